// Package replica carries out, on one broker, what storage/replication decides: it opens segment replicas, appends as primary or
// follower, fences, seals, drops and reads, on the disk that storage/rangelog keeps.
//
// Every method is safe for concurrent use. Run owns the goroutines: those that ship to followers and forward to primaries. Done functions run
// on them or on the journal's writer, and must return at once. A primary lives in memory only: after a restart no segment is served until a
// pass has closed it (INV-D5).
package replica

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	"github.com/malachilog/malachi/services/rpc"
	"github.com/malachilog/malachi/storage"
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
	// MaxInflightAll bounds the same over all segments. Default 256 MiB.
	MaxInflightAll int64
	// MaxLag is how many bytes a follower may be behind before it catches up from the log. Default 32 MiB.
	MaxLag int64
	// ProduceDeadline is how old the oldest append that is not committed may be before the primary asks for a pass. Default 5 s.
	ProduceDeadline time.Duration
	// DrainGrace is how long a drain may settle what is in flight. Default 1 s.
	DrainGrace time.Duration
}

func (c *Config) setDefaults() {
	if c.MaxInflight == 0 {
		c.MaxInflight = 64 << 20
	}
	if c.MaxInflightAll == 0 {
		c.MaxInflightAll = 256 << 20
	}
	if c.MaxLag == 0 {
		c.MaxLag = 32 << 20
	}
	if c.ProduceDeadline == 0 {
		c.ProduceDeadline = 5 * time.Second
	}
	if c.DrainGrace == 0 {
		c.DrainGrace = time.Second
	}
}

// Deps are a Service's collaborators.
type Deps struct {
	Store  *rangelog.Store
	Logger *slog.Logger
	// Peers is the way to the other brokers.
	Peers *rpc.Peers
	// StillOpen asks the topic's metadata, by a linearizable read, whether the record says that a segment is open. Nil: it is (tests).
	StillOpen func(ctx context.Context, topic string, id storage.SegmentID) (bool, error)
	// AskPass asks the coordinator of a segment for a pass. It must not block. Nil: nobody is asked.
	AskPass func(id storage.SegmentID, why replication.Reason)
	// Damaged is told that the own copy of a sealed segment did not verify when it was read. It must not block. Nil: nobody is told.
	Damaged func(id storage.SegmentID)
	// SegmentMaxBytes is when a segment asks to be closed; at twice that it takes no more. Nil or 0: never.
	SegmentMaxBytes func() int64
	// Now reads the clock; only differences of it are used, for append times within one segment. Default time.Now.
	Now func() time.Time
}

// Service is one broker's replicas.
type Service struct {
	cfg      Config
	deps     Deps
	full     chan struct{}
	work     *work
	closing  chan struct{} // closed when Run ends
	inflight atomic.Int64  // over all segments

	mu        sync.RWMutex
	primaries map[storage.SegmentID]*primary
	closed    map[storage.SegmentID]*primary // fenced here, with appends that wait for the recorded end
	shippers  map[storage.BrokerID]*shipper
	bringers  map[storage.BrokerID]*bringer
	rejoining map[storage.SegmentID]bool
}

// New returns the service. It does no I/O.
func New(cfg Config, deps Deps) *Service {
	cfg.setDefaults()
	if deps.Now == nil {
		deps.Now = time.Now
	}
	if deps.AskPass == nil {
		deps.AskPass = func(storage.SegmentID, replication.Reason) {}
	}
	if deps.Damaged == nil {
		deps.Damaged = func(storage.SegmentID) {}
	}
	if deps.SegmentMaxBytes == nil {
		deps.SegmentMaxBytes = func() int64 { return 0 }
	}
	return &Service{
		cfg: cfg, deps: deps, full: make(chan struct{}, 1), work: newWork(), closing: make(chan struct{}),
		primaries: map[storage.SegmentID]*primary{}, closed: map[storage.SegmentID]*primary{}, shippers: map[storage.BrokerID]*shipper{},
		bringers: map[storage.BrokerID]*bringer{}, rejoining: map[storage.SegmentID]bool{},
	}
}

// lookEvery is how often a service looks for appends that nobody commits.
const lookEvery = 250 * time.Millisecond

// Run owns the service's goroutines. It returns when ctx has ended and they have left; appends that wait then are of unknown outcome.
func (s *Service) Run(ctx context.Context) error {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-tick.C:
			s.look()
		}
	}
	close(s.closing)
	s.work.end()
	for _, p := range s.all() {
		p.giveUp(fmt.Errorf("%w: %w", storage.ErrOutcomeUnknown, storage.ErrClosed))
	}
	return nil
}

