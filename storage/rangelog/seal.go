package rangelog

import (
	"context"
	"errors"
	"fmt"
	"path"
	"time"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/journal"
	"github.com/malachilog/malachi/storage/replication"
	"github.com/malachilog/malachi/storage/segment"
	"github.com/malachilog/malachi/storage/vfs"
)

const defaultCheckpointEvery = 30 * time.Second

// Vote is what a fenced replica knows, for a pass.
type Vote struct {
	End    storage.End
	Pos    int64 // bytes of header and batches below End
	Digest storage.Digest
	Header []byte // the complete header; not to be changed
	// LastAppend is the append time of the last batch below End; 0 if there is none.
	LastAppend storage.Time
}

// Fence makes the replica refuse appends for ever and returns its vote once that is durable, behind every append taken before. A replica
// that is not here is fenced as a durable stub if header is given; a full disk does not hinder that. A restarted replica reads and verifies
// its file before its first vote. Fencing again answers the same. Errors: storage.ErrUnknownSegment, ErrSealed, ErrDamaged (fenced, but no
// vote), ErrUnavailable, ErrOverloaded, ErrDiskFull, ErrStorageFailed.
func (s *Store) Fence(ctx context.Context, id storage.SegmentID, header []byte) (Vote, error) {
	if s.lookup(id) == nil && header != nil {
		if err := s.await(ctx, func(done func(error)) error { return s.create(header, 0, done) }); err != nil {
			return Vote{}, fmt.Errorf("fence %s as a stub: %w", id, err)
		}
	}
	r, err := s.live(id)
	if err != nil {
		return Vote{}, fmt.Errorf("fence: %w", err)
	}
	v, err := s.fence(ctx, r)
	if err != nil {
		return Vote{}, fmt.Errorf("fence %s: %w", id, err)
	}
	return v, nil
}

func (s *Store) fence(ctx context.Context, r *replica) (Vote, error) {
	if err := s.await(ctx, func(done func(error)) error { return s.queueFence(r, done) }); err != nil {
		return Vote{}, err
	}
	if err := r.takeAdmin(ctx); err != nil {
		return Vote{}, err
	}
	err := s.verifyRestarted(r)
	r.giveAdmin()
	if err != nil {
		return Vote{}, err
	}
	// A pass that runs beside this one may be extending or cutting the replica: the vote is what is durable, and what the file holds.
	if err := s.waitFor(ctx, r, func() bool { return !r.m.Cutting() }); err != nil {
		return Vote{}, err
	}
	if err := s.await(ctx, func(done func(error)) error { r.flushed(done); return nil }); err != nil {
		return Vote{}, err
	}
	return s.vote(r)
}

func (s *Store) vote(r *replica) (Vote, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := s.Failed(); err != nil { // casts no vote, whatever is durable (INV-D8)
		return Vote{}, err
	}
	if err := r.m.Vote(); err != nil {
		return Vote{}, err
	}
	return Vote{End: r.m.Queued(), Pos: r.queuedPos, Digest: r.queuedDigest, Header: r.raw, LastAppend: r.queuedTime}, nil
}

func (s *Store) queueFence(r *replica, done func(error)) error {
	r.mu.Lock()
	queue, err := r.m.Fence()
	if err != nil || !queue {
		r.mu.Unlock()
		if err == nil {
			done(nil)
		}
		return err
	}
	defer r.mu.Unlock()
	// Fencing again while the first fence is under way writes a second entry: it means the same.
	err = s.j.Append(journal.Entry{Kind: journal.KindFence, Segment: r.id, Done: func(err error) {
		if err == nil {
			r.mu.Lock()
			r.m.FenceBarrier()
			r.mu.Unlock()
		}
		done(err)
	}})
	if err == nil {
		r.m.FenceQueued()
	}
	return err
}

// flushed calls done when everything queued by now is durable.
func (r *replica) flushed(done func(error)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.whenDurable(r.m.Queued(), done)
}

