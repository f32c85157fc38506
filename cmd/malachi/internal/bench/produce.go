package bench

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"
	"connectrpc.com/connect/v2/connectproto"
	"golang.org/x/sync/errgroup"

	"github.com/malachilog/malachi/client"
	malachiv1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/gen/go/malachi/v1/malachiv1connect"
	"github.com/malachilog/malachi/services/rpc/codec"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
)

// requestTimeout bounds one explicit batch's call.
const requestTimeout = 30 * time.Second

// pace says when a producer's next record or batch is due, and when it is to stop.
type pace struct {
	ends  time.Time
	left  *atomic.Int64 // records, over all producers; nil: without bound
	every time.Duration // 0: closed loop
	due   time.Time
	timer *time.Timer
}

// wait returns the intended start of the next n records, waiting for it in an open loop; false at the end of the run.
func (p *pace) wait(ctx context.Context, n int) (time.Time, bool) {
	if p.left != nil && p.left.Add(-int64(n)) <= -int64(n) {
		return time.Time{}, false
	}
	now := time.Now()
	if p.every == 0 {
		return now, now.Before(p.ends) && ctx.Err() == nil
	}
	at := p.due
	p.due = p.due.Add(p.every * time.Duration(n))
	if !at.Before(p.ends) {
		return at, false
	}
	if early := at.Sub(now); early > 0 {
		if p.timer == nil {
			p.timer = time.NewTimer(early)
		} else {
			p.timer.Reset(early)
		}
		select {
		case <-p.timer.C:
		case <-ctx.Done():
		}
	}
	return at, ctx.Err() == nil
}

// paces gives each producer its part of the rate, evenly shifted.
func (b *Bench) paces(began time.Time) []*pace {
	n := b.cfg.Producers
	out := make([]*pace, n)
	var left *atomic.Int64
	if b.cfg.Records > 0 {
		left = new(atomic.Int64)
		left.Store(b.cfg.Records)
	}
	for i := range out {
		out[i] = &pace{ends: began.Add(b.cfg.Duration), left: left, due: began}
		if b.cfg.Rate > 0 {
			out[i].every = max(time.Duration(float64(time.Second)*float64(n)/b.cfg.Rate), 1)
			out[i].due = began.Add(out[i].every * time.Duration(i) / time.Duration(n))
		}
	}
	return out
}

// produce runs all producers until the run's end and until every record has its answer. The first failure ends the run.
func (b *Bench) produce(ctx context.Context) error {
	send := b.pipelined
	switch {
	case b.cfg.Batch > 0:
		send = b.batches
	case b.cfg.InFlight == 1:
		send = b.oneByOne
	}
	g, ctx := errgroup.WithContext(ctx)
	for i, p := range b.paces(time.Now()) {
		g.Go(func() error { return send(ctx, b.streams[i], p) })
	}
	return g.Wait()
}

// oneByOne produces a record and waits for its answer.
func (b *Bench) oneByOne(ctx context.Context, s *stream, p *pace) error {
	took := b.recorders[s.id]
	for turn := s.id; ; turn++ {
		at, ok := p.wait(ctx, 1)
		if !ok {
			return nil
		}
		topic := turn % len(b.topics)
		key, value := s.next(topic, at)
		if err := b.client.Produce(ctx, b.topics[topic], client.Record{Key: key, Value: value, Time: at}); err != nil {
			return err
		}
		took.record(time.Since(at))
	}
}

// pipelined gives the SDK record after record and takes the results as they come.
func (b *Bench) pipelined(ctx context.Context, s *stream, p *pace) (err error) {
	took := b.recorders[s.id]
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	var answers sync.WaitGroup
	defer func() {
		answers.Wait()
		if cause := context.Cause(ctx); err == nil && cause != nil && !errors.Is(cause, context.Canceled) {
			err = cause
		}
	}()
	var window chan struct{}
	if b.cfg.InFlight > 0 {
		window = make(chan struct{}, b.cfg.InFlight)
	}
	for turn := s.id; ; turn++ {
		if window != nil {
			select {
			case window <- struct{}{}:
			case <-ctx.Done():
				return nil // the deferred function says why
			}
		}
		at, ok := p.wait(ctx, 1)
		if !ok {
			return nil
		}
		topic := turn % len(b.topics)
		key, value := s.next(topic, at)
		answers.Add(1)
		err := b.client.ProduceAsync(ctx, b.topics[topic], client.Record{Key: key, Value: value, Time: at}, func(r client.Result) {
			defer answers.Done()
			if r.Err != nil {
				fail(r.Err)
				return
			}
			took.record(time.Since(at))
			if window != nil {
				<-window
			}
		})
		if err != nil {
			answers.Done()
			return err
		}
	}
}

