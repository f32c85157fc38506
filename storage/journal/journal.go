// Package journal is the broker's shared write-ahead journal. All open segments append to it; one device barrier makes a group of
// their entries durable, so a thousand quiet segments cost one barrier.
//
// Goroutines. Append may be called from any goroutine and never does I/O. Run owns the writer, which alone touches the current
// file, and a goroutine that prepares files ahead; both have left when Run returns. The consumer takes durable groups in order
// with Next and owns what it takes.
//
// What survives a crash: every entry whose Done was called with nil, in the order of Append, and possibly some of those that
// followed in the same group. FORMAT.md in this folder holds the bytes and the numbered steps of recovery.
//
// The first failed write or barrier is final: every later Append fails with storage.ErrStorageFailed (INV-D8).
package journal

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/vfs"
)

// Config sizes a journal.
type Config struct {
	// FileBytes is the size of one file; files are written in full once and then recycled. Default (0) 64 MiB; at least 16 MiB
	// outside tests (a group of one largest batch must fit).
	FileBytes int64
	// MaxBytes is the space in files at which client appends are refused. A checkpoint is due at half of it. Default 1 GiB.
	MaxBytes int64
	// MaxPending bounds the bytes that were appended and not yet taken by the follower (Applied). Default 64 MiB.
	MaxPending int64
	// GroupBytes is where a group stops growing; one larger entry makes a group of its own. Default 4 MiB, at most what one file holds.
	GroupBytes int
	// IdleClose is how long the writer waits without work until it closes the last group with an empty one, so that later rot in
	// it shows as damage and not as a torn tail. Default 50 ms.
	IdleClose time.Duration
}

func (c *Config) setDefaults() {
	set := func(v *int64, d int64) {
		if *v == 0 {
			*v = d
		}
	}
	set(&c.FileBytes, 64<<20)
	set(&c.MaxBytes, 1<<30)
	set(&c.MaxPending, 64<<20)
	if c.GroupBytes == 0 {
		c.GroupBytes = 4 << 20
	}
	if c.IdleClose == 0 {
		c.IdleClose = 50 * time.Millisecond
	}
}

// Validate reports every fault at once.
func (c Config) Validate() error {
	c.setDefaults()
	var errs []error
	if !validFileBytes(c.FileBytes) {
		errs = append(errs, fmt.Errorf("journal file size %d: want a multiple of %d between %d and %d: %w",
			c.FileBytes, blockSize, minFileBytes, maxFileBytes, storage.ErrInvalid))
	}
	if c.MaxPending < 0 || c.GroupBytes < 0 || c.IdleClose < 0 {
		errs = append(errs, fmt.Errorf("journal setting below zero: %w", storage.ErrInvalid))
	}
	if c.MaxBytes < 4*c.FileBytes {
		errs = append(errs, fmt.Errorf("journal cap %d: want at least four files of %d: %w", c.MaxBytes, c.FileBytes, storage.ErrInvalid))
	}
	return errors.Join(errs...)
}

// Entry is one thing to make durable.
type Entry struct {
	Kind    Kind
	Segment storage.SegmentID
	// Data must not be changed after Append: the consumer writes it to the segment's file later.
	Data []byte
	// Done is called once, in order, from the writer: nil after the barrier, storage.ErrStorageFailed if the journal failed (then
	// whether the entry is durable is not known). It must return at once and may call Append. Nil: nobody waits.
	Done func(error)
}

// Group is a durable group as the consumer gets it.
type Group struct {
	Number  uint64
	Entries []Entry
	bytes   int64
}

// Stats are counters since Open, and gauges.
type Stats struct {
	Groups, Entries, Bytes uint64 // written; Bytes on the device, padding included
	Barriers               uint64 // device barriers: one per group, two per prepared file
	LastGroup              uint64 // number of the newest durable group
	FilesInUse, FilesFree  int
	Pending                int64 // bytes appended and not yet applied
	Direct                 bool  // the O_DIRECT|O_DSYNC path is in use
}

