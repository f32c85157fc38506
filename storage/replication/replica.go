package replication

import (
	"fmt"

	"github.com/malachilog/malachi/storage"
)

// State of a replica. It only goes forward.
type State uint8

// States. The zero Replica is absent.
const (
	StateAbsent  State = iota // it was never told to open the segment
	StateOpen                 // takes appends
	StateFenced               // takes only what a pass brings
	StateSealed               // for ever
	StateDropped              // removed because of a recorded fact
)

// String is the state's name for people.
func (s State) String() string {
	return [...]string{"absent", "open", "fenced", "sealed", "dropped"}[s]
}

// Origin says who extends a replica.
type Origin uint8

// Origins.
const (
	FromPrimary Origin = iota + 1 // an append: only onto an open replica
	FromPass                      // a recovered batch: only onto a fenced one
)

// Step is what to do with a batch that a replica does not refuse.
type Step uint8

// Steps.
const (
	StepQueue Step = iota + 1 // hand it to the journal, then call Queued; it is answered behind its barrier
	StepWait                  // a replay: answer when a barrier has covered the end that the answer names
	StepNow                   // a replay that is durable: answer at once
)

// Replica is the durable protocol state of one broker's copy of one segment: what it takes, what it answers, when it may vote. It is told
// what was queued to the journal and what the barrier has covered; it holds no bytes. Two ends differ: Queued is what was handed to the
// journal in order, Durable is what a barrier has covered; only the second is ever answered.
//
// A crash ends it. RecoverReplica makes it again from what the journal and the newest checkpoint tell.
type Replica struct {
	state        State // as queued
	queued       storage.End
	durable      storage.End
	openDurable  bool
	fenceDurable bool
	recovering   bool // what was replayed may live in the page cache only
	unverified   bool // restarted, and its bytes were not read since
	restarted    bool // of an earlier boot, and did not rejoin: no append
	sealing      bool // closed for a pass's batches
	cutting      bool // a cut was queued and not carried out
	damaged      error
	rules        rules
}

// NewReplica is a replica whose open entry is handed to the journal.
func NewReplica(base storage.Offset) Replica {
	return Replica{state: StateOpen, queued: storage.EndBefore(base), durable: storage.EndBefore(base)}
}

// RecoverReplica is an unsealed replica as recovery finds it: end is its checkpointed end extended by the journal. It answers nothing until
// Checkpointed, votes and takes a pass's batches only once Verified, and takes appends only once it did Rejoin.
func RecoverReplica(end storage.End, fenced bool, damaged error) Replica {
	r := Replica{state: StateOpen, queued: end, durable: end, openDurable: true, recovering: true, unverified: true, restarted: true,
		damaged: damaged}
	if fenced {
		r.state, r.fenceDurable = StateFenced, true
	}
	return r
}

// Checkpointed tells that the recovery checkpoint is durable: everything that was replayed survives the next power cut (INV-D12).
func (r *Replica) Checkpointed() { r.recovering = false }

// Verified tells that a restarted replica's bytes were read and verify up to its end.
func (r *Replica) Verified() { r.unverified = false }

// Rejoin lets a verified replica of an earlier boot take its primary's appends again: a restarted follower goes on where its durable end
// is. It is only for a replica whose primary is another broker, because a primary's boot has passed. Errors: storage.ErrUnknownSegment,
// ErrSealed, ErrDamaged, ErrFenced, ErrStaleBoot (not verified), ErrUnavailable (recovering).
func (r *Replica) Rejoin() error {
	switch {
	case r.state == StateAbsent, r.state == StateDropped:
		return storage.ErrUnknownSegment
	case r.state == StateSealed:
		return storage.ErrSealed
	case r.damaged != nil:
		return fmt.Errorf("%w: %w", storage.ErrDamaged, r.damaged)
	case r.state == StateFenced:
		return storage.ErrFenced
	case r.recovering:
		return fmt.Errorf("replica is being recovered: %w", storage.ErrUnavailable)
	case r.unverified:
		return fmt.Errorf("replica was not verified since the restart: %w", storage.ErrStaleBoot)
	}
	r.restarted = false
	return nil
}

