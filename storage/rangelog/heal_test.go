package rangelog

import (
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/vfs/memfs"
)

// sealedSource is a store with one sealed segment, and what the record says of it.
func sealedSource(t *testing.T, id storage.SegmentID) (*Store, Recorded, func()) {
	t.Helper()
	s := openStore(t, memfs.New(memfs.Options{Direct: true}))
	stop := run(t, s)
	create(t, s, id, 0)
	for i := range 5 {
		appendBatch(t, s, id, storage.Offset(10*i), 10)
	}
	v, err := s.Fence(t.Context(), id, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Seal(t.Context(), id, v.End, v.Digest); err != nil {
		t.Fatal(err)
	}
	return s, Recorded{v.End, v.Pos, v.Digest}, stop
}

// copyFrom fills a copy in small pieces.
func copyFrom(s *Store, id storage.SegmentID) func(io.WriterAt) error {
	return func(w io.WriterAt) error {
		for pos, total := int64(0), int64(1); pos < total; {
			data, all, err := s.ReadRaw(id, pos, 777)
			if err != nil {
				return err
			}
			if _, err := w.WriteAt(data, pos); err != nil {
				return err
			}
			pos, total = pos+int64(len(data)), all
		}
		return nil
	}
}

func TestInstalledCopyIsProvedAndDurable(t *testing.T) {
	inv.Covers(t, "INV-R12", "INV-R13", "INV-R14")
	id := testID(0, 0)
	src, want, stopSrc := sealedSource(t, id)
	defer stopSrc()
	fs := memfs.New(memfs.Options{Direct: true})
	s := openStore(t, fs)
	stop := run(t, s)
	if err := s.Install(t.Context(), id, want, copyFrom(src, id)); err != nil {
		t.Fatal(err)
	}
	// A power cut that keeps nothing unsynced keeps the copy, and recovery leaves it alone.
	after := openStore(t, fs.CrashClone(nil))
	if err := after.CheckCopy(id, want, nil); err != nil {
		t.Errorf("after a power cut: %v", err)
	}
	if info, err := after.Info(id); err != nil || info.State != "sealed" || info.End != want.End {
		t.Errorf("after a power cut: %+v, %v", info, err)
	}
	if err := after.Close(); err != nil {
		t.Error(err)
	}
	// What is there and verifies is not written again.
	err := s.Install(t.Context(), id, want, func(io.WriterAt) error { return errors.New("it is copied again") })
	if err != nil {
		t.Error(err)
	}
	got, err := s.Read(id, 0, want.End, 1<<20, nil)
	if err != nil || len(got) != 5 {
		t.Errorf("%d batches, %v", len(got), err)
	}
	stop()
}

func TestBadCopyIsNotInstalled(t *testing.T) {
	inv.Covers(t, "INV-R4", "INV-S14")
	id := testID(0, 0)
	src, want, stopSrc := sealedSource(t, id)
	defer stopSrc()
	s := openStore(t, memfs.New(memfs.Options{Direct: true}))
	defer run(t, s)()
	good := copyFrom(src, id)
	for name, c := range map[string]struct {
		want Recorded
		fill func(io.WriterAt) error
	}{
		"a flipped byte": {want, func(w io.WriterAt) error {
			if err := good(w); err != nil {
				return err
			}
			_, err := w.WriteAt([]byte{0xff}, want.Bytes-3)
			return err
		}},
		"short":               {want, func(w io.WriterAt) error { _, err := w.WriteAt([]byte{0}, want.Bytes-1); return err }},
		"another record":      {Recorded{want.End, want.Bytes, want.Digest + 1}, good},
		"shorter than record": {Recorded{want.End + 10, want.Bytes, want.Digest}, good},
		"a source that fails": {want, func(io.WriterAt) error { return storage.ErrUnavailable }},
	} {
		if err := s.Install(t.Context(), id, c.want, c.fill); err == nil {
			t.Errorf("%s: it was installed", name)
		}
		if _, err := s.Info(id); !errors.Is(err, storage.ErrUnknownSegment) {
			t.Errorf("%s: it left something: %v", name, err)
		}
	}
	if err := s.Install(t.Context(), id, want, good); err != nil {
		t.Error(err)
	}
}

// TestDamagedCopyIsReplaced: a sealed copy with rot, and a live replica that knows of damage, give way to a proved one.
func TestDamagedCopyIsReplaced(t *testing.T) {
	inv.Covers(t, "INV-R1")
	id := testID(0, 0)
	src, want, stopSrc := sealedSource(t, id)
	defer stopSrc()
	fs := memfs.New(memfs.Options{Direct: true})
	s := openStore(t, fs)
	defer run(t, s)()
	if err := s.Install(t.Context(), id, want, copyFrom(src, id)); err != nil {
		t.Fatal(err)
	}
	rot(t, fs, fileName(id), want.Bytes-5)
	var damage *FileDamage
	if err := s.CheckCopy(id, want, nil); !errors.As(err, &damage) {
		t.Fatalf("rot is not noticed: %v", err)
	}
	if err := s.Install(t.Context(), id, want, copyFrom(src, id)); err != nil {
		t.Fatal(err)
	}
	if err := s.CheckCopy(id, want, nil); err != nil {
		t.Error(err)
	}

	other := testID(1, 0)
	src2, want2, stop2 := sealedSource(t, other)
	defer stop2()
	create(t, s, other, 0)
	appendBatch(t, s, other, 0, 10)
	if _, err := s.Fence(t.Context(), other, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.Install(t.Context(), other, want2, func(io.WriterAt) error { return fmt.Errorf("away: %w", storage.ErrUnavailable) }); err == nil {
		t.Fatal("installed from nothing")
	}
	if info, err := s.Info(other); err != nil || info.State != "fenced" || info.End != 10 {
		t.Errorf("the old copy has gone before a new one was proved: %+v, %v", info, err)
	}
	if err := s.Install(t.Context(), other, want2, copyFrom(src2, other)); err != nil {
		t.Fatal(err)
	}
	if info, err := s.Info(other); err != nil || info.State != "sealed" || info.End != want2.End {
		t.Errorf("%+v, %v", info, err)
	}
	if got, err := s.Read(other, 40, want2.End, 1<<20, nil); err != nil || len(got) != 1 || got[0].Header.Base != 40 {
		t.Errorf("%d batches, %v", len(got), err)
	}
}
