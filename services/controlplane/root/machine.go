package root

import (
	"fmt"
	"math"
	"slices"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/storage"
)

// Machine is root's state machine. Apply and Restore are for one goroutine at a time; the States are for all.
type Machine struct {
	understood storage.Level
	st         *State
	applied    storage.Level // highest level that introduced something applied
	stopped    error
}

// New returns an empty machine that understands commands, snapshots and cluster levels up to this level.
func New(understood storage.Level) *Machine {
	return &Machine{understood: understood, st: &State{}, applied: commandLevel}
}

// State returns the present state.
func (m *Machine) State() *State { return m.st }

// Stopped returns why the machine has stopped, or nil.
func (m *Machine) Stopped() error { return m.stopped }

// Apply applies one log entry. What a command is refused for is in the Result. An error means that the machine has stopped before
// this entry, applies nothing any more and must not be snapshotted: storage.ErrNewerFormat (the entry is of a higher level, or
// raises the cluster beyond what this process understands) or storage.ErrCorrupt.
func (m *Machine) Apply(entry []byte) (Result, error) {
	if m.stopped != nil {
		return Result{}, m.stopped
	}
	understood := m.understood
	if mutate.On("root.apply-above-level") {
		understood = math.MaxUint32
	}
	cmd, level, err := decode(entry, understood)
	if err == nil {
		if to := m.st.risesTo(cmd); to > understood {
			err = fmt.Errorf("the cluster rises to level %d, this process understands %d: %w", to, understood, storage.ErrNewerFormat)
		}
	}
	if err != nil {
		m.stopped = err
		return Result{}, err
	}
	m.applied = max(m.applied, level)
	if cmd == nil {
		return Result{Outcome: OutcomeInvalid, Detail: "malformed command"}, nil
	}
	next, res := m.st.apply(cmd)
	m.st = next
	return res, nil
}

// apply returns the state after cmd; the same state if nothing changed.
func (s *State) apply(cmd Command) (*State, Result) {
	if c, ok := cmd.(*Found); ok {
		return s.found(c)
	}
	if !s.Founded() {
		return s, Result{Outcome: OutcomeNotFounded, Detail: "there is no cluster yet"}
	}
	switch c := cmd.(type) {
	case *ConfirmVnode:
		return s.confirm(c)
	case *RegisterBroker:
		return s.register(c)
	case *RefreshBroker:
		return s.refresh(c)
	case *SetLevel:
		return s.setLevel(c)
	case *AdmitBroker:
		return s.admit(c)
	case *SetBrokerState:
		return s.setBrokerState(c)
	case *RemoveBroker:
		return s.removeBroker(c)
	case *BrokerReady:
		return s.brokerReady(c)
	case *RetireReplicas:
		return s.retireReplicas(c)
	case *UpdatePolicy:
		return s.updatePolicy(c)
	}
	panic(fmt.Sprintf("root: no application of %T", cmd))
}

func (s *State) found(c *Found) (*State, Result) {
	if s.Founded() && !mutate.On("root.found-again") {
		if s.FoundNonce == c.Nonce && s.Cluster == c.Cluster {
			return s, Result{Outcome: OutcomeOK, Already: true}
		}
		return s, Result{Outcome: OutcomeFounded, Detail: "the cluster was founded before"}
	}
	if c.Cluster.IsZero() || c.Nonce.IsZero() || c.Broker == 0 || c.Vnodes < 1 || c.Vnodes > MaxVnodes || c.Level < 1 ||
		c.Brokers < 0 || c.Brokers > MaxBrokers {
		return s, Result{Outcome: OutcomeInvalid, Detail: "malformed founding"}
	}
	next := *s
	next.Cluster, next.FoundNonce, next.Level = c.Cluster, c.Nonce, c.Level
	next.Policy = foundingPolicy(c.Brokers)
	next.Ring = Ring{Version: 1, Vnodes: make([]Vnode, c.Vnodes)}
	for i, arc := range EqualArcs(c.Vnodes) {
		next.Ring.Vnodes[i] = Vnode{ID: uint32(i), Arcs: []metadata.Arc{arc}, Members: []storage.BrokerID{c.Broker}}
	}
	return &next, Result{Outcome: OutcomeOK}
}

// EqualArcs cuts the hash ring into n arcs of equal length (to within one), in order.
func EqualArcs(n int) []metadata.Arc {
	step := math.MaxUint64/uint64(n) + 1 // for n = 1 this wraps to 0, and the only arc ends at the maximum anyway
	arcs := make([]metadata.Arc, n)
	for i := range arcs {
		arcs[i] = metadata.Arc{First: uint64(i) * step, Last: uint64(i+1)*step - 1}
	}
	arcs[n-1].Last = math.MaxUint64
	return arcs
}

func (s *State) confirm(c *ConfirmVnode) (*State, Result) {
	i := slices.IndexFunc(s.Ring.Vnodes, func(v Vnode) bool { return v.ID == c.Vnode })
	switch {
	case i < 0:
		return s, Result{Outcome: OutcomeInvalid, Detail: "no such vnode"}
	case s.Ring.Vnodes[i].Confirmed:
		return s, Result{Outcome: OutcomeOK, Already: true}
	}
	next := *s
	next.Ring.Vnodes = slices.Clone(s.Ring.Vnodes)
	next.Ring.Vnodes[i].Confirmed = true
	return &next, Result{Outcome: OutcomeOK}
}

// risesTo is the level that the cluster would have after cmd, 0 if cmd does not change it.
func (s *State) risesTo(cmd Command) storage.Level {
	switch c := cmd.(type) {
	case *Found:
		if !s.Founded() {
			return c.Level
		}
	case *SetLevel:
		if s.raises(c) {
			return c.To
		}
	}
	return 0
}

// raises reports whether c would raise the level of the cluster.
func (s *State) raises(c *SetLevel) bool {
	if !s.Founded() || s.Level != c.Expect || c.To <= c.Expect {
		return false
	}
	for _, b := range s.Brokers {
		if b.AdvertisedLevel < c.To {
			return false
		}
	}
	return true
}

func (s *State) setLevel(c *SetLevel) (*State, Result) {
	switch {
	case s.Level == c.To:
		return s, Result{Outcome: OutcomeOK, Already: true}
	case s.Level != c.Expect:
		return s, Result{Outcome: OutcomeConflict, Detail: fmt.Sprintf("the cluster is at level %d", s.Level)}
	case c.To < c.Expect:
		return s, Result{Outcome: OutcomeInvalid, Detail: "a level never falls"}
	case !s.raises(c):
		return s, Result{Outcome: OutcomeConflict, Detail: fmt.Sprintf("not every registered broker has advertised level %d", c.To)}
	}
	next := *s
	next.Level = c.To
	return &next, Result{Outcome: OutcomeOK}
}
