// Package rangelog keeps the segment replicas of one broker: the shared journal, the segment files behind it, recovery, and the
// operations that a replica set needs (open, append, fence, recover, seal, drop, read, verify, rebuild index).
//
// An append is acknowledged by the journal's barrier alone. A follower goroutine then gives the same bytes to the segment files through
// the page cache, unsynced; readers see what it has given. A checkpoint notes what was given, syncs it, and lets the journal recycle.
//
// Goroutines and locks. Run owns the journal's writer, the follower and the checkpointer. Every method is safe for concurrent use. The
// order of locks is replica.admin, Store.giveMu, Store.mu, replica.mu, the journal's. Locks that are held over I/O guard only that: admin
// (one fence check, seal or drop of a replica at a time), giveMu (one group), dirMu, growMu and ioMu.
//
// What survives a crash: of an open segment, exactly its checkpointed end extended by the journal. A fence, cut, seal or drop that was
// answered. A sealed file never changes again.
package rangelog

import (
	"errors"
	"fmt"
	"log/slog"
	"path"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/journal"
	"github.com/malachilog/malachi/storage/replication"
	"github.com/malachilog/malachi/storage/segment"
	"github.com/malachilog/malachi/storage/vfs"
)

// Config of a Store.
type Config struct {
	Journal journal.Config
	// DiskReserve is the free space in bytes below which client appends and new segments are refused with storage.ErrDiskFull.
	// 0: the smaller of 5 % of the file system and 2 GiB.
	DiskReserve uint64
	// CheckpointEvery is the longest time between checkpoints while there is something to note. Default 30 s.
	CheckpointEvery time.Duration
	// MustExist refuses to begin with an empty journal: this directory has had one.
	MustExist bool
}

// Deps are a Store's collaborators.
type Deps struct {
	FS     vfs.FS
	Logger *slog.Logger
	// NewJournalID is used if the directory has no journal yet.
	NewJournalID journal.ID
	// OnFound, if not nil, is told the newest group that the journal holds, before the recovery writes anything: what this disk can prove. An
	// error of it ends the opening.
	OnFound func(last uint64) error
	// OnFailed, if not nil, is called once when the first write or sync fails.
	OnFailed func(error)
}

const (
	journalDir  = "journal"
	segmentsDir = "segments"
	fileSuffix  = ".seg"
)

// Store is the segment replicas of one data directory.
type Store struct {
	cfg  Config
	deps Deps
	fs   vfs.FS
	j    *journal.Journal
	log  *slog.Logger

	mu       sync.RWMutex
	replicas map[storage.SegmentID]*replica // live ones, and sealed or dropped ones until their file is closed
	busy     map[storage.SegmentID]struct{} // their file is being made, removed or mended: one at a time touches the name
	newNames map[string]struct{}            // directories with entries that no SyncDir has made durable yet

	// giveMu is held over each group that the follower gives, and by a checkpoint for the instant of its note: so a note is exactly what
	// replaying every group up to applied gives, never part of a group.
	giveMu  sync.Mutex
	applied uint64 // newest group that was given
	news    bool   // something but checkpoints was given since the last note

	dirMu         sync.Mutex // making and removing of directories
	checkpointing atomic.Bool
	diskFull      atomic.Bool
	failOnce      sync.Once
	failedSignal  chan struct{} // closed by fail
	sealed        sealedCache
	recovered     RecoveryReport
}

// RecoveryReport says what Open found and did.
type RecoveryReport struct {
	Groups, Entries uint64
	Segments        int // live ones
	Damaged         map[storage.SegmentID]error
}

