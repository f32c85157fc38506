package coordinator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/services/rpc"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/rangelog"
	"github.com/malachilog/malachi/storage/replication"
)

const (
	// passRetry is how long a blocked pass waits before it begins again.
	passRetry = 500 * time.Millisecond
	// How long each kind of order may take before the broker counts as one that does not answer.
	askPatience    = time.Second
	drainPatience  = 1500 * time.Millisecond
	fencePatience  = 10 * time.Second // a restarted replica reads its file before its first vote
	extendPatience = time.Minute
	// morePatience is how long a pass waits for a quorum of the set to answer before it goes on with fewer.
	morePatience = 30 * time.Second
)

var sealReasons = map[replication.Reason]metadata.SealReason{
	replication.ReasonSize:            metadata.SealSize,
	replication.ReasonAge:             metadata.SealAge,
	replication.ReasonRestart:         metadata.SealPrimaryRestarted,
	replication.ReasonPrimaryGone:     metadata.SealPrimaryRestarted,
	replication.ReasonNoQuorum:        metadata.SealUnderReplicated,
	replication.ReasonUnderReplicated: metadata.SealUnderReplicated,
	replication.ReasonDrain:           metadata.SealDrain,
	replication.ReasonFenced:          metadata.SealFailedCopy,
	replication.ReasonFailed:          metadata.SealFailedCopy,
	replication.ReasonUnconfirmed:     metadata.SealNotConfirmed,
	replication.ReasonDelete:          metadata.SealTopicDeleted,
	replication.ReasonOperator:        metadata.SealOperator,
}

// pass runs the pass over one segment until it is closed in the record, by this pass or a racer's, or ctx ends. One at a time per segment.
func (c *Coordinator) pass(ctx context.Context, id storage.SegmentID, why replication.Reason) error {
	_, err, _ := c.heads.Do("pass "+id.String(), func() (any, error) {
		return nil, c.runPass(ctx, id, why)
	})
	return err
}

// passRun is one pass being carried out.
type passRun struct {
	c       *Coordinator
	topic   *metadata.Topic
	seg     *metadata.Segment
	why     replication.Reason
	machine *replication.Pass
	votes   map[storage.BrokerID]rangelog.Vote
	events  chan func() []replication.Order // what came of orders; each is run by the one goroutine that owns the machine
	pending int
}

