package replication

import (
	"errors"
	"slices"

	"github.com/malachilog/malachi/storage"
)

// simBroker is a process and its disk. Everything but disk and gone ends with a crash.
type simBroker struct {
	w     *world
	index int
	disk  *simDisk
	gone  bool // its disk was lost: it never starts again

	refused bool // root has refused its disk: it is started again and again, and must stay refused

	up         bool
	paused     bool
	gen        int
	boot       storage.Boot
	registered bool // root has taken its boot: it may answer
	recovering bool
	failed     bool // a barrier failed
	full       bool
	pending    []simEntry
	inflight   *simGroup
	lastGroup  uint64
	given      uint64
	copies     [maxSegs]*simCopy
	sessions   [maxSegs]*session
	asked      [maxSegs]*Vote // only with laxFenceOrder
	ckpt       *simNote
	ckptSynced bool
	ended      [maxSegs]entryKind // what the replay found ended, durably or not
}

// simCopy is a broker's copy of a segment, as its process knows it.
type simCopy struct {
	m         Replica
	base      storage.End
	log       []simBatch
	digests   []storage.Digest
	waiters   []simWaiter
	voters    []func()
	live      bool // its open entry was given and no end
	givenFile bool
	fencedRun bool
}

type simWaiter struct {
	end storage.End
	f   func()
}

func (c *simCopy) digest() storage.Digest {
	if len(c.digests) == 0 {
		return 0
	}
	return c.digests[len(c.digests)-1]
}

func (c *simCopy) push(b simBatch) {
	c.log, c.digests = append(c.log, b), append(c.digests, chain(c.digest(), b))
	c.m.Extended(b.end())
}

func (c *simCopy) cut(end storage.End) {
	for len(c.log) > 0 && c.log[len(c.log)-1].end() > end {
		c.log, c.digests = c.log[:len(c.log)-1], c.digests[:len(c.digests)-1]
	}
}

// digestAt is the digest below end; false if end is no end of a batch here.
func (c *simCopy) digestAt(end storage.End) (storage.Digest, bool) {
	if end == c.base {
		return 0, true
	}
	for i, b := range c.log {
		if b.end() == end {
			return c.digests[i], true
		}
	}
	return 0, false
}

func (w *world) newBroker() *simBroker {
	b := &simBroker{w: w, index: len(w.brokers), disk: &simDisk{boot: 1, registered: true}}
	b.up, b.boot, b.registered = true, 1, true
	w.brokers = append(w.brokers, b)
	w.root[b.index] = registration{boot: 1}
	return b
}

func (b *simBroker) id() storage.BrokerID { return brokerID(b.index) }
func (b *simBroker) node() nodeID         { return nodeID(b.index) }
func (b *simBroker) running() bool        { return b.up && (!b.paused || b.w.settling) }
func (b *simBroker) serves() bool         { return b.up && b.registered }

// queue hands an entry to the journal. It is refused once the storage has failed.
func (b *simBroker) queue(e simEntry) bool {
	if b.failed {
		return false
	}
	b.pending = append(b.pending, e)
	return true
}

// journal writes the next group, or lets the barrier of the one under way return.
func (b *simBroker) journal() bool {
	w := b.w
	switch {
	case b.failed || b.recovering:
		return false
	case b.inflight == nil && len(b.pending) == 0:
		return false
	case b.inflight == nil:
		b.lastGroup++
		b.inflight = &simGroup{num: b.lastGroup, entries: b.pending}
		b.pending = nil
		b.disk.groups = append(b.disk.groups, b.inflight)
		return true
	}
	g := b.inflight
	b.inflight = nil
	if !w.settling && w.chance(.002) {
		w.note("barrier failed", b.index)
		b.failed = true
		for _, e := range append(slices.Clone(g.entries), b.pending...) {
			if e.done != nil {
				e.done(true)
			}
		}
		b.pending = nil
		return true
	}
	g.durable = true
	b.disk.last = g.num
	for i := range g.entries {
		w.learn(b, &g.entries[i])
		if done := g.entries[i].done; done != nil {
			done(false)
		}
	}
	return true
}

