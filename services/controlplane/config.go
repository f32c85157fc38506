package controlplane

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"time"

	"github.com/malachilog/malachi/services/controlplane/root"
	"github.com/malachilog/malachi/storage"
)

// Config is the control plane's settings.
type Config struct {
	// Dir is the folder of the Raft log, snapshots and identity. It may lie on another volume than the data. Required.
	Dir string
	// RaftAddress is host:port of the Raft listener. Port 0 picks a free one; an empty host is 127.0.0.1. Default ":0".
	RaftAddress string
	// Vnodes is the number of metadata shards that a founding makes, 1 to 1024. Afterwards the recorded ring counts and this
	// does not. Default 16.
	Vnodes int
	// ElectionTimeout is how long a follower waits for its leader; 100 ms to 60 s. Default 1 s.
	ElectionTimeout time.Duration
	// SnapshotEntries is after how many applied commands a group writes a snapshot; at least 10. Default 10,000.
	SnapshotEntries int
	// CommandTimeout bounds one proposal or linearizable read if the caller's ctx has no nearer deadline. Default 5 s.
	CommandTimeout time.Duration
}

func (c Config) withDefaults() Config {
	if c.RaftAddress == "" {
		c.RaftAddress = ":0"
	}
	if c.Vnodes == 0 {
		c.Vnodes = 16
	}
	if c.ElectionTimeout == 0 {
		c.ElectionTimeout = time.Second
	}
	if c.SnapshotEntries == 0 {
		c.SnapshotEntries = 10_000
	}
	if c.CommandTimeout == 0 {
		c.CommandTimeout = 5 * time.Second
	}
	return c
}

// Validate reports every fault at once, each wrapping storage.ErrInvalid. Zero values stand for the defaults.
func (c Config) Validate() error {
	c = c.withDefaults()
	var faults []error
	fault := func(format string, args ...any) {
		faults = append(faults, fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), storage.ErrInvalid))
	}
	if c.Dir == "" {
		fault("controlplane dir is empty")
	}
	if _, _, err := net.SplitHostPort(c.RaftAddress); err != nil {
		fault("raft address %q: want host:port", c.RaftAddress)
	}
	if c.Vnodes < 1 || c.Vnodes > root.MaxVnodes {
		fault("vnodes %d: want 1 to %d", c.Vnodes, root.MaxVnodes)
	}
	if c.ElectionTimeout < 100*time.Millisecond || c.ElectionTimeout > time.Minute {
		fault("election timeout %v: want 100ms to 1m", c.ElectionTimeout)
	}
	if c.SnapshotEntries < 10 {
		fault("snapshot entries %d: want at least 10", c.SnapshotEntries)
	}
	if c.CommandTimeout < 0 {
		fault("command timeout %v is negative", c.CommandTimeout)
	}
	return errors.Join(faults...)
}

// Identity is who this broker is: what its marker file says.
type Identity struct {
	Cluster storage.ClusterID
	Broker  storage.BrokerID
	// Founding allows this start to found the cluster, or to finish a founding that a crash cut short. The marker must lose
	// it once Register has returned: from then on a folder without its root group is refused and never founded anew.
	Founding bool
}

// Addresses finds the Raft addresses of other brokers.
type Addresses interface {
	// RaftAddress returns host:port of a broker, if known. It must not block.
	RaftAddress(storage.BrokerID) (string, bool)
}

// Deps are the collaborators of a ControlPlane.
type Deps struct {
	// Logger takes what the control plane and its Raft library (Warn and above) say. The library has one log for the process, so
	// its lines go to the logger of the ControlPlane opened last. Default: none.
	Logger *slog.Logger
	// Addresses knows the other brokers. Nil on a cluster of one.
	Addresses Addresses
	// Now is the clock that creation, deletion and seal times are read from. Default time.Now.
	Now func() time.Time
	// Rand is where uids and nonces come from. Default crypto/rand.
	Rand io.Reader
	// Level is the highest level that this process understands. Default storage.CurrentLevel.
	Level storage.Level
}
