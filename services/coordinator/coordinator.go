// Package coordinator runs the loops of the topics whose metadata this broker leads: it opens the segment that a range needs, runs the
// pass that closes one (after a restart, on size, on age), has replicas finished as recorded, and removes what was deleted.
//
// The loops are level-triggered: they compare what is recorded with what is there, do the first missing thing, and look again. Everything
// they do is idempotent, so a crash at any point needs nothing but another look. Nothing of a coordinator survives a restart.
//
// Run owns all goroutines. EnsureHead and Blocked may be called from any goroutine.
package coordinator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/singleflight"

	"github.com/malachilog/malachi/services/controlplane"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/services/replica"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/rangelog"
	"github.com/malachilog/malachi/storage/replication"
	"github.com/malachilog/malachi/storage/segment"
)

// Config of a Coordinator.
type Config struct {
	Self storage.BrokerID
	Boot storage.Boot
	// SegmentMaxBytes closes a segment that holds so many bytes. Default 256 MiB.
	SegmentMaxBytes int64
	// SegmentMaxAge closes a segment that holds data for so long. Default 1 h.
	SegmentMaxAge time.Duration
	// LookEvery is how often sizes and ages are looked at. Default 250 ms.
	LookEvery time.Duration
	// Workers bounds the ranges that are worked on at once. Default 16.
	Workers int
}

// DefaultSegmentMaxBytes is the size at which a segment is closed if nothing else is said.
const DefaultSegmentMaxBytes = 256 << 20

func (c *Config) setDefaults() {
	if c.SegmentMaxBytes == 0 {
		c.SegmentMaxBytes = DefaultSegmentMaxBytes
	}
	if c.SegmentMaxAge == 0 {
		c.SegmentMaxAge = time.Hour
	}
	if c.LookEvery == 0 {
		c.LookEvery = 250 * time.Millisecond
	}
	if c.Workers == 0 {
		c.Workers = 16
	}
}

// ControlPlane is what the loops need of the metadata.
type ControlPlane interface {
	CachedTopicByUID(storage.TopicUID) (*metadata.Topic, bool)
	Topics(vnode uint32) []*metadata.Topic
	Deleting(vnode uint32) []*metadata.Topic
	Vnodes() []uint32
	Leader(vnode uint32) bool
	OpenSegment(context.Context, metadata.OpenSegment) (*metadata.Segment, error)
	SealSegment(context.Context, metadata.SealSegment) (controlplane.Sealed, error)
	ForgetTopic(ctx context.Context, name string, uid storage.TopicUID) error
	NewNonce() (metadata.Nonce, error)
	Watch() *controlplane.Watcher
}

// Replicas is the way to the replicas of one broker.
type Replicas interface {
	Open(context.Context, replica.Open) error
	Ask(context.Context, storage.SegmentID) (serving bool, err error)
	Drain(context.Context, storage.SegmentID) error
	Fence(ctx context.Context, id storage.SegmentID, header []byte) (rangelog.Vote, error)
	Seal(context.Context, storage.SegmentID, storage.End, storage.Digest) error
	Drop(context.Context, storage.SegmentID) error
}

// Local is what only the own broker's replicas are asked for.
type Local interface {
	Serving() []replica.Load
	Full() <-chan struct{}
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
	Local    Local
	Store    Store
	Logger   *slog.Logger
	Now      func() time.Time
}

// Coordinator runs the loops. See the package comment.
type Coordinator struct {
	cfg   Config
	deps  Deps
	log   *slog.Logger
	heads singleflight.Group // one open or pass per range at a time
	slots chan struct{}
	group *errgroup.Group // of Run

	mu      sync.Mutex
	blocked map[storage.RangeID]string
}

// New returns a coordinator. It does no I/O.
func New(cfg Config, deps Deps) *Coordinator {
	cfg.setDefaults()
	if deps.Now == nil {
		deps.Now = time.Now
	}
	return &Coordinator{cfg: cfg, deps: deps, log: deps.Logger, slots: make(chan struct{}, cfg.Workers), blocked: map[storage.RangeID]string{}}
}

// Run runs the loops until ctx ends.
func (c *Coordinator) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	c.group = g
	g.Go(func() error { c.reconcileLoop(ctx); return nil })
	g.Go(func() error { c.rollLoop(ctx); return nil })
	return g.Wait()
}

// reconcileLoop looks at topics that changed, and at everything every 10 s: a loop that missed a change must not stay wrong.
func (c *Coordinator) reconcileLoop(ctx context.Context) {
	w := c.deps.ControlPlane.Watch()
	defer w.Close()
	all := time.NewTicker(10 * time.Second)
	defer all.Stop()
	c.reconcileAll(ctx)
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
				if t, ok := c.deps.ControlPlane.CachedTopicByUID(uid); ok {
					c.reconcileTopic(ctx, t)
				}
			}
			c.finishReplicas(ctx)
		}
	}
}

func (c *Coordinator) reconcileAll(ctx context.Context) {
	cp := c.deps.ControlPlane
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
	c.finishReplicas(ctx)
}

