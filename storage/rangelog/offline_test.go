package rangelog

import (
	"errors"
	"testing"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/vfs"
	"github.com/malachilog/malachi/storage/vfs/faultfs"
	"github.com/malachilog/malachi/storage/vfs/memfs"
)

// offlineFolder is a folder with a sealed segment (A), a live one with a checkpoint and more in the journal (B), and one opened since (C).
func offlineFolder(c *script) {
	c.create(segA, 0)
	c.create(segB, 0)
	for range 4 {
		c.extend(segA, 2, 200)
		c.extend(segB, 1, 300)
	}
	c.fence(segA, nil)
	c.seal(segA, 0)
	c.checkpoint()
	c.extend(segB, 1, 300)
	c.create(segC, 0)
	c.extend(segC, 3, 30)
	c.flush()
	c.check(c.s.j.CloseGroup())
}

// TestVerifyChangesNothing: not one mutating operation, on whole folders and on damaged ones.
func TestVerifyChangesNothing(t *testing.T) {
	inv.Covers(t, "INV-R6")
	scripted(t, func(c *script) {
		empty := faultfs.New(memfs.New(memfs.Options{}))
		if r, err := Verify(empty, nil); err != nil || !r.Nothing || empty.Ops() != 0 {
			t.Errorf("empty folder: %+v, %v", r, err)
		}
		offlineFolder(c)
		m := c.m.CrashClone(func(memfs.Unit) bool { return true })
		f := faultfs.New(m)
		before := m.Dump()
		files := 0
		r, err := Verify(f, func(string, Report) { files++ })
		if err != nil || r.Sealed != 1 || r.Live != 1 || files != 2 || r.Records != 8+4+1+3 || r.Nothing {
			t.Errorf("%+v, %d files, %v", r, files, err)
		}
		rot(t, m, fileName(segB), 200)
		damaged := m.Dump()
		if _, err := Verify(f, nil); err == nil {
			t.Error("damage was not seen")
		}
		if f.Ops() != 0 || m.Dump() != damaged || damaged == before {
			t.Errorf("%d mutating operations", f.Ops())
		}
	})
}

// TestVerifySeesEveryByte flips bytes of both files: all that a checkpoint or a seal vouches for is judged, and named.
func TestVerifySeesEveryByte(t *testing.T) {
	inv.Covers(t, "INV-H1", "INV-R2")
	scripted(t, func(c *script) {
		offlineFolder(c)
		image := c.m.CrashClone(nil)
		noted := int64(len(c.w.now(segB).ends[4].bytes))
		sealed, err := image.Stat(fileName(segA))
		c.check(err)
		for id, limit := range map[storage.SegmentID]int64{segA: sealed.Size, segB: noted} {
			for at := int64(0); at < limit; at += 7 {
				m := image.CrashClone(nil)
				rot(t, m, fileName(id), at)
				_, err := Verify(m, nil)
				var d *FileDamage
				if !errors.As(err, &d) || d.Path != fileName(id) {
					t.Fatalf("byte %d of %s: %v", at, fileName(id), err)
				}
			}
		}
		// A file that is gone, one under another's name, and one that nobody knows.
		for what, change := range map[string]func(vfs.FS) error{
			"missing": func(m vfs.FS) error { return m.Remove(fileName(segB)) },
			"renamed": func(m vfs.FS) error { return m.Rename(fileName(segA), fileName(testID(0, 9))) },
			"strange": func(m vfs.FS) error { return m.Rename(fileName(segA), segmentsDir+"/notes.txt") },
		} {
			m := image.CrashClone(nil)
			c.check(change(m))
			if _, err := Verify(m, nil); !errors.Is(err, storage.ErrCorrupt) {
				t.Errorf("%s: %v", what, err)
			}
		}
	})
}

