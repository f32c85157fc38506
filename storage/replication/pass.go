package replication

import (
	"fmt"
	"slices"

	"github.com/malachilog/malachi/storage"
)

// Reason says why a pass is run. It is recorded with the seal.
type Reason string

// Reasons.
const (
	ReasonSize            Reason = "size"             // the policy's segment_max_bytes
	ReasonAge             Reason = "age"              // the policy's segment_max_age
	ReasonRestart         Reason = "restart"          // the primary has another boot than the one recorded
	ReasonPrimaryGone     Reason = "primary-gone"     // somebody could not reach the primary
	ReasonFenced          Reason = "fenced"           // a replica is fenced while the record says open
	ReasonFailed          Reason = "failed"           // a copy's storage has failed
	ReasonNoQuorum        Reason = "no-quorum"        // the primary has an append that is older than the produce deadline
	ReasonUnconfirmed     Reason = "unconfirmed"      // the open was not confirmed in time
	ReasonDelete          Reason = "delete"           // the topic is being deleted
	ReasonDrain           Reason = "drain"            // a member is to be left without open segments
	ReasonUnderReplicated Reason = "under-replicated" // the set is smaller than wanted, and enough brokers are back
	ReasonOperator        Reason = "operator"         // asked for by a person
)

// planned reports whether the primary is expected to be serving, so that asking it proves nothing.
func (r Reason) planned() bool { return r != ReasonPrimaryGone }

// Vote is the answer of a fenced, undamaged replica: its durable end, its data's length in bytes, and the running digest as received.
type Vote struct {
	End    storage.End
	Bytes  int64
	Digest storage.Digest
}

// Outcome is what a pass has found and made sure of: the values of the seal command.
type Outcome struct {
	Vote
	Holder  storage.BrokerID   // whose answer it is
	Holders []storage.BrokerID // who hold everything below End, durably, with that digest
	Votes   int
}

// OrderKind is what a pass wants done.
type OrderKind uint8

// Orders. Each is answered by exactly one event that names the same broker, sooner or later; orders may be carried out in parallel.
const (
	OrderAsk    OrderKind = iota + 1 // read-only: are you there, do you serve this segment?       -> Answered or Unreachable
	OrderDrain                       // best effort, to the primary: stop accepting, settle         -> Drained
	OrderFence                       // fence durably, then vote                                    -> Voted, NoVote or Unreachable
	OrderExtend                      // copy batches from Holder up to End onto Broker (recovered)  -> Extended or NotExtended
	OrderSeal                        // record Outcome by compare-and-set                           -> Finish
	OrderWait                        // blocked: tell what for, begin again later                   -> Retry
	OrderStop                        // nothing to do: the primary serves                           -> none, the pass is over
	OrderMore                        // enough to seal answer, but fewer than q: wait 30 s for more -> More (only after WaitForMore)
)

// Order is one thing to do.
type Order struct {
	Kind    OrderKind
	Broker  storage.BrokerID
	Holder  storage.BrokerID
	Outcome Outcome // OrderExtend: what to reach; OrderSeal: what to record
	Blocked string  // OrderWait: by what, for people
}

// phase of a pass.
type phase uint8

const (
	phaseAsk phase = iota
	phaseMore
	phaseDrain
	phaseFence
	phaseExtend
	phaseSeal
	phaseWait
	phaseOver
)

// Pass is the only way to seal a segment. It asks, fences, takes the end from one vote among at least n-q+1, brings that end onto
// min(q, votes) copies, and records it. It holds no state that a second pass, beside it or after it, would need.
type Pass struct {
	set    []storage.BrokerID // n = len(set)
	q      int
	reason Reason

	phase    phase
	waiting  map[storage.BrokerID]bool
	answered map[storage.BrokerID]bool
	votes    map[storage.BrokerID]Vote
	lost     map[storage.BrokerID]bool // holders that could not ship: their vote does not count
	holders  map[storage.BrokerID]bool
	outcome  Outcome
	faults   []string
	patient  bool // WaitForMore
	waited   bool // in this attempt
	rules    rules
}

// NewPass begins a pass over the recorded set with the recorded q (INV-D11): never with what a policy says now.
func NewPass(set []storage.BrokerID, q int, reason Reason) *Pass {
	return &Pass{set: set, q: q, reason: reason}
}

// quorum is the number of votes that meets every set of q acknowledgements.
func (p *Pass) quorum() int {
	if p.rules.off(ruleSealQuorum) {
		return max(1, len(p.set)-p.q)
	}
	return len(p.set) - p.q + 1
}

