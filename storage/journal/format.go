package journal

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/vfs"
)

// The byte layout of FORMAT.md. Everything is little endian.
const (
	fileMagic     = 0x314c414e524a4c4d // "MLJRNAL1"
	groupMagic    = 0x31505552474a4c4d // "MLJGRUP1"
	formatVersion = 1

	blockSize       = vfs.BlockSize
	fileHeaderSize  = 48
	groupHeaderSize = 64
	entryHeaderSize = 40
	noteHeaderSize  = 16
	noteSegmentSize = 64

	// maxEntryData bounds one entry's data: a whole batch with room for a checkpoint of 100,000 segments.
	maxEntryData = storage.MaxBatchBytes + 64<<10
	// maxGroupBytes is the largest group on disk, padding included.
	maxGroupBytes = (groupHeaderSize + entryHeaderSize + maxEntryData + blockSize - 1) / blockSize * blockSize
	// minFileBytes and maxFileBytes bound a file's size, which recovery reads from its header.
	minFileBytes = 4 * blockSize
	maxFileBytes = 1 << 30
	// MaxLiveSegments is how many segments one checkpoint can note.
	MaxLiveSegments = (maxEntryData - noteHeaderSize) / noteSegmentSize
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// ID is a journal's 128 random bits. It stands in every group and is never told to a client, so that no bytes from outside can
// be taken for a group.
type ID [16]byte

// Kind says what an entry records.
type Kind uint8

// The kinds of FORMAT.md.
const (
	KindOpen       Kind = 1 // Data: the segment's complete header bytes.
	KindAppend     Kind = 2 // Data: one batch that starts at the segment's end. The only kind that an API client causes.
	KindRecovered  Kind = 3 // Data: one batch, appended onto a fenced replica by a pass.
	KindFence      Kind = 4 // No data. After it only KindRecovered extends the segment.
	KindCut        Kind = 5 // Data: the new end. Written before the file is truncated.
	KindSealed     Kind = 6 // Data: end and digest. Written after the footer is synced. Ends the replay of this segment.
	KindDropped    Kind = 7 // No data. Written before the file is removed. Ends the replay of this segment.
	KindCheckpoint Kind = 8 // Data: a Note.
)

func (k Kind) valid() bool { return k >= KindOpen && k <= KindCheckpoint }

// String is the kind's name in FORMAT.md.
func (k Kind) String() string {
	names := [...]string{"?", "open", "append", "recovered", "fence", "cut", "sealed", "dropped", "checkpoint"}
	if int(k) >= len(names) {
		k = 0
	}
	return names[k]
}

// SegmentNote is what a checkpoint says of one live segment: what its file had been given at the instant of the note.
type SegmentNote struct {
	ID     storage.SegmentID
	End    storage.End
	Pos    int64          // length in bytes of the file's header and batches
	Digest storage.Digest // over the batches as received
	Fenced bool
	// Damaged: the replica knows of damage. It stays so, whatever a later start can read.
	Damaged bool
}

const (
	noteFenced  = 1
	noteDamaged = 2
)

// Note is a checkpoint: replay begins at group From and skips what Segments hold.
type Note struct {
	From     uint64
	Segments []SegmentNote
}

func putSegmentID(b []byte, id storage.SegmentID) {
	copy(b, id.Range.Topic[:])
	binary.LittleEndian.PutUint64(b[16:], uint64(id.Range.Timeline))
	binary.LittleEndian.PutUint32(b[24:], id.Range.Seq)
	binary.LittleEndian.PutUint32(b[28:], id.Seq)
}

func getSegmentID(b []byte) (id storage.SegmentID) {
	copy(id.Range.Topic[:], b)
	id.Range.Timeline = storage.Timeline(binary.LittleEndian.Uint64(b[16:]))
	id.Range.Seq = binary.LittleEndian.Uint32(b[24:])
	id.Seq = binary.LittleEndian.Uint32(b[28:])
	return id
}

// Encode returns the note as entry data.
func (n Note) Encode() []byte {
	b := make([]byte, noteHeaderSize, noteHeaderSize+len(n.Segments)*noteSegmentSize)
	binary.LittleEndian.PutUint64(b, n.From)
	binary.LittleEndian.PutUint32(b[8:], uint32(len(n.Segments)))
	for _, s := range n.Segments {
		var e [noteSegmentSize]byte
		putSegmentID(e[:], s.ID)
		binary.LittleEndian.PutUint64(e[32:], uint64(s.End))
		binary.LittleEndian.PutUint64(e[40:], uint64(s.Pos))
		binary.LittleEndian.PutUint64(e[48:], uint64(s.Digest))
		if s.Fenced {
			e[56] |= noteFenced
		}
		if s.Damaged {
			e[56] |= noteDamaged
		}
		b = append(b, e[:]...)
	}
	return b
}

func parseNote(b []byte) (Note, error) {
	if len(b) < noteHeaderSize {
		return Note{}, fmt.Errorf("checkpoint of %d bytes: %w", len(b), storage.ErrCorrupt)
	}
	n := Note{From: binary.LittleEndian.Uint64(b)}
	count := int(binary.LittleEndian.Uint32(b[8:]))
	if len(b) != noteHeaderSize+count*noteSegmentSize || binary.LittleEndian.Uint32(b[12:]) != 0 || n.From == 0 {
		return Note{}, fmt.Errorf("checkpoint of %d bytes for %d segments: %w", len(b), count, storage.ErrCorrupt)
	}
	n.Segments = make([]SegmentNote, count)
	for i := range n.Segments {
		e := b[noteHeaderSize+i*noteSegmentSize:][:noteSegmentSize]
		n.Segments[i] = SegmentNote{
			ID:      getSegmentID(e),
			End:     storage.End(binary.LittleEndian.Uint64(e[32:])),
			Pos:     int64(binary.LittleEndian.Uint64(e[40:])),
			Digest:  storage.Digest(binary.LittleEndian.Uint64(e[48:])),
			Fenced:  e[56]&noteFenced != 0,
			Damaged: e[56]&noteDamaged != 0,
		}
		if binary.LittleEndian.Uint64(e[56:]) > noteFenced|noteDamaged || n.Segments[i].Pos < 0 {
			return Note{}, fmt.Errorf("checkpoint of segment %s: %w", n.Segments[i].ID, storage.ErrCorrupt)
		}
	}
	return n, nil
}

// EncodeCut is the data of KindCut.
func EncodeCut(end storage.End) []byte {
	return binary.LittleEndian.AppendUint64(nil, uint64(end))
}

// ParseCut reads the data of KindCut.
func ParseCut(b []byte) (storage.End, error) {
	if len(b) != 8 {
		return 0, fmt.Errorf("cut entry of %d bytes: %w", len(b), storage.ErrCorrupt)
	}
	return storage.End(binary.LittleEndian.Uint64(b)), nil
}

// EncodeSealed is the data of KindSealed.
func EncodeSealed(end storage.End, d storage.Digest) []byte {
	return binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, uint64(end)), uint64(d))
}