// TestRebuildIndex: every flipped byte of a footer is mended byte-equal; with a flipped record nothing is written; a crash at any operation
// leaves the old file or the whole new one.
func TestRebuildIndexIsByteEqual(t *testing.T) {
	inv.Covers(t, "INV-R3")
	scripted(t, func(c *script) {
		offlineFolder(c)
		image := c.m.CrashClone(nil)
		want, err := fileBytes(image, fileName(segA))
		c.check(err)
		footer := int64(len(c.w.now(segA).bytes))
		for at := footer; at < int64(len(want)); at += 3 {
			m := image.CrashClone(nil)
			rot(t, m, fileName(segA), at)
			old, err := fileBytes(m, fileName(segA))
			c.check(err)
			m.OnOp(func(op memfs.Op) {
				for _, keep := range []func(memfs.Unit) bool{nil, func(memfs.Unit) bool { return true },
					func(u memfs.Unit) bool { return coin(uint64(at), uint64(u.Index)) }} {
					got, err := fileBytes(m.CrashClone(keep), fileName(segA))
					if err != nil || string(got) != string(old) && string(got) != string(want) {
						t.Fatalf("crash at %s: %d bytes that are neither, %v", op, len(got), err)
					}
				}
			})
			done, err := RebuildIndex(m, segA)
			m.OnOp(nil)
			if err != nil || !done {
				t.Fatalf("byte %d: %v, %v", at, done, err)
			}
			c.check(sameFile(m.CrashClone(nil), fileName(segA), want))
			if done, err := RebuildIndex(m, segA); done || err != nil {
				t.Errorf("again: %v, %v", done, err)
			}
		}
		for at := int64(len(c.w.now(segA).header)); at < footer; at += 61 {
			m := image.CrashClone(nil)
			rot(t, m, fileName(segA), at)
			rot(t, m, fileName(segA), int64(len(want))-20)
			before := m.Dump()
			if _, err := RebuildIndex(m, segA); !errors.Is(err, storage.ErrCorrupt) || m.Dump() != before {
				t.Fatalf("record byte %d: %v", at, err)
			}
		}
		for id, wanted := range map[storage.SegmentID]error{segB: storage.ErrConflict, segC: storage.ErrConflict, testID(9, 9): storage.ErrUnknownSegment} {
			_, err := RebuildIndex(image, id)
			wantErr(t, id.String(), err, wanted)
		}
		// And under a running store.
		rot(t, c.m, fileName(segA), footer+10)
		c.s.sealed.drop(segA)
		_, err = c.s.Read(segA, 0, 2, 1<<20, nil)
		wantErr(t, "read with a rotten footer", err, storage.ErrCorrupt)
		if done, err := c.s.RebuildIndex(segA); !done || err != nil {
			t.Errorf("rebuild: %v, %v", done, err)
		}
		if got, err := c.s.Read(segA, 0, 2, 1<<20, nil); err != nil || len(got) != 1 {
			t.Errorf("read: %d, %v", len(got), err)
		}
		_, err = c.s.RebuildIndex(segB)
		wantErr(t, "live", err, storage.ErrConflict)
	})
}

func TestDumpShowsAll(t *testing.T) {
	scripted(t, func(c *script) {
		offlineFolder(c)
		m := faultfs.New(c.m.CrashClone(nil))
		headers, batches, footers := 0, 0, 0
		c.check(Dump(m, segA, func(p Piece) error {
			switch {
			case p.Header != nil:
				headers++
			case p.Batch != nil:
				batches++
			case p.Footer != nil:
				footers++
			}
			return nil
		}))
		if headers != 1 || batches != 4 || footers != 1 || m.Ops() != 0 {
			t.Errorf("%d headers, %d batches, %d footers, %d writes", headers, batches, footers, m.Ops())
		}
		wantErr(t, "unknown", Dump(m, testID(9, 9), nil), storage.ErrUnknownSegment)
	})
}

// TestNamesStayInside: what a segment file is called is made of numbers, and only such names are taken for one.
func TestNamesStayInside(t *testing.T) {
	inv.Covers(t, "INV-R9")
	for _, id := range []storage.SegmentID{segA, testID(7, 1<<32-1), {}} {
		if got, ok := idOf(fileName(id)); !ok || got != id {
			t.Errorf("%s: %v, %v", fileName(id), got, ok)
		}
	}
	for _, name := range []string{"segments/../../etc/0000000000.seg", "segments/0000000000.seg", "0000000000.seg", "segments/x/y/0000000000.seg",
		fileName(segA) + "x", "segments/" + segA.Range.String() + "/0.seg", "segments/" + segA.Range.String() + "/00000000001.seg",
		"segments/" + segA.Range.String() + "/-000000001.seg", "segments/" + segA.Range.String() + "/../0000000000.seg", ""} {
		if id, ok := idOf(name); ok && fileName(id) != name {
			t.Errorf("%q is taken for %s", name, id)
		}
	}
}
