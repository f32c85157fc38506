package coordinator

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/services/controlplane/root"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/replication"
)

// step makes the next change of a segment's copies, if there is one.
func (w *world) step(c *Coordinator, id storage.SegmentID) *metadata.UpdateReplicas {
	w.t.Helper()
	t := w.now(id.Range.Topic)
	cmd := c.copyStep(t, t.Segment(id), c.known(), c.deps.Brokers(), 0)
	if cmd == nil {
		return nil
	}
	if seg := t.Segment(id); cmd.Change == metadata.ReplicaDrop && slices.Contains(seg.Replicas, cmd.Broker) && len(seg.Replicas)-1 < seg.ReplicationFactor {
		w.t.Fatalf("a copy is dropped of which %d would stay", len(seg.Replicas)-1)
	}
	if _, err := w.UpdateReplicas(w.t.Context(), *cmd); err != nil {
		w.t.Fatal(err)
	}
	return cmd
}

// TestCopyIsMadeBeforeOneIsDropped: the copy of a broker that leaves goes only after another was recorded as coming, made, proved and confirmed.
func TestCopyIsMadeBeforeOneIsDropped(t *testing.T) {
	inv.Covers(t, "INV-R1")
	leaves := map[string]func(w *world){
		"decommissioned": func(w *world) { w.set(brokerC, func(b *root.Broker) { b.State = root.BrokerDecommissioning }) },
		"gone for long":  func(w *world) { w.absent[brokerC] = goneFor + time.Second },
		"removed": func(w *world) {
			w.state.Brokers = slices.DeleteFunc(w.state.Brokers, func(b root.Broker) bool { return b.ID == brokerC })
		},
	}
	for name, leave := range leaves {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, brokerA, brokerB, brokerC, brokerD)
			c := w.coordinator()
			seg := w.sealedOn(w.topic("t"), brokerA, brokerB, brokerC)
			if cmd := w.step(c, seg.ID); cmd != nil {
				t.Fatalf("nothing is wanting, and it does %+v", cmd)
			}
			leave(w)
			w.step(c, seg.ID)
			if s := w.segment(seg.ID); len(s.Replicas) != 3 || !slices.Equal(s.Incoming, []storage.BrokerID{brokerD}) {
				t.Fatalf("replicas %v, incoming %v", s.Replicas, s.Incoming)
			}
			if cmd := w.step(c, seg.ID); cmd != nil {
				t.Fatalf("the copy is not made yet, and it does %+v", cmd)
			}
			// The target makes it: not confirmed unless it is proved.
			w.self = brokerD
			target := w.coordinator()
			w.do(func() { w.healErr = storage.ErrCorrupt })
			target.healOwn(t.Context(), nil)
			if s := w.segment(seg.ID); slices.Contains(s.Replicas, brokerD) {
				t.Fatal("a copy that was not proved was confirmed")
			}
			if cmd := w.step(c, seg.ID); cmd != nil {
				t.Fatalf("the copy is not proved, and it does %+v", cmd)
			}
			w.do(func() { w.healErr = nil })
			target.healOwn(t.Context(), nil)
			w.step(c, seg.ID)
			if s := w.segment(seg.ID); !slices.Equal(s.Replicas, []storage.BrokerID{brokerA, brokerB, brokerD}) || len(s.Incoming) > 0 {
				t.Fatalf("replicas %v, incoming %v", s.Replicas, s.Incoming)
			}
			if cmd := w.step(c, seg.ID); cmd != nil {
				t.Fatalf("all is as wanted, and it does %+v", cmd)
			}
			want := []string{"incoming d4", "heal", "heal", "confirm d4", "drop c3"}
			if !slices.Equal(w.said, want) {
				t.Errorf("it was done %v, want %v", w.said, want)
			}
		})
	}
}

// TestCopyWithoutAPlaceToGoStays: with nobody to take another copy, the one of a broker that leaves is kept; a short absence is no reason at all.
func TestCopyWithoutAPlaceToGoStays(t *testing.T) {
	inv.Covers(t, "INV-R1", "INV-R5")
	w := newWorld(t, brokerA, brokerB, brokerC)
	c := w.coordinator()
	seg := w.sealedOn(w.topic("t"), brokerA, brokerB, brokerC)
	w.set(brokerC, func(b *root.Broker) { b.State = root.BrokerDecommissioning })
	if cmd := w.step(c, seg.ID); cmd != nil {
		t.Fatalf("it does %+v", cmd)
	}
	w = newWorld(t, brokerA, brokerB, brokerC, brokerD)
	c = w.coordinator()
	seg = w.sealedOn(w.topic("t"), brokerA, brokerB, brokerC)
	w.absent[brokerC] = goneFor - time.Second
	if cmd := w.step(c, seg.ID); cmd != nil {
		t.Fatalf("a broker was away for less than %v, and it does %+v", goneFor, cmd)
	}
}

