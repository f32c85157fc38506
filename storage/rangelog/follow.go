package rangelog

import (
	"context"
	"errors"
	"fmt"
	"path"
	"sort"
	"sync"
	"time"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
	"github.com/malachilog/malachi/storage/journal"
	"github.com/malachilog/malachi/storage/segment"
	"github.com/malachilog/malachi/storage/vfs"
)

const (
	// writebackStep is how much a file is given before the system is asked to start writing it out, so that a checkpoint's sync finds
	// little left to do.
	writebackStep = 4 << 20
	// joinBytes is up to how much the follower copies together to save writes.
	joinBytes = 256 << 10
	// syncEach is up to how many dirty files a checkpoint syncs one by one; above it syncs the whole file system with one call.
	syncEach = 64
)

// Run gives durable groups to the segment files, and takes checkpoints, until ctx ends; then it writes what was queued, gives that too,
// and returns when nothing of the store runs any more. It returns the storage failure, if there was one; reads go on after it.
func (s *Store) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	followCtx, stopFollow := context.WithCancel(context.WithoutCancel(ctx))
	defer stopFollow()
	due := make(chan struct{}, 1)
	wg.Go(func() { s.checkpointLoop(followCtx, due) })
	followed := make(chan struct{})
	wg.Go(func() {
		defer close(followed)
		s.follow(followCtx, due)
	})
	err := s.j.Run(ctx) // returns when all that was queued is durable, or has failed
	stopFollow()
	<-followed
	wg.Wait()
	if err == nil {
		err = s.followAll()
	}
	if err != nil {
		s.fail(err)
	}
	return err
}

// follow takes durable groups until ctx ends or the journal has failed.
func (s *Store) follow(ctx context.Context, due chan<- struct{}) {
	for {
		g, err := s.j.Next(ctx)
		if err != nil {
			return // ctx, or the failure that Run returns
		}
		if err := s.give(g); err != nil {
			s.fail(err)
			return
		}
		if s.j.CheckpointDue() {
			select {
			case due <- struct{}{}:
			default:
			}
		}
	}
}

// followAll gives what is durable by now, without waiting.
func (s *Store) followAll() error {
	for {
		ok, err := s.FollowGroup()
		if err != nil || !ok {
			return err
		}
	}
}

// FollowGroup gives one durable group, if there is one, and says so. It is the follower: only Run, or a test in place of Run, calls it.
func (s *Store) FollowGroup() (bool, error) {
	g, ok, err := s.j.TryNext()
	if err != nil || !ok {
		return false, err
	}
	if err := s.give(g); err != nil {
		s.fail(err)
		return false, err
	}
	return true, nil
}

// give writes one group's appends to their files. Small appends to one file become one write.
func (s *Store) give(g journal.Group) error {
	s.giveMu.Lock()
	defer s.giveMu.Unlock()
	var touched []*replica
	runs := map[*replica][]journal.Entry{}
	for _, e := range g.Entries {
		if e.Kind == journal.KindCheckpoint {
			continue
		}
		s.news = true
		r := s.lookup(e.Segment)
		if r == nil && e.Kind == journal.KindDropped {
			continue // a sealed segment, or a file that nothing explained
		}
		if r == nil {
			return fmt.Errorf("journal names segment %s, which is not here: %w", e.Segment, storage.ErrCorrupt)
		}
		switch e.Kind {
		case journal.KindAppend, journal.KindRecovered:
			if len(runs[r]) == 0 {
				touched = append(touched, r)
			}
			runs[r] = append(runs[r], e)
		default:
			if err := r.giveBatches(runs[r]); err != nil {
				return err
			}
			runs[r] = nil
			if err := s.giveOther(r, e); err != nil {
				return err
			}
		}
	}
	for _, r := range touched {
		if err := r.giveBatches(runs[r]); err != nil {
			return err
		}
		runs[r] = nil
	}
	s.applied = g.Number
	s.j.Applied(g)
	return nil
}

// giveBatches writes consecutive batches of one replica and shows them to readers. Small ones become one write, large ones are not copied.
func (r *replica) giveBatches(entries []journal.Entry) error {
	for len(entries) > 0 {
		n, size := 1, len(entries[0].Data)
		for n < len(entries) && size+len(entries[n].Data) <= joinBytes {
			size += len(entries[n].Data)
			n++
		}
		data := entries[0].Data
		if n > 1 {
			data = make([]byte, 0, size)
			for _, e := range entries[:n] {
				data = append(data, e.Data...)
			}
		}
		if err := r.giveBytes(data); err != nil {
			return err
		}
		entries = entries[n:]
	}
	return nil
}

