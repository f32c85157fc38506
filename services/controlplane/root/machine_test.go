package root

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/malachilog/malachi/e2e/inv"
	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/storage"
)

const broker storage.BrokerID = 0x77

// tester is what both *testing.T and *rapid.T offer.
type tester interface {
	Helper()
	Fatalf(format string, args ...any)
}

func apply(t tester, m *Machine, cmd Command) Result {
	t.Helper()
	b, err := Encode(cmd)
	if err != nil {
		t.Fatalf("encode %T: %v", cmd, err)
	}
	r, err := m.Apply(b)
	if err != nil {
		t.Fatalf("apply %T: %v", cmd, err)
	}
	if back, err := DecodeResult(r.Encode()); err != nil || back != r {
		t.Fatalf("result %+v reads back as %+v (%v)", r, back, err)
	}
	return r
}

func want(t *testing.T, m *Machine, cmd Command, outcome Outcome) Result {
	t.Helper()
	before := snapshot(t, m)
	r := apply(t, m, cmd)
	if r.Outcome != outcome {
		t.Fatalf("%T: outcome %d (%s), want %d", cmd, r.Outcome, r.Detail, outcome)
	}
	if outcome != OutcomeOK && (r.Detail == "" || !bytes.Equal(before, snapshot(t, m))) {
		t.Fatalf("%T: refused, but without a reason or with an effect", cmd)
	}
	return r
}

func snapshot(t tester, m *Machine) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := m.Snapshot().Write(&b); err != nil {
		t.Fatalf("snapshot: %v", err)
	}
	return b.Bytes()
}

func nonce(n byte) metadata.Nonce { return metadata.Nonce{7, n} }

func founding(vnodes int) *Found {
	return &Found{Cluster: storage.ClusterID{1}, Vnodes: vnodes, Broker: broker, Level: 1, Nonce: nonce(1)}
}

func founded(t tester) *Machine {
	m := New(storage.CurrentLevel)
	apply(t, m, founding(4))
	return m
}

func register(boot storage.Boot, group uint64, n byte) *RegisterBroker {
	return &RegisterBroker{ID: broker, Boot: boot, JournalGroup: group, Nonce: nonce(n), Addresses: map[string]string{"raft": "a:1"},
		AdvertisedLevel: 1}
}

func TestFoundedOnce(t *testing.T) {
	inv.Covers(t, "INV-M11")
	m := New(storage.CurrentLevel)
	want(t, m, register(1, 0, 9), OutcomeNotFounded)
	want(t, m, founding(0), OutcomeInvalid)
	want(t, m, founding(MaxVnodes+1), OutcomeInvalid)
	want(t, m, founding(4), OutcomeOK)
	st := m.State()
	if !st.Founded() || st.Level != 1 || st.Ring.Version != 1 || len(st.Ring.Vnodes) != 4 || st.Ring.Vnodes[3].Members[0] != broker {
		t.Fatalf("founded: %+v", st)
	}
	if r := want(t, m, founding(4), OutcomeOK); !r.Already {
		t.Fatal("the founding was applied twice")
	}
	other := founding(8)
	other.Nonce, other.Cluster = nonce(2), storage.ClusterID{2}
	want(t, m, other, OutcomeFounded)
	other.Cluster = storage.ClusterID{1}
	want(t, m, other, OutcomeFounded)
	if !reflect.DeepEqual(st, m.State()) {
		t.Fatal("the recorded ring changed")
	}
}

func TestEqualArcsCoverTheRing(t *testing.T) {
	for _, n := range []int{1, 2, 3, 4, 5, 7, 16, 1000, 1024} {
		arcs, next := EqualArcs(n), uint64(0)
		for i, a := range arcs {
			if a.First != next || a.Last < a.First {
				t.Fatalf("%d arcs: arc %d is %+v, want first %d", n, i, a, next)
			}
			next = a.Last + 1
		}
		if len(arcs) != n || arcs[n-1].Last != math.MaxUint64 {
			t.Fatalf("%d arcs: %d, last %+v", n, len(arcs), arcs[n-1])
		}
	}
}

