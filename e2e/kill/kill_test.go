// Package kill runs the real binary as a process of its own, kills it without warning while it is written to, and holds what several readers get
// against a ledger of what was acknowledged.
package kill

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/malachilog/malachi/client"
	"github.com/malachilog/malachi/e2e/inv"
	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
)

// process is `malachi dev` on one folder.
type process struct {
	t        *testing.T
	binary   string
	folder   string
	api, ops string
	cmd      *exec.Cmd
	log      bytes.Buffer
}

func build(t *testing.T) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "malachi")
	if b, err := exec.CommandContext(t.Context(), "go", "build", "-o", out, "github.com/malachilog/malachi/cmd/malachi").CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, b)
	}
	return out
}

func (p *process) start() {
	p.t.Helper()
	ready := filepath.Join(p.folder, "ready.json")
	if err := os.Remove(ready); err != nil && !errors.Is(err, os.ErrNotExist) {
		p.t.Fatal(err)
	}
	p.cmd = exec.CommandContext(context.WithoutCancel(p.t.Context()), p.binary, "dev", "--data", filepath.Join(p.folder, "data"),
		"--api", p.api, "--ops", p.ops, "--ready-file", ready)
	p.cmd.Stderr = &p.log
	if err := p.cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	deadline := time.NewTimer(30 * time.Second)
	defer deadline.Stop()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		if b, err := os.ReadFile(ready); err == nil {
			var f struct{ Nodes []struct{ API, Ops string } }
			if err := json.Unmarshal(b, &f); err != nil {
				p.t.Fatal(err)
			}
			p.api, p.ops = strings.TrimPrefix(f.Nodes[0].API, "http://"), strings.TrimPrefix(f.Nodes[0].Ops, "http://")
			return
		}
		select {
		case <-tick.C:
		case <-deadline.C:
			p.kill()
			p.t.Fatalf("not ready in 30 s:\n%s", p.log.String())
		}
	}
}

func (p *process) kill() {
	if err := p.cmd.Process.Kill(); err != nil {
		p.t.Errorf("the fault did not happen: %v", err)
	}
	_ = p.cmd.Wait() // killed, and says so
}

// ledger is what was acknowledged, per key.
type ledger struct {
	mu    sync.Mutex
	sent  map[string]int // records given to the client
	acked map[string]map[int]bool
}

func TestKillUnderLoad(t *testing.T) {
	inv.Covers(t, "INV-D3", "INV-S16")
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("SEED=%d", seed)
	rounds := 4
	if testing.Short() {
		rounds = 2
	}
	p := &process{t: t, binary: build(t), folder: t.TempDir(), api: "127.0.0.1:0", ops: "127.0.0.1:0"}
	p.start()
	c, err := client.New(client.Config{Servers: []string{"http://" + p.api}, MaxBatchRecords: 20})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Admin().CreateTopic(t.Context(), &v1.CreateTopicRequest{Name: "t", InitialRanges: 4}); err != nil {
		t.Fatal(err)
	}
	l := &ledger{sent: map[string]int{}, acked: map[string]map[int]bool{}}
	r := rand.New(rand.NewPCG(seed, 0))
	for round := range rounds {
		l.load(t, p, c, r, round)
	}
	if err := c.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	for reader := range 3 {
		l.check(t, c, reader)
	}
	if err := c.Close(t.Context()); err != nil {
		t.Error(err)
	}
	p.kill()
	for _, line := range strings.Split(p.log.String(), "\n") {
		if strings.Contains(line, "level=ERROR") {
			t.Errorf("the broker reports what a kill does not explain: %s", line)
		}
	}
}

// load writes until the broker has been killed in the middle and is back.
func (l *ledger) load(t *testing.T, p *process, c *client.Client, r *rand.Rand, round int) {
	const records = 4000
	killAt := records/4 + r.IntN(records/2)
	dead := make(chan struct{})
	acks := 0
	for n := range records {
		if n == records*3/4+1 {
			<-dead // the rest is written after the kill: the fault can't miss the load
			p.start()
		}
		key := fmt.Sprintf("key-%d", r.IntN(40))
		l.mu.Lock()
		seq := l.sent[key]
		l.sent[key]++
		l.mu.Unlock()
		err := c.ProduceAsync(t.Context(), "t", client.Record{Key: []byte(key), Value: []byte(strconv.Itoa(seq))}, func(res client.Result) {
			if res.Err != nil {
				t.Errorf("round %d: %v", round, res.Err)
				return
			}
			l.mu.Lock()
			defer l.mu.Unlock()
			if l.acked[key] == nil {
				l.acked[key] = map[int]bool{}
			}
			l.acked[key][seq] = true
			if acks++; acks == killAt {
				go func() {
					p.kill()
					close(dead)
				}()
			}
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// check reads everything: each acknowledged record is there, and the first copies of each key's records are in order.
func (l *ledger) check(t *testing.T, c *client.Client, reader int) {
	consumer, err := c.Consume("t", client.ConsumeConfig{ExitAtEnd: true, MaxRecords: 100 * (reader + 1)})
	if err != nil {
		t.Fatal(err)
	}
	next := map[string]int{}
	total, twice := 0, 0
	for rec, err := range consumer.Records(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		total++
		key := string(rec.Key)
		seq, err := strconv.Atoi(string(rec.Value))
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case seq == next[key]:
			next[key]++
		case seq < next[key]:
			twice++ // a batch that was in flight at a kill, sent again
		default:
			t.Fatalf("reader %d: key %s jumps from %d to %d", reader, key, next[key], seq)
		}
	}
	for key, acked := range l.acked {
		if next[key] != len(acked) || len(acked) != l.sent[key] {
			t.Errorf("reader %d: key %s: %d sent, %d acknowledged, %d read", reader, key, l.sent[key], len(acked), next[key])
		}
	}
	t.Logf("reader %d: %d records, %d of them twice", reader, total, twice)
}
