package founding

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect/v2"
	"go.uber.org/goleak"

	"github.com/malachilog/malachi/e2e/inv"
	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/gen/go/malachi/intra/v1/intrav1connect"
	"github.com/malachilog/malachi/services/rpc"
	"github.com/malachilog/malachi/storage"
)

// memMarker is a marker in memory; next is the id that Found draws.
type memMarker struct {
	mu      sync.Mutex
	cluster storage.ClusterID
	next    byte
	fail    error
}

func (m *memMarker) Cluster() storage.ClusterID {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.cluster
}

func (m *memMarker) Found() (storage.ClusterID, error) { return m.set(storage.ClusterID{m.next}) }
func (m *memMarker) Join(c storage.ClusterID) error    { _, err := m.set(c); return err }

func (m *memMarker) set(c storage.ClusterID) (storage.ClusterID, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fail != nil {
		return storage.ClusterID{}, m.fail
	}
	m.cluster = c
	return c, nil
}

// members is an Admitter in memory.
type members struct {
	mu    sync.Mutex
	came  map[storage.BrokerID]Newcomer
	fail  error
	known []Known
}

func (m *members) Admit(_ context.Context, n Newcomer) (Admission, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fail != nil {
		return Admission{}, m.fail
	}
	if m.came == nil {
		m.came = map[storage.BrokerID]Newcomer{}
	}
	m.came[n.Broker] = n
	return Admission{Known: m.known}, nil
}

// peer is a broker that listens, with its service.
type peer struct {
	*Service
	marker *memMarker
	server *http.Server
	done   chan struct{}
}

func (p *peer) stop() {
	if p.server != nil {
		_ = p.server.Close()
		<-p.done
		p.server = nil
	}
}

// addresses takes free ports, in rising order.
func addresses(t *testing.T, n int) (out []string) {
	t.Helper()
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, l.Addr().String())
		defer l.Close()
	}
	slices.Sort(out)
	return out
}

func newPeer(t *testing.T, id storage.BrokerID, cfg Config, marker *memMarker) *peer {
	t.Helper()
	cfg.Self, cfg.Level, cfg.Every = id, storage.CurrentLevel, 10*time.Millisecond
	cfg.Expect = len(cfg.List)
	peers := rpc.NewPeers(nil, nil)
	s, err := New(cfg, Deps{Marker: marker, Dial: peers.At})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", cfg.RPC)
	if err != nil {
		t.Fatal(err)
	}
	p := &peer{Service: s, marker: marker, done: make(chan struct{})}
	p.server = &http.Server{Handler: rpc.PeerHandler(slog.New(slog.DiscardHandler), func(server *connect.Server) {
		intrav1connect.RegisterClusterServiceHandler(server, s)
	})}
	server := p.server
	go func() {
		defer close(p.done)
		_ = server.Serve(l)
	}()
	t.Cleanup(func() {
		p.stop()
		peers.Close()
	})
	return p
}

// noLeaks looks for goroutines that are left when everything registered later was cleaned up.
func noLeaks(t *testing.T) {
	before := goleak.IgnoreCurrent()
	t.Cleanup(func() { goleak.VerifyNone(t, before) })
}

type settled struct {
	out Outcome
	err error
}

