package replica

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect/v2"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/gen/go/malachi/intra/v1/intrav1connect"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/services/rpc"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
	"github.com/malachilog/malachi/storage/journal"
	"github.com/malachilog/malachi/storage/rangelog"
	"github.com/malachilog/malachi/storage/replication"
	"github.com/malachilog/malachi/storage/vfs/memfs"
)

// cluster is a few brokers' replica services, each with its own memory disk, that call each other over loopback.
type cluster struct {
	t       *testing.T
	brokers []*node
	mu      sync.Mutex
	asked   map[replication.Reason]int
}

// node is one of them. While it is cut, calls to it find nobody.
type node struct {
	*Service
	id    storage.BrokerID
	fs    *memfs.FS
	store *rangelog.Store
	addr  string
	gate  sync.RWMutex // held exclusively while calls to it hang
	stop  func()
}

func newCluster(t *testing.T, n int, cfg Config) *cluster {
	t.Helper()
	c := &cluster{t: t, asked: map[replication.Reason]int{}}
	for i := range n {
		c.brokers = append(c.brokers, &node{id: storage.BrokerID(i + 1), fs: memfs.New(memfs.Options{Direct: true})})
	}
	for _, b := range c.brokers {
		c.start(b, cfg, 1)
	}
	t.Cleanup(func() {
		for _, b := range c.brokers {
			if b.stop != nil {
				b.stop()
			}
		}
	})
	return c
}

func (c *cluster) address(b storage.BrokerID) (string, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if b < 1 || int(b) > len(c.brokers) || c.brokers[b-1].addr == "" {
		return "", false
	}
	return c.brokers[b-1].addr, true
}

func (c *cluster) start(b *node, cfg Config, boot storage.Boot) {
	t := c.t
	t.Helper()
	store, err := rangelog.Open(rangelog.Config{Journal: journal.Config{FileBytes: 256 << 10, MaxBytes: 4 << 20}, DiskReserve: 1},
		rangelog.Deps{FS: b.fs, Logger: slog.New(slog.DiscardHandler), NewJournalID: journal.ID{byte(b.id)}})
	if err != nil {
		t.Fatal(err)
	}
	cfg.Self, cfg.Boot = b.id, boot
	peers := rpc.NewPeers(c.address, nil)
	b.store = store
	b.Service = New(cfg, Deps{Store: store, Logger: slog.New(slog.DiscardHandler), Peers: peers, AskPass: func(_ storage.SegmentID, why replication.Reason) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.asked[why]++
	}})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	handler := rpc.PeerHandler(slog.New(slog.DiscardHandler), func(s *connect.Server) {
		intrav1connect.RegisterReplicaServiceHandler(s, NewServer(b.Service))
	})
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b.gate.RLock() // one that is cut hangs here
		func() { defer b.gate.RUnlock() }()
		handler.ServeHTTP(w, r)
	})}
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	all.Go(func() { _ = server.Serve(l) })
	all.Go(func() { _ = b.Run(ctx) })
	storeCtx, stopStore := context.WithCancel(context.Background())
	stored := make(chan error, 1)
	go func() { stored <- store.Run(storeCtx) }()
	c.mu.Lock()
	b.addr = l.Addr().String()
	c.mu.Unlock()
	b.stop = func() {
		b.stop = nil
		_ = server.Close()
		cancel()
		all.Wait()
		stopStore()
		if err := errors.Join(<-stored, store.Close()); err != nil {
			t.Error(err)
		}
		peers.Close()
	}
}

// open opens the segment on the set, followers first.
func (c *cluster) open(q int, set ...storage.BrokerID) *metadata.Segment {
	c.t.Helper()
	now := time.Unix(1_700_000_000, 0)
	o := Open{Header: header(c.t, now), Set: set, Quorum: q, Boot: 1}
	for i := len(set) - 1; i >= 0; i-- {
		if err := c.brokers[set[i]-1].Open(c.t.Context(), o); err != nil {
			c.t.Fatal(err)
		}
	}
	return &metadata.Segment{ID: id, State: metadata.SegmentOpen, Replicas: set, Quorum: q, PrimaryBoot: 1, Header: o.Header}
}

