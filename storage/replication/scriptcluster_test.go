package replication

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/malachilog/malachi/storage"
)

// doCluster drives the simulator's world by hand: nothing happens in it but what the script says, and no message is lost but by a cut.
func (s *script) doCluster(what string, a args) (string, error) {
	w := s.world
	if what == "new" { // rf
		s.world = newWorld(simConfig{rf: int(a.n(0)), verbose: true}, 1)
		s.world.settling, s.world.scripted = true, true
		return fmt.Sprintf("%d brokers", len(s.world.brokers)), nil
	}
	seen := len(w.trace)
	switch what {
	case "open": // brokers, the primary first
		w.openNext()
		w.trace = w.trace[:seen] // says a set that is replaced
		m := w.tail()
		m.set, m.q = nil, int(a.n(0))
		for i := range a[1:] {
			m.set = append(m.set, brokerID(int(a.n(i+1))))
		}
		m.boot = w.root[m.primary()].boot
		for range len(m.set) + 1 {
			w.openReplicas(m)
			w.run()
		}
	case "append": // how many
		for range a.n(0) {
			w.brokers[w.tail().primary()].sessions[w.tail().seq].produce()
		}
	case "run":
		w.ship()
		w.run()
	case "journal": // one broker only
		b := w.brokers[a.n(0)]
		for b.journal() { //nolint:revive // until nothing is left
		}
	case "ship": // no barrier anywhere
		w.ship()
		for w.deliver() { //nolint:revive // until nothing is left
		}
	case "crash": // broker [power]
		w.brokers[a.n(0)].crash(a.has("power"))
	case "start":
		b := w.brokers[a.n(0)]
		b.start()
		b.recoveryCheckpoint()
		for seg := range w.segs {
			b.rejoin(seg)
		}
	case "checkpoint":
		for range 3 {
			w.brokers[a.n(0)].checkpoint()
			w.run()
		}
	case "cut": // brokers off from everybody else
		for i := range a {
			w.side[a.n(i)] = uint8(i + 1)
		}
	case "heal":
		w.side = [maxNodes]uint8{}
	case "rot":
		w.tail().faulted[int(a.n(0))] = true
		w.brokers[a.n(0)].disk.files[w.tail().seq].batches[0].rot = true
	case "pass":
		w.beginPass(w.tail(), Reason(a[0]))
		w.run()
	case "give-up": // everybody who did not answer
		for _, c := range slices.Clone(w.calls) {
			if !c.done {
				c.done = true
				c.timeout()
			}
		}
		w.run()
	case "retry":
		for i := len(w.passes) - 1; i >= 0; i-- {
			w.retry(i)
		}
		w.run()
	case "finish":
		m := w.tail()
		for range 3 {
			for _, member := range m.set {
				if b := w.brokers[indexOf(member)]; b.up && w.side[b.index] == 0 {
					b.onSeal(m, func() {})
				}
			}
			w.run()
		}
	case "state":
	default:
		return "", errors.New("no such command")
	}
	if w.check(); w.broken != "" {
		return "", errors.New(w.broken)
	}
	return w.describe(w.trace[seen:]), nil
}

// run lets everything that is under way come to rest.
func (w *world) run() {
	for range 5 {
		for _, b := range w.brokers {
			for b.up && b.journal() { //nolint:revive // until nothing is left
			}
			b.giveAll()
		}
		for w.deliver() { //nolint:revive // until nothing is left
		}
	}
}

func (w *world) ship() {
	for _, b := range w.brokers {
		for _, x := range b.sessions {
			if x == nil {
				continue
			}
			for i := range x.f {
				x.f[i].Resume()
				for x.ship(i) { //nolint:revive // until nothing is left
				}
			}
		}
	}
}

// describe tells what happened, and how the newest segment stands.
func (w *world) describe(trace []string) string {
	var out []string
	for _, l := range trace {
		out = append(out, "  "+l)
	}
	m := w.tail()
	line := fmt.Sprintf("segment %d acknowledged %d", m.seq, m.acked)
	if m.sealed != nil {
		line += fmt.Sprintf(" sealed %d", m.sealed.End)
	}
	for _, member := range m.set {
		b := w.brokers[indexOf(member)]
		line += fmt.Sprintf(" | %d: ", b.index)
		switch c := b.copies[m.seq]; {
		case !b.up:
			line += "down"
		case c == nil:
			line += "absent"
		default:
			line += fmt.Sprintf("%s %d/%d", c.m.State(), c.m.Durable(), c.m.Queued())
			if x := b.sessions[m.seq]; x != nil {
				line += " serves"
				if why, urgent, due := x.p.Due(); due {
					line += fmt.Sprintf(", wants a pass (%s, urgent %v)", why, urgent)
				}
			}
			if errors.Is(c.m.Damaged(), storage.ErrCorrupt) {
				line += " damaged"
			}
		}
	}
	return strings.Join(append(out, line), "\n")
}
