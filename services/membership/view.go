package membership

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/storage"
)

// maxMeta is the library's bound for what a node tells of itself.
const maxMeta = 512

// node is one process that gossips.
type node struct {
	id     storage.BrokerID
	boot   storage.Boot
	meta   Meta
	gossip string
	since  time.Time // that it was first heard of
	seen   time.Time
	skew   time.Duration
	skewed bool // skew was measured
}

// entry is what is known of a broker, there or not. The highest boot that was heard of counts.
type entry struct {
	Boot   storage.Boot
	API    string
	RPC    string
	Raft   string
	Gossip string
	gone   time.Time // since when no process of it is there; zero while one is
}

func (m *Membership) encode(meta Meta) ([]byte, error) {
	b, err := proto.Marshal(&intrav1.MemberMeta{
		ClusterId: m.cfg.Cluster[:], Broker: uint64(m.cfg.Self), Boot: uint64(m.cfg.Boot),
		ApiAddress: meta.API, RpcAddress: meta.RPC, RaftAddress: meta.Raft,
		Attributes: meta.Attributes, Version: meta.Version, Level: uint32(meta.Level), Load: meta.Load,
	})
	if err != nil {
		return nil, fmt.Errorf("encode what this broker tells of itself: %w: %w", storage.ErrInvalid, err)
	}
	if len(b) > maxMeta {
		return nil, fmt.Errorf("what this broker tells of itself takes %d bytes, the limit is %d: use fewer or shorter attributes: %w",
			len(b), maxMeta, storage.ErrTooLarge)
	}
	return b, nil
}

// decode reads what another node told. Nothing of it is trusted further than that.
func decode(b []byte) (c storage.ClusterID, id storage.BrokerID, boot storage.Boot, meta Meta, err error) {
	if len(b) > maxMeta {
		return c, 0, 0, meta, fmt.Errorf("%d bytes of meta: %w", len(b), storage.ErrTooLarge)
	}
	var p intrav1.MemberMeta
	if err := proto.Unmarshal(b, &p); err != nil {
		return c, 0, 0, meta, fmt.Errorf("meta: %w", storage.ErrCorrupt)
	}
	if len(p.GetClusterId()) != len(c) || p.GetBroker() == 0 {
		return c, 0, 0, meta, fmt.Errorf("meta without cluster or broker: %w", storage.ErrInvalid)
	}
	copy(c[:], p.GetClusterId())
	return c, storage.BrokerID(p.GetBroker()), storage.Boot(p.GetBoot()), Meta{
		API: p.GetApiAddress(), RPC: p.GetRpcAddress(), Raft: p.GetRaftAddress(), Attributes: p.GetAttributes(), Version: p.GetVersion(),
		Level: storage.Level(p.GetLevel()), Load: p.GetLoad(),
	}, nil
}

// head is the node that counts for a broker: of the highest boot, and of two with one boot the one that was here first. m.mu is held.
func (m *Membership) head(id storage.BrokerID) (name string, best *node) {
	for k, n := range m.nodes {
		if n.id != id {
			continue
		}
		if best == nil || n.boot > best.boot || n.boot == best.boot && (n.since.Before(best.since) || n.since.Equal(best.since) && k < name) {
			name, best = k, n
		}
	}
	return name, best
}

// noteSelf keeps the own node and entry. m.mu is held.
func (m *Membership) noteSelf() {
	if n := m.nodes[m.name]; n != nil {
		n.meta = m.meta
		m.note(n)
	}
}

// note keeps what a node told in the book. m.mu is held.
func (m *Membership) note(n *node) {
	e := m.book[n.id]
	if e == nil {
		if len(m.book) >= maxBook {
			return // every member of a cluster has a place; this is for who makes brokers up
		}
		e = &entry{}
		m.book[n.id] = e
	}
	e.gone = time.Time{}
	if n.boot < e.Boot {
		return
	}
	now := entry{Boot: n.boot, API: n.meta.API, RPC: n.meta.RPC, Raft: n.meta.Raft, Gossip: n.gossip}
	if now != *e {
		*e = now
		m.dirty = true
	}
}

