package client

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync"
	"time"

	"connectrpc.com/connect/v2"

	malachiv1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
)

// ConsumeConfig says what a consumer reads and how. The zero value reads everything from the earliest record on, for ever.
type ConsumeConfig struct {
	// From is where it begins.
	From Start
	// MaxRecords bounds a page, in records of whole batches, of which one comes in any case; up to 100,000; 0 means 10,000.
	MaxRecords int
	// MaxBytes bounds a page in bytes of batches, of which one comes in any case; up to 8 MiB; 0 means 4 MiB. A consumer holds
	// two pages.
	MaxBytes int
	// Wait is how long the server holds an answer when there is nothing new; up to 60 s; 0 means 10 s. It costs no delay: what
	// comes is sent at once.
	Wait time.Duration
	// ExitAtEnd ends the iteration when everything acknowledged has been read.
	ExitAtEnd bool
	// FailOnGap ends the iteration with an error instead of going on over data that retention has removed or that was lost.
	FailOnGap bool
	// OnGap, if not nil, is told of each gap, before the first record after it is yielded and on the loop's own goroutine.
	OnGap func(Gap)
}

// Gap is a stretch that the consumer did not get.
type Gap struct {
	// Lost: it was lost and is recorded as lost. Else it was trimmed, by retention or an administrator.
	Lost bool
	// Offsets is the number skipped, some of which may never have been records; -1 if it is not known.
	Offsets int64
	// Range names where, for people.
	Range string
}

// BatchError is a stored batch that does not verify or does not decode. The loop may go on after it: the batch is left out.
type BatchError struct {
	Topic string
	// Base is the offset of the batch's first record in its range, and Records how many it says to have; both 0 if its header is
	// damaged.
	Base    storage.Offset
	Records uint32
	// Err wraps storage.ErrCorrupt, ErrInvalid, ErrTooLarge or ErrNewerFormat.
	Err error
}

func (e *BatchError) Error() string {
	return fmt.Sprintf("topic %s: batch of %d records at offset %d: %v", e.Topic, e.Records, e.Base, e.Err)
}

// Unwrap gives Err.
func (e *BatchError) Unwrap() error { return e.Err }

// Consumer reads a topic from a place on. It belongs to one goroutine at a time.
type Consumer struct {
	client *Client
	topic  string
	cfg    ConsumeConfig

	start  *malachiv1.StartPosition // until the first page
	cursor string                   // where the current page begins
	// skip is what the token brought: delivered before, beyond cursor. An entry goes when its offset is reached.
	skip progress
	// done is what was delivered of the current page, and the batch in hand up to now.
	done  progress
	slice storage.Slice
	upTo  storage.Offset
	open  bool // slice and upTo hold
}

