package rangelog

import (
	"errors"
	"fmt"
	"io"
	"path"
	"sort"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
	"github.com/malachilog/malachi/storage/journal"
	"github.com/malachilog/malachi/storage/replication"
	"github.com/malachilog/malachi/storage/segment"
	"github.com/malachilog/malachi/storage/vfs"
)

// errKnownDamage is the damage of a replica that an earlier start found; it stays, whatever can be read now.
var errKnownDamage = fmt.Errorf("known since an earlier start: %w", storage.ErrCorrupt)

// Open recovers the store in deps.FS and leaves it ready: what was replayed is written again and synced, and a checkpoint of it is
// durable, before Open returns; so everything that a vote, an append or a reader may lean on survives the next crash (INV-D12). It
// starts no goroutine. Errors: storage.ErrNewerFormat, storage.ErrCorrupt and *journal.DamageError change no byte of what is there.
func Open(cfg Config, deps Deps) (*Store, error) {
	if cfg.CheckpointEvery == 0 {
		cfg.CheckpointEvery = defaultCheckpointEvery
	}
	s := &Store{
		cfg: cfg, deps: deps, fs: deps.FS, log: deps.Logger,
		replicas:     map[storage.SegmentID]*replica{},
		busy:         map[storage.SegmentID]struct{}{},
		newNames:     map[string]struct{}{},
		failedSignal: make(chan struct{}),
	}
	s.recovered.Damaged = map[storage.SegmentID]error{}
	s.CheckSpace()
	j, found, err := journal.Open(deps.FS, journalDir, cfg.Journal, deps.NewJournalID, cfg.MustExist)
	if err != nil {
		return nil, fmt.Errorf("open journal: %w", err)
	}
	s.j = j
	if deps.OnFound != nil {
		if err := deps.OnFound(found.Last); err != nil {
			return nil, errors.Join(fmt.Errorf("recover: %w", err), s.Close())
		}
	}
	if err := s.replay(found); err != nil {
		return nil, errors.Join(fmt.Errorf("recover: %w", err), s.Close())
	}
	if err := s.recoveryCheckpoint(found); err != nil {
		return nil, errors.Join(fmt.Errorf("recovery checkpoint: %w", err), s.Close())
	}
	return s, nil
}

// lastEnds numbers the entries to replay from 1 and gives the last sealed or dropped one of each segment: it ends the replay of that
// segment, entries before it included. What follows it is another life of the id.
func lastEnds(found *journal.Recovered) (map[storage.SegmentID]uint64, error) {
	ends, n := map[storage.SegmentID]uint64{}, uint64(0)
	err := found.Replay(func(_ uint64, k journal.Kind, id storage.SegmentID, _ []byte) error {
		n++
		if k == journal.KindSealed || k == journal.KindDropped {
			ends[id] = n
		}
		return nil
	})
	if mutate.On("rangelog.replay-ended-segments") {
		clear(ends)
	}
	return ends, err
}

// replay rebuilds the live replicas from the newest checkpoint and the groups behind it. All noted files are opened and their headers
// read before the first byte is changed.
func (s *Store) replay(found *journal.Recovered) error {
	ends, err := lastEnds(found)
	if err != nil {
		return err
	}
	for _, n := range found.Note.Segments {
		if ends[n.ID] > 0 {
			continue
		}
		if err := s.takeUp(n); err != nil {
			return fmt.Errorf("segment %s: %w", n.ID, err)
		}
	}
	n := uint64(0)
	err = found.Replay(func(group uint64, k journal.Kind, id storage.SegmentID, data []byte) error {
		n++
		if k == journal.KindCheckpoint || n <= ends[id] {
			return nil
		}
		if err := s.replayEntry(k, id, data); err != nil {
			return fmt.Errorf("group %d, %s of segment %s: %w", group, k, id, err)
		}
		return nil
	})
	s.recovered.Groups, s.recovered.Entries = found.Last+1-found.First, n
	s.recovered.Segments = len(s.replicas)
	s.applied = found.Last
	for id, r := range s.replicas {
		if r.missing != nil {
			s.damage(r, r.missing)
		}
		r.m = replication.RecoverReplica(r.tally.End, r.givenFenced, r.m.Damaged())
		r.queuedPos, r.queuedDigest = r.tally.Pos, r.tally.Digest
		if err := r.m.Damaged(); err != nil {
			s.recovered.Damaged[id] = err
		}
	}
	return err
}

