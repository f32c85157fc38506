package rangelog

import (
	"errors"
	"fmt"
	"io/fs"
	"path"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
	"github.com/malachilog/malachi/storage/journal"
	"github.com/malachilog/malachi/storage/replication"
	"github.com/malachilog/malachi/storage/segment"
	"github.com/malachilog/malachi/storage/vfs"
)

const (
	firstReserve = 64 << 10 // of a new segment's file; then it doubles
	maxReserve   = 16 << 20
)

// Create opens a replica from the complete header bytes that the coordinator made. done is called when the open entry is durable.
// Creating what is here already with the same header is answered as if it were new; with another header it is storage.ErrConflict.
// Errors: storage.ErrDiskFull, ErrStorageFailed, ErrSealed, ErrDamaged (a file is in the way that nothing explains), ErrUnavailable (another
// call is making or removing it), ErrOverloaded, ErrCorrupt (header). On error nothing is left that recovery would take up.
func (s *Store) Create(header []byte, done func(error)) error {
	if s.diskFull.Load() {
		return fmt.Errorf("open replica: %w", storage.ErrDiskFull)
	}
	return s.create(header, firstReserve, done)
}

func (s *Store) create(header []byte, reserve int64, done func(error)) error {
	h, n, err := segment.ParseHeader(header)
	if err != nil {
		return fmt.Errorf("open replica: %w", err)
	}
	if n != len(header) {
		return fmt.Errorf("open replica %s: %d bytes behind the header: %w", h.ID, len(header)-n, storage.ErrInvalid)
	}
	if err := s.Failed(); err != nil {
		return err
	}
	if old := s.lookup(h.ID); old != nil {
		return old.createAgain(header, done)
	}
	if err := s.takeName(h.ID); err != nil {
		return fmt.Errorf("open replica %s: %w", h.ID, err)
	}
	defer s.giveName(h.ID)
	if old := s.lookup(h.ID); old != nil { // made since
		return old.createAgain(header, done)
	}
	raw := append([]byte(nil), header...)
	h, _, err = segment.ParseHeader(raw) // a header's slices alias its bytes
	if err != nil {
		return fmt.Errorf("open replica: %w", err)
	}
	r := newReplica(h, raw)
	if err := s.makeFile(r, max(reserve, int64(len(raw)))); err != nil {
		return fmt.Errorf("open replica %s: %w", h.ID, err)
	}
	if err := s.queueOpen(r, done); err != nil {
		return fmt.Errorf("open replica %s: %w", h.ID, errors.Join(err, s.forgetUnopened(r)))
	}
	return nil
}

// queueOpen shows the replica and queues its open entry in one step, so that no append can come before it.
func (s *Store) queueOpen(r *replica, done func(error)) error {
	s.mu.Lock()
	r.mu.Lock()
	defer r.mu.Unlock()
	s.replicas[r.id] = r
	s.mu.Unlock()
	err := s.j.Append(journal.Entry{Kind: journal.KindOpen, Segment: r.id, Data: r.raw, Done: func(err error) {
		r.barrier(storage.EndBefore(r.header.Base), err)
		done(err)
	}})
	if err != nil {
		r.m.Drop()
	}
	return err
}

// forgetUnopened takes back a replica whose open entry was refused: no entry names it, and the file is one that this call made.
func (s *Store) forgetUnopened(r *replica) error {
	return errors.Join(s.retire(r), ignoreMissing(s.fs.Remove(r.name)))
}

func ignoreMissing(err error) error {
	if vfs.IsNotExist(err) {
		return nil
	}
	return err
}

// newReplica is a replica that nothing was appended to. It keeps raw.
func newReplica(h segment.Header, raw []byte) *replica {
	t := segment.NewTally(h, len(raw))
	return &replica{admin: make(chan struct{}, 1), id: h.ID, header: h, raw: raw, name: fileName(h.ID),
		m: replication.NewReplica(h.Base), queuedPos: t.Pos, tally: t}
}

