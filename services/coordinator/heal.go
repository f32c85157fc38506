package coordinator

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/services/controlplane/root"
	"github.com/malachilog/malachi/services/placement"
	"github.com/malachilog/malachi/storage"
)

const (
	healEvery = 5 * time.Second
	// healPatience bounds one copy.
	healPatience = 10 * time.Minute
	// goneFor is how long a broker must be away before its copies are made elsewhere.
	goneFor = 10 * time.Minute
	// incomingMost bounds the copies that one coordinator has under way.
	incomingMost = 16
	// scrubRate is how many bytes a second are read to find rot.
	scrubRate  = 16 << 20
	scrubPause = time.Minute // between two rounds
)

// Copies are the own copies of sealed segments.
type Copies interface {
	// Heal puts a proved copy here, if there is none.
	Heal(ctx context.Context, seg *metadata.Segment) error
	// CheckCopy reads the own copy whole and compares it with the record.
	CheckCopy(seg *metadata.Segment, pace func(n int) error) error
}

// suspects are own copies that did not verify when somebody read them.
type suspects struct {
	mu   sync.Mutex
	ids  map[storage.SegmentID]bool
	wake chan struct{}
}

// Damaged tells that the own copy of a sealed segment did not verify. It does not block.
func (c *Coordinator) Damaged(id storage.SegmentID) {
	c.suspects.mu.Lock()
	defer c.suspects.mu.Unlock()
	if len(c.suspects.ids) < 10_000 {
		c.suspects.ids[id] = true
	}
	select {
	case c.suspects.wake <- struct{}{}:
	default:
	}
}

func (c *Coordinator) takeSuspects() map[storage.SegmentID]bool {
	c.suspects.mu.Lock()
	defer c.suspects.mu.Unlock()
	out := c.suspects.ids
	c.suspects.ids = map[storage.SegmentID]bool{}
	return out
}

// healLoop gives this broker the copies that the record says it has, or is to get, and removes those that the record gives to others.
func (c *Coordinator) healLoop(ctx context.Context) {
	tick := time.NewTicker(healEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-c.suspects.wake:
		}
		c.healOwn(ctx, c.takeSuspects())
	}
}

func (c *Coordinator) healOwn(ctx context.Context, damaged map[storage.SegmentID]bool) {
	here, err := c.deps.Store.List()
	if err != nil {
		c.log.Warn("own copies cannot be listed", "error", err)
		return
	}
	held := make(map[storage.SegmentID]bool, len(here))
	for _, id := range here {
		held[id] = true
		if mutate.On("coordinator.absence-condemns") {
			if t, ok := c.deps.ControlPlane.CachedTopicByUID(id.Range.Topic); !ok || t.Segment(id) == nil {
				_ = c.deps.Replicas(c.cfg.Self).Drop(ctx, id)
			}
		}
	}
	for _, id := range c.deps.Store.Live() {
		held[id] = true // it is finished, not healed, unless it is damaged
	}
	c.eachSealed(func(t *metadata.Topic, seg *metadata.Segment) bool {
		mine, comes := slices.Contains(seg.Replicas, c.cfg.Self), slices.Contains(seg.Incoming, c.cfg.Self)
		switch {
		case (mine || comes) && (!held[seg.ID] || damaged[seg.ID]), comes:
			c.healOne(ctx, t, seg, comes)
		case !mine && !comes && held[seg.ID]: // its record names another set: that fact condemns what is here
			if err := c.deps.Replicas(c.cfg.Self).Drop(ctx, seg.ID); err != nil && ctx.Err() == nil {
				c.log.Warn("copy that is recorded elsewhere was not removed", "segment", seg.ID.String(), "error", err)
			}
		}
		return ctx.Err() == nil
	})
}

// eachSealed calls fn for every sealed segment with data that this broker knows of, until fn says no.
func (c *Coordinator) eachSealed(fn func(*metadata.Topic, *metadata.Segment) bool) {
	cp := c.deps.ControlPlane
	for _, v := range cp.Vnodes() {
		for _, t := range cp.Topics(v) {
			for _, r := range t.Ranges() {
				for _, seg := range r.Closed {
					if seg.State == metadata.SegmentSealed && !fn(t, seg) {
						return
					}
				}
			}
		}
	}
}

func (c *Coordinator) healOne(ctx context.Context, t *metadata.Topic, seg *metadata.Segment, comes bool) {
	work, cancel := context.WithTimeout(ctx, healPatience)
	defer cancel()
	if err := c.deps.Copies.Heal(work, seg); err != nil && !mutate.On("coordinator.confirm-unproved") {
		if ctx.Err() == nil {
			c.log.Warn("copy is not healed yet", "topic", t.Name, "segment", seg.ID.String(), "error", err)
		}
		return
	}
	if !comes {
		return
	}
	_, err := c.deps.ControlPlane.UpdateReplicas(ctx, metadata.UpdateReplicas{
		TopicName: t.Name, Topic: t.UID, Segment: seg.ID, ExpectVersion: seg.ReplicaVersion, Change: metadata.ReplicaConfirm, Broker: c.cfg.Self, Boot: c.cfg.Boot,
	})
	if err != nil && ctx.Err() == nil && !errors.Is(err, storage.ErrConflict) {
		c.log.Warn("proved copy is not recorded yet", "segment", seg.ID.String(), "error", err)
	}
}