// takeUp opens the file of a noted segment. What it holds beyond the noted position is not read: it was never part of the note, and what of
// it was acknowledged is in the journal, which is replayed over it. A file that does not hold what the note says is damage of this replica:
// it is kept as it is.
func (s *Store) takeUp(n journal.SegmentNote) error {
	r := &replica{admin: make(chan struct{}, 1), id: n.ID, name: fileName(n.ID), live: true, givenFenced: n.Fenced}
	s.replicas[n.ID] = r
	if err := r.takeUpFile(s.fs, n); err != nil {
		if !errors.Is(err, storage.ErrCorrupt) && !vfs.IsNotExist(err) {
			return err
		}
		s.damage(r, err)
	}
	if n.Damaged && r.m.Damaged() == nil {
		s.damage(r, errKnownDamage)
	}
	r.tally.End, r.tally.Pos, r.tally.Digest = n.End, n.Pos, n.Digest
	return nil
}

func (r *replica) takeUpFile(fs vfs.FS, n journal.SegmentNote) error {
	f, err := fs.OpenWrite(r.name)
	if err != nil {
		return err
	}
	r.file = f
	if r.header, r.raw, err = segment.ReadHeader(f); err != nil {
		return err
	}
	r.tally = segment.NewTally(r.header, len(r.raw))
	if r.header.ID != n.ID {
		return fmt.Errorf("file %s holds segment %s: %w", r.name, r.header.ID, storage.ErrCorrupt)
	}
	size, err := f.Size()
	if err == nil && size < n.Pos {
		r.missing = fmt.Errorf("file %s has %d bytes, the checkpoint notes %d: %w", r.name, size, n.Pos, storage.ErrCorrupt)
		r.size = size
	}
	return err
}

func (s *Store) replayEntry(k journal.Kind, id storage.SegmentID, data []byte) error {
	r := s.replicas[id]
	switch {
	case k == journal.KindOpen && r != nil:
		return fmt.Errorf("it is open already: %w", storage.ErrCorrupt)
	case k == journal.KindOpen:
		return s.replayOpen(data)
	case r == nil:
		return fmt.Errorf("no open entry and no note of it: %w", storage.ErrCorrupt)
	case k == journal.KindFence:
		r.givenFenced = true
		return nil
	case r.m.Damaged() != nil:
		return nil // it is kept as evidence; it neither votes nor serves
	case k == journal.KindCut:
		end, err := journal.ParseCut(data)
		if err != nil {
			return err
		}
		if err := s.giveCut(r, end); err != nil {
			return err
		}
		if r.tally.Pos <= r.size { // the cut was carried out before the crash, and the file is short of the note for that reason
			r.missing = nil
		}
		return nil
	}
	return s.replayBatch(r, k, data)
}

// replayOpen makes the file of a segment that was opened after the checkpoint. A file of that name can only be of this open: it holds
// nothing but what this replay writes again.
func (s *Store) replayOpen(header []byte) error {
	raw := append([]byte(nil), header...)
	h, _, err := segment.ParseHeader(raw)
	if err != nil {
		return err
	}
	r := newReplica(h, raw)
	r.live = true
	if err := s.fs.MkdirAll(path.Dir(r.name)); err != nil {
		return err
	}
	f, err := s.fs.OpenWrite(r.name)
	if vfs.IsNotExist(err) {
		f, err = s.fs.Create(r.name)
	}
	if err != nil {
		return err
	}
	r.file = f
	s.replicas[h.ID] = r
	_, err = f.WriteAt(r.raw, 0)
	return err
}

// replayBatch writes a journaled batch again. A note is exactly what the groups before it give, so the batch begins at the end.
func (s *Store) replayBatch(r *replica, k journal.Kind, data []byte) error {
	h, err := batch.ParseHeader(data)
	if err != nil {
		return err
	}
	if h.Base != r.tally.End.Next() || h.Size() != len(data) {
		return fmt.Errorf("batch at %d of %d bytes, end is %d: %w", h.Base, h.Size(), r.tally.End, storage.ErrCorrupt)
	}
	if k == journal.KindAppend && r.givenFenced {
		return fmt.Errorf("append behind the fence: %w", storage.ErrCorrupt)
	}
	if _, err := r.file.WriteAt(data, r.tally.Pos); err != nil {
		return err
	}
	r.tally.Digest = segment.Chain(r.tally.Digest, data)
	r.tally.End = h.End()
	r.tally.Pos += int64(len(data))
	return nil
}

