package root

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/storage"
)

func admit(id storage.BrokerID, n byte) *AdmitBroker {
	return &AdmitBroker{ID: id, Nonce: nonce(n), Addresses: map[string]string{"raft": "c:1"}, Attributes: map[string]string{"zone": "b"},
		AdvertisedLevel: 1, Time: 500}
}

func joined(id storage.BrokerID, boot storage.Boot, n byte) *RegisterBroker {
	r := register(boot, 0, n)
	r.ID = id
	return r
}

func TestRemovedBrokerNeverReturns(t *testing.T) {
	inv.Covers(t, "INV-D9", "INV-M6")
	m := founded(t)
	want(t, m, register(1, 0, 1), OutcomeOK)
	want(t, m, admit(0x88, 2), OutcomeOK)
	if b, ok := m.State().Broker(0x88); !ok || b.Boot != 0 || b.Ready() || b.Attributes["zone"] != "b" || b.AdmitTime != 500 {
		t.Fatalf("admitted %+v", b)
	}
	if r := want(t, m, admit(0x88, 3), OutcomeOK); !r.Already { // it asks again on each start
		t.Fatal("admitted twice")
	}
	want(t, m, joined(0x88, 1, 4), OutcomeOK)
	want(t, m, &BrokerReady{ID: 0x88, Boot: 2}, OutcomeStaleBoot)
	want(t, m, &BrokerReady{ID: 0x88, Boot: 1}, OutcomeOK)
	if b, _ := m.State().Broker(0x88); !b.Ready() || b.AdmitTime != 500 {
		t.Fatalf("ready %+v", b)
	}
	want(t, m, joined(0x88, 2, 5), OutcomeOK)
	if b, _ := m.State().Broker(0x88); b.Ready() {
		t.Fatal("a new boot is ready before it has caught up")
	}
	want(t, m, &RemoveBroker{ID: 0x88}, OutcomeConflict) // it is active
	want(t, m, &RemoveBroker{ID: 0x55}, OutcomeUnknownBroker)
	want(t, m, &SetBrokerState{ID: 0x88, To: BrokerDecommissioning, Nonce: nonce(6)}, OutcomeOK)
	want(t, m, &RemoveBroker{ID: 0x88}, OutcomeOK)
	if r := want(t, m, &RemoveBroker{ID: 0x88}, OutcomeOK); !r.Already {
		t.Fatal("removed twice")
	}
	for _, c := range []Command{admit(0x88, 7), joined(0x88, 3, 8), &RefreshBroker{ID: 0x88, Boot: 2}, &BrokerReady{ID: 0x88, Boot: 2},
		&SetBrokerState{ID: 0x88, ExpectVersion: 1, Nonce: nonce(9)}, &RetireReplicas{ID: 0x88}} {
		want(t, m, c, OutcomeRemoved)
	}
	want(t, m, &SetBrokerState{ID: broker, To: BrokerDecommissioning, Nonce: nonce(6)}, OutcomeOK)
	want(t, m, &RemoveBroker{ID: broker}, OutcomeConflict) // the last one
}

func TestDrainAndDecommissionExcludeEachOther(t *testing.T) {
	m := founded(t)
	want(t, m, register(1, 0, 1), OutcomeOK)
	set := func(version uint64, to BrokerState, n byte) *SetBrokerState {
		return &SetBrokerState{ID: broker, ExpectVersion: version, To: to, Nonce: nonce(n)}
	}
	want(t, m, set(0, BrokerDraining, 1), OutcomeOK)
	if r := want(t, m, set(0, BrokerDraining, 1), OutcomeOK); !r.Already {
		t.Fatal("drained twice")
	}
	want(t, m, set(0, BrokerDraining, 2), OutcomeConflict) // somebody else saw an older state
	want(t, m, set(1, BrokerDecommissioning, 3), OutcomeConflict)
	want(t, m, set(1, BrokerActive, 4), OutcomeOK)
	want(t, m, set(0, BrokerDraining, 1), OutcomeConflict) // the first one comes late
	want(t, m, set(2, BrokerDecommissioning, 5), OutcomeOK)
	want(t, m, set(3, BrokerDraining, 6), OutcomeConflict)
	want(t, m, &SetBrokerState{ID: 0x55, Nonce: nonce(7)}, OutcomeUnknownBroker)
	want(t, m, &SetBrokerState{ID: broker, ExpectVersion: 3}, OutcomeInvalid)
}

func TestRetiredReplicas(t *testing.T) {
	m := founded(t)
	want(t, m, register(1, 0, 1), OutcomeOK)
	want(t, m, &BrokerReady{ID: broker, Boot: 1}, OutcomeOK)
	for g := range uint32(MaxGeneration) {
		want(t, m, &RetireReplicas{ID: broker, ExpectGeneration: g}, OutcomeOK)
		if r := want(t, m, &RetireReplicas{ID: broker, ExpectGeneration: g}, OutcomeOK); !r.Already {
			t.Fatal("retired twice")
		}
	}
	want(t, m, &BrokerReady{ID: broker, Boot: 1}, OutcomeConflict) // late: of the first generation
	want(t, m, &RetireReplicas{ID: broker, ExpectGeneration: 0}, OutcomeConflict)
	want(t, m, &RetireReplicas{ID: broker, ExpectGeneration: MaxGeneration}, OutcomeLimit)
	want(t, m, &RetireReplicas{ID: 0x55}, OutcomeUnknownBroker)
	if b, _ := m.State().Broker(broker); b.Ready() || b.Generation != MaxGeneration {
		t.Fatalf("%+v", b)
	}
}

