// Package memfs is a file system in memory that knows what a power cut would leave. It keeps, beside what programs see, what is
// durable, and the units in between: 512-byte sectors, file lengths, and operations on directory entries. CrashClone makes a new
// file system from the durable state and any choice of those units, so a test can see every outcome that the contract of vfs
// allows, torn writes included, at every operation.
//
// A hook (OnOp) is called after each operation. Durability is granted after the hook returns: a crash clone made inside it sees
// the sync, or the direct write, that was asked for and not finished.
//
// One lock guards the state, and one more makes mutating operations, hooks included, happen one after the other. There are no
// goroutines.
package memfs

import (
	"fmt"
	"io"
	"io/fs"
	"path"
	"strings"
	"sync"
	"syscall"

	"github.com/malachilog/malachi/storage/vfs"
)

// Options are fixed when a file system is made. The zero value is an endless disk without direct writes.
type Options struct {
	// Direct lets OpenDirect open files whose writes are durable when they return. Otherwise they are buffered.
	Direct bool
	// Capacity in bytes; 0 is no limit. Files take whole blocks of vfs.BlockSize; names and holes take nothing.
	Capacity uint64

	// Lies, for tests of tests: the operation reports success and makes nothing durable.
	LieSync    bool // File.Sync
	LieDirSync bool // FS.SyncDir
	LieDirect  bool // WriteAt of a direct file
}

// OpKind says what an operation did.
type OpKind uint8

// The kinds of operations that reach the hook.
const (
	OpCreate OpKind = iota + 1
	OpMkdir
	OpRename
	OpRemove
	OpWrite
	OpTruncate
	OpAllocate
	OpSync
	OpSyncDir
	OpSyncFS
)

func (k OpKind) String() string {
	return [...]string{"?", "create", "mkdir", "rename", "remove", "write", "truncate", "allocate", "sync", "syncdir", "syncfs"}[k]
}

// Op is an operation that took effect.
type Op struct {
	Kind OpKind
	Name string
	To   string // the new name of a rename
	// Off and Len are what was written or reserved; Len is the new length after a truncate.
	Off, Len int64
	// Direct writes are durable when they return.
	Direct bool
	// Done is true in the second call for an operation that makes something durable: it is durable now. In the first call it is
	// not yet.
	Done bool
}

// String is the operation on one line.
func (o Op) String() string {
	s := o.Kind.String() + " " + o.Name
	switch o.Kind {
	case OpRename:
		s += " -> " + o.To
	case OpWrite, OpAllocate:
		s += fmt.Sprintf(" off=%d len=%d", o.Off, o.Len)
	case OpTruncate:
		s += fmt.Sprintf(" len=%d", o.Len)
	}
	if o.Direct {
		s += " direct"
	}
	if o.Done {
		s += " done"
	}
	return s
}

// FS is a vfs.FS in memory. The root directory exists and is durable.
type FS struct {
	opts Options

	ops sync.Mutex // held over a mutating operation and its hooks; taken before mu
	mu  sync.RWMutex

	hook   func(Op)
	root   *inode
	nextID uint64
	seq    uint64 // of units
	used   uint64 // bytes; only kept if there is a capacity
}

var _ vfs.FS = (*FS)(nil)

// New makes an empty file system.
func New(opts Options) *FS {
	return &FS{opts: opts, root: newDir(0)}
}

func newDir(id uint64) *inode {
	return &inode{id: id, dir: true, entries: map[string]*inode{}, durable: map[string]*inode{}}
}

// OnOp sets the hook, nil for none. It is called after each mutating operation took effect and before its caller gets the answer;
// for one that makes something durable, a first time before that and a second time (Done) after. Calls come one at a time, on the
// goroutine of the operation. The hook may read, list units and clone; a mutating operation on the same file system from inside
// it never returns. Operations that failed without effect don't reach it.
func (f *FS) OnOp(hook func(Op)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.hook = hook
}