type outcome struct {
	a   Appended
	err error
}

// send appends one record at a segment's primary, from any broker.
func (c *cluster) send(from *node, seg *metadata.Segment, value string) <-chan outcome {
	c.t.Helper()
	var b batch.Builder
	if err := b.Add(&batch.Record{Value: []byte(value)}, 0); err != nil {
		c.t.Fatal(err)
	}
	raw, err := b.Build(nil, batch.Options{})
	if err != nil {
		c.t.Fatal(err)
	}
	done := make(chan outcome, 1)
	if err := NewRouter(from.Service).Append(seg, raw, func(a Appended, err error) { done <- outcome{a, err} }); err != nil {
		done <- outcome{err: err}
	}
	return done
}

func (c *cluster) must(from *node, seg *metadata.Segment, value string) Appended {
	c.t.Helper()
	o := <-c.send(from, seg, value)
	if o.err != nil {
		c.t.Fatal(o.err)
	}
	return o.a
}

// until waits for a condition that others bring about.
func (c *cluster) until(what string, cond func() bool) {
	c.t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	late := time.After(20 * time.Second)
	for !cond() {
		select {
		case <-tick.C:
		case <-late:
			c.t.Fatalf("not in time: %s", what)
		}
	}
}

func (b *node) end() storage.End {
	info, err := b.store.Info(id)
	if err != nil {
		return 0
	}
	return info.End
}

// TestQuorumAcks: an append is acknowledged with one of two followers gone, and not with both; the followers hold the same bytes.
func TestQuorumAcks(t *testing.T) {
	inv.Covers(t, "INV-D3", "INV-D7")
	c := newCluster(t, 3, Config{})
	p, f, g := c.brokers[0], c.brokers[1], c.brokers[2]
	seg := c.open(2, 1, 2, 3)
	for i := range 20 {
		if a := c.must(c.brokers[i%3], seg, fmt.Sprint(i)); a.Base != storage.Offset(i) {
			t.Fatalf("record %d is at %d", i, a.Base)
		}
	}
	f.gate.Lock()
	c.must(p, seg, "without one")
	c.until("the other follower has it all", func() bool { return g.end() == 21 })
	g.gate.Lock()
	waits := c.send(p, seg, "without both")
	c.until("the primary has it", func() bool { return p.end() == 22 })
	select {
	case o := <-waits:
		t.Fatalf("acknowledged by the primary alone: %+v", o)
	default:
	}
	if end, err := p.Committed(id); err != nil || end != 21 {
		t.Fatalf("committed %d, %v", end, err)
	}
	got, limit, err := NewRouter(p.Service).Read(t.Context(), seg, 21, 1<<20, nil)
	if err != nil || len(got) > 0 || limit != 21 {
		t.Errorf("an uncommitted record is read: %d batches below %d, %v", len(got), limit, err)
	}
	f.gate.Unlock()
	if o := <-waits; o.err != nil || o.a.Base != 21 {
		t.Fatal(o)
	}
	g.gate.Unlock()
	c.until("all hold it", func() bool { return f.end() == 22 && g.end() == 22 })
	var votes []rangelog.Vote
	for _, b := range c.brokers {
		v, err := b.Fence(t.Context(), id, nil)
		if err != nil {
			t.Fatal(err)
		}
		votes = append(votes, v)
	}
	for _, v := range votes[1:] {
		if v.End != votes[0].End || v.Digest != votes[0].Digest || v.Pos != votes[0].Pos {
			t.Errorf("replicas differ: %+v and %+v", votes[0], v)
		}
	}
}

// TestSlowFollowerCatchesUp: one that is away while more is appended than memory keeps for it stalls nobody and is brought up from the log.
func TestSlowFollowerCatchesUp(t *testing.T) {
	c := newCluster(t, 3, Config{MaxLag: 16 << 10})
	p, g := c.brokers[0], c.brokers[2]
	seg := c.open(2, 1, 2, 3)
	c.must(p, seg, "first")
	g.gate.Lock()
	for i := range 200 {
		c.must(p, seg, fmt.Sprint(i, string(make([]byte, 1000))))
	}
	g.gate.Unlock()
	c.until("it has caught up", func() bool { return g.end() == 201 })
	c.must(p, seg, "live again")
	c.until("it follows", func() bool { return g.end() == 202 })
}

