package replication

import (
	"flag"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/malachilog/malachi/e2e/inv"
)

var (
	simSeed  = flag.Uint64("sim.seed", 0, "run this one seed in every shape and print its trace; 0: fixed and fresh seeds")
	simSteps = flag.Int("sim.steps", 500, "random steps of a history, before everything heals")
	simCount = flag.Uint64("sim.count", 1200, "fixed seeds per shape; as many fresh ones are run too")
)

// shapes are the replica sets: n of a segment is between q and rf.
var shapes = []simConfig{
	{rf: 1}, {rf: 2}, {rf: 3}, {rf: 5}, {rf: 3, all: true}, {rf: 3, policies: true}, {rf: 5, policies: true},
}

// branches are what the histories must have reached, all together: a simulation that never meets a fault proves nothing about it.
var branches = []string{
	"abandoned", "acked", "answer BUSY", "answer DAMAGED", "answer FENCED", "answer GAP", "answer SEALED", "answer STORAGE_FAILED",
	"answer UNKNOWN", "a racer had sealed", "a readable group is lost", "a readable group was kept", "barrier failed", "blocked",
	"call given up", "catch-up from the primary's log", "checkpoint", "clone refused beside the original", "copy extended", "copy sealed",
	"corrupt message refused", "crash in the recovery checkpoint", "cut", "disk full", "disk refused", "disk rolled back", "disk wiped",
	"dropped", "fenced after the seal", "fenced as a stub", "fewer than q answer", "follower gone", "follower paused", "late open refused", "late or double answer", "message doubled",
	"message lost", "message lost in a partition", "message overtook another", "no vote: replica is damaged", "no vote: segment is sealed",
	"no vote: storage has failed", "not extended, holder failed true", "open under another boot", "page cache is lost", "partition",
	"pass interrupted", "passes race", "paused", "policy", "power cut of all", "primary asks: failed", "primary asks: fenced",
	"primary asks: no-quorum", "refused before append", "replay answered at once", "restarted copy verified", "restarted follower goes on",
	"restarted primary does not serve", "rot", "rot found at a restart", "rot found by a read", "set smaller than rf", "the primary serves",
	"too few brokers for a segment", "writable again", "zombie primary",
}

func replay(t *testing.T, cfg simConfig, seed uint64) {
	t.Helper()
	cfg.verbose = true
	w := history(cfg, seed)
	t.Logf("rf %d, acks all %v, policies %v, seed %d:\n%s", cfg.rf, cfg.all, cfg.policies, seed, strings.Join(w.trace, "\n"))
	if w.broken != "" {
		t.Errorf("make sim SEED=%d STEPS=%d: %s", seed, cfg.steps, w.broken)
	}
}

// TestSimulation runs thousands of seeded histories, and looks after each step for what must never happen.
func TestSimulation(t *testing.T) {
	inv.Covers(t, "INV-D1", "INV-D2", "INV-D3", "INV-D4", "INV-D5", "INV-D7", "INV-D9", "INV-D10", "INV-D11", "INV-D12", "INV-D15",
		"INV-S1", "INV-S3", "INV-S5", "INV-S6", "INV-S7", "INV-S8", "INV-S9", "INV-S10", "INV-S11", "INV-S12", "INV-S13", "INV-S14",
		"INV-S15", "INV-S16", "INV-S17")
	if *simSeed != 0 {
		for _, cfg := range shapes {
			cfg.steps = *simSteps
			replay(t, cfg, *simSeed)
		}
		return
	}
	fresh := rand.Uint64()
	t.Logf("fixed seeds 1 to %d, fresh ones from %d", *simCount, fresh)
	counts, histories := map[string]int{}, 0
	for _, cfg := range shapes {
		cfg.steps = *simSteps
		for i := range 2 * *simCount {
			seed := i + 1
			if i >= *simCount {
				seed = fresh + i
			}
			w := history(cfg, seed)
			if w.broken != "" {
				replay(t, cfg, seed)
				return
			}
			for k, n := range w.counts {
				counts[k] += n
			}
			histories++
		}
	}
	t.Logf("%d histories", histories)
	for _, k := range slices.Sorted(maps.Keys(counts)) {
		t.Logf("%8d %s", counts[k], k)
	}
	for _, b := range branches {
		if counts[b] == 0 && histories >= 10000 && *simSteps >= 500 {
			t.Errorf("no history reached %q", b)
		}
	}
}

// TestSameSeedSameTrace holds the simulator to its promise.
func TestSameSeedSameTrace(t *testing.T) {
	for _, cfg := range shapes {
		cfg.steps, cfg.verbose = *simSteps, true
		for seed := range uint64(25) {
			a, b := history(cfg, seed), history(cfg, seed)
			if !slices.Equal(a.trace, b.trace) {
				t.Fatalf("rf %d seed %d gives two traces", cfg.rf, seed)
			}
		}
		if a, b := history(cfg, 1), history(cfg, 2); slices.Equal(a.trace, b.trace) {
			t.Errorf("rf %d: two seeds give one trace", cfg.rf)
		}
	}
}