// do runs one mutating operation: apply changes the volatile state and reports whether there was a change; then the hook; then
// settle makes durable (nil: nothing to make so). Both run under mu. The operation may change op's extent in apply.
func (f *FS) do(op *Op, apply func() (changed bool, err error), settle func()) error {
	f.ops.Lock()
	defer f.ops.Unlock()
	f.mu.Lock()
	changed, err := apply()
	hook := f.hook
	f.mu.Unlock()
	if !changed {
		return err
	}
	if hook != nil {
		hook(*op)
	}
	if settle == nil {
		return err
	}
	f.mu.Lock()
	settle()
	f.mu.Unlock()
	if hook != nil {
		done := *op
		done.Done = true
		hook(done)
	}
	return err
}

func (f *FS) newSeq() uint64 {
	f.seq++
	return f.seq
}

func (f *FS) newID() uint64 {
	f.nextID++
	return f.nextID
}

// find walks to name, which must be clean. Under mu.
func (f *FS) find(name string) (*inode, error) {
	n := f.root
	if name == "." {
		return n, nil
	}
	for el := range strings.SplitSeq(name, "/") {
		if !n.dir {
			return nil, syscall.ENOTDIR
		}
		next, ok := n.entries[el]
		if !ok {
			return nil, fs.ErrNotExist
		}
		n = next
	}
	return n, nil
}

// parent finds the directory of name and its last element. Under mu.
func (f *FS) parent(name string) (*inode, string, error) {
	if name == "." {
		return nil, "", fs.ErrInvalid
	}
	dir, err := f.find(path.Dir(name))
	if err != nil {
		return nil, "", err
	}
	if !dir.dir {
		return nil, "", syscall.ENOTDIR
	}
	return dir, path.Base(name), nil
}

func (f *FS) findFile(name string) (*inode, error) {
	n, err := f.find(name)
	if err == nil && n.dir {
		return nil, syscall.EISDIR
	}
	return n, err
}

func (f *FS) findDir(name string) (*inode, error) {
	n, err := f.find(name)
	if err == nil && !n.dir {
		return nil, syscall.ENOTDIR
	}
	return n, err
}

// link and unlink change the volatile entries and note the unit. Under mu.
func (f *FS) link(dir *inode, kind entryKind, name string, n *inode) {
	if old := dir.entries[name]; old != nil {
		f.unref(old)
	}
	dir.entries[name] = n
	n.links++
	n.path = path.Join(dir.path, name)
	dir.pending = append(dir.pending, entryOp{seq: f.newSeq(), kind: kind, name: name, ino: n})
}

func (f *FS) unlink(dir *inode, kind entryKind, name string) {
	n := dir.entries[name]
	delete(dir.entries, name)
	dir.pending = append(dir.pending, entryOp{seq: f.newSeq(), kind: kind, name: name, ino: n})
	f.unref(n)
}

func (f *FS) unref(n *inode) {
	n.links--
	f.release(n)
}

// release gives the space of a file back when nothing refers to it.
func (f *FS) release(n *inode) {
	if n.links == 0 && n.handles == 0 && f.opts.Capacity > 0 {
		f.used -= n.charged()
	}
}

func (f *FS) open(name string, direct, readOnly bool) (*file, error) {
	clean, err := vfs.CleanName(name)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	n, err := f.findFile(clean)
	if err != nil {
		return nil, wrap("open", name, err)
	}
	n.handles++
	return &file{fs: f, ino: n, name: clean, direct: direct, readOnly: readOnly}, nil
}

// Open implements vfs.FS.
func (f *FS) Open(name string) (vfs.File, error) { return asFile(f.open(name, false, true)) }

// OpenWrite implements vfs.FS.
func (f *FS) OpenWrite(name string) (vfs.File, error) { return asFile(f.open(name, false, false)) }

// OpenDirect implements vfs.FS.
func (f *FS) OpenDirect(name string) (vfs.File, bool, error) {
	h, err := asFile(f.open(name, f.opts.Direct, false))
	return h, f.opts.Direct && err == nil, err
}

// asFile keeps a nil *file from becoming a File that is not nil.
func asFile(h *file, err error) (vfs.File, error) {
	if err != nil {
		return nil, err
	}
	return h, nil
}

// Create implements vfs.FS.
func (f *FS) Create(name string) (vfs.File, error) {
	return asFile(f.create(name, false))
}

