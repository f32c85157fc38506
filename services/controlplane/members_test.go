package controlplane

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/services/controlplane/root"
	"github.com/malachilog/malachi/storage"
)

// modelGroup is one Raft group and the brokers around it, as the loop's decisions are tried on.
type modelGroup struct {
	t    *rapid.T
	m    *root.Machine
	ms   members
	down map[storage.BrokerID]bool
	away map[storage.BrokerID]time.Duration
	fear map[storage.BrokerID]bool // suspected though it runs
	next storage.BrokerID
	seen map[string]int
}

func (g *modelGroup) apply(cmd root.Command) {
	b, err := root.Encode(cmd)
	if err == nil {
		_, err = g.m.Apply(b)
	}
	if err != nil {
		g.t.Fatalf("%T: %v", cmd, err)
	}
}

func (g *modelGroup) admit(ready bool) {
	g.next += 0x1000
	n := metadata.Nonce{byte(g.next >> 12), 1}
	g.apply(&root.AdmitBroker{ID: g.next, Nonce: n, AdvertisedLevel: 1, Attributes: map[string]string{"zone": fmt.Sprint(g.next >> 12 % 3)}})
	if ready {
		g.ready(g.next)
	}
}

func (g *modelGroup) ready(id storage.BrokerID) {
	b, _ := g.m.State().Broker(id)
	g.apply(&root.RegisterBroker{ID: id, Boot: b.Boot + 1, Nonce: metadata.Nonce{byte(id >> 12), byte(b.Boot + 2)}, AdvertisedLevel: 1})
	g.apply(&root.BrokerReady{ID: id, Boot: b.Boot + 1, Generation: b.Generation})
}

func (g *modelGroup) sight(self uint64) sight {
	return sight{self: self, alive: func(b storage.BrokerID) bool { return !g.down[b] && !g.fear[b] },
		absent: func(b storage.BrokerID) time.Duration { return g.away[b] }, replaceAfter: 10 * time.Minute, choose: chooseVoters}
}

// alive is whether a replica really runs: its broker does, with this generation.
func (g *modelGroup) alive(r uint64) bool {
	for _, b := range g.m.State().Brokers {
		if replicaOf(b.ID, b.Generation) == r {
			return !g.down[b.ID]
		}
	}
	return false
}

func (g *modelGroup) count() (alive int) {
	for _, r := range g.ms.voters {
		if g.alive(r) {
			alive++
		}
	}
	return alive
}

// step lets the leader make one change, if the group has one.
func (g *modelGroup) step() changeKind {
	if g.count() < quorumOf(len(g.ms.voters)) {
		g.seen["no quorum"]++
		return noChange
	}
	leader := g.ms.voters[slices.IndexFunc(g.ms.voters, g.alive)]
	st, s := g.m.State(), g.sight(leader)
	if b, ok := toRetire(st, s, func(r uint64) bool { return slices.Contains(g.ms.voters, r) }); ok {
		g.seen["retire"]++
		g.apply(&root.RetireReplicas{ID: b.ID, ExpectGeneration: b.Generation})
		st = g.m.State()
	}
	ch, waits := nextChange(rootShard, g.ms, st, s)
	g.seen[ch.kind.String()]++
	g.seen["waits: "+waits[:min(12, len(waits))]]++
	g.ms.version++
	switch ch.kind {
	case addNonVoting:
		if _, out := g.ms.removed[ch.replica]; out {
			g.t.Fatalf("%x was removed and is added again", ch.replica)
		}
		g.ms.nonVoting = append(g.ms.nonVoting, ch.replica)
	case promote:
		i := slices.Index(g.ms.nonVoting, ch.replica)
		if i < 0 || slices.Contains(g.ms.voters, ch.replica) {
			g.t.Fatalf("%x is promoted", ch.replica)
		}
		g.ms.nonVoting = slices.Delete(g.ms.nonVoting, i, i+1)
		g.ms.voters = append(g.ms.voters, ch.replica)
	case remove:
		b, known := st.Broker(ch.broker)
		if known && replicaOf(b.ID, b.Generation) == ch.replica || !known && !st.WasRemoved(ch.broker) {
			g.t.Fatalf("broker %s is removed, which nothing recorded asks for: %+v", ch.broker, b)
		}
		if ch.replica == leader {
			g.t.Fatalf("the leader removes itself")
		}
		not := func(r uint64) bool { return r == ch.replica }
		g.ms.nonVoting, g.ms.voters = slices.DeleteFunc(g.ms.nonVoting, not), slices.DeleteFunc(g.ms.voters, not)
		g.ms.removed[ch.replica] = struct{}{}
	}
	if g.count() < quorumOf(len(g.ms.voters)) {
		g.t.Fatalf("after %s %s the group has %d of %d voters", ch.kind, ch.broker, g.count(), len(g.ms.voters))
	}
	return ch.kind
}

