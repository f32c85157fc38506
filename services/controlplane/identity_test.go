package controlplane

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/malachilog/malachi/e2e/inv"
	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/storage"
)

// TestAnotherPortAndHostName restarts a folder as another container would find it: other address, other port, other host name.
func TestAnotherPortAndHostName(t *testing.T) {
	n := newNode(t)
	n.cfg.RaftAddress = "127.0.0.1:0"
	c := n.start()
	made := n.create(c, "orders")
	first := c.Status().RaftAddress
	_ = c.Close()

	n.cfg.RaftAddress = "localhost:0"
	type result struct {
		c   *ControlPlane
		err error
	}
	for _, hostname := range []string{"elsewhere", "and-elsewhere"} {
		done := make(chan result)
		go func() {
			// The name of this thread alone. It is never unlocked, so the thread ends with the goroutine.
			runtime.LockOSThread()
			if err := unix.Unshare(unix.CLONE_NEWUTS); err != nil {
				done <- result{err: fmt.Errorf("no host name of our own: %w", err)}
				return
			}
			if err := unix.Sethostname([]byte(hostname)); err != nil {
				done <- result{err: err}
				return
			}
			if got, err := os.Hostname(); got != hostname {
				done <- result{err: fmt.Errorf("the host name is %q, %w", got, err)}
				return
			}
			c, err := Open(t.Context(), n.cfg, n.id, n.deps)
			done <- result{c, err}
		}()
		r := <-done
		if errors.Is(r.err, unix.EPERM) && os.Getenv("CI") != "true" {
			t.Skip(r.err)
		}
		if r.err != nil {
			t.Fatal(r.err)
		}
		n.boot++
		err := r.c.Register(t.Context(), n.boot, 0, nil)
		if err == nil {
			var got *metadata.Topic
			if got, err = r.c.Topic(t.Context(), "orders"); err == nil && got.UID != made.UID {
				err = fmt.Errorf("uid %s, was %s", got.UID, made.UID)
			}
		}
		second := r.c.Status().RaftAddress
		_ = r.c.Close()
		if err != nil {
			t.Fatal(err)
		}
		if first == second {
			t.Fatalf("the address did not change: %s", second)
		}
		if _, err := os.Stat(filepath.Join(n.cfg.Dir, hostname)); err != nil {
			t.Fatalf("the folder was not opened under another host name: %v", err)
		}
	}
	c = n.start() // and home again
	if _, err := c.Topic(t.Context(), "orders"); err != nil {
		t.Fatal(err)
	}
}

func TestFoldersThatAreNotOurs(t *testing.T) {
	inv.Covers(t, "INV-M11", "INV-R11")
	n := newNode(t)
	n.id.Founding = false
	n.refusedUnchanged(storage.ErrFolderRefused) // an empty folder of a broker that had one
	n.id.Founding = true
	c := n.start()
	n.create(c, "orders")
	if _, err := n.open(); !errors.Is(err, storage.ErrFolderRefused) {
		t.Fatalf("opened twice: %v", err)
	}
	_ = c.Close()

	other := *n
	other.id.Broker++
	other.refusedUnchanged(storage.ErrFolderRefused)
	other = *n
	other.id.Cluster[0]++
	other.refusedUnchanged(storage.ErrFolderRefused)
	other = *n
	other.id.Founding = true // a founding that was done already is not done again
	c, err := other.open()
	if err != nil {
		t.Fatal(err)
	}
	if st := c.Ring(); st.Version != 1 || !st.Vnodes[0].Confirmed {
		t.Fatalf("founded again: %+v", st)
	}
	_ = c.Close()
	n.cfg.Dir = filepath.Join(t.TempDir(), "none")
	n.cfg.RaftAddress = "127.0.0.1"
	if _, err := n.open(); !errors.Is(err, storage.ErrInvalid) {
		t.Fatalf("a bad address: %v", err)
	}
}

func TestRolledBackOrClonedDiskIsRefused(t *testing.T) {
	inv.Covers(t, "INV-D9")
	n := newNode(t)
	c := n.start()
	if err := c.Refresh(t.Context(), 50); err != nil {
		t.Fatal(err)
	}
	if err := c.Register(t.Context(), 1, 50, nil); err != nil {
		t.Fatalf("registering this start again: %v", err)
	}
	_ = c.Close()
	for name, start := range map[string]struct {
		boot  storage.Boot
		group uint64
	}{"the same boot": {1, 60}, "a lower journal": {2, 49}} {
		c, err := n.open()
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Register(t.Context(), start.boot, start.group, nil); !errors.Is(err, storage.ErrFolderRefused) {
			t.Fatalf("%s: %v", name, err)
		}
		// Nothing but root's own replica runs until it is registered.
		if _, err := c.CreateTopic(t.Context(), NewTopic{Name: "orders"}); !errors.Is(err, storage.ErrUnavailable) {
			t.Fatalf("%s: a creation before Register: %v", name, err)
		}
		if s := c.Status(); s.Ready || s.Boot != 0 {
			t.Fatalf("%s: status %+v", name, s)
		}
		_ = c.Close()
	}
	n.group = 50
	c = n.start()
	c.boot.Store(1) // as if the clone had registered boot 2
	if err := c.Refresh(t.Context(), 70); !errors.Is(err, storage.ErrFolderRefused) {
		t.Fatalf("the original goes on beside its clone: %v", err)
	}
}

