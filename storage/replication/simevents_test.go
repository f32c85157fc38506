package replication

import (
	"slices"

	"github.com/malachilog/malachi/storage"
)

// What can happen, how often, and what must never be seen.

type event struct {
	name   string
	weight int
	do     func(*world) bool
}

var events []event

func init() {
	events = []event{
		{"produce", 200, func(w *world) bool {
			s := w.anySession()
			return s != nil && s.produce()
		}},
		{"ship", 700, func(w *world) bool {
			s := w.anySession()
			return s != nil && len(s.f) > 0 && s.ship(w.r.IntN(len(s.f)))
		}},
		{"resume", 60, func(w *world) bool {
			s := w.anySession()
			if s == nil || len(s.f) == 0 {
				return false
			}
			s.f[w.r.IntN(len(s.f))].Resume()
			return true
		}},
		{"deliver", 1300, (*world).deliver},
		{"journal", 700, func(w *world) bool { b := w.anyBroker(); return b != nil && b.running() && b.journal() }},
		{"give", 160, func(w *world) bool { b := w.anyBroker(); return b != nil && b.running() && b.give() }},
		{"checkpoint", 25, func(w *world) bool { b := w.anyBroker(); return b != nil && b.running() && b.checkpoint() }},
		{"recovery checkpoint", 150, func(w *world) bool { b := w.anyBroker(); return b != nil && b.running() && b.recoveryCheckpoint() }},
		{"rejoin", 40, func(w *world) bool { return w.onCopy(func(b *simBroker, seg int) bool { b.rejoin(seg); return true }) }},
		{"refresh", 30, (*world).refresh},
		{"open next", 80, (*world).openNext},
		{"open replicas", 250, func(w *world) bool { m := w.tail(); return m != nil && w.openReplicas(m) }},
		{"pass", 5, (*world).somePass},
		{"due", 10, (*world).duePass},
		{"retry pass", 60, (*world).retryPass},
		{"coordinator dies", 5, (*world).interrupt},
		{"lapse", 20, func(w *world) bool { s := w.anySession(); return s != nil && s.lapse() }},
		{"late", 4, (*world).late},
		{"finish", 60, (*world).finish},
		{"give up", 60, func(w *world) bool { return w.expire(w.r.IntN(1 << 20)) }},
		{"crash", 6, (*world).crash},
		{"start", 80, func(w *world) bool {
			b := w.anyBroker()
			if b == nil || b.up || b.gone {
				return false
			}
			b.start()
			return true
		}},
		{"pause", 10, (*world).pause},
		{"partition", 10, (*world).partition},
		{"full disk", 4, (*world).fillDisk},
		{"rot", 5, (*world).rot},
		{"wipe", 1, (*world).wipe},
		{"image", 6, (*world).takeImage},
		{"clone", 3, (*world).startImage},
		{"policy", 2, (*world).changePolicy},
	}
}

func (w *world) anyBroker() *simBroker { return w.brokers[w.r.IntN(len(w.brokers))] }

func (w *world) tail() *simSegment {
	if len(w.segs) == 0 {
		return nil
	}
	return w.segs[len(w.segs)-1]
}

// anySession is a primary that runs, of any segment: also one that was sealed without its knowing.
func (w *world) anySession() *session {
	if len(w.segs) == 0 {
		return nil
	}
	m := w.segs[len(w.segs)-1]
	if w.chance(.3) {
		m = w.segs[w.r.IntN(len(w.segs))]
	}
	b := w.brokers[m.primary()]
	s := b.sessions[m.seq]
	if s == nil || !b.running() {
		return nil
	}
	if m.sealed != nil {
		w.branch("zombie primary")
	}
	return s
}

func (w *world) onCopy(f func(b *simBroker, seg int) bool) bool {
	b := w.anyBroker()
	if len(w.segs) == 0 || !b.running() || b.recovering {
		return false
	}
	seg := w.r.IntN(len(w.segs))
	return b.copies[seg] != nil && f(b, seg)
}

func (s *session) lapse() bool {
	was := s.draining
	s.draining = false
	return was
}

// refresh: a running broker tells root its newest durable group; one whose boot was superseded ends.
func (w *world) refresh() bool {
	b := w.anyBroker()
	if !b.running() || !b.registered {
		return false
	}
	if reg := &w.root[b.index]; reg.boot != b.boot {
		b.crash(false)
		b.gone = true
	} else {
		reg.group = max(reg.group, b.disk.last)
	}
	return true
}

func (w *world) openSegment() *simSegment {
	m := w.tail()
	if m == nil || m.sealed != nil {
		return nil
	}
	return m
}

