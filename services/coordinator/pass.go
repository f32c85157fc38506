package coordinator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/rangelog"
	"github.com/malachilog/malachi/storage/replication"
)

// passRetry is how long a blocked pass waits before it begins again.
const passRetry = 500 * time.Millisecond

var sealReasons = map[replication.Reason]metadata.SealReason{
	replication.ReasonSize:        metadata.SealSize,
	replication.ReasonAge:         metadata.SealAge,
	replication.ReasonRestart:     metadata.SealPrimaryRestarted,
	replication.ReasonPrimaryGone: metadata.SealPrimaryRestarted,
	replication.ReasonFenced:      metadata.SealFailedCopy,
	replication.ReasonFailed:      metadata.SealFailedCopy,
	replication.ReasonUnconfirmed: metadata.SealNotConfirmed,
	replication.ReasonDelete:      metadata.SealTopicDeleted,
	replication.ReasonOperator:    metadata.SealOperator,
}

// pass runs the pass over one segment until it is closed in the record, by this pass or a racer's, or ctx ends. One at a time per segment.
func (c *Coordinator) pass(ctx context.Context, uid storage.TopicUID, id storage.RangeID, seq uint32, why replication.Reason) error {
	_, err, _ := c.heads.Do(fmt.Sprintf("pass %s/%d", id, seq), func() (any, error) {
		return nil, c.runPass(ctx, uid, id, seq, why)
	})
	return err
}

// passRun is one pass being carried out.
type passRun struct {
	c       *Coordinator
	topic   *metadata.Topic
	seg     *metadata.Segment
	machine *replication.Pass
	votes   map[storage.BrokerID]rangelog.Vote
}

func (c *Coordinator) runPass(ctx context.Context, uid storage.TopicUID, id storage.RangeID, seq uint32, why replication.Reason) error {
	t, ok := c.deps.ControlPlane.CachedTopicByUID(uid)
	if !ok {
		return fmt.Errorf("topic %s: %w", uid, storage.ErrTopicNotFound)
	}
	seg := t.Segment(storage.SegmentID{Range: id, Seq: seq})
	if seg == nil || seg.State != metadata.SegmentOpen {
		return nil // somebody was first
	}
	p := &passRun{c: c, topic: t, seg: seg, machine: replication.NewPass(seg.Replicas, seg.Quorum, why), votes: map[storage.BrokerID]rangelog.Vote{}}
	defer c.setBlocked(id, "")
	orders := p.machine.Begin()
	for len(orders) > 0 {
		var next []replication.Order
		for _, o := range orders {
			more, done, err := p.carryOut(ctx, o, why)
			if done || err != nil {
				return err
			}
			next = append(next, more...)
		}
		orders = next
	}
	return fmt.Errorf("pass over %s ended without an order: %w", seg.ID, storage.ErrUnavailable)
}

// carryOut does what the machine orders and tells it what came of it.
func (p *passRun) carryOut(ctx context.Context, o replication.Order, why replication.Reason) (next []replication.Order, done bool, err error) {
	m, id := p.machine, p.seg.ID
	switch o.Kind {
	case replication.OrderStop:
		return nil, true, nil
	case replication.OrderWait:
		p.c.setBlocked(id.Range, o.Blocked)
		p.c.log.Warn("range is blocked", "topic", p.topic.Name, "range", id.Range.String(), "segment", id.Seq, "by", o.Blocked)
		select {
		case <-time.After(passRetry):
			return m.Retry(), false, nil
		case <-ctx.Done():
			return nil, true, fmt.Errorf("range %s is blocked: %s: %w", id.Range, o.Blocked, storage.ErrUnavailable)
		}
	case replication.OrderSeal:
		return nil, true, p.record(ctx, o.Outcome, why)
	}
	b := p.c.deps.Replicas(o.Broker)
	if b == nil {
		return m.Unreachable(o.Broker), false, nil
	}
	switch o.Kind {
	case replication.OrderAsk:
		serving, err := b.Ask(ctx, id)
		if err != nil {
			return m.Unreachable(o.Broker), false, nil
		}
		return m.Answered(o.Broker, serving), false, nil
	case replication.OrderDrain:
		if err := b.Drain(ctx, id); err != nil {
			p.c.log.Debug("primary did not drain", "segment", id.String(), "error", err)
		}
		return m.Drained(o.Broker), false, nil
	case replication.OrderFence:
		v, err := b.Fence(ctx, id, p.seg.Header)
		if err != nil {
			return m.NoVote(o.Broker, err), false, nil
		}
		p.votes[o.Broker] = v
		return m.Voted(o.Broker, replication.Vote{End: v.End, Bytes: v.Pos, Digest: v.Digest}), false, nil
	}
	return nil, true, fmt.Errorf("pass over %s orders %d, which a set of one never needs: %w", id, o.Kind, storage.ErrUnavailable)
}

// record proposes the seal. If another pass was first, its values stand and this one has nothing left to do. A roll opens the next segment
// with the same command.
func (p *passRun) record(ctx context.Context, out replication.Outcome, why replication.Reason) error {
	c := p.c
	nonce, err := c.deps.ControlPlane.NewNonce()
	if err != nil {
		return err
	}
	r := p.topic.Range(p.seg.ID.Range)
	at := c.notBefore(r, max(p.votes[out.Holder].LastAppend, p.seg.CreateTime))
	cmd := metadata.SealSegment{
		TopicName: p.topic.Name, Topic: p.topic.UID, Segment: p.seg.ID, Nonce: nonce,
		End: out.End, DataBytes: uint64(out.Bytes), Digest: out.Digest, Votes: out.Holders, Time: at, Reason: sealReasons[why],
	}
	if (why == replication.ReasonSize || why == replication.ReasonAge) && r.State == metadata.RangeActive {
		if cmd.Next, err = c.nextOpen(p.topic, r, out.End, at); err != nil {
			return err
		}
	}
	sealed, err := c.deps.ControlPlane.SealSegment(ctx, cmd)
	if err != nil && !errors.Is(err, storage.ErrConflict) {
		return fmt.Errorf("record seal of %s: %w", p.seg.ID, err)
	}
	p.machine.Finish()
	if sealed.Next != nil {
		if err := c.openReplicas(ctx, sealed.Next); err != nil {
			return err
		}
	}
	if sealed.Segment != nil {
		level := slog.LevelInfo
		if why == replication.ReasonRestart { // every open segment of the boot before: told in sum by the recovery
			level = slog.LevelDebug
		}
		c.log.Log(ctx, level, "segment closed", "topic", p.topic.Name, "segment", p.seg.ID.String(), "reason", string(why),
			"state", sealed.Segment.State.String(), "end", uint64(sealed.Segment.End))
	}
	return nil
}