// WaitForMore makes the pass order one wait for more answers (OrderMore) in each attempt in which enough to seal, but fewer than q, answer:
// whoever comes back meanwhile makes the sealed end safer, for it is brought onto as many as min(q, votes) copies. Call it before Begin.
func (p *Pass) WaitForMore() { p.patient = true }

// Begin returns the first orders.
func (p *Pass) Begin() []Order {
	p.phase, p.waited = phaseAsk, false
	p.answered, p.votes = map[storage.BrokerID]bool{}, map[storage.BrokerID]Vote{}
	p.lost, p.holders = map[storage.BrokerID]bool{}, map[storage.BrokerID]bool{}
	p.faults = nil
	if p.reason == ReasonSize || p.reason == ReasonAge {
		for _, b := range p.set {
			p.answered[b] = true
		}
		return p.drain()
	}
	return p.toAll(OrderAsk, p.set)
}

func (p *Pass) toAll(k OrderKind, to []storage.BrokerID) []Order {
	p.waiting = map[storage.BrokerID]bool{}
	var out []Order
	for _, b := range to {
		p.waiting[b] = true
		out = append(out, Order{Kind: k, Broker: b})
	}
	return out
}

// Answered: the broker is there. serving: it is this segment's primary under the recorded boot and its quorum is up.
func (p *Pass) Answered(b storage.BrokerID, serving bool) []Order {
	if p.phase != phaseAsk || !p.waiting[b] {
		return nil
	}
	delete(p.waiting, b)
	p.answered[b] = true
	if serving && !p.reason.planned() {
		p.phase = phaseOver // suspicion is advice; an answer counts (INV-S7)
		return []Order{{Kind: OrderStop}}
	}
	return p.asked()
}

func (p *Pass) asked() []Order {
	if len(p.waiting) > 0 {
		return nil
	}
	if len(p.answered) < p.quorum() { // nobody is fenced unless the answers are together (INV-S6)
		return p.wait(fmt.Sprintf("%d of %d replicas answer, %d are needed", len(p.answered), len(p.set), p.quorum()))
	}
	if p.patient && !p.waited && len(p.answered) < p.q {
		p.phase, p.waited = phaseMore, true
		return []Order{{Kind: OrderMore}}
	}
	return p.drain()
}

// More: the wait that OrderMore asked for is over. Who has not answered is asked once more, then the pass goes on with whoever is there.
func (p *Pass) More() []Order {
	if p.phase != phaseMore {
		return nil
	}
	p.phase = phaseAsk
	return p.toAll(OrderAsk, slices.DeleteFunc(slices.Clone(p.set), func(b storage.BrokerID) bool { return p.answered[b] }))
}

func (p *Pass) drain() []Order {
	if !p.answered[p.set[0]] {
		return p.fence()
	}
	p.phase = phaseDrain
	return p.toAll(OrderDrain, p.set[:1])
}

// Drained: the primary has stopped accepting, or did not answer in time; either will do.
func (p *Pass) Drained(b storage.BrokerID) []Order {
	if p.phase != phaseDrain || !p.waiting[b] {
		return nil
	}
	return p.fence()
}

func (p *Pass) fence() []Order {
	p.phase = phaseFence
	var to []storage.BrokerID
	for _, b := range p.set {
		if p.answered[b] {
			to = append(to, b)
		}
	}
	return p.toAll(OrderFence, to)
}

// Voted: the replica is durably fenced and this is its vote.
func (p *Pass) Voted(b storage.BrokerID, v Vote) []Order {
	if p.phase != phaseFence || !p.waiting[b] {
		return nil
	}
	delete(p.waiting, b)
	p.votes[b] = v
	if b == p.set[0] && p.rules.off(rulePassEnds) {
		p.votes, p.waiting = map[storage.BrokerID]Vote{b: v}, nil
		p.outcome = Outcome{Vote: v, Holder: b, Votes: 1}
		p.holders = map[storage.BrokerID]bool{b: true}
		return p.extended()
	}
	return p.voted()
}

// NoVote: the replica answered but knows of damage, or has failed: it fills no quorum (INV-S17).
func (p *Pass) NoVote(b storage.BrokerID, why error) []Order {
	if p.phase != phaseFence || !p.waiting[b] {
		return nil
	}
	delete(p.waiting, b)
	p.faults = append(p.faults, fmt.Sprintf("%s: %v", b, why))
	if p.rules.off(ruleDamagedNoVote) {
		p.votes[b] = Vote{}
	}
	return p.voted()
}

