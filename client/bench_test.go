package client

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"sync/atomic"
	"testing"

	"google.golang.org/protobuf/proto"

	malachiv1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/storage/batch"
)

// instant is a network and a server that take everything at once.
type instant struct {
	requests, records atomic.Int64
}

func (i *instant) RoundTrip(r *http.Request) (*http.Response, error) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	var req malachiv1.ProduceRequest
	if err := proto.Unmarshal(body, &req); err != nil {
		return nil, err
	}
	resp := &malachiv1.ProduceResponse{}
	for n, b := range req.Batches {
		h, err := batch.ParseHeader(b)
		if err != nil {
			return nil, err
		}
		i.requests.Add(1)
		i.records.Add(int64(h.Records))
		resp.Results = append(resp.Results, &malachiv1.ProduceResult{RecordCount: int32(h.Records), Index: int32(n)})
	}
	out, err := proto.Marshal(resp)
	if err != nil {
		return nil, err
	}
	return &http.Response{StatusCode: http.StatusOK, ProtoMajor: 1, ProtoMinor: 1, Request: r, ContentLength: int64(len(out)),
		Header: http.Header{"Content-Type": {"application/proto"}}, Body: io.NopCloser(bytes.NewReader(out))}, nil
}

// Allocations are per batch, not per record: with 2,000 records in a batch some hundreds of allocations for the call vanish.
func TestProduceAllocatesPerBatch(t *testing.T) {
	net := &instant{}
	c := open(t, "http://instant", func(cfg *Config) { cfg.HTTPClient, cfg.Lanes = &http.Client{Transport: net}, 1 })
	r := Record{Key: []byte("k"), Value: make([]byte, 100)}
	const n = 2000
	var failed atomic.Int64
	then := func(r Result) {
		if r.Err != nil {
			failed.Add(1)
		}
	}
	round := func() {
		for range n {
			if err := c.ProduceAsync(t.Context(), "t", r, then); err != nil {
				t.Fatal(err)
			}
		}
		if err := c.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	round()
	var before, after runtime.MemStats
	requests := net.requests.Load()
	runtime.ReadMemStats(&before)
	const rounds = 50
	for range rounds {
		round()
	}
	runtime.ReadMemStats(&after)
	calls := float64(net.requests.Load() - requests)
	allocs := float64(after.Mallocs-before.Mallocs) / calls
	t.Logf("%.0f records in %.0f batches, %.0f allocations a batch", float64(rounds*n), calls, allocs)
	if failed.Load() > 0 || net.records.Load() != (rounds+1)*n {
		t.Errorf("%d failed, %d arrived", failed.Load(), net.records.Load())
	}
	if perBatch := float64(rounds*n) / calls; allocs > 200+perBatch/10 {
		t.Errorf("%.0f allocations for a batch of %.0f records", allocs, perBatch)
	}
}

func BenchmarkProduceAsync(b *testing.B) {
	run := func(name, url string, max int, hc *http.Client, compression string) {
		b.Run(name, func(b *testing.B) {
			c := open(b, url, func(cfg *Config) {
				cfg.HTTPClient, cfg.MaxBatchRecords, cfg.Compression = hc, max, compression
				cfg.MaxBufferedRecords = 50_000
			})
			keys := make([][]byte, 1000)
			for i := range keys {
				keys[i] = fmt.Appendf(nil, "key-%d", i)
			}
			value := bytes.Repeat([]byte("abcdefgh"), 31)
			b.SetBytes(256)
			b.ReportAllocs()
			b.ResetTimer()
			for i := range b.N {
				if err := c.ProduceAsync(b.Context(), "t", Record{Key: keys[i%1000], Value: value}, func(Result) {}); err != nil {
					b.Fatal(err)
				}
			}
			if err := c.Flush(b.Context()); err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "records/s")
		})
	}
	for _, max := range []int{10, 100, 512} {
		for _, compression := range []string{CompressionNone, CompressionS2} {
			run(fmt.Sprintf("instant/%d/%s", max, compression), "http://instant", max, &http.Client{Transport: &instant{}}, compression)
			f := newFake(0)
			f.forget = true
			run(fmt.Sprintf("loopback/%d/%s", max, compression), f.serve(b), max, nil, compression)
		}
	}
}

// One record at a time: what the SDK, HTTP and the handler add to a barrier.
func BenchmarkProduceOne(b *testing.B) {
	f := newFake(0)
	f.forget = true
	c := open(b, f.serve(b), nil)
	r := Record{Key: []byte("k"), Value: make([]byte, 256)}
	b.ReportAllocs()
	for b.Loop() {
		if err := c.Produce(b.Context(), "t", r); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkConsume(b *testing.B) {
	f := newFake(0)
	url := f.serve(b)
	w := open(b, url, func(cfg *Config) { cfg.MaxBatchRecords = 1000; cfg.Compression = CompressionNone })
	records := make([]Record, 100_000)
	for i := range records {
		records[i] = Record{Key: fmt.Append(nil, i%100), Value: make([]byte, 1000)}
	}
	if err := w.Produce(b.Context(), "t", records...); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(100_000 * 1000)
	b.ReportAllocs()
	for b.Loop() {
		con, err := w.Consume("t", ConsumeConfig{ExitAtEnd: true, MaxBytes: 4 << 20})
		if err != nil {
			b.Fatal(err)
		}
		n := 0
		for _, err := range con.Records(b.Context()) {
			if err != nil {
				b.Fatal(err)
			}
			n++
		}
		if n != len(records) {
			b.Fatalf("%d records", n)
		}
	}
}
