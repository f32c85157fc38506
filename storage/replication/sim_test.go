package replication

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/storage"
)

// world is a replica set whose messages are lost, delayed, doubled and reordered, whose members crash, rot and come back, and over which passes
// race. It checks after every step what must never happen.
type world struct {
	r       *rand.Rand
	set     []storage.BrokerID
	q       int
	members []*member
	primary *Primary
	boot    storage.Boot
	acked   storage.End // highest end that a producer was told
	record  *Outcome
	passes  []*simPass
	net     []func()
	log     []string
	counts  map[string]int
}

// member is one replica: what is on its disk.
type member struct {
	id      storage.BrokerID
	end     storage.End
	fenced  bool
	damaged bool
	up      bool
}

type simPass struct {
	*Pass
	asked map[storage.BrokerID]bool // answered, in this attempt
	over  bool
}

// digestAt stands for the bytes below an end: every replica got the same ones from the one primary.
func digestAt(e storage.End) storage.Digest { return storage.Digest(e)*0x9e3779b97f4a7c15 + 1 }

func newWorld(seed uint64, n, q int) *world {
	w := &world{r: rand.New(rand.NewPCG(seed, 1)), q: q, boot: 1, counts: map[string]int{}}
	for i := range n {
		id := storage.BrokerID(i + 1)
		w.set = append(w.set, id)
		w.members = append(w.members, &member{id: id, up: true})
	}
	p, err := NewPrimary(w.set, q, 0, w.boot, 1)
	if err != nil {
		panic(err)
	}
	w.primary = p
	return w
}

func (w *world) member(id storage.BrokerID) *member { return w.members[id-1] }

func (w *world) note(format string, args ...any) {
	w.log = append(w.log, fmt.Sprintf(format, args...))
	w.counts[fmt.Sprintf("%.12s", format)]++
}

// send queues a message that is delivered later, maybe twice, maybe never.
func (w *world) send(f func()) { w.net = append(w.net, f) }

func (w *world) step() {
	switch x := w.r.Float64(); {
	case x < .25 && w.primary != nil:
		w.appendOne()
	case x < .70 && len(w.net) > 0:
		i := w.r.IntN(len(w.net))
		f := w.net[i]
		if w.r.Float64() < .85 {
			w.net = slices.Delete(w.net, i, i+1)
		}
		if w.r.Float64() > .1 {
			f()
		}
	case x < .75 && len(w.passes) < 3:
		reasons := []Reason{ReasonSize, ReasonRestart, ReasonPrimaryGone, ReasonFenced}
		w.begin(reasons[w.r.IntN(len(reasons))])
	case x >= .75 && x < .765:
		m := w.members[w.r.IntN(len(w.members))]
		m.up = !m.up
		if !m.up && m.id == w.set[0] {
			w.note("primary restarts")
			w.boot++
			p, err := NewPrimary(w.set, w.q, 0, w.boot, 1)
			if err == nil { // only with the rule off: it believes to be at its own end
				p.next = m.end.Next()
			}
			w.primary = p
		}
	case x >= .765 && x < .785 && w.damagedCount() < w.q-1:
		w.note("rot")
		w.members[w.r.IntN(len(w.members))].damaged = true
	default:
		for _, p := range w.passes {
			if !p.over && w.r.Float64() < .3 {
				w.carry(p, p.Retry())
			}
		}
	}
}

func (w *world) damagedCount() (n int) {
	for _, m := range w.members {
		if m.damaged {
			n++
		}
	}
	return n
}

func (w *world) appendOne() {
	p := w.primary
	base, err := p.Take(1)
	if err != nil {
		return
	}
	end := storage.EndAfter(base, 1)
	for _, m := range w.members {
		w.send(func() {
			if !m.up || m.fenced || m.damaged || m.end < storage.EndBefore(base) {
				return // FENCED, GAP, STORAGE_FAILED: none of them counts
			}
			m.end = max(m.end, end)
			got := m.end
			if got != end {
				got = end // a replay names the end that was asked about
			}
			w.send(func() {
				if w.primary != p {
					return
				}
				if c := p.Confirm(m.id, got); c > w.acked {
					w.note("acked %d", c)
					w.acked = c
				}
			})
		})
	}
}

func (w *world) begin(why Reason) {
	p := &simPass{Pass: NewPass(w.set, w.q, why), asked: map[storage.BrokerID]bool{}}
	w.passes = append(w.passes, p)
	w.note("pass %s", why)
	w.carry(p, p.Begin())
}

