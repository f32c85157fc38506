package produce

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/malachilog/malachi/e2e/inv"
	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/services/replica"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
)

const (
	self  storage.BrokerID = 1
	other storage.BrokerID = 2
)

var topicUID = storage.TopicUID{0xaa}

// world is one topic in a real metadata machine, and the primaries of its ranges. It implements Topics, Heads and Primary.
type world struct {
	t testing.TB

	mu      sync.Mutex
	machine *metadata.Machine
	changed chan struct{}
	nonces  uint64
	primary storage.BrokerID            // of the segments that it opens
	took    map[uint32][]string         // by segment seq: the batches that its primary was given, by name
	names   map[string]string           // of batches, by their bytes
	append  func(a appending) error     // what a primary does with a batch
	noHead  func(context.Context) error // in place of a new head
}

// appending is a batch at a primary.
type appending struct {
	seg  *metadata.Segment
	name string
	done func(error)
}

func newWorld(t testing.TB, ranges int) *world {
	w := &world{t: t, machine: metadata.New(storage.CurrentLevel), changed: make(chan struct{}), primary: self, took: map[uint32][]string{}, names: map[string]string{}}
	w.must(&metadata.InitVnode{Cluster: storage.ClusterID{7}, RingVersion: 1, Arcs: []metadata.Arc{{First: 0, Last: ^uint64(0)}}})
	w.must(&metadata.CreateTopic{Nonce: w.nonce(), UID: topicUID, Name: "t", InitialRanges: ranges, Time: 1})
	return w
}

func (w *world) nonce() (n metadata.Nonce) {
	w.nonces++
	binary.BigEndian.PutUint64(n[:], w.nonces)
	return n
}

func (w *world) must(cmd metadata.Command) metadata.Result {
	b, err := metadata.Encode(cmd)
	if err != nil {
		w.t.Fatal(err)
	}
	r, err := w.machine.Apply(b)
	if err != nil || r.Outcome != metadata.OutcomeOK {
		w.t.Fatalf("%T: %+v, %v", cmd, r, err)
	}
	close(w.changed)
	w.changed = make(chan struct{})
	return r
}

// roll closes the range's open segment, if there is one, and opens the next.
func (w *world) roll(id storage.RangeID) *metadata.Segment {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.machine.View().TopicByUID(topicUID).Range(id)
	if r.Open != nil {
		w.must(&metadata.SealSegment{
			TopicName: "t", Topic: topicUID, Segment: r.Open.ID, Nonce: w.nonce(), End: storage.EndAfter(r.Open.Base, 1), DataBytes: 100, Digest: 1,
			Votes: r.Open.Replicas, Time: 3, Reason: metadata.SealSize,
		})
		r = w.machine.View().TopicByUID(topicUID).Range(id)
	}
	return w.must(&metadata.OpenSegment{
		TopicName: "t", Topic: topicUID, Range: id, Seq: r.NextSegment, Base: r.SealedEnd.Next(), Nonce: w.nonce(), Replicas: []storage.BrokerID{w.primary},
		Quorum: 1, ReplicationFactor: 1, PrimaryBoot: 1, Header: []byte("h"), Time: 2,
	}).Segment
}

// rangeAt is the topic's n-th range.
func (w *world) rangeAt(n int) storage.RangeID {
	t, _ := w.CachedTopicByUID(topicUID)
	return t.Owners()[n].ID
}

// batch is a batch of one record per key.
func (w *world) batch(name string, keys ...string) []byte {
	var b batch.Builder
	for _, k := range keys {
		if err := b.Add(&batch.Record{Key: []byte(k), Value: []byte(name), Time: 1}, 0); err != nil {
			w.t.Fatal(err)
		}
	}
	data, err := b.Build(nil, batch.Options{Codec: batch.CodecNone})
	if err != nil {
		w.t.Fatal(err)
	}
	w.names[string(data)] = name
	return data
}

// keyIn is a key of the topic's n-th range.
func (w *world) keyIn(n int) string {
	t, _ := w.CachedTopicByUID(topicUID)
	for i := range 1000 {
		if k := fmt.Sprintf("k%d", i); t.Owners()[n].Slice.Holds(storage.PositionOfKey([]byte(k))) {
			return k
		}
	}
	w.t.Fatal("no such key")
	return ""
}

func (w *world) service() *Service { return New(Deps{Self: self, Topics: w, Heads: w, Primary: w}) }

func (w *world) view() *metadata.View {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.machine.View()
}

func (w *world) CachedTopic(name string) (*metadata.Topic, bool) {
	t, o := w.view().Topic(name)
	return t, o == metadata.OutcomeOK
}