// give writes the next durable group to the files, through the page cache.
func (b *simBroker) give() bool {
	for _, g := range b.disk.groups {
		if g.num <= b.given {
			continue
		}
		if !g.durable {
			return false
		}
		for i := range g.entries {
			b.giveEntry(&g.entries[i])
		}
		b.given = g.num
		return true
	}
	return false
}

func (b *simBroker) giveAll() {
	for b.give() { //nolint:revive // until nothing is left
	}
}

func (b *simBroker) giveEntry(e *simEntry) {
	if e.kind == entryCheckpoint {
		return
	}
	c, f := b.copies[e.seg], b.disk.files[e.seg]
	if c == nil || e.kind != entryOpen && f == nil { // dropped since
		b.disk.files[e.seg] = nil
		return
	}
	switch e.kind {
	case entryOpen:
		b.disk.files[e.seg] = &simFile{base: e.end}
		c.live, c.givenFile = true, true
	case entryAppend, entryRecovered:
		f.batches = append(f.batches, stored{b: e.b})
	case entryFence:
		c.fencedRun = true
	case entryCut:
		f.truncate(e.end)
		c.m.CutDone()
	case entrySealed:
		c.live = false
	case entryDropped:
		b.disk.files[e.seg] = nil
		c.live = false
	}
}

// checkpoint goes one step: note, sync, entry.
func (b *simBroker) checkpoint() bool {
	if b.failed || b.recovering {
		return false
	}
	switch {
	case b.ckpt == nil:
		n := &simNote{from: b.given + 1}
		for seg, c := range b.copies {
			if c != nil && c.live {
				f := b.disk.files[seg]
				n.segs = append(n.segs, segNote{seg, c.base, f.end(), c.fencedRun, c.m.Damaged() != nil})
			}
		}
		b.ckpt, b.ckptSynced = n, false
	case !b.ckptSynced:
		for _, n := range b.ckpt.segs {
			if f := b.disk.files[n.seg]; f != nil {
				f.sync()
			}
		}
		b.ckptSynced = true
	default:
		n := b.ckpt
		b.ckpt = nil
		b.queue(simEntry{kind: entryCheckpoint, note: n, done: func(failed bool) {
			if !failed {
				b.w.branch("checkpoint")
				b.recycle(n.from)
			}
		}})
	}
	return true
}

func (b *simBroker) recycle(before uint64) {
	b.disk.groups = slices.DeleteFunc(b.disk.groups, func(g *simGroup) bool { return g.num < before })
}

// crash ends the process; power also takes what is not durable.
func (b *simBroker) crash(power bool) {
	w := b.w
	if b.inflight != nil && w.chance(.4) { // torn: it does not verify
		b.disk.groups = b.disk.groups[:len(b.disk.groups)-1]
	}
	*b = simBroker{w: w, index: b.index, disk: b.disk, gone: b.gone, refused: b.refused, gen: b.gen + 1}
	if power {
		w.powerCut(b.disk)
	}
}

// start recovers a broker's disk. It does not answer before its recovery checkpoint.
func (b *simBroker) start() {
	w := b.w
	w.note("start", b.index)
	live, ended, last, ok := b.disk.replay()
	b.up, b.recovering, b.boot = true, true, b.disk.boot+1
	b.lastGroup, b.given = last, last
	if !ok {
		w.violates("INV-D1", "broker %d: a group is missing in the middle of its journal", b.index)
		b.crash(false)
		b.gone = true
		return
	}
	if b.disk.registered {
		b.disk.proof, b.disk.registered = last, false
	}
	b.disk.proof = min(b.disk.proof, last) // what was found then may have been readable and not durable
	b.ended = ended
	for seg, r := range live {
		b.takeUp(seg, r)
	}
	if b.rulesOff(ruleCheckpointFirst) { // it serves what it can read back
		b.recovering = false
		b.register()
	}
}

