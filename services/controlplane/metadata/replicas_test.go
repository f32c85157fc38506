package metadata

import (
	"slices"
	"testing"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/storage"
)

const brokerD storage.BrokerID = 0xdd

// sealedOnThree has one sealed segment of ten records on brokers A, B, C (rf 3), and returns its id.
func sealedOnThree(t *testing.T) (*Machine, storage.SegmentID) {
	t.Helper()
	m := newMachine(t)
	must(t, m, create("orders", 1))
	o := open("orders", 1, 0, 0, 10)
	o.Replicas, o.Quorum, o.ReplicationFactor = []storage.BrokerID{brokerA, brokerB, brokerC}, 2, 3
	must(t, m, o)
	s := seal("orders", 1, 0, 10, 11)
	s.Votes = []storage.BrokerID{brokerA, brokerC}
	must(t, m, s)
	return m, s.Segment
}

func change(id storage.SegmentID, version uint64, kind ReplicaChange, b storage.BrokerID) *UpdateReplicas {
	return &UpdateReplicas{TopicName: "orders", Topic: uid(1), Segment: id, ExpectVersion: version, Change: kind, Broker: b, Boot: 3}
}

func TestCopiesMove(t *testing.T) {
	inv.Covers(t, "INV-R1", "INV-R8")
	m, id := sealedOnThree(t)
	seg := func() *Segment { return topicOf(t, m, 1).Segment(id) }
	refused(t, m, change(id, 0, ReplicaDrop, brokerA), OutcomeConflict)    // two copies would stay
	refused(t, m, change(id, 0, ReplicaConfirm, brokerD), OutcomeConflict) // of which no byte was ever to come
	refused(t, m, change(id, 0, ReplicaIncoming, brokerA), OutcomeConflict)
	must(t, m, change(id, 0, ReplicaIncoming, brokerD))
	if s := seg(); len(s.Replicas) != 3 || !slices.Equal(s.Incoming, []storage.BrokerID{brokerD}) || s.ReplicaVersion != 1 {
		t.Fatalf("%+v", s)
	}
	if r := must(t, m, change(id, 0, ReplicaIncoming, brokerD)); !r.Already {
		t.Fatal("the retry was taken for a new step")
	}
	refused(t, m, change(id, 1, ReplicaDrop, brokerA), OutcomeConflict) // what is to come does not count
	noBoot := change(id, 1, ReplicaConfirm, brokerD)
	noBoot.Boot = 0
	refused(t, m, noBoot, OutcomeInvalid)
	must(t, m, change(id, 1, ReplicaConfirm, brokerD))
	must(t, m, change(id, 2, ReplicaDrop, brokerA))
	s := seg()
	if !slices.Equal(s.Replicas, []storage.BrokerID{brokerB, brokerC, brokerD}) || s.Incoming != nil || s.ReplicaVersion != 3 || s.Digest != 30 {
		t.Fatalf("%+v", s)
	}
	// Copies of all of it that come late.
	for _, late := range []*UpdateReplicas{change(id, 0, ReplicaIncoming, brokerD), change(id, 1, ReplicaConfirm, brokerD)} {
		refused(t, m, late, OutcomeConflict)
	}
	if r := must(t, m, change(id, 2, ReplicaDrop, brokerA)); !r.Already {
		t.Fatal("dropped twice")
	}
	// A target that was given up is not revived by a late copy of the command that made it one: its files may be gone.
	must(t, m, change(id, 3, ReplicaIncoming, brokerA))
	must(t, m, change(id, 4, ReplicaDrop, brokerA))
	refused(t, m, change(id, 3, ReplicaIncoming, brokerA), OutcomeConflict)
	// The brokers of two copies are gone for good; the last one stays, whatever anybody says.
	for i, b := range []storage.BrokerID{brokerB, brokerC, brokerD} {
		c := change(id, uint64(5+i), ReplicaDrop, b)
		refused(t, m, c, OutcomeConflict)
		if c.Gone = true; b == brokerD {
			refused(t, m, c, OutcomeConflict)
			continue
		}
		must(t, m, c)
	}
	must(t, m, open("orders", 1, 1, 10, 12))
	refused(t, m, change(storage.SegmentID{Range: id.Range, Seq: 1}, 0, ReplicaIncoming, brokerD), OutcomeConflict) // it is open
	refused(t, m, change(storage.SegmentID{Range: id.Range, Seq: 7}, 0, ReplicaIncoming, brokerD), OutcomeNotFound)
	other := change(storage.SegmentID{Range: rangeID(2, 0)}, 0, ReplicaIncoming, brokerD)
	refused(t, m, other, OutcomeTopicMismatch)
}

func TestIncomingIsBounded(t *testing.T) {
	m, id := sealedOnThree(t)
	for i := range MaxReplicas - 3 {
		must(t, m, change(id, uint64(i), ReplicaIncoming, storage.BrokerID(1000+i)))
	}
	refused(t, m, change(id, MaxReplicas-3, ReplicaIncoming, 2000), OutcomeLimit)
}

func TestResolveRecordsALoss(t *testing.T) {
	inv.Covers(t, "INV-S4")
	m, id := sealedOnThree(t)
	resolve := func(version uint64, n byte, from storage.Offset) *ResolveSegment {
		return &ResolveSegment{TopicName: "orders", Topic: uid(1), Segment: id, ExpectVersion: version, Nonce: nonce(n), LostFrom: from,
			DataBytes: 700, Digest: 77, Time: 400}
	}
	refused(t, m, resolve(0, 20, 10), OutcomeInvalid) // nothing of the segment
	refused(t, m, resolve(1, 20, 6), OutcomeConflict)
	must(t, m, resolve(0, 20, 6))
	if r := must(t, m, resolve(0, 20, 6)); !r.Already {
		t.Fatal("resolved twice")
	}
	s := topicOf(t, m, 1).Segment(id)
	if end, bytes, digest := s.Remaining(); end != 6 || bytes != 700 || digest != 77 || s.End != 10 || s.Digest != 30 {
		t.Fatalf("%+v", s)
	}
	refused(t, m, resolve(1, 21, 6), OutcomeInvalid) // a loss only grows
	must(t, m, resolve(1, 21, 0))                    // all of it
	refused(t, m, resolve(0, 20, 6), OutcomeConflict)
}

// TestOperatorSealsWithoutTheLost: replicas that are gone for good count as votes only by an operator's word, and never for an end.
func TestOperatorSealsWithoutTheLost(t *testing.T) {
	inv.Covers(t, "INV-S1")
	m := newMachine(t)
	must(t, m, create("orders", 1))
	o := open("orders", 1, 0, 0, 10)
	o.Replicas, o.Quorum, o.ReplicationFactor = []storage.BrokerID{brokerA, brokerB, brokerC}, 2, 3
	must(t, m, o)
	s := seal("orders", 1, 0, 10, 11)
	s.Gone = []storage.BrokerID{brokerB, brokerC}
	refused(t, m, s, OutcomeInvalid) // its reason is the size
	s.Reason = SealOperator
	s.Votes, s.Gone = nil, []storage.BrokerID{brokerA, brokerB, brokerC}
	refused(t, m, s, OutcomeInvalid) // an end that nobody has
	s.Votes, s.Gone = []storage.BrokerID{brokerA}, []storage.BrokerID{brokerA, brokerA}
	refused(t, m, s, OutcomeInvalid) // one broker is one vote
	s.Gone = []storage.BrokerID{brokerC}
	r := must(t, m, s)
	if r.Segment.Loss == nil || r.Segment.Loss.From != 10 || r.Segment.End != 10 {
		t.Fatalf("%+v", r.Segment)
	}
}