// Consume prepares a consumer; it does no I/O. Errors wrap storage.ErrInvalid or storage.ErrTooLarge and tell every fault.
func (c *Client) Consume(topicName string, cfg ConsumeConfig) (*Consumer, error) {
	var errs []error
	within := func(name string, v, high int64) {
		if v < 0 || v > high {
			errs = append(errs, fmt.Errorf("consume %s: %s is %d, want 0 to %d: %w", topicName, name, v, high, storage.ErrInvalid))
		}
	}
	within("MaxRecords", int64(cfg.MaxRecords), 100_000)
	within("MaxBytes", int64(cfg.MaxBytes), storage.MaxRequestBytes)
	within("Wait in ms", cfg.Wait.Milliseconds(), 60_000)
	cursor, skip, err := parseToken(cfg.From.token)
	if err != nil {
		errs = append(errs, fmt.Errorf("consume %s: %w", topicName, err))
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	if skip == nil {
		skip = progress{}
	}
	if cfg.MaxRecords == 0 {
		cfg.MaxRecords = 10_000
	}
	if cfg.MaxBytes == 0 {
		cfg.MaxBytes = 4 << 20
	}
	if cfg.Wait == 0 {
		cfg.Wait = 10 * time.Second
	}
	return &Consumer{client: c, topic: topicName, cfg: cfg, start: cfg.From.position, cursor: cursor, skip: skip, done: progress{}}, nil
}

// Cursor is the place after the last record that was yielded, exact also within a page: Cursor as ConsumeConfig.From goes on
// there, without a record lost or read twice. It is empty before the first page of a consumer that begins at the earliest record.
// Only the SDK and programs on it read it; a plain server cursor is CursorAtPage.
func (c *Consumer) Cursor() string {
	done := progress{}
	for _, p := range []progress{c.skip, c.done} {
		for s, o := range p {
			done[s] = max(done[s], o)
		}
	}
	if c.open {
		done[c.slice] = max(done[c.slice], c.upTo)
	}
	return formatToken(c.cursor, done)
}

// CursorAtPage is the server's cursor of the page in hand: what was yielded of this page comes again from there.
func (c *Consumer) CursorAtPage() string { return c.cursor }

// Records yields record after record, waiting for new ones until ctx ends. Keys, values and header values share memory with their
// page and are read-only; they stay valid, and keep the page in memory.
//
// An error ends the iteration, except a *BatchError, after which the loop may go on. What can be retried is, until no server has
// answered for DeliveryTimeout. When ctx ends its error is yielded. After the end, Records may be called again and goes on at
// Cursor.
func (c *Consumer) Records(ctx context.Context) iter.Seq2[Record, error] {
	return func(yield func(Record, error) bool) {
		c.resume()
		ctx, cancel := context.WithCancel(ctx)
		var fetching sync.WaitGroup
		defer fetching.Wait()
		defer cancel()
		if err := c.begin(ctx); err != nil {
			yield(Record{}, err)
			return
		}
		next := c.fetch(ctx, &fetching, c.cursor)
		for {
			p := <-next
			if p.err != nil {
				yield(Record{}, p.err)
				return
			}
			for _, g := range p.GetGaps() {
				c.tell(g)
			}
			if c.cfg.ExitAtEnd && len(p.GetBatches()) == 0 && p.GetAtTail() {
				c.turnPage(p.GetCursor())
				return
			}
			next = c.fetch(ctx, &fetching, p.GetCursor()) // while this page is read
			for _, b := range p.GetBatches() {
				if !c.batch(b, yield) {
					return
				}
			}
			c.turnPage(p.GetCursor())
		}
	}
}

// resume makes what an earlier loop had of its page something to skip: the page is fetched again.
func (c *Consumer) resume() {
	c.settle()
	for s, o := range c.done {
		c.skip[s] = max(c.skip[s], o)
	}
	clear(c.done)
}

// begin turns the start position into a cursor, so that every place after it has a token.
func (c *Consumer) begin(ctx context.Context) error {
	if c.start == nil && c.cursor != "" {
		return nil
	}
	var cursor string
	err := c.client.retry(ctx, "get cursor", c.client.cfg.RequestTimeout, func(ctx context.Context, s *server) error {
		r, err := s.fetch.GetCursor(ctx, &malachiv1.GetCursorRequest{Topic: c.topic, Start: c.start})
		cursor = r.GetCursor()
		return err
	})
	if err != nil {
		return err
	}
	if cursor == "" {
		return &Error{Op: "get cursor", Code: connect.CodeInternal, Message: "the server gave an empty cursor", local: true}
	}
	c.start, c.cursor = nil, cursor
	return nil
}

type page struct {
	*malachiv1.FetchResponse
	err error
}

// fetch gets the page at cursor in the background. The channel gets one page; its goroutine ends with ctx.
func (c *Consumer) fetch(ctx context.Context, g *sync.WaitGroup, cursor string) <-chan page {
	out := make(chan page, 1)
	g.Go(func() { out <- c.page(ctx, cursor) })
	return out
}

// page gets one, at the end of the topic again and again.
func (c *Consumer) page(ctx context.Context, cursor string) page {
	req := &malachiv1.FetchRequest{
		Topic: c.topic, Cursor: cursor, MaxRecords: int32(c.cfg.MaxRecords), MaxBytes: int32(c.cfg.MaxBytes),
		WaitMs: int32(c.cfg.Wait.Milliseconds()), Encoding: malachiv1.Encoding_RAW, FailOnGap: c.cfg.FailOnGap, WantAtTail: c.cfg.ExitAtEnd,
	}
	if c.cfg.ExitAtEnd {
		req.WaitMs = 0
	}
	pause := c.client.backoff()
	deadline := time.Now().Add(c.client.cfg.DeliveryTimeout)
	for {
		var resp *malachiv1.FetchResponse
		limit := c.client.cfg.RequestTimeout + time.Duration(req.WaitMs)*time.Millisecond
		err := c.client.retry(ctx, "fetch", limit, func(ctx context.Context, s *server) (err error) {
			resp, err = s.fetch.Fetch(ctx, req)
			return err
		})
		switch {
		case err != nil:
			return page{err: err}
		case resp.GetCursor() == "":
			return page{err: &Error{Op: "fetch", Code: connect.CodeInternal, Message: "the server gave no cursor", local: true}}
		case !c.cfg.ExitAtEnd || len(resp.GetBatches()) > 0 || len(resp.GetGaps()) > 0 || resp.GetAtTail() || resp.GetCursor() != cursor:
			return page{FetchResponse: resp}
		}
		// Nothing there, but whether this is the end could not be found out just now.
		if !pause.wait(ctx, 0, deadline) {
			if ctx.Err() != nil {
				return page{err: context.Cause(ctx)}
			}
			const text = "no server can tell whether this is the end"
			return page{err: &Error{Op: "fetch", Code: connect.CodeUnavailable, Message: text, local: true}}
		}
	}
}

// retry calls f until it succeeds, fails for good, or no server has answered for DeliveryTimeout.
func (c *Client) retry(ctx context.Context, op string, limit time.Duration, f func(context.Context, *server) error) error {
	deadline := time.Now().Add(c.cfg.DeliveryTimeout)
	pause := c.backoff()
	for {
		at := c.at.Load()
		call, cancel := context.WithTimeout(ctx, limit)
		err := f(call, c.server(0))
		cancel()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		e := AsError(op, err)
		e.OutcomeUnknown = false // reading changes nothing
		if !e.retryable() {
			return e
		}
		if e.local {
			c.moveOn(at)
		}
		if !pause.wait(ctx, e.RetryDelay, deadline) {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return e
		}
	}
}

func (c *Consumer) tell(g *malachiv1.Gap) {
	if c.cfg.OnGap == nil {
		return
	}
	out := Gap{Lost: g.GetKind() == malachiv1.Gap_LOST, Offsets: -1, Range: g.GetRange()}
	if g.Offsets != nil {
		out.Offsets = int64(g.GetOffsets())
	}
	c.cfg.OnGap(out)
}

// turnPage: the server's cursor now stands for all that was delivered of the page. What the token brought stays until it is
// reached.
func (c *Consumer) turnPage(cursor string) {
	c.settle()
	c.cursor = cursor
	clear(c.done)
}

// settle notes the batch in hand.
func (c *Consumer) settle() {
	if !c.open {
		return
	}
	c.done[c.slice] = max(c.done[c.slice], c.upTo)
	if o, ok := c.skip[c.slice]; ok && c.upTo >= o {
		delete(c.skip, c.slice)
	}
	c.open = false
}

// batch yields a batch's records and reports whether the loop goes on. Each has a decoder of its own, so that its records stay
// valid.
func (c *Consumer) batch(b *malachiv1.RawBatch, yield func(Record, error) bool) bool {
	c.settle()
	h, err := batch.ParseHeader(b.GetData())
	if err != nil { // which records these are is not known, so the page's end must take the cursor beyond them
		return yield(Record{}, &BatchError{Topic: c.topic, Err: err})
	}
	from := h.Base + storage.Offset(max(b.GetSkipRecords(), 0))
	from = max(from, c.skip[h.Slice])
	end := storage.Offset(h.End())
	c.slice, c.upTo, c.open = h.Slice, min(from, end), true
	if h.Kind != batch.KindData || from >= end {
		c.upTo = end
		return true
	}
	var d batch.Decoder
	if _, err := d.Open(b.GetData()); err != nil {
		c.upTo = end
		return yield(Record{}, &BatchError{Topic: c.topic, Base: h.Base, Records: h.Records, Err: err})
	}
	appended := time.Unix(0, int64(h.AppendTime))
	var r batch.Record
	for at := h.Base; d.Next(&r); at++ {
		if at < from {
			continue
		}
		c.upTo = at + 1
		if !yield(toRecord(&r, appended), nil) {
			return false
		}
	}
	if err := d.Err(); err != nil {
		c.upTo = end
		return yield(Record{}, &BatchError{Topic: c.topic, Base: h.Base, Records: h.Records, Err: err})
	}
	return true
}

func toRecord(r *batch.Record, appended time.Time) Record {
	out := Record{Key: r.Key, Value: r.Value, Time: time.Unix(0, int64(r.Time)), AppendTime: appended}
	if len(r.Headers) > 0 {
		out.Headers = make([]Header, len(r.Headers)) // the decoder reuses its own
		for i, h := range r.Headers {
			out.Headers[i] = Header{Key: string(h.Key), Value: h.Value}
		}
	}
	return out
}
