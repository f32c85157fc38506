package metadata

import (
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/storage"
)

// commandLevel is the level that introduced the commands of this build. A command that comes later gets its own.
const commandLevel storage.Level = 1

var deterministic = proto.MarshalOptions{Deterministic: true}

// Encode makes the bytes of a log entry. storage.ErrTooLarge beyond MaxCommandBytes.
func Encode(cmd Command) ([]byte, error) {
	p := &intrav1.MetadataCommand{Level: uint32(commandLevel)}
	switch c := cmd.(type) {
	case *InitVnode:
		p.Body = &intrav1.MetadataCommand_InitVnode{InitVnode: &intrav1.InitVnode{
			Vnode: c.Vnode, RingVersion: c.RingVersion, Arcs: arcsToProto(c.Arcs), ClusterId: c.Cluster[:]}}
	case *CreateTopic:
		p.Body = &intrav1.MetadataCommand_CreateTopic{CreateTopic: &intrav1.CreateTopic{
			Nonce: c.Nonce[:], Uid: c.UID[:], Name: c.Name, InitialRanges: uint32(c.InitialRanges),
			Labels: labelsToProto(c.Labels), DeletionProtection: c.DeletionProtection, Time: int64(c.Time)}}
	case *UpdateTopic:
		u := &intrav1.UpdateTopic{Name: c.Name, Uid: c.UID[:], Nonce: c.Nonce[:], ExpectVersion: c.ExpectVersion,
			DeletionProtection: c.DeletionProtection}
		if c.Labels != nil {
			u.SetLabels, u.Labels = true, labelsToProto(*c.Labels)
		}
		p.Body = &intrav1.MetadataCommand_UpdateTopic{UpdateTopic: u}
	case *DeleteTopic:
		p.Body = &intrav1.MetadataCommand_DeleteTopic{DeleteTopic: &intrav1.DeleteTopic{Name: c.Name, Uid: optionalUID(c.UID),
			Nonce: c.Nonce[:], ExpectVersion: c.ExpectVersion, Time: int64(c.Time)}}
	case *ForgetTopic:
		p.Body = &intrav1.MetadataCommand_ForgetTopic{ForgetTopic: &intrav1.ForgetTopic{Name: c.Name, Uid: c.UID[:]}}
	case *OpenSegment:
		p.Body = &intrav1.MetadataCommand_OpenSegment{OpenSegment: openToProto(c)}
	case *SealSegment:
		p.Body = &intrav1.MetadataCommand_SealSegment{SealSegment: sealToProto(c)}
	case *UpdateReplicas:
		p.Body = &intrav1.MetadataCommand_UpdateReplicas{UpdateReplicas: &intrav1.UpdateReplicas{TopicName: c.TopicName,
			TopicUid: c.Topic[:], Segment: &intrav1.SegmentKey{Range: rangeKey(c.Segment.Range), Seq: c.Segment.Seq},
			ExpectVersion: c.ExpectVersion, Change: intrav1.ReplicaChange(c.Change), Broker: uint64(c.Broker), Boot: uint64(c.Boot),
			Gone: c.Gone}}
	case *ResolveSegment:
		p.Body = &intrav1.MetadataCommand_ResolveSegment{ResolveSegment: &intrav1.ResolveSegment{TopicName: c.TopicName,
			TopicUid: c.Topic[:], Segment: &intrav1.SegmentKey{Range: rangeKey(c.Segment.Range), Seq: c.Segment.Seq},
			ExpectVersion: c.ExpectVersion, Nonce: c.Nonce[:], LostFrom: uint64(c.LostFrom), DataBytes: c.DataBytes,
			Digest: uint64(c.Digest), Time: int64(c.Time)}}
	default:
		panic(fmt.Sprintf("metadata: no encoding of %T", cmd))
	}
	b, err := deterministic.Marshal(p)
	if err != nil {
		return nil, fmt.Errorf("encode %T: %w: %w", cmd, storage.ErrInvalid, err)
	}
	if len(b) > MaxCommandBytes {
		return nil, fmt.Errorf("encode %T: %d bytes, at most %d: %w", cmd, len(b), MaxCommandBytes, storage.ErrTooLarge)
	}
	return b, nil
}