// group is a buffer that is being filled or waits for the writer.
type group struct {
	buf     []byte // aligned; its length is its capacity
	n       int    // filled, group header space included
	entries []Entry
	bytes   int64 // of entry data
}

// Journal is an open journal. See the package comment for its goroutines.
type Journal struct {
	cfg Config
	fs  vfs.FS
	dir string
	id  ID

	wake  chan struct{} // the writer has something to do
	prep  chan struct{} // a file should be prepared
	ready chan struct{} // a durable group waits for the consumer

	mu        sync.Mutex
	queue     []*group // the last one is filled by Append
	spare     []*group
	durable   []Group // for Next
	pending   int64
	failed    error
	closed    bool
	writing   bool
	prepErr   error
	current   *file // written by the writer only; nil until the first group
	inUse     []*file
	free      []*file
	seq       uint64 // number of the newest group handed to the device
	fileSeq   int
	stats     Stats
	lastEmpty bool // the newest group is an empty one
}

// file is one journal file.
type file struct {
	name   string
	f      vfs.File
	direct bool   // a write is durable when it returns
	pos    int64  // first block that no group occupies or is being written to
	first  uint64 // group numbers it holds; 0 if none that matters
	last   uint64
}

// Append queues an entry behind all entries appended before it. It does no I/O. A client append (KindAppend) is refused with
// storage.ErrOverloaded or storage.ErrDiskFull when the journal is at its bounds; all other kinds have a spare file. On error the
// entry was not queued and never will be durable.
func (j *Journal) Append(e Entry) error {
	if len(e.Data) > maxEntryData {
		return fmt.Errorf("journal entry of %d bytes, limit %d: %w", len(e.Data), maxEntryData, storage.ErrTooLarge)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.failed != nil {
		return j.failed
	}
	if j.closed {
		return fmt.Errorf("journal: %w", storage.ErrClosed)
	}
	if e.Kind == KindAppend && j.pending > 0 && j.pending+int64(len(e.Data)) > j.cfg.MaxPending {
		return fmt.Errorf("%d bytes wait to be written to segment files: %w", j.pending, storage.ErrOverloaded)
	}
	need := entryHeaderSize + len(e.Data)
	if limit := j.cfg.FileBytes - blockSize - groupHeaderSize; int64(need) > limit {
		return fmt.Errorf("journal entry of %d bytes in files of %d: %w", need, j.cfg.FileBytes, storage.ErrTooLarge)
	}
	g := j.fillable(need)
	size := need
	if g != nil {
		size += g.n
	} else {
		size += groupHeaderSize
	}
	if !j.fits(g, roundUp(size), e.Kind) {
		j.signal(j.prep)
		if j.prepErr != nil {
			return fmt.Errorf("journal: %w", j.prepErr)
		}
		return fmt.Errorf("journal is full until a checkpoint frees files: %w", storage.ErrOverloaded)
	}
	if g == nil {
		g = j.newGroup()
		j.queue = append(j.queue, g)
	}
	g.add(e, need, roundUp(j.cfg.GroupBytes))
	j.pending += int64(len(e.Data))
	if !j.writing {
		j.signal(j.wake)
	}
	return nil
}

// fillable is the group at the tail of the queue if it can take need more bytes.
func (j *Journal) fillable(need int) *group {
	if len(j.queue) == 0 {
		return nil
	}
	g := j.queue[len(j.queue)-1]
	if g.n+need > max(j.cfg.GroupBytes, groupHeaderSize) {
		return nil
	}
	return g
}

// fits reports whether the queued groups, with the tail group (or a new one) grown to size, have room in files that exist, and leave what
// an entry of this kind must leave to others. A client append leaves a whole file free, so that fences, seals and drops find room at the
// cap; those leave a quarter of a file, so that the checkpoint, which alone makes room again, always does. Called with mu held.
func (j *Journal) fits(tail *group, size int, kind Kind) bool {
	room := int64(0)
	if j.current != nil {
		room = j.cfg.FileBytes - j.current.pos
	}
	files := len(j.free)
	if kind == KindAppend {
		if files--; files < 0 {
			return false
		}
		if j.usedBytes() > j.cfg.MaxBytes-j.cfg.FileBytes {
			files = 0 // at the cap: what is left of the current file, and no more
		}
	}
	take := func(n int64) bool { // exactly as place does it
		if n > room {
			if files--; files < 0 {
				return false
			}
			room = j.cfg.FileBytes - blockSize
		}
		room -= n
		return room >= 0
	}
	for _, g := range j.queue {
		if g != tail && !take(int64(roundUp(g.n))) {
			return false
		}
	}
	if !take(int64(size)) {
		return false
	}
	return kind == KindAppend || kind == KindCheckpoint || files > 0 || room >= j.cfg.FileBytes/4
}

func (j *Journal) usedBytes() int64 { return int64(len(j.inUse)) * j.cfg.FileBytes }

func (j *Journal) newGroup() *group {
	if n := len(j.spare); n > 0 {
		g := j.spare[n-1]
		j.spare = j.spare[:n-1]
		return g
	}
	return &group{buf: vfs.AlignedBuffer(64 << 10), n: groupHeaderSize}
}

// add copies the entry in. The buffer doubles up to limit, so that it is worth keeping; only one larger entry takes it beyond.
func (g *group) add(e Entry, need, limit int) {
	if end := roundUp(g.n + need); end > len(g.buf) {
		grown := vfs.AlignedBuffer(max(end, min(2*len(g.buf), limit)))
		copy(grown, g.buf[:g.n])
		g.buf = grown
	}
	putEntryHeader(g.buf[g.n:], e.Kind, e.Segment, len(e.Data))
	copy(g.buf[g.n+entryHeaderSize:], e.Data)
	g.n += need
	g.bytes += int64(len(e.Data))
	g.entries = append(g.entries, e)
}

func (j *Journal) signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Run writes groups until ctx ends, then what is still queued, and returns when nothing of the journal runs any more. It returns
// the storage failure, if there was one.
func (j *Journal) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	prepareCtx, stopPreparing := context.WithCancel(ctx)
	defer stopPreparing()
	wg.Go(func() { j.prepare(prepareCtx) })
	idle := time.NewTimer(j.cfg.IdleClose)
	defer idle.Stop()
	for {
		wrote, err := j.WriteGroup()
		if err != nil {
			return err
		}
		if wrote {
			idle.Reset(j.cfg.IdleClose)
			continue
		}
		select {
		case <-j.wake:
		case <-idle.C:
			if err := j.CloseGroup(); err != nil {
				return err
			}
		case <-ctx.Done():
			return j.drain()
		}
	}
}

