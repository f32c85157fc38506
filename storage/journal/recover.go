package journal

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"strconv"
	"strings"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/vfs"
)

const (
	fileSuffix = ".wal"
	tempSuffix = ".tmp"
	// aheadFiles is how many free files the preparer keeps while the cap allows: the spare one, and two to run into.
	aheadFiles = 3
)

// DamageError says that a group which must be there does not verify although a later one does: it was acknowledged and has
// rotted. Nothing was changed. errors.Is(err, storage.ErrCorrupt).
type DamageError struct {
	Missing uint64 // the first group that does not verify
	Newest  uint64 // the newest group that does
}

func (e *DamageError) Error() string {
	return fmt.Sprintf("journal group %d does not verify, but group %d does: acknowledged data is damaged", e.Missing, e.Newest)
}

// Unwrap makes it a storage.ErrCorrupt.
func (e *DamageError) Unwrap() error { return storage.ErrCorrupt }

// Recovered is what Open found. Replay may be called any number of times until the first WriteGroup.
type Recovered struct {
	Note  Note   // of the newest checkpoint; From is 1 and nothing is noted in a new journal
	First uint64 // first group to replay
	Last  uint64 // last one; Last < First: nothing to replay

	id        ID
	fileBytes int64
	places    map[uint64]groupPlace
}

type groupPlace struct {
	file *file
	pos  int64
	size int
}

// Open reads the journal in dir, or makes a new one if dir has no journal file; mustExist refuses the latter. It starts nothing.
// newID is used for a new journal. Errors: storage.ErrNewerFormat (nothing changed), *DamageError, storage.ErrCorrupt.
func Open(fsys vfs.FS, dir string, cfg Config, newID ID, mustExist bool) (*Journal, *Recovered, error) {
	cfg.setDefaults()
	if err := cfg.Validate(); err != nil {
		return nil, nil, err
	}
	j := &Journal{
		cfg: cfg, fs: fsys, dir: dir, id: newID,
		wake: make(chan struct{}, 1), prep: make(chan struct{}, 1), ready: make(chan struct{}, 1),
	}
	r, err := j.open(mustExist)
	if err != nil {
		return nil, nil, errors.Join(err, j.Close())
	}
	return j, r, nil
}

func (j *Journal) open(mustExist bool) (*Recovered, error) {
	names, temps, err := j.list()
	if err != nil && !vfs.IsNotExist(err) {
		return nil, err
	}
	if len(names) == 0 && mustExist {
		return nil, fmt.Errorf("journal %s is missing, though this folder has had one: %w", j.dir, storage.ErrCorrupt)
	}
	// Steps 1 to 4 come before anything is changed.
	r, err := j.read(names, func(name string) (vfs.File, bool, error) { return j.fs.OpenDirect(name) })
	if err != nil {
		return nil, err
	}
	j.cfg.FileBytes = r.fileBytes // a setting changes only new journals: files are recycled among each other
	j.cfg.MaxBytes = max(j.cfg.MaxBytes, 4*r.fileBytes)
	j.cfg.GroupBytes = int(min(int64(j.cfg.GroupBytes), r.fileBytes-blockSize))
	if err := j.fs.MkdirAll(j.dir); err != nil {
		return nil, fmt.Errorf("make %s: %w", j.dir, err)
	}
	if err := j.fs.SyncDir(path.Dir(j.dir)); err != nil {
		return nil, fmt.Errorf("sync parent of %s: %w", j.dir, err)
	}
	for _, name := range temps { // never renamed, so never a journal file
		if err := j.fs.Remove(path.Join(j.dir, name)); err != nil {
			return nil, fmt.Errorf("remove %s: %w", name, err)
		}
	}
	for len(j.free) < 2 { // one to write and the spare one
		err := j.addFile()
		if errors.Is(err, vfs.ErrNoSpace) && len(names) > 0 {
			j.prepErr = fmt.Errorf("no room for another journal file: %w", storage.ErrDiskFull)
			break // what has been kept free for a checkpoint lets recovery end all the same
		}
		if err != nil {
			return nil, err
		}
	}
	return r, nil
}