// ParseSealed reads the data of KindSealed.
func ParseSealed(b []byte) (storage.End, storage.Digest, error) {
	if len(b) != 16 {
		return 0, 0, fmt.Errorf("sealed entry of %d bytes: %w", len(b), storage.ErrCorrupt)
	}
	return storage.End(binary.LittleEndian.Uint64(b)), storage.Digest(binary.LittleEndian.Uint64(b[8:])), nil
}

func validFileBytes(n int64) bool { return n%blockSize == 0 && n >= minFileBytes && n <= maxFileBytes }

// encodeFileHeader fills a file's first block.
func encodeFileHeader(block []byte, id ID, size int64) {
	clear(block)
	binary.LittleEndian.PutUint64(block, fileMagic)
	binary.LittleEndian.PutUint16(block[8:], formatVersion)
	copy(block[16:], id[:])
	binary.LittleEndian.PutUint64(block[32:], uint64(size))
	binary.LittleEndian.PutUint32(block[44:], crc32.Checksum(block[:44], castagnoli))
}

func parseFileHeader(b []byte) (id ID, size int64, err error) {
	if len(b) < fileHeaderSize || binary.LittleEndian.Uint64(b) != fileMagic {
		return id, 0, fmt.Errorf("not a journal file: %w", storage.ErrCorrupt)
	}
	// The CRC comes before the version, so that a flipped bit is called damage: later versions keep magic, version and CRC in place.
	if binary.LittleEndian.Uint32(b[44:]) != crc32.Checksum(b[:44], castagnoli) {
		return id, 0, fmt.Errorf("journal file header: CRC: %w", storage.ErrCorrupt)
	}
	if v := binary.LittleEndian.Uint16(b[8:]); v > formatVersion {
		return id, 0, fmt.Errorf("journal format %d, this build knows %d: %w", v, formatVersion, storage.ErrNewerFormat)
	}
	copy(id[:], b[16:])
	size = int64(binary.LittleEndian.Uint64(b[32:]))
	if !validFileBytes(size) || binary.LittleEndian.Uint16(b[8:]) == 0 || b[10]|b[11]|b[12]|b[13]|b[14]|b[15]|b[40]|b[41]|b[42]|b[43] != 0 {
		return ID{}, 0, fmt.Errorf("journal file header: fields do not fit together: %w", storage.ErrCorrupt)
	}
	return id, size, nil
}

