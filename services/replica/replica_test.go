package replica

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
	"github.com/malachilog/malachi/storage/journal"
	"github.com/malachilog/malachi/storage/rangelog"
	"github.com/malachilog/malachi/storage/segment"
	"github.com/malachilog/malachi/storage/vfs/memfs"
)

// service runs replicas on a memory file system; clock is what they are told.
func service(t *testing.T, boot storage.Boot, clock *time.Time) *Service {
	t.Helper()
	store, err := rangelog.Open(rangelog.Config{
		Journal: journal.Config{FileBytes: 256 << 10, MaxBytes: 2 << 20}, DiskReserve: 1,
	}, rangelog.Deps{FS: memfs.New(memfs.Options{Direct: true}), Logger: slog.New(slog.DiscardHandler), NewJournalID: journal.ID{1}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- store.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := errors.Join(<-done, store.Close()); err != nil {
			t.Error(err)
		}
	})
	return New(Config{Self: 1, Boot: boot}, Deps{
		Store: store, Logger: slog.New(slog.DiscardHandler), SegmentMaxBytes: func() int64 { return 4 << 10 }, Now: func() time.Time { return *clock },
	})
}

func header(t *testing.T, created time.Time) []byte {
	t.Helper()
	b, err := segment.Header{
		ID: storage.SegmentID{Range: storage.RangeID{Topic: storage.TopicUID{1}}}, Topic: "t", CreateTime: storage.Time(created.UnixNano()),
	}.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

var id = storage.SegmentID{Range: storage.RangeID{Topic: storage.TopicUID{1}}}

func put(t *testing.T, s *Service, size int) (Appended, error) {
	t.Helper()
	var b batch.Builder
	if err := b.Add(&batch.Record{Value: make([]byte, size)}, 0); err != nil {
		t.Fatal(err)
	}
	raw, err := b.Build(nil, batch.Options{})
	if err != nil {
		t.Fatal(err)
	}
	type answer struct {
		a   Appended
		err error
	}
	done := make(chan answer, 1)
	if err := s.Append(id, raw, func(a Appended, err error) { done <- answer{a, err} }); err != nil {
		return Appended{}, err
	}
	got := <-done
	return got.a, got.err
}

// TestAppendTimeIsTheWallClock: however long the open took, a record's append time is not before its request; a clock that is set back moves
// nothing back.
func TestAppendTimeIsTheWallClock(t *testing.T) {
	clock := time.Unix(1_700_000_000, 0)
	s := service(t, 1, &clock)
	if err := s.Open(t.Context(), Open{Header: header(t, clock.Add(-4*time.Second)), Set: []storage.BrokerID{1}, Quorum: 1, Boot: 1}); err != nil {
		t.Fatal(err)
	}
	clock = clock.Add(time.Second)
	a, err := put(t, s, 10)
	if err != nil || a.AppendTime != storage.Time(clock.UnixNano()) {
		t.Fatalf("append time is %d, the clock says %d, %v", a.AppendTime, clock.UnixNano(), err)
	}
	clock = clock.Add(-time.Hour)
	b, err := put(t, s, 10)
	if err != nil || b.AppendTime != a.AppendTime || b.Base != 1 {
		t.Errorf("after the clock was set back: %+v, %v", b, err)
	}
}

func TestAnotherBootsSegmentIsNotServed(t *testing.T) {
	inv.Covers(t, "INV-D5")
	clock := time.Unix(1_700_000_000, 0)
	s := service(t, 2, &clock)
	err := s.Open(t.Context(), Open{Header: header(t, clock), Set: []storage.BrokerID{1}, Quorum: 1, Boot: 1})
	if !errors.Is(err, storage.ErrStaleBoot) {
		t.Errorf("opened: %v", err)
	}
	if _, err := put(t, s, 10); !errors.Is(err, storage.ErrStaleRoute) {
		t.Errorf("appended: %v", err)
	}
}

// TestFullAndDrainedSegments: a segment asks to be closed at its size and takes no more at twice that; a drain lapses if no fence follows; a fence
// does not.
func TestFullAndDrainedSegments(t *testing.T) {
	inv.Covers(t, "INV-S5")
	clock := time.Unix(1_700_000_000, 0)
	s := service(t, 1, &clock)
	if err := s.Open(t.Context(), Open{Header: header(t, clock), Set: []storage.BrokerID{1}, Quorum: 1, Boot: 1}); err != nil {
		t.Fatal(err)
	}
	if err := s.Drain(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if _, err := put(t, s, 10); !errors.Is(err, storage.ErrFenced) {
		t.Errorf("drained: %v", err)
	}
	clock = clock.Add(drainLapse)
	for n := 0; ; n++ {
		if _, err := put(t, s, 1000); errors.Is(err, storage.ErrFenced) && n >= 7 {
			break
		} else if err != nil || n > 9 {
			t.Fatalf("append %d of 1,000 bytes into a segment of 4 KiB: %v", n, err)
		}
	}
	select {
	case <-s.Full():
	default:
		t.Error("nobody is told that it is full")
	}
	v, err := s.Fence(t.Context(), id, nil)
	if err != nil || v.End == 0 {
		t.Fatal(v, err)
	}
	clock = clock.Add(time.Hour)
	if _, err := put(t, s, 10); err == nil {
		t.Error("a fenced segment takes appends")
	}
}
