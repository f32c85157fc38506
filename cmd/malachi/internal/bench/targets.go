package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/malachilog/malachi/cmd/malachi/internal/floor"
)

const (
	repeats    = 3
	batchesOut = 32 // explicit batches under way
)

// latencyTarget: one producer, one record at a time. Floor and run take turns, so that both meet the same neighbours.
func latencyTarget(ctx context.Context, s *Suite) (rows []Row, err error) {
	var p50, floors, ratios []float64
	err = s.withNode(ctx, func(n *Node) error {
		for range repeats {
			f, err := floor.Measure(ctx, n.Dir(), 2*time.Second)
			if err != nil {
				return err
			}
			r, err := s.bench(ctx, n, Config{InFlight: 1, Duration: 3 * time.Second})
			if err != nil {
				return err
			}
			low := float64((f.Barrier + f.RoundTrip).Microseconds())
			p50, floors, ratios = append(p50, float64(r.Latency.P50)), append(floors, low), append(ratios, float64(r.Latency.P50)/low)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	r := row("one record at a time, p50", middle(p50), "us", middle(floors), 2, true)
	r.Ratio, r.Runs = middle(ratios), repeats
	r.Met = r.Ratio <= r.Target
	r.Note = "1 KiB, SDK; against barrier + round trip measured just before each run"
	return []Row{r}, nil
}

// steady makes a run that is thrown away, so that the journal's files have been written once, and then the runs that count.
func (s *Suite) steady(ctx context.Context, n *Node, first, c Config) (out []*Report, err error) {
	for i := range repeats + 1 {
		use := c
		if i == 0 {
			use = first
		}
		r, err := s.bench(ctx, n, use)
		if err != nil {
			return nil, err
		}
		if i > 0 {
			out = append(out, r)
		}
	}
	return out, nil
}

func medianOf(reports []*Report, f func(*Report) float64) float64 {
	var v []float64
	for _, r := range reports {
		v = append(v, f(r))
	}
	return middle(v)
}

// pipelinedTarget: 1 KiB records, batched by the SDK; and how fast the same is read back.
func pipelinedTarget(ctx context.Context, s *Suite) (rows []Row, err error) {
	err = s.withNode(ctx, func(n *Node) error {
		f, err := floor.Measure(ctx, n.Dir(), 2*time.Second)
		if err != nil {
			return err
		}
		c := Config{Duration: 4 * time.Second, ReadPass: true, Keys: 64}
		runs, err := s.steady(ctx, n, Config{Duration: 8 * time.Second, Keys: 64}, c)
		if err != nil {
			return err
		}
		write := row("1 KiB pipelined by the SDK", medianOf(runs, func(r *Report) float64 { return r.Written.MBps }), "MB/s", min(f.DirectMBps, 200), 0.6, false)
		write.Note = "1 producer, no compression; against the smaller of direct 1 MiB writes and 200 MB/s"
		read := row("cached raw read", medianOf(runs, func(r *Report) float64 { return r.Read.MBps }), "MB/s", 600, 1, false)
		read.Note = fmt.Sprintf("1 SDK consumer, all records of the run just written; loopback streams %.0f MB/s", f.LoopbackMBps)
		write.Runs, read.Runs = repeats, repeats
		rows = []Row{write, read}
		return nil
	})
	return rows, err
}

// batchTarget: explicit batches of so many records of 256 B, as many requests under way as keeps the broker busy.
func batchTarget(records int, wanted float64) func(context.Context, *Suite) ([]Row, error) {
	return func(ctx context.Context, s *Suite) (rows []Row, err error) {
		err = s.withNode(ctx, func(n *Node) error {
			c := Config{RecordBytes: 256, Batch: records, Producers: batchesOut, Duration: 3 * time.Second}
			runs, err := s.steady(ctx, n, c, c)
			if err != nil {
				return err
			}
			r := row(fmt.Sprintf("256 B in batches of %d", records), medianOf(runs, func(r *Report) float64 { return r.Written.RecordsPerSecond }),
				"records/s", wanted, 1, false)
			r.Runs = repeats
			r.Note = fmt.Sprintf("%d requests of one batch under way", batchesOut)
			rows = []Row{r}
			return nil
		})
		return rows, err
	}
}

// quietTarget: a thousand topics at 10 records/s each need no more barriers than one topic at 10,000/s.
func quietTarget(ctx context.Context, s *Suite) (rows []Row, err error) {
	const wanted = 10_000
	measure := func(topics int) (r *Report, err error) {
		err = s.withNode(ctx, func(n *Node) (err error) {
			r, err = s.bench(ctx, n, Config{RecordBytes: 256, Topics: topics, Keys: 1, Producers: 4, Rate: wanted, Duration: 6 * time.Second})
			return err
		})
		return r, err
	}
	one, err := measure(1)
	if err != nil {
		return nil, err
	}
	many, err := measure(1000)
	if err != nil {
		return nil, err
	}
	r := row("1,000 topics x 10/s", many.Usage.GroupsPerSecond, "barriers/s", one.Usage.GroupsPerSecond, 1.2, true)
	r.Note = fmt.Sprintf("against one topic at 10,000/s; reached %.0f and %.0f records/s", many.Written.RecordsPerSecond, one.Written.RecordsPerSecond)
	if min(many.Written.RecordsPerSecond, one.Written.RecordsPerSecond) < 0.9*wanted {
		r.Met = false // fewer barriers for less work prove nothing
		r.Note += ": not the load that was asked for"
	}
	return []Row{r}, nil
}

// idleTarget: the broker's resident memory with a thousand topics, each of which has an open segment.
func idleTarget(ctx context.Context, s *Suite) (rows []Row, err error) {
	const topics, settle = 1000, 20 * time.Second
	err = s.withNode(ctx, func(n *Node) error {
		if err := MakeTopics(ctx, n.API, topics); err != nil {
			return err
		}
		pause := time.NewTimer(settle)
		defer pause.Stop()
		select {
		case <-pause.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		rss, err := residentBytes(n.PID)
		if err != nil {
			return err
		}
		r := row("idle with 1,000 topics", float64(rss)/1e6, "MB resident", 100, 1, true)
		r.Note = fmt.Sprintf("each with an open segment and one record; after %s", settle)
		rows = []Row{r}
		return nil
	})
	return rows, err
}

// allocationTarget: what the broker allocates per batch does not depend on the number of records.
func allocationTarget(ctx context.Context, s *Suite) (rows []Row, err error) {
	err = s.withNode(ctx, func(n *Node) error {
		run := func(records int) (*Report, error) {
			return s.bench(ctx, n, Config{RecordBytes: 100, Batch: records, Producers: 8, Records: int64(records) * 10_000, Duration: time.Minute})
		}
		if _, err := run(10); err != nil {
			return err
		}
		few, err := run(10)
		if err != nil {
			return err
		}
		many, err := run(500)
		if err != nil {
			return err
		}
		r := row("allocations per batch", many.Usage.AllocationsPerBatch, "allocations", few.Usage.AllocationsPerBatch, 1.1, true)
		r.Note = fmt.Sprintf("batches of 500 against batches of 10; %.0f and %.0f bytes a batch", many.Usage.AllocatedPerBatch, few.Usage.AllocatedPerBatch)
		rows = []Row{r}
		return nil
	})
	return rows, err
}
