package frontier

import (
	"encoding/base64"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/storage"
)

var topic = storage.TopicUID{7}

func rangeID(seq uint32) storage.RangeID { return storage.RangeID{Topic: topic, Seq: seq} }

// model is a topic whose ranges split and merge, and the records that were ever appended, in order per key (a position of the keyspace).
type model struct {
	ranges map[storage.RangeID]*modelRange
	owners []storage.RangeID
	next   uint32
	given  map[storage.Position]int // records appended per key
}

type modelRange struct {
	Range
	records []keyed
}

type keyed struct {
	key storage.Position
	n   int // the n-th record of the key
}

func newModel() *model {
	m := &model{ranges: map[storage.RangeID]*modelRange{}, given: map[storage.Position]int{}}
	m.add(storage.Slice{}, nil)
	return m
}

func (m *model) add(s storage.Slice, parents []storage.RangeID) storage.RangeID {
	id := rangeID(m.next)
	m.next++
	m.ranges[id] = &modelRange{Range: Range{ID: id, Slice: s, Parents: parents}}
	m.owners = append(m.owners, id)
	return id
}

func (m *model) Range(id storage.RangeID) (Range, bool) {
	r, ok := m.ranges[id]
	if !ok {
		return Range{}, false
	}
	return r.Range, true
}

func (m *model) append(key storage.Position) {
	for _, id := range m.owners {
		if r := m.ranges[id]; r.Slice.Holds(key) {
			r.records = append(r.records, keyed{key, m.given[key]})
			m.given[key]++
			return
		}
	}
	panic("no owner")
}

func (m *model) close(id storage.RangeID) *modelRange {
	r := m.ranges[id]
	r.Closed, r.End = true, storage.End(len(r.records))
	for i, o := range m.owners {
		if o == id {
			m.owners = append(m.owners[:i], m.owners[i+1:]...)
			break
		}
	}
	return r
}

func (m *model) split(id storage.RangeID) {
	r := m.close(id)
	low, high := r.Slice.Halves()
	r.Children = []storage.RangeID{m.add(low, []storage.RangeID{id}), m.add(high, []storage.RangeID{id})}
}

// merge closes two buddies into their parent slice, if id's buddy owns its half.
func (m *model) merge(id storage.RangeID) bool {
	r := m.ranges[id]
	if r.Slice.Depth == 0 {
		return false
	}
	buddy := storage.Slice{Prefix: r.Slice.Prefix ^ 1, Depth: r.Slice.Depth}
	for _, o := range m.owners {
		if m.ranges[o].Slice != buddy {
			continue
		}
		a, b := m.close(id), m.close(o)
		child := m.add(storage.Slice{Prefix: r.Slice.Prefix >> 1, Depth: r.Slice.Depth - 1}, []storage.RangeID{id, o})
		a.Children, b.Children = []storage.RangeID{child}, []storage.RangeID{child}
		return true
	}
	return false
}

