package client

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	malachiv1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/storage"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// open makes a client that retries fast, and closes it with the test.
func open(t testing.TB, url string, edit func(*Config)) *Client {
	t.Helper()
	cfg := Config{Servers: []string{url}, MinBackoff: time.Millisecond, MaxBackoff: 5 * time.Millisecond}
	if edit != nil {
		edit(&cfg)
	}
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := c.Close(ctx); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return c
}

// readAll reads the topic to its end and gives, per key, the values in order.
func readAll(t testing.TB, c *Client) map[string][]string {
	t.Helper()
	con, err := c.Consume("t", ConsumeConfig{ExitAtEnd: true})
	if err != nil {
		t.Fatal(err)
	}
	out := map[string][]string{}
	for r, err := range con.Records(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		out[string(r.Key)] = append(out[string(r.Key)], string(r.Value))
	}
	return out
}

// Faults of every retryable kind, several producers at once, a topic with more ranges than lanes and one with fewer: each key's
// records are there once and in order.
func TestOrderPerKeyAcrossRetries(t *testing.T) {
	for _, depth := range []uint8{0, 3, 7} {
		for _, compression := range []string{CompressionNone, CompressionS2, CompressionZstd} {
			t.Run(fmt.Sprintf("%d ranges, %s", 1<<depth, compression), func(t *testing.T) {
				seed := rand.Uint64()
				t.Logf("seed %d", seed)
				rng := rand.New(rand.NewPCG(seed, 0))
				f := newFake(depth)
				f.faults = func(int) fault { // called under the fake's lock
					return []fault{fine, fine, fine, refuse, refuseInResult, loseReply, cutReply}[rng.IntN(7)]
				}
				c := open(t, f.serve(t), func(cfg *Config) { cfg.Compression, cfg.MaxBatchRecords = compression, 50 })
				const keys, each = 20, 100
				var failed atomic.Int64
				var group sync.WaitGroup
				for k := range keys {
					group.Go(func() {
						for i := range each {
							r := Record{Key: fmt.Appendf(nil, "key-%d", k), Value: fmt.Appendf(nil, "%d", i)}
							then := func(r Result) {
								if r.Err != nil || r.AppendTime.IsZero() {
									failed.Add(1)
								}
							}
							if err := c.ProduceAsync(t.Context(), "t", r, then); err != nil {
								t.Error(err)
							}
						}
					})
				}
				group.Wait()
				if err := c.Flush(t.Context()); err != nil {
					t.Fatal(err)
				}
				if failed.Load() > 0 {
					t.Fatalf("%d records failed", failed.Load())
				}
				want := map[string][]string{}
				for k := range keys {
					for i := range each {
						key := fmt.Sprintf("key-%d", k)
						want[key] = append(want[key], fmt.Sprint(i))
					}
				}
				if got := readAll(t, c); !maps.EqualFunc(want, got, slices.Equal) {
					t.Errorf("got %v", got)
				}
			})
		}
	}
}

// A batch of keyed records never straddles ranges when the lanes are cut by the topic's routes.
func TestLanesAlignWithRanges(t *testing.T) {
	f := newFake(4)
	c := open(t, f.serve(t), func(cfg *Config) { cfg.Lanes = 1 })
	var records []Record
	for i := range 500 {
		records = append(records, Record{Key: fmt.Append(nil, i)}, Record{Value: []byte("keyless")})
	}
	if err := c.Produce(t.Context(), "t", records...); err != nil {
		t.Fatal(err)
	}
	sent, stored := len(f.sent()), 0
	for _, r := range f.ranges {
		stored += len(r.batches)
	}
	if stored != sent {
		t.Errorf("%d batches were sent and cut into %d", sent, stored)
	}
	if sent > 17 {
		t.Errorf("%d batches for 16 ranges and the keyless records", sent)
	}
}