// TestRestartedFollowerFollowsAgain: it goes on at its durable end, once it has verified its file.
func TestRestartedFollowerFollowsAgain(t *testing.T) {
	c := newCluster(t, 3, Config{})
	p, g := c.brokers[0], c.brokers[2]
	seg := c.open(2, 1, 2, 3)
	for i := range 10 {
		c.must(p, seg, fmt.Sprint(i))
	}
	g.stop()
	for i := range 10 {
		c.must(p, seg, fmt.Sprint("away", i))
	}
	c.start(g, Config{}, 2)
	c.must(p, seg, "back")
	c.until("it has caught up", func() bool { return g.end() == 21 })
}

// TestFencedPrimaryWaitsForTheRecord: appends in flight at a fence get their outcome from the recorded end: below it OK, else a definite refusal.
func TestFencedPrimaryWaitsForTheRecord(t *testing.T) {
	inv.Covers(t, "INV-S8", "INV-D10")
	c := newCluster(t, 3, Config{})
	p, f, g := c.brokers[0], c.brokers[1], c.brokers[2]
	seg := c.open(2, 1, 2, 3)
	c.must(p, seg, "in")
	f.gate.Lock()
	g.gate.Lock()
	first := c.send(p, seg, "first")
	second := c.send(p, seg, "second")
	c.until("the primary has both", func() bool { return p.end() == 3 })
	v, err := p.Fence(t.Context(), id, nil)
	if err != nil || v.End != 3 {
		t.Fatal(v, err)
	}
	if o := <-c.send(p, seg, "late"); !errors.Is(o.err, storage.ErrStaleRoute) {
		t.Fatalf("a fenced primary takes an append: %+v", o)
	}
	for _, b := range []*node{f, g} { // a pass reaches them, though the primary does not
		if _, err := b.Fence(t.Context(), id, nil); err != nil {
			t.Fatal(err)
		}
	}
	f.gate.Unlock()
	g.gate.Unlock()
	p.resolve(id, 2)
	if o := <-first; o.err != nil || o.a.Base != 1 {
		t.Errorf("below the recorded end: %+v", o)
	}
	if o := <-second; !errors.Is(o.err, storage.ErrFenced) || errors.Is(o.err, storage.ErrOutcomeUnknown) {
		t.Errorf("beyond the recorded end: %+v", o)
	}
	if end := f.end(); end > 1 {
		t.Errorf("a fenced follower went to %d", end)
	}
}

