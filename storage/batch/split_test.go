package batch

import (
	"bytes"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/malachilog/malachi/storage"
)

// genSlices draws a cover of the keyspace by halving some of its slices.
func genSlices(t *rapid.T) []storage.Slice {
	out := []storage.Slice{{}}
	for range rapid.IntRange(0, 6).Draw(t, "cuts") {
		i := rapid.IntRange(0, len(out)-1).Draw(t, "at")
		low, high := out[i].Halves()
		out = append(out[:i], append([]storage.Slice{low, high}, out[i+1:]...)...)
	}
	return out
}

func TestSplitKeepsEverything(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		records := rapid.SliceOfN(rapid.Custom(genRecord), 1, 40).Draw(rt, "records")
		o := genOptions(rt)
		slices := genSlices(rt)
		b := build(t, records, o)
		whole, err := Check(b)
		if err != nil {
			rt.Fatal(err)
		}
		kept := bytes.Clone(b)
		parts, err := Split(b, slices)
		if err != nil {
			rt.Fatalf("split: %v", err)
		}
		if !bytes.Equal(b, kept) {
			rt.Fatal("Split changed the batch")
		}
		got := make([]Record, len(records))
		seen := make([]bool, len(records))
		for n, p := range parts {
			h, err := Check(p.Data)
			if err != nil {
				rt.Fatalf("part %d: %v", n, err)
			}
			if h.Slice != p.Slice || !h.FitsIn(p.Slice) || h.Producer != o.Producer || h.Epoch != o.Epoch || h.Sequence != o.Sequence ||
				h.Base != 0 || h.AppendTime != 0 || h.Kind != KindData {
				rt.Fatalf("part %d for %s: header %+v", n, p.Slice, h)
			}
			_, rs := decode(t, p.Data)
			if len(rs) != len(p.Indexes) {
				rt.Fatalf("part %d: %d records, %d indexes", n, len(rs), len(p.Indexes))
			}
			for i, at := range p.Indexes {
				if seen[at] || i > 0 && p.Indexes[i-1] >= at {
					rt.Fatalf("part %d: indexes %v", n, p.Indexes)
				}
				seen[at], got[at] = true, rs[i]
				want := whole.KeylessPosition()
				if rs[i].Key != nil {
					want = storage.PositionOfKey(rs[i].Key)
				}
				if !p.Slice.Holds(want) {
					rt.Fatalf("record %d is not of slice %s", at, p.Slice)
				}
			}
		}
		if d := cmp.Diff(records, got); d != "" {
			rt.Fatalf("records (-whole +parts):\n%s", d)
		}
		again, err := Split(b, slices)
		if err != nil || !cmp.Equal(parts, again) {
			rt.Fatalf("a second Split differs: %v", err)
		}
	})
}

func TestSplitRefuses(t *testing.T) {
	b := build(t, sample(100), Options{})
	low, high := storage.Slice{}.Halves()
	for name, into := range map[string][]storage.Slice{
		"nothing": nil, "a hole": {low}, "out of order": {high, low}, "overlap": {{}, high}, "twice": {low, low, high}, "invalid": {{Prefix: 9}},
	} {
		if parts, err := Split(b, into); !errors.Is(err, storage.ErrInvalid) {
			t.Errorf("%s: %d parts, %v", name, len(parts), err)
		}
	}
	if _, err := Split(build(t, sample(1), Options{Kind: KindControl}), []storage.Slice{{}}); !errors.Is(err, storage.ErrInvalid) {
		t.Errorf("control batch: %v", err)
	}
	b[HeaderSize] ^= 4
	if _, err := Split(b, []storage.Slice{{}}); !errors.Is(err, storage.ErrCorrupt) {
		t.Errorf("damaged: %v", err)
	}
}

// Times that lie far apart make a part longer than it was in the whole: it is refused, not cut short.
func TestSplitThatGrowsBeyondTheLimit(t *testing.T) {
	low, high := storage.Slice{}.Halves()
	key := func(s storage.Slice) []byte {
		for i := byte(0); ; i++ {
			if k := []byte{i}; s.Holds(storage.PositionOfKey(k)) {
				return k
			}
		}
	}
	var b Builder
	add := func(r Record) error { return b.Add(&r, 0) }
	if err := errors.Join(add(Record{Key: key(low)}), add(Record{Key: key(high), Time: 1 << 62})); err != nil {
		t.Fatal(err)
	}
	for b.Records() < storage.MaxBatchRecords {
		if err := add(Record{Key: key(high), Value: make([]byte, 118)}); err != nil {
			t.Fatal(err)
		}
	}
	out, err := b.Build(nil, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Split(out, []storage.Slice{{}}); err != nil {
		t.Fatalf("uncut: %v", err)
	}
	if _, err := Split(out, []storage.Slice{low, high}); !errors.Is(err, storage.ErrTooLarge) {
		t.Fatalf("cut: %v", err)
	}
}