// read opens the named files and carries out steps 1 to 4 of recovery. It changes no byte.
func (j *Journal) read(names []string, open func(name string) (vfs.File, bool, error)) (*Recovered, error) {
	r := &Recovered{Note: Note{From: 1}, places: map[uint64]groupPlace{}, id: j.id, fileBytes: j.cfg.FileBytes}
	files, err := j.openFiles(r, names, open)
	if err != nil {
		return nil, err
	}
	if err := r.scan(files); err != nil {
		return nil, err
	}
	j.id = r.id
	j.sortOut(r, files)
	return r, nil
}

// list returns the journal files and the unfinished ones, by name.
func (j *Journal) list() (names, temps []string, err error) {
	entries, err := j.fs.List(j.dir)
	if err != nil {
		return nil, nil, fmt.Errorf("list %s: %w", j.dir, err)
	}
	for _, e := range entries {
		switch {
		case strings.HasSuffix(e.Name, fileSuffix):
			n, err := strconv.ParseUint(strings.TrimSuffix(e.Name, fileSuffix), 10, 32)
			if err != nil {
				return nil, nil, fmt.Errorf("journal file name %q: %w", e.Name, storage.ErrCorrupt)
			}
			// Files are numbered without a gap and never removed: a missing number is a file that somebody else removed.
			if n != uint64(j.fileSeq)+1 {
				return nil, nil, fmt.Errorf("journal file %08d%s is missing: %w", j.fileSeq+1, fileSuffix, storage.ErrCorrupt)
			}
			names = append(names, e.Name)
			j.fileSeq = int(n)
		case strings.HasSuffix(e.Name, fileSuffix+tempSuffix):
			temps = append(temps, e.Name)
		}
	}
	return names, temps, nil
}

func (j *Journal) openFiles(r *Recovered, names []string, open func(name string) (vfs.File, bool, error)) ([]*file, error) {
	var files []*file
	for i, name := range names {
		f, direct, err := open(path.Join(j.dir, name))
		if err != nil {
			return nil, fmt.Errorf("open %s: %w", name, err)
		}
		j.stats.Direct = direct
		jf := &file{name: name, f: f, direct: direct, pos: blockSize}
		files = append(files, jf)
		j.inUse = append(j.inUse, jf) // so that Close finds it; sortOut puts it where it belongs
		head := vfs.AlignedBuffer(blockSize)
		if _, err := f.ReadAt(head, 0); err != nil && !errors.Is(err, io.EOF) {
			return nil, fmt.Errorf("read %s: %w", name, err)
		}
		id, size, err := parseFileHeader(head)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		if i == 0 {
			r.id, r.fileBytes = id, size
		}
		if id != r.id || size != r.fileBytes {
			return nil, fmt.Errorf("%s belongs to another journal than %s: %w", name, names[0], storage.ErrCorrupt)
		}
		if got, err := f.Size(); err != nil || got != size {
			return nil, fmt.Errorf("%s has %d bytes, its header says %d: %w", name, got, size, errors.Join(err, storage.ErrCorrupt))
		}
	}
	return files, nil
}

// scan finds every group that verifies, the newest checkpoint among them, and what is to be replayed (steps 2 to 4).
func (r *Recovered) scan(files []*file) error {
	var noteAt, newest uint64
	win := window{buf: vfs.AlignedBuffer(int(min(r.fileBytes, maxGroupBytes)))}
	for _, f := range files {
		win.f, win.n = f.f, 0
		for pos := int64(blockSize); pos < r.fileBytes; {
			b, err := win.group(pos)
			if err != nil {
				return fmt.Errorf("read %s: %w", f.name, err)
			}
			g, ok := parseGroup(b, r.id)
			if !ok {
				pos += blockSize
				continue
			}
			r.places[g.number] = groupPlace{f, pos, g.size}
			newest = max(newest, g.number)
			if g.number > noteAt {
				if err := r.takeNote(g, &noteAt); err != nil {
					return err
				}
			}
			pos += int64(g.size)
		}
	}
	r.First = r.Note.From
	r.Last = r.First - 1
	for r.places[r.Last+1].file != nil {
		r.Last++
	}
	if newest > r.Last && !mutate.On("journal.rot-cut-as-torn") {
		return &DamageError{Missing: r.Last + 1, Newest: newest}
	}
	for n := range r.places { // groups before First are of no use
		if n < r.First {
			delete(r.places, n)
		}
	}
	return nil
}

