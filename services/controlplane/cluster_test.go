package controlplane

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/services/controlplane/root"
	"github.com/malachilog/malachi/storage"
)

// cluster is some brokers' control planes on loopback, with a stand-in for membership.
type cluster struct {
	t     *testing.T
	id    storage.ClusterID
	nodes []*peer
	tls   TLSFiles

	settings func(*Config)

	mu   sync.Mutex
	book map[storage.BrokerID]string
	dead map[storage.BrokerID]bool
	away map[storage.BrokerID]time.Duration
}

// peer is one broker's folder and what runs in it.
type peer struct {
	cl   *cluster
	id   storage.BrokerID
	cfg  Config
	zone string
	boot storage.Boot
	new  Identity // of the next start, without generation

	cp   *ControlPlane
	ran  chan error
	stop context.CancelFunc
}

func (cl *cluster) RaftAddress(b storage.BrokerID) (string, bool) {
	cl.mu.Lock()
	defer cl.mu.Unlock()
	a, ok := cl.book[b]
	return a, ok
}

func (cl *cluster) alive(b storage.BrokerID) bool {
	cl.mu.Lock()
	defer cl.mu.Unlock()
	return !cl.dead[b]
}

func (cl *cluster) absent(b storage.BrokerID) time.Duration {
	cl.mu.Lock()
	defer cl.mu.Unlock()
	return cl.away[b]
}

func (cl *cluster) set(f func()) {
	cl.mu.Lock()
	defer cl.mu.Unlock()
	f()
}

// everywhere changes the settings of brokers to come.
func (cl *cluster) everywhere(f func(*Config)) *cluster {
	cl.settings = f
	return cl
}

func newCluster(t *testing.T) *cluster {
	return &cluster{t: t, id: storage.ClusterID{7, 7, 7}, book: map[storage.BrokerID]string{}, dead: map[storage.BrokerID]bool{},
		away: map[storage.BrokerID]time.Duration{}}
}

// add makes a broker with an empty disk; the first one founds.
func (cl *cluster) add() *peer {
	cl.t.Helper()
	n := len(cl.nodes)
	address, err := freeAddress("127.0.0.1")
	if err != nil {
		cl.t.Fatal(err)
	}
	p := &peer{cl: cl, id: storage.BrokerID(0x1111_0000_0000_0000 * uint64(n+1)), zone: fmt.Sprintf("z%d", n%3), cfg: Config{
		Dir: filepath.Join(cl.t.TempDir(), "raft"), RaftAddress: address, Vnodes: 4, ElectionTimeout: 300 * time.Millisecond,
		CommandTimeout: 10 * time.Second, FoundingBrokers: 3}}
	p.new = Identity{Cluster: cl.id, Broker: p.id, Founding: n == 0, Joining: n > 0}
	if cl.settings != nil {
		cl.settings(&p.cfg)
	}
	cl.nodes = append(cl.nodes, p)
	cl.set(func() { cl.book[p.id] = address })
	cl.t.Cleanup(func() { p.kill() })
	return p
}

// start opens the next boot as a broker does: it asks a member for admission, if it is no founder and one runs.
func (p *peer) start() error {
	ctx, cancel := context.WithTimeout(p.cl.t.Context(), time.Minute)
	defer cancel()
	id := p.new
	if !id.Founding {
		for _, o := range p.cl.nodes {
			if o.cp == nil {
				continue
			}
			a, err := o.cp.Admit(ctx, AdmitRequest{Broker: p.id, Addresses: map[string]string{"raft": p.cfg.RaftAddress},
				Attributes: map[string]string{"zone": p.zone}, Level: storage.CurrentLevel})
			if err != nil {
				return err
			}
			id.Generation = a.Generation
			break
		}
	}
	cp, err := Open(ctx, p.cfg, id, Deps{Logger: slog.New(slog.NewTextHandler(p.cl.t.Output(), nil)).With("node", p.id), Addresses: p.cl,
		Alive: p.cl.alive, Absent: p.cl.absent, TLS: p.cl.tls, Attributes: map[string]string{"zone": p.zone}})
	if err != nil {
		return err
	}
	p.boot++
	runs, stop := context.WithCancel(context.WithoutCancel(ctx))
	p.cp, p.ran, p.stop = cp, make(chan error, 1), stop
	go func() { p.ran <- cp.Run(runs) }()
	p.cl.set(func() { p.cl.dead[p.id], p.cl.away[p.id] = false, 0 })
	if err := cp.Register(ctx, p.boot, uint64(p.boot), map[string]string{"api": "127.0.0.1:1", "rpc": "127.0.0.1:2"}); err != nil {
		return err
	}
	p.new.Founding, p.new.Joining = false, false
	return nil
}

