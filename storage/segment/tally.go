package segment

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/cespare/xxhash/v2"

	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
)

// indexStep is the distance in bytes between sparse index entries: the first batch at or after each multiple is noted.
const indexStep = 64 << 10

const (
	footerFixed  = 96
	indexEntry   = 24
	trailerBytes = 16
	// maxIndex bounds what a footer may claim: a segment of 16 GiB.
	maxIndex = 16 << 30 / indexStep
)

// IndexEntry says where a batch begins.
type IndexEntry struct {
	Pos    int64 // in the file
	Offset storage.Offset
	Time   storage.Time // append time
}

// Chain continues a data digest by one batch: xxhash64 over the digest so far and the batch's header, which holds the payload's
// CRC. The digest of no batch is 0.
func Chain(d storage.Digest, header []byte) storage.Digest {
	var b [8 + batch.HeaderSize]byte
	binary.LittleEndian.PutUint64(b[:], uint64(d))
	copy(b[8:], header[:batch.HeaderSize])
	return storage.Digest(xxhash.Sum64(b[:]))
}

// Tally is everything that a footer says, kept while batches are added: a pure function of header and batches. Index is only ever
// appended to, so a copy of a Tally stays valid for readers while the original grows.
type Tally struct {
	Base        storage.Offset
	End         storage.End
	Pos         int64 // length of header and batches
	Digest      storage.Digest
	Batches     uint64
	DataRecords uint64 // without control batches
	FirstAppend storage.Time
	LastAppend  storage.Time
	MinTime     storage.Time // of the batches' first producer times
	MaxTime     storage.Time
	Index       []IndexEntry
	HeaderBytes int64
}

// NewTally is the tally of a segment without batches.
func NewTally(h Header, headerBytes int) Tally {
	return Tally{Base: h.Base, End: storage.EndBefore(h.Base), Pos: int64(headerBytes), HeaderBytes: int64(headerBytes)}
}

// Add counts the batch whose decoded header is h and whose encoded header begins raw. It fails with storage.ErrGap if the batch does
// not begin at the end.
func (t *Tally) Add(h *batch.Header, raw []byte) error {
	if h.Base != t.End.Next() {
		return fmt.Errorf("batch at offset %d, end is %d: %w", h.Base, t.End, storage.ErrGap)
	}
	if t.Batches == 0 || t.Index[len(t.Index)-1].Pos/indexStep != t.Pos/indexStep {
		t.Index = append(t.Index, IndexEntry{Pos: t.Pos, Offset: h.Base, Time: h.AppendTime})
	}
	if t.Batches == 0 {
		t.FirstAppend, t.MinTime, t.MaxTime = h.AppendTime, h.FirstTime, h.MaxTime
	}
	t.LastAppend = h.AppendTime
	t.MinTime, t.MaxTime = min(t.MinTime, h.FirstTime), max(t.MaxTime, h.MaxTime)
	t.Batches++
	if h.Kind == batch.KindData {
		t.DataRecords += uint64(h.Records)
	}
	t.End = h.End()
	t.Pos += int64(h.Size())
	t.Digest = Chain(t.Digest, raw)
	return nil
}

// Footer returns the footer of the segment as it stands.
func (t *Tally) Footer() []byte {
	total := footerFixed + len(t.Index)*indexEntry + trailerBytes
	le := binary.LittleEndian
	b := make([]byte, footerFixed, total)
	le.PutUint64(b, footerMagic)
	le.PutUint16(b[8:], formatVersion)
	le.PutUint32(b[12:], uint32(len(t.Index)))
	le.PutUint64(b[16:], uint64(t.End))
	le.PutUint64(b[24:], uint64(t.Pos))
	le.PutUint64(b[32:], uint64(t.Digest))
	le.PutUint64(b[40:], t.Batches)
	le.PutUint64(b[48:], t.DataRecords)
	le.PutUint64(b[56:], uint64(t.FirstAppend))
	le.PutUint64(b[64:], uint64(t.LastAppend))
	le.PutUint64(b[72:], uint64(t.MinTime))
	le.PutUint64(b[80:], uint64(t.MaxTime))
	le.PutUint64(b[88:], uint64(t.Base))
	for _, e := range t.Index {
		b = le.AppendUint64(b, uint64(e.Pos))
		b = le.AppendUint64(b, uint64(e.Offset))
		b = le.AppendUint64(b, uint64(e.Time))
	}
	b = le.AppendUint32(b, uint32(total))
	b = le.AppendUint32(b, crc32.Checksum(b, castagnoli))
	return le.AppendUint64(b, trailerMagic)
}

