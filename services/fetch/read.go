package fetch

import (
	"context"
	"errors"
	"fmt"

	"connectrpc.com/connect/v2"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/services/rpc"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
	"github.com/malachilog/malachi/storage/frontier"
	"github.com/malachilog/malachi/storage/rangelog"
)

// view shows a topic to the frontier algebra.
type view struct{ t *metadata.Topic }

// Range implements frontier.View.
func (v view) Range(id storage.RangeID) (frontier.Range, bool) {
	r := v.t.Range(id)
	if r == nil {
		return frontier.Range{}, false
	}
	out := frontier.Range{ID: r.ID, Slice: r.Slice, Closed: r.State == metadata.RangeSealed, Start: r.Start, End: r.SealedEnd}
	for _, p := range r.Parents {
		out.Parents = append(out.Parents, p.Range)
	}
	if out.Closed {
		for _, c := range v.t.Children(id) {
			out.Children = append(out.Children, c.ID)
		}
	}
	return out, true
}

func encoding(ctx context.Context, e v1.Encoding) v1.Encoding {
	if e != v1.Encoding_ENCODING_UNSPECIFIED {
		return e
	}
	if info, ok := connect.CallInfoForServerContext(ctx); ok && info.Codec == connect.CodecNameJSON {
		return v1.Encoding_TEXT
	}
	return v1.Encoding_DATA
}

// place is the frontier that a start position means now.
func (s *Service) place(ctx context.Context, t *metadata.Topic, start *v1.StartPosition) (frontier.Frontier, error) {
	var roots []frontier.Range
	v := view{t}
	for _, r := range t.Ranges() {
		if len(r.Parents) == 0 {
			fr, _ := v.Range(r.ID)
			roots = append(roots, fr)
		}
	}
	f := frontier.Begin(t.UID, roots)
	var err error
	switch at := start.GetAt().(type) {
	case *v1.StartPosition_Latest:
		if at.Latest {
			f, err = s.latest(ctx, t)
		}
	case *v1.StartPosition_Time:
		if err := at.Time.CheckValid(); err != nil {
			return f, rpc.Fail(v1.Reason_INVALID_ARGUMENT, nil, "start time is not a valid timestamp")
		}
		if at.Time.AsTime().After(s.deps.Now()) {
			f, err = s.latest(ctx, t)
		} else {
			err = s.seek(ctx, t, &f, storage.Time(at.Time.AsTime().UnixNano()))
		}
	}
	if err != nil {
		return f, err
	}
	if err := f.Check(); err != nil {
		return f, fmt.Errorf("start of topic %s: %w", t.Name, err)
	}
	f.Resolve(v)
	return f, nil
}

// latest is the end of everything acknowledged. It fails unless every range has answered, behind a quorum contact of its own.
func (s *Service) latest(ctx context.Context, t *metadata.Topic) (frontier.Frontier, error) {
	f := frontier.Frontier{Topic: t.UID}
	for _, r := range t.Owners() {
		end := r.SealedEnd
		if r.Open != nil {
			var err error
			if end, err = s.deps.Replicas.Latest(ctx, r.Open); err != nil {
				return f, s.blocked(r, err)
			}
		}
		f.Positions = append(f.Positions, frontier.Position{Range: r.ID, Slice: r.Slice, Offset: end.Next()})
	}
	return f, nil
}

// seek moves each position to the first record appended at or after a time. Append times never fall within a range.
func (s *Service) seek(ctx context.Context, t *metadata.Topic, f *frontier.Frontier, at storage.Time) error {
	for i := range f.Positions {
		r := t.Range(f.Positions[i].Range)
		if err := s.seekRange(ctx, r, &f.Positions[i], at); err != nil {
			return s.blocked(r, err)
		}
	}
	return nil
}

func (s *Service) seekRange(ctx context.Context, r *metadata.Range, p *frontier.Position, at storage.Time) error {
	segs := r.Closed
	if r.Open != nil {
		segs = append(segs[:len(segs):len(segs)], r.Open)
	}
	for _, seg := range segs {
		if seg.State == metadata.SegmentAbandoned || seg.State == metadata.SegmentSealed && seg.SealTime < at {
			if seg.State == metadata.SegmentSealed {
				p.Offset = seg.End.Next()
			}
			continue // a seal's time is not before its last append
		}
		if seg.State == metadata.SegmentOpen {
			end, err := s.deps.Replicas.Committed(ctx, seg)
			if err != nil {
				return err
			}
			if end == storage.EndBefore(seg.Base) {
				p.Offset = seg.Base
				return nil
			}
		}
		o, err := s.deps.Replicas.OffsetAt(ctx, seg, at)
		if err != nil {
			return err
		}
		p.Offset = o
		if seg.State == metadata.SegmentOpen || seg.End.Holds(o) {
			return nil
		}
	}
	return nil
}

// blocked words why a range cannot be read now.
func (s *Service) blocked(r *metadata.Range, err error) error {
	for _, e := range []error{storage.ErrStaleRoute, storage.ErrStaleBoot, storage.ErrUnknownSegment, storage.ErrFenced, storage.ErrUnavailable} {
		if errors.Is(err, e) {
			why := s.deps.Blocked(r.ID)
			if why == "" {
				why = "its open segment is being closed, or its copies cannot be reached"
			}
			return &rpc.Error{Reason: v1.Reason_RANGE_BLOCKED, Text: fmt.Sprintf("range %s cannot be read now: %s", r.ID, why), Retry: lookAgain / 10, Cause: err}
		}
	}
	return err
}

// builder fills a page.
type builder struct {
	req     request
	alloc   func(n int) []byte // the call's scratch memory
	out     *v1.FetchResponse
	records int
	bytes   int
	moved   bool
}

