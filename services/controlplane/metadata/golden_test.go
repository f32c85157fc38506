package metadata

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

// goldenCommands is a log that uses every command and most refusals.
func goldenCommands() []Command {
	labels := map[string]string{"team": "payments", "stage": "prod"}
	yes := true
	orders := create("orders", 1)
	orders.InitialRanges = 4
	three := open("orders", 1, 0, 0, 10).in(rangeID(1, 2))
	three.Replicas, three.Quorum, three.ReplicationFactor = []storage.BrokerID{brokerA, brokerB, brokerC}, 2, 3
	sealThree := seal("orders", 1, 0, 500, 11)
	sealThree.Segment.Range, sealThree.Votes = rangeID(1, 2), []storage.BrokerID{brokerB, brokerC}
	roll := seal("bills", 2, 0, 42, 13)
	roll.Next = open("bills", 2, 1, 42, 14)
	return []Command{
		create("early", 9), // before the vnode has arcs
		initCommand(everything), initCommand(everything),
		orders, orders, create("orders", 8), create("../x", 7), create("bills", 2), create("gone", 3),
		&UpdateTopic{Name: "orders", UID: uid(1), Nonce: nonce(20), ExpectVersion: 1, Labels: &labels, DeletionProtection: &yes},
		&UpdateTopic{Name: "orders", UID: uid(1), Nonce: nonce(21), ExpectVersion: 1, Labels: &labels},
		three, sealThree, sealThree,
		open("bills", 2, 0, 0, 12), open("bills", 2, 1, 0, 15), roll, seal("bills", 2, 1, 42, 16), open("bills", 2, 2, 42, 17),
		seal("bills", 2, 0, 50, 18), seal("orders", 2, 2, 50, 18),
		&DeleteTopic{Name: "orders", Nonce: nonce(22), Time: 900},
		&DeleteTopic{Name: "gone", Nonce: nonce(23), Time: 901}, create("gone", 3), create("gone", 4),
		&ForgetTopic{Name: "gone", UID: uid(3)}, &ForgetTopic{Name: "gone", UID: uid(3)},
		&DeleteTopic{Name: "gone", UID: uid(4), Nonce: nonce(24), ExpectVersion: 1, Time: 902},
	}
}

// goldenReplicaCommands is a log of the commands that came with clusters of several brokers.
func goldenReplicaCommands() []Command {
	three := open("bills", 1, 0, 0, 10)
	three.Replicas, three.Quorum, three.ReplicationFactor = []storage.BrokerID{brokerA, brokerB, brokerC}, 2, 3
	sealThree := seal("bills", 1, 0, 500, 11)
	sealThree.Votes = []storage.BrokerID{brokerB, brokerC}
	id := sealThree.Segment
	step := func(version uint64, kind ReplicaChange, b storage.BrokerID, gone bool) *UpdateReplicas {
		return &UpdateReplicas{TopicName: "bills", Topic: uid(1), Segment: id, ExpectVersion: version, Change: kind, Broker: b, Boot: 8, Gone: gone}
	}
	next := open("bills", 1, 1, 500, 12)
	next.Replicas, next.Quorum, next.ReplicationFactor = []storage.BrokerID{brokerB, brokerC}, 2, 3
	given := seal("bills", 1, 1, 600, 13)
	given.Votes, given.Gone, given.Reason = []storage.BrokerID{brokerB}, []storage.BrokerID{brokerC}, SealOperator
	return []Command{
		initCommand(everything), create("bills", 1), three, step(0, ReplicaIncoming, 0xdd, false), sealThree,
		step(0, ReplicaIncoming, 0xdd, false), step(0, ReplicaIncoming, 0xdd, false), step(1, ReplicaConfirm, 0xdd, false),
		step(2, ReplicaDrop, brokerA, false), step(3, ReplicaDrop, brokerB, false), step(3, ReplicaDrop, brokerB, true),
		step(4, ReplicaIncoming, 0xee, false), step(0, ReplicaIncoming, 0xdd, false), next, given,
		&ResolveSegment{TopicName: "bills", Topic: uid(1), Segment: id, ExpectVersion: 5, Nonce: nonce(20), LostFrom: 300, DataBytes: 900, Digest: 9, Time: 950},
		&ResolveSegment{TopicName: "bills", Topic: uid(1), Segment: id, ExpectVersion: 5, Nonce: nonce(21), LostFrom: 200, DataBytes: 900, Digest: 9, Time: 950},
		step(6, ReplicaConfirm, 0xbad, false),
		&UpdateReplicas{TopicName: "bills", Topic: uid(1), Segment: id, ExpectVersion: 6, Change: 9, Broker: 1},
	}
}

