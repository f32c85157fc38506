package controlplane

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/lni/dragonboat/v4"
	"github.com/lni/dragonboat/v4/config"
	sm "github.com/lni/dragonboat/v4/statemachine"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	"github.com/malachilog/malachi/storage"
)

// Raft group numbers. They stand in folders and never change.
const (
	rootShard  uint64 = 1
	vnodeShard uint64 = 16 // + vnode
)

// A read waits this long for its group before it is tried again; a proposal, whose retry costs a log entry, a little longer, and
// longer each time: what is sent to a leader that died, or to which the library has no connection yet, is lost without a word.
const (
	readAttempt    = 300 * time.Millisecond
	proposeAttempt = 400 * time.Millisecond // the first
	proposeLongest = time.Second
	memberAttempt  = 2 * time.Second
)

// host is the Raft library with one folder and one listener.
type host struct {
	cfg     Config
	id      Identity
	address string // under which others reach it

	generation uint32
	replica    uint64      // this broker's replica id in every group
	joined     bool        // its replicas joined groups that others founded
	joining    atomic.Bool // they are not complete yet: one that is missing may be made by joining

	nh   *dragonboat.NodeHost
	lock io.Closer
}

// events are what the library tells us. They are called on the library's own goroutines and must not block.
type events struct {
	leader   func(shard, replica uint64)
	members  func(shard uint64)
	deleted  func(shard, replica uint64)
	recorded func(storage.BrokerID) (string, bool)
}

// openHost takes the folder, opens it and listens. storage.ErrFolderRefused: in use, or of another broker or cluster.
func openHost(cfg Config, id Identity, deps Deps, ev events) (h *host, err error) {
	lock, err := lockFolder(cfg.Dir)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = lock.Close()
		}
	}()
	// Once more under the lock: another process may have claimed it since the first look.
	fresh, err := inspectFolder(cfg.Dir, id, deps.Level)
	if err != nil {
		return nil, err
	}
	if fresh {
		if err := claimFolder(cfg.Dir, id); err != nil {
			return nil, err
		}
	}
	if err := adoptHostname(cfg.Dir); err != nil {
		return nil, err
	}
	generation, joined, joining, err := openGeneration(cfg.Dir, id)
	if err != nil {
		return nil, err
	}
	routeRaftLog(deps.Logger)
	h = &host{cfg: cfg, id: id, lock: lock, generation: generation, replica: replicaOf(id.Broker, generation), joined: joined}
	h.joining.Store(joining)
	if err := h.listen(deps, ev); err != nil {
		return nil, err
	}
	return h, nil
}

// listen opens the library on the configured address, or on a free port of it.
func (h *host) listen(deps Deps, ev events) error {
	wanted, port, err := net.SplitHostPort(h.cfg.RaftAddress)
	if err != nil {
		return fmt.Errorf("raft address %q: %w", h.cfg.RaftAddress, storage.ErrInvalid)
	}
	if wanted == "" {
		wanted = "127.0.0.1"
	}
	for attempt := 0; ; attempt++ {
		listen := net.JoinHostPort(wanted, port)
		if port == "0" {
			if listen, err = freeAddress(wanted); err != nil {
				return fmt.Errorf("listen for raft on %s: %w", wanted, err)
			}
		}
		if h.address = h.cfg.RaftAdvertise; h.address == "" {
			h.address = listen
		}
		h.nh, err = newNodeHost(h.nodeHostConfig(listen, deps, ev))
		if err == nil {
			return nil
		}
		// Between our look and the library's bind someone may have taken a picked port: pick another.
		if port != "0" || !errors.Is(err, syscall.EADDRINUSE) || attempt == 4 {
			return hostError(err, h.cfg.Dir, listen)
		}
	}
}

// newNodeHost turns the library's panic over a damaged folder, which it sometimes swallows and returns nothing at all, into an error.
func newNodeHost(c config.NodeHostConfig) (nh *dragonboat.NodeHost, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("the raft folder is damaged (%v): %w", r, storage.ErrFolderRefused)
		}
	}()
	nh, err = dragonboat.NewNodeHost(c)
	if nh == nil && err == nil {
		err = fmt.Errorf("the raft folder is damaged: %w", storage.ErrFolderRefused)
	}
	return nh, err
}

// hostError says in our words what the library refused. Its errors of this kind are not exported, so their texts are compared.
func hostError(err error, dir, address string) error {
	text := err.Error()
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("raft address %s is in use: %w", address, err)
	case strings.Contains(text, "failed to lock data directory"):
		return fmt.Errorf("%s is in use by another process: %w", dir, storage.ErrFolderRefused)
	case strings.Contains(text, "NodeHostID"), strings.Contains(text, "deployment"):
		return fmt.Errorf("%s belongs to another broker or cluster (%s): %w", dir, text, storage.ErrFolderRefused)
	}
	return fmt.Errorf("open the raft folder %s: %w: %w", dir, storage.ErrFolderRefused, err)
}

