package rangelog

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/replication"
	"github.com/malachilog/malachi/storage/vfs/faultfs"
	"github.com/malachilog/malachi/storage/vfs/memfs"
)

// faultRun runs the whole script with mutating operation n failing, and judges what is left. It reports whether the fault happened.
func faultRun(t *testing.T, direct bool, n int, effect faultfs.Effect) (fired bool) {
	synctest.Test(t, func(t *testing.T) {
		c := newScript(t, direct)
		c.forgiving = true
		what := ""
		c.fs.InjectWith(func(op faultfs.Op) *faultfs.Fault {
			if op.N != n || op.Kind.Reads() || op.Kind == faultfs.Close {
				return nil
			}
			what = op.String()
			return &faultfs.Fault{Effect: effect, Err: syscall.EIO}
		})
		judge := func(when string) {
			if fired = fired || c.fs.Fired() > 0; t.Failed() {
				t.Fatalf("operation %d (%s), effect %d, %s", n, what, effect, when)
			}
		}
		ackedAtFailure := -1
		afterFailure := func(part string) {
			judge(part)
			if c.s == nil || c.s.Failed() == nil {
				return
			}
			if ackedAtFailure < 0 {
				ackedAtFailure = c.w.acked
			}
			if c.w.acked != ackedAtFailure {
				t.Errorf("acknowledged after the failure")
			}
			c.failedStore()
			judge("after " + part)
		}
		if c.open() {
			afterFailure("open")
			for i, part := range []func(){c.part1, c.part2, c.part3} {
				if !c.over() {
					part()
					afterFailure(fmt.Sprintf("part %d", i+1))
				}
			}
		}
		fired = fired || c.fs.Fired() > 0
		c.fs.Reset()
		for i, m := range []*memfs.FS{c.m.CrashClone(nil), c.m.CrashClone(func(memfs.Unit) bool { return true }),
			c.m.CrashClone(func(u memfs.Unit) bool { return coin(uint64(n), uint64(u.Index)) }), c.m} {
			if _, err := recoverWorld(m, c.w); err != nil {
				t.Errorf("image %d: %v", i, err)
			}
			judge("recovery")
		}
		c.closeStore()
	})
	return fired
}

// failedStore checks what a store does after its failure: no append, no vote, no seal, no open; reads go on.
func (c *script) failedStore() {
	c.t.Helper()
	for id, r := range c.s.replicas {
		h, b := testBatch(c.t, r.m.Queued().Next(), 1, 10)
		err := c.s.Append(id, h, b, never(c.t, "append after the failure"))
		if err == nil {
			c.t.Errorf("append to %s after the failure was taken", id)
		}
		if err := c.call(func(ctx context.Context) error { _, err := c.s.Fence(ctx, id, r.raw); return err }); err == nil {
			c.t.Errorf("%s voted after the failure", id)
		}
		if r.m.Unverified() || r.m.State() == replication.StateDropped || r.m.Cutting() {
			continue
		}
		got, err := c.s.Read(id, r.header.Base, r.tally.End, 8<<20, nil)
		if end := storage.EndBefore(r.header.Base); err != nil || r.tally.End > end && (len(got) == 0 || got[len(got)-1].Header.End() != r.tally.End) {
			c.t.Errorf("read of %s after the failure: %d batches, %v", id, len(got), err)
		}
	}
	for id, st := range c.w.states[c.w.acked] {
		if st.phase == phaseSealed && len(st.ends) > 0 && c.w.now(id).phase == phaseSealed {
			if got, err := c.s.Read(id, 0, st.end, 8<<20, nil); err != nil || len(got) != len(st.ends) {
				c.t.Errorf("read of sealed %s after the failure: %d batches of %d, %v", id, len(got), len(st.ends), err)
			}
		}
	}
}

func TestFailEachOperation(t *testing.T) {
	inv.Covers(t, "INV-D8", "INV-D3", "INV-D6", "INV-R7")
	for _, direct := range []bool{true, false} {
		for name, effect := range map[string]faultfs.Effect{"nothing": faultfs.Nothing, "half": faultfs.Half, "drop": faultfs.Drop, "whole": faultfs.Whole} {
			t.Run(fmt.Sprintf("direct=%v/%s", direct, name), func(t *testing.T) {
				step := 1
				if testing.Short() || raceEnabled {
					step = 13
				}
				n := 0
				for faultRun(t, direct, n, effect) {
					n += step
				}
				if n < 150 {
					t.Errorf("only %d operations failed", n)
				}
				t.Logf("%d operations failed, one at a time", n/step)
			})
		}
	}
}

