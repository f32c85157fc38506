package replica

import (
	"context"
	"fmt"
	"time"

	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/storage"
)

// contactPatience bounds one round of questions.
const contactPatience = 2 * time.Second

// contact shares rounds of questions to the followers among those who want to know: whoever comes while a round is under way waits for the next.
type contact struct {
	running bool
	next    *round
}

type round struct {
	over chan struct{}
	err  error
}

// Contact returns nil once a quorum of the segment's set has answered a question that began after this call: then what this broker has
// committed is everything that was acknowledged before. Errors: those of Committed; storage.ErrUnavailable if no quorum answers.
func (s *Service) Contact(ctx context.Context, id storage.SegmentID) error {
	if _, err := s.Committed(id); err != nil {
		return err
	}
	p, err := s.serving(id)
	if err != nil {
		return err
	}
	if len(p.feeds) == 0 {
		return s.deps.Store.Failed()
	}
	p.mu.Lock()
	if p.contact.next == nil {
		p.contact.next = &round{over: make(chan struct{})}
	}
	r := p.contact.next
	if !p.contact.running {
		p.contact.running = s.work.start(p.ask)
	}
	p.mu.Unlock()
	select {
	case <-r.over:
		return r.err
	case <-ctx.Done():
		return fmt.Errorf("no quorum of segment %s answers: %w: %w", id, storage.ErrUnavailable, ctx.Err())
	}
}

// ask runs rounds while somebody waits for one.
func (p *primary) ask(ctx context.Context) {
	for {
		p.mu.Lock()
		r := p.contact.next
		p.contact.next = nil
		if r == nil {
			p.contact.running = false
			p.mu.Unlock()
			return
		}
		p.mu.Unlock()
		r.err = p.askAll(ctx)
		close(r.over)
	}
}

// askAll asks every follower whether it still follows, and returns when a quorum does, or cannot.
func (p *primary) askAll(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, contactPatience)
	defer cancel()
	p.mu.Lock()
	closed, quorum := p.closed, p.quorum
	p.mu.Unlock()
	if closed {
		return fmt.Errorf("segment %s: %w", p.id, storage.ErrFenced)
	}
	with := 0
	if p.s.deps.Store.Failed() == nil {
		with++
	}
	answers := make(chan bool, len(p.feeds))
	for _, f := range p.feeds {
		if !p.s.work.start(func(context.Context) {
			a, err := f.to.call(ctx, &intrav1.ShipRequest{From: uint64(p.s.cfg.Self), Boot: uint64(p.s.cfg.Boot), Appends: []*intrav1.SegmentAppend{{Segment: SegmentKey(p.id)}}})
			answers <- err == nil && a[0].GetRefusal() == intrav1.Refusal_REFUSAL_UNSPECIFIED
		}) {
			return storage.ErrClosed
		}
	}
	for range p.feeds {
		if with >= quorum {
			break
		}
		if <-answers {
			with++
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.closed: // a pass came first: somebody else may serve by now
		return fmt.Errorf("segment %s: %w", p.id, storage.ErrFenced)
	case with < quorum:
		return fmt.Errorf("segment %s: %d of its set answer, %d are needed: %w", p.id, with, quorum, storage.ErrUnavailable)
	}
	return nil
}