// freeAddress is the host with a port that was free a moment ago.
func freeAddress(hostname string) (string, error) {
	l, err := net.Listen("tcp", net.JoinHostPort(hostname, "0"))
	if err != nil {
		return "", err
	}
	defer func() { _ = l.Close() }()
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		return "", err
	}
	return net.JoinHostPort(hostname, port), nil
}

func (h *host) nodeHostConfig(listen string, deps Deps, ev events) config.NodeHostConfig {
	return config.NodeHostConfig{
		// Messages of another cluster are dropped, and a folder of another cluster is refused.
		DeploymentID:   max(1, binary.LittleEndian.Uint64(h.id.Cluster[:8])),
		NodeHostID:     nodeHostID(h.id.Broker),
		NodeHostDir:    h.cfg.Dir,
		RTTMillisecond: h.rtt(),
		RaftAddress:    h.address,
		ListenAddress:  listen,
		MutualTLS:      deps.TLS != TLSFiles{},
		CAFile:         deps.TLS.CAFile,
		CertFile:       deps.TLS.CertFile,
		KeyFile:        deps.TLS.KeyFile,
		Expert: config.ExpertConfig{
			// One shard of each: all groups share one fsync. Hashed into the folder; can't change later.
			Engine: config.EngineConfig{ExecShards: 1, CommitShards: 1, ApplyShards: 4, SnapshotShards: 2, CloseShards: 2},
			LogDB:  logDBConfig(),
			NodeRegistryFactory: &registryFactory{self: h.id.Broker, replica: h.replica, address: h.address, others: deps.Addresses,
				recorded: ev.recorded},
		},
		RaftEventListener:   listener{ev: ev},
		SystemEventListener: listener{ev: ev},
	}
}

// logDBConfig keeps an idle process small: metadata is a few commands a second at most.
func logDBConfig() config.LogDBConfig {
	c := config.GetTinyMemLogDBConfig()
	c.Shards = 1
	c.KVWriteBufferSize = 2 << 20
	c.KVMaxWriteBufferNumber = 2
	c.KVMaxBytesForLevelBase = 16 << 20
	c.KVTargetFileSizeBase = 2 << 20
	c.KVLRUCacheSize = 1 << 20
	return c
}

// rtt is the library's clock tick in milliseconds: a tenth of the election timeout.
func (h *host) rtt() uint64 { return uint64(max(10, h.cfg.ElectionTimeout.Milliseconds()/10)) }

func (h *host) shardConfig(shard uint64, alone, nonVoting bool) config.Config {
	c := config.Config{
		ReplicaID:           h.replica,
		ShardID:             shard,
		CheckQuorum:         true,
		PreVote:             true,
		ElectionRTT:         10,
		HeartbeatRTT:        heartbeatTicks,
		SnapshotEntries:     uint64(h.cfg.SnapshotEntries),
		CompactionOverhead:  uint64(h.cfg.SnapshotEntries)/20 + 1,
		MaxInMemLogSize:     64 << 20,
		OrderedConfigChange: true, // each change of members is a compare-and-set on the one before
		IsNonVoting:         nonVoting,
	}
	if alone {
		// Nobody else could be the leader, so nobody need be waited for. Not recorded: a grown group gets the full timeout at its
		// next start.
		c.ElectionRTT, c.HeartbeatRTT = 5, 1
	}
	return c
}

// heartbeatTicks is how many clock ticks lie between two heartbeats of a leader.
const heartbeatTicks = 2

// start starts this broker's replica of a group. A replica that this folder has never held is made from nothing only if mayFound,
// and by joining only while the folder's replicas are not complete; else storage.ErrFolderRefused: it once had a vote and state,
// and an empty one would forget both.
func (h *host) start(shard uint64, mayFound, alone bool, machine sm.CreateConcurrentStateMachineFunc) error {
	var members map[uint64]dragonboat.Target
	join := false
	if !h.nh.HasNodeInfo(shard, h.replica) {
		switch {
		case h.joining.Load() || h.joined && mutate.On("controlplane.join-over-lost-replica"):
			join = true
		case mayFound && !h.joined:
			members = map[uint64]dragonboat.Target{h.replica: nodeHostID(h.id.Broker)}
		default:
			return fmt.Errorf("%s has lost this broker's replica: %w", h.cfg.Dir, storage.ErrFolderRefused)
		}
	}
	// A replica that joined is told on each start that it does not vote; its own log then says whether it was promoted since. One
	// that founded its group must not be told so.
	err := h.nh.StartConcurrentReplica(members, join, machine, h.shardConfig(shard, alone && !h.joined, h.joined))
	if err != nil && !errors.Is(err, dragonboat.ErrShardAlreadyExist) {
		return fmt.Errorf("start raft replica: %w", err)
	}
	return nil
}

// complete records that all replicas are there, and drops what earlier generations of them left.
func (h *host) complete(shards []uint64) error {
	if !h.joining.Load() {
		return nil
	}
	if err := completeGeneration(h.cfg.Dir, h.generation); err != nil {
		return err
	}
	h.joining.Store(false)
	for g := range h.generation {
		for _, shard := range shards {
			if old := replicaOf(h.id.Broker, g); h.nh.HasNodeInfo(shard, old) {
				if err := h.nh.RemoveData(shard, old); err != nil {
					return fmt.Errorf("drop a retired raft replica: %w", err)
				}
			}
		}
	}
	return nil
}

