package rangelog

import (
	"container/list"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
	"github.com/malachilog/malachi/storage/replication"
	"github.com/malachilog/malachi/storage/segment"
	"github.com/malachilog/malachi/storage/vfs"
)

// Batch is one batch of a read. Data is the caller's; the batches of one read share a buffer.
type Batch struct {
	Header batch.Header
	Data   []byte
}

// source is where a read finds its bytes.
type source struct {
	f     vfs.File
	tally segment.Tally // a copy: its index may be read without a lock
}

// Read returns whole batches that hold the records from offset on, verified, of at most maxBytes and never at or beyond limit. The
// first batch may begin below from. At least one batch comes if there is one below limit, whatever its size. No batch and no error: nothing
// is readable below limit yet. The batches share memory from alloc, whose content need not be zero; nil is make.
//
// Errors: storage.ErrUnknownSegment, ErrBeyondEnd (from lies beyond the end), ErrStaleBoot (an open segment of an earlier boot),
// ErrDamaged, ErrCorrupt (what is read does not verify: nothing of it is returned).
func (s *Store) Read(id storage.SegmentID, from storage.Offset, limit storage.End, maxBytes int, alloc func(n int) []byte) ([]Batch, error) {
	r := s.lookup(id)
	if r == nil {
		return s.readSealed(id, from, limit, maxBytes, alloc)
	}
	r.ioMu.RLock()
	defer r.ioMu.RUnlock()
	r.mu.Lock()
	src, damaged, stale, dropped := source{r.file, r.tally}, r.m.Damaged(), r.m.Unverified(), r.m.State() == replication.StateDropped
	r.mu.Unlock()
	switch {
	case dropped:
		return nil, fmt.Errorf("read %s: %w", id, storage.ErrUnknownSegment)
	case damaged != nil:
		return nil, fmt.Errorf("read %s: %w: %w", id, storage.ErrDamaged, damaged)
	case stale:
		return nil, fmt.Errorf("read %s: %w", id, storage.ErrStaleBoot)
	case src.f == nil: // sealed since
		return s.readSealed(id, from, limit, maxBytes, alloc)
	}
	return r.hints.read(id, src, from, limit, maxBytes, alloc)
}

func (s *Store) readSealed(id storage.SegmentID, from storage.Offset, limit storage.End, maxBytes int, alloc func(n int) []byte) ([]Batch, error) {
	f, err := s.sealed.get(s, id)
	if err != nil {
		return nil, fmt.Errorf("read: %w", err)
	}
	defer f.release()
	return f.hints.read(id, source{f.file, f.tally}, from, limit, maxBytes, alloc)
}

// hints remember where the last reads ended, so that a reader that goes on finds its place without searching.
type hints struct {
	mu   sync.Mutex
	ring [16]hint
	next int
}

type hint struct {
	offset storage.Offset
	pos    int64
}

func (h *hints) find(o storage.Offset) (int64, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, e := range h.ring {
		if e.pos > 0 && e.offset == o {
			return e.pos, true
		}
	}
	return 0, false
}

func (h *hints) add(o storage.Offset, pos int64) {
	h.mu.Lock()
	h.ring[h.next] = hint{o, pos}
	h.next = (h.next + 1) % len(h.ring)
	h.mu.Unlock()
}

func (h *hints) forget() {
	h.mu.Lock()
	h.ring = [len(h.ring)]hint{}
	h.mu.Unlock()
}

func (h *hints) read(id storage.SegmentID, src source, from storage.Offset, limit storage.End, maxBytes int, alloc func(n int) []byte) ([]Batch, error) {
	t := &src.tally
	limit = min(limit, t.End)
	switch {
	case from < t.Base || !t.End.Holds(from) && storage.EndBefore(from) != t.End:
		return nil, fmt.Errorf("read %s at %d: it holds %d to %d: %w", id, from, t.Base, t.End, storage.ErrBeyondEnd)
	case !limit.Holds(from):
		return nil, nil
	}
	pos, ok := h.find(from)
	if !ok {
		pos = t.Seek(from).Pos
	}
	if alloc == nil {
		alloc = func(n int) []byte { return make([]byte, n) }
	}
	buf := alloc(int(max(min(int64(maxBytes), t.Pos-pos), batch.HeaderSize)))
	if buf == nil {
		return nil, fmt.Errorf("read %s: no memory for a page: %w", id, storage.ErrOverloaded)
	}
	for {
		got, next, need, err := collect(src.f, t, pos, from, limit, buf, nil)
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", id, err)
		}
		if len(got) > 0 {
			last := got[len(got)-1].Header
			h.add(last.End().Next(), next)
			return got, nil
		}
		if need > len(buf) {
			if buf = alloc(need); buf == nil {
				return nil, fmt.Errorf("read %s: no memory for a page: %w", id, storage.ErrOverloaded)
			}
		} else if next == pos {
			return nil, nil
		}
		pos = next
	}
}

