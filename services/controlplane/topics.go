package controlplane

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/storage"
)

// NewTopic is what CreateTopic makes.
type NewTopic struct {
	Name               string
	InitialRanges      int // 0 means 1
	Labels             map[string]string
	DeletionProtection bool
	// Nonce makes a retry safe: the same nonce and settings answer the topic that they made. Zero: drawn here, so a caller's own
	// retry may meet storage.ErrTopicExists.
	Nonce metadata.Nonce
}

// TopicUpdate is what UpdateTopic changes.
type TopicUpdate struct {
	Name               string
	ExpectVersion      uint64             // 0: any
	Labels             *map[string]string // nil: leave; else replaces all
	DeletionProtection *bool              // nil: leave
}

// TopicDelete names what DeleteTopic deletes.
type TopicDelete struct {
	Name          string
	UID           storage.TopicUID // zero: whichever bears the name
	ExpectVersion uint64           // 0: any
	Nonce         metadata.Nonce   // zero: drawn here
}

// CreateTopic makes a topic and returns it. It is durable then. Errors: storage.ErrInvalid and storage.ErrTooLarge (with what is
// allowed), storage.ErrTopicExists, storage.ErrTopicNotFound (this nonce's topic was deleted since), storage.ErrUnavailable,
// storage.ErrOutcomeUnknown (ask again with the same nonce).
func (c *ControlPlane) CreateTopic(ctx context.Context, n NewTopic) (*metadata.Topic, error) {
	t, err := c.createTopic(ctx, n)
	if err != nil {
		return nil, fmt.Errorf("create topic %.250q: %w", n.Name, err)
	}
	return t, nil
}

func (c *ControlPlane) createTopic(ctx context.Context, n NewTopic) (*metadata.Topic, error) {
	if n.InitialRanges == 0 {
		n.InitialRanges = 1
	}
	if err := errors.Join(metadata.ValidTopicName(n.Name), metadata.ValidInitialRanges(n.InitialRanges), metadata.ValidLabels(n.Labels)); err != nil {
		return nil, err
	}
	cmd := &metadata.CreateTopic{Nonce: n.Nonce, Name: n.Name, InitialRanges: n.InitialRanges, Labels: n.Labels,
		DeletionProtection: n.DeletionProtection, Time: c.now()}
	if err := c.drawNonce(&cmd.Nonce); err != nil {
		return nil, err
	}
	if _, err := io.ReadFull(c.deps.Rand, cmd.UID[:]); err != nil {
		return nil, fmt.Errorf("draw a uid: %w", err)
	}
	return c.changeTopic(ctx, n.Name, cmd)
}

// changeTopic proposes a command on a topic and returns the topic with its effect.
func (c *ControlPlane) changeTopic(ctx context.Context, name string, cmd metadata.Command) (*metadata.Topic, error) {
	r, err := c.owner(name)
	if err != nil {
		return nil, err
	}
	res, err := c.proposeVnode(ctx, r, cmd, storage.RangeID{})
	if err == nil {
		err = commandError(res)
	}
	if err != nil {
		return nil, err
	}
	// The replica that answered is this one, so its view holds the effect.
	t := r.view.Load().TopicByUID(res.UID)
	if t == nil || t.State != metadata.TopicActive {
		return nil, fmt.Errorf("it was deleted since: %w", storage.ErrTopicNotFound)
	}
	return t, nil
}

func (c *ControlPlane) drawNonce(n *metadata.Nonce) (err error) {
	if n.IsZero() {
		*n, err = c.NewNonce()
	}
	return err
}

// commandError turns a refusal into the error of its kind.
func commandError(res metadata.Result) error {
	var kind error
	switch res.Outcome {
	case metadata.OutcomeOK:
		return nil
	case metadata.OutcomeNotFound:
		kind = storage.ErrTopicNotFound
	case metadata.OutcomeExists:
		kind = storage.ErrTopicExists
	case metadata.OutcomeStaleRoute:
		kind = storage.ErrStaleRoute
	case metadata.OutcomeInvalid, metadata.OutcomeTopicMismatch:
		kind = storage.ErrInvalid
	case metadata.OutcomeLimit:
		kind = storage.ErrTooLarge
	default:
		kind = storage.ErrConflict
	}
	return fmt.Errorf("%s: %w", res.Detail, kind)
}