func TestProduceKeepsEveryPartOfARecord(t *testing.T) {
	f := newFake(0)
	c := open(t, f.serve(t), nil)
	at := time.Unix(1_700_000_000, 123_456_789)
	want := []Record{
		{Key: []byte("k"), Value: []byte("v"), Headers: []Header{{"a", []byte("1")}, {"a", nil}, {"größe", []byte{0xff}}}, Time: at},
		{Key: []byte{}, Value: []byte("empty key"), Time: at.Add(-time.Hour)},
		{Value: []byte("no key"), Time: time.Unix(0, -5)},
		{Key: []byte("now")},
	}
	before := time.Now()
	for i, r := range want {
		if err := c.Produce(t.Context(), "t", r); err != nil {
			t.Fatalf("record %d: %v", i, err)
		}
	}
	con, err := c.Consume("t", ConsumeConfig{ExitAtEnd: true})
	if err != nil {
		t.Fatal(err)
	}
	i := 0
	for got, err := range con.Records(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		w := want[i]
		if w.Time.IsZero() {
			if got.Time.Before(before) || got.Time.After(time.Now()) {
				t.Errorf("record %d: time %s, not now", i, got.Time)
			}
		} else if !got.Time.Equal(w.Time) {
			t.Errorf("record %d: time %s, want %s", i, got.Time, w.Time)
		}
		if (got.Key == nil) != (w.Key == nil) || string(got.Key) != string(w.Key) || string(got.Value) != string(w.Value) ||
			got.AppendTime.Before(before.Add(-time.Second)) || fmt.Sprint(got.Headers) != fmt.Sprint(append([]Header(nil), w.Headers...)) {
			t.Errorf("record %d: %+v, want %+v", i, got, w)
		}
		i++
	}
	if i != len(want) {
		t.Errorf("%d records, want %d", i, len(want))
	}
}

// waitFor receives n times.
func waitFor(t testing.TB, ch <-chan struct{}, n int) {
	t.Helper()
	for range n {
		select {
		case <-ch:
		case <-t.Context().Done():
			t.Fatal("test ended while waiting")
		case <-time.After(20 * time.Second):
			t.Fatal("nothing came in 20 s")
		}
	}
}

func TestBackPressureBlocksAndReleases(t *testing.T) {
	f := newFake(0)
	f.hold = make(chan struct{})
	c := open(t, f.serve(t), func(cfg *Config) { cfg.MaxBufferedRecords, cfg.Lanes = 10, 1 })
	var done atomic.Int64
	for range 10 {
		if err := c.ProduceAsync(t.Context(), "t", Record{Key: []byte("k")}, func(Result) { done.Add(1) }); err != nil {
			t.Fatal(err)
		}
	}
	waitFor(t, f.arrived, 1)
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := c.ProduceAsync(short, "t", Record{Key: []byte("k")}, nil); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ErrOutcomeUnknown) {
		t.Fatalf("the 11th record of 10: %v", err)
	}
	blocked := make(chan error, 1)
	go func() { blocked <- c.Produce(t.Context(), "t", make([]Record, 25)...) }() // more than fits at once
	select {
	case err := <-blocked:
		t.Fatalf("Produce did not wait: %v", err)
	case <-short.Done():
	}
	close(f.hold)
	if err := <-blocked; err != nil {
		t.Fatal(err)
	}
	if err := c.Flush(t.Context()); err != nil || done.Load() != 10 {
		t.Fatalf("%d results, %v", done.Load(), err)
	}
	if !c.records.TryAcquire(10) || !c.bytes.TryAcquire(int64(c.cfg.MaxBufferedBytes)) {
		t.Error("the buffer was not given back whole")
	}
}

// A function that produces anew when the buffer is full must not wait for its own record.
func TestResultMayProduce(t *testing.T) {
	f := newFake(0)
	c := open(t, f.serve(t), func(cfg *Config) { cfg.MaxBufferedRecords = 1 })
	again := make(chan error, 1)
	err := c.ProduceAsync(t.Context(), "t", Record{Key: []byte("k")}, func(r Result) {
		again <- errors.Join(r.Err, c.ProduceAsync(t.Context(), "t", Record{Key: []byte("k")}, nil))
	})
	if err := errors.Join(err, <-again, c.Flush(t.Context())); err != nil {
		t.Fatal(err)
	}
}

