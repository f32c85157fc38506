package floor

import (
	"os"

	"golang.org/x/sys/unix"
)

// open opens a file whose every write is durable when it returns.
func open(name string, direct bool) (*os.File, error) {
	flags := os.O_WRONLY | unix.O_DSYNC
	if direct {
		flags |= unix.O_DIRECT
	}
	return os.OpenFile(name, flags, 0)
}
