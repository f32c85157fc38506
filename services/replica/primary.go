package replica

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
	"github.com/malachilog/malachi/storage/replication"
	"github.com/malachilog/malachi/storage/segment"
)

// waiterLife is how long an append waits for the recorded end after its segment was fenced here: longer than any caller does.
const waiterLife = time.Minute

// primary is a segment that this process opened as its primary and serves.
type primary struct {
	s      *Service
	id     storage.SegmentID
	slice  storage.Slice
	base   storage.Offset
	quorum int
	opened time.Time
	clock  storage.Time // wall clock at opened, not before the segment's creation time

	mu      sync.Mutex
	machine *replication.Primary
	feeds   []*feed      // the other members
	last    storage.Time // append time of the newest batch
	bytes   int64        // appended since the open
	// inflight is the bytes that are appended and not committed, waiters who wait for them, in the order of their ends.
	inflight int64
	waiters  []waiter
	recent   []shipped // newest batches, for followers on the live path
	closed   bool      // fenced here: nothing is shipped any more
	asked    bool      // an urgent pass was asked for and nothing was committed since
	askedAt  time.Time
	watchers map[chan<- struct{}]struct{}
	contact  contact
	// drained until: a pass asked to stop accepting. It lapses by itself if no fence follows.
	drained time.Time
	idle    chan struct{} // closed when inflight falls to 0 during a drain
}

// waiter is an append that waits for its quorum.
type waiter struct {
	a     Appended
	size  int64
	since time.Time
	done  func(Appended, error)
}

// shipped is a batch that followers may still need.
type shipped struct {
	base storage.Offset
	end  storage.End
	data []byte
}

func (s *Service) newPrimary(h *segment.Header, machine *replication.Primary, o Open) *primary {
	now := s.deps.Now()
	p := &primary{
		s: s, id: h.ID, slice: h.Slice, base: h.Base, opened: now, clock: max(storage.Time(now.UnixNano()), h.CreateTime), machine: machine,
		quorum: o.Quorum, last: h.CreateTime, bytes: int64(len(o.Header)),
	}
	for _, b := range o.Set {
		if b != s.cfg.Self {
			p.feeds = append(p.feeds, &feed{p: p, to: s.shipperTo(b), Follower: replication.NewFollower(h.Base, replication.Limits{Live: s.cfg.MaxLag})})
		}
	}
	return p
}

// Append stamps b in place with the next offsets, the append time and the slice it covers, queues it to the journal and to every follower. done
// is called when a quorum has it durable, or with storage.ErrOutcomeUnknown if that can't be known, or with storage.ErrFenced if the recorded
// end of the segment says that it is not in. The caller gives b away.
//
// A returned error means that nothing was appended: storage.ErrStaleRoute (not served here; look the route up again), ErrFenced,
// ErrSealed, ErrOverloaded, ErrDiskFull, ErrStorageFailed.
func (s *Service) Append(id storage.SegmentID, b []byte, done func(Appended, error)) error {
	p, err := s.serving(id)
	if err != nil {
		return err
	}
	h, err := batch.ParseHeader(b)
	if err != nil {
		return err
	}
	return p.append(h, b, done)
}

func (p *primary) append(h batch.Header, b []byte, done func(Appended, error)) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.s.deps.Now()
	size := int64(len(b))
	if err := p.takes(now, size); err != nil {
		return err
	}
	base, err := p.machine.Take(h.Records)
	if err != nil {
		return err
	}
	at := max(p.clock+storage.Time(now.Sub(p.opened)), p.last)
	covered := p.slice
	if p.slice.Covers(h.Slice) { // a part keeps the slice it was cut for: it is never widened
		covered = h.Slice
	}
	batch.Stamp(b, base, at, covered)
	if h, err = batch.ParseHeader(b); err != nil {
		p.machine.GiveBack(base)
		return err
	}
	a := Appended{Base: base, End: h.End(), AppendTime: at}
	err = p.s.deps.Store.Append(p.id, &h, b, func(err error) { p.settle(a.End, err) })
	if err != nil {
		p.machine.GiveBack(base)
		if errors.Is(err, storage.ErrFenced) || errors.Is(err, storage.ErrSealed) || errors.Is(err, storage.ErrUnknownSegment) {
			p.machine.Stop(err) // for ever: only a pass fences
		}
		return err
	}
	p.waiters = append(p.waiters, waiter{a, size, now, done})
	p.inflight += size
	p.s.inflight.Add(size)
	p.last = at
	p.ship(shipped{base, a.End, b})
	p.grow(size)
	return nil
}

