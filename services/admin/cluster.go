package admin

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/services/controlplane"
	"github.com/malachilog/malachi/services/controlplane/root"
	"github.com/malachilog/malachi/services/rpc"
	"github.com/malachilog/malachi/storage"
)

// policyName is the only policy that there is.
const policyName = "default"

// Cluster is what the service needs of the brokers and the policy.
type Cluster interface {
	Policy() root.Policy
	UpdatePolicy(context.Context, controlplane.PolicyUpdate) (root.Policy, error)
	SetBrokerState(ctx context.Context, id storage.BrokerID, state root.BrokerState) error
	RaiseLevel(ctx context.Context, to storage.Level) error
	Groups() []controlplane.GroupStatus
}

// Peers is what this broker knows of the others.
type Peers interface {
	// Absent is for how long nothing was seen of a broker; 0 while it is there.
	Absent(storage.BrokerID) time.Duration
	// Version is the build of a broker, if it is there.
	Version(storage.BrokerID) string
	// Waits is what a drain or decommission of a broker still waits for.
	Waits(root.Broker) []string
	// AllBlocked asks every broker what the ranges that it coordinates wait for. A broker that does not answer fails it.
	AllBlocked(context.Context) (map[storage.RangeID]string, error)
	// TopicName is the name of a topic, or its uid.
	TopicName(storage.TopicUID) string
}

func policyOf(name string) error {
	if name != "" && name != policyName {
		return rpc.Fail(v1.Reason_INVALID_ARGUMENT, nil, "policy %.80q: there is only %q", name, policyName)
	}
	return nil
}

// DescribePolicy shows the policy.
func (s *Service) DescribePolicy(_ context.Context, req *v1.DescribePolicyRequest) (*v1.DescribePolicyResponse, error) {
	if err := policyOf(req.GetName()); err != nil {
		return nil, err
	}
	return &v1.DescribePolicyResponse{Policy: policy(s.deps.Cluster.Policy())}, nil
}

var (
	acksNames      = map[string]root.Acks{"quorum": root.AcksQuorum, "all": root.AcksAll}
	placementNames = map[string]root.Placement{"soft": root.PlacementSoft, "hard": root.PlacementHard}
	stateNames     = map[string]root.BrokerState{"active": root.BrokerActive, "draining": root.BrokerDraining, "decommissioning": root.BrokerDecommissioning}
)

func nameOf[T comparable](names map[string]T, v T) string {
	for name, of := range names {
		if of == v {
			return name
		}
	}
	return ""
}

func policy(p root.Policy) *v1.Policy {
	out := &v1.Policy{
		Name: policyName, Version: p.Version, ReplicationFactor: int32(p.ReplicationFactor), Acks: nameOf(acksNames, p.Acks), SpreadBy: p.SpreadBy,
		MinDomains: int32(p.MinDomains), Placement: nameOf(placementNames, p.Placement), SegmentMaxBytes: p.SegmentMaxBytes,
		SegmentMaxAge: durationpb.New(p.SegmentMaxAge), Quorum: int32(p.Quorum()),
	}
	if p.MinReplicas > 0 {
		n := int32(p.MinReplicas)
		out.MinReplicas = &n
	}
	return out
}

// UpdatePolicy changes the policy. Every fault of the request is told at once.
func (s *Service) UpdatePolicy(ctx context.Context, req *v1.UpdatePolicyRequest) (*v1.UpdatePolicyResponse, error) {
	if err := policyOf(req.GetName()); err != nil {
		return nil, err
	}
	u := controlplane.PolicyUpdate{ExpectVersion: req.GetExpectVersion()}
	var faults []string
	whole := func(v *int32) *int {
		if v == nil {
			return nil
		}
		n := int(*v)
		return &n
	}
	u.ReplicationFactor, u.MinReplicas, u.MinDomains = whole(req.ReplicationFactor), whole(req.MinReplicas), whole(req.MinDomains)
	u.SpreadBy, u.SegmentMaxBytes = req.SpreadBy, req.SegmentMaxBytes
	u.Acks, faults = choose("acks", acksNames, req.Acks, faults)
	u.Placement, faults = choose("placement", placementNames, req.Placement, faults)
	if a := req.GetSegmentMaxAge(); a != nil {
		if err := a.CheckValid(); err != nil {
			faults = append(faults, "segment_max_age is no valid duration")
		}
		d := a.AsDuration()
		u.SegmentMaxAge = &d
	}
	if len(faults) > 0 {
		return nil, rpc.Fail(v1.Reason_INVALID_ARGUMENT, nil, "policy %s: %s", policyName, strings.Join(faults, "; "))
	}
	p, err := s.deps.Cluster.UpdatePolicy(ctx, u)
	if err != nil {
		return nil, err
	}
	return &v1.UpdatePolicyResponse{Policy: policy(p)}, nil
}

func choose[T comparable](field string, names map[string]T, v *string, faults []string) (*T, []string) {
	if v == nil {
		return nil, faults
	}
	of, ok := names[*v]
	if !ok {
		var all []string
		for name := range names {
			all = append(all, name)
		}
		slices.Sort(all)
		return nil, append(faults, fmt.Sprintf("%s %.40q: want %s", field, *v, strings.Join(all, " or ")))
	}
	return &of, faults
}

