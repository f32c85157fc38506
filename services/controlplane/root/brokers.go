package root

import (
	"fmt"
	"maps"
	"slices"
	"unicode/utf8"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	"github.com/malachilog/malachi/storage"
)

func removed(id storage.BrokerID) Result {
	return Result{Outcome: OutcomeRemoved, Detail: fmt.Sprintf("broker %s was removed from the cluster; an empty disk may join under a new id", id)}
}

func (s *State) admit(c *AdmitBroker) (*State, Result) {
	if c.ID == 0 || c.Nonce.IsZero() || c.AdvertisedLevel < 1 {
		return s, Result{Outcome: OutcomeInvalid, Detail: "malformed admission"}
	}
	if detail := validTexts(c.Addresses, c.Attributes); detail != "" {
		return s, Result{Outcome: OutcomeLimit, Detail: detail}
	}
	_, known := s.Broker(c.ID)
	switch {
	case s.WasRemoved(c.ID) && !mutate.On("root.removed-returns"):
		return s, removed(c.ID)
	case known: // registration is what brings its addresses up to date, so a late copy of this changes nothing
		return s, Result{Outcome: OutcomeOK, Already: true}
	case c.AdvertisedLevel < s.Level:
		return s, Result{Outcome: OutcomeConflict, Detail: fmt.Sprintf(
			"the cluster is at level %d, the broker understands %d", s.Level, c.AdvertisedLevel)}
	case len(s.Brokers) >= MaxBrokers:
		return s, Result{Outcome: OutcomeLimit, Detail: "too many brokers"}
	}
	return s.withBroker(Broker{ID: c.ID, Addresses: maps.Clone(c.Addresses), Attributes: maps.Clone(c.Attributes),
		AdvertisedLevel: c.AdvertisedLevel, AdmitTime: c.Time, admitNonce: c.Nonce}), Result{Outcome: OutcomeOK}
}

func (s *State) setBrokerState(c *SetBrokerState) (*State, Result) {
	if c.Nonce.IsZero() || c.To > BrokerDecommissioning {
		return s, Result{Outcome: OutcomeInvalid, Detail: "malformed change of a broker's state"}
	}
	b, known := s.Broker(c.ID)
	switch {
	case s.WasRemoved(c.ID):
		return s, removed(c.ID)
	case !known:
		return s, Result{Outcome: OutcomeUnknownBroker, Detail: "no broker of this id"}
	case b.stateNonce == c.Nonce && b.State == c.To && b.StateVersion == c.ExpectVersion+1:
		return s, Result{Outcome: OutcomeOK, Already: true}
	case b.StateVersion != c.ExpectVersion:
		return s, Result{Outcome: OutcomeConflict, Detail: fmt.Sprintf("the broker is %s at state version %d", b.State, b.StateVersion)}
	case b.State != BrokerActive && c.To != BrokerActive && b.State != c.To:
		return s, Result{Outcome: OutcomeConflict, Detail: fmt.Sprintf("the broker is %s; make it active first", b.State)}
	}
	b.State, b.StateVersion, b.stateNonce = c.To, b.StateVersion+1, c.Nonce
	return s.withBroker(b), Result{Outcome: OutcomeOK}
}

func (s *State) removeBroker(c *RemoveBroker) (*State, Result) {
	b, known := s.Broker(c.ID)
	switch {
	case s.WasRemoved(c.ID):
		return s, Result{Outcome: OutcomeOK, Already: true}
	case !known:
		return s, Result{Outcome: OutcomeUnknownBroker, Detail: "no broker of this id"}
	case b.State != BrokerDecommissioning:
		return s, Result{Outcome: OutcomeConflict, Detail: fmt.Sprintf("the broker is %s; it must be decommissioning", b.State)}
	case len(s.Brokers) == 1:
		return s, Result{Outcome: OutcomeConflict, Detail: "it is the last broker"}
	case len(s.Removed) >= MaxRemoved:
		return s, Result{Outcome: OutcomeLimit, Detail: "too many brokers were removed"}
	}
	next := *s
	i, _ := s.brokerIndex(c.ID)
	next.Brokers = slices.Delete(slices.Clone(s.Brokers), i, i+1)
	at, _ := slices.BinarySearch(s.Removed, c.ID)
	next.Removed = slices.Insert(slices.Clone(s.Removed), at, c.ID)
	return &next, Result{Outcome: OutcomeOK}
}

func (s *State) brokerReady(c *BrokerReady) (*State, Result) {
	b, known := s.Broker(c.ID)
	switch {
	case s.WasRemoved(c.ID):
		return s, removed(c.ID)
	case !known || c.Boot == 0:
		return s, Result{Outcome: OutcomeUnknownBroker, Detail: "no broker of this id"}
	case c.Boot != b.Boot:
		return s, Result{Outcome: OutcomeStaleBoot, Detail: fmt.Sprintf(
			"clone_or_rollback: this process runs boot %d, but boot %d is registered", c.Boot, b.Boot)}
	case c.Generation != b.Generation:
		return s, Result{Outcome: OutcomeConflict, Detail: fmt.Sprintf("its replicas are of generation %d", b.Generation)}
	case b.ReadyBoot == c.Boot:
		return s, Result{Outcome: OutcomeOK, Already: true}
	}
	b.ReadyBoot = c.Boot
	return s.withBroker(b), Result{Outcome: OutcomeOK}
}

