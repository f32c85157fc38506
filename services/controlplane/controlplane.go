package controlplane

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/services/controlplane/root"
	"github.com/malachilog/malachi/storage"
)

// ControlPlane is one broker's part in the cluster's metadata. All methods are safe for concurrent use.
type ControlPlane struct {
	cfg  Config
	id   Identity
	deps Deps
	log  *slog.Logger
	host *host

	root   *rootReplica
	routes atomic.Pointer[routing] // from the recorded ring; replaced when it changes
	boot   atomic.Uint64           // 0: not registered
	opened time.Time
	start  metadata.Nonce // of this start of the process: a repeated Register is the same intent

	changes watchers
	roots   signal // a token after each change of root's state
	groups  groups // what the membership loop knows

	stopOnce sync.Once
	stopped  chan struct{} // closed when a replica has stopped; then stopErr is set
	stopErr  error

	closeOnce sync.Once
	closed    chan struct{}
}

// Open starts the Raft host and root's own replica, and founds the cluster if id.Founding and there is none. It returns when root
// answers. No vnode replica runs until Register.
//
// Errors: storage.ErrNewerFormat (a higher level was met here before: nothing was changed), storage.ErrFolderRefused (in use, of
// another broker or cluster, or without the root group that it must have), storage.ErrInvalid (configuration),
// storage.ErrUnavailable (root has no quorum).
func Open(ctx context.Context, cfg Config, id Identity, deps Deps) (*ControlPlane, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("open control plane: %w", err)
	}
	if id.Broker == 0 || id.Cluster.IsZero() || id.Founding && id.Joining {
		return nil, fmt.Errorf("open control plane: no broker or cluster id, or both founding and joining: %w", storage.ErrInvalid)
	}
	c := &ControlPlane{cfg: cfg.withDefaults(), id: id, deps: deps.withDefaults(), opened: time.Now(),
		stopped: make(chan struct{}), closed: make(chan struct{})}
	c.log = c.deps.Logger
	c.root = &rootReplica{c: c, machine: root.New(c.deps.Level)}
	c.root.publish()
	c.routes.Store(&routing{})
	var err error
	if c.start, err = c.NewNonce(); err != nil {
		return nil, fmt.Errorf("open control plane: %w", err)
	}
	// First of all, and without writing a byte: is this folder from the future, or not ours?
	fresh, err := inspectFolder(c.cfg.Dir, id, c.deps.Level)
	if err != nil {
		return nil, fmt.Errorf("open control plane: %w", err)
	}
	if fresh && !id.Founding && !id.Joining {
		return nil, fmt.Errorf("open control plane: %s holds no metadata of broker %s, which has been part of a cluster before: %w",
			c.cfg.Dir, id.Broker, storage.ErrFolderRefused)
	}
	ev := events{leader: c.leaderChanged, members: c.groups.changed, deleted: c.replicaDeleted, recorded: c.recordedAddress}
	if c.host, err = openHost(c.cfg, id, c.deps, ev); err != nil {
		return nil, fmt.Errorf("open control plane: %w", err)
	}
	if err := c.openRoot(ctx); err != nil {
		c.host.close()
		return nil, fmt.Errorf("open control plane: %w", err)
	}
	return c, nil
}

func (d Deps) withDefaults() Deps {
	if d.Logger == nil {
		d.Logger = slog.New(slog.DiscardHandler)
	}
	if d.Now == nil {
		d.Now = time.Now
	}
	if d.Rand == nil {
		d.Rand = rand.Reader
	}
	if d.Level == 0 {
		d.Level = storage.CurrentLevel
	}
	if d.Alive == nil {
		d.Alive = func(storage.BrokerID) bool { return true }
	}
	if d.Absent == nil {
		d.Absent = func(storage.BrokerID) time.Duration { return 0 }
	}
	if d.ChooseVoters == nil {
		d.ChooseVoters = chooseVoters
	}
	return d
}