// TestFullDisk fills the disk in the middle: appends and opens are refused with a clear error, nothing is lost, and fences, stubs, seals,
// checkpoints, drops, reads and a restart work from the reserve.
func TestFullDisk(t *testing.T) {
	inv.Covers(t, "INV-R7")
	synctest.Test(t, func(t *testing.T) {
		c := newScript(t, true)
		c.open()
		c.s.cfg.DiskReserve = 1 << 20
		c.create(segA, 0)
		c.create(segB, 0)
		c.extend(segA, 4, 5000)
		c.extend(segB, 1, 100)
		c.flush()
		c.fs.NoSpaceAfter(600 << 10)
		c.s.CheckSpace()
		refused := func(when string) {
			t.Helper()
			st := c.w.now(segA)
			h, b := testBatch(t, st.end.Next(), 1, 10)
			wantErr(t, when+", append", c.s.Append(segA, h, b, never(t, when)), storage.ErrDiskFull)
			wantErr(t, when+", open", c.s.Create(testHeader(t, segC, 0), never(t, when)), storage.ErrDiskFull)
		}
		refused("full")
		c.checkpoint()
		if got, err := c.s.Read(segA, 0, 4, 1<<20, nil); err != nil || len(got) != 1 {
			t.Errorf("read on a full disk: %d, %v", len(got), err)
		}
		c.fence(segC, testHeader(t, segC, 0))
		c.fence(segB, nil)
		c.extend(segB, 1, 100) // a pass may extend
		c.flush()
		c.seal(segB, 0)
		c.drop(segC)
		if err := c.recoverNow(); err != nil {
			t.Error(err)
		}
		// Not a byte is left any more: it still starts, seals what it has room for, and says so otherwise.
		c.closeStore()
		c.fs.SetFull(true)
		c.open()
		c.fence(segA, nil)
		c.checkpoint()
		st := c.w.now(segA)
		err := c.call(func(ctx context.Context) error { return c.s.Seal(ctx, segA, st.end, st.digest) })
		if err != nil {
			wantErr(t, "seal without room for the footer", err, storage.ErrDiskFull)
		}
		if c.s.Failed() != nil {
			t.Fatal("a full disk was taken for a failed one")
		}
		c.drop(segB)
		c.fs.SetFull(false)
		c.s.CheckSpace()
		c.seal(segA, 0)
		c.create(segA2, st.end.Next())
		c.extend(segA2, 1, 100)
		c.flush()
		if err := c.recoverNow(); err != nil {
			t.Error(err)
		}
		c.closeStore()
	})
}

// TestDiskFullMet: nobody looked at the free space in time, so reservations and journal files meet the full disk themselves.
func TestDiskFullMet(t *testing.T) {
	inv.Covers(t, "INV-R7")
	synctest.Test(t, func(t *testing.T) {
		c := newScript(t, true)
		c.open()
		c.create(segA, 0)
		c.flush()
		c.fs.SetFull(true)
		var err error
		for n := 0; err == nil; n++ {
			st := c.w.now(segA)
			h, b := testBatch(t, st.end.Next(), 1, 3000)
			i := c.w.push(segA, st.with(h, b))
			if err = c.s.Append(segA, h, b, c.acks(i)); err != nil {
				c.w.states = c.w.states[:i]
			}
			c.flush()
			if n > 1000 {
				t.Fatal("the disk is never full")
			}
		}
		wantErr(t, "append", err, storage.ErrDiskFull)
		if c.s.Failed() != nil {
			t.Fatal("a full disk was taken for a failed one")
		}
		c.checkpoint()
		c.fence(segA, nil)
		if err := c.recoverNow(); err != nil {
			t.Error(err)
		}
		c.fs.SetFull(false)
		c.seal(segA, 0)
		c.create(segA2, c.w.now(segA).end.Next())
		for range 40 {
			c.extend(segA2, 1, 3000)
			c.flush()
			c.checkpoint()
		}
		if err := c.recoverNow(); err != nil {
			t.Error(err)
		}
		c.closeStore()
	})
}

// TestJournalCap runs into the cap again and again: client appends are overloaded, everything else goes through, and a checkpoint makes room.
func TestJournalCap(t *testing.T) {
	scripted(t, func(c *script) {
		c.create(segA, 0)
		c.create(segB, 0)
		c.flush()
		for round := range uint32(12) {
			var err error
			n := 0
			for ; err == nil; n++ {
				st := c.w.now(segA)
				h, b := testBatch(t, st.end.Next(), 1, 2500)
				i := c.w.push(segA, st.with(h, b))
				if err = c.s.Append(segA, h, b, c.acks(i)); err != nil {
					c.w.states = c.w.states[:i]
				}
				if n%3 == 0 {
					c.flush()
				}
				if n > 1000 {
					t.Fatal("there is no cap")
				}
			}
			wantErr(t, "append at the cap", err, storage.ErrOverloaded)
			if n < 10 {
				t.Errorf("round %d: only %d appends fit", round, n)
			}
			id := testID(7, round)
			c.fence(id, testHeader(t, id, 0))
			c.drop(id)
			h, b := testBatch(t, c.w.now(segA).end.Next(), 1, 2500)
			wantErr(t, "append at the cap", c.s.Append(segA, h, b, never(t, "append")), storage.ErrOverloaded)
			if round%4 == 3 {
				// Entries that need no checkpoint stop in the end too, and still leave room for one.
				st := c.w.now(segB)
				if st.phase != phaseFenced {
					c.fence(segB, nil)
				}
				for err = nil; err == nil; {
					st = c.w.now(segB)
					h, b := testBatch(t, st.end.Next(), 1, 2000)
					i := c.w.push(segB, st.with(h, b))
					if err = c.s.Recovered(segB, h, b, c.acks(i)); err != nil {
						c.w.states = c.w.states[:i]
					}
					c.flush()
				}
				wantErr(t, "recovered", err, storage.ErrOverloaded)
			}
			if round%2 == 0 {
				if err := c.recoverNow(); err != nil {
					t.Error(err)
				}
			}
			c.checkpoint()
		}
		if err := c.recoverNow(); err != nil {
			t.Error(err)
		}
	})
}

