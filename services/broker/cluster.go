package broker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/gen/go/malachi/intra/v1/intrav1connect"
	"github.com/malachilog/malachi/services/controlplane/root"
	"github.com/malachilog/malachi/services/replica"
	"github.com/malachilog/malachi/services/rpc"
	"github.com/malachilog/malachi/storage"
)

const (
	// retireEvery is how often decommissioning brokers are looked at.
	retireEvery = 2 * time.Second
	// askAllPatience bounds a question to every broker.
	askAllPatience = 3 * time.Second
)

// Absent is for how long nothing was seen of a broker.
func (l local) Absent(id storage.BrokerID) time.Duration { return l.b.absent(id) }

// Version is the build of a broker that is there.
func (l local) Version(id storage.BrokerID) string {
	for _, m := range l.b.members.Members() {
		if m.ID == id {
			return m.Version
		}
	}
	return ""
}

// TopicName is the name of a topic, or its uid.
func (l local) TopicName(uid storage.TopicUID) string {
	if t, ok := l.b.cp.CachedTopicByUID(uid); ok {
		return t.Name
	}
	return uid.String()
}

// AllBlocked asks every broker that is there.
func (l local) AllBlocked(ctx context.Context) (map[storage.RangeID]string, error) {
	ctx, cancel := context.WithTimeout(ctx, askAllPatience)
	defer cancel()
	all := l.b.coord.AllBlocked()
	g, ctx := errgroup.WithContext(ctx)
	brokers := l.b.cp.State().Brokers
	parts := make([][]*intrav1.BlockedRange, len(brokers))
	for i, r := range brokers {
		if r.ID == l.b.self || r.Boot == 0 || l.b.absent(r.ID) > 0 {
			continue // one that is gone coordinates nothing
		}
		g.Go(func() error {
			c, err := l.b.net.peers.Client(r.ID)
			if err != nil {
				return err
			}
			res, err := intrav1connect.NewCoordinatorServiceClient(c).Blocked(ctx, &intrav1.BlockedRequest{})
			if err != nil {
				return rpc.PeerCallError(ctx, r.ID, err)
			}
			parts[i] = res.GetRanges()
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	for _, part := range parts {
		for _, e := range part {
			id, err := replica.ParseRangeKey(e.GetRange())
			if err != nil {
				return nil, err
			}
			all[id] = e.GetBy()
		}
	}
	return all, nil
}

// Waits is what a drain or decommission of a broker still waits for.
func (l local) Waits(r root.Broker) []string { return l.b.waits(r) }

func (b *Broker) waits(r root.Broker) (out []string) {
	if r.State == root.BrokerActive {
		return nil
	}
	open, closed := 0, 0
	for _, v := range b.cp.Vnodes() {
		for _, t := range b.cp.Topics(v) {
			for _, rng := range t.Ranges() {
				if rng.Open != nil && slices.Contains(rng.Open.Replicas, r.ID) {
					open++
				}
				for _, seg := range rng.Closed {
					if seg.End > storage.EndBefore(seg.Base) && slices.Contains(seg.Replicas, r.ID) {
						closed++
					}
				}
			}
		}
	}
	if open > 0 {
		out = append(out, fmt.Sprintf("open segments with a replica there: %d", open))
	}
	if r.State == root.BrokerDraining {
		return out
	}
	if closed > 0 {
		out = append(out, fmt.Sprintf("sealed segments with a copy there: %d", closed))
	}
	return out
}

// retire takes decommissioning brokers out of the cluster once nothing is left on them.
func (b *Broker) retire(ctx context.Context) error {
	tick := time.NewTicker(retireEvery)
	defer tick.Stop()
	told := map[storage.BrokerID]string{}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		brokers := b.cp.State().Brokers
		for _, r := range brokers {
			if r.State != root.BrokerDecommissioning || r.ID == b.self {
				delete(told, r.ID)
				continue
			}
			waits := b.waits(r)
			if len(waits) == 0 {
				if err := b.cp.RemoveBroker(ctx, r.ID); err != nil && ctx.Err() == nil && !errors.Is(err, storage.ErrConflict) {
					b.log.Warn("broker not removed", "broker", r.ID.String(), "error", err)
				} else if err == nil {
					b.log.Info("broker removed from the cluster", "broker", r.ID.String())
					b.members.Forget(r.ID)
				}
				continue
			}
			if text := fmt.Sprint(waits); told[r.ID] != text {
				told[r.ID] = text
				b.log.Info("decommission waits", "broker", r.ID.String(), "for", text)
			}
		}
		maps.DeleteFunc(told, func(id storage.BrokerID, _ string) bool {
			return !slices.ContainsFunc(brokers, func(r root.Broker) bool { return r.ID == id })
		})
	}
}
