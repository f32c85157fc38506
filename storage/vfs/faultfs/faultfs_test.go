package faultfs_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/malachilog/malachi/storage/vfs"
	"github.com/malachilog/malachi/storage/vfs/faultfs"
	"github.com/malachilog/malachi/storage/vfs/memfs"
	"github.com/malachilog/malachi/storage/vfs/vfstest"
)

func TestSuitePassesThrough(t *testing.T) {
	for name, opts := range map[string]memfs.Options{"buffered": {}, "direct": {Direct: true}} {
		t.Run(name, func(t *testing.T) {
			vfstest.Run(t, func(*testing.T) vfs.FS { return faultfs.New(memfs.New(opts)) })
		})
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

func content(t testing.TB, f vfs.FS, name string) string {
	t.Helper()
	h, err := f.Open(name)
	if vfs.IsNotExist(err) {
		return "gone"
	}
	ok(t, err)
	size, err := h.Size()
	ok(t, err)
	b := make([]byte, size)
	if _, err := h.ReadAt(b, 0); err != io.EOF {
		ok(t, err)
	}
	return string(b)
}

// script does every mutating operation once and stops at the first error.
func script(f vfs.FS) error {
	if err := f.MkdirAll("d"); err != nil {
		return err
	}
	h, err := f.Create("d/a")
	if err != nil {
		return err
	}
	defer func() { _ = h.Close() }()
	l, err := f.Lock("lock")
	if err != nil {
		return err
	}
	defer func() { _ = l.Close() }()
	for _, step := range []func() error{
		func() error { return h.Allocate(0, 8192) },
		func() error { _, err := h.WriteAt(make([]byte, 1024), 0); return err },
		h.Sync,
		func() error { return h.Truncate(512) },
		func() error { return f.SyncDir("d") },
		func() error { return f.Rename("d/a", "d/b") },
		func() error { return f.SyncFS(".") },
		func() error { return f.Remove("d/b") },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

var scriptOps = []string{"mkdir d", "create d/a", "lock lock", "allocate d/a off=0 len=8192", "write d/a off=0 len=1024", "sync d/a",
	"truncate d/a len=512", "syncdir d", "rename d/a -> d/b", "syncfs .", "remove d/b"}

// TestFailEach fails operation 0, 1, 2, … of the script until none is left: each run does the operations before the failing one
// and nothing after it, and the failing one has no effect.
func TestFailEach(t *testing.T) {
	boom := errors.New("boom")
	var before string
	n := 0
	for ; ; n++ {
		m := memfs.New(memfs.Options{})
		f := faultfs.New(m)
		f.StartTrace(false)
		f.FailAt(n, boom)
		err := script(f)
		if f.Fired() == 0 {
			ok(t, err)
			break
		}
		is(t, fmt.Sprintf("operation %d", n), err, boom)
		want := slices.Clone(scriptOps[:n+1])
		want[n] += " : boom"
		got := f.TakeTrace()
		for i, line := range got { // the close that follows is not counted
			if strings.HasPrefix(line, "close") {
				got = got[:i]
				break
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("operation %d: trace\n%s", n, strings.Join(got, "\n"))
		}
		if f.Ops() != n+1 {
			t.Errorf("operation %d: %d operations", n, f.Ops())
		}
		// The state after failing operation n is the state that operation n-1 left: compare with a run that stops before n.
		if n > 0 && m.Dump() == before && !strings.HasPrefix(scriptOps[n-1], "allocate") {
			t.Errorf("operation %d changed nothing", n-1)
		}
		before = m.Dump()
	}
	if n != len(scriptOps) {
		t.Errorf("the loop ended after %d operations of %d", n, len(scriptOps))
	}
}

func TestFailReads(t *testing.T) {
	f := faultfs.New(memfs.New(memfs.Options{}))
	h, err := f.Create("a")
	ok(t, err)
	_, err = h.WriteAt([]byte("abc"), 0)
	ok(t, err)
	reads := []func() error{
		func() error { _, err := h.ReadAt(make([]byte, 3), 0); return err },
		func() error { _, err := h.Size(); return err },
		func() error { _, err := f.Stat("a"); return err },
		func() error { _, err := f.List("."); return err },
		func() error { _, _, err := f.Space("."); return err },
		func() error { _, err := f.Open("a"); return err },
		func() error { _, err := f.OpenWrite("a"); return err },
		func() error { _, _, err := f.OpenDirect("a"); return err },
	}
	for i, read := range reads {
		f.FailReadAt(i, syscall.EIO)
		is(t, fmt.Sprint("read ", i), read(), syscall.EIO)
		ok(t, read()) // only the one fails
		f.Reset()
		for range i + 1 {
			ok(t, reads[1]()) // so that the next one has number i+1
		}
	}
	buf := []byte("xyz")
	f.Inject(func(op faultfs.Op) error {
		if op.Kind == faultfs.Read {
			return syscall.EIO
		}
		return nil
	})
	if n, err := h.ReadAt(buf, 0); n != 0 || !errors.Is(err, syscall.EIO) || string(buf) != "xyz" {
		t.Errorf("a failed read: %d, %v, %q", n, err, buf)
	}
	if f.Ops() != 0 {
		t.Errorf("reads count as %d mutations", f.Ops())
	}
}

func TestHalfWrite(t *testing.T) {
	for _, c := range []struct {
		direct     bool
		off        int64
		n, reaches int // bytes
	}{{false, 0, 2048, 1024}, {false, 512, 1536, 512}, {false, 0, 512, 0}, {false, 100, 1000, 412}, {true, 4096, 4096, 2048}, {true, 0, 12288, 6144}} {
		m := memfs.New(memfs.Options{Direct: c.direct})
		f := faultfs.New(m)
		h, err := f.Create("a")
		ok(t, err)
		_, err = h.WriteAt(bytes.Repeat([]byte{'o'}, 16384), 0)
		ok(t, err)
		ok(t, m.SyncFS("."))
		w, direct, err := f.OpenDirect("a")
		ok(t, err)
		if direct != c.direct {
			t.Fatal("direct")
		}
		p := vfs.AlignedBuffer(c.n)
		for i := range p {
			p[i] = 'n'
		}
		f.FailAtWith(f.Ops(), faultfs.Fault{Effect: faultfs.Half, Err: syscall.EIO})
		if n, err := w.WriteAt(p, c.off); n != 0 || !errors.Is(err, syscall.EIO) {
			t.Errorf("%+v: %d, %v", c, n, err)
		}
		want := strings.Repeat("o", int(c.off)) + strings.Repeat("n", c.reaches) + strings.Repeat("o", 16384-int(c.off)-c.reaches)
		if got := content(t, m, "a"); got != want {
			t.Errorf("%+v: %d new bytes", c, strings.Count(got, "n"))
		}
	}
}

func TestWholeEffect(t *testing.T) {
	m := memfs.New(memfs.Options{})
	f := faultfs.New(m)
	f.InjectWith(func(faultfs.Op) *faultfs.Fault { return &faultfs.Fault{Effect: faultfs.Whole} })
	h, err := f.Create("a")
	is(t, "create", err, faultfs.ErrInjected)
	if h != nil || content(t, m, "a") != "" {
		t.Errorf("create with effect: file %v, content %q", h, content(t, m, "a"))
	}
	is(t, "rename", f.Rename("a", "b"), faultfs.ErrInjected)
	if content(t, m, "b") != "" {
		t.Error("rename had no effect")
	}
	_, err = f.Lock("lock")
	is(t, "lock", err, faultfs.ErrInjected)
	if l, err := m.Lock("lock"); err != nil {
		t.Errorf("a lock that failed is held: %v", err)
	} else {
		ok(t, l.Close())
	}
}

// TestDroppedSync is what Linux does: the sync fails once, the next succeeds, and the bytes are not there after the power cut.
func TestDroppedSync(t *testing.T) {
	m := memfs.New(memfs.Options{})
	f := faultfs.New(m)
	h, err := f.Create("a")
	ok(t, err)
	_, err = h.WriteAt([]byte("old"), 0)
	ok(t, err)
	ok(t, f.SyncFS("."))
	_, err = h.WriteAt([]byte("new"), 0)
	ok(t, err)
	drop := faultfs.Fault{Effect: faultfs.Drop, Err: syscall.EIO}
	f.FailAtWith(f.Ops(), drop)
	is(t, "sync", h.Sync(), syscall.EIO)
	ok(t, h.Sync())
	if got := content(t, m, "a"); got != "new" {
		t.Errorf("before the cut: %q", got)
	}
	if got := content(t, m.CrashClone(nil), "a"); got != "old" {
		t.Errorf("after the cut: %q", got)
	}
	_, err = h.WriteAt([]byte("NEW"), 0)
	ok(t, err)
	ok(t, h.Sync())
	if got := content(t, m.CrashClone(nil), "a"); got != "NEW" {
		t.Errorf("written again and synced: %q", got)
	}

	ok(t, f.Rename("a", "b"))
	f.FailAtWith(f.Ops(), drop)
	is(t, "syncdir", f.SyncDir("."), syscall.EIO)
	ok(t, f.SyncDir("."))
	if got := content(t, m.CrashClone(nil), "b"); got != "gone" {
		t.Errorf("a dropped rename is there: %q", got)
	}
	_, err = h.WriteAt([]byte("xyz"), 0)
	ok(t, err)
	f.FailAtWith(f.Ops(), drop)
	is(t, "syncfs", f.SyncFS("."), syscall.EIO)
	ok(t, f.SyncFS("."))
	if got := content(t, m.CrashClone(nil), "a"); got != "NEW" {
		t.Errorf("dropped by syncfs: %q", got)
	}
	if f.Fired() != 3 {
		t.Errorf("fired %d", f.Fired())
	}
}

func TestFullDisk(t *testing.T) {
	f := faultfs.New(memfs.New(memfs.Options{}))
	h, err := f.Create("a")
	ok(t, err)
	f.NoSpaceAfter(1000)
	_, err = h.WriteAt(make([]byte, 600), 0)
	ok(t, err)
	if free, _, err := f.Space("."); free != 400 || err != nil {
		t.Errorf("free %d, %v", free, err)
	}
	_, err = h.WriteAt(make([]byte, 500), 600)
	is(t, "500 bytes into 400", err, vfs.ErrNoSpace)
	ok(t, h.Allocate(500, 400)) // 300 more
	is(t, "allocate", h.Allocate(0, 2000), vfs.ErrNoSpace)
	f.SetFull(true)
	_, err = h.WriteAt(make([]byte, 300), 600) // was reserved
	ok(t, err)
	_, err = h.WriteAt(make([]byte, 900), 0) // is there
	ok(t, err)
	_, err = h.WriteAt([]byte("x"), 900)
	is(t, "one byte more", err, vfs.ErrNoSpace)
	_, err = f.Create("b")
	is(t, "create", err, vfs.ErrNoSpace)
	_, err = f.Create("a")
	is(t, "create what is there", err, fs.ErrExist)
	is(t, "mkdir", f.MkdirAll("d"), vfs.ErrNoSpace)
	ok(t, f.MkdirAll("."))
	_, err = f.Lock("lock")
	is(t, "lock", err, vfs.ErrNoSpace)
	ok(t, h.Sync())
	if len(content(t, f, "a")) != 900 {
		t.Error("reads and the size")
	}
	ok(t, f.Rename("a", "c"))
	ok(t, f.Remove("c"))
	f.SetFull(false)
	_, err = f.Create("b")
	ok(t, err)
}

func TestTraceOfReadsAndRules(t *testing.T) {
	f := faultfs.New(memfs.New(memfs.Options{Direct: true}))
	f.StartTrace(true)
	f.Inject(func(op faultfs.Op) error {
		if op.Kind == faultfs.Close && op.Name == "a" {
			return syscall.EIO
		}
		return nil
	})
	h, err := f.Create("a")
	ok(t, err)
	is(t, "close", h.Close(), syscall.EIO)
	_, err = h.Size()
	is(t, "a failed close closes", err, fs.ErrClosed)
	h, _, err = f.OpenDirect("a")
	ok(t, err)
	_, err = h.WriteAt(vfs.AlignedBuffer(4096), 4096)
	ok(t, err)
	_, err = h.ReadAt(vfs.AlignedBuffer(4096), 8192)
	is(t, "read at the end", err, io.EOF)
	_, err = f.Open("no")
	is(t, "open", err, fs.ErrNotExist)
	want := []string{"create a", "close a : input/output error", "size a : file already closed", "opendirect a", "write a off=4096 len=4096 direct",
		"read a off=8192 len=4096 direct", "open no : file does not exist"}
	if got := f.TakeTrace(); !slices.Equal(got, want) {
		t.Errorf("trace:\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}
