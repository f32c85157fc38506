package coordinator

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/services/controlplane/root"
	"github.com/malachilog/malachi/services/placement"
	"github.com/malachilog/malachi/services/rpc"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/rangelog"
	"github.com/malachilog/malachi/storage/replication"
)

// bubble runs a test in which time costs nothing.
func bubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}

// beside runs a pass in the background and returns what tells of its end.
func beside(c *Coordinator, id storage.SegmentID, why replication.Reason) <-chan error {
	done := make(chan error, 1)
	go func() { done <- c.pass(c.ctx, id, why) }()
	return done
}

// ended fails the test unless the pass has ended well.
func ended(t *testing.T, done <-chan error) {
	t.Helper()
	synctest.Wait()
	select {
	case err := <-done:
		if err != nil {
			t.Fatal(err)
		}
	default:
		t.Fatal("the pass goes on")
	}
}

// TestPassOverThree: with one broker that does not answer, the pass takes the highest end of the two others, brings it onto both, records it
// with its holder's bytes and digest, and opens the next segment, which the silent broker does not head.
func TestPassOverThree(t *testing.T) {
	inv.Covers(t, "INV-S3", "INV-S12")
	bubble(t, func(t *testing.T) {
		w := newWorld(t, brokerA, brokerB, brokerC)
		c := w.coordinator()
		seg := w.open(w.topic("t"), 2, brokerA, brokerB, brokerC)
		w.do(func() {
			w.brokers[brokerA].vote = rangelog.Vote{End: 10, Pos: 1000, Digest: 10}
			w.brokers[brokerB].away = true
			w.brokers[brokerC].vote = rangelog.Vote{End: 12, Pos: 1200, Digest: 12}
		})
		if err := c.pass(t.Context(), seg.ID, replication.ReasonFailed); err != nil {
			t.Fatal(err)
		}
		got := w.segment(seg.ID)
		if got.State != metadata.SegmentSealed || got.End != 12 || got.DataBytes != 1200 || got.Digest != 12 || got.SealReason != metadata.SealFailedCopy {
			t.Fatalf("recorded %+v", got)
		}
		a, b := w.brokers[brokerA], w.brokers[brokerB]
		if a.extendedFrom != brokerC || a.drained != 1 || b.fenced != 0 {
			t.Errorf("A was extended from %v and drained %d times, B fenced %d times", a.extendedFrom, a.drained, b.fenced)
		}
		next := w.now(seg.ID.Range.Topic).Owners()[0].Open
		if next == nil || next.Base != 12 || next.Primary() == brokerB || next.Quorum != 2 || next.N() != 3 {
			t.Fatalf("the next segment is %+v", next)
		}
		if by := c.AllBlocked(); len(by) > 0 {
			t.Errorf("blocked: %v", by)
		}
	})
}

// TestPassLeavesThePrimaryThatServes: whoever suspects the primary, if it answers that it serves, nobody is fenced.
func TestPassLeavesThePrimaryThatServes(t *testing.T) {
	inv.Covers(t, "INV-S7")
	bubble(t, func(t *testing.T) {
		w := newWorld(t, brokerA, brokerB, brokerC)
		c := w.coordinator()
		seg := w.open(w.topic("t"), 2, brokerB, brokerA, brokerC)
		w.do(func() { w.brokers[brokerB].serves = true })
		if err := c.pass(t.Context(), seg.ID, replication.ReasonPrimaryGone); err != nil {
			t.Fatal(err)
		}
		if w.segment(seg.ID).State != metadata.SegmentOpen || w.fences() > 0 {
			t.Fatalf("a segment that is served was closed on suspicion; %d brokers fenced", w.fences())
		}
		w.do(func() { w.brokers[brokerB].serves = false }) // it is there, and serves something else
		if err := c.pass(t.Context(), seg.ID, replication.ReasonPrimaryGone); err != nil {
			t.Fatal(err)
		}
		if w.segment(seg.ID).State != metadata.SegmentSealed {
			t.Fatal("a segment that nobody serves stays open")
		}
	})
}

