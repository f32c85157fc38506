// Package coordinator runs the loops of the topics whose metadata this broker leads: it opens the segment that a range needs, runs the
// pass that closes one (its primary has restarted or is gone, size, age, drain, a failed copy), places heads on brokers, and removes what was
// deleted. On every broker, leader or not, it finishes the own replicas as recorded.
//
// The loops are level-triggered: they compare what is recorded with what is there, do the first missing thing, and look again. Everything
// they do is idempotent, so a crash at any point needs nothing but another look. Nothing of a coordinator survives a restart, and two of them
// at work on one range disturb each other's time, never the data: the record decides by compare-and-set.
//
// Run owns all goroutines. The exported methods may be called from any goroutine.
package coordinator

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/singleflight"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	"github.com/malachilog/malachi/services/controlplane"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/services/controlplane/root"
	"github.com/malachilog/malachi/services/placement"
	"github.com/malachilog/malachi/services/replica"
	"github.com/malachilog/malachi/services/rpc"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/rangelog"
	"github.com/malachilog/malachi/storage/replication"
)

// Config of a Coordinator.
type Config struct {
	Self storage.BrokerID
	Boot storage.Boot
	// LookEvery is how often sizes and ages are looked at. Default 250 ms.
	LookEvery time.Duration
	// Workers bounds the ranges that are worked on at once. Default 16.
	Workers int
	// SettleTime is how long enough brokers must be there before a set that is too small is rolled. Default 60 s.
	SettleTime time.Duration
}

func (c *Config) setDefaults() {
	if c.LookEvery == 0 {
		c.LookEvery = 250 * time.Millisecond
	}
	if c.Workers == 0 {
		c.Workers = 16
	}
	if c.SettleTime == 0 {
		c.SettleTime = time.Minute
	}
}

// ControlPlane is what the loops need of the metadata.
type ControlPlane interface {
	CachedTopicByUID(storage.TopicUID) (*metadata.Topic, bool)
	Await(ctx context.Context, uid storage.TopicUID, until func(*metadata.Topic) bool) (*metadata.Topic, error)
	Topics(vnode uint32) []*metadata.Topic
	Deleting(vnode uint32) []*metadata.Topic
	Vnodes() []uint32
	Leader(vnode uint32) bool
	CoordinatorOf(storage.TopicUID) (storage.BrokerID, bool)
	OpenSegment(context.Context, metadata.OpenSegment) (*metadata.Segment, error)
	SealSegment(context.Context, metadata.SealSegment) (controlplane.Sealed, error)
	UpdateReplicas(context.Context, metadata.UpdateReplicas) (*metadata.Segment, error)
	ForgetTopic(ctx context.Context, name string, uid storage.TopicUID) error
	NewNonce() (metadata.Nonce, error)
	Watch() *controlplane.Watcher
	Policy() root.Policy
	State() *root.State
}

// Replicas is the way to the replicas of one broker.
type Replicas interface {
	Open(context.Context, replica.Open) error
	Ask(context.Context, storage.SegmentID) (serving bool, err error)
	Drain(context.Context, storage.SegmentID) error
	Fence(ctx context.Context, id storage.SegmentID, header []byte) (rangelog.Vote, error)
	Extend(ctx context.Context, id storage.SegmentID, holder storage.BrokerID, end storage.End) (storage.End, storage.Digest, error)
	Seal(context.Context, storage.SegmentID, storage.End, storage.Digest) error
	Drop(context.Context, storage.SegmentID) error
}

// Local is what only the own broker's replicas are asked for.
type Local interface {
	Serving() []replica.Load
	Full() <-chan struct{}
	// Rejoin lets a follower's replica of an earlier boot take appends again.
	Rejoin(context.Context, storage.SegmentID) error
}

// Store lists what lies on this broker's disk.
type Store interface {
	Live() []storage.SegmentID
	List() ([]storage.SegmentID, error)
}

