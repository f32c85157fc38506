package metadata

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"github.com/cespare/xxhash/v2"
	"github.com/google/btree"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	"github.com/malachilog/malachi/storage"
)

// MaxTopics bounds the topics of one vnode, deleting ones included.
const MaxTopics = 200_000

// rememberedUpdates is how many UpdateTopic nonces a topic remembers. One that is older meets its expected version instead, which
// never comes back: it is refused, not applied twice.
const rememberedUpdates = 16

// HashName is the place of a topic's name on the ring: xxhash64 of the name's bytes, seed 0.
func HashName(name string) uint64 { return xxhash.Sum64String(name) }

// Tombstone is what stays of a topic that was forgotten: enough to know late commands for it.
type Tombstone struct {
	UID         storage.TopicUID
	Name        string
	Nonce       Nonce
	DeleteNonce Nonce
	DeleteTime  storage.Time
	MetaVersion uint64
}

type nameEntry struct {
	name  string
	topic *Topic
}

type uidEntry struct {
	uid   storage.TopicUID
	topic *Topic
}

type tombEntry struct {
	uid  storage.TopicUID
	tomb *Tombstone
}

// nonceEntry finds the topic that a creation or a deletion of this name and nonce made or deleted, for ever.
type nonceEntry struct {
	name   string
	nonce  Nonce
	delete bool
	uid    storage.TopicUID
}

// state is everything that a snapshot holds, and the indexes over it. The trees are copy-on-write.
type state struct {
	level       storage.Level // highest level that introduced something applied
	cluster     storage.ClusterID
	vnode       uint32
	ringVersion uint64
	arcs        []Arc // sorted; empty: not initialised

	byName   *btree.BTreeG[nameEntry] // active
	byUID    *btree.BTreeG[uidEntry]  // active and deleting
	deleting *btree.BTreeG[uidEntry]
	tombs    *btree.BTreeG[tombEntry]
	nonces   *btree.BTreeG[nonceEntry]
}

const degree = 16

func newState() state {
	byUID := func(a, b uidEntry) bool { return bytes.Compare(a.uid[:], b.uid[:]) < 0 }
	return state{
		level:    commandLevel,
		byName:   btree.NewG(degree, func(a, b nameEntry) bool { return a.name < b.name }),
		byUID:    btree.NewG(degree, byUID),
		deleting: btree.NewG(degree, byUID),
		tombs:    btree.NewG(degree, func(a, b tombEntry) bool { return bytes.Compare(a.uid[:], b.uid[:]) < 0 }),
		nonces:   btree.NewG(degree, lessNonces),
	}
}

func lessNonces(a, b nonceEntry) bool {
	if c := strings.Compare(a.name, b.name); c != 0 {
		return c < 0
	}
	if c := bytes.Compare(a.nonce[:], b.nonce[:]); c != 0 {
		return c < 0
	}
	return !a.delete && b.delete
}

// clone costs the same whatever the state holds. Only the writer may call it.
func (s *state) clone() state {
	c := *s
	c.byName, c.byUID, c.deleting = s.byName.Clone(), s.byUID.Clone(), s.deleting.Clone()
	c.tombs, c.nonces = s.tombs.Clone(), s.nonces.Clone()
	return c
}

// owns reports whether a topic of this name belongs to the vnode.
func (s *state) owns(name string) bool {
	if mutate.On("metadata.ignore-arcs") {
		return true
	}
	h := HashName(name)
	for _, a := range s.arcs {
		if a.Holds(h) {
			return true
		}
	}
	return false
}

func (s *state) topic(uid storage.TopicUID) *Topic {
	e, _ := s.byUID.Get(uidEntry{uid: uid})
	return e.topic
}

// put replaces a topic that is there or adds one.
func (s *state) put(t *Topic) {
	s.byUID.ReplaceOrInsert(uidEntry{t.UID, t})
	if t.State == TopicActive {
		s.byName.ReplaceOrInsert(nameEntry{t.Name, t})
		return
	}
	s.deleting.ReplaceOrInsert(uidEntry{t.UID, t})
}

// Machine is the state machine of one vnode. Apply, Restore and View are for one goroutine at a time; the Views are for all.
type Machine struct {
	understood storage.Level
	st         state
	stopped    error
}

// New returns an empty machine that understands commands and snapshots up to this level.
func New(understood storage.Level) *Machine { return &Machine{understood: understood, st: newState()} }

// Apply applies one log entry. What a command is refused for is in the Result. An error means that the machine has stopped before
// this entry, applies nothing any more and must not be snapshotted: storage.ErrNewerFormat (the entry is of a higher level, the
// process must end) or storage.ErrCorrupt.
func (m *Machine) Apply(entry []byte) (Result, error) {
	if m.stopped != nil {
		return Result{}, m.stopped
	}
	understood := m.understood
	if mutate.On("metadata.apply-above-level") {
		understood = ^storage.Level(0)
	}
	cmd, level, err := decode(entry, understood)
	if err != nil {
		m.stopped = err
		return Result{}, err
	}
	if level > m.st.level {
		m.st.level = level
	}
	if cmd == nil {
		return Result{Outcome: OutcomeInvalid, Detail: "malformed command", RingVersion: m.st.ringVersion}, nil
	}
	r := m.st.apply(cmd)
	r.RingVersion = m.st.ringVersion
	return r, nil
}

// Stopped returns why the machine has stopped, or nil.
func (m *Machine) Stopped() error { return m.stopped }

