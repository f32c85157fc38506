// Package fetch is the public FetchService of a broker: it reads committed records by cursor, fairly over a topic's ranges, and waits for more.
//
// A Service holds no state between calls; a stream lives as long as its call. It starts no goroutine. Cursors are checked, never trusted.
package fetch

import (
	"context"
	"errors"
	"fmt"
	"time"

	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/gen/go/malachi/v1/malachiv1connect"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/services/rpc"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/frontier"
	"github.com/malachilog/malachi/storage/rangelog"
)

// Limits and defaults of a page.
const (
	defaultRecords = 1000
	maxRecords     = 100_000
	defaultBytes   = 1 << 20
	maxBytes       = 8 << 20
	maxWait        = time.Minute
	// grace is what a fetch may take beyond its wait before it fails: it progresses or fails, it never hangs.
	grace = 10 * time.Second
	// blockedGrace is how long a fetch that finds nothing but a range between two segments waits for the next one, whatever its wait.
	blockedGrace = 2 * time.Second
	// behindGrace is how long a page that holds something waits for records that are committed and not yet written.
	behindGrace = 100 * time.Millisecond
	// lookAgain bounds how long a waiting fetch trusts its wake-ups.
	lookAgain = time.Second

	defaultHeartbeat = 10 * time.Second
	minHeartbeat     = 100 * time.Millisecond
)

// Topics finds topics.
type Topics interface {
	CachedTopic(name string) (*metadata.Topic, bool)
	CachedTopicByUID(uid storage.TopicUID) (*metadata.Topic, bool)
	Topic(ctx context.Context, name string) (*metadata.Topic, error)
	// Changed returns a channel that has a token after each change of the topic's record, until done is called.
	Changed(uid storage.TopicUID) (changed <-chan struct{}, done func())
}

// Replicas reads segments, wherever their copies are: see replica.Router.
type Replicas interface {
	Read(ctx context.Context, seg *metadata.Segment, from storage.Offset, maxBytes int, alloc func(n int) []byte) ([]rangelog.Batch, storage.End, error)
	Committed(ctx context.Context, seg *metadata.Segment) (storage.End, error)
	// Latest is Committed behind a quorum contact that began after the call.
	Latest(ctx context.Context, seg *metadata.Segment) (storage.End, error)
	OffsetAt(ctx context.Context, seg *metadata.Segment, at storage.Time) (storage.Offset, error)
	Watch(seg *metadata.Segment, beyond storage.End, c chan<- struct{}) (cancel func())
}

// Deps are the service's collaborators.
type Deps struct {
	Topics   Topics
	Replicas Replicas
	// Blocked says what a range waits for, or nothing.
	Blocked func(storage.RangeID) string
	// Closing is closed when the broker drains: waits and streams end.
	Closing <-chan struct{}
	Now     func() time.Time
	// Observe, if not nil, is called per page with what it held.
	Observe func(records, bytes int)
}

// Service implements malachiv1connect.FetchServiceHandler.
type Service struct{ deps Deps }

// New returns the service.
func New(deps Deps) *Service {
	if deps.Now == nil {
		deps.Now = time.Now
	}
	return &Service{deps: deps}
}

// request is a checked FetchRequest.
type request struct {
	encoding  v1.Encoding
	records   int
	bytes     int
	wait      time.Duration
	failOnGap bool
	wantTail  bool
}

func limited(name string, v int32, def, most int) (int, error) {
	switch {
	case v == 0:
		return def, nil
	case v < 0 || int(v) > most:
		return 0, rpc.Fail(v1.Reason_INVALID_ARGUMENT, map[string]string{"limit": name, "limit_value": fmt.Sprint(most)}, "%s %d: want 1 to %d, or 0 for %d", name, v, most, def)
	}
	return int(v), nil
}

func (s *Service) check(ctx context.Context, req *v1.FetchRequest) (r request, err error) {
	if r.records, err = limited("max_records", req.GetMaxRecords(), defaultRecords, maxRecords); err != nil {
		return r, err
	}
	if r.bytes, err = limited("max_bytes", req.GetMaxBytes(), defaultBytes, maxBytes); err != nil {
		return r, err
	}
	wait, err := limited("wait_ms", req.GetWaitMs(), 0, int(maxWait/time.Millisecond))
	if err != nil {
		return r, err
	}
	if _, known := v1.Encoding_name[int32(req.GetEncoding())]; !known {
		return r, rpc.Fail(v1.Reason_INVALID_ARGUMENT, nil, "encoding %d is not one of TEXT, JSON, DATA, RAW", req.GetEncoding())
	}
	r.wait, r.encoding = time.Duration(wait)*time.Millisecond, encoding(ctx, req.GetEncoding())
	r.failOnGap, r.wantTail = req.GetFailOnGap(), req.GetWantAtTail()
	return r, nil
}

