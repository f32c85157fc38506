// Package batch is the codec of Malachi's batch: 1..n records in one byte string that is built once, by the producer, and never
// re-encoded on its way to journal, segment, replica, object and reader. The layout is fixed in FORMAT.md.
//
// A batch is a header of HeaderSize bytes and a payload. The payload's CRC is computed by the builder and only checked after
// that; the primary fills base offset, append time and covered slice in place (Stamp) and recomputes only the header's CRC. Bytes
// of zero never verify, so blank or preallocated space is never taken for a batch.
//
// Nothing here does I/O or starts a goroutine. Functions may be called from any goroutine; a Builder or Decoder belongs to one at
// a time. Compressors and scratch buffers are pooled per process; a decoder never takes more memory than the uncompressed length
// that the header declares, which is at most storage.MaxBatchBytes.
//
// Errors wrap the sentinels of package storage: ErrCorrupt (the bytes do not verify), ErrNewerFormat, ErrTooLarge (a limit, which
// the text names) and ErrInvalid (the bytes verify, so their builder broke a rule; ErrUnknownCodec is a case of it).
package batch

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	"github.com/malachilog/malachi/storage"
)

// Sizes and numbers of the format.
const (
	HeaderSize = 112        // bytes before the payload
	Magic      = 0x5441424d // "MBAT" read as little endian
	Version    = 1

	minRecordBytes = 4 // flags, value length, header count, time delta
)

// ErrUnknownCodec: the batch verifies but its payload is compressed in a way that this build does not know. It wraps
// storage.ErrInvalid.
var ErrUnknownCodec = fmt.Errorf("unknown compression codec: %w", storage.ErrInvalid)

// Kind says what a batch is for.
type Kind uint8

// Kinds. A control batch has exactly one record, takes one offset, and is shown to no reader.
const (
	KindData    Kind = 1
	KindControl Kind = 2
)

// Codec says how the payload is compressed.
type Codec uint8

// Codecs. S2 is the block format of github.com/klauspost/compress/s2, Zstd one Zstandard frame that says its length and
// needs no dictionary.
const (
	CodecNone Codec = 1
	CodecS2   Codec = 2
	CodecZstd Codec = 3
)

// String is "none", "s2", "zstd" or "codec(n)".
func (c Codec) String() string {
	switch c {
	case CodecNone:
		return "none"
	case CodecS2:
		return "s2"
	case CodecZstd:
		return "zstd"
	}
	return fmt.Sprintf("codec(%d)", uint8(c))
}

// ParseCodec reads what String writes for a known codec. The error wraps ErrUnknownCodec.
func ParseCodec(s string) (Codec, error) {
	for _, c := range []Codec{CodecNone, CodecS2, CodecZstd} {
		if s == c.String() {
			return c, nil
		}
	}
	return 0, fmt.Errorf("codec %.40q: want none, s2 or zstd: %w", s, ErrUnknownCodec)
}

