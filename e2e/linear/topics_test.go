package linear

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/malachilog/malachi/e2e/inv"
	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
)

// topicState is what one name stands for.
type topicState struct {
	exists  bool
	uid     string // empty while nobody was told of it
	label   string // unique to the call that set it
	version uint64
	over    bool // the history has ended: what is not done by now never is
}

type topicKind uint8

const (
	topicCreate topicKind = iota
	topicUpdate           // if the version is expect
	topicDelete
	topicRead
	topicEnd // the end of the history
)

// topicCall is one call on one name.
type topicCall struct {
	kind   topicKind
	name   string
	label  string
	expect uint64
}

// topicAnswer is what came of it. uid, label and version are those of a read, uid is also that of a creation.
type topicAnswer struct {
	outcome outcome
	uid     string
	label   string
	version uint64
}

// topicModel says what the calls on one name may answer, one after the other.
var topicModel = porcupine.Model{
	Init:  func() any { return topicState{} },
	Equal: func(a, b any) bool { return a.(topicState) == b.(topicState) },
	Partition: func(history []porcupine.Operation) (out [][]porcupine.Operation) {
		of := map[string][]porcupine.Operation{}
		for _, op := range history {
			name := op.Input.(topicCall).name
			of[name] = append(of[name], op)
		}
		for name, ops := range of {
			last := int64(0)
			for _, op := range ops {
				last = max(last, op.Call)
				if op.Return != math.MaxInt64 {
					last = max(last, op.Return)
				}
			}
			out = append(out, append(ops, porcupine.Operation{Input: topicCall{kind: topicEnd, name: name}, Output: topicAnswer{}, Call: last + 1, Return: last + 2}))
		}
		return out
	},
	Step: func(state, input, output any) (bool, any) {
		return topicStep(state.(topicState), input.(topicCall), output.(topicAnswer))
	},
	DescribeOperation: func(input, output any) string { return fmt.Sprintf("%+v -> %+v", input, output) },
}

func topicStep(s topicState, c topicCall, a topicAnswer) (bool, topicState) {
	if s.over { // only what nobody has an answer to is left
		return a.outcome == unknown, s
	}
	switch c.kind {
	case topicEnd:
		s.over = true
		return true, s
	case topicRead:
		if a.outcome == notFound {
			return !s.exists, s
		}
		if !s.exists || s.label != a.label || s.version != a.version || s.uid != "" && s.uid != a.uid {
			return false, s
		}
		s.uid = a.uid
		return true, s
	case topicCreate:
		if a.outcome == exists {
			return s.exists, s
		}
		// "Not found" is the answer if it was made, and deleted again before the answer.
		return !s.exists, topicState{exists: true, uid: a.uid, label: c.label, version: 1}
	case topicDelete:
		if a.outcome == notFound {
			return !s.exists, s
		}
		return s.exists, topicState{}
	}
	switch {
	case a.outcome == conflict:
		return s.exists && s.version != c.expect, s
	case a.outcome == notFound && !s.exists:
		return true, s
	case !s.exists || s.version != c.expect:
		return false, s
	}
	s.label, s.version = c.label, s.version+1 // also if it is not found: then it was deleted before the answer
	return true, s
}

// topicHistory is what the workers have seen.
type topicHistory struct {
	c   *cluster
	mu  sync.Mutex
	ops []porcupine.Operation
	// last are the newest versions that anybody was told of, by name.
	last     map[string]uint64
	outcomes map[topicKind]map[outcome]int
}

func (h *topicHistory) add(c topicCall, a topicAnswer, from, to int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.outcomes[c.kind] == nil {
		h.outcomes[c.kind] = map[outcome]int{}
	}
	h.outcomes[c.kind][a.outcome]++
	switch {
	case a.outcome == refused, c.kind == topicRead && a.outcome == unknown:
		return // it has done nothing: a trace of it in what others saw is a fault
	case a.outcome == unknown:
		to = math.MaxInt64
	case c.kind == topicRead && a.outcome == okay:
		h.last[c.name] = a.version
	case c.kind == topicCreate && a.outcome == okay:
		h.last[c.name] = 1
	}
	h.ops = append(h.ops, porcupine.Operation{Input: c, Output: a, Call: from, Return: to})
}

// observed adds the topic that a call has answered with: it is as at some time between call and answer, when others may have changed it again.
func (h *topicHistory) observed(t *v1.Topic, from, to int64) {
	h.add(topicCall{kind: topicRead, name: t.GetName()}, topicAnswer{uid: t.GetUid(), label: t.GetLabels()["by"], version: t.GetMetaVersion()}, from, to)
}