func newBuilder(ctx context.Context, r request) *builder {
	return &builder{req: r, alloc: func(n int) []byte { return rpc.Scratch(ctx, n) }, out: &v1.FetchResponse{}}
}

func (b *builder) empty() bool {
	return len(b.out.Records) == 0 && len(b.out.Batches) == 0 && len(b.out.Gaps) == 0 && !b.moved
}

func (b *builder) full() bool { return b.records >= b.req.records || b.bytes >= b.req.bytes }

// read goes over the positions once, beginning at the rotation, until the page is full. The next page begins behind the last range that gave
// something, so that none starves. blocked is why some range could not be read; what others gave stands.
func (s *Service) read(ctx context.Context, t *metadata.Topic, f *frontier.Frontier, b *builder) (blocked, err error) {
	f.Resolve(view{t})
	n := len(f.Positions)
	first := int(f.Rotation)
	for k := range n {
		i := (first + k) % n
		before := b.records
		err := s.readPosition(ctx, t, &f.Positions[i], b)
		if b.records > before && !mutate.On("fetch.no-rotation") {
			f.Rotation = uint32((i + 1) % n)
		}
		var gap *rpc.Error
		switch {
		case err == nil:
		case errors.As(err, &gap) && gap.Reason == v1.Reason_RANGE_BLOCKED:
			if !mutate.On("fetch.blocked-is-empty") {
				blocked = err
			}
		case b.empty():
			return nil, err
		default:
			return nil, nil // the page so far stands; the next one meets the error
		}
		if b.full() {
			break
		}
	}
	return blocked, nil
}

// errBehind: records are committed that the follower has not written to their segment's file yet.
var errBehind = errors.New("committed records are not readable yet")

// readPosition adds what one range has from p on, segment by segment.
func (s *Service) readPosition(ctx context.Context, t *metadata.Topic, p *frontier.Position, b *builder) error {
	r := t.Range(p.Range)
	if r == nil {
		return badCursor(fmt.Errorf("range %s: %w", p.Range, frontier.ErrUnknownRange))
	}
	if p.Offset < r.Start {
		if b.req.failOnGap {
			return rpc.Fail(v1.Reason_DATA_TRIMMED, map[string]string{"range": r.ID.String()}, "%d offsets of range %s were removed by retention", r.Start-p.Offset, r.ID)
		}
		skipped := uint64(r.Start - p.Offset)
		b.out.Gaps = append(b.out.Gaps, &v1.Gap{Kind: v1.Gap_TRIMMED, Offsets: &skipped, Range: r.ID.String()})
		p.Offset = r.Start
	}
	for !b.full() {
		seg := r.SegmentAt(p.Offset)
		if seg == nil {
			return s.beyond(t, r, p, r.SealedEnd)
		}
		got, limit, err := s.deps.Replicas.Read(ctx, seg, p.Offset, b.req.bytes-b.bytes, b.alloc)
		if err != nil {
			return s.blocked(r, fmt.Errorf("fetch from topic %s: %w", t.Name, err))
		}
		if !limit.Holds(p.Offset) {
			return s.beyond(t, r, p, limit)
		}
		if len(got) == 0 { // committed, but not in the file yet: the follower wakes us in a moment
			return &rpc.Error{Reason: v1.Reason_RANGE_BLOCKED, Text: fmt.Sprintf("range %s", r.ID), Retry: lookAgain / 10, Cause: errBehind}
		}
		for _, e := range got {
			if b.full() {
				return nil
			}
			if err := b.add(&e, p); err != nil {
				return fmt.Errorf("fetch from topic %s, range %s, offset %d: %w", t.Name, r.ID, e.Header.Base, err)
			}
		}
	}
	return nil
}

// beyond is nil at the end and BEYOND_END past it.
func (s *Service) beyond(t *metadata.Topic, r *metadata.Range, p *frontier.Position, end storage.End) error {
	if storage.EndBefore(p.Offset) <= end {
		return nil
	}
	near := frontier.Frontier{Topic: t.UID}
	for _, o := range t.Owners() {
		at := o.SealedEnd
		if o.ID == r.ID {
			at = end
		}
		near.Positions = append(near.Positions, frontier.Position{Range: o.ID, Slice: o.Slice, Offset: at.Next()})
	}
	return badCursor(&frontier.BeyondEndError{Position: *p, End: end, Nearest: near})
}

// add puts one batch on the page, from p.Offset on, and moves p. A batch is cut between records where the page is full, except in RAW.
func (b *builder) add(e *rangelog.Batch, p *frontier.Position) error {
	h := &e.Header
	skip := uint32(0)
	if p.Offset > h.Base {
		skip = uint32(p.Offset - h.Base)
	}
	if h.Kind == batch.KindControl {
		p.Offset, b.moved = h.End().Next(), true
		return nil
	}
	if b.req.encoding == v1.Encoding_RAW {
		b.out.Batches = append(b.out.Batches, &v1.RawBatch{Data: e.Data, SkipRecords: int32(skip)})
		b.records += int(h.Records - skip)
		b.bytes += len(e.Data)
		p.Offset = h.End().Next()
		return nil
	}
	var d batch.Decoder // records alias its buffer until the page is sent: one each
	if _, err := d.Open(e.Data); err != nil {
		return err
	}
	var r batch.Record
	for i := uint32(0); !b.full() && d.Next(&r); i++ {
		if i < skip {
			continue
		}
		rec := rpc.RecordTo(&r, h.AppendTime, b.req.encoding)
		b.out.Records = append(b.out.Records, rec)
		b.records++
		b.bytes += r.Bytes()
		p.Offset = h.Base + storage.Offset(i) + 1
	}
	return d.Err()
}
