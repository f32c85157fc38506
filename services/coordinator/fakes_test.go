package coordinator

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/malachilog/malachi/services/controlplane"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/services/controlplane/root"
	"github.com/malachilog/malachi/services/placement"
	"github.com/malachilog/malachi/services/replica"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/rangelog"
)

// The brokers of the tests. The coordinator is that of brokerA, unless a test says otherwise.
const (
	brokerA storage.BrokerID = 0xa1
	brokerB storage.BrokerID = 0xb2
	brokerC storage.BrokerID = 0xc3
	brokerD storage.BrokerID = 0xd4
)

// world is a cluster's metadata, one real vnode machine, and brokers that do as a test says. It implements ControlPlane, Copies, Local and Store.
type world struct {
	t    testing.TB
	self storage.BrokerID

	mu      sync.Mutex
	machine *metadata.Machine
	state   *root.State
	brokers map[storage.BrokerID]*fakeBroker
	absent  map[storage.BrokerID]time.Duration
	nonces  uint64
	changed chan struct{} // closed when the metadata changes
	said    []string      // commands, in order
	healErr error
	healed  []storage.SegmentID
	live    []storage.SegmentID // of Store
	listed  []storage.SegmentID
	plane   controlplane.ControlPlane // gives watchers that nothing wakes
}

// fakeBroker answers for the replicas of one broker. Its fields are set under the world's lock, by do.
type fakeBroker struct {
	w       *world
	id      storage.BrokerID
	away    bool // does not answer, and nobody has noticed
	serves  bool
	vote    rangelog.Vote
	noVote  error
	extends error
	opens   error

	asked, drained, fenced, opened int
	extendedFrom                   storage.BrokerID
	dropped, sealed                []storage.SegmentID
}

func newWorld(t testing.TB, ids ...storage.BrokerID) *world {
	w := &world{
		t: t, self: brokerA, machine: metadata.New(storage.CurrentLevel), brokers: map[storage.BrokerID]*fakeBroker{},
		absent: map[storage.BrokerID]time.Duration{}, changed: make(chan struct{}),
		state: &root.State{Cluster: storage.ClusterID{7}, Level: storage.CurrentLevel, Policy: root.Policy{
			Version: 1, ReplicationFactor: 3, Acks: root.AcksQuorum, MinDomains: 1, Placement: root.PlacementSoft,
			SegmentMaxBytes: root.DefaultSegmentMaxBytes, SegmentMaxAge: root.DefaultSegmentMaxAge,
		}},
	}
	for _, id := range ids {
		w.brokers[id] = &fakeBroker{w: w, id: id, vote: rangelog.Vote{End: 10, Pos: 1000, Digest: 77}}
		w.state.Brokers = append(w.state.Brokers, root.Broker{ID: id, Boot: 1, ReadyBoot: 1})
	}
	w.must(&metadata.InitVnode{Cluster: storage.ClusterID{7}, Vnode: 0, RingVersion: 1, Arcs: []metadata.Arc{{First: 0, Last: ^uint64(0)}}})
	return w
}

// do changes what the brokers do.
func (w *world) do(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
}

// command applies a command to the real machine.
func (w *world) command(cmd metadata.Command) (metadata.Result, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	b, err := metadata.Encode(cmd)
	if err != nil {
		return metadata.Result{}, err
	}
	r, err := w.machine.Apply(b)
	if err != nil {
		return r, err
	}
	close(w.changed)
	w.changed = make(chan struct{})
	switch r.Outcome {
	case metadata.OutcomeOK:
		return r, nil
	case metadata.OutcomeNotFound:
		return r, storage.ErrTopicNotFound
	}
	return r, fmt.Errorf("%s: %w", r.Detail, storage.ErrConflict)
}

func (w *world) must(cmd metadata.Command) metadata.Result {
	w.t.Helper()
	r, err := w.command(cmd)
	if err != nil {
		w.t.Fatalf("%T: %v", cmd, err)
	}
	return r
}

// topic makes a topic with one range.
func (w *world) topic(name string) *metadata.Topic {
	w.t.Helper()
	var uid storage.TopicUID
	copy(uid[:], name)
	nonce, _ := w.NewNonce()
	w.must(&metadata.CreateTopic{Nonce: nonce, UID: uid, Name: name, InitialRanges: 1, Time: 1})
	return w.now(uid)
}