// reconcileTopic closes heads that cannot be served any more, and removes a deleted topic.
func (c *Coordinator) reconcileTopic(ctx context.Context, t *metadata.Topic) {
	if t.State == metadata.TopicDeleting {
		if err := c.remove(ctx, t); err != nil && ctx.Err() == nil {
			c.log.Warn("topic is deleted, its data not yet", "topic", t.Name, "uid", t.UID.String(), "error", err)
		}
		return
	}
	for _, r := range t.Owners() {
		if r.Open == nil || r.Open.Primary() != c.cfg.Self || r.Open.PrimaryBoot == c.cfg.Boot {
			continue
		}
		select { // passes of many ranges run side by side: they share the journal's barriers
		case c.slots <- struct{}{}:
		case <-ctx.Done():
			return
		}
		c.group.Go(func() error {
			defer func() { <-c.slots }()
			if err := c.pass(ctx, t.UID, r.ID, r.Open.ID.Seq, replication.ReasonRestart); err != nil && ctx.Err() == nil {
				c.log.Warn("range stays blocked", "topic", t.Name, "range", r.ID.String(), "error", err)
			}
			return nil
		})
	}
}

// finishReplicas carries out on this broker's disk what is recorded: a replica of a sealed segment gets its footer, one of an abandoned
// segment is dropped. What no record speaks of is left alone.
func (c *Coordinator) finishReplicas(ctx context.Context) {
	own := c.deps.Replicas(c.cfg.Self)
	for _, id := range c.deps.Store.Live() {
		t, ok := c.deps.ControlPlane.CachedTopicByUID(id.Range.Topic)
		if !ok || t.State == metadata.TopicDeleting {
			continue
		}
		seg := t.Segment(id)
		if seg == nil {
			continue
		}
		var err error
		switch seg.State {
		case metadata.SegmentSealed:
			err = own.Seal(ctx, id, seg.End, seg.Digest)
		case metadata.SegmentAbandoned:
			err = own.Drop(ctx, id)
		}
		if err != nil && ctx.Err() == nil && !errors.Is(err, storage.ErrUnknownSegment) {
			c.log.Error("replica could not be finished as recorded", "segment", id.String(), "error", err)
		}
	}
}

// rollLoop closes segments on size and age.
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
		now := c.deps.Now()
		for _, l := range c.deps.Local.Serving() {
			var why replication.Reason
			switch {
			case l.Empty:
				continue
			case l.Bytes >= c.cfg.SegmentMaxBytes:
				why = replication.ReasonSize
			case now.Sub(l.Opened) >= c.cfg.SegmentMaxAge:
				why = replication.ReasonAge
			default:
				continue
			}
			select {
			case c.slots <- struct{}{}:
			default:
				continue // all are busy: the next look will do
			}
			c.group.Go(func() error {
				defer func() { <-c.slots }()
				if err := c.pass(ctx, l.Segment.Range.Topic, l.Segment.Range, l.Segment.Seq, why); err != nil && ctx.Err() == nil {
					c.log.Warn("segment could not be rolled", "segment", l.Segment.String(), "reason", string(why), "error", err)
				}
				return nil
			})
		}
	}
}

// EnsureHead returns the open segment of a range once it is served, opening one if there is none and closing one that can't be served any
// more. Errors: storage.ErrTopicNotFound, ErrStaleRoute (the range owns nothing any more), ErrUnavailable with what the range waits for.
func (c *Coordinator) EnsureHead(ctx context.Context, uid storage.TopicUID, id storage.RangeID) (*metadata.Segment, error) {
	ch := c.heads.DoChan("head "+id.String(), func() (any, error) {
		work, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		return c.ensureHead(work, uid, id)
	})
	select {
	case r := <-ch:
		if r.Err != nil {
			return nil, r.Err
		}
		return r.Val.(*metadata.Segment), nil
	case <-ctx.Done():
		return nil, fmt.Errorf("range %s has no open segment yet: %w", id, storage.ErrUnavailable)
	}
}

func (c *Coordinator) ensureHead(ctx context.Context, uid storage.TopicUID, id storage.RangeID) (*metadata.Segment, error) {
	for range 3 {
		t, r, err := c.find(uid, id)
		if err != nil {
			return nil, err
		}
		seg := r.Open
		switch {
		case seg == nil:
			if seg, err = c.open(ctx, t, r); err != nil {
				return nil, err
			}
		case seg.PrimaryBoot != c.cfg.Boot:
			if err := c.pass(ctx, uid, id, seg.ID.Seq, replication.ReasonRestart); err != nil {
				return nil, err
			}
			continue
		}
		err = c.openReplicas(ctx, seg)
		if err == nil {
			return seg, nil
		}
		if !errors.Is(err, storage.ErrStaleBoot) && !errors.Is(err, storage.ErrSealed) && !errors.Is(err, storage.ErrFenced) {
			return nil, err
		}
		// Fenced though the record says open: a store in that state simply needs a pass.
		if err := c.pass(ctx, uid, id, seg.ID.Seq, replication.ReasonFenced); err != nil {
			return nil, err
		}
	}
	return nil, fmt.Errorf("range %s: its segments are closed as fast as they are opened: %w", id, storage.ErrUnavailable)
}

