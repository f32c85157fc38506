package replica

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/services/rpc"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
)

const (
	maxPage = 4 << 20          // bytes of one Read between brokers, unless a single batch is larger
	maxTail = 20 * time.Second // longest wait of one Tail
)

// Server answers the calls of other brokers. It implements intrav1connect.ReplicaServiceHandler.
type Server struct {
	s             *Service
	ships, brings turns
}

// NewServer returns the server of a service.
func NewServer(s *Service) *Server { return &Server{s: s} }

// Ship takes what a primary sends. The batches of all segments are queued in the order in which they came, then one barrier is waited for.
func (v *Server) Ship(ctx context.Context, req *intrav1.ShipRequest) (*intrav1.ShipResponse, error) {
	out := &intrav1.ShipResponse{Answers: make([]*intrav1.SegmentAnswer, len(req.GetAppends()))}
	var durable sync.WaitGroup
	leave := v.ships.enter(ctx, storage.BrokerID(req.GetFrom()), storage.Boot(req.GetBoot()), req.GetNumber())
	for i, a := range req.GetAppends() {
		out.Answers[i] = &intrav1.SegmentAnswer{}
		v.s.follow(a, out.Answers[i], &durable)
	}
	leave()
	durable.Wait() // a barrier returns or the storage has failed: both end it
	return out, nil
}

// follow appends what the primary of a segment sends, and fills in the answer once everything it names is durable.
func (s *Service) follow(a *intrav1.SegmentAppend, answer *intrav1.SegmentAnswer, durable *sync.WaitGroup) {
	id, err := ParseSegmentKey(a.GetSegment())
	if err != nil {
		refuse(answer, err, 0)
		return
	}
	if len(a.GetBatches()) == 0 {
		s.answerContact(id, answer)
		return
	}
	var mu sync.Mutex // the callbacks of one segment come one after another, but not on this goroutine
	end := storage.End(0)
	for _, b := range a.GetBatches() {
		h, err := batch.ParseHeader(b)
		if err == nil {
			durable.Add(1)
			err = s.deps.Store.Append(id, &h, b, func(err error) {
				mu.Lock()
				defer durable.Done()
				defer mu.Unlock()
				if err != nil {
					refuse(answer, err, 0)
				}
			})
			if err != nil {
				durable.Done()
			}
		}
		if err != nil {
			mu.Lock()
			refuse(answer, err, s.ownEnd(id, err))
			mu.Unlock()
			return
		}
		end = h.End()
	}
	mu.Lock()
	defer mu.Unlock()
	if answer.Refusal == intrav1.Refusal_REFUSAL_UNSPECIFIED {
		answer.End = uint64(end)
	}
}

// answerContact says whether the replica would take an append now.
func (s *Service) answerContact(id storage.SegmentID, answer *intrav1.SegmentAnswer) {
	err := s.deps.Store.Failed()
	if err == nil {
		info, ierr := s.deps.Store.Info(id)
		switch err = ierr; {
		case err != nil:
		case info.Damaged != nil:
			err = storage.ErrDamaged
		case info.State == "fenced":
			err = storage.ErrFenced
		case info.State == "sealed":
			err = storage.ErrSealed
		}
	}
	if err != nil {
		refuse(answer, err, 0)
	}
}

// ownEnd is the end that a refusal may tell: of a replica that is behind, never of one that is closed.
func (s *Service) ownEnd(id storage.SegmentID, err error) storage.End {
	if errors.Is(err, storage.ErrStaleBoot) {
		s.rejoinSoon(id)
	}
	info, ierr := s.deps.Store.Info(id)
	if ierr != nil || info.State != "open" {
		return 0
	}
	return info.End
}

// refuse fills in a refusal. The first one counts.
func refuse(answer *intrav1.SegmentAnswer, err error, end storage.End) {
	if answer.Refusal != intrav1.Refusal_REFUSAL_UNSPECIFIED {
		return
	}
	answer.Refusal, answer.Text, answer.End = rpc.RefusalOf(err), err.Error(), 0
	switch answer.Refusal {
	case intrav1.Refusal_REFUSAL_OVERLOADED, intrav1.Refusal_REFUSAL_DISK_FULL, intrav1.Refusal_REFUSAL_UNAVAILABLE, intrav1.Refusal_REFUSAL_STALE_BOOT:
		answer.Refusal = intrav1.Refusal_REFUSAL_BUSY // behind, not dead
		answer.End = uint64(end)
	case intrav1.Refusal_REFUSAL_GAP:
		answer.End = uint64(end)
	}
}

