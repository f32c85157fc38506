package replica

import (
	"context"
	"sort"
	"sync"
	"time"

	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/gen/go/malachi/intra/v1/intrav1connect"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/replication"
)

const (
	shipBytes    = 4 << 20 // of one call, unless a single batch is larger
	shipFlight   = 2       // calls to one follower that are under way at once
	shipPatience = 3 * time.Second
	// A follower that could not be reached, or was busy, is tried again after a pause that doubles from the first to the longest.
	firstPause   = 20 * time.Millisecond
	longestPause = time.Second
)

// feed is one follower of one segment. Its machine is guarded by the primary's mu.
type feed struct {
	p  *primary
	to *shipper
	*replication.Follower

	queued   bool // in the shipper's line; guarded by the shipper's mu
	catching bool // a catch-up runs; guarded by the primary's mu
}

// shipper sends what the segments served here have for one other broker: natural batching, in order, a few calls at a time.
type shipper struct {
	s  *Service
	to storage.BrokerID

	collect sync.Mutex // held while one call is put together, so that calls are numbered in the order of what they hold. No I/O under it
	number  uint64

	mu      sync.Mutex
	line    []*feed // with something to ship
	paused  []*feed
	flights int
	pause   time.Duration // next pause; 0: none is due
	resting bool
}

func (s *Service) shipperTo(b storage.BrokerID) *shipper {
	s.mu.Lock()
	defer s.mu.Unlock()
	sh := s.shippers[b]
	if sh == nil {
		sh = &shipper{s: s, to: b}
		s.shippers[b] = sh
	}
	return sh
}

// ready puts the feed in line if there is something to ship. Called with the primary's mu held.
func (f *feed) ready() {
	if f.p.closed || f.catching {
		return
	}
	if _, _, ok := f.Send(); !ok {
		return
	}
	sh := f.to
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if f.queued {
		return
	}
	f.queued = true
	sh.line = append(sh.line, f)
	if sh.flights < shipFlight && sh.s.work.start(sh.fly) {
		sh.flights++
	}
}

// part is what one call carries of one segment.
type part struct {
	f    *feed
	call replication.Call
	req  *intrav1.SegmentAppend
}

// fly sends what waits until nothing does.
func (sh *shipper) fly(ctx context.Context) {
	for {
		parts, number := sh.load()
		if len(parts) == 0 {
			sh.mu.Lock()
			if len(sh.line) > 0 { // came since
				sh.mu.Unlock()
				continue
			}
			sh.flights--
			sh.mu.Unlock()
			return
		}
		sh.send(ctx, number, parts)
	}
}

// load takes what is in line, up to the size of a call.
func (sh *shipper) load() (parts []part, number uint64) {
	sh.collect.Lock()
	defer sh.collect.Unlock()
	for size := 0; size < shipBytes; {
		sh.mu.Lock()
		if len(sh.line) == 0 {
			sh.mu.Unlock()
			break
		}
		f := sh.line[0]
		sh.line[0] = nil
		if sh.line = sh.line[1:]; len(sh.line) == 0 {
			sh.line = nil
		}
		f.queued = false
		sh.mu.Unlock()
		if p, n, ok := f.load(shipBytes - size); ok {
			parts, size = append(parts, p), size+n
		}
	}
	if len(parts) > 0 {
		sh.number++
	}
	return parts, sh.number
}

// load takes the feed's next batches from memory; if they are there no more, it begins a catch-up from the log.
func (f *feed) load(room int) (_ part, size int, ok bool) {
	p := f.p
	p.mu.Lock()
	defer p.mu.Unlock()
	from, _, ok := f.Send()
	if !ok || p.closed || f.catching {
		return part{}, 0, false
	}
	i := sort.Search(len(p.recent), func(i int) bool { return p.recent[i].base >= from })
	if i == len(p.recent) || p.recent[i].base != from {
		f.catching = p.s.work.start(f.catchUp)
		return part{}, 0, false
	}
	req := &intrav1.SegmentAppend{Segment: SegmentKey(p.id), First: uint64(from)}
	end := storage.EndBefore(from)
	for ; i < len(p.recent) && (size == 0 || size+len(p.recent[i].data) <= room); i++ {
		req.Batches = append(req.Batches, p.recent[i].data)
		size += len(p.recent[i].data)
		end = p.recent[i].end
	}
	out := part{f, f.Sent(from, end), req}
	f.ready() // what did not fit
	return out, size, true
}

// send carries one call out and tells every machine what came of it.
func (sh *shipper) send(ctx context.Context, number uint64, parts []part) {
	req := &intrav1.ShipRequest{From: uint64(sh.s.cfg.Self), Boot: uint64(sh.s.cfg.Boot), Number: number}
	for i := range parts {
		req.Appends = append(req.Appends, parts[i].req)
	}
	answers, err := sh.call(ctx, req)
	var paused []*feed
	for i := range parts {
		var a *intrav1.SegmentAnswer
		if err == nil {
			a = answers[i]
		}
		if parts[i].f.answered(parts[i].call, a) == replication.VerdictPause {
			paused = append(paused, parts[i].f)
		}
	}
	sh.rest(paused)
}