func (p *peer) settle(ctx context.Context) <-chan settled {
	ch := make(chan settled, 1)
	go func() {
		out, err := p.Settle(ctx)
		ch <- settled{out, err}
	}()
	return ch
}

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func TestThreeFoundOne(t *testing.T) {
	inv.Covers(t, "INV-M11")
	noLeaks(t)
	list := addresses(t, 3)
	ctx := within(t, 20*time.Second)
	admitted := &members{known: []Known{{Broker: 1, RPC: list[0], Raft: "r", Gossip: "g"}}}
	var peers []*peer
	var ends []<-chan settled
	for i := 2; i >= 0; i-- { // the lowest last: the others have to wait for it
		p := newPeer(t, storage.BrokerID(i+1), Config{
			RPC: list[i], Raft: "raft", Gossip: fmt.Sprint("gossip-", i), Attributes: map[string]string{"zone": "a"}, List: []string{list[2], list[0], list[1]},
		}, &memMarker{next: byte(i + 1)})
		p.Admits(admitted)
		peers = append(peers, p)
		ends = append(ends, p.settle(ctx))
	}
	for i, end := range ends {
		got := <-end
		if got.err != nil || got.out.Cluster != (storage.ClusterID{1}) || got.out.Founded != (i == 2) {
			t.Fatalf("broker %s: %+v", peers[i].cfg.Self, got)
		}
		if i < 2 && (len(got.out.Known) != 1 || got.out.Known[0] != (Known{1, list[0], "r", "g"})) {
			t.Fatalf("known: %+v", got.out.Known)
		}
	}
	if n := admitted.came[3]; len(admitted.came) != 2 || n.RPC != list[2] || n.Raft != "raft" || n.Gossip != "gossip-2" || n.Attributes["zone"] != "a" || n.Level != storage.CurrentLevel {
		t.Fatalf("admitted %+v", admitted.came)
	}
	if got := peers[0].GossipAddresses(ctx); !slices.Equal(got, []string{"gossip-0", "gossip-1"}) {
		t.Fatalf("gossip addresses %v", got)
	}
	// Again, at once, from the marker.
	if out, err := peers[0].Settle(ctx); err != nil || out.Cluster != (storage.ClusterID{1}) || out.Founded {
		t.Fatalf("settled again: %+v, %v", out, err)
	}
	// The founder comes back without its disk: it joins what the others keep.
	peers[2].stop()
	p := newPeer(t, 9, Config{RPC: list[0], List: list}, &memMarker{next: 9})
	if got := <-p.settle(ctx); got.err != nil || got.out.Cluster != (storage.ClusterID{1}) || got.out.Founded {
		t.Fatalf("the wiped founder: %+v", got)
	}
}

// TestOneOfTheListIsMissing must not found, whatever time passes.
func TestOneOfTheListIsMissing(t *testing.T) {
	inv.Covers(t, "INV-M11")
	list := addresses(t, 3)
	ctx := within(t, 500*time.Millisecond)
	a := newPeer(t, 1, Config{RPC: list[0], List: list}, &memMarker{next: 1})
	b := newPeer(t, 2, Config{RPC: list[1], List: list}, &memMarker{next: 2})
	for _, end := range []<-chan settled{a.settle(ctx), b.settle(ctx)} {
		if got := <-end; !errors.Is(got.err, context.DeadlineExceeded) || !strings.Contains(got.err.Error(), list[2]+" of the founding list does not answer") {
			t.Fatalf("without the third: %+v", got)
		}
	}
	if !a.marker.Cluster().IsZero() || !b.marker.Cluster().IsZero() {
		t.Fatal("a cluster was founded")
	}
}

func TestWhoHasNoOrderJoins(t *testing.T) {
	at := addresses(t, 2)
	ctx := within(t, 20*time.Second)
	seed := newPeer(t, 1, Config{RPC: at[0]}, &memMarker{})
	p := newPeer(t, 2, Config{RPC: at[1], Seeds: at[:1]}, &memMarker{next: 2})
	end := p.settle(ctx)
	hello := func() bool {
		res, err := p.Hello(ctx, nil)
		return err == nil && !res.GetWantsFounding() && len(res.GetClusterId()) == 0
	}
	if !hello() {
		t.Fatal("a broker without an order says that it has one")
	}
	// The seed gets a cluster, but nobody to admit; then one who can't; then one who can.
	if err := seed.marker.Join(storage.ClusterID{7}); err != nil {
		t.Fatal(err)
	}
	deny := &deniesOnce{tried: make(chan struct{}, 1)}
	seed.Admits(deny)
	select {
	case <-deny.tried:
	case <-ctx.Done():
		t.Fatal("it does not ask to be admitted")
	}
	select {
	case got := <-end:
		t.Fatalf("settled though it was not admitted: %+v", got)
	default:
	}
	seed.Admits(&members{})
	if got := <-end; got.err != nil || got.out.Cluster != (storage.ClusterID{7}) || got.out.Founded {
		t.Fatalf("%+v", got)
	}
}

type deniesOnce struct{ tried chan struct{} }

func (d *deniesOnce) Admit(context.Context, Newcomer) (Admission, error) {
	select {
	case d.tried <- struct{}{}:
	default:
	}
	return Admission{}, fmt.Errorf("no quorum: %w", storage.ErrUnavailable)
}

