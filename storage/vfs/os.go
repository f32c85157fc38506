//go:build linux || darwin

package vfs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	filePerm = 0o640
	dirPerm  = 0o750
	// probeName is made and unlinked at once in a directory where direct writes are tried. One that a crash left is replaced.
	probeName = ".direct-probe"
)

// OS is the file system of the operating system below a root directory. Symbolic links that lead out of the root are refused,
// also when they are put there while it runs. There are no goroutines; the one lock guards what is known about direct writes.
// Locks are flocks: they end with the process.
type OS struct {
	root *os.Root

	mu     sync.Mutex
	direct map[string]bool // directory -> direct writes work there
}

var _ FS = (*OS)(nil)

// NewOS opens the directory root, which must exist. Its own name is the caller's to make durable.
func NewOS(root string) (*OS, error) {
	r, err := os.OpenRoot(root)
	if err != nil {
		return nil, err
	}
	return &OS{root: r, direct: map[string]bool{}}, nil
}

// Close releases the root directory. Files that are open stay usable.
func (o *OS) Close() error { return o.root.Close() }

// open opens a regular file.
func (o *OS) open(name string, flag int) (*os.File, error) {
	clean, err := CleanName(name)
	if err != nil {
		return nil, err
	}
	f, err := o.root.OpenFile(clean, flag, filePerm)
	if err != nil {
		return nil, mapErr(err)
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = &fs.PathError{Op: "open", Path: name, Err: syscall.EISDIR}
		if !st.IsDir() {
			err = &fs.PathError{Op: "open", Path: name, Err: fmt.Errorf("%w: not a regular file", fs.ErrInvalid)}
		}
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// Create implements FS.
func (o *OS) Create(name string) (File, error) {
	f, err := o.open(name, os.O_RDWR|os.O_CREATE|os.O_EXCL)
	if err != nil {
		return nil, err
	}
	return &osFile{f: f, name: name}, nil
}

// Open implements FS. A name that is a pipe does not block.
func (o *OS) Open(name string) (File, error) {
	f, err := o.open(name, os.O_RDONLY|syscall.O_NONBLOCK)
	if err != nil {
		return nil, err
	}
	return &osFile{f: f, name: name, readOnly: true}, nil
}

// OpenWrite implements FS.
func (o *OS) OpenWrite(name string) (File, error) {
	f, err := o.open(name, os.O_RDWR|syscall.O_NONBLOCK)
	if err != nil {
		return nil, err
	}
	return &osFile{f: f, name: name}, nil
}

// OpenDirect implements FS. Whether direct writes work is tried once per directory, with a file of one block that is written and
// read back. On a full disk it can't be tried, and the file is buffered.
func (o *OS) OpenDirect(name string) (File, bool, error) {
	clean, err := CleanName(name)
	if err != nil {
		return nil, false, err
	}
	works, err := o.probeDirect(path.Dir(clean))
	if err != nil {
		return nil, false, err
	}
	if !works {
		f, err := o.OpenWrite(name)
		return f, false, err
	}
	f, err := o.open(name, os.O_RDWR|syscall.O_NONBLOCK|directFlags)
	if err != nil {
		return nil, false, err
	}
	return &osFile{f: f, name: name, direct: true}, true, nil
}

// probeDirect reports whether direct writes work for files of a directory.
func (o *OS) probeDirect(dir string) (bool, error) {
	if directFlags == 0 {
		return false, nil
	}
	o.mu.Lock()
	works, known := o.direct[dir]
	o.mu.Unlock()
	if known {
		return works, nil
	}
	err := o.tryDirect(dir)
	switch {
	case err == nil:
		works = true
	case errors.Is(err, syscall.EINVAL), errors.Is(err, syscall.EOPNOTSUPP), errors.Is(err, errProbeDiffers):
		works = false
	case errors.Is(err, ErrNoSpace):
		return false, nil // not a fact to keep
	default:
		return false, fmt.Errorf("probe direct writes in %s: %w", dir, err)
	}
	o.mu.Lock()
	o.direct[dir] = works
	o.mu.Unlock()
	return works, nil
}

var errProbeDiffers = errors.New("a direct read returned other bytes than were written")

func (o *OS) tryDirect(dir string) error {
	name := path.Join(dir, probeName)
	var f *os.File
	var err error
	for range 3 { // another prober may come in between
		f, err = o.root.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL|directFlags, filePerm)
		if !errors.Is(err, fs.ErrExist) {
			break
		}
		if rerr := o.root.Remove(name); rerr != nil && !IsNotExist(rerr) {
			return rerr
		}
	}
	if err != nil {
		// Some file systems make the file and then refuse the flag.
		if rerr := o.root.Remove(name); rerr != nil && !IsNotExist(rerr) {
			return errors.Join(mapErr(err), rerr)
		}
		return mapErr(err)
	}
	h := &osFile{f: f, name: name, direct: true}
	err = o.root.Remove(name)
	if err == nil {
		err = tryBlock(h)
	}
	return errors.Join(err, f.Close())
}

// tryBlock writes and reads back one block.
func tryBlock(h *osFile) error {
	want, got := AlignedBuffer(BlockSize), AlignedBuffer(BlockSize)
	for i := range want {
		want[i] = byte(i*7 + i>>8 + 1)
	}
	if _, err := h.WriteAt(want, 0); err != nil {
		return err
	}
	if _, err := h.ReadAt(got, 0); err != nil {
		return err
	}
	if !bytes.Equal(want, got) {
		return errProbeDiffers
	}
	return nil
}

// Rename implements FS.
func (o *OS) Rename(oldName, newName string) error {
	from, err := CleanName(oldName)
	if err != nil {
		return err
	}
	to, err := CleanName(newName)
	if err != nil {
		return err
	}
	return mapErr(o.root.Rename(from, to))
}

// Remove implements FS.
func (o *OS) Remove(name string) error {
	clean, err := CleanName(name)
	if err != nil {
		return err
	}
	if clean == "." {
		return &fs.PathError{Op: "remove", Path: name, Err: fs.ErrInvalid}
	}
	return mapErr(o.root.Remove(clean))
}

// MkdirAll implements FS.
func (o *OS) MkdirAll(name string) error {
	clean, err := CleanName(name)
	if err != nil {
		return err
	}
	return mapErr(o.root.MkdirAll(clean, dirPerm))
}

// openDir opens a directory for reading and syncing.
func (o *OS) openDir(name string) (*os.File, error) {
	clean, err := CleanName(name)
	if err != nil {
		return nil, err
	}
	f, err := o.root.OpenFile(clean, os.O_RDONLY|syscall.O_DIRECTORY, 0)
	return f, mapErr(err)
}

// List implements FS.
func (o *OS) List(name string) ([]DirEntry, error) {
	d, err := o.openDir(name)
	if err != nil {
		return nil, err
	}
	entries, err := d.ReadDir(-1)
	if err = errors.Join(mapErr(err), d.Close()); err != nil {
		return nil, err
	}
	out := make([]DirEntry, 0, len(entries))
	for _, e := range entries {
		info, err := o.root.Lstat(path.Join(path.Clean(name), e.Name()))
		if IsNotExist(err) {
			continue // removed since
		}
		if err != nil {
			return nil, mapErr(err)
		}
		out = append(out, dirEntry(info))
	}
	slices.SortFunc(out, func(a, b DirEntry) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

func dirEntry(info fs.FileInfo) DirEntry {
	e := DirEntry{Name: info.Name(), Size: info.Size(), Dir: info.IsDir()}
	if e.Dir {
		e.Size = 0
	}
	return e
}

// Stat implements FS.
func (o *OS) Stat(name string) (DirEntry, error) {
	clean, err := CleanName(name)
	if err != nil {
		return DirEntry{}, err
	}
	info, err := o.root.Stat(clean)
	if err != nil {
		return DirEntry{}, mapErr(err)
	}
	e := dirEntry(info)
	e.Name = path.Base(clean)
	return e, nil
}

// SyncDir implements FS.
func (o *OS) SyncDir(name string) error {
	d, err := o.openDir(name)
	if err != nil {
		return err
	}
	return errors.Join(mapErr(d.Sync()), d.Close())
}

// SyncFS implements FS.
func (o *OS) SyncFS(name string) error {
	return o.withAny(name, func(fd int) error { return syncFS(fd) }, "syncfs")
}

// Space implements FS. What is free for root only does not count.
func (o *OS) Space(name string) (free, total uint64, err error) {
	err = o.withAny(name, func(fd int) error {
		var st unix.Statfs_t
		if err := retry(func() error { return unix.Fstatfs(fd, &st) }); err != nil {
			return err
		}
		unit := blockUnit(&st)
		free, total = st.Bavail*unit, st.Blocks*unit
		return nil
	}, "statfs")
	return free, total, err
}

// withAny opens a file or directory for a call that only needs a descriptor.
func (o *OS) withAny(name string, call func(fd int) error, op string) error {
	clean, err := CleanName(name)
	if err != nil {
		return err
	}
	f, err := o.root.OpenFile(clean, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return mapErr(err)
	}
	return errors.Join(onFD(f, name, op, call), f.Close())
}

// Lock implements FS. It excludes other processes and other FS values of this one alike.
func (o *OS) Lock(name string) (io.Closer, error) {
	f, err := o.open(name, os.O_RDWR|os.O_CREATE)
	if err != nil {
		return nil, err
	}
	err = onFD(f, name, "lock", func(fd int) error {
		err := retry(func() error { return unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) })
		if errors.Is(err, unix.EWOULDBLOCK) {
			return ErrLocked
		}
		return err
	})
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// osFile is an open file. What the os package does well (retries, short writes) is left to it.
type osFile struct {
	f        *os.File
	name     string
	direct   bool
	readOnly bool
}

var _ File = (*osFile)(nil)

func (h *osFile) fail(op string, err error) error {
	return &fs.PathError{Op: op, Path: h.name, Err: err}
}

// ReadAt implements File.
func (h *osFile) ReadAt(p []byte, off int64) (int, error) {
	if !h.direct {
		n, err := h.f.ReadAt(p, off)
		return n, mapErr(err)
	}
	if err := CheckAligned(p, off); err != nil {
		return 0, h.fail("read", err)
	}
	// os.File would go on behind a last block that is not full, at an offset that is not aligned.
	done := 0
	for done < len(p) {
		n := 0
		err := onFD(h.f, h.name, "read", func(fd int) error {
			return retry(func() (err error) { n, err = unix.Pread(fd, p[done:], off+int64(done)); return err })
		})
		if err != nil {
			return done, err
		}
		done += n
		if n == 0 || n%BlockSize != 0 {
			break
		}
	}
	if done < len(p) {
		return done, io.EOF
	}
	return done, nil
}

// WriteAt implements File.
func (h *osFile) WriteAt(p []byte, off int64) (int, error) {
	if h.readOnly {
		return 0, h.fail("write", fs.ErrPermission)
	}
	if h.direct {
		if err := CheckAligned(p, off); err != nil {
			return 0, h.fail("write", err)
		}
	}
	n, err := h.f.WriteAt(p, off)
	return n, mapErr(err)
}

// Sync implements File.
func (h *osFile) Sync() error { return onFile(h, "sync", func(fd int) error { return dataSync(fd) }) }

// Size implements File.
func (h *osFile) Size() (int64, error) {
	st, err := h.f.Stat()
	if err != nil {
		return 0, err
	}
	return st.Size(), nil
}

// Truncate implements File.
func (h *osFile) Truncate(size int64) error {
	if h.readOnly {
		return h.fail("truncate", fs.ErrPermission)
	}
	return mapErr(h.f.Truncate(size))
}

// Allocate implements File.
func (h *osFile) Allocate(off, n int64) error {
	if h.readOnly {
		return h.fail("allocate", fs.ErrPermission)
	}
	if off < 0 || n <= 0 {
		return h.fail("allocate", fs.ErrInvalid)
	}
	return onFile(h, "allocate", func(fd int) error { return allocate(fd, off, n) })
}

// StartWriteback implements File.
func (h *osFile) StartWriteback(off, n int64) {
	_ = onFile(h, "writeback", func(fd int) error { startWriteback(fd, off, n); return nil }) // a hint; a closed file needs none
}

// Close implements File.
func (h *osFile) Close() error { return mapErr(h.f.Close()) }

func onFile(h *osFile, op string, call func(fd int) error) error { return onFD(h.f, h.name, op, call) }

// onFD runs call while the descriptor can't be closed.
func onFD(f *os.File, name, op string, call func(fd int) error) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return &fs.PathError{Op: op, Path: name, Err: err}
	}
	var cerr error
	if err := conn.Control(func(fd uintptr) { cerr = call(int(fd)) }); err != nil {
		if _, err := f.Stat(); errors.Is(err, fs.ErrClosed) { // Control says so in words only
			return &fs.PathError{Op: op, Path: name, Err: fs.ErrClosed}
		}
		return &fs.PathError{Op: op, Path: name, Err: err}
	}
	if cerr != nil {
		return mapErr(&fs.PathError{Op: op, Path: name, Err: cerr})
	}
	return nil
}

// retry repeats a system call that a signal interrupted.
func retry(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// mapErr makes a full disk, or a full quota, ErrNoSpace.
func mapErr(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return fmt.Errorf("%w: %w", ErrNoSpace, err)
	}
	return err
}
