package rangelog

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
	"github.com/malachilog/malachi/storage/segment"
	"github.com/malachilog/malachi/storage/vfs"
)

// Recorded is what the metadata says of a sealed segment.
type Recorded struct {
	End    storage.End
	Bytes  int64 // header and batches
	Digest storage.Digest
}

// healSuffix is of a copy that has not proved intact yet.
const healSuffix = ".heal"

// CheckCopy reads the whole copy of a sealed segment and compares it with the record. pace, if not nil, is called for each batch and may end
// the reading with an error. It writes nothing. Errors: storage.ErrUnknownSegment (no copy is here), *FileDamage (it does not verify, is short, or is
// of other bytes than recorded), pace's.
func (s *Store) CheckCopy(id storage.SegmentID, want Recorded, pace func(n int) error) error {
	name := fileName(id)
	f, err := s.fs.Open(name)
	if vfs.IsNotExist(err) {
		return fmt.Errorf("check copy of %s: %w", id, storage.ErrUnknownSegment)
	}
	if err != nil {
		return fmt.Errorf("check copy of %s: %w", id, err)
	}
	defer func() { _ = f.Close() }() // opened for reading only
	size, err := f.Size()
	if err != nil {
		return fmt.Errorf("check copy of %s: %w", id, err)
	}
	var stopped error
	h, t, err := segment.Verify(f, size, func(_ *batch.Header, raw []byte) error {
		if pace != nil {
			stopped = pace(len(raw))
		}
		return stopped
	})
	switch {
	case stopped != nil:
		return stopped
	case err != nil:
		return damageOf(name, err)
	case h.ID != id || t.End != want.End || t.Pos != want.Bytes || t.Digest != want.Digest:
		return &FileDamage{name, 0, fmt.Errorf("it holds %s to end %d with digest %016x, recorded are %s, %d and %016x", h.ID, t.End,
			uint64(t.Digest), id, want.End, uint64(want.Digest))}
	}
	return nil
}

// ReadRaw returns up to n bytes of a sealed copy from pos on, of its header and batches, and how many there are in all. They are not verified:
// whoever copies them proves the whole.
func (s *Store) ReadRaw(id storage.SegmentID, pos int64, n int) (data []byte, total int64, err error) {
	f, err := s.sealed.get(s, id)
	if err != nil {
		return nil, 0, fmt.Errorf("read raw: %w", err)
	}
	defer f.release()
	total = f.tally.Pos
	if pos < 0 || pos > total {
		return nil, total, fmt.Errorf("read raw %s at %d of %d bytes: %w", id, pos, total, storage.ErrBeyondEnd)
	}
	data = make([]byte, min(int64(n), total-pos))
	if _, err := f.file.ReadAt(data, pos); err != nil && !errors.Is(err, io.EOF) {
		return nil, total, fmt.Errorf("read raw %s: %w", id, err)
	}
	return data, total, nil
}

// Install puts a proved copy of a sealed segment here: fill writes its header and batches under another name; they are synced, read back, and
// compared with the record; the footer is written; and only then does the file get its name, durably (INV-R12). A copy that is here and verifies is
// left as it is (INV-R13), one that does not is replaced, also one that the journal still knows as live. On error nothing has changed. Errors:
// storage.ErrDiskFull, ErrStorageFailed, ErrUnavailable (another call is at the segment), *FileDamage (what fill wrote is not as recorded), fill's.
func (s *Store) Install(ctx context.Context, id storage.SegmentID, want Recorded, fill func(io.WriterAt) error) error {
	if err := s.Failed(); err != nil {
		return err
	}
	if s.diskFull.Load() {
		return fmt.Errorf("install %s: %w", id, storage.ErrDiskFull)
	}
	if err := s.takeName(id); err != nil {
		return fmt.Errorf("install %s: %w", id, err)
	}
	defer s.giveName(id)
	if s.CheckCopy(id, want, nil) == nil && !mutate.On("rangelog.install-over-proved") {
		return nil
	}
	if err := s.install(ctx, id, want, fill); err != nil {
		return fmt.Errorf("install %s: %w", id, err)
	}
	return nil
}

func (s *Store) install(ctx context.Context, id storage.SegmentID, want Recorded, fill func(io.WriterAt) error) (err error) {
	name := fileName(id)
	temp := name + healSuffix
	s.dirMu.Lock()
	err = errors.Join(s.fs.MkdirAll(path.Dir(name)), ignoreMissing(s.fs.Remove(temp)))
	s.dirMu.Unlock()
	if err != nil {
		return s.judge(err)
	}
	if err := s.prove(temp, id, want, fill); err != nil {
		return errors.Join(err, ignoreMissing(s.fs.Remove(temp)))
	}
	// The new copy has proved intact: now the old one, if the journal knows it, may go (INV-R1).
	if r := s.lookup(id); r != nil {
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
	}
	if err := s.fs.Rename(temp, name); err != nil {
		return s.judge(err)
	}
	s.sealed.drop(id)
	return s.judge(s.syncNames(name))
}

// prove writes a copy under another name and compares what is on the disk then with the record.
func (s *Store) prove(temp string, id storage.SegmentID, want Recorded, fill func(io.WriterAt) error) (err error) {
	f, err := s.fs.Create(temp)
	if err != nil {
		return s.judge(err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := f.Allocate(0, want.Bytes); err != nil {
		return s.judge(err)
	}
	if err := fill(f); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return s.judge(err)
	}
	h, raw, err := segment.ReadHeader(f)
	if err != nil {
		return damageOf(temp, err)
	}
	t := segment.NewTally(h, len(raw))
	if err := segment.Scan(f, &t, want.Bytes, nil); err != nil && !mutate.On("rangelog.install-unproved") {
		return damageOf(temp, err)
	}
	if (h.ID != id || t.End != want.End || t.Pos != want.Bytes || t.Digest != want.Digest) && !mutate.On("rangelog.install-unproved") {
		return &FileDamage{temp, 0, fmt.Errorf("end %d and digest %016x, recorded are %d and %016x", t.End, uint64(t.Digest), want.End, uint64(want.Digest))}
	}
	footer := t.Footer()
	if _, err := f.WriteAt(footer, want.Bytes); err != nil {
		return s.judge(err)
	}
	if err := f.Truncate(want.Bytes + int64(len(footer))); err != nil {
		return s.judge(err)
	}
	return s.judge(f.Sync())
}
