package metadata

import (
	"maps"
	"math/bits"
	"slices"

	"github.com/cespare/xxhash/v2"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	"github.com/malachilog/malachi/storage"
)

func refuse(o Outcome, detail string) Result { return Result{Outcome: o, Detail: detail} }

func ofTopic(t *Topic, already bool) Result {
	return Result{Outcome: OutcomeOK, Already: already, UID: t.UID, MetaVersion: t.MetaVersion}
}

func (s *state) createTopic(c *CreateTopic) Result {
	if c.Nonce.IsZero() || c.UID.IsZero() {
		return refuse(OutcomeInvalid, "no nonce or uid")
	}
	if err := ValidTopicName(c.Name); err != nil {
		return refuse(OutcomeInvalid, err.Error())
	}
	if err := ValidInitialRanges(c.InitialRanges); err != nil {
		return refuse(OutcomeInvalid, err.Error())
	}
	if err := ValidLabels(c.Labels); err != nil {
		return refuse(OutcomeInvalid, err.Error())
	}
	// The nonce is looked for before the name: its topic may have lost the name since.
	if e, ok := s.nonces.Get(nonceEntry{name: c.Name, nonce: c.Nonce}); ok && !mutate.On("metadata.forget-nonces") {
		t := s.topic(e.uid)
		switch {
		case t == nil || t.State != TopicActive:
			return Result{Outcome: OutcomeNotFound, UID: e.uid, Detail: "the topic that this request created was deleted since"}
		case t.createdWith != settingsHash(c):
			return Result{Outcome: OutcomeExists, UID: e.uid, Detail: "created under this nonce with other settings"}
		}
		return ofTopic(t, true)
	}
	if e, ok := s.byName.Get(nameEntry{name: c.Name}); ok {
		return Result{Outcome: OutcomeExists, UID: e.topic.UID, MetaVersion: e.topic.MetaVersion, Detail: "the name is taken"}
	}
	if _, dead := s.tombs.Get(tombEntry{uid: c.UID}); dead || s.topic(c.UID) != nil {
		return refuse(OutcomeConflict, "the uid was used before")
	}
	if s.byUID.Len() >= MaxTopics {
		return refuse(OutcomeLimit, "this vnode holds as many topics as it can")
	}
	t := &Topic{UID: c.UID, Name: c.Name, Nonce: c.Nonce, CreateTime: c.Time, Labels: maps.Clone(c.Labels),
		DeletionProtection: c.DeletionProtection, InitialRanges: c.InitialRanges, MetaVersion: 1, State: TopicActive,
		createdWith: settingsHash(c)}
	depth := uint8(bits.TrailingZeros(uint(c.InitialRanges)))
	t.ranges = make([]*Range, c.InitialRanges)
	for i := range t.ranges {
		t.ranges[i] = &Range{ID: storage.RangeID{Topic: c.UID, Seq: uint32(i)}, State: RangeActive,
			Slice: storage.Slice{Prefix: uint32(i), Depth: depth}}
	}
	t.owners = ownersOf(t.ranges)
	s.put(t)
	s.nonces.ReplaceOrInsert(nonceEntry{name: c.Name, nonce: c.Nonce, uid: c.UID})
	return ofTopic(t, false)
}

// settingsHash is of what a retry of a creation must bring again. It is recorded, so it must never change its meaning.
func settingsHash(c *CreateTopic) uint64 {
	h := xxhash.New()
	num := func(n int) {
		_, _ = h.Write([]byte{byte(n), byte(n >> 8), byte(n >> 16), byte(n >> 24)})
	}
	num(c.InitialRanges)
	if c.DeletionProtection {
		num(1)
	} else {
		num(0)
	}
	for _, k := range slices.Sorted(maps.Keys(c.Labels)) {
		num(len(k))
		_, _ = h.WriteString(k)
		num(len(c.Labels[k]))
		_, _ = h.WriteString(c.Labels[k])
	}
	return h.Sum64()
}

// named finds the active topic that a command means, or why there is none.
func (s *state) named(name string, uid storage.TopicUID) (*Topic, Result) {
	e, ok := s.byName.Get(nameEntry{name: name})
	if !ok {
		return nil, refuse(OutcomeNotFound, "no topic of this name")
	}
	if !uid.IsZero() && e.topic.UID != uid {
		return nil, refuse(OutcomeNotFound, "the topic of this name has another uid")
	}
	return e.topic, Result{}
}

