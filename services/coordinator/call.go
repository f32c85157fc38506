package coordinator

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/gen/go/malachi/intra/v1/intrav1connect"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/services/replica"
	"github.com/malachilog/malachi/services/rpc"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/replication"
)

// askTime bounds a question to another broker's coordinator where nobody waits for it.
const askTime = 2 * time.Second

// EnsureHead returns the open segment of a range once it is served, asking the topic's coordinator, which may be this broker. Errors:
// storage.ErrTopicNotFound, ErrStaleRoute (the range owns nothing any more), ErrUnavailable with what the range waits for.
func (c *Coordinator) EnsureHead(ctx context.Context, uid storage.TopicUID, id storage.RangeID) (*metadata.Segment, error) {
	for {
		seg, err := c.ensureAnywhere(ctx, uid, id)
		if !errors.Is(err, storage.ErrStaleRoute) || ctx.Err() != nil {
			return seg, err
		}
		if _, _, gone := c.find(id); gone != nil {
			return nil, gone
		}
		pause(ctx, 50*time.Millisecond) // the coordinator has changed
	}
}

func (c *Coordinator) ensureAnywhere(ctx context.Context, uid storage.TopicUID, id storage.RangeID) (*metadata.Segment, error) {
	b, ok := c.deps.ControlPlane.CoordinatorOf(uid)
	switch {
	case !ok:
		if _, known := c.deps.ControlPlane.CachedTopicByUID(uid); !known {
			return nil, fmt.Errorf("topic %s: %w", uid, storage.ErrTopicNotFound)
		}
		pause(ctx, 50*time.Millisecond) // an election is under way
		if ctx.Err() != nil {
			return nil, fmt.Errorf("the topic's metadata has no leader: %w", storage.ErrUnavailable)
		}
		return nil, storage.ErrStaleRoute
	case b == c.cfg.Self:
		return c.ensureHead(ctx, id)
	}
	client, err := c.client(b)
	if err != nil {
		return nil, err
	}
	call, cancel := context.WithTimeout(ctx, headPatience)
	defer cancel()
	res, err := client.EnsureHead(call, &intrav1.EnsureHeadRequest{Range: replica.RangeKey(id)})
	if err != nil {
		err = rpc.PeerCallError(call, b, err)
		if errors.Is(err, storage.ErrUnavailable) && ctx.Err() == nil {
			pause(ctx, 100*time.Millisecond)
			if now, ok := c.deps.ControlPlane.CoordinatorOf(uid); !ok || now != b { // it has another coordinator now
				return nil, fmt.Errorf("%w: %w", storage.ErrStaleRoute, err)
			}
		}
		return nil, err
	}
	return c.awaitSegment(ctx, storage.SegmentID{Range: id, Seq: res.GetSegment()})
}

// awaitSegment returns a segment's record once this broker has it.
func (c *Coordinator) awaitSegment(ctx context.Context, id storage.SegmentID) (*metadata.Segment, error) {
	t, err := c.deps.ControlPlane.Await(ctx, id.Range.Topic, func(t *metadata.Topic) bool { return t.Segment(id) != nil })
	if err != nil {
		return nil, fmt.Errorf("segment %s is not known here yet: %w: %w", id, storage.ErrUnavailable, err)
	}
	return t.Segment(id), nil
}

func (c *Coordinator) client(b storage.BrokerID) (intrav1connect.CoordinatorServiceClient, error) {
	conn, err := c.deps.Peers.Client(b)
	if err != nil {
		return nil, err
	}
	return intrav1connect.NewCoordinatorServiceClient(conn), nil
}

// requested are the reasons that others may give.
var requested = []replication.Reason{
	replication.ReasonSize, replication.ReasonAge, replication.ReasonPrimaryGone, replication.ReasonFenced, replication.ReasonFailed,
	replication.ReasonNoQuorum, replication.ReasonDrain,
}

// askEvery bounds how often one segment's coordinator is asked for a pass by this broker.
const askEvery = 500 * time.Millisecond

// AskPass asks the coordinator of a segment, which may be this broker, for a pass. It does not block, and asking again costs nothing.
func (c *Coordinator) AskPass(id storage.SegmentID, why replication.Reason) { c.askPass(id, why) }