// membership is who is in a group, by a linearizable read.
func (h *host) membership(ctx context.Context, shard uint64) (*dragonboat.Membership, error) {
	ctx, cancel := context.WithTimeout(ctx, readAttempt)
	defer cancel()
	return h.nh.SyncGetShardMembership(ctx, shard)
}

// changeMembers makes one change of a group's members if none was made since the one numbered version.
func (h *host) changeMembers(ctx context.Context, shard, version uint64, ch change) error {
	ctx, cancel := context.WithTimeout(ctx, memberAttempt)
	defer cancel()
	target := nodeHostID(ch.broker)
	switch ch.kind {
	case addNonVoting:
		return h.nh.SyncRequestAddNonVoting(ctx, shard, ch.replica, target, version)
	case promote:
		return h.nh.SyncRequestAddReplica(ctx, shard, ch.replica, target, version)
	case remove:
		return h.nh.SyncRequestDeleteReplica(ctx, shard, ch.replica, version)
	case transfer:
		return h.nh.RequestLeaderTransfer(shard, ch.replica)
	}
	return nil
}

func (h *host) close() {
	h.nh.Close()
	_ = h.lock.Close() // last: now another process may take the folder
}

// bounded gives ctx the command timeout unless it ends sooner.
func (h *host) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, h.cfg.CommandTimeout)
}

// propose proposes cmd until it is answered or ctx ends. The command must be safe to apply twice. storage.ErrUnavailable: it was
// certainly not taken; storage.ErrOutcomeUnknown: it may be applied, now or later.
func (h *host) propose(ctx context.Context, shard uint64, cmd []byte) ([]byte, error) {
	ctx, cancel := h.bounded(ctx)
	defer cancel()
	session := h.nh.GetNoOPSession(shard)
	taken := false
	for wait := proposeAttempt; ; wait = min(wait*5/4, proposeLongest) {
		attempt, stop := context.WithTimeout(ctx, wait)
		res, err := h.nh.SyncPropose(attempt, session, cmd)
		stop()
		switch {
		case err == nil:
			return res.Data, nil
		case errors.Is(err, dragonboat.ErrClosed) && taken:
			return nil, fmt.Errorf("%w: %w", storage.ErrOutcomeUnknown, storage.ErrClosed)
		case errors.Is(err, dragonboat.ErrClosed):
			return nil, storage.ErrClosed
		case errors.Is(err, dragonboat.ErrPayloadTooBig):
			return nil, fmt.Errorf("%w: %w", storage.ErrTooLarge, err)
		case !certainlyNotTaken(err):
			taken = true
		}
		if !pause(ctx, err) {
			return nil, fate(ctx, err, taken)
		}
	}
}

// certainlyNotTaken reports whether the library refused a request before it queued it.
func certainlyNotTaken(err error) bool {
	return errors.Is(err, dragonboat.ErrSystemBusy) || errors.Is(err, dragonboat.ErrShardNotReady) ||
		errors.Is(err, dragonboat.ErrShardNotInitialized) || errors.Is(err, dragonboat.ErrShardNotFound) ||
		errors.Is(err, dragonboat.ErrTimeoutTooSmall) || errors.Is(err, dragonboat.ErrInvalidDeadline)
}

// fate words the failure of a command.
func fate(ctx context.Context, err error, taken bool) error {
	kind := storage.ErrUnavailable
	if taken {
		kind = storage.ErrOutcomeUnknown
	}
	if cerr := ctx.Err(); cerr != nil && !errors.Is(err, cerr) {
		return fmt.Errorf("%w: %w (%w)", kind, err, cerr)
	}
	return fmt.Errorf("%w: %w", kind, err)
}

// pause waits a moment before the next attempt where the last one failed at once. False: ctx has ended.
func pause(ctx context.Context, err error) bool {
	wait := time.Duration(0)
	if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, dragonboat.ErrTimeout) {
		wait = 10 * time.Millisecond
	}
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return ctx.Err() == nil
	}
}

// read runs a linearizable read until it is answered or ctx ends. storage.ErrUnavailable: no quorum answered.
func (h *host) read(ctx context.Context, shard uint64) (any, error) {
	ctx, cancel := h.bounded(ctx)
	defer cancel()
	for {
		attempt, stop := context.WithTimeout(ctx, readAttempt)
		v, err := h.nh.SyncRead(attempt, shard, nil)
		stop()
		if err == nil {
			return v, nil
		}
		if errors.Is(err, dragonboat.ErrClosed) {
			return nil, storage.ErrClosed
		}
		if errors.Is(err, storage.ErrNewerFormat) || errors.Is(err, storage.ErrClosed) || errors.Is(err, storage.ErrCorrupt) {
			return nil, err // the machine under the replica has stopped
		}
		if !pause(ctx, err) {
			return nil, fate(ctx, err, false)
		}
	}
}