// SetBrokerState drains, decommissions or takes back.
func (s *Service) SetBrokerState(ctx context.Context, req *v1.SetBrokerStateRequest) (*v1.SetBrokerStateResponse, error) {
	id, err := storage.ParseBrokerID(req.GetBroker())
	if err != nil {
		return nil, rpc.Fail(v1.Reason_INVALID_ARGUMENT, nil, "broker %.40q: want 16 hex digits: see malachi broker list", req.GetBroker())
	}
	to, ok := stateNames[req.GetState()]
	if !ok {
		return nil, rpc.Fail(v1.Reason_INVALID_ARGUMENT, nil, "state %.40q: want active, draining or decommissioning", req.GetState())
	}
	brokers, err := s.deps.ControlPlane.Brokers(ctx)
	if err != nil {
		return nil, fmt.Errorf("set state of broker %s: %w", id, err)
	}
	if !slices.ContainsFunc(brokers, func(b root.Broker) bool { return b.ID == id }) {
		return nil, rpc.Fail(v1.Reason_INVALID_ARGUMENT, nil, "broker %s is not part of this cluster: see malachi broker list", id)
	}
	if err := s.deps.Cluster.SetBrokerState(ctx, id, to); err != nil {
		return nil, err
	}
	if brokers, err = s.deps.ControlPlane.Brokers(ctx); err != nil {
		return nil, fmt.Errorf("set state of broker %s: %w", id, err)
	}
	for _, b := range brokers {
		if b.ID == id {
			return &v1.SetBrokerStateResponse{Broker: s.broker(b)}, nil
		}
	}
	return &v1.SetBrokerStateResponse{Broker: &v1.Broker{Id: id.String()}}, nil // it had nothing left and has gone already
}

// RaiseLevel raises the cluster's level.
func (s *Service) RaiseLevel(ctx context.Context, req *v1.RaiseLevelRequest) (*v1.RaiseLevelResponse, error) {
	if req.GetLevel() < 1 {
		return nil, rpc.Fail(v1.Reason_INVALID_ARGUMENT, nil, "level %d: want 1 or more", req.GetLevel())
	}
	if err := s.deps.Cluster.RaiseLevel(ctx, storage.Level(req.GetLevel())); err != nil {
		return nil, err
	}
	return &v1.RaiseLevelResponse{Level: req.GetLevel()}, nil
}

// ListBlockedRanges asks every broker.
func (s *Service) ListBlockedRanges(ctx context.Context, _ *v1.ListBlockedRangesRequest) (*v1.ListBlockedRangesResponse, error) {
	blocked, err := s.deps.Peers.AllBlocked(ctx)
	if err != nil {
		return nil, fmt.Errorf("list blocked ranges: %w", err)
	}
	out := &v1.ListBlockedRangesResponse{}
	for id, by := range blocked {
		out.Ranges = append(out.Ranges, &v1.BlockedRange{Topic: s.deps.Peers.TopicName(id.Topic), Range: id.String(), By: by})
	}
	slices.SortFunc(out.Ranges, func(a, b *v1.BlockedRange) int {
		return strings.Compare(a.Topic+"\x00"+a.Range, b.Topic+"\x00"+b.Range)
	})
	return out, nil
}

// broker is one broker for people.
func (s *Service) broker(b root.Broker) *v1.Broker {
	absent := s.deps.Peers.Absent(b.ID)
	e := &v1.Broker{
		Id: b.ID.String(), Boot: uint64(b.Boot), AdministrativeState: b.State.String(), Alive: absent == 0 && b.Boot > 0, Addresses: b.Addresses,
		Attributes: b.Attributes, Version: s.deps.Peers.Version(b.ID), Level: int32(b.AdvertisedLevel), Waits: s.deps.Peers.Waits(b),
	}
	if absent > 0 {
		e.Absent = durationpb.New(absent.Round(time.Second))
	}
	if b.ID == s.deps.Self {
		e.State, e.DiskFreeBytes, e.DiskTotalBytes = s.deps.Local.State()
	}
	return e
}

func ids(of []storage.BrokerID) (out []string) {
	for _, b := range of {
		out = append(out, b.String())
	}
	return out
}

// GetClusterStatus shows the cluster.
func (s *Service) GetClusterStatus(ctx context.Context, _ *v1.GetClusterStatusRequest) (*v1.GetClusterStatusResponse, error) {
	st := s.deps.ControlPlane.Status()
	brokers, err := s.deps.ControlPlane.Brokers(ctx)
	if err != nil {
		return nil, fmt.Errorf("cluster status: %w", err)
	}
	out := &v1.GetClusterStatusResponse{ClusterId: st.Cluster.String(), Level: int32(st.Level), Vnodes: int32(len(st.Vnodes)), Version: s.deps.Version}
	for _, b := range brokers {
		out.Brokers = append(out.Brokers, s.broker(b))
	}
	for _, g := range s.deps.Cluster.Groups() {
		m := &v1.MetadataGroup{Vnode: int32(g.Vnode), Voters: ids(g.Voters), NonVoting: ids(g.NonVoting), Applied: g.Applied, Waits: g.Waits}
		if g.Leader != 0 {
			m.Leader = g.Leader.String()
		}
		out.Groups = append(out.Groups, m)
	}
	return out, nil
}
