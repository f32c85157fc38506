// Package replica carries out, on one broker, what storage/replication decides: it opens segment replicas, appends as primary or
// follower, fences, seals, drops and reads, on the disk that storage/rangelog keeps.
//
// Every method is safe for concurrent use. The package starts no goroutine; done functions run on the journal's writer and must return
// at once. A primary lives in memory only: after a restart no segment is served until a pass has closed it (INV-D5).
package replica

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
	"github.com/malachilog/malachi/storage/rangelog"
	"github.com/malachilog/malachi/storage/replication"
	"github.com/malachilog/malachi/storage/segment"
)

// drainLapse is how long a drain holds if no fence follows.
const drainLapse = 2 * time.Second

// Config of a Service.
type Config struct {
	Self storage.BrokerID
	Boot storage.Boot
	// MaxInflight bounds the bytes of one segment that are appended and not yet committed. Default 64 MiB.
	MaxInflight int64
	// SegmentMaxBytes is when a segment asks to be closed; at twice that it takes no more. 0: never.
	SegmentMaxBytes int64
	// DrainGrace is how long a drain may settle what is in flight. Default 1 s.
	DrainGrace time.Duration
}

// Deps are a Service's collaborators.
type Deps struct {
	Store  *rangelog.Store
	Logger *slog.Logger
	// Now reads the clock; only differences of it are used, for append times within one segment. Default time.Now.
	Now func() time.Time
}

// Service is one broker's replicas.
type Service struct {
	cfg  Config
	deps Deps
	full chan struct{}

	mu        sync.RWMutex
	primaries map[storage.SegmentID]*primary
}

// primary is a segment that this process opened as its primary and serves.
type primary struct {
	id     storage.SegmentID
	slice  storage.Slice
	base   storage.Offset
	opened time.Time
	clock  storage.Time // wall clock at opened, not before the segment's creation time

	mu       sync.Mutex
	machine  *replication.Primary
	last     storage.Time // append time of the newest batch
	bytes    int64        // appended since the open
	inflight int64
	// drained until: a pass asked to stop accepting. It lapses by itself if no fence follows.
	drained time.Time
	idle    chan struct{} // closed when inflight falls to 0 during a drain
}

// New returns the service. It does no I/O.
func New(cfg Config, deps Deps) *Service {
	if cfg.MaxInflight == 0 {
		cfg.MaxInflight = 64 << 20
	}
	if cfg.DrainGrace == 0 {
		cfg.DrainGrace = time.Second
	}
	if deps.Now == nil {
		deps.Now = time.Now
	}
	return &Service{cfg: cfg, deps: deps, full: make(chan struct{}, 1), primaries: map[storage.SegmentID]*primary{}}
}

// Open is an order of the coordinator to open a replica.
type Open struct {
	Header []byte // complete
	Set    []storage.BrokerID
	Quorum int
	Boot   storage.Boot // of the primary, as recorded
}

// Open opens a replica and, if this broker heads the set, begins to serve it. It returns when the open is durable. Opening again is
// answered the same. Errors: storage.ErrStaleBoot (recorded under another boot of this broker: a pass is due), those of rangelog.Create.
func (s *Service) Open(ctx context.Context, o Open) error {
	h, _, err := segment.ParseHeader(o.Header)
	if err != nil {
		return fmt.Errorf("open replica: %w", err)
	}
	if s.primary(h.ID) != nil {
		return nil
	}
	heads := len(o.Set) > 0 && o.Set[0] == s.cfg.Self
	var machine *replication.Primary
	if heads {
		if machine, err = replication.NewPrimary(o.Set, o.Quorum, h.Base, s.cfg.Boot, o.Boot); err != nil {
			return fmt.Errorf("open replica %s: %w", h.ID, err)
		}
	}
	done := make(chan error, 1)
	if err := s.deps.Store.Create(o.Header, func(err error) { done <- err }); err != nil {
		return err
	}
	select {
	case err = <-done:
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		return fmt.Errorf("open replica %s: %w", h.ID, err)
	}
	if !heads {
		return nil
	}
	info, err := s.deps.Store.Info(h.ID)
	if err != nil {
		return err
	}
	if info.State != "open" || info.End != storage.EndBefore(h.Base) {
		return fmt.Errorf("open replica %s: it is %s with end %d: %w", h.ID, info.State, info.End, storage.ErrStaleBoot)
	}
	now := s.deps.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.primaries[h.ID] == nil {
		s.primaries[h.ID] = &primary{
			id: h.ID, slice: h.Slice, base: h.Base, opened: now, clock: max(storage.Time(now.UnixNano()), h.CreateTime), machine: machine, last: h.CreateTime,
			bytes: int64(len(o.Header)),
		}
	}
	return nil
}