// Forward appends what frontends bring to segments that this broker serves as primary. It answers when each has its outcome, or the call ends.
func (v *Server) Forward(ctx context.Context, req *intrav1.ForwardRequest) (*intrav1.ForwardResponse, error) {
	n := len(req.GetBatches())
	type outcome struct {
		i   int
		a   Appended
		err error
	}
	outcomes := make(chan outcome, n)
	leave := v.brings.enter(ctx, storage.BrokerID(req.GetFrom()), storage.Boot(req.GetBoot()), req.GetNumber())
	for i, f := range req.GetBatches() {
		id, err := ParseSegmentKey(f.GetSegment())
		if err == nil {
			err = v.s.Append(id, f.GetBatch(), func(a Appended, err error) { outcomes <- outcome{i, a, err} })
		}
		if err != nil {
			outcomes <- outcome{i: i, err: err}
		}
	}
	leave()
	out := &intrav1.ForwardResponse{Answers: make([]*intrav1.ForwardAnswer, n)}
	for range n {
		select {
		case o := <-outcomes:
			out.Answers[o.i] = &intrav1.ForwardAnswer{Error: rpc.PeerError(o.err), Base: uint64(o.a.Base), End: uint64(o.a.End), AppendTime: int64(o.a.AppendTime)}
		case <-ctx.Done():
			unknown := rpc.PeerError(fmt.Errorf("no answer from a quorum within the deadline: %w", storage.ErrOutcomeUnknown))
			for i, a := range out.Answers {
				if a == nil {
					out.Answers[i] = &intrav1.ForwardAnswer{Error: unknown}
				}
			}
			return out, nil
		}
	}
	return out, nil
}

// OpenReplica opens a replica. See Service.Open.
func (v *Server) OpenReplica(ctx context.Context, req *intrav1.OpenReplicaRequest) (*intrav1.OpenReplicaResponse, error) {
	o := Open{Header: req.GetHeader(), Quorum: int(req.GetQuorum()), Boot: storage.Boot(req.GetBoot())}
	for _, b := range req.GetSet() {
		o.Set = append(o.Set, storage.BrokerID(b))
	}
	if err := v.s.Open(ctx, o); err != nil {
		return nil, err
	}
	return &intrav1.OpenReplicaResponse{}, nil
}

// Ask answers the first question of a pass.
func (v *Server) Ask(ctx context.Context, req *intrav1.AskRequest) (*intrav1.AskResponse, error) {
	id, err := ParseSegmentKey(req.GetSegment())
	if err != nil {
		return nil, err
	}
	serving, err := v.s.Ask(ctx, id)
	if err != nil {
		return nil, err
	}
	return &intrav1.AskResponse{Serving: serving, Boot: uint64(v.s.cfg.Boot)}, nil
}

// Drain stops accepting. See Service.Drain.
func (v *Server) Drain(ctx context.Context, req *intrav1.DrainRequest) (*intrav1.DrainResponse, error) {
	id, err := ParseSegmentKey(req.GetSegment())
	if err == nil {
		err = v.s.Drain(ctx, id)
	}
	if err != nil {
		return nil, err
	}
	return &intrav1.DrainResponse{}, nil
}

// Fence fences, and votes.
func (v *Server) Fence(ctx context.Context, req *intrav1.FenceRequest) (*intrav1.FenceResponse, error) {
	id, err := ParseSegmentKey(req.GetSegment())
	if err != nil {
		return nil, err
	}
	vote, err := v.s.Fence(ctx, id, req.GetHeader())
	if err != nil {
		return nil, err
	}
	return &intrav1.FenceResponse{End: uint64(vote.End), Bytes: vote.Pos, Digest: uint64(vote.Digest), LastAppend: int64(vote.LastAppend)}, nil
}

// Extend brings a fenced replica to an end.
func (v *Server) Extend(ctx context.Context, req *intrav1.ExtendRequest) (*intrav1.ExtendResponse, error) {
	id, err := ParseSegmentKey(req.GetSegment())
	if err != nil {
		return nil, err
	}
	end, digest, err := v.s.Extend(ctx, id, storage.BrokerID(req.GetHolder()), storage.End(req.GetEnd()))
	if err != nil {
		return nil, err
	}
	return &intrav1.ExtendResponse{End: uint64(end), Digest: uint64(digest)}, nil
}

// Seal completes a replica as recorded.
func (v *Server) Seal(ctx context.Context, req *intrav1.SealRequest) (*intrav1.SealResponse, error) {
	id, err := ParseSegmentKey(req.GetSegment())
	if err == nil {
		err = v.s.Seal(ctx, id, storage.End(req.GetEnd()), storage.Digest(req.GetDigest()))
	}
	if err != nil {
		return nil, err
	}
	return &intrav1.SealResponse{}, nil
}