// TestTargetThatLeavesIsGivenUp: a copy that will never come is taken off the record, and made elsewhere.
func TestTargetThatLeavesIsGivenUp(t *testing.T) {
	w := newWorld(t, brokerA, brokerB, brokerC, brokerD, 0xe5)
	c := w.coordinator()
	seg := w.sealedOn(w.topic("t"), brokerA, brokerB, brokerC)
	w.absent[brokerC] = goneFor + time.Second
	target := w.step(c, seg.ID).Broker
	w.absent[target] = goneFor + time.Second
	if cmd := w.step(c, seg.ID); cmd.Change != metadata.ReplicaDrop || cmd.Broker != target {
		t.Fatalf("%+v", cmd)
	}
	if cmd := w.step(c, seg.ID); cmd.Change != metadata.ReplicaIncoming || cmd.Broker == target {
		t.Fatalf("%+v", cmd)
	}
}

// TestOnlyARecordCondemnsACopy: what lies here goes if its record names other brokers. If no record speaks of it, it stays, whatever else is known.
func TestOnlyARecordCondemnsACopy(t *testing.T) {
	inv.Covers(t, "INV-R8")
	w := newWorld(t, brokerA, brokerB, brokerC, brokerD)
	c := w.coordinator()
	topic := w.topic("t")
	elsewhere := w.sealedOn(topic, brokerB, brokerC, brokerD)
	here := w.sealedOn(topic, brokerA, brokerB, brokerC)
	open := w.open(topic, 2, brokerB, brokerC, brokerD)
	later, stranger := elsewhere.ID, elsewhere.ID
	later.Seq = 9                // of a topic that is known, but ahead of what this broker has heard
	stranger.Range.Topic[15] = 1 // of a topic that it has never heard of
	w.listed = []storage.SegmentID{elsewhere.ID, here.ID, open.ID, later, stranger}
	w.live = []storage.SegmentID{stranger, later, open.ID}
	c.healOwn(t.Context(), nil)
	c.finishReplicas(t.Context())
	a := w.brokers[brokerA]
	if !slices.Equal(a.dropped, []storage.SegmentID{elsewhere.ID}) || len(a.sealed) > 0 || a.fenced > 0 {
		t.Errorf("dropped %v, sealed %v, fenced %d; want only %v dropped", a.dropped, a.sealed, a.fenced, elsewhere.ID)
	}
	if len(w.healed) > 0 {
		t.Errorf("healed %v, all of which was there", w.healed)
	}
	c.healOwn(t.Context(), map[storage.SegmentID]bool{here.ID: true})
	if !slices.Equal(w.healed, []storage.SegmentID{here.ID}) {
		t.Errorf("healed %v; one copy was damaged", w.healed)
	}
}

// TestCopyOnItsWayIsNotRemoved: what is recorded as coming here is not what a record gives to others.
func TestCopyOnItsWayIsNotRemoved(t *testing.T) {
	inv.Covers(t, "INV-R14")
	w := newWorld(t, brokerA, brokerB, brokerC, brokerD)
	c := w.coordinator()
	seg := w.sealedOn(w.topic("t"), brokerB, brokerC, brokerD)
	w.set(brokerD, func(b *root.Broker) { b.State = root.BrokerDecommissioning })
	w.step(c, seg.ID) // to A
	w.listed = []storage.SegmentID{seg.ID}
	w.healErr = errors.New("interrupted")
	c.healOwn(t.Context(), nil)
	if len(w.brokers[brokerA].dropped) > 0 {
		t.Error("it was removed")
	}
}

// flap has broker C come and go, each for as long, for ten minutes, and counts how often the range's set is found wanting.
func flap(w *world, c *Coordinator, r *metadata.Range, every time.Duration) (rolls int) {
	for i := range int(10 * time.Minute / every) {
		w.do(func() { w.absent[brokerC] = time.Duration(i % 2) })
		for range int(every / time.Second) {
			after(time.Second)
			c.countBrokers()
			if why := c.wanting(r); why == replication.ReasonUnderReplicated {
				rolls++
			}
		}
	}
	return rolls
}