func (b *simBroker) rulesOff(r rules) bool { return b.w.cfg.rules.off(r) }

func (b *simBroker) takeUp(seg int, r *recovered) {
	w, f, t := b.w, b.disk.files[seg], &b.disk.truth[seg]
	faulted := seg < len(w.segs) && w.segs[seg].faulted[b.index]
	if r == nil {
		switch {
		case f != nil && f.sealed:
			c := &simCopy{base: f.base, m: Replica{state: StateSealed, queued: f.end(), durable: f.end(), rules: w.cfg.rules}}
			for _, s := range f.batches {
				c.push(s.b)
			}
			b.copies[seg] = c
		case t.opened && !t.sealed && !faulted && b.ended[seg] != entryDropped && !w.segs[seg].abandoned():
			w.violates("INV-S13", "broker %d has forgotten segment %d", b.index, seg)
		} // replay removes no file: the entry that it found may still be lost
		return
	}
	if t.sealed || t.dropped && r.end != r.base { // a late fence may make a stub of what was dropped: it holds nothing
		w.violates("INV-S13", "broker %d takes segment %d up again, which it had ended", b.index, seg)
	}
	want := t.end
	if s := w.segs[seg].sealed; s != nil { // a cut to the recorded end may be readable and not durable
		want = min(want, s.End)
	}
	if !faulted && (r.end < want || t.fenced && !r.fenced) {
		w.violates("INV-S13", "broker %d recovers segment %d at %d fenced %v, durable was %d fenced %v", b.index, seg, r.end, r.fenced,
			t.end, t.fenced)
	}
	c := &simCopy{base: r.base, live: true, givenFile: true, fencedRun: r.fenced}
	var damaged error
	if r.damaged || r.missing {
		damaged = storage.ErrCorrupt
		if !faulted {
			w.violates("INV-R2", "broker %d calls segment %d damaged, which it is not", b.index, seg)
		}
	}
	c.m = RecoverReplica(r.end, r.fenced, damaged)
	c.m.rules = w.cfg.rules
	for _, s := range r.log {
		c.log, c.digests = append(c.log, s.b), append(c.digests, chain(c.digest(), s.b))
	}
	b.copies[seg] = c
	b.disk.files[seg] = &simFile{base: r.base, batches: slices.Clone(r.log), named: f != nil && f.named}
}

// recoveryCheckpoint makes everything that was replayed durable. Then the broker registers.
func (b *simBroker) recoveryCheckpoint() bool {
	w := b.w
	if !b.up || !b.recovering {
		return false
	}
	n := &simNote{from: b.lastGroup + 1}
	for seg, c := range b.copies {
		if c == nil {
			continue
		}
		b.disk.files[seg].sync()
		if c.live {
			n.segs = append(n.segs, segNote{seg, c.base, b.disk.files[seg].end(), c.fencedRun, c.m.Damaged() != nil})
		}
	}
	b.lastGroup++
	g := &simGroup{num: b.lastGroup, entries: []simEntry{{kind: entryCheckpoint, note: n}}}
	b.disk.groups = append(b.disk.groups, g)
	if !w.settling && w.chance(.1) {
		w.note("crash in the recovery checkpoint", b.index)
		b.crash(w.chance(.5))
		return true
	}
	g.durable = true
	b.disk.last, b.given = g.num, g.num
	for seg, c := range b.copies { // what is in the page cache is on disk now
		if c != nil && c.live {
			b.relearn(seg, c)
		}
	}
	for seg, kind := range b.ended {
		if kind == entryDropped {
			b.disk.truth[seg] = onDisk{dropped: true}
			if b.copies[seg] == nil {
				b.disk.files[seg] = nil
			}
		}
	}
	b.recycle(n.from)
	b.disk.boot = b.boot
	b.recovering = false
	for _, c := range b.copies {
		if c != nil {
			c.m.Checkpointed()
		}
	}
	w.branch("recovery checkpoint")
	b.register()
	return true
}