func (r *replica) createAgain(header []byte, done func(error)) error {
	r.mu.Lock()
	switch {
	case r.m.State() == replication.StateDropped:
		r.mu.Unlock()
		return fmt.Errorf("open replica %s: it was dropped: %w", r.id, storage.ErrUnknownSegment)
	case string(r.raw) != string(header):
		r.mu.Unlock()
		return fmt.Errorf("open replica %s with another header: %w", r.id, storage.ErrConflict)
	case r.m.State() == replication.StateSealed:
		r.mu.Unlock()
		return fmt.Errorf("open replica %s: %w", r.id, storage.ErrSealed)
	case !r.m.OpenDurable():
		r.waiters = append(r.waiters, waiter{storage.EndBefore(r.header.Base), done})
		r.mu.Unlock()
		return nil
	}
	r.mu.Unlock()
	done(nil)
	return nil
}

// makeFile makes the file with its header, unsynced. Called with the name taken.
func (s *Store) makeFile(r *replica, reserve int64) error {
	f, err := s.newFile(r)
	if err != nil {
		return err
	}
	if err = f.Allocate(0, reserve); err == nil {
		_, err = f.WriteAt(r.raw, 0)
	}
	if err != nil {
		return errors.Join(s.judge(err), f.Close(), ignoreMissing(s.fs.Remove(r.name)))
	}
	r.file = f
	r.reserved.Store(reserve)
	s.mu.Lock()
	for d := path.Dir(r.name); d != "."; d = path.Dir(d) {
		s.newNames[d] = struct{}{}
	}
	s.newNames["."] = struct{}{}
	s.mu.Unlock()
	return nil
}

func (s *Store) newFile(r *replica) (vfs.File, error) {
	s.dirMu.Lock()
	defer s.dirMu.Unlock()
	if err := s.fs.MkdirAll(path.Dir(r.name)); err != nil {
		return nil, s.judge(err)
	}
	f, err := s.fs.Create(r.name)
	if errors.Is(err, fs.ErrExist) {
		return s.reuseFile(r)
	}
	return f, s.judge(err)
}