func (c *Coordinator) find(uid storage.TopicUID, id storage.RangeID) (*metadata.Topic, *metadata.Range, error) {
	t, ok := c.deps.ControlPlane.CachedTopicByUID(uid)
	if !ok || t.State != metadata.TopicActive {
		return nil, nil, fmt.Errorf("topic %s: %w", uid, storage.ErrTopicNotFound)
	}
	r := t.Range(id)
	if r == nil || r.State != metadata.RangeActive {
		return nil, nil, fmt.Errorf("range %s takes no appends: %w", id, storage.ErrStaleRoute)
	}
	return t, r, nil
}

// open records the next segment of a range. With one broker the set is that broker, n = q = rf = 1.
func (c *Coordinator) open(ctx context.Context, t *metadata.Topic, r *metadata.Range) (*metadata.Segment, error) {
	cmd, err := c.nextOpen(t, r, r.SealedEnd, c.notBefore(r, 0))
	if err != nil {
		return nil, err
	}
	seg, err := c.deps.ControlPlane.OpenSegment(ctx, *cmd)
	if err != nil {
		return nil, fmt.Errorf("open segment of range %s: %w", r.ID, err)
	}
	return seg, nil
}

// notBefore is a creation time at which append times of the range can't fall: now, or the recorded time of the last seal, which is not
// before its last append; last, if given, is that of the segment being closed.
func (c *Coordinator) notBefore(r *metadata.Range, last storage.Time) storage.Time {
	at := max(storage.Time(c.deps.Now().UnixNano()), last)
	for i := len(r.Closed) - 1; i >= 0 && i >= len(r.Closed)-1; i-- {
		at = max(at, r.Closed[i].SealTime)
	}
	return at
}

func (c *Coordinator) nextOpen(t *metadata.Topic, r *metadata.Range, base storage.End, at storage.Time) (*metadata.OpenSegment, error) {
	nonce, err := c.deps.ControlPlane.NewNonce()
	if err != nil {
		return nil, err
	}
	h := segment.Header{
		ID: storage.SegmentID{Range: r.ID, Seq: r.NextSegment}, Topic: t.Name, Slice: r.Slice, Base: base.Next(), CreateTime: at,
	}
	for _, p := range r.Parents {
		h.Lineage = append(h.Lineage, segment.Parent(p))
	}
	raw, err := h.Encode()
	if err != nil {
		return nil, err
	}
	return &metadata.OpenSegment{
		TopicName: t.Name, Topic: t.UID, Range: r.ID, Seq: r.NextSegment, Base: base.Next(), Nonce: nonce,
		Replicas: []storage.BrokerID{c.cfg.Self}, Quorum: 1, ReplicationFactor: 1, PrimaryBoot: c.cfg.Boot, Header: raw, Time: at,
	}, nil
}

// openReplicas tells the set to open the segment, the primary last. It returns when all have confirmed.
func (c *Coordinator) openReplicas(ctx context.Context, seg *metadata.Segment) error {
	o := replica.Open{Header: seg.Header, Set: seg.Replicas, Quorum: seg.Quorum, Boot: seg.PrimaryBoot}
	for i := len(seg.Replicas) - 1; i >= 0; i-- {
		b := c.deps.Replicas(seg.Replicas[i])
		if b == nil {
			return fmt.Errorf("broker %s of segment %s is not there: %w", seg.Replicas[i], seg.ID, storage.ErrUnavailable)
		}
		if err := b.Open(ctx, o); err != nil {
			return err
		}
	}
	return nil
}

// remove deletes the data of a deleted topic: every replica that its record names, then what else lies on this disk under its uid (the
// tombstone condemns all of it), then the record.
func (c *Coordinator) remove(ctx context.Context, t *metadata.Topic) error {
	for _, r := range t.Ranges() {
		segs := r.Closed
		if r.Open != nil {
			segs = append(segs[:len(segs):len(segs)], r.Open)
		}
		for _, seg := range segs {
			for _, b := range seg.Replicas {
				way := c.deps.Replicas(b)
				if way == nil {
					return fmt.Errorf("broker %s: %w", b, storage.ErrUnavailable)
				}
				if err := way.Drop(ctx, seg.ID); err != nil {
					return err
				}
			}
		}
	}
	here, err := c.deps.Store.List()
	if err != nil {
		return err
	}
	for _, id := range here {
		if id.Range.Topic == t.UID {
			if err := c.deps.Replicas(c.cfg.Self).Drop(ctx, id); err != nil {
				return err
			}
		}
	}
	if err := c.deps.ControlPlane.ForgetTopic(ctx, t.Name, t.UID); err != nil {
		return err
	}
	c.log.Info("topic removed", "topic", t.Name, "uid", t.UID.String())
	return nil
}

// Blocked says what a range waits for, or nothing.
func (c *Coordinator) Blocked(id storage.RangeID) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.blocked[id]
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
