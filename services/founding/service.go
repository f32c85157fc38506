package founding

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sync/errgroup"

	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/gen/go/malachi/intra/v1/intrav1connect"
	"github.com/malachilog/malachi/storage"
)

// Admits answers Join from now on. Before that, and on a broker of no cluster, Join is refused for the time being.
func (s *Service) Admits(a Admitter) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.admitter = a
}

// Hello says who listens here.
func (s *Service) Hello(_ context.Context, req *intrav1.HelloRequest) (*intrav1.HelloResponse, error) {
	a := AnswerOf("", s.standing())
	s.log.Debug("asked who this is", "broker", storage.BrokerID(req.GetBroker()).String(), "rpc", req.GetRpcAddress()[:min(len(req.GetRpcAddress()), maxAddress)])
	res := &intrav1.HelloResponse{
		Broker: uint64(a.Broker), RpcAddress: s.cfg.RPC, GossipAddress: s.cfg.Gossip, WantsFounding: a.Wants, FoundingList: a.List,
		Joining: a.Joining, Level: uint32(s.cfg.Level),
	}
	if !a.Cluster.IsZero() {
		res.ClusterId = a.Cluster[:]
	}
	return res, nil
}

// Join admits a new broker. Errors: storage.ErrUnavailable, storage.ErrInvalid, those of the Admitter that are temporary.
func (s *Service) Join(ctx context.Context, req *intrav1.JoinRequest) (*intrav1.JoinResponse, error) {
	cluster := s.deps.Marker.Cluster()
	s.mu.Lock()
	admitter := s.admitter
	s.mu.Unlock()
	if cluster.IsZero() || admitter == nil {
		return nil, fmt.Errorf("broker %s admits nobody yet: %w", s.cfg.Self, storage.ErrUnavailable)
	}
	if req.GetBroker() == 0 || len(req.GetAttributes()) > maxAttributes {
		return nil, fmt.Errorf("a newcomer without an id, or with more than %d attributes: %w", maxAttributes, storage.ErrInvalid)
	}
	for _, a := range []string{req.GetRpcAddress(), req.GetRaftAddress(), req.GetApiAddress(), req.GetGossipAddress()} {
		if len(a) > maxAddress {
			return nil, fmt.Errorf("an address of more than %d bytes: %w", maxAddress, storage.ErrTooLarge)
		}
	}
	n := Newcomer{
		Broker: storage.BrokerID(req.GetBroker()), Level: storage.Level(req.GetLevel()), RPC: req.GetRpcAddress(), Raft: req.GetRaftAddress(),
		API: req.GetApiAddress(), Gossip: req.GetGossipAddress(), Attributes: req.GetAttributes(),
	}
	admitted, err := admitter.Admit(ctx, n)
	switch {
	case errors.Is(err, storage.ErrFolderRefused), errors.Is(err, storage.ErrNewerFormat), errors.Is(err, storage.ErrInvalid):
		s.log.Warn("a broker is refused", "broker", n.Broker.String(), "rpc", n.RPC, "error", err)
		return &intrav1.JoinResponse{Refused: err.Error()}, nil
	case err != nil:
		return nil, err
	}
	s.log.Info("broker admitted", "broker", n.Broker.String(), "rpc", n.RPC)
	res := &intrav1.JoinResponse{ClusterId: cluster[:], Generation: admitted.Generation,
		RegisteredBoot: uint64(admitted.Boot), RegisteredGroup: admitted.JournalGroup}
	for _, k := range admitted.Known[:min(len(admitted.Known), maxKnown)] {
		res.Known = append(res.Known, &intrav1.KnownBroker{
			Broker: uint64(k.Broker), RpcAddress: k.RPC, RaftAddress: k.Raft, GossipAddress: k.Gossip,
		})
	}
	return res, nil
}

// Init orders this broker to found a cluster alone. Errors: storage.ErrConflict (it has one, has another order, or a seed stands against it;
// the text says which), storage.ErrUnavailable (it is not ready to be told).
func (s *Service) Init(ctx context.Context, req *intrav1.InitRequest) (*intrav1.InitResponse, error) {
	if c := s.deps.Marker.Cluster(); !c.IsZero() {
		return nil, fmt.Errorf("this broker belongs to cluster %s: %w", c, storage.ErrConflict)
	}
	if len(s.list) > 0 {
		return nil, fmt.Errorf("this broker was started with a founding list (%s), which founds by itself: %w", listText(s.list), storage.ErrConflict)
	}
	s.mu.Lock()
	settling := s.settling
	s.mu.Unlock()
	if !settling {
		return nil, fmt.Errorf("this broker is not looking for a cluster now: %w", storage.ErrUnavailable)
	}
	o := initOrder{ignoreUnreachable: req.GetIgnoreUnreachable(), done: make(chan initEnd, 1)}
	select {
	case s.ask <- o:
	case <-ctx.Done():
		return nil, fmt.Errorf("the order was not taken: %w: %w", storage.ErrUnavailable, ctx.Err())
	}
	select {
	case end := <-o.done:
		if end.err != nil {
			return nil, end.err
		}
		return &intrav1.InitResponse{ClusterId: end.cluster[:]}, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("the order was taken and its end is not known: %w: %w", storage.ErrUnavailable, ctx.Err())
	}
}

// GossipAddresses asks the seeds for the gossip addresses of brokers of this cluster.
func (s *Service) GossipAddresses(ctx context.Context) []string {
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	cluster := s.deps.Marker.Cluster()
	addresses := slices.DeleteFunc(slices.Concat(s.list, s.cfg.Seeds), func(a string) bool { return a == s.cfg.RPC })
	found := make([]string, len(addresses))
	var group errgroup.Group
	for i, a := range addresses {
		group.Go(func() error {
			res, err := intrav1connect.NewClusterServiceClient(s.deps.Dial(a)).Hello(ctx, &intrav1.HelloRequest{
				Broker: uint64(s.cfg.Self), RpcAddress: s.cfg.RPC,
			})
			if err != nil {
				return nil // it is asked again while it is needed
			}
			if c, ok := clusterOf(res.GetClusterId()); ok && c == cluster && len(res.GetGossipAddress()) <= maxAddress {
				found[i] = res.GetGossipAddress()
			}
			return nil
		})
	}
	_ = group.Wait() // none of them fails
	found = slices.DeleteFunc(found, func(a string) bool { return a == "" })
	slices.Sort(found)
	return slices.Compact(found)
}
