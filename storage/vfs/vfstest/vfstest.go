// Package vfstest is the acceptance suite of vfs.FS: what every maker must do while the power is on. What must be there after a
// power cut is tested with memfs, which can cut it.
package vfstest

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/malachilog/malachi/storage/vfs"
)

// Run runs the suite. open returns an empty file system for the exclusive use of one test.
func Run(t *testing.T, open func(t *testing.T) vfs.FS) {
	for _, c := range []struct {
		name string
		test func(t *testing.T, f vfs.FS)
	}{
		{"Create", testCreate},
		{"OpenModes", testOpenModes},
		{"ReadAtEnd", testReadAtEnd},
		{"SparseGrowth", testSparseGrowth},
		{"OverwriteAndTruncate", testOverwriteAndTruncate},
		{"Allocate", testAllocate},
		{"Direct", testDirect},
		{"DirectSeesBuffered", testDirectSeesBuffered},
		{"Rename", testRename},
		{"RenameDirectory", testRenameDirectory},
		{"Remove", testRemove},
		{"RemovedWhileOpen", testRemovedWhileOpen},
		{"MkdirAll", testMkdirAll},
		{"ListAndStat", testListAndStat},
		{"NamesRefused", testNamesRefused},
		{"NamesCleaned", testNamesCleaned},
		{"Kinds", testKinds},
		{"Sync", testSync},
		{"Lock", testLock},
		{"Space", testSpace},
		{"Closed", testClosed},
		{"Parallel", testParallel},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, open(t)) })
	}
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("unexpected: %v", err)
	}
}

func is(t testing.TB, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: got %v, want %v", what, err, want)
	}
}

func fails(t testing.TB, what string, err error) {
	t.Helper()
	if err == nil {
		t.Errorf("%s: no error", what)
	}
}

func create(t testing.TB, f vfs.FS, name string, content string) vfs.File {
	t.Helper()
	h, err := f.Create(name)
	ok(t, err)
	write(t, h, []byte(content), 0)
	return h
}

func put(t testing.TB, f vfs.FS, name string, content string) {
	t.Helper()
	ok(t, create(t, f, name, content).Close())
}

func write(t testing.TB, h vfs.File, p []byte, off int64) {
	t.Helper()
	if n, err := h.WriteAt(p, off); n != len(p) || err != nil {
		t.Fatalf("write of %d at %d: %d, %v", len(p), off, n, err)
	}
}

// has checks the whole content of an open file, its size and its end.
func has(t testing.TB, h vfs.File, want string) {
	t.Helper()
	size, err := h.Size()
	ok(t, err)
	if size != int64(len(want)) {
		t.Errorf("size %d, want %d", size, len(want))
	}
	got := make([]byte, len(want)+10)
	n, err := h.ReadAt(got, 0)
	if err != io.EOF {
		t.Errorf("read beyond the end: %v, want io.EOF", err)
	}
	if string(got[:n]) != want {
		t.Errorf("content %.60q (%d), want %.60q (%d)", got[:n], n, want, len(want))
	}
}

func holds(t testing.TB, f vfs.FS, name, want string) {
	t.Helper()
	h, err := f.Open(name)
	ok(t, err)
	has(t, h, want)
	ok(t, h.Close())
}

func testCreate(t *testing.T, f vfs.FS) {
	h := create(t, f, "a", "one")
	has(t, h, "one")
	_, err := f.Create("a")
	is(t, "create twice", err, fs.ErrExist)
	has(t, h, "one")
	ok(t, h.Close())
	ok(t, f.MkdirAll("d"))
	_, err = f.Create("d")
	fails(t, "create over a directory", err)
	_, err = f.Create("no/such")
	is(t, "create without a directory", err, fs.ErrNotExist)
	put(t, f, "empty", "")
	holds(t, f, "empty", "")
}

func testOpenModes(t *testing.T, f vfs.FS) {
	_, err := f.Open("a")
	is(t, "open", err, fs.ErrNotExist)
	_, err = f.OpenWrite("a")
	is(t, "open for writing", err, fs.ErrNotExist)
	_, _, err = f.OpenDirect("a")
	is(t, "open direct", err, fs.ErrNotExist)
	_, err = f.Stat("a")
	is(t, "opening made the file", err, fs.ErrNotExist)
	put(t, f, "a", "abc")
	r, err := f.Open("a")
	ok(t, err)
	_, err = r.WriteAt([]byte("x"), 0)
	fails(t, "write to a file that is open for reading", err)
	fails(t, "truncate of a file that is open for reading", r.Truncate(0))
	fails(t, "allocate in a file that is open for reading", r.Allocate(0, 10))
	w, err := f.OpenWrite("a")
	ok(t, err)
	write(t, w, []byte("X"), 1)
	has(t, r, "aXc")
	has(t, w, "aXc")
	ok(t, errors.Join(r.Close(), w.Close()))
}