var someReasons = []Reason{ReasonSize, ReasonAge, ReasonPrimaryGone, ReasonFenced, ReasonOperator}

func (w *world) somePass() bool {
	m := w.openSegment()
	if m == nil {
		return false
	}
	why := someReasons[w.r.IntN(len(someReasons))]
	if len(m.confirmed) < m.q {
		why = ReasonUnconfirmed
	}
	if b := w.brokers[m.primary()]; b.up && b.boot != m.boot {
		why = ReasonRestart
	}
	w.beginPass(m, why)
	return true
}

// duePass: a primary asks for a pass itself.
func (w *world) duePass() bool {
	s := w.anySession()
	if s == nil {
		return false
	}
	why, urgent, due := s.p.Due()
	if !due || !urgent && !w.chance(.1) {
		return false
	}
	w.branch("primary asks: " + string(why))
	w.beginPass(s.segment(), why)
	return true
}

func (w *world) late() bool {
	s := w.anySession()
	if s != nil {
		s.p.Late()
	}
	return s != nil
}

func (w *world) retryPass() bool {
	if len(w.passes) == 0 {
		return false
	}
	i := w.r.IntN(len(w.passes))
	return w.retry(i)
}

func (w *world) retry(i int) bool {
	p := w.passes[i]
	if p.phase == phaseSeal && w.chance(.3) {
		w.branch("seal command given up") // its outcome is unknown: whoever comes next finds it recorded or runs another pass
		p.Finish()
	}
	if p.Over() || p.m.sealed != nil {
		w.passes = append(w.passes[:i], w.passes[i+1:]...)
		return true
	}
	if p.phase == phaseMore {
		w.carry(p, p.More())
		return true
	}
	if !p.blocked {
		return false
	}
	p.blocked = false
	clear(p.votes)
	w.carry(p, p.Retry())
	return true
}

// interrupt: a coordinator dies in the middle of a pass; what it sent stays under way.
func (w *world) interrupt() bool {
	if len(w.passes) == 0 {
		return false
	}
	i := w.r.IntN(len(w.passes))
	p := w.passes[i]
	if !p.Over() {
		w.note("pass interrupted", p.m.seq, p.phase)
	}
	p.Finish()
	w.passes = append(w.passes[:i], w.passes[i+1:]...)
	return true
}

// finish carries out step 6 on one member.
func (w *world) finish() bool {
	if len(w.segs) == 0 {
		return false
	}
	m := w.segs[w.r.IntN(len(w.segs))]
	if m.sealed == nil {
		return false
	}
	member := m.set[w.r.IntN(len(m.set))]
	w.call(coordA, indexOf(member), func(b *simBroker, reply func(func())) { b.onSeal(m, func() { reply(func() {}) }) }, func() {})
	return true
}

func (w *world) crash() bool {
	b := w.anyBroker()
	if !b.up {
		return false
	}
	power := w.chance(.5)
	w.note("crash", b.index, power)
	if power && w.chance(.15) {
		w.note("power cut of all")
		for _, x := range w.brokers {
			if x.up {
				x.crash(true)
			}
		}
		return true
	}
	b.crash(power)
	return true
}

func (w *world) pause() bool {
	b := w.anyBroker()
	if !b.up {
		return false
	}
	if !b.paused && w.chance(.7) {
		return false
	}
	b.paused = !b.paused
	w.note("paused", b.index, b.paused)
	return true
}

func (w *world) partition() bool {
	if w.side != [maxNodes]uint8{} {
		w.side = [maxNodes]uint8{}
		w.note("partition heals")
		return true
	}
	if w.chance(.7) {
		return false
	}
	switch w.r.IntN(3) {
	case 0: // one broker
		w.side[w.r.IntN(len(w.brokers))] = 1
	case 1: // a coordinator and some brokers
		w.side[coordB] = 1
		for i := range w.brokers {
			w.side[i] = uint8(w.r.IntN(2))
		}
	case 2: // the primary alone
		if m := w.tail(); m != nil {
			w.side[m.primary()] = 1
		}
	}
	w.note("partition", w.side)
	return true
}

func (w *world) fillDisk() bool {
	b := w.anyBroker()
	b.full = !b.full && b.up && w.chance(.4)
	return true
}

// mayLose reports whether one more copy of segment m may be lost or damaged: at most q-1 are tolerated.
func mayLose(m *simSegment, b int) bool { return !m.has(b) || m.abandoned() || m.faults(b)+1 <= m.q-1 }

