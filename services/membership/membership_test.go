package membership

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	"github.com/malachilog/malachi/e2e/inv"
	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/vfs"
	"github.com/malachilog/malachi/storage/vfs/memfs"
)

// patience bounds a wait of a test; it is long because the machine may be busy.
const patience = 30 * time.Second

// logs keeps what was logged.
type logs struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logs) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *logs) count(part string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.b.String(), part)
}

// member is a process: a running Membership.
type member struct {
	*Membership
	t    *testing.T
	logs *logs
	stop context.CancelFunc
	done chan error
}

type start struct {
	id      storage.BrokerID
	boot    storage.Boot
	cluster byte
	bind    string
	seeds   []string
	keys    [][]byte
	fs      vfs.FS
	zone    string
	raft    string
	find    func(context.Context) []string
}

func open(t *testing.T, s start) *member {
	t.Helper()
	l := &logs{}
	cfg := Config{
		Bind: s.bind, Seeds: s.seeds, Cluster: storage.ClusterID{s.cluster + 1}, Self: s.id, Boot: max(s.boot, 1), Keys: s.keys, Rejoin: 200 * time.Millisecond,
	}
	if cfg.Bind == "" {
		cfg.Bind = "127.0.0.1:0"
	}
	if s.fs != nil {
		cfg.PeersFile = "peers"
	}
	if s.raft == "" {
		s.raft = fmt.Sprintf("raft-%s:4043", s.id)
	}
	meta := Meta{RPC: fmt.Sprintf("rpc-%s:4042", s.id), Raft: s.raft, Attributes: map[string]string{"zone": s.zone}, Level: 1, Version: "v1"}
	m, err := Open(t.Context(), cfg, meta, Deps{
		Logger: slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug})), FS: s.fs, Discover: s.find,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	p := &member{Membership: m, t: t, logs: l, stop: cancel, done: make(chan error, 1)}
	go func() { p.done <- m.Run(ctx) }()
	t.Cleanup(p.leave)
	return p
}

// leave ends the process with a word to the others.
func (p *member) leave() {
	p.stop()
	if err := <-p.done; err != nil {
		p.t.Errorf("run: %v", err)
	}
	p.done <- nil
}

// kill ends the process without a word.
func (p *member) kill() {
	_ = p.Close()
	p.leave()
}

// until waits for a condition on what the member answers.
func (p *member) until(what string, ok func() bool) {
	p.t.Helper()
	deadline := time.After(patience)
	tick := time.NewTicker(20 * time.Millisecond) // what changes without a change of the view: logs, files
	defer tick.Stop()
	for {
		changed := p.Changed()
		if ok() {
			return
		}
		select {
		case <-changed:
		case <-tick.C:
		case <-deadline:
			p.logs.mu.Lock()
			defer p.logs.mu.Unlock()
			p.t.Fatalf("it never came to: %s; members %+v\n%s", what, p.Members(), tail(p.logs.b.String()))
		}
	}
}

func tail(s string) string { return s[max(0, len(s)-6000):] }

func (p *member) sees(ids ...storage.BrokerID) {
	p.t.Helper()
	p.until(fmt.Sprintf("sees %v", ids), func() bool {
		got := map[storage.BrokerID]bool{}
		for _, m := range p.Members() {
			got[m.ID] = true
		}
		want := map[storage.BrokerID]bool{}
		for _, id := range ids {
			want[id] = true
		}
		return maps.Equal(got, want)
	})
}

func (p *member) find(id storage.BrokerID) Member {
	for _, m := range p.Members() {
		if m.ID == id {
			return m
		}
	}
	return Member{}
}

// noLeaks looks for goroutines that are left when everything registered later was cleaned up. The library's last goroutines end some time
// after its Shutdown.
func noLeaks(t *testing.T) {
	before := goleak.IgnoreCurrent()
	t.Cleanup(func() {
		deadline := time.NewTimer(10 * time.Second)
		defer deadline.Stop()
		for {
			err := goleak.Find(before)
			if err == nil {
				return
			}
			select {
			case <-deadline.C:
				t.Error(err)
				return
			default:
			}
		}
	})
}