// batches sends explicit batches, one at a time, each a request of its own.
func (b *Bench) batches(ctx context.Context, s *stream, p *pace) error {
	o := newBatchSender(b, s)
	took := b.recorders[s.id]
	for turn := s.id; ; turn++ {
		at, ok := p.wait(ctx, b.cfg.Batch)
		if !ok {
			return nil
		}
		if err := o.send(ctx, turn%len(b.topics), b.cfg.Batch, at); err != nil {
			return err
		}
		took.record(time.Since(at))
	}
}

// batchSender builds one stream's batches.
type batchSender struct {
	bench   *Bench
	stream  *stream
	builder batch.Builder
	options batch.Options
	request malachiv1.ProduceRequest
}

func newBatchSender(b *Bench, s *stream) *batchSender {
	o := &batchSender{bench: b, stream: s, options: batch.Options{Codec: b.codec}}
	copy(o.options.Producer[:], b.nonce[:])
	o.options.Producer[14], o.options.Producer[15] = byte(s.id>>8), byte(s.id)
	o.request.Batches = make([][]byte, 1)
	return o
}

// send appends one batch and returns when it is acknowledged. The broker's refusal for back-pressure is obeyed and counted.
func (o *batchSender) send(ctx context.Context, topic, records int, at time.Time) error {
	o.builder.Reset()
	for range records {
		key, value := o.stream.next(topic, at)
		if err := o.builder.Add(&batch.Record{Key: key, Value: value, Time: storage.Time(at.UnixNano())}, 0); err != nil {
			return err
		}
	}
	o.options.Sequence++
	wire, err := o.builder.Build(o.request.Batches[0][:0], o.options)
	if err != nil {
		return err
	}
	o.request.Topic, o.request.Batches[0] = o.bench.topics[topic], wire
	for {
		err := o.attempt(ctx, records)
		e := client.AsError("produce", err)
		if e == nil || e.Reason != malachiv1.Reason_OVERLOADED || e.OutcomeUnknown {
			return err
		}
		o.bench.refused.Add(1)
		pause := time.NewTimer(max(e.RetryDelay, 5*time.Millisecond))
		select {
		case <-pause.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (o *batchSender) attempt(ctx context.Context, records int) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	resp, err := o.bench.raw.Produce(ctx, &o.request)
	if err != nil {
		return err
	}
	if r := resp.GetResults(); len(r) != 1 || r[0].GetError() != nil || int(r[0].GetRecordCount()) != records {
		return fmt.Errorf("a batch of %d records was answered with %v", records, r)
	}
	return nil
}

// rawClient speaks to ProduceService without the SDK, over as many connections as there are producers.
func rawClient(server string, producers int) (malachiv1connect.ProduceServiceClient, func()) {
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.Protocols = new(http.Protocols)
	t.Protocols.SetHTTP1(true)
	t.ForceAttemptHTTP2 = false
	t.DisableCompression = true
	t.MaxIdleConns, t.MaxIdleConnsPerHost = 0, producers+1
	t.ReadBufferSize, t.WriteBufferSize = 4<<10, 64<<10
	conn := connect.NewClient(connecthttp.NewTransport(&http.Client{Transport: t}, strings.TrimRight(server, "/"),
		connecthttp.WithCodecs(codec.New(), connectproto.NewJSONCodec()), connecthttp.WithCompressors()))
	return malachiv1connect.NewProduceServiceClient(conn), t.CloseIdleConnections
}
