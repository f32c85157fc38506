package replication

import (
	"errors"
	"fmt"

	"github.com/malachilog/malachi/storage"
)

// AnswerKind is what a replica says to an Append of its segment.
type AnswerKind uint8

// Answers. Gap and Busy are of a replica that is behind, not dead. Those from AnswerFenced on are final: it never takes an append again.
const (
	AnswerOK      AnswerKind = iota + 1 // everything below End is durable on it
	AnswerGap                           // the append began beyond End, its own end
	AnswerBusy                          // not now: overloaded, no space, or not verified since its restart; its own end is End
	AnswerUnknown                       // it was not told to open the segment, or has dropped it
	AnswerFenced
	AnswerSealed
	AnswerFailed  // its storage has failed
	AnswerDamaged // it knows of damage in its copy
)

// Answer is a replica's answer to an Append. End is set for OK, Gap and Busy only: a fenced or sealed replica tells no primary its end,
// ever (INV-D10).
type Answer struct {
	Kind AnswerKind
	End  storage.End
}

// AnswerTo maps what a replica's own append ended with to its answer. err nil means that the barrier has covered end; with an error, end is
// the replica's own (queued) end. ok is false for errors that say nothing about the replica, such as bytes that did not verify or a call
// that was given up: the primary treats them as a lost call.
func AnswerTo(err error, end storage.End) (a Answer, ok bool) {
	switch {
	case err == nil:
		return Answer{AnswerOK, end}, true
	case errors.Is(err, storage.ErrStorageFailed):
		return Answer{Kind: AnswerFailed}, true
	case errors.Is(err, storage.ErrFenced):
		return Answer{Kind: AnswerFenced}, true
	case errors.Is(err, storage.ErrSealed):
		return Answer{Kind: AnswerSealed}, true
	case errors.Is(err, storage.ErrDamaged):
		return Answer{Kind: AnswerDamaged}, true
	case errors.Is(err, storage.ErrUnknownSegment):
		return Answer{Kind: AnswerUnknown}, true
	case errors.Is(err, storage.ErrGap):
		return Answer{AnswerGap, end}, true
	case errors.Is(err, storage.ErrOverloaded), errors.Is(err, storage.ErrDiskFull), errors.Is(err, storage.ErrUnavailable),
		errors.Is(err, storage.ErrStaleBoot):
		return Answer{AnswerBusy, end}, true
	}
	return Answer{}, false
}

// final is the reason why a replica that answered so is gone, or nil.
func (a Answer) final() error {
	switch a.Kind {
	case AnswerFenced:
		return storage.ErrFenced
	case AnswerSealed:
		return storage.ErrSealed
	case AnswerFailed:
		return storage.ErrStorageFailed
	case AnswerDamaged:
		return storage.ErrDamaged
	}
	return nil
}

// Verdict is what an answer means for the primary.
type Verdict uint8

// Verdicts.
const (
	VerdictCount Verdict = iota + 1 // OK: hand End to Primary.Confirm; Send has the next
	VerdictShip                     // nothing is counted; Send has what is to be shipped again
	VerdictPause                    // nothing to ship until the caller has waited a moment and called Resume
	VerdictGone                     // final: hand Gone to Primary.Gone
)

// Limits of one follower of one segment.
type Limits struct {
	// Live is how many bytes may be appended and not yet confirmed before the follower leaves the live path: the primary then keeps no
	// bytes in memory for it, and what it lacks is read from the primary's own log. 0: 8 MiB.
	Live int64
	// Calls is how many calls may be under way at once. 0: 2.
	Calls int
}

// followerMarks is how finely a Follower knows which bytes are confirmed: to 1/followerMarks of Limits.Live.
const followerMarks = 32

// mark says that the bytes below end are the first pos of the segment.
type mark struct {
	end storage.End
	pos int64
}

// Follower decides, in the primary, what to ship to one other replica of one segment next. It knows nothing of the bytes: the caller reads
// them from memory if Keep made it hold them, else from its own log. A follower never blocks another, whatever it answers.
//
// Its states: live; behind (more than Limits.Live is not confirmed: it catches up from the log, and is live again once less than half of
// that is); paused (Busy, a lost call, or not opened yet: until Resume); gone (a final answer).
type Follower struct {
	limits    Limits
	next      storage.End // everything appended lies below
	pos       int64       // bytes appended
	confirmed storage.End // the replica's own OK
	sure      int64       // bytes below confirmed, at least
	cursor    storage.End // everything below was shipped, or is there
	attempt   uint32      // rises when cursor goes back: what older calls say about the cursor is past
	calls     int
	opened    bool
	paused    bool
	behind    bool
	gone      error
	marks     [followerMarks]mark // a ring, oldest first from head
	head, n   int
}

// Call names one shipment that is under way.
type Call struct {
	from, end storage.End
	sure      storage.End // confirmed when it was sent
	attempt   uint32
}

// NewFollower is a replica of a segment that begins at base, to which nothing was shipped yet.
func NewFollower(base storage.Offset, limits Limits) *Follower {
	if limits.Live <= 0 {
		limits.Live = 8 << 20
	}
	if limits.Calls <= 0 {
		limits.Calls = 2
	}
	b := storage.EndBefore(base)
	return &Follower{limits: limits, next: b, confirmed: b, cursor: b}
}

