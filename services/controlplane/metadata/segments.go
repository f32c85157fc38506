package metadata

import (
	"slices"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	"github.com/malachilog/malachi/storage"
)

// rangeOf finds the topic and range that a segment command names. A range of another topic than the one named is refused, whoever
// made the mistake: applied, it would change data under a lock that was never taken.
func (s *state) rangeOf(name string, uid storage.TopicUID, id storage.RangeID) (*Topic, *Range, Result) {
	if mutate.On("metadata.range-of-any-topic") {
		uid = id.Topic
		if t := s.topic(uid); t != nil {
			name = t.Name
		}
	}
	t := s.topic(uid)
	switch {
	case t == nil:
		return nil, nil, refuse(OutcomeNotFound, "no topic of this uid")
	case t.Name != name:
		return nil, nil, refuse(OutcomeTopicMismatch, "the uid belongs to a topic of another name")
	case id.Topic != uid:
		return nil, nil, refuse(OutcomeTopicMismatch, "the range belongs to another topic")
	}
	r := t.Range(id)
	if r == nil {
		return nil, nil, Result{Outcome: OutcomeNotFound, UID: t.UID, MetaVersion: t.MetaVersion, Detail: "no such range"}
	}
	return t, r, Result{}
}

func (s *state) openSegment(c *OpenSegment) Result {
	t, r, refused := s.rangeOf(c.TopicName, c.Topic, c.Range)
	if t == nil {
		return refused
	}
	if seg := r.Segment(c.Seq); seg != nil && seg.OpenNonce == c.Nonce {
		return Result{Outcome: OutcomeOK, Already: true, UID: t.UID, MetaVersion: t.MetaVersion, Segment: seg}
	}
	next, refused := opened(t, r, c)
	if next == nil {
		return refused
	}
	t = t.withRange(next)
	s.put(t)
	return Result{Outcome: OutcomeOK, UID: t.UID, MetaVersion: t.MetaVersion, Segment: next.Open}
}

// opened returns r with the segment that c opens, or why it may not be opened.
func opened(t *Topic, r *Range, c *OpenSegment) (*Range, Result) {
	conflict := func(detail string) (*Range, Result) {
		return nil, Result{Outcome: OutcomeConflict, UID: t.UID, MetaVersion: t.MetaVersion, Segment: r.Open, Detail: detail}
	}
	if detail := malformedOpen(c); detail != "" {
		return nil, Result{Outcome: OutcomeInvalid, UID: t.UID, MetaVersion: t.MetaVersion, Detail: detail}
	}
	switch {
	case t.State != TopicActive:
		return conflict("the topic is being deleted")
	case r.State != RangeActive:
		return conflict("the range is " + r.State.String())
	case r.Open != nil:
		return conflict("the range has an open segment")
	case c.Seq != r.NextSegment:
		return conflict("the range's tail is another one than expected")
	case storage.End(c.Base) != r.SealedEnd && !mutate.On("metadata.any-base"):
		return conflict("the base is not the end of the segment before")
	case t.segments >= MaxSegments || r.NextSegment == ^uint32(0):
		return nil, Result{Outcome: OutcomeLimit, UID: t.UID, MetaVersion: t.MetaVersion, Detail: "a topic has at most 100000 segments"}
	}
	next := *r
	next.NextSegment++
	next.Open = &Segment{ID: storage.SegmentID{Range: r.ID, Seq: c.Seq}, State: SegmentOpen, Base: c.Base,
		Replicas: slices.Clone(c.Replicas), Quorum: c.Quorum, ReplicationFactor: c.ReplicationFactor, PrimaryBoot: c.PrimaryBoot,
		OpenNonce: c.Nonce, Header: slices.Clone(c.Header), CreateTime: c.Time}
	return &next, Result{}
}

func malformedOpen(c *OpenSegment) string {
	n := len(c.Replicas)
	switch {
	case c.Nonce.IsZero():
		return "no nonce"
	case n < 1 || n > MaxReplicas:
		return "a replica set has 1 to 16 members"
	case c.ReplicationFactor < 1 || c.ReplicationFactor > MaxReplicas:
		return "a replication factor is 1 to 16"
	case c.Quorum != c.ReplicationFactor/2+1 && c.Quorum != c.ReplicationFactor:
		return "the quorum is neither a majority of the replication factor nor all of it"
	case n < c.Quorum || n > c.ReplicationFactor:
		return "the set is smaller than the quorum or larger than the replication factor"
	case c.PrimaryBoot == 0:
		return "no boot of the primary"
	case len(c.Header) > MaxSegmentHeader:
		return "the segment header is larger than 64 KiB"
	case c.Base > storage.MaxOffset:
		return "the base is beyond the largest offset"
	}
	for i, b := range c.Replicas {
		if b == 0 || slices.Contains(c.Replicas[:i], b) {
			return "a replica is named twice or is no broker"
		}
	}
	return ""
}

