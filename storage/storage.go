// Package storage is the vocabulary of Malachi's data: identities, positions of the keyspace, offsets and ends, the states a
// range or segment can be in, and the errors that cross package boundaries. It does no I/O and imports nothing of ours.
//
// All types here are values. They are safe to copy, to compare with == where comparable, and to use from any goroutine.
package storage

import (
	"encoding/hex"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/cespare/xxhash/v2"
)

// TopicUID names one life of a topic. It is 128 random bits, drawn at every creation, so a topic that is deleted and created
// again under the same name never meets the old one's data. The zero value names no topic.
type TopicUID [16]byte

// String is the uid as 32 lower-case hex digits.
func (u TopicUID) String() string { return hex.EncodeToString(u[:]) }

// IsZero reports whether u names no topic.
func (u TopicUID) IsZero() bool { return u == TopicUID{} }

// ParseTopicUID reads 32 hex digits.
func ParseTopicUID(s string) (TopicUID, error) {
	var u TopicUID
	if len(s) != 2*len(u) {
		return u, fmt.Errorf("topic uid %.40q: want %d hex digits", s, 2*len(u))
	}
	if _, err := hex.Decode(u[:], []byte(s)); err != nil {
		return TopicUID{}, fmt.Errorf("topic uid %q: want %d hex digits", s, 2*len(u))
	}
	return u, nil
}

// Timeline separates what a topic was before a restore from what it became after it. The first one is 0; a restore draws 64
// random bits.
type Timeline uint64

// RangeID names a range for ever. Seq rises per (topic, timeline) and is never reused.
type RangeID struct {
	Topic    TopicUID
	Timeline Timeline
	Seq      uint32
}

// String is "<topic uid>/<timeline in hex>-<seq>": a legal relative path, used for directories and object keys.
func (r RangeID) String() string {
	return fmt.Sprintf("%s/%016x-%d", r.Topic, uint64(r.Timeline), r.Seq)
}

// ParseRangeID reads what String wrote. Anything else, path tricks included, is an error.
func ParseRangeID(s string) (RangeID, error) {
	bad := func() (RangeID, error) {
		return RangeID{}, fmt.Errorf("range id %.80q: want <uid>/<timeline>-<seq>", s)
	}
	topic, rest, ok := strings.Cut(s, "/")
	if !ok {
		return bad()
	}
	uid, err := ParseTopicUID(topic)
	if err != nil {
		return bad()
	}
	tl, seq, ok := strings.Cut(rest, "-")
	if !ok || len(tl) != 16 {
		return bad()
	}
	t, err := strconv.ParseUint(tl, 16, 64)
	if err != nil {
		return bad()
	}
	n, err := strconv.ParseUint(seq, 10, 32)
	if err != nil {
		return bad()
	}
	id := RangeID{Topic: uid, Timeline: Timeline(t), Seq: uint32(n)}
	if id.String() != s { // no second spelling of one id
		return bad()
	}
	return id, nil
}

// SegmentID names a segment for ever. Seq rises per range and is never reused, not even by an abandoned segment.
type SegmentID struct {
	Range RangeID
	Seq   uint32
}

// String is "<range>/<seq>".
func (s SegmentID) String() string { return fmt.Sprintf("%s/%d", s.Range, s.Seq) }

// Offset is the place of one record (or control batch) in its range, from 0.
type Offset uint64

// End is an exclusive bound: the first offset that is NOT in. Every end in Malachi is one (durable, committed, sealed, cursor).
// It is its own type so that it can't be compared with an Offset by accident.
type End uint64

// MaxOffset is the largest offset a range can reach; appends beyond it are refused.
const MaxOffset = Offset(math.MaxInt64 - 1)

// Holds reports whether the record at o lies below e.
func (e End) Holds(o Offset) bool { return uint64(o) < uint64(e) }

// Next is the offset that the next record appended at e takes.
func (e End) Next() Offset { return Offset(e) }

// EndBefore is the end of everything that precedes o.
func EndBefore(o Offset) End { return End(o) }

// EndAfter is the end of n offsets that start at o.
func EndAfter(o Offset, n uint64) End { return End(uint64(o) + n) }

// Position is a point of the keyspace [0, 2^64).
type Position uint64

// PositionOfKey is xxhash64 (seed 0) of the key's bytes: where every record of this key lives.
func PositionOfKey(key []byte) Position { return Position(xxhash.Sum64(key)) }

// MaxDepth is the largest number of bits that a slice fixes.
const MaxDepth = 24

