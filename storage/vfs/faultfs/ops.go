package faultfs

import (
	"errors"
	"io"
	"io/fs"

	"github.com/malachilog/malachi/storage/vfs"
)

// What memfs can do on top of the contract; see Drop.
type (
	dropFile interface{ DropUnsynced() }
	dropFS   interface {
		DropDir(name string) error
		DropAll()
	}
)

// wrap returns h as a file of f.
func (f *FS) wrap(h vfs.File, name string, direct bool) *file {
	return &file{fs: f, inner: h, name: name, direct: direct}
}

// opened runs an operation that returns a file. One that is to fail after its whole effect closes what it opened.
func (f *FS) opened(op Op, call func() (vfs.File, bool, error)) (vfs.File, bool, error) {
	var h vfs.File
	var direct bool
	err := f.run(op, func() (err error) { h, direct, err = call(); return err }, nil)
	if err != nil {
		if h != nil {
			err = errors.Join(err, h.Close())
		}
		return nil, false, err
	}
	return f.wrap(h, op.Name, direct), direct, nil
}

// Create implements vfs.FS.
func (f *FS) Create(name string) (vfs.File, error) {
	h, _, err := f.opened(Op{Kind: Create, Name: name}, func() (vfs.File, bool, error) {
		if err := f.mayCreate(Create, name); err != nil {
			return nil, false, err
		}
		h, err := f.inner.Create(name)
		return h, false, err
	})
	return h, err
}

// mayCreate refuses a new name on a full disk. A name that is there is not the disk's fault.
func (f *FS) mayCreate(kind Kind, name string) error {
	if _, err := f.inner.Stat(name); !vfs.IsNotExist(err) {
		return nil
	}
	if err := f.takeSpace(0); err != nil {
		return &fs.PathError{Op: string(kind), Path: name, Err: err}
	}
	return nil
}

// Open implements vfs.FS.
func (f *FS) Open(name string) (vfs.File, error) {
	h, _, err := f.opened(Op{Kind: Open, Name: name}, func() (vfs.File, bool, error) {
		h, err := f.inner.Open(name)
		return h, false, err
	})
	return h, err
}

// OpenWrite implements vfs.FS.
func (f *FS) OpenWrite(name string) (vfs.File, error) {
	h, _, err := f.opened(Op{Kind: OpenWrite, Name: name}, func() (vfs.File, bool, error) {
		h, err := f.inner.OpenWrite(name)
		return h, false, err
	})
	return h, err
}

// OpenDirect implements vfs.FS.
func (f *FS) OpenDirect(name string) (vfs.File, bool, error) {
	return f.opened(Op{Kind: OpenDirect, Name: name}, func() (vfs.File, bool, error) { return f.inner.OpenDirect(name) })
}

// Rename implements vfs.FS.
func (f *FS) Rename(oldName, newName string) error {
	return f.run(Op{Kind: Rename, Name: oldName, To: newName}, func() error {
		err := f.inner.Rename(oldName, newName)
		if err == nil {
			f.moveReserved(oldName, newName)
		}
		return err
	}, nil)
}

// moveReserved keeps what was allocated with the file's name; an empty name drops it.
func (f *FS) moveReserved(from, to string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	end, ok := f.reserved[from]
	delete(f.reserved, from)
	delete(f.reserved, to)
	if ok && to != "" {
		f.reserved[to] = end
	}
}

// Remove implements vfs.FS.
func (f *FS) Remove(name string) error {
	return f.run(Op{Kind: Remove, Name: name}, func() error {
		err := f.inner.Remove(name)
		if err == nil {
			f.moveReserved(name, "")
		}
		return err
	}, nil)
}

// MkdirAll implements vfs.FS. It is one operation, however many directories it makes.
func (f *FS) MkdirAll(name string) error {
	return f.run(Op{Kind: Mkdir, Name: name}, func() error {
		if err := f.mayCreate(Mkdir, name); err != nil {
			return err
		}
		return f.inner.MkdirAll(name)
	}, nil)
}