// TestEveryRecordOnceInKeyOrder reads a topic that splits and merges under the reader: each record comes exactly once, each key in order, and the
// frontier stays one, through tokens.
func TestEveryRecordOnceInKeyOrder(t *testing.T) {
	inv.Covers(t, "INV-C9")
	rapid.Check(t, func(t *rapid.T) {
		m := newModel()
		f := Begin(topic, []Range{m.ranges[rangeID(0)].Range})
		seen := map[storage.Position]int{}
		read := func(budget int) (got int) {
			f.Resolve(m)
			n := len(f.Positions)
			for k := range n {
				p := &f.Positions[(int(f.Rotation)+k)%n]
				r := m.ranges[p.Range]
				for ; budget > 0 && int(p.Offset) < len(r.records); budget-- {
					rec := r.records[p.Offset]
					if !p.Slice.Holds(rec.key) {
						p.Offset++ // a position that holds a part of its range's slice: the rest is another position's
						continue
					}
					if rec.n != seen[rec.key] {
						t.Fatalf("key %x: record %d after %d", rec.key, rec.n, seen[rec.key])
					}
					seen[rec.key]++
					p.Offset++
					got++
				}
			}
			f.Rotation = uint32(rapid.IntRange(0, n-1).Draw(t, "rotation"))
			return got
		}
		keys := rapid.SliceOfN(rapid.Uint64(), 1, 8).Draw(t, "keys")
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			owner := m.owners[rapid.IntRange(0, len(m.owners)-1).Draw(t, "owner")]
			switch rapid.IntRange(0, 5).Draw(t, "what") {
			case 0, 1:
				m.append(storage.Position(rapid.SampledFrom(keys).Draw(t, "key")))
			case 2:
				if m.ranges[owner].Slice.Depth < 5 {
					m.split(owner)
				}
			case 3:
				m.merge(owner)
			case 4:
				read(rapid.IntRange(1, 5).Draw(t, "budget"))
			case 5:
				token, err := f.Token()
				if err != nil {
					t.Fatal(err)
				}
				if f, err = Parse(token, topic); err != nil {
					t.Fatal(err)
				}
			}
			if err := f.Check(); err != nil {
				t.Fatal(err)
			}
			if err := f.Fit(m); err != nil {
				t.Fatal(err)
			}
		}
		for idle := 0; idle < 2*int(m.next)+2; idle++ {
			if read(1000) > 0 {
				idle = 0
			}
		}
		for key, n := range m.given {
			if seen[key] != n {
				t.Fatalf("key %x: %d of %d records were read", key, seen[key], n)
			}
		}
	})
}

