package coordinator

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/services/controlplane/root"
	"github.com/malachilog/malachi/services/placement"
	"github.com/malachilog/malachi/services/replica"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/replication"
	"github.com/malachilog/malachi/storage/segment"
)

const (
	headPatience = 10 * time.Second
	// openPatience is how long the opening of a segment may take before it is given up and placed elsewhere.
	openPatience = 2 * time.Second
	openAgain    = 500 * time.Millisecond
)

// ensureHead returns the open segment of a range that this broker coordinates once it is served, opening one if there is none and closing one
// that can't be served any more. Errors: storage.ErrTopicNotFound, ErrStaleRoute (the range owns nothing any more), ErrUnavailable with what the
// range waits for.
func (c *Coordinator) ensureHead(ctx context.Context, id storage.RangeID) (*metadata.Segment, error) {
	ch := c.heads.DoChan("head "+id.String(), func() (any, error) {
		work, cancel := context.WithTimeout(context.WithoutCancel(ctx), headPatience)
		defer cancel()
		return c.makeHead(work, id)
	})
	select {
	case r := <-ch:
		if r.Err != nil {
			return nil, r.Err
		}
		return r.Val.(*metadata.Segment), nil
	case <-ctx.Done():
		return nil, c.notYet(id)
	}
}

func (c *Coordinator) notYet(id storage.RangeID) error {
	if by := c.Blocked(id); by != "" {
		return fmt.Errorf("range %s is blocked: %s: %w", id, by, storage.ErrUnavailable)
	}
	return fmt.Errorf("range %s has no open segment yet: %w", id, storage.ErrUnavailable)
}

func (c *Coordinator) makeHead(ctx context.Context, id storage.RangeID) (*metadata.Segment, error) {
	for range 5 {
		t, r, err := c.find(id)
		if err != nil {
			return nil, err
		}
		seg := r.Open
		if seg == nil {
			if seg, err = c.open(ctx, t, r); err != nil {
				return nil, err
			}
		} else if c.bootOf(seg.Primary()) != seg.PrimaryBoot {
			if err := c.pass(ctx, seg.ID, replication.ReasonRestart); err != nil {
				return nil, err
			}
			continue
		}
		why, err := c.openReplicas(ctx, seg)
		if err == nil {
			return seg, nil
		}
		if why == "" {
			return nil, err
		}
		if err := c.pass(ctx, seg.ID, why); err != nil {
			return nil, err
		}
	}
	return nil, fmt.Errorf("range %s: its segments are closed as fast as they are opened: %w", id, storage.ErrUnavailable)
}

func (c *Coordinator) find(id storage.RangeID) (*metadata.Topic, *metadata.Range, error) {
	t, ok := c.deps.ControlPlane.CachedTopicByUID(id.Topic)
	if !ok || t.State != metadata.TopicActive {
		return nil, nil, fmt.Errorf("topic %s: %w", id.Topic, storage.ErrTopicNotFound)
	}
	r := t.Range(id)
	if r == nil || r.State != metadata.RangeActive {
		return nil, nil, fmt.Errorf("range %s takes no appends: %w", id, storage.ErrStaleRoute)
	}
	return t, r, nil
}

// open records the next segment of a range.
func (c *Coordinator) open(ctx context.Context, t *metadata.Topic, r *metadata.Range) (*metadata.Segment, error) {
	cmd, err := c.nextOpen(t, r, r.SealedEnd, c.notBefore(r, 0))
	if err != nil {
		c.setBlocked(r.ID, err.Error())
		return nil, err
	}
	seg, err := c.deps.ControlPlane.OpenSegment(ctx, *cmd)
	if err != nil {
		return nil, fmt.Errorf("open segment of range %s: %w", r.ID, err)
	}
	c.setBlocked(r.ID, "")
	return seg, nil
}

// notBefore is a creation time at which append times of the range can't fall: now, or the recorded time of the last seal, which is not
// before its last append; last, if given, is that of the segment being closed.
func (c *Coordinator) notBefore(r *metadata.Range, last storage.Time) storage.Time {
	at := max(storage.Time(c.deps.Now().UnixNano()), last)
	if n := len(r.Closed); n > 0 {
		at = max(at, r.Closed[n-1].SealTime)
	}
	return at
}

// nextOpen is the command that opens the next segment of a range at base, on a set that is placed now, with the n and q that the policy means
// now. They are recorded with it and never looked up again. Errors: *placement.Shortage (storage.ErrUnavailable).
func (c *Coordinator) nextOpen(t *metadata.Topic, r *metadata.Range, base storage.End, at storage.Time) (*metadata.OpenSegment, error) {
	id := storage.SegmentID{Range: r.ID, Seq: r.NextSegment}
	policy := c.deps.ControlPlane.Policy()
	set, err := c.place(id, policy)
	if err != nil {
		return nil, fmt.Errorf("place %s: %w", id, err)
	}
	nonce, err := c.deps.ControlPlane.NewNonce()
	if err != nil {
		return nil, err
	}
	h := segment.Header{ID: id, Topic: t.Name, Slice: r.Slice, Base: base.Next(), CreateTime: at}
	for _, p := range r.Parents {
		h.Lineage = append(h.Lineage, segment.Parent(p))
	}
	raw, err := h.Encode()
	if err != nil {
		return nil, err
	}
	return &metadata.OpenSegment{
		TopicName: t.Name, Topic: t.UID, Range: r.ID, Seq: id.Seq, Base: base.Next(), Nonce: nonce,
		Replicas: set, Quorum: policy.Quorum(), ReplicationFactor: policy.ReplicationFactor, PrimaryBoot: c.bootOf(set[0]), Header: raw, Time: at,
	}, nil
}