// Deps are a Coordinator's collaborators.
type Deps struct {
	ControlPlane ControlPlane
	// Replicas returns the way to a broker, or nil if there is none now.
	Replicas func(storage.BrokerID) Replicas
	// Brokers are the brokers as placement sees them: registered ones, with what membership knows of them.
	Brokers func() []placement.Broker
	// Peers is the way to the other brokers' coordinators.
	Peers *rpc.Peers
	// Absent is for how long nothing was seen of a broker.
	Absent func(storage.BrokerID) time.Duration
	Copies Copies
	Local  Local
	Store  Store
	Logger *slog.Logger
	Now    func() time.Time
}

// Coordinator runs the loops. See the package comment.
type Coordinator struct {
	cfg   Config
	deps  Deps
	log   *slog.Logger
	heads singleflight.Group // one open or pass per range at a time
	slots chan struct{}

	suspects suspects
	settled  atomic.Bool

	mu      sync.Mutex
	group   *errgroup.Group // of Run; nil before it
	ctx     context.Context // of Run
	blocked map[storage.RangeID]string
	avoid   map[storage.RangeID]map[storage.BrokerID]time.Time // not to be placed there until then
	rolled  map[storage.RangeID]time.Time                      // last roll for a set that was too small
	enough  time.Time                                          // since when enough brokers are there; zero: they are not
	opening map[storage.SegmentID]bool                         // followers are being told to open, in the background
	passing map[storage.SegmentID]bool
	asked   map[storage.SegmentID]time.Time // when this broker last asked for a pass
}

// New returns a coordinator. It does no I/O.
func New(cfg Config, deps Deps) *Coordinator {
	cfg.setDefaults()
	if deps.Now == nil {
		deps.Now = time.Now
	}
	return &Coordinator{
		cfg: cfg, deps: deps, log: deps.Logger, slots: make(chan struct{}, cfg.Workers), blocked: map[storage.RangeID]string{},
		avoid: map[storage.RangeID]map[storage.BrokerID]time.Time{}, rolled: map[storage.RangeID]time.Time{},
		opening: map[storage.SegmentID]bool{}, passing: map[storage.SegmentID]bool{},
		asked: map[storage.SegmentID]time.Time{}, suspects: suspects{ids: map[storage.SegmentID]bool{}, wake: make(chan struct{}, 1)},
	}
}

// Run runs the loops until ctx ends.
func (c *Coordinator) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	c.mu.Lock()
	c.group, c.ctx = g, ctx
	c.mu.Unlock()
	g.Go(func() error { c.reconcileLoop(ctx); return nil })
	g.Go(func() error { c.finishLoop(ctx); return nil })
	g.Go(func() error { c.rollLoop(ctx); return nil })
	g.Go(func() error { c.healLoop(ctx); return nil })
	g.Go(func() error { c.copiesLoop(ctx); return nil })
	g.Go(func() error { c.scrubLoop(ctx); return nil })
	err := g.Wait()
	c.mu.Lock()
	c.group = nil
	c.mu.Unlock()
	return err
}

// spawn runs f within Run. False: Run has not begun or is ending.
func (c *Coordinator) spawn(f func(ctx context.Context)) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.group == nil || c.ctx.Err() != nil {
		return false
	}
	ctx := c.ctx
	c.group.Go(func() error { f(ctx); return nil })
	return true
}

// reconcileLoop looks at topics that changed, and at everything every second: a loop that missed a change must not stay wrong, and that a
// broker is gone or back changes no topic.
func (c *Coordinator) reconcileLoop(ctx context.Context) {
	w := c.deps.ControlPlane.Watch()
	defer w.Close()
	all := time.NewTicker(time.Second)
	defer all.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-all.C:
			c.reconcileAll(ctx)
		case <-w.C():
			changes := w.Take()
			if changes.All {
				c.reconcileAll(ctx)
				continue
			}
			for _, uid := range changes.Topics {
				if t, ok := c.deps.ControlPlane.CachedTopicByUID(uid); ok && c.leads(uid) {
					c.reconcileTopic(ctx, t)
				}
			}
		}
	}
}

func (c *Coordinator) leads(uid storage.TopicUID) bool {
	b, ok := c.deps.ControlPlane.CoordinatorOf(uid)
	return ok && b == c.cfg.Self
}