func TestCloneOrRolledBackDiskIsRefused(t *testing.T) {
	inv.Covers(t, "INV-D9")
	m := founded(t)
	want(t, m, register(5, 100, 1), OutcomeOK)
	if r := want(t, m, register(5, 100, 1), OutcomeOK); !r.Already {
		t.Fatal("a retry was taken for a new registration")
	}
	// A clone that starts at the same time has the same boot, but not the same nonce.
	for _, c := range []*RegisterBroker{register(5, 100, 2), register(4, 200, 3), register(6, 99, 4)} {
		if r := want(t, m, c, OutcomeCloneOrRollback); !strings.Contains(r.Detail, "clone_or_rollback") {
			t.Fatalf("boot %d group %d: %q", c.Boot, c.JournalGroup, r.Detail)
		}
	}
	want(t, m, &RefreshBroker{ID: broker, Boot: 5, JournalGroup: 150}, OutcomeOK)
	want(t, m, &RefreshBroker{ID: broker, Boot: 5, JournalGroup: 120}, OutcomeOK) // late: lowers nothing
	want(t, m, register(6, 149, 5), OutcomeCloneOrRollback)
	want(t, m, register(6, 150, 6), OutcomeOK) // the clone was faster; the original, never restarted, finds out when it refreshes
	want(t, m, &RefreshBroker{ID: broker, Boot: 5, JournalGroup: 151}, OutcomeStaleBoot)
	want(t, m, &RefreshBroker{ID: 0x99, Boot: 5, JournalGroup: 151}, OutcomeUnknownBroker)
	for _, c := range []*RegisterBroker{register(0, 1, 1), {ID: broker, Boot: 9, Nonce: nonce(1)}, {Boot: 9, Nonce: nonce(1), AdvertisedLevel: 1}} {
		want(t, m, c, OutcomeInvalid)
	}
	many := register(7, 200, 7)
	many.Addresses = map[string]string{}
	for i := range MaxAddresses + 1 {
		many.Addresses[fmt.Sprint(i)] = "x"
	}
	want(t, m, many, OutcomeLimit)
	b, ok := m.State().Broker(broker)
	if !ok || b.Boot != 6 || b.JournalGroup != 150 || b.Addresses["raft"] != "a:1" {
		t.Fatalf("broker %+v", b)
	}
}

func TestConfirmVnode(t *testing.T) {
	m := founded(t)
	before := m.State()
	want(t, m, &ConfirmVnode{Vnode: 9}, OutcomeInvalid)
	want(t, m, &ConfirmVnode{Vnode: 2}, OutcomeOK)
	if r := want(t, m, &ConfirmVnode{Vnode: 2}, OutcomeOK); !r.Already {
		t.Fatal("confirmed twice")
	}
	if before.Ring.Vnodes[2].Confirmed || !m.State().Ring.Vnodes[2].Confirmed {
		t.Fatal("an old state changed, or the new one did not")
	}
}

func TestLevelRisesWhenAllHaveAdvertisedIt(t *testing.T) {
	inv.Covers(t, "INV-M10")
	m := New(2)
	apply(t, m, founding(1))
	want(t, m, register(1, 0, 1), OutcomeOK)
	other := register(1, 0, 2)
	other.ID, other.AdvertisedLevel = 0x78, 2
	want(t, m, other, OutcomeOK)
	want(t, m, &SetLevel{Expect: 1, To: 2}, OutcomeConflict) // a dead one counts too
	upgraded := register(2, 0, 3)
	upgraded.AdvertisedLevel = 2
	want(t, m, upgraded, OutcomeOK)
	want(t, m, &SetLevel{Expect: 2, To: 3}, OutcomeConflict)

	// A replica that does not understand 2 stops at the very entry that raises the cluster, and stays there.
	older := New(1)
	if err := older.Restore(bytes.NewReader(snapshot(t, m))); err != nil {
		t.Fatal(err)
	}
	before := snapshot(t, older)
	for i, cmd := range []Command{&SetLevel{Expect: 1, To: 2}, &ConfirmVnode{Vnode: 0}} {
		entry, err := Encode(cmd)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := older.Apply(entry); !errors.Is(err, storage.ErrNewerFormat) || !bytes.Equal(before, snapshot(t, older)) {
			t.Fatalf("entry %d: an older replica went on: %v", i, err)
		}
	}

	want(t, m, &SetLevel{Expect: 1, To: 2}, OutcomeOK)
	if r := want(t, m, &SetLevel{Expect: 1, To: 2}, OutcomeOK); !r.Already || m.State().Level != 2 {
		t.Fatalf("level %d, %+v", m.State().Level, r)
	}
	want(t, m, &SetLevel{Expect: 1, To: 1}, OutcomeConflict)
	want(t, m, &SetLevel{Expect: 2, To: 1}, OutcomeInvalid)
	fresh := New(1)
	if err := fresh.Restore(bytes.NewReader(snapshot(t, m))); !errors.Is(err, storage.ErrNewerFormat) || fresh.State().Founded() {
		t.Fatalf("an older replica took the snapshot: %v", err)
	}
}

