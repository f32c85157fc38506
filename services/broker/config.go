package broker

import (
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/malachilog/malachi/services/controlplane/root"
	"github.com/malachilog/malachi/services/transport"
	"github.com/malachilog/malachi/storage"
)

// Config is a broker's settings. Zero values stand for the defaults.
type Config struct {
	// Data is the data directory. Required. It is made if missing.
	Data string
	// RaftDir is where metadata's Raft log lives. Default: "raft" in Data.
	RaftDir string
	// API, Ops, RPC, Raft and Gossip are host:port of the listeners: the public API, operations, and three for other brokers. Port 0 takes a
	// free one. Defaults 127.0.0.1:4040 to 4044, in this order.
	API    string
	Ops    string
	RPC    string
	Raft   string
	Gossip string
	// Advertise is the host under which other brokers and clients reach the listeners. Default: the listeners' own; required if one of them
	// listens on every interface.
	Advertise string
	// Bootstrap lets an empty directory found a cluster of this one broker, at once.
	Bootstrap bool
	// BootstrapExpect and Founders order a founding together: Founders are the RPC addresses of BootstrapExpect brokers, this one among them,
	// and all of them are started with the same list.
	BootstrapExpect int
	Founders        []string
	// Join are RPC addresses of some brokers of the cluster that an empty directory joins.
	Join []string
	// Attributes are what placement may spread over: "zone" -> "a".
	Attributes map[string]string
	// TLS are PEM files. With a certificate the API and operations ports talk TLS; with authorities too, the ports between brokers talk mutual
	// TLS. GossipKeys is a file of keys that encrypt the gossip.
	TLS        transport.Files
	GossipKeys string
	// Insecure allows to listen beyond loopback without them.
	Insecure bool
	// Vnodes is the number of metadata shards of a new cluster. Default 16.
	Vnodes int
	// ElectionTimeout of the Raft groups. Default 1 s.
	ElectionTimeout time.Duration
	// SegmentMaxBytes and SegmentMaxAge go into the policy "default" when this start founds the cluster; afterwards the recorded policy counts.
	// Defaults 256 MiB and 1 h.
	SegmentMaxBytes int64
	SegmentMaxAge   time.Duration
	// JournalFileBytes and JournalMaxBytes size the journal. Defaults 64 MiB and 1 GiB.
	JournalFileBytes int64
	JournalMaxBytes  int64
	// DiskReserve is the free space in bytes below which appends are refused. Default: the smaller of 5 % and 2 GiB.
	DiskReserve uint64
	// DrainGrace is how long a stop waits for calls under way. Default 10 s.
	DrainGrace time.Duration
	// Version is what the broker calls itself.
	Version string
}

func (c Config) withDefaults() Config {
	def := func(p *string, v string) {
		if *p == "" {
			*p = v
		}
	}
	def(&c.API, "127.0.0.1:4040")
	def(&c.Ops, "127.0.0.1:4041")
	def(&c.RPC, "127.0.0.1:4042")
	def(&c.Raft, "127.0.0.1:4043")
	def(&c.Gossip, "127.0.0.1:4044")
	def(&c.Version, "devel")
	if c.ElectionTimeout == 0 {
		c.ElectionTimeout = time.Second
	}
	if c.DrainGrace == 0 {
		c.DrainGrace = 10 * time.Second
	}
	return c
}

// Validate reports every fault at once, each wrapping storage.ErrInvalid.
func (c Config) Validate() error {
	c = c.withDefaults()
	var faults []error
	fault := func(format string, args ...any) {
		faults = append(faults, fmt.Errorf(format+": %w", append(args, storage.ErrInvalid)...))
	}
	if c.Data == "" {
		fault("data: name a folder")
	}
	faults = append(faults, c.validateNetwork()...)
	if c.Vnodes < 0 || c.Vnodes > root.MaxVnodes {
		fault("vnodes %d: want 1 to %d", c.Vnodes, root.MaxVnodes)
	}
	if c.ElectionTimeout < 100*time.Millisecond || c.ElectionTimeout > time.Minute {
		fault("election_timeout %v: want 100ms to 1m", c.ElectionTimeout)
	}
	if c.DrainGrace < 0 {
		fault("drain_grace %v is negative", c.DrainGrace)
	}
	if c.SegmentMaxBytes < 0 || c.SegmentMaxBytes > 0 && c.SegmentMaxBytes < 1<<20 {
		fault("segment_max_bytes %d: want at least 1 MiB", c.SegmentMaxBytes)
	}
	if c.SegmentMaxAge < 0 || c.SegmentMaxAge > 0 && c.SegmentMaxAge < time.Second {
		fault("segment_max_age %v: want at least 1s", c.SegmentMaxAge)
	}
	file, all := c.JournalFileBytes, c.JournalMaxBytes
	if file == 0 {
		file = 64 << 20
	}
	if all == 0 {
		all = 1 << 30
	}
	if file < 16<<20 || file > 1<<30 || file%4096 != 0 {
		fault("journal_file_bytes %d: want 16 MiB, so that the largest batch fits, to 1 GiB, in whole blocks of 4 KiB", file)
	}
	if all/4 < file {
		fault("journal_max_bytes %d: want at least four files of %d (journal_file_bytes)", all, file)
	}
	return errors.Join(faults...)
}

// validateNetwork looks at addresses and at what secures them.
func (c Config) validateNetwork() (faults []error) {
	fault := func(format string, args ...any) {
		faults = append(faults, fmt.Errorf(format+": %w", append(args, storage.ErrInvalid)...))
	}
	secure, mutual := c.TLS.Cert != "", c.TLS.Cert != "" && c.TLS.CA != ""
	if (c.TLS.Cert == "") != (c.TLS.Key == "") || c.TLS.CA != "" && c.TLS.Cert == "" {
		fault("tls_cert, tls_key and tls_ca: a certificate needs its key, and authorities are of use only beside them")
	}
	ports := map[string]string{}
	for _, a := range []struct {
		name, addr string
		secure     bool
	}{{"api", c.API, secure}, {"ops", c.Ops, secure}, {"rpc", c.RPC, mutual}, {"raft", c.Raft, mutual}, {"gossip", c.Gossip, c.GossipKeys != ""}} {
		host, port, err := net.SplitHostPort(a.addr)
		if err != nil {
			fault("%s %q: want host:port", a.name, a.addr)
			continue
		}
		if host == "" {
			fault("%s %q: name the host: an empty one would listen on every interface", a.name, a.addr)
			continue
		}
		if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() && c.Advertise == "" {
			fault("%s %q listens on every interface: say in advertise under which host others reach it", a.name, a.addr)
		}
		if err := transport.RequireSecure(a.addr, a.secure, c.Insecure); err != nil {
			faults = append(faults, fmt.Errorf("%s: %w", a.name, err))
		}
		if n, err := strconv.ParseUint(port, 10, 16); err != nil {
			fault("%s %q: want a port from 0 to 65535", a.name, a.addr)
		} else if other := ports[port]; n > 0 && other != "" {
			fault("%s %q: %s has this port already", a.name, a.addr, other)
		}
		ports[port] = a.name
	}
	if c.Bootstrap && (c.BootstrapExpect > 0 || len(c.Join) > 0) {
		fault("bootstrap founds a cluster of this one broker: it excludes bootstrap_expect and join")
	}
	if c.BootstrapExpect != len(c.Founders) {
		fault("bootstrap_expect %d: founders names %d brokers", c.BootstrapExpect, len(c.Founders))
	}
	return faults
}
