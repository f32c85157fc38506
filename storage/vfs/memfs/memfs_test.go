package memfs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"
	"testing"

	"github.com/malachilog/malachi/storage/vfs"
	"github.com/malachilog/malachi/storage/vfs/vfstest"
)

func alignedCopy(p []byte) []byte {
	b := vfs.AlignedBuffer(len(p))
	copy(b, p)
	return b
}

func fill(b byte, n int) []byte { return bytes.Repeat([]byte{b}, n) }

func create(t testing.TB, f *FS, name string, content []byte) vfs.File {
	t.Helper()
	h, err := f.Create(name)
	must(t, err)
	write(t, h, content, 0)
	return h
}

func write(t testing.TB, h vfs.File, p []byte, off int64) {
	t.Helper()
	if n, err := h.WriteAt(p, off); n != len(p) || err != nil {
		t.Fatalf("write of %d bytes at %d: %d, %v", len(p), off, n, err)
	}
}

// content is the whole file, or nil if there is none.
func contentOf(t testing.TB, f *FS, name string) []byte {
	t.Helper()
	h, err := f.Open(name)
	if vfs.IsNotExist(err) {
		return nil
	}
	must(t, err)
	size, err := h.Size()
	must(t, err)
	b := make([]byte, size)
	if n, err := h.ReadAt(b, 0); int64(n) != size || err != nil && err != io.EOF {
		t.Fatalf("read %s: %d of %d, %v", name, n, size, err)
	}
	return b
}

// runs shows content as byte values with lengths: "1x512 0x512".
func runs(b []byte) string {
	if b == nil {
		return "gone"
	}
	var out []string
	for i := 0; i < len(b); {
		j := i
		for j < len(b) && b[j] == b[i] {
			j++
		}
		out = append(out, fmt.Sprintf("%dx%d", b[i], j-i))
		i = j
	}
	return strings.Join(out, " ")
}

// outcomes is every distinct content of name over all subsets of the unsynced units, sorted.
func outcomes(t testing.TB, f *FS, name string) []string {
	t.Helper()
	units := f.Unsynced()
	if len(units) > 12 {
		t.Fatalf("too many units for all subsets: %v", units)
	}
	seen := map[string]bool{}
	for subset := range 1 << len(units) {
		c := f.CrashClone(func(u Unit) bool { return subset>>slices.Index(units, u)&1 == 1 })
		seen[runs(contentOf(t, c, name))] = true
	}
	out := make([]string, 0, len(seen))
	for s := range seen {
		out = append(out, s)
	}
	slices.Sort(out)
	return out
}

func wantOutcomes(t testing.TB, f *FS, name string, want ...string) {
	t.Helper()
	slices.Sort(want)
	if got := outcomes(t, f, name); !slices.Equal(got, want) {
		t.Errorf("%s may be after a power cut:\n got  %q\n want %q\nunits %v", name, got, want, f.Unsynced())
	}
}

func TestOutcomesOfAppend(t *testing.T) {
	f := New(Options{})
	h := create(t, f, "a", fill(1, 512))
	wantOutcomes(t, f, "a", "gone", "", "1x512", "0x512") // name, length and bytes are apart
	must(t, h.Sync())
	wantOutcomes(t, f, "a", "gone", "1x512") // syncing the file does not make its name durable
	must(t, f.SyncDir("."))
	wantOutcomes(t, f, "a", "1x512")
	write(t, h, fill(2, 600), 512)
	wantOutcomes(t, f, "a", "1x512", "1x512 0x600", "1x512 2x512 0x88", "1x512 0x512 2x88", "1x512 2x600")
}

func TestOutcomesOfOverwrite(t *testing.T) {
	f := New(Options{})
	h := create(t, f, "a", fill(1, 1024))
	must(t, f.SyncFS("."))
	write(t, h, fill(2, 1024), 0)
	wantOutcomes(t, f, "a", "1x1024", "2x512 1x512", "1x512 2x512", "2x1024")
}

func TestOutcomesOfCutAndGrowth(t *testing.T) {
	f := New(Options{})
	h := create(t, f, "a", fill(1, 1024))
	must(t, f.SyncFS("."))
	must(t, h.Truncate(0))
	write(t, h, fill(2, 512), 512)
	// The old bytes may be there only if the cut is not.
	wantOutcomes(t, f, "a", "1x1024", "", "1x512 2x512", "0x1024", "0x512 2x512")
	must(t, h.Sync())
	wantOutcomes(t, f, "a", "0x512 2x512")
}

