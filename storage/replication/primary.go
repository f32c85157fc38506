// Package replication holds the decisions of the append path and of sealing, as state machines without I/O, clock, randomness or
// goroutine: a message comes in, orders come out. services/replica and services/coordinator carry the orders out.
//
// Primary assigns offsets and counts ends; Follower says what to ship to one other replica next; Replica is what one broker's copy takes,
// answers and votes; Pass seals. The simulator of this package's tests runs the four on brokers that crash, lie and lose disks.
//
// A machine is owned by one goroutine (or guarded by one lock) at a time. Of these only a Replica stands for what is on disk: a Primary and
// its Followers end with their boot, and a Pass may be begun again from nothing at any time, by anyone, any number of times.
package replication

import (
	"errors"
	"fmt"
	"slices"

	"github.com/malachilog/malachi/storage"
)

// Primary assigns offsets to one open segment and decides what is committed. It serves only under the boot that was recorded when the
// segment was opened (INV-D5): make one with NewPrimary for an open that this process carried out, and never for one found after a restart.
type Primary struct {
	set       []storage.BrokerID
	q         int
	next      storage.Offset
	ends      []storage.End // what each member of set has confirmed to an append of this segment
	committed storage.End
	gone      []error       // why a member never confirms again; nil while it may
	late      bool          // the oldest append that is not committed is older than the produce deadline
	scratch   []storage.End // Confirm sorts here
	stopped   error
	rules     rules
}

// NewPrimary is the primary of a segment that begins at base. boot is this process's; recorded is the one in the segment's record. It
// fails with storage.ErrStaleBoot if they differ.
func NewPrimary(set []storage.BrokerID, q int, base storage.Offset, boot, recorded storage.Boot) (*Primary, error) {
	return newPrimary(set, q, base, boot, recorded, 0)
}

func newPrimary(set []storage.BrokerID, q int, base storage.Offset, boot, recorded storage.Boot, r rules) (*Primary, error) {
	if boot != recorded && !r.off(ruleRecordedBoot) {
		return nil, fmt.Errorf("opened under boot %d, this is %d: %w", recorded, boot, storage.ErrStaleBoot)
	}
	if q < 1 || q > len(set) {
		return nil, fmt.Errorf("quorum of %d in a set of %d: %w", q, len(set), storage.ErrInvalid)
	}
	p := &Primary{set: set, q: q, next: base, committed: storage.EndBefore(base), ends: make([]storage.End, len(set)),
		gone: make([]error, len(set)), scratch: make([]storage.End, len(set)), rules: r}
	for i := range p.ends {
		p.ends[i] = p.committed
	}
	return p, nil
}

// Next is the offset that the next batch takes.
func (p *Primary) Next() storage.Offset { return p.next }

// Committed is the end that a quorum has confirmed. It never falls.
func (p *Primary) Committed() storage.End { return p.committed }

// Take assigns the next n offsets, at least one (INV-D16). It fails with the reason once the primary has stopped.
func (p *Primary) Take(n uint32) (storage.Offset, error) {
	if p.stopped != nil {
		return 0, p.stopped
	}
	if n == 0 {
		return 0, fmt.Errorf("a batch of no records takes no offset: %w", storage.ErrInvalid)
	}
	if p.next > storage.MaxOffset-storage.Offset(n) {
		return 0, fmt.Errorf("offset %d: %w", p.next, storage.ErrTooLarge)
	}
	base := p.next
	p.next += storage.Offset(n)
	return base, nil
}

// GiveBack takes back the newest Take, whose append was refused before anything was queued.
func (p *Primary) GiveBack(base storage.Offset) { p.next = base }

// Confirm counts an end that member has returned as OK to an append of this segment, and returns the committed end. An end beyond
// what was assigned means that somebody else appends: the primary stops, and a pass is due.
func (p *Primary) Confirm(member storage.BrokerID, end storage.End) storage.End {
	i := slices.Index(p.set, member)
	if i < 0 {
		return p.committed
	}
	if end > storage.EndBefore(p.next) {
		p.Stop(fmt.Errorf("replica %s is at %d, beyond everything assigned (%d): %w", member, end, p.next, storage.ErrConflict))
		return p.committed
	}
	p.ends[i] = max(p.ends[i], end)
	copy(p.scratch, p.ends)
	slices.Sort(p.scratch)
	k := len(p.scratch) - p.q
	if p.rules.off(ruleQuorumOfAcks) {
		k = min(k+1, len(p.scratch)-1)
	}
	if c := p.scratch[k]; c > p.committed {
		p.committed, p.late = c, false
	}
	return p.committed
}

// Gone tells that member never confirms again: what Follower.Gone says of another replica, or what this broker's own append failed with.
// What it has confirmed stays counted. The first reason stays.
func (p *Primary) Gone(member storage.BrokerID, why error) {
	if i := slices.Index(p.set, member); i >= 0 && p.gone[i] == nil {
		p.gone[i] = why
	}
}

// Late tells that the oldest append that is not committed is older than the produce deadline: a partition may have cut only this broker,
// so it asks for a pass itself. Progress takes that back.
func (p *Primary) Late() {
	if p.committed < storage.EndBefore(p.next) {
		p.late = true
	}
}

// Due says whether a pass is due, and why. urgent: without one, nothing more is committed here; else the quorum is up and the segment may
// be rolled when it suits.
func (p *Primary) Due() (why Reason, urgent, due bool) {
	left := 0
	for _, g := range p.gone {
		switch {
		case g == nil:
			left++
		case errors.Is(g, storage.ErrFenced), errors.Is(g, storage.ErrSealed):
			why = ReasonFenced
		case why == "":
			why = ReasonFailed
		}
	}
	switch {
	case p.stopped != nil && errors.Is(p.stopped, storage.ErrConflict):
		return ReasonFenced, true, true // somebody else extends these replicas
	case left < p.q:
		return why, true, true
	case p.late:
		return ReasonNoQuorum, true, true
	}
	return why, false, why != ""
}

// Stop makes every later Take fail with err. The first reason stays.
func (p *Primary) Stop(err error) {
	if p.stopped == nil {
		p.stopped = err
	}
}

// Stopped returns why the primary takes nothing more, or nil.
func (p *Primary) Stopped() error { return p.stopped }
