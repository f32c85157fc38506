package replica

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/rangelog"
)

const (
	// readPatience bounds one call to another broker for a reader.
	readPatience = 5 * time.Second
	// tailEvery is how often a reader's watch on another broker is renewed.
	tailEvery = 10 * time.Second
)

// Router finds the copies of segments for frontends: here if this broker has what is asked for, else on the broker that does. Its methods are
// those of the service with a segment's record in place of its id.
type Router struct{ s *Service }

// NewRouter returns the router of a service.
func NewRouter(s *Service) *Router { return &Router{s: s} }

// Append is Service.Append at the segment's primary, wherever that is. Refusals of another broker come by done.
func (r *Router) Append(seg *metadata.Segment, b []byte, done func(Appended, error)) error {
	if seg.Primary() == r.s.cfg.Self {
		return r.s.Append(seg.ID, b, done)
	}
	return r.s.forward(seg.Primary(), seg.ID, b, done)
}

// Read returns committed batches of a segment and the end below which it was read: what is committed of an open one, else the recorded end. An
// open segment is read at its primary, a closed one from any copy that has what is asked for.
func (r *Router) Read(ctx context.Context, seg *metadata.Segment, from storage.Offset, maxBytes int, alloc func(n int) []byte) ([]rangelog.Batch, storage.End, error) {
	if seg.State == metadata.SegmentOpen {
		return r.readOpen(ctx, seg, from, maxBytes, alloc)
	}
	var errs []error
	for _, b := range r.nearest(seg) {
		got, err := r.readCopy(ctx, b, seg, from, maxBytes, alloc)
		if err == nil && len(got) == 0 {
			err = fmt.Errorf("copy on broker %s is short: %w", b, storage.ErrUnavailable)
		}
		if err == nil {
			return got, seg.End, nil
		}
		if errs = append(errs, err); ctx.Err() != nil {
			break
		}
	}
	return nil, 0, unreadable(errs)
}

// unreadable is why no copy could be read. A copy that could not be reached is no proof that the data is damaged or gone.
func unreadable(errs []error) error {
	for _, err := range errs {
		if !errors.Is(err, storage.ErrCorrupt) && !errors.Is(err, storage.ErrDamaged) {
			return fmt.Errorf("no copy can be read now: %w: %w", storage.ErrUnavailable, errors.Join(errs...))
		}
	}
	return errors.Join(errs...)
}

// nearest is the set of a segment with this broker first.
func (r *Router) nearest(seg *metadata.Segment) []storage.BrokerID {
	out := make([]storage.BrokerID, 0, len(seg.Replicas))
	for _, b := range seg.Replicas {
		if b == r.s.cfg.Self {
			out = append([]storage.BrokerID{b}, out...)
		} else {
			out = append(out, b)
		}
	}
	return out
}

func (r *Router) readCopy(ctx context.Context, b storage.BrokerID, seg *metadata.Segment, from storage.Offset, maxBytes int, alloc func(n int) []byte) ([]rangelog.Batch, error) {
	if b == r.s.cfg.Self {
		got, err := r.s.deps.Store.Read(seg.ID, from, seg.End, maxBytes, alloc)
		if errors.Is(err, storage.ErrCorrupt) || errors.Is(err, storage.ErrUnknownSegment) {
			r.s.deps.Damaged(seg.ID)
		}
		return got, err
	}
	got, _, err := r.readThere(ctx, b, &intrav1.ReadRequest{Segment: SegmentKey(seg.ID), From: uint64(from), Limit: uint64(seg.End), MaxBytes: uint32(maxBytes)})
	return got, err
}

func (r *Router) readThere(ctx context.Context, b storage.BrokerID, req *intrav1.ReadRequest) ([]rangelog.Batch, storage.End, error) {
	there, err := NewRemote(r.s.deps.Peers, b)
	if err != nil {
		return nil, 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, readPatience)
	defer cancel()
	return there.read(ctx, req)
}

func (r *Router) readOpen(ctx context.Context, seg *metadata.Segment, from storage.Offset, maxBytes int, alloc func(n int) []byte) ([]rangelog.Batch, storage.End, error) {
	if seg.Primary() == r.s.cfg.Self {
		committed, err := r.committedHere(seg)
		if mutate.On("replica.read-uncommitted") {
			committed = storage.End(storage.MaxOffset)
		}
		if err != nil || !committed.Holds(from) {
			return nil, committed, err
		}
		got, err := r.s.deps.Store.Read(seg.ID, from, committed, maxBytes, alloc)
		return got, committed, err
	}
	got, committed, err := r.readThere(ctx, seg.Primary(), &intrav1.ReadRequest{
		Segment: SegmentKey(seg.ID), Open: true, From: uint64(from), Limit: uint64(storage.MaxOffset), MaxBytes: uint32(maxBytes),
	})
	switch {
	case errors.Is(err, storage.ErrUnknownSegment):
		return nil, storage.EndBefore(seg.Base), nil // recorded and not opened yet
	case errors.Is(err, storage.ErrUnavailable):
		r.s.suspect(seg.ID)
	case errors.Is(err, storage.ErrBeyondEnd):
		committed, cerr := r.Committed(ctx, seg)
		return nil, committed, cerr
	}
	return got, committed, err
}