// Damage tells of damage in this copy. It stays: the replica neither takes nor votes nor is a source again. The first reason stays.
func (r *Replica) Damage(why error) {
	if r.damaged == nil {
		r.damaged = why
	}
}

// State is the state as queued.
func (r *Replica) State() State { return r.state }

// Queued is the replica's own end: of what was handed to the journal.
func (r *Replica) Queued() storage.End { return r.queued }

// Durable is the end that a barrier has covered.
func (r *Replica) Durable() storage.End { return r.durable }

// Damaged returns the known damage, or nil.
func (r *Replica) Damaged() error { return r.damaged }

// Unverified reports whether the replica was recovered and not read since.
func (r *Replica) Unverified() bool { return r.unverified }

// OpenDurable reports whether the open entry's barrier has returned.
func (r *Replica) OpenDurable() bool { return r.openDurable }

// FenceDurable reports whether the fence survives a crash.
func (r *Replica) FenceDurable() bool { return r.fenceDurable }

// Sealing reports whether a seal is under way.
func (r *Replica) Sealing() bool { return r.sealing }

// Cutting reports whether a queued cut was not carried out yet.
func (r *Replica) Cutting() bool { return r.cutting }

// Take says what to do with whole batches from first to end. A refusal is storage.ErrUnknownSegment, ErrFenced, ErrSealed, ErrDamaged,
// ErrGap (they do not begin at the replica's own end), ErrStaleBoot (restarted and not verified since), ErrConflict (a pass's batches onto a
// replica that is not fenced) or ErrUnavailable (recovering, or being sealed); nothing has changed then, and AnswerTo has the answer.
func (r *Replica) Take(from Origin, first storage.Offset, end storage.End) (Step, error) {
	if r.state == StateAbsent && from == FromPrimary && r.rules.off(ruleNoCreate) {
		*r = Replica{state: StateOpen, queued: storage.EndBefore(first), durable: storage.EndBefore(first), rules: r.rules}
	}
	if err := r.refuses(from); err != nil {
		return 0, err
	}
	switch {
	case from == FromPrimary && r.state == StateFenced: // only with the rule off
		return r.Replayed(r.queued), nil
	case first == r.queued.Next():
		return StepQueue, nil
	}
	if end > r.queued {
		return 0, fmt.Errorf("batch at %d, end is %d: %w", first, r.queued, storage.ErrGap)
	}
	return r.Replayed(end), nil
}

// Replayed is how an OK that names end is given: it waits for the barrier of that end (INV-D15).
func (r *Replica) Replayed(end storage.End) Step {
	if end > r.durable && !r.rules.off(ruleReplayWaits) {
		return StepWait
	}
	return StepNow
}

func (r *Replica) refuses(from Origin) error {
	switch {
	case r.state == StateAbsent, r.state == StateDropped:
		return storage.ErrUnknownSegment
	case r.state == StateSealed:
		return storage.ErrSealed
	case r.damaged != nil:
		return fmt.Errorf("%w: %w", storage.ErrDamaged, r.damaged)
	case from == FromPrimary && r.state == StateFenced && !r.rules.off(ruleFencedSaysNoEnd):
		return storage.ErrFenced
	case r.recovering && !r.rules.off(ruleCheckpointFirst):
		return fmt.Errorf("replica is being recovered: %w", storage.ErrUnavailable)
	case from == FromPrimary && r.restarted:
		return storage.ErrStaleBoot
	case from == FromPass && r.state != StateFenced:
		return fmt.Errorf("replica is not fenced: %w", storage.ErrConflict)
	case r.unverified:
		return fmt.Errorf("replica was not verified since the restart: %w", storage.ErrStaleBoot)
	case r.sealing || r.cutting:
		return fmt.Errorf("replica is being sealed: %w", storage.ErrUnavailable)
	}
	return nil
}

// Extended tells that batches up to end were handed to the journal, behind everything before.
func (r *Replica) Extended(end storage.End) { r.queued = end }

// Barrier tells that everything below end is durable, the open entry too.
func (r *Replica) Barrier(end storage.End) {
	r.durable = max(r.durable, end)
	r.openDurable = true
}