// openRoot starts root's replica and founds the cluster where that is due.
func (c *ControlPlane) openRoot(ctx context.Context) error {
	if err := c.host.start(rootShard, c.id.Founding, c.id.Founding, c.root.create); err != nil {
		return fmt.Errorf("start root: %w", err)
	}
	c.root.started.Store(true)
	st, err := c.awaitRoot(ctx)
	if err != nil {
		return fmt.Errorf("read root: %w", err)
	}
	if !st.Founded() {
		if st, err = c.found(ctx); err != nil {
			return err
		}
	}
	if st.Cluster != c.id.Cluster {
		return fmt.Errorf("the folder belongs to cluster %s, not %s: %w", st.Cluster, c.id.Cluster, storage.ErrFolderRefused)
	}
	if st.WasRemoved(c.id.Broker) {
		return fmt.Errorf("broker %s was removed from the cluster: %w", c.id.Broker, storage.ErrFolderRefused)
	}
	if n := len(st.Ring.Vnodes); n != c.cfg.Vnodes {
		c.log.Info("the recorded ring counts, not the configuration", "recorded_vnodes", n, "configured_vnodes", c.cfg.Vnodes)
	}
	return nil
}

// awaitRoot reads root as soon as it has a quorum.
func (c *ControlPlane) awaitRoot(ctx context.Context) (st *root.State, err error) {
	err = c.patiently(ctx, "root", func() error {
		st, err = c.readRoot(ctx)
		return err
	})
	return st, err
}

// patiently repeats a read at the start of a broker while its group has no quorum: the other brokers may start later than this one,
// so only ctx ends the wait.
func (c *ControlPlane) patiently(ctx context.Context, group string, read func() error) error {
	for warned := false; ; {
		err := read()
		if err == nil || ctx.Err() != nil || !errors.Is(err, storage.ErrUnavailable) {
			return err
		}
		if !warned {
			c.log.Warn("waiting for a quorum of a metadata group", "group", group, "err", err)
			warned = true
		}
	}
}

func (c *ControlPlane) found(ctx context.Context) (*root.State, error) {
	if !c.id.Founding {
		return nil, fmt.Errorf("root knows no cluster, and this start may not found one: %w", storage.ErrFolderRefused)
	}
	nonce, err := c.NewNonce()
	if err != nil {
		return nil, err
	}
	res, err := c.proposeRoot(ctx, &root.Found{Cluster: c.id.Cluster, Vnodes: c.cfg.Vnodes, Broker: c.id.Broker, Level: c.deps.Level,
		Nonce: nonce, Brokers: c.foundingBrokers()})
	if err != nil {
		return nil, fmt.Errorf("found the cluster: %w", err)
	}
	if res.Outcome != root.OutcomeOK {
		return nil, fmt.Errorf("found the cluster: %s: %w", res.Detail, storage.ErrFolderRefused)
	}
	st, err := c.readRoot(ctx)
	if err != nil {
		return nil, fmt.Errorf("read root: %w", err)
	}
	c.log.Info("cluster founded", "cluster", c.id.Cluster, "broker", c.id.Broker, "vnodes", len(st.Ring.Vnodes))
	return st, nil
}

// foundingBrokers is 0 for one, which is what a log of before there were more says.
func (c *ControlPlane) foundingBrokers() int {
	if c.cfg.FoundingBrokers == 1 {
		return 0
	}
	return c.cfg.FoundingBrokers
}

// Register announces this start of the broker to root, then starts this broker's replicas of all vnodes and returns when each
// answers; from then on it may be made a voter. boot
// must have been raised and synced on the broker's disk before; journalGroup is the last durable group of its journal; addresses
// ("api", "ops", "rpc") are for others to find it. It may be called again after an error that is not final.
//
// Errors: storage.ErrFolderRefused (root knows a higher boot or journal group of this broker, so its disk was cloned or rolled back;
// or a vnode's replica is missing), storage.ErrUnavailable, storage.ErrOutcomeUnknown, storage.ErrNewerFormat.
func (c *ControlPlane) Register(ctx context.Context, boot storage.Boot, journalGroup uint64, addresses map[string]string) error {
	all := map[string]string{"raft": c.host.address}
	for k, v := range addresses {
		all[k] = v
	}
	if storage.Boot(c.boot.Load()) != boot || boot == 0 {
		res, err := c.proposeRoot(ctx, &root.RegisterBroker{ID: c.id.Broker, Boot: boot, JournalGroup: journalGroup, Nonce: c.start,
			Addresses: all, Attributes: c.deps.Attributes, AdvertisedLevel: c.deps.Level, Time: c.now()})
		if err == nil {
			err = rootError(res)
		}
		if err != nil {
			return fmt.Errorf("register broker %s: %w", c.id.Broker, err)
		}
		c.boot.Store(uint64(boot))
	}
	err := c.startVnodes(ctx)
	if err == nil {
		err = c.becomeReady(ctx, boot)
	}
	if err != nil {
		return fmt.Errorf("register broker %s: %w", c.id.Broker, err)
	}
	return nil
}

