package segment

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"hash/crc32"
	"os"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
)

var rewrite = flag.Bool("rewrite", false, "write testdata anew: only before a format's first release")

func sampleHeader() Header {
	topic := storage.TopicUID{0xaa, 1, 2, 3}
	parent := func(seq, prefix uint32, end storage.End) Parent {
		return Parent{Range: storage.RangeID{Topic: topic, Timeline: 9, Seq: seq}, Slice: storage.Slice{Prefix: prefix, Depth: 4}, End: end}
	}
	return Header{
		ID:    storage.SegmentID{Range: storage.RangeID{Topic: topic, Timeline: 9, Seq: 7}, Seq: 3},
		Topic: "orders.v2", Slice: storage.Slice{Prefix: 2, Depth: 3}, Base: 1000, CreateTime: 1_700_000_000_000_000_000,
		Lineage: []Parent{parent(4, 4, 50), parent(5, 5, 1<<40)}, Table: []byte("a table of producers"),
	}
}

func encode(t testing.TB, h Header) []byte {
	t.Helper()
	b, err := h.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// sampleFile is a sealed segment of n batches of about size bytes, and the tally of it.
func sampleFile(t testing.TB, h Header, n, size int) ([]byte, Tally) {
	t.Helper()
	out := encode(t, h)
	tally := NewTally(h, len(out))
	for i := range n {
		var b batch.Builder
		for k := range 2 {
			v := bytes.Repeat([]byte{byte('a' + i%26)}, size/2)
			if err := b.Add(&batch.Record{Key: []byte{byte(i), byte(k)}, Value: v, Time: storage.Time(100*i + k)}, 0); err != nil {
				t.Fatal(err)
			}
		}
		raw, err := b.Build(nil, batch.Options{})
		if err != nil {
			t.Fatal(err)
		}
		batch.Stamp(raw, tally.End.Next(), storage.Time(1000+i), storage.Slice{})
		bh, err := batch.ParseHeader(raw)
		if err != nil {
			t.Fatal(err)
		}
		if err := tally.Add(&bh, raw); err != nil {
			t.Fatal(err)
		}
		out = append(out, raw...)
	}
	return append(out, tally.Footer()...), tally
}

// TestFrozenFile holds today's code to a sealed segment of the first release, byte for byte.
func TestFrozenFile(t *testing.T) {
	const name = "testdata/segment-v1.hex"
	file, tally := sampleFile(t, sampleHeader(), 4, 40)
	if *rewrite {
		var b strings.Builder
		for i := 0; i < len(file); i += 32 {
			fmt.Fprintln(&b, hex.EncodeToString(file[i:min(i+32, len(file))]))
		}
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	frozen, err := hex.DecodeString(strings.Join(strings.Fields(string(text)), ""))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(frozen, file) {
		t.Error("the same header and batches give other bytes than they did")
	}
	h, got, err := Verify(bytes.NewReader(frozen), int64(len(frozen)), nil)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(h, sampleHeader()) {
		t.Errorf("header reads as %+v", h)
	}
	if !reflect.DeepEqual(got, tally) || got.End != 1008 || got.DataRecords != 8 || got.Batches != 4 {
		t.Errorf("tally reads as %+v", got)
	}
}

// TestNewerVersionsAreRefused: as newer, where the CRC is right; a flipped bit in the version is damage and not a newer format.
func TestNewerVersionsAreRefused(t *testing.T) {
	inv.Covers(t, "INV-R11")
	b := encode(t, sampleHeader())
	b[8] = 2
	if _, _, err := ParseHeader(b); !errors.Is(err, storage.ErrCorrupt) || errors.Is(err, storage.ErrNewerFormat) {
		t.Errorf("a flipped bit in the version: %v", err)
	}
	binary.LittleEndian.PutUint32(b[len(b)-4:], crc32.Checksum(b[:len(b)-4], castagnoli))
	if _, _, err := ParseHeader(b); !errors.Is(err, storage.ErrNewerFormat) {
		t.Errorf("header of version 2: %v", err)
	}
}

// TestEveryFlippedBitIsSeen: in header, batches and footer, by Verify.
func TestEveryFlippedBitIsSeen(t *testing.T) {
	inv.Covers(t, "INV-H1", "INV-R3")
	file, _ := sampleFile(t, sampleHeader(), 3, 20)
	for i := range file {
		for bit := range 8 {
			bad := bytes.Clone(file)
			bad[i] ^= 1 << bit
			_, _, err := Verify(bytes.NewReader(bad), int64(len(bad)), nil)
			if !errors.Is(err, storage.ErrCorrupt) {
				t.Fatalf("byte %d bit %d: %v", i, bit, err)
			}
		}
	}
	for cut := 1; cut < len(file); cut += 7 {
		if _, _, err := Verify(bytes.NewReader(file[:len(file)-cut]), int64(len(file)-cut), nil); !errors.Is(err, storage.ErrCorrupt) {
			t.Fatalf("%d bytes cut off: %v", cut, err)
		}
	}
	if _, _, err := Verify(bytes.NewReader(make([]byte, 4096)), 4096, nil); !errors.Is(err, storage.ErrCorrupt) {
		t.Errorf("zeros: %v", err)
	}
}

// TestADroppedBatchIsSeen: a file with one batch left out and a footer that fits the rest chains no more.
func TestADroppedBatchIsSeen(t *testing.T) {
	inv.Covers(t, "INV-H1")
	h := sampleHeader()
	file, tally := sampleFile(t, h, 4, 40)
	head := len(encode(t, h))
	one := (int(tally.Pos) - head) / 4
	bad := append(bytes.Clone(file[:head+one]), file[head+2*one:]...)
	if _, _, err := Verify(bytes.NewReader(bad), int64(len(bad)), nil); !errors.Is(err, storage.ErrCorrupt) {
		t.Errorf("a batch is missing: %v", err)
	}
}

// TestRebuildFooter: byte-equal, or not at all.
func TestRebuildFooter(t *testing.T) {
	inv.Covers(t, "INV-R3")
	file, tally := sampleFile(t, sampleHeader(), 5, 60)
	for i := int(tally.Pos); i < len(file); i++ {
		bad := bytes.Clone(file)
		bad[i] ^= 0x40
		pos, footer, err := RebuildFooter(bytes.NewReader(bad), int64(len(bad)), nil)
		if err != nil || pos != tally.Pos || !bytes.Equal(footer, file[pos:]) {
			t.Fatalf("footer byte %d: rebuilt at %d, %v", i, pos, err)
		}
	}
	for i := range int(tally.Pos) { // over records that do not verify nothing is rebuilt
		bad := bytes.Clone(file)
		bad[i] ^= 1
		if _, _, err := RebuildFooter(bytes.NewReader(bad), int64(len(bad)), nil); err == nil {
			t.Fatalf("data byte %d is damaged, and a footer was made over it", i)
		}
		if _, _, err := RebuildFooter(bytes.NewReader(bad), int64(len(bad)), &tally); err == nil {
			t.Fatalf("data byte %d is damaged, and a footer was made over it though the digest is known", i)
		}
	}
	other := tally
	other.Digest++
	if _, _, err := RebuildFooter(bytes.NewReader(file), int64(len(file)), &other); !errors.Is(err, storage.ErrCorrupt) {
		t.Errorf("another digest is recorded: %v", err)
	}
}

// TestIndexFindsEveryBatch: Seek and SeekTime never land behind what is sought, and at most one index step before it.
func TestIndexFindsEveryBatch(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := Header{Topic: "t", Base: storage.Offset(rapid.Uint32().Draw(t, "base"))}
		tally := NewTally(h, 200)
		type place struct {
			pos  int64
			base storage.Offset
			time storage.Time
		}
		var places []place
		at := storage.Time(0)
		for range rapid.IntRange(0, 60).Draw(t, "batches") {
			at += storage.Time(rapid.IntRange(0, 2).Draw(t, "dt"))
			n := rapid.SampledFrom([]uint32{10, 5000, 40_000, 70_000, 200_000}).Draw(t, "bytes")
			bh := batch.Header{Kind: batch.KindData, Records: uint32(rapid.IntRange(1, 9).Draw(t, "n")), PayloadBytes: n, Base: tally.End.Next(), AppendTime: at}
			places = append(places, place{tally.Pos, bh.Base, at})
			if err := tally.Add(&bh, make([]byte, batch.HeaderSize)); err != nil {
				t.Fatal(err)
			}
		}
		for i, p := range places {
			e := tally.Seek(p.base)
			if e.Pos > p.pos || e.Offset > p.base || p.pos-e.Pos > indexStep {
				t.Fatalf("batch %d at %d: seek gives %d", i, p.pos, e.Pos)
			}
			if e := tally.SeekTime(p.time); e.Time > p.time || e.Time == p.time && e.Pos > p.pos {
				t.Fatalf("batch %d at time %d: seek gives time %d", i, p.time, e.Time)
			}
		}
		back, err := ParseFooter(tally.Footer(), tally.HeaderBytes)
		if err != nil {
			t.Fatal(err)
		}
		if len(back.Index) == 0 {
			back.Index = tally.Index
		}
		if !reflect.DeepEqual(back, tally) {
			t.Fatalf("footer reads as %+v, was %+v", back, tally)
		}
	})
}