// Places of the header's fields.
const (
	offMagic        = 0
	offVersion      = 4
	offKind         = 5
	offCodec        = 6
	offDepth        = 7
	offPayloadBytes = 8
	offPlainBytes   = 12
	offRecords      = 16
	offPrefix       = 20
	offBase         = 24
	offAppendTime   = 32
	offFirstTime    = 40
	offMaxTime      = 48
	offProducer     = 56
	offSequence     = 72
	offLowest       = 80
	offHighest      = 88
	offEpoch        = 96
	offReserved     = 100
	offPayloadCRC   = 104
	offHeaderCRC    = 108
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Header is a batch's header, decoded. It is a value and aliases nothing.
type Header struct {
	Kind  Kind
	Codec Codec
	// Slice is the part of the keyspace that the batch was cut for or appended to; the whole keyspace until Stamp or Split says
	// else.
	Slice storage.Slice
	// PayloadBytes is the payload's length as stored, PlainBytes its length uncompressed.
	PayloadBytes uint32
	PlainBytes   uint32
	// Records is 1..storage.MaxBatchRecords; a batch takes as many offsets.
	Records uint32
	// Base is the offset of the first record; 0 until Stamp.
	Base storage.Offset
	// AppendTime is given by the primary; 0 until Stamp.
	AppendTime storage.Time
	// FirstTime is the producer time of the first record, MaxTime the latest of all.
	FirstTime storage.Time
	MaxTime   storage.Time
	// Producer, Epoch and Sequence identify the batch in its producer's stream.
	Producer storage.ProducerID
	Epoch    uint32
	Sequence uint64
	// Lowest and Highest bound the positions of the records.
	Lowest  storage.Position
	Highest storage.Position
	// PayloadCRC is CRC32C of the payload as stored, HeaderCRC of the header's bytes before it.
	PayloadCRC uint32
	HeaderCRC  uint32
}

// Size is the length of the whole batch in bytes.
func (h *Header) Size() int { return HeaderSize + int(h.PayloadBytes) }

// End is the first offset after the batch.
func (h *Header) End() storage.End { return storage.EndAfter(h.Base, uint64(h.Records)) }

// FitsIn reports whether every position of the batch lies in s, by the header's word alone.
func (h *Header) FitsIn(s storage.Slice) bool { return s.Holds(h.Lowest) && s.Holds(h.Highest) }

// ParseHeader reads and checks the header at the front of b, which may be longer or, after the header, shorter than the batch:
// the caller compares Size with what it has. It reads no payload and allocates nothing unless it fails.
//
// Errors: storage.ErrCorrupt (short, magic, header CRC), storage.ErrNewerFormat (a verified header of a later version),
// ErrUnknownCodec, storage.ErrTooLarge and storage.ErrInvalid (a verified header that breaks a rule).
func ParseHeader(b []byte) (Header, error) {
	if len(b) < HeaderSize {
		return Header{}, fmt.Errorf("batch header: %d bytes of %d: %w", len(b), HeaderSize, storage.ErrCorrupt)
	}
	b = b[:HeaderSize]
	le := binary.LittleEndian
	if m := le.Uint32(b[offMagic:]); m != Magic {
		return Header{}, fmt.Errorf("batch header: magic %#x: %w", m, storage.ErrCorrupt)
	}
	// The CRC comes before the version: a flipped bit must be called damage, not a newer format. So every later version of this
	// magic keeps magic, version and header CRC where they are.
	h := Header{HeaderCRC: le.Uint32(b[offHeaderCRC:])}
	if sum := crc32.Checksum(b[:offHeaderCRC], castagnoli); sum != h.HeaderCRC {
		return Header{}, fmt.Errorf("batch header: CRC %08x, computed %08x: %w", h.HeaderCRC, sum, storage.ErrCorrupt)
	}
	switch v := b[offVersion]; {
	case v > Version:
		return Header{}, fmt.Errorf("batch version %d, this build knows %d: %w", v, Version, storage.ErrNewerFormat)
	case v == 0:
		return Header{}, fmt.Errorf("batch version 0: %w", storage.ErrInvalid)
	}
	h.Kind, h.Codec = Kind(b[offKind]), Codec(b[offCodec])
	h.Slice = storage.Slice{Prefix: le.Uint32(b[offPrefix:]), Depth: b[offDepth]}
	h.PayloadBytes, h.PlainBytes = le.Uint32(b[offPayloadBytes:]), le.Uint32(b[offPlainBytes:])
	h.Records = le.Uint32(b[offRecords:])
	h.Base = storage.Offset(le.Uint64(b[offBase:]))
	h.AppendTime = storage.Time(le.Uint64(b[offAppendTime:]))
	h.FirstTime, h.MaxTime = storage.Time(le.Uint64(b[offFirstTime:])), storage.Time(le.Uint64(b[offMaxTime:]))
	copy(h.Producer[:], b[offProducer:])
	h.Epoch, h.Sequence = le.Uint32(b[offEpoch:]), le.Uint64(b[offSequence:])
	h.Lowest, h.Highest = storage.Position(le.Uint64(b[offLowest:])), storage.Position(le.Uint64(b[offHighest:]))
	h.PayloadCRC = le.Uint32(b[offPayloadCRC:])
	if le.Uint32(b[offReserved:]) != 0 {
		return Header{}, fmt.Errorf("batch header: reserved field is not zero: %w", storage.ErrInvalid)
	}
	if err := h.check(); err != nil {
		return Header{}, err
	}
	return h, nil
}

// check holds the header's rules that need no other bytes. It has a value's receiver so that h does not escape into the errors.
func (h Header) check() error {
	switch {
	case h.Kind != KindData && h.Kind != KindControl:
		return fmt.Errorf("batch kind %d: %w", h.Kind, storage.ErrInvalid)
	case h.Codec < CodecNone || h.Codec > CodecZstd:
		return fmt.Errorf("batch codec %d: %w", uint8(h.Codec), ErrUnknownCodec)
	case uint64(h.PayloadBytes) > storage.MaxBatchBytes-HeaderSize:
		return fmt.Errorf("batch of %d bytes, limit %d: %w", HeaderSize+uint64(h.PayloadBytes), storage.MaxBatchBytes, storage.ErrTooLarge)
	case uint64(h.PlainBytes) > storage.MaxBatchBytes-HeaderSize:
		return fmt.Errorf("batch of %d bytes uncompressed, limit %d: %w",
			HeaderSize+uint64(h.PlainBytes), storage.MaxBatchBytes, storage.ErrTooLarge)
	case h.Records > storage.MaxBatchRecords:
		return fmt.Errorf("batch of %d records, limit %d: %w", h.Records, storage.MaxBatchRecords, storage.ErrTooLarge)
	case h.Records == 0 && !mutate.On("batch.accept-empty"):
		return fmt.Errorf("batch without a record: %w", storage.ErrInvalid) // it would take no offset
	case h.Kind == KindControl && h.Records != 1:
		return fmt.Errorf("control batch of %d records: %w", h.Records, storage.ErrInvalid)
	case uint64(h.Records)*minRecordBytes > uint64(h.PlainBytes):
		return fmt.Errorf("batch of %d records in %d bytes: %w", h.Records, h.PlainBytes, storage.ErrInvalid)
	case h.PayloadBytes == 0:
		return fmt.Errorf("batch without a payload: %w", storage.ErrInvalid)
	case h.Codec == CodecNone && h.PayloadBytes != h.PlainBytes:
		return fmt.Errorf("uncompressed batch of %d bytes says %d: %w", h.PayloadBytes, h.PlainBytes, storage.ErrInvalid)
	case !h.Slice.Valid():
		return fmt.Errorf("batch slice prefix %d, depth %d: %w", h.Slice.Prefix, h.Slice.Depth, storage.ErrInvalid)
	case h.Lowest > h.Highest:
		return fmt.Errorf("batch positions %d to %d: %w", h.Lowest, h.Highest, storage.ErrInvalid)
	case h.FirstTime > h.MaxTime:
		return fmt.Errorf("batch times: first %d is after the latest %d: %w", h.FirstTime, h.MaxTime, storage.ErrInvalid)
	case h.Base > storage.MaxOffset || storage.MaxOffset-h.Base < storage.Offset(h.Records-1):
		return fmt.Errorf("batch of %d records at offset %d: %w", h.Records, h.Base, storage.ErrInvalid)
	}
	return nil
}

// Verify checks that b is exactly one batch whose header and payload CRCs are right. It does not look into the payload: Check
// does. It allocates nothing unless it fails. Errors: as ParseHeader; a wrong length or payload CRC is storage.ErrCorrupt.
func Verify(b []byte) (Header, error) {
	h, err := ParseHeader(b)
	if err != nil {
		return Header{}, err
	}
	if len(b) != h.Size() {
		return Header{}, fmt.Errorf("batch of %d bytes says %d: %w", len(b), h.Size(), storage.ErrCorrupt)
	}
	if sum := crc32.Checksum(b[HeaderSize:], castagnoli); sum != h.PayloadCRC && !mutate.On("batch.skip-payload-crc") {
		return Header{}, fmt.Errorf("batch payload: CRC %08x, computed %08x: %w", h.PayloadCRC, sum, storage.ErrCorrupt)
	}
	return h, nil
}

// Stamp fills in, in place, what only the primary knows, and recomputes the header's CRC. The payload and its CRC stay untouched,
// so damage that b had before is still seen after. b must begin with a header that ParseHeader took; base leaves room for its
// records up to storage.MaxOffset. It panics if b is shorter than a header or covered is not a valid slice.
func Stamp(b []byte, base storage.Offset, appendTime storage.Time, covered storage.Slice) {
	if !covered.Valid() {
		panic("batch: stamp with an invalid slice")
	}
	b = b[:HeaderSize]
	le := binary.LittleEndian
	b[offDepth] = covered.Depth
	le.PutUint32(b[offPrefix:], covered.Prefix)
	le.PutUint64(b[offBase:], uint64(base))
	le.PutUint64(b[offAppendTime:], uint64(appendTime))
	sealHeader(b)
}

// put writes every field of h but the header CRC, which sealHeader computes over what stands there then.
func (h *Header) put(b []byte) {
	b = b[:HeaderSize]
	le := binary.LittleEndian
	le.PutUint32(b[offMagic:], Magic)
	b[offVersion], b[offKind], b[offCodec], b[offDepth] = Version, byte(h.Kind), byte(h.Codec), h.Slice.Depth
	le.PutUint32(b[offPayloadBytes:], h.PayloadBytes)
	le.PutUint32(b[offPlainBytes:], h.PlainBytes)
	le.PutUint32(b[offRecords:], h.Records)
	le.PutUint32(b[offPrefix:], h.Slice.Prefix)
	le.PutUint64(b[offBase:], uint64(h.Base))
	le.PutUint64(b[offAppendTime:], uint64(h.AppendTime))
	le.PutUint64(b[offFirstTime:], uint64(h.FirstTime))
	le.PutUint64(b[offMaxTime:], uint64(h.MaxTime))
	copy(b[offProducer:offSequence], h.Producer[:])
	le.PutUint64(b[offSequence:], h.Sequence)
	le.PutUint64(b[offLowest:], uint64(h.Lowest))
	le.PutUint64(b[offHighest:], uint64(h.Highest))
	le.PutUint32(b[offEpoch:], h.Epoch)
	le.PutUint32(b[offReserved:], 0)
	le.PutUint32(b[offPayloadCRC:], h.PayloadCRC)
}

func sealHeader(b []byte) {
	binary.LittleEndian.PutUint32(b[offHeaderCRC:], crc32.Checksum(b[:offHeaderCRC], castagnoli))
}