// collect reads once into buf from pos and returns the batches in it that reach beyond from and end at or below limit. next is the
// position behind the last batch it looked at; need is the size of a batch at next that buf is too small for.
func collect(f vfs.File, t *segment.Tally, pos int64, from storage.Offset, limit storage.End, buf []byte, out []Batch) (_ []Batch, next int64, need int, err error) {
	n, err := f.ReadAt(buf[:min(int64(len(buf)), t.Pos-pos)], pos)
	if err != nil && !errors.Is(err, io.EOF) {
		return out, pos, 0, fmt.Errorf("at byte %d: %w", pos, err)
	}
	b := buf[:n]
	for {
		if len(b) < batch.HeaderSize {
			return out, pos, batch.HeaderSize, nil
		}
		h, err := batch.ParseHeader(b)
		if err != nil {
			return damaged(out, pos, err)
		}
		size := h.Size()
		if size > len(b) {
			return out, pos, size, nil
		}
		if h.End() > limit {
			return out, pos, 0, nil
		}
		if h.End() > storage.EndBefore(from) {
			if _, err := batch.Verify(b[:size]); err != nil {
				return damaged(out, pos, err)
			}
			out = append(out, Batch{h, b[:size:size]})
		}
		b, pos = b[size:], pos+int64(size)
		if h.End() == limit {
			return out, pos, 0, nil // what follows is not ours to look at
		}
	}
}

// damaged ends a collect at a batch that does not verify: what lies before it is given out, and the next read meets the damage.
func damaged(out []Batch, pos int64, why error) ([]Batch, int64, int, error) {
	if len(out) > 0 {
		return out, pos, 0, nil
	}
	return nil, pos, 0, &segment.Damage{Pos: pos, Reason: why}
}

// OffsetAt returns the first offset of the segment whose batch was appended at or after at, or the segment's end. It reads headers only.
func (s *Store) OffsetAt(id storage.SegmentID, at storage.Time) (storage.Offset, error) {
	r := s.lookup(id)
	if r == nil {
		f, err := s.sealed.get(s, id)
		if err != nil {
			return 0, fmt.Errorf("find time: %w", err)
		}
		defer f.release()
		return offsetAt(source{f.file, f.tally}, at)
	}
	r.ioMu.RLock()
	defer r.ioMu.RUnlock()
	r.mu.Lock()
	src, stale := source{r.file, r.tally}, r.m.Unverified() || r.m.Damaged() != nil
	r.mu.Unlock()
	if stale || src.f == nil {
		return 0, fmt.Errorf("find time in %s: %w", id, storage.ErrStaleBoot)
	}
	return offsetAt(src, at)
}

func offsetAt(src source, at storage.Time) (storage.Offset, error) {
	pos := src.tally.SeekTime(at).Pos
	var b [batch.HeaderSize]byte
	for pos < src.tally.Pos {
		if _, err := src.f.ReadAt(b[:], pos); err != nil && !errors.Is(err, io.EOF) {
			return 0, fmt.Errorf("at byte %d: %w", pos, err)
		}
		h, err := batch.ParseHeader(b[:])
		if err != nil {
			return 0, &segment.Damage{Pos: pos, Reason: err}
		}
		if h.AppendTime >= at {
			return h.Base, nil
		}
		pos += int64(h.Size())
	}
	return src.tally.End.Next(), nil
}

// Watch sends on c, without blocking, whenever more of the segment becomes readable or its state changes, until the returned function is
// called. A sealed segment never changes: watching it does nothing.
func (s *Store) Watch(id storage.SegmentID, c chan<- struct{}) (cancel func()) {
	r := s.lookup(id)
	if r == nil {
		return func() {}
	}
	return s.watch(r, c)
}