// TestChangesKeepTheQuorum: whatever dies, leaves, joins and comes back, no change that we make costs a group its quorum, nobody is
// removed without a record that says so, and once all is well there are three voters.
func TestChangesKeepTheQuorum(t *testing.T) {
	inv.Covers(t, "INV-M6", "INV-M8")
	seen := map[string]int{}
	for range 10 {
		rapid.Check(t, func(t *rapid.T) { history(t, seen) })
	}
	t.Logf("branches: %v", seen)
	for _, branch := range []string{"add", "promote", "remove", "retire", "nothing", "no quorum", "waits: a broker tha", "waits: a third brok"} {
		if seen[branch] == 0 {
			t.Errorf("the random histories never reached %q", branch)
		}
	}
}

// disturb lets something happen, or the leader make a step. False: a command took the quorum.
func (g *modelGroup) disturb(t *rapid.T) bool {
	brokers := g.m.State().Brokers
	b := brokers[rapid.IntRange(0, len(brokers)-1).Draw(t, "broker")]
	switch rapid.IntRange(0, 11).Draw(t, "what") {
	case 0:
		if len(brokers) < 7 {
			g.admit(rapid.Bool().Draw(t, "ready"))
		}
	case 1:
		g.down[b.ID] = true
	case 2:
		g.away[b.ID] = time.Minute // suspected, and for a wrong reason
		if g.down[b.ID] || rapid.Bool().Draw(t, "for long") {
			g.down[b.ID], g.away[b.ID] = true, time.Hour
		}
	case 3:
		g.fear[b.ID] = !g.fear[b.ID]
	case 4:
		g.down[b.ID], g.away[b.ID] = false, 0
		g.ready(b.ID)
	case 5:
		to := root.BrokerState(rapid.IntRange(0, 2).Draw(t, "state"))
		g.apply(&root.SetBrokerState{ID: b.ID, ExpectVersion: b.StateVersion, To: to, Nonce: metadata.Nonce{9, byte(b.StateVersion), byte(b.ID >> 12)}})
	case 6:
		before := len(brokers)
		g.apply(&root.RemoveBroker{ID: b.ID})
		if len(g.m.State().Brokers) < before && !g.down[b.ID] && slices.Contains(g.ms.voters, replicaOf(b.ID, b.Generation)) {
			// An operator took out a voter that runs. It stops when it learns of it, and counts as dead from now on: that is the command's
			// doing, so where it alone costs the quorum there is nothing to check.
			if g.count() < quorumOf(len(g.ms.voters)) {
				g.seen["removed by force"]++
				return false
			}
		}
	default:
		g.step()
	}
	return true
}

func history(t *rapid.T, seen map[string]int) {
	g := &modelGroup{t: t, m: root.New(1), down: map[storage.BrokerID]bool{}, away: map[storage.BrokerID]time.Duration{},
		fear: map[storage.BrokerID]bool{}, next: 0x1000,
		seen: seen, ms: members{voters: []uint64{0x1000}, removed: map[uint64]struct{}{}}}
	g.apply(&root.Found{Cluster: storage.ClusterID{1}, Vnodes: 1, Broker: 0x1000, Level: 1, Nonce: metadata.Nonce{1}})
	g.ready(0x1000)
	for range rapid.IntRange(0, 4).Draw(t, "brokers") {
		g.admit(true)
	}
	for rapid.Bool().Draw(t, "grown") && g.step() != noChange {
	}
	for range rapid.IntRange(1, 120).Draw(t, "steps") {
		if !g.disturb(t) {
			return
		}
	}
	// All come back.
	for _, b := range g.m.State().Brokers {
		g.down[b.ID], g.away[b.ID], g.fear[b.ID] = false, 0, false
		g.apply(&root.SetBrokerState{ID: b.ID, ExpectVersion: b.StateVersion, To: root.BrokerActive, Nonce: metadata.Nonce{8, byte(b.ID >> 12)}})
		g.ready(b.ID)
	}
	for range 5 {
		g.admit(true)
	}
	if g.count() < quorumOf(len(g.ms.voters)) {
		return // lost for good: too many were removed by command while the others were dead
	}
	steps := 0
	for g.step() != noChange {
		if steps++; steps > 100 {
			t.Fatalf("it never settles: %+v", g.ms)
		}
	}
	good := 0
	for _, r := range g.ms.voters {
		if g.alive(r) {
			good++
		}
	}
	if good < wantedVoters {
		t.Fatalf("%d good voters of %x", good, g.ms.voters)
	}
}