// carry sends a pass's orders and feeds the answers back.
func (w *world) carry(p *simPass, orders []Order) {
	for _, o := range orders {
		switch o.Kind {
		case OrderStop:
			w.note("stop: the primary serves")
			p.over = true
		case OrderWait:
			w.note("wait %s", o.Blocked)
		case OrderSeal:
			w.seal(p, o.Outcome)
		default:
			w.send(func() { w.deliver(p, o) })
		}
	}
}

func (w *world) deliver(p *simPass, o Order) {
	m := w.member(o.Broker)
	reply := func(f func() []Order) { w.send(func() { w.carry(p, f()) }) }
	if !m.up {
		if o.Kind == OrderDrain {
			reply(func() []Order { return p.Drained(o.Broker) })
			return
		}
		if o.Kind == OrderExtend {
			reply(func() []Order { return p.NotExtended(o.Broker, false) })
			return
		}
		reply(func() []Order { return p.Unreachable(o.Broker) })
		return
	}
	switch o.Kind {
	case OrderAsk:
		serving := w.primary != nil && w.primary.stopped == nil && o.Broker == w.set[0] && !m.fenced
		reply(func() []Order { return p.Answered(o.Broker, serving) })
	case OrderDrain:
		reply(func() []Order { return p.Drained(o.Broker) })
	case OrderFence:
		m.fenced = true
		if m.damaged {
			reply(func() []Order { return p.NoVote(o.Broker, errors.New("damaged")) })
			return
		}
		v := Vote{End: m.end, Bytes: int64(m.end), Digest: digestAt(m.end)}
		reply(func() []Order { return p.Voted(o.Broker, v) })
	case OrderExtend:
		h := w.member(o.Holder)
		switch {
		case !h.up || h.damaged || h.end < o.Outcome.End:
			reply(func() []Order { return p.NotExtended(o.Broker, true) })
		case !m.fenced || m.damaged:
			reply(func() []Order { return p.NotExtended(o.Broker, false) })
		default:
			m.end = max(m.end, o.Outcome.End)
			reply(func() []Order { return p.Extended(o.Broker, o.Outcome.End, digestAt(o.Outcome.End)) })
		}
	}
}

func (w *world) seal(p *simPass, o Outcome) {
	p.over = true
	p.Finish()
	if w.record != nil {
		return // compare-and-set: a racer was first, its values stand
	}
	w.note("sealed %d by %d votes", o.End, o.Votes)
	w.record = &o
	holders := 0
	for _, m := range w.members {
		if m.end >= o.End && !m.damaged {
			holders++
		}
	}
	if holders == 0 && o.End > 0 {
		w.note("no holder is left")
	}
	for _, m := range w.members { // step 6: cut beyond the end
		if m.fenced {
			m.end = min(m.end, o.End)
		}
	}
}

// broken says which invariant does not hold.
func (w *world) broken() string {
	if w.record == nil {
		return ""
	}
	switch {
	case w.acked > w.record.End:
		return fmt.Sprintf("INV-S1: sealed at %d, acknowledged is %d", w.record.End, w.acked)
	case w.record.Digest != digestAt(w.record.End) || w.record.Bytes != int64(w.record.End):
		return fmt.Sprintf("INV-S3: end %d with the bytes or digest of another vote", w.record.End)
	case w.record.Votes < len(w.set)-w.q+1:
		return fmt.Sprintf("INV-S1: sealed with %d votes", w.record.Votes)
	case len(w.record.Holders) < min(w.q, w.record.Votes):
		return fmt.Sprintf("INV-S12: %d holders", len(w.record.Holders))
	}
	return ""
}

func history(seed uint64, n, q int) (*world, string) {
	w := newWorld(seed, n, q)
	for range 200 {
		w.step()
		if b := w.broken(); b != "" {
			return w, b
		}
	}
	return w, ""
}

// TestSimulatedPasses runs thousands of seeded histories; SEED replays one of them.
func TestSimulatedPasses(t *testing.T) {
	inv.Covers(t, "INV-S1", "INV-S3", "INV-S12", "INV-S17", "INV-D11", "INV-S7")
	first, count := uint64(0), uint64(3000)
	if s := os.Getenv("SEED"); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		first, count = n, 1
	}
	counts := map[string]int{}
	histories := 0
	for _, shape := range []struct{ n, q int }{{1, 1}, {2, 2}, {3, 2}, {4, 3}, {5, 3}, {3, 3}} {
		for seed := first; seed < first+count; seed++ {
			w, broken := history(seed, shape.n, shape.q)
			if broken != "" {
				t.Fatalf("n=%d q=%d SEED=%d: %s\n%v", shape.n, shape.q, seed, broken, w.log)
			}
			for k, v := range w.counts {
				counts[k] += v
			}
			histories++
		}
	}
	t.Logf("%d histories: %v", histories, counts)
	if count > 1 {
		for _, branch := range []string{"acked %d", "sealed %d by", "wait %s", "stop: the pr", "rot", "primary rest"} {
			if counts[branch] == 0 {
				t.Errorf("no history reached %q", branch)
			}
		}
	}
}

