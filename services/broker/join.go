package broker

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"log"
	"log/slog"
	"path/filepath"
	"slices"
	"time"

	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/gen/go/malachi/intra/v1/intrav1connect"
	"github.com/malachilog/malachi/services/controlplane"
	"github.com/malachilog/malachi/services/controlplane/root"
	"github.com/malachilog/malachi/services/founding"
	"github.com/malachilog/malachi/services/membership"
	"github.com/malachilog/malachi/services/placement"
	"github.com/malachilog/malachi/services/rpc"
	"github.com/malachilog/malachi/services/transport"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/datadir"
)

// maxSkew is how far a broker's clock may be from this one's before it takes nothing new.
const maxSkew = time.Minute

// marker shows the data directory's marker to the founding.
type marker struct{ b *Broker }

// Cluster is what is durable.
func (m marker) Cluster() storage.ClusterID {
	id, err := clusterID(m.b.dir.Marker().Cluster)
	if err != nil {
		return storage.ClusterID{}
	}
	return id
}

// Found draws an id and makes it durable.
func (m marker) Found() (storage.ClusterID, error) {
	var id storage.ClusterID
	if _, err := rand.Read(id[:]); err != nil {
		return id, err
	}
	return id, m.b.setCluster(id, true)
}

// Join makes the cluster durable.
func (m marker) Join(id storage.ClusterID) error { return m.b.setCluster(id, false) }

func (b *Broker) setCluster(id storage.ClusterID, founding bool) error {
	_, err := b.dir.Update(func(m *datadir.Marker) { m.Cluster, m.Founding, m.Joining = id.String(), founding, !founding })
	return err
}

func clusterID(text string) (id storage.ClusterID, err error) {
	raw, err := hex.DecodeString(text)
	if err != nil || len(raw) != len(id) {
		return id, fmt.Errorf("cluster id %.40q: %w", text, storage.ErrFolderRefused)
	}
	copy(id[:], raw)
	return id, nil
}

// quietLog sends what the HTTP server says of single connections to the debug level.
func quietLog(l *slog.Logger) *log.Logger { return slog.NewLogLogger(l.Handler(), slog.LevelDebug) }

func (b *Broker) transportDeps() transport.Deps { return transport.Deps{Logger: b.log} }

// meet opens the port for other brokers, and brings this broker into a cluster: the one of its disk, or one that it founds or joins.
func (b *Broker) meet(ctx context.Context) (err error) {
	n := &b.net
	dial := rpc.NewPeers(b.rpcAddress, nil)
	if n.mutual() {
		dial = rpc.NewPeers(b.rpcAddress, n.source.Transport())
	}
	n.peers = dial
	b.founding, err = founding.New(founding.Config{
		Self: b.self, Level: storage.CurrentLevel, RPC: n.advertised(n.rpc.Addr().String()), Raft: n.advertised(n.raft), API: n.advertised(n.api.Addr().String()),
		Gossip: n.advertised(n.gossip), Attributes: b.cfg.Attributes, Expect: b.cfg.BootstrapExpect, List: b.cfg.Founders, Seeds: b.cfg.Join,
	}, founding.Deps{Logger: b.log, Marker: marker{b}, Dial: dial.At})
	if err != nil {
		return err
	}
	b.background.Go(n.servePeers(b))
	if b.cfg.Bootstrap && (marker{b}).Cluster().IsZero() { // alone: nobody need be asked
		if _, err := (marker{b}).Found(); err != nil {
			return err
		}
	}
	if (marker{b}).Cluster().IsZero() && b.cfg.BootstrapExpect == 0 && len(b.cfg.Join) == 0 {
		b.log.Warn("this broker belongs to no cluster: it waits for `malachi cluster init`, as bootstrap, bootstrap_expect and join are all unset")
	}
	met, err := b.founding.Settle(ctx)
	if err != nil {
		return fmt.Errorf("find the cluster: %w", err)
	}
	return b.openMembership(ctx, met)
}

func (b *Broker) rpcAddress(id storage.BrokerID) (string, bool) {
	if b.members == nil {
		return "", false
	}
	return b.members.RPCAddress(id)
}

// askPatience bounds a question to each seed at a start; one that does not answer must not hold the start up.
const askPatience = time.Second

