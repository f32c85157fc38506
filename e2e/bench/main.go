// peers runs one set of workloads against replicated-log servers on loopback
// under stated durability, and prints medians over runs.
//
//	peers -targets "nats-always;nats-default" -nodes 3 -w w1,w2,w3,w4 -runs 5
//
// The servers' programs are found on PATH. All files go under -dir.
package main

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/malachilog/malachi/e2e/bench/internal/quiet"
)

var (
	dir     = flag.String("dir", filepath.Join(os.TempDir(), "peers"), "scratch directory")
	targets = flag.String("targets", "nats-always", "semicolon list: nats-always nats-default redis rabbit-quorum rabbit-stream etcd kafka=host:port,...")
	nodes   = flag.Int("nodes", 3, "nodes (and replicas)")
	work    = flag.String("w", "w1,w2,w3,w4", "workloads: w1 w2 w3 w4 w5 w6 w7 w8, or hold: only keep the servers up for -e2e")
	runs    = flag.Int("runs", 5, "runs; medians are printed")
	dur     = flag.Duration("dur", 3*time.Second, "time per run of w1-w4")
	window  = flag.Int("window", 1000, "records in flight in w2 and w4")
	backlog = flag.Int64("backlog", 1<<30, "bytes of the backlog in w5")
	topics  = flag.Int("topics", 1000, "topics in w7")
	rate    = flag.Int("rate", 1000, "records/s in w6 and w7")
	e2eDur  = flag.Duration("e2e", 10*time.Second, "time per run of w6 and w7")
	qmax    = flag.Float64("quiet", 0.4, "wait until the machine is less busy than this before a run")
	qlim    = flag.Duration("quietwait", 10*time.Second, "but at most this long")
	reuse   = flag.Bool("reuse", false, "start each target once, not anew for every run (for servers slow to start; not with w5)")
	wrap    = flag.String("wrap", "", "command put before each server's, e.g. a tracer that delays fsync")
	out     = flag.String("json", "", "append one JSON line per run to this file")
)

// A result is one run of one workload: named numbers.
type result map[string]float64

func newTarget(name, dir string) (Target, error) {
	w := strings.Fields(*wrap)
	switch {
	case name == "nats-always":
		return &natsTarget{dir: dir, sync: "always", wrap: w}, nil
	case name == "nats-default":
		return &natsTarget{dir: dir, sync: "2m", wrap: w}, nil
	default:
		if f := extra[strings.SplitN(name, "=", 2)[0]]; f != nil {
			return f(name, dir, w), nil
		}
	}
	return nil, fmt.Errorf("no target %q", name)
}

// extra holds the targets of other files.
var extra = map[string]func(name, dir string, wrap []string) Target{}

func pct(l []float64, p float64) float64 {
	if len(l) == 0 {
		return 0
	}
	return l[min(len(l)-1, int(float64(len(l))*p))]
}

func lats(r result, pre string, l []float64) {
	sort.Float64s(l)
	r[pre+"p50_us"], r[pre+"p99_us"], r[pre+"p99.9_us"], r[pre+"max_us"] = pct(l, .5), pct(l, .99), pct(l, .999), pct(l, 1)
}

