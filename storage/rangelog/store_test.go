package rangelog

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"testing"

	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
	"github.com/malachilog/malachi/storage/journal"
	"github.com/malachilog/malachi/storage/segment"
	"github.com/malachilog/malachi/storage/vfs"
	"github.com/malachilog/malachi/storage/vfs/memfs"
)

var testTopic = storage.TopicUID{1, 2, 3}

func testID(rangeSeq, seq uint32) storage.SegmentID {
	return storage.SegmentID{Range: storage.RangeID{Topic: testTopic, Seq: rangeSeq}, Seq: seq}
}

func testHeader(t testing.TB, id storage.SegmentID, base storage.Offset) []byte {
	t.Helper()
	b, err := segment.Header{ID: id, Topic: "orders", Base: base, CreateTime: 7}.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// testBatch is a stamped batch of n records whose values say where they belong.
func testBatch(t testing.TB, base storage.Offset, n, valueBytes int) (*batch.Header, []byte) {
	t.Helper()
	var bb batch.Builder
	for i := range n {
		v := make([]byte, max(valueBytes, 8))
		binary.LittleEndian.PutUint64(v, uint64(base)+uint64(i))
		if err := bb.Add(&batch.Record{Value: v, Time: storage.Time(base)}, 0); err != nil {
			t.Fatal(err)
		}
	}
	b, err := bb.Build(nil, batch.Options{Codec: batch.CodecNone})
	if err != nil {
		t.Fatal(err)
	}
	batch.Stamp(b, base, storage.Time(base)+1, storage.Slice{})
	h, err := batch.Verify(b)
	if err != nil {
		t.Fatal(err)
	}
	return &h, b
}

func testConfig() Config {
	return Config{Journal: journal.Config{FileBytes: 64 << 10, MaxBytes: 512 << 10, GroupBytes: 16 << 10}, DiskReserve: 1}
}

func openStore(t testing.TB, fs vfs.FS) *Store {
	t.Helper()
	s, err := Open(testConfig(), Deps{FS: fs, Logger: slog.New(slog.DiscardHandler), NewJournalID: journal.ID{9}})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// run starts the store and returns a function that stops it and closes it.
func run(t testing.TB, s *Store) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	return func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	}
}

func create(t testing.TB, s *Store, id storage.SegmentID, base storage.Offset) {
	t.Helper()
	if err := s.await(t.Context(), func(done func(error)) error { return s.Create(testHeader(t, id, base), done) }); err != nil {
		t.Fatal(err)
	}
}

// appendBatch appends and waits. It tries again while the journal is at a bound: the test may outrun the preparer and the checkpointer.
func appendBatch(t testing.TB, s *Store, id storage.SegmentID, base storage.Offset, n int) {
	t.Helper()
	h, b := testBatch(t, base, n, 100)
	for {
		err := s.await(t.Context(), func(done func(error)) error { return s.Append(id, h, b, done) })
		if err == nil {
			return
		}
		if !errors.Is(err, storage.ErrOverloaded) {
			t.Fatal(err)
		}
		runtime.Gosched()
	}
}

func readAllRecords(t testing.TB, s *Store, id storage.SegmentID, from storage.Offset, end storage.End) {
	t.Helper()
	for end.Holds(from) {
		got, err := s.Read(id, from, end, 4<<10, nil)
		if err != nil {
			t.Fatal(err)
		}
		if len(got) == 0 {
			t.Fatalf("nothing at %d, end is %d", from, end)
		}
		for _, b := range got {
			var d batch.Decoder
			if _, err := d.Open(b.Data); err != nil {
				t.Fatal(err)
			}
			var r batch.Record
			for o := uint64(b.Header.Base); d.Next(&r); o++ {
				if v := binary.LittleEndian.Uint64(r.Value); v != o {
					t.Fatalf("offset %d holds record %d", o, v)
				}
			}
			from = b.Header.End().Next()
		}
	}
}

func TestAppendRestartSealRead(t *testing.T) {
	for _, direct := range []bool{true, false} {
		t.Run(fmt.Sprintf("direct=%v", direct), func(t *testing.T) {
			fs := memfs.New(memfs.Options{Direct: direct})
			s := openStore(t, fs)
			stop := run(t, s)
			id := testID(0, 0)
			create(t, s, id, 0)
			end := storage.Offset(0)
			for i := 1; i < 200; i++ {
				n := i%7 + 1
				appendBatch(t, s, id, end, n)
				end += storage.Offset(n)
			}
			stop()

			s = openStore(t, fs)
			stop = run(t, s)
			h, b := testBatch(t, end, 1, 10)
			if err := s.Append(id, h, b, func(error) {}); err == nil {
				t.Fatal("a restarted replica took an append without being verified")
			}
			v, err := s.Fence(t.Context(), id, nil)
			if err != nil {
				t.Fatal(err)
			}
			if v.End != storage.EndBefore(end) {
				t.Fatalf("vote says end %d, appended were %d", v.End, end)
			}
			readAllRecords(t, s, id, 0, v.End)
			if err := s.Seal(t.Context(), id, v.End, v.Digest); err != nil {
				t.Fatal(err)
			}
			readAllRecords(t, s, id, 3, v.End)
			if err := s.Seal(t.Context(), id, v.End, v.Digest); err != nil {
				t.Fatalf("seal again: %v", err)
			}
			create(t, s, testID(0, 1), end)
			appendBatch(t, s, testID(0, 1), end, 5)
			stop()

			s = openStore(t, fs)
			stop = run(t, s)
			readAllRecords(t, s, id, 0, v.End)
			if err := s.Drop(t.Context(), id); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Fence(t.Context(), testID(0, 1), nil); err != nil {
				t.Fatal(err)
			}
			if err := s.Drop(t.Context(), testID(0, 1)); err != nil {
				t.Fatal(err)
			}
			if left, err := s.List(); err != nil || len(left) != 0 {
				t.Fatalf("after dropping all: %v, %v", left, err)
			}
			stop()
		})
	}
}

var discard = slog.New(slog.DiscardHandler)
