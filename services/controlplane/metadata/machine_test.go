package metadata

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/malachilog/malachi/e2e/inv"
	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/storage"
)

const (
	brokerA storage.BrokerID = 0xa
	brokerB storage.BrokerID = 0xb
	brokerC storage.BrokerID = 0xc
)

var everything = []Arc{{First: 0, Last: ^uint64(0)}}

func initCommand(arcs []Arc) *InitVnode {
	return &InitVnode{Cluster: storage.ClusterID{9}, Vnode: 3, RingVersion: 7, Arcs: arcs}
}

// newMachine owns the whole ring.
func newMachine(t testing.TB) *Machine {
	t.Helper()
	m := New(storage.CurrentLevel)
	must(t, m, initCommand(everything))
	return m
}

func apply(t testing.TB, m *Machine, cmd Command) Result {
	t.Helper()
	b, err := Encode(cmd)
	if err != nil {
		t.Fatalf("encode %T: %v", cmd, err)
	}
	r, err := m.Apply(b)
	if err != nil {
		t.Fatalf("apply %T: %v", cmd, err)
	}
	return r
}

func must(t testing.TB, m *Machine, cmd Command) Result {
	t.Helper()
	r := apply(t, m, cmd)
	if r.Outcome != OutcomeOK {
		t.Fatalf("%T: outcome %d (%s)", cmd, r.Outcome, r.Detail)
	}
	return r
}

// refused applies a command that must have this outcome and change nothing.
func refused(t testing.TB, m *Machine, cmd Command, want Outcome) Result {
	t.Helper()
	before := snapshot(t, m)
	r := apply(t, m, cmd)
	if r.Outcome != want {
		t.Fatalf("%T: outcome %d (%s), want %d", cmd, r.Outcome, r.Detail, want)
	}
	if r.Detail == "" && want != OutcomeOK {
		t.Errorf("%T: refused with %d and not a word why", cmd, want)
	}
	if !bytes.Equal(before, snapshot(t, m)) {
		t.Fatalf("%T: outcome %d, but the state changed", cmd, r.Outcome)
	}
	return r
}