// now is a topic as it is recorded now.
func (w *world) now(uid storage.TopicUID) *metadata.Topic {
	w.t.Helper()
	t, ok := w.CachedTopicByUID(uid)
	if !ok {
		w.t.Fatal("the topic is gone")
	}
	return t
}

// open records an open segment of the topic's one range on a set.
func (w *world) open(t *metadata.Topic, q int, set ...storage.BrokerID) *metadata.Segment {
	w.t.Helper()
	r := w.now(t.UID).Owners()[0]
	nonce, _ := w.NewNonce()
	return w.must(&metadata.OpenSegment{
		TopicName: t.Name, Topic: t.UID, Range: r.ID, Seq: r.NextSegment, Base: r.SealedEnd.Next(), Nonce: nonce, Replicas: set, Quorum: q,
		ReplicationFactor: w.Policy().ReplicationFactor, PrimaryBoot: 1, Header: []byte("header"), Time: 2,
	}).Segment
}

// sealed records a sealed segment of ten records on a set.
func (w *world) sealedOn(t *metadata.Topic, set ...storage.BrokerID) *metadata.Segment {
	w.t.Helper()
	seg := w.open(t, 2, set...)
	nonce, _ := w.NewNonce()
	return w.must(&metadata.SealSegment{
		TopicName: t.Name, Topic: t.UID, Segment: seg.ID, Nonce: nonce, End: storage.EndAfter(seg.Base, 10), DataBytes: 1000, Digest: 77,
		Votes: set, Time: 3, Reason: metadata.SealSize,
	}).Segment
}

// change is the record of a sealed segment after one step of its copies.
func (w *world) segment(id storage.SegmentID) *metadata.Segment {
	w.t.Helper()
	return w.now(id.Range.Topic).Segment(id)
}

// coordinator is one within whose Run the test's goroutine is: what it spawns runs until the test ends.
func (w *world) coordinator() *Coordinator {
	c := New(Config{Self: w.self, Boot: 1}, w.deps())
	ctx, cancel := context.WithCancel(context.WithoutCancel(w.t.Context()))
	c.group, c.ctx = errgroup.WithContext(ctx)
	w.t.Cleanup(func() {
		cancel()
		if err := c.group.Wait(); err != nil {
			w.t.Error(err)
		}
	})
	return c
}

func (w *world) deps() Deps {
	return Deps{
		ControlPlane: w, Copies: w, Local: w, Store: w, Logger: slog.New(slog.DiscardHandler), Absent: w.absentFor, Brokers: w.candidates,
		Replicas: func(b storage.BrokerID) Replicas {
			if f := w.brokers[b]; f != nil {
				return f
			}
			return nil
		},
	}
}

func (w *world) absentFor(b storage.BrokerID) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.absent[b]
}

// candidates are the brokers for placement: absent is who has been seen to be.
func (w *world) candidates() (out []placement.Broker) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, b := range w.state.Brokers {
		out = append(out, placement.Broker{ID: b.ID, Absent: w.absent[b.ID] > 0, Draining: b.State != root.BrokerActive})
	}
	return out
}

// set changes what root knows of a broker.
func (w *world) set(id storage.BrokerID, f func(*root.Broker)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	next := *w.state
	next.Brokers = slices.Clone(w.state.Brokers)
	for i := range next.Brokers {
		if next.Brokers[i].ID == id {
			f(&next.Brokers[i])
		}
	}
	w.state = &next
}

// ControlPlane.

