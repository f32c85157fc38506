package rangelog

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
	"github.com/malachilog/malachi/storage/journal"
	"github.com/malachilog/malachi/storage/vfs"
)

// BenchmarkAppend is what a store makes durable on a real disk, with many appends in flight.
func BenchmarkAppend(b *testing.B) {
	for _, size := range []int{1 << 10, 64 << 10, 1 << 20} {
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) { benchAppend(b, size) })
	}
}

func benchAppend(b *testing.B, size int) {
	fs, err := vfs.NewOS(b.TempDir())
	if err != nil {
		b.Fatal(err)
	}
	s, err := Open(Config{Journal: journal.Config{MaxBytes: 512 << 20}, DiskReserve: 1}, Deps{FS: fs, Logger: discard, NewJournalID: journal.ID{1}})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.Context())
	ran := make(chan error, 1)
	go func() { ran <- s.Run(ctx) }()
	create(b, s, segA, 0)
	_, first := testBatch(b, 0, 1, size-batch.HeaderSize-16)
	inFlight := make(chan struct{}, max(4, min(512, 16<<20/size)))
	var wg sync.WaitGroup
	b.SetBytes(int64(len(first)))
	b.ResetTimer()
	for n := range b.N {
		data := append([]byte(nil), first...)
		batch.Stamp(data, storage.Offset(n), storage.Time(n), storage.Slice{})
		h, err := batch.ParseHeader(data)
		if err != nil {
			b.Fatal(err)
		}
		inFlight <- struct{}{}
		wg.Add(1)
		for {
			err := s.Append(segA, &h, data, func(err error) {
				if err != nil {
					b.Error(err)
				}
				<-inFlight
				wg.Done()
			})
			if err == nil {
				break
			}
		}
	}
	wg.Wait()
	b.StopTimer()
	b.ReportMetric(float64(s.Stats().Barriers)/b.Elapsed().Seconds(), "barriers/s")
	cancel()
	if err := <-ran; err != nil {
		b.Error(err)
	}
	if err := s.Close(); err != nil {
		b.Error(err)
	}
}

// BenchmarkRaw is the floor: 1 MiB direct writes into recycled files.
func BenchmarkRaw(b *testing.B) {
	fs, err := vfs.NewOS(b.TempDir())
	if err != nil {
		b.Fatal(err)
	}
	const fileBytes = 64 << 20
	buf := vfs.AlignedBuffer(1 << 20)
	for i := range buf {
		buf[i] = byte(i * 7)
	}
	var files [3]vfs.File
	for i := range files {
		name := fmt.Sprintf("f%d", i)
		f, err := fs.Create(name)
		if err != nil {
			b.Fatal(err)
		}
		for pos := int64(0); pos < fileBytes; pos += int64(len(buf)) {
			if _, err := f.WriteAt(buf, pos); err != nil {
				b.Fatal(err)
			}
		}
		if err := f.Sync(); err != nil {
			b.Fatal(err)
		}
		direct := false
		if files[i], direct, err = fs.OpenDirect(name); err != nil || !direct {
			b.Skipf("no direct writes here: %v", err)
		}
	}
	b.SetBytes(int64(len(buf)))
	b.ResetTimer()
	for n := range b.N {
		if _, err := files[n/64%3].WriteAt(buf, int64(n%64)*int64(len(buf))); err != nil {
			b.Fatal(err)
		}
	}
}
