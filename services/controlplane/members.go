package controlplane

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	"github.com/malachilog/malachi/services/controlplane/root"
	"github.com/malachilog/malachi/storage"
)

// What follows decides who is in a Raft group. It is a function of what is recorded and seen; the loop in membership.go carries it
// out. Every broker runs a replica of every group; three of them vote (one while there are fewer than three brokers), the others
// follow as non-voting members. A vote cannot be taken back from a replica, so voters stay until their broker is gone for good.

// wantedVoters is how many members of a group vote where there are as many brokers.
const wantedVoters = 3

type changeKind int

const (
	noChange changeKind = iota
	addNonVoting
	promote
	remove
	transfer // of the leadership, so that the one that led may be removed
)

func (k changeKind) String() string {
	return [...]string{"nothing", "add", "promote", "remove", "transfer leadership to"}[k]
}

// change is one step of one group.
type change struct {
	kind    changeKind
	broker  storage.BrokerID
	replica uint64
}

// members is who is in a group, all sorted.
type members struct {
	version   uint64 // number of the last change
	voters    []uint64
	nonVoting []uint64
	removed   map[uint64]struct{} // replica ids that may never come back
}

// sight is what a broker knows beside what is recorded.
type sight struct {
	self         uint64 // its replica
	alive        func(storage.BrokerID) bool
	absent       func(storage.BrokerID) time.Duration
	replaceAfter time.Duration
	choose       func(group uint64, candidates []Candidate, n int) []storage.BrokerID
}

func (s sight) gone(b storage.BrokerID) bool { return s.absent(b) >= s.replaceAfter }

func quorumOf(voters int) int { return voters/2 + 1 }

// member is one replica of a group and what there is to say of it.
type member struct {
	replica uint64
	broker  root.Broker // only its id where it was removed
	known   bool        // root knows its broker, or that it was removed
	stale   bool        // its broker was removed, or has newer replicas
	alive   bool
}

// good reports whether a voter is to stay one.
func (m member) good(s sight) bool {
	return m.known && !m.stale && m.broker.State != root.BrokerDecommissioning && !s.gone(m.broker.ID)
}

func describe(st *root.State, s sight, replica uint64) member {
	m := member{replica: replica}
	id, known := findBroker(replica, func(b storage.BrokerID) bool {
		_, ok := st.Broker(b)
		return ok || st.WasRemoved(b)
	})
	if !known {
		return m // a member that root does not know is left alone: not knowing is no reason
	}
	m.known, m.broker.ID = true, id
	if b, ok := st.Broker(id); ok {
		m.broker = b
		m.stale = replicaOf(id, b.Generation) != replica
	} else {
		m.stale = true
	}
	m.alive = replica == s.self || !m.stale && s.alive(id)
	return m
}

// nextChange is the next step of a group that this broker leads, or what it waits for. At most one step at a time is under way.
func nextChange(group uint64, ms members, st *root.State, s sight) (change, string) {
	if ch := missing(ms, st); ch.kind != noChange {
		return ch, ""
	}
	var candidates []member // that might be promoted now
	for _, r := range ms.nonVoting {
		m := describe(st, s, r)
		switch {
		case m.known && m.stale:
			return change{remove, m.broker.ID, r}, ""
		case m.known && m.alive && m.broker.State == root.BrokerActive && m.broker.Ready() && !s.gone(m.broker.ID):
			candidates = append(candidates, m)
		}
	}
	var good, bad []member
	alive := 0
	for _, r := range ms.voters {
		m := describe(st, s, r)
		if m.alive {
			alive++
		}
		if m.good(s) || !m.known {
			good = append(good, m)
		} else {
			bad = append(bad, m)
		}
	}
	if want := voterTarget(st, s); len(good) < want {
		ch, waits := nextVoter(group, ms, good, candidates, alive, want, s)
		if ch.kind != noChange || len(bad) == 0 {
			return ch, waits
		}
	}
	return nextRemoval(ms, good, bad, alive, s)
}

// missing adds a broker that has no replica in the group. One whose retired replica is still in it waits until that is out: a group
// has one replica of a broker at most.
func missing(ms members, st *root.State) change {
	has := func(b storage.BrokerID) bool {
		of := func(r uint64) bool { return r-uint64(b) <= root.MaxGeneration }
		return slices.ContainsFunc(ms.voters, of) || slices.ContainsFunc(ms.nonVoting, of)
	}
	for _, b := range st.Brokers {
		r := replicaOf(b.ID, b.Generation)
		if _, out := ms.removed[r]; !out && !has(b.ID) {
			return change{addNonVoting, b.ID, r}
		}
	}
	return change{}
}

// voterTarget is how many voters the group should have.
func voterTarget(st *root.State, s sight) int {
	n := 0
	for _, b := range st.Brokers {
		if b.Boot != 0 && b.State != root.BrokerDecommissioning && !s.gone(b.ID) {
			n++
		}
	}
	if n < wantedVoters {
		return 1
	}
	return wantedVoters
}