// UpdateTopic changes a topic and returns it. Errors: storage.ErrTopicNotFound, storage.ErrConflict (ExpectVersion was not met),
// storage.ErrInvalid, storage.ErrTooLarge, storage.ErrUnavailable, storage.ErrOutcomeUnknown.
func (c *ControlPlane) UpdateTopic(ctx context.Context, u TopicUpdate) (*metadata.Topic, error) {
	t, err := c.updateTopic(ctx, u)
	if err != nil {
		return nil, fmt.Errorf("update topic %.250q: %w", u.Name, err)
	}
	return t, nil
}

func (c *ControlPlane) updateTopic(ctx context.Context, u TopicUpdate) (*metadata.Topic, error) {
	if u.Labels != nil {
		if err := metadata.ValidLabels(*u.Labels); err != nil {
			return nil, err
		}
	}
	if u.Labels == nil && u.DeletionProtection == nil {
		return nil, fmt.Errorf("nothing to change: %w", storage.ErrInvalid)
	}
	ctx, cancel := c.host.bounded(ctx)
	defer cancel()
	for {
		// "Any version" is still a compare-and-set, on the version and life of the topic that is there now: a proposal that is applied
		// late must not undo a newer change.
		t, err := c.topic(ctx, u.Name)
		if err != nil {
			return nil, err
		}
		cmd := &metadata.UpdateTopic{Name: u.Name, UID: t.UID, ExpectVersion: u.ExpectVersion, Labels: u.Labels,
			DeletionProtection: u.DeletionProtection}
		if cmd.ExpectVersion == 0 {
			cmd.ExpectVersion = t.MetaVersion
		}
		if err := c.drawNonce(&cmd.Nonce); err != nil {
			return nil, err
		}
		t, err = c.changeTopic(ctx, u.Name, cmd)
		if err == nil || u.ExpectVersion != 0 || !errors.Is(err, storage.ErrConflict) || ctx.Err() != nil {
			return t, err
		}
	}
}

// DeleteTopic frees the name at once; the topic stays in Deleting until its copies are gone and ForgetTopic is called. Errors:
// storage.ErrTopicNotFound, storage.ErrConflict (ExpectVersion was not met, or deletion_protection is set),
// storage.ErrUnavailable, storage.ErrOutcomeUnknown.
func (c *ControlPlane) DeleteTopic(ctx context.Context, d TopicDelete) error {
	cmd := &metadata.DeleteTopic{Name: d.Name, UID: d.UID, Nonce: d.Nonce, ExpectVersion: d.ExpectVersion, Time: c.now()}
	err := c.drawNonce(&cmd.Nonce)
	if err == nil {
		err = c.command(ctx, d.Name, cmd)
	}
	if err != nil {
		return fmt.Errorf("delete topic %.250q: %w", d.Name, err)
	}
	return nil
}

// ForgetTopic drops a deleting topic whose copies are all gone; a tombstone stays. Errors: storage.ErrTopicNotFound,
// storage.ErrConflict (it is not deleting), storage.ErrUnavailable, storage.ErrOutcomeUnknown.
func (c *ControlPlane) ForgetTopic(ctx context.Context, name string, uid storage.TopicUID) error {
	if err := c.command(ctx, name, &metadata.ForgetTopic{Name: name, UID: uid}); err != nil {
		return fmt.Errorf("forget topic %.250q (%s): %w", name, uid, err)
	}
	return nil
}

func (c *ControlPlane) command(ctx context.Context, name string, cmd metadata.Command) error {
	r, err := c.owner(name)
	if err != nil {
		return err
	}
	res, err := c.proposeVnode(ctx, r, cmd, storage.RangeID{})
	if err != nil {
		return err
	}
	return commandError(res)
}

