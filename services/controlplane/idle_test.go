package controlplane

import (
	"fmt"
	"os"
	"syscall"
	"testing"
	"time"
)

// TestIdleCost reports what three brokers with 16 vnodes cost while nothing happens.
func TestIdleCost(t *testing.T) {
	if os.Getenv("MALACHI_REPORT") == "" {
		t.Skip("a report of ten seconds, not a check: set MALACHI_REPORT")
	}
	cl := newCluster(t)
	for range 3 {
		cl.add()
	}
	for _, p := range cl.nodes {
		p.cfg.Vnodes, p.cfg.ElectionTimeout = 16, time.Second
		cl.start(p)
	}
	cl.settledGroups(17, 3, 0)
	for i := range 1000 {
		cl.nodes[0].create(fmt.Sprintf("topic-%d", i))
	}
	cpu := func() time.Duration {
		var u syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
			t.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	for range 2 {
		before, begin := cpu(), time.Now()
		<-time.After(5 * time.Second)
		t.Logf("idle: %.4f of a core for three brokers", (cpu()-before).Seconds()/time.Since(begin).Seconds())
	}
}
