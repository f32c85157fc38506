package metadata

import (
	"bytes"
	"fmt"
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/storage"
)

// world draws commands that mostly fit the state, and some that do not.
type world struct {
	t    *rapid.T
	m    *Machine // whose state the commands are drawn for
	next byte
}

func (w *world) fresh() (Nonce, byte) {
	w.next++
	return Nonce{0x22, w.next, byte(len(w.m.View().st.arcs))}, w.next
}

func (w *world) nonce() Nonce {
	if w.next > 0 && rapid.IntRange(0, 5).Draw(w.t, "reuse") == 0 {
		return Nonce{0x22, byte(rapid.IntRange(1, int(w.next)).Draw(w.t, "nonce")), 1}
	}
	n, _ := w.fresh()
	return n
}

func (w *world) topic() *Topic {
	var all []*Topic
	w.m.View().st.byUID.Ascend(func(e uidEntry) bool {
		all = append(all, e.topic)
		return true
	})
	if len(all) == 0 {
		return &Topic{UID: storage.TopicUID{0xff}, Name: "t0"}
	}
	return all[rapid.IntRange(0, len(all)-1).Draw(w.t, "topic")]
}

func (w *world) name() string { return fmt.Sprintf("t%d", rapid.IntRange(0, 2).Draw(w.t, "name")) }

func (w *world) off(label string, right uint64) uint64 {
	if rapid.IntRange(0, 7).Draw(w.t, label+"-off") == 0 {
		return right + uint64(rapid.IntRange(0, 3).Draw(w.t, label))
	}
	return right
}

func (w *world) command() Command {
	time := storage.Time(rapid.IntRange(1, 1000).Draw(w.t, "time"))
	switch rapid.IntRange(0, 14).Draw(w.t, "kind") {
	case 0, 1:
		n := w.nonce()
		return &CreateTopic{Nonce: n, UID: storage.TopicUID(n), Name: w.name(), Time: time,
			InitialRanges: 1 << rapid.IntRange(0, 2).Draw(w.t, "ranges"), Labels: map[string]string{"a": "b", "c": "d"}}
	case 2:
		t := w.topic()
		labels := map[string]string{"n": fmt.Sprint(w.next)}
		return &UpdateTopic{Name: t.Name, UID: t.UID, Nonce: w.nonce(), ExpectVersion: w.off("version", t.MetaVersion), Labels: &labels}
	case 3:
		d := &DeleteTopic{Name: w.name(), Nonce: w.nonce(), Time: time}
		if rapid.Bool().Draw(w.t, "by uid") {
			t := w.topic()
			d.Name, d.UID, d.ExpectVersion = t.Name, t.UID, w.off("version", t.MetaVersion)
		}
		return d
	case 4:
		t := w.topic()
		return &ForgetTopic{Name: t.Name, UID: t.UID}
	case 5, 6:
		t := w.topic()
		return w.open(t, w.rangeOf(t), time)
	case 7, 8, 9, 10:
		return w.replicas()
	case 11:
		return w.resolve(time)
	default:
		return w.seal(time)
	}
}

func (w *world) rangeOf(t *Topic) *Range {
	if len(t.ranges) == 0 {
		return &Range{ID: storage.RangeID{Topic: t.UID}}
	}
	r := t.ranges[rapid.IntRange(0, len(t.ranges)-1).Draw(w.t, "range")]
	if rapid.IntRange(0, 9).Draw(w.t, "foreign") == 0 {
		foreign := *r
		foreign.ID.Topic = w.topic().UID
		return &foreign
	}
	return r
}

func (w *world) open(t *Topic, r *Range, time storage.Time) *OpenSegment {
	rf := 1 + 2*rapid.IntRange(0, 1).Draw(w.t, "rf")
	o := &OpenSegment{TopicName: t.Name, Topic: t.UID, Range: r.ID, Seq: uint32(w.off("seq", uint64(r.NextSegment))),
		Base: storage.Offset(w.off("base", uint64(r.SealedEnd))), Nonce: w.nonce(), ReplicationFactor: rf, Quorum: rf/2 + 1,
		PrimaryBoot: 1, Header: []byte{1, 2}, Time: time}
	for i := range rf {
		o.Replicas = append(o.Replicas, storage.BrokerID(i+1))
	}
	return o
}