func openToProto(c *OpenSegment) *intrav1.OpenSegment {
	return &intrav1.OpenSegment{TopicName: c.TopicName, TopicUid: c.Topic[:], Range: rangeKey(c.Range), Seq: c.Seq,
		Base: uint64(c.Base), Nonce: c.Nonce[:], Replicas: brokersToProto(c.Replicas), Quorum: uint32(c.Quorum),
		ReplicationFactor: uint32(c.ReplicationFactor), PrimaryBoot: uint64(c.PrimaryBoot), Header: c.Header, Time: int64(c.Time)}
}

func sealToProto(c *SealSegment) *intrav1.SealSegment {
	p := &intrav1.SealSegment{TopicName: c.TopicName, TopicUid: c.Topic[:],
		Segment: &intrav1.SegmentKey{Range: rangeKey(c.Segment.Range), Seq: c.Segment.Seq}, Nonce: c.Nonce[:], End: uint64(c.End),
		DataBytes: c.DataBytes, Digest: uint64(c.Digest), ProducerTableDigest: uint64(c.ProducerTableDigest),
		ProducerTableBytes: c.ProducerTableBytes, Votes: brokersToProto(c.Votes), Time: int64(c.Time),
		Reason: intrav1.SealReason(c.Reason), Gone: brokersToProto(c.Gone)}
	if c.Next != nil {
		p.Next = openToProto(c.Next)
	}
	return p
}

