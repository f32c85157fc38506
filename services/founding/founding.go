// Package founding brings a broker of no cluster into one: it founds a cluster if it was told to and may, and else joins one.
//
// A cluster is founded once. Decide is the rule, and is PURE; Settle asks the others and carries it out; the same service answers others,
// before and after. What a broker is lives in the marker of its data directory: after a crash at any point it asks anew. Settle owns its
// goroutines; a Service is safe for concurrent use. Its mutex is never held during I/O.
package founding

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect/v2"
	"golang.org/x/sync/errgroup"

	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/gen/go/malachi/intra/v1/intrav1connect"
	"github.com/malachilog/malachi/storage"
)

const (
	defaultEvery = 500 * time.Millisecond
	// helloTimeout bounds a round: an answer that comes later does not count.
	helloTimeout = 2 * time.Second
	joinTimeout  = 10 * time.Second
	// Bounds of what comes from outside.
	maxList       = 64
	maxAddress    = 256
	maxAttributes = 32
	maxKnown      = 1024
)

// Config is who a broker is and what it was told.
type Config struct {
	Self  storage.BrokerID
	Level storage.Level
	// RPC, Raft, API and Gossip are host:port under which others call this broker. RPC is required.
	RPC, Raft, API, Gossip string
	Attributes             map[string]string
	// Expect and List order a founding: the list has Expect addresses (host:port as in RPC), this broker's among them, and all brokers on it
	// are started with the same one, in any order. 0 and none: no order.
	Expect int
	List   []string
	// Seeds are the RPC addresses of some brokers of the cluster, or of the one to be.
	Seeds []string
	// Every is the pause between two rounds of questions. Default 500 ms.
	Every time.Duration
}

// Validate reports every fault at once, each wrapping storage.ErrInvalid.
func (c Config) Validate() error {
	var faults []error
	fault := func(format string, args ...any) {
		faults = append(faults, fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), storage.ErrInvalid))
	}
	for _, a := range slices.Concat([]string{c.RPC}, c.List, c.Seeds) {
		if host, port, err := net.SplitHostPort(a); err != nil || host == "" || port == "" || port == "0" || len(a) > maxAddress {
			fault("rpc address %.80q: want host:port", a)
		}
	}
	if c.Self == 0 {
		fault("founding needs a broker id")
	}
	if c.Expect != len(c.List) {
		fault("bootstrap-expect is %d and its list has %d addresses", c.Expect, len(c.List))
	}
	if len(c.List) > maxList || len(c.Seeds) > maxList {
		fault("more than %d addresses in the founding list or the seeds", maxList)
	}
	if len(c.List) > 0 && !slices.Contains(c.List, c.RPC) {
		fault("the founding list lacks this broker's own address %s", c.RPC)
	}
	if sorted := slices.Sorted(slices.Values(c.List)); len(slices.Compact(sorted)) != len(c.List) {
		fault("the founding list names an address twice")
	}
	if c.Every < 0 {
		fault("pause %v is negative", c.Every)
	}
	return errors.Join(faults...)
}

// Marker is what the broker's disk says of its cluster. Implementations are safe for concurrent use.
type Marker interface {
	// Cluster is what is durable; zero for none.
	Cluster() storage.ClusterID
	// Found draws an id and makes it, and that its founding is due, durable before it returns.
	Found() (storage.ClusterID, error)
	// Join makes the cluster durable before it returns.
	Join(storage.ClusterID) error
}

// Newcomer is a broker that asks to be admitted.
type Newcomer struct {
	Broker storage.BrokerID
	// Level is the highest that it understands.
	Level                  storage.Level
	RPC, Raft, API, Gossip string
	Attributes             map[string]string
}

// Admission is what a broker is told that was admitted, now or before.
type Admission struct {
	Known []Known
	// Generation counts how often its metadata replicas were given to others because it was away for too long.
	Generation uint32
	// Boot and JournalGroup are what is registered of the broker; 0 if it never was.
	Boot         storage.Boot
	JournalGroup uint64
}

// Known is a broker of the cluster, for who has not heard of it yet.
type Known struct {
	Broker            storage.BrokerID
	RPC, Raft, Gossip string
}

// Admitter records brokers in the cluster. Admitting one again changes nothing. An error that wraps storage.ErrFolderRefused,
// storage.ErrNewerFormat or storage.ErrInvalid is final; any other is temporary.
type Admitter interface {
	Admit(ctx context.Context, n Newcomer) (Admission, error)
}