func TestOutcomesOfNames(t *testing.T) {
	f := New(Options{})
	must(t, create(t, f, "old", fill(1, 100)).Sync())
	must(t, create(t, f, "new", fill(2, 100)).Sync())
	must(t, f.SyncDir("."))
	must(t, f.Rename("old", "new"))
	wantOutcomes(t, f, "new", "2x100", "1x100")
	wantOutcomes(t, f, "old", "1x100", "gone")
	must(t, f.Remove("new"))
	wantOutcomes(t, f, "new", "2x100", "1x100", "gone")
	must(t, f.SyncDir("."))
	wantOutcomes(t, f, "new", "gone")

	must(t, f.MkdirAll("d"))
	must(t, create(t, f, "d/x", fill(3, 10)).Sync())
	must(t, f.SyncDir("d"))
	wantOutcomes(t, f, "d/x", "gone", "3x10") // the directory's own name
	must(t, f.SyncDir("."))
	must(t, f.Rename("d/x", "y"))
	must(t, f.SyncDir("d")) // one of two directories is not enough
	wantOutcomes(t, f, "y", "gone", "3x10")
	wantOutcomes(t, f, "d/x", "gone")
}

func TestDirectoryMovedByHalf(t *testing.T) {
	f := New(Options{})
	must(t, f.MkdirAll("a"))
	must(t, f.MkdirAll("b"))
	must(t, f.SyncFS("."))
	must(t, f.Rename("a", "b/a"))
	must(t, f.Rename("b/a", "c"))
	must(t, f.Rename("b", "c/b"))
	units := f.Unsynced()
	for subset := range 1 << len(units) {
		c := f.CrashClone(func(u Unit) bool { return subset>>slices.Index(units, u)&1 == 1 })
		if d := c.Dump(); strings.Count(d, "\n") > 2 { // each directory at most once, and the walk ends
			t.Fatalf("subset %b of %v:\n%s", subset, units, d)
		}
	}
}

func TestDirectWrites(t *testing.T) {
	f := New(Options{Direct: true})
	must(t, create(t, f, "j", fill(1, 8192)).Close())
	must(t, f.SyncFS("."))
	h, direct, err := f.OpenDirect("j")
	if err != nil || !direct {
		t.Fatalf("direct %v, %v", direct, err)
	}
	var during, after []string
	f.OnOp(func(op Op) {
		if op.Done {
			after = outcomes(t, f, "j")
			return
		}
		none, all := f.CrashClone(nil), f.CrashClone(func(Unit) bool { return true })
		torn := f.CrashClone(func(u Unit) bool { return u.Index == 9 })
		for _, c := range []*FS{none, torn, all} {
			during = append(during, runs(contentOf(t, c, "j")))
		}
	})
	write(t, h, alignedCopy(fill(2, 4096)), 4096)
	if want := []string{"1x8192", "1x4608 2x512 1x3072", "1x4096 2x4096"}; !slices.Equal(during, want) {
		t.Errorf("inside the write: %q", during)
	}
	if want := []string{"1x4096 2x4096"}; !slices.Equal(after, want) {
		t.Errorf("after the write: %q", after)
	}
	f.OnOp(nil)
	write(t, h, alignedCopy(fill(3, 4096)), 8192) // the length is durable too
	wantOutcomes(t, f, "j", "1x4096 2x4096 3x4096")
	for _, bad := range []struct {
		p   []byte
		off int64
	}{{alignedCopy(fill(1, 4096)), 512}, {alignedCopy(fill(1, 4096))[:512], 0}, {alignedCopy(fill(1, 8192))[512 : 512+4096], 0}} {
		if _, err := h.WriteAt(bad.p, bad.off); !errors.Is(err, vfs.ErrMisaligned) {
			t.Errorf("misaligned write: %v", err)
		}
	}
	wantOutcomes(t, f, "j", "1x4096 2x4096 3x4096")
}

func TestHookSeesBothSidesOfSync(t *testing.T) {
	f := New(Options{})
	h := create(t, f, "a", fill(1, 512))
	var trace []string
	f.OnOp(func(op Op) {
		trace = append(trace, fmt.Sprintf("%s: %d", op, len(f.Unsynced())))
	})
	must(t, h.Sync())
	must(t, f.SyncDir("."))
	must(t, f.SyncFS("."))
	must(t, f.MkdirAll("d/e"))
	must(t, f.MkdirAll("d/e")) // nothing to do, nothing to see
	must(t, f.Rename("a", "b"))
	must(t, h.Truncate(100))
	must(t, h.Allocate(0, 4096))
	must(t, f.Remove("b"))
	if _, err := f.Create("no/such"); !vfs.IsNotExist(err) {
		t.Errorf("create without a directory: %v", err)
	}
	want := []string{"sync a: 3", "sync a done: 1", "syncdir .: 1", "syncdir . done: 0", "syncfs .: 0", "syncfs . done: 0",
		"mkdir d: 1", "mkdir d/e: 2", "rename a -> b: 3", "truncate a len=100: 5", "allocate a off=0 len=4096: 5", "remove b: 6"}
	if !slices.Equal(trace, want) {
		t.Errorf("trace:\n%s\nwant\n%s", strings.Join(trace, "\n"), strings.Join(want, "\n"))
	}
}

