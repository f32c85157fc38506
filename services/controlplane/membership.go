package controlplane

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/lni/dragonboat/v4"
	"golang.org/x/sync/errgroup"

	"github.com/malachilog/malachi/services/controlplane/root"
	"github.com/malachilog/malachi/storage"
)

// ErrRetired: this broker was away for so long that its Raft replicas were given to others. The process must end and start again,
// asking a member for admission first, which answers the generation to join with.
var ErrRetired = errors.New("the broker was away too long and must join again")

// signal wakes whoever waits for something to change.
type signal struct {
	mu      sync.Mutex
	waiters map[chan struct{}]struct{}
}

// wait returns a channel that has a token after each fire until done is called.
func (s *signal) wait() (ch chan struct{}, done func()) {
	ch = make(chan struct{}, 1)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.waiters == nil {
		s.waiters = map[chan struct{}]struct{}{}
	}
	s.waiters[ch] = struct{}{}
	return ch, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.waiters, ch)
	}
}

func (s *signal) fire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for ch := range s.waiters {
		poke(ch)
	}
}

// groups is what the membership loop knows of the groups. Its lock is never held over I/O.
type groups struct {
	wake signal

	mu    sync.Mutex
	known map[uint64]*groupView
}

type groupView struct {
	dirty   bool // members must be asked for
	members members
	waits   string
	since   time.Time // of the last change of members or leader
}

// changed notes that a group may have other members or another leader.
func (g *groups) changed(shard uint64) {
	g.mu.Lock()
	v := g.at(shard)
	v.dirty, v.since = true, time.Now()
	g.mu.Unlock()
	g.wake.fire()
}

// at is the view of a group, made where there was none. The caller holds the lock.
func (g *groups) at(shard uint64) *groupView {
	if g.known == nil {
		g.known = map[uint64]*groupView{}
	}
	if g.known[shard] == nil {
		g.known[shard] = &groupView{}
	}
	return g.known[shard]
}

// view is what is known of a group; false: its members must be asked for first.
func (g *groups) view(shard uint64) (groupView, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	v := g.known[shard]
	if v == nil {
		return groupView{}, false
	}
	return *v, !v.dirty
}

// asking notes that the members are about to be asked for: a change from here on makes them dirty again.
func (g *groups) asking(shard uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.at(shard).dirty = false
}

func (g *groups) update(shard uint64, f func(*groupView)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	f(g.at(shard))
}

// isVoter reports whether a replica votes in some group, as far as is known.
func (g *groups) isVoter(replica uint64) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, v := range g.known {
		if slices.Contains(v.members.voters, replica) {
			return true
		}
	}
	return false
}

// stepPause is how long the loop waits after a step that failed, and how often it looks without being woken.
const (
	stepPause = 100 * time.Millisecond
	lookEvery = time.Second
)

// keepMembers is the membership loop: for each group that this broker leads it makes one change after the other until all is as it
// should be. It is level-triggered: every look begins from what is recorded and seen.
func (c *ControlPlane) keepMembers(ctx context.Context) error {
	rootChanged, done := c.roots.wait()
	defer done()
	woken, done := c.groups.wake.wait()
	defer done()
	t := time.NewTimer(0)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-c.stopped:
			return nil
		case <-rootChanged:
		case <-woken:
		case <-t.C:
		}
		again := c.lookAtGroups(ctx)
		wait := lookEvery
		if again {
			wait = stepPause
		}
		t.Reset(wait)
	}
}