// List implements vfs.FS.
func (f *FS) List(name string) (list []vfs.DirEntry, err error) {
	err = f.run(Op{Kind: List, Name: name}, func() (err error) { list, err = f.inner.List(name); return err }, nil)
	return list, err
}

// Stat implements vfs.FS.
func (f *FS) Stat(name string) (e vfs.DirEntry, err error) {
	err = f.run(Op{Kind: Stat, Name: name}, func() (err error) { e, err = f.inner.Stat(name); return err }, nil)
	return e, err
}

// SyncDir implements vfs.FS.
func (f *FS) SyncDir(name string) error {
	return f.run(Op{Kind: SyncDir, Name: name}, func() error { return f.inner.SyncDir(name) }, func(e Effect) error {
		if d, ok := f.inner.(dropFS); ok && e == Drop {
			return d.DropDir(name)
		}
		return nil
	})
}

// SyncFS implements vfs.FS.
func (f *FS) SyncFS(name string) error {
	return f.run(Op{Kind: SyncFS, Name: name}, func() error { return f.inner.SyncFS(name) }, func(e Effect) error {
		if d, ok := f.inner.(dropFS); ok && e == Drop {
			d.DropAll()
		}
		return nil
	})
}

// Lock implements vfs.FS.
func (f *FS) Lock(name string) (io.Closer, error) {
	var l io.Closer
	err := f.run(Op{Kind: Lock, Name: name}, func() (err error) {
		if err := f.mayCreate(Lock, name); err != nil {
			return err
		}
		l, err = f.inner.Lock(name)
		return err
	}, nil)
	if err != nil {
		if l != nil {
			err = errors.Join(err, l.Close())
		}
		return nil, err
	}
	return l, nil
}