// FooterLength reads the length of the footer from the last 16 bytes of a file.
func FooterLength(trailer []byte) (int, error) {
	le := binary.LittleEndian
	if len(trailer) != trailerBytes || le.Uint64(trailer[8:]) != trailerMagic {
		return 0, fmt.Errorf("no segment footer: %w", storage.ErrCorrupt)
	}
	n := int(le.Uint32(trailer))
	if n < footerFixed+trailerBytes || n > footerFixed+maxIndex*indexEntry+trailerBytes {
		return 0, fmt.Errorf("segment footer of %d bytes: %w", n, storage.ErrCorrupt)
	}
	return n, nil
}

// ParseFooter reads a complete footer. Errors: storage.ErrCorrupt, storage.ErrNewerFormat.
func ParseFooter(b []byte, headerBytes int64) (Tally, error) {
	bad := func(what string) (Tally, error) {
		return Tally{}, fmt.Errorf("segment footer: %s: %w", what, storage.ErrCorrupt)
	}
	if len(b) < footerFixed+trailerBytes {
		return bad("cut short")
	}
	le := binary.LittleEndian
	n, err := FooterLength(b[len(b)-trailerBytes:])
	if err != nil {
		return Tally{}, err
	}
	if n != len(b) || le.Uint32(b[n-12:]) != crc32.Checksum(b[:n-12], castagnoli) || le.Uint64(b) != footerMagic {
		return bad("CRC")
	}
	if v := le.Uint16(b[8:]); v > formatVersion {
		return Tally{}, fmt.Errorf("segment footer format %d, this build knows %d: %w", v, formatVersion, storage.ErrNewerFormat)
	}
	count := int(le.Uint32(b[12:]))
	if le.Uint16(b[8:]) == 0 || b[10]|b[11] != 0 {
		return bad("reserved bytes")
	}
	if n != footerFixed+count*indexEntry+trailerBytes {
		return bad("index length")
	}
	t := Tally{
		End: storage.End(le.Uint64(b[16:])), Pos: int64(le.Uint64(b[24:])), Digest: storage.Digest(le.Uint64(b[32:])),
		Batches: le.Uint64(b[40:]), DataRecords: le.Uint64(b[48:]),
		FirstAppend: storage.Time(le.Uint64(b[56:])), LastAppend: storage.Time(le.Uint64(b[64:])),
		MinTime: storage.Time(le.Uint64(b[72:])), MaxTime: storage.Time(le.Uint64(b[80:])),
		Base: storage.Offset(le.Uint64(b[88:])), HeaderBytes: headerBytes,
		Index: make([]IndexEntry, count),
	}
	for i := range t.Index {
		e := b[footerFixed+i*indexEntry:]
		t.Index[i] = IndexEntry{int64(le.Uint64(e)), storage.Offset(le.Uint64(e[8:])), storage.Time(le.Uint64(e[16:]))}
		if p := t.Index[i]; p.Pos < headerBytes || p.Pos >= t.Pos || i > 0 && (p.Pos <= t.Index[i-1].Pos || p.Offset <= t.Index[i-1].Offset) {
			return bad("index order")
		}
	}
	if t.End < storage.EndBefore(t.Base) || t.Pos < headerBytes || (count == 0) != (t.Batches == 0) {
		return bad("counts")
	}
	return t, nil
}

// Seek returns where to begin reading for the record at o: the last indexed batch that begins at or before it, or the first batch.
func (t *Tally) Seek(o storage.Offset) IndexEntry {
	lo, hi := 0, len(t.Index)
	for lo < hi {
		if m := (lo + hi) / 2; t.Index[m].Offset <= o {
			lo = m + 1
		} else {
			hi = m
		}
	}
	if lo == 0 {
		return IndexEntry{Pos: t.HeaderBytes, Offset: t.Base, Time: t.FirstAppend}
	}
	return t.Index[lo-1]
}

// SeekTime returns where to begin reading for the first batch appended at or after at: append times never fall within a range.
func (t *Tally) SeekTime(at storage.Time) IndexEntry {
	lo, hi := 0, len(t.Index)
	for lo < hi {
		if m := (lo + hi) / 2; t.Index[m].Time < at {
			lo = m + 1
		} else {
			hi = m
		}
	}
	if lo == 0 {
		return IndexEntry{Pos: t.HeaderBytes, Offset: t.Base, Time: t.FirstAppend}
	}
	return t.Index[lo-1]
}