// giveBytes writes whole batches at the end of what was given.
func (r *replica) giveBytes(data []byte) error {
	r.mu.Lock()
	pos, damaged := r.tally.Pos, r.m.Damaged() // only the follower moves the tally
	r.mu.Unlock()
	if damaged != nil {
		return nil // a cut that could not be carried out came before: the file is kept as it is
	}
	if _, err := r.file.WriteAt(data, pos); err != nil {
		return fmt.Errorf("write %s: %w", r.name, err)
	}
	if end := pos + int64(len(data)); end/writebackStep != pos/writebackStep {
		r.file.StartWriteback(pos/writebackStep*writebackStep, end/writebackStep*writebackStep-pos/writebackStep*writebackStep)
	}
	return r.show(data)
}

// show adds batches that are in the file to the tally and wakes readers.
func (r *replica) show(data []byte) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(data) > 0 {
		h, err := batch.ParseHeader(data)
		if err != nil {
			return fmt.Errorf("journaled batch of %s: %w", r.id, err)
		}
		if err := r.tally.Add(&h, data); err != nil {
			return fmt.Errorf("journaled batch of %s: %w", r.id, err)
		}
		data = data[h.Size():]
	}
	r.dirty = true
	r.wake()
	return nil
}

// giveOther carries out an entry that is no batch.
func (s *Store) giveOther(r *replica, e journal.Entry) error {
	if e.Kind == journal.KindCut {
		end, err := journal.ParseCut(e.Data)
		if err != nil {
			return err
		}
		return s.giveCut(r, end)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch e.Kind {
	case journal.KindOpen:
		r.live, r.dirty = true, true
	case journal.KindFence:
		r.givenFenced = true
	case journal.KindSealed, journal.KindDropped:
		r.live, r.endGiven = false, true
	}
	r.wake()
	return nil
}

// giveCut truncates the file. Damage below the cut is the replica's, not the directory's: the file is kept as it is then.
func (s *Store) giveCut(r *replica, end storage.End) error {
	r.mu.Lock()
	t := r.cutTo
	r.mu.Unlock()
	var err error
	if t == nil || t.End != end { // at replay
		var found segment.Tally
		found, err = r.tallyAt(end)
		t = &found
	}
	if err == nil {
		err = r.cutFile(t)
	} else if errors.Is(err, storage.ErrCorrupt) {
		s.damage(r, fmt.Errorf("cut to %d: %w", end, err))
		err = nil
	}
	if err != nil {
		return err
	}
	r.mu.Lock()
	r.cutTo = nil
	r.m.CutDone()
	r.wake()
	r.mu.Unlock()
	return nil
}

// damage records known damage of a replica.
func (s *Store) damage(r *replica, err error) {
	s.log.Error("replica is damaged; it neither votes nor serves", "segment", r.id.String(), "error", err)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.m.Damage(err)
	r.wake()
}

// tallyAt reads the file from the front and gives the tally of the batches below end, all verified. storage.ErrCorrupt if one does not
// verify, or if end lies inside a batch or not in the file.
func (r *replica) tallyAt(end storage.End) (segment.Tally, error) {
	r.mu.Lock()
	limit := r.tally.Pos
	r.mu.Unlock()
	t := segment.NewTally(r.header, len(r.raw))
	reached := errors.New("reached the end")
	var err error
	if t.End < end {
		err = segment.Scan(r.file, &t, limit, func(*batch.Header, []byte) error {
			if t.End >= end {
				return reached
			}
			return nil
		})
	}
	if err != nil && !errors.Is(err, reached) {
		return t, fmt.Errorf("read %s: %w", r.name, err)
	}
	if t.End != end {
		return t, fmt.Errorf("%s has no batch that ends at %d: %w", r.name, end, storage.ErrCorrupt)
	}
	return t, nil
}

// cutFile truncates the file to what t counts. No reader is under way meanwhile.
func (r *replica) cutFile(t *segment.Tally) error {
	r.ioMu.Lock()
	defer r.ioMu.Unlock()
	if err := r.file.Truncate(t.Pos); err != nil {
		return fmt.Errorf("cut %s: %w", r.name, err)
	}
	r.hints.forget()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tally, r.dirty = *t, true
	r.reserved.Store(t.Pos) // truncation gave the reservation back
	return nil
}

// checkpointLoop takes checkpoints when they are due, or when CheckpointEvery has passed.
func (s *Store) checkpointLoop(ctx context.Context, due <-chan struct{}) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	last := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-due:
		case <-tick.C:
			s.CheckSpace()
			if time.Since(last) < s.cfg.CheckpointEvery && !s.j.CheckpointDue() {
				continue
			}
		}
		last = time.Now()
		done := make(chan error, 1)
		if ok, err := s.Checkpoint(func(err error) { done <- err }); err != nil {
			if !errors.Is(err, storage.ErrStorageFailed) && !errors.Is(err, storage.ErrClosed) {
				s.log.Warn("checkpoint not taken", "error", err)
			}
			continue
		} else if !ok {
			continue
		}
		select {
		case <-done: //nolint:errcheck // a failure is final: Run returns it
		case <-ctx.Done():
			return
		}
	}
}

