package controlplane

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/services/controlplane/root"
	"github.com/malachilog/malachi/storage"
)

// State is root's state as last applied here: brokers, policy, ring, level. It is immutable and shared: do not write to it.
func (c *ControlPlane) State() *root.State { return c.root.state.Load() }

// StateChanged returns a channel that has a token after each change of State, until done is called.
func (c *ControlPlane) StateChanged() (changed <-chan struct{}, done func()) { return c.roots.wait() }

// Policy is the policy "default" as last applied here. Its Version is 0 before the cluster is known.
func (c *ControlPlane) Policy() root.Policy { return c.root.state.Load().Policy }

// PolicyUpdate is what UpdatePolicy changes; what is nil stays.
type PolicyUpdate struct {
	ExpectVersion uint64 // 0: whichever is there now
	root.PolicyChange
}

// UpdatePolicy changes the policy "default" and returns it. It is durable then. Errors: storage.ErrInvalid (with every fault),
// storage.ErrConflict (ExpectVersion was not met), storage.ErrUnavailable, storage.ErrOutcomeUnknown.
func (c *ControlPlane) UpdatePolicy(ctx context.Context, u PolicyUpdate) (root.Policy, error) {
	p, err := c.updatePolicy(ctx, u)
	if err != nil {
		return root.Policy{}, fmt.Errorf("update policy default: %w", err)
	}
	return p, nil
}

func (c *ControlPlane) updatePolicy(ctx context.Context, u PolicyUpdate) (root.Policy, error) {
	if u.PolicyChange == (root.PolicyChange{}) {
		return root.Policy{}, fmt.Errorf("nothing to change: %w", storage.ErrInvalid)
	}
	nonce, err := c.NewNonce()
	if err != nil {
		return root.Policy{}, err
	}
	ctx, cancel := c.host.bounded(ctx)
	defer cancel()
	for {
		// "Any version" is still a compare-and-set on the version that is there now: a proposal that is applied late must not undo a
		// newer change.
		cmd := &root.UpdatePolicy{Nonce: nonce, ExpectVersion: u.ExpectVersion, Change: u.PolicyChange}
		if u.ExpectVersion == 0 {
			st, err := c.readRoot(ctx)
			if err != nil {
				return root.Policy{}, err
			}
			cmd.ExpectVersion = st.Policy.Version
		}
		res, err := c.proposeRoot(ctx, cmd)
		if err == nil {
			err = rootError(res)
		}
		if errors.Is(err, storage.ErrConflict) && u.ExpectVersion == 0 && ctx.Err() == nil {
			continue
		}
		if err != nil {
			return root.Policy{}, err
		}
		return c.Policy(), nil // the replica that answered is this one, so its state holds the effect
	}
}

// AdmitRequest is a broker that asks to join, as it describes itself.
type AdmitRequest struct {
	Broker     storage.BrokerID
	Nonce      metadata.Nonce    // zero: drawn here
	Addresses  map[string]string // "raft" is required
	Attributes map[string]string
	Level      storage.Level
}

// Admission is what a broker needs to open its control plane as a member.
type Admission struct {
	Cluster storage.ClusterID
	Level   storage.Level
	// Generation goes into Identity.Generation on every start that could ask.
	Generation uint32
	// RaftAddresses are those of the other brokers, as they registered: a first address book.
	RaftAddresses map[storage.BrokerID]string
}

// Admit lets a broker into the cluster and adds its replica of root's group. A broker asks before its first start, and, because it
// may have been retired meanwhile, before each later one if anybody answers. Asking again changes nothing. It may be called on any
// member. Errors: storage.ErrFolderRefused (the broker was removed), storage.ErrConflict (it does not understand the cluster's level),
// storage.ErrInvalid, storage.ErrTooLarge, storage.ErrUnavailable, storage.ErrOutcomeUnknown.
func (c *ControlPlane) Admit(ctx context.Context, req AdmitRequest) (Admission, error) {
	a, err := c.admit(ctx, req)
	if err != nil {
		return Admission{}, fmt.Errorf("admit broker %s: %w", req.Broker, err)
	}
	return a, nil
}