// takes says why nothing can be appended now. Called with mu held.
func (p *primary) takes(now time.Time, size int64) error {
	most := p.s.deps.SegmentMaxBytes()
	switch {
	case p.closed:
		return fmt.Errorf("segment %s: %w", p.id, storage.ErrFenced)
	case now.Before(p.drained):
		return fmt.Errorf("segment %s is being closed: %w", p.id, storage.ErrFenced)
	case most > 0 && p.bytes >= 2*most:
		return fmt.Errorf("segment %s has twice its size and waits to be closed: %w", p.id, storage.ErrFenced)
	case p.inflight > 0 && p.inflight+size > p.s.cfg.MaxInflight:
		return fmt.Errorf("segment %s has %d bytes in flight: %w", p.id, p.inflight, storage.ErrOverloaded)
	case p.s.inflight.Load() > p.s.cfg.MaxInflightAll:
		return fmt.Errorf("%d bytes are in flight on this broker: %w", p.s.inflight.Load(), storage.ErrOverloaded)
	}
	return nil
}

// grow counts bytes and says once when the segment has its size. Called with mu held.
func (p *primary) grow(size int64) {
	p.bytes += size
	if most := p.s.deps.SegmentMaxBytes(); most > 0 && p.bytes >= most && p.bytes-size < most {
		poke(p.s.full)
	}
}

func poke(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// ship makes a batch ready for the followers. Called with mu held.
func (p *primary) ship(b shipped) {
	if len(p.feeds) == 0 {
		return
	}
	p.recent = append(p.recent, b)
	for _, f := range p.feeds {
		f.Appended(b.end, int64(len(b.data)))
		f.ready()
	}
	p.trim()
}

// trim drops the batches that no follower on the live path needs. Called with mu held.
func (p *primary) trim() {
	keep := p.machine.Next()
	for _, f := range p.feeds {
		if from, ok := f.Keep(); ok {
			keep = min(keep, from)
		}
	}
	n := 0
	for n < len(p.recent) && p.recent[n].end <= storage.EndBefore(keep) {
		p.recent[n].data = nil
		n++
	}
	if p.recent = p.recent[n:]; len(p.recent) == 0 {
		p.recent = nil
	}
}

// settle counts the own barrier of an append.
func (p *primary) settle(end storage.End, err error) {
	p.mu.Lock()
	if err != nil {
		p.machine.Gone(p.s.cfg.Self, err)
		p.machine.Stop(err)
		if len(p.feeds) == 0 { // nobody else can have it
			p.mu.Unlock()
			p.giveUp(fmt.Errorf("%w: %w", storage.ErrOutcomeUnknown, err))
			return
		}
		p.mu.Unlock()
		p.askDue()
		return
	}
	p.unlockAndTell(p.confirm(p.s.cfg.Self, end))
}

// confirm counts a member's end and takes out the waiters below what is committed then. Called with mu held.
func (p *primary) confirm(member storage.BrokerID, end storage.End) (ready []waiter) {
	before := p.machine.Committed()
	committed := p.machine.Confirm(member, end)
	if committed == before {
		return nil
	}
	p.asked = false
	n := 0
	for n < len(p.waiters) && p.waiters[n].a.End <= committed {
		n++
	}
	return p.takeWaiters(n)
}

// takeWaiters takes the first n waiters out. Called with mu held.
func (p *primary) takeWaiters(n int) (taken []waiter) {
	taken, p.waiters = p.waiters[:n:n], p.waiters[n:]
	size := int64(0)
	for i := range taken {
		size += taken[i].size
	}
	p.inflight -= size
	p.s.inflight.Add(-size)
	if p.inflight == 0 && p.idle != nil {
		close(p.idle)
		p.idle = nil
	}
	return taken
}

// unlockAndTell tells waiters that they have their quorum, then readers that there is more: outside the lock, for what they do is not ours.
func (p *primary) unlockAndTell(ready []waiter) {
	watched := len(p.watchers) > 0
	p.mu.Unlock()
	for i := range ready {
		ready[i].done(ready[i].a, nil)
	}
	if !watched || len(ready) == 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.watchers {
		poke(c)
	}
}

// close ends serving. It reports whether appends wait for the recorded end.
func (p *primary) close() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	p.machine.Stop(fmt.Errorf("segment %s: %w", p.id, storage.ErrFenced))
	p.recent = nil
	for c := range p.watchers {
		poke(c)
	}
	return len(p.waiters) > 0
}