func testReadAtEnd(t *testing.T, f vfs.FS) {
	h := create(t, f, "a", "0123456789")
	for _, c := range []struct {
		off  int64
		n    int
		want string
		err  error
	}{
		{0, 10, "0123456789", nil}, {0, 11, "0123456789", io.EOF}, {7, 3, "789", nil}, {7, 4, "789", io.EOF},
		{10, 1, "", io.EOF}, {5000, 1, "", io.EOF}, {3, 0, "", nil},
	} {
		p := make([]byte, c.n)
		n, err := h.ReadAt(p, c.off)
		if full := n == len(p) && err == io.EOF && c.err == nil; err != c.err && !full { // io.ReaderAt allows either
			t.Errorf("read of %d at %d: error %v, want %v", c.n, c.off, err, c.err)
		}
		if string(p[:n]) != c.want {
			t.Errorf("read of %d at %d: %q, want %q", c.n, c.off, p[:n], c.want)
		}
	}
	_, err := h.ReadAt(make([]byte, 1), -1)
	if err == nil || err == io.EOF {
		t.Errorf("read at -1: %v", err)
	}
	_, err = h.WriteAt([]byte("x"), -1)
	fails(t, "write at -1", err)
	has(t, h, "0123456789")
	ok(t, h.Close())
}

func testSparseGrowth(t *testing.T, f vfs.FS) {
	h := create(t, f, "a", "ab")
	write(t, h, []byte("z"), 10_000)
	has(t, h, "ab"+strings.Repeat("\x00", 9_998)+"z")
	ok(t, h.Truncate(20_000))
	has(t, h, "ab"+strings.Repeat("\x00", 9_998)+"z"+strings.Repeat("\x00", 9_999))
	ok(t, h.Close())
}

func testOverwriteAndTruncate(t *testing.T, f vfs.FS) {
	h := create(t, f, "a", strings.Repeat("x", 9_000))
	write(t, h, []byte("yy"), 4_095)
	has(t, h, strings.Repeat("x", 4_095)+"yy"+strings.Repeat("x", 4_903))
	ok(t, h.Truncate(4_096))
	has(t, h, strings.Repeat("x", 4_095)+"y")
	ok(t, h.Truncate(100))
	ok(t, h.Truncate(6_000)) // what was cut does not come back
	has(t, h, strings.Repeat("x", 100)+strings.Repeat("\x00", 5_900))
	ok(t, h.Truncate(0))
	write(t, h, []byte("n"), 3)
	has(t, h, "\x00\x00\x00n")
	fails(t, "truncate to -1", h.Truncate(-1))
	ok(t, h.Sync())
	has(t, h, "\x00\x00\x00n")
	ok(t, h.Close())
}

func testAllocate(t *testing.T, f vfs.FS) {
	h := create(t, f, "a", "abc")
	ok(t, h.Allocate(0, 1<<20))
	has(t, h, "abc")
	ok(t, h.Allocate(1<<20, 100))
	has(t, h, "abc")
	write(t, h, []byte("d"), 5)
	has(t, h, "abc\x00\x00d")
	fails(t, "allocate nothing", h.Allocate(0, 0))
	fails(t, "allocate at -1", h.Allocate(-1, 10))
	h.StartWriteback(0, 3)
	h.StartWriteback(1<<20, 1<<20)
	h.StartWriteback(-1, -1)
	ok(t, h.Close())
}

