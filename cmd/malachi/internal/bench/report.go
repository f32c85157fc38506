package bench

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/malachilog/malachi/cmd/malachi/internal/floor"
)

// Report is what a run gave. If Failures is not empty, it holds no rate and no latency.
type Report struct {
	Config   Config    `json:"config"`
	Began    time.Time `json:"began"`
	Outcome  string    `json:"outcome"` // "ok" or "FAILED"
	Failures []string  `json:"failures,omitempty"`
	// Verified is the number of records that were acknowledged and read back, warm-up included.
	Verified int64 `json:"verified,omitempty"`
	// Written is what the producers wrote, from the first record's start to the last acknowledgement.
	Written *Rate    `json:"written,omitempty"`
	Latency *Latency `json:"latency,omitempty"`
	// EndToEnd is from a record's intended start to a consumer's hand, for consumers that read along.
	EndToEnd *Latency `json:"endToEnd,omitempty"`
	Read     *Rate    `json:"read,omitempty"`
	// Refused is how often explicit batches were refused for back-pressure and sent again.
	Refused int64        `json:"refused,omitempty"`
	Usage   *Usage       `json:"usage,omitempty"`
	Floor   *floor.Floor `json:"floor,omitempty"`
}

// Rate is an amount and the time it took. Megabytes are 10^6 bytes of keys and values.
type Rate struct {
	Records          int64   `json:"records"`
	Bytes            int64   `json:"bytes"`
	Seconds          float64 `json:"seconds"`
	RecordsPerSecond float64 `json:"recordsPerSecond"`
	MBps             float64 `json:"MBps"`
}

func rate(t tally, took time.Duration) *Rate {
	s := took.Seconds()
	return &Rate{Records: t.records, Bytes: t.bytes, Seconds: s, RecordsPerSecond: float64(t.records) / s, MBps: float64(t.bytes) / s / 1e6}
}

// Usage is what broker and load generator used while the producers wrote.
type Usage struct {
	ClientCPUSeconds float64 `json:"clientCPUSeconds"`
	ServerCPUSeconds float64 `json:"serverCPUSeconds,omitempty"`
	// GroupsPerSecond are barriers for records: those that prepare journal files are not in it.
	GroupsPerSecond float64 `json:"groupsPerSecond,omitempty"`
	Batches         int64   `json:"batches,omitempty"`
	// AllocationsPerBatch and AllocatedPerBatch (bytes) are the broker's, for everything it does.
	AllocationsPerBatch float64 `json:"allocationsPerBatch,omitempty"`
	AllocatedPerBatch   float64 `json:"allocatedPerBatch,omitempty"`
}

func (r *Report) fail(err error) {
	r.Outcome, r.Failures = "FAILED", strings.Split(err.Error(), "\n")
	r.Verified, r.Written, r.Latency, r.EndToEnd, r.Read, r.Usage = 0, nil, nil, nil, nil, nil
}

// OK reports whether nothing failed.
func (r *Report) OK() bool { return r.Outcome == "ok" && len(r.Failures) == 0 }

func (r *Report) written(t tally, took time.Duration, b *Bench) {
	r.Outcome = "ok"
	r.Written = rate(t, took)
	r.Latency = summary(b.recorders...)
	r.Refused = b.refused.Load()
}

func (r *Report) used(before, after counters, took time.Duration) {
	u := &Usage{ClientCPUSeconds: after.clientCPU - before.clientCPU}
	if after.server != nil {
		d := func(name string) float64 { return after.server[name] - before.server[name] }
		u.ServerCPUSeconds = d(metricCPU)
		u.GroupsPerSecond = d(metricGroups) / took.Seconds()
		if n := d(metricBatches); n > 0 {
			u.Batches = int64(n)
			u.AllocationsPerBatch, u.AllocatedPerBatch = d(metricMallocs)/n, d(metricAllocated)/n
		}
	}
	r.Usage = u
}

// Table writes the report for people.
func (r *Report) Table(to io.Writer) error {
	w := tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)
	line := func(name, format string, args ...any) { fmt.Fprintf(w, "%s\t%s\n", name, fmt.Sprintf(format, args...)) }
	if !r.OK() {
		line("outcome", "FAILED: this run is no measurement")
		for _, f := range r.Failures {
			line("", "%s", f)
		}
	} else {
		r.figures(line)
	}
	if f := r.Floor; f != nil {
		line("floor: barrier", "%s p50 for 4 KiB (direct: %t)", f.Barrier.Round(time.Microsecond), f.Direct)
		line("floor: round trip", "%s p50 for 1 KiB", f.RoundTrip.Round(time.Microsecond))
		line("floor: disk", "%.0f MB/s in direct 1 MiB writes", f.DirectMBps)
		line("floor: loopback", "%.0f MB/s", f.LoopbackMBps)
		if r.OK() && r.Latency != nil && f.Barrier > 0 {
			line("p50 / floor", "%.2f of barrier + round trip", float64(r.Latency.P50)*1e3/float64(f.Barrier+f.RoundTrip))
		}
	}
	return w.Flush()
}

func (r *Report) figures(line func(name, format string, args ...any)) {
	c := r.Config
	how := "batched by the SDK"
	if c.Batch > 0 {
		how = fmt.Sprintf("batches of %d", c.Batch)
	} else if c.InFlight > 0 {
		how += fmt.Sprintf(", %d in flight", c.InFlight)
	}
	loop := "closed loop"
	if c.Rate > 0 {
		loop = fmt.Sprintf("open loop, %.0f records/s asked", c.Rate)
	}
	line("load", "%d B records, %s, %d producers, %d topics of %d ranges, %s, compression %s", c.RecordBytes, how, c.Producers, c.Topics, c.Ranges,
		loop, c.Compression)
	line("written", "%d records in %.2f s: %.0f records/s, %.1f MB/s", r.Written.Records, r.Written.Seconds, r.Written.RecordsPerSecond, r.Written.MBps)
	row := func(name string, l *Latency) {
		if l != nil {
			line(name, "p50 %d us, p90 %d, p99 %d, p99.9 %d, max %d", l.P50, l.P90, l.P99, l.P999, l.Max)
		}
	}
	row("latency", r.Latency)
	row("end to end", r.EndToEnd)
	line("verified", "%d records: count, content, order per key", r.Verified)
	if r.Read != nil {
		line("read", "%d records: %.0f records/s, %.1f MB/s", r.Read.Records, r.Read.RecordsPerSecond, r.Read.MBps)
	}
	if r.Refused > 0 {
		line("back-pressure", "%d batches were refused once and sent again", r.Refused)
	}
	if u := r.Usage; u != nil {
		line("client", "%.2f s of CPU", u.ClientCPUSeconds)
		if u.Batches > 0 {
			line("broker", "%.2f s of CPU, %.0f barriers/s, %d batches, %.1f allocations and %.0f bytes per batch", u.ServerCPUSeconds,
				u.GroupsPerSecond, u.Batches, u.AllocationsPerBatch, u.AllocatedPerBatch)
		}
	}
}