func (c *Coordinator) reconcileAll(ctx context.Context) {
	cp := c.deps.ControlPlane
	c.countBrokers()
	for _, v := range cp.Vnodes() {
		if !cp.Leader(v) {
			continue
		}
		for _, t := range cp.Topics(v) {
			c.reconcileTopic(ctx, t)
		}
		for _, t := range cp.Deleting(v) {
			c.reconcileTopic(ctx, t)
		}
	}
}

// countBrokers notes since when as many brokers are there as the policy wants replicas.
func (c *Coordinator) countBrokers() {
	fit := 0
	for _, b := range c.deps.Brokers() {
		if !b.Absent && !b.Draining && !b.Skewed {
			fit++
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case fit < c.deps.ControlPlane.Policy().ReplicationFactor:
		c.enough = time.Time{}
	case c.enough.IsZero():
		c.enough = c.deps.Now()
	}
}

// reconcileTopic closes heads that cannot be served any more or are not as wanted, and removes a deleted topic.
func (c *Coordinator) reconcileTopic(ctx context.Context, t *metadata.Topic) {
	if t.State == metadata.TopicDeleting {
		c.startRemove(t)
		return
	}
	for _, r := range t.Owners() {
		if r.Open == nil {
			continue
		}
		if why := c.wanting(r); why != "" {
			c.startPass(ctx, r.Open.ID, why)
		}
	}
}

// wanting says why the open segment of a range is due for a pass, or nothing. What only its primary knows (size, age, want of a quorum) comes
// by RequestPass.
func (c *Coordinator) wanting(r *metadata.Range) replication.Reason {
	seg := r.Open
	brokers := c.known()
	primary := brokers[seg.Primary()]
	switch {
	case c.bootOf(seg.Primary()) != seg.PrimaryBoot:
		return replication.ReasonRestart
	case primary.Absent:
		return replication.ReasonPrimaryGone
	}
	for _, b := range seg.Replicas {
		if brokers[b].Draining && c.placeable(r) {
			return replication.ReasonDrain
		}
	}
	if c.rollWanted(seg) && c.placeable(r) {
		return replication.ReasonUnderReplicated
	}
	return ""
}

// placeable reports whether brokers for the next segment of a range are there: a head that serves is not closed for nothing.
func (c *Coordinator) placeable(r *metadata.Range) bool {
	_, err := c.place(storage.SegmentID{Range: r.ID, Seq: r.NextSegment}, c.deps.ControlPlane.Policy())
	return err == nil
}

// known are the brokers by id. One that is not registered counts as absent.
func (c *Coordinator) known() map[storage.BrokerID]placement.Broker {
	out := map[storage.BrokerID]placement.Broker{}
	for _, b := range c.deps.Brokers() {
		out[b.ID] = b
	}
	return out
}

// bootOf is the registered boot of a broker; 0 if it is not registered.
func (c *Coordinator) bootOf(b storage.BrokerID) storage.Boot {
	rec, ok := c.deps.ControlPlane.State().Broker(b)
	if !ok {
		return 0
	}
	return rec.Boot
}

// rollEvery bounds how often a range is rolled because its set is too small (INV-M8).
const rollEvery = 10 * time.Minute

// rollWanted reports whether the set is smaller than the policy wants although enough brokers have been there for a while, or larger.
func (c *Coordinator) rollWanted(seg *metadata.Segment) bool {
	policy := c.deps.ControlPlane.Policy()
	if seg.N() >= policy.ReplicationFactor && seg.ReplicationFactor == policy.ReplicationFactor && seg.Quorum == policy.Quorum() {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.deps.Now()
	changed := seg.ReplicationFactor != policy.ReplicationFactor || seg.Quorum != policy.Quorum()
	if c.enough.IsZero() || !changed && now.Sub(c.enough) < c.cfg.SettleTime && !mutate.On("coordinator.roll-unsettled") {
		return false
	}
	if last, ok := c.rolled[seg.ID.Range]; ok && now.Sub(last) < rollEvery && !changed && !mutate.On("coordinator.roll-again") {
		return false
	}
	c.rolled[seg.ID.Range] = now
	return true
}

// avoidFor keeps a broker off a range for a while, as long as others can be had.
const avoidFor = 30 * time.Second

func (c *Coordinator) avoidOn(id storage.RangeID, brokers ...storage.BrokerID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, b := range brokers {
		if c.avoid[id] == nil {
			c.avoid[id] = map[storage.BrokerID]time.Time{}
		}
		c.avoid[id][b] = c.deps.Now().Add(avoidFor)
	}
}

func (c *Coordinator) avoided(id storage.RangeID) map[storage.BrokerID]bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	now, out := c.deps.Now(), map[storage.BrokerID]bool{}
	maps.DeleteFunc(c.avoid[id], func(_ storage.BrokerID, until time.Time) bool { return now.After(until) })
	for b := range c.avoid[id] {
		out[b] = true
	}
	if len(out) == 0 {
		delete(c.avoid, id)
	}
	if mutate.On("coordinator.avoid-nobody") {
		return nil
	}
	return out
}

// startPass runs a pass in the background, unless one is under way.
func (c *Coordinator) startPass(ctx context.Context, id storage.SegmentID, why replication.Reason) {
	c.mu.Lock()
	busy := c.passing[id]
	c.passing[id] = true
	c.mu.Unlock()
	if busy {
		return
	}
	end := func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.passing, id)
	}
	select { // passes of many ranges run side by side: they share the journals' barriers
	case c.slots <- struct{}{}:
	case <-ctx.Done():
		end()
		return
	}
	started := c.spawn(func(ctx context.Context) {
		defer end()
		defer func() { <-c.slots }()
		ctx, cancel := context.WithTimeout(ctx, 2*time.Minute) // a blocked one begins anew at the next look
		defer cancel()
		if err := c.pass(ctx, id, why); err != nil && c.ctx.Err() == nil {
			c.log.Warn("segment could not be closed", "segment", id.String(), "reason", string(why), "error", err)
		}
	})
	if !started {
		<-c.slots
		end()
	}
}

