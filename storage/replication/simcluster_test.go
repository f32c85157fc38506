package replication

import (
	"errors"
	"fmt"
	"slices"

	"github.com/malachilog/malachi/storage"
)

// The cluster side of the simulator: primaries, coordinators with their passes, the metadata's record of segments, and faults.

// session is a primary that serves a segment.
type session struct {
	b        *simBroker
	gen      int
	seg      int
	p        *Primary
	f        []*Follower // of set[1:]
	mem      []simBatch
	draining bool
}

var simLimits = Limits{Live: 120, Calls: 2}

func newSession(b *simBroker, seg int, p *Primary) *session {
	s := &session{b: b, gen: b.gen, seg: seg, p: p}
	for range b.w.segs[seg].set[1:] {
		s.f = append(s.f, NewFollower(p.Next(), simLimits))
	}
	return s
}

func (s *session) current() bool        { return s.gen == s.b.gen && s.b.up }
func (s *session) segment() *simSegment { return s.b.w.segs[s.seg] }

// produce appends one batch at the primary.
func (s *session) produce() bool {
	w, c := s.b.w, s.b.copies[s.seg]
	if s.draining || c == nil {
		return false
	}
	n := uint32(1 + w.r.IntN(3))
	base, err := s.p.Take(n)
	if err != nil {
		w.branch("primary has stopped")
		return false
	}
	w.content++
	x := simBatch{base: base, n: n, content: w.content*2 + 1}
	step, err := c.m.Take(FromPrimary, x.base, x.end())
	if err == nil && step != StepQueue {
		err = storage.ErrConflict
	}
	if err == nil && s.b.full {
		err = storage.ErrDiskFull
	}
	if err == nil && s.b.failed {
		err = storage.ErrStorageFailed
	}
	if err != nil {
		s.p.GiveBack(base)
		w.branch("refused before append")
		if !errors.Is(err, storage.ErrDiskFull) && !errors.Is(err, storage.ErrUnavailable) {
			s.p.Gone(s.b.id(), err)
		}
		return false
	}
	m := s.segment()
	if x.base != m.end().Next() {
		w.violates("INV-D2", "broker %d writes offset %d of segment %d, which ends at %d", s.b.index, x.base, s.seg, m.end())
		return true
	}
	if s.b.boot != m.boot {
		w.violates("INV-D5", "broker %d of boot %d appends to a segment opened under %d", s.b.index, s.b.boot, m.boot)
	}
	d := storage.Digest(0)
	if len(m.chains) > 0 {
		d = m.chains[len(m.chains)-1]
	}
	m.written, m.chains = append(m.written, x), append(m.chains, chain(d, x))
	w.note("append", s.b.index, s.seg, base, n)
	c.push(x)
	s.b.queue(simEntry{kind: entryAppend, seg: s.seg, b: x, done: func(failed bool) {
		if failed {
			s.p.Gone(s.b.id(), storage.ErrStorageFailed)
			return
		}
		c.m.Barrier(x.end())
		s.b.wake(c)
		s.confirm(s.b.id(), x.end())
	}})
	s.mem = append(s.mem, x)
	for _, f := range s.f {
		f.Appended(x.end(), x.bytes())
	}
	return true
}

func (s *session) confirm(member storage.BrokerID, end storage.End) {
	w, m := s.b.w, s.segment()
	c := s.p.Confirm(member, end)
	if err := s.p.Stopped(); err != nil {
		w.branch("an end beyond everything assigned")
		return
	}
	if c <= m.acked {
		return
	}
	w.note("acked", s.seg, c)
	m.acked = c
	w.dirty[s.seg] = true
	if m.sealed != nil && c > m.sealed.End {
		w.violates("INV-S8", "segment %d is sealed at %d, its primary acknowledges %d", s.seg, m.sealed.End, c)
	}
}

