package bench

import (
	"bytes"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/malachilog/malachi/e2e/inv"
)

type written struct {
	key, value []byte
	at         time.Time
}

var testFill = sync.OnceValue(func() []byte { return filler(false) })

// write makes records of two producers for one topic, in turn.
func write(n int) ([]*stream, []written) {
	c := Config{Server: "x", RecordBytes: MinRecordBytes + 9, Producers: 2, Keys: 3}.withDefaults()
	fill := testFill()
	streams := []*stream{newStream(0, c, fill), newStream(1, c, fill)}
	var out []written
	for i := range n {
		at := time.Unix(0, int64(1000+i))
		k, v := streams[i%2].next(0, at)
		out = append(out, written{slices.Clone(k), slices.Clone(v), at})
	}
	return streams, out
}

func check(streams []*stream, records []written) error {
	v := newVerifier(0, streams)
	for _, r := range records {
		if err := v.record(r.key, r.value, r.at); err != nil {
			return err
		}
	}
	return v.finish()
}

func TestVerifierTakesWhatWasWritten(t *testing.T) {
	streams, records := write(60)
	if err := check(streams, records); err != nil {
		t.Error(err)
	}
	// Ranges may interleave: only a key's own order counts.
	slices.SortStableFunc(records, func(a, b written) int { return bytes.Compare(a.key, b.key) })
	if err := check(streams, records); err != nil {
		t.Error(err)
	}
}

// The negative control of the checker: whatever single thing is wrong, it says so.
func TestVerifierSeesEveryFault(t *testing.T) {
	inv.Covers(t, "INV-H1")
	const n = 12
	seen := func(name string, spoil func([]written) []written) {
		t.Helper()
		streams, records := write(n)
		if check(streams, spoil(records)) == nil {
			t.Errorf("%s: not seen", name)
		}
	}
	for i := range n {
		seen("dropped record", func(r []written) []written { return slices.Delete(r, i, i+1) })
		seen("doubled record", func(r []written) []written { return slices.Insert(r, i, r[i]) })
		seen("another time", func(r []written) []written { r[i].at = r[i].at.Add(1); return r })
		seen("another key", func(r []written) []written { r[i].key = r[(i+1)%n].key; return r })
		if i+6 < n { // two producers of three keys: the same key comes every sixth time
			seen("changed order", func(r []written) []written { r[i], r[i+6] = r[i+6], r[i]; return r })
		}
		_, records := write(n)
		for b := range records[i].key {
			seen("flipped byte in a key", func(r []written) []written { r[i].key[b] ^= 1; return r })
		}
		for b := range records[i].value {
			seen("flipped byte in a value", func(r []written) []written { r[i].value[b] ^= 1; return r })
		}
		seen("short value", func(r []written) []written { r[i].value = r[i].value[:stampBytes-1]; return r })
	}
	seen("nothing", func([]written) []written { return nil })
	streams, records := write(n)
	_, more := write(n + 1)
	if check(streams, append(records, more[n])) == nil {
		t.Error("a record that was never acknowledged: not seen")
	}
}

func TestParseMetricsSumsLabels(t *testing.T) {
	got, err := parseMetrics(strings.NewReader("# HELP a b\n# TYPE a counter\na{x=\"1 }\"} 2\na{x=\"2\"} 3.5\nb 1e3\n\n"))
	if err != nil || got["a"] != 5.5 || got["b"] != 1000 || len(got) != 2 {
		t.Errorf("got %v, %v", got, err)
	}
	if _, err := parseMetrics(strings.NewReader("a b c\n")); err == nil {
		t.Error("a line without a number was taken")
	}
}

func TestConfigTellsEveryFault(t *testing.T) {
	err := Config{RecordBytes: 3, Batch: 10, InFlight: 1, Ranges: 3, Rate: -1, Compression: "rar"}.Validate()
	if err == nil {
		t.Fatal("taken")
	}
	for _, want := range []string{"no server", "record-bytes", "in-flight", "power of two", "rate", "rar"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not tell %q", err, want)
		}
	}
	if err := (Config{Server: "http://x"}).Validate(); err != nil {
		t.Errorf("defaults: %v", err)
	}
}

// In an open loop a latency begins when the record was due, however late it is sent.
func TestPaceGivesTheIntendedStart(t *testing.T) {
	b := &Bench{cfg: Config{Producers: 2, Rate: 100, Duration: time.Second}.withDefaults()}
	began := time.Now().Add(-500 * time.Millisecond)
	p := b.paces(began)
	for i := range 10 {
		at, ok := p[1].wait(t.Context(), 1)
		if want := began.Add(time.Duration(i)*20*time.Millisecond + 10*time.Millisecond); !ok || !at.Equal(want) {
			t.Fatalf("record %d of the second producer is due at %v, want %v", i, at.Sub(began), want.Sub(began))
		}
	}
	b.cfg.Records = 5
	p = b.paces(began)
	n := 0
	for i := 0; i < 20; i++ {
		if _, ok := p[i%2].wait(t.Context(), 1); ok {
			n++
		}
	}
	if n != 5 {
		t.Errorf("%d records were due, want 5", n)
	}
}