// TestDamagedVoteFillsNoQuorum: of three, one is silent and one damaged: one vote is not enough. That the silent one is back ends it.
func TestDamagedVoteFillsNoQuorum(t *testing.T) {
	inv.Covers(t, "INV-S17")
	for _, fault := range []error{storage.ErrDamaged, storage.ErrStorageFailed} {
		bubble(t, func(t *testing.T) {
			w := newWorld(t, brokerA, brokerB, brokerC)
			c := w.coordinator()
			seg := w.open(w.topic("t"), 2, brokerA, brokerB, brokerC)
			w.do(func() {
				w.brokers[brokerA].vote = rangelog.Vote{End: 10, Pos: 1000, Digest: 77}
				w.brokers[brokerB].away = true
				w.brokers[brokerC].noVote = fmt.Errorf("a page is gone: %w", fault)
				w.brokers[brokerC].vote = rangelog.Vote{End: 50, Pos: 5000, Digest: 55} // what it says counts for nothing
			})
			done := beside(c, seg.ID, replication.ReasonFailed)
			after(10 * time.Second)
			if s := w.segment(seg.ID); s.State != metadata.SegmentOpen {
				t.Fatalf("%v: sealed at %d by one vote", fault, s.End)
			}
			if by := c.Blocked(seg.ID.Range); !strings.Contains(by, "1 of 3 replicas vote, 2 are needed") || !strings.Contains(by, fault.Error()) {
				t.Errorf("blocked by %q", by)
			}
			w.do(func() { w.brokers[brokerB].away = false })
			after(2 * passRetry)
			ended(t, done)
			if s := w.segment(seg.ID); s.State != metadata.SegmentSealed || s.End != 10 || s.Digest != 77 {
				t.Fatalf("recorded %+v", s)
			}
		})
	}
}

// TestBlockedRangeIsToldAndComesBack: a range without its quorum says what it waits for, to everybody who asks, and fences nobody; when the quorum is
// back, it goes on by itself.
func TestBlockedRangeIsToldAndComesBack(t *testing.T) {
	inv.Covers(t, "INV-S11", "INV-S6")
	bubble(t, func(t *testing.T) {
		w := newWorld(t, brokerA, brokerB, brokerC)
		c := w.coordinator()
		seg := w.open(w.topic("t"), 2, brokerA, brokerB, brokerC)
		w.do(func() { w.brokers[brokerB].away, w.brokers[brokerC].away = true, true })
		done := beside(c, seg.ID, replication.ReasonRestart)
		after(time.Minute)
		by := c.AllBlocked()
		if len(by) != 1 || by[seg.ID.Range] != "1 of 3 replicas answer, 2 are needed" {
			t.Fatalf("blocked: %v", by)
		}
		told, err := NewServer(c).Blocked(t.Context(), nil)
		if err != nil || len(told.GetRanges()) != 1 || told.GetRanges()[0].GetBy() != by[seg.ID.Range] {
			t.Errorf("told %v, %v", told, err)
		}
		if w.fences() > 0 {
			t.Error("a replica was fenced although the answers were not together")
		}
		w.do(func() { w.brokers[brokerC].away = false })
		after(2 * passRetry)
		ended(t, done)
		if s := w.segment(seg.ID); s.State != metadata.SegmentSealed {
			t.Fatalf("recorded %+v", s)
		}
		if by := c.AllBlocked(); len(by) > 0 {
			t.Errorf("still blocked: %v", by)
		}
	})
}

// TestWhoWaitsForABlockedRangeIsTold: a produce that needs the range's next segment fails with what the range waits for.
func TestWhoWaitsForABlockedRangeIsTold(t *testing.T) {
	inv.Covers(t, "INV-S11")
	bubble(t, func(t *testing.T) {
		w := newWorld(t, brokerA, brokerB, brokerC)
		c := w.coordinator()
		seg := w.open(w.topic("t"), 2, brokerB, brokerA, brokerC)
		w.set(brokerB, func(b *root.Broker) { b.Boot = 2 }) // it has restarted: the segment is not served any more
		w.do(func() { w.brokers[brokerB].away, w.brokers[brokerC].away = true, true })
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		_, err := c.EnsureHead(ctx, seg.ID.Range.Topic, seg.ID.Range)
		if !errors.Is(err, storage.ErrUnavailable) || !strings.Contains(err.Error(), "1 of 3 replicas answer, 2 are needed") {
			t.Fatalf("the caller is told %v", err)
		}
		after(headPatience) // the work of the call that was given up
		w.do(func() { w.brokers[brokerB].away, w.brokers[brokerC].away = false, false })
		head, err := c.EnsureHead(t.Context(), seg.ID.Range.Topic, seg.ID.Range)
		if err != nil || head.ID.Seq != seg.ID.Seq+1 {
			t.Fatalf("the next head is %+v, %v", head, err)
		}
		if by := c.AllBlocked(); len(by) > 0 {
			t.Errorf("still blocked: %v", by)
		}
	})
}