func (s *state) apply(cmd Command) Result {
	if c, ok := cmd.(*InitVnode); ok {
		return s.initVnode(c)
	}
	if !s.owns(topicName(cmd)) {
		return Result{Outcome: OutcomeStaleRoute, Detail: "the topic's name lies outside this vnode's arcs"}
	}
	switch c := cmd.(type) {
	case *CreateTopic:
		return s.createTopic(c)
	case *UpdateTopic:
		return s.updateTopic(c)
	case *DeleteTopic:
		return s.deleteTopic(c)
	case *ForgetTopic:
		return s.forgetTopic(c)
	case *OpenSegment:
		return s.openSegment(c)
	case *SealSegment:
		return s.sealSegment(c)
	case *UpdateReplicas:
		return s.updateReplicas(c)
	case *ResolveSegment:
		return s.resolveSegment(c)
	}
	panic(fmt.Sprintf("metadata: no application of %T", cmd))
}

func topicName(cmd Command) string {
	switch c := cmd.(type) {
	case *CreateTopic:
		return c.Name
	case *UpdateTopic:
		return c.Name
	case *DeleteTopic:
		return c.Name
	case *ForgetTopic:
		return c.Name
	case *OpenSegment:
		return c.TopicName
	case *SealSegment:
		return c.TopicName
	case *UpdateReplicas:
		return c.TopicName
	case *ResolveSegment:
		return c.TopicName
	}
	return ""
}

func (s *state) initVnode(c *InitVnode) Result {
	if len(s.arcs) > 0 {
		if s.vnode == c.Vnode && s.cluster == c.Cluster && s.ringVersion == c.RingVersion && slices.Equal(s.arcs, c.Arcs) {
			return Result{Outcome: OutcomeOK, Already: true}
		}
		return Result{Outcome: OutcomeConflict, Detail: "the vnode was initialised with other values"}
	}
	if err := validArcs(c.Arcs); err != "" || c.Cluster.IsZero() || c.RingVersion == 0 {
		return Result{Outcome: OutcomeInvalid, Detail: "malformed arcs, cluster or ring version: " + err}
	}
	s.vnode, s.cluster, s.ringVersion, s.arcs = c.Vnode, c.Cluster, c.RingVersion, slices.Clone(c.Arcs)
	return Result{Outcome: OutcomeOK}
}

func validArcs(arcs []Arc) string {
	if len(arcs) == 0 || len(arcs) > 4096 {
		return "no arcs or too many"
	}
	for i, a := range arcs {
		if a.Last < a.First || i > 0 && arcs[i-1].Last >= a.First {
			return "arcs are not sorted or overlap"
		}
	}
	return ""
}

// View is a state that never changes. All methods may be called from any goroutine, without a lock; none that finds a single topic
// allocates.
type View struct{ st state }

// View returns the present state.
func (m *Machine) View() *View { return &View{st: m.st.clone()} }

// Initialized reports whether the vnode knows its arcs.
func (v *View) Initialized() bool { return len(v.st.arcs) > 0 }

// RingVersion is the version of the ring that the vnode's arcs are from; 0 before it is initialised.
func (v *View) RingVersion() uint64 { return v.st.ringVersion }

// Level is the highest level that introduced something applied.
func (v *View) Level() storage.Level { return v.st.level }

// Arcs are the parts of the ring that the vnode owns. The slice is the view's own.
func (v *View) Arcs() []Arc { return v.st.arcs }

// Topic finds the active topic of a name: OutcomeOK, OutcomeNotFound, or OutcomeStaleRoute for a name outside the vnode's arcs,
// whose absence here says nothing.
func (v *View) Topic(name string) (*Topic, Outcome) {
	if e, ok := v.st.byName.Get(nameEntry{name: name}); ok {
		return e.topic, OutcomeOK
	}
	if !v.st.owns(name) {
		return nil, OutcomeStaleRoute
	}
	return nil, OutcomeNotFound
}

// TopicByUID finds an active or deleting topic, or nil.
func (v *View) TopicByUID(uid storage.TopicUID) *Topic { return v.st.topic(uid) }

// Tombstone finds the tombstone of a forgotten topic, or nil.
func (v *View) Tombstone(uid storage.TopicUID) *Tombstone {
	e, _ := v.st.tombs.Get(tombEntry{uid: uid})
	return e.tomb
}

// Len is how many topics are active, and how many deleting.
func (v *View) Len() (active, deleting int) { return v.st.byName.Len(), v.st.deleting.Len() }

// List returns up to limit active topics by name: those after a name that have the prefix.
func (v *View) List(prefix, after string, limit int) []*Topic {
	from := prefix
	if after >= from {
		from = after
	}
	var out []*Topic
	v.st.byName.AscendGreaterOrEqual(nameEntry{name: from}, func(e nameEntry) bool {
		if !strings.HasPrefix(e.name, prefix) || len(out) >= limit {
			return false
		}
		if after == "" || e.name > after {
			out = append(out, e.topic)
		}
		return true
	})
	return out
}

// Topics calls yield for each active topic by name until it returns false.
func (v *View) Topics(yield func(*Topic) bool) {
	v.st.byName.Ascend(func(e nameEntry) bool { return yield(e.topic) })
}

// Deleting calls yield for each deleting topic by uid until it returns false.
func (v *View) Deleting(yield func(*Topic) bool) {
	v.st.deleting.Ascend(func(e uidEntry) bool { return yield(e.topic) })
}