// ship sends what a follower wants next.
func (s *session) ship(i int) bool {
	w, f := s.b.w, s.f[i]
	from, to, ok := f.Send()
	if !ok {
		return false
	}
	var batches []simBatch
	if keep, mem := f.Keep(); mem && keep <= from {
		for _, x := range s.mem {
			if x.base >= from && x.end() <= to && len(batches) < 3 {
				batches = append(batches, x)
			}
		}
	} else {
		var err error
		w.branch("catch-up from the primary's log")
		if batches, err = s.b.read(s.seg, storage.EndBefore(from), to, 5); err != nil {
			s.b.copies[s.seg].m.Damage(err)
			s.p.Gone(s.b.id(), storage.ErrDamaged)
		}
	}
	if len(batches) == 0 {
		return false
	}
	if !w.settling && w.chance(corruptRate) {
		batches = slices.Clone(batches)
		batches[0].content ^= 1 << 40
		batches[0].bad = true
		w.branch("message corrupted")
	}
	member := s.segment().set[i+1]
	call := f.Sent(from, batches[len(batches)-1].end())
	w.call(s.b.node(), indexOf(member), func(b *simBroker, reply func(func())) {
		b.onAppend(s.seg, batches, func(a Answer) {
			reply(func() {
				if !s.current() {
					return
				}
				switch f.Answer(call, a) {
				case VerdictCount:
					s.confirm(member, a.End)
				case VerdictGone:
					w.branch("follower gone")
					s.p.Gone(member, f.Gone())
				case VerdictPause:
					w.branch("follower paused")
				}
			})
		})
	}, func() {
		if s.current() {
			f.Lost(call)
		}
	})
	return true
}

// simPass is a pass as a coordinator runs it.
type simPass struct {
	*Pass
	m       *simSegment
	at      nodeID
	why     Reason
	votes   map[storage.BrokerID]bool // that were given, in this attempt
	blocked bool
}

func (w *world) beginPass(m *simSegment, why Reason) {
	if m.sealed != nil || len(w.passes) >= 4 {
		return
	}
	at := coordA
	if w.chance(.4) {
		at = coordB
	}
	set, q := m.set, m.q
	if w.cfg.lax&laxLivePolicy != 0 {
		q = min(w.policy.q(), len(set))
	}
	p := &simPass{Pass: NewPass(set, q, why), m: m, at: at, why: why, votes: map[storage.BrokerID]bool{}}
	p.rules = w.cfg.rules
	if w.chance(.5) {
		p.WaitForMore()
	}
	w.note("pass", m.seq, why)
	if len(w.passes) > 0 {
		w.branch("passes race")
	}
	w.passes = append(w.passes, p)
	w.carry(p, p.Begin())
}

// carry sends a pass's orders and feeds the answers back.
func (w *world) carry(p *simPass, orders []Order) {
	for _, o := range orders {
		switch o.Kind {
		case OrderStop:
			w.note("the primary serves", p.m.seq)
		case OrderWait:
			if o.Blocked == "" {
				w.violates("INV-S11", "a blocked pass over segment %d does not say by what", p.m.seq)
			}
			p.blocked = true
			w.note("blocked", p.m.seq, o.Blocked)
		case OrderMore:
			w.branch("fewer than q answer") // a retry goes on with it
		case OrderSeal:
			p.checkOutcome(w, o.Outcome)
			w.send(p.at, metadata, func() { w.seal(p, o.Outcome) })
		case OrderFence:
			if len(p.answered) < p.m.quorumOfSeal() && w.cfg.rules == 0 && w.cfg.lax == 0 {
				w.violates("INV-S6", "segment %d is fenced with %d answers", p.m.seq, len(p.answered))
			}
			w.order(p, o)
		default:
			w.order(p, o)
		}
	}
}

func (p *simPass) checkOutcome(w *world, o Outcome) {
	voted := 0
	for _, b := range p.m.set {
		voted += btoi(p.votes[b])
	}
	if o.Votes > voted {
		w.violates("INV-S17", "segment %d: %d votes, %d were given", p.m.seq, o.Votes, voted)
	}
	if o.Votes < p.m.quorumOfSeal() {
		w.violates("INV-D11", "segment %d: sealed with %d votes of %d at q %d", p.m.seq, o.Votes, len(p.m.set), p.m.q)
	}
}