// Checkpoint notes what the files have been given, syncs it, and queues the note; done is called when the note is durable. It reports
// false, without calling done, if nothing was given since the last one or another is under way. Appends go on meanwhile. Errors:
// storage.ErrStorageFailed, ErrDiskFull and ErrOverloaded (no room for the note: it is tried again later).
func (s *Store) Checkpoint(done func(error)) (bool, error) {
	if err := s.Failed(); err != nil { // what a failed sync left is never synced again and believed (INV-D8)
		return false, err
	}
	if s.checkpointing.Swap(true) {
		return false, nil
	}
	note, work := s.takeNote()
	if work == nil {
		s.checkpointing.Store(false)
		return false, nil
	}
	err := s.syncGiven(work)
	if err != nil && mutate.On("rangelog.retry-failed-sync") {
		err = s.syncGiven(work)
	}
	if err != nil {
		s.checkpointing.Store(false)
		s.fail(err)
		return false, fmt.Errorf("checkpoint: %w: %w", storage.ErrStorageFailed, err)
	}
	if mutate.On("rangelog.note-after-sync") { // the note claims what was given while the sync ran
		note, _ = s.takeNote()
	}
	if mutate.On("rangelog.replay-from-entry") {
		note.From = s.j.Stats().LastGroup + 1 // what the sync did not cover is skipped
	}
	err = s.j.Checkpoint(note, func(err error) {
		s.checkpointing.Store(false)
		if done != nil {
			done(err)
		}
	})
	if err != nil {
		s.checkpointing.Store(false)
		s.giveMu.Lock()
		s.news = true
		s.giveMu.Unlock()
		return false, fmt.Errorf("checkpoint: %w", err)
	}
	return true, nil
}

// given is what one note has to make durable.
type given struct {
	files []*replica
	dirs  []string
}

// takeNote notes what every live segment's file has been given, exactly as it is after group s.applied. work is nil if that is nothing new.
func (s *Store) takeNote() (journal.Note, *given) {
	s.giveMu.Lock()
	defer s.giveMu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	note := journal.Note{From: s.applied + 1}
	if !s.news && !mutate.On("rangelog.note-after-sync") {
		return note, nil
	}
	s.news = false
	work := &given{}
	for _, r := range s.replicas {
		r.mu.Lock()
		if r.live {
			note.Segments = append(note.Segments, r.note())
		}
		if r.dirty {
			r.dirty = false
			work.files = append(work.files, r)
		}
		r.mu.Unlock()
	}
	for d := range s.newNames {
		work.dirs = append(work.dirs, d)
	}
	clear(s.newNames)
	sortNotes(note.Segments)
	sort.Slice(work.files, func(a, b int) bool { return work.files[a].name < work.files[b].name })
	sort.Strings(work.dirs)
	return note, work
}

// note is what a checkpoint says of the replica now. Called with mu held.
func (r *replica) note() journal.SegmentNote {
	return journal.SegmentNote{ID: r.id, End: r.tally.End, Pos: r.tally.Pos, Digest: r.tally.Digest,
		Fenced: r.givenFenced && !mutate.On("rangelog.forget-fence"), Damaged: r.m.Damaged() != nil}
}

// syncGiven makes durable what the note claims. Any failure is final: nothing written since the last good sync can be trusted.
func (s *Store) syncGiven(w *given) error {
	if len(w.files)+len(w.dirs) > syncEach {
		if err := s.fs.SyncFS("."); err != nil {
			return fmt.Errorf("sync file system: %w", err)
		}
		return nil
	}
	for _, r := range w.files {
		if err := r.sync(); err != nil {
			return fmt.Errorf("sync %s: %w", r.name, err)
		}
	}
	for _, d := range w.dirs {
		if mutate.On("rangelog.no-dir-sync") {
			break
		}
		if err := s.syncDir(d); err != nil && !vfs.IsNotExist(err) { // dropped since
			return err
		}
	}
	return nil
}

// sync syncs the file unless it was retired, which has synced or removed it.
func (r *replica) sync() error {
	r.ioMu.RLock()
	defer r.ioMu.RUnlock()
	if r.file == nil {
		return nil
	}
	return r.file.Sync()
}

func (s *Store) syncDir(d string) error {
	if err := s.fs.SyncDir(d); err != nil {
		return fmt.Errorf("sync directory %s: %w", d, err)
	}
	return nil
}

// syncNames makes the names from a file up to the root of the store durable.
func (s *Store) syncNames(name string) error {
	for d := path.Dir(name); ; d = path.Dir(d) {
		if err := s.syncDir(d); err != nil {
			return err
		}
		if d == "." {
			return nil
		}
	}
}
