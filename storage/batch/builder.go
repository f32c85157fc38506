package batch

import (
	"fmt"
	"hash/crc32"
	"slices"

	"github.com/malachilog/malachi/storage"
)

// ErrFull: the record is within its limits but the batch has no room for it; it goes into the next one. It wraps
// storage.ErrTooLarge.
var ErrFull = fmt.Errorf("batch is full: %w", storage.ErrTooLarge)

// Builder collects records and makes batches of them. The zero value is ready. It keeps its buffer over Reset, so a reused one
// allocates nothing per record. Not safe for concurrent use.
type Builder struct {
	plain     []byte
	records   int
	first     storage.Time
	max       storage.Time
	low, high storage.Position
}

// Options is what Build puts into the header beside what the records say.
type Options struct {
	// Kind 0 means KindData.
	Kind Kind
	// Codec 0 means CodecNone. If compressing does not make the payload shorter, CodecNone is used.
	Codec Codec
	// Producer is zero for none.
	Producer storage.ProducerID
	Epoch    uint32
	Sequence uint64
	// Slice is the one that the batch was cut for; the zero value is the whole keyspace.
	Slice storage.Slice
}

// Reset forgets all records and keeps the memory.
func (b *Builder) Reset() { *b = Builder{plain: b.plain[:0]} }

// Records is the number of records added since the last Reset.
func (b *Builder) Records() int { return b.records }

// Bytes is the size in bytes that the batch has now, header included, before compression.
func (b *Builder) Bytes() int { return HeaderSize + len(b.plain) }

// Add appends a copy of r. Its position is storage.PositionOfKey of its key, or keyless if it has none; a producer with an id
// passes KeylessPosition(id, sequence). On error the builder is as before: ErrFull if only this batch has no room, else as
// CheckRecord.
func (b *Builder) Add(r *Record, keyless storage.Position) error {
	if err := CheckRecord(r); err != nil {
		return err
	}
	p := keyless
	if r.Key != nil {
		p = storage.PositionOfKey(r.Key)
	}
	return b.add(r, p)
}

func (b *Builder) add(r *Record, p storage.Position) error {
	if b.records == storage.MaxBatchRecords {
		return ErrFull
	}
	if b.records == 0 {
		b.first, b.max, b.low, b.high = r.Time, r.Time, p, p
	}
	at := len(b.plain)
	b.plain = appendRecord(b.plain, r, b.first)
	if HeaderSize+len(b.plain) > storage.MaxBatchBytes { // never the first one: a record is far smaller
		b.plain = b.plain[:at]
		return ErrFull
	}
	b.max = max(b.max, r.Time)
	b.low, b.high = min(b.low, p), max(b.high, p)
	b.records++
	return nil
}

// Build appends the batch of all records added since Reset to dst and returns it, as append does. The builder keeps its records:
// Reset it before the next batch. Errors, all storage.ErrInvalid: no record, a control batch with more than one, an unknown kind
// or codec (ErrUnknownCodec), an invalid slice.
func (b *Builder) Build(dst []byte, o Options) ([]byte, error) {
	h := Header{
		Kind: o.Kind, Codec: o.Codec, Slice: o.Slice,
		PlainBytes: uint32(len(b.plain)), Records: uint32(b.records), FirstTime: b.first, MaxTime: b.max,
		Producer: o.Producer, Epoch: o.Epoch, Sequence: o.Sequence, Lowest: b.low, Highest: b.high,
	}
	if h.Kind == 0 {
		h.Kind = KindData
	}
	if h.Codec == 0 {
		h.Codec = CodecNone
	}
	h.PayloadBytes = h.PlainBytes // for the check: it will not be longer
	if err := h.check(); err != nil {
		return dst, fmt.Errorf("build batch: %w", err)
	}
	at := len(dst)
	dst = slices.Grow(dst, HeaderSize+compressRoom(len(b.plain), h.Codec))[:at+HeaderSize]
	var ok bool
	if dst, ok = compress(dst, b.plain, h.Codec); !ok {
		h.Codec = CodecNone
		dst = append(dst, b.plain...)
	}
	payload := dst[at+HeaderSize:]
	h.PayloadBytes = uint32(len(payload))
	h.PayloadCRC = crc32.Checksum(payload, castagnoli)
	h.put(dst[at:])
	sealHeader(dst[at : at+HeaderSize])
	return dst, nil
}
