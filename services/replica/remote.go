package replica

import (
	"context"
	"fmt"

	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/gen/go/malachi/intra/v1/intrav1connect"
	"github.com/malachilog/malachi/services/rpc"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
	"github.com/malachilog/malachi/storage/rangelog"
)

// Remote is the way to the replicas of another broker. Every error of a call that the broker did not answer is storage.ErrUnavailable.
type Remote struct {
	broker storage.BrokerID
	client intrav1connect.ReplicaServiceClient
}

// NewRemote returns the way to a broker, or storage.ErrUnavailable if no address of it is known.
func NewRemote(peers *rpc.Peers, b storage.BrokerID) (*Remote, error) {
	c, err := peers.Client(b)
	if err != nil {
		return nil, err
	}
	return &Remote{broker: b, client: intrav1connect.NewReplicaServiceClient(c)}, nil
}

func (r *Remote) failed(ctx context.Context, err error) error {
	return rpc.PeerCallError(ctx, r.broker, err)
}

// Open is Service.Open there.
func (r *Remote) Open(ctx context.Context, o Open) error {
	req := &intrav1.OpenReplicaRequest{Header: o.Header, Quorum: uint32(o.Quorum), Boot: uint64(o.Boot)}
	for _, b := range o.Set {
		req.Set = append(req.Set, uint64(b))
	}
	_, err := r.client.OpenReplica(ctx, req)
	return r.failed(ctx, err)
}

// Ask is Service.Ask there.
func (r *Remote) Ask(ctx context.Context, id storage.SegmentID) (serving bool, err error) {
	res, err := r.client.Ask(ctx, &intrav1.AskRequest{Segment: SegmentKey(id)})
	return res.GetServing(), r.failed(ctx, err)
}

// Drain is Service.Drain there.
func (r *Remote) Drain(ctx context.Context, id storage.SegmentID) error {
	_, err := r.client.Drain(ctx, &intrav1.DrainRequest{Segment: SegmentKey(id)})
	return r.failed(ctx, err)
}

// Fence is Service.Fence there. The vote has no header.
func (r *Remote) Fence(ctx context.Context, id storage.SegmentID, header []byte) (rangelog.Vote, error) {
	res, err := r.client.Fence(ctx, &intrav1.FenceRequest{Segment: SegmentKey(id), Header: header})
	if err != nil {
		return rangelog.Vote{}, r.failed(ctx, err)
	}
	return rangelog.Vote{End: storage.End(res.GetEnd()), Pos: res.GetBytes(), Digest: storage.Digest(res.GetDigest()),
		LastAppend: storage.Time(res.GetLastAppend())}, nil
}

// Extend is Service.Extend there.
func (r *Remote) Extend(ctx context.Context, id storage.SegmentID, holder storage.BrokerID, end storage.End) (storage.End, storage.Digest, error) {
	res, err := r.client.Extend(ctx, &intrav1.ExtendRequest{Segment: SegmentKey(id), Holder: uint64(holder), End: uint64(end)})
	return storage.End(res.GetEnd()), storage.Digest(res.GetDigest()), r.failed(ctx, err)
}

// Seal is Service.Seal there.
func (r *Remote) Seal(ctx context.Context, id storage.SegmentID, end storage.End, digest storage.Digest) error {
	_, err := r.client.Seal(ctx, &intrav1.SealRequest{Segment: SegmentKey(id), End: uint64(end), Digest: uint64(digest)})
	return r.failed(ctx, err)
}

// Drop is Service.Drop there.
func (r *Remote) Drop(ctx context.Context, id storage.SegmentID) error {
	_, err := r.client.Drop(ctx, &intrav1.DropRequest{Segment: SegmentKey(id)})
	return r.failed(ctx, err)
}

// read returns verified batches of the copy there; with open, end is what is committed.
func (r *Remote) read(ctx context.Context, req *intrav1.ReadRequest) (batches []rangelog.Batch, end storage.End, err error) {
	res, err := r.client.Read(ctx, req)
	if err != nil {
		return nil, 0, r.failed(ctx, err)
	}
	for _, b := range res.GetBatches() {
		h, err := batch.Verify(b) // checked at every hop
		if err != nil {
			return nil, 0, fmt.Errorf("broker %s sent a batch: %w", r.broker, err)
		}
		batches = append(batches, rangelog.Batch{Header: h, Data: b})
	}
	return batches, storage.End(res.GetEnd()), nil
}