func (s *Service) primary(id storage.SegmentID) *primary {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.primaries[id]
}

func (s *Service) serving(id storage.SegmentID) (*primary, error) {
	if p := s.primary(id); p != nil {
		return p, nil
	}
	return nil, fmt.Errorf("segment %s is not served here: %w", id, storage.ErrStaleRoute)
}

// Appended says where a batch went.
type Appended struct {
	Base       storage.Offset
	End        storage.End
	AppendTime storage.Time
}

// Append stamps b in place with the next offsets, the append time and the slice it covers, and queues it. done is called when a quorum
// has it durable, or with storage.ErrOutcomeUnknown if that can't be known. The caller gives b away.
//
// A returned error means that nothing was appended: storage.ErrStaleRoute (not served here; look the route up again), ErrFenced,
// ErrSealed, ErrOverloaded, ErrDiskFull, ErrStorageFailed.
func (s *Service) Append(id storage.SegmentID, b []byte, done func(Appended, error)) error {
	p, err := s.serving(id)
	if err != nil {
		return err
	}
	h, err := batch.ParseHeader(b)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	now := s.deps.Now()
	if now.Before(p.drained) {
		return fmt.Errorf("segment %s is being closed: %w", id, storage.ErrFenced)
	}
	if most := s.cfg.SegmentMaxBytes; most > 0 && p.bytes >= 2*most {
		return fmt.Errorf("segment %s has twice its size and waits to be closed: %w", id, storage.ErrFenced)
	}
	if p.inflight > 0 && p.inflight+int64(len(b)) > s.cfg.MaxInflight {
		return fmt.Errorf("segment %s has %d bytes in flight: %w", id, p.inflight, storage.ErrOverloaded)
	}
	base, err := p.machine.Take(h.Records)
	if err != nil {
		return err
	}
	at := max(p.clock+storage.Time(now.Sub(p.opened)), p.last)
	covered := p.slice
	if p.slice.Covers(h.Slice) { // a part keeps the slice it was cut for: it is never widened
		covered = h.Slice
	}
	batch.Stamp(b, base, at, covered)
	if h, err = batch.ParseHeader(b); err != nil {
		p.machine.GiveBack(base)
		return err
	}
	a := Appended{Base: base, End: h.End(), AppendTime: at}
	size := int64(len(b))
	err = s.deps.Store.Append(id, &h, b, func(err error) {
		p.settle(s.cfg.Self, a.End, size, err)
		if err != nil {
			err = fmt.Errorf("%w: %w", storage.ErrOutcomeUnknown, err)
		}
		done(a, err)
	})
	if err != nil {
		p.machine.GiveBack(base)
		if errors.Is(err, storage.ErrFenced) || errors.Is(err, storage.ErrSealed) || errors.Is(err, storage.ErrUnknownSegment) {
			p.machine.Stop(err) // for ever: only a pass fences
		}
		return err
	}
	p.last = at
	p.bytes += size
	if most := s.cfg.SegmentMaxBytes; most > 0 && p.bytes >= most && p.bytes-size < most {
		select {
		case s.full <- struct{}{}:
		default:
		}
	}
	p.inflight += size
	return nil
}

// settle counts the own barrier of an append.
func (p *primary) settle(self storage.BrokerID, end storage.End, size int64, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil {
		p.machine.Confirm(self, end)
	} else {
		p.machine.Stop(err)
	}
	if p.inflight -= size; p.inflight == 0 && p.idle != nil {
		close(p.idle)
		p.idle = nil
	}
}