// call asks the broker. An error means that there is no answer, not that nothing was done.
func (sh *shipper) call(ctx context.Context, req *intrav1.ShipRequest) ([]*intrav1.SegmentAnswer, error) {
	client, err := sh.s.deps.Peers.Client(sh.to)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, shipPatience)
	defer cancel()
	res, err := intrav1connect.NewReplicaServiceClient(client).Ship(ctx, req)
	if err == nil && len(res.GetAnswers()) != len(req.GetAppends()) {
		err = storage.ErrCorrupt
	}
	return res.GetAnswers(), err
}

var answerKinds = map[intrav1.Refusal]replication.AnswerKind{
	intrav1.Refusal_REFUSAL_UNSPECIFIED:     replication.AnswerOK,
	intrav1.Refusal_REFUSAL_GAP:             replication.AnswerGap,
	intrav1.Refusal_REFUSAL_BUSY:            replication.AnswerBusy,
	intrav1.Refusal_REFUSAL_UNKNOWN_SEGMENT: replication.AnswerUnknown,
	intrav1.Refusal_REFUSAL_FENCED:          replication.AnswerFenced,
	intrav1.Refusal_REFUSAL_SEALED:          replication.AnswerSealed,
	intrav1.Refusal_REFUSAL_STORAGE_FAILED:  replication.AnswerFailed,
	intrav1.Refusal_REFUSAL_DAMAGED:         replication.AnswerDamaged,
}

// answered tells the machines the answer to a call; nil: there was none.
func (f *feed) answered(c replication.Call, a *intrav1.SegmentAnswer) replication.Verdict {
	p := f.p
	p.mu.Lock()
	kind := answerKinds[a.GetRefusal()]
	var verdict replication.Verdict
	if a == nil || kind == 0 {
		verdict = f.Lost(c)
	} else {
		verdict = f.Answer(c, replication.Answer{Kind: kind, End: storage.End(a.GetEnd())})
	}
	var ready []waiter
	switch verdict {
	case replication.VerdictCount:
		f.to.well()
		ready = p.confirm(f.to.to, storage.End(a.GetEnd()))
	case replication.VerdictGone:
		p.machine.Gone(f.to.to, f.Gone())
	}
	p.trim()
	f.ready()
	p.unlockAndTell(ready)
	if verdict == replication.VerdictGone {
		p.askDue()
	}
	return verdict
}

// well says that the broker answers.
func (sh *shipper) well() {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	sh.pause = 0
}

// rest resumes paused feeds after a pause that doubles while the broker does not answer.
func (sh *shipper) rest(feeds []*feed) {
	if len(feeds) == 0 {
		return
	}
	sh.mu.Lock()
	defer sh.mu.Unlock()
	sh.paused = append(sh.paused, feeds...)
	if sh.resting {
		return
	}
	sh.pause = min(max(firstPause, 2*sh.pause), longestPause)
	pause := sh.pause
	sh.resting = sh.s.work.start(func(ctx context.Context) {
		t := time.NewTimer(pause)
		defer t.Stop()
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
		sh.mu.Lock()
		feeds := sh.paused
		sh.paused, sh.resting = nil, false
		sh.mu.Unlock()
		for _, f := range feeds {
			f.p.mu.Lock()
			f.Resume()
			f.ready()
			f.p.mu.Unlock()
		}
	})
}

// catchUp ships from the log until the follower is back at what memory holds, has to wait, or is gone. One call at a time, and beside the calls
// of the live path: a follower that is behind costs the others nothing.
func (f *feed) catchUp(ctx context.Context) {
	p := f.p
	for ctx.Err() == nil {
		p.mu.Lock()
		from, to, ok := f.Send()
		live := ok && len(p.recent) > 0 && p.recent[0].base <= from
		if !ok || live || p.closed {
			f.catching = false
			f.ready()
			p.mu.Unlock()
			return
		}
		p.mu.Unlock()
		batches, err := p.s.deps.Store.Read(p.id, from, to, shipBytes, nil)
		if err != nil || len(batches) == 0 {
			f.wait(ctx, err)
			continue
		}
		req := &intrav1.SegmentAppend{Segment: SegmentKey(p.id), First: uint64(batches[0].Header.Base)}
		for _, b := range batches {
			req.Batches = append(req.Batches, b.Data)
		}
		p.mu.Lock()
		call := f.Sent(from, batches[len(batches)-1].Header.End())
		p.mu.Unlock()
		f.to.send(ctx, 0, []part{{f, call, req}})
	}
}

// wait waits for what is queued and not in the file yet, or a little.
func (f *feed) wait(ctx context.Context, err error) {
	if err != nil {
		f.p.s.deps.Logger.Warn("follower cannot be brought up from the log", "segment", f.p.id.String(), "follower", f.to.to.String(), "error", err)
	}
	wake := make(chan struct{}, 1)
	defer f.p.s.deps.Store.Watch(f.p.id, wake)()
	t := time.NewTimer(firstPause)
	defer t.Stop()
	select {
	case <-wake:
	case <-t.C:
	case <-ctx.Done():
	}
}
