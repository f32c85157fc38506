package root

import (
	"slices"
	"strings"
	"time"

	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/storage"
)

func addressesToProto(m map[string]string) []*intrav1.Address {
	out := make([]*intrav1.Address, 0, len(m))
	for k, v := range m {
		out = append(out, &intrav1.Address{Name: k, Address: v})
	}
	slices.SortFunc(out, func(a, b *intrav1.Address) int { return strings.Compare(a.Name, b.Name) })
	return out
}

func attributesToProto(m map[string]string) []*intrav1.Label {
	out := make([]*intrav1.Label, 0, len(m))
	for k, v := range m {
		out = append(out, &intrav1.Label{Key: k, Value: v})
	}
	slices.SortFunc(out, func(a, b *intrav1.Label) int { return strings.Compare(a.Key, b.Key) })
	return out
}

// nonceToProto leaves out a nonce that there is none of.
func nonceToProto(n metadata.Nonce, always bool) []byte {
	if n.IsZero() && !always {
		return nil
	}
	return n[:]
}

func policyToProto(p Policy) *intrav1.PolicyRecord {
	out := &intrav1.PolicyRecord{Version: p.Version, ReplicationFactor: uint32(p.ReplicationFactor), MinReplicas: uint32(p.MinReplicas),
		Acks: intrav1.PolicyAcks(p.Acks), SpreadBy: p.SpreadBy, MinDomains: uint32(p.MinDomains),
		Placement: intrav1.PolicyPlacement(p.Placement), SegmentMaxBytes: p.SegmentMaxBytes, SegmentMaxAge: int64(p.SegmentMaxAge)}
	for _, u := range p.updates {
		out.Updates = append(out.Updates, &intrav1.AppliedUpdate{Nonce: u.nonce[:], MetaVersion: u.version})
	}
	return out
}

func policyUpdateToProto(c *UpdatePolicy) *intrav1.UpdatePolicy {
	ch := c.Change
	p := &intrav1.UpdatePolicy{Nonce: c.Nonce[:], ExpectVersion: c.ExpectVersion, ReplicationFactor: optionalUint32(ch.ReplicationFactor),
		MinReplicas: optionalUint32(ch.MinReplicas), SpreadBy: ch.SpreadBy, MinDomains: optionalUint32(ch.MinDomains),
		SegmentMaxBytes: ch.SegmentMaxBytes}
	if ch.Acks != nil {
		p.Acks = intrav1.PolicyAcks(*ch.Acks)
	}
	if ch.Placement != nil {
		p.Placement = intrav1.PolicyPlacement(*ch.Placement)
	}
	if ch.SegmentMaxAge != nil {
		age := int64(*ch.SegmentMaxAge)
		p.SegmentMaxAge = &age
	}
	return p
}

// optionalUint32 clamps what does not fit, which the validation then refuses by its number.
func optionalUint32(n *int) *uint32 {
	if n == nil {
		return nil
	}
	u := uint32(max(0, min(*n, 1<<31-1)))
	if *n < 0 {
		u = 1<<31 - 1
	}
	return &u
}

// decoder notes whether anything was malformed.
type decoder struct{ bad bool }

func (d *decoder) id(b []byte) [16]byte {
	if len(b) != 16 {
		d.bad = true
		return [16]byte{}
	}
	return [16]byte(b)
}

func (d *decoder) optionalNonce(b []byte) metadata.Nonce {
	if len(b) == 0 {
		return metadata.Nonce{}
	}
	return metadata.Nonce(d.id(b))
}

func (d *decoder) brokerState(s intrav1.BrokerState) BrokerState {
	if s < 0 || s > intrav1.BrokerState(BrokerDecommissioning) {
		d.bad = true
		return BrokerActive
	}
	return BrokerState(s)
}

func (d *decoder) addresses(as []*intrav1.Address) map[string]string {
	if len(as) == 0 {
		return nil
	}
	out := make(map[string]string, min(len(as), MaxAddresses))
	for i, a := range as {
		if i > 0 && as[i-1].GetName() >= a.GetName() {
			d.bad = true
		}
		out[a.GetName()] = a.GetAddress()
	}
	return out
}