// becomeReady tells root that all replicas have caught up. In this order: once root knows, one of them may vote.
func (c *ControlPlane) becomeReady(ctx context.Context, boot storage.Boot) error {
	shards := []uint64{rootShard}
	for _, r := range c.routes.Load().vnodes {
		shards = append(shards, r.shard)
	}
	if err := c.host.complete(shards); err != nil {
		return err
	}
	res, err := c.proposeRoot(ctx, &root.BrokerReady{ID: c.id.Broker, Boot: boot, Generation: c.host.generation})
	if err != nil {
		return err
	}
	return rootError(res)
}

// startVnodes starts the replicas of all vnodes, all at once, and returns when each answers.
func (c *ControlPlane) startVnodes(ctx context.Context) error {
	st := c.root.state.Load()
	g, ctx := errgroup.WithContext(ctx)
	rt := c.routes.Load()
	for _, rec := range st.Ring.Vnodes {
		r := rt.vnode(rec.ID)
		if r == nil {
			continue
		}
		g.Go(func() error {
			if err := c.startVnode(ctx, st, rec, r); err != nil {
				return fmt.Errorf("start vnode %d: %w", rec.ID, err)
			}
			return nil
		})
	}
	return g.Wait()
}

func (c *ControlPlane) startVnode(ctx context.Context, st *root.State, rec root.Vnode, r *vnodeReplica) error {
	if !r.started.Load() {
		founded := !rec.Confirmed && slices.Contains(rec.Members, c.id.Broker)
		if err := c.host.start(r.shard, founded, len(st.Brokers) <= 1, r.create); err != nil {
			return err
		}
		r.started.Store(true)
		c.groups.changed(r.shard)
	}
	var v *metadata.View
	err := c.patiently(ctx, fmt.Sprintf("vnode %d", rec.ID), func() (err error) {
		v, err = c.readVnode(ctx, r)
		return err
	})
	if err != nil {
		return err
	}
	if !v.Initialized() {
		res, err := c.proposeVnode(ctx, r, &metadata.InitVnode{Cluster: st.Cluster, Vnode: rec.ID, RingVersion: st.Ring.Version,
			Arcs: rec.Arcs}, storage.RangeID{})
		if err != nil {
			return err
		}
		if res.Outcome != metadata.OutcomeOK {
			return fmt.Errorf("give it its arcs: %s: %w", res.Detail, storage.ErrFolderRefused)
		}
	}
	if rec.Confirmed {
		return nil
	}
	res, err := c.proposeRoot(ctx, &root.ConfirmVnode{Vnode: rec.ID})
	if err != nil {
		return err
	}
	return rootError(res)
}

// Run keeps the members of the Raft groups as they should be, and watches over the replicas. It returns nil when ctx ends or the
// control plane is closed; storage.ErrNewerFormat when a replica has met a command, snapshot or cluster level above what this process
// understands: it has stopped before it, every call fails from then on, and the process must end with exit code 78;
// storage.ErrFolderRefused when this broker was removed from the cluster; and ErrRetired.
func (c *ControlPlane) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return c.keepMembers(ctx) })
	g.Go(func() error {
		select {
		case <-ctx.Done():
			return nil
		case <-c.closed:
			return errEnd // ends the loop too
		case <-c.stopped:
			return c.stopErr
		}
	})
	if err := g.Wait(); !errors.Is(err, errEnd) {
		return err
	}
	return nil
}

var errEnd = errors.New("closed")

// Close stops the replicas and the Raft host. What was answered is durable already. Calls under way fail with storage.ErrClosed.
func (c *ControlPlane) Close() error {
	c.closeOnce.Do(func() {
		close(c.closed)
		c.host.close()
	})
	return nil
}

// stop records the first reason for which a replica stopped.
func (c *ControlPlane) stop(err error) {
	c.stopOnce.Do(func() {
		if errors.Is(err, storage.ErrNewerFormat) {
			// So that the next start of this build refuses before it touches anything.
			if werr := writeLevel(c.cfg.Dir, c.deps.Level+1); werr != nil {
				c.log.Warn("the level could not be recorded", "err", werr)
			}
		}
		c.stopErr = err
		close(c.stopped)
	})
}