func TestHigherLevelStopsTheMachine(t *testing.T) {
	inv.Covers(t, "INV-M10")
	for name, p := range map[string]*intrav1.RootCommand{
		"level":           {Level: 2, Body: &intrav1.RootCommand_ConfirmVnode{ConfirmVnode: &intrav1.ConfirmVnode{}}},
		"unknown command": {Level: 1},
	} {
		entry, err := proto.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		m := founded(t)
		before := snapshot(t, m)
		if _, err := m.Apply(entry); !errors.Is(err, storage.ErrNewerFormat) || !errors.Is(m.Stopped(), storage.ErrNewerFormat) ||
			!bytes.Equal(before, snapshot(t, m)) {
			t.Fatalf("%s: %v", name, err)
		}
	}
}

func drawCommand(t *rapid.T) Command {
	n := nonce(byte(rapid.IntRange(1, 6).Draw(t, "nonce")))
	id := storage.BrokerID(rapid.IntRange(1, 2).Draw(t, "broker"))
	boot := storage.Boot(rapid.IntRange(0, 5).Draw(t, "boot"))
	group := uint64(rapid.IntRange(0, 5).Draw(t, "group"))
	switch rapid.IntRange(0, 16).Draw(t, "kind") {
	case 7:
		return &AdmitBroker{ID: id, Nonce: n, AdvertisedLevel: storage.Level(boot), Addresses: map[string]string{"raft": "y:1"}}
	case 8, 9, 10:
		return &SetBrokerState{ID: id, ExpectVersion: uint64(rapid.IntRange(0, 3).Draw(t, "version")), Nonce: n,
			To: BrokerState(rapid.IntRange(0, 2).Draw(t, "to"))}
	case 11:
		return &RemoveBroker{ID: id}
	case 12:
		return &BrokerReady{ID: id, Boot: boot, Generation: uint32(rapid.IntRange(0, 1).Draw(t, "generation"))}
	case 13:
		return &RetireReplicas{ID: id, ExpectGeneration: uint32(rapid.IntRange(0, 2).Draw(t, "generation"))}
	case 14, 15:
		rf, least := rapid.IntRange(0, 4).Draw(t, "rf"), rapid.IntRange(0, 4).Draw(t, "least")
		return &UpdatePolicy{Nonce: n, ExpectVersion: uint64(rapid.IntRange(0, 3).Draw(t, "version")),
			Change: PolicyChange{ReplicationFactor: &rf, MinReplicas: &least}}
	case 0:
		return &Found{Cluster: storage.ClusterID{byte(rapid.IntRange(1, 2).Draw(t, "cluster"))}, Vnodes: 1 + int(group), Broker: id, Level: 1, Nonce: n}
	case 1:
		return &ConfirmVnode{Vnode: uint32(group)}
	case 2, 3:
		return &RegisterBroker{ID: id, Boot: boot, JournalGroup: group, Nonce: n, AdvertisedLevel: storage.Level(rapid.IntRange(1, 3).Draw(t, "level")),
			Addresses: map[string]string{"raft": "x:1", "api": fmt.Sprint(boot)}}
	case 4, 5:
		return &RefreshBroker{ID: id, Boot: boot, JournalGroup: group}
	}
	level := storage.Level(rapid.IntRange(1, 3).Draw(t, "level"))
	return &SetLevel{Expect: level, To: level + 1}
}

// TestReplicasAgree runs one log on two machines, on one that is restored from its snapshot at random, and on one that gets every
// command twice and old ones again.
func TestReplicasAgree(t *testing.T) {
	inv.Covers(t, "INV-M1", "INV-M12", "INV-D9")
	tally := map[string]int{}
	for range 15 {
		rapid.Check(t, func(t *rapid.T) { replicasAgree(t, tally) })
	}
	t.Logf("branches: %v", tally)
	for _, branch := range []string{"*root.Found 1", "*root.Found 3", "*root.ConfirmVnode 1", "*root.RegisterBroker 1", "*root.RegisterBroker 4",
		"*root.RefreshBroker 1", "*root.RefreshBroker 6", "*root.SetLevel 1", "*root.SetLevel 7", "*root.AdmitBroker 1",
		"*root.SetBrokerState 1", "*root.SetBrokerState 7", "*root.RemoveBroker 1", "*root.RemoveBroker 7", "*root.BrokerReady 1",
		"*root.RetireReplicas 1", "*root.UpdatePolicy 1", "*root.UpdatePolicy 7", "*root.UpdatePolicy 8"} {
		if tally[branch] == 0 {
			t.Errorf("the random commands never reached %q", branch)
		}
	}
}

