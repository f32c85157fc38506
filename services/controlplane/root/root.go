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
)

// Vnode is one shard of the metadata: the arcs of the ring that it owns and the brokers on which its group was started.
type Vnode struct {
	ID      uint32
	Arcs    []metadata.Arc
	Members []storage.BrokerID
	// Confirmed: the group has applied its first command. Its replicas are never started from nothing again.
	Confirmed bool
}

// Ring is the recorded division of topic names among vnodes. No configuration overrides it.
type Ring struct {
	Version uint64
	Vnodes  []Vnode // by id
}

// Broker is what root knows of one broker.
type Broker struct {
	ID              storage.BrokerID
	Boot            storage.Boot
	JournalGroup    uint64 // last durable journal group that it reported
	Nonce           metadata.Nonce
	Addresses       map[string]string // "api", "ops", "rpc", "raft" -> host:port
	AdvertisedLevel storage.Level
}

// State is the whole state at one index. It is immutable.
type State struct {
	Cluster    storage.ClusterID // zero: not founded
	FoundNonce metadata.Nonce
	Level      storage.Level // of the cluster
	Ring       Ring
	Brokers    []Broker // by id
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
	AdvertisedLevel storage.Level
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

func (*Found) isCommand()          {}
func (*ConfirmVnode) isCommand()   {}
func (*RegisterBroker) isCommand() {}
func (*RefreshBroker) isCommand()  {}
func (*SetLevel) isCommand()       {}

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
)

// Result is what a command answers: a function of the state and the command.
type Result struct {
	Outcome Outcome
	Already bool
	Detail  string
}
