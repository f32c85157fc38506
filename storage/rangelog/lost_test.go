package rangelog

import (
	"errors"
	"io/fs"
	"log/slog"
	"testing"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/vfs"
	"github.com/malachilog/malachi/storage/vfs/memfs"
)

// TestLostJournalTailIsDamage wipes the newest acknowledged groups, and whole journal files, of a killed process (its page cache lives): the start
// is refused, and what lies in the segment file is not cut.
func TestLostJournalTailIsDamage(t *testing.T) {
	inv.Covers(t, "INV-R2")
	live := memfs.New(memfs.Options{Direct: true})
	s := openStore(t, live)
	id := testID(0, 0)
	step := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		for {
			wrote, err := s.j.WriteGroup()
			if err != nil {
				t.Fatal(err)
			}
			if !wrote {
				break
			}
		}
		if err := s.followAll(); err != nil {
			t.Fatal(err)
		}
		for s.j.Prepare() {
		}
	}
	step(s.Create(testHeader(t, id, 0), func(error) {}))
	for base := storage.Offset(0); base < 20; base++ {
		h, b := testBatch(t, base, 1, 3000)
		step(s.Append(id, h, b, func(error) {}))
	}
	files := s.Stats().FilesInUse + s.Stats().FilesFree
	everything := func(memfs.Unit) bool { return true }
	if _, err := Open(testConfig(), Deps{FS: live.CrashClone(everything), Logger: slog.New(slog.DiscardHandler)}); err != nil {
		t.Fatalf("nothing is lost, and still: %v", err)
	}
	entries, err := live.List("journal")
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != files {
		t.Fatalf("%d files, the journal counts %d", len(entries), files)
	}
	for _, e := range entries {
		for name, damage := range map[string]func(fsys vfs.FS) error{
			"removed": func(fsys vfs.FS) error { return fsys.Remove("journal/" + e.Name) },
			"wiped behind its first groups": func(fsys vfs.FS) error {
				f, err := fsys.OpenWrite("journal/" + e.Name)
				if err != nil {
					return err
				}
				_, err = f.WriteAt(make([]byte, int(e.Size)-4*vfs.BlockSize), 4*vfs.BlockSize)
				return errors.Join(err, f.Close())
			},
		} {
			clone := live.CrashClone(everything)
			before, err := fileBytes(clone, fileName(id))
			if err != nil {
				t.Fatal(err)
			}
			if err := damage(clone); err != nil && !errors.Is(err, fs.ErrNotExist) {
				t.Fatal(err)
			}
			got, err := Open(testConfig(), Deps{FS: clone, Logger: slog.New(slog.DiscardHandler)})
			if err == nil {
				info, infoErr := got.Info(id)
				if infoErr != nil || info.End != 20 {
					t.Errorf("%s %s: accepted, and the segment ends at %d, %v", e.Name, name, info.End, infoErr)
				}
				continue // a spare file: nothing of it mattered
			}
			if !errors.Is(err, storage.ErrCorrupt) {
				t.Errorf("%s %s: %v", e.Name, name, err)
			}
			if after, err := fileBytes(clone, fileName(id)); err != nil || len(after) < len(before) {
				t.Errorf("%s %s: the segment file was cut from %d to %d bytes, %v", e.Name, name, len(before), len(after), err)
			}
		}
	}
}
