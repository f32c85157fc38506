package metadata

import (
	"slices"

	"github.com/malachilog/malachi/storage"
)

// Nonce names one intent of a caller: 128 random bits, the same on every retry of the same intent.
type Nonce [16]byte

// IsZero reports whether there is no nonce.
func (n Nonce) IsZero() bool { return n == Nonce{} }

// TopicState says whether a topic lives.
type TopicState uint8

// The states of a topic. A deleting topic has lost its name already and is found by its uid only.
const (
	TopicActive TopicState = iota + 1
	TopicDeleting
)

// RangeState says what may happen to a range.
type RangeState uint8

// The states of a range. A sealing range opens no new segment and still owns its slice; a sealed one has an end and children.
const (
	RangeActive RangeState = iota + 1
	RangeSealing
	RangeSealed
)

// String is the state in lower case.
func (s RangeState) String() string {
	switch s {
	case RangeActive:
		return "active"
	case RangeSealing:
		return "sealing"
	case RangeSealed:
		return "sealed"
	}
	return "unknown"
}

// SegmentState says what may happen to a segment.
type SegmentState uint8

// The states of a segment. An abandoned segment ended at its base: it has no bytes anywhere, and its seq is never used again.
const (
	SegmentOpen SegmentState = iota + 1
	SegmentSealed
	SegmentAbandoned
)

// String is the state in lower case.
func (s SegmentState) String() string {
	switch s {
	case SegmentOpen:
		return "open"
	case SegmentSealed:
		return "sealed"
	case SegmentAbandoned:
		return "abandoned"
	}
	return "unknown"
}

// SealReason says why a pass was run.
type SealReason uint8

// The reasons of a seal. The numbers stand in Raft logs and never change.
const (
	SealSize             SealReason = 1
	SealAge              SealReason = 2
	SealPrimaryRestarted SealReason = 3
	SealTopicDeleted     SealReason = 4
	SealDrain            SealReason = 5
	SealUnderReplicated  SealReason = 6
	SealFailedCopy       SealReason = 7
	SealSplit            SealReason = 8
	SealMerge            SealReason = 9
	SealOperator         SealReason = 10
	SealNotConfirmed     SealReason = 11
)

var sealReasons = [...]string{
	SealSize: "size", SealAge: "age", SealPrimaryRestarted: "primary restarted", SealTopicDeleted: "topic deleted",
	SealDrain: "drain", SealUnderReplicated: "under-replicated", SealFailedCopy: "failed copy", SealSplit: "split",
	SealMerge: "merge", SealOperator: "operator", SealNotConfirmed: "open not confirmed",
}

// String is the reason in words; empty for none.
func (r SealReason) String() string {
	if int(r) < len(sealReasons) {
		return sealReasons[r]
	}
	return "unknown"
}

// Segment is one segment as recorded. It is immutable; whoever holds one may keep it and must not write to its slices.
type Segment struct {
	ID    storage.SegmentID
	State SegmentState
	Base  storage.Offset // offset of its first record

	Replicas          []storage.BrokerID // ordered; the head is the primary
	Quorum            int                // q of every acknowledgement and pass of this segment
	ReplicationFactor int                // what the policy wanted when it was opened
	PrimaryBoot       storage.Boot       // the segment is served under this boot of its primary and no other
	OpenNonce         Nonce
	Header            []byte // the file's header without producer table; kept while the segment is open, nil afterwards
	CreateTime        storage.Time

	// Once sealed or abandoned (End then equals Base). Never changed again.
	End                 storage.End
	DataBytes           uint64 // length of the file's header and batches, without footer
	Digest              storage.Digest
	SealTime            storage.Time
	SealReason          SealReason
	ProducerTableDigest storage.Digest
	ProducerTableBytes  uint32
	SealNonce           Nonce

	// Once sealed, Replicas are the brokers that hold a copy that counts, and these change by UpdateReplicas and ResolveSegment.
	Incoming       []storage.BrokerID // are to get a copy, which counts for nothing yet
	ReplicaVersion uint64             // rises with every change of Replicas, Incoming and Loss
	Loss           *Loss              // what an operator has given up; nil: nothing
}