func testDirect(t *testing.T, f vfs.FS) {
	const bs = vfs.BlockSize
	put(t, f, "a", strings.Repeat("x", 2*bs))
	h, direct, err := f.OpenDirect("a")
	ok(t, err)
	t.Logf("direct: %v", direct)
	buf := vfs.AlignedBuffer(2 * bs)
	for i := range buf {
		buf[i] = 'a' + byte(i%23)
	}
	write(t, h, buf[:bs], bs)
	write(t, h, buf, 4*bs) // grows, leaving a hole
	want := strings.Repeat("x", bs) + string(buf[:bs]) + strings.Repeat("\x00", 2*bs) + string(buf)
	holds(t, f, "a", want)
	got := vfs.AlignedBuffer(8 * bs)
	n, err := h.ReadAt(got, 0)
	if n != 6*bs || err != io.EOF || string(got[:n]) != want {
		t.Errorf("direct read: %d bytes, %v", n, err)
	}
	if n, err := h.ReadAt(got[:bs], 6*bs); n != 0 || err != io.EOF {
		t.Errorf("direct read at the end: %d, %v", n, err)
	}
	if direct {
		_, err = h.WriteAt(buf[:bs], 512)
		is(t, "offset 512", err, vfs.ErrMisaligned)
		_, err = h.WriteAt(buf[:512], 0)
		is(t, "length 512", err, vfs.ErrMisaligned)
		_, err = h.WriteAt(buf[512:512+bs], 0)
		is(t, "memory at 512", err, vfs.ErrMisaligned)
		_, err = h.ReadAt(got[:bs], 512)
		is(t, "read at 512", err, vfs.ErrMisaligned)
		_, err = h.ReadAt(got[512:512+bs], 0)
		is(t, "read to 512", err, vfs.ErrMisaligned)
	}
	holds(t, f, "a", want)
	ok(t, h.Sync())
	ok(t, h.Truncate(bs+10)) // an end inside a block
	n, err = h.ReadAt(got[:2*bs], 0)
	if n != bs+10 || err != io.EOF || string(got[:n]) != want[:bs+10] {
		t.Errorf("direct read of a file that ends inside a block: %d, %v", n, err)
	}
	ok(t, h.Close())
	list, err := f.List(".")
	ok(t, err)
	if len(list) != 1 {
		t.Errorf("opening direct left files behind: %v", list)
	}
}

func testDirectSeesBuffered(t *testing.T, f vfs.FS) {
	w := create(t, f, "a", strings.Repeat("x", vfs.BlockSize))
	h, _, err := f.OpenDirect("a")
	ok(t, err)
	write(t, w, []byte("buffered"), 100)
	got := vfs.AlignedBuffer(vfs.BlockSize)
	if n, err := h.ReadAt(got, 0); n != len(got) || err != nil && err != io.EOF {
		t.Fatalf("read: %d, %v", n, err)
	}
	if !bytes.Equal(got[100:108], []byte("buffered")) {
		t.Errorf("a direct read does not see a buffered write")
	}
	ok(t, errors.Join(h.Close(), w.Close()))
}

func testRename(t *testing.T, f vfs.FS) {
	put(t, f, "a", "A")
	put(t, f, "b", "B")
	h, err := f.Open("b")
	ok(t, err)
	ok(t, f.Rename("a", "b"))
	holds(t, f, "b", "A")
	has(t, h, "B") // who has it open keeps the old one
	ok(t, h.Close())
	_, err = f.Stat("a")
	is(t, "the old name", err, fs.ErrNotExist)
	is(t, "rename of nothing", f.Rename("a", "b"), fs.ErrNotExist)
	is(t, "rename to nowhere", f.Rename("b", "no/such"), fs.ErrNotExist)
	ok(t, f.Rename("b", "b"))
	holds(t, f, "b", "A")
	ok(t, f.MkdirAll("d/e"))
	ok(t, f.Rename("b", "d/e/c"))
	holds(t, f, "d/e/c", "A")
	put(t, f, "x", "X")
	fails(t, "file over a directory", f.Rename("x", "d"))
	fails(t, "directory over a file", f.Rename("d", "x"))
	fails(t, "directory into itself", f.Rename("d", "d/e/f"))
	holds(t, f, "x", "X")
	holds(t, f, "d/e/c", "A")
}

func testRenameDirectory(t *testing.T, f vfs.FS) {
	ok(t, f.MkdirAll("d/e"))
	put(t, f, "d/e/a", "A")
	ok(t, f.MkdirAll("t"))
	ok(t, f.Rename("d/e", "t/n"))
	holds(t, f, "t/n/a", "A")
	_, err := f.Stat("d/e")
	is(t, "the old name", err, fs.ErrNotExist)
	ok(t, f.Remove("d"))
}

func testRemove(t *testing.T, f vfs.FS) {
	is(t, "remove nothing", f.Remove("a"), fs.ErrNotExist)
	put(t, f, "a", "A")
	ok(t, f.Remove("a"))
	_, err := f.Open("a")
	is(t, "open what was removed", err, fs.ErrNotExist)
	ok(t, f.MkdirAll("d"))
	put(t, f, "d/x", "X")
	fails(t, "remove a directory that is not empty", f.Remove("d"))
	holds(t, f, "d/x", "X")
	ok(t, f.Remove("d/x"))
	ok(t, f.Remove("d"))
	_, err = f.Stat("d")
	is(t, "stat of a removed directory", err, fs.ErrNotExist)
	fails(t, "remove the root", f.Remove("."))
	put(t, f, "a", "again") // nothing of the old one
	holds(t, f, "a", "again")
}

