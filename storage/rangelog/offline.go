package rangelog

import (
	"errors"
	"fmt"
	"io"
	"path"
	"strings"

	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
	"github.com/malachilog/malachi/storage/journal"
	"github.com/malachilog/malachi/storage/segment"
	"github.com/malachilog/malachi/storage/vfs"
)

// Report is what Verify has read and found intact.
type Report struct {
	Files          int // segment files
	Live, Sealed   int // of them
	Batches        uint64
	Records        uint64 // offsets, control batches included
	Bytes          int64  // of segment files, footers included, and of journaled batches
	JournalEntries uint64
	Nothing        bool // there is neither a journal nor a segment file
}

// FileDamage is the first thing that does not verify. errors.Is(err, storage.ErrCorrupt).
type FileDamage struct {
	Path   string
	Pos    int64
	Reason error
}

func (d *FileDamage) Error() string {
	return fmt.Sprintf("%s is damaged at byte %d: %v", d.Path, d.Pos, d.Reason)
}

// Unwrap gives the reason, and storage.ErrCorrupt whatever it was.
func (d *FileDamage) Unwrap() []error { return []error{storage.ErrCorrupt, d.Reason} }

// damageOf makes a FileDamage of what a reader of segment files answered; a failed read stays what it is.
func damageOf(name string, err error) error {
	var d *segment.Damage
	switch {
	case err == nil:
		return nil
	case errors.As(err, &d):
		return &FileDamage{name, d.Pos, d.Reason}
	case errors.Is(err, storage.ErrCorrupt):
		return &FileDamage{name, 0, err}
	}
	return fmt.Errorf("verify %s: %w", name, err)
}

// expected is what the journal says of a segment's file.
type expected struct {
	noted  bool
	note   journal.SegmentNote
	keep   storage.End // noted: what the file must hold; lower than the note if a cut follows
	sealed bool
	end    storage.End // sealed
	digest storage.Digest
	gone   bool // dropped: a file that is left does not count
	seen   bool
}

// verifier is one run of Verify.
type verifier struct {
	fs   vfs.FS
	fn   func(name string, so Report)
	want map[storage.SegmentID]*expected
	r    Report
}

// Verify reads every batch of every file under segments/ and every journal group that a recovery would replay. It opens nothing for
// writing (INV-R6), trusts no file name, and looks at a folder that nothing else uses. A segment that the journal knows as live is judged by
// it: what the newest checkpoint notes must be in the file, bytes beyond belong to nobody. fn, if not nil, is called after each file. The
// report counts what was verified, also with an error. Errors: *FileDamage is the first damage; others are failed reads, and
// storage.ErrNewerFormat.
func Verify(fsys vfs.FS, fn func(name string, so Report)) (Report, error) {
	v := &verifier{fs: fsys, fn: fn, want: map[storage.SegmentID]*expected{}}
	here, err := v.journal()
	if err == nil {
		err = v.walk(segmentsDir)
	}
	if err == nil {
		err = v.missing()
	}
	v.r.Nothing = err == nil && !here && v.r.Files == 0
	return v.r, err
}

// journal reads the groups and learns what each live file must hold.
func (v *verifier) journal() (here bool, err error) {
	i, err := journal.Inspect(v.fs, journalDir)
	if vfs.IsNotExist(err) {
		return false, nil
	}
	if err != nil {
		return true, damageOf(journalDir, err)
	}
	defer func() { err = errors.Join(err, i.Close()) }()
	for _, n := range i.Note.Segments {
		v.want[n.ID] = &expected{noted: true, note: n, keep: n.End}
	}
	err = i.Replay(func(group uint64, k journal.Kind, id storage.SegmentID, data []byte) error {
		v.r.JournalEntries++
		if err := v.entry(k, id, data); err != nil {
			return fmt.Errorf("group %d, %s of segment %s: %w", group, k, id, err)
		}
		return nil
	})
	return true, damageOf(journalDir, err)
}

func (v *verifier) entry(k journal.Kind, id storage.SegmentID, data []byte) (err error) {
	w := v.want[id]
	if w == nil && k != journal.KindCheckpoint {
		w = &expected{}
		v.want[id] = w
	}
	switch k {
	case journal.KindOpen:
		*w = expected{}
		_, _, err = segment.ParseHeader(data)
	case journal.KindAppend, journal.KindRecovered:
		var h batch.Header
		h, err = batch.Verify(data)
		v.count(&h)
	case journal.KindCut:
		var end storage.End
		if end, err = journal.ParseCut(data); err == nil {
			w.keep = min(w.keep, end)
		}
	case journal.KindSealed:
		w.sealed = true
		w.end, w.digest, err = journal.ParseSealed(data)
	case journal.KindDropped:
		w.gone = true
	}
	return err
}

