// Package drill runs three real brokers as processes of their own, does to them what happens to machines, and holds what three readers get against a
// ledger of what was acknowledged. A drill whose fault did not happen fails.
package drill

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/malachilog/malachi/client"
	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
)

// patience is how long anything may take that a healthy cluster does at once.
const patience = 40 * time.Second

// node is one broker process.
type node struct {
	t      *testing.T
	number int
	dir    string // configuration, data and ready file
	data   string
	ports  []string // api, ops, rpc, raft, gossip
	extra  string   // configuration lines
	cmd    *exec.Cmd
	exited chan struct{}
	id     string
	log    logBuffer
}

// logBuffer is what all starts of a node have said.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logBuffer) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(b)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// cluster is some brokers and the binary that they run.
type cluster struct {
	t      *testing.T
	binary string
	nodes  []*node
	// explained are ERROR lines that the drill's fault explains, by a part of their text.
	explained []string
}

var binary = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "malachi-drill")
	if err != nil {
		return "", err
	}
	out := filepath.Join(dir, "malachi")
	b, err := exec.Command("go", "build", "-o", out, "github.com/malachilog/malachi/cmd/malachi").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("build: %w\n%s", err, b)
	}
	return out, nil
})

// newCluster plans n brokers that found a cluster together, without starting them.
func newCluster(t *testing.T, n int) *cluster {
	t.Helper()
	bin, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{t: t, binary: bin}
	for range n {
		c.add("")
	}
	var founders []string
	for _, b := range c.nodes {
		founders = append(founders, b.ports[2])
	}
	list := "[" + strings.Join(founders, ", ") + "]"
	for _, b := range c.nodes {
		b.extra = fmt.Sprintf("bootstrap_expect: %d\nfounders: %s\njoin: %s\n", n, list, list)
	}
	t.Cleanup(c.end)
	return c
}

// add plans one more broker.
func (c *cluster) add(extra string) *node {
	c.t.Helper()
	b := &node{t: c.t, number: len(c.nodes) + 1, dir: c.t.TempDir(), extra: extra}
	b.data = filepath.Join(b.dir, "data")
	var open []net.Listener
	for range 5 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			c.t.Fatal(err)
		}
		open = append(open, l)
		b.ports = append(b.ports, l.Addr().String())
	}
	for _, l := range open {
		_ = l.Close()
	}
	c.nodes = append(c.nodes, b)
	return b
}

// end kills what runs, and looks for what no fault explains.
func (c *cluster) end() {
	for _, b := range c.nodes {
		if b.running() {
			b.signal(syscall.SIGKILL)
			<-b.exited
		}
	}
	for _, b := range c.nodes {
		for line := range strings.Lines(b.log.String()) {
			if slices.ContainsFunc(c.explained, func(part string) bool { return strings.Contains(line, part) }) {
				continue
			}
			if strings.Contains(line, "level=ERROR") || strings.Contains(line, "panic:") || strings.Contains(line, "DATA RACE") {
				c.t.Errorf("node %d says what no fault explains: %s", b.number, line)
			}
		}
		if c.t.Failed() {
			text := b.log.String()
			c.t.Logf("node %d, last lines:\n%s", b.number, text[max(0, len(text)-3000):])
		}
	}
}

func (b *node) running() bool {
	if b.cmd == nil {
		return false
	}
	select {
	case <-b.exited:
		return false
	default:
		return true
	}
}

func (b *node) signal(s syscall.Signal) {
	b.t.Helper()
	if err := syscall.Kill(b.cmd.Process.Pid, s); err != nil {
		b.t.Errorf("the fault did not happen: signal %v to node %d: %v", s, b.number, err)
	}
}

// launch starts the process.
func (b *node) launch() {
	b.t.Helper()
	bin, _ := binary()
	conf := filepath.Join(b.dir, "node.yaml")
	text := fmt.Sprintf("data: %q\napi: %s\nops: %s\nrpc: %s\nraft: %s\ngossip: %s\nvnodes: 4\ndisk_reserve: 64MiB\njournal_file_bytes: 16MiB\njournal_max_bytes: 256MiB\n%s",
		b.data, b.ports[0], b.ports[1], b.ports[2], b.ports[3], b.ports[4], b.extra)
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		b.t.Fatal(err)
	}
	if err := os.Remove(b.readyFile()); err != nil && !errors.Is(err, os.ErrNotExist) {
		b.t.Fatal(err)
	}
	b.cmd = exec.Command(bin, "server", "--config", conf, "--ready-file", b.readyFile())
	b.cmd.Stderr, b.cmd.Stdout = &b.log, &b.log
	b.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := b.cmd.Start(); err != nil {
		b.t.Fatal(err)
	}
	b.exited = make(chan struct{})
	go func(cmd *exec.Cmd, exited chan struct{}) {
		_ = cmd.Wait() // how it ended is in cmd.ProcessState
		close(exited)
	}(b.cmd, b.exited)
}