// Members returns the brokers that are there, this one included, by id. A broker that is only suspected counts as there.
func (m *Membership) Members() []Member {
	m.mu.Lock()
	defer m.mu.Unlock()
	heads := map[storage.BrokerID]*node{}
	for _, n := range m.nodes {
		if heads[n.id] == nil {
			_, heads[n.id] = m.head(n.id)
		}
	}
	out := make([]Member, 0, len(heads))
	for id, n := range heads {
		b := Member{
			ID: id, Boot: n.boot, Meta: n.meta, Gossip: n.gossip, Self: id == m.cfg.Self, LastSeen: n.seen, Skew: n.skew, SkewKnown: n.skewed,
		}
		b.Attributes = maps.Clone(n.meta.Attributes)
		if b.Self {
			b.LastSeen, b.SkewKnown = time.Now(), true
		}
		out = append(out, b)
	}
	slices.SortFunc(out, func(a, b Member) int { return cmp.Compare(a.ID, b.ID) })
	return out
}

// Skewed returns the brokers, this one too, whose clock is further than limit from the one that most of those that are there agree on. Where
// no majority agrees, as between two, it can't be said who is wrong, and none is returned.
func (m *Membership) Skewed(limit time.Duration) map[storage.BrokerID]bool {
	clocks := map[storage.BrokerID]time.Duration{}
	for _, b := range m.Members() {
		if b.SkewKnown {
			clocks[b.ID] = b.Skew
		}
	}
	return skewed(clocks, limit)
}

func skewed(clocks map[storage.BrokerID]time.Duration, limit time.Duration) map[storage.BrokerID]bool {
	sorted := slices.Sorted(maps.Values(clocks))
	if len(sorted) == 0 {
		return nil
	}
	middle := sorted[(len(sorted)-1)/2] // in a majority, if there is one
	out := map[storage.BrokerID]bool{}
	for id, c := range clocks {
		if (c - middle).Abs() > limit {
			out[id] = true
		}
	}
	if 2*(len(clocks)-len(out)) <= len(clocks) {
		return nil
	}
	return out
}

// RaftAddress returns where a broker's Raft listens, as last known, whether it is there or not. It never blocks.
func (m *Membership) RaftAddress(id storage.BrokerID) (string, bool) {
	return m.address(id, func(e *entry) string { return e.Raft })
}

// RPCAddress returns where a broker takes calls of other brokers, as last known, whether it is there or not. It never blocks.
func (m *Membership) RPCAddress(id storage.BrokerID) (string, bool) {
	return m.address(id, func(e *entry) string { return e.RPC })
}

func (m *Membership) address(id storage.BrokerID, of func(*entry) string) (string, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if e := m.book[id]; e != nil && of(e) != "" {
		return of(e), true
	}
	return "", false
}

// Absent returns for how long this process has seen nothing of a broker; 0 while it is there. For one that was never seen, or not since the
// start, it counts from Open: what was before is not known.
func (m *Membership) Absent(id storage.BrokerID) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	if id == m.cfg.Self {
		return 0
	}
	if _, n := m.head(id); n != nil {
		return 0
	}
	since := m.opened
	if e := m.book[id]; e != nil && e.gone.After(since) {
		since = e.gone
	}
	return max(time.Since(since), 1)
}

// Learn adds what is known of brokers from elsewhere, such as the answer to joining. It never replaces what a broker said of itself.
func (m *Membership) Learn(id storage.BrokerID, rpc, raft, gossip string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if id == 0 || id == m.cfg.Self || m.book[id] != nil || len(m.book) >= maxBook {
		return
	}
	m.book[id] = &entry{RPC: rpc, Raft: raft, Gossip: gossip}
	m.dirty = true
	m.announce()
}

// Forget drops what is known of a broker that was removed from the cluster, so that it is not looked for any more.
func (m *Membership) Forget(id storage.BrokerID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.book[id] != nil && id != m.cfg.Self {
		delete(m.book, id)
		m.dirty = true
		m.announce()
	}
}
