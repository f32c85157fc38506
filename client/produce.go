package client

import (
	"context"
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	malachiv1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
)

// Record is one record, to write or read.
type Record struct {
	// Key is nil for none; empty is another key. Records of one key keep their order.
	Key   []byte
	Value []byte
	// Headers keep their order and may repeat a key.
	Headers []Header
	// Time is the producer's time, to the nanosecond. Zero means now when writing; a time that does not fit 64 bits of
	// nanoseconds around 1970 is refused.
	Time time.Time
	// AppendTime is when the broker took it: set when reading, ignored when writing.
	AppendTime time.Time
}

// Header is one header of a record. Key is UTF-8.
type Header struct {
	Key   string
	Value []byte
}

// Result is what became of one record.
type Result struct {
	// Err is nil if the record is on stable storage. Else *Error, ErrClosed, or a record's own fault (storage.ErrTooLarge,
	// storage.ErrInvalid).
	Err error
	// AppendTime is when the broker took the record.
	AppendTime time.Time
	// Duplicate: an earlier attempt had written it.
	Duplicate bool
}

// Produce writes the records and returns nil when all are on stable storage. The slices are copied; they may be reused after it
// returns. Records that break a limit fail the call before any is sent. If one of one record fails its error is returned, of
// several a *Failures. When ctx ends, records that were taken in may still be written: their error wraps ErrOutcomeUnknown and
// ctx's.
func (c *Client) Produce(ctx context.Context, topicName string, records ...Record) error {
	if len(records) == 0 {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	for i := range records {
		if err := check(&records[i]); err != nil {
			if len(records) > 1 {
				err = fmt.Errorf("record %d: %w", i, err)
			}
			return err
		}
	}
	t, err := c.topicFor(ctx, topicName)
	if err != nil {
		return err
	}
	w := &waiter{done: make(chan struct{})}
	w.left.Store(int64(len(records)) + 1)
	var held lanes
	for i := range records {
		if err = t.add(ctx, &records[i], entry{waiter: w, index: int32(i)}, &held); err != nil {
			for ; i < len(records); i++ {
				w.failed(i, err)
			}
			break
		}
	}
	held.release()
	w.end(1)
	select {
	case <-w.done:
	case <-ctx.Done():
		return fmt.Errorf("produce: %w: %w", ErrOutcomeUnknown, context.Cause(ctx))
	}
	return w.result(len(records))
}

// ProduceAsync takes the record in and returns; then is called once with the result, unless ProduceAsync returned an error. It
// blocks while the client's buffer is full, and at the first use of a topic. ctx bounds that wait and nothing else. The record is
// copied.
//
// then runs on the lane's goroutine: it must not wait for anything of this client. It may be nil for who does not want to know.
func (c *Client) ProduceAsync(ctx context.Context, topicName string, record Record, then func(Result)) error {
	if err := check(&record); err != nil {
		return err
	}
	t, err := c.topicFor(ctx, topicName)
	if err != nil {
		return err
	}
	return t.add(ctx, &record, entry{then: then}, nil)
}

var (
	earliestTime = time.Unix(0, -1<<63)
	latestTime   = time.Unix(0, 1<<63-1)
)

// check holds r against the limits, so that a bad record is refused before anything is done.
func check(r *Record) error {
	n := len(r.Key) + len(r.Value)
	if len(r.Headers) > 0 {
		b := batch.Record{Key: r.Key, Value: r.Value, Headers: make([]batch.RecordHeader, len(r.Headers))}
		for i, h := range r.Headers {
			b.Headers[i] = batch.RecordHeader{Key: []byte(h.Key), Value: h.Value}
		}
		if err := batch.CheckRecord(&b); err != nil {
			return err
		}
	} else if len(r.Key) > storage.MaxKeyBytes || n > storage.MaxRecordBytes {
		return batch.CheckRecord(&batch.Record{Key: r.Key, Value: r.Value})
	}
	if !r.Time.IsZero() && (r.Time.Before(earliestTime) || r.Time.After(latestTime)) {
		return fmt.Errorf("record time %s does not fit 64 bits of nanoseconds: %w", r.Time.UTC(), storage.ErrInvalid)
	}
	return nil
}

// waiter gathers the results of one Produce.
type waiter struct {
	left atomic.Int64
	done chan struct{}
	mu   sync.Mutex
	bad  []Failure
}

func (w *waiter) failed(i int, err error) {
	w.mu.Lock()
	w.bad = append(w.bad, Failure{i, err})
	w.mu.Unlock()
	w.end(1)
}

func (w *waiter) end(n int64) {
	if w.left.Add(-n) == 0 {
		close(w.done)
	}
}

func (w *waiter) result(of int) error {
	switch {
	case len(w.bad) == 0:
		return nil
	case of == 1:
		return w.bad[0].Err
	}
	slices.SortFunc(w.bad, func(a, b Failure) int { return a.Index - b.Index })
	return &Failures{Failed: w.bad, Of: of}
}

// entry is one record's way back.
type entry struct {
	then   func(Result)
	waiter *waiter
	index  int32
}

func (e *entry) finish(r Result) {
	switch {
	case e.waiter == nil:
		if e.then != nil {
			e.then(r)
		}
	case r.Err != nil:
		e.waiter.failed(int(e.index), r.Err)
	default:
		e.waiter.end(1)
	}
}

// topic is one topic's lanes. They are fixed at open: a key must not change its lane while records are on the way.
type topic struct {
	client *Client
	name   string
	ready  chan struct{} // closed when err and lanes are set
	err    error

	keyed   []*lane // 2^n equal slices of the keyspace
	shift   int     // position >> shift is the keyed lane
	keyless []*lane
	turn    atomic.Uint32 // which keyless lane collects now
}

// open learns the topic's ranges and cuts the lanes. Advice that can't be had is done without, a topic that does not exist is an
// error.
func (t *topic) open(ctx context.Context) error {
	depth := bits.Len(uint(t.client.cfg.Lanes - 1))
	call, cancel := context.WithTimeout(ctx, t.client.cfg.RequestTimeout)
	defer cancel()
	at := t.client.at.Load()
	resp, err := t.client.server(0).produce.GetRoutes(call, &malachiv1.GetRoutesRequest{Topic: t.name})
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if e := AsError("get routes", err); e != nil {
		if !e.retryable() {
			return e
		}
		t.client.moveOn(at)
	}
	for _, r := range resp.GetRoutes() {
		depth = max(depth, int(min(r.GetSlice().GetDepth(), storage.MaxDepth)))
	}
	depth = min(depth, bits.Len(maxLanes-1))
	t.shift = 64 - depth
	for i := range 1 << depth {
		t.keyed = append(t.keyed, newLane(t, uint32(i), false))
	}
	for i := range t.client.cfg.Lanes {
		t.keyless = append(t.keyless, newLane(t, uint32(i), true))
	}
	return nil
}

// lanes are lanes that hold back their records until the caller has added its last.
type lanes []*lane

func (ls *lanes) hold(l *lane) {
	if !slices.Contains(*ls, l) {
		l.hold()
		*ls = append(*ls, l)
	}
}

func (ls *lanes) release() {
	for _, l := range *ls {
		l.release()
	}
	*ls = (*ls)[:0]
}

// add waits for room and puts r into its lane. held, if not nil, collects lanes that the caller must release.
func (t *topic) add(ctx context.Context, r *Record, e entry, held *lanes) error {
	c := t.client
	size := int64(cost(r))
	if !c.records.TryAcquire(1) {
		if held != nil {
			held.release() // what we hold back may be what fills the buffer
		}
		if err := c.records.Acquire(ctx, 1); err != nil {
			return fmt.Errorf("produce: wait for room in the buffer: %w", context.Cause(ctx))
		}
	}
	if !c.bytes.TryAcquire(size) {
		if held != nil {
			held.release()
		}
		if err := c.bytes.Acquire(ctx, size); err != nil {
			c.records.Release(1)
			return fmt.Errorf("produce: wait for room in the buffer: %w", context.Cause(ctx))
		}
	}
	l := t.laneOf(r)
	if held != nil {
		held.hold(l)
	}
	if err := l.add(r, e); err != nil {
		c.records.Release(1)
		c.bytes.Release(size)
		return err
	}
	return nil
}

func (t *topic) laneOf(r *Record) *lane {
	if r.Key == nil {
		return t.keyless[t.turn.Load()%uint32(len(t.keyless))]
	}
	return t.keyed[uint64(storage.PositionOfKey(r.Key))>>t.shift] // a shift by 64 gives 0: the only lane
}

// cost is what a record takes of MaxBufferedBytes.
func cost(r *Record) int {
	n := entryCost + len(r.Key) + len(r.Value)
	for i := range r.Headers {
		n += len(r.Headers[i].Key) + len(r.Headers[i].Value)
	}
	return n
}

// flush makes every lane send what it has, and returns what ends when that is done.
func (t *topic) flush() []<-chan struct{} {
	select {
	case <-t.ready:
	default:
		return nil // nothing was added yet
	}
	var out []<-chan struct{}
	for _, ls := range [][]*lane{t.keyed, t.keyless} {
		for _, l := range ls {
			if done := l.flush(); done != nil {
				out = append(out, done)
			}
		}
	}
	return out
}

// scratch is a lane's room for turning a record into the codec's form.
type scratch struct {
	headers []batch.RecordHeader
	keys    []byte
}

// record gives r in the codec's form; what it returns is good until the next call.
func (s *scratch) record(r *Record) batch.Record {
	t := r.Time
	if t.IsZero() {
		t = time.Now()
	}
	s.headers, s.keys = s.headers[:0], s.keys[:0]
	for i := range r.Headers {
		at := len(s.keys)
		s.keys = append(s.keys, r.Headers[i].Key...) // if it moves, the keys before keep the old memory
		s.headers = append(s.headers, batch.RecordHeader{Key: s.keys[at:], Value: r.Headers[i].Value})
	}
	return batch.Record{Key: r.Key, Value: r.Value, Headers: s.headers, Time: storage.Time(t.UnixNano())}
}