func (c *ControlPlane) admit(ctx context.Context, req AdmitRequest) (Admission, error) {
	if req.Addresses["raft"] == "" {
		return Admission{}, fmt.Errorf("it names no raft address: %w", storage.ErrInvalid)
	}
	if err := c.drawNonce(&req.Nonce); err != nil {
		return Admission{}, err
	}
	res, err := c.proposeRoot(ctx, &root.AdmitBroker{ID: req.Broker, Nonce: req.Nonce, Addresses: req.Addresses,
		Attributes: req.Attributes, AdvertisedLevel: req.Level, Time: c.now()})
	if err == nil {
		err = rootError(res)
	}
	if err != nil {
		return Admission{}, err
	}
	st := c.root.state.Load()
	b, ok := st.Broker(req.Broker)
	if !ok {
		return Admission{}, fmt.Errorf("it was removed meanwhile: %w", storage.ErrFolderRefused)
	}
	if err := c.addToRoot(ctx, b); err != nil {
		return Admission{}, err
	}
	a := Admission{Cluster: st.Cluster, Level: st.Level, Generation: b.Generation, RaftAddresses: map[storage.BrokerID]string{}}
	for _, o := range st.Brokers {
		if address := o.Addresses["raft"]; o.ID != req.Broker && address != "" {
			a.RaftAddresses[o.ID] = address
		}
	}
	return a, nil
}

// addToRoot adds a broker's replica to root's group unless it is in it. Root's leader would do so as well; this way the broker may
// start at once.
func (c *ControlPlane) addToRoot(ctx context.Context, b root.Broker) error {
	ctx, cancel := c.host.bounded(ctx)
	defer cancel()
	r := replicaOf(b.ID, b.Generation)
	for {
		err := c.failed()
		if err != nil {
			return err
		}
		m, err := c.host.membership(ctx, rootShard)
		if err == nil {
			_, votes := m.Nodes[r]
			_, follows := m.NonVotings[r]
			if votes || follows {
				return nil
			}
			err = c.host.changeMembers(ctx, rootShard, m.ConfigChangeID, change{addNonVoting, b.ID, r})
		}
		if err == nil {
			return nil
		}
		if !pause(ctx, err) {
			return fmt.Errorf("add its replica of root: %w: %w", storage.ErrUnavailable, err)
		}
	}
}

// SetBrokerState changes what is to become of a broker. Setting the state that it has is a success. Errors: storage.ErrConflict
// (draining and decommissioning exclude each other), storage.ErrFolderRefused (no such broker, or removed), storage.ErrUnavailable,
// storage.ErrOutcomeUnknown.
func (c *ControlPlane) SetBrokerState(ctx context.Context, id storage.BrokerID, state root.BrokerState) error {
	if err := c.setBrokerState(ctx, id, state); err != nil {
		return fmt.Errorf("make broker %s %s: %w", id, state, err)
	}
	return nil
}

func (c *ControlPlane) setBrokerState(ctx context.Context, id storage.BrokerID, state root.BrokerState) error {
	nonce, err := c.NewNonce()
	if err != nil {
		return err
	}
	st, err := c.readRoot(ctx)
	if err != nil {
		return err
	}
	b, ok := st.Broker(id)
	if ok && b.State == state {
		return nil
	}
	res, err := c.proposeRoot(ctx, &root.SetBrokerState{ID: id, ExpectVersion: b.StateVersion, To: state, Nonce: nonce})
	if err != nil {
		return err
	}
	return rootError(res)
}

// RemoveBroker takes a decommissioning broker out of the cluster for ever: its replicas leave their groups as soon as these keep
// their quorum without them, and its id is never taken again. Errors: storage.ErrConflict (it is not decommissioning, or the last),
// storage.ErrFolderRefused (no such broker), storage.ErrUnavailable, storage.ErrOutcomeUnknown.
func (c *ControlPlane) RemoveBroker(ctx context.Context, id storage.BrokerID) error {
	res, err := c.proposeRoot(ctx, &root.RemoveBroker{ID: id})
	if err == nil {
		err = rootError(res)
	}
	if err != nil {
		return fmt.Errorf("remove broker %s: %w", id, err)
	}
	return nil
}

