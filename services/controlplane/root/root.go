package root

import (
	"slices"

	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/storage"
)

// Bounds of the state.
const (
	MaxVnodes    = 1024
	MaxBrokers   = 4096
	MaxAddresses = 16
	MaxAddress   = 512 // bytes of one address or of its name
	MaxRemoved   = 1 << 16
	// MaxAttributes bounds the attributes of a broker, MaxAttribute the bytes of one name or value.
	MaxAttributes = 16
	MaxAttribute  = 128
	// MaxGeneration is how often the replicas of one broker may be retired.
	MaxGeneration = 63
)

// Vnode is one shard of the metadata: the arcs of the ring that it owns and the broker on which its group was started. Every broker
// runs a replica of it; who is a member now, the group itself knows.
type Vnode struct {
	ID      uint32
	Arcs    []metadata.Arc
	Members []storage.BrokerID // that founded the group
	// Confirmed: the group has applied its first command. Its replicas are never started from nothing again.
	Confirmed bool
}

// Ring is the recorded division of topic names among vnodes. No configuration overrides it.
type Ring struct {
	Version uint64
	Vnodes  []Vnode // by id
}

// BrokerState says what is to become of a broker.
type BrokerState uint8

// The states of a broker. A draining one is about to restart and takes no new work; a decommissioning one gives everything away and
// is then removed. One excludes the other.
const (
	BrokerActive BrokerState = iota
	BrokerDraining
	BrokerDecommissioning
)

// String is the state in lower case.
func (s BrokerState) String() string {
	switch s {
	case BrokerActive:
		return "active"
	case BrokerDraining:
		return "draining"
	case BrokerDecommissioning:
		return "decommissioning"
	}
	return "unknown"
}

// Broker is what root knows of one broker. Its maps are shared: do not write to them.
type Broker struct {
	ID              storage.BrokerID
	Boot            storage.Boot // 0: admitted, not registered yet
	JournalGroup    uint64       // last durable journal group that it reported
	Nonce           metadata.Nonce
	Addresses       map[string]string // "api", "ops", "rpc", "raft" -> host:port
	Attributes      map[string]string // "zone" -> "a"
	AdvertisedLevel storage.Level

	State        BrokerState
	StateVersion uint64 // rises with every change of State: what SetBrokerState expects
	AdmitTime    storage.Time
	RegisterTime storage.Time // of this boot
	// Generation counts how often its Raft replicas were retired because it was away for too long.
	Generation uint32
	// ReadyBoot is the boot under which all its replicas had caught up; it may vote while that is its Boot.
	ReadyBoot storage.Boot

	stateNonce, admitNonce metadata.Nonce
}

// Ready reports whether the replicas of this boot of the broker have caught up once.
func (b Broker) Ready() bool { return b.Boot != 0 && b.ReadyBoot == b.Boot }

// State is the whole state at one index. It is immutable.
type State struct {
	Cluster    storage.ClusterID // zero: not founded
	FoundNonce metadata.Nonce
	Level      storage.Level // of the cluster
	Ring       Ring
	Brokers    []Broker           // by id, removed ones not included
	Removed    []storage.BrokerID // sorted: ids that are never taken again
	Policy     Policy             // "default"
}

// WasRemoved reports whether a broker of this id was part of the cluster and is so no more, for ever.
func (s *State) WasRemoved(id storage.BrokerID) bool {
	_, ok := slices.BinarySearch(s.Removed, id)
	return ok
}

// Founded reports whether the cluster exists.
func (s *State) Founded() bool { return !s.Cluster.IsZero() }

// Broker returns the broker of this id.
func (s *State) Broker(id storage.BrokerID) (Broker, bool) {
	i, ok := s.brokerIndex(id)
	if !ok {
		return Broker{}, false
	}
	return s.Brokers[i], true
}

func (s *State) brokerIndex(id storage.BrokerID) (int, bool) {
	return slices.BinarySearchFunc(s.Brokers, id, func(b Broker, id storage.BrokerID) int {
		switch {
		case b.ID < id:
			return -1
		case b.ID > id:
			return 1
		}
		return 0
	})
}

// Command is one of the command types of this package. Encode makes the bytes of a log entry of it.
type Command interface{ isCommand() }