// Fetch returns a page.
func (s *Service) Fetch(ctx context.Context, req *v1.FetchRequest) (*v1.FetchResponse, error) {
	r, err := s.check(ctx, req)
	if err != nil {
		return nil, err
	}
	t, f, err := s.begin(ctx, req.GetTopic(), req.GetCursor(), req.GetStart())
	if err != nil {
		return nil, err
	}
	return s.page(ctx, t, &f, r)
}

// begin finds the topic and where to read.
func (s *Service) begin(ctx context.Context, name, cursor string, start *v1.StartPosition) (*metadata.Topic, frontier.Frontier, error) {
	t, ok := s.deps.Topics.CachedTopic(name)
	if !ok {
		if err := metadata.ValidTopicName(name); err != nil {
			return nil, frontier.Frontier{}, &rpc.Error{Reason: v1.Reason_INVALID_TOPIC_NAME, Text: "topic name", Cause: err}
		}
		var err error
		if t, err = s.deps.Topics.Topic(ctx, name); err != nil {
			return nil, frontier.Frontier{}, err
		}
	}
	if cursor == "" {
		f, err := s.place(ctx, t, start)
		return t, f, err
	}
	f, err := frontier.Parse(cursor, t.UID)
	if err == nil {
		err = f.Fit(view{t})
	}
	return t, f, badCursor(err)
}

func badCursor(err error) error {
	var beyond *frontier.BeyondEndError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &beyond):
		near, tokenErr := beyond.Nearest.Token()
		if tokenErr != nil {
			return tokenErr
		}
		return &rpc.Error{Reason: v1.Reason_BEYOND_END, Text: "fetch", Cause: err, Metadata: map[string]string{"nearest_cursor": near}}
	case errors.Is(err, frontier.ErrUnknownRange):
		return &rpc.Error{Reason: v1.Reason_UNKNOWN_RANGE, Text: "fetch", Cause: err}
	case errors.Is(err, storage.ErrTooLarge):
		return &rpc.Error{Reason: v1.Reason_LIMIT_EXCEEDED, Text: "fetch", Cause: err, Metadata: map[string]string{"limit": "cursor_bytes", "limit_bytes": fmt.Sprint(storage.MaxCursorBytes)}}
	}
	return &rpc.Error{Reason: v1.Reason_INVALID_CURSOR, Text: "fetch", Cause: err}
}

// page reads once, and waits and reads again while there is nothing. It progresses or fails within the wait and a grace.
func (s *Service) page(ctx context.Context, t *metadata.Topic, f *frontier.Frontier, r request) (*v1.FetchResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, r.wait+grace)
	defer cancel()
	waiting := time.NewTimer(r.wait)
	defer waiting.Stop()
	patient := false // a range is blocked, and its grace has begun
	for {
		// Watch before reading: what arrives in between wakes the wait.
		w := s.watch(t, f, r.wait > 0 || patient)
		b := newBuilder(ctx, r)
		blocked, err := s.read(ctx, t, f, b)
		if err != nil {
			w.cancel()
			return nil, err
		}
		if !b.empty() {
			w.cancel()
			if errors.Is(blocked, errBehind) {
				err = s.catchUp(ctx, t, f, b)
			}
			if err != nil {
				return nil, err
			}
			return s.finish(f, b)
		}
		if blocked != nil && !patient {
			patient = true
			waiting.Reset(max(r.wait, blockedGrace))
			w.cancel()
			continue
		}
		more, err := s.await(ctx, w, waiting)
		w.cancel()
		if err != nil {
			return nil, err
		}
		if !more {
			if blocked != nil {
				return nil, blocked
			}
			return s.emptyPage(ctx, t, f, b)
		}
		if t, err = s.again(t); err != nil {
			return nil, err
		}
	}
}