// window reads a file front to back so that a whole group is in memory at each position.
type window struct {
	f   vfs.File
	buf []byte
	pos int64 // of buf[0]
	n   int
}

// group returns the bytes at pos, as many as the group claims that begins there, if the file has them.
func (w *window) group(pos int64) ([]byte, error) {
	b, err := w.at(pos, blockSize)
	if err != nil {
		return nil, err
	}
	if n := claimedSize(b); n > len(b) {
		return w.at(pos, n)
	}
	return b, nil
}

// at returns the bytes at pos, at least n of them unless the file or the buffer ends before.
func (w *window) at(pos int64, n int) ([]byte, error) {
	if off := pos - w.pos; w.n > 0 && off >= 0 && off+int64(n) <= int64(w.n) {
		return w.buf[off:w.n], nil
	}
	got, err := w.f.ReadAt(w.buf, pos)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	w.pos, w.n = pos, got
	return w.buf[:got], nil
}

// takeNote takes the checkpoint of a group, if there is one in it.
func (r *Recovered) takeNote(g parsedGroup, noteAt *uint64) error {
	return g.each(func(k Kind, _ storage.SegmentID, data []byte) error {
		if k != KindCheckpoint {
			return nil
		}
		n, err := parseNote(data)
		if err == nil && n.From > g.number {
			err = fmt.Errorf("checkpoint in group %d says that replay begins at %d: %w", g.number, n.From, storage.ErrCorrupt)
		}
		if err != nil {
			return err
		}
		r.Note, *noteAt = n, g.number
		return nil
	})
}

// sortOut divides the files into those that hold groups to replay and free ones, and sets where the writer goes on: behind the last group,
// in the same file (step 5).
func (j *Journal) sortOut(r *Recovered, files []*file) {
	j.inUse, j.free, j.current = nil, nil, nil
	for n := r.First; n <= r.Last; n++ {
		p := r.places[n]
		f := p.file
		if f.first == 0 {
			f.first = n
			j.inUse = append(j.inUse, f)
		}
		f.last, f.pos = n, p.pos+int64(p.size)
		j.current = f
	}
	for _, f := range files {
		if f.first == 0 {
			j.free = append(j.free, f)
		}
	}
	j.seq = r.Last
}

// Inspection is a journal that was opened for reading only.
type Inspection struct {
	*Recovered
	Files int // journal files
	j     *Journal
}

// Inspect reads the journal in dir as Open does, steps 1 to 4 of recovery, but opens nothing for writing and changes nothing. The journal
// should not be in use meanwhile: what is being written looks torn. Errors: as Open; fs.ErrNotExist if there is no journal.
func Inspect(fsys vfs.FS, dir string) (*Inspection, error) {
	j := &Journal{fs: fsys, dir: dir}
	j.cfg.setDefaults()
	names, _, err := j.list()
	if err != nil {
		return nil, err
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("journal %s has no file: %w", dir, fs.ErrNotExist)
	}
	r, err := j.read(names, func(name string) (vfs.File, bool, error) {
		f, err := fsys.Open(name)
		return f, false, err
	})
	if err != nil {
		return nil, errors.Join(err, j.Close())
	}
	return &Inspection{Recovered: r, Files: len(names), j: j}, nil
}

// Close closes the files.
func (i *Inspection) Close() error { return i.j.Close() }

// Replay calls fn for every entry of the groups First..Last, in order. data is fn's only until it returns. A group that verified
// at Open and does not now is damage.
func (r *Recovered) Replay(fn func(group uint64, k Kind, id storage.SegmentID, data []byte) error) error {
	largest := 0
	for _, p := range r.places {
		largest = max(largest, p.size)
	}
	buf := vfs.AlignedBuffer(largest)
	for n := r.First; n <= r.Last; n++ {
		p := r.places[n]
		if _, err := p.file.f.ReadAt(buf[:p.size], p.pos); err != nil && !errors.Is(err, io.EOF) {
			return fmt.Errorf("read %s: %w", p.file.name, err)
		}
		g, ok := parseGroup(buf[:p.size], r.id)
		if !ok || g.number != n {
			return &DamageError{Missing: n, Newest: r.Last}
		}
		err := g.each(func(k Kind, id storage.SegmentID, data []byte) error { return fn(n, k, id, data) })
		if err != nil {
			return err
		}
	}
	return nil
}

