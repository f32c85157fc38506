//go:build linux

package vfs_test

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/malachilog/malachi/storage/vfs"
	"github.com/malachilog/malachi/storage/vfs/vfstest"
)

func openOS(t *testing.T, dir string) *vfs.OS {
	t.Helper()
	f, err := vfs.NewOS(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	return f
}

func TestOSSuite(t *testing.T) {
	vfstest.Run(t, func(t *testing.T) vfs.FS { return openOS(t, t.TempDir()) })
}

// TestOSSuiteOnTmpfs runs where /dev/shm is: another file system, with other ways to refuse.
func TestOSSuiteOnTmpfs(t *testing.T) {
	const shm = "/dev/shm"
	if st, err := os.Stat(shm); err != nil || !st.IsDir() {
		t.Skip("no " + shm)
	}
	vfstest.Run(t, func(t *testing.T) vfs.FS {
		dir, err := os.MkdirTemp(shm, "vfs-test-")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := os.RemoveAll(dir); err != nil {
				t.Error(err)
			}
		})
		return openOS(t, dir)
	})
}

func TestOSRootMustExist(t *testing.T) {
	if _, err := vfs.NewOS(filepath.Join(t.TempDir(), "no")); !vfs.IsNotExist(err) {
		t.Errorf("got %v", err)
	}
}