// relearn is what a recovery checkpoint makes durable: groups that were readable and not durable.
func (b *simBroker) relearn(seg int, c *simCopy) {
	t, m := &b.disk.truth[seg], b.w.segs[seg]
	if c.m.queued > t.end {
		b.w.branch("a readable group was kept")
	}
	if !t.opened {
		*t = onDisk{opened: true, end: c.base, good: c.base, bad: c.base != m.base}
	}
	for _, x := range c.log {
		if x.base >= t.end.Next() {
			t.end = x.end()
			if t.bad = t.bad || x.bad || !m.wrote(x); !t.bad {
				t.good = t.end
			}
		}
	}
	if c.m.queued < t.end { // a cut that was readable and not durable
		t.end, t.good = c.m.queued, min(t.good, c.m.queued)
	}
	t.fenced = t.fenced || c.m.state == StateFenced
	b.w.dirty[seg] = true
}

// register asks root to take this boot. A disk that was cloned or rolled back is refused: exit 78.
func (b *simBroker) register() {
	w, reg := b.w, &b.w.root[b.index]
	if w.cfg.lax&laxProof != 0 {
		b.disk.proof = b.disk.last
	}
	if (b.boot <= reg.boot || b.disk.proof < reg.group) && w.cfg.lax&laxIdentity == 0 {
		w.note("disk refused", b.index)
		b.crash(false)
		b.refused = true
		return
	}
	if b.refused {
		w.violates("INV-D9", "broker %d is registered with a disk that was refused", b.index)
	}
	*reg = registration{b.boot, max(reg.group, b.disk.proof)}
	b.registered, b.disk.registered = true, true
	for seg, c := range b.copies { // with the rule off, a primary goes on after its restart
		if c == nil || c.m.state != StateOpen || w.segs[seg].primary() != b.index {
			continue
		}
		p, err := newPrimary(w.segs[seg].set, w.segs[seg].q, c.m.queued.Next(), b.boot, w.segs[seg].boot, w.cfg.rules)
		if err != nil {
			w.branch("restarted primary does not serve")
			continue
		}
		c.m.Verified()
		if err := c.m.Rejoin(); err == nil {
			b.sessions[seg] = newSession(b, seg, p)
		}
	}
}

// verify reads a restarted copy.
func (b *simBroker) verify(seg int) {
	c := b.copies[seg]
	if c == nil || !c.m.unverified || c.m.damaged != nil {
		return
	}
	b.w.branch("restarted copy verified")
	for _, s := range b.disk.files[seg].batches {
		if s.rot || s.b.bad && b.w.cfg.lax&laxBytes == 0 {
			b.w.note("rot found at a restart", b.index, seg)
			c.m.Damage(storage.ErrCorrupt)
			return
		}
	}
	c.m.Verified()
}

// rejoin verifies a restarted copy of another's segment and follows again.
func (b *simBroker) rejoin(seg int) {
	b.verify(seg)
	if c := b.copies[seg]; c != nil && c.m.restarted && b.w.segs[seg].primary() != b.index && c.m.Rejoin() == nil {
		b.w.branch("restarted follower goes on")
	}
}

// read returns verified batches of a copy from end from, up to end to, as they are in its file.
func (b *simBroker) read(seg int, from, to storage.End, limit int) (out []simBatch, err error) {
	f := b.disk.files[seg]
	if f == nil { // nothing was given to it yet
		return nil, nil
	}
	for _, s := range f.batches {
		switch {
		case storage.EndBefore(s.b.base) < from:
		case s.b.end() > to || len(out) == limit:
			return out, nil
		case s.rot:
			b.w.note("rot found by a read", b.index, seg)
			return out, storage.ErrCorrupt
		default:
			out = append(out, s.b)
		}
	}
	return out, nil
}

