package journal

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"hash/crc32"
	"os"
	"strings"
	"testing"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/vfs"
	"github.com/malachilog/malachi/storage/vfs/faultfs"
	"github.com/malachilog/malachi/storage/vfs/memfs"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func smallConfig() Config {
	return Config{FileBytes: 32 << 10, MaxBytes: 128 << 10, GroupBytes: 8 << 10}
}

func openJournal(t testing.TB, fs vfs.FS) (*Journal, *Recovered) {
	t.Helper()
	j, r, err := Open(fs, "journal", smallConfig(), ID{1, 2, 3}, false)
	must(t, err)
	return j, r
}

var testSegment = storage.SegmentID{Range: storage.RangeID{Topic: storage.TopicUID{9}, Timeline: 3, Seq: 2}, Seq: 1}

// put appends one entry and writes its group.
func put(t testing.TB, j *Journal, k Kind, data []byte) {
	t.Helper()
	acked := false
	must(t, j.Append(Entry{Kind: k, Segment: testSegment, Data: data, Done: func(err error) { must(t, err); acked = true }}))
	_, err := j.WriteGroup()
	must(t, err)
	if !acked {
		t.Fatal("written and not acknowledged")
	}
	for {
		g, ok, err := j.TryNext()
		must(t, err)
		if !ok {
			return
		}
		j.Applied(g)
	}
}

// TestForeignGroupIsNotReplayed: bytes that look like the next group of another journal, as a client might send or an old disk might
// hold, are no group of this one.
func TestForeignGroupIsNotReplayed(t *testing.T) {
	inv.Covers(t, "INV-R10")
	m := memfs.New(memfs.Options{Direct: true})
	j, _ := openJournal(t, m)
	put(t, j, KindAppend, []byte("mine"))
	f, pos, next := j.current, j.current.pos, j.seq+1
	forged := vfs.AlignedBuffer(blockSize)
	n := groupHeaderSize + entryHeaderSize + 6
	putEntryHeader(forged[groupHeaderSize:], KindAppend, testSegment, 6)
	copy(forged[groupHeaderSize+entryHeaderSize:], "forged")
	sealGroup(forged, n, ID{66}, next, 1)
	_, err := f.f.WriteAt(forged, pos)
	must(t, err)
	must(t, j.Close())
	j, r := openJournal(t, m)
	if r.Last != next-1 {
		t.Errorf("recovery went on to group %d, the last one is %d", r.Last, next-1)
	}
	must(t, j.Close())
}

// TestRecycledBytesAreNoEntries goes round the files several times: what an earlier use left behind the newest group is never replayed.
func TestRecycledBytesAreNoEntries(t *testing.T) {
	inv.Covers(t, "INV-R10", "INV-D13")
	m := memfs.New(memfs.Options{Direct: true})
	j, _ := openJournal(t, m)
	for i := range 200 {
		put(t, j, KindAppend, bytes.Repeat([]byte{byte(i)}, 3000))
		if i%9 == 8 {
			must(t, j.Checkpoint(Note{From: j.seq + 1}, nil))
			_, err := j.WriteGroup()
			must(t, err)
		}
		for j.Prepare() {
		}
		if i%7 != 0 {
			continue
		}
		again, r, err := Open(m.CrashClone(nil), "journal", smallConfig(), ID{5}, true)
		must(t, err)
		if again.ID() != j.ID() || r.Last != j.seq {
			t.Fatalf("round %d: recovered up to group %d, written are %d", i, r.Last, j.seq)
		}
		at := r.First
		must(t, r.Replay(func(g uint64, k Kind, _ storage.SegmentID, data []byte) error {
			if g < at || k == KindAppend && len(data) != 3000 {
				t.Fatalf("group %d: %s of %d bytes", g, k, len(data))
			}
			at = g
			return nil
		}))
		must(t, again.Close())
	}
	if s := j.Stats(); s.FilesInUse+s.FilesFree > 5 {
		t.Errorf("%d files are beyond the cap", s.FilesInUse+s.FilesFree)
	}
	must(t, j.Close())
}

