package bench

import (
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

const slowest = 5 * time.Minute

// recorder collects latencies, in microseconds to three digits. Safe for concurrent use.
type recorder struct {
	mu sync.Mutex
	h  *hdrhistogram.Histogram
}

func newRecorder() *recorder { return &recorder{h: hdrhistogram.New(1, slowest.Microseconds(), 3)} }

func (r *recorder) record(d time.Duration) {
	us := min(max(d.Microseconds(), 1), slowest.Microseconds())
	r.mu.Lock()
	defer r.mu.Unlock()
	_ = r.h.RecordValue(us) // it is within the bounds
}

// Latency sums up, in microseconds.
type Latency struct {
	Count int64   `json:"count"`
	Mean  float64 `json:"meanUs"`
	P50   int64   `json:"p50Us"`
	P90   int64   `json:"p90Us"`
	P99   int64   `json:"p99Us"`
	P999  int64   `json:"p999Us"`
	Max   int64   `json:"maxUs"`
}

// summary merges recorders that nobody writes to any more.
func summary(of ...*recorder) *Latency {
	h := hdrhistogram.New(1, slowest.Microseconds(), 3)
	for _, r := range of {
		h.Merge(r.h)
	}
	if h.TotalCount() == 0 {
		return nil
	}
	return &Latency{Count: h.TotalCount(), Mean: h.Mean(), P50: h.ValueAtQuantile(50), P90: h.ValueAtQuantile(90), P99: h.ValueAtQuantile(99),
		P999: h.ValueAtQuantile(99.9), Max: h.Max()}
}