func (w *world) order(p *simPass, o Order) {
	seg, m := p.m.seq, p.m
	on := func(f func() []Order) func() { return func() { w.carry(p, f()) } }
	timeout := on(func() []Order {
		switch o.Kind {
		case OrderDrain:
			return p.Drained(o.Broker)
		case OrderExtend:
			return p.NotExtended(o.Broker, false)
		}
		return p.Unreachable(o.Broker)
	})
	w.call(p.at, indexOf(o.Broker), func(b *simBroker, reply func(func())) {
		if !b.serves() {
			return
		}
		switch o.Kind {
		case OrderAsk:
			s := b.sessions[seg]
			serving := s != nil && s.p.Stopped() == nil && !s.urgent()
			b.measure(seg)
			reply(func() {
				next := p.Answered(o.Broker, serving)
				if serving && p.why == ReasonPrimaryGone && (len(next) != 1 || next[0].Kind != OrderStop) && !p.Over() && p.phase == phaseAsk {
					w.violates("INV-S7", "segment %d: the primary serves, the pass goes on with %v", seg, next)
				}
				w.carry(p, next)
			})
		case OrderDrain:
			if s := b.sessions[seg]; s != nil {
				s.draining = true
			}
			reply(on(func() []Order { return p.Drained(o.Broker) }))
		case OrderFence:
			b.onFence(m, func(v Vote) {
				reply(func() {
					p.votes[o.Broker] = true
					w.carry(p, p.Voted(o.Broker, v))
				})
			}, func(err error) {
				w.branch("no vote: " + cause(err))
				reply(on(func() []Order { return p.NoVote(o.Broker, err) }))
			})
		case OrderExtend:
			b.onExtend(m, o, func(d storage.Digest) {
				reply(on(func() []Order { return p.Extended(o.Broker, o.Outcome.End, d) }))
			}, func(holder bool) {
				w.branch(fmt.Sprintf("not extended, holder failed %v", holder))
				reply(on(func() []Order { return p.NotExtended(o.Broker, holder) }))
			})
		}
	}, timeout)
}

func cause(err error) string {
	for _, e := range []error{storage.ErrDamaged, storage.ErrStorageFailed, storage.ErrSealed, storage.ErrUnavailable, storage.ErrUnknownSegment} {
		if errors.Is(err, e) {
			return e.Error()
		}
	}
	return err.Error()
}

func (s *session) urgent() bool {
	_, urgent, _ := s.p.Due()
	return urgent
}

// measure notes the end before any fence, for the rule that forbids to use it.
func (b *simBroker) measure(seg int) {
	if c := b.copies[seg]; c != nil && b.w.cfg.lax&laxFenceOrder != 0 {
		if d, ok := c.digestAt(c.m.Durable()); ok {
			b.asked[seg] = &Vote{End: c.m.Durable(), Digest: d}
		}
	}
}

// onExtend fetches what a fenced copy lacks from the holder.
func (b *simBroker) onExtend(m *simSegment, o Order, done func(storage.Digest), failed func(holder bool)) {
	c, end := b.copies[m.seq], o.Outcome.End
	if c == nil || b.failed {
		failed(false)
		return
	}
	b.verify(m.seq)
	finish := func() {
		if d, ok := c.digestAt(end); ok && c.m.Vote() == nil {
			done(d)
		} else {
			failed(false)
		}
	}
	if c.m.Queued() >= end {
		b.when(c, c.m.Queued(), finish)
		return
	}
	gen, from := b.gen, c.m.Queued()
	b.w.call(b.node(), indexOf(o.Holder), func(h *simBroker, reply func(func())) {
		if !h.serves() {
			return
		}
		h.giveAll()
		batches, err := h.read(m.seq, from, end, 1000)
		if err != nil || len(batches) == 0 || batches[len(batches)-1].end() != end {
			reply(func() { failed(true) })
			return
		}
		if !b.w.settling && b.w.chance(corruptRate) {
			batches[0].content ^= 1 << 41
			batches[0].bad = true
		}
		reply(func() {
			if b.gen != gen {
				return
			}
			for _, x := range batches {
				if x.bad && b.w.cfg.lax&laxBytes == 0 {
					failed(false)
					return
				}
				if err := b.extend(FromPass, m.seq, x); err != nil {
					b.w.branch("recovered batch refused")
					failed(false)
					return
				}
			}
			b.w.branch("copy extended")
			b.when(c, end, finish)
		})
	}, func() { failed(true) })
}