// TestFewerThanTheQuorumWaitForMore: where one answer is enough to seal, but fewer than q are there, the pass waits for more, and says so, before it goes
// on alone.
func TestFewerThanTheQuorumWaitForMore(t *testing.T) {
	inv.Covers(t, "INV-S12")
	for _, comesBack := range []bool{false, true} {
		bubble(t, func(t *testing.T) {
			w := newWorld(t, brokerA, brokerB, brokerC)
			c := w.coordinator()
			seg := w.open(w.topic("t"), 3, brokerA, brokerB, brokerC) // acks: all
			w.do(func() { w.brokers[brokerB].away, w.brokers[brokerC].away = true, true })
			done := beside(c, seg.ID, replication.ReasonRestart)
			after(morePatience / 2)
			if w.segment(seg.ID).State != metadata.SegmentOpen || w.fences() > 0 {
				t.Fatal("it did not wait")
			}
			if by := c.Blocked(seg.ID.Range); !strings.Contains(by, "waiting up to 30s for more") {
				t.Errorf("blocked by %q", by)
			}
			if comesBack {
				w.do(func() { w.brokers[brokerB].away, w.brokers[brokerC].away = false, false })
				after(3 * passRetry)
				ended(t, done)
				if w.brokers[brokerC].fenced != 1 {
					t.Error("who came back was not asked")
				}
			} else {
				after(morePatience)
				ended(t, done)
			}
			if s := w.segment(seg.ID); s.State != metadata.SegmentSealed || s.End != 10 {
				t.Fatalf("recorded %+v", s)
			}
		})
	}
}

// TestHolderThatCannotShipLosesItsVote: the end is then that of the others, if they are enough.
func TestHolderThatCannotShipLosesItsVote(t *testing.T) {
	inv.Covers(t, "INV-S12", "INV-R4")
	bubble(t, func(t *testing.T) {
		w := newWorld(t, brokerA, brokerB, brokerC)
		c := w.coordinator()
		seg := w.open(w.topic("t"), 2, brokerA, brokerB, brokerC)
		w.do(func() {
			w.brokers[brokerC].vote = rangelog.Vote{End: 20, Pos: 2000, Digest: 20}
			w.brokers[brokerA].extends = fmt.Errorf("read from C: %w", rpc.ErrHolderFailed)
			w.brokers[brokerB].extends = fmt.Errorf("read from C: %w", rpc.ErrHolderFailed)
		})
		if err := c.pass(t.Context(), seg.ID, replication.ReasonFailed); err != nil {
			t.Fatal(err)
		}
		if s := w.segment(seg.ID); s.End != 10 || s.Digest != 77 {
			t.Fatalf("recorded %+v", s)
		}
	})
}

// headed is a topic whose next segment the broker would head, of all these.
func headed(t *testing.T, w *world, by storage.BrokerID) *metadata.Topic {
	t.Helper()
	for i := range 1000 {
		uid := storage.TopicUID{}
		name := fmt.Sprintf("t%d", i)
		copy(uid[:], name)
		id := storage.SegmentID{Range: storage.RangeID{Topic: uid}, Seq: 1}
		set, err := placement.Choose(placement.KeyOfSegment(id), w.candidates(), 3, placement.Rules{})
		if err != nil {
			t.Fatal(err)
		}
		if set[0] == by {
			topic := w.topic(name)
			if topic.Owners()[0].ID != id.Range {
				t.Fatalf("range %v, want %v", topic.Owners()[0].ID, id.Range)
			}
			return topic
		}
	}
	t.Fatal("no such topic")
	return nil
}