func (s *state) sealSegment(c *SealSegment) Result {
	t, r, refused := s.rangeOf(c.TopicName, c.Topic, c.Segment.Range)
	if t == nil {
		return refused
	}
	seg := r.Segment(c.Segment.Seq)
	if seg == nil {
		return Result{Outcome: OutcomeNotFound, UID: t.UID, MetaVersion: t.MetaVersion, Detail: "no such segment"}
	}
	if seg.State != SegmentOpen && !mutate.On("metadata.seal-again") {
		return recordedSeal(t, r, seg, c)
	}
	if detail := malformedSeal(seg, c); detail != "" {
		return Result{Outcome: OutcomeInvalid, UID: t.UID, MetaVersion: t.MetaVersion, Detail: detail}
	}
	sealed := *seg
	sealed.State, sealed.End, sealed.SealTime, sealed.SealReason = SegmentSealed, c.End, c.Time, c.Reason
	sealed.DataBytes, sealed.Digest = c.DataBytes, c.Digest
	sealed.ProducerTableDigest, sealed.ProducerTableBytes = c.ProducerTableDigest, c.ProducerTableBytes
	sealed.SealNonce = c.Nonce
	sealed.Header = nil // every replica's file has it, and a replica without a file is healed from a whole copy
	if c.End == storage.EndBefore(seg.Base) {
		// No file, no bytes anywhere: nothing to compare a copy with.
		sealed.State, sealed.DataBytes, sealed.Digest = SegmentAbandoned, 0, 0
	}
	if len(c.Gone) > 0 {
		sealed.Loss = &Loss{From: c.End.Next(), DataBytes: sealed.DataBytes, Digest: sealed.Digest, Time: c.Time, Nonce: c.Nonce}
	}
	next := *r
	next.Open, next.SealedEnd = nil, c.End
	if mutate.On("metadata.seal-again") {
		next.Closed = slices.DeleteFunc(slices.Clone(r.Closed), func(o *Segment) bool { return o.ID == seg.ID })
	}
	// Older versions of the range share the array and see only their own length of it; the history has one writer.
	next.Closed = append(next.Closed, &sealed)
	res := Result{Outcome: OutcomeOK, UID: t.UID, Segment: &sealed}
	rng := &next
	if c.Next != nil {
		// The seal stands whether or not the next segment may be opened: the topic may be deleting by now, or at its bound.
		withNext, why := opened(t, rng, c.Next)
		if withNext != nil {
			rng, res.Next = withNext, withNext.Open
		} else {
			res.Detail = why.Detail
		}
	}
	t = t.withRange(rng)
	s.put(t)
	res.MetaVersion = t.MetaVersion
	return res
}

// recordedSeal answers a seal of what is sealed: the record, whatever the command brings.
func recordedSeal(t *Topic, r *Range, seg *Segment, c *SealSegment) Result {
	res := Result{Outcome: OutcomeConflict, UID: t.UID, MetaVersion: t.MetaVersion, Segment: seg, Detail: "the segment is sealed"}
	if seg.SealNonce == c.Nonce {
		res.Outcome, res.Already, res.Detail = OutcomeOK, true, ""
		if c.Next != nil {
			if n := r.Segment(seg.ID.Seq + 1); n != nil && n.OpenNonce == c.Next.Nonce {
				res.Next = n
			}
		}
	}
	return res
}

// voters counts the replicas of a segment among brokers, each once, but none of except.
func voters(seg *Segment, brokers, except []storage.BrokerID) (n int) {
	for i, b := range brokers {
		if slices.Contains(seg.Replicas, b) && !slices.Contains(brokers[:i], b) && !slices.Contains(except, b) {
			n++
		}
	}
	return n
}

func malformedSeal(seg *Segment, c *SealSegment) string {
	switch {
	case c.Nonce.IsZero():
		return "no nonce"
	case c.End < storage.EndBefore(seg.Base):
		return "the end lies before the base"
	case c.End > storage.EndAfter(storage.MaxOffset, 1):
		return "the end is beyond the largest offset"
	case c.End > storage.EndBefore(seg.Base) && c.DataBytes == 0:
		return "records without bytes"
	case c.Reason < SealSize || c.Reason > SealNotConfirmed:
		return "no reason"
	}
	// n-q+1 votes meet every quorum of q, so one of them holds each acknowledged record.
	if len(c.Gone) > 0 && c.Reason != SealOperator {
		return "only an operator gives replicas up"
	}
	votes := voters(seg, c.Votes, c.Gone)
	if votes == 0 && c.End > storage.EndBefore(seg.Base) {
		return "an end without a vote"
	}
	votes += voters(seg, c.Gone, nil)
	if votes < seg.N()-seg.Quorum+1 && !mutate.On("metadata.seal-without-votes") {
		return "fewer votes than the seal quorum"
	}
	if n := c.Next; n != nil {
		if n.Topic != c.Topic || n.TopicName != c.TopicName || n.Range != c.Segment.Range || n.Seq != c.Segment.Seq+1 ||
			storage.EndBefore(n.Base) != c.End {
			return "the next segment does not follow the sealed one"
		}
		if detail := malformedOpen(n); detail != "" {
			return "next segment: " + detail
		}
	}
	return ""
}