// when runs f once the barrier has covered end.
func (b *simBroker) when(c *simCopy, end storage.End, f func()) {
	if c.m.Durable() >= end {
		f()
		return
	}
	c.waiters = append(c.waiters, simWaiter{end, f})
}

// seal is the command: compare-and-set on open. A racer reads what is recorded.
func (w *world) seal(p *simPass, o Outcome) {
	m := p.m
	w.send(metadata, p.at, p.Finish)
	if m.sealed != nil {
		w.branch("a racer had sealed")
		return
	}
	w.note("sealed", m.seq, o.End, o.Votes, o.Holders)
	if o.End == m.base {
		w.branch("abandoned")
	}
	m.sealed = &o
	w.checkSeal(m)
	if w.broken == "" && !w.scripted && w.chance(.3) {
		w.openNext() // one command per roll
	}
}

// openNext is the command that opens the next segment: compare-and-set on the tail.
func (w *world) openNext() bool {
	base := storage.End(0)
	if n := len(w.segs); n > 0 {
		last := w.segs[n-1]
		if last.sealed == nil || n >= maxSegs-1 {
			return false
		}
		base = last.sealed.End
	}
	var up []int
	for _, b := range w.brokers {
		if b.serves() && (w.settling || !b.paused && w.side[b.index] == w.side[coordA]) && !b.failed {
			up = append(up, b.index)
		}
	}
	q := w.policy.q()
	if len(up) < q {
		w.branch("too few brokers for a segment")
		return false
	}
	w.r.Shuffle(len(up), func(i, j int) { up[i], up[j] = up[j], up[i] })
	n := min(len(up), w.policy.rf)
	if n > q && w.chance(.25) {
		n-- // a broker is not placed, for whatever reason
	}
	if n < w.policy.rf {
		w.branch("set smaller than rf")
	}
	m := &simSegment{seq: len(w.segs), q: q, base: base, acked: base, confirmed: map[storage.BrokerID]bool{}, faulted: map[int]bool{}}
	for _, i := range up[:n] {
		m.set = append(m.set, brokerID(i))
	}
	m.boot = w.root[m.primary()].boot
	w.segs = append(w.segs, m)
	w.note("open", m.seq, m.set, q, base)
	return true
}

// openReplicas repeats OpenReplica to who has not confirmed it; the primary is the last.
func (w *world) openReplicas(m *simSegment) bool {
	if m.sealed != nil || len(m.confirmed) == len(m.set) {
		return false
	}
	for i := len(m.set) - 1; i >= 0; i-- {
		member := m.set[i]
		if m.confirmed[member] || i == 0 && len(m.confirmed) < m.q-1 {
			continue
		}
		w.call(coordA, indexOf(member), func(b *simBroker, reply func(func())) {
			confirm := func(failed bool) {
				if !failed {
					reply(func() { m.confirmed[member] = true })
				}
			}
			switch c := b.copies[m.seq]; {
			case !b.serves() || b.failed:
			case c == nil && m.sealed != nil && w.cfg.lax&laxLateOpen == 0:
				w.branch("late open refused") // the record is asked: a drop has taken the fence with it
			case c == nil && i == 0 && b.boot != m.boot:
				w.branch("open under another boot")
			case c == nil:
				b.open(m.seq, m.base, func(failed bool) {
					if p, err := newPrimary(m.set, m.q, m.base.Next(), b.boot, m.boot, w.cfg.rules); i == 0 && !failed && err == nil &&
						b.copies[m.seq].m.state == StateOpen {
						b.sessions[m.seq] = newSession(b, m.seq, p)
					}
					confirm(failed)
				})
			case c.m.OpenDurable():
				confirm(false)
			}
		}, func() {})
	}
	return true
}