func TestMembersFindEachOther(t *testing.T) {
	noLeaks(t)
	a := open(t, start{id: 1, zone: "a"})
	b := open(t, start{id: 2, zone: "b", seeds: []string{a.Gossip()}})
	c := open(t, start{id: 3, zone: "c", find: func(context.Context) []string { return []string{b.Gossip()} }})
	for _, m := range []*member{a, b, c} {
		m.sees(1, 2, 3)
	}
	if m := a.find(3); m.Attributes["zone"] != "c" || m.RPC != "rpc-0000000000000003:4042" || m.Version != "v1" || m.Level != 1 || m.Boot != 1 || m.Self || m.Gossip != c.Gossip() {
		t.Fatalf("broker 3 is %+v", m)
	}
	if m := a.find(1); !m.Self || !m.SkewKnown || m.Skew != 0 {
		t.Fatalf("itself is %+v", m)
	}
	if got, ok := a.RaftAddress(2); !ok || got != "raft-0000000000000002:4043" {
		t.Fatalf("raft address %q %v", got, ok)
	}
	if _, ok := a.RPCAddress(9); ok {
		t.Fatal("an address of nobody")
	}
	a.until("the clock of 2 is known", func() bool { return a.find(2).SkewKnown })
	if s := a.find(2).Skew; s > time.Second || s < -time.Second {
		t.Fatalf("the clock of this very machine is off by %v", s)
	}
	if got := a.Skewed(time.Minute); len(got) > 0 {
		t.Fatalf("clocks of one machine: %v", got)
	}
	// What one tells of itself changes, and reaches the others.
	if err := b.Update(Meta{Raft: "elsewhere:1", Attributes: map[string]string{"zone": "z"}, Load: 700}); err != nil {
		t.Fatal(err)
	}
	c.until("the update", func() bool {
		m := c.find(2)
		at, _ := c.RaftAddress(2)
		return m.Load == 700 && m.Attributes["zone"] == "z" && at == "elsewhere:1"
	})
	if at, _ := b.RaftAddress(2); at != "elsewhere:1" {
		t.Fatalf("its own address is %q", at)
	}
	big := map[string]string{"zone": strings.Repeat("x", 500)}
	if err := b.Update(Meta{Attributes: big}); !errors.Is(err, storage.ErrTooLarge) || b.find(2).Load != 700 {
		t.Fatalf("a meta of more than 512 bytes: %v", err)
	}
	if a.Absent(2) != 0 || a.Absent(1) != 0 || a.Absent(9) == 0 {
		t.Fatalf("absent: %v %v %v", a.Absent(2), a.Absent(1), a.Absent(9))
	}
	// One leaves: it is gone at once, and its addresses are kept.
	b.leave()
	a.sees(1, 3)
	if at, ok := a.RaftAddress(2); !ok || at != "elsewhere:1" || a.Absent(2) <= 0 {
		t.Fatalf("after it left: %q %v, absent %v", at, ok, a.Absent(2))
	}
	a.Forget(2)
	if _, ok := a.RaftAddress(2); ok {
		t.Fatal("a forgotten broker has an address")
	}
	a.Learn(5, "rpc:5", "raft:5", "")
	a.Learn(3, "no", "no", "no")
	if at, _ := a.RPCAddress(5); at != "rpc:5" {
		t.Fatalf("learnt %q", at)
	}
	if at, _ := a.RPCAddress(3); at == "no" {
		t.Fatal("what was learnt replaced what the broker said of itself")
	}
}

// TestAStoppedProcessIsNoticed and its restart elsewhere, which takes its place without a fight.
func TestAStoppedProcessIsNoticed(t *testing.T) {
	noLeaks(t)
	a := open(t, start{id: 1})
	b := open(t, start{id: 2, seeds: []string{a.Gossip()}})
	c := open(t, start{id: 3, seeds: []string{a.Gossip()}})
	a.sees(1, 2, 3)
	c.sees(1, 2, 3)
	began := time.Now()
	b.kill()
	a.sees(1, 3)
	c.sees(1, 3)
	t.Logf("noticed after %v", time.Since(began))
	// On another port, and again at once on yet another: the higher boot counts while the ghost of the lower is still there.
	b2 := open(t, start{id: 2, boot: 2, raft: "second:1", seeds: []string{a.Gossip()}})
	a.sees(1, 2, 3)
	b2.kill()
	b3 := open(t, start{id: 2, boot: 3, raft: "third:1", seeds: []string{c.Gossip()}})
	for _, m := range []*member{a, c} {
		m.until("boot 3", func() bool {
			at, _ := m.RaftAddress(2)
			return m.find(2).Boot == 3 && at == "third:1" && m.Absent(2) == 0
		})
	}
	b3.sees(1, 2, 3)
	a.until("the ghost is dropped", func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return len(a.nodes) == 3
	})
	if m := a.find(2); m.Boot != 3 || a.Absent(2) != 0 {
		t.Fatalf("the end of the ghost took the broker along: %+v", m)
	}
	if a.logs.count("two processes") > 0 {
		t.Fatal("a restart was taken for two processes")
	}
}