// ID is the journal's random id.
func (j *Journal) ID() ID { return j.id }

// prepare keeps files ahead of the writer until ctx ends.
func (j *Journal) prepare(ctx context.Context) {
	for {
		for ctx.Err() == nil && j.Prepare() {
		}
		select {
		case <-j.prep:
		case <-ctx.Done():
			return
		}
	}
}

// Prepare makes one more free file if there should be one, and reports whether it did and more may be needed.
func (j *Journal) Prepare() bool {
	j.mu.Lock()
	total := int64(len(j.inUse) + len(j.free))
	want := len(j.free) < aheadFiles && j.failed == nil && !j.closed
	want = want && total*j.cfg.FileBytes < j.cfg.MaxBytes+j.cfg.FileBytes // the spare file comes on top
	if !want {
		j.prepErr = nil
	}
	j.mu.Unlock()
	if !want {
		return false
	}
	err := j.addFile()
	if err != nil && !errors.Is(err, vfs.ErrNoSpace) {
		j.Fail(err)
		return false
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.prepErr = nil
	if err != nil {
		j.prepErr = fmt.Errorf("no room for another journal file: %w", storage.ErrDiskFull)
	}
	return err == nil
}

// addFile writes a new file in full, makes it and its name durable, and adds it to the free ones. A failure leaves nothing that
// recovery could take for a journal file. A full disk is not final: no entry was in it.
func (j *Journal) addFile() (err error) {
	// One at a time: Open, and then the preparer. A number is taken by the rename, so that a failure before it leaves no gap.
	name := fmt.Sprintf("%08d%s", j.fileSeq+1, fileSuffix)
	temp := path.Join(j.dir, name+tempSuffix)
	if err := j.fill(temp); err != nil {
		return fmt.Errorf("prepare %s: %w", name, errors.Join(err, ignoreMissing(j.fs.Remove(temp))))
	}
	full := path.Join(j.dir, name)
	if err := j.fs.Rename(temp, full); err != nil {
		return fmt.Errorf("prepare %s: %w", name, err)
	}
	j.fileSeq++
	if err := j.fs.SyncDir(j.dir); err != nil {
		return fmt.Errorf("prepare %s: %w", name, err)
	}
	f, direct, err := j.fs.OpenDirect(full)
	if err != nil {
		return fmt.Errorf("prepare %s: %w", name, err)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.stats.Direct = direct
	j.stats.Barriers += 2
	j.free = append(j.free, &file{name: name, f: f, direct: direct, pos: blockSize})
	return nil
}

func ignoreMissing(err error) error {
	if vfs.IsNotExist(err) {
		return nil
	}
	return err
}

func (j *Journal) fill(name string) (err error) {
	f, err := j.fs.Create(name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := f.Allocate(0, j.cfg.FileBytes); err != nil {
		return err
	}
	chunk := vfs.AlignedBuffer(int(min(1<<20, j.cfg.FileBytes)))
	encodeFileHeader(chunk[:blockSize], j.id, j.cfg.FileBytes)
	for pos := int64(0); pos < j.cfg.FileBytes; pos += int64(len(chunk)) {
		if rest := j.cfg.FileBytes - pos; rest < int64(len(chunk)) {
			chunk = chunk[:rest]
		}
		if _, err := f.WriteAt(chunk, pos); err != nil {
			return err
		}
		if pos == 0 {
			clear(chunk[:blockSize])
		}
		if next := pos + int64(len(chunk)); next%fillStep == 0 && next < j.cfg.FileBytes {
			if err := f.Sync(); err != nil {
				return err
			}
		}
	}
	return f.Sync()
}

// fillStep is how much of a new file is written before it is synced: barriers of the groups wait behind no more than that.
const fillStep = 4 << 20
