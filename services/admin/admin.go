// Package admin is the public AdminService of a broker: topics, ranges, segments and the cluster's state, read from and written to the
// control plane. It holds no state between calls and starts no goroutine.
package admin

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"fmt"

	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/services/controlplane"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/services/controlplane/root"
	"github.com/malachilog/malachi/services/rpc"
	"github.com/malachilog/malachi/storage"
)

const (
	defaultPage = 100
	maxPage     = 1000
)

// ControlPlane is what the service needs of the metadata.
type ControlPlane interface {
	CreateTopic(context.Context, controlplane.NewTopic) (*metadata.Topic, error)
	UpdateTopic(context.Context, controlplane.TopicUpdate) (*metadata.Topic, error)
	DeleteTopic(context.Context, controlplane.TopicDelete) error
	Topic(ctx context.Context, name string) (*metadata.Topic, error)
	ListTopics(ctx context.Context, prefix, after string, limit int) ([]*metadata.Topic, bool, error)
	Brokers(context.Context) ([]root.Broker, error)
	Status() controlplane.Status
}

// Local is what only the broker that serves a segment knows of it.
type Local interface {
	Committed(storage.SegmentID) (storage.End, error)
	Blocked(storage.RangeID) string
	// State is this broker's: "serving", "storage_failed" or "disk_full", with free and total bytes of its disk.
	State() (state string, free, total uint64)
}

// Deps are the service's collaborators.
type Deps struct {
	ControlPlane ControlPlane
	Cluster      Cluster
	Peers        Peers
	Local        Local
	Self         storage.BrokerID
	Version      string
}

// Service implements malachiv1connect.AdminServiceHandler.
type Service struct{ deps Deps }

// New returns the service.
func New(deps Deps) *Service { return &Service{deps: deps} }

func validName(name string) error {
	if err := metadata.ValidTopicName(name); err != nil {
		return &rpc.Error{Reason: v1.Reason_INVALID_TOPIC_NAME, Text: "topic name", Cause: err}
	}
	return nil
}

// CreateTopic creates a topic.
func (s *Service) CreateTopic(ctx context.Context, req *v1.CreateTopicRequest) (*v1.CreateTopicResponse, error) {
	if err := validName(req.GetName()); err != nil {
		return nil, err
	}
	t, err := s.deps.ControlPlane.CreateTopic(ctx, controlplane.NewTopic{
		Name: req.GetName(), InitialRanges: int(req.GetInitialRanges()), Labels: req.GetLabels(),
		DeletionProtection: req.GetDeletionProtection(), Nonce: nonceOf(req.GetNonce()),
	})
	if err != nil {
		return nil, err
	}
	return &v1.CreateTopicResponse{Topic: topic(t)}, nil
}

// nonceOf folds a client's nonce, any text, into 128 bits. Empty: none.
func nonceOf(s string) (n metadata.Nonce) {
	if s != "" {
		sum := sha256.Sum256([]byte(s))
		copy(n[:], sum[:])
	}
	return n
}

func topic(t *metadata.Topic) *v1.Topic {
	return &v1.Topic{
		Name: t.Name, Uid: t.UID.String(), CreateTime: rpc.Timestamp(t.CreateTime), MetaVersion: t.MetaVersion, Labels: t.Labels,
		DeletionProtection: t.DeletionProtection, InitialRanges: int32(t.InitialRanges),
	}
}

// page reads a page request; kind keeps tokens of one list from being used in another.
func page(p *v1.PageRequest, kind string) (size int, after string, err error) {
	size = int(p.GetPageSize())
	switch {
	case size == 0:
		size = defaultPage
	case size < 0 || size > maxPage:
		return 0, "", rpc.Fail(v1.Reason_INVALID_ARGUMENT, map[string]string{"limit": "page_size"}, "page_size %d: want 1 to %d, or 0 for %d", size, maxPage, defaultPage)
	}
	if p.GetPageToken() == "" {
		return size, "", nil
	}
	b, err := base64.RawURLEncoding.DecodeString(p.GetPageToken())
	if err != nil || len(b) < len(kind) || string(b[:len(kind)]) != kind {
		return 0, "", rpc.Fail(v1.Reason_INVALID_ARGUMENT, nil, "page_token is not one that this list gave out")
	}
	return size, string(b[len(kind):]), nil
}

func pageToken(kind, after string) string {
	return base64.RawURLEncoding.EncodeToString([]byte(kind + after))
}

// ListTopics lists topics by name.
func (s *Service) ListTopics(ctx context.Context, req *v1.ListTopicsRequest) (*v1.ListTopicsResponse, error) {
	size, after, err := page(req.GetPage(), "t:")
	if err != nil {
		return nil, err
	}
	if len(req.GetPrefix()) > storage.MaxTopicName {
		return nil, rpc.Fail(v1.Reason_INVALID_ARGUMENT, nil, "prefix of %d bytes: topic names have at most %d", len(req.GetPrefix()), storage.MaxTopicName)
	}
	topics, more, err := s.deps.ControlPlane.ListTopics(ctx, req.GetPrefix(), after, size)
	if err != nil {
		return nil, fmt.Errorf("list topics: %w", err)
	}
	out := &v1.ListTopicsResponse{}
	for _, t := range topics {
		out.Topics = append(out.Topics, topic(t))
	}
	if more && len(topics) > 0 {
		out.NextPageToken = pageToken("t:", topics[len(topics)-1].Name)
	}
	return out, nil
}