// rollLoop asks for passes over the segments served here that have their size or age.
func (c *Coordinator) rollLoop(ctx context.Context) {
	tick := time.NewTicker(c.cfg.LookEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-c.deps.Local.Full():
		}
		now, policy := c.deps.Now(), c.deps.ControlPlane.Policy()
		for _, l := range c.deps.Local.Serving() {
			switch {
			case l.Empty:
			case policy.SegmentMaxBytes > 0 && l.Bytes >= int64(policy.SegmentMaxBytes):
				c.askPass(l.Segment, replication.ReasonSize)
			case policy.SegmentMaxAge > 0 && now.Sub(l.Opened) >= policy.SegmentMaxAge:
				c.askPass(l.Segment, replication.ReasonAge)
			}
		}
	}
}

// HandOver asks for passes over the segments that this broker serves, so that others head their ranges, and returns when none is left or ctx ends.
func (c *Coordinator) HandOver(ctx context.Context) {
	for ctx.Err() == nil {
		serving := c.deps.Local.Serving()
		if len(serving) == 0 {
			return
		}
		for _, l := range serving {
			c.askPass(l.Segment, replication.ReasonDrain)
		}
		pause(ctx, 50*time.Millisecond)
	}
}

// Blocked says what a range waits for, or nothing, as far as this broker's loops know.
func (c *Coordinator) Blocked(id storage.RangeID) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.blocked[id]
}

// AllBlocked is what each blocked range of this broker's loops waits for.
func (c *Coordinator) AllBlocked() map[storage.RangeID]string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.blocked)
}

func (c *Coordinator) setBlocked(id storage.RangeID, by string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if by == "" {
		delete(c.blocked, id)
	} else {
		c.blocked[id] = by
	}
}

// way is the path to a broker's replicas. storage.ErrUnavailable: there is none now.
func (c *Coordinator) way(b storage.BrokerID) (Replicas, error) {
	w := c.deps.Replicas(b)
	if w == nil {
		return nil, fmt.Errorf("broker %s is not there: %w", b, storage.ErrUnavailable)
	}
	return w, nil
}
