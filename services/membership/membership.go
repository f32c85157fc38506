// Package membership is who is there: brokers tell each other of themselves by gossip, with hashicorp/memberlist, and notice who is gone.
//
// What it says is advice. An address of it may be old, and one that it calls gone may be at work: nothing durable is decided by it alone.
//
// A process is a node of the gossip under a name of its own (broker id, boot, a random part), so a restart under another address conflicts
// with nothing, and two processes of one broker id are both seen: the higher boot counts, and that there are two is said loudly. Addresses
// of brokers that are gone are kept in a file, so that after a stop of all each finds the others again.
//
// Open listens and answers, on goroutines of the library. Run joins, joins again what was lost, and writes the file; when its ctx ends it
// leaves and closes. One mutex guards the view; it is never held during I/O or a call of the library. After a crash nothing of it is needed:
// a lost or damaged file costs the seeds' help.
package membership

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/vfs"
)

// Timings: a stopped process is noticed within some 2 to 4 s, a busy one has 2 s to say that it lives.
const (
	probeInterval  = 500 * time.Millisecond
	probeTimeout   = 300 * time.Millisecond
	gossipInterval = 100 * time.Millisecond
	streamTimeout  = 2 * time.Second
	pushPull       = 15 * time.Second
	leaveTimeout   = time.Second
)

// defaultRejoin is how often brokers that are not there are looked for.
const defaultRejoin = 2 * time.Second

// Config is a member's settings. Zero values stand for the defaults.
type Config struct {
	// Bind is host:port for gossip, TCP and UDP; port 0 takes a free one. Required.
	Bind string
	// Advertise is host:port under which others reach it. Default: what Bind came to; required if Bind's host is unspecified.
	Advertise string
	// Seeds are gossip addresses, host:port, of some members. They are asked while this broker is alone, and once a minute.
	Seeds []string
	// Cluster and Self are who this broker is. Required. A node of another cluster is refused.
	Cluster storage.ClusterID
	Self    storage.BrokerID
	Boot    storage.Boot
	// Keys encrypt the gossip, each of 16, 24 or 32 bytes; the first encrypts, all decrypt. None: plain. Not kept.
	Keys [][]byte
	// PeersFile is the file, in Deps.FS, that keeps the known brokers. Empty: none.
	PeersFile string
	// Rejoin is how often brokers that are not there are looked for. Default 2 s.
	Rejoin time.Duration
}

// Validate reports every fault at once, each wrapping storage.ErrInvalid.
func (c Config) Validate() error {
	var faults []error
	fault := func(format string, args ...any) {
		faults = append(faults, fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), storage.ErrInvalid))
	}
	for _, a := range append([]struct{ name, addr string }{{"gossip", c.Bind}, {"gossip advertise", c.Advertise}}, seedFields(c.Seeds)...) {
		if a.addr == "" && a.name == "gossip advertise" {
			continue
		}
		host, port, err := net.SplitHostPort(a.addr)
		if n, perr := strconv.ParseUint(port, 10, 16); err != nil || host == "" || perr != nil || n == 0 && a.name != "gossip" {
			fault("%s address %q: want host:port", a.name, a.addr)
		}
	}
	if c.Cluster.IsZero() {
		fault("gossip needs a cluster id")
	}
	if c.Self == 0 {
		fault("gossip needs a broker id")
	}
	if c.Rejoin < 0 {
		fault("gossip rejoin %v is negative", c.Rejoin)
	}
	if err := checkKeys(c.Keys); err != nil {
		faults = append(faults, err)
	}
	return errors.Join(faults...)
}

func seedFields(seeds []string) (out []struct{ name, addr string }) {
	for _, s := range seeds {
		out = append(out, struct{ name, addr string }{"gossip seed", s})
	}
	return out
}

// Deps are the collaborators of a Membership.
type Deps struct {
	// Logger takes what is noticed. Default: none.
	Logger *slog.Logger
	// FS holds PeersFile.
	FS vfs.FS
	// Discover returns more gossip addresses to try while this broker is alone, such as those that seeds tell of themselves. May be nil.
	Discover func(ctx context.Context) []string
}

// Meta is what a broker tells of itself. Encoded, with the ids, it takes at most 512 bytes.
type Meta struct {
	// API, RPC and Raft are host:port of its ports; empty if it has none.
	API, RPC, Raft string
	Attributes     map[string]string
	Version        string
	// Level is the highest that it understands.
	Level storage.Level
	// Load is how busy it is, in thousandths.
	Load uint32
}

// Member is a broker that is there.
type Member struct {
	ID   storage.BrokerID
	Boot storage.Boot
	Meta
	// Gossip is host:port of its gossip.
	Gossip string
	// Self: it is this broker.
	Self bool
	// LastSeen is when it last answered, or was heard of, by this broker's clock.
	LastSeen time.Time
	// Skew is how far its clock is ahead of this one's, measured at its last answer to within the round trip. Only if SkewKnown.
	Skew      time.Duration
	SkewKnown bool
}

// Membership is a member of the gossip. All methods are safe for concurrent use.
type Membership struct {
	cfg    Config
	deps   Deps
	log    *slog.Logger
	gossip string // own address
	list   *memberlist.Memberlist
	ring   *memberlist.Keyring // nil: plain
	name   string
	opened time.Time

	told rarely
	poke chan struct{} // something that Run has to look at

	mu      sync.Mutex
	meta    Meta
	encoded []byte
	resend  bool // meta is to be sent
	nodes   map[string]*node
	book    map[storage.BrokerID]*entry
	dirty   bool // the book is to be written
	changed chan struct{}

	ending sync.Mutex // of leaving and closing alone, which the library does not let cross
	closed bool
}