func (v *verifier) count(h *batch.Header) {
	v.r.Batches++
	v.r.Records += uint64(h.Records)
	v.r.Bytes += int64(h.Size())
}

// walk verifies every file below a directory, whatever it is called.
func (v *verifier) walk(dir string) error {
	entries, err := v.fs.List(dir)
	if vfs.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list %s: %w", dir, err)
	}
	for _, e := range entries {
		name := path.Join(dir, e.Name)
		switch {
		case e.Dir:
			err = v.walk(name)
		case path.Ext(name) == tempSuffix, path.Ext(name) == healSuffix: // of a rebuild or a copy that was cut short
		default:
			err = v.file(name)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (v *verifier) file(name string) (err error) {
	f, err := v.fs.Open(name)
	if err != nil {
		return fmt.Errorf("open %s: %w", name, err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	size, err := f.Size()
	if err != nil {
		return fmt.Errorf("verify %s: %w", name, err)
	}
	id, named := idOf(name)
	w := v.want[id]
	if named && w != nil {
		w.seen = true
		if w.gone || !w.sealed && !w.noted { // dropped, or opened behind the checkpoint: the journal holds all of it
			return nil
		}
	}
	h, raw, err := segment.ReadHeader(f)
	if err != nil {
		return damageOf(name, err)
	}
	if !named || h.ID != id {
		return &FileDamage{name, 0, fmt.Errorf("it holds segment %s, which has another name", h.ID)}
	}
	v.r.Files++
	if w != nil && !w.sealed {
		v.r.Live++
		err = v.live(name, f, segment.NewTally(h, len(raw)), w)
	} else if w != nil || size > int64(len(raw)) { // no more than a header is what an open that failed leaves
		v.r.Sealed++
		err = v.sealed(name, f, size, w)
	}
	if err == nil && v.fn != nil {
		v.fn(name, v.r)
	}
	return err
}

// idOf is the segment that a file of this name must hold.
func idOf(name string) (storage.SegmentID, bool) {
	dir, base := path.Split(name)
	rest, inside := strings.CutPrefix(dir, segmentsDir+"/")
	seq, ok := parseFileName(base)
	if !inside || !ok {
		return storage.SegmentID{}, false
	}
	r, err := storage.ParseRangeID(strings.TrimSuffix(rest, "/"))
	return storage.SegmentID{Range: r, Seq: seq}, err == nil
}

// live judges an open segment's file by the newest checkpoint.
func (v *verifier) live(name string, f vfs.File, t segment.Tally, w *expected) error {
	if w.note.Damaged {
		return &FileDamage{name, 0, errKnownDamage}
	}
	reached := errors.New("reached the end")
	var err error
	if t.End < w.keep {
		err = segment.Scan(f, &t, w.note.Pos, func(h *batch.Header, _ []byte) error {
			v.count(h)
			if w.keep < w.note.End && h.End() >= w.keep {
				return reached
			}
			return nil
		})
	}
	if err != nil && !errors.Is(err, reached) {
		return damageOf(name, err)
	}
	if t.End != w.keep || w.keep == w.note.End && (t.Digest != w.note.Digest || t.Pos != w.note.Pos) {
		return &FileDamage{name, t.Pos, fmt.Errorf("batches end at %d with digest %016x, the checkpoint notes %d and %016x",
			t.End, uint64(t.Digest), w.keep, uint64(w.note.Digest))}
	}
	return nil
}

func (v *verifier) sealed(name string, f vfs.File, size int64, w *expected) error {
	_, t, err := segment.Verify(f, size, func(h *batch.Header, _ []byte) error { v.count(h); return nil })
	if err != nil {
		return damageOf(name, err)
	}
	v.r.Bytes += size - t.Pos
	if w != nil && (t.End != w.end || t.Digest != w.digest) {
		return &FileDamage{name, t.Pos, fmt.Errorf("it ends at %d with digest %016x, sealed were %d and %016x",
			t.End, uint64(t.Digest), w.end, uint64(w.digest))}
	}
	return nil
}

// missing finds segments whose file is not there.
func (v *verifier) missing() error {
	for id, w := range v.want {
		if !w.seen && !w.gone && (w.noted || w.sealed) {
			return &FileDamage{fileName(id), 0, errors.New("the file is missing")}
		}
	}
	return nil
}

// Piece is a part of a segment file, for people: exactly one field beside Pos is set.
type Piece struct {
	Pos    int64
	Header *segment.Header
	Batch  *batch.Header
	Footer *segment.Tally
}

// Dump calls fn with the header of a segment's file, each batch that verifies, and the footer if there is one. It writes nothing. Errors:
// storage.ErrUnknownSegment, *FileDamage behind what it has shown.
func Dump(fsys vfs.FS, id storage.SegmentID, fn func(Piece) error) (err error) {
	name := fileName(id)
	f, err := fsys.Open(name)
	if vfs.IsNotExist(err) {
		return fmt.Errorf("dump %s: %w", id, storage.ErrUnknownSegment)
	}
	if err != nil {
		return fmt.Errorf("dump %s: %w", id, err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	size, err := f.Size()
	if err != nil {
		return fmt.Errorf("dump %s: %w", id, err)
	}
	h, raw, err := segment.ReadHeader(f)
	if err != nil {
		return damageOf(name, err)
	}
	if err := fn(Piece{Header: &h}); err != nil {
		return err
	}
	limit := size
	footer, ferr := segment.ReadFooter(f, size, int64(len(raw)))
	if ferr == nil {
		limit = footer.Pos
	}
	t := segment.NewTally(h, len(raw))
	err = segment.Scan(f, &t, limit, func(b *batch.Header, _ []byte) error {
		return fn(Piece{Pos: t.Pos - int64(b.Size()), Batch: b})
	})
	if err != nil || ferr != nil {
		return damageOf(name, err)
	}
	return fn(Piece{Pos: footer.Pos, Footer: &footer})
}

const tempSuffix = ".tmp"

// RebuildIndex writes the footer of a sealed segment again, from batches that it has verified: byte-equal to the one that was there, or
// not at all (INV-R3). It reports false if nothing was wrong. The new file is written beside the old one, synced, read back, renamed over
// it and its directory synced, so a crash leaves the old or the new one. For a folder that nothing else uses. Errors:
// storage.ErrUnknownSegment, ErrConflict (the journal knows the segment as live), *FileDamage (records do not verify: nothing was written).
func RebuildIndex(fsys vfs.FS, id storage.SegmentID) (bool, error) {
	v := &verifier{fs: fsys, want: map[storage.SegmentID]*expected{}}
	if _, err := v.journal(); err != nil {
		return false, fmt.Errorf("rebuild index of %s: %w", id, err)
	}
	if w := v.want[id]; w != nil && !w.sealed && !w.gone {
		return false, fmt.Errorf("rebuild index of %s: it is not sealed: %w", id, storage.ErrConflict)
	}
	return rebuildIndex(fsys, id)
}

// RebuildIndex is as the function, for a running store.
func (s *Store) RebuildIndex(id storage.SegmentID) (bool, error) {
	if err := s.takeName(id); err != nil {
		return false, fmt.Errorf("rebuild index of %s: %w", id, err)
	}
	defer s.giveName(id)
	if s.lookup(id) != nil {
		return false, fmt.Errorf("rebuild index of %s: it is not sealed: %w", id, storage.ErrConflict)
	}
	if err := s.Failed(); err != nil {
		return false, err
	}
	defer s.sealed.drop(id)
	return rebuildIndex(s.fs, id)
}

func rebuildIndex(fsys vfs.FS, id storage.SegmentID) (done bool, err error) {
	name := fileName(id)
	f, err := fsys.Open(name)
	if vfs.IsNotExist(err) {
		return false, fmt.Errorf("rebuild index of %s: %w", id, storage.ErrUnknownSegment)
	}
	if err != nil {
		return false, fmt.Errorf("rebuild index of %s: %w", id, err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	size, err := f.Size()
	if err != nil {
		return false, fmt.Errorf("rebuild index of %s: %w", id, err)
	}
	h, _, err := segment.Verify(f, size, nil)
	if err == nil && h.ID == id {
		return false, nil
	}
	pos, footer, err := segment.RebuildFooter(f, size, nil)
	if err != nil {
		return false, damageOf(name, err)
	}
	if h, _, err = segment.ReadHeader(f); err != nil || h.ID != id {
		return false, &FileDamage{name, 0, fmt.Errorf("it holds segment %s", h.ID)}
	}
	if err := replaceFooter(fsys, name, f, pos, footer); err != nil {
		return false, fmt.Errorf("rebuild index of %s: %w", id, err)
	}
	return true, nil
}

// replaceFooter makes a file of the first pos bytes of f and footer, and puts it in the place of name once it verifies.
func replaceFooter(fsys vfs.FS, name string, f vfs.File, pos int64, footer []byte) (err error) {
	temp := name + tempSuffix
	if err := ignoreMissing(fsys.Remove(temp)); err != nil {
		return err
	}
	out, err := fsys.Create(temp)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, ignoreMissing(fsys.Remove(temp)))
		}
	}()
	_, err = io.Copy(io.NewOffsetWriter(out, 0), io.NewSectionReader(f, 0, pos))
	if err == nil {
		_, err = out.WriteAt(footer, pos)
	}
	if err == nil {
		err = out.Sync()
	}
	if err == nil {
		_, _, err = segment.Verify(out, pos+int64(len(footer)), nil)
	}
	if err = errors.Join(err, out.Close()); err != nil {
		return err
	}
	if err := fsys.Rename(temp, name); err != nil {
		return err
	}
	return fsys.SyncDir(path.Dir(name))
}