func TestLies(t *testing.T) {
	f := New(Options{LieSync: true})
	must(t, create(t, f, "a", fill(1, 512)).Sync())
	must(t, f.SyncDir("."))
	wantOutcomes(t, f, "a", "", "0x512", "1x512")

	f = New(Options{LieDirSync: true})
	must(t, create(t, f, "a", fill(1, 512)).Sync())
	must(t, f.SyncDir("."))
	wantOutcomes(t, f, "a", "gone", "1x512")

	f = New(Options{LieDirect: true, Direct: true})
	must(t, create(t, f, "a", fill(1, 4096)).Sync())
	must(t, f.SyncDir("."))
	h, _, err := f.OpenDirect("a")
	must(t, err)
	write(t, h, alignedCopy(fill(2, 4096)), 0)
	if n := len(f.Unsynced()); n != 8 {
		t.Errorf("a lying direct write left %d units", n)
	}
}

// TestNothingHidesBeyondTheEnd: bytes that a crash or a drop left beyond the durable length don't come back when the file grows.
func TestNothingHidesBeyondTheEnd(t *testing.T) {
	f := New(Options{})
	h := create(t, f, "a", fill(1, 100))
	must(t, f.SyncFS("."))
	write(t, h, fill(2, 300), 100)
	grown := func(c *FS) string {
		h, err := c.OpenWrite("a")
		must(t, err)
		must(t, h.Truncate(1000))
		return runs(contentOf(t, c, "a"))
	}
	if got := grown(f.CrashClone(func(u Unit) bool { return u.Kind == UnitSector })); got != "1x100 0x900" {
		t.Errorf("sectors without the length: %s", got)
	}
	h.(interface{ DropUnsynced() }).DropUnsynced()
	write(t, h, fill(3, 10), 0) // brings the first sector again, not the length
	must(t, h.Sync())
	if got := grown(f.CrashClone(nil)); got != "3x10 1x90 0x900" {
		t.Errorf("dropped length: %s", got)
	}
}

func TestDroppedStaysVolatile(t *testing.T) {
	f := New(Options{})
	h := create(t, f, "a", fill(1, 512))
	must(t, f.SyncFS("."))
	write(t, h, fill(2, 1024), 0)
	h.(interface{ DropUnsynced() }).DropUnsynced()
	must(t, h.Sync()) // believed, and proves nothing
	if got := runs(contentOf(t, f, "a")); got != "2x1024" {
		t.Errorf("the volatile file is %s", got)
	}
	wantOutcomes(t, f, "a", "1x512", "2x512", "1x512 0x512", "1x512 2x512", "2x512 0x512", "2x1024")
	write(t, h, fill(3, 512), 512)
	must(t, h.Sync()) // only what was written again, and the length
	wantOutcomes(t, f, "a", "1x512 3x512", "2x512 3x512")

	must(t, create(t, f, "b", nil).Close())
	must(t, f.DropDir("."))
	must(t, f.SyncDir("."))
	must(t, create(t, f, "c", nil).Close())
	must(t, f.SyncDir("."))
	wantOutcomes(t, f, "b", "", "gone")
	wantOutcomes(t, f, "c", "")
	f.DropAll()
	must(t, f.SyncFS("."))
	wantOutcomes(t, f, "a", "1x512 3x512", "2x512 3x512")
}