// RaiseLevel raises the cluster's level to to, which every broker, dead ones included, must have advertised. At that level already
// is a success. Errors: storage.ErrConflict (some broker has not), storage.ErrInvalid, storage.ErrUnavailable,
// storage.ErrOutcomeUnknown.
func (c *ControlPlane) RaiseLevel(ctx context.Context, to storage.Level) error {
	st, err := c.readRoot(ctx)
	if err == nil {
		var res root.Result
		if res, err = c.proposeRoot(ctx, &root.SetLevel{Expect: st.Level, To: to}); err == nil {
			err = rootError(res)
		}
	}
	if err != nil {
		return fmt.Errorf("raise the level to %d: %w", to, err)
	}
	return nil
}

// HandOver gives the leadership of every group that this broker leads to another voter that seems to run, and returns when each is
// led by another one, or ctx ends. Before Close it spares the others an election. A group without another voter stays as it is.
func (c *ControlPlane) HandOver(ctx context.Context) error {
	ctx, cancel := c.host.bounded(ctx)
	defer cancel()
	woken, done := c.groups.wake.wait()
	defer done()
	t := time.NewTicker(c.cfg.ElectionTimeout)
	defer t.Stop()
	for {
		left := 0
		for _, r := range c.replicas() {
			if r.leader == c.host.replica && c.handOver(ctx, r.shard) {
				left++
			}
		}
		if left == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("hand over: %d groups are still led here: %w", left, ctx.Err())
		case <-c.closed:
			return fmt.Errorf("hand over: %w", storage.ErrClosed)
		case <-woken:
		case <-t.C:
		}
	}
}

// handOver asks for the transfer of one group. False: there is nobody to take it.
func (c *ControlPlane) handOver(ctx context.Context, shard uint64) bool {
	v, fresh := c.groups.view(shard)
	if !fresh {
		m, err := c.host.membership(ctx, shard)
		if err != nil {
			return true
		}
		v.members = membersOf(m)
	}
	// To the one that runs longest: to one that came back a moment ago the others may not have a connection yet.
	var to member
	st := c.root.state.Load()
	for _, replica := range v.members.voters {
		m := describe(st, c.sight(), replica)
		if replica != c.host.replica && m.alive && m.broker.State != root.BrokerDraining &&
			(to.replica == 0 || m.broker.RegisterTime < to.broker.RegisterTime) {
			to = m
		}
	}
	if to.replica == 0 {
		return false
	}
	if err := c.host.changeMembers(ctx, shard, 0, change{transfer, to.broker.ID, to.replica}); err != nil {
		c.log.Debug("a leadership could not be handed over", "group", shard, "err", err)
	}
	return true
}

// GroupStatus is one Raft group as this broker sees it.
type GroupStatus struct {
	Group     uint64
	Vnode     int              // -1: root
	Leader    storage.BrokerID // 0: none is known
	Voters    []storage.BrokerID
	NonVoting []storage.BrokerID
	Applied   uint64 // index of the last entry that is applied here
	// Waits is what the next change of its members waits for, where this broker leads it and one is due.
	Waits string
}

// Groups are root's group and then those of the vnodes, from memory.
func (c *ControlPlane) Groups() []GroupStatus {
	var out []GroupStatus
	for _, r := range c.replicas() {
		v, _ := c.groups.view(r.shard)
		g := GroupStatus{Group: r.shard, Vnode: r.vnode, Applied: r.applied, Waits: v.waits}
		g.Leader, _ = c.brokerOf(r.leader)
		g.Voters, g.NonVoting = c.brokersOf(v.members.voters), c.brokersOf(v.members.nonVoting)
		out = append(out, g)
	}
	return out
}

func (c *ControlPlane) brokersOf(replicas []uint64) []storage.BrokerID {
	set := map[storage.BrokerID]struct{}{}
	for _, r := range replicas {
		if b, ok := c.brokerOf(r); ok {
			set[b] = struct{}{}
		}
	}
	return slices.Sorted(maps.Keys(set))
}