// kill ends a broker as a crash does: nothing is handed over.
func (p *peer) kill() {
	if p.cp == nil {
		return
	}
	p.stop()
	<-p.ran
	_ = p.cp.Close()
	p.cp = nil
	p.cl.set(func() { p.cl.dead[p.id] = true })
}

func (cl *cluster) start(ps ...*peer) {
	cl.t.Helper()
	var g errgroup.Group
	for _, p := range ps {
		g.Go(func() error {
			if err := p.start(); err != nil {
				return fmt.Errorf("broker %s: %w", p.id, err)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		cl.t.Fatal(err)
	}
}

func (cl *cluster) running() []*peer {
	return slices.DeleteFunc(slices.Clone(cl.nodes), func(p *peer) bool { return p.cp == nil })
}

// settled waits until every group has so many voters and followers, seen from each running broker.
func (cl *cluster) settled(voters, nonVoting int) {
	cl.t.Helper()
	cl.settledGroups(5, voters, nonVoting)
}

func (cl *cluster) settledGroups(count, voters, nonVoting int) {
	cl.t.Helper()
	last := ""
	within(cl.t, 30*time.Second, func() bool {
		for _, p := range cl.running() {
			groups := p.cp.Groups()
			if len(groups) != count {
				last = fmt.Sprintf("%s has %d groups", p.id, len(groups))
				return false
			}
			for _, g := range groups {
				if len(g.Voters) != voters || len(g.NonVoting) != nonVoting || g.Leader == 0 {
					last = fmt.Sprintf("%s sees %+v", p.id, g)
					return false
				}
			}
		}
		return true
	}, func() string { return last })
}

func within(t *testing.T, d time.Duration, ok func() bool, why func() string) {
	t.Helper()
	deadline := time.After(d)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-deadline:
			t.Fatalf("it did not happen within %v: %s", d, why())
		case <-tick.C:
		}
	}
}

func (p *peer) create(name string) *metadata.Topic {
	p.cl.t.Helper()
	topic, err := p.cp.CreateTopic(p.cl.t.Context(), NewTopic{Name: name})
	if err != nil {
		p.cl.t.Fatalf("broker %s: %v", p.id, err)
	}
	return topic
}

// agree checks that every running broker reads all these topics, linearizably and in its own view.
func (cl *cluster) agree(topics map[string]storage.TopicUID) {
	cl.t.Helper()
	for _, p := range cl.running() {
		list, _, err := p.cp.ListTopics(cl.t.Context(), "", "", MaxList)
		if err != nil {
			cl.t.Fatalf("broker %s: %v", p.id, err)
		}
		got := map[string]storage.TopicUID{}
		for _, t := range list {
			got[t.Name] = t.UID
		}
		if !maps.Equal(got, topics) {
			cl.t.Fatalf("broker %s has %v, want %v", p.id, slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(topics)))
		}
		for name, uid := range topics {
			if t, ok := p.cp.CachedTopic(name); !ok || t.UID != uid {
				cl.t.Fatalf("broker %s has no view of %s", p.id, name)
			}
		}
	}
}

