package membership

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	"github.com/malachilog/malachi/storage"
)

// rivalAfter is how long after a newer process was noticed an answer of the older one proves that both run.
const rivalAfter = time.Second

// delegate is what the library calls, some of it under its own lock: nothing here calls the library back.
type delegate Membership

var (
	_ memberlist.Delegate      = (*delegate)(nil)
	_ memberlist.EventDelegate = (*delegate)(nil)
	_ memberlist.AliveDelegate = (*delegate)(nil)
	_ memberlist.MergeDelegate = (*delegate)(nil)
	_ memberlist.PingDelegate  = (*delegate)(nil)
)

// NodeMeta is what this broker tells of itself.
func (d *delegate) NodeMeta(limit int) []byte {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.encoded) > limit {
		return nil // Open and Update have refused it; the library would panic
	}
	return d.encoded
}

// NotifyMsg, GetBroadcasts, LocalState and MergeRemoteState carry nothing: the meta is all there is.
func (d *delegate) NotifyMsg([]byte) {}

// GetBroadcasts has none.
func (d *delegate) GetBroadcasts(int, int) [][]byte { return nil }

// LocalState is empty.
func (d *delegate) LocalState(bool) []byte { return nil }

// MergeRemoteState has nothing to merge.
func (d *delegate) MergeRemoteState([]byte, bool) {}

// admits says whether a node belongs to this cluster. What it refuses never becomes a member here.
func (d *delegate) admits(n *memberlist.Node) error {
	cluster, id, _, _, err := decode(n.Meta)
	if err != nil {
		if d.told.may("meta "+n.Address(), 10*time.Minute) {
			d.log.Warn("what gossips there is no broker that this version understands; it is ignored", "address", n.Address(), "error", err)
		}
		return err
	}
	if cluster == d.cfg.Cluster || mutate.On("membership.any-cluster") {
		return nil
	}
	if d.told.may("cluster "+cluster.String(), 10*time.Minute) {
		d.log.Warn("a broker of another cluster gossips with this one and is refused: correct its seeds, or this broker's",
			"address", n.Address(), "its_cluster", cluster.String(), "its_broker", id.String(), "cluster", d.cfg.Cluster.String())
	}
	return fmt.Errorf("node %s belongs to cluster %s: %w", n.Name, cluster, storage.ErrInvalid)
}

// NotifyAlive refuses what is not of this cluster, however it was heard of.
func (d *delegate) NotifyAlive(n *memberlist.Node) error { return d.admits(n) }

// NotifyMerge refuses to exchange members with another cluster.
func (d *delegate) NotifyMerge(peers []*memberlist.Node) error {
	for _, n := range peers {
		if n.State != memberlist.StateAlive && n.State != memberlist.StateSuspect {
			continue
		}
		if err := d.admits(n); err != nil {
			return err
		}
	}
	return nil
}

// NotifyJoin takes a process into the view.
func (d *delegate) NotifyJoin(n *memberlist.Node) {
	_, id, boot, meta, err := decode(n.Meta)
	if err != nil {
		return
	}
	m := (*Membership)(d)
	d.mu.Lock()
	now := time.Now()
	_, before := m.head(id)
	p := &node{id: id, boot: boot, meta: meta, gossip: n.Address(), since: now, seen: now}
	d.nodes[n.Name] = p
	m.note(p)
	m.announce()
	d.mu.Unlock()
	switch {
	case n.Name == d.name:
	case id == d.cfg.Self && boot >= d.cfg.Boot: // the ghost of an earlier process has a lower boot
		d.rival(id, d.cfg.Boot, d.cfg.Bind, boot, p.gossip)
	case before == nil:
		d.log.Info("broker is there", "broker", id.String(), "boot", uint64(boot), "gossip", p.gossip)
	}
}

// NotifyUpdate takes what a process now tells of itself.
func (d *delegate) NotifyUpdate(n *memberlist.Node) {
	_, id, boot, meta, err := decode(n.Meta)
	if err != nil {
		return
	}
	m := (*Membership)(d)
	d.mu.Lock()
	defer d.mu.Unlock()
	p := d.nodes[n.Name]
	if p == nil || p.id != id || p.boot != boot { // a process does not change who it is
		return
	}
	p.meta, p.gossip, p.seen = meta, n.Address(), time.Now()
	m.note(p)
	m.announce()
}

// NotifyLeave drops a process from the view.
func (d *delegate) NotifyLeave(n *memberlist.Node) {
	m := (*Membership)(d)
	d.mu.Lock()
	p := d.nodes[n.Name]
	if p == nil {
		d.mu.Unlock()
		return
	}
	delete(d.nodes, n.Name)
	_, left := m.head(p.id)
	if e := d.book[p.id]; e != nil && left == nil {
		e.gone = time.Now()
	}
	m.announce()
	d.mu.Unlock()
	if left == nil && n.Name != d.name {
		d.log.Info("broker is gone", "broker", p.id.String(), "boot", uint64(p.boot), "gossip", p.gossip)
	}
}

// AckPayload is this broker's wall clock, sent with every answer to a probe.
func (d *delegate) AckPayload() []byte {
	return binary.LittleEndian.AppendUint64(nil, uint64(time.Now().UnixNano()))
}

// NotifyPingComplete takes the answer to a probe: the process lives, and what its clock says.
func (d *delegate) NotifyPingComplete(n *memberlist.Node, rtt time.Duration, payload []byte) {
	m := (*Membership)(d)
	now := time.Now()
	d.mu.Lock()
	p := d.nodes[n.Name]
	if p == nil {
		d.mu.Unlock()
		return
	}
	p.seen = now
	if len(payload) == 8 && rtt >= 0 {
		theirs := time.Unix(0, int64(binary.LittleEndian.Uint64(payload)))
		p.skew, p.skewed = theirs.Sub(now.Add(-rtt/2).Round(0)), true
	}
	name, h := m.head(p.id)
	rival := h != nil && name != n.Name && now.Sub(h.since) > rivalAfter
	var boot storage.Boot
	var at string
	if rival {
		boot, at = h.boot, h.gossip
	}
	d.mu.Unlock()
	if rival {
		d.rival(p.id, p.boot, p.gossip, boot, at)
	}
}

// rival says loudly that two processes run with one broker id.
func (d *delegate) rival(id storage.BrokerID, boot storage.Boot, at string, otherBoot storage.Boot, otherAt string) {
	if d.told.may("rival "+id.String(), time.Minute) {
		d.log.Error("two processes run with one broker id; the higher boot counts: stop the other, whose folder is a copy or was rolled back",
			"broker", id.String(), "boot", uint64(boot), "gossip", at, "other_boot", uint64(otherBoot), "other_gossip", otherAt)
	}
}