// Deps are the collaborators of a Service.
type Deps struct {
	Logger *slog.Logger
	Marker Marker
	// Dial returns the way to whoever listens at an RPC address. It must not block.
	Dial func(address string) *connect.Client
}

// Service answers ClusterService, and settles this broker.
type Service struct {
	cfg  Config
	deps Deps
	log  *slog.Logger
	list []string // sorted
	ask  chan initOrder

	mu       sync.Mutex
	init     *initOrder // under way
	joining  bool
	settling bool
	admitter Admitter
}

// initOrder is an order to found alone, and where its end is told.
type initOrder struct {
	ignoreUnreachable bool
	done              chan initEnd // has room for one
}

type initEnd struct {
	cluster storage.ClusterID
	err     error
}

var _ intrav1connect.ClusterServiceHandler = (*Service)(nil)

// New returns a service that answers at once. Errors: storage.ErrInvalid.
func New(cfg Config, deps Deps) (*Service, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Every == 0 {
		cfg.Every = defaultEvery
	}
	if deps.Logger == nil {
		deps.Logger = slog.New(slog.DiscardHandler)
	}
	return &Service{cfg: cfg, deps: deps, log: deps.Logger, list: slices.Sorted(slices.Values(cfg.List)), ask: make(chan initOrder)}, nil
}

// standing is how this broker stands now.
func (s *Service) standing() Standing {
	s.mu.Lock()
	joining, order := s.joining, Order{List: s.list}
	if s.init != nil {
		order.Init, order.IgnoreUnreachable = true, s.init.ignoreUnreachable
	}
	s.mu.Unlock()
	// The marker last: a join that was under way is either seen in joining, or has written it.
	return Standing{Broker: s.cfg.Self, Address: s.cfg.RPC, Cluster: s.deps.Marker.Cluster(), Order: order, Joining: joining}
}

// Outcome is how a broker came to its cluster.
type Outcome struct {
	Cluster storage.ClusterID
	// Founded: this broker founds it, now or by an earlier start of this Service.
	Founded bool
	// Known are brokers of the cluster, if it was joined now.
	Known []Known
}

// Settle returns the cluster of this broker: at once if its disk names one, else as soon as one is founded or joined. It asks and waits until
// ctx ends. One call at a time. Errors: storage.ErrFolderRefused (the cluster will never admit this broker), those of ctx and of the marker.
func (s *Service) Settle(ctx context.Context) (Outcome, error) {
	if c := s.deps.Marker.Cluster(); !c.IsZero() {
		return Outcome{Cluster: c}, nil
	}
	s.setSettling(true)
	defer s.setSettling(false)
	var why string
	pause := time.NewTimer(0)
	defer pause.Stop()
	for {
		var order *initOrder
		select {
		case <-ctx.Done():
			return Outcome{}, fmt.Errorf("no cluster yet: %s: %w", why, ctx.Err())
		case o := <-s.ask:
			order = &o
		case <-pause.C:
		}
		out, v, err := s.round(ctx, order)
		if err != nil || !out.Cluster.IsZero() {
			return out, err
		}
		if v.Why != why && order == nil && ctx.Err() == nil {
			why = v.Why
			s.log.Info("this broker belongs to no cluster yet", "waits", why)
		}
		pause.Reset(s.cfg.Every)
	}
}

func (s *Service) setSettling(on bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.settling = on
}

// round asks once and does what follows. An order to found alone lives for one round.
func (s *Service) round(ctx context.Context, order *initOrder) (out Outcome, v Verdict, err error) {
	if order != nil {
		s.setInit(order) // known to others before they are asked
		defer func() {
			s.setInit(nil)
			order.done <- initResult(out, v, err)
		}()
	}
	answers := s.askAll(ctx)
	if ctx.Err() != nil {
		return out, Verdict{Why: "stopping"}, nil
	}
	switch v = Decide(s.standing(), answers); v.Do {
	case Found:
		out.Cluster, err = s.deps.Marker.Found()
		out.Founded = true
		if err == nil {
			s.log.Info("founding a cluster", "cluster", out.Cluster.String())
		}
	case Join:
		if order != nil {
			return out, v, nil // it is joined in the next round; the order ends refused
		}
		out, v.Why, err = s.join(ctx, v)
	}
	return out, v, err
}

func initResult(out Outcome, v Verdict, err error) initEnd {
	switch {
	case err != nil:
	case out.Founded:
		return initEnd{cluster: out.Cluster}
	case v.Do == Join:
		err = fmt.Errorf("cluster %s is there already, at %s; this broker joins it: %w", v.Cluster, v.At[0], storage.ErrConflict)
	default:
		err = fmt.Errorf("no cluster is founded: %s: %w", v.Why, storage.ErrConflict)
	}
	return initEnd{err: err}
}

