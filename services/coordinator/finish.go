package coordinator

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/services/rpc"
	"github.com/malachilog/malachi/storage"
)

// finishLoop keeps what lies on this broker's disk as recorded: on every change, and every 10 s.
func (c *Coordinator) finishLoop(ctx context.Context) {
	w := c.deps.ControlPlane.Watch()
	defer w.Close()
	all := time.NewTicker(10 * time.Second)
	defer all.Stop()
	for {
		c.finishReplicas(ctx)
		c.settled.Store(true)
		select {
		case <-ctx.Done():
			return
		case <-all.C:
		case <-w.C():
			w.Take()
		}
	}
}

// Settled reports whether every replica that this broker found at its start has been looked at: those of open segments follow again.
func (c *Coordinator) Settled() bool { return c.settled.Load() }

// finishReplicas carries out on this broker's disk what is recorded: a replica of a sealed segment is brought to its end and gets its footer,
// one of an abandoned segment is dropped. What no record speaks of is left alone.
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
			err = c.finish(ctx, own, seg)
		case metadata.SegmentAbandoned:
			err = own.Drop(ctx, id)
		case metadata.SegmentOpen:
			if seg.Primary() != c.cfg.Self && slices.Contains(seg.Replicas, c.cfg.Self) {
				err = c.deps.Local.Rejoin(ctx, id) // after a restart; else it costs nothing
			}
		}
		switch {
		case err == nil, ctx.Err() != nil, errors.Is(err, storage.ErrUnknownSegment), errors.Is(err, storage.ErrFenced), errors.Is(err, storage.ErrSealed):
		case errors.Is(err, storage.ErrUnavailable), errors.Is(err, storage.ErrOverloaded), errors.Is(err, storage.ErrDiskFull):
			c.log.Debug("replica is not finished yet", "segment", id.String(), "error", err)
		case seg.State == metadata.SegmentSealed && (errors.Is(err, storage.ErrDamaged) || errors.Is(err, storage.ErrCorrupt)):
			c.log.Warn("own copy is damaged: it is healed from another one", "segment", id.String(), "error", err)
			c.Damaged(id)
		default:
			c.log.Error("replica could not be finished as recorded", "segment", id.String(), "error", err)
		}
	}
}

// finish seals the own replica at the recorded end. One that no pass has fenced is fenced first: the record says that it is closed. One that is
// short is brought to the end from another copy.
func (c *Coordinator) finish(ctx context.Context, own Replicas, seg *metadata.Segment) error {
	err := own.Seal(ctx, seg.ID, seg.End, seg.Digest)
	if errors.Is(err, storage.ErrConflict) {
		if _, ferr := own.Fence(ctx, seg.ID, nil); ferr != nil {
			return ferr
		}
		err = own.Seal(ctx, seg.ID, seg.End, seg.Digest)
	}
	if !errors.Is(err, storage.ErrGap) {
		return err
	}
	if _, ferr := own.Fence(ctx, seg.ID, nil); ferr != nil { // it verifies a restarted replica before it is extended
		return ferr
	}
	for _, b := range seg.Replicas {
		if b == c.cfg.Self {
			continue
		}
		_, _, xerr := own.Extend(ctx, seg.ID, b, seg.End)
		if xerr == nil {
			return own.Seal(ctx, seg.ID, seg.End, seg.Digest)
		}
		if !errors.Is(xerr, rpc.ErrHolderFailed) {
			return xerr
		}
		c.log.Debug("copy is not finished from there", "segment", seg.ID.String(), "broker", b.String(), "error", xerr)
	}
	return fmt.Errorf("copy of %s is short of its recorded end, and no other copy can be read now: %w", seg.ID, storage.ErrUnavailable)
}

// startRemove removes a deleted topic in the background.
func (c *Coordinator) startRemove(t *metadata.Topic) {
	c.spawn(func(ctx context.Context) {
		_, err, _ := c.heads.Do("remove "+t.UID.String(), func() (any, error) { return nil, c.remove(ctx, t) })
		switch {
		case err == nil, ctx.Err() != nil, errors.Is(err, storage.ErrTopicNotFound):
		default:
			c.log.Warn("topic is deleted, its data not yet", "topic", t.Name, "uid", t.UID.String(), "error", err)
		}
	})
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
				w, err := c.way(b)
				if err == nil {
					err = w.Drop(ctx, seg.ID)
				}
				if err != nil {
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
