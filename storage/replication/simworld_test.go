package replication

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sort"

	"github.com/malachilog/malachi/storage"
)

// The simulator's world: brokers with disks, two coordinators that race, metadata that is linearizable, and a network that loses, delays,
// doubles and reorders. One random number decides every step, so a seed is a history.

const (
	maxBrokers  = 12
	coordA      = nodeID(maxBrokers)
	coordB      = nodeID(maxBrokers + 1)
	metadata    = nodeID(maxBrokers + 2)
	maxNodes    = maxBrokers + 3
	corruptRate = .02
)

type nodeID int

// outside are rules that this package does not decide, switched off.
type outside uint8

const (
	laxFenceOrder outside = 1 << iota // the end is measured when the replica is asked, before its fence
	laxLivePolicy                     // n and q come from today's policy
	laxBytes                          // batches are counted into the digest without being verified
	laxIdentity                       // root registers any disk that names the broker
	laxProof                          // root judges a disk by groups that it wrote since it was refused
	laxLateOpen                       // a replica is opened without asking whether the record still says open
)

// simConfig is a kind of history.
type simConfig struct {
	rf       int
	all      bool // acks: all
	steps    int
	rules    rules
	lax      outside
	policies bool // the policy changes while segments are open
	lossOnly bool // only losses count, not the breaking of a contract
	weights  map[string]int
	verbose  bool
}

type policy struct {
	rf  int
	all bool
}

func (p policy) q() int {
	if p.all {
		return p.rf
	}
	return p.rf/2 + 1
}

type message struct {
	from, to nodeID
	f        func()
}

// simCall is a call that is answered once, or given up.
type simCall struct {
	done    bool
	timeout func()
}

// segment is one segment's record in the metadata, and what the simulator alone knows: what the primary wrote and what was acknowledged.
type simSegment struct {
	seq       int
	set       []storage.BrokerID
	q         int
	boot      storage.Boot // the primary's
	base      storage.End
	confirmed map[storage.BrokerID]bool
	sealed    *Outcome

	written []simBatch
	chains  []storage.Digest
	acked   storage.End
	faulted map[int]bool // lost or damaged copies
}

func (m *simSegment) end() storage.End {
	if len(m.written) == 0 {
		return m.base
	}
	return m.written[len(m.written)-1].end()
}

// wrote reports whether the primary wrote exactly b.
func (m *simSegment) wrote(b simBatch) bool {
	i := sort.Search(len(m.written), func(i int) bool { return m.written[i].base >= b.base })
	return i < len(m.written) && m.written[i] == b
}

// digestAt is the digest of what the primary wrote below end; false if that is no end of a batch.
func (m *simSegment) digestAt(end storage.End) (storage.Digest, bool) {
	if end == m.base {
		return 0, true
	}
	i := sort.Search(len(m.written), func(i int) bool { return m.written[i].end() >= end })
	if i == len(m.written) || m.written[i].end() != end {
		return 0, false
	}
	return m.chains[i], true
}

func (m *simSegment) has(b int) bool { return slices.Contains(m.set, brokerID(b)) }

func brokerID(i int) storage.BrokerID       { return storage.BrokerID(i + 1) }
func indexOf(b storage.BrokerID) int        { return int(b) - 1 }
func (m *simSegment) primary() int          { return indexOf(m.set[0]) }
func (m *simSegment) quorumOfSeal() int     { return len(m.set) - m.q + 1 }
func (m *simSegment) abandoned() bool       { return m.sealed != nil && m.sealed.End == m.base }
func (m *simSegment) faults(except int) int { return len(m.faulted) - btoi(m.faulted[except]) }

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

type registration struct {
	boot  storage.Boot
	group uint64
}

type world struct {
	cfg      simConfig
	r        *rand.Rand
	policy   policy
	brokers  []*simBroker
	segs     []*simSegment
	root     [maxBrokers]registration
	images   []*image
	net      []message
	calls    []*simCall
	passes   []*simPass
	side     [maxNodes]uint8
	dirty    [maxSegs]bool
	counts   map[string]int
	trace    []string
	broken   string
	settling bool
	scripted bool
	content  uint64
	total    int // sum of the weights
	weights  []int
}

// image is a copy of a disk that somebody keeps.
type image struct {
	broker int
	disk   *simDisk
}