// lostGroups looks for acknowledged groups that the journal has lost at its end, where it alone cannot tell them from a torn group. The
// follower gives a file only what is durable in the journal, so a whole batch behind the recovered end, that continues it, was.
func (s *Store) lostGroups() error {
	if mutate.On("rangelog.ignore-lost-groups") {
		return nil
	}
	for id, r := range s.replicas {
		if r.file == nil || r.m.Damaged() != nil {
			continue
		}
		b := make([]byte, batch.HeaderSize)
		if n, err := readAt(r.file, b, r.tally.Pos); err != nil || n < len(b) {
			continue // nothing whole is there; a file that cannot be read is found by its first vote
		}
		h, err := batch.ParseHeader(b)
		if err != nil || h.Base != r.tally.End.Next() {
			continue
		}
		b = make([]byte, h.Size())
		if n, err := readAt(r.file, b, r.tally.Pos); err != nil || n < len(b) {
			continue
		}
		if _, err := batch.Verify(b); err == nil {
			return fmt.Errorf("segment %s: its file goes on at offset %d, where the journal ends: acknowledged groups are missing from the journal: %w",
				id, h.Base, storage.ErrCorrupt)
		}
	}
	return nil
}

// readAt is ReadAt to which the end of the file is no error.
func readAt(f vfs.File, b []byte, pos int64) (int, error) {
	n, err := f.ReadAt(b, pos)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return n, err
}

// recoveryCheckpoint cuts what lies beyond each end, syncs what the replay wrote and notes it. What can be read back may live only in the
// page cache, so even a file that needed no change is synced.
func (s *Store) recoveryCheckpoint(found *journal.Recovered) error {
	// The note's group is the first after the replayed ones, so it is also the one to replay from.
	note, work := journal.Note{From: found.Last + 1}, &given{}
	dirs := map[string]struct{}{".": {}}
	if err := s.lostGroups(); err != nil { // before anything is cut
		return err
	}
	for _, r := range s.replicas {
		r.mu.Lock()
		note.Segments = append(note.Segments, r.note())
		r.mu.Unlock()
		if err := r.cutRest(); err != nil {
			return err
		}
		work.files = append(work.files, r)
		for d := path.Dir(r.name); d != "."; d = path.Dir(d) {
			dirs[d] = struct{}{}
		}
	}
	if mutate.On("rangelog.vote-before-recovery-checkpoint") {
		s.checkpointed()
		return nil
	}
	for d := range dirs {
		work.dirs = append(work.dirs, d)
	}
	sort.Slice(work.files, func(a, b int) bool { return work.files[a].name < work.files[b].name })
	sort.Strings(work.dirs)
	sortNotes(note.Segments)
	if err := s.syncGiven(work); err != nil {
		return err
	}
	if err := s.j.Checkpoint(note, nil); err != nil {
		return err
	}
	if _, err := s.j.WriteGroup(); err != nil {
		return err
	}
	if _, err := s.FollowGroup(); err != nil {
		return err
	}
	s.checkpointed()
	return nil
}

// checkpointed lets the recovered replicas answer: everything that was replayed survives the next crash (INV-D12).
func (s *Store) checkpointed() {
	for _, r := range s.replicas {
		r.mu.Lock()
		r.m.Checkpointed()
		r.mu.Unlock()
	}
}

// cutRest truncates a recovered file to its end, unread.
func (r *replica) cutRest() error {
	if r.file == nil || r.m.Damaged() != nil {
		return nil
	}
	size, err := r.file.Size()
	if err == nil && size > r.tally.Pos {
		err = r.file.Truncate(r.tally.Pos)
	}
	r.reserved.Store(r.tally.Pos)
	if err != nil {
		return fmt.Errorf("cut %s: %w", r.name, err)
	}
	return nil
}

func sortNotes(n []journal.SegmentNote) {
	key := make(map[storage.SegmentID]string, len(n))
	for _, s := range n {
		key[s.ID] = s.ID.String()
	}
	sort.Slice(n, func(a, b int) bool { return key[n[a].ID] < key[n[b].ID] })
}
