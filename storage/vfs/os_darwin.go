package vfs

import "golang.org/x/sys/unix"

// Systems other than Linux are for development: no direct writes, no reservations, and a sync of a whole file system that the
// system only promises to begin.

const directFlags = 0

func dataSync(fd int) error {
	return retry(func() error {
		_, err := unix.FcntlInt(uintptr(fd), unix.F_FULLFSYNC, 0)
		return err
	})
}

func syncFS(int) error { return unix.Sync() }

func allocate(int, int64, int64) error { return nil }

func startWriteback(int, int64, int64) {}

// blockUnit is the unit in which statfs counts.
func blockUnit(st *unix.Statfs_t) uint64 { return uint64(st.Bsize) }
