package replication

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/malachilog/malachi/storage"
)

var rewrite = flag.Bool("rewrite", false, "write what the machines say now into testdata/*.txt; read the difference")

// TestScripts runs the interaction scripts: what the machines of a segment are told line by line, and what they say to it. A script is
// made of blocks: commands, a line of dashes, and the answers. Lines that begin with # are for the reader.
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, name := range files {
		t.Run(strings.TrimSuffix(filepath.Base(name), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			got := runScript(t, string(text))
			if *rewrite {
				if err := os.WriteFile(name, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			} else if got != string(text) {
				t.Errorf("the machines say otherwise:\n%s", got)
			}
		})
	}
}

func runScript(t *testing.T, text string) string {
	var out strings.Builder
	s := &script{calls: map[string]Call{}}
	for block := range strings.SplitSeq(strings.TrimRight(text, "\n"), "\n\n") {
		commands, _, _ := strings.Cut(block, "\n----")
		var said []string
		comment := true
		for line := range strings.SplitSeq(commands, "\n") {
			if strings.HasPrefix(line, "#") || line == "" {
				continue
			}
			comment = false
			answer, err := s.do(strings.Fields(line))
			if err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			said = append(said, answer)
		}
		if out.Len() > 0 {
			out.WriteString("\n")
		}
		out.WriteString(commands + "\n")
		if !comment {
			out.WriteString("----\n" + strings.Join(said, "\n") + "\n")
		}
	}
	return out.String()
}

// script holds one machine of each kind.
type script struct {
	primary  *Primary
	follower *Follower
	replica  Replica
	pass     *Pass
	calls    map[string]Call
	world    *world
}

type args []string

func (a args) n(i int) uint64 {
	if i >= len(a) {
		return 0
	}
	n, err := strconv.ParseUint(a[i], 10, 64)
	if err != nil {
		return 0
	}
	return n
}
func (a args) end(i int) storage.End         { return storage.End(a.n(i)) }
func (a args) broker(i int) storage.BrokerID { return storage.BrokerID(a.n(i)) }
func (a args) has(s string) bool             { return slices.Contains(a, s) }

var scriptErrors = map[string]error{"fenced": storage.ErrFenced, "sealed": storage.ErrSealed, "failed": storage.ErrStorageFailed,
	"damaged": storage.ErrDamaged, "unknown": storage.ErrUnknownSegment}

var scriptAnswers = map[string]AnswerKind{"ok": AnswerOK, "gap": AnswerGap, "busy": AnswerBusy, "unknown": AnswerUnknown, "fenced": AnswerFenced,
	"sealed": AnswerSealed, "failed": AnswerFailed, "damaged": AnswerDamaged}

func (s *script) do(line []string) (string, error) {
	kind, a := line[0], args(line[1:])
	if len(a) == 0 {
		return "", fmt.Errorf("what shall %s do?", kind)
	}
	switch kind {
	case "primary":
		return s.doPrimary(a[0], a[1:])
	case "follower":
		return s.doFollower(a[0], a[1:])
	case "replica":
		return s.doReplica(a[0], a[1:])
	case "cluster":
		return s.doCluster(a[0], a[1:])
	case "pass":
		return s.doPass(a[0], a[1:])
	}
	return "", errors.New("no such machine")
}

func set(n uint64) (out []storage.BrokerID) {
	for i := range n {
		out = append(out, storage.BrokerID(i+1))
	}
	return out
}

func (s *script) doPrimary(what string, a args) (string, error) {
	p := s.primary
	switch what {
	case "new": // n q base boot recorded
		made, err := NewPrimary(set(a.n(0)), int(a.n(1)), storage.Offset(a.n(2)), storage.Boot(a.n(3)), storage.Boot(a.n(4)))
		if err != nil {
			return "refused: " + err.Error(), nil
		}
		s.primary, p = made, made
	case "take":
		base, err := p.Take(uint32(a.n(0)))
		if err != nil {
			return "refused: " + err.Error(), nil
		}
		return fmt.Sprintf("offset %d", base), nil
	case "confirm":
		p.Confirm(a.broker(0), a.end(1))
	case "gone":
		p.Gone(a.broker(0), scriptErrors[a[1]])
	case "late":
		p.Late()
	default:
		return "", errors.New("no such command")
	}
	out := fmt.Sprintf("next %d committed %d", p.Next(), p.Committed())
	if why, urgent, due := p.Due(); due {
		out += fmt.Sprintf(", asks for a pass: %s urgent %v", why, urgent)
	}
	if err := p.Stopped(); err != nil {
		out += ", stopped: " + err.Error()
	}
	return out, nil
}

func (s *script) doFollower(what string, a args) (string, error) {
	f := s.follower
	verdict := ""
	switch what {
	case "new": // base live
		s.follower = NewFollower(storage.Offset(a.n(0)), Limits{Live: int64(a.n(1))})
		f = s.follower
	case "appended":
		f.Appended(a.end(0), int64(a.n(1)))
	case "opened":
		f.Opened()
	case "sent": // name end
		from, _, ok := f.Send()
		if !ok {
			return "nothing to send", nil
		}
		s.calls[a[0]] = f.Sent(from, a.end(1))
	case "answer": // name kind end
		verdict = verdictNames[f.Answer(s.calls[a[0]], Answer{scriptAnswers[a[1]], a.end(2)})]
	case "lost":
		verdict = verdictNames[f.Lost(s.calls[a[0]])]
	case "resume":
		f.Resume()
	default:
		return "", errors.New("no such command")
	}
	return verdict + describe(f), nil
}