func TestGrowth(t *testing.T) {
	cl := newCluster(t)
	first := cl.add()
	cl.start(first)
	topics := map[string]storage.TopicUID{}
	make3 := func(round string) {
		t.Helper()
		for _, p := range cl.running() {
			for i := range 3 {
				name := fmt.Sprintf("%s-%s-%d", round, p.id, i)
				topics[name] = p.create(name).UID
			}
		}
		cl.agree(topics)
	}
	make3("one")
	cl.settled(1, 0)
	begin := time.Now()
	cl.start(cl.add())
	cl.settled(1, 1) // two brokers: the second one follows
	make3("two")
	cl.start(cl.add())
	cl.settled(3, 0)
	t.Logf("1 -> 3 in %v", time.Since(begin))
	make3("three")
	begin = time.Now()
	cl.start(cl.add(), cl.add())
	cl.settled(3, 2)
	t.Logf("3 -> 5 in %v", time.Since(begin))
	make3("five")

	for i, p := range cl.nodes { // one after the other
		if err := p.cp.HandOver(t.Context()); err != nil {
			t.Fatal(err)
		}
		p.kill()
		other := cl.nodes[(i+1)%len(cl.nodes)]
		begin := time.Now()
		name := fmt.Sprintf("without-%s", p.id)
		topics[name] = other.create(name).UID
		t.Logf("a command without broker %d: %v", i, time.Since(begin))
		begin = time.Now()
		cl.start(p)
		t.Logf("restart of broker %d: %v", i, time.Since(begin))
		cl.agree(topics)
	}
	cl.settled(3, 2)
	for _, p := range cl.nodes { // and all at once
		p.kill()
	}
	begin = time.Now()
	cl.start(cl.nodes...)
	t.Logf("cold restart of five: %v", time.Since(begin))
	cl.agree(topics)
	make3("after")
	for _, p := range cl.nodes {
		if b, ok := p.cp.State().Broker(p.id); !ok || !b.Ready() || b.Attributes["zone"] != p.zone || b.Addresses["rpc"] == "" {
			t.Fatalf("broker %s as recorded: %+v", p.id, b)
		}
	}
	if pol := first.cp.Policy(); pol.ReplicationFactor != 3 || pol.Quorum() != 2 {
		t.Fatalf("policy %+v", pol)
	}
}

// three starts three brokers and waits until all vote.
func three(t *testing.T) *cluster {
	t.Helper()
	cl := newCluster(t)
	for range 3 {
		cl.start(cl.add())
	}
	cl.settled(3, 0)
	return cl
}

