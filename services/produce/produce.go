// Package produce is the public ProduceService of a broker, as frontend: it validates what comes, finds the range of each batch, hands
// batches to the primaries of the ranges' open segments, and answers per batch once a quorum has them on stable storage.
//
// It holds no state between calls and starts no goroutine. A batch that lies in one range passes through untouched.
package produce

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/services/replica"
	"github.com/malachilog/malachi/services/rpc"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
)

const (
	// deadline is how long an append may take if the caller sets no nearer one.
	deadline = 10 * time.Second
	// headWait is how long a refused batch waits for the range's next segment before it looks again.
	headWait = 100 * time.Millisecond
)

// errNoHead refuses a batch that was not submitted, or was refused, when the deadline came.
var errNoHead = fmt.Errorf("no head took the batch within the deadline: %w", storage.ErrUnavailable)

// Topics finds topics.
type Topics interface {
	CachedTopic(name string) (*metadata.Topic, bool)
	Topic(ctx context.Context, name string) (*metadata.Topic, error)
	CachedTopicByUID(uid storage.TopicUID) (*metadata.Topic, bool)
	Await(ctx context.Context, uid storage.TopicUID, until func(*metadata.Topic) bool) (*metadata.Topic, error)
}

// Heads opens the segment that a range needs.
type Heads interface {
	EnsureHead(ctx context.Context, uid storage.TopicUID, id storage.RangeID) (*metadata.Segment, error)
}

// Primary appends at the primary of a segment, wherever that is. A refusal, with nothing appended, is returned or comes by done.
type Primary interface {
	Append(seg *metadata.Segment, b []byte, done func(replica.Appended, error)) error
}

// Deps are the service's collaborators.
type Deps struct {
	Self    storage.BrokerID
	Topics  Topics
	Heads   Heads
	Primary Primary
	// API returns the base URL of another broker's API, or nothing. Nil: nobody is told of other brokers.
	API func(storage.BrokerID) string
	Now func() time.Time
	// Observe, if not nil, is called per batch with its records, bytes and outcome ("ok" or a Reason).
	Observe func(records, bytes int, outcome string)
}

// Service implements malachiv1connect.ProduceServiceHandler.
type Service struct{ deps Deps }

// New returns the service.
func New(deps Deps) *Service {
	if deps.Now == nil {
		deps.Now = time.Now
	}
	return &Service{deps: deps}
}

// Produce appends. See the API.
func (s *Service) Produce(ctx context.Context, req *v1.ProduceRequest) (*v1.ProduceResponse, error) {
	t, err := s.topic(ctx, req.GetTopic())
	if err != nil {
		return nil, err
	}
	var items []*item
	switch {
	case len(req.GetRecords()) > 0 && len(req.GetBatches()) > 0:
		return nil, rpc.Fail(v1.Reason_INVALID_ARGUMENT, nil, "send either records or batches, not both")
	case len(req.GetBatches()) > 0:
		items, err = s.fromBatches(req.GetBatches())
	case len(req.GetRecords()) > 0:
		items, err = s.fromRecords(t, req.GetRecords())
	default:
		return nil, rpc.Fail(v1.Reason_INVALID_ARGUMENT, nil, "the request has no record")
	}
	if err != nil {
		return nil, err
	}
	if at, ok := ctx.Deadline(); !ok || time.Until(at) > deadline { // a timer of its own for each call shows in the time of small ones
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, deadline)
		defer cancel()
	}
	c := newCall(items)
	for _, it := range items { // in order: a batch that has to wait for its range holds back those behind it
		s.submit(ctx, t.UID, c, it)
	}
	c.wait(ctx, func(it *item) { s.submit(ctx, t.UID, c, it) })
	return c.response(s.deps.Observe, s.near)
}

func (s *Service) topic(ctx context.Context, name string) (*metadata.Topic, error) {
	if t, ok := s.deps.Topics.CachedTopic(name); ok {
		return t, nil
	}
	if err := metadata.ValidTopicName(name); err != nil {
		return nil, &rpc.Error{Reason: v1.Reason_INVALID_TOPIC_NAME, Text: "topic name", Cause: err}
	}
	t, err := s.deps.Topics.Topic(ctx, name)
	if err != nil {
		return nil, err
	}
	return t, nil
}