func replicasAgree(t *rapid.T, tally map[string]int) {
	a, b, c, twice := New(9), New(9), New(9), New(9)
	var done []Command
	for i := range rapid.IntRange(1, 30).Draw(t, "steps") {
		cmd := drawCommand(t)
		if i == 0 {
			cmd = founding(3)
		}
		before := a.State()
		ra := apply(t, a, cmd)
		state := snapshot(t, a)
		tally[fmt.Sprintf("%T %d", cmd, ra.Outcome)]++
		if rb := apply(t, b, cmd); ra != rb || !bytes.Equal(state, snapshot(t, b)) {
			t.Fatalf("two replicas differ after %T", cmd)
		}
		if rapid.IntRange(0, 4).Draw(t, "restore") == 0 {
			snap := snapshot(t, c)
			c = New(9)
			if err := c.Restore(bytes.NewReader(snap)); err != nil {
				t.Fatalf("restore: %v", err)
			}
		}
		if rc := apply(t, c, cmd); ra != rc || !bytes.Equal(state, snapshot(t, c)) {
			t.Fatalf("a restored replica differs after %T", cmd)
		}
		first, second := apply(t, twice, cmd), apply(t, twice, cmd)
		if ra.Outcome != first.Outcome || !bytes.Equal(state, snapshot(t, twice)) ||
			first.Outcome == OutcomeOK && (second.Outcome != OutcomeOK || !second.Already) {
			t.Fatalf("%T applied twice: %+v, %+v, %+v", cmd, ra, first, second)
		}
		if ra.Outcome == OutcomeOK {
			done = append(done, cmd)
		}
		if len(done) > 0 {
			old := done[rapid.IntRange(0, len(done)-1).Draw(t, "late")]
			if apply(t, twice, old); !bytes.Equal(state, snapshot(t, twice)) {
				t.Fatalf("a late copy of %T changed the state", old)
			}
		}
		neverFalls(t, before, a.State())
	}
}

// neverFalls: a cluster stays what it is; boots, journal groups and the level only rise.
func neverFalls(t *rapid.T, before, after *State) {
	if before.Founded() && (after.Cluster != before.Cluster || len(after.Ring.Vnodes) != len(before.Ring.Vnodes) || after.Level < before.Level) {
		t.Fatalf("the cluster changed from %+v to %+v", before, after)
	}
	for _, id := range before.Removed {
		if _, ok := after.Broker(id); ok || !after.WasRemoved(id) {
			t.Fatalf("broker %s came back", id)
		}
	}
	if len(after.Policy.Faults()) > 0 && after.Founded() || after.Policy.Version < before.Policy.Version {
		t.Fatalf("the policy became %+v", after.Policy)
	}
	for _, b := range before.Brokers {
		now, ok := after.Broker(b.ID)
		if after.WasRemoved(b.ID) {
			continue
		}
		if now.Generation < b.Generation || now.StateVersion < b.StateVersion || b.State+now.State == BrokerDraining+BrokerDecommissioning &&
			b.State != now.State && b.State != BrokerActive && now.State != BrokerActive {
			t.Fatalf("broker %+v became %+v", b, now)
		}
		if !ok || now.Boot < b.Boot || now.JournalGroup < b.JournalGroup {
			t.Fatalf("broker %+v became %+v", b, now)
		}
	}
}

// FuzzApply: bytes from outside never panic, and what is not applied changes nothing.
func FuzzApply(f *testing.F) {
	for _, c := range append(goldenClusterCommands(), founding(4), register(2, 3, 4), &RefreshBroker{ID: broker, Boot: 1}, &ConfirmVnode{},
		&SetLevel{Expect: 1, To: 2}) {
		b, err := Encode(c)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, entry []byte) {
		m := founded(t)
		before := snapshot(t, m)
		r, err := m.Apply(entry)
		after := snapshot(t, m)
		if (err != nil || r.Outcome != OutcomeOK || r.Already) && !bytes.Equal(before, after) {
			t.Fatalf("outcome %d, error %v, but the state changed", r.Outcome, err)
		}
		again := New(storage.CurrentLevel)
		if err := again.Restore(bytes.NewReader(after)); err != nil || !bytes.Equal(after, snapshot(t, again)) {
			t.Fatalf("the snapshot of the new state does not restore: %v", err)
		}
	})
}

// FuzzRestore: a snapshot from outside never panics; what it restores to can be written and restored again.
func FuzzRestore(f *testing.F) {
	m := founded(f)
	apply(f, m, register(1, 5, 2))
	f.Add(snapshot(f, m))
	f.Fuzz(func(t *testing.T, b []byte) {
		m := New(storage.CurrentLevel)
		if err := m.Restore(bytes.NewReader(b)); err != nil {
			return
		}
		again := New(storage.CurrentLevel)
		if err := again.Restore(bytes.NewReader(snapshot(t, m))); err != nil {
			t.Fatal(err)
		}
	})
}