// drain refuses further entries, writes what is queued and closes the last group.
func (j *Journal) drain() error {
	j.mu.Lock()
	j.closed = true
	j.mu.Unlock()
	for {
		if wrote, err := j.WriteGroup(); err != nil {
			return err
		} else if !wrote {
			break
		}
	}
	err := j.CloseGroup()
	j.signal(j.ready)
	return err
}

// WriteGroup writes the oldest waiting group, waits for its barrier, calls its Done functions and hands it to the consumer. It
// reports whether there was one. It is the writer: only Run, or a test in place of Run, calls it.
func (j *Journal) WriteGroup() (bool, error) {
	j.mu.Lock()
	if j.failed != nil {
		j.mu.Unlock()
		return false, j.fail(nil, nil)
	}
	if len(j.queue) == 0 {
		j.writing = false
		j.mu.Unlock()
		return false, nil
	}
	g := j.queue[0]
	j.queue = j.queue[:copy(j.queue, j.queue[1:])]
	j.writing = true
	pos, err := j.place(int64(roundUp(g.n)))
	f, number := j.current, j.seq+1
	j.mu.Unlock()

	if mutate.On("journal.ack-before-barrier") {
		g.done(nil)
	}
	size := 0
	if err == nil {
		size = sealGroup(g.buf, g.n, j.id, number, len(g.entries))
		err = j.write(f, g.buf[:size], pos)
	}
	if err != nil && mutate.On("journal.retry-failed-write") && f != nil {
		err = j.write(f, g.buf[:size], pos)
	}
	if err != nil {
		return false, j.fail(err, g)
	}
	j.mu.Lock()
	j.seq = number
	j.note(f, number, size, len(g.entries))
	j.lastEmpty = len(g.entries) == 0
	j.mu.Unlock()
	g.done(nil) // before the consumer gets the entries: from then on they are its own
	j.recycle(g)
	j.signal(j.ready)
	return true, nil
}