func (c *Coordinator) place(id storage.SegmentID, policy root.Policy) ([]storage.BrokerID, error) {
	return placement.Choose(placement.KeyOfSegment(id), c.deps.Brokers(), policy.ReplicationFactor, placement.Rules{
		SpreadBy: policy.SpreadBy, MinDomains: policy.MinDomains, Hard: policy.Placement == root.PlacementHard,
		Min: max(policy.Quorum(), policy.MinReplicas), Avoid: c.avoided(id.Range),
	})
}

// openReplicas tells the set to open the segment: the followers, then the primary once a quorum with it has confirmed. The others are told
// until they confirm or the segment is closed. With an error, why is the reason for a pass, or empty if none would help.
func (c *Coordinator) openReplicas(ctx context.Context, seg *metadata.Segment) (why replication.Reason, err error) {
	o := replica.Open{Header: seg.Header, Set: seg.Replicas, Quorum: seg.Quorum, Boot: seg.PrimaryBoot}
	answers := make(chan confirmed, len(seg.Replicas))
	for _, b := range seg.Replicas[1:] {
		if !c.spawn(func(ctx context.Context) { answers <- confirmed{b, c.openOne(ctx, b, o)} }) {
			return "", storage.ErrClosed
		}
	}
	have, told := 1, 0
	var late []storage.BrokerID
	var faults []error
	for ; told < len(seg.Replicas)-1 && have < seg.Quorum; told++ {
		a := <-answers
		switch {
		case a.err == nil:
			have++
			continue
		case closedError(a.err):
			return replication.ReasonFenced, a.err
		}
		late, faults = append(late, a.b), append(faults, a.err)
	}
	if have < seg.Quorum {
		c.avoidOn(seg.ID.Range, late...)
		return replication.ReasonUnconfirmed, fmt.Errorf("segment %s: %d of its set confirm, %d are needed: %w: %w", seg.ID, have, seg.Quorum,
			storage.ErrUnavailable, errors.Join(faults...))
	}
	err = c.openOne(ctx, seg.Primary(), o)
	switch {
	case err == nil:
		c.openLate(seg, o, late, answers, len(seg.Replicas)-1-told)
		return "", nil
	case closedError(err):
		return replication.ReasonFenced, err
	}
	c.avoidOn(seg.ID.Range, seg.Primary())
	return replication.ReasonUnconfirmed, err
}

// confirmed is what became of telling one broker to open a replica.
type confirmed struct {
	b   storage.BrokerID
	err error
}

// closedError reports whether a replica cannot be opened because it was closed: fenced though the record says open simply needs a pass.
func closedError(err error) bool {
	return errors.Is(err, storage.ErrStaleBoot) || errors.Is(err, storage.ErrSealed) || errors.Is(err, storage.ErrFenced)
}

func (c *Coordinator) openOne(ctx context.Context, b storage.BrokerID, o replica.Open) error {
	w, err := c.way(b)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, openPatience)
	defer cancel()
	return w.Open(ctx, o)
}

// openLate tells the followers that have not confirmed again and again, until each has or the segment is closed: opening is idempotent. late are
// those that failed; pending ones will say so on answers.
func (c *Coordinator) openLate(seg *metadata.Segment, o replica.Open, late []storage.BrokerID, answers <-chan confirmed, pending int) {
	if len(late)+pending == 0 {
		return
	}
	c.mu.Lock()
	busy := c.opening[seg.ID]
	c.opening[seg.ID] = true
	c.mu.Unlock()
	if busy {
		return
	}
	end := func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.opening, seg.ID)
	}
	if !c.spawn(func(ctx context.Context) {
		defer end()
		for range pending {
			if a := <-answers; a.err != nil {
				late = append(late, a.b)
			}
		}
		for len(late) > 0 && ctx.Err() == nil {
			pause(ctx, openAgain)
			if !c.stillOpen(seg.ID) {
				return
			}
			late = slices.DeleteFunc(late, func(b storage.BrokerID) bool {
				err := c.openOne(ctx, b, o)
				return err == nil || closedError(err)
			})
		}
	}) {
		end()
	}
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

func (c *Coordinator) stillOpen(id storage.SegmentID) bool {
	t, ok := c.deps.ControlPlane.CachedTopicByUID(id.Range.Topic)
	if !ok || t.State != metadata.TopicActive {
		return false
	}
	seg := t.Segment(id)
	return seg != nil && seg.State == metadata.SegmentOpen
}
