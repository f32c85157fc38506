package controlplane

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sync/errgroup"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/storage"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// node is one broker's folder, opened as often as a test likes.
type node struct {
	t     *testing.T
	cfg   Config
	id    Identity
	deps  Deps
	boot  storage.Boot
	group uint64
}

func newNode(t *testing.T) *node {
	t.Helper()
	return &node{
		t: t,
		cfg: Config{Dir: filepath.Join(t.TempDir(), "raft"), Vnodes: 4, ElectionTimeout: 200 * time.Millisecond,
			CommandTimeout: 20 * time.Second},
		id:   Identity{Cluster: storage.ClusterID{1, 2, 3}, Broker: 0xfedcba9876543210, Founding: true},
		deps: Deps{Logger: slog.New(slog.NewTextHandler(t.Output(), nil))},
	}
}

// open opens the folder, which the test closes at its end.
func (n *node) open() (*ControlPlane, error) {
	c, err := Open(n.t.Context(), n.cfg, n.id, n.deps)
	if err == nil {
		n.t.Cleanup(func() { _ = c.Close() })
	}
	return c, err
}

// start opens and registers the next boot.
func (n *node) start() *ControlPlane {
	n.t.Helper()
	c, err := n.open()
	if err != nil {
		n.t.Fatal(err)
	}
	n.boot++
	if err := c.Register(n.t.Context(), n.boot, n.group, map[string]string{"api": "127.0.0.1:4040"}); err != nil {
		n.t.Fatal(err)
	}
	n.id.Founding = false
	return c
}

// refusedUnchanged opens the folder, which must be refused without a byte of it changed.
func (n *node) refusedUnchanged(want error) {
	n.t.Helper()
	before := tree(n.t, n.cfg.Dir)
	if c, err := n.open(); !errors.Is(err, want) {
		n.t.Fatalf("open: %v, %v, want %v", c, err, want)
	}
	if after := tree(n.t, n.cfg.Dir); before != after {
		n.t.Fatalf("a refused start changed the folder:\nbefore %s\nafter %s", before, after)
	}
}

// tree is every name below dir with its content.
func tree(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) && path == dir {
			return fs.SkipAll
		}
		if err != nil {
			return err
		}
		if d.IsDir() {
			fmt.Fprintf(&b, "%s/\n", path)
			return nil
		}
		data, err := os.ReadFile(path)
		fmt.Fprintf(&b, "%s %d %x\n", path, len(data), metadata.HashName(string(data)))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func (n *node) create(c *ControlPlane, name string) *metadata.Topic {
	n.t.Helper()
	topic, err := c.CreateTopic(n.t.Context(), NewTopic{Name: name})
	if err != nil {
		n.t.Fatal(err)
	}
	return topic
}