func (s *Service) find(ctx context.Context, name string) (*metadata.Topic, error) {
	if err := validName(name); err != nil {
		return nil, err
	}
	t, err := s.deps.ControlPlane.Topic(ctx, name)
	if err != nil {
		return nil, err
	}
	return t, nil
}

// DescribeTopic shows a topic with its ranges.
func (s *Service) DescribeTopic(ctx context.Context, req *v1.DescribeTopicRequest) (*v1.DescribeTopicResponse, error) {
	t, err := s.find(ctx, req.GetName())
	if err != nil {
		return nil, err
	}
	out := &v1.DescribeTopicResponse{Topic: topic(t)}
	for _, r := range t.Ranges() {
		out.Ranges = append(out.Ranges, s.rangeOf(r))
	}
	return out, nil
}

func (s *Service) rangeOf(r *metadata.Range) *v1.Range {
	out := &v1.Range{
		Id: r.ID.String(), Slice: &v1.KeySlice{Prefix: r.Slice.Prefix, Depth: uint32(r.Slice.Depth)},
		State: v1.Range_State(r.State), Start: uint64(r.Start), SealedEnd: uint64(r.SealedEnd), Segments: int32(r.Len()),
		BlockedBy: s.deps.Local.Blocked(r.ID),
	}
	if r.Open == nil {
		end := uint64(r.SealedEnd)
		out.CommittedEnd = &end
		return out
	}
	out.OpenSegment = r.Open.ID.String()
	if end, err := s.deps.Local.Committed(r.Open.ID); err == nil {
		e := uint64(end)
		out.CommittedEnd = &e
	}
	return out
}

// UpdateTopic changes what is set.
func (s *Service) UpdateTopic(ctx context.Context, req *v1.UpdateTopicRequest) (*v1.UpdateTopicResponse, error) {
	if err := validName(req.GetName()); err != nil {
		return nil, err
	}
	u := controlplane.TopicUpdate{Name: req.GetName(), ExpectVersion: req.GetExpectMetaVersion(), DeletionProtection: req.DeletionProtection}
	if l := req.GetLabels(); l != nil {
		labels := l.GetLabels()
		u.Labels = &labels
	}
	if u.Labels == nil && u.DeletionProtection == nil {
		return nil, rpc.Fail(v1.Reason_INVALID_ARGUMENT, nil, "update topic %s: nothing to change is set", req.GetName())
	}
	t, err := s.deps.ControlPlane.UpdateTopic(ctx, u)
	if err != nil {
		return nil, err
	}
	return &v1.UpdateTopicResponse{Topic: topic(t)}, nil
}

// DeleteTopic deletes a topic.
func (s *Service) DeleteTopic(ctx context.Context, req *v1.DeleteTopicRequest) (*v1.DeleteTopicResponse, error) {
	if err := validName(req.GetName()); err != nil {
		return nil, err
	}
	d := controlplane.TopicDelete{Name: req.GetName(), ExpectVersion: req.GetExpectMetaVersion()}
	if req.GetUid() != "" {
		uid, err := storage.ParseTopicUID(req.GetUid())
		if err != nil {
			return nil, &rpc.Error{Reason: v1.Reason_INVALID_ARGUMENT, Text: "uid", Cause: err}
		}
		d.UID = uid
	}
	if err := s.deps.ControlPlane.DeleteTopic(ctx, d); err != nil {
		return nil, err
	}
	return &v1.DeleteTopicResponse{}, nil
}

// ListSegments lists a topic's segments by range and seq.
func (s *Service) ListSegments(ctx context.Context, req *v1.ListSegmentsRequest) (*v1.ListSegmentsResponse, error) {
	size, after, err := page(req.GetPage(), "s:")
	if err != nil {
		return nil, err
	}
	t, err := s.find(ctx, req.GetTopic())
	if err != nil {
		return nil, err
	}
	out := &v1.ListSegmentsResponse{}
	passed := after == ""
	for _, r := range t.Ranges() {
		for seq := uint32(0); seq < r.NextSegment; seq++ {
			seg := r.Segment(seq)
			if seg == nil {
				continue
			}
			if !passed {
				passed = seg.ID.String() == after
				continue
			}
			if len(out.Segments) == size {
				out.NextPageToken = pageToken("s:", out.Segments[size-1].Id)
				return out, nil
			}
			out.Segments = append(out.Segments, s.segmentOf(seg))
		}
	}
	if !passed {
		return nil, rpc.Fail(v1.Reason_INVALID_ARGUMENT, nil, "page_token names a segment that is gone: begin again")
	}
	return out, nil
}

func (s *Service) segmentOf(seg *metadata.Segment) *v1.Segment {
	out := &v1.Segment{
		Id: seg.ID.String(), Range: seg.ID.Range.String(), State: v1.Segment_State(seg.State), Base: uint64(seg.Base),
		CreateTime: rpc.Timestamp(seg.CreateTime),
	}
	for _, b := range seg.Replicas {
		out.Replicas = append(out.Replicas, b.String())
	}
	if seg.State == metadata.SegmentOpen {
		if end, err := s.deps.Local.Committed(seg.ID); err == nil {
			e := uint64(end)
			out.End = &e
		}
		return out
	}
	end, bytes := uint64(seg.End), seg.DataBytes
	out.End, out.Bytes = &end, &bytes
	out.Digest = fmt.Sprintf("%016x", uint64(seg.Digest))
	out.SealTime, out.SealReason = rpc.Timestamp(seg.SealTime), seg.SealReason.String()
	return out
}