// Appended tells that the primary has taken a batch of bytes bytes, up to end. It costs nothing for a follower that is slow or dead.
func (f *Follower) Appended(end storage.End, bytes int64) {
	if end <= f.next {
		return
	}
	f.next, f.pos = end, f.pos+bytes
	if last := f.newest(); f.n == 0 || f.pos-last.pos >= f.limits.Live/followerMarks {
		if f.n == followerMarks {
			f.head, f.n = (f.head+1)%followerMarks, f.n-1
		}
		f.marks[(f.head+f.n)%followerMarks] = mark{f.next, f.pos}
		f.n++
	}
	f.measure()
}

func (f *Follower) newest() mark { return f.marks[(f.head+f.n+followerMarks-1)%followerMarks] }

// Opened tells that the replica has confirmed the opening of the segment, as an OK, Gap or Busy does too: from then on an Unknown is final.
func (f *Follower) Opened() { f.opened = true }

// Send returns what to ship next: whole batches from offset from, up to at most to. ok is false if there is nothing, if enough is under
// way, or if the replica is paused or gone. It changes nothing: the caller says with Sent what it did ship.
func (f *Follower) Send() (from storage.Offset, to storage.End, ok bool) {
	if f.gone != nil || f.paused || f.calls >= f.limits.Calls || f.cursor >= f.next {
		return 0, 0, false
	}
	return f.cursor.Next(), f.next, true
}

// Sent tells that batches from from to end are on their way. Exactly one Answer or Lost follows for each call.
func (f *Follower) Sent(from storage.Offset, end storage.End) Call {
	f.calls++
	if f.cursor == storage.EndBefore(from) {
		f.cursor = max(f.cursor, end)
	}
	return Call{from: storage.EndBefore(from), end: end, sure: f.confirmed, attempt: f.attempt}
}

// Answer takes the replica's answer to a call. With VerdictCount, a.End counts for the quorum: it is a durable end that the replica itself
// returned as OK to an append of this segment.
func (f *Follower) Answer(c Call, a Answer) Verdict {
	f.calls--
	if f.gone != nil {
		return VerdictGone
	}
	current := c.attempt == f.attempt
	switch a.Kind {
	case AnswerOK:
		f.opened = true
		f.confirmed = max(f.confirmed, a.End)
		if f.cursor < f.confirmed {
			f.cursor = min(f.confirmed, f.next) // an end beyond next stops the primary; there is nothing to ship in any case
		}
		if current && a.End < c.end {
			f.back(a.End)
		}
		f.measure()
		return VerdictCount
	case AnswerGap:
		f.opened = true
		if a.End < c.sure { // it answered this call after it had confirmed more than it has now
			return f.end(fmt.Errorf("replica is at %d and had confirmed %d: %w", a.End, c.sure, storage.ErrConflict))
		}
		if current {
			f.back(a.End)
		}
		return VerdictShip
	case AnswerBusy:
		f.opened = true
		if current {
			f.back(a.End)
		}
		f.paused = true
		return VerdictPause
	case AnswerUnknown:
		if f.opened {
			return f.end(storage.ErrUnknownSegment)
		}
		return f.lost(current)
	}
	if err := a.final(); err != nil {
		return f.end(err)
	}
	return f.lost(current)
}

// Lost tells that a call ended without the replica's answer: it may have taken the batches or not. They are shipped again from what it
// has confirmed, after Resume.
func (f *Follower) Lost(c Call) Verdict {
	f.calls--
	if f.gone != nil {
		return VerdictGone
	}
	return f.lost(c.attempt == f.attempt)
}

func (f *Follower) lost(current bool) Verdict {
	if current {
		f.back(f.confirmed)
		f.paused = true
	}
	if f.paused {
		return VerdictPause
	}
	return VerdictShip
}

// back makes end the next thing to ship, or what is confirmed if that is more: an answer may be older than a confirmation.
func (f *Follower) back(end storage.End) {
	f.cursor = min(max(end, f.confirmed), f.next)
	f.attempt++
}

func (f *Follower) end(why error) Verdict {
	f.gone = why
	return VerdictGone
}

// Resume ends a pause.
func (f *Follower) Resume() { f.paused = false }

// measure moves the follower between the live path and catching up.
func (f *Follower) measure() {
	for f.n > 0 && f.marks[f.head].end <= f.confirmed {
		f.sure = f.marks[f.head].pos
		f.head, f.n = (f.head+1)%followerMarks, f.n-1
	}
	if f.confirmed >= f.next {
		f.sure = f.pos
	}
	switch lag := f.pos - f.sure; {
	case lag > f.limits.Live:
		f.behind = true
	case lag <= f.limits.Live/2:
		f.behind = false
	}
}

// Keep returns the offset from which on the primary holds the bytes in memory for this follower, and false if it needs none: it has left
// the live path, or is gone.
func (f *Follower) Keep() (storage.Offset, bool) {
	return f.confirmed.Next(), f.gone == nil && !f.behind
}

// Confirmed is the highest end that the replica has returned as OK.
func (f *Follower) Confirmed() storage.End { return f.confirmed }

// Behind reports whether the follower has left the live path and catches up from the log.
func (f *Follower) Behind() bool { return f.gone == nil && f.behind }

// Paused reports whether nothing is shipped until Resume.
func (f *Follower) Paused() bool { return f.gone == nil && f.paused }

// Gone returns the final reason why nothing is shipped ever again, or nil.
func (f *Follower) Gone() error { return f.gone }

// Lag is how many bytes are appended and not confirmed, rounded up by at most 1/32 of Limits.Live.
func (f *Follower) Lag() int64 { return f.pos - f.sure }