// TestNextHeadAvoidsWhoFailed: a broker that did not answer, whose disk failed, or which asked for the pass for want of a quorum or because it stops, is not
// in the next set while others can be, and never heads it; half a minute later it may be again.
func TestNextHeadAvoidsWhoFailed(t *testing.T) {
	inv.Covers(t, "INV-S10")
	faults := map[string]func(w *world, c *Coordinator, seg *metadata.Segment) replication.Reason{
		"silent": func(w *world, _ *Coordinator, _ *metadata.Segment) replication.Reason {
			w.brokers[brokerB].away = true
			return replication.ReasonFailed
		},
		"its disk failed": func(w *world, _ *Coordinator, _ *metadata.Segment) replication.Reason {
			w.brokers[brokerB].noVote = storage.ErrStorageFailed
			return replication.ReasonFailed
		},
		"without a quorum": func(_ *world, c *Coordinator, seg *metadata.Segment) replication.Reason {
			_ = c.requested(seg.ID, replication.ReasonNoQuorum, brokerB)
			return replication.ReasonNoQuorum
		},
		"stops": func(_ *world, c *Coordinator, seg *metadata.Segment) replication.Reason {
			_ = c.requested(seg.ID, replication.ReasonDrain, brokerB)
			return replication.ReasonDrain
		},
	}
	for name, fault := range faults {
		for _, ids := range [][]storage.BrokerID{{brokerA, brokerB, brokerC}, {brokerA, brokerB, brokerC, brokerD}} {
			t.Run(fmt.Sprintf("%s, of %d", name, len(ids)), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					w := newWorld(t, ids...)
					c := w.coordinator()
					topic := headed(t, w, brokerB)
					seg := w.open(topic, 2, brokerB, brokerA, brokerC)
					if err := c.pass(t.Context(), seg.ID, fault(w, c, seg)); err != nil {
						t.Fatal(err)
					}
					synctest.Wait()
					next := w.now(topic.UID).Owners()[0].Open
					switch {
					case next == nil:
						t.Fatal("no next segment")
					case next.Primary() == brokerB:
						t.Error("the broker that failed heads the next segment")
					case slices.Contains(next.Replicas, brokerB) != (len(ids) == 3):
						t.Errorf("the next set is %v", next.Replicas)
					}
					after(avoidFor + time.Second)
					if len(c.avoided(seg.ID.Range)) > 0 {
						t.Error("it is avoided for ever")
					}
				})
			})
		}
	}
}

// TestOpenThatIsNotConfirmedIsPlacedElsewhere: a follower that is told to open and does not answer costs the segment nothing; a set of which too few
// confirm is closed, and the next one is headed by another broker.
func TestOpenThatIsNotConfirmedIsPlacedElsewhere(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, brokerA, brokerB, brokerC, brokerD)
		c := w.coordinator()
		topic := headed(t, w, brokerB)
		seg := w.open(topic, 2, brokerB, brokerA, brokerC)
		w.do(func() { w.brokers[brokerC].away, w.brokers[brokerC].vote = true, rangelog.Vote{} })
		head, err := c.EnsureHead(t.Context(), topic.UID, seg.ID.Range)
		if err != nil || head.ID != seg.ID {
			t.Fatalf("one of three is silent: %v, %v", head, err)
		}
		w.do(func() {
			for _, b := range w.brokers {
				b.vote = rangelog.Vote{End: storage.EndBefore(seg.Base)} // nothing was written
			}
			w.brokers[brokerB].opens = storage.ErrDiskFull
		})
		head, err = c.EnsureHead(t.Context(), topic.UID, seg.ID.Range)
		if err != nil || head.ID.Seq != 1 || head.Primary() == brokerB {
			t.Fatalf("the primary cannot open it: %+v, %v", head, err)
		}
		if s := w.segment(seg.ID); s.State != metadata.SegmentAbandoned {
			t.Errorf("recorded %+v", s)
		}
		w.do(func() { w.brokers[brokerC].away = false }) // who is told of the late open
		after(openAgain)
	})
}
