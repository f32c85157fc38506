package bench

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Names of what is read from the broker's /metrics.
const (
	metricCPU       = "process_cpu_seconds_total"
	metricGroups    = "malachi_journal_groups_total"
	metricBatches   = "malachi_produce_batches_total"
	metricMallocs   = "go_memstats_mallocs_total"
	metricAllocated = "go_memstats_alloc_bytes_total"

	maxMetricsBytes = 16 << 20
)

// counters are read before and after.
type counters struct {
	clientCPU float64
	server    map[string]float64 // nil if there is no operations port
}

func (b *Bench) sample(ctx context.Context) (c counters, err error) {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return c, fmt.Errorf("read own CPU time: %w", err)
	}
	c.clientCPU = time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
	if b.cfg.Ops == "" {
		return c, nil
	}
	c.server, err = metrics(ctx, b.cfg.Ops)
	return c, err
}

// metrics scrapes a broker: the sum over all label sets, by name.
func metrics(ctx context.Context, ops string) (_ map[string]float64, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimRight(ops, "/")+"/metrics", nil)
	if err != nil {
		return nil, fmt.Errorf("scrape: %w", err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, fmt.Errorf("scrape: %w", err)
	}
	defer func() { _ = resp.Body.Close() }() // read to its end, or not worth it
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("scrape %s: %s", ops, resp.Status)
	}
	return parseMetrics(io.LimitReader(resp.Body, maxMetricsBytes))
}

func parseMetrics(r io.Reader) (map[string]float64, error) {
	out := map[string]float64{}
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		text := lines.Text()
		at := strings.LastIndexByte(text, ' ')
		if strings.HasPrefix(text, "#") || at < 0 {
			continue
		}
		v, err := strconv.ParseFloat(text[at+1:], 64)
		if err != nil {
			return nil, fmt.Errorf("metric line %.200q: %w", text, err)
		}
		name, _, _ := strings.Cut(text[:at], "{")
		out[name] += v
	}
	return out, lines.Err()
}

// residentBytes is VmRSS of a process of this machine.
func residentBytes(pid int) (int64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, fmt.Errorf("read resident size: %w", err)
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kb, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			if err != nil {
				return 0, fmt.Errorf("read resident size: %w", err)
			}
			return kb << 10, nil
		}
	}
	return 0, fmt.Errorf("process %d says no resident size", pid)
}