func (w *world) Topic(_ context.Context, name string) (*metadata.Topic, error) {
	if t, ok := w.CachedTopic(name); ok {
		return t, nil
	}
	return nil, storage.ErrTopicNotFound
}

func (w *world) CachedTopicByUID(uid storage.TopicUID) (*metadata.Topic, bool) {
	t := w.view().TopicByUID(uid)
	return t, t != nil
}

func (w *world) Await(ctx context.Context, uid storage.TopicUID, until func(*metadata.Topic) bool) (*metadata.Topic, error) {
	for {
		w.mu.Lock()
		changed := w.changed
		w.mu.Unlock()
		if t, ok := w.CachedTopicByUID(uid); ok && until(t) {
			return t, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (w *world) EnsureHead(ctx context.Context, _ storage.TopicUID, id storage.RangeID) (*metadata.Segment, error) {
	if w.noHead != nil {
		if err := w.noHead(ctx); err != nil {
			return nil, err
		}
	}
	return w.roll(id), nil
}

func (w *world) Append(seg *metadata.Segment, b []byte, done func(replica.Appended, error)) error {
	w.mu.Lock()
	name := w.names[string(b)]
	w.mu.Unlock()
	a := appending{seg: seg, name: name, done: func(err error) { done(replica.Appended{AppendTime: 5}, err) }}
	if err := w.append(a); err != nil {
		return err
	}
	return nil
}

// takes notes that a primary has queued a batch.
func (w *world) takes(a appending) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.took[a.seg.ID.Seq] = append(w.took[a.seg.ID.Seq], a.name)
}

// later calls f when time has passed: in a bubble of synctest it costs none.
func later(d time.Duration, f func()) { time.AfterFunc(d, f) }

// TestOrderInsideARequest: batches of one range are appended in the request's order, whenever their head refuses them and in whatever way.
func TestOrderInsideARequest(t *testing.T) {
	inv.Covers(t, "INV-C5")
	cases := map[string]func(w *world) func(appending) error{
		"refused after all were queued": func(w *world) func(appending) error {
			return func(a appending) error {
				if w.takes(a); a.seg.ID.Seq == 0 {
					later(time.Second, func() { a.done(storage.ErrFenced) })
				} else {
					later(time.Millisecond, func() { a.done(nil) })
				}
				return nil
			}
		},
		"refused while others are queued": func(w *world) func(appending) error {
			return func(a appending) error {
				if w.takes(a); a.seg.ID.Seq == 0 {
					a.done(storage.ErrSealed)
				} else {
					later(time.Millisecond, func() { a.done(nil) })
				}
				return nil
			}
		},
		"the first is refused early, the second late": func(w *world) func(appending) error {
			return func(a appending) error {
				w.takes(a)
				switch {
				case a.seg.ID.Seq > 0:
					later(time.Millisecond, func() { a.done(nil) })
				case a.name == "1":
					later(time.Millisecond, func() { a.done(storage.ErrFenced) })
				default:
					later(time.Second, func() { a.done(storage.ErrFenced) })
				}
				return nil
			}
		},
		"the third is refused at once, those before it late": func(w *world) func(appending) error {
			return func(a appending) error {
				switch {
				case a.seg.ID.Seq > 0:
					w.takes(a)
					later(time.Millisecond, func() { a.done(nil) })
				case a.name < "3":
					w.takes(a)
					later(time.Second, func() { a.done(storage.ErrFenced) })
				default:
					w.roll(a.seg.ID.Range)
					return storage.ErrFenced
				}
				return nil
			}
		},
		"the segment ends in the middle": func(w *world) func(appending) error {
			return func(a appending) error {
				if w.takes(a); a.seg.ID.Seq == 0 && a.name > "2" {
					later(time.Second, func() { a.done(storage.ErrSealed) })
				} else {
					later(time.Second, func() { a.done(nil) })
				}
				return nil
			}
		},
		"the next head refuses too": func(w *world) func(appending) error {
			return func(a appending) error {
				if w.takes(a); a.seg.ID.Seq < 3 {
					later(100*time.Millisecond, func() { a.done(storage.ErrStaleBoot) })
				} else {
					later(time.Millisecond, func() { a.done(nil) })
				}
				return nil
			}
		},
	}
	for name, primary := range cases {
		for _, at := range []storage.BrokerID{self, other} {
			t.Run(fmt.Sprintf("%s, broker %d", name, at), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := newWorld(t, 1)
					w.primary = at
					w.append = primary(w)
					w.roll(w.rangeAt(0))
					var batches [][]byte
					want := []string{"1", "2", "3", "4"}
					for _, n := range want {
						batches = append(batches, w.batch(n, "k"))
					}
					res, err := w.service().Produce(t.Context(), &v1.ProduceRequest{Topic: "t", Batches: batches})
					if err != nil {
						t.Fatal(err)
					}
					for i, r := range res.GetResults() {
						if r.GetError() != nil {
							t.Errorf("batch %d: %v", i+1, r.GetError())
						}
					}
					w.mu.Lock()
					defer w.mu.Unlock()
					var last []string // where each batch was taken for good, in order
					seqs := make([]uint32, 0, len(w.took))
					for seq := range w.took {
						seqs = append(seqs, seq)
					}
					slices.Sort(seqs)
					for _, seq := range seqs {
						for _, n := range w.took[seq] {
							last = append(slices.DeleteFunc(last, func(o string) bool { return o == n }), n)
						}
					}
					if !slices.Equal(last, want) {
						t.Errorf("appended in the order %v: %v", last, w.took)
					}
				})
			})
		}
	}
}