// TestFilesAreRecycledOnlyBehindTheNote: a checkpoint that is queued and not durable frees nothing.
func TestFilesAreRecycledOnlyBehindTheNote(t *testing.T) {
	inv.Covers(t, "INV-R10", "INV-D14")
	m := memfs.New(memfs.Options{Direct: true})
	j, _ := openJournal(t, m)
	for range 12 {
		put(t, j, KindAppend, make([]byte, 6000))
		for j.Prepare() {
		}
	}
	before := j.Stats().FilesFree
	must(t, j.Checkpoint(Note{From: j.seq + 1}, nil))
	if got := j.Stats().FilesFree; got != before {
		t.Errorf("%d files are free before the note is durable, %d were", got, before)
	}
	_, err := j.WriteGroup()
	must(t, err)
	if got := j.Stats().FilesFree; got <= before {
		t.Errorf("%d files are free behind the note, %d were", got, before)
	}
	must(t, j.Close())
}

// TestRoomCountsWhatIsBeingWritten appends from inside the write of a group: the blocks of that group are taken already.
func TestRoomCountsWhatIsBeingWritten(t *testing.T) {
	fs := faultfs.New(memfs.New(memfs.Options{Direct: true}))
	j, _ := openJournal(t, fs)
	refused := 0
	fs.Inject(func(op faultfs.Op) error {
		if op.Kind != faultfs.Write || !op.Direct {
			return nil
		}
		for { // fill up all that there is
			if err := j.Append(Entry{Kind: KindAppend, Segment: testSegment, Data: make([]byte, 7000)}); err != nil {
				refused++
				return nil
			}
		}
	})
	must(t, j.Append(Entry{Kind: KindAppend, Segment: testSegment, Data: make([]byte, 7000)}))
	for {
		wrote, err := j.WriteGroup()
		if err != nil {
			t.Fatalf("an entry was taken that no file had room for: %v", err)
		}
		if !wrote {
			break
		}
	}
	if refused == 0 {
		t.Error("the journal was never full")
	}
	must(t, j.Append(Entry{Kind: KindFence, Segment: testSegment}))
	must(t, j.Checkpoint(Note{From: 1}, nil))
	_, err := j.WriteGroup()
	must(t, err)
	must(t, j.Close())
}

// TestOutsideFailureAnswersTheQueue: who waits for a group is told when a segment file fails.
func TestOutsideFailureAnswersTheQueue(t *testing.T) {
	inv.Covers(t, "INV-D8")
	j, _ := openJournal(t, memfs.New(memfs.Options{Direct: true}))
	var got error
	must(t, j.Append(Entry{Kind: KindAppend, Segment: testSegment, Done: func(err error) { got = err }}))
	j.Fail(errors.New("segment file"))
	if err := j.Run(t.Context()); !errors.Is(err, storage.ErrStorageFailed) || !errors.Is(got, storage.ErrStorageFailed) {
		t.Errorf("run %v, entry %v", err, got)
	}
	if err := j.Append(Entry{Kind: KindFence}); !errors.Is(err, storage.ErrStorageFailed) {
		t.Errorf("append: %v", err)
	}
	must(t, j.Close())
}

// TestRunEndsWithTheFailure: Run must not wait for its context, or nobody learns of the failure.
func TestRunEndsWithTheFailure(t *testing.T) {
	fs := faultfs.New(memfs.New(memfs.Options{Direct: true}))
	j, _ := openJournal(t, fs)
	fs.Inject(func(op faultfs.Op) error {
		if op.Direct && op.Kind == faultfs.Write {
			return faultfs.ErrInjected
		}
		return nil
	})
	must(t, j.Append(Entry{Kind: KindAppend, Segment: testSegment, Data: []byte("x")}))
	if err := j.Run(t.Context()); !errors.Is(err, storage.ErrStorageFailed) {
		t.Errorf("run: %v", err)
	}
	must(t, j.Close())
}

// TestInspectChangesNothing reads a journal without one mutating operation, also when it is damaged.
func TestInspectChangesNothing(t *testing.T) {
	inv.Covers(t, "INV-R6")
	fs := faultfs.New(memfs.New(memfs.Options{Direct: true}))
	j, _ := openJournal(t, fs)
	put(t, j, KindAppend, []byte("one"))
	put(t, j, KindAppend, []byte("two"))
	must(t, j.Close())
	ops := fs.Ops()
	i, err := Inspect(fs, "journal")
	must(t, err)
	var got []string
	must(t, i.Replay(func(_ uint64, _ Kind, _ storage.SegmentID, data []byte) error {
		got = append(got, string(data))
		return nil
	}))
	must(t, i.Close())
	if strings.Join(got, " ") != "one two" || fs.Ops() != ops {
		t.Errorf("%q, %d mutating operations", got, fs.Ops()-ops)
	}
	if _, err := Inspect(fs, "elsewhere"); !vfs.IsNotExist(err) {
		t.Errorf("no journal: %v", err)
	}
}