// TestContact: a quorum contact fails with both followers away, and after a fence.
func TestContact(t *testing.T) {
	inv.Covers(t, "INV-C13")
	c := newCluster(t, 3, Config{})
	p, f, g := c.brokers[0], c.brokers[1], c.brokers[2]
	seg := c.open(2, 1, 2, 3)
	c.must(p, seg, "one")
	if end, err := NewRouter(f.Service).Latest(t.Context(), seg); err != nil || end != 1 {
		t.Fatal(end, err)
	}
	for _, b := range []*node{f, g} {
		if _, err := b.Fence(t.Context(), id, nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Contact(t.Context(), id); !errors.Is(err, storage.ErrUnavailable) {
		t.Fatalf("a primary whose followers are fenced knows the tail: %v", err)
	}
	c.must2Asked(seg)
}

// must2Asked: an append that can never be committed makes the primary ask for a pass.
func (c *cluster) must2Asked(seg *metadata.Segment) {
	c.t.Helper()
	waits := c.send(c.brokers[0], seg, "never")
	c.until("a pass is asked for", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.asked[replication.ReasonFenced] > 0
	})
	select {
	case o := <-waits:
		c.t.Errorf("it has an outcome: %+v", o)
	default:
	}
}

// TestExtend: a fenced replica is brought to the end of another, and a holder that cannot ship what it claims is named as such.
func TestExtend(t *testing.T) {
	c := newCluster(t, 3, Config{})
	p, f, g := c.brokers[0], c.brokers[1], c.brokers[2]
	seg := c.open(2, 1, 2, 3)
	g.gate.Lock()
	for i := range 50 {
		c.must(p, seg, fmt.Sprint(i))
	}
	var want rangelog.Vote
	for _, b := range c.brokers {
		v, err := b.Fence(t.Context(), id, seg.Header)
		if err != nil {
			t.Fatal(err)
		}
		if v.End > want.End {
			want = v
		}
	}
	g.gate.Unlock()
	end, digest, err := g.Extend(t.Context(), id, f.id, want.End)
	if err != nil || end != want.End || digest != want.Digest {
		t.Fatalf("extended to %d, %x, %v; want %d, %x", end, digest, err, want.End, want.Digest)
	}
	if _, _, err := g.Extend(t.Context(), id, f.id, want.End+1); !errors.Is(err, rpc.ErrHolderFailed) {
		t.Errorf("a holder that has less than it is said to: %v", err)
	}
	for _, b := range c.brokers {
		if err := b.Seal(t.Context(), id, want.End, want.Digest); err != nil {
			t.Error(err)
		}
	}
	sealed := *seg
	sealed.State, sealed.End = metadata.SegmentSealed, want.End
	p.stop()
	got, limit, err := NewRouter(f.Service).Read(t.Context(), &sealed, 0, 1<<20, nil)
	if err != nil || limit != want.End || len(got) != 50 {
		t.Errorf("%d batches below %d, %v", len(got), limit, err)
	}
}

// TestLateOpenIsRefused: an order to open a segment that comes after it was closed and dropped makes no replica.
func TestLateOpenIsRefused(t *testing.T) {
	inv.Covers(t, "INV-S5", "INV-S8")
	clock := time.Unix(1_700_000_000, 0)
	s := service(t, 1, &clock)
	open := true
	s.deps.StillOpen = func(_ context.Context, topic string, of storage.SegmentID) (bool, error) {
		if topic != "t" || of != id {
			t.Errorf("asked for %s of %q", of, topic)
		}
		return open, nil
	}
	o := Open{Header: header(t, clock), Set: []storage.BrokerID{2, 1}, Quorum: 1, Boot: 1}
	if err := s.Open(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	open = false
	if _, err := s.Fence(t.Context(), id, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.Drop(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if err := s.Open(t.Context(), o); !errors.Is(err, storage.ErrSealed) {
		t.Fatalf("a late order: %v", err)
	}
	if _, err := s.deps.Store.Info(id); !errors.Is(err, storage.ErrUnknownSegment) {
		t.Errorf("it made a replica: %v", err)
	}
}

// TestPrimaryThatStartsIsNoPrimary: a broker that is not registered yet knows none of the calls: nothing was appended there, and whoever asked may go on.
func TestPrimaryThatStartsIsNoPrimary(t *testing.T) {
	c := newCluster(t, 2, Config{})
	seg := c.open(1, 1, 2)
	c.must(c.brokers[1], seg, "one")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: rpc.PeerHandler(slog.New(slog.DiscardHandler), func(*connect.Server) {})}
	go func() { _ = server.Serve(l) }()
	defer func() { _ = server.Close() }()
	c.mu.Lock()
	c.brokers[0].addr = l.Addr().String()
	c.mu.Unlock()
	o := <-c.send(c.brokers[1], seg, "two")
	if !errors.Is(o.err, storage.ErrStaleRoute) || errors.Is(o.err, storage.ErrOutcomeUnknown) {
		t.Errorf("a batch for a broker that starts: %v", o.err)
	}
	_, _, err = NewRouter(c.brokers[1].Service).Read(t.Context(), seg, 0, 1<<20, nil)
	var ce *connect.Error
	if !errors.Is(err, storage.ErrUnavailable) || errors.As(err, &ce) {
		t.Errorf("a read from a broker that starts: %v", err)
	}
}
