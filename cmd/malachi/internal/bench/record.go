package bench

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"time"

	"github.com/cespare/xxhash/v2"
)

// A value says what record it belongs to: checksum, producer, key, sequence within the key, producer's time; then filling.
const (
	keyBytes    = 12
	stampBytes  = 8 + 4 + 4 + 8 + 8
	fillerBytes = 1 << 20
)

// checksum covers the key and all of the value behind the checksum itself.
func checksum(key, value []byte) uint64 {
	return xxhash.Sum64(value[8:]) ^ bits.RotateLeft64(xxhash.Sum64(key), 31)
}

func keyName(producer, key int) []byte { return fmt.Appendf(nil, "%04x.%07x", producer, key) }

// filler is what values are filled from.
func filler(compressible bool) []byte {
	r := rand.New(rand.NewPCG(1, 2)) // the same bytes in every run
	b := make([]byte, 0, fillerBytes)
	if !compressible {
		for len(b) < fillerBytes {
			b = binary.LittleEndian.AppendUint64(b, r.Uint64())
		}
		return b
	}
	var words [512][]byte
	for i := range words {
		words[i] = fmt.Appendf(nil, "%x ", r.Uint64()>>(r.IntN(8)*4))
	}
	for len(b) < fillerBytes {
		b = append(b, words[r.IntN(len(words))]...)
	}
	return b
}

// tally sums up records, in any order.
type tally struct {
	records, bytes int64
	sum            uint64 // of all checksums
}

func (t *tally) add(bytes int, sum uint64) {
	t.records++
	t.bytes += int64(bytes)
	t.sum += sum
}

// stream is one producer's records. One goroutine at a time.
type stream struct {
	id     int
	keys   [][]byte
	filler []byte
	value  []byte // of the record in hand
	turn   int
	// sequences is, per topic and key, the next one.
	sequences [][]uint64
	sent      []tally // per topic
}

func newStream(id int, c Config, filler []byte) *stream {
	s := &stream{id: id, filler: filler, value: make([]byte, c.RecordBytes-keyBytes), sent: make([]tally, c.Topics)}
	for k := range c.Keys {
		s.keys = append(s.keys, keyName(id, k))
	}
	for range c.Topics {
		s.sequences = append(s.sequences, make([]uint64, c.Keys))
	}
	return s
}

// next makes the stream's next record for a topic. The value is overwritten by the following call.
func (s *stream) next(topic int, at time.Time) (key, value []byte) {
	k := s.turn % len(s.keys)
	s.turn++
	key, v := s.keys[k], s.value
	le := binary.LittleEndian
	le.PutUint32(v[8:], uint32(s.id))
	le.PutUint32(v[12:], uint32(k))
	le.PutUint64(v[16:], s.sequences[topic][k])
	le.PutUint64(v[24:], uint64(at.UnixNano()))
	s.sequences[topic][k]++
	rest := v[stampBytes:]
	from := (s.turn*1031 + s.id*65537) % (len(s.filler) / 2)
	for len(rest) > 0 {
		rest = rest[copy(rest, s.filler[from:]):]
	}
	sum := checksum(key, v)
	le.PutUint64(v, sum)
	s.sent[topic].add(len(key)+len(v), sum)
	return key, v
}

// verifier checks what one reader gets of one topic. One goroutine at a time.
type verifier struct {
	topic   int
	streams []*stream // only their keys are looked at before finish
	next    [][]uint64
	got     tally
}

func newVerifier(topic int, streams []*stream) *verifier {
	v := &verifier{topic: topic, streams: streams}
	for _, s := range streams {
		v.next = append(v.next, make([]uint64, len(s.keys)))
	}
	return v
}

// record checks one record against its own stamp and its key's order.
func (v *verifier) record(key, value []byte, at time.Time) error {
	if len(value) < stampBytes {
		return fmt.Errorf("record %d of the reader: value of %d bytes is none of ours", v.got.records, len(value))
	}
	le := binary.LittleEndian
	sum := checksum(key, value)
	if le.Uint64(value) != sum {
		return fmt.Errorf("record %d of the reader, key %.40q: content does not match its checksum", v.got.records, key)
	}
	p, k, seq := int(le.Uint32(value[8:])), int(le.Uint32(value[12:])), le.Uint64(value[16:])
	if p >= len(v.next) || k >= len(v.next[p]) || string(key) != string(v.streams[p].keys[k]) {
		return fmt.Errorf("record %d of the reader: key %.40q is not that of producer %d, key %d", v.got.records, key, p, k)
	}
	if at.UnixNano() != int64(le.Uint64(value[24:])) {
		return fmt.Errorf("key %s, sequence %d: time %d is not the one written", key, seq, at.UnixNano())
	}
	switch want := v.next[p][k]; {
	case seq > want:
		return fmt.Errorf("key %s: sequence %d where %d was due: records are missing or out of order", key, seq, want)
	case seq < want:
		return fmt.Errorf("key %s: sequence %d comes again or out of order, %d was due", key, seq, want)
	}
	v.next[p][k]++
	v.got.add(len(key)+len(value), sum)
	return nil
}

// finish checks that everything written was read. No stream may be writing any more.
func (v *verifier) finish() error {
	var faults []error
	var sent tally
	for p, s := range v.streams {
		t := s.sent[v.topic]
		sent = tally{sent.records + t.records, sent.bytes + t.bytes, sent.sum + t.sum}
		for k, want := range s.sequences[v.topic] {
			if got := v.next[p][k]; got != want && len(faults) < 3 {
				faults = append(faults, fmt.Errorf("key %s: %d records were acknowledged, %d read", s.keys[k], want, got))
			}
		}
	}
	if v.got != sent && len(faults) == 0 {
		faults = append(faults, fmt.Errorf("%d records of %d bytes with content hash %016x were acknowledged, %d of %d with %016x read",
			sent.records, sent.bytes, sent.sum, v.got.records, v.got.bytes, v.got.sum))
	}
	return errors.Join(faults...)
}