func (d *decoder) attributes(as []*intrav1.Label) map[string]string {
	if len(as) == 0 {
		return nil
	}
	out := make(map[string]string, min(len(as), MaxAttributes))
	for i, a := range as {
		if i > 0 && as[i-1].GetKey() >= a.GetKey() {
			d.bad = true
		}
		out[a.GetKey()] = a.GetValue()
	}
	return out
}

func (d *decoder) broker(b *intrav1.BrokerRecord) Broker {
	out := Broker{ID: storage.BrokerID(b.Id), Boot: storage.Boot(b.Boot), JournalGroup: b.JournalGroup, Addresses: d.addresses(b.Addresses),
		Attributes: d.attributes(b.Attributes), AdvertisedLevel: storage.Level(b.AdvertisedLevel), State: d.brokerState(b.State),
		StateVersion: b.StateVersion, AdmitTime: storage.Time(b.AdmitTime), RegisterTime: storage.Time(b.RegisterTime),
		Generation: b.Generation, ReadyBoot: storage.Boot(b.ReadyBoot), stateNonce: d.optionalNonce(b.StateNonce),
		admitNonce: d.optionalNonce(b.AdmitNonce)}
	if b.Boot != 0 || len(b.Nonce) > 0 {
		out.Nonce = metadata.Nonce(d.id(b.Nonce))
	}
	if b.Generation > MaxGeneration {
		d.bad = true
	}
	return out
}

func (d *decoder) policy(p *intrav1.PolicyRecord) Policy {
	out := Policy{Version: p.Version, ReplicationFactor: int(p.ReplicationFactor), MinReplicas: int(p.MinReplicas),
		Acks: d.acks(p.Acks), SpreadBy: p.SpreadBy, MinDomains: int(p.MinDomains), Placement: d.placement(p.Placement),
		SegmentMaxBytes: p.SegmentMaxBytes, SegmentMaxAge: time.Duration(p.SegmentMaxAge)}
	for _, u := range p.Updates {
		out.updates = append(out.updates, policyUpdate{metadata.Nonce(d.id(u.Nonce)), u.MetaVersion})
	}
	if out.Version == 0 || len(out.updates) > rememberedUpdates || len(out.Faults()) > 0 {
		d.bad = true
	}
	return out
}

func (d *decoder) acks(a intrav1.PolicyAcks) Acks {
	if a < 0 || a > intrav1.PolicyAcks(AcksAll) {
		d.bad = true
		return 0
	}
	return Acks(a)
}

func (d *decoder) placement(p intrav1.PolicyPlacement) Placement {
	if p < 0 || p > intrav1.PolicyPlacement(PlacementHard) {
		d.bad = true
		return 0
	}
	return Placement(p)
}

func (d *decoder) policyUpdate(p *intrav1.UpdatePolicy) *UpdatePolicy {
	c := &UpdatePolicy{Nonce: metadata.Nonce(d.id(p.Nonce)), ExpectVersion: p.ExpectVersion, Change: PolicyChange{
		ReplicationFactor: optionalInt(p.ReplicationFactor), MinReplicas: optionalInt(p.MinReplicas), SpreadBy: p.SpreadBy,
		MinDomains: optionalInt(p.MinDomains), SegmentMaxBytes: p.SegmentMaxBytes}}
	if a := d.acks(p.Acks); a != 0 {
		c.Change.Acks = &a
	}
	if pl := d.placement(p.Placement); pl != 0 {
		c.Change.Placement = &pl
	}
	if p.SegmentMaxAge != nil {
		age := time.Duration(*p.SegmentMaxAge)
		c.Change.SegmentMaxAge = &age
	}
	return c
}

func optionalInt(u *uint32) *int {
	if u == nil {
		return nil
	}
	n := int(*u)
	return &n
}
