package linear

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/crc64"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/malachilog/malachi/client"
	"github.com/malachilog/malachi/e2e/inv"
	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
)

// logState is one range: how many records it has, and what they are, in their order.
type logState struct {
	tail int
	hash uint64
}

var table = crc64.MakeTable(crc64.ECMA)

// with is the range with one more record.
func (s logState) with(value string) logState {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], s.hash)
	return logState{s.tail + 1, crc64.Update(crc64.Checksum(b[:], table), table, []byte(value))}
}

// logCall is an append of one record (of a value that no other has), or, without a value, a read of everything.
type logCall struct{ value string }

// logAnswer is what came of it.
type logAnswer struct {
	outcome outcome
	// at is the place of the appended record among all that were read at the end; -1: it is not there.
	at int
	// read is what a read has seen: the whole range as it was then, or, if more, not necessarily all of it.
	read logState
	more bool
}

// logModel says what appends to, and reads of, one range may answer, one after the other.
var logModel = porcupine.Model{
	Init:  func() any { return logState{} },
	Equal: func(a, b any) bool { return a.(logState) == b.(logState) },
	Step: func(state, input, output any) (bool, any) {
		s, c, a := state.(logState), input.(logCall), output.(logAnswer)
		switch {
		case c.value != "":
		case a.more: // that it is the beginning of the log, the test has compared
			return a.read.tail <= s.tail, s
		default:
			return a.read == s, s
		}
		if a.outcome == refused || a.at != s.tail {
			return false, s
		}
		return true, s.with(c.value)
	},
	DescribeOperation: func(input, output any) string { return fmt.Sprintf("%+v -> %+v", input, output) },
}

// placed makes a history of calls whose appends know their place, which all brokers agreed on in the end. What is not there and was not acknowledged
// has no part in it: nobody can have seen it.
func placed(ops []porcupine.Operation, final []string) []porcupine.Operation {
	at := map[string]int{}
	for i, v := range final {
		at[v] = i
	}
	var out []porcupine.Operation
	for _, op := range ops {
		if c := op.Input.(logCall); c.value != "" {
			a := op.Output.(logAnswer)
			var ok bool
			if a.at, ok = at[c.value]; !ok {
				a.at = -1
			}
			if !ok && a.outcome != okay {
				continue
			}
			op.Output = a
		}
		out = append(out, op)
	}
	return out
}

// logHistory is what the workers have seen of the one range of a topic.
type logHistory struct {
	c     *cluster
	topic string

	mu       sync.Mutex
	ops      []porcupine.Operation
	outcomes map[outcome]int
	whys     map[string]int
	reads    int
	seen     map[string][]string // what each reader has read
}