// used draws a topic and one of its ranges, one that has segments if there is any.
func (w *world) used() (*Topic, *Range) {
	type pair struct {
		t *Topic
		r *Range
	}
	var all []pair
	w.m.View().st.byUID.Ascend(func(e uidEntry) bool {
		for _, r := range e.topic.ranges {
			if r.Len() > 0 {
				all = append(all, pair{e.topic, r})
			}
		}
		return true
	})
	if len(all) == 0 || rapid.IntRange(0, 9).Draw(w.t, "any range") == 0 {
		t := w.topic()
		return t, w.rangeOf(t)
	}
	p := all[rapid.IntRange(0, len(all)-1).Draw(w.t, "used range")]
	return p.t, p.r
}

func (w *world) seal(time storage.Time) *SealSegment {
	t, r := w.used()
	seq, base := uint32(0), storage.Offset(0)
	if last := r.Last(); last != nil {
		seq, base = last.ID.Seq, last.Base
	}
	s := &SealSegment{TopicName: t.Name, Topic: t.UID, Segment: storage.SegmentID{Range: r.ID, Seq: uint32(w.off("seq", uint64(seq)))},
		Nonce: w.nonce(), End: storage.EndAfter(base, uint64(rapid.IntRange(0, 3).Draw(w.t, "count"))), Time: time, Reason: SealAge,
		Digest: storage.Digest(time), DataBytes: 77, Votes: []storage.BrokerID{1, 2}}
	if rapid.Bool().Draw(w.t, "roll") {
		after := *r
		after.NextSegment, after.SealedEnd = seq+1, s.End
		s.Next = w.open(t, &after, time)
	}
	return s
}

// closed draws a segment that mostly is sealed.
func (w *world) closed() (*Topic, *Segment) {
	t, r := w.used()
	if len(r.Closed) == 0 {
		return t, &Segment{ID: storage.SegmentID{Range: r.ID}, Replicas: []storage.BrokerID{1}}
	}
	return t, r.Closed[rapid.IntRange(0, len(r.Closed)-1).Draw(w.t, "closed")]
}

func (w *world) replicas() *UpdateReplicas {
	t, s := w.closed()
	c := &UpdateReplicas{TopicName: t.Name, Topic: t.UID, Segment: s.ID, ExpectVersion: w.off("version", s.ReplicaVersion),
		Change: ReplicaChange(rapid.IntRange(1, 3).Draw(w.t, "change")), Broker: storage.BrokerID(rapid.IntRange(1, 6).Draw(w.t, "broker")),
		Boot: 1, Gone: rapid.IntRange(0, 3).Draw(w.t, "gone") == 0}
	if c.Change == ReplicaConfirm && len(s.Incoming) > 0 {
		c.Broker = s.Incoming[0]
	}
	return c
}

func (w *world) resolve(time storage.Time) *ResolveSegment {
	t, s := w.closed()
	end, _, _ := s.Remaining()
	from := uint64(s.Base)
	if end > storage.EndBefore(s.Base) {
		from = uint64(rapid.IntRange(int(s.Base), int(end)-1).Draw(w.t, "from"))
	}
	return &ResolveSegment{TopicName: t.Name, Topic: t.UID, Segment: s.ID, ExpectVersion: w.off("version", s.ReplicaVersion), Nonce: w.nonce(),
		LostFrom: storage.Offset(w.off("lost", from)), DataBytes: 5, Digest: 6, Time: time}
}

// restored is a machine made from m's snapshot.
func restored(t *rapid.T, m *Machine) *Machine {
	var b bytes.Buffer
	if err := m.View().WriteSnapshot(&b); err != nil {
		t.Fatal(err)
	}
	out := New(storage.CurrentLevel)
	if err := out.Restore(&b); err != nil {
		t.Fatal(err)
	}
	return out
}

