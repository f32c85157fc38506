package client

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"time"

	"connectrpc.com/connect/v2"

	malachiv1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
)

// pending is a batch that is being built, waits, or is in flight. It is reused.
type pending struct {
	builder  batch.Builder
	entries  []entry
	cost     int64 // of the client's buffer
	sequence uint64
	keyless  storage.Position
	opened   time.Time
	full     bool          // takes no more records
	done     chan struct{} // made by flush; closed when all results are out
	wire     []byte        // the built batch
}

// idleFor is how long a lane keeps its goroutine, whose stack has grown to what a call needs, after the last batch.
const idleFor = 250 * time.Millisecond

// lane is one producer's stream: a random id, rising sequences, one batch in flight. Its goroutine lives while there is something
// to send, and a moment longer: it is started by whoever adds to a lane that has none.
type lane struct {
	topic   *topic
	index   uint32
	keyless bool
	id      storage.ProducerID

	mu       sync.Mutex
	next     uint64     // sequence of the next batch
	queue    []*pending // oldest first; only the last may be open
	flying   *pending
	running  bool          // there is a goroutine
	idle     bool          // which waits for a kick
	holds    int           // callers that are still adding: the open batch waits for them
	kick     chan struct{} // wakes a lingering goroutine
	scratch  scratch
	outgoing malachiv1.ProduceRequest // of the goroutine
	near     *server                  // of the goroutine: the one that serves the lane's range, if a broker has said so
	moved    uint32                   // of the goroutine: how often it left a server that did not answer
}

func newLane(t *topic, index uint32, keyless bool) *lane {
	l := &lane{topic: t, index: index, keyless: keyless, next: 1, kick: make(chan struct{}, 1)}
	rand.Read(l.id[:]) // never fails
	l.outgoing.Topic = t.name
	l.outgoing.Batches = make([][]byte, 1)
	return l
}

// add copies r into the open batch, and starts the lane if nobody holds it.
func (l *lane) add(r *Record, e entry) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.topic.client
	if c.closed.Load() {
		return ErrClosed
	}
	b := l.scratch.record(r)
	p := l.open()
	if p.builder.Records() > 0 && p.builder.Bytes()+b.Bytes() > c.cfg.MaxBatchBytes {
		l.seal(p)
		p = l.open()
	}
	err := p.builder.Add(&b, p.keyless)
	if errors.Is(err, batch.ErrFull) {
		l.seal(p)
		p = l.open()
		err = p.builder.Add(&b, p.keyless)
	}
	if err != nil {
		return fmt.Errorf("produce: %w", err)
	}
	p.entries = append(p.entries, e)
	p.cost += int64(cost(r))
	if len(p.entries) == c.cfg.MaxBatchRecords || p.builder.Bytes() >= c.cfg.MaxBatchBytes {
		l.seal(p)
	}
	if l.holds == 0 || l.queue[0].full {
		l.startLocked()
	}
	return nil
}

// open gives the batch that takes records now.
func (l *lane) open() *pending {
	if n := len(l.queue); n > 0 && !l.queue[n-1].full {
		return l.queue[n-1]
	}
	p := l.topic.client.bufs.Get().(*pending)
	p.sequence, p.opened, p.full = l.next, time.Now(), false
	p.keyless = batch.KeylessPosition(l.id, p.sequence)
	l.next++
	l.queue = append(l.queue, p)
	return p
}

// seal ends the open batch. The next keyless lane takes over, so that several are in flight at once.
func (l *lane) seal(p *pending) {
	p.full = true
	if l.keyless {
		l.topic.turn.CompareAndSwap(l.index, (l.index+1)%uint32(len(l.topic.keyless)))
	}
	l.kickLocked()
}

func (l *lane) kickLocked() {
	select {
	case l.kick <- struct{}{}:
	default:
	}
}

// hold keeps the open batch back until release, unless it is full: more is coming at once.
func (l *lane) hold() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.holds++
}

func (l *lane) release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.holds--; l.holds == 0 {
		l.startLocked()
		l.kickLocked()
	}
}

func (l *lane) startLocked() {
	switch {
	case len(l.queue) == 0:
	case !l.running:
		l.running = true
		l.topic.client.start(l.run)
	case l.idle:
		l.idle = false
		l.kickLocked()
	}
}

// flush sends the open batch without lingering and returns what is closed when the last record of now has its result; nil if
// there is none.
func (l *lane) flush() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	last := l.flying
	if n := len(l.queue); n > 0 {
		last = l.queue[n-1]
		if !last.full {
			l.seal(last)
		}
	}
	if last == nil {
		return nil
	}
	l.startLocked()
	if last.done == nil {
		last.done = make(chan struct{})
	}
	return last.done
}

// run sends batch after batch until the lane has been empty for a while. The context ends when the client gives up, or has
// nothing left.
func (l *lane) run(ctx context.Context) {
	t := time.NewTimer(time.Hour)
	defer t.Stop()
	for {
		p := l.take(ctx, t)
		if p == nil {
			return
		}
		result := l.send(ctx, p)
		l.finish(p, result)
	}
}

