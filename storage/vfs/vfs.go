// Package vfs is the contract between storage and a file system, and its implementation on the operating system. It says what
// is durable when, because everything above argues from that.
//
// Durability. A file's bytes are durable after Sync of that file (or, for a file opened with OpenDirect whose writes are
// durable, when WriteAt returns). A file's *name* (creation, rename, removal) is durable after SyncDir of its directory; syncing
// a file alone does not make its name durable. What was not synced may after a power cut be there, be partly there in units of
// 512 bytes, or be gone, in any combination and any order.
//
// After a failed Sync, or a failed WriteAt of a durable file, nothing is known about any byte written since the last good one,
// and a later Sync that succeeds proves nothing: the caller must treat the first failure as final.
//
// Makers: the operating system (OS), memfs (memory, with crash clones), faultfs (wraps another, fails operation n). All pass
// the suite in vfstest. Names are slash-separated; makers refuse names with ".." elements. All methods are safe for concurrent
// use; concurrent WriteAt calls to overlapping bytes are the caller's mistake.
package vfs

import (
	"errors"
	"io"
	"io/fs"
)

// SectorSize is the unit in which a device writes atomically: a torn write tears between sectors, never inside one.
const SectorSize = 512

// BlockSize is the alignment (memory, offset, length) that direct files need.
const BlockSize = 4096

// ErrNoSpace: the device is full. Wraps the operating system's ENOSPC.
var ErrNoSpace = errors.New("no space left on device")

// ErrLocked: another process (or another FS value) holds the lock.
var ErrLocked = errors.New("locked by another process")

// Not found and already there are fs.ErrNotExist and fs.ErrExist.

// FS is a file system. It never removes or follows anything outside the names it was given.
type FS interface {
	// Create makes a new file for reading and writing. fs.ErrExist if the name is taken. The name is durable after SyncDir.
	Create(name string) (File, error)
	// Open opens an existing file for reading only.
	Open(name string) (File, error)
	// OpenWrite opens an existing file for reading and writing through the page cache.
	OpenWrite(name string) (File, error)
	// OpenDirect opens an existing file so that each WriteAt is durable when it returns (O_DIRECT|O_DSYNC), if the file system can:
	// then direct is true and reads and writes must be aligned to BlockSize in memory, offset and length. Otherwise the file is
	// as from OpenWrite, direct is false, and the caller must Sync.
	OpenDirect(name string) (f File, direct bool, err error)
	// Rename replaces newName if it exists. Durable after SyncDir of both directories.
	Rename(oldName, newName string) error
	// Remove removes a file or an empty directory. Durable after SyncDir of its directory.
	Remove(name string) error
	// MkdirAll makes a directory and its parents. No error if it is there. Names are durable after SyncDir of each parent.
	MkdirAll(name string) error
	// List returns the entries of a directory, sorted by name.
	List(name string) ([]DirEntry, error)
	// Stat returns size and kind of a file or directory. fs.ErrNotExist if there is none.
	Stat(name string) (DirEntry, error)
	// SyncDir makes the entries of one directory durable.
	SyncDir(name string) error
	// SyncFS makes everything written to the file system that holds name durable, files and names. Dear, but one call.
	SyncFS(name string) error
	// Lock takes the exclusive lock of a file, making the file if needed. ErrLocked if someone has it. Closing releases it, as
	// does the end of the process.
	Lock(name string) (io.Closer, error)
	// Space returns the bytes that can still be written and the size of the file system that holds name.
	Space(name string) (free, total uint64, err error)
}

// DirEntry is a name with size (0 for directories) and kind.
type DirEntry struct {
	Name string
	Size int64
	Dir  bool
}

// File is an open file.
type File interface {
	io.ReaderAt // io.EOF at the end, as io.ReaderAt asks
	io.WriterAt // grows the file; bytes between the old end and off read as zero. Never a short write without an error.
	// Sync makes all bytes and the size of the file durable, not its name.
	Sync() error
	// Size is the file's length in bytes.
	Size() (int64, error)
	// Truncate sets the length. Durable after Sync.
	Truncate(size int64) error
	// Allocate reserves device space for [off, off+n) without changing the file's size, so that later writes there can't run out
	// of space. ErrNoSpace if there is none. A maker that can't reserve does nothing.
	Allocate(off, n int64) error
	// StartWriteback asks the system to begin writing [off, off+n) to the device. A hint: promises nothing, fails never.
	StartWriteback(off, n int64)
	// Close releases the file. It makes nothing durable.
	Close() error
}

// IsNotExist is errors.Is(err, fs.ErrNotExist), under the name that callers look for.
func IsNotExist(err error) bool { return errors.Is(err, fs.ErrNotExist) }
