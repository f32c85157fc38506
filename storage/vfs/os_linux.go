package vfs

import (
	"errors"

	"golang.org/x/sys/unix"
)

// directFlags make each write durable when it returns.
const directFlags = unix.O_DIRECT | unix.O_DSYNC

// dataSync makes the bytes and the size durable.
func dataSync(fd int) error {
	return retry(func() error { return unix.Fdatasync(fd) })
}

func syncFS(fd int) error {
	return retry(func() error { return unix.Syncfs(fd) })
}

func allocate(fd int, off, n int64) error {
	err := retry(func() error { return unix.Fallocate(fd, unix.FALLOC_FL_KEEP_SIZE, off, n) })
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) {
		return nil // the contract: who can't reserve does nothing
	}
	return err
}

func startWriteback(fd int, off, n int64) {
	_ = unix.SyncFileRange(fd, off, n, unix.SYNC_FILE_RANGE_WRITE) // a hint
}

// blockUnit is the unit in which statfs counts.
func blockUnit(st *unix.Statfs_t) uint64 {
	if st.Frsize > 0 {
		return uint64(st.Frsize)
	}
	return uint64(st.Bsize)
}