func TestTopicsSurviveARestart(t *testing.T) {
	n := newNode(t)
	begin := time.Now()
	c := n.start()
	t.Logf("start on an empty folder (root and 4 vnodes): %v", time.Since(begin))
	ctx := t.Context()
	made, err := c.CreateTopic(ctx, NewTopic{Name: "orders", InitialRanges: 4, Labels: map[string]string{"team": "a"}})
	if err != nil {
		t.Fatal(err)
	}
	n.create(c, "bills")
	yes := true
	updated, err := c.UpdateTopic(ctx, TopicUpdate{Name: "orders", DeletionProtection: &yes})
	if err != nil || !updated.DeletionProtection || updated.Labels["team"] != "a" || updated.MetaVersion <= made.MetaVersion {
		t.Fatalf("updated %+v, %v", updated, err)
	}
	if _, err := c.UpdateTopic(ctx, TopicUpdate{Name: "orders", ExpectVersion: made.MetaVersion, DeletionProtection: &yes}); !errors.Is(err, storage.ErrConflict) {
		t.Fatalf("update of an old version: %v", err)
	}
	if err := c.DeleteTopic(ctx, TopicDelete{Name: "orders"}); !errors.Is(err, storage.ErrConflict) {
		t.Fatalf("delete of a protected topic: %v", err)
	}
	if err := c.DeleteTopic(ctx, TopicDelete{Name: "bills"}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Topic(ctx, "bills"); !errors.Is(err, storage.ErrTopicNotFound) {
		t.Fatalf("a deleted topic: %v", err)
	}
	if _, err := c.CreateTopic(ctx, NewTopic{Name: "../x"}); !errors.Is(err, storage.ErrInvalid) {
		t.Fatalf("a bad name: %v", err)
	}
	if err := c.Refresh(ctx, 12); err != nil {
		t.Fatal(err)
	}
	n.group = 12
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Topic(ctx, "orders"); !errors.Is(err, storage.ErrClosed) {
		t.Fatalf("after Close: %v", err)
	}

	begin = time.Now()
	c = n.start()
	t.Logf("restart: %v", time.Since(begin))
	got, err := c.Topic(ctx, "orders")
	if err != nil || got.UID != made.UID || got.MetaVersion != updated.MetaVersion || len(got.Owners()) != 4 {
		t.Fatalf("after the restart: %+v, %v", got, err)
	}
	vnode, ok := c.VnodeFor("bills")
	if !ok {
		t.Fatal("no vnode for bills")
	}
	deleting := c.Deleting(vnode)
	if len(deleting) != 1 || deleting[0].Name != "bills" {
		t.Fatalf("deleting %v", deleting)
	}
	if err := c.ForgetTopic(ctx, "bills", deleting[0].UID); err != nil {
		t.Fatal(err)
	}
	if len(c.Deleting(vnode)) != 0 {
		t.Fatal("a forgotten topic is still deleting")
	}
	brokers, err := c.Brokers(ctx)
	if err != nil || len(brokers) != 1 || brokers[0].Boot != 2 || brokers[0].JournalGroup != 12 || brokers[0].Addresses["api"] == "" {
		t.Fatalf("brokers %+v, %v", brokers, err)
	}
}

func TestRecordedRingWins(t *testing.T) {
	inv.Covers(t, "INV-M5")
	n := newNode(t)
	c := n.start()
	want := map[string]uint32{}
	for i := range 40 {
		name := fmt.Sprintf("topic-%d", i)
		n.create(c, name)
		want[name], _ = c.VnodeFor(name)
	}
	ring := c.Ring()
	_ = c.Close()
	n.cfg.Vnodes = 16
	c = n.start()
	if got := c.Ring(); len(got.Vnodes) != 4 || got.Version != ring.Version || len(c.Vnodes()) != 4 {
		t.Fatalf("configuration changed the ring to %+v", got)
	}
	used := map[uint32]int{}
	for name, vnode := range want {
		used[vnode]++
		if got, ok := c.VnodeFor(name); !ok || got != vnode {
			t.Fatalf("%s moved from vnode %d to %d", name, vnode, got)
		}
		if _, err := c.Topic(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	if len(used) != 4 {
		t.Fatalf("40 names fall on %d of 4 vnodes", len(used))
	}
	// A control plane that has not read the ring guesses nothing.
	empty := &ControlPlane{}
	empty.routes.Store(&routing{})
	if v, ok := empty.VnodeFor("orders"); ok {
		t.Fatalf("without a ring, orders is on vnode %d", v)
	}
}

func TestConcurrentCreatesOfOneName(t *testing.T) {
	n := newNode(t)
	c := n.start()
	var wins, exists atomic.Int32
	var g errgroup.Group
	for range 16 {
		g.Go(func() error {
			_, err := c.CreateTopic(t.Context(), NewTopic{Name: "orders"})
			switch {
			case err == nil:
				wins.Add(1)
			case errors.Is(err, storage.ErrTopicExists):
				exists.Add(1)
			default:
				return err
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil || wins.Load() != 1 || exists.Load() != 15 {
		t.Fatalf("%d won, %d found it there, %v", wins.Load(), exists.Load(), err)
	}
	// One intent, many times at once: one topic, and everybody has it.
	nonce, err := c.NewNonce()
	if err != nil {
		t.Fatal(err)
	}
	var uids sync.Map
	for range 16 {
		g.Go(func() error {
			topic, err := c.CreateTopic(t.Context(), NewTopic{Name: "bills", Nonce: nonce})
			if err == nil {
				uids.Store(topic.UID, true)
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	count := 0
	uids.Range(func(any, any) bool { count++; return true })
	if count != 1 {
		t.Fatalf("one nonce made %d topics", count)
	}
}

func TestLostReply(t *testing.T) {
	inv.Covers(t, "INV-M12")
	n := newNode(t)
	c := n.start()
	nonce, err := c.NewNonce()
	if err != nil {
		t.Fatal(err)
	}
	// The command is applied, and nobody hears the answer.
	r, err := c.owner("orders")
	if err != nil {
		t.Fatal(err)
	}
	cmd, err := metadata.Encode(&metadata.CreateTopic{Nonce: nonce, UID: storage.TopicUID{5}, Name: "orders", InitialRanges: 1, Time: 1})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.host.propose(t.Context(), r.shard, cmd); err != nil {
		t.Fatal(err)
	}
	again, err := c.CreateTopic(t.Context(), NewTopic{Name: "orders", Nonce: nonce})
	if err != nil || again.UID != (storage.TopicUID{5}) {
		t.Fatalf("the retry got %+v, %v", again, err)
	}
	if err := c.DeleteTopic(t.Context(), TopicDelete{Name: "orders"}); err != nil {
		t.Fatal(err)
	}
	// Now an old copy of the command arrives.
	if _, err := c.host.propose(t.Context(), r.shard, cmd); err != nil {
		t.Fatal(err)
	}
	if topic, err := c.Topic(t.Context(), "orders"); !errors.Is(err, storage.ErrTopicNotFound) {
		t.Fatalf("a late creation revived %+v, %v", topic, err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = c.CreateTopic(ctx, NewTopic{Name: "never", Nonce: nonce})
	if !errors.Is(err, storage.ErrOutcomeUnknown) && !errors.Is(err, storage.ErrUnavailable) {
		t.Fatalf("with a cancelled context: %v", err)
	}
	// Whatever became of it, the same intent may be tried again.
	if _, err := c.CreateTopic(t.Context(), NewTopic{Name: "never", Nonce: nonce}); err != nil {
		t.Fatal(err)
	}
}

func TestListIsWholeOrNothing(t *testing.T) {
	inv.Covers(t, "INV-C1", "INV-C2")
	n := newNode(t)
	n.cfg.CommandTimeout = 500 * time.Millisecond
	c := n.start()
	ctx := t.Context()
	names := map[string]bool{}
	for i := range 60 {
		name := fmt.Sprintf("t-%02d", i)
		n.create(c, name)
		names[name] = true
	}
	n.create(c, "other")
	seen, after := 0, ""
	for {
		page, more, err := c.ListTopics(ctx, "t-", after, 7)
		if err != nil {
			t.Fatal(err)
		}
		for _, topic := range page {
			if !names[topic.Name] || topic.Name <= after {
				t.Fatalf("%q after %q", topic.Name, after)
			}
			after = topic.Name
			seen++
		}
		if !more {
			break
		}
	}
	if seen != 60 {
		t.Fatalf("%d topics listed, want 60", seen)
	}
	gone, _ := c.VnodeFor("t-00")
	if err := c.host.nh.StopShard(vnodeShard + uint64(gone)); err != nil {
		t.Fatal(err)
	}
	if page, _, err := c.ListTopics(ctx, "", "", 100); !errors.Is(err, storage.ErrUnavailable) || page != nil {
		t.Fatalf("with a vnode away: %d topics, %v", len(page), err)
	}
	if _, err := c.Topic(ctx, "t-00"); !errors.Is(err, storage.ErrUnavailable) {
		t.Fatalf("a topic of the vnode that is away: %v", err)
	}
	if _, err := c.CreateTopic(ctx, NewTopic{Name: "t-00"}); !errors.Is(err, storage.ErrUnavailable) {
		t.Fatalf("a creation on the vnode that is away: %v", err)
	}
	// The last view of it stays.
	if _, ok := c.CachedTopic("t-00"); !ok {
		t.Fatal("a vnode that went away took its topics from the cache")
	}
}

func TestSegmentsThroughRaft(t *testing.T) {
	n := newNode(t)
	c := n.start()
	ctx := t.Context()
	topic := n.create(c, "orders")
	rng := topic.Ranges()[0].ID
	nonce := func() metadata.Nonce {
		v, err := c.NewNonce()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	open := metadata.OpenSegment{TopicName: "orders", Topic: topic.UID, Range: rng, Nonce: nonce(), Replicas: []storage.BrokerID{n.id.Broker},
		Quorum: 1, ReplicationFactor: 1, PrimaryBoot: n.boot, Header: []byte("header bytes")}
	seg, err := c.OpenSegment(ctx, open)
	if err != nil || seg.State != metadata.SegmentOpen || string(seg.Header) != "header bytes" || seg.CreateTime == 0 {
		t.Fatalf("opened %+v, %v", seg, err)
	}
	if again, err := c.OpenSegment(ctx, open); err != nil || again.ID != seg.ID {
		t.Fatalf("opened again: %+v, %v", again, err)
	}
	racer := open
	racer.Nonce = nonce()
	if _, err := c.OpenSegment(ctx, racer); !errors.Is(err, storage.ErrConflict) {
		t.Fatalf("a racer: %v", err)
	}
	cached, ok := c.CachedTopic("orders")
	if !ok || cached.Head(rng) == nil || cached.Head(rng).ID != seg.ID {
		t.Fatalf("cached head %+v", cached.Head(rng))
	}
	next := open
	next.Seq, next.Base, next.Nonce = 1, 10, nonce()
	seal := metadata.SealSegment{TopicName: "orders", Topic: topic.UID, Segment: seg.ID, Nonce: nonce(), End: 10, DataBytes: 500, Digest: 7,
		Votes: []storage.BrokerID{n.id.Broker}, Reason: metadata.SealSize, Next: &next}
	sealed, err := c.SealSegment(ctx, seal)
	if err != nil || sealed.Segment.End != 10 || sealed.Next == nil || sealed.Next.Base != 10 || sealed.Already {
		t.Fatalf("sealed %+v, %v", sealed, err)
	}
	if again, err := c.SealSegment(ctx, seal); err != nil || !again.Already || again.Next == nil || again.Segment.Digest != 7 {
		t.Fatalf("sealed again: %+v, %v", again, err)
	}
	other := seal
	other.Nonce, other.End, other.Digest = nonce(), 9, 8
	if lost, err := c.SealSegment(ctx, other); !errors.Is(err, storage.ErrConflict) || lost.Segment == nil || lost.Segment.End != 10 || lost.Segment.Digest != 7 {
		t.Fatalf("a racing seal: %+v, %v", lost, err)
	}
	foreign := n.create(c, "bills")
	wrong := open
	wrong.Range, wrong.Seq, wrong.Nonce = foreign.Ranges()[0].ID, 0, nonce()
	if _, err := c.OpenSegment(ctx, wrong); !errors.Is(err, storage.ErrInvalid) {
		t.Fatalf("a range of another topic: %v", err)
	}
}

func TestSnapshotAndRestart(t *testing.T) {
	n := newNode(t)
	n.cfg.Vnodes, n.cfg.SnapshotEntries = 1, 10
	c := n.start()
	for i := range 120 {
		n.create(c, fmt.Sprintf("topic-%d", i))
	}
	if err := c.DeleteTopic(t.Context(), TopicDelete{Name: "topic-7"}); err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool {
		found, err := filepath.Glob(filepath.Join(n.cfg.Dir, "*", "*", "*", "snapshot-16-*", "snapshot-*", "snapshot-*.gbsnap"))
		if err != nil {
			t.Fatal(err)
		}
		return len(found) > 0
	})
	_ = c.Close()
	c = n.start()
	topics, more, err := c.ListTopics(t.Context(), "", "", 1000)
	if err != nil || more || len(topics) != 119 {
		t.Fatalf("%d topics after the restart, %v", len(topics), err)
	}
	n.create(c, "topic-7")
}

// waitFor polls until ok, for at most 20 s.
func waitFor(t *testing.T, ok func() bool) {
	t.Helper()
	deadline := time.After(20 * time.Second)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-deadline:
			t.Fatal("it did not happen within 20 s")
		case <-tick.C:
		}
	}
}

func TestWatchAndAwait(t *testing.T) {
	n := newNode(t)
	c := n.start()
	ctx := t.Context()
	waitFor(t, func() bool { return c.Status().Ready }) // all leaders are known: no more All from them
	w := c.Watch()
	<-w.C()
	if ch := w.Take(); !ch.All {
		t.Fatalf("the first look: %+v", ch)
	}
	orders, bills := n.create(c, "orders"), n.create(c, "bills")
	yes := true
	if _, err := c.UpdateTopic(ctx, TopicUpdate{Name: "orders", DeletionProtection: &yes}); err != nil {
		t.Fatal(err)
	}
	got := map[storage.TopicUID]int{}
	for len(got) < 2 {
		<-w.C()
		ch := w.Take()
		if ch.All {
			t.Fatal("everything at once")
		}
		for _, u := range ch.Topics {
			got[u]++
		}
	}
	if got[orders.UID] == 0 || got[bills.UID] == 0 {
		t.Fatalf("changes %v", got)
	}
	w.Close()
	w2 := &Watcher{of: &c.changes, ch: make(chan struct{}, 1)}
	for i := range maxPending + 1 {
		w2.add([]storage.TopicUID{{byte(i), byte(i >> 8), 1}}, false)
	}
	if ch := w2.Take(); !ch.All || len(ch.Topics) != 0 {
		t.Fatalf("beyond the bound: all %v, %d topics", ch.All, len(ch.Topics))
	}

	done := make(chan error, 1)
	var version uint64
	go func() {
		topic, err := c.Await(ctx, orders.UID, func(t *metadata.Topic) bool { return t.State == metadata.TopicDeleting })
		if err == nil {
			version = topic.MetaVersion
		}
		done <- err
	}()
	no := false
	if _, err := c.UpdateTopic(ctx, TopicUpdate{Name: "orders", DeletionProtection: &no}); err != nil {
		t.Fatal(err)
	}
	if err := c.DeleteTopic(ctx, TopicDelete{Name: "orders"}); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil || version != 4 {
		t.Fatalf("awaited version %d, %v", version, err)
	}
	if _, err := c.Await(ctx, storage.TopicUID{0xdd}, func(*metadata.Topic) bool { return true }); !errors.Is(err, storage.ErrTopicNotFound) {
		t.Fatalf("await nothing: %v", err)
	}
	short, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := c.Await(short, bills.UID, func(*metadata.Topic) bool { return false }); !errors.Is(err, context.Canceled) {
		t.Fatalf("await with a cancelled context: %v", err)
	}
}

func TestCachedTopicDoesNotAllocate(t *testing.T) {
	n := newNode(t)
	c := n.start()
	for i := range 50 {
		n.create(c, fmt.Sprintf("topic-%d", i))
	}
	want := n.create(c, "orders")
	name := "orders"
	if a := testing.AllocsPerRun(200, func() {
		if topic, ok := c.CachedTopic(name); !ok || topic.UID != want.UID {
			t.Error("lost")
		}
		if topic, ok := c.CachedTopicByUID(want.UID); !ok || topic.RangeAt(7) == nil {
			t.Error("lost by uid")
		}
	}); a != 0 {
		t.Errorf("%v allocations", a)
	}
}

// TestThousandTopics reports how fast they are made and how much memory the process then holds.
func TestThousandTopics(t *testing.T) {
	if testing.Short() {
		t.Skip("a report, not a check")
	}
	n := newNode(t)
	c := n.start()
	begin := time.Now()
	var g errgroup.Group
	g.SetLimit(16)
	for i := range 1000 {
		g.Go(func() error {
			_, err := c.CreateTopic(t.Context(), NewTopic{Name: fmt.Sprintf("topic-%d", i)})
			return err
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	t.Logf("1,000 topics, 16 at a time: %v", time.Since(begin))
	begin = time.Now()
	for i := range 100 {
		n.create(c, fmt.Sprintf("single-%d", i))
	}
	t.Logf("100 topics, one at a time: %v each", time.Since(begin)/100)
	if topics, _, err := c.ListTopics(t.Context(), "", "", MaxList); err != nil || len(topics) != 1100 {
		t.Fatalf("%d topics, %v", len(topics), err)
	}
	status, err := os.ReadFile("/proc/self/status")
	if err == nil {
		for _, l := range strings.Split(string(status), "\n") {
			if strings.HasPrefix(l, "VmRSS") || strings.HasPrefix(l, "VmHWM") {
				t.Log(l)
			}
		}
	}
}

func TestCloseUnderLoad(t *testing.T) {
	n := newNode(t)
	c := n.start()
	var g errgroup.Group
	var made atomic.Int32
	names := make([]int, 8)
	for i := range names {
		g.Go(func() error {
			for {
				_, err := c.CreateTopic(t.Context(), NewTopic{Name: fmt.Sprintf("t-%d-%d", i, names[i])})
				if errors.Is(err, storage.ErrClosed) || errors.Is(err, storage.ErrOutcomeUnknown) {
					return nil
				}
				if err != nil {
					return err
				}
				names[i]++
				made.Add(1)
			}
		})
	}
	waitFor(t, func() bool { return made.Load() > 100 })
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	c = n.start()
	for i, count := range names {
		for j := range count { // what was answered is there
			if _, ok := c.CachedTopic(fmt.Sprintf("t-%d-%d", i, j)); !ok {
				t.Fatalf("t-%d-%d was answered and is gone", i, j)
			}
		}
	}
}
