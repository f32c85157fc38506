package replication

import (
	"errors"
	"fmt"
	"testing"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/storage"
)

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
	if _, err := p.Take(uint32(1)); err != nil {
		t.Error(err)
	}
	p.GiveBack(15)
	if p.Next() != 15 {
		t.Errorf("next is %d after an append that was refused", p.Next())
	}
	if p.Confirm(2, 16); p.stopped == nil {
		t.Error("an end beyond everything assigned does not stop the primary")
	}
	if _, err := p.Take(1); !errors.Is(err, storage.ErrConflict) {
		t.Errorf("a stopped primary takes: %v", err)
	}
	if why, urgent, due := p.Due(); why != ReasonFenced || !urgent || !due {
		t.Errorf("it asks for no pass: %q %v %v", why, urgent, due)
	}
}

func TestConfirmTakesNoMemory(t *testing.T) {
	p, err := NewPrimary([]storage.BrokerID{1, 2, 3}, 2, 0, 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	f := NewFollower(0, Limits{})
	m := NewReplica(0)
	n := testing.AllocsPerRun(1000, func() {
		base, _ := p.Take(1)
		end := storage.EndAfter(base, 1)
		if step, err := m.Take(FromPrimary, base, end); err != nil || step != StepQueue {
			t.Fatal(step, err)
		}
		m.Extended(end)
		m.Barrier(end)
		f.Appended(end, 1<<10)
		from, to, _ := f.Send()
		f.Answer(f.Sent(from, to), Answer{AnswerOK, to})
		p.Confirm(1, end)
		p.Confirm(2, end)
	})
	if n != 0 {
		t.Errorf("%v allocations per append", n)
	}
	if p.Committed() != storage.EndBefore(p.Next()) {
		t.Error("nothing was committed")
	}
}

// TestSlowFollowerIsBounded: what the primary keeps in memory for a follower that answers nothing is at most the bound, and it comes back
// to the live path by itself.
func TestSlowFollowerIsBounded(t *testing.T) {
	f := NewFollower(100, Limits{Live: 1000, Calls: 2})
	end := storage.End(100)
	held := func() (n int64) { // bytes that Keep makes the primary hold: 10 per offset
		if from, ok := f.Keep(); ok {
			n = int64(end.Next()-from) * 10
		}
		return n
	}
	for range 500 {
		end++
		f.Appended(end, 10)
		if held() > 1000 {
			t.Fatalf("%d bytes are held for a dead follower", held())
		}
	}
	if !f.Behind() {
		t.Fatal("a follower that confirms nothing stays on the live path")
	}
	from, to, ok := f.Send()
	if !ok || from != 100 || to != end {
		t.Fatalf("catch-up from %d to %d, %v", from, to, ok)
	}
	first, second := f.Sent(100, 200), f.Sent(200, 300)
	if _, _, ok := f.Send(); ok {
		t.Error("a third call at once")
	}
	f.Answer(first, Answer{AnswerOK, 200})
	f.Answer(second, Answer{AnswerOK, 300})
	if !f.Behind() {
		t.Error("3,000 bytes behind, and back on the live path")
	}
	f.Answer(f.Sent(300, 580), Answer{AnswerOK, 580})
	if f.Behind() {
		t.Errorf("%d bytes behind, and not back on the live path", f.Lag())
	}
	if lag := f.Lag(); lag < 200 || lag > 300 {
		t.Errorf("lag is %d bytes, 200 are not confirmed", lag)
	}
}

// TestLostConfirmedData: a replica that has less than it had confirmed before is no follower any more, and an answer that was overtaken
// is no such case.
func TestLostConfirmedData(t *testing.T) {
	f := NewFollower(0, Limits{})
	f.Appended(10, 1)
	f.Appended(20, 1)
	first, second := f.Sent(0, 10), f.Sent(10, 20)
	f.Answer(first, Answer{AnswerOK, 10})
	if v := f.Answer(second, Answer{AnswerGap, 5}); v != VerdictShip { // said before the first was taken
		t.Fatalf("verdict %d", v)
	}
	if from, _, ok := f.Send(); !ok || from != 10 {
		t.Errorf("ships from %d, %v", from, ok)
	}
	third := f.Sent(10, 20)
	if v := f.Answer(third, Answer{AnswerGap, 5}); v != VerdictGone || !errors.Is(f.Gone(), storage.ErrConflict) {
		t.Errorf("a replica that lost what it confirmed: verdict %d, %v", v, f.Gone())
	}
}

func TestAnswers(t *testing.T) {
	inv.Covers(t, "INV-D10")
	for _, c := range []struct {
		err  error
		want Answer
		ok   bool
	}{
		{nil, Answer{AnswerOK, 7}, true},
		{storage.ErrGap, Answer{AnswerGap, 7}, true},
		{storage.ErrOverloaded, Answer{AnswerBusy, 7}, true},
		{storage.ErrDiskFull, Answer{AnswerBusy, 7}, true},
		{storage.ErrStaleBoot, Answer{AnswerBusy, 7}, true},
		{storage.ErrUnavailable, Answer{AnswerBusy, 7}, true},
		{storage.ErrFenced, Answer{Kind: AnswerFenced}, true},
		{storage.ErrSealed, Answer{Kind: AnswerSealed}, true},
		{storage.ErrUnknownSegment, Answer{Kind: AnswerUnknown}, true},
		{fmt.Errorf("%w: %w", storage.ErrDamaged, storage.ErrCorrupt), Answer{Kind: AnswerDamaged}, true},
		{fmt.Errorf("%w: %w", storage.ErrStorageFailed, storage.ErrDiskFull), Answer{Kind: AnswerFailed}, true},
		{storage.ErrCorrupt, Answer{}, false},
		{errors.New("given up"), Answer{}, false},
	} {
		if got, ok := AnswerTo(c.err, 7); got != c.want || ok != c.ok {
			t.Errorf("%v is answered %+v %v", c.err, got, ok)
		}
	}
}

// TestFencedReplicaTellsNoEnd: whatever an append to a fenced, sealed or dropped replica says, it gets no end.
func TestFencedReplicaTellsNoEnd(t *testing.T) {
	inv.Covers(t, "INV-D10", "INV-S5", "INV-D7", "INV-D15", "INV-D12")
	r := NewReplica(5)
	take := func(from Origin, first storage.Offset, end storage.End, want Step, wantErr error) {
		t.Helper()
		if step, err := r.Take(from, first, end); step != want || !errors.Is(err, wantErr) {
			t.Errorf("batch %d to %d: %d %v, want %d %v", first, end, step, err, want, wantErr)
		}
	}
	take(FromPrimary, 6, 8, 0, storage.ErrGap)
	take(FromPass, 5, 8, 0, storage.ErrConflict)
	take(FromPrimary, 5, 8, StepQueue, nil)
	r.Extended(8)
	take(FromPrimary, 5, 8, StepWait, nil)
	take(FromPrimary, 5, 9, 0, storage.ErrGap) // neither a replay nor at the end
	r.Barrier(8)
	take(FromPrimary, 5, 8, StepNow, nil)
	if queue, err := r.Fence(); !queue || err != nil {
		t.Fatal(queue, err)
	}
	r.FenceQueued()
	take(FromPrimary, 8, 9, 0, storage.ErrFenced)
	take(FromPrimary, 5, 8, 0, storage.ErrFenced)
	if err := r.Vote(); !errors.Is(err, storage.ErrConflict) {
		t.Errorf("a vote before the fence is durable: %v", err)
	}
	r.FenceBarrier()
	if err := r.Vote(); err != nil {
		t.Error(err)
	}
	take(FromPass, 8, 9, StepQueue, nil)
	r.Extended(9)
	if err := r.Vote(); !errors.Is(err, storage.ErrUnavailable) {
		t.Errorf("a vote for what is not durable: %v", err)
	}
	back := RecoverReplica(9, true, nil)
	if _, err := back.Fence(); !errors.Is(err, storage.ErrUnavailable) {
		t.Errorf("a fence answer before the recovery checkpoint: %v", err)
	}
	if err := back.Vote(); err == nil {
		t.Error("a vote before the recovery checkpoint")
	}
	back.Checkpointed()
	if err := back.Vote(); !errors.Is(err, storage.ErrStaleBoot) {
		t.Errorf("a vote of bytes that nobody has read: %v", err)
	}
	back.Verified()
	if err := back.Vote(); err != nil {
		t.Error(err)
	}
}