// create makes a file, or, if it may be there, opens it.
func (f *FS) create(name string, mayExist bool) (*file, error) {
	clean, err := vfs.CleanName(name)
	if err != nil {
		return nil, err
	}
	var h *file
	err = f.do(&Op{Kind: OpCreate, Name: clean}, func() (bool, error) {
		dir, base, err := f.parent(clean)
		if err != nil {
			return false, err
		}
		n, exists := dir.entries[base]
		switch {
		case exists && !mayExist:
			return false, fs.ErrExist
		case exists && n.dir:
			return false, syscall.EISDIR
		case !exists:
			n = &inode{id: f.newID()}
			f.link(dir, entryCreate, base, n)
		}
		n.handles++
		h = &file{fs: f, ino: n, name: clean}
		return !exists, nil
	}, nil)
	return h, wrap("create", name, err)
}

// MkdirAll implements vfs.FS.
func (f *FS) MkdirAll(name string) error {
	clean, err := vfs.CleanName(name)
	if err != nil {
		return err
	}
	if clean == "." {
		return nil
	}
	for i := 0; i <= len(clean); i++ {
		if i < len(clean) && clean[i] != '/' {
			continue
		}
		at := clean[:i]
		err := f.do(&Op{Kind: OpMkdir, Name: at}, func() (bool, error) {
			dir, base, err := f.parent(at)
			if err != nil {
				return false, err
			}
			if n := dir.entries[base]; n != nil {
				if !n.dir {
					return false, syscall.ENOTDIR
				}
				return false, nil
			}
			f.link(dir, entryCreate, base, newDir(f.newID()))
			return true, nil
		}, nil)
		if err != nil {
			return wrap("mkdir", name, err)
		}
	}
	return nil
}

// Remove implements vfs.FS. Files that are open live on without a name.
func (f *FS) Remove(name string) error {
	clean, err := vfs.CleanName(name)
	if err != nil {
		return err
	}
	err = f.do(&Op{Kind: OpRemove, Name: clean}, func() (bool, error) {
		dir, base, err := f.parent(clean)
		if err != nil {
			return false, err
		}
		n := dir.entries[base]
		if n == nil {
			return false, fs.ErrNotExist
		}
		if n.dir && len(n.entries) > 0 {
			return false, syscall.ENOTEMPTY
		}
		f.unlink(dir, entryRemove, base)
		return true, nil
	}, nil)
	return wrap("remove", name, err)
}

// Rename implements vfs.FS. Inside one directory it is one unit; between two, each directory has its own.
func (f *FS) Rename(oldName, newName string) error {
	from, err := vfs.CleanName(oldName)
	if err != nil {
		return err
	}
	to, err := vfs.CleanName(newName)
	if err != nil {
		return err
	}
	err = f.do(&Op{Kind: OpRename, Name: from, To: to}, func() (bool, error) { return f.rename(from, to) }, nil)
	return wrap("rename", oldName+" -> "+newName, err)
}

func (f *FS) rename(from, to string) (bool, error) {
	oldDir, oldBase, err := f.parent(from)
	if err != nil {
		return false, err
	}
	newDir, newBase, err := f.parent(to)
	if err != nil {
		return false, err
	}
	n, target := oldDir.entries[oldBase], newDir.entries[newBase]
	switch {
	case n == nil:
		return false, fs.ErrNotExist
	case n == target:
		return false, nil
	case n.dir && strings.HasPrefix(to+"/", from+"/"):
		return false, fs.ErrInvalid
	case target != nil && target.dir && !n.dir:
		return false, syscall.EISDIR
	case target != nil && !target.dir && n.dir:
		return false, syscall.ENOTDIR
	case target != nil && len(target.entries) > 0:
		return false, syscall.ENOTEMPTY
	}
	n.links++ // not released in between
	if oldDir == newDir {
		if target != nil {
			f.unref(target)
		}
		delete(oldDir.entries, oldBase)
		oldDir.entries[newBase] = n
		n.path = path.Join(oldDir.path, newBase)
		oldDir.pending = append(oldDir.pending, entryOp{seq: f.newSeq(), kind: entryRename, name: oldBase, to: newBase, ino: n})
	} else {
		f.link(newDir, entryRenameIn, newBase, n)
		f.unlink(oldDir, entryRenameOut, oldBase)
	}
	n.links--
	return true, nil
}