func testRemovedWhileOpen(t *testing.T, f vfs.FS) {
	h := create(t, f, "a", "old")
	ok(t, f.Remove("a"))
	put(t, f, "a", "new")
	write(t, h, []byte("O"), 0)
	has(t, h, "Old")
	ok(t, h.Sync())
	holds(t, f, "a", "new")
	ok(t, h.Close())
}

func testMkdirAll(t *testing.T, f vfs.FS) {
	ok(t, f.MkdirAll("."))
	ok(t, f.MkdirAll("a/b/c"))
	ok(t, f.MkdirAll("a/b/c"))
	ok(t, f.MkdirAll("a/b/d"))
	put(t, f, "a/b/c/x", "X")
	fails(t, "a file in the way", f.MkdirAll("a/b/c/x/y"))
	fails(t, "a file of that name", f.MkdirAll("a/b/c/x"))
	holds(t, f, "a/b/c/x", "X")
}

func testListAndStat(t *testing.T, f vfs.FS) {
	list, err := f.List(".")
	ok(t, err)
	if len(list) != 0 {
		t.Fatalf("a new file system holds %v", list)
	}
	for _, name := range []string{"b", "a10", "a9", "B", "-"} {
		put(t, f, name, name)
	}
	ok(t, f.MkdirAll("aa"))
	put(t, f, "aa/inner", "1234")
	list, err = f.List(".")
	ok(t, err)
	want := []vfs.DirEntry{{Name: "-", Size: 1}, {Name: "B", Size: 1}, {Name: "a10", Size: 3}, {Name: "a9", Size: 2},
		{Name: "aa", Dir: true}, {Name: "b", Size: 1}}
	if !slices.Equal(list, want) {
		t.Errorf("list: %v, want %v", list, want)
	}
	for name, want := range map[string]vfs.DirEntry{
		"aa/inner": {Name: "inner", Size: 4}, "aa": {Name: "aa", Dir: true}, ".": {Name: ".", Dir: true}} {
		got, err := f.Stat(name)
		ok(t, err)
		if got != want {
			t.Errorf("stat %s: %v, want %v", name, got, want)
		}
	}
	_, err = f.List("no")
	is(t, "list nothing", err, fs.ErrNotExist)
	_, err = f.Stat("aa/no")
	is(t, "stat nothing", err, fs.ErrNotExist)
	_, err = f.List("b")
	fails(t, "list a file", err)
}

func testNamesRefused(t *testing.T, f vfs.FS) {
	put(t, f, "x", "X")
	for _, bad := range []string{"", "/", "/x", "..", "../x", "a/../../x", "x/..", "a/..", "x\x00y"} {
		errs := map[string]error{}
		_, errs["create"] = f.Create(bad)
		_, errs["open"] = f.Open(bad)
		_, errs["openwrite"] = f.OpenWrite(bad)
		_, _, errs["opendirect"] = f.OpenDirect(bad)
		errs["rename from"] = f.Rename(bad, "y")
		errs["rename to"] = f.Rename("x", bad)
		errs["remove"] = f.Remove(bad)
		errs["mkdir"] = f.MkdirAll(bad)
		_, errs["list"] = f.List(bad)
		_, errs["stat"] = f.Stat(bad)
		errs["syncdir"] = f.SyncDir(bad)
		errs["syncfs"] = f.SyncFS(bad)
		_, errs["lock"] = f.Lock(bad)
		_, _, errs["space"] = f.Space(bad)
		for op, err := range errs {
			is(t, op+" "+bad, err, fs.ErrInvalid)
		}
	}
	list, err := f.List(".")
	ok(t, err)
	if len(list) != 1 || list[0].Name != "x" {
		t.Errorf("a refused name did something: %v", list)
	}
	for _, good := range []string{"..a", "a..b", "..."} { // only an element that is ".." leads up
		put(t, f, good, good)
		holds(t, f, good, good)
	}
}

func testNamesCleaned(t *testing.T, f vfs.FS) {
	ok(t, f.MkdirAll("d//e/"))
	put(t, f, "./d/./e//x", "X")
	holds(t, f, "d/e/x", "X")
}