// Found makes the cluster: its id, its level, and a ring of Vnodes equal arcs on Broker. Once, for ever: the same nonce again
// changes nothing, any other finds OutcomeFounded.
type Found struct {
	Cluster storage.ClusterID
	Vnodes  int
	Broker  storage.BrokerID
	Level   storage.Level
	Nonce   metadata.Nonce
	// Brokers is how many brokers the founding list names, 0 for one: the first replication factor is the lower of it and 3.
	Brokers int
}

// ConfirmVnode records that the vnode's group has applied its first command.
type ConfirmVnode struct{ Vnode uint32 }

// RegisterBroker announces a start of a broker. Accepted only with a boot above the registered one and a journal that reaches the
// recorded group; else OutcomeCloneOrRollback: the disk was cloned or rolled back. The same nonce again answers the recorded
// success.
type RegisterBroker struct {
	ID              storage.BrokerID
	Boot            storage.Boot
	JournalGroup    uint64
	Nonce           metadata.Nonce
	Addresses       map[string]string
	Attributes      map[string]string
	AdvertisedLevel storage.Level
	Time            storage.Time
}

// RefreshBroker raises the recorded journal group of a running broker. Under another boot than the registered one it answers
// OutcomeStaleBoot: another process runs with this identity.
type RefreshBroker struct {
	ID           storage.BrokerID
	Boot         storage.Boot
	JournalGroup uint64
}

// SetLevel raises the cluster's level, if it is Expect and every registered broker has advertised To.
type SetLevel struct{ Expect, To storage.Level }

// AdmitBroker lets a broker in, so that its Raft replicas may be added. One that is known already, under whatever nonce, changes
// nothing and is a success; a removed one is refused with OutcomeRemoved for ever; one that does not understand the cluster's level
// is a conflict.
type AdmitBroker struct {
	ID              storage.BrokerID
	Nonce           metadata.Nonce
	Addresses       map[string]string
	Attributes      map[string]string
	AdvertisedLevel storage.Level
	Time            storage.Time
}

// SetBrokerState changes a broker's state, if its state version is ExpectVersion. The same nonce again answers success while no
// later change was made. Draining and decommissioning exclude each other: the way from one to the other leads through active.
type SetBrokerState struct {
	ID            storage.BrokerID
	ExpectVersion uint64
	To            BrokerState
	Nonce         metadata.Nonce
}

// RemoveBroker takes a decommissioning broker out for ever. Its id is never admitted or registered again. The last broker stays.
type RemoveBroker struct{ ID storage.BrokerID }

// BrokerReady records that all replicas of the broker, of this generation, have caught up under this boot. For another boot than
// the registered one, or another generation, it changes nothing.
type BrokerReady struct {
	ID         storage.BrokerID
	Boot       storage.Boot
	Generation uint32
}

// RetireReplicas gives a broker that was away for too long a new generation of Raft replicas, if its generation is
// ExpectGeneration: those it has are taken out of their groups, and it joins anew when it comes back.
type RetireReplicas struct {
	ID               storage.BrokerID
	ExpectGeneration uint32
}

// UpdatePolicy changes what is set of the policy "default", if it is at ExpectVersion. The same nonce again answers success.
type UpdatePolicy struct {
	Nonce         metadata.Nonce
	ExpectVersion uint64
	Change        PolicyChange
}

func (*Found) isCommand()          {}
func (*ConfirmVnode) isCommand()   {}
func (*RegisterBroker) isCommand() {}
func (*RefreshBroker) isCommand()  {}
func (*SetLevel) isCommand()       {}
func (*AdmitBroker) isCommand()    {}
func (*SetBrokerState) isCommand() {}
func (*RemoveBroker) isCommand()   {}
func (*BrokerReady) isCommand()    {}
func (*RetireReplicas) isCommand() {}
func (*UpdatePolicy) isCommand()   {}

// Outcome is what became of a command.
type Outcome uint8

// The outcomes. The numbers stand in Raft results and never change.
const (
	OutcomeOK              Outcome = 1
	OutcomeNotFounded      Outcome = 2
	OutcomeFounded         Outcome = 3 // by someone else
	OutcomeCloneOrRollback Outcome = 4
	OutcomeUnknownBroker   Outcome = 5
	OutcomeStaleBoot       Outcome = 6
	OutcomeConflict        Outcome = 7
	OutcomeInvalid         Outcome = 8
	OutcomeLimit           Outcome = 9
	OutcomeRemoved         Outcome = 10 // the broker was removed; its id is never taken again
)

// Result is what a command answers: a function of the state and the command.
type Result struct {
	Outcome Outcome
	Already bool
	Detail  string
}
