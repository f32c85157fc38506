package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/pprof"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/malachilog/malachi/cmd/malachi/internal/bench"
	"github.com/malachilog/malachi/cmd/malachi/internal/floor"
)

type benchFlags struct {
	bench.Config
	rate, dir, cpuProfile string
	output                *choice
	noFloor               bool
}

func newBench(std streams) *cobra.Command {
	var f benchFlags
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure how fast a broker writes and reads, and verify all of it",
		Long: `Write records to a broker, read every one back, and report rates and latencies beside what this machine can do at all.

Without --server a broker process is started on a temporary folder and removed again. Every record carries its key, producer, sequence
and a checksum; a run in which a call failed, a record is missing, changed, doubled or out of its key's order is reported as FAILED,
without a rate, and exits with 8.

Closed loop (default): each producer sends its next record, or batch, when it may. Open loop (--rate): records are due at fixed times
whatever the answers do, and a latency begins when its record was due.`,
		Example: "  malachi bench --in-flight 1\n  malachi bench --record-bytes 256 --batch 100 --producers 32\n  malachi bench --rate 5000/s --topics 100 --consumers 1",
		Args:    noArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return runBench(cmd.Context(), f, std) },
	}
	fl := cmd.Flags()
	fl.StringVar(&f.Server, "server", "", "base URL of a running broker (default: a broker process of its own)")
	fl.StringVar(&f.Ops, "ops", "", "with --server: base URL of its operations port, for the broker's own counters")
	fl.StringVar(&f.rate, "rate", "", "open loop: records a second over all producers, as 5000 or 5000/s")
	fl.IntVar(&f.RecordBytes, "record-bytes", 1024, "size of a record's key and value together")
	fl.IntVar(&f.Batch, "batch", 0, "records per explicit batch, one batch a request, one under way per producer; 0: the SDK makes the batches")
	fl.IntVar(&f.InFlight, "in-flight", 0, "records under way per producer when the SDK makes the batches; 1: one at a time; 0: the SDK's own bound")
	fl.IntVar(&f.Producers, "producers", 1, "producers, each with keys of its own")
	fl.IntVar(&f.Keys, "keys", 16, "keys of a producer")
	fl.IntVar(&f.Topics, "topics", 1, "topics, written in turn")
	fl.IntVar(&f.Ranges, "ranges", 1, "ranges of a topic; a power of two")
	fl.IntVar(&f.Consumers, "consumers", 0, "consumers of every topic that read along")
	fl.DurationVar(&f.Duration, "duration", 10*time.Second, "how long to write")
	fl.Int64Var(&f.Records, "records", 0, "end after so many records, if the duration does not end first")
	fl.StringVar(&f.Compression, "compression", "none", "none, s2 or zstd; values are random bytes with none, words with the others")
	fl.BoolVar(&f.ReadPass, "read-pass", false, "read everything once more after the verification, to tell the reading rate")
	fl.BoolVar(&f.noFloor, "no-floor", false, "do not measure the machine's floor")
	fl.StringVar(&f.cpuProfile, "cpu-profile", "", "write the load generator's CPU profile to this file")
	benchPlaceFlags(cmd, &f)
	cmd.AddCommand(newBenchSuite(std))
	return cmd
}

func benchPlaceFlags(cmd *cobra.Command, f *benchFlags) {
	cmd.Flags().StringVar(&f.dir, "dir", "", "where the own broker's folder is made and the disk measured (default: the temporary folder)")
	f.output = outputFlag(cmd, "table for people, json for programs", "table", "json")
}

func newBenchSuite(std streams) *cobra.Command {
	var f benchFlags
	var only []string
	cmd := &cobra.Command{
		Use:   "suite",
		Short: "Measure the project's speed targets one after another",
		Long: "Measure the project's speed targets one after another, each against a broker process of its own, in a few minutes. A missed target\n" +
			"is a result; a run that failed exits with 8. Nothing else should run on the machine.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runBenchSuite(cmd.Context(), f, only, std) },
	}
	benchPlaceFlags(cmd, &f)
	cmd.Flags().StringSliceVar(&only, "only", nil, "targets to measure: "+strings.Join(bench.Targets(), ", "))
	return cmd
}

