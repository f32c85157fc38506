package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/malachilog/malachi/cmd/malachi/internal/floor"
)

// Suite measures the project's speed targets for one broker, each against a broker process of its own, in one go.
type Suite struct {
	// Exe is the malachi program; Dir is where brokers get their folders ("": the system's temporary folder).
	Exe, Dir string
	// Only names the targets to run; empty: all.
	Only []string
	// Progress is told what is being measured.
	Progress io.Writer
}

// Row is one target.
type Row struct {
	Name     string  `json:"name"`
	Measured float64 `json:"measured"`
	Unit     string  `json:"unit"`
	// Reference is what Measured is held against, for ratios; 0 if the target is absolute.
	Reference float64 `json:"reference,omitempty"`
	Ratio     float64 `json:"ratio"`
	Target    float64 `json:"target"` // of Ratio
	AtMost    bool    `json:"atMost"` // else at least
	Met       bool    `json:"met"`
	Runs      int     `json:"runs"`
	Note      string  `json:"note"`
	Failure   string  `json:"failure,omitempty"` // the run failed: there is no figure
}

// SuiteReport is what a suite gave.
type SuiteReport struct {
	Began time.Time   `json:"began"`
	Floor floor.Floor `json:"floor"` // of the beginning
	Rows  []Row       `json:"rows"`
}

// errFailed: a run that failed has no figures.
var errFailed = errors.New("FAILED")

// target is one line of the suite.
type target struct {
	name    string
	measure func(context.Context, *Suite) ([]Row, error)
}

func targets() []target {
	return []target{
		{"latency", latencyTarget},
		{"pipelined", pipelinedTarget},
		{"batch-100", batchTarget(100, 250_000)},
		{"batch-10", batchTarget(10, 45_000)},
		{"batch-512", batchTarget(512, 430_000)},
		{"quiet-topics", quietTarget},
		{"idle", idleTarget},
		{"allocations", allocationTarget},
	}
}

// Targets are the names for Suite.Only.
func Targets() (names []string) {
	for _, t := range targets() {
		names = append(names, t.name)
	}
	return names
}

// Run measures target after target. A run that fails becomes a row with its failure. The error is nil unless nothing could be measured, or
// ctx has ended.
func (s *Suite) Run(ctx context.Context) (*SuiteReport, error) {
	out := &SuiteReport{Began: time.Now().UTC().Truncate(time.Second)}
	err := s.withNode(ctx, func(n *Node) (err error) {
		out.Floor, err = floor.Measure(ctx, n.Dir(), 2*time.Second)
		return err
	})
	if err != nil {
		return nil, err
	}
	for _, t := range targets() {
		if len(s.Only) > 0 && !slices.Contains(s.Only, t.name) {
			continue
		}
		fmt.Fprintf(s.Progress, "measuring %s\n", t.name)
		rows, err := t.measure(ctx, s)
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if err != nil {
			rows = []Row{{Name: t.name, Failure: err.Error()}}
		}
		out.Rows = append(out.Rows, rows...)
	}
	return out, nil
}

// OK reports whether every run was a measurement; a missed target is one too.
func (r *SuiteReport) OK() bool {
	return !slices.ContainsFunc(r.Rows, func(w Row) bool { return w.Failure != "" })
}

// Table writes the rows for people.
func (r *SuiteReport) Table(to io.Writer) error {
	w := tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)
	f := r.Floor
	fmt.Fprintf(w, "floor: barrier %s, round trip %s, direct writes %.0f MB/s, loopback %.0f MB/s\n\n", f.Barrier.Round(time.Microsecond),
		f.RoundTrip.Round(time.Microsecond), f.DirectMBps, f.LoopbackMBps)
	fmt.Fprintln(w, "TARGET\tMEASURED\tFLOOR OR PEER\tRATIO\tWANTED\t\tRUNS\tNOTE")
	for _, x := range r.Rows {
		if x.Failure != "" {
			fmt.Fprintf(w, "%s\tFAILED\t\t\t\t\t\t%s\n", x.Name, x.Failure)
			continue
		}
		want, met := ">=", "met"
		if x.AtMost {
			want = "<="
		}
		if !x.Met {
			met = "MISSED"
		}
		fmt.Fprintf(w, "%s\t%s %s\t%s\t%.2f\t%s %.2f\t%s\t%d\t%s\n", x.Name, figure(x.Measured), x.Unit, figure(x.Reference), x.Ratio, want, x.Target, met,
			x.Runs, x.Note)
	}
	return w.Flush()
}

func figure(v float64) string {
	if v >= 1000 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.4g", v)
}

// row holds a figure against a reference.
func row(name string, measured float64, unit string, reference, target float64, atMost bool) Row {
	r := Row{Name: name, Measured: measured, Unit: unit, Reference: reference, Ratio: measured / reference, Target: target, AtMost: atMost, Runs: 1}
	r.Met = r.Ratio >= target
	if atMost {
		r.Met = r.Ratio <= target
	}
	return r
}

// withNode runs f with a broker of its own.
func (s *Suite) withNode(ctx context.Context, f func(*Node) error) error {
	n, err := StartNode(ctx, s.Exe, s.Dir)
	if err != nil {
		return err
	}
	return errors.Join(f(n), n.Stop())
}

// bench makes one run; a failed one is an error.
func (s *Suite) bench(ctx context.Context, n *Node, c Config) (*Report, error) {
	c.Server, c.Ops = n.API, n.Ops
	b, err := New(c)
	if err != nil {
		return nil, err
	}
	r, err := b.Run(ctx)
	if err != nil {
		return nil, err
	}
	if !r.OK() {
		return nil, fmt.Errorf("%w: %v", errFailed, r.Failures)
	}
	return r, nil
}

func middle(v []float64) float64 {
	v = slices.Clone(v)
	slices.Sort(v)
	return v[len(v)/2]
}