// Loss is what an operator has given up of a segment: everything from From on. End stays the recorded one, so that readers can be
// told how much is missing.
type Loss struct {
	From      storage.Offset
	DataBytes uint64 // of what remains: header and batches
	Digest    storage.Digest
	Time      storage.Time
	Nonce     Nonce
}

// Remaining is the end, length and digest of what every copy must hold: the recorded seal, less what was given up.
func (s *Segment) Remaining() (end storage.End, dataBytes uint64, digest storage.Digest) {
	if s.Loss != nil {
		return storage.EndBefore(s.Loss.From), s.Loss.DataBytes, s.Loss.Digest
	}
	return s.End, s.DataBytes, s.Digest
}

// Primary is the broker that appends: the head of the set.
func (s *Segment) Primary() storage.BrokerID { return s.Replicas[0] }

// N is the size of the replica set.
func (s *Segment) N() int { return len(s.Replicas) }

// Parent is a range that this one came from: the parent's slice, and the end at which it was sealed.
type Parent struct {
	Range storage.RangeID
	Slice storage.Slice
	End   storage.End
}

// Range is one range as recorded. It is immutable; whoever holds one may keep it and must not write to its slices.
type Range struct {
	ID      storage.RangeID
	Slice   storage.Slice
	State   RangeState
	Parents []Parent       // none for an initial range, one after a split, two after a merge
	Start   storage.Offset // first offset still there
	// SealedEnd is the end of the closed segments: where the next segment begins, and where the open one began.
	SealedEnd storage.End
	// NextSegment is the seq that the next segment takes.
	NextSegment uint32
	// Closed are the sealed and abandoned segments, by seq, hence by base.
	Closed []*Segment
	// Open is the segment that takes the appends, or nil.
	Open *Segment
}

// Len is how many segments the range has, the open one and abandoned ones included.
func (r *Range) Len() int {
	n := len(r.Closed)
	if r.Open != nil {
		n++
	}
	return n
}

// Segment returns the segment of this seq, or nil.
func (r *Range) Segment(seq uint32) *Segment {
	if r.Open != nil && r.Open.ID.Seq == seq {
		return r.Open
	}
	i, ok := slices.BinarySearchFunc(r.Closed, seq, func(s *Segment, seq uint32) int { return cmpUint32(s.ID.Seq, seq) })
	if !ok {
		return nil
	}
	return r.Closed[i]
}

// Last returns the newest segment: the open one, or the last that was closed, or nil if the range never had one.
func (r *Range) Last() *Segment {
	if r.Open != nil {
		return r.Open
	}
	if len(r.Closed) == 0 {
		return nil
	}
	return r.Closed[len(r.Closed)-1]
}

// SegmentAt returns the segment that holds offset o: a sealed one whose [base, end) holds it, or the open one if o is not below
// its base (how far that reaches, its primary knows). Nil: below Start or beyond everything that was opened. Abandoned segments
// hold nothing. It does not allocate.
func (r *Range) SegmentAt(o storage.Offset) *Segment {
	if o < r.Start {
		return nil
	}
	if r.Open != nil && o >= r.Open.Base {
		return r.Open
	}
	// The first closed segment that ends beyond o. Ends never fall from one to the next.
	i, _ := slices.BinarySearchFunc(r.Closed, o, func(s *Segment, o storage.Offset) int {
		if s.End.Holds(o) {
			return 1
		}
		return -1
	})
	if i == len(r.Closed) || r.Closed[i].Base > o {
		return nil
	}
	return r.Closed[i]
}

// Topic is one topic as recorded at MetaVersion. It is immutable; whoever holds one may keep it and must not write to its slices
// or map. None of its methods allocates unless said.
type Topic struct {
	UID                storage.TopicUID
	Name               string
	Nonce              Nonce // of the creation
	CreateTime         storage.Time
	Labels             map[string]string
	DeletionProtection bool
	InitialRanges      int
	MetaVersion        uint64 // rises with every change of the topic, its ranges or its segments; from 1
	State              TopicState
	DeleteNonce        Nonce
	DeleteTime         storage.Time

	createdWith uint64 // hash of the settings at creation
	segments    int
	ranges      []*Range        // by (timeline, seq)
	owners      []*Range        // active and sealing, by first position; together they cover the keyspace
	updates     []appliedUpdate // the newest, oldest first
}