func TestTwoProcessesOfOneBroker(t *testing.T) {
	a := open(t, start{id: 1})
	old := open(t, start{id: 2, boot: 4, raft: "old:1", seeds: []string{a.Gossip()}})
	a.sees(1, 2)
	fresh := open(t, start{id: 2, boot: 5, raft: "new:1", seeds: []string{a.Gossip()}})
	const line = "two processes run with one broker id"
	for _, m := range []*member{a, old} {
		m.until("it is told", func() bool { return m.logs.count("level=ERROR msg=\""+line) == 1 })
	}
	if m := a.find(2); m.Boot != 5 || m.Raft != "new:1" {
		t.Fatalf("the lower boot counts: %+v", m)
	}
	fresh.sees(1, 2)
	// A clone has the same boot; both are told.
	clone := open(t, start{id: 1, seeds: []string{a.Gossip()}})
	for _, m := range []*member{a, clone} {
		m.until("the clone is told", func() bool { return m.logs.count("broker=0000000000000001") > 0 && m.logs.count(line) > 0 })
	}
}

func TestAnotherClusterIsRefused(t *testing.T) {
	inv.Covers(t, "INV-M11")
	noLeaks(t)
	a := open(t, start{id: 1})
	b := open(t, start{id: 2, seeds: []string{a.Gossip()}})
	a.sees(1, 2)
	other := open(t, start{id: 9, cluster: 7, seeds: []string{a.Gossip(), b.Gossip()}})
	const line = "a broker of another cluster gossips with this one and is refused"
	for _, m := range []*member{a, other} {
		m.until("it is told", func() bool { return m.logs.count(line) > 0 || len(m.Members()) == 3 })
		if len(m.Members()) == 3 {
			t.Fatal("the two clusters are one")
		}
	}
	// It tries again and again. It is told once, and nobody is disturbed.
	other.until("it has tried again", func() bool { return other.logs.count("belongs to cluster") > 4 })
	for _, m := range []*member{a, b} {
		m.sees(1, 2)
		if n := m.logs.count(line); n > 1 || m == a && n == 0 {
			t.Fatalf("told %d times", n)
		}
		if _, ok := m.RaftAddress(9); ok {
			t.Fatal("a foreign broker is in the book")
		}
	}
	other.sees(9)
}

func key(b byte) []byte { return bytes.Repeat([]byte{b}, 32) }

func TestKeys(t *testing.T) {
	noLeaks(t)
	a := open(t, start{id: 1, keys: [][]byte{key(1)}})
	b := open(t, start{id: 2, keys: [][]byte{key(1)}, seeds: []string{a.Gossip()}})
	a.sees(1, 2)
	wrong := open(t, start{id: 3, keys: [][]byte{key(9)}, seeds: []string{a.Gossip()}})
	plain := open(t, start{id: 4, seeds: []string{a.Gossip()}})
	for _, m := range []*member{wrong, plain} {
		m.until("the key is told", func() bool { return m.logs.count("level=WARN msg=\"gossip with this address can't be read") == 1 })
		m.sees(m.cfg.Self)
	}
	a.sees(1, 2)

	// Rotation, one member at a time: both keys, the new one first, the new one alone. Each stage is checked by news that has to travel.
	news := uint32(0)
	travels := func() {
		t.Helper()
		news++
		for from, to := range map[*member]*member{a: b, b: a} {
			if err := from.Update(Meta{Load: news}); err != nil {
				t.Fatal(err)
			}
			to.until("news", func() bool { return to.find(from.cfg.Self).Load == news })
		}
	}
	for _, keys := range [][][]byte{{key(1), key(2)}, {key(2), key(1)}, {key(2)}} {
		for _, m := range []*member{a, b} {
			if err := m.SetKeys(keys); err != nil {
				t.Fatal(err)
			}
			travels()
		}
	}
	if got := a.ring.GetKeys(); len(got) != 1 || !bytes.Equal(got[0], key(2)) {
		t.Fatalf("the ring holds %d keys", len(got))
	}
	late := open(t, start{id: 5, keys: [][]byte{key(2)}, seeds: []string{b.Gossip()}})
	late.sees(1, 2, 5)
	if err := a.SetKeys([][]byte{{1, 2}}); !errors.Is(err, storage.ErrInvalid) {
		t.Fatalf("a short key: %v", err)
	}
	if err := a.SetKeys(nil); !errors.Is(err, storage.ErrInvalid) {
		t.Fatalf("no key: %v", err)
	}
	if err := plain.SetKeys([][]byte{key(1)}); !errors.Is(err, storage.ErrInvalid) {
		t.Fatalf("keys for plain gossip: %v", err)
	}
	for _, m := range []*member{a, b, wrong, plain} {
		for _, k := range []string{string(key(1)), string(key(9)), "AQEBAQEB", "0101010101"} {
			if m.logs.count(k) > 0 {
				t.Fatal("a key is in the log")
			}
		}
	}
}