func snapshot(t testing.TB, m *Machine) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := m.View().WriteSnapshot(&b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func uid(n byte) storage.TopicUID { return storage.TopicUID{0xee, n} }
func nonce(n byte) Nonce          { return Nonce{0x11, n} }

func create(name string, n byte) *CreateTopic {
	return &CreateTopic{Nonce: nonce(n), UID: uid(n), Name: name, InitialRanges: 1, Labels: map[string]string{"team": "a"}, Time: 100}
}

func rangeID(n byte, seq uint32) storage.RangeID { return storage.RangeID{Topic: uid(n), Seq: seq} }

func open(name string, n byte, seq uint32, base storage.Offset, nonceByte byte) *OpenSegment {
	return &OpenSegment{TopicName: name, Topic: uid(n), Range: rangeID(n, 0), Seq: seq, Base: base, Nonce: nonce(nonceByte),
		Replicas: []storage.BrokerID{brokerA}, Quorum: 1, ReplicationFactor: 1, PrimaryBoot: 5, Header: []byte("header"), Time: 200}
}

func seal(name string, n byte, seq uint32, end storage.End, nonceByte byte) *SealSegment {
	return &SealSegment{TopicName: name, Topic: uid(n), Segment: storage.SegmentID{Range: rangeID(n, 0), Seq: seq}, Nonce: nonce(nonceByte),
		End: end, DataBytes: 1000 + uint64(end), Digest: storage.Digest(end) * 3, ProducerTableDigest: 4, ProducerTableBytes: 8,
		Votes: []storage.BrokerID{brokerA}, Time: 300, Reason: SealSize}
}

func topicOf(t testing.TB, m *Machine, n byte) *Topic {
	t.Helper()
	topic := m.View().TopicByUID(uid(n))
	if topic == nil {
		t.Fatalf("no topic %d", n)
	}
	return topic
}

func TestTopicLife(t *testing.T) {
	m := newMachine(t)
	c := create("orders", 1)
	c.InitialRanges = 4
	if r := must(t, m, c); r.MetaVersion != 1 || r.UID != uid(1) {
		t.Fatalf("created %+v", r)
	}
	topic, outcome := m.View().Topic("orders")
	if outcome != OutcomeOK || len(topic.Ranges()) != 4 || topic.Labels["team"] != "a" {
		t.Fatalf("topic %+v, outcome %d", topic, outcome)
	}
	for i, want := range []storage.Position{0, 1 << 62, 2 << 62, 3 << 62} {
		r := topic.RangeAt(want)
		if r == nil || r.ID.Seq != uint32(i) || topic.RangeAt(r.Slice.Last()) != r {
			t.Fatalf("range at %x: %+v", want, r)
		}
	}
	refused(t, m, create("orders", 2), OutcomeExists)
	refused(t, m, create("other", 1), OutcomeConflict) // the uid again
	for _, bad := range []string{"", "../x", ".x", "a/b", "a b", "ä", strings.Repeat("a", 250)} {
		refused(t, m, create(bad, 3), OutcomeInvalid)
	}
	bad := create("ranges", 3)
	for _, n := range []int{0, 3, 512} {
		bad.InitialRanges = n
		refused(t, m, bad, OutcomeInvalid)
	}

	labels := map[string]string{"team": "b"}
	yes, no := true, false
	update := &UpdateTopic{Name: "orders", UID: uid(1), Nonce: nonce(4), ExpectVersion: 1, Labels: &labels, DeletionProtection: &yes}
	if r := must(t, m, update); r.MetaVersion != 2 {
		t.Fatalf("updated %+v", r)
	}
	refused(t, m, &UpdateTopic{Name: "orders", UID: uid(1), Nonce: nonce(5), ExpectVersion: 1, Labels: &labels}, OutcomeConflict)
	refused(t, m, &UpdateTopic{Name: "nobody", UID: uid(1), Nonce: nonce(5), ExpectVersion: 1, Labels: &labels}, OutcomeNotFound)
	refused(t, m, &DeleteTopic{Name: "orders", Nonce: nonce(6)}, OutcomeProtected)
	must(t, m, &UpdateTopic{Name: "orders", UID: uid(1), Nonce: nonce(5), ExpectVersion: 2, DeletionProtection: &no})
	if got := topicOf(t, m, 1); got.Labels["team"] != "b" || got.DeletionProtection || got.MetaVersion != 3 {
		t.Fatalf("after updates: %+v", got)
	}
	refused(t, m, &DeleteTopic{Name: "orders", Nonce: nonce(6), ExpectVersion: 2}, OutcomeConflict)
	refused(t, m, &DeleteTopic{Name: "orders", Nonce: nonce(6), UID: uid(9)}, OutcomeNotFound)
	refused(t, m, &ForgetTopic{Name: "orders", UID: uid(1)}, OutcomeConflict) // not deleted
	must(t, m, &DeleteTopic{Name: "orders", Nonce: nonce(6), UID: uid(1), ExpectVersion: 3, Time: 400})
	if _, outcome := m.View().Topic("orders"); outcome != OutcomeNotFound {
		t.Fatalf("the name is still taken: %d", outcome)
	}
	if got := topicOf(t, m, 1); got.State != TopicDeleting || got.MetaVersion != 4 {
		t.Fatalf("deleting: %+v", got)
	}
	must(t, m, create("orders", 7)) // the name is free at once
	refused(t, m, open("orders", 1, 0, 0, 8), OutcomeConflict)
	must(t, m, &ForgetTopic{Name: "orders", UID: uid(1)})
	if m.View().TopicByUID(uid(1)) != nil || m.View().Tombstone(uid(1)) == nil {
		t.Fatal("forgotten topic is there, or its tombstone is not")
	}
	reborn := create("elsewhere", 1)
	reborn.Nonce = nonce(60)
	refused(t, m, reborn, OutcomeConflict) // a uid has one life
}

func TestSegmentLife(t *testing.T) {
	inv.Covers(t, "INV-D4")
	m := newMachine(t)
	must(t, m, create("orders", 1))
	refused(t, m, open("orders", 1, 1, 0, 10), OutcomeConflict) // not the tail
	refused(t, m, open("orders", 1, 0, 5, 10), OutcomeConflict) // not the end of the one before
	must(t, m, open("orders", 1, 0, 0, 10))
	if r := refused(t, m, open("orders", 1, 1, 0, 11), OutcomeConflict); r.Segment == nil || r.Segment.OpenNonce != nonce(10) {
		t.Fatalf("a racer must be told what is open: %+v", r)
	}
	refused(t, m, seal("orders", 1, 3, 10, 12), OutcomeNotFound)
	first := must(t, m, seal("orders", 1, 0, 10, 12))
	if s := first.Segment; s.State != SegmentSealed || s.End != 10 || s.Header != nil || s.SealReason != SealSize {
		t.Fatalf("sealed %+v", s)
	}
	refused(t, m, open("orders", 1, 1, 0, 13), OutcomeConflict)
	refused(t, m, open("orders", 1, 1, 11, 13), OutcomeConflict) // a hole
	must(t, m, open("orders", 1, 1, 10, 13))
	abandoned := must(t, m, seal("orders", 1, 1, 10, 14))
	if s := abandoned.Segment; s.State != SegmentAbandoned || s.DataBytes != 0 || s.Digest != 0 {
		t.Fatalf("abandoned %+v", s)
	}
	must(t, m, open("orders", 1, 2, 10, 15))
	refused(t, m, seal("orders", 1, 2, 9, 16), OutcomeInvalid) // before the base
	roll := seal("orders", 1, 2, 25, 16)
	roll.Next = open("orders", 1, 3, 24, 17)
	refused(t, m, roll, OutcomeInvalid) // the next one must chain
	roll.Next.Base = 25
	before := topicOf(t, m, 1).MetaVersion
	r := must(t, m, roll)
	if r.Next == nil || r.Next.State != SegmentOpen || r.Next.Base != 25 || r.MetaVersion != before+1 {
		t.Fatalf("roll: %+v", r)
	}
	topic := topicOf(t, m, 1)
	rng := topic.Range(rangeID(1, 0))
	for o, want := range map[storage.Offset]uint32{0: 0, 9: 0, 10: 2, 24: 2, 25: 3, 1000: 3} {
		if s := rng.SegmentAt(o); s == nil || s.ID.Seq != want {
			t.Errorf("segment at %d: %+v, want seq %d", o, s, want)
		}
	}
	if topic.Segments() != 4 || rng.Len() != 4 || rng.Last().ID.Seq != 3 || topic.Head(rng.ID) != rng.Open || rng.Segment(1).ID.Seq != 1 {
		t.Errorf("counts: %d %d", topic.Segments(), rng.Len())
	}
	// A deleting topic still takes seals, and the next segment is left out.
	must(t, m, &DeleteTopic{Name: "orders", Nonce: nonce(18)})
	last := seal("orders", 1, 3, 30, 19)
	last.Next = open("orders", 1, 4, 30, 20)
	if r := must(t, m, last); r.Next != nil || r.Detail == "" {
		t.Fatalf("seal of a deleting topic: %+v", r)
	}
}

func TestMalformedSegmentsAreRefused(t *testing.T) {
	m := newMachine(t)
	must(t, m, create("orders", 1))
	for name, spoil := range map[string]func(*OpenSegment){
		"no nonce":          func(c *OpenSegment) { c.Nonce = Nonce{} },
		"no replicas":       func(c *OpenSegment) { c.Replicas = nil },
		"a replica twice":   func(c *OpenSegment) { c.Replicas, c.ReplicationFactor, c.Quorum = []storage.BrokerID{1, 1}, 2, 2 },
		"no broker":         func(c *OpenSegment) { c.Replicas = []storage.BrokerID{0} },
		"quorum too small":  func(c *OpenSegment) { c.Replicas, c.ReplicationFactor = []storage.BrokerID{1, 2, 3}, 3 },
		"set below quorum":  func(c *OpenSegment) { c.ReplicationFactor, c.Quorum = 3, 2 },
		"set above rf":      func(c *OpenSegment) { c.Replicas = []storage.BrokerID{1, 2} },
		"too many replicas": func(c *OpenSegment) { c.Replicas = make([]storage.BrokerID, 17) },
		"no boot":           func(c *OpenSegment) { c.PrimaryBoot = 0 },
		"huge header":       func(c *OpenSegment) { c.Header = make([]byte, MaxSegmentHeader+1) },
		"base out of range": func(c *OpenSegment) { c.Base = storage.MaxOffset + 1 },
	} {
		c := open("orders", 1, 0, 0, 10)
		spoil(c)
		if r := refused(t, m, c, OutcomeInvalid); r.Detail == "" {
			t.Errorf("%s: no reason", name)
		}
	}
	refused(t, m, open("orders", 1, 0, 0, 10).in(rangeID(1, 5)), OutcomeNotFound)
	must(t, m, open("orders", 1, 0, 0, 10))
	for name, spoil := range map[string]func(*SealSegment){
		"no nonce":       func(c *SealSegment) { c.Nonce = Nonce{} },
		"no reason":      func(c *SealSegment) { c.Reason = 0 },
		"unknown reason": func(c *SealSegment) { c.Reason = 200 },
		"no bytes":       func(c *SealSegment) { c.DataBytes = 0 },
		"end too large":  func(c *SealSegment) { c.End = storage.EndAfter(storage.MaxOffset, 2) },
	} {
		c := seal("orders", 1, 0, 10, 11)
		spoil(c)
		if r := refused(t, m, c, OutcomeInvalid); r.Detail == "" {
			t.Errorf("%s: no reason", name)
		}
	}
}

func (c *OpenSegment) in(r storage.RangeID) *OpenSegment { c.Range = r; return c }

func TestSealNeedsTheSealQuorum(t *testing.T) {
	inv.Covers(t, "INV-S1")
	m := newMachine(t)
	must(t, m, create("orders", 1))
	o := open("orders", 1, 0, 0, 10)
	o.Replicas, o.Quorum, o.ReplicationFactor = []storage.BrokerID{brokerA, brokerB, brokerC}, 2, 3
	must(t, m, o)
	s := seal("orders", 1, 0, 10, 11)
	for _, votes := range [][]storage.BrokerID{nil, {brokerA}, {brokerA, brokerA}, {brokerA, 0xdd}} {
		s.Votes = votes
		refused(t, m, s, OutcomeInvalid)
	}
	s.Votes = []storage.BrokerID{brokerA, brokerC}
	must(t, m, s)
}

func TestSealIsRecordedOnce(t *testing.T) {
	inv.Covers(t, "INV-S4")
	m := newMachine(t)
	must(t, m, create("orders", 1))
	must(t, m, open("orders", 1, 0, 0, 10))
	recorded := must(t, m, seal("orders", 1, 0, 10, 11)).Segment
	// A racer with other values is told the record.
	r := refused(t, m, seal("orders", 1, 0, 12, 12), OutcomeConflict)
	if !reflect.DeepEqual(r.Segment, recorded) {
		t.Fatalf("racer sees %+v, recorded %+v", r.Segment, recorded)
	}
	// So is the same intent, whatever values it brings the second time.
	r = refused(t, m, seal("orders", 1, 0, 12, 11), OutcomeOK)
	if !r.Already || !reflect.DeepEqual(r.Segment, recorded) {
		t.Fatalf("retry sees %+v, already %v", r.Segment, r.Already)
	}
}

func TestCommandOnAnotherTopicsRange(t *testing.T) {
	inv.Covers(t, "INV-M7")
	m := newMachine(t)
	must(t, m, create("orders", 1))
	must(t, m, create("bills", 2))
	must(t, m, open("bills", 2, 0, 0, 10))
	wrong := open("orders", 1, 1, 0, 11)
	wrong.Range = rangeID(2, 0)
	refused(t, m, wrong, OutcomeTopicMismatch)
	wrongSeal := seal("orders", 1, 0, 10, 12)
	wrongSeal.Segment.Range = rangeID(2, 0)
	refused(t, m, wrongSeal, OutcomeTopicMismatch)
	// The name is what routes, so it must be the uid's own.
	refused(t, m, seal("orders", 2, 0, 10, 12), OutcomeTopicMismatch)
	refused(t, m, open("orders", 2, 1, 0, 12), OutcomeTopicMismatch)
	must(t, m, &DeleteTopic{Name: "bills", Nonce: nonce(13)})
	refused(t, m, &ForgetTopic{Name: "orders", UID: uid(2)}, OutcomeTopicMismatch)
	must(t, m, &ForgetTopic{Name: "bills", UID: uid(2)})
	refused(t, m, &ForgetTopic{Name: "orders", UID: uid(2)}, OutcomeTopicMismatch)
	roll := seal("orders", 1, 0, 10, 14)
	must(t, m, open("orders", 1, 0, 0, 15))
	roll.Next = open("orders", 1, 1, 10, 16).in(rangeID(2, 0))
	refused(t, m, roll, OutcomeInvalid)
}

func TestOutsideTheArcsIsNeverNotFound(t *testing.T) {
	inv.Covers(t, "INV-M9")
	m := New(storage.CurrentLevel)
	commands := func(name string) []Command {
		return []Command{create(name, 1), open(name, 1, 0, 0, 2), seal(name, 1, 0, 5, 3), &ForgetTopic{Name: name, UID: uid(1)},
			&UpdateTopic{Name: name, UID: uid(1), Nonce: nonce(4), ExpectVersion: 1}, &DeleteTopic{Name: name, Nonce: nonce(5)}}
	}
	for _, c := range commands("orders") { // a vnode that does not know its arcs owns nothing
		refused(t, m, c, OutcomeStaleRoute)
	}
	half := []Arc{{First: 0, Last: 1<<63 - 1}}
	must(t, m, initCommand(half))
	inside, outside := 0, 0
	for i := range 200 {
		name := fmt.Sprintf("topic-%d", i)
		_, outcome := m.View().Topic(name)
		if half[0].Holds(HashName(name)) {
			inside++
			if outcome != OutcomeNotFound {
				t.Fatalf("%s inside: outcome %d", name, outcome)
			}
			continue
		}
		outside++
		if outcome != OutcomeStaleRoute {
			t.Fatalf("%s outside: query answers %d", name, outcome)
		}
		for _, c := range commands(name) {
			if r := refused(t, m, c, OutcomeStaleRoute); r.RingVersion != 7 {
				t.Fatalf("%s: stale route of version %d, want 7", name, r.RingVersion)
			}
		}
	}
	if inside == 0 || outside == 0 {
		t.Fatalf("%d names inside, %d outside", inside, outside)
	}
	refused(t, m, initCommand(half), OutcomeOK)
	refused(t, m, initCommand(everything), OutcomeConflict)
}

func TestHigherLevelStopsTheMachine(t *testing.T) {
	inv.Covers(t, "INV-M10")
	level := func(cmd Command, level storage.Level) []byte {
		b, err := Encode(cmd)
		if err != nil {
			t.Fatal(err)
		}
		var p intrav1.MetadataCommand
		if err := proto.Unmarshal(b, &p); err != nil {
			t.Fatal(err)
		}
		p.Level = uint32(level)
		b, err = proto.Marshal(&p)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	unknown, err := proto.Marshal(&intrav1.MetadataCommand{Level: 1}) // a command that this build has no field for looks like none
	if err != nil {
		t.Fatal(err)
	}
	for name, entry := range map[string][]byte{"level": level(create("new", 9), storage.CurrentLevel+1), "unknown command": unknown} {
		m := newMachine(t)
		must(t, m, create("orders", 1))
		before := snapshot(t, m)
		if _, err := m.Apply(entry); !errors.Is(err, storage.ErrNewerFormat) {
			t.Fatalf("%s: %v", name, err)
		}
		// Nothing that follows is applied either: what was skipped might change what it means.
		b, err := Encode(create("after", 2))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := m.Apply(b); !errors.Is(err, storage.ErrNewerFormat) || !errors.Is(m.Stopped(), storage.ErrNewerFormat) {
			t.Fatalf("%s: a command after the stop: %v", name, err)
		}
		if !bytes.Equal(before, snapshot(t, m)) {
			t.Fatalf("%s: the state changed", name)
		}
	}

	newer := New(storage.CurrentLevel + 1)
	for _, entry := range [][]byte{level(initCommand(everything), 1), level(create("new", 9), storage.CurrentLevel+1)} {
		if _, err := newer.Apply(entry); err != nil {
			t.Fatal(err)
		}
	}
	m := newMachine(t)
	if err := m.Restore(bytes.NewReader(snapshot(t, newer))); !errors.Is(err, storage.ErrNewerFormat) {
		t.Fatalf("snapshot of a higher level: %v", err)
	}
	if _, outcome := m.View().Topic("new"); outcome != OutcomeNotFound {
		t.Fatal("a refused snapshot changed the state")
	}
	again := New(storage.CurrentLevel + 1)
	if err := again.Restore(bytes.NewReader(snapshot(t, newer))); err != nil {
		t.Fatal(err)
	}
}

func TestLateCopiesOfACommand(t *testing.T) {
	inv.Covers(t, "INV-M12")
	m := newMachine(t)
	c := create("orders", 1)
	must(t, m, c)
	retry := create("orders", 1)
	retry.UID = uid(50) // a retry through another process draws its own uid
	if r := refused(t, m, retry, OutcomeOK); !r.Already || r.UID != uid(1) {
		t.Fatalf("retry of a creation: %+v", r)
	}
	other := create("orders", 1)
	other.InitialRanges = 2
	refused(t, m, other, OutcomeExists) // same nonce, other settings: not the same intent

	labels, later := map[string]string{"v": "1"}, map[string]string{"v": "2"}
	u := &UpdateTopic{Name: "orders", UID: uid(1), Nonce: nonce(2), ExpectVersion: 1, Labels: &labels}
	must(t, m, u)
	must(t, m, &UpdateTopic{Name: "orders", UID: uid(1), Nonce: nonce(3), ExpectVersion: 2, Labels: &later})
	if r := refused(t, m, u, OutcomeOK); !r.Already || r.MetaVersion != 2 {
		t.Fatalf("late update: %+v", r)
	}
	if topicOf(t, m, 1).Labels["v"] != "2" {
		t.Fatal("a late copy undid a newer update")
	}

	o := open("orders", 1, 0, 0, 4)
	must(t, m, o)
	s := seal("orders", 1, 0, 10, 5)
	s.Next = open("orders", 1, 1, 10, 6)
	must(t, m, s)
	if r := refused(t, m, o, OutcomeOK); !r.Already || r.Segment.State != SegmentSealed {
		t.Fatalf("late open: %+v", r)
	}
	if r := refused(t, m, s, OutcomeOK); !r.Already || r.Next == nil || r.Next.OpenNonce != nonce(6) {
		t.Fatalf("late roll: %+v", r)
	}

	d := &DeleteTopic{Name: "orders", Nonce: nonce(7)}
	must(t, m, d)
	refused(t, m, c, OutcomeNotFound) // does not revive what was deleted
	must(t, m, create("orders", 8))   // the next life of the name
	if r := refused(t, m, d, OutcomeOK); !r.Already || r.UID != uid(1) {
		t.Fatalf("late deletion: %+v", r)
	}
	must(t, m, &ForgetTopic{Name: "orders", UID: uid(1)})
	refused(t, m, d, OutcomeOK)
	refused(t, m, c, OutcomeNotFound)
	refused(t, m, &ForgetTopic{Name: "orders", UID: uid(1)}, OutcomeOK)

	// The memory survives a snapshot.
	m2 := New(storage.CurrentLevel)
	if err := m2.Restore(bytes.NewReader(snapshot(t, m))); err != nil {
		t.Fatal(err)
	}
	refused(t, m2, d, OutcomeOK)
	refused(t, m2, c, OutcomeNotFound)
}

func TestBoundsAreRefusedPolitely(t *testing.T) {
	m := newMachine(t)
	must(t, m, create("orders", 1))
	full := *topicOf(t, m, 1)
	full.segments = MaxSegments
	m.st.put(&full)
	refused(t, m, open("orders", 1, 0, 0, 2), OutcomeLimit)
	full.segments = MaxSegments - 1
	m.st.put(&full)
	must(t, m, open("orders", 1, 0, 0, 2))

	c := create("labels", 3)
	c.Labels = map[string]string{}
	for i := range MaxLabels + 1 {
		c.Labels[fmt.Sprint(i)] = ""
	}
	refused(t, m, c, OutcomeInvalid)
	if _, err := Encode(&OpenSegment{Header: make([]byte, MaxCommandBytes)}); !errors.Is(err, storage.ErrTooLarge) {
		t.Fatalf("a huge command: %v", err)
	}
}

func TestViewsNeverChange(t *testing.T) {
	m := newMachine(t)
	var readers sync.WaitGroup
	stop := make(chan struct{})
	defer readers.Wait()
	defer close(stop)
	for i := range 64 {
		must(t, m, create(fmt.Sprintf("topic-%d", i), byte(i+1)))
	}
	view := m.View()
	var want bytes.Buffer
	if err := view.WriteSnapshot(&want); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		readers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				var got bytes.Buffer
				if err := view.WriteSnapshot(&got); err != nil || !bytes.Equal(got.Bytes(), want.Bytes()) {
					t.Errorf("the view changed (err %v)", err)
					return
				}
			}
		})
	}
	for seq := range uint32(8) {
		for i := range 64 {
			name, n := fmt.Sprintf("topic-%d", i), byte(i+1)
			base := storage.Offset(seq) * 10
			o := open(name, n, seq, base, byte(100+seq))
			must(t, m, o)
			must(t, m, seal(name, n, seq, storage.EndAfter(base, 10), byte(150+seq)))
		}
	}
	for i := range 32 {
		must(t, m, &DeleteTopic{Name: fmt.Sprintf("topic-%d", i), Nonce: nonce(200)})
		must(t, m, &ForgetTopic{Name: fmt.Sprintf("topic-%d", i), UID: uid(byte(i + 1))})
	}
}