// TestGoldenLog replays the log of each released level: the same entries must give the same answers and the same snapshot bytes in
// every later build, or replicas of different builds would part.
func TestGoldenLog(t *testing.T) {
	inv.Covers(t, "INV-M1")
	golden(t, "testdata/level1.golden", goldenCommands())
	golden(t, "testdata/level1-replicas.golden", goldenReplicaCommands())
}

func golden(t *testing.T, path string, commands []Command) {
	t.Helper()
	m := New(storage.CurrentLevel)
	var b strings.Builder
	b.WriteString("# level 1: per entry its bytes in hex and the answer; then the snapshot. Frozen.\n")
	for _, c := range commands {
		entry, err := Encode(c)
		if err != nil {
			t.Fatal(err)
		}
		r, err := m.Apply(entry)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&b, "entry %x\n  %T -> %x\n", entry, c, r.Encode())
	}
	fmt.Fprintf(&b, "snapshot %x\n", snapshot(t, m))
	if *rewrite {
		if err := os.WriteFile(path, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	got, lines := strings.Split(b.String(), "\n"), strings.Split(string(want), "\n")
	for i := range max(len(got), len(lines)) {
		if i >= len(got) || i >= len(lines) || got[i] != lines[i] {
			t.Fatalf("%s: line %d differs:\n got %s\nwant %s", path, i+1, line(got, i), line(lines, i))
		}
	}
	replayGolden(t, lines, len(commands))
}

// replayGolden uses nothing but the file, as a later build will whose encoder has moved on.
func replayGolden(t *testing.T, lines []string, want int) {
	t.Helper()
	m := New(storage.CurrentLevel)
	entries := 0
	var answer []byte
	for i, l := range lines {
		kind, text, _ := strings.Cut(strings.TrimSpace(l), " ")
		switch {
		case kind == "entry":
			entry, err := hex.DecodeString(text)
			if err != nil {
				t.Fatalf("line %d: %v", i+1, err)
			}
			r, err := m.Apply(entry)
			if err != nil {
				t.Fatalf("line %d: %v", i+1, err)
			}
			answer = r.Encode()
			entries++
		case strings.HasPrefix(kind, "*"):
			_, want, _ := strings.Cut(l, "-> ")
			if got := hex.EncodeToString(answer); got != want {
				t.Fatalf("line %d: answer %s, want %s", i+1, got, want)
			}
		case kind == "snapshot":
			snap, err := hex.DecodeString(text)
			if err != nil {
				t.Fatalf("line %d: %v", i+1, err)
			}
			if !bytes.Equal(snap, snapshot(t, m)) {
				t.Fatal("the replayed log has another snapshot")
			}
			again := New(storage.CurrentLevel)
			if err := again.Restore(bytes.NewReader(snap)); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(snap, snapshot(t, again)) {
				t.Fatal("restored, the golden snapshot is another")
			}
		}
	}
	if entries != want {
		t.Fatalf("%d entries, want %d", entries, want)
	}
}

func line(ls []string, i int) string {
	if i < len(ls) {
		return ls[i]
	}
	return "(none)"
}