// open takes an OpenReplica of the coordinator, or makes the stub that a fence needs.
func (b *simBroker) open(seg int, base storage.End, done func(failed bool)) *simCopy {
	c := &simCopy{base: base, m: NewReplica(base.Next())}
	c.m.rules = b.w.cfg.rules
	gen := b.gen
	if !b.queue(simEntry{kind: entryOpen, seg: seg, end: base, done: func(failed bool) {
		if b.gen == gen && !failed {
			c.m.Barrier(base)
		}
		done(failed)
	}}) {
		return nil
	}
	b.copies[seg] = c
	return c
}

// extend queues one batch, from the primary or a pass.
func (b *simBroker) extend(from Origin, seg int, x simBatch) error {
	c := b.copies[seg]
	if b.failed {
		return storage.ErrStorageFailed
	}
	if c == nil {
		m := Replica{rules: b.w.cfg.rules}
		if _, err := m.Take(from, x.base, x.end()); err != nil {
			return err
		}
		c = b.open(seg, storage.EndBefore(x.base), func(bool) {}) // only with the rule off
	}
	if b.full && from == FromPrimary {
		b.w.branch("disk full")
		return storage.ErrDiskFull
	}
	step, err := c.m.Take(from, x.base, x.end())
	if err != nil || step != StepQueue {
		return err
	}
	kind := entryAppend
	if from == FromPass {
		kind = entryRecovered
	}
	c.push(x)
	b.queue(simEntry{kind: kind, seg: seg, b: x, done: func(failed bool) {
		if failed {
			return
		}
		c.m.Barrier(x.end())
		b.wake(c)
	}})
	return nil
}

// wake runs what waited for a barrier.
func (b *simBroker) wake(c *simCopy) {
	c.waiters = slices.DeleteFunc(c.waiters, func(x simWaiter) bool {
		if x.end > c.m.durable {
			return false
		}
		x.f()
		return true
	})
	voters := c.voters
	c.voters = nil
	for _, f := range voters {
		f()
	}
}

// onAppend serves an Append of a primary.
func (b *simBroker) onAppend(seg int, batches []simBatch, reply func(Answer)) {
	if !b.serves() {
		return // nothing is answered before root has taken the boot
	}
	fenced := b.copies[seg] != nil && b.copies[seg].m.state >= StateFenced
	for _, x := range batches {
		if x.bad && b.w.cfg.lax&laxBytes == 0 {
			b.w.branch("corrupt message refused")
			return
		}
		if err := b.extend(FromPrimary, seg, x); err != nil {
			var end storage.End
			if c := b.copies[seg]; c != nil {
				end = c.m.queued
			}
			if a, ok := AnswerTo(err, end); ok {
				b.w.branch(answerNames[a.Kind])
				reply(a)
			}
			return
		}
	}
	c := b.copies[seg]
	end := c.m.Queued()
	ok := func() {
		if end > b.disk.truth[seg].end {
			b.w.violates("INV-D3", "broker %d answers %d for segment %d, durable is %d", b.index, end, seg, b.disk.truth[seg].end)
		}
		if fenced {
			b.w.violates("INV-D10", "fenced broker %d answers %d for segment %d", b.index, end, seg)
		}
		reply(Answer{AnswerOK, end})
	}
	if c.m.Replayed(end) == StepNow {
		b.w.branch("replay answered at once")
		ok()
		return
	}
	c.waiters = append(c.waiters, simWaiter{end, ok})
}

var answerNames = map[AnswerKind]string{AnswerGap: "answer GAP", AnswerBusy: "answer BUSY", AnswerUnknown: "answer UNKNOWN",
	AnswerFenced: "answer FENCED", AnswerSealed: "answer SEALED", AnswerFailed: "answer STORAGE_FAILED", AnswerDamaged: "answer DAMAGED"}