func us(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

func payload(n int) []byte {
	b := make([]byte, n)
	rand.New(rand.NewSource(1)).Read(b)
	return b
}

// costs adds what the run used.
func costs(r result, a, b usage, recs, bytes float64) {
	el := b.t.Sub(a.t).Seconds()
	r["cpu_servers"] = (b.servers - a.servers) / el
	r["cpu_client"] = (b.client - a.client) / el
	r["cpu_other"] = max(0, (b.total-a.total)/el-r["cpu_servers"]-r["cpu_client"])
	r["disk_amp"] = float64(b.written-a.written) / bytes
	r["flushes_per_rec"] = float64(b.flushes-a.flushes) / recs
	r["server_rss_mb"], r["server_fds"] = float64(b.rss)/1e6, float64(b.fds)
}

// sync1 is w1: one producer, one record at a time.
func sync1(t Target, topic string) (result, error) {
	p, err := t.NewProducer(topic)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	b := payload(1024)
	ch := make(chan error, 1)
	one := func() error {
		p.Send(b, func(err error) { ch <- err })
		p.Flush()
		select {
		case err := <-ch:
			return err
		case <-time.After(20 * time.Second):
			return errors.New("no ack in 20 s")
		}
	}
	for i := 0; i < 100; i++ {
		if err := one(); err != nil {
			return nil, err
		}
	}
	var l []float64
	u := sample(t)
	for start := time.Now(); time.Since(start) < *dur; {
		t0 := time.Now()
		if err := one(); err != nil {
			return nil, err
		}
		l = append(l, us(time.Since(t0)))
	}
	v := sample(t)
	r := result{"rec_s": float64(len(l)) / v.t.Sub(u.t).Seconds()}
	r["MB_s"] = r["rec_s"] * 1024 / 1e6
	costs(r, u, v, float64(len(l)), float64(len(l)*1024))
	lats(r, "", l)
	return r, nil
}

// pipe is w2 and w4: one producer with -window records in flight.
func pipe(t Target, topic string, size int, limit int64) (result, error) {
	p, err := t.NewProducer(topic)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	b := payload(size)
	sem := make(chan struct{}, *window)
	var fail atomic.Pointer[error]
	var mu sync.Mutex
	var l []float64
	send := func(rec bool) error {
		select {
		case sem <- struct{}{}:
		default:
			p.Flush()
			select {
			case sem <- struct{}{}:
			case <-time.After(20 * time.Second):
				return errors.New("no ack in 20 s")
			}
		}
		if e := fail.Load(); e != nil {
			return *e
		}
		t0 := time.Now()
		p.Send(b, func(err error) {
			if err != nil {
				fail.CompareAndSwap(nil, &err)
			}
			if rec {
				mu.Lock()
				l = append(l, us(time.Since(t0)))
				mu.Unlock()
			}
			<-sem
		})
		return nil
	}
	drain := func() error {
		p.Flush()
		for i := 0; i < *window; i++ {
			select {
			case sem <- struct{}{}:
			case <-time.After(20 * time.Second):
				return errors.New("no ack in 20 s")
			}
		}
		for i := 0; i < *window; i++ {
			<-sem
		}
		if e := fail.Load(); e != nil {
			return *e
		}
		return nil
	}
	if limit == 0 {
		for i := 0; i < 2**window; i++ {
			if err := send(false); err != nil {
				return nil, err
			}
		}
		if err := drain(); err != nil {
			return nil, err
		}
	}
	n := int64(0)
	u := sample(t)
	for start := time.Now(); limit > 0 && n*int64(size) < limit || limit == 0 && time.Since(start) < *dur; n++ {
		if err := send(true); err != nil {
			return nil, err
		}
	}
	if err := drain(); err != nil {
		return nil, err
	}
	v := sample(t)
	r := result{"rec_s": float64(n) / v.t.Sub(u.t).Seconds()}
	r["MB_s"] = r["rec_s"] * float64(size) / 1e6
	costs(r, u, v, float64(n), float64(n)*float64(size))
	lats(r, "", l)
	return r, nil
}

// batch16 is w3: 16 producers, each sending batches of 100 and waiting for all acks.
func batch16(t Target, topic string) (result, error) {
	const producers, batch, size = 16, 100, 1024
	var ps []Producer
	for i := 0; i < producers; i++ {
		p, err := t.NewProducer(topic)
		if err != nil {
			return nil, err
		}
		defer p.Close()
		ps = append(ps, p)
	}
	b := payload(size)
	var mu sync.Mutex
	var l []float64
	var n atomic.Int64
	var wg sync.WaitGroup
	errs := make(chan error, producers)
	u := sample(t)
	start := time.Now()
	for _, p := range ps {
		wg.Add(1)
		go func() {
			defer wg.Done()
			ch := make(chan error, batch)
			for time.Since(start) < *dur {
				t0 := time.Now()
				for i := 0; i < batch; i++ {
					p.Send(b, func(err error) { ch <- err })
				}
				p.Flush()
				for i := 0; i < batch; i++ {
					select {
					case err := <-ch:
						if err != nil {
							errs <- err
							return
						}
					case <-time.After(20 * time.Second):
						errs <- errors.New("no ack in 20 s")
						return
					}
				}
				n.Add(batch)
				mu.Lock()
				l = append(l, us(time.Since(t0)))
				mu.Unlock()
			}
		}()
	}
	wg.Wait()
	v := sample(t)
	select {
	case err := <-errs:
		return nil, err
	default:
	}
	r := result{"rec_s": float64(n.Load()) / v.t.Sub(u.t).Seconds()}
	r["MB_s"] = r["rec_s"] * size / 1e6
	costs(r, u, v, float64(n.Load()), float64(n.Load()*size))
	lats(r, "batch_", l)
	return r, nil
}

// catchup is one read of w5.
func catchup(t Target, topic string, records int64) (result, error) {
	u := sample(t)
	var n, bytes int64
	err := t.Consume(topic, func(p []byte) bool {
		n++
		bytes += int64(len(p))
		return n < records
	})
	if err != nil {
		return nil, err
	}
	v := sample(t)
	el := v.t.Sub(u.t).Seconds()
	r := result{"rec_s": float64(n) / el, "MB_s": float64(bytes) / 1e6 / el}
	costs(r, u, v, float64(n), float64(bytes))
	return r, nil
}

// openLoop sends at a fixed rate over the topics; each record carries the time
// at which it was meant to be sent, from which all latencies are counted
// (so a stall is charged to every record that it held up).
func openLoop(t Target, names []string, consume bool) (result, error) {
	p, err := t.NewProducer(names[0])
	if err != nil {
		return nil, err
	}
	defer p.Close()
	total := int(e2eDur.Seconds() * float64(*rate))
	base := time.Now()
	var acks, e2e, late []float64
	var mu sync.Mutex
	cdone := make(chan error, 1)
	if consume {
		ready := make(chan struct{})
		var once sync.Once
		go func() {
			n := 0
			cdone <- t.Consume(names[0], func(b []byte) bool {
				ts := int64(binary.LittleEndian.Uint64(b))
				if ts < 0 {
					once.Do(func() { close(ready) })
					return true
				}
				e2e = append(e2e, us(time.Since(base)-time.Duration(ts)))
				n++
				return n < total
			})
		}()
		mark := make([]byte, 1024)
		binary.LittleEndian.PutUint64(mark, ^uint64(0))
		for i, ok := 0, false; !ok && i < 100; i++ {
			p.Send(mark, func(error) {})
			p.Flush()
			select {
			case <-ready:
				ok = true
			case err := <-cdone:
				return nil, err
			case <-time.After(100 * time.Millisecond):
			}
		}
		time.Sleep(200 * time.Millisecond)
	}
	var left sync.WaitGroup
	var fails atomic.Int64
	to, _ := p.(interface {
		SendTo(string, []byte, func(error))
	})
	// Go's timers are good for about a millisecond only: sleep in the kernel,
	// with the least slack, on a thread of our own.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	syscall.Syscall(syscall.SYS_PRCTL, 29, 1, 0) // PR_SET_TIMERSLACK, 1 ns
	u := sample(t)
	start := time.Since(base)
	for i := 0; i < total; i++ {
		at := start + time.Duration(float64(i)/float64(*rate)*1e9)
		if d := at - time.Since(base); d > 0 {
			ts := syscall.NsecToTimespec(int64(d))
			syscall.Nanosleep(&ts, nil)
		}
		late = append(late, us(time.Since(base)-at))
		b := make([]byte, 1024)
		binary.LittleEndian.PutUint64(b, uint64(at))
		left.Add(1)
		done := func(err error) {
			if err != nil {
				fails.Add(1)
			}
			d := us(time.Since(base) - at)
			mu.Lock()
			acks = append(acks, d)
			mu.Unlock()
			left.Done()
		}
		if len(names) > 1 {
			to.SendTo(names[i%len(names)], b, done)
		} else {
			p.Send(b, done)
		}
		p.Flush()
	}
	ok := make(chan struct{})
	go func() { left.Wait(); close(ok) }()
	select {
	case <-ok:
	case <-time.After(30 * time.Second):
		return nil, errors.New("acks missing after 30 s")
	}
	if consume {
		select {
		case err := <-cdone:
			if err != nil {
				return nil, err
			}
		case <-time.After(30 * time.Second):
			return nil, errors.New("records missing after 30 s")
		}
	}
	v := sample(t)
	r := result{"fails": float64(fails.Load())}
	costs(r, u, v, float64(total), float64(total)*1024)
	lats(r, "ack_", acks)
	lats(r, "e2e_", e2e)
	lats(r, "pacer_", late)
	return r, nil
}

// kill9 is w8: a producer with one record in flight resends what is not
// acknowledged in 250 ms; the leader is killed; afterwards every
// acknowledged record must be readable.
func kill9(t Target, topic string) (result, error) {
	p, err := t.NewProducer(topic)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	var acked []uint64
	var times []time.Time
	var killed time.Time
	retries := 0
	var victim *Node
	for start, id := time.Now(), uint64(1); time.Since(start) < 12*time.Second || len(times) > 0 && times[len(times)-1].Before(killed) && time.Since(start) < 60*time.Second; id++ {
		if victim == nil && time.Since(start) > 2*time.Second {
			l, err := t.Leader(topic)
			if err != nil {
				return nil, err
			}
			victim = t.Nodes()[l]
			killed = time.Now()
			go victim.Kill()
		}
		b := payload(1024)
		binary.LittleEndian.PutUint64(b, id)
		ch := make(chan error, 1000)
		for ok := false; !ok && time.Since(start) < 60*time.Second; {
			p.Send(b, func(err error) { ch <- err })
			p.Flush()
			select {
			case err := <-ch:
				ok = err == nil
				if !ok {
					retries++
					time.Sleep(5 * time.Millisecond)
				}
			case <-time.After(250 * time.Millisecond):
				retries++
			}
		}
		acked = append(acked, id)
		times = append(times, time.Now())
	}
	var gap time.Duration
	for i := 1; i < len(times); i++ {
		gap = max(gap, times[i].Sub(times[i-1]))
	}
	r := result{"acked": float64(len(acked)), "gap_ms": us(gap) / 1e3, "retries": float64(retries)}
	t1 := time.Now()
	if err := victim.Start(); err != nil {
		return nil, err
	}
	if err := victim.WaitReady(60 * time.Second); err != nil {
		return nil, err
	}
	r["restart_ms"] = us(time.Since(t1)) / 1e3
	seen := map[uint64]int{}
	last := acked[len(acked)-1]
	done := make(chan error, 1)
	go func() {
		var err error
		for try := 0; try < 20; try++ {
			clear(seen)
			if err = t.Consume(topic, func(b []byte) bool {
				k := binary.LittleEndian.Uint64(b)
				seen[k]++
				return k != last
			}); err == nil {
				break
			}
			time.Sleep(500 * time.Millisecond)
		}
		done <- err
	}()
	select {
	case err := <-done:
		if err != nil {
			return nil, err
		}
	case <-time.After(60 * time.Second):
		r["read_incomplete"] = 1
	}
	lost, dup := 0, 0
	for _, k := range acked {
		if seen[k] == 0 {
			lost++
		}
		if seen[k] > 1 {
			dup++
		}
	}
	r["lost"], r["dups"] = float64(lost), float64(dup)
	return r, nil
}

type runKey struct{ target, work string }

var (
	results = map[runKey][]result{}
	order   []runKey
	current Target
	curMu   sync.Mutex
)

func record(name, w string, r result, err error) {
	k := runKey{name, w}
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s %s: %v\n", name, w, err)
		return
	}
	if _, ok := results[k]; !ok {
		order = append(order, k)
	}
	results[k] = append(results[k], r)
	fmt.Fprintf(os.Stderr, "%s %s nodes=%d load=%s %s\n", name, w, *nodes, quiet.Load(), show(r))
	if *out != "" {
		if f, err := os.OpenFile(*out, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644); err == nil {
			json.NewEncoder(f).Encode(map[string]any{"target": name, "nodes": *nodes, "w": w, "load": quiet.Load(), "wrap": *wrap, "r": r})
			f.Close()
		}
	}
}