func TestRefusedForGood(t *testing.T) {
	at := addresses(t, 2)
	seed := newPeer(t, 1, Config{RPC: at[0]}, &memMarker{cluster: storage.ClusterID{7}})
	for _, cause := range []error{storage.ErrFolderRefused, storage.ErrNewerFormat, storage.ErrInvalid} {
		seed.Admits(&members{fail: fmt.Errorf("broker 2 was removed: %w", cause)})
		p := newPeer(t, 2, Config{RPC: at[1], Seeds: at[:1]}, &memMarker{})
		got := <-p.settle(within(t, 10*time.Second))
		if !errors.Is(got.err, storage.ErrFolderRefused) || !strings.Contains(got.err.Error(), "broker 2 was removed") || !p.marker.Cluster().IsZero() {
			t.Fatalf("%v: %+v", cause, got)
		}
		p.stop()
	}
	seed.Admits(&members{})
	broken := newPeer(t, 2, Config{RPC: at[1], Seeds: at[:1]}, &memMarker{fail: storage.ErrStorageFailed})
	if got := <-broken.settle(within(t, 10*time.Second)); !errors.Is(got.err, storage.ErrStorageFailed) {
		t.Fatalf("a marker that can't be written: %+v", got)
	}
}

func TestInit(t *testing.T) {
	inv.Covers(t, "INV-M11")
	at := addresses(t, 4)
	ctx := within(t, 20*time.Second)
	order := func(p *peer, ignore bool) (*intrav1.InitResponse, error) {
		return intrav1connect.NewClusterServiceClient(p.deps.Dial(p.cfg.RPC)).Init(ctx, &intrav1.InitRequest{IgnoreUnreachable: ignore})
	}
	p := newPeer(t, 1, Config{RPC: at[0], Seeds: []string{at[0], at[1]}}, &memMarker{next: 1})
	if _, err := order(p, false); !errors.Is(rpc.PeerCallError(ctx, 1, err), storage.ErrUnavailable) {
		t.Fatalf("told before it looks: %v", err)
	}
	end := p.settle(ctx)
	refused := func(p *peer, ignore bool, why string) {
		t.Helper()
		for { // a moment may pass before it looks for a cluster
			_, err := order(p, ignore)
			err = rpc.PeerCallError(ctx, 1, err)
			if errors.Is(err, storage.ErrUnavailable) && ctx.Err() == nil {
				continue
			}
			if !errors.Is(err, storage.ErrConflict) || !strings.Contains(err.Error(), why) {
				t.Fatalf("want %q: %v", why, err)
			}
			return
		}
	}
	refused(p, false, "seed "+at[1]+" does not answer")
	other := newPeer(t, 2, Config{RPC: at[1], List: []string{at[1], at[2]}}, &memMarker{})
	refused(other, false, "was started with a founding list")
	refused(p, true, at[1]+" has an order to found a cluster too")
	other.stop()
	res, err := order(p, true)
	if err != nil || res.GetClusterId()[0] != 1 {
		t.Fatalf("%v, %v", res, err)
	}
	if got := <-end; got.err != nil || !got.out.Founded || got.out.Cluster != (storage.ClusterID{1}) {
		t.Fatalf("%+v", got)
	}
	refused(p, true, "belongs to cluster 01")
	p.Admits(&members{})
	late := newPeer(t, 3, Config{RPC: at[3], Seeds: at[:1]}, &memMarker{next: 3})
	end = late.settle(ctx)
	if got := <-end; got.err != nil || got.out.Founded || got.out.Cluster != (storage.ClusterID{1}) {
		t.Fatalf("%+v", got)
	}
}

// TestInitMeetsACluster looks at the one round in which an order meets a seed that has a cluster.
func TestInitMeetsACluster(t *testing.T) {
	inv.Covers(t, "INV-M11")
	at := addresses(t, 2)
	newPeer(t, 1, Config{RPC: at[0]}, &memMarker{cluster: storage.ClusterID{7}})
	p := newPeer(t, 2, Config{RPC: at[1], Seeds: at[:1]}, &memMarker{next: 2})
	o := &initOrder{done: make(chan initEnd, 1)}
	out, _, err := p.round(within(t, 10*time.Second), o)
	if end := <-o.done; err != nil || !out.Cluster.IsZero() || !errors.Is(end.err, storage.ErrConflict) || !strings.Contains(end.err.Error(), "is there already, at "+at[0]) {
		t.Fatalf("%+v, %v, %+v", out, err, end)
	}
	if st := p.standing(); st.Order.wants() {
		t.Fatalf("the order outlived its round: %+v", st)
	}
}

