// Package broker is the composition root of a node: it opens the data directory, recovers the store, joins the control plane, and serves the
// public services and the operations port.
//
// Open does I/O and starts nothing that serves. Run owns every goroutine, drains when its context ends, and returns after the last has left.
// After a crash at any point Open finds its way: what is durable is in the data directory and in the Raft folder.
package broker

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	"github.com/malachilog/malachi/services/admin"
	"github.com/malachilog/malachi/services/controlplane"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/services/coordinator"
	"github.com/malachilog/malachi/services/fetch"
	"github.com/malachilog/malachi/services/founding"
	"github.com/malachilog/malachi/services/membership"
	"github.com/malachilog/malachi/services/produce"
	"github.com/malachilog/malachi/services/replica"
	"github.com/malachilog/malachi/services/rpc"
	"github.com/malachilog/malachi/services/telemetry"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/datadir"
	"github.com/malachilog/malachi/storage/journal"
	"github.com/malachilog/malachi/storage/rangelog"
	"github.com/malachilog/malachi/storage/replication"
	"github.com/malachilog/malachi/storage/vfs"
)

// Broker is an open broker.
type Broker struct {
	cfg  Config
	log  *slog.Logger
	self storage.BrokerID
	boot storage.Boot

	fs        *vfs.OS
	dir       *datadir.Dir
	store     *rangelog.Store
	cp        *controlplane.ControlPlane
	replicas  *replica.Service
	coord     *coordinator.Coordinator
	founding  *founding.Service
	members   *membership.Membership
	meta      membership.Meta // what this broker tells of itself
	services  rpc.Services
	telemetry *telemetry.Telemetry
	net       network

	// What must run before Run does: the port for other brokers, and the gossip.
	background     *errgroup.Group
	backgroundCtx  context.Context
	stopBackground context.CancelFunc

	closing chan struct{} // closed when the drain begins
	ready   atomic.Bool
}

// Open recovers the node and leaves it ready to Run. Errors: storage.ErrFolderRefused and storage.ErrNewerFormat (exit 78), storage.ErrInvalid
// (configuration), ErrPortInUse.
func Open(ctx context.Context, cfg Config, log *slog.Logger) (_ *Broker, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	b := &Broker{cfg: cfg.withDefaults(), log: log, closing: make(chan struct{})}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close())
		}
	}()
	b.background, b.backgroundCtx = errgroup.WithContext(context.Background())
	b.backgroundCtx, b.stopBackground = context.WithCancel(b.backgroundCtx)
	b.net.cfg = b.cfg
	if err := b.net.open(b.transportDeps()); err != nil { // first: a port in use must not cost a boot
		return nil, err
	}
	if err := b.openFolder(); err != nil {
		return nil, fmt.Errorf("data folder %s: %w", b.cfg.Data, err)
	}
	if err := b.meet(ctx); err != nil {
		return nil, err
	}
	if err := b.openControlPlane(ctx); err != nil {
		return nil, err
	}
	if err := b.compose(); err != nil {
		return nil, err
	}
	b.net.registered(b)
	return b, nil
}

// openFolder locks the data directory, recovers the store and raises the boot.
func (b *Broker) openFolder() (err error) {
	if err := os.MkdirAll(b.cfg.Data, 0o755); err != nil { // not a folder, or not ours to write
		return fmt.Errorf("%w: %w", storage.ErrFolderRefused, err)
	}
	if b.fs, err = vfs.NewOS(b.cfg.Data); err != nil {
		return fmt.Errorf("%w: %w", storage.ErrFolderRefused, err)
	}
	if b.dir, err = datadir.Open(b.fs, rand.Reader); err != nil {
		return err
	}
	m := b.dir.Marker()
	if b.self, err = storage.ParseBrokerID(m.Broker); err != nil {
		return err
	}
	var jid journal.ID
	if _, err := rand.Read(jid[:]); err != nil {
		return err
	}
	b.store, err = rangelog.Open(rangelog.Config{
		Journal:     journal.Config{FileBytes: b.cfg.JournalFileBytes, MaxBytes: b.cfg.JournalMaxBytes},
		DiskReserve: b.cfg.DiskReserve,
		MustExist:   m.Journal,
	}, rangelog.Deps{FS: b.fs, Logger: b.log, NewJournalID: jid, OnFound: b.prove, OnFailed: b.storageFailed})
	if err != nil {
		return err
	}
	if rec := b.store.Recovery(); rec.Entries > 1 {
		b.log.Info("journal replayed", "groups", rec.Groups, "entries", rec.Entries, "segments", rec.Segments, "damaged", len(rec.Damaged))
	}
	m, err = b.dir.Update(func(m *datadir.Marker) {
		m.Boot++
		m.Journal = true
		m.StorageFailed = "" // the recovery checkpoint is done: what is there was written again and synced
	})
	b.boot = m.Boot
	return err
}

// prove notes what the journal held before this start wrote anything. After a start that was not registered it can only fall.
func (b *Broker) prove(last uint64) error {
	_, err := b.dir.Update(func(m *datadir.Marker) {
		if m.Registered || mutate.On("broker.proof-grows") {
			m.Proof = last
		}
		m.Proof, m.Registered = min(m.Proof, last), false
	})
	return err
}

// storageFailed keeps the failure in the marker, if that can still be written.
func (b *Broker) storageFailed(cause error) {
	if _, err := b.dir.Update(func(m *datadir.Marker) { m.StorageFailed = cause.Error() }); err != nil {
		b.log.Error("the storage failure could not be recorded", "error", err)
	}
}

