package metadata

import (
	"unicode/utf8"

	"github.com/malachilog/malachi/storage"
)

func validUTF8(s string) bool { return utf8.ValidString(s) }

// Command is one of the command types of this package. Encode makes the bytes of a log entry of it.
type Command interface{ isCommand() }

// Arc is a part of the hash ring: the topics whose HashName lies in [First, Last], both inclusive.
type Arc struct{ First, Last uint64 }

// Holds reports whether h lies in the arc.
func (a Arc) Holds(h uint64) bool { return a.First <= h && h <= a.Last }

// InitVnode is the first command of a vnode and gives it its arcs. Again with the same values it changes nothing; with others it
// is a conflict. Until it was applied every command and query answers OutcomeStaleRoute.
type InitVnode struct {
	Cluster     storage.ClusterID
	Vnode       uint32
	RingVersion uint64
	Arcs        []Arc
}

// CreateTopic makes a topic with InitialRanges equal slices. A topic of the same name made under the same nonce with the same
// settings is the recorded answer; any other holder of the name refuses with OutcomeExists. The nonce of a topic that was deleted
// since answers OutcomeNotFound.
type CreateTopic struct {
	Nonce              Nonce
	UID                storage.TopicUID
	Name               string
	InitialRanges      int
	Labels             map[string]string
	DeletionProtection bool
	Time               storage.Time
}

// UpdateTopic changes what is set, if the topic is at ExpectVersion of this UID: versions begin anew with each life of a name. The
// same nonce again answers the version that it made.
type UpdateTopic struct {
	Name               string
	UID                storage.TopicUID
	Nonce              Nonce
	ExpectVersion      uint64
	Labels             *map[string]string // nil: leave; else replaces all
	DeletionProtection *bool
}

// DeleteTopic frees the name and leaves the topic deleting under its uid. UID zero: whichever bears the name. ExpectVersion 0:
// any.
type DeleteTopic struct {
	Name          string
	UID           storage.TopicUID
	Nonce         Nonce
	ExpectVersion uint64
	Time          storage.Time
}

// ForgetTopic drops a deleting topic whose copies are all gone; its tombstone stays. Again it changes nothing.
type ForgetTopic struct {
	Name string
	UID  storage.TopicUID
}

// OpenSegment opens Segment in a range whose tail is just before it. It is refused while a segment is open, if Seq is not the
// next, or if Base is not the end of what is closed. The same nonce again answers the recorded segment, also when it was sealed
// since.
type OpenSegment struct {
	TopicName         string
	Topic             storage.TopicUID
	Range             storage.RangeID
	Seq               uint32
	Base              storage.Offset
	Nonce             Nonce
	Replicas          []storage.BrokerID
	Quorum            int
	ReplicationFactor int
	PrimaryBoot       storage.Boot
	Header            []byte
	Time              storage.Time
}

// SealSegment records the end of an open segment, for ever; an end at its base records it as abandoned. Only the pass proposes
// it. With Next the following segment is opened by the same command. A segment that is sealed already answers what is recorded:
// the same nonce as success, another one as OutcomeConflict.
type SealSegment struct {
	TopicName           string
	Topic               storage.TopicUID
	Segment             storage.SegmentID
	Nonce               Nonce
	End                 storage.End
	DataBytes           uint64
	Digest              storage.Digest
	ProducerTableDigest storage.Digest
	ProducerTableBytes  uint32
	Votes               []storage.BrokerID // who voted; kept in the log only
	Time                storage.Time
	Reason              SealReason
	Next                *OpenSegment
	// Gone are replicas that an operator has given up (SealOperator only). Each counts as a vote for the base; that anything beyond
	// the end may be lost is recorded.
	Gone []storage.BrokerID
}

// ReplicaChange is a step in the life of one copy of a sealed segment.
type ReplicaChange uint8

// The steps: Incoming records the target before any byte is sent; Confirm makes its proved copy count; Drop takes a copy, or a
// target, off the record, after which its files may be deleted.
const (
	ReplicaIncoming ReplicaChange = 1
	ReplicaConfirm  ReplicaChange = 2
	ReplicaDrop     ReplicaChange = 3
)

// UpdateReplicas makes one step, if the segment is sealed and at ExpectVersion of its replicas. A copy that counts is dropped only if
// as many as the replication factor recorded at the open stay, or, with Gone (its broker is decommissioned or removed), at least
// one. The same step again, with nothing between, is a success.
type UpdateReplicas struct {
	TopicName     string
	Topic         storage.TopicUID
	Segment       storage.SegmentID
	ExpectVersion uint64
	Change        ReplicaChange
	Broker        storage.BrokerID
	Boot          storage.Boot // of a Confirm; kept in the log only
	Gone          bool
}

// ResolveSegment records, by an operator's order, that a sealed segment has lost everything from LostFrom on, with the length and
// digest of what remains. At most once more per loss: it can only grow.
type ResolveSegment struct {
	TopicName     string
	Topic         storage.TopicUID
	Segment       storage.SegmentID
	ExpectVersion uint64
	Nonce         Nonce
	LostFrom      storage.Offset
	DataBytes     uint64
	Digest        storage.Digest
	Time          storage.Time
}

func (*InitVnode) isCommand()      {}
func (*CreateTopic) isCommand()    {}
func (*UpdateTopic) isCommand()    {}
func (*DeleteTopic) isCommand()    {}
func (*ForgetTopic) isCommand()    {}
func (*OpenSegment) isCommand()    {}
func (*SealSegment) isCommand()    {}
func (*UpdateReplicas) isCommand() {}
func (*ResolveSegment) isCommand() {}

// Outcome is what became of a command.
type Outcome uint8

// The outcomes. The numbers stand in Raft results and never change.
const (
	OutcomeOK            Outcome = 1
	OutcomeNotFound      Outcome = 2
	OutcomeExists        Outcome = 3
	OutcomeConflict      Outcome = 4
	OutcomeInvalid       Outcome = 5
	OutcomeStaleRoute    Outcome = 6 // the topic's name lies outside the arcs; never "not found"
	OutcomeTopicMismatch Outcome = 7 // the range or segment belongs to another topic than the command names
	OutcomeLimit         Outcome = 8
	OutcomeProtected     Outcome = 9
)

// Result is what a command answers: a function of the state and the command.
type Result struct {
	Outcome     Outcome
	Already     bool // the effect was there: an earlier copy of the command had been applied
	UID         storage.TopicUID
	MetaVersion uint64
	Segment     *Segment // open and seal: as recorded, also with OutcomeConflict where there is a record
	Next        *Segment // seal with a next segment: as recorded
	Detail      string   // which check refused
	RingVersion uint64
}

// Bounds of the state. A command that would pass one is refused with OutcomeLimit.
const (
	MaxRanges        = 2048
	MaxSegments      = 100_000 // of a topic, abandoned ones included
	MaxSegmentHeader = 64 << 10
	MaxReplicas      = 16
	// MaxCommandBytes bounds an encoded command.
	MaxCommandBytes = 512 << 10
)
