package controlplane

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/services/controlplane/root"
	"github.com/malachilog/malachi/storage"
)

// routing is the recorded ring, ready to be searched. It is immutable; the replicas in it live on when it is replaced.
type routing struct {
	version uint64
	arcs    []route // by first hash; together they cover the ring
	vnodes  []*vnodeReplica
}

type route struct {
	arc   metadata.Arc
	vnode *vnodeReplica
}

// newRouting makes the routing of a state, keeping the replicas that there are.
func (c *ControlPlane) newRouting(st *root.State) *routing {
	old := c.routes.Load()
	rt := &routing{version: st.Ring.Version}
	for _, v := range st.Ring.Vnodes {
		var r *vnodeReplica
		if old != nil {
			if j := slices.IndexFunc(old.vnodes, func(o *vnodeReplica) bool { return o.vnode == v.ID }); j >= 0 {
				r = old.vnodes[j]
			}
		}
		if r == nil {
			r = &vnodeReplica{c: c, vnode: v.ID, shard: vnodeShard + uint64(v.ID), machine: metadata.New(c.deps.Level)}
			r.view.Store(r.machine.View())
		}
		rt.vnodes = append(rt.vnodes, r)
		for _, a := range v.Arcs {
			rt.arcs = append(rt.arcs, route{a, r})
		}
	}
	slices.SortFunc(rt.arcs, func(a, b route) int {
		if a.arc.First < b.arc.First {
			return -1
		}
		return 1
	})
	return rt
}