// tabler is a report.
type tabler interface {
	Table(to io.Writer) error
	OK() bool
}

// printBench writes a report; one that is not OK is errCheck.
func printBench(r tabler, output string, std streams) error {
	var err error
	if output == "json" {
		e := json.NewEncoder(std.out)
		e.SetIndent("", "  ")
		err = e.Encode(r)
	} else {
		err = r.Table(std.out)
	}
	if err == nil && !r.OK() {
		err = fmt.Errorf("bench: the run FAILED and is no measurement: %w", errCheck)
	}
	return err
}

func runBench(ctx context.Context, f benchFlags, std streams) (err error) {
	if f.rate != "" {
		if n, err := fmt.Sscanf(strings.TrimSuffix(f.rate, "/s")+"\n", "%g\n", &f.Rate); n != 1 || err != nil || f.Rate <= 0 {
			return usage("--rate %q: want records a second, as 5000 or 5000/s", f.rate)
		}
	}
	if f.Ops != "" && f.Server == "" {
		return usage("--ops goes with --server")
	}
	for name, to := range map[string]*string{"--server": &f.Server, "--ops": &f.Ops} {
		if *to != "" {
			if *to, err = parseServer(name, *to); err != nil {
				return err
			}
		}
	}
	check := f.Config
	if check.Server == "" {
		check.Server = "http://own"
	}
	if err := check.Validate(); err != nil {
		return usageError{err}
	}
	if f.cpuProfile != "" {
		stop, err := profile(f.cpuProfile)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, stop()) }()
	}
	r, err := benchOnce(ctx, f, std)
	if err != nil {
		return err
	}
	return printBench(r, f.output.value, std)
}

// benchOnce starts a broker if need be, measures the floor while it is idle, and runs.
func benchOnce(ctx context.Context, f benchFlags, std streams) (_ *bench.Report, err error) {
	dir := f.dir
	if f.Server == "" {
		exe, err := os.Executable()
		if err != nil {
			return nil, err
		}
		n, err := bench.StartNode(ctx, exe, f.dir)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, n.Stop()) }()
		f.Server, f.Ops, dir = n.API, n.Ops, n.Dir()
	} else if dir == "" {
		dir = os.TempDir()
	}
	var low *floor.Floor
	if !f.noFloor {
		fmt.Fprintln(std.err, "measuring the floor")
		m, err := floor.Measure(ctx, dir, 2*time.Second)
		if err != nil {
			return nil, err
		}
		low = &m
	}
	b, err := bench.New(f.Config)
	if err != nil {
		return nil, err
	}
	fmt.Fprintln(std.err, "running")
	r, err := b.Run(ctx)
	if r != nil {
		r.Floor = low
	}
	return r, err
}

func profile(name string) (stop func() error, err error) {
	out, err := os.Create(name)
	if err != nil {
		return nil, err
	}
	if err := pprof.StartCPUProfile(out); err != nil {
		return nil, errors.Join(err, out.Close())
	}
	return func() error {
		pprof.StopCPUProfile()
		return out.Close()
	}, nil
}

func runBenchSuite(ctx context.Context, f benchFlags, only []string, std streams) error {
	known := strings.Join(bench.Targets(), ", ")
	for _, o := range only {
		if !strings.Contains(", "+known+", ", ", "+o+", ") {
			return usage("--only %q: want some of %s", o, known)
		}
	}
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	s := bench.Suite{Exe: exe, Dir: f.dir, Only: only, Progress: std.err}
	r, err := s.Run(ctx)
	if err != nil {
		return err
	}
	return printBench(r, f.output.value, std)
}