func (s *State) retireReplicas(c *RetireReplicas) (*State, Result) {
	b, known := s.Broker(c.ID)
	switch {
	case s.WasRemoved(c.ID):
		return s, removed(c.ID)
	case !known:
		return s, Result{Outcome: OutcomeUnknownBroker, Detail: "no broker of this id"}
	case b.Generation == c.ExpectGeneration+1:
		return s, Result{Outcome: OutcomeOK, Already: true}
	case b.Generation != c.ExpectGeneration:
		return s, Result{Outcome: OutcomeConflict, Detail: fmt.Sprintf("its replicas are of generation %d", b.Generation)}
	case b.Generation >= MaxGeneration:
		return s, Result{Outcome: OutcomeLimit, Detail: "its replicas were retired too often; an empty disk may join under a new id"}
	}
	b.Generation, b.ReadyBoot = b.Generation+1, 0
	return s.withBroker(b), Result{Outcome: OutcomeOK}
}

func (s *State) register(c *RegisterBroker) (*State, Result) {
	if c.ID == 0 || c.Boot == 0 || c.Nonce.IsZero() || c.AdvertisedLevel < 1 {
		return s, Result{Outcome: OutcomeInvalid, Detail: "malformed registration"}
	}
	if detail := validTexts(c.Addresses, c.Attributes); detail != "" {
		return s, Result{Outcome: OutcomeLimit, Detail: detail}
	}
	if s.WasRemoved(c.ID) && !mutate.On("root.removed-returns") {
		return s, removed(c.ID)
	}
	b, known := s.Broker(c.ID)
	switch {
	case known && b.Boot == c.Boot && b.Nonce == c.Nonce:
		return s, Result{Outcome: OutcomeOK, Already: true}
	case known && c.Boot <= b.Boot && !mutate.On("root.any-boot"):
		return s, Result{Outcome: OutcomeCloneOrRollback, Detail: fmt.Sprintf(
			"clone_or_rollback: the disk says boot %d, but boot %d is registered", c.Boot, b.Boot)}
	case known && c.JournalGroup < b.JournalGroup && !mutate.On("root.any-journal-group"):
		return s, Result{Outcome: OutcomeCloneOrRollback, Detail: fmt.Sprintf(
			"clone_or_rollback: the disk's journal ends at group %d, but group %d was durable", c.JournalGroup, b.JournalGroup)}
	case !known && len(s.Brokers) >= MaxBrokers:
		return s, Result{Outcome: OutcomeLimit, Detail: "too many brokers"}
	}
	b.ID, b.Boot, b.JournalGroup, b.Nonce, b.RegisterTime = c.ID, c.Boot, c.JournalGroup, c.Nonce, c.Time
	b.Addresses, b.Attributes, b.AdvertisedLevel = maps.Clone(c.Addresses), maps.Clone(c.Attributes), c.AdvertisedLevel
	return s.withBroker(b), Result{Outcome: OutcomeOK}
}

func (s *State) refresh(c *RefreshBroker) (*State, Result) {
	b, known := s.Broker(c.ID)
	switch {
	case s.WasRemoved(c.ID):
		return s, removed(c.ID)
	case !known:
		return s, Result{Outcome: OutcomeUnknownBroker, Detail: "the broker was never registered"}
	case c.Boot != b.Boot:
		return s, Result{Outcome: OutcomeStaleBoot, Detail: fmt.Sprintf(
			"clone_or_rollback: this process runs boot %d, but boot %d is registered", c.Boot, b.Boot)}
	case c.JournalGroup <= b.JournalGroup: // a late refresh does not lower it
		return s, Result{Outcome: OutcomeOK, Already: true}
	}
	b.JournalGroup = c.JournalGroup
	return s.withBroker(b), Result{Outcome: OutcomeOK}
}

func (s *State) withBroker(b Broker) *State {
	next := *s
	next.Brokers = slices.Clone(s.Brokers)
	if i, ok := s.brokerIndex(b.ID); ok {
		next.Brokers[i] = b
	} else {
		next.Brokers = slices.Insert(next.Brokers, i, b)
	}
	return &next
}

// validTexts says what is wrong with the addresses or attributes of a broker.
func validTexts(addresses, attributes map[string]string) string {
	if !validMap(addresses, MaxAddresses, MaxAddress) {
		return "too many addresses, or one is too long"
	}
	if !validMap(attributes, MaxAttributes, MaxAttribute) {
		return "too many attributes, or one is too long"
	}
	return ""
}

func validMap(m map[string]string, most, longest int) bool {
	if len(m) > most {
		return false
	}
	for k, v := range m {
		if len(k) > longest || len(v) > longest || !utf8.ValidString(k) || !utf8.ValidString(v) {
			return false
		}
	}
	return true
}