func testKinds(t *testing.T, f vfs.FS) {
	ok(t, f.MkdirAll("d"))
	put(t, f, "x", "X")
	_, err := f.Open("d")
	fails(t, "open a directory", err)
	_, err = f.OpenWrite("d")
	fails(t, "open a directory for writing", err)
	_, _, err = f.OpenDirect("d")
	fails(t, "open a directory direct", err)
	_, err = f.Lock("d")
	fails(t, "lock a directory", err)
	fails(t, "syncdir of a file", f.SyncDir("x"))
	_, err = f.Open("x/y")
	fails(t, "a file as a directory", err)
	_, err = f.Create("x/y")
	fails(t, "create below a file", err)
}

func testSync(t *testing.T, f vfs.FS) {
	ok(t, f.MkdirAll("d"))
	h := create(t, f, "d/a", "abc")
	ok(t, h.Sync())
	ok(t, h.Sync())
	ok(t, f.SyncDir("d"))
	ok(t, f.SyncDir("."))
	ok(t, f.SyncFS("."))
	ok(t, f.SyncFS("d/a"))
	is(t, "syncdir of nothing", f.SyncDir("no"), fs.ErrNotExist)
	is(t, "syncfs of nothing", f.SyncFS("no"), fs.ErrNotExist)
	r, err := f.Open("d/a")
	ok(t, err)
	ok(t, r.Sync())
	has(t, r, "abc")
	ok(t, errors.Join(h.Close(), r.Close()))
}

func testLock(t *testing.T, f vfs.FS) {
	l, err := f.Lock("lock")
	ok(t, err)
	_, err = f.Lock("lock")
	is(t, "lock twice", err, vfs.ErrLocked)
	_, err = f.Lock("lock") // a refused attempt does not release it
	is(t, "lock three times", err, vfs.ErrLocked)
	other, err := f.Lock("other")
	ok(t, err)
	ok(t, l.Close())
	l, err = f.Lock("lock")
	ok(t, err)
	ok(t, errors.Join(l.Close(), other.Close()))
	_, err = f.Lock("no/lock")
	is(t, "lock without a directory", err, fs.ErrNotExist)
	put(t, f, "full", "kept") // an existing file is locked as it is
	l, err = f.Lock("full")
	ok(t, err)
	ok(t, l.Close())
	holds(t, f, "full", "kept")
}

func testSpace(t *testing.T, f vfs.FS) {
	put(t, f, "a", "x")
	for _, name := range []string{".", "a"} {
		free, total, err := f.Space(name)
		ok(t, err)
		if free == 0 || free > total {
			t.Errorf("space of %s: %d of %d", name, free, total)
		}
	}
	_, _, err := f.Space("no")
	is(t, "space of nothing", err, fs.ErrNotExist)
}

func testClosed(t *testing.T, f vfs.FS) {
	h := create(t, f, "a", "abc")
	ok(t, h.Close())
	_, err := h.ReadAt(make([]byte, 1), 0)
	is(t, "read", err, fs.ErrClosed)
	_, err = h.WriteAt([]byte("x"), 0)
	is(t, "write", err, fs.ErrClosed)
	_, err = h.Size()
	is(t, "size", err, fs.ErrClosed)
	is(t, "sync", h.Sync(), fs.ErrClosed)
	is(t, "truncate", h.Truncate(0), fs.ErrClosed)
	is(t, "allocate", h.Allocate(0, 10), fs.ErrClosed)
	is(t, "close", h.Close(), fs.ErrClosed)
	h.StartWriteback(0, 1)
	holds(t, f, "a", "abc")
}

// testParallel has one writer per block, readers, and names that come and go; blocks must be whole at the end.
func testParallel(t *testing.T, f vfs.FS) {
	const writers, rounds = 4, 25
	h := create(t, f, "a", "")
	errs := make([]error, writers)
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			name := "f" + string(rune('0'+w))
			for i := range rounds {
				p := bytes.Repeat([]byte{byte(1 + i)}, 4096)
				_, werr := h.WriteAt(p, int64(w)*4096)
				got := make([]byte, 4096)
				_, rerr := h.ReadAt(got, int64(w)*4096)
				if rerr == io.EOF {
					rerr = nil
				}
				if !bytes.Equal(got, p) {
					rerr = errors.New("read back other bytes")
				}
				c, cerr := f.Create(name)
				if cerr == nil {
					cerr = c.Close()
				}
				_, lerr := f.List(".")
				errs[w] = errors.Join(errs[w], werr, rerr, cerr, lerr, f.Rename(name, name+"x"), f.Remove(name+"x"))
			}
		})
	}
	wg.Wait()
	ok(t, errors.Join(errs...))
	has(t, h, strings.Repeat(string(rune(rounds)), writers*4096))
	ok(t, h.Close())
	list, err := f.List(".")
	ok(t, err)
	if len(list) != 1 {
		t.Errorf("left behind: %v", list)
	}
}