func (b *node) readyFile() string { return filepath.Join(b.dir, "ready.json") }

// await waits until the broker serves.
func (b *node) await() {
	b.t.Helper()
	until(b.t, fmt.Sprintf("node %d serves", b.number), func() bool {
		if !b.running() {
			b.t.Fatalf("node %d has ended: %v\n%s", b.number, b.cmd.ProcessState, b.log.String())
		}
		body, err := os.ReadFile(b.readyFile())
		if err != nil {
			return false
		}
		var f struct{ Nodes []struct{ ID string } }
		if json.Unmarshal(body, &f) != nil || len(f.Nodes) != 1 {
			return false
		}
		b.id = f.Nodes[0].ID
		return b.ready()
	})
}

func (b *node) ready() bool {
	res, err := http.Get("http://" + b.ports[1] + "/readyz")
	if err != nil {
		return false
	}
	defer func() { _ = res.Body.Close() }()
	_, _ = io.Copy(io.Discard, res.Body)
	return res.StatusCode == http.StatusOK
}

// kill ends the process without warning, and makes sure of it.
func (b *node) kill() {
	b.t.Helper()
	b.signal(syscall.SIGKILL)
	<-b.exited
	if b.cmd.ProcessState.Success() {
		b.t.Errorf("the fault did not happen: node %d ended by itself", b.number)
	}
}

// stop ends the process in an orderly way.
func (b *node) stop() {
	b.t.Helper()
	b.signal(syscall.SIGTERM)
	select {
	case <-b.exited:
	case <-time.After(patience):
		b.t.Fatalf("node %d does not stop", b.number)
	}
	if code := b.cmd.ProcessState.ExitCode(); code != 0 {
		b.t.Errorf("node %d stops with exit code %d", b.number, code)
	}
}

// start starts all brokers and waits until they serve.
func (c *cluster) start() {
	c.t.Helper()
	for _, b := range c.nodes {
		b.launch()
	}
	for _, b := range c.nodes {
		b.await()
	}
}

func (c *cluster) urls() (out []string) {
	for _, b := range c.nodes {
		out = append(out, "http://"+b.ports[0])
	}
	return out
}

// client is an SDK client of all brokers, or of the one given.
func (c *cluster) client(only ...*node) *client.Client {
	c.t.Helper()
	servers := c.urls()
	if len(only) > 0 {
		servers = []string{"http://" + only[0].ports[0]}
	}
	s, err := client.New(client.Config{Servers: servers, RequestTimeout: 5 * time.Second})
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { // its brokers are gone, and what is under way with them
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		_ = s.Close(ctx)
	})
	return s
}

// byID is the node of a broker id.
func (c *cluster) byID(id string) *node {
	c.t.Helper()
	i := slices.IndexFunc(c.nodes, func(b *node) bool { return b.id == id })
	if i < 0 {
		c.t.Fatalf("no node is broker %s", id)
	}
	return c.nodes[i]
}

// segments of a topic, asked of a node that runs.
func (c *cluster) segments(topic string) []*v1.Segment {
	for _, b := range c.nodes {
		if !b.running() {
			continue
		}
		ctx, cancel := context.WithTimeout(c.t.Context(), 5*time.Second)
		res, err := c.client(b).Admin().ListSegments(ctx, &v1.ListSegmentsRequest{Topic: topic, Page: &v1.PageRequest{PageSize: 1000}})
		cancel()
		if err == nil {
			return res.GetSegments()
		}
	}
	return nil
}

// primary is the node that heads some open segment of a topic.
func (c *cluster) primary(topic string) *node {
	c.t.Helper()
	var found *node
	until(c.t, "the topic has a head", func() bool {
		for _, s := range c.segments(topic) {
			if s.GetState() == v1.Segment_OPEN {
				found = c.byID(s.GetReplicas()[0])
				return true
			}
		}
		return false
	})
	return found
}

// status of the cluster, asked of one node.
func (c *cluster) status(b *node) *v1.GetClusterStatusResponse {
	ctx, cancel := context.WithTimeout(c.t.Context(), 5*time.Second)
	defer cancel()
	res, err := c.client(b).Admin().GetClusterStatus(ctx, &v1.GetClusterStatusRequest{})
	if err != nil {
		return nil
	}
	return res
}

// leader is the node that leads most metadata groups.
func (c *cluster) leader() *node {
	c.t.Helper()
	var id string
	until(c.t, "the metadata has leaders", func() bool {
		count := map[string]int{}
		for _, g := range c.status(c.nodes[0]).GetGroups() {
			count[g.GetLeader()]++
		}
		best := 0
		for l, n := range count {
			if l != "" && n > best {
				id, best = l, n
			}
		}
		return id != ""
	})
	return c.byID(id)
}

// until waits for a condition that others bring about.
func until(t *testing.T, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	late := time.After(patience)
	for !cond() {
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("not in time: %s", what)
		}
	}
}