// find returns the vnode that owns a name, or nil before the ring is known. It does not allocate.
func (rt *routing) find(name string) *vnodeReplica {
	h := metadata.HashName(name)
	lo, hi := 0, len(rt.arcs)
	for lo < hi {
		mid := int(uint(lo+hi) >> 1)
		if rt.arcs[mid].arc.Last < h {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	if lo == len(rt.arcs) || !rt.arcs[lo].arc.Holds(h) {
		return nil
	}
	return rt.arcs[lo].vnode
}

func (rt *routing) vnode(v uint32) *vnodeReplica {
	for _, r := range rt.vnodes {
		if r.vnode == v {
			return r
		}
	}
	return nil
}

// VnodeFor returns the vnode that owns a topic's name by the recorded ring; false before the ring is known.
func (c *ControlPlane) VnodeFor(name string) (uint32, bool) {
	r := c.routes.Load().find(name)
	if r == nil {
		return 0, false
	}
	return r.vnode, true
}

// Vnodes are all vnodes of the recorded ring, by id.
func (c *ControlPlane) Vnodes() []uint32 {
	var out []uint32
	for _, r := range c.routes.Load().vnodes {
		out = append(out, r.vnode)
	}
	return out
}

// Leader reports whether this broker leads the vnode's group, as far as it knows: whoever acts on it must still have its commands
// answered. A change of leadership wakes every Watcher with All.
func (c *ControlPlane) Leader(vnode uint32) bool {
	r := c.routes.Load().vnode(vnode)
	return r != nil && r.leader.Load() == c.host.replica
}

// LeaderOf is the broker that leads a vnode's group, its coordinator, as far as this one knows; false while none is known.
func (c *ControlPlane) LeaderOf(vnode uint32) (storage.BrokerID, bool) {
	r := c.routes.Load().vnode(vnode)
	if r == nil {
		return 0, false
	}
	return c.brokerOf(r.leader.Load())
}

// brokerOf is whose replica this is, by what root has recorded.
func (c *ControlPlane) brokerOf(replica uint64) (storage.BrokerID, bool) {
	switch replica {
	case 0:
		return 0, false
	case c.host.replica:
		return c.id.Broker, true
	}
	st := c.root.state.Load()
	return findBroker(replica, func(b storage.BrokerID) bool {
		_, known := st.Broker(b)
		return known || st.WasRemoved(b)
	})
}

// VnodeOfTopic is the vnode that holds a topic, active or deleting, in what this broker has applied. False: not known here.
func (c *ControlPlane) VnodeOfTopic(uid storage.TopicUID) (uint32, bool) {
	for _, r := range c.routes.Load().vnodes {
		if r.view.Load().TopicByUID(uid) != nil {
			return r.vnode, true
		}
	}
	return 0, false
}

// CoordinatorOf is the broker that leads the vnode of a topic, as far as this one knows.
func (c *ControlPlane) CoordinatorOf(uid storage.TopicUID) (storage.BrokerID, bool) {
	vnode, ok := c.VnodeOfTopic(uid)
	if !ok {
		return 0, false
	}
	return c.LeaderOf(vnode)
}

func (c *ControlPlane) leaderChanged(shard, leader uint64) {
	if shard == rootShard {
		c.root.leader.Store(leader)
		c.groups.changed(shard)
		return
	}
	if r := c.routes.Load().vnode(uint32(shard - vnodeShard)); r != nil {
		r.leader.Store(leader)
		c.groups.changed(shard)
		c.changes.publishAll()
	}
}

// owner returns the replica that serves a name. storage.ErrUnavailable before Register.
func (c *ControlPlane) owner(name string) (*vnodeReplica, error) {
	r := c.routes.Load().find(name)
	if r == nil || !r.started.Load() {
		return nil, fmt.Errorf("the vnode of this name is not running here: %w", storage.ErrUnavailable)
	}
	return r, nil
}

// readRoot is a linearizable read of root.
func (c *ControlPlane) readRoot(ctx context.Context) (*root.State, error) {
	v, err := c.read(ctx, rootShard)
	if err != nil {
		return nil, err
	}
	return v.(*root.State), nil
}

// readVnode is a linearizable read of a vnode.
func (c *ControlPlane) readVnode(ctx context.Context, r *vnodeReplica) (*metadata.View, error) {
	v, err := c.read(ctx, r.shard)
	if err != nil {
		return nil, err
	}
	return v.(*metadata.View), nil
}

func (c *ControlPlane) read(ctx context.Context, shard uint64) (any, error) {
	if err := c.failed(); err != nil {
		return nil, err
	}
	v, err := c.host.read(ctx, shard)
	if err != nil {
		if stopped := c.failed(); stopped != nil {
			return nil, stopped
		}
		return nil, err
	}
	return v, nil
}

func (c *ControlPlane) propose(ctx context.Context, shard uint64, cmd []byte) ([]byte, error) {
	if err := c.failed(); err != nil {
		return nil, err
	}
	b, err := c.host.propose(ctx, shard, cmd)
	stopped := c.failed()
	switch {
	case err == nil && len(b) > 0, stopped == nil:
		return b, err
	case errors.Is(err, storage.ErrOutcomeUnknown) && !errors.Is(err, stopped):
		return nil, fmt.Errorf("%w: %w", err, stopped)
	case errors.Is(err, storage.ErrOutcomeUnknown):
		return nil, err
	}
	return nil, stopped // a stopped machine answers nothing
}

func (c *ControlPlane) proposeRoot(ctx context.Context, cmd root.Command) (root.Result, error) {
	b, err := root.Encode(cmd)
	if err != nil {
		return root.Result{}, err
	}
	if b, err = c.propose(ctx, rootShard, b); err != nil {
		return root.Result{}, err
	}
	return root.DecodeResult(b)
}

func (c *ControlPlane) proposeVnode(ctx context.Context, r *vnodeReplica, cmd metadata.Command, rng storage.RangeID) (metadata.Result, error) {
	b, err := metadata.Encode(cmd)
	if err != nil {
		return metadata.Result{}, err
	}
	if b, err = c.propose(ctx, r.shard, b); err != nil {
		return metadata.Result{}, err
	}
	return metadata.DecodeResult(b, rng)
}
