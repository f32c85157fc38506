package vfs

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"
	"unsafe"
)

// ErrMisaligned: a read or write of a direct file whose memory, offset or length is not a multiple of BlockSize. Nothing was
// done.
var ErrMisaligned = errors.New("not aligned to the block size")

// CleanName returns name in its shortest form ("." is the root). Makers call it on every name they are given. Absolute names,
// empty ones, and names with a ".." element or a zero byte are refused with an error that is fs.ErrInvalid, so that no name from
// outside can lead out of the root.
func CleanName(name string) (string, error) {
	switch {
	case name == "":
		return "", &fs.PathError{Op: "name", Path: name, Err: fmt.Errorf("%w: empty (the root is \".\")", fs.ErrInvalid)}
	case strings.HasPrefix(name, "/"):
		return "", &fs.PathError{Op: "name", Path: name, Err: fmt.Errorf("%w: absolute", fs.ErrInvalid)}
	case strings.ContainsRune(name, 0):
		return "", &fs.PathError{Op: "name", Path: name, Err: fmt.Errorf("%w: zero byte", fs.ErrInvalid)}
	}
	for el := range strings.SplitSeq(name, "/") {
		if el == ".." {
			return "", &fs.PathError{Op: "name", Path: name, Err: fmt.Errorf("%w: \"..\" element", fs.ErrInvalid)}
		}
	}
	return path.Clean(name), nil
}

// AlignedBuffer returns n zero bytes whose memory starts at a multiple of BlockSize, as direct files need it. The capacity is n.
// Slices of it that start at a multiple of BlockSize are aligned too.
func AlignedBuffer(n int) []byte {
	raw := make([]byte, n+BlockSize)
	skip := 0
	if rest := int(uintptr(unsafe.Pointer(unsafe.SliceData(raw))) % BlockSize); rest != 0 {
		skip = BlockSize - rest
	}
	return raw[skip : skip+n : skip+n]
}

// CheckAligned is nil if p may be read or written at off of a direct file, else an error that is ErrMisaligned.
func CheckAligned(p []byte, off int64) error {
	if off%BlockSize != 0 {
		return fmt.Errorf("%w: offset %d", ErrMisaligned, off)
	}
	if len(p)%BlockSize != 0 {
		return fmt.Errorf("%w: length %d", ErrMisaligned, len(p))
	}
	if addr := uintptr(unsafe.Pointer(unsafe.SliceData(p))); len(p) > 0 && addr%BlockSize != 0 {
		return fmt.Errorf("%w: memory", ErrMisaligned)
	}
	return nil
}