// await runs queue with a done that it then waits for.
func (s *Store) await(ctx context.Context, queue func(done func(error)) error) error {
	done := make(chan error, 1)
	if err := queue(func(err error) { done <- err }); err != nil {
		return err
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// waitFor waits until cond, which is asked with r.mu held whenever the replica changes. It ends early when the storage fails.
func (s *Store) waitFor(ctx context.Context, r *replica, cond func() bool) error {
	wake := make(chan struct{}, 1)
	defer s.watch(r, wake)()
	for {
		r.mu.Lock()
		ok := cond()
		r.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-wake:
		case <-s.failedSignal:
			return s.Failed()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// takeAdmin waits for the right to verify, seal or drop the replica.
func (r *replica) takeAdmin(ctx context.Context) error {
	select {
	case r.admin <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (r *replica) giveAdmin() { <-r.admin }

// verifyRestarted reads a restarted replica's file once and fills in the index; what does not verify is damage of the replica. Called
// with admin taken: nothing extends or cuts an unverified replica, so the file stands still.
func (s *Store) verifyRestarted(r *replica) error {
	r.mu.Lock()
	skip, want := !r.m.Unverified() || r.m.Damaged() != nil || r.m.State() == replication.StateDropped, r.tally
	r.mu.Unlock()
	if skip {
		return nil
	}
	t := segment.NewTally(r.header, len(r.raw))
	err := segment.Scan(r.file, &t, want.Pos, nil)
	if err == nil && (t.End != want.End || t.Digest != want.Digest) {
		err = fmt.Errorf("batches give end %d and digest %016x, the journal %d and %016x: %w",
			t.End, uint64(t.Digest), want.End, uint64(want.Digest), storage.ErrCorrupt)
	}
	if mutate.On("rangelog.vote-unread") && errors.Is(err, storage.ErrCorrupt) {
		t, err = want, nil
	}
	switch {
	case err == nil:
		r.mu.Lock()
		r.m.Verified()
		r.tally, r.queuedTime = t, t.LastAppend
		r.mu.Unlock()
	case errors.Is(err, storage.ErrCorrupt):
		s.damage(r, err)
	default:
		return err
	}
	return nil
}

// Seal makes the fenced replica end at end for ever: it cuts what lies beyond, writes the footer, syncs file and names, and records that.
// The replica must hold everything below end, with that digest. Sealing again with the same values is answered as the first time.
// Errors: storage.ErrGap (shorter than end), ErrCorrupt (other digest, or end is not the end of a batch: nothing was changed), ErrConflict
// (not fenced, or sealed otherwise), ErrDamaged, ErrUnknownSegment, ErrUnavailable, ErrDiskFull and ErrOverloaded (try again),
// ErrStorageFailed.
func (s *Store) Seal(ctx context.Context, id storage.SegmentID, end storage.End, digest storage.Digest) error {
	r := s.lookup(id)
	if r == nil {
		return s.sealedAlready(id, end, digest)
	}
	if err := r.takeAdmin(ctx); err != nil {
		return fmt.Errorf("seal %s: %w", id, err)
	}
	defer r.giveAdmin()
	if err := s.seal(ctx, r, end, digest); err != nil {
		return fmt.Errorf("seal %s at %d with digest %016x: %w", id, end, uint64(digest), err)
	}
	return nil
}

func (s *Store) seal(ctx context.Context, r *replica, end storage.End, digest storage.Digest) (err error) {
	if err := s.Failed(); err != nil {
		return err
	}
	if err := s.verifyRestarted(r); err != nil {
		return err
	}
	again, err := r.beginSeal(end, digest)
	if err != nil {
		return err
	}
	if again {
		return s.endSeal(ctx, r)
	}
	queued := false
	defer func() {
		if !queued { // with a sealed entry under way the replica stays closed
			r.mu.Lock()
			r.m.AbortSeal()
			r.mu.Unlock()
		}
	}()
	t, err := s.settle(ctx, r, end, digest)
	if err != nil {
		return err
	}
	if err := s.writeFooter(r, &t); err != nil {
		return err
	}
	err = s.await(ctx, func(done func(error)) error {
		err := s.queueSealed(r, end, digest, done)
		queued = err == nil
		return err
	})
	if err != nil {
		return err
	}
	return s.endSeal(ctx, r)
}

func (s *Store) queueSealed(r *replica, end storage.End, digest storage.Digest, done func(error)) error {
	return s.j.Append(journal.Entry{Kind: journal.KindSealed, Segment: r.id, Data: journal.EncodeSealed(end, digest), Done: func(err error) {
		if err == nil {
			r.mu.Lock()
			r.m.EndSeal()
			r.wake()
			r.mu.Unlock()
		}
		done(err)
	}})
}

// beginSeal checks that the replica can be sealed at end and closes it for recovered batches. again: it is sealed so already.
func (r *replica) beginSeal(end storage.End, digest storage.Digest) (again bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	again, err = r.m.BeginSeal(end)
	if again && (r.m.Queued() != end || r.queuedDigest != digest) {
		return false, fmt.Errorf("it is sealed at %d with %016x: %w", r.m.Queued(), uint64(r.queuedDigest), storage.ErrConflict)
	}
	return again, err
}

// settle waits until the file has been given everything, and cuts what lies beyond end. It answers the tally at end, which has digest.
func (s *Store) settle(ctx context.Context, r *replica, end storage.End, digest storage.Digest) (segment.Tally, error) {
	given := func() bool { return r.m.Damaged() != nil || !r.m.Cutting() && r.tally.End == r.m.Queued() }
	if err := s.waitFor(ctx, r, given); err != nil {
		return segment.Tally{}, err
	}
	r.mu.Lock()
	t, damaged := r.tally, r.m.Damaged()
	r.mu.Unlock()
	if damaged != nil {
		return t, fmt.Errorf("%w: %w", storage.ErrDamaged, damaged)
	}
	longer := t.End > end
	if longer { // what stays is verified before anything is journaled
		var err error
		if t, err = r.tallyAt(end); err != nil {
			return t, err
		}
	}
	if t.End != end || t.Digest != digest {
		return t, fmt.Errorf("copy has %d and %016x: %w", t.End, uint64(t.Digest), storage.ErrCorrupt)
	}
	if !longer {
		return t, nil
	}
	if err := s.await(ctx, func(done func(error)) error { return s.queueCut(r, t, done) }); err != nil {
		return t, err
	}
	return t, s.waitFor(ctx, r, given)
}

// queueCut journals a cut to what t counts.
func (s *Store) queueCut(r *replica, t segment.Tally, done func(error)) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	err := s.j.Append(journal.Entry{Kind: journal.KindCut, Segment: r.id, Data: journal.EncodeCut(t.End), Done: func(err error) {
		if err == nil {
			r.mu.Lock()
			r.m.CutBarrier(t.End)
			r.mu.Unlock()
		}
		done(err)
	}})
	if err == nil {
		r.m.CutQueued(t.End)
		r.cutTo = &t
		r.queuedPos, r.queuedDigest, r.queuedTime = t.Pos, t.Digest, t.LastAppend
	}
	return err
}

// endSeal waits until the follower is done with a sealed replica and lets it go.
func (s *Store) endSeal(ctx context.Context, r *replica) error {
	if err := s.waitFor(ctx, r, func() bool { return r.endGiven }); err != nil {
		return err
	}
	return s.retire(r)
}

// retire closes the file of a replica that is sealed or dropped and forgets the replica: a sealed file is served by its own footer.
func (s *Store) retire(r *replica) error {
	s.mu.Lock()
	if s.replicas[r.id] == r {
		delete(s.replicas, r.id)
	}
	s.mu.Unlock()
	r.ioMu.Lock()
	defer r.ioMu.Unlock()
	r.mu.Lock()
	f := r.file
	r.file = nil
	r.mu.Unlock()
	if f == nil {
		return nil
	}
	if err := f.Close(); err != nil {
		return fmt.Errorf("close %s: %w", r.name, err)
	}
	return nil
}

func (s *Store) sealedAlready(id storage.SegmentID, end storage.End, digest storage.Digest) error {
	f, err := s.sealed.get(s, id)
	if err != nil {
		return fmt.Errorf("seal: %w", err)
	}
	defer f.release()
	if f.tally.End != end || f.tally.Digest != digest {
		return fmt.Errorf("seal %s at %d: it is sealed at %d: %w", id, end, f.tally.End, storage.ErrConflict)
	}
	return nil
}

// writeFooter completes the file and makes it durable under its name, in an order in which a crash leaves either an unsealed file, which
// the journal still explains, or the whole sealed one. Room for the footer is reserved first: a full disk is refused, not met.
func (s *Store) writeFooter(r *replica, t *segment.Tally) error {
	footer := t.Footer()
	size := t.Pos + int64(len(footer))
	if err := s.grow(r, size); err != nil {
		return err
	}
	_, err := r.file.WriteAt(footer, t.Pos)
	if err == nil {
		err = r.file.Truncate(size) // gives back the rest of the reservation
	}
	r.reserved.Store(size)
	if err == nil && !mutate.On("rangelog.seal-before-sync") {
		err = r.file.Sync()
	}
	if err == nil && !mutate.On("rangelog.seal-before-sync") {
		err = s.syncNames(r.name)
	}
	if err != nil {
		return s.judge(fmt.Errorf("complete %s: %w", r.name, err))
	}
	return nil
}

// Drop removes a replica for good: a durable entry first, then the file, then the directories that are left empty. The caller acts on a
// recorded fact (deleted topic, abandoned segment), never on absence. Dropping what is not here is no error. Errors: storage.ErrUnavailable
// (another call is at it), ErrOverloaded, ErrDiskFull, ErrStorageFailed; it can be called again after each.
func (s *Store) Drop(ctx context.Context, id storage.SegmentID) error {
	if err := s.takeName(id); err != nil {
		return fmt.Errorf("drop %s: %w", id, err)
	}
	defer s.giveName(id)
	if err := s.drop(ctx, id); err != nil {
		return fmt.Errorf("drop %s: %w", id, err)
	}
	return nil
}

func (s *Store) drop(ctx context.Context, id storage.SegmentID) error {
	r := s.lookup(id)
	if r == nil {
		if _, err := s.fs.Stat(fileName(id)); vfs.IsNotExist(err) {
			return nil
		} else if err != nil {
			return err
		}
		err := s.await(ctx, func(done func(error)) error {
			return s.j.Append(journal.Entry{Kind: journal.KindDropped, Segment: id, Done: done})
		})
		if err != nil {
			return err
		}
		return s.removeFile(id)
	}
	if err := r.takeAdmin(ctx); err != nil {
		return err
	}
	defer r.giveAdmin()
	if err := s.await(ctx, func(done func(error)) error { return s.queueDrop(r, done) }); err != nil {
		return err
	}
	if err := s.waitFor(ctx, r, func() bool { return r.endGiven }); err != nil {
		return err
	}
	if err := s.retire(r); err != nil {
		return err
	}
	return s.removeFile(id)
}

func (s *Store) queueDrop(r *replica, done func(error)) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	err := s.j.Append(journal.Entry{Kind: journal.KindDropped, Segment: r.id, Done: done})
	if err == nil {
		r.m.Drop()
		r.wake()
	}
	return err
}

// removeFile removes the file of a dropped segment, and directories that are empty then.
func (s *Store) removeFile(id storage.SegmentID) error {
	defer s.sealed.drop(id) // after the name is gone, so that nobody opens it again
	s.dirMu.Lock()
	defer s.dirMu.Unlock()
	name := fileName(id)
	if err := ignoreMissing(s.fs.Remove(name)); err != nil {
		return err
	}
	d := path.Dir(name)
	for d != segmentsDir {
		left, err := s.fs.List(d)
		if err == nil && len(left) > 0 {
			break
		}
		if err == nil {
			err = s.fs.Remove(d)
		}
		if ignoreMissing(err) != nil {
			return err
		}
		d = path.Dir(d)
	}
	return s.judge(ignoreMissing(s.syncDir(d)))
}
