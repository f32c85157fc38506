package controlplane

import (
	"errors"
	"io"
	"sync/atomic"

	sm "github.com/lni/dragonboat/v4/statemachine"

	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/services/controlplane/root"
	"github.com/malachilog/malachi/storage"
)

// The two adapters below put a pure machine under the library. When the machine stops (a higher level), they apply nothing any
// more and write no snapshot, so that the entry it stopped at stays in the log for a process that understands it, and tell the
// control plane, whose Run ends the process in an orderly way. An error returned to the library would end it at once.

// rootReplica is root's machine. The library calls it from one goroutine at a time, except Lookup and SaveSnapshot.
type rootReplica struct {
	c       *ControlPlane
	machine *root.Machine
	state   atomic.Pointer[root.State]
	started atomic.Bool
	applied atomic.Uint64
	leader  atomic.Uint64 // replica id; 0: none is known
}

func (r *rootReplica) create(uint64, uint64) sm.IConcurrentStateMachine { return rootSM{r} }

// publish makes the machine's state the one that everybody reads.
func (r *rootReplica) publish() {
	st := r.machine.State()
	old := r.state.Swap(st)
	if old == st {
		return
	}
	if old == nil || old.Ring.Version != st.Ring.Version {
		r.c.routes.Store(r.c.newRouting(st))
	}
	if st.Level > 0 && (old == nil || old.Level != st.Level) {
		if err := writeLevel(r.c.cfg.Dir, st.Level); err != nil {
			r.c.log.Warn("the level could not be recorded", "err", err)
		}
	}
	r.c.roots.fire()
}

type rootSM struct{ r *rootReplica }

// Update applies entries.
func (s rootSM) Update(entries []sm.Entry) ([]sm.Entry, error) {
	for i, e := range entries {
		res, err := s.r.machine.Apply(e.Cmd)
		if err != nil {
			s.r.c.stop(err)
			break
		}
		entries[i].Result = sm.Result{Value: uint64(res.Outcome), Data: res.Encode()}
		s.r.applied.Store(e.Index)
	}
	s.r.publish()
	return entries, nil
}

// Lookup returns the state.
func (s rootSM) Lookup(any) (any, error) {
	if err := s.r.c.failed(); err != nil {
		return nil, err
	}
	return s.r.state.Load(), nil
}

// PrepareSnapshot is O(1).
func (s rootSM) PrepareSnapshot() (any, error) {
	if s.r.machine.Stopped() != nil {
		return nil, nil
	}
	return s.r.machine.Snapshot(), nil
}

// SaveSnapshot writes what PrepareSnapshot took.
func (s rootSM) SaveSnapshot(prepared any, w io.Writer, _ sm.ISnapshotFileCollection, _ <-chan struct{}) error {
	snap, ok := prepared.(*root.Snapshot)
	if !ok {
		return sm.ErrSnapshotAborted
	}
	return snap.Write(w)
}

// RecoverFromSnapshot replaces the state.
func (s rootSM) RecoverFromSnapshot(in io.Reader, _ []sm.SnapshotFile, _ <-chan struct{}) error {
	if err := s.r.machine.Restore(in); err != nil {
		return stopOrFail(s.r.c, err)
	}
	s.r.publish()
	return nil
}

// Close does nothing: the state is memory.
func (s rootSM) Close() error { return nil }

// stopOrFail turns a higher level into an orderly stop. Anything else is a broken snapshot, on which the library ends the process.
func stopOrFail(c *ControlPlane, err error) error {
	if errors.Is(err, storage.ErrNewerFormat) {
		c.stop(err)
		return nil
	}
	return err
}

// vnodeReplica is the machine of one vnode. Every broker has one of each.
type vnodeReplica struct {
	c     *ControlPlane
	vnode uint32
	shard uint64

	machine *metadata.Machine
	view    atomic.Pointer[metadata.View]
	started atomic.Bool
	applied atomic.Uint64
	leader  atomic.Uint64 // replica id; 0: none is known
}

func (r *vnodeReplica) create(uint64, uint64) sm.IConcurrentStateMachine { return vnodeSM{r} }

type vnodeSM struct{ r *vnodeReplica }

// Update applies entries, publishes the state after them, then wakes whoever waits for what changed.
func (s vnodeSM) Update(entries []sm.Entry) ([]sm.Entry, error) {
	var changed []storage.TopicUID
	for i, e := range entries {
		res, err := s.r.machine.Apply(e.Cmd)
		if err != nil {
			s.r.c.stop(err)
			break
		}
		entries[i].Result = sm.Result{Value: uint64(res.Outcome), Data: res.Encode()}
		s.r.applied.Store(e.Index)
		if res.Outcome == metadata.OutcomeOK && !res.Already && !res.UID.IsZero() {
			changed = append(changed, res.UID)
		}
	}
	s.r.view.Store(s.r.machine.View())
	s.r.c.changes.publish(changed)
	return entries, nil
}

// Lookup returns the view.
func (s vnodeSM) Lookup(any) (any, error) {
	if err := s.r.c.failed(); err != nil {
		return nil, err
	}
	return s.r.view.Load(), nil
}

// PrepareSnapshot is O(1).
func (s vnodeSM) PrepareSnapshot() (any, error) {
	if s.r.machine.Stopped() != nil {
		return nil, nil
	}
	return s.r.machine.View(), nil
}

// SaveSnapshot writes what PrepareSnapshot took.
func (s vnodeSM) SaveSnapshot(prepared any, w io.Writer, _ sm.ISnapshotFileCollection, _ <-chan struct{}) error {
	view, ok := prepared.(*metadata.View)
	if !ok {
		return sm.ErrSnapshotAborted
	}
	return view.WriteSnapshot(w)
}

// RecoverFromSnapshot replaces the state.
func (s vnodeSM) RecoverFromSnapshot(in io.Reader, _ []sm.SnapshotFile, _ <-chan struct{}) error {
	if err := s.r.machine.Restore(in); err != nil {
		return stopOrFail(s.r.c, err)
	}
	s.r.view.Store(s.r.machine.View())
	s.r.c.changes.publishAll()
	return nil
}

// Close does nothing: the state is memory.
func (s vnodeSM) Close() error { return nil }