// TestNoChangeWhileVotersSeemDown: a group that could lose its quorum by the next failure is not changed in a way that would make
// that failure the present one.
func TestNoChangeWhileVotersSeemDown(t *testing.T) {
	inv.Covers(t, "INV-M6")
	rapid.Check(t, func(t *rapid.T) {
		g := &modelGroup{t: t, m: root.New(1), down: map[storage.BrokerID]bool{}, away: map[storage.BrokerID]time.Duration{},
			fear: map[storage.BrokerID]bool{}, next: 0x1000, seen: map[string]int{}, ms: members{voters: []uint64{0x1000}, removed: map[uint64]struct{}{}}}
		g.apply(&root.Found{Cluster: storage.ClusterID{1}, Vnodes: 1, Broker: 0x1000, Level: 1, Nonce: metadata.Nonce{1}})
		g.ready(0x1000)
		for range 4 {
			g.admit(true)
		}
		for g.step() != noChange {
		}
		// One voter is gone for good. Of the others, how many seem to run?
		gone, _ := g.m.State().Broker(storage.BrokerID(g.ms.voters[rapid.IntRange(1, 2).Draw(t, "gone")]))
		if rapid.Bool().Draw(t, "removed") {
			g.apply(&root.SetBrokerState{ID: gone.ID, To: root.BrokerDecommissioning, Nonce: metadata.Nonce{7}})
			g.apply(&root.RemoveBroker{ID: gone.ID})
		} else {
			g.apply(&root.RetireReplicas{ID: gone.ID})
		}
		for _, b := range g.m.State().Brokers {
			g.down[b.ID] = rapid.Bool().Draw(t, "down")
		}
		ch, waits := nextChange(rootShard, g.ms, g.m.State(), g.sight(0x1000))
		g.down[0x1000] = false
		alive := g.count()
		switch ch.kind {
		case promote:
			if g.down[ch.broker] || alive+1 < quorumOf(4) {
				t.Fatalf("%s %s with %d of 3 voters", ch.kind, ch.broker, alive)
			}
		case remove:
			if slices.Contains(g.ms.voters, ch.replica) && alive < quorumOf(2) {
				t.Fatalf("%s %s with %d of 3 voters", ch.kind, ch.broker, alive)
			}
		case noChange:
			if waits == "" {
				t.Fatal("nothing is done, and nothing is said")
			}
		}
	})
}

func TestChooseVotersSpreads(t *testing.T) {
	var list []Candidate
	for i := range 9 {
		list = append(list, Candidate{ID: storage.BrokerID(i + 1), Attributes: map[string]string{"zone": string(rune('a' + i/3))}})
	}
	used := map[storage.BrokerID]int{}
	for group := range uint64(64) {
		got := chooseVoters(group, list, 3)
		zones := map[storage.BrokerID]bool{}
		for _, b := range got {
			zones[(b-1)/3] = true
			used[b]++
		}
		if len(got) != 3 || len(zones) != 3 {
			t.Fatalf("group %d: %v", group, got)
		}
		kept := slices.Clone(list)
		kept[4].Voter, kept[5].Voter = true, true // both of zone b: they stay
		got = chooseVoters(group, kept, 3)
		if len(got) != 3 || !slices.Contains(got, 5) || !slices.Contains(got, 6) || got[2] == 4 {
			t.Fatalf("group %d: %v", group, got)
		}
	}
	if len(used) != 9 {
		t.Fatalf("only %d of 9 brokers ever vote", len(used))
	}
}