func TestLostReplicaIsNotMadeAnew(t *testing.T) {
	n := newNode(t)
	c := n.start()
	n.create(c, "orders")
	vnode, _ := c.VnodeFor("orders")
	shard, replica := vnodeShard+uint64(vnode), uint64(n.id.Broker)
	if err := c.host.nh.StopShard(shard); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := c.host.nh.SyncRemoveData(ctx, shard, replica); err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	c, err := n.open()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Register(t.Context(), 2, 0, nil); !errors.Is(err, storage.ErrFolderRefused) {
		t.Fatalf("a vnode without its data started: %v", err)
	}
}

func TestNewerLevelIsRefusedUnchanged(t *testing.T) {
	inv.Covers(t, "INV-M10", "INV-R11")
	n := newNode(t)
	n.deps.Level = storage.CurrentLevel + 1
	c := n.start()
	n.create(c, "orders")
	_ = c.Close()
	n.deps.Level = storage.CurrentLevel
	n.refusedUnchanged(storage.ErrNewerFormat)

	// Without the note of the level the machine itself finds out, and stops.
	if err := os.Remove(filepath.Join(n.cfg.Dir, levelFile)); err != nil {
		t.Fatal(err)
	}
	if _, err := n.open(); !errors.Is(err, storage.ErrNewerFormat) {
		t.Fatalf("open: %v", err)
	}
	n.refusedUnchanged(storage.ErrNewerFormat) // and noted it

	n.deps.Level = storage.CurrentLevel + 1
	c = n.start()
	if _, err := c.Topic(t.Context(), "orders"); err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	if err := os.WriteFile(filepath.Join(n.cfg.Dir, levelFile), []byte("level 1x\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	n.refusedUnchanged(storage.ErrCorrupt)
}

func TestHigherLevelCommandStopsTheControlPlane(t *testing.T) {
	inv.Covers(t, "INV-M10")
	n := newNode(t)
	n.cfg.SnapshotEntries = 10
	c := n.start()
	n.create(c, "orders")
	ran := make(chan error, 1)
	go func() { ran <- c.Run(t.Context()) }()
	r, err := c.owner("later")
	if err != nil {
		t.Fatal(err)
	}
	body, err := metadata.Encode(&metadata.CreateTopic{Nonce: metadata.Nonce{9}, UID: storage.TopicUID{9}, Name: "later", InitialRanges: 1, Time: 1})
	if err != nil {
		t.Fatal(err)
	}
	var p intrav1.MetadataCommand
	if err := proto.Unmarshal(body, &p); err != nil {
		t.Fatal(err)
	}
	p.Level = uint32(storage.CurrentLevel) + 1
	if body, err = proto.Marshal(&p); err != nil {
		t.Fatal(err)
	}
	if _, err := c.propose(t.Context(), r.shard, body); !errors.Is(err, storage.ErrNewerFormat) {
		t.Fatalf("the command was answered: %v", err)
	}
	if err := <-ran; !errors.Is(err, storage.ErrNewerFormat) {
		t.Fatalf("Run: %v", err)
	}
	if _, err := c.Topic(t.Context(), "orders"); !errors.Is(err, storage.ErrNewerFormat) {
		t.Fatalf("a stopped control plane answers: %v", err)
	}
	if _, err := c.CreateTopic(t.Context(), NewTopic{Name: "more"}); !errors.Is(err, storage.ErrNewerFormat) {
		t.Fatalf("a stopped control plane creates: %v", err)
	}
	if s := c.Status(); s.Ready || !errors.Is(s.Err, storage.ErrNewerFormat) {
		t.Fatalf("status %+v", s)
	}
	_ = c.Close()
	n.refusedUnchanged(storage.ErrNewerFormat)
	// A build that understands it finds the command in the log, where the older one left it.
	n.deps.Level = storage.CurrentLevel + 1
	c = n.start()
	if topic, err := c.Topic(t.Context(), "later"); err != nil || topic.UID != (storage.TopicUID{9}) {
		t.Fatalf("the command was skipped: %+v, %v", topic, err)
	}
}

func TestPortInUse(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	n := newNode(t)
	n.cfg.RaftAddress = l.Addr().String()
	_, err = n.open()
	if err == nil || !strings.Contains(err.Error(), n.cfg.RaftAddress+" is in use") || strings.Contains(err.Error(), "\n") {
		t.Fatalf("a port in use: %v", err)
	}
	n.cfg.RaftAddress = "127.0.0.1:0" // and the folder is free again
	n.start()
}

func TestConfigValidate(t *testing.T) {
	if err := (Config{Dir: "x"}).Validate(); err != nil {
		t.Fatal(err)
	}
	err := Config{RaftAddress: "nonsense", Vnodes: -1, ElectionTimeout: time.Millisecond, SnapshotEntries: 1, CommandTimeout: -1}.Validate()
	if !errors.Is(err, storage.ErrInvalid) {
		t.Fatal(err)
	}
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok || len(joined.Unwrap()) != 6 {
		t.Fatalf("not every fault at once: %v", err)
	}
}

func TestNodeHostIDs(t *testing.T) {
	for _, b := range []storage.BrokerID{1, 0x77, 0xfedcba9876543210, ^storage.BrokerID(0)} {
		id := nodeHostID(b)
		if got, ok := brokerOf(id); !ok || got != b || len(id) != 36 {
			t.Errorf("%s: %s reads back as %s", b, id, got)
		}
	}
	for _, bad := range []string{"", "127.0.0.1:4043", "6d616c61-6368-8000-0000-0000000000zz", nodeHostID(1) + "0"} {
		if b, ok := brokerOf(bad); ok {
			t.Errorf("%q is taken for broker %s", bad, b)
		}
	}
}

type addressBook map[storage.BrokerID]string

func (a addressBook) RaftAddress(b storage.BrokerID) (string, bool) {
	s, ok := a[b]
	return s, ok
}

func TestRegistryFollowsAddresses(t *testing.T) {
	const self, other, silent, recorded storage.BrokerID = 0x1000, 0x2000, 0x3000, 0x4000
	book := addressBook{other: "b:1"}
	made, err := (&registryFactory{self: self, replica: uint64(self), address: "a:1", others: book,
		recorded: func(b storage.BrokerID) (string, bool) { return "d:1", b == recorded }}).Create("", 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range []storage.BrokerID{self, other, silent, recorded} {
		made.Add(rootShard, uint64(b), nodeHostID(b))
	}
	made.Add(rootShard, replicaOf(other, 3), nodeHostID(other))
	resolve := func(replica uint64, want string) {
		t.Helper()
		got, _, err := made.Resolve(rootShard, replica)
		if got != want || (want == "") != errors.Is(err, storage.ErrUnavailable) {
			t.Errorf("replica %x: %q, %v, want %q", replica, got, err, want)
		}
	}
	for replica, want := range map[uint64]string{uint64(self): "a:1", uint64(other): "b:1", replicaOf(other, 3): "b:1",
		replicaOf(other, 2): "b:1", uint64(silent): "", uint64(recorded): "d:1", 0x5000: ""} { // of generation 2 no group has told yet
		resolve(replica, want)
	}
	made.Add(rootShard, uint64(silent), "127.0.0.1:7") // it spoke to us
	made.Add(rootShard, 0x5000, "127.0.0.1:8")
	made.Add(rootShard, uint64(recorded), "d:2")
	made.Add(rootShard, uint64(other), "127.0.0.1:9") // the address book counts more
	for replica, want := range map[uint64]string{uint64(silent): "127.0.0.1:7", 0x5000: "127.0.0.1:8", uint64(recorded): "d:2",
		uint64(other): "b:1"} {
		resolve(replica, want)
	}
	book[other] = "c:9"
	resolve(uint64(other), "c:9")
	made.Remove(rootShard, uint64(silent))
	resolve(uint64(silent), "127.0.0.1:7") // its last messages are answered
	made.RemoveShard(rootShard)
	resolve(uint64(recorded), "d:2")
	resolve(0x6000, "")
}

// TestDamagedRaftFolderIsRefused: the library panics over some of this; the process must not.
func TestDamagedRaftFolderIsRefused(t *testing.T) {
	n := newNode(t)
	c := n.start()
	n.create(c, "orders")
	_ = c.Close()
	name := filepath.Join(n.cfg.Dir, "NODEHOST.ID")
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	for _, at := range []int{0, len(b) / 2, len(b) - 1} {
		bad := bytes.Clone(b)
		bad[at] ^= 0x10
		if err := os.WriteFile(name, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		if c, err := n.open(); !errors.Is(err, storage.ErrFolderRefused) {
			if err == nil {
				_ = c.Close()
			}
			t.Errorf("byte %d of the host id is damaged: %v", at, err)
		}
	}
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
	c = n.start()
	_ = c.Close()
}