// TestSameSeedSameTrace holds the simulator to its promise.
func TestSameSeedSameTrace(t *testing.T) {
	for seed := range uint64(50) {
		a, _ := history(seed, 3, 2)
		b, _ := history(seed, 3, 2)
		if !slices.Equal(a.log, b.log) {
			t.Fatalf("SEED=%d gives two traces", seed)
		}
	}
}

func TestPrimaryOfAnotherBootIsRefused(t *testing.T) {
	inv.Covers(t, "INV-D5", "INV-S16")
	set := []storage.BrokerID{1}
	if _, err := NewPrimary(set, 1, 0, 2, 1); !errors.Is(err, storage.ErrStaleBoot) {
		t.Fatalf("boot 2 serves a segment that was opened under boot 1: %v", err)
	}
	if _, err := NewPrimary(set, 2, 0, 1, 1); !errors.Is(err, storage.ErrInvalid) {
		t.Fatalf("quorum of 2 in a set of one: %v", err)
	}
}

func TestPrimary(t *testing.T) {
	inv.Covers(t, "INV-D16")
	set := []storage.BrokerID{1, 2, 3}
	p, err := NewPrimary(set, 2, 10, 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Take(0); !errors.Is(err, storage.ErrInvalid) {
		t.Errorf("a batch that takes no offset: %v", err)
	}
	if base, err := p.Take(5); err != nil || base != 10 {
		t.Fatalf("first batch at %d, %v", base, err)
	}
	if c := p.Confirm(1, 15); c != 10 {
		t.Errorf("one of two confirmed, committed is %d", c)
	}
	if c := p.Confirm(9, 15); c != 10 {
		t.Errorf("a stranger's end counts: %d", c)
	}
	if c := p.Confirm(3, 13); c != 13 {
		t.Errorf("committed is %d", c)
	}
	if c := p.Confirm(3, 11); c != 13 {
		t.Errorf("committed fell to %d", c)
	}
	if p.Confirm(2, 16); p.stopped == nil {
		t.Error("an end beyond everything assigned does not stop the primary")
	}
	if _, err := p.Take(1); !errors.Is(err, storage.ErrConflict) {
		t.Errorf("a stopped primary takes: %v", err)
	}
}

// script runs a pass by hand: no answers from the network but what the test says.
func TestPassOverOne(t *testing.T) {
	p := NewPass([]storage.BrokerID{1}, 1, ReasonRestart)
	expect := func(got []Order, kind OrderKind) Order {
		t.Helper()
		if len(got) != 1 || got[0].Kind != kind {
			t.Fatalf("orders are %+v, want one of kind %d", got, kind)
		}
		return got[0]
	}
	expect(p.Begin(), OrderAsk)
	expect(p.Answered(1, true), OrderDrain) // after a restart "serving" is no answer: the boot is another
	expect(p.Drained(1), OrderFence)
	o := expect(p.NoVote(1, errors.New("damaged")), OrderWait)
	if o.Blocked == "" {
		t.Error("it does not say what it waits for")
	}
	expect(p.Retry(), OrderAsk)
	expect(p.Answered(1, false), OrderDrain)
	expect(p.Drained(1), OrderFence)
	o = expect(p.Voted(1, Vote{End: 7, Bytes: 99, Digest: 5}), OrderSeal)
	if o.Outcome.End != 7 || o.Outcome.Bytes != 99 || o.Outcome.Digest != 5 || o.Outcome.Votes != 1 || len(o.Outcome.Holders) != 1 {
		t.Errorf("outcome %+v", o.Outcome)
	}
	if again := p.Voted(1, Vote{End: 9}); again != nil {
		t.Errorf("a late vote changes something: %+v", again)
	}
	gone := NewPass([]storage.BrokerID{1}, 1, ReasonPrimaryGone)
	gone.Begin()
	expect(gone.Answered(1, true), OrderStop)
	if !gone.Over() {
		t.Error("a pass that was called off goes on")
	}
	size := NewPass([]storage.BrokerID{1}, 1, ReasonSize)
	expect(size.Begin(), OrderDrain)
}