var verdictNames = map[Verdict]string{VerdictCount: "counts; ", VerdictShip: "again; ", VerdictPause: "pause; ", VerdictGone: "gone; "}

func describe(f *Follower) string {
	out := fmt.Sprintf("confirmed %d", f.Confirmed())
	switch from, to, ok := f.Send(); {
	case f.Gone() != nil:
		out += ", gone: " + f.Gone().Error()
	case f.Paused():
		out += ", paused"
	case ok:
		out += fmt.Sprintf(", ship %d to %d", from, to)
	}
	if f.Behind() {
		out += ", behind"
	}
	if from, ok := f.Keep(); ok && f.Lag() > 0 {
		out += fmt.Sprintf(", keep from %d", from)
	}
	return out
}

func (s *script) doReplica(what string, a args) (string, error) {
	r := &s.replica
	var err error
	said := ""
	switch what {
	case "absent":
		*r = Replica{}
	case "open":
		*r = NewReplica(storage.Offset(a.n(0)))
	case "recover": // end [fenced] [damaged]
		var damaged error
		if a.has("damaged") {
			damaged = storage.ErrCorrupt
		}
		*r = RecoverReplica(a.end(0), a.has("fenced"), damaged)
	case "checkpointed":
		r.Checkpointed()
	case "verified":
		r.Verified()
	case "rejoin":
		err = r.Rejoin()
	case "append", "recovered": // first end
		from := FromPrimary
		if what == "recovered" {
			from = FromPass
		}
		var step Step
		step, err = r.Take(from, storage.Offset(a.n(0)), a.end(1))
		if said = [...]string{"", "queue; ", "wait; ", "now; "}[step]; step == StepQueue {
			r.Extended(a.end(1))
		}
		if answer, ok := AnswerTo(err, r.Queued()); err != nil && ok {
			said = fmt.Sprintf("answer %d end %d; ", answer.Kind, answer.End)
		}
	case "barrier":
		r.Barrier(a.end(0))
	case "fence":
		var queue bool
		if queue, err = r.Fence(); queue {
			said = "queue; "
			r.FenceQueued()
		}
	case "fence-barrier":
		r.FenceBarrier()
	case "vote":
		if err = r.Vote(); err == nil {
			said = fmt.Sprintf("votes %d; ", r.Queued())
		}
	case "seal":
		var again bool
		if again, err = r.BeginSeal(a.end(0)); again {
			said = "again; "
		}
	case "abort-seal":
		r.AbortSeal()
	case "cut":
		r.CutQueued(a.end(0))
	case "cut-barrier":
		r.CutBarrier(a.end(0))
	case "cut-done":
		r.CutDone()
	case "end-seal":
		r.EndSeal()
	case "drop":
		r.Drop()
	default:
		return "", errors.New("no such command")
	}
	out := fmt.Sprintf("%s%s queued %d durable %d", said, r.State(), r.Queued(), r.Durable())
	if err != nil {
		out += ", refused: " + err.Error()
	}
	return out, nil
}

func (s *script) doPass(what string, a args) (string, error) {
	p := s.pass
	var orders []Order
	switch what {
	case "new": // n q reason
		s.pass = NewPass(set(a.n(0)), int(a.n(1)), Reason(a[2]))
		if a.has("patient") {
			s.pass.WaitForMore()
		}
		return describeOrders(s.pass.Begin()), nil
	case "answered":
		orders = p.Answered(a.broker(0), a.has("serving"))
	case "drained":
		orders = p.Drained(a.broker(0))
	case "voted": // broker end digest
		orders = p.Voted(a.broker(0), Vote{End: a.end(1), Bytes: int64(a.n(1)) * 10, Digest: storage.Digest(a.n(2))})
	case "no-vote":
		orders = p.NoVote(a.broker(0), scriptErrors[a[1]])
	case "unreachable":
		orders = p.Unreachable(a.broker(0))
	case "extended":
		orders = p.Extended(a.broker(0), a.end(1), storage.Digest(a.n(2)))
	case "not-extended":
		orders = p.NotExtended(a.broker(0), a.has("holder"))
	case "more":
		orders = p.More()
	case "retry":
		orders = p.Retry()
	case "finish":
		p.Finish()
	default:
		return "", errors.New("no such command")
	}
	return describeOrders(orders), nil
}

func describeOrders(orders []Order) string {
	if len(orders) == 0 {
		return "-"
	}
	var out []string
	for _, o := range orders {
		switch o.Kind {
		case OrderAsk, OrderDrain, OrderFence:
			out = append(out, fmt.Sprintf("%s %d", map[OrderKind]string{OrderAsk: "ask", OrderDrain: "drain", OrderFence: "fence"}[o.Kind], o.Broker))
		case OrderExtend:
			out = append(out, fmt.Sprintf("extend %d from %d to %d", o.Broker, o.Holder, o.Outcome.End))
		case OrderSeal:
			x := o.Outcome
			out = append(out, fmt.Sprintf("seal at %d, %d bytes, digest %d, of %d votes, from %d, held by %d", x.End, x.Bytes, x.Digest, x.Votes,
				x.Holder, x.Holders))
		case OrderWait:
			out = append(out, "wait: "+o.Blocked)
		case OrderStop:
			out = append(out, "stop")
		case OrderMore:
			out = append(out, "wait for more")
		}
	}
	return strings.Join(out, "; ")
}
