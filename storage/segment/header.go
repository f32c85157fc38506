// Package segment is the format of one segment: a header from the coordinator, batches back to back, and once sealed a footer
// that is a pure function of both. So a sealed file is the same bytes on every replica and in the bucket, and explains itself.
//
// The package decides bytes and reads files; it makes nothing durable and owns no goroutine. Values are not safe for concurrent
// use unless said. FORMAT.md in this folder holds the field tables.
package segment

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/cespare/xxhash/v2"

	"github.com/malachilog/malachi/storage"
)

const (
	headerMagic   = 0x3148474553434c4d // "MLCSEGH1"
	footerMagic   = 0x3146474553434c4d // "MLCSEGF1"
	trailerMagic  = 0x3154474553434c4d // "MLCSEGT1"
	formatVersion = 1

	headerFixed   = 88
	lineageEntry  = 32
	maxLineage    = 2
	maxTableBytes = 4 << 20
	// MaxHeaderBytes bounds a complete header.
	MaxHeaderBytes = headerFixed + storage.MaxTopicName + maxLineage*lineageEntry + maxTableBytes + 4
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Parent is one parent of a range: the range that owned Slice before, up to End.
type Parent struct {
	Range storage.RangeID
	Slice storage.Slice
	End   storage.End
}

// Header is what the coordinator says of a segment when it opens it. Its encoding is equal on all replicas.
type Header struct {
	ID         storage.SegmentID
	Topic      string
	Slice      storage.Slice
	Lineage    []Parent // of the range; none for a first range, two after a merge
	Base       storage.Offset
	CreateTime storage.Time
	// Table is the producer table at Base (opaque here), empty where no producer is known.
	Table []byte
}

// Encode returns the complete header bytes. It fails with storage.ErrTooLarge or storage.ErrInvalid.
func (h Header) Encode() ([]byte, error) {
	switch {
	case len(h.Topic) == 0 || len(h.Topic) > storage.MaxTopicName:
		return nil, fmt.Errorf("segment header: topic name of %d bytes: %w", len(h.Topic), storage.ErrInvalid)
	case len(h.Lineage) > maxLineage:
		return nil, fmt.Errorf("segment header: %d parents: %w", len(h.Lineage), storage.ErrInvalid)
	case len(h.Table) > maxTableBytes:
		return nil, fmt.Errorf("segment header: producer table of %d bytes, limit %d: %w", len(h.Table), maxTableBytes, storage.ErrTooLarge)
	case !h.Slice.Valid() || h.Base > storage.MaxOffset:
		return nil, fmt.Errorf("segment header: slice %s, base %d: %w", h.Slice, h.Base, storage.ErrInvalid)
	}
	total := headerFixed + len(h.Topic) + len(h.Lineage)*lineageEntry + len(h.Table) + 4
	le := binary.LittleEndian
	b := make([]byte, headerFixed, total)
	le.PutUint64(b, headerMagic)
	le.PutUint16(b[8:], formatVersion)
	le.PutUint32(b[12:], uint32(total))
	putRange(b[16:], h.ID.Range)
	le.PutUint32(b[44:], h.ID.Seq)
	le.PutUint64(b[48:], uint64(h.Base))
	le.PutUint64(b[56:], uint64(h.CreateTime))
	le.PutUint32(b[64:], h.Slice.Prefix)
	b[68] = h.Slice.Depth
	le.PutUint16(b[72:], uint16(len(h.Topic)))
	le.PutUint16(b[74:], uint16(len(h.Lineage)))
	le.PutUint32(b[76:], uint32(len(h.Table)))
	le.PutUint64(b[80:], xxhash.Sum64(h.Table))
	b = append(b, h.Topic...)
	for _, p := range h.Lineage {
		if p.Range.Topic != h.ID.Range.Topic || !p.Slice.Valid() {
			return nil, fmt.Errorf("segment header: parent %s of %s: %w", p.Range, h.ID, storage.ErrInvalid)
		}
		b = le.AppendUint64(b, uint64(p.Range.Timeline))
		b = le.AppendUint32(b, p.Range.Seq)
		b = le.AppendUint32(b, p.Slice.Prefix)
		b = append(b, p.Slice.Depth, 0, 0, 0, 0, 0, 0, 0)
		b = le.AppendUint64(b, uint64(p.End))
	}
	b = append(b, h.Table...)
	return le.AppendUint32(b, crc32.Checksum(b, castagnoli)), nil
}

func putRange(b []byte, r storage.RangeID) {
	copy(b, r.Topic[:])
	binary.LittleEndian.PutUint64(b[16:], uint64(r.Timeline))
	binary.LittleEndian.PutUint32(b[24:], r.Seq)
}

// HeaderLength reads the length of the complete header from its first 16 bytes, bounded by MaxHeaderBytes. Nothing is verified yet. Every
// later version keeps magic, version, length and the CRC at the end where they are, within this bound.
func HeaderLength(b []byte) (int, error) {
	if len(b) < 16 || binary.LittleEndian.Uint64(b) != headerMagic {
		return 0, fmt.Errorf("not a segment file: %w", storage.ErrCorrupt)
	}
	n := int(binary.LittleEndian.Uint32(b[12:]))
	if n < headerFixed+5 || n > MaxHeaderBytes {
		return 0, fmt.Errorf("segment header of %d bytes: %w", n, storage.ErrCorrupt)
	}
	return n, nil
}

// ParseHeader reads the complete header at the front of b and returns its length. Slices of the result alias b. Errors:
// storage.ErrCorrupt, storage.ErrNewerFormat.
func ParseHeader(b []byte) (Header, int, error) {
	n, err := HeaderLength(b)
	if err != nil {
		return Header{}, 0, err
	}
	le := binary.LittleEndian
	if len(b) < n || le.Uint32(b[n-4:n]) != crc32.Checksum(b[:n-4], castagnoli) {
		return Header{}, 0, fmt.Errorf("segment header: CRC: %w", storage.ErrCorrupt)
	}
	// After the CRC, so that a flipped bit is called damage and not a newer format.
	if v := le.Uint16(b[8:]); v > formatVersion {
		return Header{}, 0, fmt.Errorf("segment format %d, this build knows %d: %w", v, formatVersion, storage.ErrNewerFormat)
	}
	b = b[:n-4]
	h := Header{
		ID:         storage.SegmentID{Range: getRange(b[16:]), Seq: le.Uint32(b[44:])},
		Base:       storage.Offset(le.Uint64(b[48:])),
		CreateTime: storage.Time(le.Uint64(b[56:])),
		Slice:      storage.Slice{Prefix: le.Uint32(b[64:]), Depth: b[68]},
	}
	name, parents, table := int(le.Uint16(b[72:])), int(le.Uint16(b[74:])), int(le.Uint32(b[76:]))
	bad := le.Uint16(b[8:]) == 0 || name == 0 || name > storage.MaxTopicName || parents > maxLineage || len(b) != headerFixed+name+parents*lineageEntry+table
	if bad || !h.Slice.Valid() || h.Base > storage.MaxOffset || le.Uint16(b[10:]) != 0 || b[69]|b[70]|b[71] != 0 {
		return Header{}, 0, fmt.Errorf("segment header: fields do not fit together: %w", storage.ErrCorrupt)
	}
	h.Topic = string(b[headerFixed : headerFixed+name])
	rest := b[headerFixed+name:]
	for range parents {
		p := Parent{
			Range: storage.RangeID{Topic: h.ID.Range.Topic, Timeline: storage.Timeline(le.Uint64(rest)), Seq: le.Uint32(rest[8:])},
			Slice: storage.Slice{Prefix: le.Uint32(rest[12:]), Depth: rest[16]},
			End:   storage.End(le.Uint64(rest[24:])),
		}
		if !p.Slice.Valid() || rest[17]|rest[18]|rest[19]|rest[20]|rest[21]|rest[22]|rest[23] != 0 {
			return Header{}, 0, fmt.Errorf("segment header: parent: %w", storage.ErrCorrupt)
		}
		h.Lineage = append(h.Lineage, p)
		rest = rest[lineageEntry:]
	}
	h.Table = rest
	if le.Uint64(b[80:]) != xxhash.Sum64(h.Table) {
		return Header{}, 0, fmt.Errorf("segment header: producer table: %w", storage.ErrCorrupt)
	}
	return h, n, nil
}

func getRange(b []byte) (r storage.RangeID) {
	copy(r.Topic[:], b)
	r.Timeline = storage.Timeline(binary.LittleEndian.Uint64(b[16:]))
	r.Seq = binary.LittleEndian.Uint32(b[24:])
	return r
}
