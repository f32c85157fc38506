//go:build !linux

package floor

import (
	"os"
	"syscall"
)

// open opens a file whose every write is durable when it returns; there is no direct way here.
func open(name string, direct bool) (*os.File, error) {
	if direct {
		return nil, syscall.EINVAL
	}
	return os.OpenFile(name, os.O_WRONLY|os.O_SYNC, 0)
}
