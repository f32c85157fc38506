package bench

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/malachilog/malachi/client"
)

const (
	readers = 4                // topics that are read back at once
	stall   = 30 * time.Second // without a record a read-back has failed
)

// reader is a *client.Consumer.
type reader interface {
	Records(ctx context.Context) iter.Seq2[client.Record, error]
	Cursor() string
}

// consumer reads one topic while it is written, and then to its end.
type consumer struct {
	topic    string
	verifier *verifier
	took     *recorder // from the record's producer time to the hand of the reader
	cursor   string
}

// startConsumers starts the readers that read along. stop ends them and returns their faults.
func (b *Bench) startConsumers(ctx context.Context) (all []*consumer, stop func() error) {
	ctx, cancel := context.WithCancel(ctx)
	var g errgroup.Group
	for range b.cfg.Consumers {
		for i, name := range b.topics {
			c := &consumer{topic: name, verifier: newVerifier(i, b.streams), took: newRecorder()}
			all = append(all, c)
			g.Go(func() error { return b.follow(ctx, c) })
		}
	}
	return all, func() error {
		cancel()
		return g.Wait()
	}
}

// follow reads until ctx ends.
func (b *Bench) follow(ctx context.Context, c *consumer) error {
	r, err := b.open(c.topic, client.ConsumeConfig{Wait: 5 * time.Second})
	if err != nil {
		return err
	}
	for rec, err := range r.Records(ctx) {
		if err == nil {
			err = c.verifier.record(rec.Key, rec.Value, rec.Time)
			c.took.record(time.Since(rec.Time))
		}
		if ctx.Err() != nil && (err == nil || errors.Is(err, ctx.Err())) {
			break // what was yielded was counted, and the cursor is behind it
		}
		if err != nil {
			return fmt.Errorf("consume %s: %w", c.topic, err)
		}
	}
	c.cursor = r.Cursor()
	return nil
}

// verify reads every topic to its end: along which consumers have come, else once from the front.
func (b *Bench) verify(ctx context.Context, r *Report, along []*consumer) error {
	if len(along) == 0 {
		for i, name := range b.topics {
			along = append(along, &consumer{topic: name, verifier: newVerifier(i, b.streams)})
		}
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(readers)
	for _, c := range along {
		g.Go(func() error { return b.readBack(ctx, c) })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	var took []*recorder
	for _, c := range along {
		if c.took != nil {
			took = append(took, c.took)
		}
	}
	r.EndToEnd = summary(took...)
	return nil
}

func (b *Bench) readBack(ctx context.Context, c *consumer) error {
	r, err := b.open(c.topic, client.ConsumeConfig{From: client.Cursor(c.cursor), ExitAtEnd: true})
	if err != nil {
		return err
	}
	ctx, alive, cancel := watchdog(ctx)
	defer cancel()
	for rec, err := range r.Records(ctx) {
		if err == nil {
			err = c.verifier.record(rec.Key, rec.Value, rec.Time)
		}
		if err != nil {
			return fmt.Errorf("topic %s: %w", c.topic, err)
		}
		if c.verifier.got.records%1024 == 0 {
			alive()
		}
	}
	if err := c.verifier.finish(); err != nil {
		return fmt.Errorf("topic %s: %w", c.topic, err)
	}
	return nil
}

// watchdog ends a context after a while without a call of alive.
func watchdog(ctx context.Context) (_ context.Context, alive, cancel func()) {
	ctx, fail := context.WithCancelCause(ctx)
	t := time.AfterFunc(stall, func() { fail(fmt.Errorf("nothing came for %s", stall)) })
	return ctx, func() { t.Reset(stall) }, func() { t.Stop(); fail(nil) }
}

// readPass reads every topic once more and counts.
func (b *Bench) readPass(ctx context.Context) (*Rate, error) {
	counts := make([]tally, len(b.topics))
	began := time.Now()
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(readers)
	for i, name := range b.topics {
		g.Go(func() error {
			r, err := b.open(name, client.ConsumeConfig{ExitAtEnd: true})
			if err != nil {
				return err
			}
			ctx, _, cancel := watchdog(ctx)
			defer cancel()
			for rec, err := range r.Records(ctx) {
				if err != nil {
					return fmt.Errorf("topic %s: %w", name, err)
				}
				counts[i].records++
				counts[i].bytes += int64(len(rec.Key) + len(rec.Value))
			}
			return nil
		})
	}
	err := g.Wait()
	var sum tally
	for _, c := range counts {
		sum.records += c.records
		sum.bytes += c.bytes
	}
	return rate(sum, time.Since(began)), err
}