// append appends one record by way of a broker.
func (h *logHistory) append(ctx context.Context, n *node, r *rand.Rand, value string) bool {
	wait := 4 * time.Second
	if r.IntN(40) == 0 { // the caller gives up, perhaps in the middle
		wait = time.Duration(r.IntN(3000)) * time.Microsecond
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	from := h.c.now()
	res, err := n.produce.Produce(ctx, &v1.ProduceRequest{Topic: h.topic, Records: []*v1.Record{{
		Key: &v1.Payload{Form: &v1.Payload_Text{Text: "k"}}, Value: &v1.Payload{Form: &v1.Payload_Text{Text: value}},
	}}})
	to := h.c.now()
	out := outcomeOf(err)
	why := ""
	if out != okay {
		why = client.AsError("append", err).Error()
	}
	if out != okay && out != unknown {
		out = refused
	}
	if err == nil {
		if e := res.GetResults()[0].GetError(); e != nil {
			if out, why = refused, e.GetDetail().GetReason().String(); e.GetDetail().GetOutcomeUnknown() {
				out = unknown
			}
		}
	}
	if out == unknown {
		to = math.MaxInt64
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.outcomes[out]++
	if i := strings.IndexByte(why, ':'); i > 0 {
		why = why[:min(len(why), 60)]
	}
	h.whys[why]++
	h.ops = append(h.ops, porcupine.Operation{Input: logCall{value}, Output: logAnswer{outcome: out}, Call: from, Return: to})
	return out == okay
}

// reader reads on from where it was, by way of one broker.
type reader struct {
	h      *logHistory
	n      *node
	name   string
	cursor string
	read   []string
	state  logState
}

// step reads one page. If it is empty and the server says that there was no more, the reader has seen the whole range at some time during this call.
func (r *reader) step(ctx context.Context) (atTail bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, 4*time.Second)
	defer cancel()
	from := r.h.c.now()
	res, err := r.n.fetch.Fetch(ctx, &v1.FetchRequest{Topic: r.h.topic, Cursor: r.cursor, MaxRecords: 200, Encoding: v1.Encoding_TEXT, WantAtTail: true, FailOnGap: true})
	to := r.h.c.now()
	if err != nil {
		return false, err
	}
	for _, rec := range res.GetRecords() {
		v := rec.GetValue().GetText()
		r.read = append(r.read, v)
		r.state = r.state.with(v)
	}
	r.cursor = res.GetCursor()
	r.h.mu.Lock()
	defer r.h.mu.Unlock()
	r.h.seen[r.name] = r.read
	atTail = len(res.GetRecords()) == 0 && res.GetAtTail()
	if atTail {
		r.h.reads++
	}
	r.h.ops = append(r.h.ops, porcupine.Operation{Input: logCall{}, Output: logAnswer{read: r.state, more: !atTail}, Call: from, Return: to})
	return atTail, nil
}

// whole reads everything, by way of one broker.
func (h *logHistory) whole(n *node, name string) []string {
	h.c.t.Helper()
	r := &reader{h: h, n: n, name: name}
	var last error
	h.c.eventually("everything is read", 15*time.Second, func() bool {
		done, err := r.step(h.c.t.Context())
		last = err
		return done
	})
	if last != nil {
		h.c.t.Fatal(last)
	}
	return r.read
}

// primary is the broker that serves the range's open segment, and how many segments there are.
func (h *logHistory) primary() (n *node, segments int) {
	for _, asked := range h.c.nodes {
		ctx, cancel := context.WithTimeout(h.c.t.Context(), 2*time.Second)
		res, err := asked.admin.ListSegments(ctx, &v1.ListSegmentsRequest{Topic: h.topic})
		cancel()
		if err != nil {
			continue
		}
		segments = len(res.GetSegments())
		if segments == 0 || res.GetSegments()[segments-1].GetState() != v1.Segment_OPEN {
			return nil, segments
		}
		for _, n := range h.c.nodes {
			if n.id.String() == res.GetSegments()[segments-1].GetReplicas()[0] {
				return n, segments
			}
		}
	}
	return nil, segments
}

// TestAppendsAreLinearizable: every acknowledged record is in the range, in an order that calls which did not overlap were made in; readers of all
// brokers who are told that they are at the tail have seen every record that was acknowledged before they asked; what was refused is not there. All that
// while segments roll each second, and the broker that serves the range is stopped, twice.
func TestAppendsAreLinearizable(t *testing.T) {
	inv.Covers(t, "INV-C13", "INV-H1")
	c := newCluster(t)
	c.create("log")
	if _, err := c.nodes[0].admin.UpdatePolicy(t.Context(), &v1.UpdatePolicyRequest{Name: "default", SegmentMaxAge: durationpb.New(time.Second)}); err != nil {
		t.Fatal(err)
	}
	h := &logHistory{c: c, topic: "log", outcomes: map[outcome]int{}, whys: map[string]int{}, seen: map[string][]string{}}
	w := c.workers()
	for i := range 2 * brokers {
		r, calls := rand.New(rand.NewPCG(c.rand.Uint64(), 0)), 0
		n := c.nodes[i%brokers]
		w.every(10*time.Millisecond, func() {
			if c.now()/int64(100*time.Millisecond)%3 == 2 { // in bursts, so that readers get to the tail
				return
			}
			calls++
			if h.append(w.ctx, n, r, fmt.Sprintf("%d.%d", i, calls)) {
				w.done.Add(1)
			}
		})
	}
	for i, n := range c.nodes {
		r := &reader{h: h, n: n, name: fmt.Sprintf("reader %d", i)}
		w.every(20*time.Millisecond, func() {
			_, _ = r.step(w.ctx) // a reader that gets no answer asks again
		})
	}
	for range 2 {
		c.more(w, 100)
		var n *node
		c.eventually("the range is served", 10*time.Second, func() bool { n, _ = h.primary(); return n != nil })
		c.stop(n)
		c.more(w, 100)
		c.run(n)
	}
	c.more(w, 150)
	w.stop()
	if _, segments := h.primary(); segments < 4 {
		t.Errorf("%d segments: they did not roll", segments)
	}
	var final []string // of the last one: the others must have the beginning of it, and what they said of the tail is in the history
	for i, n := range c.nodes {
		final = h.whole(n, fmt.Sprintf("last %d", i))
	}
	t.Logf("%d records, %d reads at the tail, per outcome %v: %v", len(final), h.reads, h.outcomes, h.whys)
	if h.reads < 10 || h.outcomes[okay] < 400 || h.outcomes[refused] == 0 {
		t.Error("too few calls of some kind: the history says little")
	}
	for name, read := range h.seen {
		if len(read) > len(final) || !slices.Equal(read, final[:len(read)]) {
			t.Errorf("%s has read something else than the beginning of the log", name)
		}
	}
	for i, v := range slices.Sorted(slices.Values(final)) {
		if sorted := slices.Sorted(slices.Values(final)); i > 0 && sorted[i-1] == v {
			t.Errorf("record %s is there twice", v)
		}
	}
	history := placed(h.ops, final)
	decide(t, logModel, history, porcupine.Ok)
	h.controls(t, history, final)
}

// controls spoil the history: each time the checker must see it.
func (h *logHistory) controls(t *testing.T, history []porcupine.Operation, final []string) {
	acked := map[string]porcupine.Operation{}
	for _, op := range history {
		if c := op.Input.(logCall); c.value != "" && op.Output.(logAnswer).outcome == okay {
			acked[c.value] = op
		}
	}
	middle := len(final) / 2
	for acked[final[middle]].Return == 0 {
		middle++
	}
	t.Run("an acknowledged record is lost", func(t *testing.T) {
		decide(t, logModel, placed(h.appends(), slices.Delete(slices.Clone(final), middle, middle+1)), porcupine.Illegal)
	})
	t.Run("two records are swapped", func(t *testing.T) {
		for i := middle; i < len(final); i++ {
			for j := i + 1; j < len(final); j++ {
				a, b := acked[final[i]], acked[final[j]]
				if a.Return == 0 || b.Return == 0 || a.Return >= b.Call {
					continue
				}
				swapped := slices.Clone(final)
				swapped[i], swapped[j] = swapped[j], swapped[i]
				decide(t, logModel, placed(h.appends(), swapped), porcupine.Illegal)
				return
			}
		}
		t.Fatal("no two calls of this history were one after the other")
	})
	t.Run("a byte is flipped", func(t *testing.T) {
		spoiled := slices.Clone(history)
		for i, op := range spoiled {
			if a := op.Output.(logAnswer); a.read.tail > 0 && !a.more {
				a.read.hash ^= 1
				spoiled[i].Output = a
				decide(t, logModel, spoiled, porcupine.Illegal)
				return
			}
		}
		t.Fatal("nothing was read")
	})
	t.Run("a reader at the tail misses the last record", func(t *testing.T) {
		states := []logState{{}}
		for _, v := range final {
			states = append(states, states[len(states)-1].with(v))
		}
		spoiled := slices.Clone(history)
		for i, op := range slices.Backward(spoiled) {
			a := op.Output.(logAnswer)
			if a.read.tail == 0 || a.more || acked[final[a.read.tail-1]].Return == 0 || acked[final[a.read.tail-1]].Return >= op.Call {
				continue
			}
			a.read = states[a.read.tail-1]
			spoiled[i].Output = a
			decide(t, logModel, spoiled, porcupine.Illegal)
			return
		}
		t.Fatal("no reader was told of a tail")
	})
	t.Run("a refused record is there", func(t *testing.T) {
		spoiled := slices.Clone(history)
		for i, op := range spoiled {
			if op.Input.(logCall).value == final[middle] {
				spoiled[i].Output = logAnswer{outcome: refused, at: middle}
			}
		}
		decide(t, logModel, spoiled, porcupine.Illegal)
	})
}

// appends are the history's appends alone: what a checker sees where nobody reads before the end.
func (h *logHistory) appends() []porcupine.Operation {
	return slices.DeleteFunc(slices.Clone(h.ops), func(op porcupine.Operation) bool { return op.Input.(logCall).value == "" })
}

// TestLogModelSees gives the model short histories by hand, of which it must take the good and refuse the bad ones.
func TestLogModelSees(t *testing.T) {
	inv.Covers(t, "INV-H1")
	add := func(from, to int64, value string, o outcome) porcupine.Operation {
		return porcupine.Operation{Input: logCall{value}, Output: logAnswer{outcome: o}, Call: from, Return: to}
	}
	read := func(from, to int64, values ...string) porcupine.Operation {
		var s logState
		for _, v := range values {
			s = s.with(v)
		}
		return porcupine.Operation{Input: logCall{}, Output: logAnswer{read: s}, Call: from, Return: to}
	}
	page := func(from, to int64, values ...string) porcupine.Operation {
		op := read(from, to, values...)
		a := op.Output.(logAnswer)
		a.more = true
		op.Output = a
		return op
	}
	const never = math.MaxInt64
	for _, c := range []struct {
		name  string
		want  porcupine.CheckResult
		final []string
		ops   []porcupine.Operation
	}{
		{"in order", porcupine.Ok, []string{"a", "b"}, []porcupine.Operation{add(1, 2, "a", okay), read(3, 4, "a"), add(5, 6, "b", okay)}},
		{"beside one another, in either order", porcupine.Ok, []string{"b", "a"}, []porcupine.Operation{add(1, 5, "a", okay), add(2, 4, "b", okay)}},
		{"unknown, and there", porcupine.Ok, []string{"b", "a"}, []porcupine.Operation{add(1, never, "a", unknown), add(3, 4, "b", okay), read(5, 6, "b")}},
		{"unknown, and not there", porcupine.Ok, []string{"b"}, []porcupine.Operation{add(1, never, "a", unknown), add(3, 4, "b", okay)}},
		{"lost", porcupine.Illegal, []string{"b"}, []porcupine.Operation{add(1, 2, "a", okay), add(3, 4, "b", okay)}},
		{"swapped", porcupine.Illegal, []string{"b", "a"}, []porcupine.Operation{add(1, 2, "a", okay), add(3, 4, "b", okay)}},
		{"refused, and there", porcupine.Illegal, []string{"a"}, []porcupine.Operation{add(1, 2, "a", refused)}},
		{"a reader at the tail misses one", porcupine.Illegal, []string{"a"}, []porcupine.Operation{add(1, 2, "a", okay), read(3, 4)}},
		{"seen, then gone", porcupine.Illegal, []string{"b"}, []porcupine.Operation{add(1, never, "a", unknown), read(3, 4, "a"), add(5, 6, "b", okay)}},
		{"a page of more", porcupine.Ok, []string{"a", "b"}, []porcupine.Operation{add(1, 2, "a", okay), add(3, 4, "b", okay), page(5, 6, "a")}},
		{"a page before it was sent", porcupine.Illegal, []string{"a"}, []porcupine.Operation{page(1, 2, "a"), add(3, 4, "a", okay)}},
		{"read before it was sent", porcupine.Illegal, []string{"a"}, []porcupine.Operation{read(1, 2, "a"), add(3, 4, "a", okay)}},
	} {
		t.Run(c.name, func(t *testing.T) { decide(t, logModel, placed(c.ops, c.final), c.want) })
	}
}