func newWorld(cfg simConfig, seed uint64) *world {
	w := &world{cfg: cfg, r: rand.New(rand.NewPCG(seed, 0x6d616c61)), policy: policy{cfg.rf, cfg.all}, counts: map[string]int{}}
	for range cfg.rf + 1 {
		w.newBroker()
	}
	for _, e := range events {
		weight := e.weight
		if n, ok := cfg.weights[e.name]; ok {
			weight = n
		}
		w.weights = append(w.weights, weight)
		w.total += weight
	}
	return w
}

func (w *world) chance(p float64) bool { return w.r.Float64() < p }

// branch counts that something happened.
func (w *world) branch(name string) { w.counts[name]++ }

// note counts that something happened and puts it into the trace.
func (w *world) note(name string, args ...any) {
	w.counts[name]++
	if w.cfg.verbose {
		w.trace = append(w.trace, fmt.Sprint(append([]any{name, " "}, args...)...))
	}
}

// violates ends the history. A contract that is broken without a loss is not enough for a control.
func (w *world) violates(inv, format string, args ...any) {
	if w.broken != "" || w.cfg.lossOnly && !losses[inv] {
		return
	}
	w.broken = inv + ": " + fmt.Sprintf(format, args...)
	w.note("VIOLATION", w.broken)
}

// losses are the lines that are a loss in themselves.
var losses = map[string]bool{"INV-D1": true, "INV-D2": true, "INV-D4": true, "INV-S1": true, "INV-S3": true, "INV-S8": true, "INV-S12": true,
	"INV-S14": true}

func (w *world) alive(n nodeID) *simBroker {
	if n >= maxBrokers {
		return nil
	}
	return w.brokers[n]
}

// send puts a message onto the network.
func (w *world) send(from, to nodeID, f func()) { w.net = append(w.net, message{from, to, f}) }

// call sends a request to a broker. serve runs there and calls reply at most once, whenever it likes; what it is given runs at the caller.
// Exactly one of that and timeout runs.
func (w *world) call(from nodeID, to int, serve func(b *simBroker, reply func(func())), timeout func()) {
	c := &simCall{timeout: timeout}
	w.calls = append(w.calls, c)
	w.send(from, nodeID(to), func() {
		b := w.brokers[to]
		serve(b, func(f func()) {
			w.send(nodeID(to), from, func() {
				if c.done {
					w.branch("late or double answer")
					return
				}
				c.done = true
				f()
			})
		})
	})
}

// deliver hands over one message, or loses, doubles or delays it.
func (w *world) deliver() bool {
	if len(w.net) == 0 {
		return false
	}
	i := 0
	if !w.settling {
		i = w.r.IntN(len(w.net))
		if len(w.net) > 1 && w.chance(.5) { // half of the time roughly in order
			i = w.r.IntN(min(len(w.net), 4))
		}
	}
	m := w.net[i]
	double := !w.settling && w.chance(.05)
	if b := w.alive(m.to); b != nil && b.up && b.paused && !w.settling {
		return false // it waits at the paused process
	}
	if double {
		w.branch("message doubled")
	} else {
		w.net = slices.Delete(w.net, i, i+1)
	}
	if w.side[m.from] != w.side[m.to] {
		w.branch("message lost in a partition")
		return true
	}
	if !w.settling && m.to != metadata && w.chance(.06) {
		w.branch("message lost")
		return true
	}
	if b := w.alive(m.to); b != nil && !b.up {
		w.branch("message to a dead process")
		return true
	}
	if i > 0 {
		w.branch("message overtook another")
	}
	m.f()
	return true
}

// expire gives up a call.
func (w *world) expire(i int) bool {
	w.calls = slices.DeleteFunc(w.calls, func(c *simCall) bool { return c.done })
	if len(w.calls) == 0 {
		return false
	}
	c := w.calls[i%len(w.calls)]
	c.done = true
	w.branch("call given up")
	c.timeout()
	return true
}

// step does one thing.
func (w *world) step() {
	for range 20 { // until something could be done
		x := w.r.IntN(w.total)
		for i, weight := range w.weights {
			if x -= weight; x < 0 {
				if events[i].do(w) {
					w.check()
					return
				}
				break
			}
		}
	}
}

// history runs one seed to its end: random steps, then everything heals and the range must be writable again.
func history(cfg simConfig, seed uint64) *world {
	w := newWorld(cfg, seed)
	for range cfg.steps {
		if w.step(); w.broken != "" {
			return w
		}
	}
	w.settle()
	return w
}