// call makes one random call on a random name by way of one broker.
func (h *topicHistory) call(ctx context.Context, n *node, r *rand.Rand, id string) bool {
	call := topicCall{name: fmt.Sprintf("t%d", r.IntN(3)), label: id}
	wait := 3 * time.Second
	if r.IntN(30) == 0 { // the caller gives up, perhaps in the middle
		wait = time.Duration(r.IntN(4000)) * time.Microsecond
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	labels := map[string]string{"by": id}
	var topic *v1.Topic
	var err error
	from := h.c.now()
	switch k := r.IntN(20); {
	case k < 4:
		call.kind = topicCreate
		var res *v1.CreateTopicResponse
		res, err = n.admin.CreateTopic(ctx, &v1.CreateTopicRequest{Name: call.name, Labels: labels})
		topic = res.GetTopic()
	case k < 6:
		call.kind = topicDelete
		_, err = n.admin.DeleteTopic(ctx, &v1.DeleteTopicRequest{Name: call.name})
	case k < 13:
		call.kind = topicUpdate
		h.mu.Lock()
		call.expect = max(1, h.last[call.name])
		h.mu.Unlock()
		var res *v1.UpdateTopicResponse
		res, err = n.admin.UpdateTopic(ctx, &v1.UpdateTopicRequest{Name: call.name, ExpectMetaVersion: call.expect, Labels: &v1.LabelSet{Labels: labels}})
		topic = res.GetTopic()
	default:
		call.kind = topicRead
		var res *v1.DescribeTopicResponse
		res, err = n.admin.DescribeTopic(ctx, &v1.DescribeTopicRequest{Name: call.name})
		topic = res.GetTopic()
	}
	to := h.c.now()
	answer := topicAnswer{outcome: outcomeOf(err), uid: topic.GetUid()}
	if err == nil && topic != nil {
		h.observed(topic, from, to)
	}
	if err != nil || call.kind != topicRead {
		h.add(call, answer, from, to)
	}
	return err == nil
}

// TestTopicsAreLinearizable: what callers of all brokers see of topics is explained by one order of their calls, while a broker stops and comes back,
// and callers give up in the middle.
func TestTopicsAreLinearizable(t *testing.T) {
	inv.Covers(t, "INV-M12", "INV-H1")
	c := newCluster(t)
	c.create("first")
	h := &topicHistory{c: c, last: map[string]uint64{}, outcomes: map[topicKind]map[outcome]int{}}
	w := c.workers()
	for i := range 2 * brokers {
		r, calls := rand.New(rand.NewPCG(c.rand.Uint64(), 0)), 0
		n := c.nodes[i%brokers]
		w.every(15*time.Millisecond, func() {
			calls++
			if h.call(w.ctx, n, r, fmt.Sprintf("%d.%d", i, calls)) {
				w.done.Add(1)
			}
		})
	}
	c.more(w, 100)
	n := c.nodes[c.rand.IntN(brokers)]
	c.stop(n)
	down := h.counts(refused)
	c.more(w, 150)
	if h.counts(refused) == down {
		t.Error("the fault did not happen: no call was refused while a broker was down")
	}
	c.run(n)
	c.more(w, 200)
	w.stop()
	t.Logf("%d operations; per kind and outcome %v", len(h.ops), h.outcomes)
	for _, k := range []topicKind{topicCreate, topicUpdate, topicDelete, topicRead} {
		if h.outcomes[k][okay] == 0 {
			t.Errorf("no call of kind %d succeeded", k)
		}
	}
	decide(t, topicModel, h.ops, porcupine.Ok)
	for name, spoil := range topicFaults {
		t.Run(name, func(t *testing.T) { decide(t, topicModel, spoil(t, h.ops), porcupine.Illegal) })
	}
}

func (h *topicHistory) counts(o outcome) (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, of := range h.outcomes {
		n += of[o]
	}
	return n
}

// decide has porcupine judge a history.
func decide(t *testing.T, m porcupine.Model, history []porcupine.Operation, want porcupine.CheckResult) {
	t.Helper()
	got, info := porcupine.CheckOperationsVerbose(m, history, 20*time.Second)
	if got == want {
		return
	}
	t.Errorf("the checker says %s, want %s", got, want)
	if want == porcupine.Ok && got == porcupine.Illegal {
		for i, partial := range info.PartialLinearizationsOperations() {
			longest := 0
			for _, p := range partial {
				longest = max(longest, len(p))
			}
			t.Logf("partition %d: the longest order explains %d operations", i, longest)
			for _, p := range partial {
				if len(p) == longest {
					for _, op := range p[max(0, len(p)-8):] {
						t.Logf("  [%d, %d] %+v -> %+v", op.Call, op.Return, op.Input, op.Output)
					}
					break
				}
			}
		}
	}
}

// topicFaults spoil a good history, each in a way that must be seen.
var topicFaults = map[string]func(*testing.T, []porcupine.Operation) []porcupine.Operation{
	"an acknowledged update is lost": func(t *testing.T, ops []porcupine.Operation) []porcupine.Operation {
		seen := map[string]bool{}
		for _, op := range ops {
			if c := op.Input.(topicCall); c.kind == topicRead {
				seen[op.Output.(topicAnswer).label] = true
			}
		}
		return without(t, ops, func(c topicCall, a topicAnswer) bool {
			return c.kind == topicUpdate && a.outcome == okay && seen[c.label]
		})
	},
	"a read is stale": func(t *testing.T, ops []porcupine.Operation) []porcupine.Operation {
		ops = slices.Clone(ops)
		slices.SortFunc(ops, func(a, b porcupine.Operation) int { return int(a.Call - b.Call) })
		for i, op := range ops {
			c, a := op.Input.(topicCall), op.Output.(topicAnswer)
			if c.kind == topicRead && a.outcome == okay && i > len(ops)/2 {
				a.version++
				ops[i].Output = a
				return ops
			}
		}
		t.Fatal("no such call")
		return nil
	},
	"a name has two topics": func(t *testing.T, ops []porcupine.Operation) []porcupine.Operation {
		for _, op := range ops {
			if c := op.Input.(topicCall); c.kind == topicCreate && op.Output.(topicAnswer).outcome == okay {
				twin := op
				c.label, twin.Output = "twin", topicAnswer{uid: "twin"}
				twin.Input, twin.Call, twin.Return = c, op.Return+1, op.Return+1
				next := int64(math.MaxInt64)
				for _, other := range ops { // where nothing but the creation is under way
					if o := other.Input.(topicCall); o.name == c.name && o.kind != topicRead && other.Return > op.Return && other.Input != op.Input {
						next = min(next, other.Call)
					}
				}
				if next > op.Return+1 {
					return append(slices.Clone(ops), twin)
				}
			}
		}
		t.Skip("every creation of this history has others beside it")
		return nil
	},
}

func without(t *testing.T, ops []porcupine.Operation, which func(topicCall, topicAnswer) bool) []porcupine.Operation {
	t.Helper()
	for i, op := range ops {
		if which(op.Input.(topicCall), op.Output.(topicAnswer)) {
			return slices.Delete(slices.Clone(ops), i, i+1)
		}
	}
	t.Fatal("no such call")
	return nil
}

// TestTopicModelSees gives the model short histories by hand, of which it must take the good and refuse the bad ones.
func TestTopicModelSees(t *testing.T) {
	inv.Covers(t, "INV-H1")
	op := func(from, to int64, c topicCall, a topicAnswer) porcupine.Operation {
		c.name = "t"
		return porcupine.Operation{Input: c, Output: a, Call: from, Return: to}
	}
	create := func(from, to int64, label string, o outcome) porcupine.Operation {
		return op(from, to, topicCall{kind: topicCreate, label: label}, topicAnswer{outcome: o})
	}
	read := func(from, to int64, label string, version uint64) porcupine.Operation {
		return op(from, to, topicCall{kind: topicRead}, topicAnswer{label: label, version: version, uid: "u"})
	}
	update := func(from, to int64, label string, expect uint64, o outcome) porcupine.Operation {
		return op(from, to, topicCall{kind: topicUpdate, label: label, expect: expect}, topicAnswer{outcome: o})
	}
	const never = math.MaxInt64
	for _, c := range []struct {
		name string
		want porcupine.CheckResult
		ops  []porcupine.Operation
	}{
		{"read what was made", porcupine.Ok, []porcupine.Operation{create(1, 2, "a", okay), read(3, 4, "a", 1)}},
		{"unknown was done", porcupine.Ok, []porcupine.Operation{create(1, never, "a", unknown), read(3, 4, "a", 1)}},
		{"unknown was done late", porcupine.Ok, []porcupine.Operation{create(1, never, "a", unknown), create(3, 4, "b", okay), read(5, 6, "b", 1)}},
		{"conflict after an unknown update", porcupine.Ok, []porcupine.Operation{create(1, 2, "a", okay), update(3, never, "b", 1, unknown), update(5, 6, "c", 1, conflict)}},
		{"one expected version, two updates", porcupine.Illegal, []porcupine.Operation{create(1, 2, "a", okay), update(3, 4, "b", 1, okay), update(3, 4, "c", 1, okay)}},
		{"an unknown update is done twice", porcupine.Illegal, []porcupine.Operation{create(1, 2, "a", okay), update(3, never, "b", 1, unknown), read(4, 5, "b", 3)}},
		{"a stale read", porcupine.Illegal, []porcupine.Operation{create(1, 2, "a", okay), update(3, 4, "b", 1, okay), read(5, 6, "a", 1)}},
		{"a refused creation shows", porcupine.Illegal, []porcupine.Operation{read(3, 4, "a", 1)}},
		{"made twice", porcupine.Illegal, []porcupine.Operation{create(1, 2, "a", okay), create(3, 4, "b", okay)}},
		{"an update goes back", porcupine.Illegal, []porcupine.Operation{create(1, 2, "a", okay), update(1, 9, "b", 1, okay), read(3, 4, "b", 2), read(5, 6, "a", 1)}},
	} {
		t.Run(c.name, func(t *testing.T) { decide(t, topicModel, c.ops, c.want) })
	}
}