// lookAtGroups makes the next step of each group, several groups at a time. True: something is to be tried again soon.
func (c *ControlPlane) lookAtGroups(ctx context.Context) (again bool) {
	if c.boot.Load() == 0 || c.failed() != nil {
		return false
	}
	var retry sync.Map
	var g errgroup.Group
	g.SetLimit(4)
	for _, r := range c.replicas() {
		g.Go(func() error {
			if !c.lookAtGroup(ctx, r) {
				retry.Store(r.shard, true)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return true
	}
	retry.Range(func(any, any) bool { again = true; return false })
	if c.root.leader.Load() == c.host.replica {
		again = !c.retireAbsent(ctx) || again
	}
	return again
}

// replica is a group as the loop sees it.
type replica struct {
	shard   uint64
	vnode   int // -1: root
	leader  uint64
	applied uint64
}

// replicas are the groups that run here: root, then the vnodes.
func (c *ControlPlane) replicas() []replica {
	var out []replica
	if c.root.started.Load() {
		out = append(out, replica{rootShard, -1, c.root.leader.Load(), c.root.applied.Load()})
	}
	for _, r := range c.routes.Load().vnodes {
		if r.started.Load() {
			out = append(out, replica{r.shard, int(r.vnode), r.leader.Load(), r.applied.Load()})
		}
	}
	return out
}

// lookAtGroup brings what is known of a group up to date and, where this broker leads it, makes steps until there is none left.
// False: it did not get that far.
func (c *ControlPlane) lookAtGroup(ctx context.Context, r replica) bool {
	for ctx.Err() == nil {
		v, fresh := c.groups.view(r.shard)
		if !fresh {
			if r.leader == 0 {
				return true // its next leader wakes us
			}
			c.groups.asking(r.shard)
			m, err := c.host.membership(ctx, r.shard)
			if err != nil {
				c.groups.update(r.shard, func(v *groupView) { v.dirty, v.waits = true, "a quorum of the group" })
				return false
			}
			v.members = membersOf(m)
			c.groups.update(r.shard, func(to *groupView) { to.members = v.members })
		}
		if r.leader != c.host.replica {
			c.groups.update(r.shard, func(v *groupView) { v.waits = "" })
			return true
		}
		ch, waits := nextChange(r.shard, v.members, c.root.state.Load(), c.sight())
		c.groups.update(r.shard, func(v *groupView) { v.waits = waits })
		if ch.kind == noChange {
			if ch = c.balance(r.shard, v, waits); ch.kind == noChange {
				return true
			}
		}
		if err := c.changeMembers(ctx, r.shard, v.members.version, ch); err != nil {
			c.log.Debug("a change of raft members failed", "group", r.shard, "change", ch.kind.String(), "broker", ch.broker, "err", err)
			c.groups.update(r.shard, func(v *groupView) {
				v.dirty = true
				v.waits = fmt.Sprintf("an answer: %s broker %s", ch.kind, ch.broker)
			})
			return false
		}
		c.log.Info("raft members changed", "group", r.shard, "change", ch.kind.String(), "broker", ch.broker)
		if ch.kind == transfer {
			return true // the new leader goes on
		}
		c.groups.update(r.shard, func(v *groupView) { v.dirty = true })
	}
	return true
}

// balance moves the leadership of a group that has been left in peace for a while to the voter that should have it.
func (c *ControlPlane) balance(shard uint64, v groupView, waits string) change {
	if waits != "" || time.Since(v.since) < c.cfg.BalanceAfter {
		return change{}
	}
	to, ok := preferredLeader(shard, v.members, c.root.state.Load(), c.sight())
	if !ok || to.replica == c.host.replica {
		return change{}
	}
	c.groups.update(shard, func(v *groupView) { v.since = time.Now() }) // whether it works or not: once in a while
	return change{transfer, to.broker.ID, to.replica}
}

func (c *ControlPlane) changeMembers(ctx context.Context, shard, version uint64, ch change) error {
	if ch.kind == promote && c.deps.Probe != nil {
		asking, cancel := context.WithTimeout(ctx, memberAttempt)
		defer cancel()
		if err := c.deps.Probe(asking, ch.broker); err != nil {
			return fmt.Errorf("ask broker %s: %w", ch.broker, err)
		}
	}
	return c.host.changeMembers(ctx, shard, version, ch)
}

func (c *ControlPlane) sight() sight {
	return sight{self: c.host.replica, alive: c.alive, absent: c.absent, replaceAfter: c.cfg.ReplaceAfter, choose: c.deps.ChooseVoters}
}

// absent is for how long this process has missed a broker: after a start of the whole cluster nobody is late yet, however long it
// was down.
func (c *ControlPlane) absent(b storage.BrokerID) time.Duration {
	if b == c.id.Broker {
		return 0
	}
	return min(c.deps.Absent(b), time.Since(c.opened))
}

func (c *ControlPlane) alive(b storage.BrokerID) bool { return b == c.id.Broker || c.deps.Alive(b) }

func membersOf(m *dragonboat.Membership) members {
	return members{version: m.ConfigChangeID, voters: slices.Sorted(maps.Keys(m.Nodes)),
		nonVoting: slices.Sorted(maps.Keys(m.NonVotings)), removed: m.Removed}
}

// retireAbsent gives brokers that were away for too long a new generation of replicas. Only root's leader does so. False: to be
// tried again.
func (c *ControlPlane) retireAbsent(ctx context.Context) bool {
	b, found := toRetire(c.root.state.Load(), c.sight(), c.groups.isVoter)
	if !found {
		return true
	}
	c.log.Warn("a broker was away for too long: others take over its part of the metadata", "broker", b.ID, "away", c.deps.Absent(b.ID))
	res, err := c.proposeRoot(ctx, &root.RetireReplicas{ID: b.ID, ExpectGeneration: b.Generation})
	if err == nil {
		err = rootError(res)
	}
	if err != nil {
		c.log.Debug("a broker could not be retired", "broker", b.ID, "err", err)
	}
	return err == nil
}

// replicaDeleted is told when a replica of this broker applies its own removal.
func (c *ControlPlane) replicaDeleted(shard, replica uint64) {
	if replica != c.host.replica {
		return
	}
	st := c.root.state.Load()
	if st.WasRemoved(c.id.Broker) {
		c.stop(fmt.Errorf("broker %s was removed from the cluster: %w", c.id.Broker, storage.ErrFolderRefused))
		return
	}
	c.stop(fmt.Errorf("its replica of raft group %d was removed: %w", shard, ErrRetired))
}

// recordedAddress is where a broker listened for Raft when it registered or was admitted.
func (c *ControlPlane) recordedAddress(b storage.BrokerID) (string, bool) {
	rec, ok := c.root.state.Load().Broker(b)
	if !ok || rec.Addresses["raft"] == "" {
		return "", false
	}
	return rec.Addresses["raft"], true
}