func (c *Coordinator) runPass(ctx context.Context, id storage.SegmentID, why replication.Reason) error {
	t, ok := c.deps.ControlPlane.CachedTopicByUID(id.Range.Topic)
	if !ok {
		return fmt.Errorf("topic %s: %w", id.Range.Topic, storage.ErrTopicNotFound)
	}
	seg := t.Segment(id)
	if seg == nil || seg.State != metadata.SegmentOpen {
		return nil // somebody was first
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // what is still under way when the pass is over answers nobody
	p := &passRun{
		c: c, topic: t, seg: seg, why: why, machine: replication.NewPass(seg.Replicas, seg.Quorum, why), votes: map[storage.BrokerID]rangelog.Vote{},
		events: make(chan func() []replication.Order, 4*len(seg.Replicas)),
	}
	defer c.setBlocked(id.Range, "")
	p.machine.WaitForMore()
	orders := p.machine.Begin()
	for {
		for _, o := range orders {
			done, err := p.carryOut(ctx, o)
			if done || err != nil {
				return err
			}
		}
		if p.pending == 0 {
			return fmt.Errorf("pass over %s ended without an order: %w", seg.ID, storage.ErrUnavailable)
		}
		select {
		case event := <-p.events:
			p.pending--
			orders = event()
		case <-ctx.Done():
			return p.gaveUp(ctx)
		}
	}
}

func (p *passRun) gaveUp(ctx context.Context) error {
	return fmt.Errorf("pass over %s: %w: %w", p.seg.ID, storage.ErrUnavailable, ctx.Err())
}

// carryOut does what the machine orders; what came of it arrives as an event.
func (p *passRun) carryOut(ctx context.Context, o replication.Order) (done bool, err error) {
	switch o.Kind {
	case replication.OrderStop:
		return true, nil
	case replication.OrderSeal:
		return true, p.record(ctx, o.Outcome)
	case replication.OrderWait:
		p.c.setBlocked(p.seg.ID.Range, o.Blocked)
		p.c.log.Warn("range is blocked", "topic", p.topic.Name, "segment", p.seg.ID.String(), "by", o.Blocked)
		pause(ctx, passRetry)
		if ctx.Err() != nil {
			return true, fmt.Errorf("range %s is blocked: %s: %w", p.seg.ID.Range, o.Blocked, storage.ErrUnavailable)
		}
		p.event(p.machine.Retry)
		return false, nil
	}
	p.pending++
	if !p.c.spawn(func(context.Context) {
		event := p.machine.More
		if o.Kind == replication.OrderMore {
			p.awaitMore(ctx)
		} else {
			event = p.ask(ctx, o)
		}
		select {
		case p.events <- event:
		case <-ctx.Done():
		}
	}) {
		return true, storage.ErrClosed
	}
	return false, nil
}

// awaitMore returns when as many of the set answer as an acknowledgement needs, or after a while.
func (p *passRun) awaitMore(ctx context.Context) {
	p.c.setBlocked(p.seg.ID.Range, fmt.Sprintf("fewer than %d of its replicas answer: waiting up to %v for more", p.seg.Quorum, morePatience))
	ctx, cancel := context.WithTimeout(ctx, morePatience)
	defer cancel()
	for ctx.Err() == nil {
		pause(ctx, passRetry)
		there := 0
		for _, b := range p.seg.Replicas {
			if w, err := p.c.way(b); err == nil {
				call, cancel := context.WithTimeout(ctx, askPatience)
				if _, err := w.Ask(call, p.seg.ID); err == nil {
					there++
				}
				cancel()
			}
		}
		if there >= p.seg.Quorum {
			return
		}
	}
}

func (p *passRun) event(f func() []replication.Order) {
	p.pending++
	p.events <- f
}

// ask tells one broker what is wanted of it.
func (p *passRun) ask(ctx context.Context, o replication.Order) func() []replication.Order {
	m, id, b := p.machine, p.seg.ID, o.Broker
	unreachable := func() []replication.Order {
		p.c.avoidOn(id.Range, b)
		return m.Unreachable(b)
	}
	w, err := p.c.way(b)
	switch o.Kind {
	case replication.OrderAsk:
		if err != nil {
			return unreachable
		}
		ctx, cancel := context.WithTimeout(ctx, askPatience)
		defer cancel()
		serving, err := w.Ask(ctx, id)
		if err != nil {
			return unreachable
		}
		if mutate.On("coordinator.seal-on-suspicion") {
			serving = false
		}
		return func() []replication.Order { return m.Answered(b, serving) }
	case replication.OrderDrain:
		ctx, cancel := context.WithTimeout(ctx, drainPatience)
		defer cancel()
		if err == nil {
			err = w.Drain(ctx, id)
		}
		if err != nil {
			p.c.log.Debug("primary did not drain", "segment", id.String(), "error", err)
		}
		return func() []replication.Order { return m.Drained(b) }
	case replication.OrderFence:
		return p.fence(ctx, w, b, err)
	}
	if err != nil {
		return func() []replication.Order { return m.NotExtended(b, false) }
	}
	ctx, cancel := context.WithTimeout(ctx, extendPatience)
	defer cancel()
	end, digest, err := w.Extend(ctx, id, o.Holder, o.Outcome.End)
	if err != nil {
		p.c.log.Warn("replica could not be extended", "segment", id.String(), "broker", b.String(), "holder", o.Holder.String(), "error", err)
		return func() []replication.Order { return m.NotExtended(b, errors.Is(err, rpc.ErrHolderFailed)) }
	}
	return func() []replication.Order { return m.Extended(b, end, digest) }
}

func (p *passRun) fence(ctx context.Context, w Replicas, b storage.BrokerID, err error) func() []replication.Order {
	m := p.machine
	var v rangelog.Vote
	if err == nil {
		ctx, cancel := context.WithTimeout(ctx, fencePatience)
		defer cancel()
		v, err = w.Fence(ctx, p.seg.ID, p.seg.Header)
	}
	switch {
	case err == nil, mutate.On("coordinator.damaged-votes") && errors.Is(err, storage.ErrDamaged):
		return func() []replication.Order {
			p.votes[b] = v
			return m.Voted(b, replication.Vote{End: v.End, Bytes: v.Pos, Digest: v.Digest})
		}
	case errors.Is(err, storage.ErrDamaged), errors.Is(err, storage.ErrStorageFailed):
		p.c.avoidOn(p.seg.ID.Range, b)
		return func() []replication.Order { return m.NoVote(b, err) }
	}
	p.c.log.Debug("replica gives no vote", "segment", p.seg.ID.String(), "broker", b.String(), "error", err)
	return func() []replication.Order {
		if errors.Is(err, storage.ErrUnavailable) {
			p.c.avoidOn(p.seg.ID.Range, b)
		}
		return m.NoVote(b, err)
	}
}

// record proposes the seal. If another pass was first, its values stand and this one has nothing left to do. The next segment is opened by the
// same command where brokers for it are there.
func (p *passRun) record(ctx context.Context, out replication.Outcome) error {
	c := p.c
	nonce, err := c.deps.ControlPlane.NewNonce()
	if err != nil {
		return err
	}
	r := p.topic.Range(p.seg.ID.Range)
	at := c.notBefore(r, max(p.votes[out.Holder].LastAppend, p.seg.CreateTime))
	cmd := metadata.SealSegment{
		TopicName: p.topic.Name, Topic: p.topic.UID, Segment: p.seg.ID, Nonce: nonce,
		End: out.End, DataBytes: uint64(out.Bytes), Digest: out.Digest, Votes: out.Holders, Time: at, Reason: sealReasons[p.why],
	}
	if p.goesOn(out) && r.State == metadata.RangeActive {
		if cmd.Next, err = c.nextOpen(p.topic, r, out.End, at); err != nil {
			c.log.Warn("the next segment cannot be placed yet", "topic", p.topic.Name, "range", r.ID.String(), "error", err)
		}
	}
	sealed, err := c.deps.ControlPlane.SealSegment(ctx, cmd)
	if err != nil && !errors.Is(err, storage.ErrConflict) {
		return fmt.Errorf("record seal of %s: %w", p.seg.ID, err)
	}
	p.machine.Finish()
	p.tell(ctx, sealed.Segment)
	if sealed.Next != nil {
		if why, err := c.openReplicas(ctx, sealed.Next); err != nil {
			c.log.Info("the next segment is not served yet", "segment", sealed.Next.ID.String(), "reason", string(why), "error", err)
		}
	}
	return nil
}

// goesOn reports whether the next segment is opened at once: not after a restart of everything, or where nothing was ever written, for then the
// first produce opens it.
func (p *passRun) goesOn(out replication.Outcome) bool {
	switch p.why {
	case replication.ReasonDelete, replication.ReasonRestart, replication.ReasonUnconfirmed:
		return false
	}
	return out.End > storage.EndBefore(p.seg.Base)
}

func (p *passRun) tell(ctx context.Context, seg *metadata.Segment) {
	if seg == nil {
		return
	}
	level := slog.LevelInfo
	if p.why == replication.ReasonRestart { // every open segment of the boot before: told in sum by the recovery
		level = slog.LevelDebug
	}
	p.c.log.Log(ctx, level, "segment closed", "topic", p.topic.Name, "segment", p.seg.ID.String(), "reason", string(p.why),
		"state", seg.State.String(), "end", uint64(seg.End))
}