func bytesOf(t *rapid.T, m *Machine) []byte {
	var b bytes.Buffer
	if err := m.View().WriteSnapshot(&b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func applyTo(t *rapid.T, m *Machine, cmd Command) Result {
	b, err := Encode(cmd)
	if err != nil {
		t.Fatal(err)
	}
	r, err := m.Apply(b)
	if err != nil {
		t.Fatal(err)
	}
	back, err := DecodeResult(r.Encode(), rangeOfCommand(cmd))
	if err != nil || !reflect.DeepEqual(r, back) {
		t.Fatalf("result %+v reads back as %+v (%v)", r, back, err)
	}
	return r
}

func rangeOfCommand(cmd Command) storage.RangeID {
	switch c := cmd.(type) {
	case *OpenSegment:
		return c.Range
	case *SealSegment:
		return c.Segment.Range
	case *UpdateReplicas:
		return c.Segment.Range
	case *ResolveSegment:
		return c.Segment.Range
	}
	return storage.RangeID{}
}

// TestReplicasAgree runs one log on four machines: twice plainly, once restored from its snapshot at random points, once with every
// command twice and old ones again in between. All must hold the same bytes at each index.
func TestReplicasAgree(t *testing.T) {
	inv.Covers(t, "INV-M1", "INV-M12", "INV-D4", "INV-S4", "INV-C6")
	tally := map[string]int{}
	for range 4 {
		rapid.Check(t, func(t *rapid.T) { replicasAgree(t, tally) })
	}
	t.Logf("branches: %v", tally)
	for _, want := range []string{"*metadata.CreateTopic 1", "*metadata.CreateTopic 3", "*metadata.UpdateTopic 1", "*metadata.UpdateTopic 4",
		"*metadata.DeleteTopic 1", "*metadata.ForgetTopic 1", "*metadata.OpenSegment 1", "*metadata.OpenSegment 4",
		"*metadata.OpenSegment 7", "*metadata.SealSegment 1 sealed", "*metadata.SealSegment 1 abandoned", "*metadata.SealSegment 1 rolled",
		"*metadata.SealSegment 4", "*metadata.UpdateReplicas 1", "*metadata.UpdateReplicas 4", "*metadata.ResolveSegment 1",
		"*metadata.ResolveSegment 4", "*metadata.ResolveSegment 5"} {
		if tally[want] == 0 {
			t.Errorf("the random commands never reached %q", want)
		}
	}
}

func replicasAgree(t *rapid.T, tally map[string]int) {
	a, b, c, twice := New(1), New(1), New(1), New(1)
	for _, m := range []*Machine{a, b, c, twice} {
		applyTo(t, m, initCommand(everything))
	}
	w := &world{t: t, m: a}
	seen := &history{seals: map[storage.SegmentID]*Segment{}, versions: map[storage.TopicUID]*Topic{}}
	var done []Command
	for range rapid.IntRange(1, 60).Draw(t, "steps") {
		cmd := w.command()
		ra := applyTo(t, a, cmd)
		tally[branch(cmd, ra)]++
		want := bytesOf(t, a)
		if rb := applyTo(t, b, cmd); !reflect.DeepEqual(ra, rb) || !bytes.Equal(want, bytesOf(t, b)) {
			t.Fatalf("two replicas differ after %T: %+v, %+v", cmd, ra, rb)
		}
		if rapid.IntRange(0, 4).Draw(t, "restore") == 0 {
			c = restored(t, c)
		}
		if rc := applyTo(t, c, cmd); !reflect.DeepEqual(ra, rc) || !bytes.Equal(want, bytesOf(t, c)) {
			t.Fatalf("a restored replica differs after %T: %+v, %+v", cmd, ra, rc)
		}
		first, second := applyTo(t, twice, cmd), applyTo(t, twice, cmd)
		if !reflect.DeepEqual(ra, first) || !bytes.Equal(want, bytesOf(t, twice)) {
			t.Fatalf("%T applied twice makes another state: %+v, %+v, %+v", cmd, ra, first, second)
		}
		if first.Outcome == OutcomeOK && (second.Outcome != OutcomeOK || !second.Already || !reflect.DeepEqual(first.Segment, second.Segment)) {
			t.Fatalf("%T: the first copy answers %+v, the second %+v", cmd, first, second)
		}
		if ra.Outcome == OutcomeOK {
			done = append(done, cmd)
		}
		if len(done) > 0 {
			old := done[rapid.IntRange(0, len(done)-1).Draw(t, "late")]
			if r := applyTo(t, twice, old); !bytes.Equal(want, bytesOf(t, twice)) {
				t.Fatalf("a late copy of %T changed the state: %+v", old, r)
			}
		}
		seen.check(t, a.View())
	}
}

// branch names what a command came to.
func branch(cmd Command, r Result) string {
	s := fmt.Sprintf("%T %d", cmd, r.Outcome)
	if _, ok := cmd.(*SealSegment); ok && r.Outcome == OutcomeOK && !r.Already {
		s += " " + r.Segment.State.String()
		if r.Next != nil {
			s = fmt.Sprintf("%T %d rolled", cmd, r.Outcome)
		}
	}
	return s
}

// history remembers what must never change.
type history struct {
	seals    map[storage.SegmentID]*Segment
	versions map[storage.TopicUID]*Topic
}

func (h *history) check(t *rapid.T, v *View) {
	v.st.byUID.Ascend(func(e uidEntry) bool {
		topic := e.topic
		if old := h.versions[topic.UID]; old != nil {
			if topic.MetaVersion < old.MetaVersion || topic.MetaVersion == old.MetaVersion && !reflect.DeepEqual(topic, old) {
				t.Fatalf("topic %s changed from version %d to %d", topic.Name, old.MetaVersion, topic.MetaVersion)
			}
		}
		h.versions[topic.UID] = topic
		segments := 0
		for _, r := range topic.ranges {
			h.checkRange(t, r)
			segments += r.Len()
		}
		if segments != topic.segments {
			t.Fatalf("topic %s counts %d segments of %d", topic.Name, topic.segments, segments)
		}
		next := storage.Position(0)
		for i, r := range topic.owners {
			if r.Slice.First() != next {
				t.Fatalf("topic %s: position %x has no owner, or two", topic.Name, next)
			}
			next = r.Slice.Last() + 1
			if topic.RangeAt(r.Slice.First()) != r || topic.RangeAt(r.Slice.Last()) != r || i == len(topic.owners)-1 && next != 0 {
				t.Fatalf("topic %s: owner %s is not found at its ends", topic.Name, r.ID)
			}
		}
		return true
	})
}

// checkClosed: what is sealed stays as recorded; who holds copies changes by one broker at a time, and what remains only shrinks.
func checkClosed(t *rapid.T, old, now *Segment) {
	was, is := *old, *now
	for _, s := range []*Segment{&was, &is} {
		s.Replicas, s.Incoming, s.ReplicaVersion, s.Loss = nil, nil, 0, nil
	}
	if !reflect.DeepEqual(was, is) {
		t.Fatalf("the seal of %s changed from %+v to %+v", now.ID, old, now)
	}
	if now.ReplicaVersion == old.ReplicaVersion && !reflect.DeepEqual(old, now) || now.ReplicaVersion < old.ReplicaVersion ||
		now.ReplicaVersion > old.ReplicaVersion+1 {
		t.Fatalf("the copies of %s changed from %+v to %+v", now.ID, old, now)
	}
	added, dropped := 0, 0
	for _, b := range now.Replicas {
		if !slices.Contains(old.Replicas, b) {
			if added++; !slices.Contains(old.Incoming, b) {
				t.Fatalf("the copy of %s on %s was never to come", now.ID, b)
			}
		}
		if slices.Contains(now.Incoming, b) {
			t.Fatalf("the copy of %s on %s is there and yet to come", now.ID, b)
		}
	}
	for _, b := range old.Replicas {
		if !slices.Contains(now.Replicas, b) {
			dropped++
		}
	}
	wasEnd, _, _ := old.Remaining()
	isEnd, _, _ := now.Remaining()
	if added+dropped > 1 || len(now.Replicas) == 0 || isEnd > wasEnd {
		t.Fatalf("the copies of %s changed from %+v to %+v", now.ID, old, now)
	}
}

// checkRange: bases chain without a hole, seqs count up, at most the last segment is open, and what is sealed stays as recorded.
func (h *history) checkRange(t *rapid.T, r *Range) {
	end := storage.EndBefore(r.Start)
	for i, s := range r.Closed {
		abandoned := s.End == storage.EndBefore(s.Base)
		if s.ID.Seq != uint32(i) || storage.EndBefore(s.Base) != end || s.End < end || s.State == SegmentOpen ||
			abandoned != (s.State == SegmentAbandoned) {
			t.Fatalf("segment %s: %+v does not follow %d", s.ID, s, end)
		}
		end = s.End
		if old := h.seals[s.ID]; old != nil {
			checkClosed(t, old, s)
		}
		h.seals[s.ID] = s
	}
	if r.SealedEnd != end || r.NextSegment != uint32(r.Len()) {
		t.Fatalf("range %s: sealed end %d of %d, next %d of %d", r.ID, r.SealedEnd, end, r.NextSegment, r.Len())
	}
	if o := r.Open; o != nil && (o.State != SegmentOpen || storage.EndBefore(o.Base) != end || o.ID.Seq != r.NextSegment-1) {
		t.Fatalf("open segment %+v does not follow %d", o, end)
	}
}