// TestKilledLeader kills whoever leads, without a word, and asks at once: whoever asks gets an answer, from each of the others.
func TestKilledLeader(t *testing.T) {
	cl := three(t)
	topics := map[string]storage.TopicUID{}
	for round := range 3 {
		name := fmt.Sprintf("topic-%d", round)
		vnode, _ := cl.nodes[0].cp.VnodeFor(name)
		leader, ok := cl.nodes[0].cp.LeaderOf(vnode)
		i := slices.IndexFunc(cl.nodes, func(p *peer) bool { return p.id == leader })
		if !ok || i < 0 || !cl.nodes[i].cp.Leader(vnode) {
			t.Fatalf("vnode %d is led by %s, %v", vnode, leader, ok)
		}
		cl.nodes[i].kill()
		begin := time.Now()
		asks, reads := cl.nodes[(i+1)%3], cl.nodes[(i+2)%3]
		topics[name] = asks.create(name).UID
		t.Logf("a command after the kill: %v", time.Since(begin))
		if _, err := reads.cp.Topic(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		t.Logf("and a read: %v", time.Since(begin))
		if now, ok := asks.cp.CoordinatorOf(topics[name]); !ok || now == leader {
			t.Fatalf("coordinated by %s, %v", now, ok)
		}
		cl.start(cl.nodes[i])
		cl.agree(topics)
	}
	// Without a quorum there is no answer, and no wrong one.
	cl.nodes[1].kill()
	cl.nodes[2].kill()
	cl.nodes[0].cp.cfg.CommandTimeout = time.Second
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := cl.nodes[0].cp.Topic(ctx, "topic-0"); !errors.Is(err, storage.ErrUnavailable) {
		t.Fatalf("a read without a quorum: %v", err)
	}
	if _, ok := cl.nodes[0].cp.CachedTopic("topic-0"); !ok {
		t.Fatal("what was seen is forgotten")
	}
}

// TestLeadershipIsSpread: after a while the groups are led from all three, and stay so.
func TestLeadershipIsSpread(t *testing.T) {
	inv.Covers(t, "INV-M8")
	cl := newCluster(t)
	for range 3 {
		p := cl.add()
		p.cfg.BalanceAfter, p.cfg.Vnodes = time.Second, 16
		cl.start(p)
	}
	cl.settledGroups(17, 3, 0)
	st, s := cl.nodes[0].cp.State(), cl.nodes[0].cp.sight()
	last := ""
	spread := func() bool {
		leaders := map[storage.BrokerID]bool{}
		for _, p := range cl.nodes {
			for _, g := range p.cp.Groups() {
				v, _ := p.cp.groups.view(g.Group)
				if want, ok := preferredLeader(g.Group, v.members, st, s); !ok || g.Leader != want.broker.ID {
					last = fmt.Sprintf("%s sees %+v, want leader %s", p.id, g, want.broker.ID)
					return false
				}
				leaders[g.Leader] = true
			}
		}
		last = fmt.Sprintf("leaders %v", leaders)
		return len(leaders) == 3
	}
	within(t, 30*time.Second, spread, func() string { return last })
	cl.nodes[1].create("after")
}

// TestReplacedByCommand removes a dead voter: a fourth broker takes its votes, and the dead one never comes back.
func TestReplacedByCommand(t *testing.T) {
	inv.Covers(t, "INV-M6")
	cl := three(t)
	topics := map[string]storage.TopicUID{"before": cl.nodes[1].create("before").UID}
	fourth := cl.add()
	cl.start(fourth)
	cl.settled(3, 1)
	dead := cl.nodes[2]
	dead.kill()
	ctx, c := t.Context(), fourth.cp
	if err := c.RemoveBroker(ctx, dead.id); !errors.Is(err, storage.ErrConflict) {
		t.Fatalf("removed while active: %v", err)
	}
	if err := c.SetBrokerState(ctx, dead.id, root.BrokerDraining); err != nil {
		t.Fatal(err)
	}
	if err := c.SetBrokerState(ctx, dead.id, root.BrokerDecommissioning); !errors.Is(err, storage.ErrConflict) {
		t.Fatalf("drained and decommissioned: %v", err)
	}
	for _, st := range []root.BrokerState{root.BrokerActive, root.BrokerDecommissioning, root.BrokerDecommissioning} {
		if err := c.SetBrokerState(ctx, dead.id, st); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.RemoveBroker(ctx, dead.id); err != nil {
		t.Fatal(err)
	}
	cl.settled(3, 0)
	topics["after"] = cl.nodes[0].create("after").UID
	cl.agree(topics)
	for _, g := range fourth.cp.Groups() {
		if slices.Contains(g.Voters, dead.id) || !slices.Contains(g.Voters, fourth.id) {
			t.Fatalf("%+v", g)
		}
	}
	if err := dead.start(); !errors.Is(err, storage.ErrFolderRefused) {
		t.Fatalf("a removed broker asks for admission: %v", err)
	}
}

// TestReplacedAfterAbsence: a voter that is away for too long gives way to another broker, and when it comes back it joins with new
// replicas.
func TestReplacedAfterAbsence(t *testing.T) {
	inv.Covers(t, "INV-M6", "INV-M8")
	cl := newCluster(t).everywhere(func(c *Config) { c.ReplaceAfter = 3 * time.Second })
	for range 3 {
		cl.start(cl.add())
	}
	cl.settled(3, 0)
	topics := map[string]storage.TopicUID{"before": cl.nodes[1].create("before").UID}
	lost := cl.nodes[1]
	lost.kill()
	cl.set(func() { cl.away[lost.id] = time.Hour }) // with nobody to take over, nothing happens
	fourth := cl.add()
	cl.start(fourth)
	last := ""
	within(t, 30*time.Second, func() bool { // the fourth votes, and the lost one does not
		return !slices.ContainsFunc(cl.nodes[0].cp.Groups(), func(g GroupStatus) bool {
			last = fmt.Sprintf("%+v", g)
			return slices.Contains(g.Voters, lost.id) || len(g.Voters) != 3
		})
	}, func() string { return last })
	cl.settled(3, 1) // of the lost one a new replica is expected
	if b, _ := cl.nodes[0].cp.State().Broker(lost.id); b.Generation != 1 {
		t.Fatalf("%+v", b)
	}
	topics["meanwhile"] = fourth.create("meanwhile").UID
	cl.start(lost)
	topics["back"] = lost.create("back").UID
	cl.agree(topics)
	cl.settled(3, 1)
	lost.kill() // and a plain restart of it, with nobody asked
	asked := cl.nodes
	cl.nodes = []*peer{lost}
	cl.start(lost)
	cl.nodes = asked
	cl.agree(topics)
}

// TestRetiredWhileRunning: a broker that the others have not seen for too long, though it runs, learns of it, stops, and comes back.
func TestRetiredWhileRunning(t *testing.T) {
	cl := newCluster(t).everywhere(func(c *Config) { c.ReplaceAfter = time.Second })
	for range 4 {
		cl.start(cl.add())
	}
	cl.settled(3, 1)
	i := slices.IndexFunc(cl.nodes, func(p *peer) bool {
		return p.id != cl.nodes[0].id && slices.Contains(cl.nodes[0].cp.Groups()[0].Voters, p.id)
	})
	unseen := cl.nodes[i]
	topics := map[string]storage.TopicUID{"before": unseen.create("before").UID}
	cl.set(func() { cl.away[unseen.id], cl.dead[unseen.id] = time.Hour, true })
	select {
	case err := <-unseen.ran:
		if !errors.Is(err, ErrRetired) {
			t.Fatalf("Run: %v", err)
		}
		unseen.ran <- err
	case <-time.After(30 * time.Second):
		t.Fatalf("it runs on: %+v", unseen.cp.Groups())
	}
	if _, err := unseen.cp.CreateTopic(t.Context(), NewTopic{Name: "x"}); !errors.Is(err, ErrRetired) {
		t.Fatalf("a retired broker answers: %v", err)
	}
	unseen.kill()
	cl.start(unseen)
	cl.settled(3, 1)
	cl.agree(topics)
}

// TestWipedBrokerJoinsAnew: an empty disk in the place of a voter is a new broker; the folder with the old id and nothing in it is
// refused.
func TestWipedBrokerJoinsAnew(t *testing.T) {
	inv.Covers(t, "INV-D9", "INV-M5")
	cl := three(t)
	topics := map[string]storage.TopicUID{"before": cl.nodes[1].create("before").UID}
	wiped := cl.nodes[2]
	wiped.kill()
	wiped.cfg.Dir = filepath.Join(t.TempDir(), "raft")
	if err := wiped.start(); !errors.Is(err, storage.ErrFolderRefused) {
		t.Fatalf("an empty folder with the old id: %v", err)
	}
	cl.start(cl.add())
	cl.settled(3, 1)
	topics["after"] = cl.nodes[3].create("after").UID
	cl.agree(topics)
}

// TestLostReplicaIsRefused: a folder that has lost only what the library keeps is refused as well: its replicas had votes, and made
// anew they would give them a second time.
func TestLostReplicaIsRefused(t *testing.T) {
	inv.Covers(t, "INV-D9", "INV-M5")
	cl := three(t)
	partly := cl.nodes[1]
	partly.kill()
	all, err := filepath.Glob(filepath.Join(partly.cfg.Dir, "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range all {
		if base := filepath.Base(name); base != identityFile && base != joinedFile {
			if err := os.RemoveAll(name); err != nil {
				t.Fatal(err)
			}
		}
	}
	if cp, err := partly.openAlone(t); !errors.Is(err, storage.ErrFolderRefused) {
		t.Fatalf("a folder that has lost its replicas: %v, %v", cp, err)
	}
	cl.nodes[0].create("after")
}

// TestJoinBySnapshot: the log of the groups is long gone when others join, vote, restart and lead.
func TestJoinBySnapshot(t *testing.T) {
	cl := newCluster(t).everywhere(func(c *Config) { c.SnapshotEntries, c.Vnodes = 10, 1 })
	cl.start(cl.add())
	topics := map[string]storage.TopicUID{}
	create := func(round string, n int) {
		t.Helper()
		for i := range n {
			name := fmt.Sprintf("%s-%d", round, i)
			topics[name] = cl.running()[i%len(cl.running())].create(name).UID
		}
	}
	create("alone", 120)
	cl.start(cl.add())
	cl.start(cl.add())
	cl.settledGroups(2, 3, 0)
	cl.agree(topics)
	create("three", 60)
	for _, p := range cl.nodes { // what a snapshot says of the members is what a restart finds
		p.kill()
		create("without-"+p.id.String(), 30)
		cl.start(p)
		cl.agree(topics)
	}
	cl.settledGroups(2, 3, 0)
	cl.nodes[0].kill() // the founder: one that joined by a snapshot leads
	create("led-by-another", 5)
	cl.agree(topics)
}

// TestMutualTLS runs the Raft port with certificates; a broker without one is not heard.
func TestMutualTLS(t *testing.T) {
	cl := newCluster(t)
	cl.tls = certificates(t)
	for range 3 {
		cl.start(cl.add())
	}
	cl.settled(3, 0)
	cl.agree(map[string]storage.TopicUID{"orders": cl.nodes[2].create("orders").UID})
	cl.tls = certificates(t) // of another authority
	p := cl.nodes[1]
	p.kill()
	p.new.Generation = 0
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if cp, err := Open(ctx, p.cfg, p.new, Deps{Addresses: cl, TLS: cl.tls}); !errors.Is(err, storage.ErrUnavailable) {
		t.Fatalf("with a foreign certificate: %v, %v", cp, err)
	}
	cl.nodes[0].create("undisturbed")
}

// certificates are those of a new authority and of a broker on loopback.
func certificates(t *testing.T) TLSFiles {
	t.Helper()
	dir := t.TempDir()
	write := func(name, kind string, der []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	cert := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "broker"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return TLSFiles{CAFile: write("ca.pem", "CERTIFICATE", der), CertFile: write("cert.pem", "CERTIFICATE", der),
		KeyFile: write("key.pem", "EC PRIVATE KEY", secret)}
}

// TestPolicyAndLevel changes what is cluster-wide from a broker that does not lead.
func TestPolicyAndLevel(t *testing.T) {
	inv.Covers(t, "INV-M10", "INV-M12")
	cl := three(t)
	ctx, c := t.Context(), cl.nodes[2].cp
	changed, done := c.StateChanged()
	defer done()
	one, least := 1, 7
	p, err := c.UpdatePolicy(ctx, PolicyUpdate{PolicyChange: root.PolicyChange{ReplicationFactor: &one}})
	if err != nil || p.ReplicationFactor != 1 || p.Version != 2 || c.Policy().Version != 2 {
		t.Fatalf("%+v, %v", p, err)
	}
	<-changed
	if _, err := c.UpdatePolicy(ctx, PolicyUpdate{ExpectVersion: 1, PolicyChange: root.PolicyChange{ReplicationFactor: &one}}); !errors.Is(err, storage.ErrConflict) {
		t.Fatalf("an old version: %v", err)
	}
	if _, err := c.UpdatePolicy(ctx, PolicyUpdate{PolicyChange: root.PolicyChange{MinReplicas: &least}}); !errors.Is(err, storage.ErrInvalid) {
		t.Fatalf("more copies than there are: %v", err)
	}
	if _, err := c.UpdatePolicy(ctx, PolicyUpdate{}); !errors.Is(err, storage.ErrInvalid) {
		t.Fatalf("nothing: %v", err)
	}
	var g errgroup.Group
	for _, n := range cl.nodes { // "any version" from all at once: each is applied, none undoes another
		g.Go(func() error {
			age := time.Duration(1+n.id>>60) * time.Minute
			_, err := n.cp.UpdatePolicy(ctx, PolicyUpdate{PolicyChange: root.PolicyChange{SegmentMaxAge: &age}})
			return err
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if brokers, err := c.Brokers(ctx); err != nil || len(brokers) != 3 {
		t.Fatalf("%v, %v", brokers, err)
	}
	if v := c.Policy().Version; v != 5 {
		t.Fatalf("three changes made version %d of 2", v)
	}
	if err := c.RaiseLevel(ctx, storage.CurrentLevel); err != nil {
		t.Fatal(err)
	}
	if err := c.RaiseLevel(ctx, storage.CurrentLevel+1); !errors.Is(err, storage.ErrConflict) {
		t.Fatalf("a level that nobody advertises: %v", err)
	}
}

// TestRemovedWhileRunning: a broker that is taken out stops by itself, for good.
func TestRemovedWhileRunning(t *testing.T) {
	cl := three(t)
	cl.start(cl.add())
	cl.settled(3, 1)
	out := cl.nodes[0] // it founded all groups, and leads some
	if err := out.cp.SetBrokerState(t.Context(), out.id, root.BrokerDecommissioning); err != nil {
		t.Fatal(err)
	}
	cl.settled(4, 0) // its votes are given to others before it goes
	if err := cl.nodes[1].cp.RemoveBroker(t.Context(), out.id); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-out.ran:
		if !errors.Is(err, storage.ErrFolderRefused) {
			t.Fatalf("Run: %v", err)
		}
		out.ran <- err
	case <-time.After(30 * time.Second):
		t.Fatalf("it runs on: %+v", out.cp.Groups())
	}
	out.kill()
	cl.settled(3, 0)
	if _, err := out.openAlone(t); !errors.Is(err, storage.ErrFolderRefused) && !errors.Is(err, storage.ErrUnavailable) {
		t.Fatalf("a removed broker that asks nobody: %v", err)
	}
	cl.nodes[1].create("after")
}

// openAlone opens the folder without asking anybody, for two seconds.
func (p *peer) openAlone(t *testing.T) (*ControlPlane, error) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	cp, err := Open(ctx, p.cfg, p.new, Deps{Addresses: p.cl})
	if err == nil {
		_ = cp.Close()
	}
	return cp, err
}

// TestJoinIsCutOff kills a broker at several moments of its joining; it goes on where it was.
func TestJoinIsCutOff(t *testing.T) {
	cl := newCluster(t)
	cl.start(cl.add())
	topics := map[string]storage.TopicUID{"a": cl.nodes[0].create("a").UID}
	for i, wait := range []time.Duration{20, 60, 100, 200, 400} {
		p := cl.add()
		ctx, cancel := context.WithTimeout(t.Context(), wait*time.Millisecond)
		a, err := cl.nodes[0].cp.Admit(t.Context(), AdmitRequest{Broker: p.id, Level: 1, Addresses: map[string]string{"raft": p.cfg.RaftAddress}})
		if err != nil || a.Cluster != cl.id || a.RaftAddresses[cl.nodes[0].id] == "" {
			t.Fatalf("%+v, %v", a, err)
		}
		cp, err := Open(ctx, p.cfg, p.new, Deps{Addresses: cl})
		if err == nil {
			p.boot++
			err = cp.Register(ctx, p.boot, 0, nil)
			_ = cp.Close()
		}
		cancel()
		t.Logf("%d: cut off after %v: %v", i, wait*time.Millisecond, err)
		cl.start(p)
		cl.agree(topics)
	}
	cl.settled(3, 3)
}
