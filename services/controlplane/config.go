package controlplane

import (
	"context"
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
	// RaftAdvertise is host:port under which the others reach this broker. Default: the address that it listens on.
	RaftAdvertise string
	// FoundingBrokers is how many brokers the founding list names: the first replication factor is the lower of it and 3. Only a
	// founding reads it. Default 1.
	FoundingBrokers int
	// ReplaceAfter is how long a broker must be away (Deps.Absent) before its part in metadata groups is given to another one; at
	// least 1 s. Default 10 min.
	ReplaceAfter time.Duration
	// BalanceAfter is how long a group must have had the same members and leader before its leadership is moved to the voter that
	// should have it, so that all brokers lead some; at least 1 s. Default 30 s.
	BalanceAfter time.Duration
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
	if c.FoundingBrokers == 0 {
		c.FoundingBrokers = 1
	}
	if c.ReplaceAfter == 0 {
		c.ReplaceAfter = 10 * time.Minute
	}
	if c.BalanceAfter == 0 {
		c.BalanceAfter = 30 * time.Second
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
	if c.RaftAdvertise != "" {
		if host, port, err := net.SplitHostPort(c.RaftAdvertise); err != nil || host == "" || port == "" || port == "0" {
			fault("advertised raft address %q: want host:port", c.RaftAdvertise)
		}
	}
	if c.FoundingBrokers < 1 || c.FoundingBrokers > root.MaxBrokers {
		fault("founding brokers %d: want 1 to %d", c.FoundingBrokers, root.MaxBrokers)
	}
	if c.ReplaceAfter < time.Second {
		fault("replace after %v: want at least 1s", c.ReplaceAfter)
	}
	if c.BalanceAfter < time.Second {
		fault("balance after %v: want at least 1s", c.BalanceAfter)
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
	// Joining allows a folder that has never been used to join: the broker was admitted (Admit, on a member) and its replicas are
	// made by the others' logs. The marker must lose it once Register has returned, as Founding.
	Joining bool
	// Generation is what Admit answered on this start. Above what the folder holds, the broker was away for so long that its
	// replicas were given away: the folder's are left behind and it joins with new ones. 0 where nobody could be asked.
	Generation uint32
}

// TLSFiles are paths of PEM files. With all three the Raft port talks mutual TLS; the library reads the listener's once, at Open, and
// the dialling side's for each connection.
type TLSFiles struct{ CAFile, CertFile, KeyFile string }

// Candidate is a broker that may vote in a Raft group.
type Candidate struct {
	ID         storage.BrokerID
	Attributes map[string]string
	// Voter: it votes already. Those stay: they are always part of the answer.
	Voter bool
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
	// Addresses knows the other brokers. Where it does not know one, or is nil, the address from which the broker last spoke is
	// taken, or the one it registered.
	Addresses Addresses
	// Alive reports whether a broker seems to run. It must not block. A suspicion only delays a change of a group's members.
	// Default: all do.
	Alive func(storage.BrokerID) bool
	// Probe asks a broker directly whether it runs, before it is given a vote: one that is dead already, and not suspected yet, could
	// cost a group its quorum. ctx bounds it. Default: Alive is believed.
	Probe func(ctx context.Context, b storage.BrokerID) error
	// Absent is how long a broker has been away, 0 while it is there. It must not block. Default: none is ever away.
	Absent func(storage.BrokerID) time.Duration
	// ChooseVoters picks n of the candidates, those that vote already included, for a Raft group. It must be deterministic.
	// Default: rendezvous hashing, spread over the attribute "zone".
	ChooseVoters func(group uint64, candidates []Candidate, n int) []storage.BrokerID
	// Attributes of this broker, recorded at Register: "zone" -> "a".
	Attributes map[string]string
	// TLS secures the Raft port. Zero: plaintext.
	TLS TLSFiles
	// Now is the clock that creation, deletion and seal times are read from. Default time.Now.
	Now func() time.Time
	// Rand is where uids and nonces come from. Default crypto/rand.
	Rand io.Reader
	// Level is the highest level that this process understands. Default storage.CurrentLevel.
	Level storage.Level
}