func TestCloseFlushesAndRefuses(t *testing.T) {
	f := newFake(2)
	c := open(t, f.serve(t), func(cfg *Config) { cfg.Linger = time.Hour })
	var good atomic.Int64
	for i := range 100 {
		err := c.ProduceAsync(t.Context(), "t", Record{Key: fmt.Append(nil, i)}, func(r Result) {
			if r.Err == nil {
				good.Add(1)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if good.Load() != 100 {
		t.Errorf("%d of 100 records were written by Close", good.Load())
	}
	if got := f.sent(); len(got) != 4 {
		t.Errorf("lingering records went in %d batches, want one for each of 4 lanes", len(got))
	}
	if err := c.Produce(t.Context(), "t", Record{}); !errors.Is(err, ErrClosed) {
		t.Errorf("produce after Close: %v", err)
	}
	if err := c.Produce(t.Context(), "other", Record{}); !errors.Is(err, ErrClosed) {
		t.Errorf("produce to a new topic after Close: %v", err)
	}
	if err := c.Close(t.Context()); err != nil {
		t.Errorf("second Close: %v", err)
	}
}

func TestCloseGivesUp(t *testing.T) {
	f := newFake(0)
	f.hold = make(chan struct{})
	c := open(t, f.serve(t), func(cfg *Config) { cfg.MaxBatchRecords, cfg.Lanes = 1, 1 })
	results := make(chan Result, 2)
	for range 2 {
		if err := c.ProduceAsync(t.Context(), "t", Record{Key: []byte("k")}, func(r Result) { results <- r }); err != nil {
			t.Fatal(err)
		}
	}
	waitFor(t, f.arrived, 1)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.Close(ctx); !errors.Is(err, context.Canceled) {
		t.Fatalf("close: %v", err)
	}
	flying, waiting := <-results, <-results
	if !errors.Is(flying.Err, ErrClosed) || !errors.Is(flying.Err, ErrOutcomeUnknown) {
		t.Errorf("record in flight: %v", flying.Err)
	}
	if !errors.Is(waiting.Err, ErrClosed) || errors.Is(waiting.Err, ErrOutcomeUnknown) {
		t.Errorf("record that waited: %v", waiting.Err)
	}
}

func TestProduceContextEnds(t *testing.T) {
	f := newFake(0)
	f.hold = make(chan struct{})
	c := open(t, f.serve(t), nil)
	ctx, cancel := context.WithCancel(t.Context())
	out := make(chan error, 1)
	go func() { out <- c.Produce(ctx, "t", Record{Key: []byte("k")}) }()
	waitFor(t, f.arrived, 1)
	cancel()
	if err := <-out; !errors.Is(err, ErrOutcomeUnknown) || !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if err := c.Produce(ctx, "t", Record{}); !errors.Is(err, context.Canceled) || errors.Is(err, ErrOutcomeUnknown) {
		t.Errorf("with a context that has ended: %v", err)
	}
	close(f.hold)
}

func TestErrorsForGood(t *testing.T) {
	f := newFake(0)
	c := open(t, f.serve(t), func(cfg *Config) { cfg.DeliveryTimeout = 200 * time.Millisecond })
	one := func() error { return c.Produce(t.Context(), "t", Record{Key: []byte("k")}) }

	var e *Error
	err := c.Produce(t.Context(), "no-such-topic", Record{})
	if !errors.As(err, &e) || e.Reason != malachiv1.Reason_TOPIC_NOT_FOUND || !errors.Is(err, storage.ErrTopicNotFound) || e.OutcomeUnknown ||
		e.Metadata["topic"] != "t" {
		t.Errorf("unknown topic: %#v", err)
	}
	f.set(func() { f.faults = func(int) fault { return invalid } })
	if err := one(); !errors.Is(err, storage.ErrInvalid) || errors.Is(err, ErrOutcomeUnknown) {
		t.Errorf("invalid: %v", err)
	}
	err = c.Produce(t.Context(), "t", make([]Record, 3)...)
	var fs *Failures
	if !errors.As(err, &fs) || fs.Of != 3 || len(fs.Failed) != 3 || fs.Failed[2].Index != 2 || !errors.Is(err, storage.ErrInvalid) {
		t.Errorf("three invalid records: %v", err)
	}
	f.set(func() { f.faults = func(int) fault { return refuse } })
	if err := one(); !errors.Is(err, storage.ErrUnavailable) || errors.Is(err, ErrOutcomeUnknown) {
		t.Errorf("refused until the time was over: %v", err)
	}
	for _, what := range []fault{loseReply, cutReply, lieCount, noResult} {
		f.set(func() { f.faults = func(int) fault { return what } })
		if err := one(); !errors.Is(err, ErrOutcomeUnknown) || !errors.As(err, &e) {
			t.Errorf("fault %d: %v", what, err)
		}
	}
	// Once it may have been written, a later refusal does not make it certain.
	f.set(func() {
		first := f.calls
		f.faults = func(n int) fault {
			if n == first {
				return loseReply
			}
			return invalid
		}
	})
	if err := one(); !errors.Is(err, ErrOutcomeUnknown) || !errors.Is(err, storage.ErrInvalid) {
		t.Errorf("lost, then refused: %v", err)
	}
	f.set(func() { f.faults = nil })
	if err := one(); err != nil {
		t.Errorf("after all that: %v", err)
	}
}

func TestRequestTimeoutIsRetried(t *testing.T) {
	f := newFake(0)
	f.hold = make(chan struct{})
	c := open(t, f.serve(t), func(cfg *Config) { cfg.RequestTimeout = 30 * time.Millisecond })
	out := make(chan error, 1)
	go func() { out <- c.Produce(t.Context(), "t", Record{Key: []byte("k"), Value: []byte("v")}) }()
	waitFor(t, f.arrived, 3) // two timed out
	f.set(func() {
		close(f.hold)
		f.hold = nil
	})
	if err := <-out; err != nil {
		t.Fatal(err)
	}
	if got := readAll(t, c); len(got["k"]) != 1 {
		t.Errorf("stored %v", got)
	}
}

func TestDeadServerIsLeft(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	dead := "http://" + l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	f := newFake(0)
	c := open(t, f.serve(t), func(cfg *Config) { cfg.Servers = []string{dead, cfg.Servers[0]} })
	if err := c.Produce(t.Context(), "t", Record{Key: []byte("a")}, Record{Key: []byte("b")}, Record{Key: []byte("c")}); err != nil {
		t.Fatal(err)
	}
	alone := open(t, dead, func(cfg *Config) { cfg.DeliveryTimeout = 20 * time.Millisecond })
	if err := alone.Produce(t.Context(), "t", Record{}); err == nil || errors.Is(err, ErrOutcomeUnknown) {
		t.Errorf("nobody there: %v", err)
	}
}

func TestBatching(t *testing.T) {
	f := newFake(0)
	c := open(t, f.serve(t), func(cfg *Config) { cfg.Lanes, cfg.MaxBatchRecords, cfg.MaxBatchBytes = 1, 100, 64<<10 })
	records := make([]Record, 250)
	for i := range records {
		records[i].Key = []byte("k")
	}
	if err := c.Produce(t.Context(), "t", records...); err != nil {
		t.Fatal(err)
	}
	if got := f.sent(); !slices.Equal(got, []int{100, 100, 50}) {
		t.Errorf("250 records in batches of 100 went as %v", got)
	}
	for i := range records[:10] {
		records[i].Value = make([]byte, 20<<10)
	}
	if err := c.Produce(t.Context(), "t", records[:10]...); err != nil {
		t.Fatal(err)
	}
	if got := f.sent(); !slices.Equal(got, []int{3, 3, 3, 1}) {
		t.Errorf("10 records of 20 KiB in batches of 64 KiB went as %v", got)
	}
	if err := c.Produce(t.Context(), "t", Record{Key: []byte("k"), Value: make([]byte, storage.MaxRecordBytes-1)}); err != nil {
		t.Errorf("a record larger than MaxBatchBytes: %v", err)
	}
}

func TestLingerCollects(t *testing.T) {
	f := newFake(0)
	c := open(t, f.serve(t), func(cfg *Config) { cfg.Linger, cfg.Lanes, cfg.MaxBatchRecords = time.Hour, 1, 10 })
	var done sync.WaitGroup
	add := func() {
		done.Add(1)
		if err := c.ProduceAsync(t.Context(), "t", Record{Key: []byte("k")}, func(Result) { done.Done() }); err != nil {
			t.Fatal(err)
		}
	}
	for range 10 {
		add()
	}
	done.Wait() // full: it goes although the hour is not over
	for range 7 {
		add()
	}
	if err := c.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	done.Wait()
	if got := f.sent(); !slices.Equal(got, []int{10, 7}) {
		t.Errorf("batches %v, want 10 and 7", got)
	}
	c = open(t, f.serve(t), func(cfg *Config) { cfg.Linger = time.Millisecond })
	add()
	done.Wait() // the time ran out, nobody flushed
}

func TestRecordLimits(t *testing.T) {
	f := newFake(0)
	c := open(t, f.serve(t), nil)
	for name, r := range map[string]Record{
		"value":         {Value: make([]byte, storage.MaxRecordBytes+1)},
		"key":           {Key: make([]byte, storage.MaxKeyBytes+1)},
		"headers":       {Headers: make([]Header, storage.MaxHeaders+1)},
		"header key":    {Headers: []Header{{Key: strings.Repeat("h", storage.MaxHeaderKey+1)}}},
		"all together":  {Key: make([]byte, 10), Value: make([]byte, storage.MaxRecordBytes-10), Headers: []Header{{Key: "h"}}},
		"time too far":  {Time: time.Date(3000, 1, 1, 0, 0, 0, 0, time.UTC)},
		"time too long": {Time: time.Date(1, 1, 2, 0, 0, 0, 0, time.UTC)},
		"no UTF-8":      {Headers: []Header{{Key: "\xff"}}},
	} {
		want := storage.ErrTooLarge
		if strings.HasPrefix(name, "time") || name == "no UTF-8" {
			want = storage.ErrInvalid
		}
		if err := c.Produce(t.Context(), "t", Record{Value: []byte("good")}, r); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", name, err, want)
		}
		if err := c.ProduceAsync(t.Context(), "t", r, func(Result) { t.Errorf("%s: result of a refused record", name) }); !errors.Is(err, want) {
			t.Errorf("%s: async: %v, want %v", name, err, want)
		}
	}
	if f.calls != 0 {
		t.Errorf("%d calls were made for calls with a bad record", f.calls)
	}
}

func TestConfigFaultsAreToldTogether(t *testing.T) {
	err := Config{Servers: []string{"ftp://x", "http://"}, Lanes: -1, MaxBatchRecords: 1 << 20, MaxBatchBytes: 1, Compression: "gzip",
		MaxBufferedBytes: 5, MaxBufferedRecords: -1, Linger: -1, RequestTimeout: -1, DeliveryTimeout: -1, MinBackoff: time.Hour,
		MaxBackoff: time.Second}.Validate()
	if !errors.Is(err, storage.ErrInvalid) {
		t.Fatal(err)
	}
	for _, part := range []string{`"ftp://x"`, `"http://"`, "Lanes", "MaxBatchRecords", "MaxBatchBytes", "Compression", "MaxBufferedBytes",
		"MaxBufferedRecords", "Linger", "RequestTimeout", "DeliveryTimeout", "MinBackoff"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("not told: %s in\n%v", part, err)
		}
	}
	if _, err := New(Config{}); !errors.Is(err, storage.ErrInvalid) {
		t.Errorf("no servers: %v", err)
	}
	if err := (Config{Servers: []string{"http://127.0.0.1:4040"}}).Validate(); err != nil {
		t.Errorf("defaults: %v", err)
	}
}