// reuseFile opens a file that is there already although neither checkpoint nor journal knows it. If it holds no more than a header, it is of
// an open that failed. Everything else is kept: a sealed segment, also one whose footer has rotted, or a dropped one not removed yet.
func (s *Store) reuseFile(r *replica) (vfs.File, error) {
	f, err := s.fs.OpenWrite(r.name)
	if err != nil {
		return nil, err
	}
	size, err := f.Size()
	if err == nil && size > int64(len(r.raw)) {
		if err = s.notLiveFile(r.id); err == nil {
			err = storage.ErrSealed
		}
	}
	if err == nil {
		err = s.judge(f.Truncate(0))
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// notLiveFile says why the file of a segment that is not live is no whole sealed one.
func (s *Store) notLiveFile(id storage.SegmentID) error {
	f, err := s.openSealed(id)
	if err != nil {
		return fmt.Errorf("%w: a file that no open explains is in the way: %w", storage.ErrDamaged, err)
	}
	return f.file.Close()
}

// Append queues a stamped batch that begins at first. done is called after the barrier that covers the batch's end, or with
// storage.ErrStorageFailed, when its fate is not known. A batch that lies wholly below the replica's own end is a replay: it is answered
// when the end it names is durable. Append keeps b until it is in the segment's file; the caller must not change it. Both CRCs of b are
// checked here, whoever checked them before: what is counted into the digest was verified as received (INV-S14). done may be called
// before Append returns, and must return at once.
//
// A returned error means that nothing was queued: storage.ErrGap, ErrFenced, ErrSealed, ErrUnknownSegment, ErrStaleBoot (the replica is of
// an earlier boot), ErrDamaged, ErrDiskFull, ErrOverloaded, ErrUnavailable (being opened or sealed), ErrStorageFailed, ErrCorrupt, ErrInvalid.
func (s *Store) Append(id storage.SegmentID, h *batch.Header, b []byte, done func(error)) error {
	return s.extend(id, replication.FromPrimary, h, b, done)
}

// Recovered queues a batch onto a fenced replica, on behalf of a pass. Otherwise as Append.
func (s *Store) Recovered(id storage.SegmentID, h *batch.Header, b []byte, done func(error)) error {
	return s.extend(id, replication.FromPass, h, b, done)
}

func (s *Store) extend(id storage.SegmentID, from replication.Origin, h *batch.Header, b []byte, done func(error)) error {
	if err := verified(h, b); err != nil {
		return fmt.Errorf("append to %s: %w", id, err)
	}
	if err := s.Failed(); err != nil { // a replay is not answered either
		return fmt.Errorf("append to %s: %w", id, err)
	}
	r, err := s.live(id)
	if err != nil {
		return fmt.Errorf("append: %w", err)
	}
	if from == replication.FromPrimary && s.diskFull.Load() {
		return fmt.Errorf("append to %s: %w", id, storage.ErrDiskFull)
	}
	for {
		need, err := s.tryExtend(r, from, h, b, done)
		if err == nil && need > 0 {
			err = s.grow(r, need)
		} else if err == nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("append to %s: %w", id, err)
		}
	}
}

func verified(h *batch.Header, b []byte) error {
	if mutate.On("rangelog.accept-unverified") {
		return nil
	}
	got, err := batch.Verify(b)
	if err == nil && got != *h {
		err = fmt.Errorf("header is not the batch's own: %w", storage.ErrInvalid)
	}
	return err
}

// tryExtend queues the batch, or answers that the file needs a reservation up to need first.
func (s *Store) tryExtend(r *replica, from replication.Origin, h *batch.Header, b []byte, done func(error)) (need int64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	end := h.End()
	step, err := r.take(from, h.Base, end)
	if err != nil {
		return 0, err
	}
	if step != replication.StepQueue {
		r.whenDurable(end, done)
		return 0, nil
	}
	pos := r.queuedPos + int64(len(b))
	if pos > r.reserved.Load() {
		return pos, nil
	}
	kind := journal.KindAppend
	if from == replication.FromPass {
		kind = journal.KindRecovered
	}
	err = s.j.Append(journal.Entry{Kind: kind, Segment: r.id, Data: b, Done: func(err error) {
		r.barrier(end, err)
		done(err)
	}})
	if err != nil {
		return 0, err
	}
	r.m.Extended(end)
	r.queuedPos, r.queuedDigest, r.queuedTime = pos, segment.Chain(r.queuedDigest, b), h.AppendTime
	return 0, nil
}

// take asks the machine what to do with a batch. Called with mu held.
func (r *replica) take(from replication.Origin, first storage.Offset, end storage.End) (replication.Step, error) {
	step, err := r.m.Take(from, first, end)
	switch {
	case errors.Is(err, storage.ErrFenced) && mutate.On("rangelog.append-after-fence"),
		errors.Is(err, storage.ErrStaleBoot) && from == replication.FromPrimary && mutate.On("rangelog.append-after-restart"),
		first != r.m.Queued().Next() && (err == nil || errors.Is(err, storage.ErrGap)) && mutate.On("rangelog.accept-gap"):
		return replication.StepQueue, nil
	}
	return step, err
}

// whenDurable calls done once the barrier covers end, at once if it does. Called with mu held.
func (r *replica) whenDurable(end storage.End, done func(error)) {
	if r.m.Replayed(end) == replication.StepWait && !mutate.On("rangelog.replay-answered-before-barrier") {
		r.waiters = append(r.waiters, waiter{end, done})
		return
	}
	r.mu.Unlock() // done is not ours: no lock is held while it runs
	done(nil)
	r.mu.Lock()
}

// barrier records that everything below end is durable, and wakes who waited for it. Called by the journal's writer, in order.
func (r *replica) barrier(end storage.End, err error) {
	r.mu.Lock()
	if err == nil {
		r.m.Barrier(end)
	}
	var ready []waiter
	keep := r.waiters[:0]
	for _, w := range r.waiters {
		if err != nil || w.end <= r.m.Durable() {
			ready = append(ready, w)
		} else {
			keep = append(keep, w)
		}
	}
	r.waiters = keep
	r.mu.Unlock()
	for _, w := range ready {
		w.done(err)
	}
}

// grow reserves device space up to at least need, in doubling steps, so that a full disk is refused here and never met by a write.
func (s *Store) grow(r *replica, need int64) error {
	r.ioMu.RLock()
	defer r.ioMu.RUnlock()
	r.growMu.Lock()
	defer r.growMu.Unlock()
	have := r.reserved.Load()
	if need <= have {
		return nil
	}
	if r.file == nil {
		return fmt.Errorf("it was just sealed or dropped: %w", storage.ErrUnavailable)
	}
	step := min(max(have, firstReserve), maxReserve)
	want := max(need, have+step)
	err := r.file.Allocate(have, want-have)
	if errors.Is(err, vfs.ErrNoSpace) {
		want = need // less may be there still
		err = r.file.Allocate(have, want-have)
	}
	if err != nil {
		return s.judge(err)
	}
	r.reserved.Store(want)
	return nil
}
