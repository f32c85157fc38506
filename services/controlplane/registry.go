package controlplane

import (
	"fmt"
	"sync"

	"github.com/lni/dragonboat/v4/config"
	"github.com/lni/dragonboat/v4/raftio"

	"github.com/malachilog/malachi/services/controlplane/root"
	"github.com/malachilog/malachi/storage"
)

// nodeHostID is a broker's name in Raft memberships: its id in the form of a UUID, which the library insists on. Members are
// recorded under it and never under an address.
func nodeHostID(b storage.BrokerID) string {
	return fmt.Sprintf("6d616c61-6368-8000-%04x-%012x", uint64(b)>>48, uint64(b)&(1<<48-1))
}

// brokerOf reads what nodeHostID wrote.
func brokerOf(nhid string) (storage.BrokerID, bool) {
	var high, low uint64
	if _, err := fmt.Sscanf(nhid, "6d616c61-6368-8000-%04x-%012x", &high, &low); err != nil {
		return 0, false
	}
	b := storage.BrokerID(high<<48 | low)
	return b, nodeHostID(b) == nhid
}

// The replica ids of a broker in every group: its id plus the generation of its replicas. Ids are random in 64 bits, so those of two
// brokers never lie within a generation's reach of each other.
func replicaOf(b storage.BrokerID, generation uint32) uint64 { return uint64(b) + uint64(generation) }

// findBroker returns the broker whose replica this is, of whatever generation, if known says which ids there are.
func findBroker(replica uint64, known func(storage.BrokerID) bool) (storage.BrokerID, bool) {
	for g := range uint64(root.MaxGeneration + 1) {
		if b := storage.BrokerID(replica - g); b != 0 && known(b) {
			return b, true
		}
	}
	return 0, false
}

type registryFactory struct {
	self    storage.BrokerID
	replica uint64
	address string
	others  Addresses
	// recorded is the address that a broker registered.
	recorded func(storage.BrokerID) (string, bool)
}

// Create makes the registry of one host.
func (f *registryFactory) Create(string, uint64, config.TargetValidator) (raftio.INodeRegistry, error) {
	return &registry{registryFactory: *f, brokers: map[raftio.NodeInfo]storage.BrokerID{}, heard: map[uint64]string{}}, nil
}

// registry finds where the members of Raft groups listen. A broker's address is asked for each time, so it may change at any time.
type registry struct {
	registryFactory

	mu      sync.RWMutex
	brokers map[raftio.NodeInfo]storage.BrokerID // as the groups record their members
	heard   map[uint64]string                    // replica id -> where it last spoke from
}

var _ raftio.INodeRegistry = (*registry)(nil)

// maxHeard bounds the addresses that were heard: one for each broker that may be.
const maxHeard = 2 * root.MaxBrokers

// Close does nothing.
func (r *registry) Close() error { return nil }

// Add notes which broker holds a replica, or, called by the transport, where one has spoken from.
func (r *registry) Add(shard, replica uint64, target string) {
	b, named := brokerOf(target)
	r.mu.RLock()
	known := !named && r.heard[replica] == target
	r.mu.RUnlock()
	if known {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case named:
		r.brokers[raftio.GetNodeInfo(shard, replica)] = b
	case len(r.heard) < maxHeard || r.heard[replica] != "":
		r.heard[replica] = target
	}
}

// Remove forgets a replica.
func (r *registry) Remove(shard, replica uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.brokers, raftio.GetNodeInfo(shard, replica))
}

// RemoveShard forgets all replicas of a group.
func (r *registry) RemoveShard(shard uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for k := range r.brokers {
		if k.ShardID == shard {
			delete(r.brokers, k)
		}
	}
}

// Resolve returns a replica's address and the key under which its connection is shared. A replica that no group has told of yet, as
// every one to a broker that joins, is found by its id.
func (r *registry) Resolve(shard, replica uint64) (string, string, error) {
	r.mu.RLock()
	b, ok := r.brokers[raftio.GetNodeInfo(shard, replica)]
	heard := r.heard[replica]
	r.mu.RUnlock()
	if replica == r.replica || ok && b == r.self {
		return r.address, r.address, nil
	}
	if !ok {
		b, ok = findBroker(replica, func(b storage.BrokerID) bool { _, found := r.addressOf(b); return found })
	}
	if ok {
		if address, found := r.addressOf(b); found {
			return address, address, nil
		}
	}
	if heard != "" {
		return heard, heard, nil
	}
	if ok && r.recorded != nil {
		if address, found := r.recorded(b); found {
			return address, address, nil
		}
	}
	return "", "", fmt.Errorf("no address of replica %016x of raft group %d is known: %w", replica, shard, storage.ErrUnavailable)
}

func (r *registry) addressOf(b storage.BrokerID) (string, bool) {
	if r.others == nil {
		return "", false
	}
	return r.others.RaftAddress(b)
}
