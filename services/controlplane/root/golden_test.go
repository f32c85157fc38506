package root

import (
	"bytes"
	"encoding/hex"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/storage"
)

var rewrite = flag.Bool("rewrite", false, "write the golden files anew; never for a level that was released")

func goldenCommands() []Command {
	other := register(1, 0, 9)
	other.ID = 0x78
	return []Command{register(1, 0, 2), founding(4), founding(4), founding(0), register(1, 0, 2), register(1, 0, 2), register(1, 0, 3),
		other, &ConfirmVnode{Vnode: 0}, &ConfirmVnode{Vnode: 3}, &ConfirmVnode{Vnode: 4},
		&RefreshBroker{ID: broker, Boot: 1, JournalGroup: 77}, &RefreshBroker{ID: broker, Boot: 2, JournalGroup: 78},
		register(2, 76, 4), register(2, 77, 5), &SetLevel{Expect: 1, To: 2}, &SetLevel{Expect: 1, To: 1}}
}

// TestGoldenLog: the log of each released level gives the same answers and snapshot bytes in every later build.
func TestGoldenLog(t *testing.T) {
	inv.Covers(t, "INV-M1")
	const path = "testdata/level1.golden"
	var b strings.Builder
	b.WriteString("# level 1: per entry its bytes in hex and the answer; then the snapshot. Frozen.\n")
	m := New(storage.CurrentLevel)
	for _, c := range goldenCommands() {
		entry, err := Encode(c)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&b, "entry %x\n  %T -> %x\n", entry, c, apply(t, m, c).Encode())
	}
	fmt.Fprintf(&b, "snapshot %x\n", snapshot(t, m))
	if *rewrite {
		if err := os.WriteFile(path, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	golden, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if b.String() != string(golden) {
		t.Fatalf("%s differs:\n%s", path, b.String())
	}
	// Now from the file alone.
	m = New(storage.CurrentLevel)
	var answer []byte
	entries := 0
	for i, l := range strings.Split(string(golden), "\n") {
		kind, text, _ := strings.Cut(strings.TrimSpace(l), " ")
		raw, _ := hex.DecodeString(text)
		switch {
		case kind == "entry":
			r, err := m.Apply(raw)
			if err != nil {
				t.Fatalf("line %d: %v", i+1, err)
			}
			answer = r.Encode()
			entries++
		case strings.HasPrefix(kind, "*"):
			if _, want, _ := strings.Cut(l, "-> "); hex.EncodeToString(answer) != want {
				t.Fatalf("line %d: answer %x, want %s", i+1, answer, want)
			}
		case kind == "snapshot":
			again := New(storage.CurrentLevel)
			if err := again.Restore(bytes.NewReader(raw)); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(raw, snapshot(t, m)) || !bytes.Equal(raw, snapshot(t, again)) {
				t.Fatal("replayed or restored, the snapshot is another")
			}
		}
	}
	if entries != len(goldenCommands()) {
		t.Fatalf("%d entries in the file", entries)
	}
}