// fromBatches checks every batch before anything is appended: one bad batch refuses the request whole.
func (s *Service) fromBatches(batches [][]byte) ([]*item, error) {
	items := make([]*item, 0, len(batches))
	for i, b := range batches {
		h, err := batch.Check(b)
		if err != nil {
			return nil, badBatch(i, err)
		}
		if h.Kind != batch.KindData {
			return nil, rpc.Fail(v1.Reason_INVALID_BATCH, nil, "batch %d is a control batch: only brokers write those", i)
		}
		for _, other := range items {
			if !h.Producer.IsZero() && other.header.Producer == h.Producer {
				return nil, rpc.Fail(v1.Reason_INVALID_BATCH, nil, "batches %d and %d are of one producer id: a producer has one batch in flight", other.index, i)
			}
		}
		items = append(items, &item{index: i, records: int(h.Records), header: h, data: b})
	}
	return items, nil
}

func badBatch(i int, err error) error {
	reason := v1.Reason_INVALID_BATCH
	switch {
	case errors.Is(err, batch.ErrUnknownCodec):
		reason = v1.Reason_UNKNOWN_CODEC
	case errors.Is(err, storage.ErrTooLarge):
		reason = v1.Reason_LIMIT_EXCEEDED
	}
	return &rpc.Error{Reason: reason, Text: fmt.Sprintf("batch %d", i), Cause: err}
}

// fromRecords builds one batch per range, in the order of each range's first record. Records without a key go together, to a place that
// is drawn per request.
func (s *Service) fromRecords(t *metadata.Topic, records []*v1.Record) ([]*item, error) {
	if len(records) > storage.MaxBatchRecords {
		return nil, rpc.Fail(v1.Reason_LIMIT_EXCEEDED, map[string]string{"limit": "batch_records", "limit_records": fmt.Sprint(storage.MaxBatchRecords)},
			"%d records in a request, the limit is %d", len(records), storage.MaxBatchRecords)
	}
	now := storage.Time(s.deps.Now().UnixNano())
	keyless := storage.Position(rand.Uint64())
	var items []*item
	builders := map[storage.RangeID]*building{}
	for i, r := range records {
		rec, err := rpc.RecordFrom(r, now)
		if err != nil {
			return nil, fmt.Errorf("record %d: %w", i, err)
		}
		at := keyless
		if rec.Key != nil {
			at = storage.PositionOfKey(rec.Key)
		}
		owner := t.RangeAt(at)
		if owner == nil {
			return nil, fmt.Errorf("produce to topic %s: %w", t.Name, storage.ErrTopicNotFound)
		}
		b := builders[owner.ID]
		if b == nil {
			b = &building{item: &item{index: i}}
			builders[owner.ID] = b
			items = append(items, b.item)
		}
		if err := b.Add(&rec, keyless); err != nil {
			return nil, badRecord(i, err)
		}
		b.item.indexes = append(b.item.indexes, int32(i))
	}
	for _, b := range builders {
		if err := b.finish(); err != nil {
			return nil, err
		}
	}
	return items, nil
}

type building struct {
	batch.Builder
	item *item
}

func (b *building) finish() error {
	data, err := b.Build(nil, batch.Options{Codec: batch.CodecNone})
	if err != nil {
		return err
	}
	h, err := batch.ParseHeader(data)
	if err != nil {
		return err
	}
	b.item.data, b.item.header, b.item.records = data, h, int(h.Records)
	return nil
}

func badRecord(i int, err error) error {
	switch {
	case errors.Is(err, batch.ErrFull):
		return rpc.Fail(v1.Reason_LIMIT_EXCEEDED, map[string]string{"limit": "batch_bytes", "limit_bytes": fmt.Sprint(storage.MaxBatchBytes)},
			"records of one range exceed the batch limit of %d bytes at record %d", storage.MaxBatchBytes, i)
	case errors.Is(err, storage.ErrTooLarge):
		return &rpc.Error{Reason: v1.Reason_LIMIT_EXCEEDED, Text: fmt.Sprintf("record %d", i), Cause: err}
	}
	return &rpc.Error{Reason: v1.Reason_INVALID_RECORD, Text: fmt.Sprintf("record %d", i), Cause: err}
}

// near is the base URL under which a batch would have saved a hop, or nothing.
func (s *Service) near(it *item) string {
	if s.deps.API == nil || it.primary == 0 || it.primary == s.deps.Self {
		return ""
	}
	return s.deps.API(it.primary)
}

