package datadir

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/vfs"
	"github.com/malachilog/malachi/storage/vfs/memfs"
)

func source() *rand.ChaCha8 { return rand.NewChaCha8([32]byte{1}) }

func open(t *testing.T, fs vfs.FS) *Dir {
	t.Helper()
	d, err := Open(fs, source())
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestMarkerLives(t *testing.T) {
	fs := memfs.New(memfs.Options{})
	d := open(t, fs)
	first := d.Marker()
	if first.Broker == "" || first.Boot != 0 || first.Format != Format || first.Level != storage.CurrentLevel {
		t.Fatalf("a new marker says %+v", first)
	}
	m, err := d.Update(func(m *Marker) {
		m.Boot++
		m.Cluster = storage.ClusterID{5}.String()
		m.StorageFailed = "sync: I/O error"
	})
	if err != nil || m.Boot != 1 {
		t.Fatal(m, err)
	}
	if _, err := Open(fs, source()); !errors.Is(err, storage.ErrFolderRefused) {
		t.Errorf("two processes on one folder: %v", err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	d = open(t, fs.CrashClone(nil)) // what Update answered survives a power cut
	if d.Marker() != m {
		t.Errorf("after a power cut it says %+v, written was %+v", d.Marker(), m)
	}
}

// TestPowerCuts cuts the power at every operation of a founding and of an update, with every single unit kept or lost: the marker is the old one
// or the new one, or the folder is as good as empty.
func TestPowerCuts(t *testing.T) {
	inv.Covers(t, "INV-D9")
	states := 0
	var want []Marker // what may be found, the last answered one first
	fs := memfs.New(memfs.Options{})
	fs.OnOp(func(memfs.Op) {
		units := fs.Unsynced()
		keeps := []func(memfs.Unit) bool{nil, func(memfs.Unit) bool { return true }}
		for _, u := range units {
			keeps = append(keeps, func(v memfs.Unit) bool { return v == u }, func(v memfs.Unit) bool { return v != u })
		}
		for _, keep := range keeps {
			states++
			clone := fs.CrashClone(keep)
			m, found, err := read(clone)
			if err != nil {
				t.Fatalf("a power cut leaves a marker that is refused: %v\n%s", err, clone.Dump())
			}
			ok := !found && len(want) == 0
			for _, w := range want {
				ok = ok || found && m == w
			}
			if !ok && len(want) == 0 && found && m.Boot == 0 {
				ok = true // the founding was complete
			}
			if !ok {
				t.Fatalf("found %+v (%v), may be %+v", m, found, want)
			}
			d, err := Open(clone, source())
			if err != nil {
				t.Fatalf("after a power cut the folder is refused: %v\n%s", err, clone.Dump())
			}
			if found && d.Marker() != m {
				t.Fatalf("opening changed the marker from %+v to %+v", m, d.Marker())
			}
		}
	})
	d := open(t, fs)
	want = []Marker{d.Marker()}
	for boot := storage.Boot(1); boot < 4; boot++ {
		next := want[0]
		next.Boot = boot
		want = []Marker{want[0], next}
		if _, err := d.Update(func(m *Marker) { m.Boot = boot }); err != nil {
			t.Fatal(err)
		}
		want = []Marker{next}
	}
	if states < 100 {
		t.Errorf("only %d states", states)
	}
	t.Logf("%d states", states)
}

// snapshot is every file of a folder but the lock.
func snapshot(t *testing.T, fs vfs.FS) string {
	t.Helper()
	entries, err := fs.List(".")
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for _, e := range entries {
		if e.Name == lockName {
			continue
		}
		f, err := fs.Open(e.Name)
		if err != nil {
			t.Fatal(err)
		}
		body := make([]byte, e.Size)
		if _, err := f.ReadAt(body, 0); err != nil && len(body) > 0 && !strings.Contains(err.Error(), "EOF") {
			t.Fatal(err)
		}
		fmt.Fprintf(&b, "%s %q\n", e.Name, body)
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return b.String()
}

func put(t *testing.T, fs vfs.FS, name, body string) {
	t.Helper()
	f, err := fs.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte(body), 0); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

func sealed(json string) string {
	return json + fmt.Sprintf("\ncrc32c %08x\n", crc32.Checksum([]byte(json), castagnoli))
}

// TestRefusalsChangeNothing: newer formats and levels, damage and strange folders are refused, told apart, and left as they are.
func TestRefusalsChangeNothing(t *testing.T) {
	inv.Covers(t, "INV-R11")
	const fine = `{"format":1,"cluster_id":"","broker_id":"00000000000000ff","boot":3,"level":1,"journal":true,"founding":false}`
	for name, c := range map[string]struct {
		file, body string
		newer      bool
	}{
		"newer format":       {markerName, sealed(`{"format":2,"surprise":[1]}`), true},
		"newer level":        {markerName, sealed(strings.Replace(fine, `"level":1`, `"level":99`, 1)), true},
		"flipped bit":        {markerName, strings.Replace(sealed(fine), "boot", "bOot", 1), false},
		"cut short":          {markerName, fine, false},
		"empty":              {markerName, "", false},
		"zeros":              {markerName, strings.Repeat("\x00", 200), false},
		"no broker":          {markerName, sealed(`{"format":1,"broker_id":"","level":1}`), false},
		"no JSON":            {markerName, sealed(`format 1`), false},
		"somebody's folder":  {"thesis.txt", "chapter one", false},
		"journal, no marker": {"journal", "x", false},
	} {
		fs := memfs.New(memfs.Options{})
		put(t, fs, c.file, c.body)
		before := snapshot(t, fs)
		_, err := Open(fs, source())
		if !errors.Is(err, storage.ErrFolderRefused) || errors.Is(err, storage.ErrNewerFormat) != c.newer {
			t.Errorf("%s: %v", name, err)
		}
		if after := snapshot(t, fs); after != before {
			t.Errorf("%s: the refused folder was changed from\n%s to\n%s", name, before, after)
		}
	}
	fs := memfs.New(memfs.Options{})
	put(t, fs, markerName, sealed(fine))
	if m := open(t, fs).Marker(); m.Boot != 3 || m.Broker != "00000000000000ff" || !m.Journal {
		t.Errorf("a marker of the first release reads as %+v", m)
	}
}

func TestNoBrokerIDWithoutRandomness(t *testing.T) {
	fs := memfs.New(memfs.Options{})
	if _, err := Open(fs, bytes.NewReader(nil)); err == nil {
		t.Fatal("an id was drawn from nothing")
	}
	if got := snapshot(t, fs); got != "" {
		t.Errorf("left behind: %s", got)
	}
	open(t, fs)
}

func FuzzParse(f *testing.F) {
	m := Marker{Format: 1, Broker: "00000000000000ff", Level: 1}
	if b, err := m.Encode(); err == nil {
		f.Add(b)
	}
	f.Add([]byte(sealed(`{"format":1}`)))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := Parse(b)
		if err != nil {
			return
		}
		again, err := m.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if back, err := Parse(again); err != nil || back != m {
			t.Fatalf("%+v reads back as %+v, %v", m, back, err)
		}
	})
}