// controls: one safety rule each is switched off, and the simulator must find a loss.
var controls = []struct {
	name string
	cfg  simConfig
}{
	{"ack at q-1", simConfig{rf: 2, rules: ruleQuorumOfAcks}},
	{"end taken before the fence", simConfig{rf: 3, lax: laxFenceOrder}},
	{"primary resumes after restart", simConfig{rf: 3, rules: ruleRecordedBoot}},
	{"seal quorum n-q", simConfig{rf: 3, rules: ruleSealQuorum}},
	{"primary proposes its own durable end", simConfig{rf: 3, rules: rulePassEnds, weights: manyCrashes}},
	{"a fenced replica's end counts for an ack", simConfig{rf: 3, rules: ruleFencedSaysNoEnd, weights: manyPasses}},
	{"n or q from the live policy", simConfig{rf: 3, policies: true, lax: laxLivePolicy}},
	{"votes before the recovery checkpoint", simConfig{rf: 1, rules: ruleCheckpointFirst}},
	{"a damaged answer fills the quorum", simConfig{rf: 3, rules: ruleDamagedNoVote}},
	{"digest from unverified bytes", simConfig{rf: 2, lax: laxBytes}},
	{"cloned disk accepted", simConfig{rf: 2, lax: laxIdentity}},
	{"followers create on append", simConfig{rf: 2, rules: ruleNoCreate, weights: manyPasses}},
	{"replayed append answered before its barrier", simConfig{rf: 2, rules: ruleReplayWaits}},
	{"a refused disk grows into its own past", simConfig{rf: 2, lax: laxProof, weights: manyImages}},
}

// Histories in which the misfortune of a control is frequent.
var (
	manyPasses  = map[string]int{"pass": 40, "finish": 300}
	manyCrashes = map[string]int{"crash": 30, "start": 200, "pass": 20}
	manyImages  = map[string]int{"image": 60, "clone": 60, "crash": 30, "start": 200}
)

const (
	controlHistories = 2000
	controlSteps     = 500
)

func TestNegativeControls(t *testing.T) {
	inv.Covers(t, "INV-H1", "INV-D1", "INV-D5", "INV-D9", "INV-D10", "INV-D11", "INV-D12", "INV-D15", "INV-S1", "INV-S2", "INV-S14", "INV-S15", "INV-S17")
	for _, c := range controls {
		t.Run(c.name, func(t *testing.T) {
			cfg := c.cfg
			cfg.lossOnly, cfg.steps = true, controlSteps
			clean := cfg
			clean.rules, clean.lax = 0, 0
			for seed := range uint64(controlHistories) {
				if w := history(clean, seed); w.broken != "" {
					t.Fatalf("with the rule on, seed %d: %s", seed, w.broken)
				}
				if w := history(cfg, seed); w.broken != "" {
					t.Logf("rf %d, smallest seed %d: %s", cfg.rf, seed, w.broken)
					return
				}
			}
			t.Errorf("the rule is off, and %d histories find no loss", controlHistories)
		})
	}
}

// TestDroppedReplicaIsNotOpenedAgain: dropping an abandoned segment takes its fence away. An OpenReplica that was under way all the time
// must not make the replica again while the old primary still lives: who opens asks the record first.
func TestDroppedReplicaIsNotOpenedAgain(t *testing.T) {
	inv.Covers(t, "INV-S8", "INV-D6")
	for _, lax := range []outside{0, laxLateOpen} {
		w := newWorld(simConfig{rf: 2, lax: lax, lossOnly: true, verbose: true}, 1)
		w.settling = true // nothing is lost but what the test takes
		pump := func() {
			for range 6 {
				for _, b := range w.brokers {
					for b.journal() { //nolint:revive // until nothing is left
					}
					b.giveAll()
				}
				for w.deliver() { //nolint:revive // until nothing is left
				}
			}
			w.check()
		}
		w.openNext()
		m := w.segs[0]
		w.openReplicas(m)
		pump()
		w.openReplicas(m)
		pump()
		primary, follower := w.brokers[m.primary()], w.brokers[indexOf(m.set[1])]
		s := primary.sessions[0]
		if s == nil || len(m.confirmed) != 2 {
			t.Fatal("the segment does not open")
		}
		clear(m.confirmed)
		w.openReplicas(m)
		late := w.net
		w.net = nil
		w.side[primary.index] = 1 // the primary alone is cut off
		w.beginPass(m, ReasonPrimaryGone)
		for range 4 {
			pump()
			for _, c := range w.calls {
				if !c.done {
					c.done = true
					c.timeout()
				}
			}
		}
		if m.sealed == nil || !m.abandoned() {
			t.Fatalf("the segment is not abandoned: %v", w.trace)
		}
		follower.onSeal(m, func() {})
		pump()
		w.side = [maxNodes]uint8{}
		w.net = late
		pump()
		s.produce()
		s.ship(0)
		pump()
		if lost := w.broken != ""; lost != (lax != 0) {
			t.Errorf("asking the record %v: %q, acknowledged %d", lax == 0, w.broken, m.acked)
		}
	}
}