func TestHeaderLimits(t *testing.T) {
	for name, change := range map[string]func(*Header){
		"no name":        func(h *Header) { h.Topic = "" },
		"long name":      func(h *Header) { h.Topic = strings.Repeat("x", 250) },
		"three parents":  func(h *Header) { h.Lineage = append(h.Lineage, h.Lineage[0]) },
		"foreign parent": func(h *Header) { h.Lineage[0].Range.Topic = storage.TopicUID{1} },
		"bad slice":      func(h *Header) { h.Slice.Depth = 25 },
		"huge table":     func(h *Header) { h.Table = make([]byte, 4<<20+1) },
		"base":           func(h *Header) { h.Base = storage.MaxOffset + 1 },
	} {
		h := sampleHeader()
		change(&h)
		if _, err := h.Encode(); err == nil {
			t.Errorf("%s is encoded", name)
		}
	}
}

func FuzzParseHeader(f *testing.F) {
	f.Add(encode(f, sampleHeader()))
	f.Add(encode(f, Header{Topic: "t"}))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		h, n, err := ParseHeader(b)
		if err != nil {
			return
		}
		if again := encode(t, h); !bytes.Equal(again, b[:n]) {
			t.Fatalf("%x reads as %+v and is written as %x", b[:n], h, again)
		}
	})
}

func FuzzParseFooter(f *testing.F) {
	_, tally := sampleFile(f, sampleHeader(), 3, 20)
	f.Add(tally.Footer())
	f.Add(make([]byte, 200))
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := ParseFooter(b, tally.HeaderBytes)
		if err == nil && !bytes.Equal(got.Footer(), b) {
			t.Fatalf("%x reads as %+v", b, got)
		}
	})
}

func FuzzVerify(f *testing.F) {
	file, _ := sampleFile(f, sampleHeader(), 2, 20)
	f.Add(file)
	f.Add(file[:len(file)-1])
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, tally, err := Verify(bytes.NewReader(b), int64(len(b)), nil); err == nil && tally.Batches > uint64(len(b)) {
			t.Fatalf("%d batches in %d bytes", tally.Batches, len(b))
		}
		_, _, _ = RebuildFooter(bytes.NewReader(b), int64(len(b)), nil) // must only not panic
	})
}