func TestOSLinksStayInside(t *testing.T) {
	outside, dir := t.TempDir(), t.TempDir()
	secret := filepath.Join(outside, "secret")
	if err := os.WriteFile(secret, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, target := range map[string]string{"file": secret, "dir": outside, "up": "../" + filepath.Base(outside), "dangling": outside + "/new"} {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	f := openOS(t, dir)
	for _, name := range []string{"file", "dir/secret", "up/secret"} {
		if _, err := f.Open(name); err == nil {
			t.Errorf("open of %s worked", name)
		}
		if _, err := f.OpenWrite(name); err == nil {
			t.Errorf("open of %s for writing worked", name)
		}
		if _, _, err := f.OpenDirect(name); err == nil {
			t.Errorf("direct open of %s worked", name)
		}
		if _, err := f.Stat(name); err == nil {
			t.Errorf("stat of %s worked", name)
		}
		if _, err := f.Lock(name); err == nil {
			t.Errorf("lock of %s worked", name)
		}
	}
	for _, name := range []string{"dir/new", "up/new", "dangling"} {
		if _, err := f.Create(name); err == nil {
			t.Errorf("create of %s worked", name)
		}
	}
	if err := f.Remove("dir/secret"); err == nil {
		t.Error("remove through a link worked")
	}
	if err := f.Rename("file", "dir/stolen"); err == nil {
		t.Error("rename through a link worked")
	}
	if err := f.Remove("file"); err != nil { // the link itself is ours
		t.Error(err)
	}
	got, err := os.ReadDir(outside)
	if err != nil || len(got) != 1 {
		t.Errorf("outside holds %v, %v", got, err)
	}
	if b, err := os.ReadFile(secret); string(b) != "secret" || err != nil {
		t.Errorf("the file outside is %q, %v", b, err)
	}
}

// TestOSDirectIsDirect asks the kernel which flags the descriptor really has.
func TestOSDirectIsDirect(t *testing.T) {
	dir := t.TempDir()
	f := openOS(t, dir)
	h, err := f.Create("j")
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	d, direct, err := f.OpenDirect("j")
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if !direct {
		t.Skipf("no direct writes in %s", dir)
	}
	found := false
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range fds {
		fd, err := strconv.Atoi(e.Name())
		if err != nil {
			t.Fatal(err)
		}
		if target, err := os.Readlink("/proc/self/fd/" + e.Name()); err != nil || target != filepath.Join(dir, "j") {
			continue
		}
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
		if err != nil {
			t.Fatal(err)
		}
		found = found || flags&unix.O_DIRECT != 0 && flags&unix.O_DSYNC != 0
	}
	if !found {
		t.Error("no descriptor of the file has O_DIRECT and O_DSYNC")
	}
}

// TestOSProbeLeftBehind: a crash inside the probe leaves its file; the next one is not misled by it.
func TestOSProbeLeftBehind(t *testing.T) {
	dir := t.TempDir()
	f := openOS(t, dir)
	h, err := f.Create("j")
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, ".direct-probe"), []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, want, err := openOS(t, dir).OpenDirect("j")
	if err != nil {
		t.Fatal(err)
	}
	list, err := f.List(".")
	if err != nil || len(list) != 1 {
		t.Errorf("the directory holds %v, %v", list, err)
	}
	if _, again, err := f.OpenDirect("j"); err != nil || again != want {
		t.Errorf("a second probe says %v, %v; the first %v", again, err, want)
	}
}

func TestOSLockExcludesOtherValues(t *testing.T) {
	dir := t.TempDir()
	a, b := openOS(t, dir), openOS(t, dir)
	l, err := a.Lock("lock")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Lock("lock"); !errors.Is(err, vfs.ErrLocked) {
		t.Errorf("second value: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	l, err = b.Lock("lock")
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

const lockHelper = "VFS_TEST_LOCK_DIR"

// TestOSLockExcludesOtherProcesses starts this test binary again as the other process.
func TestOSLockExcludesOtherProcesses(t *testing.T) {
	if dir := os.Getenv(lockHelper); dir != "" {
		_, err := openOS(t, dir).Lock("lock")
		if errors.Is(err, vfs.ErrLocked) {
			os.Exit(42)
		}
		os.Exit(43)
	}
	dir := t.TempDir()
	other := func() int {
		cmd := exec.Command(os.Args[0], "-test.run=^TestOSLockExcludesOtherProcesses$")
		cmd.Env = append(os.Environ(), lockHelper+"="+dir)
		var exit *exec.ExitError
		if err := cmd.Run(); !errors.As(err, &exit) {
			t.Fatalf("the other process: %v", err)
		}
		return exit.ExitCode()
	}
	l, err := openOS(t, dir).Lock("lock")
	if err != nil {
		t.Fatal(err)
	}
	if got := other(); got != 42 {
		t.Errorf("while locked the other process exits %d, want 42", got)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if got := other(); got != 43 {
		t.Errorf("after that the other process exits %d, want 43", got)
	}
}

// TestOSFullDisk needs root to mount a small file system; elsewhere the mapping is tested by the suite of faultfs only.
func TestOSFullDisk(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("vfs-test", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Skipf("mount: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	f, err := vfs.NewOS(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h, err := f.Create("a")
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if err := h.Allocate(0, 2<<20); !errors.Is(err, vfs.ErrNoSpace) || !errors.Is(err, unix.ENOSPC) {
		t.Errorf("allocate: %v", err)
	}
	if err := h.Allocate(0, 512<<10); err != nil {
		t.Errorf("allocate what there is: %v", err)
	}
	free, total, err := f.Space("a")
	if err != nil || total != 1<<20 || free != 512<<10 {
		t.Errorf("space: %d of %d, %v", free, total, err)
	}
	if n, err := h.WriteAt(make([]byte, 2<<20), 0); !errors.Is(err, vfs.ErrNoSpace) || n == 2<<20 {
		t.Errorf("write: %d, %v", n, err)
	}
	if free, _, err := f.Space("."); free != 0 || err != nil {
		t.Errorf("full, and %d are free, %v", free, err)
	}
	got := make([]byte, 4096)
	if _, err := h.ReadAt(got, 0); err != nil {
		t.Errorf("read on a full disk: %v", err)
	}
	if _, direct, err := f.OpenDirect("a"); direct || err != nil { // can't be probed now
		t.Errorf("direct on a full disk: %v, %v", direct, err)
	}
	if err := h.Truncate(0); err != nil {
		t.Fatal(err)
	}
	if _, direct, err := f.OpenDirect("a"); err != nil || !direct {
		t.Errorf("the full disk was taken for a fact about direct writes: %v, %v", direct, err)
	}
}

func TestOSPipeDoesNotBlock(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mkfifo(filepath.Join(dir, "pipe"), 0o600); err != nil {
		t.Fatal(err)
	}
	f := openOS(t, dir)
	if _, err := f.Open("pipe"); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("open of a pipe: %v", err)
	}
	if _, err := f.OpenWrite("pipe"); err == nil {
		t.Error("open of a pipe for writing worked")
	}
}

func TestAlignedBuffer(t *testing.T) {
	for _, n := range []int{0, 1, 512, 4095, 4096, 4097, 1 << 20} {
		b := vfs.AlignedBuffer(n)
		if len(b) != n || cap(b) != n {
			t.Errorf("%d: length %d, capacity %d", n, len(b), cap(b))
		}
		if at := uintptr(unsafe.Pointer(unsafe.SliceData(b))); n > 0 && at%vfs.BlockSize != 0 {
			t.Errorf("%d: memory at %x", n, at)
		}
		if !bytes.Equal(b, make([]byte, n)) {
			t.Errorf("%d: not zero", n)
		}
	}
}

func TestCleanName(t *testing.T) {
	for name, want := range map[string]string{"a": "a", ".": ".", "./a//b/": "a/b", "a/.": "a", strings.Repeat("a/", 100) + "b": strings.Repeat("a/", 100) + "b"} {
		if got, err := vfs.CleanName(name); got != want || err != nil {
			t.Errorf("%q: %q, %v", name, got, err)
		}
	}
}