func TestNewerJournalIsRefused(t *testing.T) {
	inv.Covers(t, "INV-R11")
	m := memfs.New(memfs.Options{})
	j, _ := openJournal(t, m)
	put(t, j, KindAppend, []byte("x"))
	must(t, j.Close())
	f, err := m.OpenWrite("journal/00000002.wal")
	must(t, err)
	b := make([]byte, blockSize)
	encodeFileHeader(b, ID{1, 2, 3}, 32<<10)
	for _, c := range []struct {
		want error
		sum  bool
	}{{storage.ErrNewerFormat, true}, {storage.ErrCorrupt, false}} {
		b[8] = 2
		if c.sum {
			resumHeader(b)
		} else {
			b[44] ^= 1
		}
		_, err = f.WriteAt(b, 0)
		must(t, errors.Join(err, f.Sync()))
		before := m.Dump()
		if _, _, err := Open(m, "journal", smallConfig(), ID{}, true); !errors.Is(err, c.want) {
			t.Errorf("got %v, want %v", err, c.want)
		}
		if m.Dump() != before {
			t.Error("a refused start changed something")
		}
	}
	must(t, f.Close())
}

// sampleJournal is the frozen file's content: three groups, with an entry of every kind.
func sampleJournal(t testing.TB) []byte {
	m := memfs.New(memfs.Options{Direct: true})
	cfg := Config{FileBytes: 16 << 10, MaxBytes: 64 << 10, GroupBytes: 8 << 10}
	j, _, err := Open(m, "journal", cfg, ID{0xab, 0xcd}, false)
	must(t, err)
	for _, e := range []Entry{{Kind: KindOpen, Data: []byte("header")}, {Kind: KindAppend, Data: []byte("batch")}, {Kind: KindFence},
		{Kind: KindRecovered, Data: []byte("more")}, {Kind: KindCut, Data: EncodeCut(7)}} {
		e.Segment = testSegment
		must(t, j.Append(e))
	}
	_, err = j.WriteGroup()
	must(t, err)
	must(t, j.Append(Entry{Kind: KindSealed, Segment: testSegment, Data: EncodeSealed(7, 0xfeed)}))
	must(t, j.Append(Entry{Kind: KindDropped, Segment: testSegment}))
	must(t, j.Checkpoint(Note{From: 2, Segments: []SegmentNote{
		{ID: testSegment, End: 5, Pos: 600, Digest: 0x1234, Fenced: true},
		{ID: storage.SegmentID{Seq: 4}, End: 9, Pos: 700, Digest: 0x5678, Damaged: true},
	}}, nil))
	_, err = j.WriteGroup()
	must(t, err)
	must(t, j.CloseGroup())
	must(t, j.Close())
	f, err := m.Open("journal/00000001.wal")
	must(t, err)
	b := make([]byte, 16<<10)
	_, err = f.ReadAt(b, 0)
	must(t, errors.Join(err, f.Close()))
	return b
}