// Committed returns the committed end of a segment that is served here. Errors: storage.ErrUnknownSegment if this broker has no replica of it
// (recorded, but not opened here yet), else storage.ErrStaleRoute.
func (s *Service) Committed(id storage.SegmentID) (storage.End, error) {
	p, err := s.serving(id)
	if err != nil {
		if _, known := s.deps.Store.Info(id); errors.Is(known, storage.ErrUnknownSegment) {
			return 0, known
		}
		if p = s.primary(id); p == nil { // it may have been opened between the two looks
			return 0, err
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.machine.Committed(), nil
}

// Load is what a served segment holds, for size and age.
type Load struct {
	Segment storage.SegmentID
	Bytes   int64
	Created storage.Time
	Opened  time.Time
	Empty   bool
}

// Full has a token when some segment has reached its size since the last look.
func (s *Service) Full() <-chan struct{} { return s.full }

// Serving lists the segments that are served here.
func (s *Service) Serving() []Load {
	s.mu.RLock()
	defer s.mu.RUnlock()
	out := make([]Load, 0, len(s.primaries))
	for _, p := range s.primaries {
		p.mu.Lock()
		out = append(out, Load{p.id, p.bytes, p.clock, p.opened, p.machine.Next() == p.base})
		p.mu.Unlock()
	}
	return out
}

// Ask answers the first question of a pass: does this broker serve the segment?
func (s *Service) Ask(_ context.Context, id storage.SegmentID) (serving bool, err error) {
	if err := s.deps.Store.Failed(); err != nil {
		return false, nil
	}
	return s.primary(id) != nil, nil
}

// Drain stops accepting appends to the segment and waits, at most the grace, until what is in flight has settled.
func (s *Service) Drain(ctx context.Context, id storage.SegmentID) error {
	p := s.primary(id)
	if p == nil {
		return nil
	}
	p.mu.Lock()
	p.drained = s.deps.Now().Add(drainLapse)
	var idle chan struct{}
	if p.inflight > 0 {
		if p.idle == nil {
			p.idle = make(chan struct{})
		}
		idle = p.idle
	}
	p.mu.Unlock()
	if idle == nil {
		return nil
	}
	grace := time.NewTimer(s.cfg.DrainGrace)
	defer grace.Stop()
	select {
	case <-idle:
	case <-grace.C:
	case <-ctx.Done():
	}
	return nil
}

// Fence fences the replica and returns its vote. See rangelog.Store.Fence for the errors; a replica whose storage has failed never votes.
func (s *Service) Fence(ctx context.Context, id storage.SegmentID, header []byte) (rangelog.Vote, error) {
	if err := s.deps.Store.Failed(); err != nil {
		return rangelog.Vote{}, err
	}
	v, err := s.deps.Store.Fence(ctx, id, header)
	if err == nil {
		s.stopServing(id)
	}
	return v, err
}

func (s *Service) stopServing(id storage.SegmentID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.primaries, id)
}

// Seal completes a replica at the recorded end and digest.
func (s *Service) Seal(ctx context.Context, id storage.SegmentID, end storage.End, digest storage.Digest) error {
	s.stopServing(id)
	return s.deps.Store.Seal(ctx, id, end, digest)
}

// Drop removes a replica that a recorded fact condemns.
func (s *Service) Drop(ctx context.Context, id storage.SegmentID) error {
	s.stopServing(id)
	return s.deps.Store.Drop(ctx, id)
}

// Read returns committed batches from offset on: see rangelog.Store.Read. An open segment is read at its primary only.
func (s *Service) Read(id storage.SegmentID, open bool, from storage.Offset, limit storage.End, maxBytes int, alloc func(n int) []byte) ([]rangelog.Batch, error) {
	if open {
		committed, err := s.Committed(id)
		if err != nil {
			return nil, err
		}
		limit = min(limit, committed)
	}
	return s.deps.Store.Read(id, from, limit, maxBytes, alloc)
}

// OffsetAt returns the first offset appended at or after a time: see rangelog.Store.OffsetAt.
func (s *Service) OffsetAt(id storage.SegmentID, at storage.Time) (storage.Offset, error) {
	return s.deps.Store.OffsetAt(id, at)
}

// Watch tells c when more of a segment may be readable: see rangelog.Store.Watch.
func (s *Service) Watch(id storage.SegmentID, c chan<- struct{}) (cancel func()) {
	return s.deps.Store.Watch(id, c)
}
