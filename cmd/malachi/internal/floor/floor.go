// Package floor measures what a machine can do at all, raw: one device barrier, large direct writes, one loopback round trip, loopback
// streaming. It is the yardstick of `malachi bench` and so imports nothing of Malachi's: only the standard library and x/sys.
//
// Measure runs alone on the machine for a second or two, on files that it makes in a folder of its own and removes again.
package floor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"
	"unsafe"
)

// Floor is what was measured. Rates are in megabytes (10^6 bytes) a second.
type Floor struct {
	// Barrier is the median time in which 4 KiB into a recycled, pre-written file become durable.
	Barrier time.Duration `json:"barrierNs"`
	// RoundTrip is the median time of 1 KiB over loopback TCP there and 16 bytes back.
	RoundTrip time.Duration `json:"roundTripNs"`
	// DirectMBps is the rate of durable 1 MiB writes, one at a time, into recycled files.
	DirectMBps float64 `json:"directMBps"`
	// LoopbackMBps is the rate of one loopback TCP stream, 256 KiB at a time.
	LoopbackMBps float64 `json:"loopbackMBps"`
	// Direct: the file system takes O_DIRECT. Else the files were opened with O_DSYNC alone.
	Direct bool `json:"direct"`
}

const (
	block     = 4 << 10
	large     = 1 << 20
	fileBytes = 64 << 20
	files     = 3
)

// Measure measures in the file system of dir, which must exist, each of the four for a part of budget (at least 200 ms in all).
// Nothing else should run meanwhile.
func Measure(ctx context.Context, dir string, budget time.Duration) (_ Floor, err error) {
	part := max(budget, 200*time.Millisecond) / 4
	temp, err := os.MkdirTemp(dir, "floor-")
	if err != nil {
		return Floor{}, fmt.Errorf("measure floor: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(temp)) }()
	var f Floor
	if err := f.disk(ctx, temp, part); err != nil {
		return f, fmt.Errorf("measure disk: %w", err)
	}
	if err := f.network(ctx, part); err != nil {
		return f, fmt.Errorf("measure loopback: %w", err)
	}
	return f, nil
}

func (f *Floor) disk(ctx context.Context, dir string, part time.Duration) (err error) {
	f.Direct = true
	set := make([]*os.File, files)
	defer func() {
		for _, x := range set {
			if x != nil {
				err = errors.Join(err, x.Close())
			}
		}
	}()
	buf := aligned(large)
	for i := range buf {
		buf[i] = byte(i*7 + i>>8) // blank blocks may be stored as holes
	}
	for i := range set {
		name := filepath.Join(dir, fmt.Sprint(i))
		if err := prewrite(name, buf); err != nil {
			return err
		}
		if set[i], err = open(name, f.Direct); errors.Is(err, syscall.EINVAL) && i == 0 {
			f.Direct = false
			set[i], err = open(name, false)
		}
		if err != nil {
			return err
		}
	}
	if f.Barrier, err = barrier(ctx, set[0], buf[:block], part); err != nil {
		return err
	}
	f.DirectMBps, err = stream(ctx, set, buf, part)
	return err
}

// prewrite writes a file in full and syncs it, so that later writes change no metadata.
func prewrite(name string, buf []byte) error {
	x, err := os.Create(name)
	if err != nil {
		return err
	}
	for range fileBytes / len(buf) {
		if _, err := x.Write(buf); err != nil {
			return errors.Join(err, x.Close())
		}
	}
	return errors.Join(x.Sync(), x.Close())
}

// barrier writes block after block and gives the median.
func barrier(ctx context.Context, x *os.File, b []byte, part time.Duration) (time.Duration, error) {
	var took []time.Duration
	began := time.Now()
	for n := 0; time.Since(began) < part || n < 20; n++ {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		at := time.Now()
		if _, err := x.WriteAt(b, int64(n*block%fileBytes)); err != nil {
			return 0, err
		}
		took = append(took, time.Since(at))
	}
	return median(took), nil
}

// stream writes large blocks over all files, round and round.
func stream(ctx context.Context, set []*os.File, b []byte, part time.Duration) (float64, error) {
	began := time.Now()
	n := 0
	for ; time.Since(began) < part || n < 8; n++ {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		at := n * len(b) % (fileBytes * len(set))
		if _, err := set[at/fileBytes].WriteAt(b, int64(at%fileBytes)); err != nil {
			return 0, err
		}
	}
	return float64(n*len(b)) / time.Since(began).Seconds() / 1e6, nil
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

// aligned is memory that starts at a block's boundary, which direct writes demand.
func aligned(n int) []byte {
	b := make([]byte, n+block)
	skip := block - int(uintptr(unsafe.Pointer(unsafe.SliceData(b)))%block)
	return b[skip : skip+n : skip+n]
}