// List implements vfs.FS.
func (f *FS) List(name string) ([]vfs.DirEntry, error) {
	clean, err := vfs.CleanName(name)
	if err != nil {
		return nil, err
	}
	f.mu.RLock()
	defer f.mu.RUnlock()
	dir, err := f.findDir(clean)
	if err != nil {
		return nil, wrap("list", name, err)
	}
	out := make([]vfs.DirEntry, 0, len(dir.entries))
	for _, base := range sortedNames(dir.entries) {
		out = append(out, dir.entries[base].stat(base))
	}
	return out, nil
}

// Stat implements vfs.FS.
func (f *FS) Stat(name string) (vfs.DirEntry, error) {
	clean, err := vfs.CleanName(name)
	if err != nil {
		return vfs.DirEntry{}, err
	}
	f.mu.RLock()
	defer f.mu.RUnlock()
	n, err := f.find(clean)
	if err != nil {
		return vfs.DirEntry{}, wrap("stat", name, err)
	}
	return n.stat(path.Base(clean)), nil
}

func (n *inode) stat(base string) vfs.DirEntry {
	return vfs.DirEntry{Name: base, Size: n.vol.size, Dir: n.dir}
}

// SyncDir implements vfs.FS.
func (f *FS) SyncDir(name string) error {
	clean, err := vfs.CleanName(name)
	if err != nil {
		return err
	}
	var dir *inode
	err = f.do(&Op{Kind: OpSyncDir, Name: clean}, func() (ok bool, err error) {
		dir, err = f.findDir(clean)
		return err == nil, err
	}, func() {
		if !f.opts.LieDirSync {
			dir.syncEntries()
		}
	})
	return wrap("syncdir", name, err)
}

// SyncFS implements vfs.FS.
func (f *FS) SyncFS(name string) error {
	clean, err := vfs.CleanName(name)
	if err != nil {
		return err
	}
	err = f.do(&Op{Kind: OpSyncFS, Name: clean}, func() (bool, error) {
		_, err := f.find(clean)
		return err == nil, err
	}, func() {
		for _, n := range f.reachable() {
			if n.dir {
				n.syncEntries()
			} else {
				n.sync()
			}
		}
	})
	return wrap("syncfs", name, err)
}

// Lock implements vfs.FS. The lock belongs to the file, not to its name, and is not in a crash clone.
func (f *FS) Lock(name string) (io.Closer, error) {
	h, err := f.create(name, true)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	taken := h.ino.locked
	h.ino.locked = true
	f.mu.Unlock()
	if taken {
		_ = h.Close() // closing a handle that was just made can't fail
		return nil, wrap("lock", name, vfs.ErrLocked)
	}
	h.holdsLock = true
	return h, nil
}

// Space implements vfs.FS. Without a capacity it is a terabyte that never gets less.
func (f *FS) Space(name string) (free, total uint64, err error) {
	clean, err := vfs.CleanName(name)
	if err != nil {
		return 0, 0, err
	}
	f.mu.RLock()
	defer f.mu.RUnlock()
	if _, err := f.find(clean); err != nil {
		return 0, 0, wrap("space", name, err)
	}
	if f.opts.Capacity == 0 {
		return 1 << 40, 1 << 40, nil
	}
	return f.opts.Capacity - min(f.used, f.opts.Capacity), f.opts.Capacity, nil
}

// DropDir makes the file system forget that the entries of a directory are not durable, as after a failed sync: a later SyncDir
// succeeds and makes only later operations durable. For fault injection.
func (f *FS) DropDir(name string) error {
	clean, err := vfs.CleanName(name)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	dir, err := f.findDir(clean)
	if err != nil {
		return wrap("drop", name, err)
	}
	dir.drop()
	return nil
}

// DropAll is DropUnsynced of every file and DropDir of every directory.
func (f *FS) DropAll() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, n := range f.reachable() {
		n.drop()
	}
}

func wrap(op, name string, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: op, Path: name, Err: err}
}