func (c *Coordinator) askPass(id storage.SegmentID, why replication.Reason) {
	c.mu.Lock()
	now := c.deps.Now()
	if now.Sub(c.asked[id]) < askEvery {
		c.mu.Unlock()
		return
	}
	if len(c.asked) > 10_000 {
		clear(c.asked)
	}
	c.asked[id] = now
	c.mu.Unlock()
	c.spawn(func(ctx context.Context) {
		if err := c.request(ctx, id, why); err != nil && ctx.Err() == nil {
			c.log.Debug("pass not asked for", "segment", id.String(), "reason", string(why), "error", err)
		}
	})
}

func (c *Coordinator) request(ctx context.Context, id storage.SegmentID, why replication.Reason) error {
	b, ok := c.deps.ControlPlane.CoordinatorOf(id.Range.Topic)
	if !ok {
		return storage.ErrUnavailable
	}
	if b == c.cfg.Self {
		return c.requested(id, why, c.cfg.Self)
	}
	client, err := c.client(b)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	_, err = client.RequestPass(ctx, &intrav1.RequestPassRequest{Segment: replica.SegmentKey(id), Reason: string(why), From: uint64(c.cfg.Self)})
	return rpc.PeerCallError(ctx, b, err)
}

// requested begins a pass that a broker has asked for.
func (c *Coordinator) requested(id storage.SegmentID, why replication.Reason, from storage.BrokerID) error {
	if !slices.Contains(requested, why) {
		return fmt.Errorf("reason %.40q: %w", why, storage.ErrInvalid)
	}
	if !c.leads(id.Range.Topic) {
		return fmt.Errorf("topic %s is coordinated elsewhere: %w", id.Range.Topic, storage.ErrStaleRoute)
	}
	if !c.stillOpen(id) {
		return nil
	}
	if why == replication.ReasonDrain { // it stops: it may follow, and heads nothing
		c.avoidOn(id.Range, from)
	}
	if why == replication.ReasonNoQuorum { // a partition may have cut only it: it does not head the next one
		c.avoidOn(id.Range, from)
	}
	c.mu.Lock()
	ctx := c.ctx
	c.mu.Unlock()
	if ctx == nil {
		return storage.ErrClosed
	}
	c.startPass(ctx, id, why)
	return nil
}

// Server answers the calls of other brokers. It implements intrav1connect.CoordinatorServiceHandler.
type Server struct{ c *Coordinator }

// NewServer returns the server of a coordinator.
func NewServer(c *Coordinator) *Server { return &Server{c} }

// EnsureHead opens the segment that a range needs.
func (s *Server) EnsureHead(ctx context.Context, req *intrav1.EnsureHeadRequest) (*intrav1.EnsureHeadResponse, error) {
	id, err := replica.ParseRangeKey(req.GetRange())
	if err != nil {
		return nil, err
	}
	if !s.c.leads(id.Topic) {
		return nil, fmt.Errorf("topic %s is coordinated elsewhere: %w", id.Topic, storage.ErrStaleRoute)
	}
	seg, err := s.c.ensureHead(ctx, id)
	if err != nil {
		return nil, err
	}
	return &intrav1.EnsureHeadResponse{Segment: seg.ID.Seq}, nil
}

// RequestPass begins a pass.
func (s *Server) RequestPass(_ context.Context, req *intrav1.RequestPassRequest) (*intrav1.RequestPassResponse, error) {
	id, err := replica.ParseSegmentKey(req.GetSegment())
	if err == nil {
		err = s.c.requested(id, replication.Reason(req.GetReason()), storage.BrokerID(req.GetFrom()))
	}
	if err != nil {
		return nil, err
	}
	return &intrav1.RequestPassResponse{}, nil
}

// Blocked lists what ranges of this broker's loops wait for.
func (s *Server) Blocked(context.Context, *intrav1.BlockedRequest) (*intrav1.BlockedResponse, error) {
	out := &intrav1.BlockedResponse{}
	for id, by := range s.c.AllBlocked() {
		out.Ranges = append(out.Ranges, &intrav1.BlockedRange{Range: replica.RangeKey(id), By: by})
	}
	return out, nil
}
