package memfs

import (
	"io"
	"io/fs"
	"sync/atomic"
	"syscall"

	"github.com/malachilog/malachi/storage/vfs"
)

// maxFileSize bounds the page table of one file (32 MiB of pointers).
const maxFileSize = 16 << 30

// file is an open file.
type file struct {
	fs        *FS
	ino       *inode
	name      string // when it was opened
	direct    bool
	readOnly  bool
	holdsLock bool
	closed    atomic.Bool
}

var _ vfs.File = (*file)(nil)

func (h *file) check(op string, writes bool) error {
	if h.closed.Load() {
		return wrap(op, h.name, fs.ErrClosed)
	}
	if writes && h.readOnly {
		return wrap(op, h.name, fs.ErrPermission)
	}
	return nil
}

// ReadAt implements vfs.File.
func (h *file) ReadAt(p []byte, off int64) (int, error) {
	if err := h.check("read", false); err != nil {
		return 0, err
	}
	if off < 0 {
		return 0, wrap("read", h.name, fs.ErrInvalid)
	}
	if h.direct {
		if err := vfs.CheckAligned(p, off); err != nil {
			return 0, wrap("read", h.name, err)
		}
	}
	h.fs.mu.RLock()
	defer h.fs.mu.RUnlock()
	n := h.ino.vol.readAt(p, off)
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// WriteAt implements vfs.File. On a full disk the pages that fit are written.
func (h *file) WriteAt(p []byte, off int64) (int, error) {
	if err := h.check("write", true); err != nil {
		return 0, err
	}
	if off < 0 {
		return 0, wrap("write", h.name, fs.ErrInvalid)
	}
	if off > maxFileSize-int64(len(p)) {
		return 0, wrap("write", h.name, syscall.EFBIG)
	}
	if h.direct {
		if err := vfs.CheckAligned(p, off); err != nil {
			return 0, wrap("write", h.name, err)
		}
	}
	if len(p) == 0 {
		return 0, nil
	}
	n := 0
	op := Op{Kind: OpWrite, Name: h.name, Off: off, Direct: h.direct}
	var settle func()
	if h.direct {
		settle = func() {
			if !h.fs.opts.LieDirect {
				h.ino.syncPages(off/pageSize, (off+int64(n))/pageSize)
			}
		}
	}
	err := h.fs.do(&op, func() (bool, error) {
		var err error
		n, err = h.fs.write(h.ino, p, off)
		op.Len = int64(n)
		return n > 0, err
	}, settle)
	return n, wrap("write", h.name, err)
}

// write changes the volatile bytes. Under mu.
func (f *FS) write(n *inode, p []byte, off int64) (int, error) {
	done := 0
	var err error
	for done < len(p) {
		at := off + int64(done)
		i, in := at/pageSize, int(at%pageSize)
		if n.vol.page(i) == nil && !(i < int64(len(n.marks)) && n.marks[i].reserved) {
			if err = f.charge(1); err != nil {
				break
			}
		}
		w := n.vol.writable(i)
		c := copy(w.data[in:], p[done:])
		first, last := in/sectorSize, (in+c-1)/sectorSize
		n.dirty(i, uint8(1<<(last+1)-1)&^uint8(1<<first-1))
		done += c
	}
	end := off + int64(done)
	if done > 0 && end > n.vol.size {
		n.resize(end, f.newSeq())
	}
	// The next writeback of a rewritten tail also brings the length that a failed one gave up.
	if last := len(n.sizes) - 1; last >= 0 && n.sizes[last].dropped && end > n.dur.size {
		n.sizes[last].dropped = false
	}
	return done, err
}

// charge takes space for pages.
func (f *FS) charge(pages int64) error {
	if f.opts.Capacity == 0 {
		return nil
	}
	want := uint64(pages) * pageSize
	if want > f.opts.Capacity-min(f.used, f.opts.Capacity) {
		return vfs.ErrNoSpace
	}
	f.used += want
	return nil
}

// charged is the space that n takes, in bytes.
func (n *inode) charged() uint64 {
	pages := uint64(0)
	for i := range max(len(n.vol.pages), len(n.marks)) {
		if n.takes(int64(i)) {
			pages++
		}
	}
	return pages * pageSize
}

// takes reports whether page i has space on the device.
func (n *inode) takes(i int64) bool {
	return n.vol.page(i) != nil || i < int64(len(n.marks)) && n.marks[i].reserved
}

// Sync implements vfs.File.
func (h *file) Sync() error {
	if err := h.check("sync", false); err != nil {
		return err
	}
	op := Op{Kind: OpSync, Name: h.name}
	return h.fs.do(&op, func() (bool, error) { return true, nil }, func() {
		if !h.fs.opts.LieSync {
			h.ino.sync()
		}
	})
}

// DropUnsynced makes the file system forget that bytes of the file are not durable, as after a failed sync: a later Sync succeeds
// and makes only what was written again durable. For fault injection.
func (h *file) DropUnsynced() {
	h.fs.mu.Lock()
	defer h.fs.mu.Unlock()
	h.ino.drop()
}

// Size implements vfs.File.
func (h *file) Size() (int64, error) {
	if err := h.check("size", false); err != nil {
		return 0, err
	}
	h.fs.mu.RLock()
	defer h.fs.mu.RUnlock()
	return h.ino.vol.size, nil
}

// Truncate implements vfs.File.
func (h *file) Truncate(size int64) error {
	if err := h.check("truncate", true); err != nil {
		return err
	}
	if size < 0 {
		return wrap("truncate", h.name, fs.ErrInvalid)
	}
	if size > maxFileSize {
		return wrap("truncate", h.name, syscall.EFBIG)
	}
	op := Op{Kind: OpTruncate, Name: h.name, Len: size}
	return h.fs.do(&op, func() (bool, error) {
		changed := size != h.ino.vol.size
		before := h.fs.before(h.ino)
		if changed {
			h.ino.resize(size, h.fs.newSeq())
		}
		keep := (size + pageSize - 1) / pageSize
		for i := keep; i < int64(len(h.ino.marks)); i++ { // reservations beyond the end go too
			h.ino.marks[i].reserved = false
		}
		h.fs.used -= before - h.fs.before(h.ino)
		return changed, nil
	}, nil)
}

// before is what a file takes, if anyone counts.
func (f *FS) before(n *inode) uint64 {
	if f.opts.Capacity == 0 {
		return 0
	}
	return n.charged()
}

// Allocate implements vfs.File.
func (h *file) Allocate(off, n int64) error {
	if err := h.check("allocate", true); err != nil {
		return err
	}
	if off < 0 || n <= 0 {
		return wrap("allocate", h.name, fs.ErrInvalid)
	}
	if off > maxFileSize-n {
		return wrap("allocate", h.name, syscall.EFBIG)
	}
	op := Op{Kind: OpAllocate, Name: h.name, Off: off, Len: n}
	err := h.fs.do(&op, func() (bool, error) {
		first, end := off/pageSize, (off+n+pageSize-1)/pageSize
		need := int64(0)
		for i := first; i < end; i++ {
			if !h.ino.takes(i) {
				need++
			}
		}
		if err := h.fs.charge(need); err != nil {
			return false, err
		}
		for i := first; i < end; i++ {
			h.ino.mark(i).reserved = true
		}
		return true, nil
	}, nil)
	return wrap("allocate", h.name, err)
}

// StartWriteback implements vfs.File. A crash clone may keep any sector at any time, so there is nothing to do.
func (h *file) StartWriteback(int64, int64) {}

// Close implements vfs.File.
func (h *file) Close() error {
	if h.closed.Swap(true) {
		return wrap("close", h.name, fs.ErrClosed)
	}
	h.fs.mu.Lock()
	defer h.fs.mu.Unlock()
	if h.holdsLock {
		h.ino.locked = false
	}
	h.ino.handles--
	h.fs.release(h.ino)
	return nil
}