func TestSeedsOfTwoClusters(t *testing.T) {
	self := Standing{Broker: 1, Address: "a:1", Order: Order{Init: true}}
	v := Decide(self, []Answer{
		{Asked: "b:1", Reached: true, Broker: 2, Cluster: storage.ClusterID{1}}, {Asked: "c:1", Reached: true, Broker: 3, Cluster: storage.ClusterID{2}},
	})
	if v.Do != Wait || !strings.Contains(v.Why, "name brokers of one cluster") {
		t.Fatalf("%+v", v)
	}
}

// TestListsThatCannotFound goes through what stands in the way of a list.
func TestListsThatCannotFound(t *testing.T) {
	inv.Covers(t, "INV-M11")
	list := []string{"a:1", "b:1"}
	self := Standing{Broker: 1, Address: "a:1", Order: Order{List: list}}
	mine := AnswerOf("a:1", self)
	free := Answer{Asked: "b:1", Reached: true, Broker: 2, Wants: true, List: list}
	if v := Decide(self, []Answer{mine, free}); v.Do != Found {
		t.Fatalf("all is well, and it does not found: %+v", v)
	}
	change := func(f func(*Answer)) []Answer {
		a := free
		f(&a)
		return []Answer{mine, a}
	}
	stranger := mine
	stranger.Broker = 5
	for why, answers := range map[string][]Answer{
		"does not answer":                        {mine},
		"is about to join":                       change(func(a *Answer) { a.Joining = true }),
		"another founding list: none":            change(func(a *Answer) { a.List = nil }),
		"another founding list: b:1, c:1":        change(func(a *Answer) { a.List = []string{"b:1", "c:1"} }),
		"are one broker":                         change(func(a *Answer) { a.Broker = 1 }),
		"answers at this one's address":          {stranger, free},
		"seed s:1 does not answer":               {mine, free, {Asked: "s:1"}},
		"s:1 has an order to found":              {mine, free, {Asked: "s:1", Reached: true, Broker: 9, Wants: true}},
		"a:1, the lowest of the founding list, ": nil,
	} {
		from := self
		if answers == nil {
			from = Standing{Broker: 2, Address: "b:1", Order: Order{List: list}}
			answers = []Answer{mine, free}
		}
		if v := Decide(from, answers); v.Do != Wait || !strings.Contains(v.Why, why) {
			t.Errorf("want %q: %+v", why, v)
		}
	}
}

func TestConfigFaultsAreToldAtOnce(t *testing.T) {
	err := Config{RPC: "nowhere", Expect: 3, List: []string{"a:1", "a:1"}, Seeds: []string{"b:0"}, Every: -1}.Validate()
	for _, part := range []string{`"nowhere"`, `"b:0"`, "needs a broker id", "bootstrap-expect is 3 and its list has 2", "lacks this broker's own", "twice", "negative"} {
		if !errors.Is(err, storage.ErrInvalid) || !strings.Contains(err.Error(), part) {
			t.Errorf("%q is not told: %v", part, err)
		}
	}
}

func TestNewcomersAreBounded(t *testing.T) {
	at := addresses(t, 1)
	p := newPeer(t, 1, Config{RPC: at[0]}, &memMarker{cluster: storage.ClusterID{1}})
	came := &members{}
	p.Admits(came)
	many := map[string]string{}
	for i := range maxAttributes + 1 {
		many[fmt.Sprint(i)] = "x"
	}
	for name, req := range map[string]*intrav1.JoinRequest{
		"no id": {}, "attributes": {Broker: 1, Attributes: many}, "address": {Broker: 1, RpcAddress: strings.Repeat("x", maxAddress+1)},
	} {
		if _, err := p.Join(t.Context(), req); !errors.Is(err, storage.ErrInvalid) && !errors.Is(err, storage.ErrTooLarge) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if len(came.came) > 0 {
		t.Fatalf("admitted %v", came.came)
	}
}
