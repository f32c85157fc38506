package metadata

import (
	"slices"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	"github.com/malachilog/malachi/storage"
)

// updateReplicas changes who holds copies of a sealed segment. A broker whose copy is not on record, neither as a replica nor as
// incoming, is told by that record that its files may go.
func (s *state) updateReplicas(c *UpdateReplicas) Result {
	t, r, seg, refused := s.closedSegment(c.TopicName, c.Topic, c.Segment)
	if seg == nil {
		return refused
	}
	res := Result{UID: t.UID, MetaVersion: t.MetaVersion, Segment: seg}
	no := func(o Outcome, detail string) Result {
		res.Outcome, res.Detail = o, detail
		return res
	}
	if c.Broker == 0 || c.Change < ReplicaIncoming || c.Change > ReplicaDrop || c.Change == ReplicaConfirm && c.Boot == 0 {
		return no(OutcomeInvalid, "malformed change of replicas")
	}
	holds, comes := slices.Contains(seg.Replicas, c.Broker), slices.Contains(seg.Incoming, c.Broker)
	if seg.ReplicaVersion == c.ExpectVersion+1 && (c.Change == ReplicaIncoming && comes || c.Change == ReplicaConfirm && holds ||
		c.Change == ReplicaDrop && !holds && !comes) {
		res.Outcome, res.Already = OutcomeOK, true
		return res
	}
	if seg.ReplicaVersion != c.ExpectVersion && !mutate.On("metadata.any-replica-version") {
		return no(OutcomeConflict, "the replicas have changed since")
	}
	next := *seg
	without := func(list []storage.BrokerID) []storage.BrokerID {
		return slices.DeleteFunc(slices.Clone(list), func(b storage.BrokerID) bool { return b == c.Broker })
	}
	switch c.Change {
	case ReplicaIncoming:
		if holds || comes {
			return no(OutcomeConflict, "the broker holds a copy, or is to get one")
		}
		if len(seg.Replicas)+len(seg.Incoming) >= MaxReplicas {
			return no(OutcomeLimit, "a segment has at most 16 copies, incoming ones included")
		}
		next.Incoming = append(slices.Clone(seg.Incoming), c.Broker)
	case ReplicaConfirm:
		if !comes {
			return no(OutcomeConflict, "no copy is to come to the broker")
		}
		next.Incoming, next.Replicas = without(seg.Incoming), append(slices.Clone(seg.Replicas), c.Broker)
	case ReplicaDrop:
		if !holds && !comes {
			return no(OutcomeConflict, "the broker holds no copy")
		}
		stay := seg.ReplicationFactor
		if c.Gone {
			stay = 1
		}
		if holds && len(seg.Replicas)-1 < stay && !mutate.On("metadata.drop-too-many") {
			return no(OutcomeConflict, "too few copies would stay")
		}
		next.Incoming, next.Replicas = without(seg.Incoming), without(seg.Replicas)
	}
	if len(next.Incoming) == 0 {
		next.Incoming = nil
	}
	return s.replaceClosed(t, r, &next)
}

func (s *state) resolveSegment(c *ResolveSegment) Result {
	t, r, seg, refused := s.closedSegment(c.TopicName, c.Topic, c.Segment)
	if seg == nil {
		return refused
	}
	res := Result{UID: t.UID, MetaVersion: t.MetaVersion, Segment: seg}
	no := func(o Outcome, detail string) Result {
		res.Outcome, res.Detail = o, detail
		return res
	}
	end, _, _ := seg.Remaining()
	from := storage.EndBefore(c.LostFrom)
	switch {
	case c.Nonce.IsZero():
		return no(OutcomeInvalid, "no nonce")
	case seg.Loss != nil && seg.Loss.Nonce == c.Nonce:
		res.Outcome, res.Already = OutcomeOK, true
		return res
	case seg.ReplicaVersion != c.ExpectVersion:
		return no(OutcomeConflict, "the segment has changed since")
	case c.LostFrom < seg.Base || from >= end:
		return no(OutcomeInvalid, "the loss must begin in the segment, before what is lost already")
	case from > storage.EndBefore(seg.Base) && c.DataBytes == 0:
		return no(OutcomeInvalid, "records without bytes")
	}
	next := *seg
	next.Loss = &Loss{From: c.LostFrom, DataBytes: c.DataBytes, Digest: c.Digest, Time: c.Time, Nonce: c.Nonce}
	return s.replaceClosed(t, r, &next)
}

// closedSegment finds a sealed segment; nil with what to answer if there is none.
func (s *state) closedSegment(name string, uid storage.TopicUID, id storage.SegmentID) (*Topic, *Range, *Segment, Result) {
	t, r, refused := s.rangeOf(name, uid, id.Range)
	if t == nil {
		return nil, nil, nil, refused
	}
	seg := r.Segment(id.Seq)
	switch {
	case seg == nil:
		return nil, nil, nil, Result{Outcome: OutcomeNotFound, UID: t.UID, MetaVersion: t.MetaVersion, Detail: "no such segment"}
	case seg.State != SegmentSealed:
		return nil, nil, nil, Result{Outcome: OutcomeConflict, UID: t.UID, MetaVersion: t.MetaVersion, Segment: seg,
			Detail: "the segment is " + seg.State.String() + ", not sealed"}
	}
	return t, r, seg, Result{}
}

// replaceClosed puts a new version of a closed segment in its place.
func (s *state) replaceClosed(t *Topic, r *Range, seg *Segment) Result {
	seg.ReplicaVersion++
	next := *r
	next.Closed = slices.Clone(r.Closed) // older versions of the range keep theirs
	i, _ := slices.BinarySearchFunc(next.Closed, seg.ID.Seq, func(s *Segment, seq uint32) int { return cmpUint32(s.ID.Seq, seq) })
	next.Closed[i] = seg
	t = t.withRange(&next)
	s.put(t)
	return Result{Outcome: OutcomeOK, UID: t.UID, MetaVersion: t.MetaVersion, Segment: seg}
}