func TestCapacity(t *testing.T) {
	f := New(Options{Capacity: 5 * 4096})
	free := func() uint64 {
		n, total, err := f.Space(".")
		if err != nil || total != 5*4096 {
			t.Fatalf("space: %d %v", total, err)
		}
		return n / 4096
	}
	a := create(t, f, "a", fill(1, 4097))
	if free() != 3 {
		t.Errorf("two pages written, %d free", free())
	}
	must(t, a.Allocate(0, 4*4096))
	if err := a.Allocate(0, 6*4096); !errors.Is(err, vfs.ErrNoSpace) {
		t.Errorf("allocate beyond: %v", err)
	}
	b, err := f.Create("b")
	must(t, err)
	n, err := b.WriteAt(fill(2, 2*4096), 0)
	if n != 4096 || !errors.Is(err, vfs.ErrNoSpace) {
		t.Errorf("write on a full disk: %d %v", n, err)
	}
	write(t, a, fill(3, 2*4096), 2*4096) // reserved
	write(t, a, fill(3, 4096), 0)        // there already
	if free() != 0 {
		t.Errorf("%d free on a full disk", free())
	}
	must(t, f.SyncFS("."))
	if n, _, err := f.CrashClone(nil).Space("."); n != 0 || err != nil {
		t.Errorf("clone: %d free, %v", n, err)
	}
	must(t, a.Truncate(4096))
	if free() != 3 {
		t.Errorf("after the cut %d free", free())
	}
	must(t, f.Remove("b"))
	if free() != 3 {
		t.Errorf("removed while open: %d free", free())
	}
	must(t, b.Close())
	if free() != 4 {
		t.Errorf("removed and closed: %d free", free())
	}
	must(t, f.MkdirAll("d"))
	must(t, create(t, f, "d/a", fill(1, 4096)).Close())
	must(t, create(t, f, "b", fill(1, 4096)).Close())
	must(t, f.Rename("b", "d/a")) // what is replaced gives its space back
	if free() != 3 {
		t.Errorf("replaced from another directory: %d free", free())
	}
	must(t, create(t, f, "d/b", fill(1, 4096)).Close())
	must(t, f.Rename("d/b", "d/a"))
	if free() != 3 {
		t.Errorf("replaced in the directory: %d free", free())
	}
}

func TestCloneHasNoLocksAndNoHook(t *testing.T) {
	f := New(Options{})
	l, err := f.Lock("lock")
	must(t, err)
	calls := 0
	f.OnOp(func(Op) { calls++ })
	c := f.CrashClone(func(Unit) bool { return true })
	if _, err := c.Lock("lock"); err != nil {
		t.Errorf("lock in the clone: %v", err)
	}
	must(t, create(t, c, "x", nil).Close())
	if calls != 0 {
		t.Errorf("the clone called the hook %d times", calls)
	}
	if _, err := f.Lock("lock"); !errors.Is(err, vfs.ErrLocked) {
		t.Errorf("lock twice: %v", err)
	}
	must(t, l.Close())
	if err := l.Close(); !errors.Is(err, fs.ErrClosed) {
		t.Errorf("close twice: %v", err)
	}
}

// TestClonesInParallel lets clones and the original change shared pages at once; the race detector judges.
func TestClonesInParallel(t *testing.T) {
	f := New(Options{Direct: true})
	h := create(t, f, "a", fill(1, 64<<10))
	must(t, f.SyncFS("."))
	done := make(chan string)
	for i := range 8 {
		write(t, h, fill(byte(i), 4096), int64(i)*4096)
		c := f.CrashClone(func(Unit) bool { return true })
		go func() {
			h, err := c.OpenWrite("a")
			if err == nil {
				_, err = h.WriteAt(fill(100+byte(i), 8192), 1000)
			}
			if err == nil {
				err = h.Sync()
			}
			d, e := c.CrashClone(nil), ""
			if err != nil {
				e = err.Error()
			} else if got := contentOf(t, d, "a"); !bytes.Equal(got[1000:9192], fill(100+byte(i), 8192)) || got[0] != 0 {
				e = "wrong bytes: " + runs(got)
			}
			done <- e
		}()
		must(t, h.Sync())
	}
	for range 8 {
		if e := <-done; e != "" {
			t.Error(e)
		}
	}
}

func BenchmarkCrashClone(b *testing.B) {
	f := New(Options{Direct: true})
	must(b, f.MkdirAll("seg"))
	for i := range 30 {
		create(b, f, fmt.Sprintf("seg/%d", i), fill(1, 32<<10))
	}
	must(b, f.SyncFS("."))
	h, err := f.OpenWrite("seg/3")
	must(b, err)
	write(b, h, fill(9, 8192), 512)
	b.ReportAllocs()
	for b.Loop() {
		f.CrashClone(func(u Unit) bool { return u.Index&1 == 0 })
	}
}

func TestSuite(t *testing.T) {
	for name, opts := range map[string]Options{"buffered": {}, "direct": {Direct: true}, "bounded": {Direct: true, Capacity: 64 << 20}} {
		t.Run(name, func(t *testing.T) {
			vfstest.Run(t, func(*testing.T) vfs.FS { return New(opts) })
		})
	}
}
