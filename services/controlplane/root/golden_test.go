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

// goldenClusterCommands is a log of the commands that came with clusters of several brokers.
func goldenClusterCommands() []Command {
	found := founding(2)
	found.Brokers = 5
	named := register(1, 3, 2)
	named.Attributes, named.Time = map[string]string{"zone": "a", "rack": "7"}, 1000
	rf, bad, acks, bytes := 5, 9, AcksAll, uint64(1<<20)
	return []Command{
		admit(0x88, 10), found, named, admit(0x88, 10), admit(0x88, 11), admit(0, 12), &BrokerReady{ID: broker, Boot: 1},
		&BrokerReady{ID: broker, Boot: 2}, admit(0x99, 13), joined(0x88, 1, 14), &BrokerReady{ID: 0x88, Boot: 1},
		&SetBrokerState{ID: 0x88, To: BrokerDraining, Nonce: nonce(20)},
		&SetBrokerState{ID: 0x88, ExpectVersion: 1, To: BrokerDecommissioning, Nonce: nonce(21)}, &RemoveBroker{ID: 0x88},
		&SetBrokerState{ID: 0x99, To: BrokerDecommissioning, Nonce: nonce(22)}, &RemoveBroker{ID: 0x99}, &RemoveBroker{ID: 0x99}, admit(0x99, 13),
		joined(0x99, 1, 15), &RetireReplicas{ID: 0x88}, &RetireReplicas{ID: 0x88}, &RetireReplicas{ID: 0x88, ExpectGeneration: 4},
		&UpdatePolicy{Nonce: nonce(30), ExpectVersion: 1, Change: PolicyChange{ReplicationFactor: &rf, Acks: &acks, SegmentMaxBytes: &bytes}},
		&UpdatePolicy{Nonce: nonce(30), ExpectVersion: 1, Change: PolicyChange{ReplicationFactor: &rf, Acks: &acks, SegmentMaxBytes: &bytes}},
		&UpdatePolicy{Nonce: nonce(31), ExpectVersion: 1, Change: PolicyChange{ReplicationFactor: &rf}},
		&UpdatePolicy{Nonce: nonce(32), ExpectVersion: 2, Change: PolicyChange{ReplicationFactor: &bad, MinReplicas: &bad}},
	}
}

// TestGoldenLog: the log of each released level gives the same answers and snapshot bytes in every later build.
func TestGoldenLog(t *testing.T) {
	inv.Covers(t, "INV-M1")
	golden(t, "testdata/level1.golden", goldenCommands())
	golden(t, "testdata/level1-cluster.golden", goldenClusterCommands())
}

func golden(t *testing.T, path string, commands []Command) {
	t.Helper()
	var b strings.Builder
	b.WriteString("# level 1: per entry its bytes in hex and the answer; then the snapshot. Frozen.\n")
	m := New(storage.CurrentLevel)
	for _, c := range commands {
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
	if entries != len(commands) {
		t.Fatalf("%d entries in the file", entries)
	}
}
