package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"iter"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"

	"github.com/malachilog/malachi/client"
	"github.com/malachilog/malachi/client/clienttest"
	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/gen/go/malachi/v1/malachiv1connect"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, goleak.IgnoreCurrent()) }

func bench(t *testing.T, c Config, change func(*Bench)) *Report {
	t.Helper()
	b, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(b)
	}
	r, err := b.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestRunsVerifyWhatTheyWrote(t *testing.T) {
	broker := clienttest.Start(t)
	for name, c := range map[string]Config{
		"one at a time":     {Records: 50, InFlight: 1},
		"pipelined":         {Records: 5000, RecordBytes: 200, Producers: 2, Ranges: 4, Compression: "s2"},
		"window":            {Records: 500, InFlight: 20, Topics: 3},
		"batches, consumer": {Records: 1000, Batch: 20, Producers: 3, Ranges: 2, Consumers: 1},
		"open loop":         {Records: 100, Rate: 2000, Consumers: 2},
	} {
		t.Run(name, func(t *testing.T) {
			c.Server, c.Ops, c.ReadPass = broker.URL(), broker.OpsURL(), true
			r := bench(t, c, nil)
			if !r.OK() {
				t.Fatalf("failed: %v", r.Failures)
			}
			warm := int64(max(c.Topics, 1))
			if r.Written.Records != c.Records || r.Verified != c.Records+warm || r.Read.Records != r.Verified {
				t.Errorf("written %d, verified %d, read %d; want %d and %d for the warm-up", r.Written.Records, r.Verified, r.Read.Records, c.Records, warm)
			}
			if n := r.Latency.Count; n != c.Records/int64(max(c.Batch, 1)) {
				t.Errorf("%d latencies", n)
			}
			if (r.EndToEnd != nil) != (c.Consumers > 0) {
				t.Errorf("end to end: %v", r.EndToEnd)
			}
			if r.Usage.Batches == 0 || r.Usage.AllocationsPerBatch == 0 {
				t.Errorf("usage %+v: the broker's counters were not found", r.Usage)
			}
			figures(t, r, true)
		})
	}
}

// figures holds that a report has rates, or, if it is of a failed run, nothing that could be taken for one.
func figures(t *testing.T, r *Report, want bool) {
	t.Helper()
	var table bytes.Buffer
	if err := r.Table(&table); err != nil {
		t.Fatal(err)
	}
	raw, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{table.String(), string(raw)} {
		if got := strings.Contains(text, "records/s, ") || strings.Contains(text, "recordsPerSecond") || strings.Contains(text, "p50"); got != want {
			t.Errorf("figures shown: %t, want %t:\n%s", got, want, text)
		}
		if strings.Contains(text, "FAILED") == want {
			t.Errorf("outcome is wrong:\n%s", text)
		}
	}
}

// liar spoils what a reader yields.
type liar struct {
	reader
	spoil func(*client.Record) (keep bool)
}

func (l liar) Records(ctx context.Context) iter.Seq2[client.Record, error] {
	return func(yield func(client.Record, error) bool) {
		for r, err := range l.reader.Records(ctx) {
			if err == nil && !l.spoil(&r) {
				continue
			}
			if !yield(r, err) {
				return
			}
		}
	}
}

// nth spoils one record and passes all others.
func nth(n int64, spoil func(*client.Record) bool) func(*client.Record) bool {
	var seen atomic.Int64
	return func(r *client.Record) bool { return seen.Add(1) != n || spoil(r) }
}

func drop(*client.Record) bool { return false }

func flip(r *client.Record) bool {
	r.Value = slices.Clone(r.Value)
	r.Value[len(r.Value)-1] ^= 0x10
	return true
}

// The negative control of whole runs: with one byte flipped, or one record dropped, in what is read, the run fails, and no rate is shown.
func TestSpoiltReadIsNoMeasurement(t *testing.T) {
	inv.Covers(t, "INV-H1", "INV-H3")
	broker := clienttest.Start(t)
	const records = 300
	for name, spoil := range map[string]func() func(*client.Record) bool{
		"flipped":            func() func(*client.Record) bool { return nth(100, flip) },
		"dropped":            func() func(*client.Record) bool { return nth(100, drop) },
		"dropped the last":   func() func(*client.Record) bool { return nth(records+1, drop) }, // with the warm-up's
		"dropped everything": func() func(*client.Record) bool { return drop },
	} {
		for _, consumers := range []int{0, 1} {
			t.Run(name, func(t *testing.T) {
				r := bench(t, Config{Server: broker.URL(), Records: records, Batch: 10, Consumers: consumers}, func(b *Bench) {
					open, spoil := b.open, spoil()
					b.open = func(topic string, c client.ConsumeConfig) (reader, error) {
						r, err := open(topic, c)
						return liar{r, spoil}, err
					}
				})
				if r.OK() || len(r.Failures) == 0 {
					t.Errorf("report %+v, want a failure", r)
				}
				figures(t, r, false)
			})
		}
	}
}

// A call that failed makes the run a failure, even though everything acknowledged can be read.
func TestFailedCallIsNoMeasurement(t *testing.T) {
	inv.Covers(t, "INV-H3")
	broker := clienttest.Start(t)
	to, err := url.Parse(broker.URL())
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]Config{
		"one at a time": {InFlight: 1}, "pipelined": {Records: 1000, InFlight: 1000}, "batches": {Batch: 10, Producers: 2},
	} {
		t.Run(name, func(t *testing.T) {
			var calls atomic.Int64
			proxy := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(to) }}
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == malachiv1connect.ProduceServiceProduceProcedure && calls.Add(1) == 3 {
					w.Header().Set("Content-Type", "application/json")
					w.WriteHeader(http.StatusForbidden)
					_, _ = w.Write([]byte(`{"code":"permission_denied","message":"not you"}`))
					return
				}
				proxy.ServeHTTP(w, r)
			}))
			defer s.Close()
			defer http.DefaultTransport.(*http.Transport).CloseIdleConnections()
			c.Server = s.URL
			r := bench(t, c, nil)
			if r.OK() || !strings.Contains(strings.Join(r.Failures, " "), "not you") {
				t.Errorf("outcome %s, failures %v; want the refusal", r.Outcome, r.Failures)
			}
			figures(t, r, false)
		})
	}
}

func TestSuiteRowsSayWhatWasMet(t *testing.T) {
	r := &SuiteReport{Rows: []Row{
		row("a", 90, "MB/s", 100, 0.6, false), row("b", 90, "us", 30, 2, true), {Name: "c", Failure: "FAILED: broken"},
	}}
	if !r.Rows[0].Met || r.Rows[1].Met || r.OK() {
		t.Errorf("rows %+v, ok %t", r.Rows, r.OK())
	}
	var out bytes.Buffer
	if err := r.Table(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"met", "MISSED", "FAILED: broken", ">= 0.60", "<= 2.00"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("table lacks %q:\n%s", want, out.String())
		}
	}
}