func (w *world) rot() bool {
	b := w.anyBroker()
	if len(w.segs) == 0 {
		return false
	}
	m := w.segs[w.r.IntN(len(w.segs))]
	f := b.disk.files[m.seq]
	if f == nil || len(f.batches) == 0 || !mayLose(m, b.index) {
		return false
	}
	m.faulted[b.index] = true
	f.batches[w.r.IntN(len(f.batches))].rot = true
	w.note("rot", b.index, m.seq)
	return true
}

func (w *world) mayLoseDisk(b *simBroker) bool {
	for _, m := range w.segs {
		if !mayLose(m, b.index) {
			return false
		}
	}
	return !b.gone && !b.refused && len(w.brokers) < maxBrokers
}

// loseDisk: nothing of this broker comes back; another one joins.
func (w *world) loseDisk(b *simBroker) {
	for _, m := range w.segs {
		if m.has(b.index) {
			m.faulted[b.index] = true
		}
	}
	b.crash(false)
	b.gone = true
	w.newBroker()
}

// wipe: the disk is empty. It founds another identity; nobody votes with the old one.
func (w *world) wipe() bool {
	b := w.anyBroker()
	if !w.mayLoseDisk(b) {
		return false
	}
	w.note("disk wiped", b.index)
	w.loseDisk(b)
	return true
}

func (w *world) takeImage() bool {
	b := w.anyBroker()
	if b.gone || len(w.images) > 8 {
		return false
	}
	w.images = append(w.images, &image{b.index, b.disk.clone()})
	return true
}

// startImage starts a copy of a disk that was taken earlier: a clone beside the original, or a rollback of it. Root must know a later
// group of the original, which it does some 30 seconds after the copy: before that a copy cannot be told from the original, which is a
// stated limit.
func (w *world) startImage() bool {
	if len(w.images) == 0 {
		return false
	}
	im := w.images[w.r.IntN(len(w.images))]
	b := w.brokers[im.broker]
	if b.gone || im.disk.newest() >= w.root[b.index].group {
		return false
	}
	if w.cfg.lax&laxIdentity != 0 { // accepted: it takes the original's place
		w.note("clone accepted", b.index)
		b.crash(false)
		b.disk = im.disk.clone()
		for seg := range w.segs {
			w.dirty[seg] = true
		}
		return true
	}
	if w.chance(.5) {
		w.note("clone refused beside the original", b.index)
		boot := im.disk.boot + 1
		if reg := w.root[b.index]; boot > reg.boot && im.disk.newest() >= reg.group {
			w.violates("INV-D9", "a clone of broker %d would be registered", b.index)
		}
		return true
	}
	if !w.mayLoseDisk(b) {
		return false
	}
	w.note("disk rolled back", b.index)
	w.loseDisk(b)
	b.disk, b.gone = im.disk.clone(), false // it starts again, and must be refused
	return true
}

func (w *world) changePolicy() bool {
	if !w.cfg.policies {
		return false
	}
	w.policy = policy{rf: 1 + w.r.IntN(w.cfg.rf), all: w.chance(.3)}
	w.note("policy", w.policy)
	return true
}

// check looks at everything that the step may have changed.
func (w *world) check() {
	for seg, dirty := range w.dirty {
		if !dirty || seg >= len(w.segs) {
			continue
		}
		w.dirty[seg] = false
		w.checkAcked(w.segs[seg])
	}
}

// checkAcked: what was acknowledged is on the disks of a quorum, less the ones that faults took.
func (w *world) checkAcked(m *simSegment) {
	if m.sealed != nil && m.acked > m.sealed.End {
		w.violates("INV-S1", "segment %d is sealed at %d, acknowledged is %d", m.seq, m.sealed.End, m.acked)
	}
	if m.acked == m.base {
		return
	}
	holders := 0
	for _, member := range m.set {
		i := indexOf(member)
		if t := &w.brokers[i].disk.truth[m.seq]; !m.faulted[i] && t.opened && !t.dropped && t.good >= m.acked {
			holders++
		}
	}
	if holders < max(1, m.q-len(m.faulted)) {
		w.violates("INV-D1", "segment %d is acknowledged up to %d, which %d disks hold; q is %d, %d are faulty", m.seq, m.acked, holders, m.q,
			len(m.faulted))
	}
}