// decode reads a log entry. A level above ours or a command that we do not know is storage.ErrNewerFormat; bytes that are no
// command at all are storage.ErrCorrupt. A known command whose ids are malformed decodes to a nil Command: every replica refuses it
// alike.
func decode(entry []byte, understood storage.Level) (Command, storage.Level, error) {
	var p intrav1.MetadataCommand
	if err := proto.Unmarshal(entry, &p); err != nil {
		return nil, 0, fmt.Errorf("decode metadata command: %w: %w", storage.ErrCorrupt, err)
	}
	level := storage.Level(p.Level)
	if level > understood {
		return nil, level, fmt.Errorf("metadata command of level %d, this process understands %d: %w", level, understood,
			storage.ErrNewerFormat)
	}
	d := decoder{}
	var cmd Command
	switch b := p.Body.(type) {
	case *intrav1.MetadataCommand_InitVnode:
		c := b.InitVnode
		cmd = &InitVnode{Cluster: storage.ClusterID(d.id(c.ClusterId)), Vnode: c.Vnode, RingVersion: c.RingVersion,
			Arcs: arcsFromProto(c.Arcs)}
	case *intrav1.MetadataCommand_CreateTopic:
		c := b.CreateTopic
		cmd = &CreateTopic{Nonce: Nonce(d.id(c.Nonce)), UID: storage.TopicUID(d.id(c.Uid)), Name: c.Name,
			InitialRanges: int(c.InitialRanges), Labels: d.labels(c.Labels), DeletionProtection: c.DeletionProtection,
			Time: storage.Time(c.Time)}
	case *intrav1.MetadataCommand_UpdateTopic:
		c := b.UpdateTopic
		u := &UpdateTopic{Name: c.Name, UID: storage.TopicUID(d.id(c.Uid)), Nonce: Nonce(d.id(c.Nonce)), ExpectVersion: c.ExpectVersion,
			DeletionProtection: c.DeletionProtection}
		if c.SetLabels {
			labels := d.labels(c.Labels)
			u.Labels = &labels
		}
		cmd = u
	case *intrav1.MetadataCommand_DeleteTopic:
		c := b.DeleteTopic
		cmd = &DeleteTopic{Name: c.Name, UID: d.optionalUID(c.Uid), Nonce: Nonce(d.id(c.Nonce)), ExpectVersion: c.ExpectVersion,
			Time: storage.Time(c.Time)}
	case *intrav1.MetadataCommand_ForgetTopic:
		cmd = &ForgetTopic{Name: b.ForgetTopic.Name, UID: storage.TopicUID(d.id(b.ForgetTopic.Uid))}
	case *intrav1.MetadataCommand_OpenSegment:
		cmd = d.open(b.OpenSegment)
	case *intrav1.MetadataCommand_SealSegment:
		cmd = d.seal(b.SealSegment)
	case *intrav1.MetadataCommand_UpdateReplicas:
		cmd = d.updateReplicas(b.UpdateReplicas)
	case *intrav1.MetadataCommand_ResolveSegment:
		c := b.ResolveSegment
		cmd = &ResolveSegment{TopicName: c.TopicName, Topic: storage.TopicUID(d.id(c.TopicUid)), Segment: d.segmentID(c.Segment),
			ExpectVersion: c.ExpectVersion, Nonce: Nonce(d.id(c.Nonce)), LostFrom: storage.Offset(c.LostFrom), DataBytes: c.DataBytes,
			Digest: storage.Digest(c.Digest), Time: storage.Time(c.Time)}
	default:
		return nil, level, fmt.Errorf("metadata command of level %d that this process does not know: %w", level, storage.ErrNewerFormat)
	}
	if d.bad {
		return nil, level, nil
	}
	return cmd, level, nil
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

func (d *decoder) optionalUID(b []byte) storage.TopicUID {
	if len(b) == 0 {
		return storage.TopicUID{}
	}
	return storage.TopicUID(d.id(b))
}

func (d *decoder) rangeID(k *intrav1.RangeKey) storage.RangeID {
	if k == nil {
		d.bad = true
		return storage.RangeID{}
	}
	return storage.RangeID{Topic: storage.TopicUID(d.id(k.Topic)), Timeline: storage.Timeline(k.Timeline), Seq: k.Seq}
}

func (d *decoder) labels(ls []*intrav1.Label) map[string]string {
	out := make(map[string]string, min(len(ls), MaxLabels))
	for i, l := range ls {
		if i > 0 && ls[i-1].GetKey() >= l.GetKey() {
			d.bad = true
		}
		out[l.GetKey()] = l.GetValue()
	}
	return out
}

func (d *decoder) open(c *intrav1.OpenSegment) *OpenSegment {
	return &OpenSegment{TopicName: c.TopicName, Topic: storage.TopicUID(d.id(c.TopicUid)), Range: d.rangeID(c.Range), Seq: c.Seq,
		Base: storage.Offset(c.Base), Nonce: Nonce(d.id(c.Nonce)), Replicas: brokersFromProto(c.Replicas), Quorum: int(c.Quorum),
		ReplicationFactor: int(c.ReplicationFactor), PrimaryBoot: storage.Boot(c.PrimaryBoot), Header: c.Header,
		Time: storage.Time(c.Time)}
}

func (d *decoder) segmentID(k *intrav1.SegmentKey) storage.SegmentID {
	return storage.SegmentID{Range: d.rangeID(k.GetRange()), Seq: k.GetSeq()}
}

func (d *decoder) updateReplicas(c *intrav1.UpdateReplicas) *UpdateReplicas {
	if c.Change < 0 || c.Change > 255 {
		d.bad = true
	}
	return &UpdateReplicas{TopicName: c.TopicName, Topic: storage.TopicUID(d.id(c.TopicUid)), Segment: d.segmentID(c.Segment),
		ExpectVersion: c.ExpectVersion, Change: ReplicaChange(c.Change), Broker: storage.BrokerID(c.Broker), Boot: storage.Boot(c.Boot),
		Gone: c.Gone}
}

func (d *decoder) seal(c *intrav1.SealSegment) *SealSegment {
	s := &SealSegment{TopicName: c.TopicName, Topic: storage.TopicUID(d.id(c.TopicUid)),
		Segment: storage.SegmentID{Range: d.rangeID(c.Segment.GetRange()), Seq: c.Segment.GetSeq()}, Nonce: Nonce(d.id(c.Nonce)),
		End: storage.End(c.End), DataBytes: c.DataBytes, Digest: storage.Digest(c.Digest),
		ProducerTableDigest: storage.Digest(c.ProducerTableDigest), ProducerTableBytes: c.ProducerTableBytes,
		Votes: brokersFromProto(c.Votes), Time: storage.Time(c.Time), Reason: SealReason(c.Reason)}
	if len(c.Gone) > 0 {
		s.Gone = brokersFromProto(c.Gone)
	}
	if c.Reason < 0 || c.Reason > 255 {
		d.bad = true
	}
	if c.Next != nil {
		s.Next = d.open(c.Next)
	}
	return s
}

// encode makes the bytes of a Raft result.
func (r Result) encode() []byte {
	b, err := deterministic.Marshal(&intrav1.MetadataResult{Outcome: intrav1.Outcome(r.Outcome), Already: r.Already,
		Uid: optionalUID(r.UID), MetaVersion: r.MetaVersion, Segment: segmentToProto(r.Segment), Next: segmentToProto(r.Next),
		Detail: r.Detail, RingVersion: r.RingVersion})
	if err != nil {
		panic(fmt.Sprintf("metadata: encode result: %v", err)) // text in it is validated UTF-8
	}
	return b
}

// Encode makes the bytes in which a replica answers.
func (r Result) Encode() []byte { return r.encode() }

// DecodeResult reads what Result.Encode wrote, for a command on range rng (zero if the command names none).
func DecodeResult(b []byte, rng storage.RangeID) (Result, error) {
	var p intrav1.MetadataResult
	if err := proto.Unmarshal(b, &p); err != nil {
		return Result{}, fmt.Errorf("decode metadata result: %w: %w", storage.ErrCorrupt, err)
	}
	d := decoder{}
	r := Result{Outcome: Outcome(p.Outcome), Already: p.Already, UID: d.optionalUID(p.Uid), MetaVersion: p.MetaVersion,
		Segment: d.segment(p.Segment, rng), Next: d.segment(p.Next, rng), Detail: p.Detail, RingVersion: p.RingVersion}
	if d.bad || p.Outcome == 0 {
		return Result{}, fmt.Errorf("decode metadata result: %w", storage.ErrCorrupt)
	}
	return r, nil
}

func segmentToProto(s *Segment) *intrav1.SegmentRecord {
	if s == nil {
		return nil
	}
	p := &intrav1.SegmentRecord{Seq: s.ID.Seq, State: intrav1.SegmentState(s.State), Base: uint64(s.Base),
		Replicas: brokersToProto(s.Replicas), Quorum: uint32(s.Quorum), ReplicationFactor: uint32(s.ReplicationFactor),
		PrimaryBoot: uint64(s.PrimaryBoot), OpenNonce: s.OpenNonce[:], Header: s.Header, CreateTime: int64(s.CreateTime)}
	if s.State != SegmentOpen {
		p.End, p.DataBytes, p.Digest, p.SealTime = uint64(s.End), s.DataBytes, uint64(s.Digest), int64(s.SealTime)
		p.SealReason = intrav1.SealReason(s.SealReason)
		p.ProducerTableDigest, p.ProducerTableBytes = uint64(s.ProducerTableDigest), s.ProducerTableBytes
		p.SealNonce = s.SealNonce[:]
		p.Incoming, p.ReplicaVersion = brokersToProto(s.Incoming), s.ReplicaVersion
		if l := s.Loss; l != nil {
			p.Loss = &intrav1.LossRecord{LostFrom: uint64(l.From), DataBytes: l.DataBytes, Digest: uint64(l.Digest), Time: int64(l.Time),
				Nonce: l.Nonce[:]}
		}
	}
	return p
}

func (d *decoder) segment(p *intrav1.SegmentRecord, rng storage.RangeID) *Segment {
	if p == nil {
		return nil
	}
	s := &Segment{ID: storage.SegmentID{Range: rng, Seq: p.Seq}, State: SegmentState(p.State), Base: storage.Offset(p.Base),
		Replicas: brokersFromProto(p.Replicas), Quorum: int(p.Quorum), ReplicationFactor: int(p.ReplicationFactor),
		PrimaryBoot: storage.Boot(p.PrimaryBoot), OpenNonce: Nonce(d.id(p.OpenNonce)), CreateTime: storage.Time(p.CreateTime)}
	if s.State < SegmentOpen || s.State > SegmentAbandoned || len(s.Replicas) == 0 || len(s.Replicas) > MaxReplicas {
		d.bad = true
	}
	if s.State == SegmentOpen {
		s.Header = p.Header
		return s
	}
	s.End, s.DataBytes, s.Digest, s.SealTime = storage.End(p.End), p.DataBytes, storage.Digest(p.Digest), storage.Time(p.SealTime)
	s.SealReason = SealReason(p.SealReason)
	s.ProducerTableDigest, s.ProducerTableBytes = storage.Digest(p.ProducerTableDigest), p.ProducerTableBytes
	s.SealNonce = Nonce(d.id(p.SealNonce))
	s.ReplicaVersion = p.ReplicaVersion
	if len(p.Incoming) > 0 {
		s.Incoming = brokersFromProto(p.Incoming)
	}
	if len(s.Incoming)+len(s.Replicas) > MaxReplicas {
		d.bad = true
	}
	if l := p.Loss; l != nil {
		s.Loss = &Loss{From: storage.Offset(l.LostFrom), DataBytes: l.DataBytes, Digest: storage.Digest(l.Digest),
			Time: storage.Time(l.Time), Nonce: Nonce(d.id(l.Nonce))}
	}
	return s
}

func rangeKey(id storage.RangeID) *intrav1.RangeKey {
	return &intrav1.RangeKey{Topic: id.Topic[:], Timeline: uint64(id.Timeline), Seq: id.Seq}
}

func optionalUID(u storage.TopicUID) []byte {
	if u.IsZero() {
		return nil
	}
	return u[:]
}

func labelsToProto(m map[string]string) []*intrav1.Label {
	out := make([]*intrav1.Label, 0, len(m))
	for k, v := range m {
		out = append(out, &intrav1.Label{Key: k, Value: v})
	}
	slices.SortFunc(out, func(a, b *intrav1.Label) int {
		switch {
		case a.Key < b.Key:
			return -1
		case a.Key > b.Key:
			return 1
		}
		return 0
	})
	return out
}

func arcsToProto(arcs []Arc) []*intrav1.HashArc {
	out := make([]*intrav1.HashArc, len(arcs))
	for i, a := range arcs {
		out[i] = &intrav1.HashArc{First: a.First, Last: a.Last}
	}
	return out
}

func arcsFromProto(arcs []*intrav1.HashArc) []Arc {
	out := make([]Arc, len(arcs))
	for i, a := range arcs {
		out[i] = Arc{First: a.GetFirst(), Last: a.GetLast()}
	}
	return out
}

func brokersToProto(ids []storage.BrokerID) []uint64 {
	out := make([]uint64, len(ids))
	for i, id := range ids {
		out[i] = uint64(id)
	}
	return out
}

func brokersFromProto(ids []uint64) []storage.BrokerID {
	out := make([]storage.BrokerID, len(ids))
	for i, id := range ids {
		out[i] = storage.BrokerID(id)
	}
	return out
}