// Open listens and answers others. Errors: storage.ErrInvalid (settings, or a Meta that does not fit), and of the network; an address in use
// is syscall.EADDRINUSE.
func Open(ctx context.Context, cfg Config, meta Meta, deps Deps) (*Membership, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Rejoin == 0 {
		cfg.Rejoin = defaultRejoin
	}
	if deps.Logger == nil {
		deps.Logger = slog.New(slog.DiscardHandler)
	}
	m := &Membership{
		cfg: cfg, deps: deps, log: deps.Logger, meta: meta, opened: time.Now(), poke: make(chan struct{}, 1),
		nodes: map[string]*node{}, book: map[storage.BrokerID]*entry{}, changed: make(chan struct{}),
	}
	var nonce [4]byte
	if _, err := rand.Read(nonce[:]); err != nil {
		return nil, err
	}
	m.name = fmt.Sprintf("%s-%d-%s", cfg.Self, cfg.Boot, hex.EncodeToString(nonce[:]))
	var err error
	if m.encoded, err = m.encode(meta); err != nil {
		return nil, err
	}
	m.loadBook()
	lib, err := m.libraryConfig(ctx)
	if err != nil {
		return nil, err
	}
	m.list, err = memberlist.Create(lib)
	if err == nil {
		m.gossip = m.list.LocalNode().Address() // read once: the library writes to its node at every update
	}
	if err != nil {
		return nil, listenError(cfg.Bind, err)
	}
	m.cfg.Keys = nil
	return m, nil
}

// listenError finds again the cause that the library turned into text.
func listenError(bind string, err error) error {
	if containsAny(err.Error(), "address already in use") {
		return fmt.Errorf("listen for gossip on %s: %w", bind, syscall.EADDRINUSE)
	}
	return fmt.Errorf("listen for gossip on %s: %w", bind, err)
}

func (m *Membership) libraryConfig(ctx context.Context) (*memberlist.Config, error) {
	c := memberlist.DefaultLANConfig()
	c.Name = m.name
	c.ProbeInterval, c.ProbeTimeout = probeInterval, probeTimeout
	c.GossipInterval, c.PushPullInterval, c.TCPTimeout = gossipInterval, pushPull, streamTimeout
	c.SuspicionMult, c.SuspicionMaxTimeoutMult = 4, 2
	c.GossipToTheDeadTime = 30 * time.Second
	c.RequireNodeNames = false
	c.Logger = m.libraryLog()
	d := (*delegate)(m)
	c.Delegate, c.Events, c.Alive, c.Merge, c.Ping = d, d, d, d, d
	host, port, err := resolve(ctx, m.cfg.Bind)
	if err != nil {
		return nil, err
	}
	c.BindAddr, c.BindPort, c.AdvertisePort = host.String(), port, port
	switch {
	case m.cfg.Advertise != "":
		ahost, aport, err := resolve(ctx, m.cfg.Advertise)
		if err != nil {
			return nil, err
		}
		c.AdvertiseAddr, c.AdvertisePort = ahost.String(), aport
	case host.IsUnspecified():
		return nil, fmt.Errorf("gossip listens on every interface (%s): say by which address others reach it (advertise): %w", m.cfg.Bind, storage.ErrInvalid)
	}
	if len(m.cfg.Keys) > 0 {
		if m.ring, err = memberlist.NewKeyring(m.cfg.Keys, m.cfg.Keys[0]); err != nil {
			return nil, fmt.Errorf("gossip keys: %w: %w", storage.ErrInvalid, err)
		}
		c.Keyring = m.ring
	}
	return c, nil
}

// resolve gives the address that a host:port stands for: the library would take a name that it can't parse for every interface.
func resolve(ctx context.Context, addr string) (net.IP, int, error) {
	host, p, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, 0, fmt.Errorf("gossip address %q: %w", addr, storage.ErrInvalid)
	}
	port, err := strconv.ParseUint(p, 10, 16)
	if err != nil {
		return nil, 0, fmt.Errorf("gossip address %q: %w", addr, storage.ErrInvalid)
	}
	if ip := net.ParseIP(host); ip != nil {
		return ip, int(port), nil
	}
	ips, err := net.DefaultResolver.LookupIP(ctx, "ip", host)
	if err != nil {
		return nil, 0, fmt.Errorf("gossip address %q: %w", addr, err)
	}
	for _, ip := range ips {
		if ip.To4() != nil {
			return ip, int(port), nil
		}
	}
	return ips[0], int(port), nil
}

// Gossip is host:port under which others reach this member.
func (m *Membership) Gossip() string { return m.gossip }

// Update replaces what this broker tells of itself; the others hear of it within about a second while Run runs. storage.ErrTooLarge: it
// does not fit, and nothing changes.
func (m *Membership) Update(meta Meta) error {
	b, err := m.encode(meta)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.meta, m.encoded, m.resend = meta, b, true
	m.noteSelf()
	m.announce()
	return nil
}

// announce wakes who waits for a change. m.mu is held.
func (m *Membership) announce() {
	close(m.changed)
	m.changed = make(chan struct{})
	m.wake()
}

func (m *Membership) wake() {
	select {
	case m.poke <- struct{}{}:
	default:
	}
}

// Changed returns a channel that is closed at the next change of what Members, RaftAddress or RPCAddress answer. Take it before you read.
func (m *Membership) Changed() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.changed
}