// copiesLoop keeps the wanted number of copies of the sealed segments that this broker coordinates: it records where new ones are to be made, and
// drops those of brokers that leave once enough others are proved.
func (c *Coordinator) copiesLoop(ctx context.Context) {
	tick := time.NewTicker(healEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		brokers, all, under := c.known(), c.deps.Brokers(), 0
		leads := map[storage.TopicUID]bool{}
		c.eachSealed(func(t *metadata.Topic, seg *metadata.Segment) bool {
			lead, asked := leads[t.UID]
			if !asked {
				lead = c.leads(t.UID)
				leads[t.UID] = lead
			}
			if lead {
				under += len(seg.Incoming)
				if cmd := c.copyStep(t, seg, brokers, all, under); cmd != nil {
					if cmd.Change == metadata.ReplicaIncoming {
						under++
					}
					if _, err := c.deps.ControlPlane.UpdateReplicas(ctx, *cmd); err != nil && ctx.Err() == nil && !errors.Is(err, storage.ErrConflict) {
						c.log.Warn("replicas not changed", "segment", seg.ID.String(), "error", err)
						return false // stop at the first command without an answer, and look again
					}
				}
			}
			return ctx.Err() == nil
		})
	}
}

// copyStep is the next change of a segment's copies, or nil.
func (c *Coordinator) copyStep(t *metadata.Topic, seg *metadata.Segment, brokers map[storage.BrokerID]placement.Broker, all []placement.Broker, under int) *metadata.UpdateReplicas {
	step := func(change metadata.ReplicaChange, b storage.BrokerID, gone bool) *metadata.UpdateReplicas {
		return &metadata.UpdateReplicas{TopicName: t.Name, Topic: t.UID, Segment: seg.ID, ExpectVersion: seg.ReplicaVersion, Change: change, Broker: b, Gone: gone}
	}
	var stay, leave []storage.BrokerID
	for _, b := range seg.Replicas {
		if c.leaves(b) {
			leave = append(leave, b)
		} else {
			stay = append(stay, b)
		}
	}
	for _, b := range seg.Incoming {
		if c.leaves(b) {
			return step(metadata.ReplicaDrop, b, false) // it will never come
		}
	}
	wanted := min(seg.ReplicationFactor, len(stay)+len(seg.Incoming)+c.spare(seg, brokers))
	switch {
	case len(stay)+len(seg.Incoming) < wanted && under < incomingMost:
		policy := c.deps.ControlPlane.Policy()
		set, err := placement.Choose(placement.KeyOfSegment(seg.ID), all, wanted, placement.Rules{
			SpreadBy: policy.SpreadBy, MinDomains: policy.MinDomains, Keep: append(slices.Clone(stay), seg.Incoming...),
		})
		if err != nil {
			return nil
		}
		for _, b := range set {
			if !slices.Contains(seg.Replicas, b) && !slices.Contains(seg.Incoming, b) {
				return step(metadata.ReplicaIncoming, b, false)
			}
		}
	case len(leave) > 0 && (len(stay) >= seg.ReplicationFactor || mutate.On("coordinator.drop-early")):
		return step(metadata.ReplicaDrop, leave[0], false)
	}
	return nil
}

// spare counts brokers that could take a copy and have none.
func (c *Coordinator) spare(seg *metadata.Segment, brokers map[storage.BrokerID]placement.Broker) (n int) {
	for id, b := range brokers {
		if !b.Absent && !b.Draining && !b.Skewed && !slices.Contains(seg.Replicas, id) && !slices.Contains(seg.Incoming, id) {
			n++
		}
	}
	return n
}

// leaves reports whether a broker's copies are to be made elsewhere: it is being decommissioned, was removed, or has been away for long.
func (c *Coordinator) leaves(b storage.BrokerID) bool {
	rec, known := c.deps.ControlPlane.State().Broker(b)
	return !known || rec.State == root.BrokerDecommissioning || c.deps.Absent(b) > goneFor
}

// scrubLoop reads the own copies of sealed segments again and again, slowly, and heals what has rotted.
func (c *Coordinator) scrubLoop(ctx context.Context) {
	for ctx.Err() == nil {
		c.eachSealed(func(_ *metadata.Topic, seg *metadata.Segment) bool {
			if slices.Contains(seg.Replicas, c.cfg.Self) && !slices.Contains(c.deps.Store.Live(), seg.ID) {
				c.scrub(ctx, seg)
			}
			return ctx.Err() == nil
		})
		pause(ctx, scrubPause)
	}
}

func (c *Coordinator) scrub(ctx context.Context, seg *metadata.Segment) {
	err := c.deps.Copies.CheckCopy(seg, func(n int) error {
		pause(ctx, time.Duration(n)*time.Second/scrubRate)
		return ctx.Err()
	})
	switch {
	case err == nil, ctx.Err() != nil, errors.Is(err, storage.ErrUnknownSegment):
	case errors.Is(err, storage.ErrCorrupt):
		c.log.Warn("own copy has rotted: it is healed from another one", "segment", seg.ID.String(), "error", err)
		c.Damaged(seg.ID)
	default:
		c.log.Warn("own copy cannot be read", "segment", seg.ID.String(), "error", err)
	}
}