// Slice is the part of the keyspace whose top Depth bits equal Prefix. The zero value is the whole keyspace.
type Slice struct {
	Prefix uint32
	Depth  uint8
}

// Valid reports whether Depth is at most MaxDepth and Prefix has no bit beyond it.
func (s Slice) Valid() bool { return s.Depth <= MaxDepth && uint64(s.Prefix)>>s.Depth == 0 }

// First is the lowest position of the slice.
func (s Slice) First() Position {
	if s.Depth == 0 {
		return 0
	}
	return Position(uint64(s.Prefix) << (64 - s.Depth))
}

// Last is the highest position of the slice (inclusive: 2^64 does not fit).
func (s Slice) Last() Position {
	return s.First() | Position(math.MaxUint64>>s.Depth)
}

// Holds reports whether p lies in s.
func (s Slice) Holds(p Position) bool { return p >= s.First() && p <= s.Last() }

// Covers reports whether every position of t lies in s.
func (s Slice) Covers(t Slice) bool { return s.First() <= t.First() && t.Last() <= s.Last() }

// Meets reports whether some position lies in both.
func (s Slice) Meets(t Slice) bool { return s.Covers(t) || t.Covers(s) }

// Halves are the two slices that a split makes. It panics at MaxDepth: the caller checks it.
func (s Slice) Halves() (low, high Slice) {
	if s.Depth >= MaxDepth {
		panic("storage: slice at maximum depth has no halves")
	}
	return Slice{s.Prefix << 1, s.Depth + 1}, Slice{s.Prefix<<1 | 1, s.Depth + 1}
}

// String is "prefix/depth", the prefix in binary ("-" for depth 0).
func (s Slice) String() string {
	if s.Depth == 0 {
		return "-/0"
	}
	return fmt.Sprintf("%0*b/%d", int(s.Depth), s.Prefix, s.Depth)
}

// BrokerID names a broker's data directory, not a machine or an address: 64 random bits, drawn when the directory is founded.
// Zero names none.
type BrokerID uint64

// String is 16 lower-case hex digits.
func (b BrokerID) String() string { return fmt.Sprintf("%016x", uint64(b)) }

// ParseBrokerID reads what String wrote.
func ParseBrokerID(s string) (BrokerID, error) {
	n, err := strconv.ParseUint(s, 16, 64)
	if err != nil || len(s) != 16 || n == 0 {
		return 0, fmt.Errorf("broker id %.40q: want 16 hex digits, not all zero", s)
	}
	return BrokerID(n), nil
}

// ClusterID names a cluster: 128 random bits drawn at its founding.
type ClusterID [16]byte

// String is 32 lower-case hex digits.
func (c ClusterID) String() string { return hex.EncodeToString(c[:]) }

// IsZero reports whether c names no cluster.
func (c ClusterID) IsZero() bool { return c == ClusterID{} }

// Boot counts the starts of a broker's process. It lives on the broker's disk and is raised and synced before anything is served.
type Boot uint64

// Level is the version of the cluster's commands and formats. A process refuses what a higher one wrote.
type Level uint32

// CurrentLevel is what this build understands and writes.
const CurrentLevel Level = 1

// ProducerID names a producer's stream: 128 random bits for unnamed ones. The zero value means none.
type ProducerID [16]byte

// IsZero reports whether there is no producer id.
func (p ProducerID) IsZero() bool { return p == ProducerID{} }

// String is 32 lower-case hex digits.
func (p ProducerID) String() string { return hex.EncodeToString(p[:]) }

// Digest is a segment's data digest: a 64-bit chain over its batch headers, each of which holds its payload's CRC.
type Digest uint64

// Time is nanoseconds since the Unix epoch, UTC.
type Time int64

// Limits of what comes from outside, in bytes unless said. They are checked before work is done or memory is taken.
const (
	MaxRecordBytes   = 1 << 20  // key + value + headers of one record
	MaxBatchBytes    = 8 << 20  // header and payload, compressed or not: the uncompressed payload has the same bound
	MaxRequestBytes  = 8 << 20  // one API request
	MaxBatchRecords  = 1 << 16  // records of one batch
	MaxHeaders       = 64       // headers of one record
	MaxHeaderKey     = 256      // one header's key
	MaxKeyBytes      = 64 << 10 // a record's key
	MaxTopicName     = 249      // a topic's name
	MaxCursorBytes   = 256 << 10
	MaxInitialRanges = 256
)