// Fence says whether a fence entry is to be handed to the journal, behind every append taken before; then call FenceQueued. false, nil: it
// is fenced durably already. Errors: storage.ErrUnknownSegment, ErrSealed, ErrUnavailable (recovering).
func (r *Replica) Fence() (queue bool, err error) {
	switch {
	case r.state == StateAbsent, r.state == StateDropped:
		return false, storage.ErrUnknownSegment
	case r.state == StateSealed:
		return false, storage.ErrSealed
	case r.recovering && !r.rules.off(ruleCheckpointFirst):
		return false, fmt.Errorf("replica is being recovered: %w", storage.ErrUnavailable)
	}
	return !r.fenceDurable, nil
}

// FenceQueued tells that the fence entry was handed to the journal: no append is taken from here on.
func (r *Replica) FenceQueued() { r.state = max(r.state, StateFenced) }

// FenceBarrier tells that the fence survives a crash.
func (r *Replica) FenceBarrier() { r.fenceDurable = true }

// Vote returns nil if the replica may vote now, with its queued end, which is then durable too. Errors: storage.ErrDamaged,
// ErrUnknownSegment, ErrSealed, ErrConflict (not durably fenced), ErrStaleBoot (to be verified first), ErrUnavailable (something is under way).
func (r *Replica) Vote() error {
	switch {
	case r.state == StateAbsent, r.state == StateDropped:
		return storage.ErrUnknownSegment
	case r.damaged != nil:
		return fmt.Errorf("%w: %w", storage.ErrDamaged, r.damaged)
	case r.state == StateSealed:
		return storage.ErrSealed
	case !r.fenceDurable:
		return fmt.Errorf("replica is not fenced: %w", storage.ErrConflict)
	case r.unverified:
		return fmt.Errorf("replica was not verified since the restart: %w", storage.ErrStaleBoot)
	case r.cutting || r.durable != r.queued:
		return fmt.Errorf("another pass is changing the replica: %w", storage.ErrUnavailable)
	case r.recovering && !r.rules.off(ruleCheckpointFirst):
		return fmt.Errorf("replica is being recovered: %w", storage.ErrUnavailable)
	}
	return nil
}

// BeginSeal closes the replica for a pass's batches, to be sealed at end; EndSeal or AbortSeal follows. again: it is sealed already, and
// the caller compares the values. Errors: storage.ErrUnknownSegment, ErrDamaged, ErrConflict (not durably fenced), ErrUnavailable (another
// seal, or recovering), ErrGap (shorter than end).
func (r *Replica) BeginSeal(end storage.End) (again bool, err error) {
	switch {
	case r.state == StateAbsent, r.state == StateDropped:
		return false, storage.ErrUnknownSegment
	case r.state == StateSealed:
		return true, nil
	case r.damaged != nil:
		return false, fmt.Errorf("%w: %w", storage.ErrDamaged, r.damaged)
	case r.recovering:
		return false, fmt.Errorf("replica is being recovered: %w", storage.ErrUnavailable)
	case r.state != StateFenced || !r.fenceDurable:
		return false, fmt.Errorf("replica is not fenced: %w", storage.ErrConflict)
	case r.sealing: // by a call that gave up while its entry was under way
		return false, fmt.Errorf("another seal is under way: %w", storage.ErrUnavailable)
	case r.queued < end:
		return false, fmt.Errorf("copy ends at %d: %w", r.queued, storage.ErrGap)
	}
	r.sealing = true
	return false, nil
}

// AbortSeal opens the replica for a pass's batches again: the seal failed before its entry was handed to the journal.
func (r *Replica) AbortSeal() { r.sealing = false }

// CutQueued tells that a cut to end was handed to the journal.
func (r *Replica) CutQueued(end storage.End) { r.queued, r.cutting = end, true }

// CutBarrier tells that the cut to end survives a crash. It is the one way in which a durable end falls, on a fenced replica only.
func (r *Replica) CutBarrier(end storage.End) { r.durable = end }

// CutDone tells that the cut was carried out.
func (r *Replica) CutDone() { r.cutting = false }

// EndSeal tells that the sealed entry is durable.
func (r *Replica) EndSeal() { r.state = StateSealed }

// Drop tells that a dropped entry was handed to the journal.
func (r *Replica) Drop() { r.state = StateDropped }