// checkSeal: what was just recorded is the truth, and enough disks hold it.
func (w *world) checkSeal(m *simSegment) {
	o := m.sealed
	w.checkAcked(m)
	digest, ok := m.digestAt(o.End)
	switch {
	case !ok || o.End > m.end():
		w.violates("INV-D4", "segment %d is sealed at %d, which is no end of a batch", m.seq, o.End)
	case digest != o.Digest:
		w.violates("INV-S14", "segment %d is sealed with a digest that is not of the bytes below %d", m.seq, o.End)
	}
	holders, faulty := 0, 0
	for _, member := range o.Holders {
		i := indexOf(member)
		if t := &w.brokers[i].disk.truth[m.seq]; m.faulted[i] {
			faulty++
		} else if t.good >= o.End && t.opened && !t.dropped {
			holders++
		}
	}
	if want := min(m.q, o.Votes); holders+faulty < want {
		w.violates("INV-S12", "segment %d is sealed at %d, which %d disks hold of %v; %d must", m.seq, o.End, holders, o.Holders, want)
	}
}

// settle heals everything. Then every segment but the last must be sealed, and an append must be acknowledged.
func (w *world) settle() {
	w.settling = true
	w.side = [maxNodes]uint8{}
	for _, b := range w.brokers {
		b.paused, b.full = false, false
		if b.up && b.failed {
			b.crash(false)
		}
	}
	if w.cfg.rf > 1 { // a range that is blocked by a policy of more brokers than there are would be right to stay so
		w.policy = policy{w.cfg.rf, w.cfg.all}
	}
	goal := -1
	for round := range 300 {
		w.settleBrokers()
		m := w.tail()
		if m == nil || m.sealed != nil {
			if len(w.segs) >= maxSegs-1 {
				return
			}
			w.openNext()
			continue
		}
		if m.acked > m.base && goal == m.seq {
			w.branch("writable again")
			w.readBack()
			return
		}
		w.openReplicas(m)
		s := w.brokers[m.primary()].sessions[m.seq]
		switch {
		case s != nil && s.produce() && goal < 0 && !s.urgent():
			goal = m.seq
		case s == nil || s.urgent() || round%20 == 19:
			if len(m.confirmed) >= m.q || round%5 == 4 {
				goal = -1
				w.beginPass(m, ReasonRestart)
			}
		}
		if w.broken != "" {
			return
		}
	}
	m := w.tail()
	w.violates("INV-S10", "nothing is broken, and segment %d (set %v, q %d) neither takes an append nor is it sealed", m.seq, m.set, m.q)
}

// settleBrokers lets everything that is under way come to its end.
func (w *world) settleBrokers() {
	for _, b := range w.brokers {
		if !b.up && !b.gone {
			b.start()
		}
		b.recoveryCheckpoint()
		if b.up && !b.gone {
			for seg := range w.segs {
				b.rejoin(seg)
			}
		}
	}
	for range 4 {
		for _, b := range w.brokers {
			for b.up && b.journal() { //nolint:revive // until nothing is left
			}
			b.giveAll()
			for _, s := range b.sessions {
				if s == nil || !b.up {
					continue
				}
				s.draining = false
				for i := range s.f {
					s.f[i].Resume()
					for s.ship(i) { //nolint:revive // until nothing is left
					}
				}
			}
		}
		for w.deliver() {
			if w.broken != "" {
				return
			}
		}
		w.check()
	}
	for _, c := range slices.Clone(w.calls) { // of the dead: what is alive has answered
		if !c.done {
			c.done = true
			c.timeout()
		}
	}
	w.calls = slices.DeleteFunc(w.calls, func(c *simCall) bool { return c.done })
	for i := len(w.passes) - 1; i >= 0; i-- {
		w.retry(i)
	}
	for _, m := range w.segs {
		for _, member := range m.set {
			if b := w.brokers[indexOf(member)]; m.sealed != nil && b.up {
				b.onSeal(m, func() {})
			}
		}
	}
}

// readBack reads every acknowledged record from some copy, as a reader would.
func (w *world) readBack() {
	next := storage.End(0)
	for _, m := range w.segs {
		if m.base != next {
			w.violates("INV-D4", "segment %d begins at %d, the one before ended at %d", m.seq, m.base, next)
		}
		end := m.acked
		if m.sealed != nil {
			end = m.sealed.End
		}
		next = end
		if m.acked == m.base {
			continue
		}
		if !w.readable(m) {
			w.violates("INV-D1", "segment %d: no copy gives what was acknowledged below %d", m.seq, m.acked)
		}
	}
}

func (w *world) readable(m *simSegment) bool {
	for _, member := range m.set {
		b := w.brokers[indexOf(member)]
		if b.gone || b.refused {
			continue
		}
		batches, _ := b.read(m.seq, m.base, m.acked, 1<<30)
		at := m.base
		for _, x := range batches {
			if storage.EndBefore(x.base) != at || !m.wrote(x) {
				break
			}
			at = x.end()
		}
		if at >= m.acked {
			return true
		}
	}
	return false
}
