package controlplane

import (
	"fmt"
	"sync"

	"github.com/lni/dragonboat/v4/config"
	"github.com/lni/dragonboat/v4/raftio"

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

type registryFactory struct {
	self    storage.BrokerID
	address string
	others  Addresses
}

// Create makes the registry of one host.
func (f *registryFactory) Create(string, uint64, config.TargetValidator) (raftio.INodeRegistry, error) {
	return &registry{registryFactory: *f, brokers: map[raftio.NodeInfo]storage.BrokerID{}}, nil
}

// registry finds where the members of Raft groups listen. A broker's address is asked for each time, so it may change at any time.
type registry struct {
	registryFactory

	mu      sync.RWMutex
	brokers map[raftio.NodeInfo]storage.BrokerID
}

var _ raftio.INodeRegistry = (*registry)(nil)

// Close does nothing.
func (r *registry) Close() error { return nil }

// Add notes which broker holds a replica.
func (r *registry) Add(shard, replica uint64, target string) {
	b, ok := brokerOf(target)
	if !ok {
		return // resolving it will fail, which says more than a panic here
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.brokers[raftio.GetNodeInfo(shard, replica)] = b
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

// Resolve returns a replica's address and the key under which its connection is shared.
func (r *registry) Resolve(shard, replica uint64) (string, string, error) {
	r.mu.RLock()
	b, ok := r.brokers[raftio.GetNodeInfo(shard, replica)]
	r.mu.RUnlock()
	switch {
	case !ok:
		return "", "", fmt.Errorf("raft group %d has no known replica %d: %w", shard, replica, storage.ErrUnavailable)
	case b == r.self:
		return r.address, r.address, nil
	case r.others == nil:
		return "", "", fmt.Errorf("no address of broker %s is known: %w", b, storage.ErrUnavailable)
	}
	address, ok := r.others.RaftAddress(b)
	if !ok {
		return "", "", fmt.Errorf("no address of broker %s is known: %w", b, storage.ErrUnavailable)
	}
	return address, address, nil
}
