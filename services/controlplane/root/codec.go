package root

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/storage"
)

// commandLevel is the level that introduced the commands of this build.
const commandLevel storage.Level = 1

// maxSnapshot bounds what Restore reads: every vnode and broker at its bounds, several times over.
const maxSnapshot = 256 << 20

var deterministic = proto.MarshalOptions{Deterministic: true}

// Encode makes the bytes of a log entry. storage.ErrInvalid if a text in it is not UTF-8.
func Encode(cmd Command) ([]byte, error) {
	p := &intrav1.RootCommand{Level: uint32(commandLevel)}
	switch c := cmd.(type) {
	case *Found:
		p.Body = &intrav1.RootCommand_Found{Found: &intrav1.Found{ClusterId: c.Cluster[:], Vnodes: uint32(c.Vnodes),
			Broker: uint64(c.Broker), ClusterLevel: uint32(c.Level), Nonce: c.Nonce[:]}}
	case *ConfirmVnode:
		p.Body = &intrav1.RootCommand_ConfirmVnode{ConfirmVnode: &intrav1.ConfirmVnode{Vnode: c.Vnode}}
	case *RegisterBroker:
		p.Body = &intrav1.RootCommand_RegisterBroker{RegisterBroker: &intrav1.RegisterBroker{Id: uint64(c.ID), Boot: uint64(c.Boot),
			JournalGroup: c.JournalGroup, Nonce: c.Nonce[:], Addresses: addressesToProto(c.Addresses),
			AdvertisedLevel: uint32(c.AdvertisedLevel)}}
	case *RefreshBroker:
		p.Body = &intrav1.RootCommand_RefreshBroker{RefreshBroker: &intrav1.RefreshBroker{Id: uint64(c.ID), Boot: uint64(c.Boot),
			JournalGroup: c.JournalGroup}}
	case *SetLevel:
		p.Body = &intrav1.RootCommand_SetLevel{SetLevel: &intrav1.SetLevel{Expect: uint32(c.Expect), To: uint32(c.To)}}
	default:
		panic(fmt.Sprintf("root: no encoding of %T", cmd))
	}
	b, err := deterministic.Marshal(p)
	if err != nil {
		return nil, fmt.Errorf("encode %T: %w: %w", cmd, storage.ErrInvalid, err)
	}
	return b, nil
}

// decode reads a log entry; see the decode of package metadata.
func decode(entry []byte, understood storage.Level) (Command, storage.Level, error) {
	var p intrav1.RootCommand
	if err := proto.Unmarshal(entry, &p); err != nil {
		return nil, 0, fmt.Errorf("decode root command: %w: %w", storage.ErrCorrupt, err)
	}
	level := storage.Level(p.Level)
	if level > understood {
		return nil, level, fmt.Errorf("root command of level %d, this process understands %d: %w", level, understood,
			storage.ErrNewerFormat)
	}
	bad := false
	id := func(b []byte) [16]byte {
		if len(b) != 16 {
			bad = true
			return [16]byte{}
		}
		return [16]byte(b)
	}
	var cmd Command
	switch b := p.Body.(type) {
	case *intrav1.RootCommand_Found:
		c := b.Found
		cmd = &Found{Cluster: storage.ClusterID(id(c.ClusterId)), Vnodes: int(c.Vnodes), Broker: storage.BrokerID(c.Broker),
			Level: storage.Level(c.ClusterLevel), Nonce: metadata.Nonce(id(c.Nonce))}
	case *intrav1.RootCommand_ConfirmVnode:
		cmd = &ConfirmVnode{Vnode: b.ConfirmVnode.Vnode}
	case *intrav1.RootCommand_RegisterBroker:
		c := b.RegisterBroker
		cmd = &RegisterBroker{ID: storage.BrokerID(c.Id), Boot: storage.Boot(c.Boot), JournalGroup: c.JournalGroup,
			Nonce: metadata.Nonce(id(c.Nonce)), Addresses: addressesFromProto(c.Addresses, &bad),
			AdvertisedLevel: storage.Level(c.AdvertisedLevel)}
	case *intrav1.RootCommand_RefreshBroker:
		c := b.RefreshBroker
		cmd = &RefreshBroker{ID: storage.BrokerID(c.Id), Boot: storage.Boot(c.Boot), JournalGroup: c.JournalGroup}
	case *intrav1.RootCommand_SetLevel:
		cmd = &SetLevel{Expect: storage.Level(b.SetLevel.Expect), To: storage.Level(b.SetLevel.To)}
	default:
		return nil, level, fmt.Errorf("root command of level %d that this process does not know: %w", level, storage.ErrNewerFormat)
	}
	if bad {
		return nil, level, nil
	}
	return cmd, level, nil
}

// Encode makes the bytes in which a replica answers.
func (r Result) Encode() []byte {
	b, err := deterministic.Marshal(&intrav1.RootResult{Outcome: intrav1.RootOutcome(r.Outcome), Already: r.Already, Detail: r.Detail})
	if err != nil {
		panic(fmt.Sprintf("root: encode result: %v", err)) // its text is ours
	}
	return b
}

// DecodeResult reads what Result.Encode wrote.
func DecodeResult(b []byte) (Result, error) {
	var p intrav1.RootResult
	if err := proto.Unmarshal(b, &p); err != nil || p.Outcome == 0 {
		return Result{}, fmt.Errorf("decode root result: %w", storage.ErrCorrupt)
	}
	return Result{Outcome: Outcome(p.Outcome), Already: p.Already, Detail: p.Detail}, nil
}

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
			Nonce: b.Nonce[:], Addresses: addressesToProto(b.Addresses), AdvertisedLevel: uint32(b.AdvertisedLevel)})
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
	bad := level == 0 || p.ClusterLevel > p.Level || len(p.Vnodes) > MaxVnodes || len(p.Brokers) > MaxBrokers
	st := &State{Level: storage.Level(p.ClusterLevel), Ring: Ring{Version: p.RingVersion}}
	if len(p.ClusterId) == 16 && len(p.FoundNonce) == 16 {
		st.Cluster, st.FoundNonce = storage.ClusterID(p.ClusterId), metadata.Nonce(p.FoundNonce)
	} else if len(p.ClusterId) != 0 {
		bad = true
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
		if len(b.Nonce) != 16 || i > 0 && p.Brokers[i-1].Id >= b.Id {
			bad = true
			break
		}
		st.Brokers = append(st.Brokers, Broker{ID: storage.BrokerID(b.Id), Boot: storage.Boot(b.Boot), JournalGroup: b.JournalGroup,
			Nonce: metadata.Nonce(b.Nonce), Addresses: addressesFromProto(b.Addresses, &bad),
			AdvertisedLevel: storage.Level(b.AdvertisedLevel)})
	}
	if bad {
		return nil, 0, fmt.Errorf("malformed: %w", storage.ErrCorrupt)
	}
	return st, level, nil
}

func addressesToProto(m map[string]string) []*intrav1.Address {
	out := make([]*intrav1.Address, 0, len(m))
	for k, v := range m {
		out = append(out, &intrav1.Address{Name: k, Address: v})
	}
	slices.SortFunc(out, func(a, b *intrav1.Address) int { return strings.Compare(a.Name, b.Name) })
	return out
}

func addressesFromProto(as []*intrav1.Address, bad *bool) map[string]string {
	if len(as) == 0 {
		return nil
	}
	out := make(map[string]string, min(len(as), MaxAddresses))
	for i, a := range as {
		if i > 0 && as[i-1].GetName() >= a.GetName() {
			*bad = true
		}
		out[a.GetName()] = a.GetAddress()
	}
	return out
}