// Unreachable: the broker did not answer the order.
func (p *Pass) Unreachable(b storage.BrokerID) []Order {
	if !p.waiting[b] {
		return nil
	}
	delete(p.waiting, b)
	p.faults = append(p.faults, fmt.Sprintf("%s does not answer", b))
	switch p.phase {
	case phaseAsk:
		return p.asked()
	case phaseFence:
		return p.voted()
	}
	return nil
}

func (p *Pass) voted() []Order {
	if len(p.waiting) > 0 {
		return nil
	}
	return p.choose()
}

// choose takes end, bytes and digest from the one vote with the highest end (INV-S3) and has it brought onto enough copies.
func (p *Pass) choose() []Order {
	votes := 0
	p.outcome = Outcome{}
	for _, b := range p.set { // in the set's order, so that equal votes choose the same holder
		v, ok := p.votes[b]
		if !ok || p.lost[b] {
			continue
		}
		if votes++; votes == 1 || v.End > p.outcome.End {
			p.outcome.Vote, p.outcome.Holder = v, b
		}
	}
	p.outcome.Votes = votes
	if votes < p.quorum() {
		return p.wait(fmt.Sprintf("%d of %d replicas vote, %d are needed %v", votes, len(p.set), p.quorum(), p.faults))
	}
	p.holders = map[storage.BrokerID]bool{}
	p.waiting = map[storage.BrokerID]bool{}
	p.phase = phaseExtend
	var out []Order
	for _, b := range p.set {
		v, ok := p.votes[b]
		switch {
		case !ok || p.lost[b]:
		case v.End == p.outcome.End && v.Digest == p.outcome.Digest:
			p.holders[b] = true
		case v.End < p.outcome.End:
			p.waiting[b] = true
			out = append(out, Order{Kind: OrderExtend, Broker: b, Holder: p.outcome.Holder, Outcome: p.outcome})
		}
	}
	if done := p.extended(); done != nil {
		return done
	}
	return out
}

// Extended: the replica has everything below the end, durably; digest is what it computed as received.
func (p *Pass) Extended(b storage.BrokerID, end storage.End, digest storage.Digest) []Order {
	if p.phase != phaseExtend || !p.waiting[b] {
		return nil
	}
	delete(p.waiting, b)
	if end == p.outcome.End && digest == p.outcome.Digest {
		p.holders[b] = true
	} else {
		p.faults = append(p.faults, fmt.Sprintf("%s has other bytes below %d than %s", b, end, p.outcome.Holder))
	}
	return p.extended()
}

// NotExtended: the copy onto b failed. holderFailed: the holder could not ship verified batches up to its end, and loses its vote.
func (p *Pass) NotExtended(b storage.BrokerID, holderFailed bool) []Order {
	if p.phase != phaseExtend || !p.waiting[b] {
		return nil
	}
	delete(p.waiting, b)
	p.faults = append(p.faults, fmt.Sprintf("%s could not be extended", b))
	if holderFailed {
		p.lost[p.outcome.Holder] = true
		return p.choose()
	}
	return p.extended()
}

func (p *Pass) extended() []Order {
	if len(p.holders) >= min(p.q, p.outcome.Votes) {
		p.phase = phaseSeal
		p.outcome.Holders = nil
		for _, b := range p.set {
			if p.holders[b] {
				p.outcome.Holders = append(p.outcome.Holders, b)
			}
		}
		return []Order{{Kind: OrderSeal, Outcome: p.outcome}}
	}
	if len(p.waiting) > 0 {
		return nil
	}
	return p.wait(fmt.Sprintf("%d copies hold everything below %d, %d are needed %v",
		len(p.holders), p.outcome.End, min(p.q, p.outcome.Votes), p.faults))
}

func (p *Pass) wait(by string) []Order {
	p.phase = phaseWait
	p.waiting = nil
	return []Order{{Kind: OrderWait, Blocked: by}}
}

// Retry begins again after OrderWait: everything is asked anew, for an answer may be old.
func (p *Pass) Retry() []Order {
	if p.phase != phaseWait {
		return nil
	}
	return p.Begin()
}

// Finish: the seal was recorded, or a racer's was found recorded. The pass is over.
func (p *Pass) Finish() {
	p.phase = phaseOver
}

// Over reports whether the pass has ended.
func (p *Pass) Over() bool { return p.phase == phaseOver }

// Waiting returns the brokers whose answer is outstanding, in the set's order.
func (p *Pass) Waiting() []storage.BrokerID {
	out := slices.Clone(p.set)
	return slices.DeleteFunc(out, func(b storage.BrokerID) bool { return !p.waiting[b] })
}