// TestWhatIsKnownOfAnAppend: a refusal is told as one, and what may be in the log is named unknown; the call itself fails only if nothing was tried.
func TestWhatIsKnownOfAnAppend(t *testing.T) {
	inv.Covers(t, "INV-M12")
	at := func(d time.Duration, err error) func(*world, appending) error {
		return func(w *world, a appending) error {
			w.takes(a)
			later(d, func() { a.done(err) })
			return nil
		}
	}
	refuses := func(err error) func(*world, appending) error {
		return func(*world, appending) error { return err }
	}
	for _, c := range []struct {
		name    string
		first   func(*world, appending) error // what the primaries of the two ranges do
		second  func(*world, appending) error
		noHead  func(context.Context) error
		whole   error    // of the call
		unknown [2]bool  // of each result
		failed  [2]error // by its reason
		lasts   time.Duration
	}{
		{name: "both are in", first: at(0, nil), second: at(0, nil)},
		{name: "both refused at once", first: refuses(storage.ErrDiskFull), second: refuses(storage.ErrOverloaded), whole: storage.ErrDiskFull},
		{name: "both refused later", first: at(time.Second, storage.ErrStorageFailed), second: refuses(storage.ErrOverloaded), whole: storage.ErrStorageFailed, lasts: time.Second},
		{name: "one is refused", first: at(0, nil), second: refuses(storage.ErrDiskFull), failed: [2]error{nil, storage.ErrDiskFull}},
		{name: "one is unknown", first: at(time.Second, storage.ErrOutcomeUnknown), second: at(0, nil), failed: [2]error{storage.ErrOutcomeUnknown, nil}, unknown: [2]bool{true, false}, lasts: time.Second},
		{name: "one is not answered", first: at(time.Hour, nil), second: refuses(storage.ErrDiskFull), failed: [2]error{storage.ErrOutcomeUnknown, storage.ErrDiskFull}, unknown: [2]bool{true, false}, lasts: deadline},
		{
			name: "no head within the deadline", first: refuses(storage.ErrFenced), second: refuses(storage.ErrFenced), whole: storage.ErrUnavailable, lasts: deadline,
			noHead: func(ctx context.Context) error { <-ctx.Done(); return storage.ErrUnavailable },
		},
		{name: "every head refuses after it was queued", first: at(3*time.Second, storage.ErrFenced), second: at(0, nil), failed: [2]error{storage.ErrUnavailable, nil}, unknown: [2]bool{true, false}, lasts: deadline},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, 2)
				w.noHead = c.noHead
				w.append = func(a appending) error {
					if a.seg.ID.Range == w.rangeAt(0) {
						return c.first(w, a)
					}
					return c.second(w, a)
				}
				w.roll(w.rangeAt(0))
				w.roll(w.rangeAt(1))
				req := &v1.ProduceRequest{Topic: "t", Batches: [][]byte{w.batch("1", w.keyIn(0)), w.batch("2", w.keyIn(1))}}
				start := time.Now()
				res, err := w.service().Produce(t.Context(), req)
				if took := time.Since(start); took != c.lasts {
					t.Errorf("it took %v, want %v", took, c.lasts)
				}
				if !errors.Is(err, c.whole) {
					t.Fatalf("the call failed with %v, want %v", err, c.whole)
				}
				for i, r := range res.GetResults() {
					if e := r.GetError(); (e != nil) != (c.failed[i] != nil) || e.GetDetail().GetOutcomeUnknown() != c.unknown[i] {
						t.Errorf("batch %d: %v, want %v, unknown: %v", i+1, e, c.failed[i], c.unknown[i])
					}
				}
				after := time.After(2 * time.Hour) // answers that come late change nothing
				<-after
			})
		})
	}
}

