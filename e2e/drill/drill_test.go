package drill

import (
	"bytes"

	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/malachilog/malachi/e2e/inv"
	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
)

// TestKillEachRole kills the primary, a follower and the leader of the metadata in turn, under load, and starts each again.
func TestKillEachRole(t *testing.T) {
	inv.Covers(t, "INV-D1", "INV-S8", "INV-S10", "INV-H2")
	c := newCluster(t, 3)
	c.start()
	c.create(4)
	l := newLedger()
	stop := c.load(l, 6)
	l.grow(t, 300)
	for _, role := range []string{"primary", "follower", "leader"} {
		var victim *node
		switch role {
		case "primary":
			victim = c.primary(topic)
		case "follower":
			p := c.primary(topic)
			victim = c.nodes[p.number%3] // some other one
		case "leader":
			victim = c.leader()
		}
		t.Logf("kill -9 of a %s: node %d", role, victim.number)
		victim.kill()
		l.grow(t, 300)
		victim.launch()
		victim.await()
		l.grow(t, 100)
	}
	stop()
	c.check(l)
}

// TestKillAll kills all brokers at once.
func TestKillAll(t *testing.T) {
	inv.Covers(t, "INV-D1", "INV-S11")
	c := newCluster(t, 3)
	c.start()
	c.create(4)
	l := newLedger()
	stop := c.load(l, 6)
	l.grow(t, 500)
	for _, b := range c.nodes {
		b.signal(syscall.SIGKILL)
	}
	for _, b := range c.nodes {
		<-b.exited
	}
	for _, b := range c.nodes {
		b.launch()
	}
	for _, b := range c.nodes {
		b.await()
	}
	l.grow(t, 300)
	stop()
	c.check(l)
	until(t, "no range is blocked", func() bool {
		res, err := c.client(c.nodes[0]).Admin().ListBlockedRanges(t.Context(), &v1.ListBlockedRangesRequest{})
		return err == nil && len(res.GetRanges()) == 0
	})
}

// TestPausedPrimary stops the primary's clock, not its memory: it comes back believing to serve, and gets not one more record acknowledged that is
// not read back.
func TestPausedPrimary(t *testing.T) {
	inv.Covers(t, "INV-S8", "INV-D10", "INV-H2")
	c := newCluster(t, 3)
	c.start()
	c.create(2)
	l := newLedger()
	stop := c.load(l, 6)
	l.grow(t, 300)
	victim := c.primary(topic)
	victim.signal(syscall.SIGSTOP)
	until(t, "the primary is stopped", func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", victim.cmd.Process.Pid))
		return err == nil && strings.Contains(string(stat), ") T ")
	})
	l.grow(t, 300) // somebody else serves
	victim.signal(syscall.SIGCONT)
	l.grow(t, 500)
	stop()
	c.check(l)
}

// TestRollingRestart stops and starts one broker after the other: no call fails once the SDK has tried again.
func TestRollingRestart(t *testing.T) {
	c := newCluster(t, 3)
	c.start()
	c.create(4)
	l := newLedger()
	stop := c.load(l, 6)
	l.grow(t, 300)
	for _, b := range c.nodes {
		b.stop()
		l.grow(t, 100)
		b.launch()
		b.await()
		l.grow(t, 100)
	}
	stop()
	c.check(l)
}

// TestWipedDisk loses a broker's folder: an empty one is a new broker, which joins beside the memory of the old, and never votes in its name.
func TestWipedDisk(t *testing.T) {
	inv.Covers(t, "INV-D9", "INV-H2")
	c := newCluster(t, 3)
	c.start()
	c.create(2)
	l := newLedger()
	stop := c.load(l, 4)
	l.grow(t, 300)
	victim := c.nodes[2]
	old := victim.id
	victim.kill()
	if err := os.RemoveAll(victim.data); err != nil {
		t.Fatal(err)
	}
	victim.launch()
	victim.await()
	if victim.id == old {
		t.Fatalf("the empty folder is broker %s again", old)
	}
	l.grow(t, 300)
	stop()
	c.check(l)
	until(t, "the cluster knows the new broker, and that the old one is gone", func() bool {
		ids := map[string]bool{}
		for _, b := range c.status(c.nodes[0]).GetBrokers() {
			ids[b.GetId()] = b.GetAlive()
		}
		return len(ids) == 4 && !ids[old] && ids[victim.id]
	})
}