func (s *Store) watch(r *replica, c chan<- struct{}) (cancel func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.readers == nil {
		r.readers = map[chan<- struct{}]int{}
	}
	r.readers[c]++
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.readers[c]--; r.readers[c] == 0 {
			delete(r.readers, c)
		}
	}
}

// wake tells everyone who watches the replica. Called with mu held.
func (r *replica) wake() {
	for c := range r.readers {
		select {
		case c <- struct{}{}:
		default:
		}
	}
}

// maxSealedFiles bounds the sealed files that are held open with their index in memory (some 100 kB for 256 MiB).
const maxSealedFiles = 128

// sealedFile is an open sealed segment.
type sealedFile struct {
	hints  hints
	id     storage.SegmentID
	header segment.Header
	tally  segment.Tally
	file   vfs.File
	cache  *sealedCache
	refs   int // guarded by cache.mu; the cache holds one itself
}

// sealedCache keeps the sealed files that were read last.
type sealedCache struct {
	mu    sync.Mutex
	files map[storage.SegmentID]*list.Element
	order list.List // of *sealedFile, newest first
	drops uint64    // calls of drop: a file opened before one may be the dropped one
}

// get opens a sealed segment or finds it open. The caller calls release.
func (c *sealedCache) get(s *Store, id storage.SegmentID) (*sealedFile, error) {
	c.mu.Lock()
	if e := c.files[id]; e != nil {
		c.order.MoveToFront(e)
		f := e.Value.(*sealedFile)
		f.refs++
		c.mu.Unlock()
		return f, nil
	}
	drops := c.drops
	c.mu.Unlock()
	f, err := s.openSealed(id)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	f.cache, f.refs = c, 1
	if c.files == nil {
		c.files = map[storage.SegmentID]*list.Element{}
	}
	if c.files[id] != nil || c.drops != drops { // this one lives until its release
		return f, nil
	}
	f.refs = 2
	c.files[id] = c.order.PushFront(f)
	if c.order.Len() > maxSealedFiles {
		c.evict(c.order.Back())
	}
	return f, nil
}

func (c *sealedCache) evict(e *list.Element) {
	f := c.order.Remove(e).(*sealedFile)
	delete(c.files, f.id)
	f.unref()
}

func (f *sealedFile) unref() {
	if f.refs--; f.refs == 0 {
		_ = f.file.Close() // opened for reading only: there is nothing to lose
	}
}

func (f *sealedFile) release() {
	f.cache.mu.Lock()
	defer f.cache.mu.Unlock()
	f.unref()
}

func (c *sealedCache) drop(id storage.SegmentID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.drops++
	if e := c.files[id]; e != nil {
		c.evict(e)
	}
}

func (c *sealedCache) close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.order.Len() > 0 {
		c.evict(c.order.Back())
	}
	return nil
}

// openSealed opens the file of a segment that is not live. Its footer must be whole; RebuildIndex mends one that is not. A file with nothing
// behind its header is of an open that failed: storage.ErrUnknownSegment, as if it were not there.
func (s *Store) openSealed(id storage.SegmentID) (*sealedFile, error) {
	name := fileName(id)
	f, err := s.fs.Open(name)
	if vfs.IsNotExist(err) {
		return nil, fmt.Errorf("segment %s: %w", id, storage.ErrUnknownSegment)
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", name, err)
	}
	sf, err := readSealedFile(f, id)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open %s: %w", name, err), f.Close())
	}
	return sf, nil
}

func readSealedFile(f vfs.File, id storage.SegmentID) (*sealedFile, error) {
	h, raw, err := segment.ReadHeader(f)
	if err != nil {
		return nil, err
	}
	if h.ID != id {
		return nil, fmt.Errorf("file holds segment %s: %w", h.ID, storage.ErrCorrupt)
	}
	size, err := f.Size()
	if err != nil {
		return nil, err
	}
	if size <= int64(len(raw)) {
		return nil, fmt.Errorf("segment %s was never opened: %w", id, storage.ErrUnknownSegment)
	}
	t, err := segment.ReadFooter(f, size, int64(len(raw)))
	if err != nil {
		return nil, err
	}
	if t.Base != h.Base {
		return nil, fmt.Errorf("footer has base %d, header %d: %w", t.Base, h.Base, storage.ErrCorrupt)
	}
	return &sealedFile{id: id, header: h, tally: t, file: f}, nil
}
