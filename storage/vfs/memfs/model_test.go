package memfs

import (
	"bytes"
	"fmt"
	"hash/fnv"
	"io"
	"maps"
	"path"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// The model is a second, dumb implementation: flat byte slices, everything copied, nothing shared.
type modelFile struct {
	vol, dur []byte
	dirty    map[int64]bool // sectors
	sizes    []modelSize
}

type modelSize struct {
	size   int64
	growth bool
}

type modelEntry struct {
	what     string
	name, to string
	file     int
}

type modelDir struct {
	now, durable map[string]int
	pending      []modelEntry
}

type model struct {
	files []*modelFile
	dirs  map[string]*modelDir // a fixed set, durable from the start
}

func setLen(b []byte, n int64) []byte {
	if n <= int64(len(b)) {
		return slices.Clone(b[:n])
	}
	return append(slices.Clone(b), make([]byte, n-int64(len(b)))...)
}

func (f *modelFile) resize(n int64) {
	grow := n > int64(len(f.vol))
	f.vol = setLen(f.vol, n)
	if !grow {
		for s := range f.dirty {
			if s*512 >= n {
				delete(f.dirty, s)
			}
		}
	}
	if k := len(f.sizes); grow && k > 0 && f.sizes[k-1].growth {
		f.sizes[k-1].size = n
	} else {
		f.sizes = append(f.sizes, modelSize{n, grow})
	}
}

func (f *modelFile) write(p []byte, off int64) {
	if end := off + int64(len(p)); end > int64(len(f.vol)) {
		f.resize(end)
	}
	copy(f.vol[off:], p)
	for s := off / 512; s*512 < off+int64(len(p)); s++ {
		f.dirty[s] = true
	}
}

func (f *modelFile) sync() {
	f.dur, f.dirty, f.sizes = slices.Clone(f.vol), map[int64]bool{}, nil
}

// crashed is the durable bytes, then the kept lengths in order, then the kept sectors.
func (f *modelFile) crashed(keepSize func(size int64, nth int) bool, keepSector func(int64) bool) []byte {
	img := slices.Clone(f.dur)
	for i, s := range f.sizes {
		if keepSize(s.size, i) {
			img = setLen(img, s.size)
		}
	}
	for s := range f.dirty {
		if !keepSector(s) {
			continue
		}
		var sector [512]byte
		if s*512 < int64(len(f.vol)) {
			copy(sector[:], f.vol[s*512:])
		}
		if s*512 < int64(len(img)) {
			copy(img[s*512:], sector[:])
		}
	}
	return img
}

func (m *model) entry(d, what, name, to string, file int) {
	dir := m.dirs[d]
	e := modelEntry{what, name, to, file}
	dir.pending = append(dir.pending, e)
	e.apply(dir.now)
}

func (e modelEntry) apply(to map[string]int) {
	switch e.what {
	case "link":
		to[e.name] = e.file
	case "unlink":
		delete(to, e.name)
	case "rename":
		delete(to, e.name)
		to[e.to] = e.file
	}
}

func newModel(dirs ...string) *model {
	m := &model{dirs: map[string]*modelDir{}}
	for _, d := range dirs {
		m.dirs[d] = &modelDir{now: map[string]int{}, durable: map[string]int{}}
	}
	return m
}

// coin is a choice that depends on the seed and the unit only.
func coin(seed uint64, u Unit) bool {
	h := fnv.New64a()
	_, _ = fmt.Fprintf(h, "%d/%s/%d/%d", seed, u, u.ino, u.seq)
	v := h.Sum64()
	return (v^v>>29)*0x9e3779b97f4a7c15>>63 == 1
}

type machine struct {
	t     *rapid.T
	fs    *FS
	m     *model
	tag   byte
	frees []frozen // file systems that must not change any more
}

type frozen struct {
	fs   *FS
	dump string
}

var (
	testDirs  = []string{".", "d", "d/e"}
	testNames = []string{"a", "b", "c"}
)

func (s *machine) names(pick bool) (dir, base string, file int, ok bool) {
	dir = rapid.SampledFrom(testDirs).Draw(s.t, "dir")
	base = rapid.SampledFrom(testNames).Draw(s.t, "base")
	file, ok = s.m.dirs[dir].now[base]
	if !pick || ok {
		return dir, base, file, ok
	}
	for _, d := range testDirs { // rather an existing one
		for _, b := range testNames {
			if file, ok = s.m.dirs[d].now[b]; ok {
				return d, b, file, true
			}
		}
	}
	return dir, base, 0, false
}

func must(t interface{ Fatalf(string, ...any) }, err error) {
	if err != nil {
		t.Fatalf("unexpected: %v", err)
	}
}

func (s *machine) step() {
	switch rapid.SampledFrom([]string{"create", "write", "write", "write", "direct", "truncate", "sync", "syncdir", "syncfs",
		"rename", "remove", "crash", "reopen"}).Draw(s.t, "op") {
	case "create":
		dir, base, _, exists := s.names(false)
		h, err := s.fs.Create(path.Join(dir, base))
		if exists != (err != nil) {
			s.t.Fatalf("create %s/%s: exists %v, err %v", dir, base, exists, err)
		}
		if err == nil {
			must(s.t, h.Close())
			s.m.files = append(s.m.files, &modelFile{dirty: map[int64]bool{}})
			s.m.entry(dir, "link", base, "", len(s.m.files)-1)
		}
	case "write", "direct":
		s.write(rapid.Bool().Draw(s.t, "direct"))
	case "truncate":
		dir, base, file, ok := s.names(true)
		if !ok {
			return
		}
		f := s.m.files[file]
		n := rapid.Int64Range(0, 20000).Draw(s.t, "size")
		h, err := s.fs.OpenWrite(path.Join(dir, base))
		must(s.t, err)
		must(s.t, h.Truncate(n))
		must(s.t, h.Close())
		shrunk := n < int64(len(f.vol))
		if n != int64(len(f.vol)) {
			f.resize(n)
		}
		if shrunk && n%512 != 0 { // the sector that the cut goes through gets a new tail
			f.dirty[n/512] = true
		}
	case "sync":
		if dir, base, file, ok := s.names(true); ok {
			h, err := s.fs.Open(path.Join(dir, base))
			must(s.t, err)
			must(s.t, h.Sync())
			must(s.t, h.Close())
			s.m.files[file].sync()
		}
	case "syncdir":
		dir := rapid.SampledFrom(testDirs).Draw(s.t, "dir")
		must(s.t, s.fs.SyncDir(dir))
		s.m.dirs[dir].durable, s.m.dirs[dir].pending = maps.Clone(s.m.dirs[dir].now), nil
	case "syncfs":
		must(s.t, s.fs.SyncFS("."))
		for _, d := range s.m.dirs {
			d.durable, d.pending = maps.Clone(d.now), nil
		}
		for _, f := range s.m.files {
			f.sync()
		}
	case "rename":
		s.rename()
	case "remove":
		if dir, base, file, ok := s.names(true); ok {
			must(s.t, s.fs.Remove(path.Join(dir, base)))
			s.m.entry(dir, "unlink", base, "", file)
		}
	case "crash":
		s.crash(rapid.Uint64().Draw(s.t, "seed"), false)
	case "reopen":
		s.crash(rapid.Uint64().Draw(s.t, "seed"), true)
	}
	s.compareNow()
}

func (s *machine) write(direct bool) {
	dir, base, file, ok := s.names(true)
	if !ok {
		return
	}
	f := s.m.files[file]
	off, n := rapid.Int64Range(0, 16000).Draw(s.t, "off"), rapid.Int64Range(1, 9000).Draw(s.t, "len")
	if direct {
		off, n = off/4096*4096, (n/4096+1)*4096
	}
	s.tag++
	p := bytes.Repeat([]byte{s.tag | 1}, int(n)) // never zero
	if direct {
		h, isDirect, err := s.fs.OpenDirect(path.Join(dir, base))
		must(s.t, err)
		if !isDirect {
			s.t.Fatalf("not direct")
		}
		_, err = h.WriteAt(alignedCopy(p), off)
		must(s.t, err)
		must(s.t, h.Close())
		f.write(p, off)
		// The write brings the length, and its own sectors; the rest stays as it is.
		for _, z := range f.sizes {
			f.dur = setLen(f.dur, z.size)
		}
		f.sizes = nil
		copy(f.dur[off:], p)
		for i := off / 512; i < (off+n)/512; i++ {
			delete(f.dirty, i)
		}
		return
	}
	h, err := s.fs.OpenWrite(path.Join(dir, base))
	must(s.t, err)
	_, err = h.WriteAt(p, off)
	must(s.t, err)
	must(s.t, h.Close())
	f.write(p, off)
}

func (s *machine) rename() {
	dir, base, file, ok := s.names(true)
	if !ok {
		return
	}
	to, toBase, target, exists := s.names(false)
	must(s.t, s.fs.Rename(path.Join(dir, base), path.Join(to, toBase)))
	switch {
	case exists && target == file: // itself, or a second name of the same file
	case dir == to:
		s.m.entry(dir, "rename", base, toBase, file)
	default:
		s.m.entry(to, "link", toBase, "", file)
		s.m.entry(dir, "unlink", base, "", file)
	}
}

// crash compares a clone with the model's image; with move the test goes on in the clone.
func (s *machine) crash(seed uint64, move bool) {
	units := s.fs.Unsynced()
	keep := map[Unit]bool{}
	for _, u := range units {
		if _, twice := keep[u]; twice {
			s.t.Fatalf("unit twice: %s", u)
		}
		keep[u] = coin(seed, u)
	}
	asked := 0
	clone := s.fs.CrashClone(func(u Unit) bool {
		if asked >= len(units) || units[asked] != u {
			s.t.Fatalf("asked for %s as number %d, listed %v", u, asked, units)
		}
		asked++
		return keep[u]
	})
	if asked != len(units) {
		s.t.Fatalf("asked for %d of %d units", asked, len(units))
	}
	img := s.modelCrash(units, keep)
	compare(s.t, clone, img)
	if got := clone.Unsynced(); len(got) != 0 {
		s.t.Fatalf("the clone has unsynced units: %v", got)
	}
	again := s.fs.CrashClone(func(u Unit) bool { return keep[u] })
	if a, b := clone.Dump(), again.Dump(); a != b {
		s.t.Fatalf("two clones differ:\n%s\n%s", a, b)
	}
	if move {
		s.frees = append(s.frees, frozen{s.fs, s.fs.Dump()})
		s.fs, s.m = clone, img
	} else {
		s.frees = append(s.frees, frozen{clone, clone.Dump()})
	}
}

// modelCrash applies the kept units. Units are matched to the model's by the order inside each file and directory.
func (s *machine) modelCrash(units []Unit, keep map[Unit]bool) *model {
	byIno := map[uint64]int{} // inode -> model file, through any state of any directory
	note := func(n *inode, file int) { byIno[n.id] = file }
	s.fs.mu.Lock()
	for d, dir := range s.m.dirs {
		n, err := s.fs.find(d)
		must(s.t, err)
		for b, file := range dir.now {
			note(n.entries[b], file)
		}
		for b, file := range dir.durable {
			note(n.durable[b], file)
		}
		for i, e := range dir.pending {
			note(n.pending[i].ino, e.file)
		}
	}
	s.fs.mu.Unlock()
	sizes, sectors, entries := map[int][]bool{}, map[int]map[int64]bool{}, map[uint64][]bool{}
	for _, u := range units {
		switch u.Kind {
		case UnitEntry:
			entries[u.ino] = append(entries[u.ino], keep[u])
		case UnitSize:
			sizes[byIno[u.ino]] = append(sizes[byIno[u.ino]], keep[u])
		case UnitSector:
			f, known := byIno[u.ino]
			if !known || !s.m.files[f].dirty[u.Index] {
				s.t.Fatalf("%s is a unit, but the sector was not written (file %d, %v)", u, f, known)
			}
			if sectors[f] == nil {
				sectors[f] = map[int64]bool{}
			}
			sectors[f][u.Index] = keep[u]
		}
	}
	img := newModel(testDirs...)
	for i, f := range s.m.files {
		if slices.Contains(slices.Collect(maps.Values(byIno)), i) && (len(sectors[i]) != len(f.dirty) || len(sizes[i]) != len(f.sizes)) {
			s.t.Fatalf("file %d: %d sectors and %d lengths are units, want %d and %d", i, len(sectors[i]), len(sizes[i]), len(f.dirty), len(f.sizes))
		}
		b := f.crashed(
			func(_ int64, nth int) bool { return nth < len(sizes[i]) && sizes[i][nth] },
			func(sec int64) bool { return sectors[i][sec] })
		img.files = append(img.files, &modelFile{vol: b, dur: slices.Clone(b), dirty: map[int64]bool{}})
	}
	for d, dir := range s.m.dirs {
		s.fs.mu.Lock()
		n, _ := s.fs.find(d)
		s.fs.mu.Unlock()
		kept := entries[n.id]
		names := maps.Clone(dir.durable)
		for i, e := range dir.pending {
			if kept[i] {
				e.apply(names)
			}
		}
		img.dirs[d].now, img.dirs[d].durable = names, maps.Clone(names)
	}
	return img
}

func (s *machine) compareNow() { compare(s.t, s.fs, s.m) }

func compare(t *rapid.T, f *FS, m *model) {
	for d, dir := range m.dirs {
		list, err := f.List(d)
		must(t, err)
		var got []string
		for _, e := range list {
			if !e.Dir {
				got = append(got, e.Name)
			}
		}
		if want := slices.Sorted(maps.Keys(dir.now)); !slices.Equal(got, want) {
			t.Fatalf("%s holds %v, want %v", d, got, want)
		}
		for b, file := range dir.now {
			want := m.files[file].vol
			h, err := f.Open(path.Join(d, b))
			must(t, err)
			got := make([]byte, len(want)+1)
			n, err := h.ReadAt(got, 0)
			if err != io.EOF || n != len(want) || !bytes.Equal(got[:n], want) {
				t.Fatalf("%s/%s: %d bytes (%v), want %d; first difference at %d", d, b, n, err, len(want), firstDiff(got[:n], want))
			}
			must(t, h.Close())
		}
	}
}

func firstDiff(a, b []byte) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	return min(len(a), len(b))
}

func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := &machine{t: t, fs: New(Options{Direct: true}), m: newModel(testDirs...)}
		must(t, s.fs.MkdirAll("d/e"))
		must(t, s.fs.SyncFS("."))
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			s.step()
		}
		s.crash(0, false)
		for i, f := range s.frees {
			if got := f.fs.Dump(); got != f.dump {
				t.Fatalf("file system %d changed by what happened in another:\n%s\nwas\n%s", i, got, f.dump)
			}
		}
	})
}