// TestClonedAndRolledBackDisks: a copy of a broker's folder beside the original, and a folder that was set back, are refused with exit code 78, and
// disturb nobody.
func TestClonedAndRolledBackDisks(t *testing.T) {
	inv.Covers(t, "INV-D9", "INV-H2")
	c := newCluster(t, 3)
	c.start()
	c.create(2)
	l := newLedger()
	stop := c.load(l, 4)
	l.grow(t, 200)
	c.explained = []string{"two processes run with one broker id"}
	victim := c.nodes[1]
	victim.stop()
	clone := c.add("join: [" + c.nodes[0].ports[2] + "]\n")
	c.nodes = c.nodes[:3] // it is no member
	copyDir(t, clone.data, victim.data)
	victim.launch()
	victim.await()
	since := time.Now()
	until(t, "the cluster has heard how far the original is", func() bool { return time.Since(since) > 4*time.Second })
	for _, what := range []string{"a clone", "the clone, once more"} {
		refused(t, clone, what)
	}
	l.grow(t, 100)
	victim.stop()
	if err := os.RemoveAll(victim.data); err != nil {
		t.Fatal(err)
	}
	copyDir(t, victim.data, clone.data)
	for _, what := range []string{"a folder that was set back", "the same, once more"} {
		refused(t, victim, what)
	}
	l.grow(t, 200)
	stop()
	c.check(l)
}

func copyDir(t *testing.T, to, from string) {
	t.Helper()
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
}

// refused starts a node that must end with exit code 78 and one clear line.
func refused(t *testing.T, b *node, what string) {
	t.Helper()
	from := len(b.log.String())
	b.launch()
	select {
	case <-b.exited:
	case <-time.After(patience):
		b.signal(syscall.SIGKILL)
		t.Fatalf("%s is not refused:\n%s", what, b.log.String()[from:])
	}
	if code := b.cmd.ProcessState.ExitCode(); code != 78 {
		t.Errorf("%s ends with exit code %d:\n%s", what, code, b.log.String()[from:])
	}
	if said := b.log.String()[from:]; !strings.Contains(said, "clone_or_rollback") {
		t.Errorf("%s is not told why: %s", what, said)
	}
}

// TestRotIsHealed flips a byte in one sealed copy of a stopped broker, cuts another short and removes a third: all are whole again soon after the start,
// byte by byte as on the other brokers.
func TestRotIsHealed(t *testing.T) {
	inv.Covers(t, "INV-R1", "INV-S3", "INV-H2")
	c := newCluster(t, 3)
	c.start()
	c.create(1)
	age := func(d time.Duration) {
		t.Helper()
		if _, err := c.client().Admin().UpdatePolicy(t.Context(), &v1.UpdatePolicyRequest{SegmentMaxAge: durationpb.New(d)}); err != nil {
			t.Fatal(err)
		}
	}
	age(time.Second)
	l := newLedger()
	stop := c.load(l, 4)
	until(t, "three segments are sealed", func() bool { return len(sealed(c.segments(topic))) >= 3 })
	age(time.Hour)
	stop()
	victim := c.nodes[1]
	segs := sealed(c.segments(topic))[:3]
	file := func(b *node, s *v1.Segment) string { return segmentFile(t, b, s.GetId()) }
	until(t, "all copies are finished", func() bool { return same(c, segs, file) })
	victim.stop()
	spoil(t, file(victim, segs[0]), func(b []byte) []byte { b[len(b)/2] ^= 0x40; return b })
	spoil(t, file(victim, segs[1]), func(b []byte) []byte { return b[:len(b)/3] })
	if err := os.Remove(file(victim, segs[2])); err != nil {
		t.Fatal(err)
	}
	if same(c, segs, file) {
		t.Fatal(errNoFault)
	}
	victim.launch()
	victim.await()
	until(t, "the copies are byte-identical again", func() bool { return same(c, segs, file) })
	c.check(l)
}