// compose wires the parts together.
func (b *Broker) compose() (err error) {
	if b.telemetry, err = telemetry.New(); err != nil {
		return err
	}
	b.replicas = replica.New(replica.Config{Self: b.self, Boot: b.boot}, replica.Deps{
		Store: b.store, Logger: b.log, Peers: b.net.peers, StillOpen: b.stillOpen,
		AskPass:         func(id storage.SegmentID, why replication.Reason) { b.coord.AskPass(id, why) },
		Damaged:         func(id storage.SegmentID) { b.coord.Damaged(id) },
		SegmentMaxBytes: func() int64 { return int64(b.cp.Policy().SegmentMaxBytes) },
	})
	b.coord = coordinator.New(coordinator.Config{Self: b.self, Boot: b.boot}, coordinator.Deps{
		ControlPlane: b.cp, Brokers: b.brokers, Absent: b.absent, Peers: b.net.peers, Copies: b.replicas, Local: b.replicas, Store: b.store, Logger: b.log, Replicas: b.way,
	})
	router := replica.NewRouter(b.replicas)
	b.services = rpc.Services{
		Produce: produce.New(produce.Deps{Self: b.self, Topics: b.cp, Heads: b.coord, Primary: router, API: b.apiOf, Observe: b.telemetry.Produced}),
		Fetch: fetch.New(fetch.Deps{
			Topics: b.cp, Replicas: router, Blocked: b.coord.Blocked, Closing: b.closing, Observe: b.telemetry.Fetched,
		}),
		Admin: admin.New(admin.Deps{ControlPlane: b.cp, Cluster: b.cp, Peers: local{b}, Local: local{b}, Self: b.self, Version: b.cfg.Version}),
	}
	return b.telemetry.Observe(telemetry.Gauges{
		Journal: b.store.Stats, StorageFailed: func() bool { return b.store.Failed() != nil }, DiskFull: b.store.DiskFull,
		Disk: b.disk, Serving: func() int { return len(b.replicas.Serving()) }, Topics: b.topics, Ready: b.ready.Load,
	})
}

// apiOf is the base URL of a broker's API, or nothing if it is not known.
func (b *Broker) apiOf(id storage.BrokerID) string {
	rec, ok := b.cp.State().Broker(id)
	if !ok || rec.Addresses["api"] == "" {
		return ""
	}
	return b.net.scheme() + "://" + rec.Addresses["api"]
}

// stillOpen reads the record of a segment behind everything that was decided before.
func (b *Broker) stillOpen(ctx context.Context, topic string, id storage.SegmentID) (bool, error) {
	t, err := b.cp.Topic(ctx, topic)
	switch {
	case errors.Is(err, storage.ErrTopicNotFound):
		return false, nil
	case err != nil:
		return false, err
	}
	seg := t.Segment(id)
	return t.UID == id.Range.Topic && seg != nil && seg.State == metadata.SegmentOpen, nil
}

// way is the path to a broker's replicas, or nil if no address of it is known.
func (b *Broker) way(id storage.BrokerID) coordinator.Replicas {
	if id == b.self {
		return b.replicas
	}
	r, err := replica.NewRemote(b.net.peers, id)
	if err != nil {
		return nil
	}
	return r
}

func (b *Broker) topics() (n int) {
	for _, v := range b.cp.Status().Vnodes {
		n += v.Topics
	}
	return n
}

func (b *Broker) disk() (free, total uint64) {
	free, total, err := b.fs.Space(".")
	if err != nil {
		b.log.Warn("cannot tell the free space", "error", err)
	}
	return free, total
}

// local answers for this broker what the admin service asks.
type local struct{ b *Broker }

func (l local) Committed(id storage.SegmentID) (storage.End, error) {
	return l.b.replicas.Committed(id)
}
func (l local) Blocked(id storage.RangeID) string { return l.b.coord.Blocked(id) }

func (l local) State() (state string, free, total uint64) {
	free, total = l.b.disk()
	switch {
	case l.b.store.Failed() != nil:
		state = "storage_failed"
	case l.b.store.DiskFull():
		state = "disk_full"
	default:
		state = "serving"
	}
	return state, free, total
}

// ID is this broker's id.
func (b *Broker) ID() storage.BrokerID { return b.self }

// Boot counts the starts on this folder, this one included.
func (b *Broker) Boot() storage.Boot { return b.boot }

// APIAddr and OpsAddr are the listeners' addresses.
func (b *Broker) APIAddr() string { return b.net.api.Addr().String() }

// OpsAddr is the address of the operations port.
func (b *Broker) OpsAddr() string { return b.net.ops.Addr().String() }

// Scheme of the API and operations ports: "http", or "https" with a certificate.
func (b *Broker) Scheme() string { return b.net.scheme() }

// close releases what Open has taken, in reverse order.
func (b *Broker) close() error {
	var errs []error
	b.stopBackground()
	if b.cp != nil {
		errs = append(errs, b.cp.Close())
	}
	errs = append(errs, b.net.close()...)
	errs = append(errs, b.background.Wait())
	if b.store != nil {
		errs = append(errs, b.store.Close())
	}
	if b.dir != nil {
		errs = append(errs, b.dir.Close())
	}
	if b.fs != nil {
		errs = append(errs, b.fs.Close())
	}
	return errors.Join(errs...)
}