// tail waits there until more than beyond is committed.
func (r *Remote) tail(ctx context.Context, req *intrav1.TailRequest) (storage.End, error) {
	res, err := r.client.Tail(ctx, req)
	return storage.End(res.GetCommitted()), r.failed(ctx, err)
}

func (r *Remote) offsetAt(ctx context.Context, id storage.SegmentID, at storage.Time) (storage.Offset, error) {
	res, err := r.client.OffsetAt(ctx, &intrav1.OffsetAtRequest{Segment: SegmentKey(id), Time: int64(at)})
	return storage.Offset(res.GetOffset()), r.failed(ctx, err)
}

// Copy is what a broker holds of a segment. State is empty if it holds nothing.
type Copy struct {
	State   string
	End     storage.End
	Bytes   int64
	Damaged bool
}

// Copy asks what the broker holds of a segment.
func (r *Remote) Copy(ctx context.Context, id storage.SegmentID) (Copy, error) {
	res, err := r.client.Copy(ctx, &intrav1.CopyRequest{Segment: SegmentKey(id)})
	return Copy{res.GetState(), storage.End(res.GetEnd()), res.GetBytes(), res.GetDamaged()}, r.failed(ctx, err)
}

// Extend brings a fenced replica to an end by reading what it lacks from the holder's copy, batch by verified batch. It returns the end and
// digest that are durable here then. Errors: rpc.ErrHolderFailed (the holder could not ship what it claims), else the own replica's.
func (s *Service) Extend(ctx context.Context, id storage.SegmentID, holder storage.BrokerID, end storage.End) (storage.End, storage.Digest, error) {
	info, err := s.deps.Store.Info(id)
	if err != nil {
		return 0, 0, fmt.Errorf("extend %s: %w", id, err)
	}
	for at := info.End; at < end; {
		batches, err := s.readFrom(ctx, holder, id, at.Next(), end)
		if err == nil && len(batches) == 0 {
			err = fmt.Errorf("it has nothing at %d", at)
		}
		if err != nil {
			return 0, 0, fmt.Errorf("extend %s from broker %s: %w: %w", id, holder, rpc.ErrHolderFailed, err)
		}
		if at, err = s.recovered(ctx, id, batches); err != nil {
			return 0, 0, fmt.Errorf("extend %s: %w", id, err)
		}
	}
	v, err := s.deps.Store.Fence(ctx, id, nil) // it is fenced: this only waits for the barrier, and gives the digest
	if err != nil {
		return 0, 0, fmt.Errorf("extend %s: %w", id, err)
	}
	return v.End, v.Digest, nil
}

// recovered queues batches onto a fenced replica and returns their end when they are durable.
func (s *Service) recovered(ctx context.Context, id storage.SegmentID, batches []rangelog.Batch) (end storage.End, err error) {
	done := make(chan error, len(batches))
	for i := range batches {
		b := &batches[i]
		if err := s.deps.Store.Recovered(id, &b.Header, b.Data, func(err error) { done <- err }); err != nil {
			return 0, err
		}
		end = b.Header.End()
	}
	for range batches {
		select {
		case err := <-done:
			if err != nil {
				return 0, err
			}
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
	return end, nil
}

// readFrom reads from a fenced or sealed copy, here or there.
func (s *Service) readFrom(ctx context.Context, holder storage.BrokerID, id storage.SegmentID, from storage.Offset, limit storage.End) ([]rangelog.Batch, error) {
	if holder == s.cfg.Self {
		return s.readWritten(ctx, id, from, limit, maxPage)
	}
	r, err := NewRemote(s.deps.Peers, holder)
	if err != nil {
		return nil, err
	}
	batches, _, err := r.read(ctx, &intrav1.ReadRequest{Segment: SegmentKey(id), From: uint64(from), Limit: uint64(limit), MaxBytes: maxPage, Fenced: true})
	return batches, err
}

// readWritten reads the own copy, waiting for what is durable and not written to the file yet.
func (s *Service) readWritten(ctx context.Context, id storage.SegmentID, from storage.Offset, limit storage.End, most int) ([]rangelog.Batch, error) {
	wake := make(chan struct{}, 1)
	defer s.deps.Store.Watch(id, wake)()
	for {
		got, err := s.deps.Store.Read(id, from, limit, most, nil)
		if err != nil || len(got) > 0 || !limit.Holds(from) {
			return got, err
		}
		info, err := s.deps.Store.Info(id)
		if err != nil {
			return nil, err
		}
		if !info.End.Holds(from) {
			return nil, nil // it is not here
		}
		select {
		case <-wake:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}