// replica is one segment replica that is not yet sealed, or was sealed by this process.
type replica struct {
	admin chan struct{} // holds one token; who takes it may verify, seal or drop

	id     storage.SegmentID
	header segment.Header
	raw    []byte // complete header bytes
	name   string // of the file

	growMu   sync.Mutex // serialises reservations; held over that I/O alone
	reserved atomic.Int64
	ioMu     sync.RWMutex // keeps the file open: held shared over reads and syncs, exclusively to close it

	mu   sync.Mutex
	file vfs.File
	// m decides what is taken, answered and voted; it is the machine that the simulator of storage/replication runs.
	m replication.Replica
	// queued is what was handed to the journal, below m.Queued().
	queuedPos    int64
	queuedDigest storage.Digest
	queuedTime   storage.Time // append time of the newest batch
	// given is what the follower has written to the file.
	tally       segment.Tally
	givenFenced bool
	live        bool // its open entry was given and neither a sealed nor a dropped one: belongs into a note
	endGiven    bool // a sealed or dropped entry was given: the follower does not touch the file again
	dirty       bool // the file has bytes that no sync has covered

	cutTo   *segment.Tally // what the queued cut leaves, verified; nil once it was given
	missing error          // while replaying: the file has only size bytes, fewer than the checkpoint notes
	size    int64          // with missing
	waiters []waiter
	readers map[chan<- struct{}]int
	hints   hints
}

// waiter waits for a barrier to cover end.
type waiter struct {
	end  storage.End
	done func(error)
}

// fileName is made of numbers only, so no name from outside can lead out of the directory (INV-R9).
func fileName(id storage.SegmentID) string { return path.Join(rangeDir(id.Range), segmentFile(id.Seq)) }

func rangeDir(r storage.RangeID) string { return path.Join(segmentsDir, r.String()) }

func segmentFile(seq uint32) string { return fmt.Sprintf("%010d%s", seq, fileSuffix) }

func (s *Store) lookup(id storage.SegmentID) *replica {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.replicas[id]
}

// live returns the replica if it is neither sealed nor dropped.
func (s *Store) live(id storage.SegmentID) (*replica, error) {
	if r := s.lookup(id); r != nil {
		return r, nil
	}
	return nil, fmt.Errorf("segment %s: %w", id, s.notLive(id))
}

// notLive says what a segment is that is no live replica.
func (s *Store) notLive(id storage.SegmentID) error {
	s.mu.RLock()
	_, busy := s.busy[id]
	s.mu.RUnlock()
	if busy {
		return fmt.Errorf("it is being opened or dropped: %w", storage.ErrUnavailable)
	}
	f, err := s.sealed.get(s, id)
	switch {
	case err == nil:
		f.release()
		return storage.ErrSealed
	case errors.Is(err, storage.ErrCorrupt):
		return fmt.Errorf("%w: %w", storage.ErrDamaged, err)
	}
	return err
}

// takeName reserves the right to make or remove the file of a segment.
func (s *Store) takeName(id storage.SegmentID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, busy := s.busy[id]; busy {
		return fmt.Errorf("it is being opened or dropped: %w", storage.ErrUnavailable)
	}
	s.busy[id] = struct{}{}
	return nil
}

func (s *Store) giveName(id storage.SegmentID) {
	s.mu.Lock()
	delete(s.busy, id)
	s.mu.Unlock()
}

// judge says what a failed change of the file system means: a full disk is foreseen, everything else is final.
func (s *Store) judge(err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, vfs.ErrNoSpace) {
		return fmt.Errorf("%w: %w", storage.ErrDiskFull, err)
	}
	s.fail(err)
	return fmt.Errorf("%w: %w", storage.ErrStorageFailed, err)
}

// fail makes err final for the directory.
func (s *Store) fail(err error) {
	s.j.Fail(err)
	s.failOnce.Do(func() {
		close(s.failedSignal)
		s.log.Error("storage failed; this broker takes no more appends", "error", err)
		if s.deps.OnFailed != nil {
			s.deps.OnFailed(err)
		}
	})
}

// Failed returns the failure that ended this store's writing, or nil.
func (s *Store) Failed() error { return s.j.Failed() }

// Recovery returns what Open did.
func (s *Store) Recovery() RecoveryReport { return s.recovered }

// Stats returns the journal's counters.
func (s *Store) Stats() journal.Stats { return s.j.Stats() }

// DiskFull reports whether less than the reserve is free, as of the last look.
func (s *Store) DiskFull() bool { return s.diskFull.Load() }