// OpenSegment records an open segment and returns it as recorded. The caller fills Nonce (NewNonce) and keeps it on retries; a zero
// Time is filled here. Errors: storage.ErrConflict (the tail is another one, or a segment is open; re-read the topic),
// storage.ErrTopicNotFound, storage.ErrInvalid, storage.ErrTooLarge, storage.ErrUnavailable, storage.ErrOutcomeUnknown.
func (c *ControlPlane) OpenSegment(ctx context.Context, cmd metadata.OpenSegment) (*metadata.Segment, error) {
	if cmd.Time == 0 {
		cmd.Time = c.now()
	}
	res, err := c.segmentCommand(ctx, cmd.TopicName, &cmd, cmd.Range)
	if err != nil {
		return nil, fmt.Errorf("open segment %s: %w", storage.SegmentID{Range: cmd.Range, Seq: cmd.Seq}, err)
	}
	return res.Segment, nil
}

// Sealed is what SealSegment found recorded.
type Sealed struct {
	Segment *metadata.Segment // with its end; nil only where an error other than storage.ErrConflict came back
	Next    *metadata.Segment // the segment opened by the same command; nil if none was asked for or it could not be opened
	Already bool              // an earlier copy of this very command had recorded it
}

// SealSegment records the end of a segment for ever. Only a pass may call it. The caller fills Nonce and keeps it on retries; zero
// Times are filled here. With storage.ErrConflict the Segment is what someone else recorded, and that is the end. Other errors as
// OpenSegment.
func (c *ControlPlane) SealSegment(ctx context.Context, cmd metadata.SealSegment) (Sealed, error) {
	if cmd.Time == 0 {
		cmd.Time = c.now()
	}
	if cmd.Next != nil && cmd.Next.Time == 0 {
		next := *cmd.Next
		next.Time = cmd.Time
		cmd.Next = &next
	}
	res, err := c.segmentCommand(ctx, cmd.TopicName, &cmd, cmd.Segment.Range)
	s := Sealed{Segment: res.Segment, Next: res.Next, Already: res.Already}
	if err != nil {
		return s, fmt.Errorf("seal segment %s: %w", cmd.Segment, err)
	}
	return s, nil
}

// UpdateReplicas makes one step of a change of who holds copies of a sealed segment, and returns the segment as recorded. With
// storage.ErrConflict (the replicas have changed, or the step does not fit: re-read) the segment is what is recorded. Other errors
// as OpenSegment.
func (c *ControlPlane) UpdateReplicas(ctx context.Context, cmd metadata.UpdateReplicas) (*metadata.Segment, error) {
	res, err := c.segmentCommand(ctx, cmd.TopicName, &cmd, cmd.Segment.Range)
	if err != nil {
		return res.Segment, fmt.Errorf("update replicas of segment %s: %w", cmd.Segment, err)
	}
	return res.Segment, nil
}

// ResolveSegment records that a sealed segment has lost everything from an offset on, by an operator's order. The caller fills Nonce
// and keeps it on retries; a zero Time is filled here. Errors as UpdateReplicas.
func (c *ControlPlane) ResolveSegment(ctx context.Context, cmd metadata.ResolveSegment) (*metadata.Segment, error) {
	if cmd.Time == 0 {
		cmd.Time = c.now()
	}
	res, err := c.segmentCommand(ctx, cmd.TopicName, &cmd, cmd.Segment.Range)
	if err != nil {
		return res.Segment, fmt.Errorf("resolve segment %s: %w", cmd.Segment, err)
	}
	return res.Segment, nil
}

func (c *ControlPlane) segmentCommand(ctx context.Context, name string, cmd metadata.Command, rng storage.RangeID) (metadata.Result, error) {
	r, err := c.owner(name)
	if err != nil {
		return metadata.Result{}, err
	}
	res, err := c.proposeVnode(ctx, r, cmd, rng)
	if err != nil {
		return metadata.Result{}, err
	}
	return res, commandError(res)
}

// Topic finds a topic by name with a linearizable read: what was answered before this call is seen. Errors:
// storage.ErrTopicNotFound, storage.ErrStaleRoute, storage.ErrUnavailable.
func (c *ControlPlane) Topic(ctx context.Context, name string) (*metadata.Topic, error) {
	t, err := c.topic(ctx, name)
	if err != nil {
		return nil, fmt.Errorf("topic %.250q: %w", name, err)
	}
	return t, nil
}