// TestFlappingBrokerMovesNothing: a set that is too small is rolled once enough brokers have been there for a while, not each time that one shows up, and not
// again within ten minutes.
func TestFlappingBrokerMovesNothing(t *testing.T) {
	inv.Covers(t, "INV-M8")
	bubble(t, func(t *testing.T) {
		w := newWorld(t, brokerA, brokerB, brokerC)
		c := w.coordinator()
		topic := w.topic("t")
		w.open(topic, 2, brokerA, brokerB)
		r := w.now(topic.UID).Owners()[0]
		if n := flap(w, c, r, 20*time.Second); n != 0 {
			t.Errorf("rolled %d times for a broker that comes for 20 s at a time", n)
		}
		if n := flap(w, c, r, 90*time.Second); n != 1 {
			t.Errorf("rolled %d times in ten minutes for a broker that comes for 90 s at a time", n)
		}
		w.do(func() { w.absent[brokerC] = 0 })
		rolled := time.Now()
		for c.wanting(r) == "" {
			after(time.Second)
			c.countBrokers()
			if time.Since(rolled) > 20*time.Minute {
				t.Fatal("the set stays too small although the broker is back for good")
			}
		}
	})
}

// TestPolicyChangeRollsAtOnce: that is an order, not a broker that comes and goes.
func TestPolicyChangeRollsAtOnce(t *testing.T) {
	inv.Covers(t, "INV-D11")
	bubble(t, func(t *testing.T) {
		w := newWorld(t, brokerA, brokerB, brokerC)
		w.state.Policy.ReplicationFactor = 1
		c := w.coordinator()
		topic := w.topic("t")
		seg := w.open(topic, 1, brokerA)
		w.do(func() {
			next := *w.state
			next.Policy.ReplicationFactor = 3
			w.state = &next
		})
		after(time.Second)
		c.countBrokers()
		r := w.now(topic.UID).Owners()[0]
		if why := c.wanting(r); why != replication.ReasonUnderReplicated {
			t.Fatalf("wanting %q", why)
		}
		// The pass counts by what is recorded with the segment, not by the policy of now: one vote of one is enough.
		if err := c.pass(t.Context(), seg.ID, replication.ReasonUnderReplicated); err != nil {
			t.Fatal(err)
		}
		if next := w.now(topic.UID).Owners()[0].Open; next == nil || next.N() != 3 || next.Quorum != 2 {
			t.Fatalf("the next segment is %+v", next)
		}
	})
}

// TestRun: the loops find by themselves that a primary has restarted, that its range is blocked, and that it is not any more; they end when told.
func TestRun(t *testing.T) {
	inv.Covers(t, "INV-S16", "INV-S11")
	bubble(t, func(t *testing.T) {
		w := newWorld(t, brokerA, brokerB, brokerC)
		c := New(Config{Self: brokerA, Boot: 1}, w.deps())
		seg := w.open(w.topic("t"), 2, brokerB, brokerA, brokerC)
		w.do(func() { w.brokers[brokerB].serves = true })
		ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
		defer cancel()
		done := make(chan error, 1)
		go func() { done <- c.Run(ctx) }()
		after(10 * time.Second)
		if w.segment(seg.ID).State != metadata.SegmentOpen || w.fences() > 0 || !c.Settled() {
			t.Fatal("all is well, and the segment is not left alone")
		}
		w.do(func() { w.brokers[brokerB].away, w.brokers[brokerC].away = true, true })
		w.set(brokerB, func(b *root.Broker) { b.Boot = 2 })
		after(3 * time.Minute)
		if len(c.AllBlocked()) != 1 {
			t.Errorf("blocked: %v", c.AllBlocked())
		}
		w.do(func() { w.brokers[brokerB].away, w.brokers[brokerC].away = false, false })
		after(3 * time.Second)
		if w.segment(seg.ID).State != metadata.SegmentSealed || len(c.AllBlocked()) > 0 {
			t.Errorf("the segment is %v; blocked: %v", w.segment(seg.ID).State, c.AllBlocked())
		}
		cancel()
		synctest.Wait()
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		default:
			t.Error("Run goes on")
		}
	})
}