// CheckSpace looks at the free space. Run does so every second.
func (s *Store) CheckSpace() {
	free, total, err := s.fs.Space(".")
	if err != nil {
		s.log.Warn("cannot tell the free space", "error", err)
		return
	}
	reserve := s.cfg.DiskReserve
	if reserve == 0 {
		reserve = min(total/20, 2<<30)
	}
	if full := free < reserve; full != s.diskFull.Swap(full) {
		s.log.Warn("disk space", "full", full, "free_bytes", free, "reserve_bytes", reserve)
	}
}

// Info is the public state of a replica.
type Info struct {
	ID      storage.SegmentID
	State   string // "open", "fenced", "sealed"
	Base    storage.Offset
	End     storage.End // durable
	Written storage.End // readable
	Bytes   int64       // header and batches
	Damaged error
}

// Info returns the state of one replica. storage.ErrUnknownSegment if it is not here.
func (s *Store) Info(id storage.SegmentID) (Info, error) {
	if r := s.lookup(id); r != nil {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.m.State() == replication.StateDropped {
			return Info{}, fmt.Errorf("segment %s: %w", id, storage.ErrUnknownSegment)
		}
		return Info{ID: id, State: r.m.State().String(), Base: r.header.Base, End: r.m.Durable(), Written: r.tally.End,
			Bytes: r.tally.Pos, Damaged: r.m.Damaged()}, nil
	}
	sf, err := s.sealed.get(s, id)
	if err != nil {
		return Info{}, err
	}
	defer sf.release()
	t := sf.tally
	return Info{ID: id, State: "sealed", Base: t.Base, End: t.End, Written: t.End, Bytes: t.Pos}, nil
}

// Live returns the ids of the replicas that are neither sealed nor dropped, in no order.
func (s *Store) Live() []storage.SegmentID {
	s.mu.RLock()
	defer s.mu.RUnlock()
	out := make([]storage.SegmentID, 0, len(s.replicas))
	for id, r := range s.replicas {
		r.mu.Lock()
		if r.m.State() < replication.StateSealed {
			out = append(out, id)
		}
		r.mu.Unlock()
	}
	return out
}

// List returns the segment ids that this directory holds a file of, in no order. It reads names only.
func (s *Store) List() ([]storage.SegmentID, error) {
	var out []storage.SegmentID
	err := s.walk(func(id storage.SegmentID) { out = append(out, id) })
	return out, err
}

func (s *Store) walk(fn func(storage.SegmentID)) error { return walk(s.fs, fn) }

// walk calls fn for every file under segments/ whose name is a segment's. Others are left alone.
func walk(fsys vfs.FS, fn func(storage.SegmentID)) error {
	topics, err := listDirs(fsys, segmentsDir)
	if err != nil {
		return err
	}
	for _, topic := range topics {
		ranges, err := listDirs(fsys, path.Join(segmentsDir, topic))
		if err != nil {
			return err
		}
		for _, r := range ranges {
			id, err := storage.ParseRangeID(topic + "/" + r)
			if err != nil {
				continue
			}
			files, err := fsys.List(rangeDir(id))
			if vfs.IsNotExist(err) {
				continue // removed since
			}
			if err != nil {
				return fmt.Errorf("list %s: %w", id, err)
			}
			for _, f := range files {
				if seq, ok := parseFileName(f.Name); ok && !f.Dir {
					fn(storage.SegmentID{Range: id, Seq: seq})
				}
			}
		}
	}
	return nil
}

func parseFileName(name string) (seq uint32, ok bool) {
	n, err := strconv.ParseUint(strings.TrimSuffix(name, fileSuffix), 10, 32)
	return uint32(n), err == nil && name == segmentFile(uint32(n))
}

func listDirs(fsys vfs.FS, name string) ([]string, error) {
	entries, err := fsys.List(name)
	if vfs.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", name, err)
	}
	var out []string
	for _, e := range entries {
		if e.Dir {
			out = append(out, e.Name)
		}
	}
	return out, nil
}

// Close closes all files. Run must have returned.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	errs := []error{s.j.Close(), s.sealed.close()}
	for _, r := range s.replicas {
		if r.file != nil {
			errs = append(errs, r.file.Close())
		}
	}
	s.replicas = nil
	return errors.Join(errs...)
}
