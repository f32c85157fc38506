package root

import (
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/malachilog/malachi/services/controlplane/metadata"
)

// Acks says how many replicas must have a record before it is acknowledged.
type Acks uint8

// The kinds of acknowledgement. There is none that is weaker.
const (
	AcksQuorum Acks = 1
	AcksAll    Acks = 2
)

// Placement says what happens while a replica set cannot be spread over MinDomains.
type Placement uint8

// Soft places it anyway, hard refuses to.
const (
	PlacementSoft Placement = 1
	PlacementHard Placement = 2
)

// Bounds and defaults of a policy.
const (
	MaxReplicationFactor   = 7
	DefaultSegmentMaxBytes = 256 << 20
	DefaultSegmentMaxAge   = time.Hour
	minSegmentMaxBytes     = 64 << 10
	maxSegmentMaxBytes     = 1 << 40
	minSegmentMaxAge       = time.Second
	maxSegmentMaxAge       = 366 * 24 * time.Hour
)

// rememberedUpdates is how many nonces of changes the policy remembers. An older one meets its expected version instead.
const rememberedUpdates = 16

// Policy is how topics are kept. Every field has a value; only MinReplicas may be unset.
type Policy struct {
	Version           uint64 // rises with every change; 0: there is no cluster yet
	ReplicationFactor int
	MinReplicas       int // with fewer live replicas no segment is opened; 0: not set, it follows the quorum
	Acks              Acks
	SpreadBy          string // attribute of brokers over whose values a replica set is spread; empty: over none
	MinDomains        int
	Placement         Placement
	SegmentMaxBytes   uint64
	SegmentMaxAge     time.Duration

	updates []policyUpdate // the newest, oldest first
}

type policyUpdate struct {
	nonce   metadata.Nonce
	version uint64
}

// Quorum is how many replicas of a segment opened under this policy must have a record before it is acknowledged.
func (p Policy) Quorum() int {
	if p.Acks == AcksAll {
		return p.ReplicationFactor
	}
	return p.ReplicationFactor/2 + 1
}

// EffectiveMinReplicas is MinReplicas, or what it follows while it is not set.
func (p Policy) EffectiveMinReplicas() int {
	if p.MinReplicas == 0 {
		return p.Quorum()
	}
	return p.MinReplicas
}

// PolicyChange is what UpdatePolicy sets; what is nil stays.
type PolicyChange struct {
	ReplicationFactor *int
	MinReplicas       *int // 0 unsets it
	Acks              *Acks
	SpreadBy          *string
	MinDomains        *int
	Placement         *Placement
	SegmentMaxBytes   *uint64
	SegmentMaxAge     *time.Duration
}

// Apply is p with the change made. It does not raise the version.
func (c PolicyChange) Apply(p Policy) Policy {
	set(&p.ReplicationFactor, c.ReplicationFactor)
	set(&p.MinReplicas, c.MinReplicas)
	set(&p.Acks, c.Acks)
	set(&p.SpreadBy, c.SpreadBy)
	set(&p.MinDomains, c.MinDomains)
	set(&p.Placement, c.Placement)
	set(&p.SegmentMaxBytes, c.SegmentMaxBytes)
	set(&p.SegmentMaxAge, c.SegmentMaxAge)
	return p
}

func set[T any](to *T, from *T) {
	if from != nil {
		*to = *from
	}
}