func sealed(all []*v1.Segment) (out []*v1.Segment) {
	for _, s := range all {
		if s.GetState() == v1.Segment_SEALED {
			out = append(out, s)
		}
	}
	slices.SortFunc(out, func(a, b *v1.Segment) int { return strings.Compare(a.GetId(), b.GetId()) })
	return out
}

// segmentFile is the path of a segment's copy, by its id <topic>/<range>/<seq>.
func segmentFile(t *testing.T, b *node, id string) string {
	t.Helper()
	at := strings.LastIndexByte(id, '/')
	var seq uint32
	if _, err := fmt.Sscan(id[at+1:], &seq); err != nil {
		t.Fatal(err)
	}
	found, err := filepath.Glob(filepath.Join(b.data, "segments", id[:at], fmt.Sprintf("%010d*", seq)))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range found {
		if !strings.HasSuffix(f, ".heal") && !strings.HasSuffix(f, ".tmp") {
			return f
		}
	}
	return filepath.Join(b.data, "segments", id[:at], fmt.Sprintf("%010d.none", seq))
}

func spoil(t *testing.T, path string, how func([]byte) []byte) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(path, how(b), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// same reports whether every broker has the same bytes of each segment.
func same(c *cluster, segs []*v1.Segment, file func(*node, *v1.Segment) string) bool {
	for _, s := range segs {
		var first []byte
		for i, b := range c.nodes {
			got, err := os.ReadFile(file(b, s))
			if err != nil || i > 0 && !bytes.Equal(first, got) {
				return false
			}
			first = got
		}
	}
	return true
}

// TestGrowth grows a cluster of one to three, raises the replication factor, sees the heads roll onto three brokers, and kills one.
func TestGrowth(t *testing.T) {
	inv.Covers(t, "INV-M6")
	c := newCluster(t, 1)
	first := c.nodes[0]
	first.extra = "bootstrap: true\n"
	for range 2 {
		c.add("join: [" + first.ports[2] + "]\n")
	}
	first.launch()
	first.await()
	c.create(2)
	l := newLedger()
	stop := c.load(l, 4)
	l.grow(t, 200)
	before := sealed(c.segments(topic))
	for _, b := range c.nodes[1:] {
		b.launch()
		b.await()
	}
	rf := int32(3)
	if _, err := c.client(first).Admin().UpdatePolicy(t.Context(), &v1.UpdatePolicyRequest{ReplicationFactor: &rf}); err != nil {
		t.Fatal(err)
	}
	until(t, "every head has three replicas", func() bool {
		heads := 0
		for _, s := range c.segments(topic) {
			if s.GetState() == v1.Segment_OPEN {
				if len(s.GetReplicas()) != 3 {
					return false
				}
				heads++
			}
		}
		return heads == 2
	})
	for _, old := range before {
		for _, s := range c.segments(topic) {
			if s.GetId() == old.GetId() && !slices.Equal(s.GetReplicas(), old.GetReplicas()) {
				t.Errorf("sealed segment %s has moved from %v to %v", s.GetId(), old.GetReplicas(), s.GetReplicas())
			}
		}
	}
	until(t, "the metadata has three voters", func() bool {
		for _, g := range c.status(first).GetGroups() {
			if len(g.GetVoters()) != 3 {
				return false
			}
		}
		return c.status(first) != nil
	})
	l.grow(t, 200)
	victim := c.leader()
	victim.kill()
	l.grow(t, 300)
	victim.launch()
	victim.await()
	stop()
	c.check(l)
}