// sealGroup completes the group that b holds (header space, then entries) and returns the length on disk. The bytes from the
// end of the entries to the end of the last block are cleared: nothing of an earlier use of the buffer reaches the disk.
func sealGroup(buf []byte, n int, id ID, number uint64, entries int) int {
	h := buf[:groupHeaderSize]
	clear(h)
	binary.LittleEndian.PutUint64(h, groupMagic)
	binary.LittleEndian.PutUint16(h[8:], formatVersion)
	binary.LittleEndian.PutUint32(h[12:], uint32(entries))
	copy(h[16:], id[:])
	binary.LittleEndian.PutUint64(h[32:], number)
	binary.LittleEndian.PutUint32(h[40:], uint32(n-groupHeaderSize))
	c := crc32.Checksum(h[:60], castagnoli)
	binary.LittleEndian.PutUint32(h[60:], crc32.Update(c, castagnoli, buf[groupHeaderSize:n]))
	total := roundUp(n)
	clear(buf[n:total])
	return total
}

func roundUp(n int) int { return (n + blockSize - 1) / blockSize * blockSize }

// claimedSize is the length on disk that the bytes at b claim for a group that begins there, bounded; blockSize if they claim none.
func claimedSize(b []byte) int {
	if len(b) < groupHeaderSize || binary.LittleEndian.Uint64(b) != groupMagic {
		return blockSize
	}
	return int(min(int64(roundUp(groupHeaderSize+int(binary.LittleEndian.Uint32(b[40:])))), maxGroupBytes))
}

// parsedGroup is a group found on disk.
type parsedGroup struct {
	number  uint64
	entries int
	payload []byte // aliases the buffer it was parsed from
	size    int    // on disk, padding included
}

// parseGroup reads the group that starts at b[0]. ok is false for anything that does not verify; a group of another journal or
// format version does not.
func parseGroup(b []byte, id ID) (g parsedGroup, ok bool) {
	if len(b) < groupHeaderSize || binary.LittleEndian.Uint64(b) != groupMagic {
		return g, false
	}
	if ID(b[16:32]) != id && !mutate.On("journal.any-journal-id") {
		return g, false
	}
	if binary.LittleEndian.Uint16(b[8:]) != formatVersion || binary.LittleEndian.Uint16(b[10:]) != 0 ||
		binary.LittleEndian.Uint64(b[44:]) != 0 || binary.LittleEndian.Uint64(b[52:]) != 0 {
		return g, false
	}
	n := int(binary.LittleEndian.Uint32(b[40:]))
	if n > len(b)-groupHeaderSize || n > maxGroupBytes {
		return g, false
	}
	g.payload = b[groupHeaderSize : groupHeaderSize+n]
	c := crc32.Checksum(b[:60], castagnoli)
	if crc32.Update(c, castagnoli, g.payload) != binary.LittleEndian.Uint32(b[60:]) {
		return g, false
	}
	g.number = binary.LittleEndian.Uint64(b[32:])
	g.entries = int(binary.LittleEndian.Uint32(b[12:]))
	g.size = roundUp(groupHeaderSize + n)
	return g, g.number > 0
}

// putEntryHeader writes an entry's header.
func putEntryHeader(b []byte, k Kind, id storage.SegmentID, n int) {
	b[0], b[1], b[2], b[3] = byte(k), 0, 0, 0
	binary.LittleEndian.PutUint32(b[4:], uint32(n))
	putSegmentID(b[8:], id)
}

// each calls fn for every entry of a verified group. Entries that do not parse although the CRC holds were written by a faulty
// writer: corrupt.
func (g parsedGroup) each(fn func(Kind, storage.SegmentID, []byte) error) error {
	b, n := g.payload, 0
	for len(b) > 0 {
		if len(b) < entryHeaderSize {
			return fmt.Errorf("group %d: entry header cut short: %w", g.number, storage.ErrCorrupt)
		}
		k, size := Kind(b[0]), int(binary.LittleEndian.Uint32(b[4:]))
		if !k.valid() || size > len(b)-entryHeaderSize {
			return fmt.Errorf("group %d: entry %d of kind %d and %d bytes: %w", g.number, n, k, size, storage.ErrCorrupt)
		}
		if err := fn(k, getSegmentID(b[8:]), b[entryHeaderSize:entryHeaderSize+size]); err != nil {
			return err
		}
		b = b[entryHeaderSize+size:]
		n++
	}
	if n != g.entries {
		return fmt.Errorf("group %d holds %d entries, its header says %d: %w", g.number, n, g.entries, storage.ErrCorrupt)
	}
	return nil
}