// CloseGroup writes an empty group behind the last one unless that is empty already: from then on a group that does not verify has
// a verified successor, and counts as damage.
func (j *Journal) CloseGroup() error {
	j.mu.Lock()
	if j.lastEmpty || j.seq == 0 || j.failed != nil || !j.fits(nil, blockSize, KindFence) {
		defer j.mu.Unlock()
		return j.failed
	}
	j.queue = append(j.queue, j.newGroup())
	j.mu.Unlock()
	_, err := j.WriteGroup()
	return err
}

// place makes current the file that the next group of size bytes goes to, and takes the blocks for it: Append must not count on them
// while they are being written. Called with mu held.
func (j *Journal) place(size int64) (pos int64, err error) {
	if j.current == nil || j.current.pos+size > j.cfg.FileBytes {
		if len(j.free) == 0 {
			return 0, errors.New("no journal file is left, not even the spare one")
		}
		j.current = j.free[0]
		j.free = j.free[:copy(j.free, j.free[1:])]
		j.current.pos, j.current.first, j.current.last = blockSize, 0, 0
		j.inUse = append(j.inUse, j.current)
		j.signal(j.prep)
	}
	pos = j.current.pos
	j.current.pos += size
	if mutate.On("journal.rewrite-block") && size > blockSize {
		j.current.pos -= blockSize
	}
	return pos, nil
}

func (j *Journal) write(f *file, b []byte, pos int64) error {
	if _, err := f.f.WriteAt(b, pos); err != nil {
		return fmt.Errorf("write %s: %w", f.name, err)
	}
	if !f.direct {
		if err := f.f.Sync(); err != nil {
			return fmt.Errorf("sync %s: %w", f.name, err)
		}
	}
	return nil
}

// note records a written group in its file. Called with mu held.
func (j *Journal) note(f *file, number uint64, size, entries int) {
	f.last = number
	if f.first == 0 {
		f.first = number
	}
	j.stats.Groups++
	j.stats.Barriers++
	j.stats.Entries += uint64(entries)
	j.stats.Bytes += uint64(size)
}

// fail makes err final, or the failure that there is already. The group that was being written (nil for none) and everything queued get
// it: none of it is known to be durable, and nothing will be tried again.
func (j *Journal) fail(err error, g *group) error {
	j.mu.Lock()
	if j.failed == nil {
		j.failed = fmt.Errorf("journal: %w: %w", storage.ErrStorageFailed, err)
	}
	queue := j.queue
	j.queue = nil
	err = j.failed
	j.mu.Unlock()
	if g != nil {
		g.done(err)
	}
	for _, q := range queue {
		q.done(err)
	}
	j.signal(j.ready)
	return err
}

func (g *group) done(err error) {
	for i := range g.entries {
		if d := g.entries[i].Done; d != nil {
			g.entries[i].Done = nil
			d(err)
		}
	}
}