// committedHere is the committed end of a segment whose primary is this broker. One that this broker has no replica of was recorded a moment ago
// and not opened yet: nothing can have been acknowledged in it.
func (r *Router) committedHere(seg *metadata.Segment) (storage.End, error) {
	end, err := r.s.Committed(seg.ID)
	if errors.Is(err, storage.ErrUnknownSegment) {
		return storage.EndBefore(seg.Base), nil
	}
	return end, err
}

// Committed is what is committed of an open segment, asked at its primary.
func (r *Router) Committed(ctx context.Context, seg *metadata.Segment) (storage.End, error) {
	return r.committed(ctx, seg, false)
}

// Latest is Committed, behind a quorum contact that began after this call (INV-C13): what was acknowledged before it lies below.
func (r *Router) Latest(ctx context.Context, seg *metadata.Segment) (storage.End, error) {
	return r.committed(ctx, seg, true)
}

func (r *Router) committed(ctx context.Context, seg *metadata.Segment, contact bool) (storage.End, error) {
	if seg.Primary() == r.s.cfg.Self {
		if contact {
			if err := r.s.Contact(ctx, seg.ID); err != nil {
				return r.unopened(seg, err)
			}
		}
		return r.committedHere(seg)
	}
	there, err := NewRemote(r.s.deps.Peers, seg.Primary())
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, readPatience)
	defer cancel()
	end, err := there.tail(ctx, &intrav1.TailRequest{Segment: SegmentKey(seg.ID), Contact: contact})
	if errors.Is(err, storage.ErrUnavailable) {
		r.s.suspect(seg.ID)
	}
	if err != nil {
		return r.unopened(seg, err)
	}
	return end, nil
}

// unopened answers for a segment that its primary does not know yet.
func (r *Router) unopened(seg *metadata.Segment, err error) (storage.End, error) {
	if errors.Is(err, storage.ErrUnknownSegment) {
		return storage.EndBefore(seg.Base), nil
	}
	return 0, err
}

// OffsetAt is the first offset of a segment appended at or after a time.
func (r *Router) OffsetAt(ctx context.Context, seg *metadata.Segment, at storage.Time) (storage.Offset, error) {
	from := r.nearest(seg)
	if seg.State == metadata.SegmentOpen {
		from = seg.Replicas[:1]
	}
	var errs []error
	for _, b := range from {
		o, err := r.offsetAt(ctx, b, seg.ID, at)
		if err == nil {
			return o, nil
		}
		errs = append(errs, err)
	}
	if seg.State == metadata.SegmentOpen {
		return 0, errs[0]
	}
	return 0, unreadable(errs)
}

func (r *Router) offsetAt(ctx context.Context, b storage.BrokerID, id storage.SegmentID, at storage.Time) (storage.Offset, error) {
	if b == r.s.cfg.Self {
		return r.s.OffsetAt(id, at)
	}
	there, err := NewRemote(r.s.deps.Peers, b)
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, readPatience)
	defer cancel()
	return there.offsetAt(ctx, id, at)
}

// Watch tells c when more of an open segment may be readable beyond an end, until the returned function is called.
func (r *Router) Watch(seg *metadata.Segment, beyond storage.End, c chan<- struct{}) (cancel func()) {
	if seg.Primary() == r.s.cfg.Self {
		return r.s.Watch(seg.ID, c)
	}
	ctx, stop := context.WithCancel(context.Background())
	started := r.s.work.start(func(run context.Context) {
		defer stop()
		defer context.AfterFunc(run, stop)()
		there, err := NewRemote(r.s.deps.Peers, seg.Primary())
		if err == nil {
			_, err = there.tail(ctx, &intrav1.TailRequest{Segment: SegmentKey(seg.ID), Beyond: uint64(beyond), WaitMs: uint32(tailEvery / time.Millisecond)})
		}
		if errors.Is(err, storage.ErrUnavailable) && ctx.Err() == nil {
			r.s.suspect(seg.ID)
			return // the reader looks again by itself; telling it at once would make it spin
		}
		select {
		case c <- struct{}{}:
		default:
		}
	})
	if !started {
		stop()
	}
	return stop
}
