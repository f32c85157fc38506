package root

import (
	"fmt"
	"io"

	"google.golang.org/protobuf/proto"

	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/storage"
)

// maxSnapshot bounds what Restore reads: every vnode and broker at its bounds, several times over.
const maxSnapshot = 256 << 20

// Snapshot is a state that can be written: what Machine.Snapshot prepared.
type Snapshot struct {
	st      *State
	applied storage.Level
}

// Snapshot prepares a snapshot of the present state, at no cost.
func (m *Machine) Snapshot() *Snapshot { return &Snapshot{m.st, m.applied} }

// Write writes the snapshot. Equal states write equal bytes.
func (s *Snapshot) Write(w io.Writer) error {
	p := &intrav1.RootSnapshot{Level: uint32(max(s.applied, s.st.Level)), ClusterLevel: uint32(s.st.Level),
		RingVersion: s.st.Ring.Version}
	if s.st.Founded() {
		p.ClusterId, p.FoundNonce = s.st.Cluster[:], s.st.FoundNonce[:]
	}
	for _, v := range s.st.Ring.Vnodes {
		r := &intrav1.VnodeRecord{Id: v.ID, Confirmed: v.Confirmed}
		for _, a := range v.Arcs {
			r.Arcs = append(r.Arcs, &intrav1.HashArc{First: a.First, Last: a.Last})
		}
		for _, b := range v.Members {
			r.Members = append(r.Members, uint64(b))
		}
		p.Vnodes = append(p.Vnodes, r)
	}
	for _, b := range s.st.Brokers {
		p.Brokers = append(p.Brokers, &intrav1.BrokerRecord{Id: uint64(b.ID), Boot: uint64(b.Boot), JournalGroup: b.JournalGroup,
			Nonce: nonceToProto(b.Nonce, b.Boot != 0), Addresses: addressesToProto(b.Addresses), AdvertisedLevel: uint32(b.AdvertisedLevel),
			State: intrav1.BrokerState(b.State), StateVersion: b.StateVersion, StateNonce: nonceToProto(b.stateNonce, false),
			Attributes: attributesToProto(b.Attributes), AdmitNonce: nonceToProto(b.admitNonce, false), AdmitTime: int64(b.AdmitTime),
			RegisterTime: int64(b.RegisterTime), Generation: b.Generation, ReadyBoot: uint64(b.ReadyBoot)})
	}
	for _, id := range s.st.Removed {
		p.Removed = append(p.Removed, uint64(id))
	}
	if s.st.Founded() && !s.st.Policy.isFounding() {
		p.Policy = policyToProto(s.st.Policy)
	}
	out, err := deterministic.Marshal(p)
	if err == nil {
		_, err = w.Write(out)
	}
	if err != nil {
		return fmt.Errorf("write root snapshot: %w", err)
	}
	return nil
}

// Restore replaces the machine's state by a snapshot's. On an error the state is as it was and the machine has stopped:
// storage.ErrNewerFormat, storage.ErrCorrupt, or the reader's error.
func (m *Machine) Restore(in io.Reader) error {
	if m.stopped != nil {
		return m.stopped
	}
	st, applied, err := read(in, m.understood)
	if err != nil {
		m.stopped = fmt.Errorf("restore root snapshot: %w", err)
		return m.stopped
	}
	m.st, m.applied = st, applied
	return nil
}

func read(in io.Reader, understood storage.Level) (*State, storage.Level, error) {
	b, err := io.ReadAll(io.LimitReader(in, maxSnapshot+1))
	if err != nil {
		return nil, 0, err
	}
	var p intrav1.RootSnapshot
	if len(b) > maxSnapshot {
		return nil, 0, fmt.Errorf("more than %d bytes: %w", maxSnapshot, storage.ErrCorrupt)
	}
	if err := proto.Unmarshal(b, &p); err != nil {
		return nil, 0, fmt.Errorf("%w: %w", storage.ErrCorrupt, err)
	}
	level := storage.Level(p.Level)
	if level > understood {
		return nil, 0, fmt.Errorf("level %d, this process understands %d: %w", level, understood, storage.ErrNewerFormat)
	}
	d := decoder{bad: level == 0 || p.ClusterLevel > p.Level || len(p.Vnodes) > MaxVnodes || len(p.Brokers) > MaxBrokers ||
		len(p.Removed) > MaxRemoved}
	st := &State{Level: storage.Level(p.ClusterLevel), Ring: Ring{Version: p.RingVersion}}
	if len(p.ClusterId) == 16 && len(p.FoundNonce) == 16 {
		st.Cluster, st.FoundNonce = storage.ClusterID(p.ClusterId), metadata.Nonce(p.FoundNonce)
	} else if len(p.ClusterId) != 0 {
		d.bad = true
	}
	for _, v := range p.Vnodes {
		r := Vnode{ID: v.Id, Confirmed: v.Confirmed}
		for _, a := range v.Arcs {
			r.Arcs = append(r.Arcs, metadata.Arc{First: a.First, Last: a.Last})
		}
		for _, b := range v.Members {
			r.Members = append(r.Members, storage.BrokerID(b))
		}
		st.Ring.Vnodes = append(st.Ring.Vnodes, r)
	}
	for i, b := range p.Brokers {
		if i > 0 && p.Brokers[i-1].Id >= b.Id {
			d.bad = true
			break
		}
		st.Brokers = append(st.Brokers, d.broker(b))
	}
	for i, id := range p.Removed {
		d.bad = d.bad || i > 0 && p.Removed[i-1] >= id
		st.Removed = append(st.Removed, storage.BrokerID(id))
	}
	switch {
	case p.Policy != nil:
		st.Policy = d.policy(p.Policy)
	case st.Founded():
		st.Policy = foundingPolicy(1)
	}
	if d.bad {
		return nil, 0, fmt.Errorf("malformed: %w", storage.ErrCorrupt)
	}
	return st, level, nil
}