// appliedUpdate remembers which UpdateTopic made which version.
type appliedUpdate struct {
	nonce   Nonce
	version uint64
}

// Ranges are all ranges, sealed ones included, by (timeline, seq). The slice is the topic's own.
func (t *Topic) Ranges() []*Range { return t.ranges }

// Owners are the ranges that own a slice of the keyspace now (active or sealing), by position. The slice is the topic's own.
func (t *Topic) Owners() []*Range { return t.owners }

// Segments is how many segments all ranges have.
func (t *Topic) Segments() int { return t.segments }

// Range returns the range of this id, or nil.
func (t *Topic) Range(id storage.RangeID) *Range {
	i, ok := t.rangeIndex(id)
	if !ok {
		return nil
	}
	return t.ranges[i]
}

func (t *Topic) rangeIndex(id storage.RangeID) (int, bool) {
	if id.Topic != t.UID {
		return 0, false
	}
	return slices.BinarySearchFunc(t.ranges, id, func(r *Range, id storage.RangeID) int { return compareRangeIDs(r.ID, id) })
}

// RangeAt returns the one range that owns position p. Every position has one; nil only for a topic that is no longer active.
func (t *Topic) RangeAt(p storage.Position) *Range {
	i, ok := slices.BinarySearchFunc(t.owners, p, func(r *Range, p storage.Position) int {
		switch {
		case r.Slice.Last() < p:
			return -1
		case r.Slice.First() > p:
			return 1
		}
		return 0
	})
	if !ok {
		return nil
	}
	return t.owners[i]
}

// Segment returns the segment of this id, or nil.
func (t *Topic) Segment(id storage.SegmentID) *Segment {
	r := t.Range(id.Range)
	if r == nil {
		return nil
	}
	return r.Segment(id.Seq)
}

// Head returns the open segment of a range, or nil.
func (t *Topic) Head(id storage.RangeID) *Segment {
	r := t.Range(id)
	if r == nil {
		return nil
	}
	return r.Open
}

// Children returns the ranges that name id as a parent, by position. It allocates.
func (t *Topic) Children(id storage.RangeID) []*Range {
	var out []*Range
	for _, r := range t.ranges {
		for _, p := range r.Parents {
			if p.Range == id {
				out = append(out, r)
				break
			}
		}
	}
	slices.SortFunc(out, func(a, b *Range) int { return comparePositions(a.Slice.First(), b.Slice.First()) })
	return out
}

// withRange returns a copy of t at the next version in which r stands in place of the range of its id. Owners are rebuilt.
func (t *Topic) withRange(r *Range) *Topic {
	next := *t
	next.MetaVersion++
	next.ranges = slices.Clone(t.ranges)
	i, ok := t.rangeIndex(r.ID)
	if !ok {
		panic("metadata: range of another topic")
	}
	next.segments += r.Len() - t.ranges[i].Len()
	next.ranges[i] = r
	next.owners = ownersOf(next.ranges)
	return &next
}

func ownersOf(ranges []*Range) []*Range {
	out := make([]*Range, 0, len(ranges))
	for _, r := range ranges {
		if r.State == RangeActive || r.State == RangeSealing {
			out = append(out, r)
		}
	}
	slices.SortFunc(out, func(a, b *Range) int { return comparePositions(a.Slice.First(), b.Slice.First()) })
	return out
}

func compareRangeIDs(a, b storage.RangeID) int {
	switch {
	case a.Timeline < b.Timeline:
		return -1
	case a.Timeline > b.Timeline:
		return 1
	}
	return cmpUint32(a.Seq, b.Seq)
}

func comparePositions(a, b storage.Position) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

func cmpUint32(a, b uint32) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}