// Space implements vfs.FS. Free space is at most what NoSpaceAfter left.
func (f *FS) Space(name string) (free, total uint64, err error) {
	err = f.run(Op{Kind: Space, Name: name}, func() (err error) { free, total, err = f.inner.Space(name); return err }, nil)
	if err != nil {
		return 0, 0, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.budget != Unlimited {
		free = min(free, uint64(f.budget))
	}
	return free, total, nil
}

// file is an open file of an FS.
type file struct {
	fs     *FS
	inner  vfs.File
	name   string
	direct bool
}

var _ vfs.File = (*file)(nil)

// ReadAt implements vfs.File.
func (h *file) ReadAt(p []byte, off int64) (n int, err error) {
	// The end of a file is no failure and not worth a line, so it does not go through run's error.
	var end error
	err = h.fs.run(Op{Kind: Read, Name: h.name, Off: off, Len: int64(len(p)), Direct: h.direct}, func() (err error) {
		n, err = h.inner.ReadAt(p, off)
		if err == io.EOF {
			end, err = err, nil
		}
		return err
	}, nil)
	if err != nil {
		return 0, err
	}
	return n, end
}

// WriteAt implements vfs.File.
func (h *file) WriteAt(p []byte, off int64) (n int, err error) {
	err = h.fs.run(Op{Kind: Write, Name: h.name, Off: off, Len: int64(len(p)), Direct: h.direct}, func() (err error) {
		if err := h.grow(off, int64(len(p))); err != nil {
			return err
		}
		n, err = h.inner.WriteAt(p, off)
		return err
	}, func(e Effect) error {
		if e != Half {
			return nil
		}
		return h.tear(p, off)
	})
	if err != nil && n == len(p) { // carried out, and reported as failed
		n = 0
	}
	return n, err
}

// grow charges what a write adds beyond size and reservation.
func (h *file) grow(off, n int64) error {
	size, err := h.inner.Size()
	if err != nil {
		return err
	}
	h.fs.mu.Lock()
	have := max(size, h.fs.reserved[h.name])
	h.fs.mu.Unlock()
	if off < 0 || n == 0 || off+n <= have {
		return nil
	}
	if err := h.fs.takeSpace(off + n - max(have, off)); err != nil {
		return &fs.PathError{Op: string(Write), Path: h.name, Err: err}
	}
	return nil
}

// tear writes the first half of the sectors that p touches. A direct file gets whole blocks, in which the other sectors stay as
// they were.
func (h *file) tear(p []byte, off int64) error {
	first := off / vfs.SectorSize
	sectors := (off+int64(len(p))+vfs.SectorSize-1)/vfs.SectorSize - first
	end := (first + sectors/2) * vfs.SectorSize // in the file
	if end <= off {
		return nil
	}
	half := p[:end-off]
	if !h.direct {
		_, err := h.inner.WriteAt(half, off)
		return err
	}
	blocks := vfs.AlignedBuffer((len(half) + vfs.BlockSize - 1) / vfs.BlockSize * vfs.BlockSize)
	if _, err := h.inner.ReadAt(blocks, off); err != nil && err != io.EOF {
		return err
	}
	copy(blocks, half)
	_, err := h.inner.WriteAt(blocks, off)
	return err
}

// Sync implements vfs.File.
func (h *file) Sync() error {
	return h.fs.run(Op{Kind: Sync, Name: h.name}, h.inner.Sync, func(e Effect) error {
		if d, ok := h.inner.(dropFile); ok && e == Drop {
			d.DropUnsynced()
		}
		return nil
	})
}

// Size implements vfs.File.
func (h *file) Size() (n int64, err error) {
	err = h.fs.run(Op{Kind: Size, Name: h.name}, func() (err error) { n, err = h.inner.Size(); return err }, nil)
	return n, err
}

// Truncate implements vfs.File. Growth by Truncate is a hole and takes no space.
func (h *file) Truncate(size int64) error {
	return h.fs.run(Op{Kind: Truncate, Name: h.name, Len: size}, func() error {
		err := h.inner.Truncate(size)
		if err == nil {
			h.fs.mu.Lock()
			if h.fs.reserved[h.name] > size {
				delete(h.fs.reserved, h.name)
			}
			h.fs.mu.Unlock()
		}
		return err
	}, nil)
}

// Allocate implements vfs.File.
func (h *file) Allocate(off, n int64) error {
	return h.fs.run(Op{Kind: Allocate, Name: h.name, Off: off, Len: n}, func() error {
		if err := h.reserve(off, n); err != nil {
			return &fs.PathError{Op: string(Allocate), Path: h.name, Err: err}
		}
		err := h.inner.Allocate(off, n)
		if err == nil {
			h.fs.mu.Lock()
			h.fs.reserved[h.name] = max(h.fs.reserved[h.name], off+n)
			h.fs.mu.Unlock()
		}
		return err
	}, nil)
}

// reserve charges what [off, off+n) adds. Nonsense is left to the wrapped file system to refuse.
func (h *file) reserve(off, n int64) error {
	if off < 0 || n <= 0 {
		return nil
	}
	size, err := h.inner.Size()
	if err != nil {
		return err
	}
	h.fs.mu.Lock()
	have := max(size, h.fs.reserved[h.name])
	h.fs.mu.Unlock()
	if off+n <= have {
		return nil
	}
	return h.fs.takeSpace(off + n - max(have, off))
}

// StartWriteback implements vfs.File.
func (h *file) StartWriteback(off, n int64) { h.inner.StartWriteback(off, n) }

// DropUnsynced passes on, so that wrappers can be stacked.
func (h *file) DropUnsynced() {
	if d, ok := h.inner.(dropFile); ok {
		d.DropUnsynced()
	}
}

// Close implements vfs.File. The file is closed also when a rule makes Close fail.
func (h *file) Close() error {
	op := Op{Kind: Close, Name: h.name}
	fault := h.fs.begin(&op)
	err := h.inner.Close()
	if fault != nil {
		err = &fs.PathError{Op: string(Close), Path: h.name, Err: errors.Join(fault.err(), err)}
	}
	h.fs.end(op, err)
	return err
}