// TestAppendsGoOnDuringACheckpoint blocks a checkpoint in its sync: appends are made durable, given and read meanwhile.
func TestAppendsGoOnDuringACheckpoint(t *testing.T) {
	inv.Covers(t, "INV-D14")
	fs := faultfs.New(memfs.New(memfs.Options{Direct: true}))
	s := openStore(t, fs)
	stop := run(t, s)
	create(t, s, segA, 0)
	appendBatch(t, s, segA, 0, 2)
	entered, release := make(chan struct{}), make(chan struct{})
	fs.Inject(func(op faultfs.Op) error {
		if op.Kind == faultfs.Sync && op.Name == fileName(segA) {
			select {
			case entered <- struct{}{}:
				<-release
			case <-release:
			}
		}
		return nil
	})
	wake := make(chan struct{}, 1)
	cancel := s.Watch(segA, wake)
	for {
		if i, err := s.Info(segA); err != nil || i.Written == 2 {
			break
		}
		<-wake
	}
	cancel()
	noted := make(chan error, 1)
	go func() {
		ok, err := s.Checkpoint(func(err error) { noted <- err })
		if err != nil || !ok {
			noted <- fmt.Errorf("checkpoint: %v, %w", ok, err)
		}
	}()
	<-entered
	for i := range 50 {
		appendBatch(t, s, segA, storage.Offset(2+i), 1)
	}
	readAllRecords(t, s, segA, 0, min(52, waitWritten(t, s, segA, 52)))
	select {
	case err := <-noted:
		t.Errorf("the checkpoint ended during its sync: %v", err)
	default:
	}
	close(release)
	if err := <-noted; err != nil {
		t.Error(err)
	}
	stop()
	s = openStore(t, fs)
	stop = run(t, s)
	if v, err := s.Fence(t.Context(), segA, nil); err != nil || v.End != 52 {
		t.Errorf("after a restart: end %d, %v", v.End, err)
	}
	stop()
}

// waitWritten waits until the segment can be read up to end.
func waitWritten(t testing.TB, s *Store, id storage.SegmentID, end storage.End) storage.End {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	wake := make(chan struct{}, 1)
	defer s.Watch(id, wake)()
	for {
		i, err := s.Info(id)
		if err != nil {
			t.Fatal(err)
		}
		if i.Written >= end {
			return i.Written
		}
		select {
		case <-wake:
		case <-ctx.Done():
			t.Fatalf("%s is readable up to %d, not %d", id, i.Written, end)
		}
	}
}

// TestFollowerFailureEndsAppends: a segment file that cannot be written fails the directory, and everyone who waits is told.
func TestFollowerFailureEndsAppends(t *testing.T) {
	inv.Covers(t, "INV-D8")
	fs := faultfs.New(memfs.New(memfs.Options{Direct: true}))
	failed := make(chan error, 1)
	s, err := Open(testConfig(), Deps{FS: fs, Logger: discard, OnFailed: func(err error) { failed <- err }})
	if err != nil {
		t.Fatal(err)
	}
	ran := make(chan error, 1)
	go func() { ran <- s.Run(t.Context()) }()
	create(t, s, segA, 0)
	fs.Inject(func(op faultfs.Op) error {
		if op.Kind == faultfs.Write && op.Name == fileName(segA) {
			return syscall.EIO
		}
		return nil
	})
	h, b := testBatch(t, 0, 1, 10)
	if err := s.await(t.Context(), func(done func(error)) error { return s.Append(segA, h, b, done) }); err != nil {
		wantErr(t, "append", err, storage.ErrStorageFailed) // durable in the journal, but the failure may have come first
	}
	if err := <-failed; !errors.Is(err, syscall.EIO) {
		t.Errorf("OnFailed: %v", err)
	}
	wantErr(t, "run", <-ran, storage.ErrStorageFailed)
	h, b = testBatch(t, 1, 1, 10)
	wantErr(t, "append", s.Append(segA, h, b, func(error) {}), storage.ErrStorageFailed)
	_, err = s.Fence(t.Context(), segA, nil)
	wantErr(t, "fence", err, storage.ErrStorageFailed)
	wantErr(t, "seal", s.Seal(t.Context(), segA, 1, 1), storage.ErrStorageFailed)
	wantErr(t, "drop", s.Drop(t.Context(), segA), storage.ErrStorageFailed)
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	fs.Reset()
	s = openStore(t, fs)
	if r := s.lookup(segA); r == nil || r.tally.End != 1 {
		t.Error("the acknowledged record is not there after a restart")
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