func TestList(t *testing.T) {
	m := newMachine(t)
	for i, name := range []string{"b", "a1", "a2", "a3", "c"} {
		must(t, m, create(name, byte(i+1)))
	}
	names := func(ts []*Topic) string {
		var out []string
		for _, t := range ts {
			out = append(out, t.Name)
		}
		return strings.Join(out, " ")
	}
	v := m.View()
	for _, c := range []struct {
		prefix, after string
		limit         int
		want          string
	}{{"", "", 10, "a1 a2 a3 b c"}, {"", "a2", 2, "a3 b"}, {"a", "", 2, "a1 a2"}, {"a", "a2", 9, "a3"}, {"a", "b", 9, ""}, {"b", "a", 9, "b"}, {"", "", 0, ""}} {
		if got := names(v.List(c.prefix, c.after, c.limit)); got != c.want {
			t.Errorf("list prefix %q after %q limit %d: %q, want %q", c.prefix, c.after, c.limit, got, c.want)
		}
	}
	var all []*Topic
	v.Topics(func(t *Topic) bool { all = append(all, t); return true })
	if names(all) != "a1 a2 a3 b c" {
		t.Errorf("topics: %q", names(all))
	}
}

func TestHotLookupsDoNotAllocate(t *testing.T) {
	m := newMachine(t)
	for i := range 50 {
		c := create(fmt.Sprintf("topic-%d", i), byte(i+1))
		c.InitialRanges = 8
		must(t, m, c)
	}
	must(t, m, open("topic-3", 4, 0, 0, 90))
	view := m.View()
	name := "topic-3"
	if n := testing.AllocsPerRun(100, func() {
		topic, outcome := view.Topic(name)
		if outcome != OutcomeOK {
			t.Fatal(outcome)
		}
		r := topic.RangeAt(storage.PositionOfKey(nil))
		if r == nil || topic.Range(r.ID) != r || view.TopicByUID(topic.UID) != topic {
			t.Fatal("lost")
		}
		_ = topic.Head(r.ID)
		_ = r.SegmentAt(0)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestChildren(t *testing.T) {
	low, high := storage.Slice{}.Halves()
	parent := rangeID(1, 0)
	topic := &Topic{UID: uid(1), ranges: []*Range{
		{ID: parent, State: RangeSealed},
		{ID: rangeID(1, 1), Slice: high, State: RangeActive, Parents: []Parent{{Range: parent, End: 9}}},
		{ID: rangeID(1, 2), Slice: low, State: RangeActive, Parents: []Parent{{Range: parent, End: 9}}},
	}}
	got := topic.Children(parent)
	if len(got) != 2 || got[0].ID.Seq != 2 || got[1].ID.Seq != 1 {
		t.Fatalf("children %v", got)
	}
	topic.owners = ownersOf(topic.ranges)
	if !slices.Equal(topic.Owners(), got) || topic.RangeAt(0) != got[0] || topic.RangeAt(high.Last()) != got[1] {
		t.Fatal("owners are not the children")
	}
}