// catchUp adds to a page what is committed and a moment later also written, so that a reader finds what was acknowledged before it asked.
func (s *Service) catchUp(ctx context.Context, t *metadata.Topic, f *frontier.Frontier, b *builder) error {
	w := s.watch(t, f, true)
	defer w.cancel()
	over := time.NewTimer(behindGrace)
	defer over.Stop()
	for {
		blocked, err := s.read(ctx, t, f, b)
		if err != nil || !errors.Is(blocked, errBehind) || b.full() {
			return err
		}
		select {
		case <-w.records:
		case <-over.C: // the page is good as it is, and the cursor goes on behind it
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// await reports whether it is worth reading again.
func (s *Service) await(ctx context.Context, w watched, waiting *time.Timer) (bool, error) {
	look := time.NewTimer(lookAgain)
	defer look.Stop()
	select {
	case <-w.records:
		return true, nil
	case <-w.topic:
		return true, nil
	case <-look.C:
		return true, nil
	case <-waiting.C:
		waiting.Reset(0) // it stays over
		return false, nil
	case <-s.deps.Closing:
		return false, nil
	case <-ctx.Done():
		return false, ctx.Err()
	}
}

// again returns the topic as it is now.
func (s *Service) again(t *metadata.Topic) (*metadata.Topic, error) {
	now, ok := s.deps.Topics.CachedTopicByUID(t.UID)
	if !ok || now.State != metadata.TopicActive {
		return nil, fmt.Errorf("topic %s was deleted: %w", t.Name, storage.ErrTopicNotFound)
	}
	return now, nil
}

// watched are the wake-ups of one wait.
type watched struct {
	records chan struct{}
	topic   <-chan struct{}
	cancels []func()
}

func (w watched) cancel() {
	for _, c := range w.cancels {
		c()
	}
}

func (s *Service) watch(t *metadata.Topic, f *frontier.Frontier, wait bool) (w watched) {
	if !wait {
		return w
	}
	changed, done := s.deps.Topics.Changed(t.UID)
	w = watched{records: make(chan struct{}, 1), topic: changed, cancels: []func(){done}}
	for _, p := range f.Positions {
		if r := t.Range(p.Range); r != nil && r.Open != nil {
			w.cancels = append(w.cancels, s.deps.Replicas.Watch(r.Open, storage.EndBefore(p.Offset), w.records))
		}
	}
	return w
}

func (s *Service) finish(f *frontier.Frontier, b *builder) (*v1.FetchResponse, error) {
	token, err := f.Token()
	if err != nil {
		return nil, err
	}
	b.out.Cursor = token
	if s.deps.Observe != nil {
		s.deps.Observe(b.records, b.bytes)
	}
	return b.out, nil
}

// emptyPage is the answer when nothing came. At the tail it says so only if it knows: the record of the topic was read anew after the request,
// and every range's primary had a quorum contact that began after it (INV-C13).
func (s *Service) emptyPage(ctx context.Context, t *metadata.Topic, f *frontier.Frontier, b *builder) (*v1.FetchResponse, error) {
	if b.req.wantTail {
		now, err := s.deps.Topics.Topic(ctx, t.Name)
		if err == nil && now.UID == t.UID {
			if tail, known := s.atTail(ctx, now, f); known {
				b.out.AtTail = &tail
			}
		}
	}
	return s.finish(f, b)
}

func (s *Service) atTail(ctx context.Context, t *metadata.Topic, f *frontier.Frontier) (tail, known bool) {
	for _, p := range f.Positions {
		r := t.Range(p.Range)
		if r == nil {
			return false, false
		}
		end := r.SealedEnd
		if r.Open != nil {
			var err error
			if end, err = s.deps.Replicas.Latest(ctx, r.Open); err != nil {
				return false, false
			}
		}
		if storage.EndBefore(p.Offset) != end || r.State != metadata.RangeActive {
			return false, true
		}
	}
	return true, true
}

// GetCursor makes a cursor without reading.
func (s *Service) GetCursor(ctx context.Context, req *v1.GetCursorRequest) (*v1.GetCursorResponse, error) {
	_, f, err := s.begin(ctx, req.GetTopic(), "", req.GetStart())
	if err != nil {
		return nil, err
	}
	token, err := f.Token()
	if err != nil {
		return nil, err
	}
	return &v1.GetCursorResponse{Cursor: token}, nil
}

// Subscribe streams pages, and heartbeats while there is nothing. It ends with an error that says why; the last cursor resumes it.
func (s *Service) Subscribe(ctx context.Context, req *v1.SubscribeRequest, stream malachiv1connect.FetchServiceSubscribeServerStream) error {
	r, err := s.check(ctx, &v1.FetchRequest{
		Encoding: req.GetEncoding(), MaxRecords: req.GetMaxRecords(), MaxBytes: req.GetMaxBytes(), FailOnGap: req.GetFailOnGap(),
	})
	if err != nil {
		return err
	}
	beat, err := limited("heartbeat_ms", req.GetHeartbeatMs(), int(defaultHeartbeat/time.Millisecond), int(maxWait/time.Millisecond))
	if err != nil {
		return err
	}
	if r.wait = time.Duration(beat) * time.Millisecond; r.wait < minHeartbeat {
		return rpc.Fail(v1.Reason_INVALID_ARGUMENT, nil, "heartbeat_ms %d: want at least %d", beat, minHeartbeat/time.Millisecond)
	}
	t, f, err := s.begin(ctx, req.GetTopic(), req.GetCursor(), req.GetStart())
	if err != nil {
		return err
	}
	for {
		page, err := s.page(ctx, t, &f, r)
		if err != nil {
			return err
		}
		idle := len(page.Records) == 0 && len(page.Batches) == 0
		if err := stream.Send(&v1.SubscribeResponse{Page: page, Heartbeat: idle}); err != nil {
			return err
		}
		rpc.Sent(ctx)
		select {
		case <-s.deps.Closing:
			return rpc.Fail(v1.Reason_SHUTTING_DOWN, nil, "the broker is shutting down; resume from the last cursor")
		default:
		}
		if t, err = s.again(t); err != nil {
			return err
		}
	}
}
