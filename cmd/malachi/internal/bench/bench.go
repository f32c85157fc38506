package bench

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/malachilog/malachi/client"
	malachiv1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/gen/go/malachi/v1/malachiv1connect"
	"github.com/malachilog/malachi/storage/batch"
)

// adminCalls is how many topics are made or deleted at once.
const adminCalls = 16

// Bench is one run against one broker.
type Bench struct {
	cfg     Config
	codec   batch.Codec
	nonce   [16]byte
	client  *client.Client
	raw     malachiv1connect.ProduceServiceClient
	release func()

	topics    []string
	streams   []*stream
	recorders []*recorder // per stream
	refused   atomic.Int64
	// open gives a reader of a topic. A test of the checker puts a liar in its place.
	open func(topic string, cfg client.ConsumeConfig) (reader, error)
}

// New prepares a run; it does no I/O. Errors: those of Config.Validate.
func New(cfg Config) (*Bench, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	b := &Bench{cfg: cfg.withDefaults()}
	var err error
	if b.codec, err = batch.ParseCodec(b.cfg.Compression); err != nil {
		return nil, err
	}
	if b.client, err = client.New(client.Config{Servers: []string{b.cfg.Server}, Compression: b.cfg.Compression}); err != nil {
		return nil, err
	}
	b.raw, b.release = rawClient(b.cfg.Server, b.cfg.Producers)
	rand.Read(b.nonce[:]) // never fails
	for i := range b.cfg.Topics {
		b.topics = append(b.topics, fmt.Sprintf("%s-%x-%d", b.cfg.Prefix, b.nonce[:4], i))
	}
	fill := filler(b.codec != batch.CodecNone)
	for i := range b.cfg.Producers {
		b.streams = append(b.streams, newStream(i, b.cfg, fill))
		b.recorders = append(b.recorders, newRecorder())
	}
	b.open = func(topic string, cfg client.ConsumeConfig) (reader, error) { return b.client.Consume(topic, cfg) }
	return b, nil
}

// Run makes the topics, writes, reads everything back, and removes the topics. A run in which anything failed has a report too, which
// says so and holds no rates (INV-H3). The error is nil unless the run could not begin, or ctx has ended.
func (b *Bench) Run(ctx context.Context) (_ *Report, err error) {
	defer b.release()
	defer func() { err = errors.Join(err, b.client.Close(context.WithoutCancel(ctx))) }()
	r := &Report{Config: b.cfg, Began: time.Now().UTC().Truncate(time.Second)}
	if err := b.makeTopics(ctx); err != nil {
		return nil, err
	}
	if !b.cfg.Keep {
		defer func() { err = errors.Join(err, b.dropTopics(context.WithoutCancel(ctx))) }()
	}
	fault := b.measure(ctx, r)
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if fault != nil {
		r.fail(fault)
	}
	return r, nil
}

// measure fills the report, or says what failed.
func (b *Bench) measure(ctx context.Context, r *Report) error {
	if err := b.warmUp(ctx); err != nil {
		return fmt.Errorf("warm up: %w", err)
	}
	warm := b.total()
	readers, stop := b.startConsumers(ctx)
	before, err := b.sample(ctx)
	if err != nil {
		return errors.Join(err, stop())
	}
	began := time.Now()
	err = b.produce(ctx)
	took := time.Since(began)
	if err != nil {
		return errors.Join(fmt.Errorf("produce: %w", err), stop())
	}
	after, err := b.sample(ctx)
	if err = errors.Join(err, stop()); err != nil {
		return err
	}
	sent := b.total()
	r.written(tally{sent.records - warm.records, sent.bytes - warm.bytes, 0}, took, b)
	r.used(before, after, took)
	if err := b.verify(ctx, r, readers); err != nil {
		return fmt.Errorf("verify: %w", err)
	}
	r.Verified = sent.records
	if b.cfg.ReadPass {
		if r.Read, err = b.readPass(ctx); err != nil {
			return fmt.Errorf("read: %w", err)
		}
		if r.Read.Records != sent.records {
			return fmt.Errorf("read: %d records, %d were acknowledged", r.Read.Records, sent.records)
		}
	}
	return nil
}

// warmUp writes one record to every topic, so that segments and connections are there before the clock runs. It is verified like all
// others.
func (b *Bench) warmUp(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(adminCalls)
	s := b.streams[0]
	for i, name := range b.topics {
		at := time.Now()
		key, value := s.next(i, at)
		record := client.Record{Key: key, Value: slices.Clone(value), Time: at}
		g.Go(func() error { return b.client.Produce(ctx, name, record) })
	}
	return g.Wait()
}

func (b *Bench) total() (t tally) {
	for _, s := range b.streams {
		for _, n := range s.sent {
			t.records += n.records
			t.bytes += n.bytes
		}
	}
	return t
}

func (b *Bench) makeTopics(ctx context.Context) error {
	return b.eachTopic(ctx, func(ctx context.Context, name string) error {
		_, err := b.client.Admin().CreateTopic(ctx, &malachiv1.CreateTopicRequest{Name: name, InitialRanges: int32(b.cfg.Ranges), Nonce: name})
		if err != nil {
			return fmt.Errorf("topic %s: %w", name, client.AsError("create topic", err))
		}
		return nil
	})
}

func (b *Bench) dropTopics(ctx context.Context) error {
	return b.eachTopic(ctx, func(ctx context.Context, name string) error {
		if _, err := b.client.Admin().DeleteTopic(ctx, &malachiv1.DeleteTopicRequest{Name: name}); err != nil {
			return fmt.Errorf("topic %s: %w", name, client.AsError("delete topic", err))
		}
		return nil
	})
}

func (b *Bench) eachTopic(ctx context.Context, do func(context.Context, string) error) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(adminCalls)
	for _, name := range b.topics {
		g.Go(func() error { return do(ctx, name) })
	}
	return g.Wait()
}

// MakeTopics makes n topics with one record each and leaves them there, for measurements of what a broker needs when it is idle.
func MakeTopics(ctx context.Context, server string, n int) error {
	b, err := New(Config{Server: server, Topics: n, Keys: 1, Keep: true})
	if err != nil {
		return err
	}
	defer b.release()
	if err = b.makeTopics(ctx); err == nil {
		err = b.warmUp(ctx)
	}
	return errors.Join(err, b.client.Close(context.WithoutCancel(ctx)))
}