func show(r result) string {
	var k []string
	for n := range r {
		k = append(k, n)
	}
	sort.Strings(k)
	var s []string
	for _, n := range k {
		s = append(s, fmt.Sprintf("%s=%.4g", n, r[n]))
	}
	return strings.Join(s, " ")
}

func one(name string, run int, w string) {
	d := filepath.Join(*dir, fmt.Sprintf("%s.%d", strings.SplitN(name, "=", 2)[0], os.Getpid()))
	curMu.Lock()
	t := current
	curMu.Unlock()
	var err error
	if t == nil {
		os.RemoveAll(d)
		os.MkdirAll(d, 0o755)
		if t, err = newTarget(name, d); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(2)
		}
		curMu.Lock()
		current = t
		curMu.Unlock()
		if err = t.Start(*nodes); err != nil {
			record(name, w, nil, err)
		}
	}
	defer func() {
		if !*reuse {
			end(name)
		}
	}()
	if err != nil {
		return
	}
	topic := fmt.Sprintf("%s-r%d", w, run)
	n := 1
	if w == "w7" {
		n = *topics
	}
	t0 := time.Now()
	if err := t.CreateTopics(topic, n); err != nil {
		record(name, w, nil, err)
		return
	}
	created := time.Since(t0)
	time.Sleep(500 * time.Millisecond)
	quiet.Wait(*qmax, *qlim)
	var r result
	switch w {
	case "w1":
		r, err = sync1(t, topic)
	case "w2":
		r, err = pipe(t, topic, 1024, 0)
	case "w3":
		r, err = batch16(t, topic)
	case "w4":
		r, err = pipe(t, topic, 100, 0)
	case "w5":
		var f result
		f, err = pipe(t, topic, 1024, *backlog)
		if err != nil {
			break
		}
		record(name, "w5-fill", f, nil)
		recs := (*backlog + 1023) / 1024
		_, forgetful := t.(*ceilTarget) // it recovers nothing: only its pages are dropped
		for _, nd := range t.Nodes() {
			if !forgetful {
				nd.Terminate()
			}
		}
		dropCache(d)
		for _, nd := range t.Nodes() {
			if !forgetful {
				if err = nd.Start(); err != nil {
					break
				}
			}
		}
		for _, nd := range t.Nodes() {
			if err = nd.WaitReady(60 * time.Second); err != nil {
				break
			}
		}
		for i := 0; i < 100; i++ {
			if _, err = t.Leader(topic); err == nil {
				break
			}
			time.Sleep(200 * time.Millisecond)
		}
		time.Sleep(time.Second)
		quiet.Wait(*qmax, *qlim)
		r, err = catchup(t, topic, recs)
		record(name, "w5-cold", r, err)
		for i := 0; i < 3 && err == nil; i++ {
			quiet.Wait(*qmax, *qlim)
			r, err = catchup(t, topic, recs)
			record(name, "w5-warm", r, err)
		}
		return
	case "w6":
		r, err = openLoop(t, []string{topic}, true)
	case "w7":
		var names []string
		for i := 0; i < n; i++ {
			names = append(names, fmt.Sprintf("%s%d", topic, i))
		}
		time.Sleep(3 * time.Second)
		u := sample(t)
		time.Sleep(5 * time.Second)
		v := sample(t)
		idle := result{}
		costs(idle, u, v, 1, 1)
		r, err = openLoop(t, names, false)
		if err == nil {
			r["idle_cpu_servers"] = idle["cpu_servers"]
			r["idle_rss_mb"] = idle["server_rss_mb"]
			r["create_s"] = created.Seconds()
		}
	case "w8":
		r, err = kill9(t, topic)
	case "hold": // keep the servers up for other load generators
		fmt.Fprintf(os.Stderr, "%s is up for %v\n", name, *e2eDur)
		time.Sleep(*e2eDur)
		return
	default:
		err = errors.New("no such workload")
	}
	record(name, w, r, err)
}

