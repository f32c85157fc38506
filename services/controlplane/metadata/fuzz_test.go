package metadata

import (
	"bytes"
	"testing"

	"github.com/malachilog/malachi/storage"
)

// FuzzApply: bytes from outside never panic, and what is not applied changes nothing.
func FuzzApply(f *testing.F) {
	roll := seal("orders", 1, 0, 10, 12)
	roll.Next = open("orders", 1, 1, 10, 13)
	for _, c := range []Command{initCommand(everything), create("orders", 1), open("orders", 1, 0, 0, 10), roll,
		&DeleteTopic{Name: "orders", Nonce: nonce(4)}, &ForgetTopic{Name: "orders", UID: uid(1)}} {
		b, err := Encode(c)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, entry []byte) {
		m := newMachine(t)
		must(t, m, create("orders", 1))
		must(t, m, open("orders", 1, 0, 0, 10))
		before := snapshot(t, m)
		r, err := m.Apply(entry)
		after := snapshot(t, m)
		if (err != nil || r.Outcome != OutcomeOK || r.Already) && !bytes.Equal(before, after) {
			t.Fatalf("outcome %d, error %v, but the state changed", r.Outcome, err)
		}
		again := New(storage.CurrentLevel)
		if err := again.Restore(bytes.NewReader(after)); err != nil {
			t.Fatalf("the snapshot of the new state does not restore: %v", err)
		}
		if !bytes.Equal(after, snapshot(t, again)) {
			t.Fatal("restored, the state is another")
		}
	})
}

// FuzzRestore: a snapshot from outside never panics; what it restores to can be written and restored again.
func FuzzRestore(f *testing.F) {
	m := newMachine(f)
	must(f, m, create("orders", 1))
	must(f, m, open("orders", 1, 0, 0, 10))
	must(f, m, seal("orders", 1, 0, 10, 11))
	must(f, m, create("bills", 2))
	must(f, m, &DeleteTopic{Name: "bills", Nonce: nonce(3)})
	must(f, m, create("gone", 4))
	must(f, m, &DeleteTopic{Name: "gone", Nonce: nonce(5)})
	must(f, m, &ForgetTopic{Name: "gone", UID: uid(4)})
	f.Add(snapshot(f, m))
	f.Add(snapshot(f, New(storage.CurrentLevel)))
	f.Fuzz(func(t *testing.T, b []byte) {
		m := New(storage.CurrentLevel)
		if err := m.Restore(bytes.NewReader(b)); err != nil {
			return
		}
		again := New(storage.CurrentLevel)
		if err := again.Restore(bytes.NewReader(snapshot(t, m))); err != nil {
			t.Fatal(err)
		}
	})
}

func TestDamagedSnapshotsAreRefused(t *testing.T) {
	m := newMachine(t)
	must(t, m, create("orders", 1))
	must(t, m, open("orders", 1, 0, 0, 10))
	whole := snapshot(t, m)
	for i := range whole {
		for _, bad := range [][]byte{whole[:i], flipped(whole, i)} {
			if err := New(storage.CurrentLevel).Restore(bytes.NewReader(bad)); err == nil {
				t.Fatalf("restored with damage at byte %d of %d", i, len(whole))
			}
		}
	}
}

func flipped(b []byte, i int) []byte {
	out := bytes.Clone(b)
	out[i] ^= 0x10
	return out
}
