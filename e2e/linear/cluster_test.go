// Package linear records what clients of a running cluster see, and has porcupine decide whether one order of all calls explains it: for commands
// on topics, and for the records of one range. The cluster is three real brokers in this process, which are stopped and started under the load.
package linear

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"
	"connectrpc.com/connect/v2/connectproto"

	"github.com/malachilog/malachi/client"
	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/gen/go/malachi/v1/malachiv1connect"
	"github.com/malachilog/malachi/services/broker"
	"github.com/malachilog/malachi/services/rpc/codec"
	"github.com/malachilog/malachi/storage"
)

const brokers = 3

// node is one broker. Its fields but the clients belong to the test's own goroutine.
type node struct {
	cfg    broker.Config
	id     storage.BrokerID
	cancel context.CancelFunc
	done   chan error

	admin   malachiv1connect.AdminServiceClient
	produce malachiv1connect.ProduceServiceClient
	fetch   malachiv1connect.FetchServiceClient
}

// cluster is three brokers that have founded a cluster together. The clients make one attempt per call: a retry would hide what came of it.
type cluster struct {
	t     *testing.T
	nodes [brokers]*node
	log   *slog.Logger
	rand  *rand.Rand // of the test's own goroutine
	start time.Time
}

// said keeps what brokers log, to be shown if the test fails.
type said struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

// Write implements io.Writer.
func (s *said) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.buf.Write(b)
}

func (s *said) last(n int) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	lines := strings.Split(s.buf.String(), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// free are addresses with ports that were free a moment ago.
func free(t *testing.T, n int) (out []string) {
	t.Helper()
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = l.Close() }()
		out = append(out, l.Addr().String())
	}
	return out
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("SEED=%d", seed)
	log := &said{}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the brokers said last:\n%s", log.last(120))
		}
	})
	c := &cluster{t: t, log: slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelInfo})), rand: rand.New(rand.NewPCG(seed, 1)), start: time.Now()}
	hc := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 32}}
	t.Cleanup(hc.CloseIdleConnections)
	ports, folder := free(t, 5*brokers), t.TempDir()
	rpc := []string{ports[2], ports[7], ports[12]}
	var opening sync.WaitGroup
	for i := range c.nodes {
		p := ports[5*i:]
		conn := connect.NewClient(connecthttp.NewTransport(hc, "http://"+p[0], connecthttp.WithCodecs(codec.New(), connectproto.NewJSONCodec())))
		n := &node{
			admin: malachiv1connect.NewAdminServiceClient(conn), produce: malachiv1connect.NewProduceServiceClient(conn),
			fetch: malachiv1connect.NewFetchServiceClient(conn),
			cfg: broker.Config{
				Data: filepath.Join(folder, fmt.Sprintf("node%d", i+1)), API: p[0], Ops: p[1], RPC: p[2], Raft: p[3], Gossip: p[4],
				BootstrapExpect: brokers, Founders: rpc, Join: rpc, Vnodes: 4, ElectionTimeout: 300 * time.Millisecond, DiskReserve: 64 << 20,
				JournalFileBytes: 16 << 20, JournalMaxBytes: 128 << 20, DrainGrace: 2 * time.Second,
			},
		}
		c.nodes[i] = n
		opening.Go(func() { c.run(n) })
	}
	opening.Wait()
	t.Cleanup(func() {
		var stopping sync.WaitGroup
		for _, n := range c.nodes {
			stopping.Go(func() { c.stop(n) })
		}
		stopping.Wait()
	})
	if t.Failed() {
		t.FailNow()
	}
	return c
}

// run starts a broker on its folder.
func (c *cluster) run(n *node) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(c.t.Context()))
	b, err := broker.Open(ctx, n.cfg, c.log)
	if err != nil {
		cancel()
		c.t.Errorf("open broker: %v", err)
		return
	}
	n.id, n.cancel, n.done = b.ID(), cancel, make(chan error, 1)
	go func() { n.done <- b.Run(ctx) }()
}

// stop drains a broker and waits for its end.
func (c *cluster) stop(n *node) {
	if n.cancel == nil {
		return
	}
	n.cancel()
	n.cancel = nil
	if err := <-n.done; err != nil {
		c.t.Errorf("broker ended with: %v", err)
	}
}

// now is the time of an event of a history.
func (c *cluster) now() int64 { return int64(time.Since(c.start)) }

// eventually waits until f says yes.
func (c *cluster) eventually(what string, within time.Duration, f func() bool) {
	c.t.Helper()
	deadline := time.NewTimer(within)
	defer deadline.Stop()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !f() {
		select {
		case <-tick.C:
		case <-deadline.C:
			c.t.Fatalf("not within %v: %s", within, what)
		}
	}
}

// create makes a topic, once the new cluster can.
func (c *cluster) create(name string) {
	c.t.Helper()
	c.eventually("topic "+name+" is created", 15*time.Second, func() bool {
		ctx, cancel := context.WithTimeout(c.t.Context(), 2*time.Second)
		defer cancel()
		_, err := c.nodes[0].admin.CreateTopic(ctx, &v1.CreateTopicRequest{Name: name, Nonce: "the test's own"})
		return err == nil
	})
}

// workers run until stop is called. Each pauses between its calls, so that a history stays short, and makes as many as it likes.
type workers struct {
	ctx    context.Context
	cancel context.CancelFunc
	group  sync.WaitGroup
	done   atomic.Int64 // calls that were answered as asked
}

func (c *cluster) workers() *workers {
	w := &workers{}
	w.ctx, w.cancel = context.WithCancel(c.t.Context())
	c.t.Cleanup(w.stop)
	return w
}

func (w *workers) stop() {
	w.cancel()
	w.group.Wait()
}

// every calls f until the workers stop, with a pause between.
func (w *workers) every(pause time.Duration, f func()) {
	w.group.Go(func() {
		tick := time.NewTicker(pause)
		defer tick.Stop()
		for {
			select {
			case <-w.ctx.Done():
				return
			case <-tick.C:
				f()
			}
		}
	})
}

// more waits until n more calls were answered as asked.
func (c *cluster) more(w *workers, n int64) {
	c.t.Helper()
	until := w.done.Load() + n
	c.eventually(fmt.Sprintf("%d more calls succeed", n), 15*time.Second, func() bool { return w.done.Load() >= until })
}

// outcome is what a caller knows of a call.
type outcome uint8

const (
	okay     outcome = iota // it was done
	refused                 // it was not done, for sure
	unknown                 // it may have been done, or may yet be
	notFound                // metadata: there is no such topic
	exists                  // metadata: there is one already
	conflict                // metadata: it is at another version
)

// outcomeOf reads an error as a caller has to.
func outcomeOf(err error) outcome {
	e := client.AsError("call", err)
	switch {
	case e == nil:
		return okay
	case e.OutcomeUnknown:
		return unknown
	case e.Reason == v1.Reason_TOPIC_NOT_FOUND:
		return notFound
	case e.Reason == v1.Reason_TOPIC_EXISTS:
		return exists
	case e.Reason == v1.Reason_CONFLICT:
		return conflict
	}
	return refused
}