// askMembers asks the cluster, before anything of its metadata is started here, what it knows of this broker: whether its metadata replicas were given
// to others while it was away, and whether this disk is the one that was registered. 0: nobody could be asked, or nothing happened. It is a
// courtesy: root judges every start again. But a Raft log that was set back ends the process before root can say so.
func (b *Broker) askMembers(ctx context.Context) (generation uint32, err error) {
	n, m := &b.net, b.dir.Marker()
	self := n.advertised(n.rpc.Addr().String())
	cluster := (marker{b}).Cluster()
	for _, seed := range slices.Concat(b.cfg.Join, b.cfg.Founders) {
		if seed == self {
			continue
		}
		call, cancel := context.WithTimeout(ctx, askPatience)
		client := intrav1connect.NewClusterServiceClient(n.peers.At(seed))
		hello, err := client.Hello(call, &intrav1.HelloRequest{Broker: uint64(b.self), RpcAddress: self})
		if err != nil || !bytes.Equal(hello.GetClusterId(), cluster[:]) { // of another cluster: it must not be asked
			cancel()
			continue
		}
		res, err := client.Join(call, &intrav1.JoinRequest{
			Broker: uint64(b.self), RpcAddress: self, RaftAddress: n.advertised(n.raft), ApiAddress: n.advertised(n.api.Addr().String()),
			GossipAddress: n.advertised(n.gossip), Level: uint32(storage.CurrentLevel), Attributes: b.cfg.Attributes,
		})
		cancel()
		switch {
		case err != nil:
			continue
		case res.GetRefused() != "":
			return 0, fmt.Errorf("%w: %.300s", storage.ErrFolderRefused, res.GetRefused())
		case uint64(b.boot) <= res.GetRegisteredBoot(), m.Proof < res.GetRegisteredGroup():
			return 0, fmt.Errorf("%w: clone_or_rollback: this disk has boot %d and journal group %d, registered are %d and %d", storage.ErrFolderRefused,
				b.boot, m.Proof, res.GetRegisteredBoot(), res.GetRegisteredGroup())
		}
		return res.GetGeneration(), nil
	}
	return 0, nil
}

// probe asks a broker directly whether it runs.
func (b *Broker) probe(ctx context.Context, id storage.BrokerID) error {
	c, err := b.net.peers.Client(id)
	if err != nil {
		return err
	}
	_, err = intrav1connect.NewClusterServiceClient(c).Hello(ctx, &intrav1.HelloRequest{Broker: uint64(b.self)})
	return rpc.PeerCallError(ctx, id, err)
}

// chooseVoters places the votes of a metadata group as segments are placed: who votes goes on to.
func (b *Broker) chooseVoters(group uint64, candidates []controlplane.Candidate, n int) []storage.BrokerID {
	var all []placement.Broker
	var keep []storage.BrokerID
	for _, c := range candidates {
		all = append(all, placement.Broker{ID: c.ID, Attributes: c.Attributes})
		if c.Voter {
			keep = append(keep, c.ID)
		}
	}
	set, err := placement.Choose(placement.KeyOfGroup(group), all, n, placement.Rules{SpreadBy: b.cp.Policy().SpreadBy, Keep: keep})
	if err != nil {
		return keep
	}
	return set
}

// openMembership begins to gossip. The others' addresses come from it.
func (b *Broker) openMembership(ctx context.Context, met founding.Outcome) (err error) {
	n := &b.net
	cfg := membership.Config{
		Bind: n.gossip, Cluster: met.Cluster, Self: b.self, Boot: b.boot, PeersFile: "PEERS",
	}
	if n.cfg.Advertise != "" {
		cfg.Advertise = n.advertised(n.gossip)
	}
	if n.keys != nil {
		cfg.Keys = n.keys.Keys()
	}
	b.meta = membership.Meta{
		API: n.advertised(n.api.Addr().String()), RPC: n.advertised(n.rpc.Addr().String()), Raft: n.advertised(n.raft),
		Attributes: b.cfg.Attributes, Version: b.cfg.Version, Level: storage.CurrentLevel,
	}
	b.members, err = membership.Open(ctx, cfg, b.meta, membership.Deps{Logger: b.log, FS: b.fs, Discover: b.founding.GossipAddresses})
	if err != nil {
		return portError("gossip", n.gossip, fmt.Errorf("gossip: %w", err))
	}
	for _, k := range met.Known {
		b.members.Learn(k.Broker, k.RPC, k.Raft, k.Gossip)
	}
	b.background.Go(func() error { return b.members.Run(b.backgroundCtx) })
	if n.keys != nil {
		b.background.Go(func() error { return n.keys.Run(b.backgroundCtx, b.members.SetKeys) })
	}
	if n.source != nil {
		b.background.Go(func() error { return n.source.Run(b.backgroundCtx) })
	}
	return nil
}