func TestAdmissionIsBounded(t *testing.T) {
	m := founded(t)
	for _, c := range []*AdmitBroker{{}, {ID: 1, AdvertisedLevel: 1}, {ID: 1, Nonce: nonce(1)}} {
		want(t, m, c, OutcomeInvalid)
	}
	many := admit(1, 1)
	many.Attributes = map[string]string{}
	for i := range MaxAttributes + 1 {
		many.Attributes[fmt.Sprint(i)] = "x"
	}
	want(t, m, many, OutcomeLimit)
	long := admit(1, 1)
	long.Attributes = map[string]string{"zone": strings.Repeat("x", MaxAttribute+1)}
	want(t, m, long, OutcomeLimit)
	raised := New(9)
	f := founding(1)
	f.Level = 3
	apply(t, raised, f)
	want(t, raised, admit(1, 1), OutcomeConflict) // it would stop at the first command of level 3
}

func ptr[T any](v T) *T { return &v }

func TestPolicy(t *testing.T) {
	m := New(storage.CurrentLevel)
	for n, rf := range map[int]int{0: 1, 1: 1, 2: 2, 3: 3, 5: 3} {
		one := New(storage.CurrentLevel)
		f := founding(1)
		f.Brokers = n
		apply(t, one, f)
		if p := one.State().Policy; p.ReplicationFactor != rf || p.Version != 1 || p.EffectiveMinReplicas() != rf/2+1 || len(p.Faults()) != 0 {
			t.Fatalf("founded by %d: %+v", n, p)
		}
	}
	apply(t, m, founding(1))
	update := func(version uint64, n byte, c PolicyChange) *UpdatePolicy {
		return &UpdatePolicy{Nonce: nonce(n), ExpectVersion: version, Change: c}
	}
	want(t, m, update(1, 1, PolicyChange{ReplicationFactor: ptr(3)}), OutcomeOK)
	if p := m.State().Policy; p.ReplicationFactor != 3 || p.Quorum() != 2 || p.EffectiveMinReplicas() != 2 || p.Version != 2 {
		t.Fatalf("%+v", p)
	}
	if r := want(t, m, update(1, 1, PolicyChange{ReplicationFactor: ptr(3)}), OutcomeOK); !r.Already {
		t.Fatal("changed twice")
	}
	want(t, m, update(1, 2, PolicyChange{ReplicationFactor: ptr(5)}), OutcomeConflict)
	want(t, m, update(2, 3, PolicyChange{Acks: ptr(AcksAll), MinReplicas: ptr(3), SpreadBy: ptr("rack"), MinDomains: ptr(2),
		Placement: ptr(PlacementHard), SegmentMaxBytes: ptr(uint64(1 << 20)), SegmentMaxAge: ptr(time.Minute)}), OutcomeOK)
	p := m.State().Policy
	if p.Quorum() != 3 || p.SpreadBy != "rack" || p.MinDomains != 2 || p.Placement != PlacementHard || p.SegmentMaxBytes != 1<<20 ||
		p.SegmentMaxAge != time.Minute || p.MinReplicas != 3 {
		t.Fatalf("%+v", p)
	}
	want(t, m, update(1, 1, PolicyChange{ReplicationFactor: ptr(3)}), OutcomeOK) // the first one comes late: known, and not done again
	if !reflect.DeepEqual(p, m.State().Policy) {
		t.Fatal("a late copy changed the policy")
	}
	// Everything that is wrong, at once.
	r := want(t, m, update(3, 4, PolicyChange{ReplicationFactor: ptr(8), MinReplicas: ptr(-1), MinDomains: ptr(0), SpreadBy: ptr(strings.Repeat("x", 200)),
		SegmentMaxBytes: ptr(uint64(1)), SegmentMaxAge: ptr(time.Nanosecond)}), OutcomeInvalid)
	for _, field := range []string{"replication_factor", "min_replicas", "min_domains", "spread_by", "segment_max_bytes", "segment_max_age"} {
		if !strings.Contains(r.Detail, field) {
			t.Errorf("nothing is said of %s: %s", field, r.Detail)
		}
	}
	r = want(t, m, update(3, 5, PolicyChange{Acks: ptr(AcksQuorum), MinReplicas: ptr(1)}), OutcomeInvalid)
	if !strings.Contains(r.Detail, "min_replicas 1: want 2") {
		t.Errorf("below the quorum: %s", r.Detail)
	}
	want(t, m, &UpdatePolicy{ExpectVersion: 3}, OutcomeInvalid)
	want(t, m, update(3, 6, PolicyChange{MinReplicas: ptr(0)}), OutcomeOK) // unset: it follows the quorum again
	for i := range rememberedUpdates + 2 {
		want(t, m, update(uint64(4+i), byte(100+i), PolicyChange{SegmentMaxAge: ptr(time.Hour)}), OutcomeOK)
	}
	want(t, m, update(1, 1, PolicyChange{ReplicationFactor: ptr(3)}), OutcomeConflict) // forgotten, and still not done again
}