// nextVoter promotes one candidate.
func nextVoter(group uint64, ms members, good, candidates []member, alive, want int, s sight) (change, string) {
	if len(candidates) == 0 {
		return change{}, "a broker that has caught up and may vote"
	}
	if len(ms.voters) == 1 && want > 1 && len(candidates) < 2 {
		// Two voters bear no failure at all: the step to three is made at once or not begun.
		return change{}, "a third broker that has caught up and may vote"
	}
	// The one to be promoted counts as alive: it is a candidate only if it seems so.
	if alive+1 < quorumOf(len(ms.voters)+1) && !mutate.On("controlplane.members-without-quorum") {
		return change{}, "a voter that is down: one more voter now would leave the group without a quorum"
	}
	var list []Candidate
	for _, m := range good {
		if m.known {
			list = append(list, Candidate{ID: m.broker.ID, Attributes: m.broker.Attributes, Voter: true})
		}
	}
	for _, m := range candidates {
		list = append(list, Candidate{ID: m.broker.ID, Attributes: m.broker.Attributes})
	}
	chosen := s.choose(group, list, want)
	for _, m := range candidates {
		if slices.Contains(chosen, m.broker.ID) {
			return change{promote, m.broker.ID, m.replica}, ""
		}
	}
	return change{}, "a broker that placement allows to vote"
}

// nextRemoval takes out one voter whose broker is gone for good.
func nextRemoval(ms members, good, bad []member, alive int, s sight) (change, string) {
	waits := ""
	for _, m := range bad {
		if !m.stale {
			if waits = fmt.Sprintf("broker %s to be removed", m.broker.ID); m.broker.State != root.BrokerDecommissioning {
				waits = fmt.Sprintf("broker %s, which has been away for too long, to be retired", m.broker.ID)
			}
			continue
		}
		left := alive
		if m.alive {
			left--
		}
		if left < quorumOf(len(ms.voters)-1) && !mutate.On("controlplane.members-without-quorum") {
			waits = fmt.Sprintf("voters that are down: without broker %s the group would have no quorum", m.broker.ID)
			continue
		}
		if m.replica == s.self {
			for _, g := range good {
				if g.alive && g.replica != s.self {
					return change{transfer, g.broker.ID, g.replica}, ""
				}
			}
			waits = "another voter to lead the group"
			continue
		}
		return change{remove, m.broker.ID, m.replica}, ""
	}
	return change{}, waits
}

// toRetire returns a broker that was away for so long that its votes are given to others, if there are others that can take them.
// isVoter says whether its present replica votes in some group: nobody is retired who stands in no way.
func toRetire(st *root.State, s sight, isVoter func(replica uint64) bool) (root.Broker, bool) {
	able := 0
	for _, b := range st.Brokers {
		if b.Ready() && b.State == root.BrokerActive && s.absent(b.ID) == 0 && s.alive(b.ID) {
			able++
		}
	}
	if able < wantedVoters {
		return root.Broker{}, false
	}
	for _, b := range st.Brokers {
		if s.gone(b.ID) && b.Generation < root.MaxGeneration && isVoter(replicaOf(b.ID, b.Generation)) {
			return b, true
		}
	}
	return root.Broker{}, false
}

// preferredLeader is the voter that should lead a group, so that the groups are led from all brokers that vote: the same one by
// everybody's reckoning, unless it seems down or is about to go.
func preferredLeader(group uint64, ms members, st *root.State, s sight) (member, bool) {
	var best member
	for _, r := range ms.voters {
		m := describe(st, s, r)
		if m.alive && m.good(s) && m.broker.State == root.BrokerActive && m.broker.Ready() &&
			(best.replica == 0 || weight(group, m.broker.ID) > weight(group, best.broker.ID)) {
			best = m
		}
	}
	return best, best.replica != 0
}

// weight orders brokers for a group (rendezvous hashing).
func weight(group uint64, b storage.BrokerID) uint64 {
	var key [16]byte
	binary.LittleEndian.PutUint64(key[:8], group)
	binary.LittleEndian.PutUint64(key[8:], uint64(b))
	return xxhash.Sum64(key[:])
}

// chooseVoters keeps who votes and adds by rendezvous hashing, first from zones that have no voter yet.
func chooseVoters(group uint64, candidates []Candidate, n int) []storage.BrokerID {
	list := slices.Clone(candidates)
	slices.SortFunc(list, func(a, b Candidate) int {
		if a.Voter != b.Voter {
			if a.Voter {
				return -1
			}
			return 1
		}
		return cmp.Or(cmp.Compare(weight(group, b.ID), weight(group, a.ID)), cmp.Compare(a.ID, b.ID))
	})
	var out []storage.BrokerID
	zones := map[string]bool{}
	take := func(fits func(Candidate) bool) {
		for _, c := range list {
			if len(out) < n && !slices.Contains(out, c.ID) && fits(c) {
				out = append(out, c.ID)
				zones[c.Attributes["zone"]] = true
			}
		}
	}
	take(func(c Candidate) bool { return c.Voter })
	take(func(c Candidate) bool { return !zones[c.Attributes["zone"]] })
	take(func(Candidate) bool { return true })
	return out
}
