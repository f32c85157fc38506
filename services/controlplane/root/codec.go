package root

import (
	"fmt"

	"google.golang.org/protobuf/proto"

	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/storage"
)

// commandLevel is the level that introduced the commands of this build.
const commandLevel storage.Level = 1

var deterministic = proto.MarshalOptions{Deterministic: true}

// Encode makes the bytes of a log entry. storage.ErrInvalid if a text in it is not UTF-8.
func Encode(cmd Command) ([]byte, error) {
	p := &intrav1.RootCommand{Level: uint32(commandLevel)}
	switch c := cmd.(type) {
	case *Found:
		p.Body = &intrav1.RootCommand_Found{Found: &intrav1.Found{ClusterId: c.Cluster[:], Vnodes: uint32(c.Vnodes),
			Broker: uint64(c.Broker), ClusterLevel: uint32(c.Level), Nonce: c.Nonce[:], Brokers: uint32(c.Brokers)}}
	case *ConfirmVnode:
		p.Body = &intrav1.RootCommand_ConfirmVnode{ConfirmVnode: &intrav1.ConfirmVnode{Vnode: c.Vnode}}
	case *RegisterBroker:
		p.Body = &intrav1.RootCommand_RegisterBroker{RegisterBroker: &intrav1.RegisterBroker{Id: uint64(c.ID), Boot: uint64(c.Boot),
			JournalGroup: c.JournalGroup, Nonce: c.Nonce[:], Addresses: addressesToProto(c.Addresses),
			AdvertisedLevel: uint32(c.AdvertisedLevel), Attributes: attributesToProto(c.Attributes), Time: int64(c.Time)}}
	case *RefreshBroker:
		p.Body = &intrav1.RootCommand_RefreshBroker{RefreshBroker: &intrav1.RefreshBroker{Id: uint64(c.ID), Boot: uint64(c.Boot),
			JournalGroup: c.JournalGroup}}
	case *SetLevel:
		p.Body = &intrav1.RootCommand_SetLevel{SetLevel: &intrav1.SetLevel{Expect: uint32(c.Expect), To: uint32(c.To)}}
	case *AdmitBroker:
		p.Body = &intrav1.RootCommand_AdmitBroker{AdmitBroker: &intrav1.AdmitBroker{Id: uint64(c.ID), Nonce: c.Nonce[:],
			Addresses: addressesToProto(c.Addresses), Attributes: attributesToProto(c.Attributes),
			AdvertisedLevel: uint32(c.AdvertisedLevel), Time: int64(c.Time)}}
	case *SetBrokerState:
		p.Body = &intrav1.RootCommand_SetBrokerState{SetBrokerState: &intrav1.SetBrokerState{Id: uint64(c.ID),
			ExpectVersion: c.ExpectVersion, To: intrav1.BrokerState(c.To), Nonce: c.Nonce[:]}}
	case *RemoveBroker:
		p.Body = &intrav1.RootCommand_RemoveBroker{RemoveBroker: &intrav1.RemoveBroker{Id: uint64(c.ID)}}
	case *BrokerReady:
		p.Body = &intrav1.RootCommand_BrokerReady{BrokerReady: &intrav1.BrokerReady{Id: uint64(c.ID), Boot: uint64(c.Boot),
			Generation: c.Generation}}
	case *RetireReplicas:
		p.Body = &intrav1.RootCommand_RetireReplicas{RetireReplicas: &intrav1.RetireReplicas{Id: uint64(c.ID),
			ExpectGeneration: c.ExpectGeneration}}
	case *UpdatePolicy:
		p.Body = &intrav1.RootCommand_UpdatePolicy{UpdatePolicy: policyUpdateToProto(c)}
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
	d := decoder{}
	var cmd Command
	switch b := p.Body.(type) {
	case *intrav1.RootCommand_Found:
		c := b.Found
		cmd = &Found{Cluster: storage.ClusterID(d.id(c.ClusterId)), Vnodes: int(c.Vnodes), Broker: storage.BrokerID(c.Broker),
			Level: storage.Level(c.ClusterLevel), Nonce: metadata.Nonce(d.id(c.Nonce)), Brokers: int(c.Brokers)}
	case *intrav1.RootCommand_ConfirmVnode:
		cmd = &ConfirmVnode{Vnode: b.ConfirmVnode.Vnode}
	case *intrav1.RootCommand_RegisterBroker:
		c := b.RegisterBroker
		cmd = &RegisterBroker{ID: storage.BrokerID(c.Id), Boot: storage.Boot(c.Boot), JournalGroup: c.JournalGroup,
			Nonce: metadata.Nonce(d.id(c.Nonce)), Addresses: d.addresses(c.Addresses),
			AdvertisedLevel: storage.Level(c.AdvertisedLevel), Attributes: d.attributes(c.Attributes), Time: storage.Time(c.Time)}
	case *intrav1.RootCommand_RefreshBroker:
		c := b.RefreshBroker
		cmd = &RefreshBroker{ID: storage.BrokerID(c.Id), Boot: storage.Boot(c.Boot), JournalGroup: c.JournalGroup}
	case *intrav1.RootCommand_SetLevel:
		cmd = &SetLevel{Expect: storage.Level(b.SetLevel.Expect), To: storage.Level(b.SetLevel.To)}
	case *intrav1.RootCommand_AdmitBroker:
		c := b.AdmitBroker
		cmd = &AdmitBroker{ID: storage.BrokerID(c.Id), Nonce: metadata.Nonce(d.id(c.Nonce)), Addresses: d.addresses(c.Addresses),
			Attributes: d.attributes(c.Attributes), AdvertisedLevel: storage.Level(c.AdvertisedLevel), Time: storage.Time(c.Time)}
	case *intrav1.RootCommand_SetBrokerState:
		c := b.SetBrokerState
		cmd = &SetBrokerState{ID: storage.BrokerID(c.Id), ExpectVersion: c.ExpectVersion, To: d.brokerState(c.To),
			Nonce: metadata.Nonce(d.id(c.Nonce))}
	case *intrav1.RootCommand_RemoveBroker:
		cmd = &RemoveBroker{ID: storage.BrokerID(b.RemoveBroker.Id)}
	case *intrav1.RootCommand_BrokerReady:
		cmd = &BrokerReady{ID: storage.BrokerID(b.BrokerReady.Id), Boot: storage.Boot(b.BrokerReady.Boot), Generation: b.BrokerReady.Generation}
	case *intrav1.RootCommand_RetireReplicas:
		cmd = &RetireReplicas{ID: storage.BrokerID(b.RetireReplicas.Id), ExpectGeneration: b.RetireReplicas.ExpectGeneration}
	case *intrav1.RootCommand_UpdatePolicy:
		cmd = d.policyUpdate(b.UpdatePolicy)
	default:
		return nil, level, fmt.Errorf("root command of level %d that this process does not know: %w", level, storage.ErrNewerFormat)
	}
	if d.bad {
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