// submit hands one batch to the range that owns it, cut into parts if it straddles ranges. It returns when the batch is queued at the primary of
// the range's head, or refused for good: a refusal that comes later is submitted again by the call's own goroutine.
func (s *Service) submit(ctx context.Context, uid storage.TopicUID, c *call, it *item) {
	for {
		t, ok := s.deps.Topics.CachedTopicByUID(uid)
		if !ok || t.State != metadata.TopicActive {
			c.refuse(it, fmt.Errorf("topic was deleted: %w", storage.ErrTopicNotFound))
			return
		}
		r := t.RangeAt(it.header.Lowest)
		if r == nil {
			c.refuse(it, fmt.Errorf("topic %s owns no range there: %w", t.Name, storage.ErrStaleRoute))
			return
		}
		if !r.Slice.Holds(it.header.Highest) {
			s.split(ctx, t, c, it)
			return
		}
		err := s.appendOnce(ctx, t, r, c, it)
		if err == nil {
			return
		}
		switch {
		case !again(err):
			c.refuse(it, err)
			return
		case ctx.Err() != nil:
			c.refuse(it, fmt.Errorf("%w: %w", errNoHead, err))
			return
		}
		s.awaitHead(ctx, uid, r)
	}
}

// again reports whether an append that was refused before anything was queued may succeed on the range's next segment.
func again(err error) bool {
	for _, e := range []error{storage.ErrFenced, storage.ErrSealed, storage.ErrStaleRoute, storage.ErrStaleBoot, storage.ErrUnknownSegment} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

func (s *Service) appendOnce(ctx context.Context, t *metadata.Topic, r *metadata.Range, c *call, it *item) error {
	head := r.Open
	if it.moved != nil && head != nil && head.ID == *it.moved { // it refused this batch: another head, or this one served again, is needed
		head = nil
	}
	if head != nil {
		err := s.hand(ctx, head, c, it)
		if !errors.Is(err, storage.ErrStaleRoute) && !errors.Is(err, storage.ErrUnknownSegment) {
			return err
		}
	}
	head, err := s.deps.Heads.EnsureHead(ctx, t.UID, r.ID)
	if err != nil {
		return err
	}
	return s.hand(ctx, head, c, it)
}

// hand gives the batch to a segment's primary. An error means that it was refused at once.
func (s *Service) hand(ctx context.Context, head *metadata.Segment, c *call, it *item) error {
	if (head.Primary() != s.deps.Self || c.elsewhere(head.ID)) && !c.settle(ctx, head.ID.Range) {
		return errNoHead
	}
	it.moved, it.tried, it.primary = nil, head.ID, head.Primary()
	if c.waits(it, head.ID.Range) {
		return nil
	}
	c.submitted(head.ID)
	err := s.deps.Primary.Append(head, it.data, func(a replica.Appended, err error) { c.done(it, a, err) })
	if err != nil {
		c.unsubmitted(head.ID.Range)
	}
	return err
}

// awaitHead waits until the range's record has moved on, or a little.
func (s *Service) awaitHead(ctx context.Context, uid storage.TopicUID, r *metadata.Range) {
	wait, cancel := context.WithTimeout(ctx, headWait)
	defer cancel()
	// The outcome does not matter: whoever asked looks again.
	_, _ = s.deps.Topics.Await(wait, uid, func(t *metadata.Topic) bool {
		now := t.Range(r.ID)
		return now == nil || now.State != r.State || (now.Open == nil) != (r.Open == nil) || now.Open != nil && now.Open.ID != r.Open.ID
	})
}

// split cuts a batch that straddles ranges and submits the parts in keyspace order.
func (s *Service) split(ctx context.Context, t *metadata.Topic, c *call, it *item) {
	owners := t.Owners()
	into := make([]storage.Slice, 0, len(owners))
	for _, r := range owners {
		if r.Slice.Last() >= it.header.Lowest && r.Slice.First() <= it.header.Highest {
			into = append(into, r.Slice)
		}
	}
	parts, err := batch.Split(it.data, into)
	if err != nil {
		c.refuse(it, badBatch(it.index, err))
		return
	}
	c.expect(it, len(parts))
	for _, p := range parts {
		h, err := batch.ParseHeader(p.Data)
		if err != nil {
			c.refuse(it, err)
			continue
		}
		s.submit(ctx, t.UID, c, &item{index: it.index, header: h, data: p.Data, whole: it})
	}
}

// GetRoutes lists the slices of the active ranges.
func (s *Service) GetRoutes(ctx context.Context, req *v1.GetRoutesRequest) (*v1.GetRoutesResponse, error) {
	t, err := s.topic(ctx, req.GetTopic())
	if err != nil {
		return nil, err
	}
	out := &v1.GetRoutesResponse{TopicUid: t.UID.String(), MetaVersion: t.MetaVersion}
	for _, r := range t.Owners() {
		out.Routes = append(out.Routes, &v1.Route{Slice: &v1.KeySlice{Prefix: r.Slice.Prefix, Depth: uint32(r.Slice.Depth)}})
	}
	return out, nil
}