// TestUnknownIsNeverTriedAgain: without a producer id a second try could make a second copy.
func TestUnknownIsNeverTriedAgain(t *testing.T) {
	inv.Covers(t, "INV-M12")
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1)
		w.append = func(a appending) error {
			w.takes(a)
			later(time.Millisecond, func() { a.done(fmt.Errorf("the segment was fenced meanwhile: %w", storage.ErrOutcomeUnknown)) })
			return nil
		}
		w.roll(w.rangeAt(0))
		res, err := w.service().Produce(t.Context(), &v1.ProduceRequest{Topic: "t", Batches: [][]byte{w.batch("1", "k")}})
		if err != nil || !res.GetResults()[0].GetError().GetDetail().GetOutcomeUnknown() {
			t.Fatalf("%v, %v", res, err)
		}
		if len(w.took) != 1 || len(w.took[0]) != 1 {
			t.Errorf("it was appended at %v", w.took)
		}
	})
}

// TestCallersDeadline: the caller's own, if it is nearer, ends the call with the outcome named unknown.
func TestCallersDeadline(t *testing.T) {
	inv.Covers(t, "INV-C10")
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1)
		w.append = func(appending) error { return nil }
		w.roll(w.rangeAt(0))
		for _, d := range []time.Duration{time.Second, time.Hour} {
			ctx, cancel := context.WithTimeout(t.Context(), d)
			start := time.Now()
			res, err := w.service().Produce(ctx, &v1.ProduceRequest{Topic: "t", Batches: [][]byte{w.batch("1", "k")}})
			cancel()
			if took := time.Since(start); took != min(d, deadline) {
				t.Errorf("with %v it took %v", d, took)
			}
			if err != nil || !res.GetResults()[0].GetError().GetDetail().GetOutcomeUnknown() {
				t.Errorf("%v, %v", res, err)
			}
		}
	})
}

// TestPartlyRefused: of a batch that straddles ranges one part is in and one refused: what is known of the whole is "unknown".
func TestPartlyRefused(t *testing.T) {
	inv.Covers(t, "INV-M12")
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2)
		w.append = func(a appending) error {
			if a.seg.ID.Range == w.rangeAt(1) {
				return storage.ErrDiskFull
			}
			later(time.Millisecond, func() { a.done(nil) })
			return nil
		}
		w.roll(w.rangeAt(0))
		w.roll(w.rangeAt(1))
		res, err := w.service().Produce(t.Context(), &v1.ProduceRequest{Topic: "t", Batches: [][]byte{w.batch("1", w.keyIn(0), w.keyIn(1))}})
		if err != nil || len(res.GetResults()) != 1 {
			t.Fatalf("%v, %v", res, err)
		}
		if d := res.GetResults()[0].GetError().GetDetail(); d.GetReason() != v1.Reason_DISK_FULL || !d.GetOutcomeUnknown() {
			t.Errorf("%v", d)
		}
	})
}

// TestBadRequestsAppendNothing: what is wrong with one batch is told before any is appended.
func TestBadRequestsAppendNothing(t *testing.T) {
	w := newWorld(t, 1)
	w.append = func(a appending) error {
		t.Errorf("batch %s was appended", a.name)
		return storage.ErrOverloaded
	}
	good := w.batch("1", "k")
	named := func(seq uint64) []byte {
		var b batch.Builder
		if err := b.Add(&batch.Record{Key: []byte("k"), Value: []byte("v")}, 0); err != nil {
			t.Fatal(err)
		}
		data, err := b.Build(nil, batch.Options{Producer: storage.ProducerID{9}, Sequence: seq})
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	flipped := slices.Clone(good)
	flipped[len(flipped)-1] ^= 1
	record := &v1.Record{Value: &v1.Payload{Form: &v1.Payload_Text{Text: "v"}}}
	for name, req := range map[string]*v1.ProduceRequest{
		"no record":             {Topic: "t"},
		"records and batches":   {Topic: "t", Records: []*v1.Record{record}, Batches: [][]byte{good}},
		"a flipped byte":        {Topic: "t", Batches: [][]byte{good, flipped}},
		"no batch at all":       {Topic: "t", Batches: [][]byte{good, []byte("no")}},
		"one producer id twice": {Topic: "t", Batches: [][]byte{named(1), named(2)}},
		"a topic that is not":   {Topic: "u", Batches: [][]byte{good}},
		"a name that can't be":  {Topic: "no name", Batches: [][]byte{good}},
	} {
		if res, err := w.service().Produce(t.Context(), req); err == nil {
			t.Errorf("%s: %v", name, res)
		}
	}
}