// recycle hands the entries to the consumer and keeps up to three buffers, so that one fills while one is written.
func (j *Journal) recycle(g *group) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.durable = append(j.durable, Group{Number: j.seq, Entries: g.entries, bytes: g.bytes})
	g.n, g.bytes, g.entries = groupHeaderSize, 0, nil
	if len(j.spare) < 3 && len(g.buf) <= roundUp(j.cfg.GroupBytes) {
		j.spare = append(j.spare, g)
	}
}

// Next returns the oldest durable group that was not taken yet, waiting for one. It returns ctx's error, or the storage failure
// once every durable group was taken. One consumer only.
func (j *Journal) Next(ctx context.Context) (Group, error) {
	for {
		g, ok, err := j.TryNext()
		if ok || err != nil {
			return g, err
		}
		select {
		case <-j.ready:
		case <-ctx.Done():
			return Group{}, ctx.Err()
		}
	}
}

// TryNext is Next without waiting.
func (j *Journal) TryNext() (Group, bool, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.durable) > 0 {
		g := j.durable[0]
		j.durable[0] = Group{}
		j.durable = j.durable[1:]
		return g, true, nil
	}
	j.durable = nil
	return Group{}, false, j.failed
}

// Applied says that the consumer is done with a group's data.
func (j *Journal) Applied(g Group) {
	j.mu.Lock()
	j.pending -= g.bytes
	j.mu.Unlock()
}

// checkpointFiles is how many full files make a checkpoint due, if that is less than half the cap: the fewer files go round, the sooner new ones,
// which must be written in full before they are of use, are needed no more.
const checkpointFiles = 3

// CheckpointDue reports whether half the cap is in use, or a few files.
func (j *Journal) CheckpointDue() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.usedBytes() >= min(j.cfg.MaxBytes/2, checkpointFiles*j.cfg.FileBytes)
}

// Checkpoint queues a note; when it is durable, the files that hold only groups before n.From are recycled and done is called. The
// caller has synced what the note claims.
func (j *Journal) Checkpoint(n Note, done func(error)) error {
	if len(n.Segments) > MaxLiveSegments {
		return fmt.Errorf("checkpoint of %d live segments, limit %d: %w", len(n.Segments), MaxLiveSegments, storage.ErrTooLarge)
	}
	err := j.Append(Entry{Kind: KindCheckpoint, Data: n.Encode(), Done: func(err error) {
		if err == nil {
			j.reclaim(n.From)
		}
		if done != nil {
			done(err)
		}
	}})
	if err == nil && mutate.On("journal.recycle-before-note") {
		j.reclaim(n.From)
	}
	return err
}

// reclaim frees files that are wholly before group from.
func (j *Journal) reclaim(from uint64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	keep := j.inUse[:0]
	for _, f := range j.inUse {
		if f != j.current && f.last < from {
			j.free = append(j.free, f)
		} else {
			keep = append(keep, f)
		}
	}
	clear(j.inUse[len(keep):])
	j.inUse = keep
}

// Fail makes an outside failure of the data directory final here too: a segment file that could not be written or synced. The writer
// then answers what is queued with it.
func (j *Journal) Fail(err error) {
	j.mu.Lock()
	if j.failed == nil {
		j.failed = fmt.Errorf("journal: %w: %w", storage.ErrStorageFailed, err)
	}
	j.mu.Unlock()
	j.signal(j.wake)
	j.signal(j.ready)
}

// Failed returns the failure that ended this journal, or nil.
func (j *Journal) Failed() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.failed
}

// Stats returns the counters.
func (j *Journal) Stats() Stats {
	j.mu.Lock()
	defer j.mu.Unlock()
	s := j.stats
	s.LastGroup, s.FilesInUse, s.FilesFree, s.Pending = j.seq, len(j.inUse), len(j.free), j.pending
	return s
}

// Close closes the files. Run must have returned.
func (j *Journal) Close() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.closed = true
	var errs []error
	for _, f := range append(j.inUse, j.free...) {
		errs = append(errs, f.f.Close())
	}
	j.inUse, j.free, j.current = nil, nil, nil
	return errors.Join(errs...)
}