func TestCheckRefusesWhatIsNoFrontier(t *testing.T) {
	half := func(p uint32, o storage.Offset) Position {
		return Position{Range: rangeID(p), Slice: storage.Slice{Prefix: p, Depth: 1}, Offset: o}
	}
	whole := Position{Range: rangeID(0)}
	for name, f := range map[string]Frontier{
		"empty":           {Topic: topic},
		"hole":            {Topic: topic, Positions: []Position{half(0, 0)}},
		"hole at front":   {Topic: topic, Positions: []Position{half(1, 0)}},
		"overlap":         {Topic: topic, Positions: []Position{half(0, 0), half(0, 0)}},
		"whole and half":  {Topic: topic, Positions: []Position{whole, half(1, 0)}},
		"out of order":    {Topic: topic, Positions: []Position{half(1, 0), half(0, 0)}},
		"rotation":        {Topic: topic, Positions: []Position{whole}, Rotation: 1},
		"offset":          {Topic: topic, Positions: []Position{{Range: rangeID(0), Offset: storage.MaxOffset + 2}}},
		"foreign range":   {Topic: topic, Positions: []Position{{Range: storage.RangeID{Topic: storage.TopicUID{8}}}}},
		"bad slice":       {Topic: topic, Positions: []Position{{Range: rangeID(0), Slice: storage.Slice{Prefix: 1}}}},
		"depth":           {Topic: topic, Positions: []Position{{Range: rangeID(0), Slice: storage.Slice{Depth: 25}}}},
		"after the whole": {Topic: topic, Positions: []Position{whole, whole}},
	} {
		if err := f.Check(); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	ok := Frontier{Topic: topic, Positions: []Position{half(0, 5), half(1, 0)}, Rotation: 1}
	if err := ok.Check(); err != nil {
		t.Error(err)
	}
}

func TestFit(t *testing.T) {
	m := newModel()
	m.append(1)
	m.append(1 << 63)
	m.split(rangeID(0))
	f := Begin(topic, []Range{m.ranges[rangeID(0)].Range})
	f.Positions[0].Offset = 3
	var beyond *BeyondEndError
	if err := f.Fit(m); !errors.As(err, &beyond) || !errors.Is(err, storage.ErrBeyondEnd) {
		t.Fatalf("beyond the end: %v", err)
	}
	if err := beyond.Nearest.Fit(m); err != nil || beyond.Nearest.Positions[0].Offset != 2 {
		t.Errorf("the nearest frontier does not fit: %v, %+v", err, beyond.Nearest)
	}
	f.Positions[0] = Position{Range: rangeID(99)}
	if err := f.Fit(m); !errors.Is(err, ErrUnknownRange) {
		t.Errorf("unknown range: %v", err)
	}
	f = Frontier{Topic: topic, Positions: []Position{{Range: rangeID(1)}}} // the low child, for the whole keyspace
	if err := f.Fit(m); !errors.Is(err, ErrMalformed) {
		t.Errorf("slice beyond its range: %v", err)
	}
}

// TestHostileTokens: forged, oversized, compressed and foreign cursors are refused without an allocation beyond their own size.
func TestHostileTokens(t *testing.T) {
	inv.Covers(t, "INV-C7")
	f := Begin(topic, []Range{{ID: rangeID(0)}})
	good, err := f.Token()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Parse(good, storage.TopicUID{9}); !errors.Is(err, ErrMalformed) {
		t.Errorf("foreign topic: %v", err)
	}
	for i := range good {
		for _, c := range "AZ_" {
			bad := good[:i] + string(c) + good[i+1:]
			if bad == good {
				continue
			}
			if g, err := Parse(bad, topic); err == nil {
				t.Fatalf("byte %d as %c: taken as %+v", i, c, g)
			}
		}
	}
	for name, token := range map[string]string{
		"empty":     "",
		"oversized": strings.Repeat("A", storage.MaxCursorBytes+1),
		"largest":   strings.Repeat("A", storage.MaxCursorBytes),
		"gzip":      base64.RawURLEncoding.EncodeToString([]byte("\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff")),
		"text":      "earliest",
		"percent":   "%00%ff",
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := Parse(token, topic)
		runtime.ReadMemStats(&after)
		if err == nil {
			t.Errorf("%s was taken", name)
		}
		if grew := after.TotalAlloc - before.TotalAlloc; grew > 4*storage.MaxCursorBytes {
			t.Errorf("%s: %d bytes allocated", name, grew)
		}
	}
}

// TestFrozenToken holds today's reader to a token of the first release.
func TestFrozenToken(t *testing.T) {
	f := Frontier{Topic: topic, Rotation: 1, Positions: []Position{
		{Range: rangeID(3), Slice: storage.Slice{Prefix: 0, Depth: 1}, Offset: 17},
		{Range: storage.RangeID{Topic: topic, Timeline: 5, Seq: 4}, Slice: storage.Slice{Prefix: 1, Depth: 1}, Offset: 1 << 40},
	}}
	const frozen = "AQoQBwAAAAAAAAAAAAAAAAAAABIGEAMgASgREg8IBRAEGAEgASiAgICAgCAYAXYJzhU"
	got, err := f.Token()
	if err != nil || got != frozen {
		t.Fatalf("token is %s, %v", got, err)
	}
	back, err := Parse(frozen, topic)
	if err != nil || fmt.Sprint(back) != fmt.Sprint(f) {
		t.Fatalf("frozen token reads as %+v, %v", back, err)
	}
}

func FuzzParse(f *testing.F) {
	begin := Begin(topic, []Range{{ID: rangeID(0)}})
	if token, err := begin.Token(); err == nil {
		f.Add(token)
	}
	f.Add("")
	f.Add("AAAA")
	f.Fuzz(func(t *testing.T, token string) {
		got, err := Parse(token, topic)
		if err != nil {
			return
		}
		again, err := got.Token()
		if err != nil {
			t.Fatal(err)
		}
		if back, err := Parse(again, topic); err != nil || fmt.Sprint(back) != fmt.Sprint(got) {
			t.Fatalf("%q reads back as %+v, %v", token, back, err)
		}
	})
}