func (w *world) view() *metadata.View {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.machine.View()
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

func (w *world) Topics(uint32) []*metadata.Topic {
	return slices.Collect(w.view().Topics)
}

func (w *world) Deleting(uint32) []*metadata.Topic {
	return slices.Collect(w.view().Deleting)
}

func (w *world) Vnodes() []uint32      { return []uint32{0} }
func (w *world) Leader(uint32) bool    { return true }
func (w *world) Full() <-chan struct{} { return nil }

func (w *world) CoordinatorOf(storage.TopicUID) (storage.BrokerID, bool) { return w.self, true }

func (w *world) OpenSegment(_ context.Context, c metadata.OpenSegment) (*metadata.Segment, error) {
	r, err := w.command(&c)
	return r.Segment, err
}

func (w *world) SealSegment(_ context.Context, c metadata.SealSegment) (controlplane.Sealed, error) {
	r, err := w.command(&c)
	return controlplane.Sealed{Segment: r.Segment, Next: r.Next, Already: r.Already}, err
}

func (w *world) UpdateReplicas(_ context.Context, c metadata.UpdateReplicas) (*metadata.Segment, error) {
	w.do(func() {
		w.said = append(w.said, fmt.Sprintf("%s %x", [...]string{metadata.ReplicaIncoming: "incoming", metadata.ReplicaConfirm: "confirm", metadata.ReplicaDrop: "drop"}[c.Change], uint64(c.Broker)))
	})
	r, err := w.command(&c)
	return r.Segment, err
}

func (w *world) ForgetTopic(_ context.Context, name string, uid storage.TopicUID) error {
	_, err := w.command(&metadata.ForgetTopic{Name: name, UID: uid})
	return err
}

func (w *world) NewNonce() (n metadata.Nonce, _ error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.nonces++
	binary.BigEndian.PutUint64(n[:], w.nonces)
	return n, nil
}

func (w *world) Watch() *controlplane.Watcher { return w.plane.Watch() }
func (w *world) Policy() root.Policy          { return w.State().Policy }

func (w *world) State() *root.State {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.state
}

// Copies, Local and Store.

func (w *world) Heal(_ context.Context, seg *metadata.Segment) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.said = append(w.said, "heal")
	if w.healErr == nil {
		w.healed = append(w.healed, seg.ID)
	}
	return w.healErr
}

func (w *world) CheckCopy(*metadata.Segment, func(int) error) error { return nil }
func (w *world) Serving() []replica.Load                            { return nil }
func (w *world) Rejoin(context.Context, storage.SegmentID) error    { return nil }
func (w *world) Live() []storage.SegmentID                          { return w.live }
func (w *world) List() ([]storage.SegmentID, error)                 { return w.listed, nil }

// Replicas.

// answer is whether the broker answers at all.
func (b *fakeBroker) answer(count *int) error {
	if b.away {
		return fmt.Errorf("broker %s: %w", b.id, storage.ErrUnavailable)
	}
	*count++
	return nil
}

func (b *fakeBroker) Open(context.Context, replica.Open) error {
	b.w.mu.Lock()
	defer b.w.mu.Unlock()
	if err := b.answer(&b.opened); err != nil {
		return err
	}
	return b.opens
}

func (b *fakeBroker) Ask(context.Context, storage.SegmentID) (bool, error) {
	b.w.mu.Lock()
	defer b.w.mu.Unlock()
	return b.serves, b.answer(&b.asked)
}

func (b *fakeBroker) Drain(context.Context, storage.SegmentID) error {
	b.w.mu.Lock()
	defer b.w.mu.Unlock()
	return b.answer(&b.drained)
}

func (b *fakeBroker) Fence(context.Context, storage.SegmentID, []byte) (rangelog.Vote, error) {
	b.w.mu.Lock()
	defer b.w.mu.Unlock()
	if err := b.answer(&b.fenced); err != nil {
		return rangelog.Vote{}, err
	}
	return b.vote, b.noVote
}

func (b *fakeBroker) Extend(_ context.Context, _ storage.SegmentID, from storage.BrokerID, end storage.End) (storage.End, storage.Digest, error) {
	b.w.mu.Lock()
	defer b.w.mu.Unlock()
	var n int
	if err := b.answer(&n); err != nil {
		return 0, 0, err
	}
	if b.extends != nil {
		return 0, 0, b.extends
	}
	b.extendedFrom = from
	return end, b.w.brokers[from].vote.Digest, nil
}

func (b *fakeBroker) Seal(_ context.Context, id storage.SegmentID, _ storage.End, _ storage.Digest) error {
	b.w.mu.Lock()
	defer b.w.mu.Unlock()
	b.sealed = append(b.sealed, id)
	return nil
}

func (b *fakeBroker) Drop(_ context.Context, id storage.SegmentID) error {
	b.w.mu.Lock()
	defer b.w.mu.Unlock()
	b.dropped = append(b.dropped, id)
	return nil
}

// fences is how many brokers were told to fence.
func (w *world) fences() (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for b := range maps.Values(w.brokers) {
		n += b.fenced
	}
	return n
}

// after lets time pass: in a bubble of synctest it costs none.
func after(d time.Duration) { <-time.After(d) }