// Drop removes a replica that a recorded fact condemns.
func (v *Server) Drop(ctx context.Context, req *intrav1.DropRequest) (*intrav1.DropResponse, error) {
	id, err := ParseSegmentKey(req.GetSegment())
	if err == nil {
		err = v.s.Drop(ctx, id)
	}
	if err != nil {
		return nil, err
	}
	return &intrav1.DropResponse{}, nil
}

// Read returns batches of this broker's copy.
func (v *Server) Read(ctx context.Context, req *intrav1.ReadRequest) (*intrav1.ReadResponse, error) {
	id, err := ParseSegmentKey(req.GetSegment())
	if err != nil {
		return nil, err
	}
	most, limit := int(min(req.GetMaxBytes(), maxPage)), storage.End(req.GetLimit())
	var end storage.End
	if req.GetOpen() {
		if end, err = v.s.Committed(id); err != nil {
			return nil, err
		}
		limit = min(limit, end)
	}
	batches, err := v.s.deps.Store.Read(id, storage.Offset(req.GetFrom()), limit, most, nil)
	if err == nil && len(batches) == 0 && req.GetFenced() { // a pass: what is durable is written in a moment
		batches, err = v.s.readWritten(ctx, id, storage.Offset(req.GetFrom()), limit, most)
	}
	if err != nil {
		return nil, err
	}
	out := &intrav1.ReadResponse{Batches: make([][]byte, 0, len(batches)), End: uint64(end)}
	for _, b := range batches {
		out.Batches = append(out.Batches, b.Data)
	}
	return out, nil
}

// Tail waits for more.
func (v *Server) Tail(ctx context.Context, req *intrav1.TailRequest) (*intrav1.TailResponse, error) {
	id, err := ParseSegmentKey(req.GetSegment())
	if err != nil {
		return nil, err
	}
	if req.GetContact() {
		if err := v.s.Contact(ctx, id); err != nil {
			return nil, err
		}
	}
	wake := make(chan struct{}, 1)
	defer v.s.Watch(id, wake)()
	wait := time.NewTimer(min(time.Duration(req.GetWaitMs())*time.Millisecond, maxTail))
	defer wait.Stop()
	for {
		end, err := v.s.Committed(id)
		if err != nil {
			return nil, err
		}
		if uint64(end) > req.GetBeyond() {
			return &intrav1.TailResponse{Committed: uint64(end)}, nil
		}
		select {
		case <-wake:
		case <-wait.C:
			return &intrav1.TailResponse{Committed: uint64(end)}, nil
		case <-v.s.closing:
			return nil, fmt.Errorf("the broker is shutting down: %w", storage.ErrClosed)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// OffsetAt finds a time in this broker's copy.
func (v *Server) OffsetAt(_ context.Context, req *intrav1.OffsetAtRequest) (*intrav1.OffsetAtResponse, error) {
	id, err := ParseSegmentKey(req.GetSegment())
	if err != nil {
		return nil, err
	}
	at, err := v.s.OffsetAt(id, storage.Time(req.GetTime()))
	if err != nil {
		return nil, err
	}
	return &intrav1.OffsetAtResponse{Offset: uint64(at)}, nil
}

// Copy says what this broker holds of a segment.
func (v *Server) Copy(_ context.Context, req *intrav1.CopyRequest) (*intrav1.CopyResponse, error) {
	id, err := ParseSegmentKey(req.GetSegment())
	if err != nil {
		return nil, err
	}
	info, err := v.s.deps.Store.Info(id)
	if errors.Is(err, storage.ErrUnknownSegment) {
		return &intrav1.CopyResponse{Boot: uint64(v.s.cfg.Boot)}, nil
	}
	if err != nil {
		return nil, err
	}
	return &intrav1.CopyResponse{State: info.State, End: uint64(info.End), Bytes: info.Bytes, Damaged: info.Damaged != nil, Boot: uint64(v.s.cfg.Boot)}, nil
}

// ReadRaw returns bytes of a sealed copy.
func (v *Server) ReadRaw(_ context.Context, req *intrav1.ReadRawRequest) (*intrav1.ReadRawResponse, error) {
	id, err := ParseSegmentKey(req.GetSegment())
	if err != nil {
		return nil, err
	}
	data, total, err := v.s.deps.Store.ReadRaw(id, req.GetPosition(), int(min(req.GetMaxBytes(), maxPage)))
	if err != nil {
		return nil, err
	}
	return &intrav1.ReadRawResponse{Data: data, Total: total}, nil
}