// TestHalvesFindEachOtherAgain cuts one member off by giving it another key, until each side has given the other up, and then back.
func TestHalvesFindEachOtherAgain(t *testing.T) {
	noLeaks(t)
	common, apart := [][]byte{key(1)}, [][]byte{key(2)}
	a := open(t, start{id: 1, keys: common})
	b := open(t, start{id: 2, keys: common, seeds: []string{a.Gossip()}})
	c := open(t, start{id: 3, keys: common, seeds: []string{a.Gossip()}})
	all := []*member{a, b, c}
	for _, m := range all {
		m.sees(1, 2, 3)
	}
	if err := c.SetKeys(apart); err != nil {
		t.Fatal(err)
	}
	a.sees(1, 2)
	b.sees(1, 2)
	c.sees(3)
	if at, ok := c.RaftAddress(1); !ok || at == "" || c.Absent(1) <= 0 {
		t.Fatalf("the one that was cut off has forgotten the others: %q", at)
	}
	if err := c.SetKeys(common); err != nil {
		t.Fatal(err)
	}
	for _, m := range all {
		m.sees(1, 2, 3)
	}
}

// TestColdRestartOnOtherPorts stops all and starts them without seeds: the file knows where to look.
func TestColdRestartOnOtherPorts(t *testing.T) {
	disks := map[storage.BrokerID]vfs.FS{1: memfs.New(memfs.Options{}), 2: memfs.New(memfs.Options{}), 3: memfs.New(memfs.Options{})}
	var running []*member
	for id := storage.BrokerID(1); id <= 3; id++ {
		s := start{id: id, fs: disks[id]}
		if id > 1 {
			s.seeds = []string{running[0].Gossip()}
		}
		running = append(running, open(t, s))
	}
	for _, m := range running {
		m.sees(1, 2, 3)
	}
	last := running[2].Gossip()
	for _, m := range running {
		m.until("the file is written", func() bool {
			b, err := readBook(m.deps.FS, "peers")
			return err == nil && len(b.Peers) == 3
		})
	}
	for _, m := range running {
		m.kill()
	}
	// Broker 3 is where it was, the others are not: they find it, and through it each other.
	c := open(t, start{id: 3, boot: 2, bind: last, fs: disks[3]})
	if at, ok := c.RaftAddress(1); !ok || at != "raft-0000000000000001:4043" {
		t.Fatalf("before anyone is there: %q %v", at, ok)
	}
	if c.Absent(1) <= 0 || c.Absent(1) > patience {
		t.Fatalf("absent for %v, which this process can't know", c.Absent(1))
	}
	a := open(t, start{id: 1, boot: 2, fs: disks[1]})
	b := open(t, start{id: 2, boot: 2, fs: disks[2]})
	for _, m := range []*member{a, b, c} {
		m.sees(1, 2, 3)
	}
}