// all are the primaries that serve or have appends waiting.
func (s *Service) all() []*primary {
	s.mu.RLock()
	defer s.mu.RUnlock()
	out := make([]*primary, 0, len(s.primaries)+len(s.closed))
	for _, p := range s.primaries {
		out = append(out, p)
	}
	for _, p := range s.closed {
		out = append(out, p)
	}
	return out
}

// look asks for passes where appends wait too long for a quorum, and gives up those that nobody can still be waiting for.
func (s *Service) look() {
	now := s.deps.Now()
	for _, p := range s.all() {
		p.look(now)
	}
}

func (s *Service) suspect(id storage.SegmentID) { s.deps.AskPass(id, replication.ReasonPrimaryGone) }

// Rejoin lets a follower's replica of an earlier boot take appends again: see rangelog.Store.Rejoin.
func (s *Service) Rejoin(ctx context.Context, id storage.SegmentID) error {
	return s.deps.Store.Rejoin(ctx, id)
}

// rejoinSoon has a follower's replica of an earlier boot verified, so that it takes appends again.
func (s *Service) rejoinSoon(id storage.SegmentID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rejoining[id] {
		return
	}
	s.rejoining[id] = s.work.start(func(ctx context.Context) {
		err := s.deps.Store.Rejoin(ctx, id)
		s.mu.Lock()
		delete(s.rejoining, id)
		s.mu.Unlock()
		if err != nil && ctx.Err() == nil {
			s.deps.Logger.Warn("replica does not follow again", "segment", id.String(), "error", err)
		}
	})
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
	if err := s.mayCreate(ctx, &h); err != nil {
		return fmt.Errorf("open replica %s: %w", h.ID, err)
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
	p := s.newPrimary(&h, machine, o)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.primaries[h.ID] == nil {
		s.primaries[h.ID] = p
	}
	return nil
}

// mayCreate refuses to make a replica of a segment that the record does not call open (any more). A segment that was closed and dropped has no
// fence left here; an order to open it that comes late must not bring it back to life.
func (s *Service) mayCreate(ctx context.Context, h *segment.Header) error {
	if _, err := s.deps.Store.Info(h.ID); err == nil || s.deps.StillOpen == nil || mutate.On("replica.open-without-record") {
		return nil
	}
	open, err := s.deps.StillOpen(ctx, h.Topic, h.ID)
	if err == nil && !open {
		err = storage.ErrSealed
	}
	return err
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

// Ask answers the first question of a pass: does this broker serve the segment, and is its quorum up as far as it knows?
func (s *Service) Ask(_ context.Context, id storage.SegmentID) (serving bool, err error) {
	p := s.primary(id)
	if p == nil || s.deps.Store.Failed() != nil {
		return false, nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	_, urgent, _ := p.machine.Due()
	return !urgent && p.machine.Stopped() == nil, nil
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
	p := s.primaries[id]
	if p == nil {
		return
	}
	delete(s.primaries, id)
	if p.close() { // its appends in flight wait for the recorded end
		s.closed[id] = p
	}
}

// resolve gives every append that waits its outcome by the recorded end.
func (s *Service) resolve(id storage.SegmentID, end storage.End) {
	s.stopServing(id)
	s.mu.Lock()
	p := s.closed[id]
	delete(s.closed, id)
	s.mu.Unlock()
	if p != nil {
		p.resolve(end)
	}
}

// Seal completes a replica at the recorded end and digest.
func (s *Service) Seal(ctx context.Context, id storage.SegmentID, end storage.End, digest storage.Digest) error {
	s.resolve(id, end)
	return s.deps.Store.Seal(ctx, id, end, digest)
}

// Drop removes a replica that a recorded fact condemns.
func (s *Service) Drop(ctx context.Context, id storage.SegmentID) error {
	s.stopServing(id)
	s.mu.Lock()
	p := s.closed[id]
	delete(s.closed, id)
	s.mu.Unlock()
	if p != nil {
		p.giveUp(fmt.Errorf("the segment was dropped: %w", storage.ErrOutcomeUnknown))
	}
	return s.deps.Store.Drop(ctx, id)
}

// OffsetAt returns the first offset appended at or after a time: see rangelog.Store.OffsetAt.
func (s *Service) OffsetAt(id storage.SegmentID, at storage.Time) (storage.Offset, error) {
	return s.deps.Store.OffsetAt(id, at)
}