// onFence fences durably, then votes.
func (b *simBroker) onFence(m *simSegment, voted func(Vote), noVote func(error)) {
	if !b.serves() {
		return
	}
	if b.failed {
		noVote(storage.ErrStorageFailed)
		return
	}
	seg := m.seq
	c := b.copies[seg]
	if c == nil {
		b.w.branch("fenced as a stub")
		if c = b.open(seg, m.base, func(bool) {}); c == nil {
			return
		}
	}
	queue, err := c.m.Fence()
	if err != nil {
		noVote(err)
		return
	}
	vote := func() { b.vote(m, c, voted, noVote) }
	if !queue {
		vote()
		return
	}
	c.m.FenceQueued()
	b.queue(simEntry{kind: entryFence, seg: seg, done: func(failed bool) {
		if !failed {
			c.m.FenceBarrier()
			vote()
		}
	}})
}

func (b *simBroker) vote(m *simSegment, c *simCopy, voted func(Vote), noVote func(error)) {
	seg := m.seq
	if b.failed {
		noVote(storage.ErrStorageFailed)
		return
	}
	b.verify(seg)
	switch err := c.m.Vote(); {
	case errors.Is(err, storage.ErrUnavailable):
		c.voters = append(c.voters, func() { b.vote(m, c, voted, noVote) })
		return
	case err != nil:
		noVote(err)
		return
	}
	v := Vote{End: c.m.Queued(), Digest: c.digest(), Bytes: int64(len(c.log))}
	if t := b.disk.truth[seg]; v.End > t.end || !t.fenced {
		b.w.violates("INV-D12", "broker %d votes %d for segment %d, durable is %d fenced %v", b.index, v.End, seg, t.end, t.fenced)
	}
	if asked := b.asked[seg]; asked != nil && b.w.cfg.lax&laxFenceOrder != 0 {
		v = *asked
	}
	voted(v)
}

// onSeal is step 6: cut beyond the recorded end, complete the file, record that.
func (b *simBroker) onSeal(m *simSegment, done func()) {
	c := b.copies[m.seq]
	if !b.serves() || b.failed || c == nil {
		return
	}
	end := m.sealed.End
	if m.abandoned() {
		if c.m.state != StateDropped {
			c.m.Drop()
			b.queue(simEntry{kind: entryDropped, seg: m.seq, done: func(failed bool) {
				if !failed {
					b.w.note("dropped", b.index, m.seq)
					b.copies[m.seq], b.sessions[m.seq] = nil, nil
					done()
				}
			}})
		}
		return
	}
	if queue, err := c.m.Fence(); err == nil && queue { // it was away when the others were fenced
		b.w.branch("fenced after the seal")
		c.m.FenceQueued()
		b.queue(simEntry{kind: entryFence, seg: m.seq, done: func(failed bool) {
			if !failed {
				c.m.FenceBarrier()
			}
		}})
		return
	}
	b.verify(m.seq)
	again, err := c.m.BeginSeal(end)
	if again {
		done()
	}
	if again || err != nil {
		return
	}
	b.giveAll()
	f := b.disk.files[m.seq]
	d, ok := c.digestAt(end)
	switch {
	case c.m.durable != c.m.queued || c.m.cutting || f == nil || f.end() != c.m.queued:
		c.m.AbortSeal() // not all of it is in the file yet
	case !ok || d != m.sealed.Digest:
		c.m.AbortSeal()
		if !m.faulted[b.index] {
			b.w.violates("INV-S3", "broker %d holds other bytes below %d of segment %d", b.index, end, m.seq)
		}
	case c.m.queued > end:
		b.w.note("cut", b.index, m.seq, end)
		c.m.CutQueued(end)
		c.cut(end)
		b.queue(simEntry{kind: entryCut, seg: m.seq, end: end, done: func(failed bool) {
			if !failed {
				c.m.CutBarrier(end)
				c.m.AbortSeal()
			}
		}})
	default:
		f.sync()
		f.sealed = true
		b.queue(simEntry{kind: entrySealed, seg: m.seq, end: end, done: func(failed bool) {
			if !failed {
				c.m.EndSeal()
				if at := b.disk.truth[m.seq].end; at != end {
					b.w.violates("INV-S9", "broker %d seals segment %d with %d, recorded is %d", b.index, m.seq, at, end)
				}
				b.w.note("copy sealed", b.index, m.seq)
				done()
			}
		}})
	}
}