// failed returns why no call can succeed any more, or nil.
func (c *ControlPlane) failed() error {
	select {
	case <-c.stopped:
		return c.stopErr
	case <-c.closed:
		return storage.ErrClosed
	default:
		return nil
	}
}

// Refresh reports the last durable journal group to root; due every 30 s. storage.ErrFolderRefused: another process runs with this
// broker's identity, or it was never registered; this one must stop serving.
func (c *ControlPlane) Refresh(ctx context.Context, journalGroup uint64) error {
	res, err := c.proposeRoot(ctx, &root.RefreshBroker{ID: c.id.Broker, Boot: storage.Boot(c.boot.Load()), JournalGroup: journalGroup})
	if err == nil {
		err = rootError(res)
	}
	if err != nil {
		return fmt.Errorf("refresh broker %s: %w", c.id.Broker, err)
	}
	return nil
}

func rootError(res root.Result) error {
	var kind error
	switch res.Outcome {
	case root.OutcomeOK:
		return nil
	case root.OutcomeCloneOrRollback, root.OutcomeStaleBoot, root.OutcomeUnknownBroker, root.OutcomeFounded, root.OutcomeNotFounded,
		root.OutcomeRemoved:
		kind = storage.ErrFolderRefused
	case root.OutcomeLimit:
		kind = storage.ErrTooLarge
	case root.OutcomeInvalid:
		kind = storage.ErrInvalid
	default:
		kind = storage.ErrConflict
	}
	return fmt.Errorf("%s: %w", res.Detail, kind)
}

// Brokers are all registered brokers by id, by a linearizable read of root. Errors: storage.ErrUnavailable.
func (c *ControlPlane) Brokers(ctx context.Context) ([]root.Broker, error) {
	st, err := c.readRoot(ctx)
	if err != nil {
		return nil, fmt.Errorf("list brokers: %w", err)
	}
	return st.Brokers, nil
}

// Ring is the recorded ring as last applied here. The value is shared: do not write to it.
func (c *ControlPlane) Ring() root.Ring { return c.root.state.Load().Ring }

// Cluster is the cluster's id and its level as last applied here.
func (c *ControlPlane) Cluster() (storage.ClusterID, storage.Level) {
	st := c.root.state.Load()
	return st.Cluster, st.Level
}

// NewNonce draws the nonce of one intent. Keep it on every retry of that intent.
func (c *ControlPlane) NewNonce() (metadata.Nonce, error) {
	var n metadata.Nonce
	if _, err := io.ReadFull(c.deps.Rand, n[:]); err != nil {
		return metadata.Nonce{}, fmt.Errorf("draw a nonce: %w", err)
	}
	return n, nil
}

func (c *ControlPlane) now() storage.Time { return storage.Time(c.deps.Now().UnixNano()) }

// Status is a picture of the control plane for people and readiness.
type Status struct {
	Cluster     storage.ClusterID
	Level       storage.Level // of the cluster
	RingVersion uint64
	RaftAddress string
	Boot        storage.Boot // registered; 0 before
	Vnodes      []VnodeStatus
	// Ready: registered, nothing has stopped, and every vnode has a leader and its arcs.
	Ready bool
	// Err is why the control plane has stopped, or nil.
	Err error
}

// VnodeStatus is one vnode as this broker sees it.
type VnodeStatus struct {
	Vnode     uint32
	Local     bool // this broker has a replica
	Leader    bool // this broker leads it
	HasLeader bool
	Applied   uint64 // index of the last applied entry
	Topics    int
	Deleting  int
}

// Status reads memory only.
func (c *ControlPlane) Status() Status {
	st := c.root.state.Load()
	s := Status{Cluster: st.Cluster, Level: st.Level, RingVersion: st.Ring.Version, RaftAddress: c.host.address,
		Boot: storage.Boot(c.boot.Load()), Err: c.failed()}
	s.Ready = s.Boot != 0 && s.Err == nil && st.Founded()
	for _, r := range c.routes.Load().vnodes {
		leader := r.leader.Load()
		v := VnodeStatus{Vnode: r.vnode, Local: r.started.Load(), Leader: leader == c.host.replica, HasLeader: leader != 0,
			Applied: r.applied.Load()}
		view := r.view.Load()
		v.Topics, v.Deleting = view.Len()
		s.Vnodes = append(s.Vnodes, v)
		s.Ready = s.Ready && v.HasLeader && view.Initialized()
	}
	return s
}
