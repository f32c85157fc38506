package drill

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/malachilog/malachi/client"
	"github.com/malachilog/malachi/e2e/inv"
	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
)

const topic = "drill"

// ledger is what was sent and acknowledged, per key: the n-th record of a key has the value n.
type ledger struct {
	mu    sync.Mutex
	acked map[string]int // records of the key that were acknowledged, in order: all below
	times []time.Time    // of acknowledgements
	fails []error
}

// load writes until the returned function is called: each worker writes record after record of its own keys, so that a key's next record is sent only
// after the one before was acknowledged.
func (c *cluster) load(l *ledger, workers int) (stop func()) {
	c.t.Helper()
	s := c.client()
	ctx, cancel := context.WithCancel(context.WithoutCancel(c.t.Context()))
	var all sync.WaitGroup
	for w := range workers {
		all.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				l.write(ctx, s, fmt.Sprintf("w%d-k%d", w, n%5), n/5)
			}
		})
	}
	return func() {
		cancel()
		all.Wait()
	}
}

func (l *ledger) write(ctx context.Context, s *client.Client, key string, n int) {
	// The record is written to its end whatever happens to ctx: one that is half sent is in no ledger.
	err := s.Produce(context.WithoutCancel(ctx), topic, client.Record{Key: []byte(key), Value: []byte(strconv.Itoa(n))})
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil {
		l.fails = append(l.fails, fmt.Errorf("key %s, record %d: %w", key, n, err))
		return
	}
	l.acked[key] = n + 1
	l.times = append(l.times, time.Now())
}

func newLedger() *ledger { return &ledger{acked: map[string]int{}} }

func (l *ledger) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.times)
}

// grow waits until n more records are acknowledged.
func (l *ledger) grow(t *testing.T, n int) {
	t.Helper()
	from := l.count()
	until(t, fmt.Sprintf("%d more records are acknowledged", n), func() bool { return l.count() >= from+n })
}

// gap is the longest time without an acknowledgement.
func (l *ledger) gap() (longest time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	slices.SortFunc(l.times, func(a, b time.Time) int { return a.Compare(b) })
	for i := 1; i < len(l.times); i++ {
		longest = max(longest, l.times[i].Sub(l.times[i-1]))
	}
	return longest
}

// entry is a record that a reader got.
type entry struct {
	key string
	n   int
}

// judge holds what a reader got against the ledger: every acknowledged record is there, first copies of each key's records are in order and without a
// hole, and nothing is there that was never sent.
func (l *ledger) judge(got []entry) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	next := map[string]int{}
	for _, e := range got {
		switch {
		case e.n == next[e.key]:
			next[e.key]++
		case e.n > next[e.key]:
			return fmt.Errorf("key %s jumps from %d to %d", e.key, next[e.key], e.n)
		}
	}
	for key, acked := range l.acked {
		if next[key] < acked {
			return fmt.Errorf("key %s: %d records were acknowledged, %d are read", key, acked, next[key])
		}
	}
	for key, n := range next {
		if n > l.acked[key]+1 {
			return fmt.Errorf("key %s: %d records are read, %d were acknowledged and one more may have been sent", key, n, l.acked[key])
		}
	}
	return nil
}

// read reads everything through one broker.
func (c *cluster) read(b *node, page int) (got []entry, err error) {
	ctx, cancel := context.WithTimeout(c.t.Context(), patience)
	defer cancel()
	consumer, err := c.client(b).Consume(topic, client.ConsumeConfig{ExitAtEnd: true, MaxRecords: page})
	if err != nil {
		return nil, err
	}
	for r, err := range consumer.Records(ctx) {
		if err != nil {
			return got, err
		}
		n, err := strconv.Atoi(string(r.Value))
		if err != nil {
			return got, err
		}
		got = append(got, entry{string(r.Key), n})
	}
	return got, nil
}

// check has every broker that runs read everything.
func (c *cluster) check(l *ledger) {
	c.t.Helper()
	for _, err := range l.fails {
		c.t.Errorf("a call failed although the SDK tries again: %v", err)
	}
	for i, b := range c.nodes {
		if !b.running() {
			continue
		}
		got, err := c.read(b, 500*(i+1))
		if err != nil {
			c.t.Errorf("reader at node %d: %v", b.number, err)
			continue
		}
		if err := l.judge(got); err != nil {
			c.t.Errorf("reader at node %d: %v", b.number, err)
		}
		twice := map[entry]int{}
		extra := 0
		for _, e := range got {
			if twice[e]++; twice[e] > 1 {
				extra++
			}
		}
		c.t.Logf("reader at node %d: %d records, %d of them sent again", b.number, len(got), extra)
	}
	c.t.Logf("%d acknowledged; the longest time without an acknowledgement was %v", l.count(), l.gap().Round(time.Millisecond))
}

// create makes the topic.
func (c *cluster) create(ranges int32) {
	c.t.Helper()
	if _, err := c.client().Admin().CreateTopic(c.t.Context(), &v1.CreateTopicRequest{Name: topic, InitialRanges: ranges}); err != nil {
		c.t.Fatal(err)
	}
}

// TestJudgeSees gives the checker one of each fault.
func TestJudgeSees(t *testing.T) {
	inv.Covers(t, "INV-H1")
	good := func() []entry {
		var out []entry
		for n := range 5 {
			out = append(out, entry{"a", n}, entry{"b", n})
		}
		return out
	}
	l := newLedger()
	l.acked["a"], l.acked["b"] = 5, 5
	if err := l.judge(good()); err != nil {
		t.Fatalf("a whole log: %v", err)
	}
	if err := l.judge(slices.Insert(good(), 6, entry{"a", 1})); err != nil {
		t.Errorf("a record that was sent again: %v", err)
	}
	swapped := good()
	swapped[2], swapped[4] = swapped[4], swapped[2]
	for name, got := range map[string][]entry{
		"the last record is missing": good()[:9],
		"a record is missing":        slices.Delete(good(), 4, 5),
		"two are swapped":            swapped,
		"a key is missing":           slices.DeleteFunc(good(), func(e entry) bool { return e.key == "b" }),
		"another value":              append(good()[:8], entry{"a", 7}, entry{"b", 4}),
		"more than was sent":         append(good(), entry{"a", 5}, entry{"a", 6}),
	} {
		if l.judge(got) == nil {
			t.Errorf("%s: not noticed", name)
		}
	}
}

var errNoFault = errors.New("the fault did not happen")