// end stops the current target and removes its files.
func end(name string) {
	curMu.Lock()
	defer curMu.Unlock()
	if current != nil {
		current.Stop()
		current = nil
	}
	os.RemoveAll(filepath.Join(*dir, fmt.Sprintf("%s.%d", strings.SplitN(name, "=", 2)[0], os.Getpid())))
}

func main() {
	flag.Parse()
	sig := make(chan os.Signal, 1)
	signal.Notify(sig, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-sig
		curMu.Lock()
		if current != nil {
			current.Stop()
		}
		os.Exit(130)
	}()
	ts, ws := strings.Split(*targets, ";"), strings.Split(*work, ",")
	if *reuse {
		for _, t := range ts {
			for r := 0; r < *runs; r++ {
				for _, w := range ws {
					one(t, r, w)
				}
			}
			end(t)
		}
	} else {
		// Targets take turns, so that a neighbour's noise falls on all of them.
		for r := 0; r < *runs; r++ {
			for _, w := range ws {
				for _, t := range ts {
					one(t, r, w)
				}
			}
		}
	}
	for _, k := range order {
		rs := results[k]
		med := result{}
		for n := range rs[0] {
			var v []float64
			for _, r := range rs {
				v = append(v, r[n])
			}
			sort.Float64s(v)
			med[n] = v[len(v)/2]
			if n == "MB_s" || strings.HasSuffix(n, "p99_us") || n == "rec_s" {
				med[n+"_min"], med[n+"_max"] = v[0], v[len(v)-1]
			}
		}
		fmt.Printf("%s %s nodes=%d runs=%d %s\n", k.target, k.work, *nodes, len(rs), show(med))
	}
}