// openControlPlane joins the metadata groups, and has this boot registered.
func (b *Broker) openControlPlane(ctx context.Context) error {
	m := b.dir.Marker()
	cluster, err := clusterID(m.Cluster)
	if err != nil {
		return err
	}
	raft := b.cfg.RaftDir
	if raft == "" {
		raft = filepath.Join(b.cfg.Data, "raft")
	}
	cfg := controlplane.Config{
		Dir: raft, RaftAddress: b.net.raft, Vnodes: b.cfg.Vnodes, ElectionTimeout: b.cfg.ElectionTimeout, FoundingBrokers: max(1, b.cfg.BootstrapExpect),
	}
	if b.cfg.Advertise != "" {
		cfg.RaftAdvertise = b.net.advertised(b.net.raft)
	}
	deps := controlplane.Deps{
		Logger: b.log, Addresses: b.members, Absent: b.absent, Attributes: b.cfg.Attributes,
		Alive: func(id storage.BrokerID) bool { return b.absent(id) == 0 }, Probe: b.probe, ChooseVoters: b.chooseVoters,
	}
	if b.net.mutual() {
		deps.TLS = controlplane.TLSFiles{CAFile: b.cfg.TLS.CA, CertFile: b.cfg.TLS.Cert, KeyFile: b.cfg.TLS.Key}
	}
	generation, err := b.askMembers(ctx)
	if err != nil {
		return err
	}
	b.cp, err = controlplane.Open(ctx, cfg, controlplane.Identity{
		Cluster: cluster, Broker: b.self, Founding: m.Founding, Joining: m.Joining, Generation: generation,
	}, deps)
	if err != nil {
		return portError("raft", b.net.raft, err)
	}
	addr := b.cp.Status().RaftAddress
	b.meta.Raft = b.net.advertised(addr)
	if err := b.members.Update(b.meta); err != nil {
		return err
	}
	b.founding.Admits(admitter{b})
	err = b.cp.Register(ctx, b.boot, m.Proof, map[string]string{
		"api": b.meta.API, "ops": b.net.advertised(b.net.ops.Addr().String()), "rpc": b.meta.RPC, "gossip": b.members.Gossip(),
	})
	if err != nil {
		return err
	}
	if m.Founding {
		if err := b.foundingPolicy(ctx); err != nil {
			return err
		}
	}
	_, err = b.dir.Update(func(m *datadir.Marker) { m.Founding, m.Joining, m.Registered = false, false, true })
	return err
}

// foundingPolicy puts the configured sizes into the policy of the cluster that this start founds.
func (b *Broker) foundingPolicy(ctx context.Context) error {
	var u controlplane.PolicyUpdate
	if b.cfg.SegmentMaxBytes > 0 {
		n := uint64(b.cfg.SegmentMaxBytes)
		u.SegmentMaxBytes = &n
	}
	if b.cfg.SegmentMaxAge > 0 {
		u.SegmentMaxAge = &b.cfg.SegmentMaxAge
	}
	if u.SegmentMaxBytes == nil && u.SegmentMaxAge == nil {
		return nil
	}
	_, err := b.cp.UpdatePolicy(ctx, u)
	return err
}

// absent is for how long nothing was seen of a broker.
func (b *Broker) absent(id storage.BrokerID) time.Duration {
	if id == b.self {
		return 0
	}
	return b.members.Absent(id)
}

// brokers are the brokers as placement sees them.
func (b *Broker) brokers() []placement.Broker {
	skewed := b.members.Skewed(maxSkew)
	var out []placement.Broker
	for _, r := range b.cp.State().Brokers {
		if r.Boot == 0 {
			continue // admitted, and not there yet
		}
		out = append(out, placement.Broker{
			ID: r.ID, Attributes: r.Attributes, Absent: b.absent(r.ID) > 0, Draining: r.State != root.BrokerActive, Skewed: skewed[r.ID],
		})
	}
	return out
}

// onlyOne refuses a broker whose id answers at another address: its folder is a copy of one that is in use.
func (b *Broker) onlyOne(ctx context.Context, n founding.Newcomer) error {
	at, known := b.members.RPCAddress(n.Broker)
	if !known || at == n.RPC || n.Broker == b.self && n.RPC == b.meta.RPC {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, askPatience/2)
	defer cancel()
	res, err := intrav1connect.NewClusterServiceClient(b.net.peers.At(at)).Hello(ctx, &intrav1.HelloRequest{Broker: uint64(b.self)})
	if err == nil && storage.BrokerID(res.GetBroker()) == n.Broker {
		return fmt.Errorf("clone_or_rollback: broker %s runs at %s: the folder at %s is a copy: %w", n.Broker, at, n.RPC, storage.ErrFolderRefused)
	}
	return nil
}

// admitter takes new brokers into the cluster.
type admitter struct{ b *Broker }

// Admit implements founding.Admitter.
func (a admitter) Admit(ctx context.Context, n founding.Newcomer) (founding.Admission, error) {
	if err := a.b.onlyOne(ctx, n); err != nil {
		return founding.Admission{}, err
	}
	addresses := map[string]string{"rpc": n.RPC, "raft": n.Raft, "api": n.API, "gossip": n.Gossip}
	admitted, err := a.b.cp.Admit(ctx, controlplane.AdmitRequest{Broker: n.Broker, Addresses: addresses, Attributes: n.Attributes, Level: n.Level})
	if err != nil {
		return founding.Admission{}, err
	}
	out := founding.Admission{Generation: admitted.Generation}
	for _, r := range a.b.cp.State().Brokers {
		if r.ID == n.Broker {
			out.Boot, out.JournalGroup = r.Boot, r.JournalGroup
		}
		out.Known = append(out.Known, founding.Known{Broker: r.ID, RPC: r.Addresses["rpc"], Raft: r.Addresses["raft"], Gossip: r.Addresses["gossip"]})
	}
	return out, nil
}
