package replication

import "github.com/malachilog/malachi/e2e/inv/mutate"

// rules is a set of safety rules that are switched off, for the negative controls: the simulator must then find a loss. It is empty outside
// of this package's tests. The same switches exist by name in binaries built with the tag "mutate".
type rules uint32

// Rules that a machine of this package decides.
const (
	ruleQuorumOfAcks    rules = 1 << iota // an ack needs q confirmed ends, not q-1
	ruleRecordedBoot                      // a segment is served only under the boot that opened it
	ruleFencedSaysNoEnd                   // a fenced replica reports no end to a primary
	ruleReplayWaits                       // a replayed append is answered behind the barrier of the end it names
	ruleNoCreate                          // an append creates no replica
	ruleCheckpointFirst                   // a recovered replica answers nothing before its recovery checkpoint
	ruleSealQuorum                        // a seal needs n-q+1 votes
	ruleDamagedNoVote                     // the answer of a damaged replica fills no quorum
	rulePassEnds                          // the primary is one voter among n and proposes no end
)

// ruleNames are the switches of mutate.On.
var ruleNames = map[rules]string{
	ruleQuorumOfAcks:    "replication.ack-short-of-quorum",
	ruleRecordedBoot:    "replication.serve-stale-boot",
	ruleFencedSaysNoEnd: "replication.fenced-end-counts",
	ruleReplayWaits:     "replication.replay-before-barrier",
	ruleNoCreate:        "replication.create-on-append",
	ruleCheckpointFirst: "replication.vote-before-checkpoint",
	ruleSealQuorum:      "replication.seal-without-quorum",
	ruleDamagedNoVote:   "replication.damaged-vote-counts",
	rulePassEnds:        "replication.primary-proposes-end",
}

// off reports whether a rule is switched off.
func (r rules) off(rule rules) bool {
	return r&rule != 0 || mutated && mutate.On(ruleNames[rule])
}