// TestFrozenFile holds format version 1 for ever: the file decodes to these values, and the same entries give the same bytes.
func TestFrozenFile(t *testing.T) {
	text, err := os.ReadFile("testdata/journal-v1.hex")
	must(t, err)
	var want []byte
	for line := range strings.Lines(string(text)) {
		b, err := hex.DecodeString(strings.TrimSpace(line))
		must(t, err)
		want = append(want, b...)
		want = append(want, make([]byte, 512-len(b))...)
	}
	if got := sampleJournal(t); !bytes.Equal(got, want) {
		t.Error("the same entries give other bytes")
	}
	id, size, err := parseFileHeader(want)
	if err != nil || id != (ID{0xab, 0xcd}) || size != 16<<10 {
		t.Errorf("header: %x, %d, %v", id, size, err)
	}
	var got []string
	for n, pos := uint64(1), blockSize; pos < len(want); n++ {
		g, ok := parseGroup(want[pos:], id)
		if !ok || g.number != n {
			t.Fatalf("group %d: %v, %d", n, ok, g.number)
		}
		must(t, g.each(func(k Kind, s storage.SegmentID, data []byte) error {
			got = append(got, k.String())
			if (k == KindCheckpoint) == (s == testSegment) {
				t.Errorf("%s of segment %s", k, s)
			}
			switch k {
			case KindCheckpoint:
				note, err := parseNote(data)
				if err != nil || note.From != 2 || len(note.Segments) != 2 || !note.Segments[0].Fenced || note.Segments[0].Damaged ||
					note.Segments[1].Fenced || !note.Segments[1].Damaged || note.Segments[1].Digest != 0x5678 || note.Segments[0].Pos != 600 {
					t.Errorf("note %+v, %v", note, err)
				}
			case KindSealed:
				if end, d, err := ParseSealed(data); end != 7 || d != 0xfeed || err != nil {
					t.Errorf("sealed %d, %x, %v", end, d, err)
				}
			case KindCut:
				if end, err := ParseCut(data); end != 7 || err != nil {
					t.Errorf("cut %d, %v", end, err)
				}
			}
			return nil
		}))
		pos += g.size
	}
	if s := strings.Join(got, " "); s != "open append fence recovered cut sealed dropped checkpoint" {
		t.Errorf("entries %s", s)
	}
}

func TestZeroBytesAreNothing(t *testing.T) {
	inv.Covers(t, "INV-R10")
	b := make([]byte, 2*blockSize)
	if _, ok := parseGroup(b, ID{}); ok {
		t.Error("zeros are a group")
	}
	if _, _, err := parseFileHeader(b); !errors.Is(err, storage.ErrCorrupt) {
		t.Errorf("zeros as a file header: %v", err)
	}
	if _, err := parseNote(b[:16]); !errors.Is(err, storage.ErrCorrupt) {
		t.Errorf("zeros as a note: %v", err)
	}
	if Kind(0).valid() {
		t.Error("kind zero is valid")
	}
}

func FuzzGroup(f *testing.F) {
	b := sampleJournal(f)
	f.Add(b[blockSize : 2*blockSize])
	f.Add(b[2*blockSize:])
	f.Add(make([]byte, blockSize))
	f.Fuzz(func(t *testing.T, b []byte) {
		if n := claimedSize(b); n < blockSize || n > maxGroupBytes || n%blockSize != 0 {
			t.Fatalf("claims %d bytes", n)
		}
		g, ok := parseGroup(b, ID{0xab, 0xcd})
		if !ok {
			return
		}
		seen := 0
		err := g.each(func(_ Kind, _ storage.SegmentID, data []byte) error { seen += entryHeaderSize + len(data); return nil })
		if seen > len(b) || err != nil && !errors.Is(err, storage.ErrCorrupt) {
			t.Errorf("%d bytes of entries, %v", seen, err)
		}
	})
}

func FuzzNote(f *testing.F) {
	f.Add(Note{From: 1}.Encode())
	f.Add(Note{From: 9, Segments: []SegmentNote{{ID: testSegment, End: 4, Pos: 5, Digest: 6, Fenced: true, Damaged: true}}}.Encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		if n, err := parseNote(b); err == nil && !bytes.Equal(n.Encode(), b) {
			t.Error("a note encodes to other bytes")
		}
	})
}

func FuzzFileHeader(f *testing.F) {
	b := make([]byte, blockSize)
	encodeFileHeader(b, ID{7}, 64<<20)
	f.Add(b)
	f.Add(make([]byte, fileHeaderSize))
	f.Fuzz(func(t *testing.T, b []byte) {
		id, size, err := parseFileHeader(b)
		if err != nil {
			return
		}
		again := make([]byte, blockSize)
		if encodeFileHeader(again, id, size); !validFileBytes(size) || !bytes.Equal(again[:fileHeaderSize], b[:fileHeaderSize]) {
			t.Errorf("header of %d bytes encodes to other bytes", size)
		}
	})
}

// resumHeader gives a changed file header its right CRC.
func resumHeader(b []byte) {
	binary.LittleEndian.PutUint32(b[44:], crc32.Checksum(b[:44], castagnoli))
}