// Faults says everything that is wrong with the policy, each in a few words; nothing if it may be used.
func (p Policy) Faults() []string {
	var out []string
	fault := func(bad bool, format string, args ...any) {
		if bad {
			out = append(out, fmt.Sprintf(format, args...))
		}
	}
	fault(p.ReplicationFactor < 1 || p.ReplicationFactor > MaxReplicationFactor, "replication_factor %d: want 1 to %d",
		p.ReplicationFactor, MaxReplicationFactor)
	fault(p.Acks != AcksQuorum && p.Acks != AcksAll, "acks: want quorum or all")
	if m := p.EffectiveMinReplicas(); len(out) == 0 {
		fault(m < p.Quorum() || m > p.ReplicationFactor, "min_replicas %d: want %d (the quorum) to %d (the replication factor)",
			m, p.Quorum(), p.ReplicationFactor)
	} else {
		fault(p.MinReplicas < 0 || p.MinReplicas > MaxReplicationFactor, "min_replicas %d: want 1 to %d", p.MinReplicas, MaxReplicationFactor)
	}
	fault(len(p.SpreadBy) > MaxAttribute || !utf8.ValidString(p.SpreadBy), "spread_by: want at most %d bytes of UTF-8", MaxAttribute)
	fault(p.MinDomains < 1 || p.MinDomains > MaxReplicationFactor, "min_domains %d: want 1 to %d", p.MinDomains, MaxReplicationFactor)
	fault(p.MinDomains > p.ReplicationFactor && p.MinDomains <= MaxReplicationFactor, "min_domains %d: more than the replication factor %d",
		p.MinDomains, p.ReplicationFactor)
	fault(p.MinDomains > 1 && p.SpreadBy == "", "min_domains %d: spread_by names no attribute", p.MinDomains)
	fault(p.Placement != PlacementSoft && p.Placement != PlacementHard, "placement: want soft or hard")
	fault(p.SegmentMaxBytes < minSegmentMaxBytes || p.SegmentMaxBytes > maxSegmentMaxBytes, "segment_max_bytes %d: want %d to %d",
		p.SegmentMaxBytes, minSegmentMaxBytes, maxSegmentMaxBytes)
	fault(p.SegmentMaxAge < minSegmentMaxAge || p.SegmentMaxAge > maxSegmentMaxAge, "segment_max_age %v: want %v to %v",
		p.SegmentMaxAge, minSegmentMaxAge, maxSegmentMaxAge)
	return out
}

// foundingPolicy is the policy "default" of a cluster whose founding list names n brokers.
func foundingPolicy(n int) Policy {
	return Policy{Version: 1, ReplicationFactor: min(3, max(1, n)), Acks: AcksQuorum, SpreadBy: "zone", MinDomains: 1,
		Placement: PlacementSoft, SegmentMaxBytes: DefaultSegmentMaxBytes, SegmentMaxAge: DefaultSegmentMaxAge}
}

func (p Policy) isFounding() bool {
	f := foundingPolicy(1)
	return len(p.updates) == 0 && p.Version == f.Version && p.ReplicationFactor == f.ReplicationFactor && p.MinReplicas == 0 &&
		p.Acks == f.Acks && p.SpreadBy == f.SpreadBy && p.MinDomains == f.MinDomains && p.Placement == f.Placement &&
		p.SegmentMaxBytes == f.SegmentMaxBytes && p.SegmentMaxAge == f.SegmentMaxAge
}

func (s *State) updatePolicy(c *UpdatePolicy) (*State, Result) {
	if c.Nonce.IsZero() {
		return s, Result{Outcome: OutcomeInvalid, Detail: "a change of the policy without a nonce"}
	}
	for _, u := range s.Policy.updates {
		if u.nonce == c.Nonce {
			return s, Result{Outcome: OutcomeOK, Already: true}
		}
	}
	if s.Policy.Version != c.ExpectVersion {
		return s, Result{Outcome: OutcomeConflict, Detail: fmt.Sprintf("the policy is at version %d", s.Policy.Version)}
	}
	p := c.Change.Apply(s.Policy)
	if faults := p.Faults(); len(faults) > 0 {
		return s, Result{Outcome: OutcomeInvalid, Detail: strings.Join(faults, "; ")}
	}
	p.Version++
	p.updates = append(slices.Clone(s.Policy.updates), policyUpdate{c.Nonce, p.Version})
	if n := len(p.updates) - rememberedUpdates; n > 0 {
		p.updates = p.updates[n:]
	}
	next := *s
	next.Policy = p
	return &next, Result{Outcome: OutcomeOK}
}