// take waits for a batch, and while it lingers, and makes it the one in flight. Nil: the goroutine is to end. t is its timer.
func (l *lane) take(ctx context.Context, t *time.Timer) *pending {
	for expired := false; ; {
		l.mu.Lock()
		l.idle = false
		var wait time.Duration
		if len(l.queue) == 0 {
			if expired || ctx.Err() != nil {
				l.running = false
				l.mu.Unlock()
				return nil
			}
			l.idle = true
			wait = idleFor
		} else {
			p := l.queue[0]
			if !p.full && l.holds > 0 {
				wait = time.Hour // release kicks
			} else if linger := l.topic.client.cfg.Linger; !p.full && linger > 0 && ctx.Err() == nil {
				wait = linger - time.Since(p.opened)
			}
			if wait <= 0 {
				l.launch(p)
				l.mu.Unlock()
				return p
			}
		}
		l.mu.Unlock()
		t.Reset(wait)
		expired = false
		select {
		case <-t.C:
			expired = true
		case <-l.kick:
		case <-ctx.Done():
		}
	}
}

// launch takes p off the queue's front.
func (l *lane) launch(p *pending) {
	if !p.full {
		l.seal(p)
	}
	l.queue[0] = nil
	l.queue = l.queue[1:]
	l.flying = p
}

// finish gives the buffer back, then the results: a function that produces anew must find room.
func (l *lane) finish(p *pending, r Result) {
	c := l.topic.client
	c.bytes.Release(p.cost)
	c.records.Release(int64(len(p.entries)))
	for i := range p.entries {
		p.entries[i].finish(r)
	}
	l.mu.Lock()
	l.flying = nil
	done := p.done
	l.mu.Unlock()
	if done != nil {
		close(done)
	}
	clear(p.entries)
	p.entries, p.cost, p.done = p.entries[:0], 0, nil
	p.builder.Reset()
	c.bufs.Put(p)
}

// send tries until it is written, can't be, or the time is over.
func (l *lane) send(ctx context.Context, p *pending) Result {
	c := l.topic.client
	if ctx.Err() != nil {
		return Result{Err: ErrClosed}
	}
	var err error
	p.wire, err = p.builder.Build(p.wire[:0], batch.Options{Codec: c.codec, Producer: l.id, Sequence: p.sequence})
	if err != nil {
		return Result{Err: fmt.Errorf("produce: %w", err)}
	}
	l.outgoing.Batches[0] = p.wire
	deadline := time.Now().Add(c.cfg.DeliveryTimeout)
	pause := c.backoff()
	unknown := false // some attempt may have been written
	for {
		to := l.near
		if to == nil {
			to = c.server(l.index + l.moved)
		}
		r, e := l.attempt(ctx, to, len(p.entries))
		if e == nil {
			return r
		}
		unknown = unknown || e.OutcomeUnknown
		e.OutcomeUnknown = unknown
		if !e.retryable() {
			return Result{Err: e}
		}
		if l.near != nil {
			l.near = nil // the others know who serves it now
		} else if e.local {
			l.moved++ // the lane stays with the next one that answers
		}
		if !pause.wait(ctx, e.RetryDelay, deadline) {
			if ctx.Err() != nil {
				return Result{Err: errors.Join(ErrClosed, e)}
			}
			return Result{Err: e}
		}
	}
}

// attempt sends the lane's request once.
func (l *lane) attempt(ctx context.Context, s *server, records int) (Result, *Error) {
	ctx, cancel := context.WithTimeout(ctx, l.topic.client.cfg.RequestTimeout)
	defer cancel()
	resp, err := s.produce.Produce(ctx, &l.outgoing)
	if err != nil {
		return Result{}, AsError("produce", err)
	}
	if len(resp.GetResults()) != 1 {
		return Result{}, strange("%d results for one batch", len(resp.GetResults()))
	}
	r := resp.GetResults()[0]
	if r.GetError() != nil {
		return Result{}, batchError(r.GetError())
	}
	if int(r.GetRecordCount()) != records || r.GetIndex() != 0 {
		return Result{}, strange("result speaks for %d records at batch %d, sent were %d", r.GetRecordCount(), r.GetIndex(), records)
	}
	if r.GetServer() != "" {
		l.near = l.topic.client.named(r.GetServer())
	}
	out := Result{Duplicate: r.GetDuplicate()}
	if r.GetAppendTime() != nil {
		out.AppendTime = r.GetAppendTime().AsTime()
	}
	return out, nil
}

// strange is an answer that makes no sense: what became of the batch nobody knows, and asking again would not tell.
func strange(format string, args ...any) *Error {
	return &Error{Op: "produce", Code: connect.CodeInternal, Message: "strange answer: " + fmt.Sprintf(format, args...), OutcomeUnknown: true,
		local: true}
}
