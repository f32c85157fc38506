// Package replication holds the decisions of the append path and of sealing, as state machines without I/O, clock, randomness or
// goroutine: a message comes in, orders come out. services/replica and services/coordinator carry the orders out.
//
// A machine is owned by one goroutine (or guarded by one lock) at a time. Nothing here survives a crash: a Primary ends with its boot, and
// a Pass may be begun again from nothing at any time, by anyone, any number of times.
package replication

import (
	"fmt"
	"slices"

	"github.com/malachilog/malachi/e2e/inv/mutate"
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
	stopped   error
}

// NewPrimary is the primary of a segment that begins at base. boot is this process's; recorded is the one in the segment's record. It
// fails with storage.ErrStaleBoot if they differ.
func NewPrimary(set []storage.BrokerID, q int, base storage.Offset, boot, recorded storage.Boot) (*Primary, error) {
	if boot != recorded && !mutate.On("replication.serve-stale-boot") {
		return nil, fmt.Errorf("opened under boot %d, this is %d: %w", recorded, boot, storage.ErrStaleBoot)
	}
	if q < 1 || q > len(set) {
		return nil, fmt.Errorf("quorum of %d in a set of %d: %w", q, len(set), storage.ErrInvalid)
	}
	p := &Primary{set: set, q: q, next: base, committed: storage.EndBefore(base), ends: make([]storage.End, len(set))}
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
	sorted := slices.Clone(p.ends)
	slices.Sort(sorted)
	p.committed = max(p.committed, sorted[len(sorted)-p.q])
	return p.committed
}

// Stop makes every later Take fail with err. The first reason stays.
func (p *Primary) Stop(err error) {
	if p.stopped == nil {
		p.stopped = err
	}
}