func (s *Service) setInit(o *initOrder) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.init = o
}

// askAll asks the list and the seeds at once, and returns when all have answered or their time is over.
func (s *Service) askAll(ctx context.Context) []Answer {
	var addresses []string
	for _, a := range slices.Concat(s.list, s.cfg.Seeds) {
		if !slices.Contains(addresses, a) {
			addresses = append(addresses, a)
		}
	}
	answers := make([]Answer, len(addresses))
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	var group errgroup.Group
	for i, a := range addresses {
		if a == s.cfg.RPC && len(s.list) == 1 { // a list of one has nobody to mistake for another
			answers[i] = AnswerOf(a, s.standing())
			continue
		}
		group.Go(func() error {
			answers[i] = s.hello(ctx, a)
			return nil
		})
	}
	_ = group.Wait() // none of them fails: no answer is one too
	return answers
}

func (s *Service) hello(ctx context.Context, address string) Answer {
	res, err := intrav1connect.NewClusterServiceClient(s.deps.Dial(address)).Hello(ctx, &intrav1.HelloRequest{
		Broker: uint64(s.cfg.Self), RpcAddress: s.cfg.RPC,
	})
	if err != nil {
		s.log.Debug("no answer", "address", address, "error", err)
		return Answer{Asked: address}
	}
	a := Answer{
		Asked: address, Reached: true, Broker: storage.BrokerID(res.GetBroker()), Wants: res.GetWantsFounding(), List: res.GetFoundingList(),
		Joining: res.GetJoining(),
	}
	var ok bool
	if a.Cluster, ok = clusterOf(res.GetClusterId()); !ok || a.Broker == 0 || len(a.List) > maxList {
		s.log.Warn("an answer makes no sense; it is taken as none", "address", address)
		return Answer{Asked: address}
	}
	return a
}

// clusterOf reads a cluster id; none is the zero one.
func clusterOf(b []byte) (c storage.ClusterID, ok bool) {
	if len(b) != 0 && len(b) != len(c) {
		return c, false
	}
	copy(c[:], b)
	return c, true
}

// join asks the brokers of a cluster, one after the other, to be admitted.
func (s *Service) join(ctx context.Context, v Verdict) (out Outcome, why string, err error) {
	s.setJoining(true)
	defer s.setJoining(false) // after the marker is written, or when the call is over and its answer lost
	for _, address := range v.At {
		res, err := s.callJoin(ctx, address)
		if err != nil {
			why = fmt.Sprintf("%s does not admit this broker to cluster %s: %.200s", address, v.Cluster, err)
			continue
		}
		if res.GetRefused() != "" {
			return out, "", fmt.Errorf("cluster %s refuses this broker: %.300s: %w", v.Cluster, res.GetRefused(), storage.ErrFolderRefused)
		}
		if c, ok := clusterOf(res.GetClusterId()); !ok || c != v.Cluster {
			why = fmt.Sprintf("%s was of cluster %s and is of another now", address, v.Cluster)
			continue
		}
		if err := s.deps.Marker.Join(v.Cluster); err != nil {
			return out, "", err
		}
		s.log.Info("joined a cluster", "cluster", v.Cluster.String(), "at", address)
		return Outcome{Cluster: v.Cluster, Known: knownOf(res.GetKnown())}, "", nil
	}
	return out, why, nil
}

func (s *Service) setJoining(on bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.joining = on
}

func (s *Service) callJoin(ctx context.Context, address string) (*intrav1.JoinResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, joinTimeout)
	defer cancel()
	return intrav1connect.NewClusterServiceClient(s.deps.Dial(address)).Join(ctx, &intrav1.JoinRequest{
		Broker: uint64(s.cfg.Self), RpcAddress: s.cfg.RPC, RaftAddress: s.cfg.Raft, ApiAddress: s.cfg.API, GossipAddress: s.cfg.Gossip,
		Level: uint32(s.cfg.Level), Attributes: s.cfg.Attributes,
	})
}

func knownOf(in []*intrav1.KnownBroker) (out []Known) {
	for _, k := range in[:min(len(in), maxKnown)] {
		out = append(out, Known{Broker: storage.BrokerID(k.GetBroker()), RPC: k.GetRpcAddress(), Raft: k.GetRaftAddress(), Gossip: k.GetGossipAddress()})
	}
	return out
}