func TestAFileThatCannotBeUsed(t *testing.T) {
	write := func(b []byte) vfs.FS {
		fs := memfs.New(memfs.Options{})
		f, err := fs.Create("peers")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteAt(b, 0); err != nil {
			t.Fatal(err)
		}
		return fs
	}
	good := memfs.New(memfs.Options{})
	if err := writeBook(good, "peers", bookFile{Format: 1, Cluster: (storage.ClusterID{1}).String(), Peers: map[string]*entry{
		storage.BrokerID(7).String(): {Raft: "seven:1"}, "nonsense": {Raft: "x"}, storage.BrokerID(8).String(): nil,
	}}); err != nil {
		t.Fatal(err)
	}
	if m := open(t, start{id: 1, fs: good}); m.logs.count("known brokers can't be used") > 0 {
		t.Fatal("a good file was refused")
	} else if at, _ := m.RaftAddress(7); at != "seven:1" {
		t.Fatalf("of a good file: %q", at)
	}
	raw, err := good.Open("peers")
	if err != nil {
		t.Fatal(err)
	}
	size, _ := raw.Size()
	flipped := make([]byte, size)
	if _, err := raw.ReadAt(flipped, 0); err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	flipped[20] ^= 1
	newer := `{"format":2}`
	for name, fs := range map[string]vfs.FS{"flipped": write(flipped), "cut": write(flipped[:10]), "newer": write([]byte(newer + "\n" + sumLine(newer)))} {
		m := open(t, start{id: 1, fs: fs})
		if m.logs.count("known brokers can't be used") != 1 {
			t.Errorf("%s: it is not told", name)
		}
		m.Learn(4, "a:1", "b:1", "c:1")
		m.until("it is written anew", func() bool {
			b, err := readBook(fs, "peers")
			return err == nil && b.Peers[storage.BrokerID(4).String()] != nil
		})
	}
	m := open(t, start{id: 1, fs: good, cluster: 3})
	if _, ok := m.RaftAddress(7); ok || m.logs.count("known brokers can't be used") != 1 {
		t.Error("the file of another cluster was used")
	}
}

func TestConfigAndMetaAreChecked(t *testing.T) {
	err := Config{Bind: "host", Advertise: "x:0", Seeds: []string{"a:b"}, Keys: [][]byte{make([]byte, 5)}, Rejoin: -1}.Validate()
	for _, part := range []string{`gossip address "host"`, `advertise address "x:0"`, `seed address "a:b"`, "cluster id", "broker id", "key 1 has 5 bytes", "negative"} {
		if !errors.Is(err, storage.ErrInvalid) || !strings.Contains(err.Error(), part) {
			t.Errorf("%q is not told: %v", part, err)
		}
	}
	good := Config{Bind: "127.0.0.1:0", Cluster: storage.ClusterID{1}, Self: 1}
	if _, err := Open(t.Context(), good, Meta{Version: strings.Repeat("x", 600)}, Deps{}); !errors.Is(err, storage.ErrTooLarge) {
		t.Errorf("a meta that does not fit: %v", err)
	}
	wide := good
	wide.Bind = "0.0.0.0:0"
	if _, err := Open(t.Context(), wide, Meta{}, Deps{}); !errors.Is(err, storage.ErrInvalid) || !strings.Contains(err.Error(), "advertise") {
		t.Errorf("every interface, and no address to tell: %v", err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	taken := good
	taken.Bind = l.Addr().String()
	if _, err := Open(t.Context(), taken, Meta{}, Deps{}); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("a port in use: %v", err)
	}
}

func TestWhoseClockIsWrong(t *testing.T) {
	for name, c := range map[string]struct {
		clocks []time.Duration // of brokers 1, 2, ...; the first is this one
		wrong  []storage.BrokerID
	}{
		"none": {nil, nil}, "alone": {[]time.Duration{0}, nil}, "two agree": {[]time.Duration{0, time.Second}, nil},
		"two do not":        {[]time.Duration{0, time.Hour}, nil},
		"one of three":      {[]time.Duration{0, -time.Second, time.Hour}, []storage.BrokerID{3}},
		"this one of three": {[]time.Duration{0, time.Hour, time.Hour + time.Second}, []storage.BrokerID{1}},
		"behind":            {[]time.Duration{0, -time.Hour, 0, 0}, []storage.BrokerID{2}},
		"two and two":       {[]time.Duration{0, 0, time.Hour, time.Hour}, nil},
		"all differ":        {[]time.Duration{0, time.Hour, 2 * time.Hour}, nil},
		"two of five":       {[]time.Duration{0, 0, time.Hour, -time.Hour, 0}, []storage.BrokerID{3, 4}},
	} {
		clocks, want := map[storage.BrokerID]time.Duration{}, map[storage.BrokerID]bool{}
		for i, d := range c.clocks {
			clocks[storage.BrokerID(i+1)] = d
		}
		for _, id := range c.wrong {
			want[id] = true
		}
		if got := skewed(clocks, time.Minute); !maps.Equal(got, want) {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
}

// FuzzMeta feeds what other nodes might tell.
func FuzzMeta(f *testing.F) {
	b, err := proto.Marshal(&intrav1.MemberMeta{ClusterId: make([]byte, 16), Broker: 1, Attributes: map[string]string{"a": "b"}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		_, id, _, meta, err := decode(b)
		if err == nil && (id == 0 || len(b) > maxMeta || len(meta.Attributes) > maxMeta) {
			t.Fatalf("%x was taken", b)
		}
	})
}