func (c *ControlPlane) topic(ctx context.Context, name string) (*metadata.Topic, error) {
	r, err := c.owner(name)
	if err != nil {
		return nil, err
	}
	v, err := c.readVnode(ctx, r)
	if err != nil {
		return nil, err
	}
	t, outcome := v.Topic(name)
	switch outcome {
	case metadata.OutcomeOK:
		return t, nil
	case metadata.OutcomeStaleRoute:
		return nil, fmt.Errorf("vnode %d does not own it: %w", r.vnode, storage.ErrStaleRoute)
	}
	return nil, storage.ErrTopicNotFound
}

// CachedTopic finds a topic by name in what this broker has applied, without a lock, an allocation or a message. False: not known
// here, which does not mean that there is none; ask Topic.
func (c *ControlPlane) CachedTopic(name string) (*metadata.Topic, bool) {
	r := c.routes.Load().find(name)
	if r == nil {
		return nil, false
	}
	t, outcome := r.view.Load().Topic(name)
	return t, outcome == metadata.OutcomeOK
}

// CachedTopicByUID is CachedTopic by uid, over all vnodes. It also finds deleting topics.
func (c *ControlPlane) CachedTopicByUID(uid storage.TopicUID) (*metadata.Topic, bool) {
	for _, r := range c.routes.Load().vnodes {
		if t := r.view.Load().TopicByUID(uid); t != nil {
			return t, true
		}
	}
	return nil, false
}

// MaxList bounds one ListTopics.
const MaxList = 10_000

// ListTopics returns up to limit (at most MaxList) active topics by name, those after a name that have a prefix, by linearizable
// reads of all vnodes; more says that further ones follow. A vnode that does not answer makes the whole call
// storage.ErrUnavailable: a list is whole or it is not given.
func (c *ControlPlane) ListTopics(ctx context.Context, prefix, after string, limit int) (topics []*metadata.Topic, more bool, err error) {
	limit = min(limit, MaxList)
	rt := c.routes.Load()
	parts := make([][]*metadata.Topic, len(rt.vnodes))
	g, ctx := errgroup.WithContext(ctx)
	for i, r := range rt.vnodes {
		g.Go(func() error {
			v, err := c.listable(ctx, r)
			if err != nil && mutate.On("controlplane.short-list") {
				return nil
			}
			if err != nil {
				return fmt.Errorf("vnode %d: %w", r.vnode, err)
			}
			parts[i] = v.List(prefix, after, limit+1)
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return nil, false, fmt.Errorf("list topics: %w", err)
	}
	if len(rt.vnodes) == 0 {
		return nil, false, fmt.Errorf("list topics: the ring is not known: %w", storage.ErrUnavailable)
	}
	for _, p := range parts {
		topics = append(topics, p...)
	}
	slices.SortFunc(topics, func(a, b *metadata.Topic) int { return strings.Compare(a.Name, b.Name) })
	if len(topics) > limit {
		return topics[:limit], true, nil
	}
	return topics, false, nil
}

// listable is a linearizable view of a vnode that knows what it owns.
func (c *ControlPlane) listable(ctx context.Context, r *vnodeReplica) (*metadata.View, error) {
	if !r.started.Load() {
		return nil, fmt.Errorf("it is not running here: %w", storage.ErrUnavailable)
	}
	v, err := c.readVnode(ctx, r)
	if err != nil {
		return nil, err
	}
	if !v.Initialized() {
		return nil, fmt.Errorf("it has no arcs yet: %w", storage.ErrUnavailable)
	}
	return v, nil
}

// Topics are the active topics of one vnode in what this broker has applied, by name.
func (c *ControlPlane) Topics(vnode uint32) []*metadata.Topic {
	r := c.routes.Load().vnode(vnode)
	if r == nil {
		return nil
	}
	v := r.view.Load()
	active, _ := v.Len()
	out := make([]*metadata.Topic, 0, active)
	v.Topics(func(t *metadata.Topic) bool {
		out = append(out, t)
		return true
	})
	return out
}

// Deleting are the topics of one vnode that wait for ForgetTopic, in what this broker has applied, by uid.
func (c *ControlPlane) Deleting(vnode uint32) []*metadata.Topic {
	r := c.routes.Load().vnode(vnode)
	if r == nil {
		return nil
	}
	var out []*metadata.Topic
	r.view.Load().Deleting(func(t *metadata.Topic) bool {
		out = append(out, t)
		return true
	})
	return out
}