func (s *state) updateTopic(c *UpdateTopic) Result {
	// The uid is not optional: versions begin anew with each life of a name, and a late copy must not meet its version there.
	if c.Nonce.IsZero() || c.ExpectVersion == 0 || c.UID.IsZero() {
		return refuse(OutcomeInvalid, "no nonce, expected version or uid")
	}
	t, refused := s.named(c.Name, c.UID)
	if t == nil {
		return refused
	}
	if c.Labels != nil {
		if err := ValidLabels(*c.Labels); err != nil {
			return refuse(OutcomeInvalid, err.Error())
		}
	}
	for _, u := range t.updates {
		if u.nonce == c.Nonce {
			return Result{Outcome: OutcomeOK, Already: true, UID: t.UID, MetaVersion: u.version}
		}
	}
	if c.ExpectVersion != t.MetaVersion {
		return Result{Outcome: OutcomeConflict, UID: t.UID, MetaVersion: t.MetaVersion, Detail: "the topic is at another version"}
	}
	next := *t
	next.MetaVersion++
	if c.Labels != nil {
		next.Labels = maps.Clone(*c.Labels)
	}
	if c.DeletionProtection != nil {
		next.DeletionProtection = *c.DeletionProtection
	}
	next.updates = append(slices.Clone(t.updates), appliedUpdate{c.Nonce, next.MetaVersion})
	if n := len(next.updates); n > rememberedUpdates {
		next.updates = next.updates[n-rememberedUpdates:]
	}
	s.put(&next)
	return ofTopic(&next, false)
}

func (s *state) deleteTopic(c *DeleteTopic) Result {
	if c.Nonce.IsZero() {
		return refuse(OutcomeInvalid, "no nonce")
	}
	// The nonce is looked for before the name: by now another life of the topic may bear it.
	if e, ok := s.nonces.Get(nonceEntry{name: c.Name, nonce: c.Nonce, delete: true}); ok && !mutate.On("metadata.forget-nonces") {
		return Result{Outcome: OutcomeOK, Already: true, UID: e.uid}
	}
	t, refused := s.named(c.Name, c.UID)
	switch {
	case t == nil:
		return refused
	case c.ExpectVersion != 0 && c.ExpectVersion != t.MetaVersion:
		return Result{Outcome: OutcomeConflict, UID: t.UID, MetaVersion: t.MetaVersion, Detail: "the topic is at another version"}
	case t.DeletionProtection:
		return Result{Outcome: OutcomeProtected, UID: t.UID, MetaVersion: t.MetaVersion, Detail: "deletion_protection is set"}
	}
	next := *t
	next.MetaVersion++
	next.State, next.DeleteNonce, next.DeleteTime = TopicDeleting, c.Nonce, c.Time
	s.byName.Delete(nameEntry{name: t.Name})
	s.put(&next)
	s.nonces.ReplaceOrInsert(nonceEntry{name: t.Name, nonce: c.Nonce, delete: true, uid: t.UID})
	return ofTopic(&next, false)
}

func (s *state) forgetTopic(c *ForgetTopic) Result {
	t := s.topic(c.UID)
	if t == nil {
		e, ok := s.tombs.Get(tombEntry{uid: c.UID})
		switch {
		case !ok:
			return refuse(OutcomeNotFound, "no topic of this uid")
		case e.tomb.Name != c.Name:
			return refuse(OutcomeTopicMismatch, "the uid belongs to a topic of another name")
		}
		return Result{Outcome: OutcomeOK, Already: true, UID: c.UID, MetaVersion: e.tomb.MetaVersion}
	}
	switch {
	case t.Name != c.Name:
		return refuse(OutcomeTopicMismatch, "the uid belongs to a topic of another name")
	case t.State != TopicDeleting:
		return Result{Outcome: OutcomeConflict, UID: t.UID, MetaVersion: t.MetaVersion, Detail: "the topic is not deleted"}
	}
	tomb := &Tombstone{UID: t.UID, Name: t.Name, Nonce: t.Nonce, DeleteNonce: t.DeleteNonce, DeleteTime: t.DeleteTime,
		MetaVersion: t.MetaVersion + 1}
	s.byUID.Delete(uidEntry{uid: t.UID})
	s.deleting.Delete(uidEntry{uid: t.UID})
	s.tombs.ReplaceOrInsert(tombEntry{t.UID, tomb})
	return Result{Outcome: OutcomeOK, UID: t.UID, MetaVersion: tomb.MetaVersion}
}