// resolve gives each waiting append its outcome by the recorded end: below it, it is in; else it never will be.
func (p *primary) resolve(end storage.End) {
	p.mu.Lock()
	all := p.takeWaiters(len(p.waiters))
	p.mu.Unlock()
	for _, w := range all {
		if w.a.End <= end {
			w.done(w.a, nil)
		} else {
			w.done(Appended{}, fmt.Errorf("segment %s was closed at %d, below it: %w", p.id, end, storage.ErrFenced))
		}
	}
}

// giveUp gives all that wait the same error.
func (p *primary) giveUp(err error) {
	p.mu.Lock()
	all := p.takeWaiters(len(p.waiters))
	p.mu.Unlock()
	for _, w := range all {
		w.done(Appended{}, err)
	}
}

// look is called now and then: an append that waits longer than the deadline makes the primary ask for a pass.
func (p *primary) look(now time.Time) {
	p.mu.Lock()
	var old []waiter
	if len(p.waiters) > 0 {
		switch age := now.Sub(p.waiters[0].since); {
		case age > waiterLife:
			n := slices.IndexFunc(p.waiters, func(w waiter) bool { return now.Sub(w.since) <= waiterLife })
			if n < 0 {
				n = len(p.waiters)
			}
			old = p.takeWaiters(n)
		case age > p.s.cfg.ProduceDeadline && !p.closed:
			p.machine.Late()
		}
	}
	p.mu.Unlock()
	for _, w := range old {
		w.done(Appended{}, fmt.Errorf("no quorum: %w", storage.ErrOutcomeUnknown))
	}
	p.askDue()
}

// askAgain is how often an urgent pass is asked for while nothing comes of it.
const askAgain = time.Second

// askDue asks for a pass if one is due: at once if nothing more can be committed without it.
func (p *primary) askDue() {
	p.mu.Lock()
	why, urgent, due := p.machine.Due()
	now := p.s.deps.Now()
	ask := due && !p.closed && urgent && (!p.asked || now.Sub(p.askedAt) > askAgain)
	if ask {
		p.asked, p.askedAt = true, now
	}
	p.mu.Unlock()
	if ask {
		p.s.deps.AskPass(p.id, why)
	}
}

// Watch tells c when more of a segment may be readable: more is committed, or written, or its state has changed.
func (s *Service) Watch(id storage.SegmentID, c chan<- struct{}) (cancel func()) {
	stop := s.deps.Store.Watch(id, c)
	p := s.primary(id)
	if p == nil {
		return stop
	}
	p.mu.Lock()
	if p.watchers == nil {
		p.watchers = map[chan<- struct{}]struct{}{}
	}
	p.watchers[c] = struct{}{}
	p.mu.Unlock()
	return func() {
		stop()
		p.mu.Lock()
		delete(p.watchers, c)
		p.mu.Unlock()
	}
}
