package rangelog

import (
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"log/slog"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/vfs/faultfs"
	"github.com/malachilog/malachi/storage/vfs/memfs"
)

// scripted runs fn with a fresh store that is driven by hand.
func scripted(t *testing.T, fn func(c *script)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		c := newScript(t, true)
		c.open()
		fn(c)
		if c.s != nil {
			c.closeStore()
		}
	})
}

func wantErr(t testing.TB, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: got %v, want %v", what, err, want)
	}
}

func never(t testing.TB, what string) func(error) {
	return func(err error) { t.Errorf("%s: answered %v", what, err) }
}

func TestAppendTakesOnlyItsOwnEnd(t *testing.T) {
	inv.Covers(t, "INV-D4", "INV-D7")
	scripted(t, func(c *script) {
		c.create(segA, 0)
		c.extend(segA, 5, 10)
		h, b := testBatch(t, 7, 1, 10)
		wantErr(t, "gap", c.s.Append(segA, h, b, never(t, "gap")), storage.ErrGap)
		h, b = testBatch(t, 4, 3, 10) // begins below the end and reaches beyond it
		wantErr(t, "overlap", c.s.Append(segA, h, b, never(t, "overlap")), storage.ErrGap)
		c.extend(segA, 1, 10)
		c.flush()
		wantErr(t, "unknown", c.s.Append(segB, h, b, never(t, "unknown")), storage.ErrUnknownSegment)
	})
}

func TestReplayWaitsForTheBarrier(t *testing.T) {
	inv.Covers(t, "INV-D15", "INV-D3")
	scripted(t, func(c *script) {
		c.create(segA, 0)
		c.flush()
		c.extend(segA, 5, 10)
		answered := 0
		h, b := testBatch(t, 0, 5, 10)
		replay := func() { c.check(c.s.Append(segA, h, b, func(err error) { c.check(err); answered++ })) }
		replay()
		if answered != 0 {
			t.Error("a replay was answered before the barrier of the end that it names")
		}
		if i, err := c.s.Info(segA); err != nil || i.End != 0 {
			t.Errorf("durable end %d before the barrier (%v)", i.End, err)
		}
		c.write()
		if answered != 1 {
			t.Errorf("after the barrier: answered %d times", answered)
		}
		replay()
		if answered != 2 {
			t.Error("a replay of what is durable was not answered at once")
		}
		c.flush()
	})
}

func TestFencedTakesNoAppend(t *testing.T) {
	inv.Covers(t, "INV-S5", "INV-D10")
	scripted(t, func(c *script) {
		c.create(segA, 0)
		c.extend(segA, 2, 10)
		c.flush()
		refused := func(when string) {
			t.Helper()
			h, b := testBatch(t, 2, 1, 10)
			wantErr(t, when, c.s.Append(segA, h, b, never(t, when)), storage.ErrFenced)
			h, b = testBatch(t, 0, 2, 10) // a fenced replica reports no end to a primary
			wantErr(t, when+", replay", c.s.Append(segA, h, b, never(t, when)), storage.ErrFenced)
		}
		h, b := testBatch(t, 2, 1, 10)
		wantErr(t, "recovered before the fence", c.s.Recovered(segA, h, b, never(t, "recovered")), storage.ErrConflict)
		c.check(c.s.queueFence(c.s.lookup(segA), func(error) {}))
		refused("fence queued")
		c.fence(segA, nil)
		refused("fence durable")
		c.checkpoint()
		c.closeStore()
		c.open()
		refused("after a restart")
		c.fence(segA, nil)
		refused("after the vote")
	})
}

func TestRestartedTakesNoAppend(t *testing.T) {
	inv.Covers(t, "INV-D5", "INV-S16")
	scripted(t, func(c *script) {
		c.create(segA, 0)
		c.extend(segA, 2, 10)
		c.flush()
		c.closeStore()
		c.open()
		h, b := testBatch(t, 2, 1, 10)
		wantErr(t, "append", c.s.Append(segA, h, b, never(t, "append")), storage.ErrStaleBoot)
		_, err := c.s.Read(segA, 0, 2, 1<<20, nil)
		wantErr(t, "read", err, storage.ErrStaleBoot)
		// A seal verifies the file and then finds that there is no fence: that must not reopen it.
		wantErr(t, "seal", c.call(func(ctx context.Context) error { return c.s.Seal(ctx, segA, 2, 1) }), storage.ErrConflict)
		wantErr(t, "append", c.s.Append(segA, h, b, never(t, "append")), storage.ErrStaleBoot)
	})
}

func TestOnlyVerifiedBytesAreCounted(t *testing.T) {
	inv.Covers(t, "INV-S14")
	scripted(t, func(c *script) {
		c.create(segA, 0)
		c.flush()
		refused := func(kind string, extend func(*testing.T, []byte) error) {
			h, b := testBatch(t, 0, 3, 100)
			for _, at := range []int{3, 20, 110, 112, len(b) - 1} {
				bad := append([]byte(nil), b...)
				bad[at] ^= 4
				wantErr(t, kind, extend(t, bad), storage.ErrCorrupt)
			}
			other, _ := testBatch(t, 0, 2, 100)
			wantErr(t, "foreign header", c.s.Append(segA, other, b, never(t, kind)), storage.ErrInvalid)
			wantErr(t, "cut short", c.s.Append(segA, h, b[:len(b)-1], never(t, kind)), storage.ErrCorrupt)
		}
		h, _ := testBatch(t, 0, 3, 100)
		refused("append", func(t *testing.T, b []byte) error { return c.s.Append(segA, h, b, never(t, "append")) })
		c.fence(segA, nil)
		refused("recovered", func(t *testing.T, b []byte) error { return c.s.Recovered(segA, h, b, never(t, "recovered")) })
		c.flush()
		if i, _ := c.s.Info(segA); i.End != 0 {
			t.Errorf("end %d", i.End)
		}
	})
}

// rot flips a byte of a file, behind the back of the file system.
func rot(t testing.TB, m *memfs.FS, name string, at int64) {
	t.Helper()
	f, err := m.OpenWrite(name)
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 1)
	if _, err := f.ReadAt(b, at); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 0x10
	if _, err := f.WriteAt(b, at); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		t.Fatal(err)
	}
}

// TestRotBelowTheCheckpointIsNoVote flips each of many bytes of an open segment's file below the checkpointed end.
func TestRotBelowTheCheckpointIsNoVote(t *testing.T) {
	inv.Covers(t, "INV-R2", "INV-S17", "INV-H1")
	scripted(t, func(c *script) {
		c.create(segA, 0)
		for range 5 {
			c.extend(segA, 2, 100)
		}
		c.flush()
		c.checkpoint()
		c.extend(segA, 2, 100) // in the journal alone
		c.flush()
		st := c.w.now(segA)
		checkpointed := int64(len(st.ends[5].bytes))
		for at := int64(len(st.header)); at < checkpointed; at += 97 {
			m := c.m.CrashClone(nil)
			rot(t, m, fileName(segA), at)
			before, err := fileBytes(m, fileName(segA))
			c.check(err)
			for range 2 { // it stays so at the next start, and nothing is cut
				s, err := openOn(m)
				if err != nil {
					t.Fatal(err)
				}
				inner := &script{t: t, m: m, s: s, w: newWorld()}
				err = inner.call(func(ctx context.Context) error { _, err := s.Fence(ctx, segA, nil); return err })
				wantErr(t, "vote", err, storage.ErrDamaged)
				_, err = s.Read(segA, 0, 2, 1<<20, nil)
				wantErr(t, "read", err, storage.ErrDamaged)
				err = inner.call(func(ctx context.Context) error { return s.Seal(ctx, segA, st.end, st.digest) })
				wantErr(t, "seal", err, storage.ErrDamaged)
				c.check(s.Close())
				after, err := fileBytes(m, fileName(segA))
				c.check(err)
				if string(after[:checkpointed]) != string(before[:checkpointed]) {
					t.Fatal("recovery changed damaged bytes")
				}
			}
		}
	})
}

// TestRotInTheJournalIsDamage flips bytes of acknowledged groups: recovery says so and changes nothing. The last group counts from its
// closing on.
func TestRotInTheJournalIsDamage(t *testing.T) {
	inv.Covers(t, "INV-R2", "INV-H1")
	scripted(t, func(c *script) {
		c.create(segA, 0)
		var last int64
		c.m.OnOp(func(op memfs.Op) {
			if op.Kind == memfs.OpWrite && op.Direct {
				last = op.Off
			}
		})
		for range 4 {
			c.extend(segA, 1, 5000)
			c.flush()
		}
		lastGroup := last
		c.m.OnOp(nil)
		torn := c.m.CrashClone(nil)
		rot(t, torn, "journal/00000001.wal", lastGroup+100)
		if n, err := recoverWorld(torn, &world{states: c.w.states}); err != nil || n != len(c.w.states)-2 {
			t.Errorf("a last group that is not closed looks torn: world %d of %d, %v", n, len(c.w.states)-1, err)
		}
		c.check(c.s.j.CloseGroup())
		flips := 0
		for at := int64(4096); at < lastGroup+5000; at += 509 {
			m := c.m.CrashClone(nil)
			rot(t, m, "journal/00000001.wal", at)
			before := m.Dump()
			_, err := openOn(m)
			if err == nil { // padding behind a group is not part of it
				if _, err := recoverWorld(m.CrashClone(nil), c.w); err != nil {
					t.Errorf("byte %d: neither damage nor all there: %v", at, err)
				}
				continue
			}
			flips++
			wantErr(t, "open", err, storage.ErrCorrupt)
			if m.Dump() != before {
				t.Fatal("a refused start changed something")
			}
		}
		if flips < 40 {
			t.Errorf("only %d flips were seen", flips)
		}
	})
}

// TestVoteSurvivesPowerCut: a process is killed between the write of a group and its barrier, so the group can be read back and is
// recovered; then the power goes. What was voted must still be there.
func TestVoteSurvivesPowerCut(t *testing.T) {
	inv.Covers(t, "INV-D12", "INV-R12")
	synctest.Test(t, func(t *testing.T) {
		c := newScript(t, false)
		c.open()
		c.create(segA, 0)
		c.flush()
		c.fence(segA, nil) // so that the next vote needs no entry of its own
		c.checkpoint()
		c.extend(segA, 3, 100)
		c.fs.FailAt(c.fs.Ops()+1, nil) // the sync behind the write
		if _, err := c.s.j.WriteGroup(); err == nil || c.fs.Fired() != 1 {
			t.Fatalf("the barrier did not fail: %v", err)
		}
		c.closeStore()
		c.fs.Reset()
		c.open()
		v := c.fence(segA, nil)
		if v.End != 3 {
			t.Fatalf("vote %d: the group was not read back", v.End)
		}
		image := c.m.CrashClone(nil)
		c.closeStore()
		if _, err := recoverWorld(image, c.w); err != nil {
			t.Errorf("after the power cut: %v", err)
		}
	})
}

// TestFailedSyncIsFinal: the kernel reports a failed sync once and forgets the dirty pages; the next one would succeed and prove nothing.
func TestFailedSyncIsFinal(t *testing.T) {
	inv.Covers(t, "INV-D8")
	synctest.Test(t, func(t *testing.T) {
		c := newScript(t, true)
		c.forgiving = true
		c.open()
		c.create(segA, 0)
		c.extend(segA, 3, 100)
		c.flush()
		c.fs.InjectWith(func(op faultfs.Op) *faultfs.Fault {
			if op.Kind != faultfs.Sync || c.fs.Fired() > 0 {
				return nil
			}
			return &faultfs.Fault{Effect: faultfs.Drop, Err: syscall.EIO}
		})
		if _, err := c.s.Checkpoint(nil); c.fs.Fired() != 1 || !errors.Is(err, storage.ErrStorageFailed) {
			t.Errorf("checkpoint: %v (%d faults)", err, c.fs.Fired())
		}
		_, _ = c.s.j.WriteGroup()
		h, b := testBatch(t, 3, 1, 10)
		wantErr(t, "append", c.s.Append(segA, h, b, never(t, "append")), storage.ErrStorageFailed)
		h, b = testBatch(t, 0, 3, 100)
		wantErr(t, "replay", c.s.Append(segA, h, b, never(t, "replay")), storage.ErrStorageFailed)
		_, err := c.s.Checkpoint(nil)
		wantErr(t, "second checkpoint", err, storage.ErrStorageFailed)
		if got, err := c.s.Read(segA, 0, 3, 1<<20, nil); err != nil || len(got) != 1 {
			t.Errorf("reads must go on: %d batches, %v", len(got), err)
		}
		if _, err := recoverWorld(c.m.CrashClone(nil), c.w); err != nil {
			t.Error(err)
		}
		c.closeStore()
	})
}

// TestFailedWriteIsFinal: a journal write that failed is not tried again.
func TestFailedWriteIsFinal(t *testing.T) {
	inv.Covers(t, "INV-D8", "INV-D13")
	synctest.Test(t, func(t *testing.T) {
		c := newScript(t, true)
		c.open()
		c.create(segA, 0)
		c.flush()
		h, b := testBatch(t, 0, 3, 100)
		var got error
		c.check(c.s.Append(segA, h, b, func(err error) { got = err }))
		c.fs.FailAtWith(c.fs.Ops(), faultfs.Fault{Effect: faultfs.Half, Err: syscall.EIO})
		_, err := c.s.j.WriteGroup()
		wantErr(t, "write", err, storage.ErrStorageFailed)
		wantErr(t, "append", got, storage.ErrStorageFailed)
		ops := c.fs.Ops()
		_, err = c.s.j.WriteGroup()
		wantErr(t, "write again", err, storage.ErrStorageFailed)
		wantErr(t, "close group", c.s.j.CloseGroup(), storage.ErrStorageFailed)
		if c.fs.Ops() != ops {
			t.Errorf("%d operations after the failure", c.fs.Ops()-ops)
		}
		c.closeStore()
	})
}

func TestSealNeedsTheRightBytes(t *testing.T) {
	inv.Covers(t, "INV-S3", "INV-S4", "INV-S14")
	scripted(t, func(c *script) {
		c.create(segA, 0)
		for range 3 {
			c.extend(segA, 2, 100)
		}
		c.flush()
		seal := func(end storage.End, d storage.Digest) error {
			return c.call(func(ctx context.Context) error { return c.s.Seal(ctx, segA, end, d) })
		}
		st := c.w.now(segA)
		wantErr(t, "not fenced", seal(6, st.digest), storage.ErrConflict)
		c.fence(segA, nil)
		wantErr(t, "longer", seal(8, st.digest), storage.ErrGap)
		wantErr(t, "other digest", seal(6, st.digest+1), storage.ErrCorrupt)
		wantErr(t, "inside a batch", seal(3, st.digest), storage.ErrCorrupt)
		wantErr(t, "other digest, shorter", seal(4, st.digest), storage.ErrCorrupt)
		if v := c.fence(segA, nil); v.End != 6 {
			t.Errorf("a refused seal changed the vote to %d", v.End)
		}
		c.seal(segA, 1)
		wantErr(t, "sealed otherwise", seal(6, st.digest), storage.ErrConflict)
		if err := seal(4, c.w.now(segA).digest); err != nil {
			t.Errorf("seal again: %v", err)
		}
		_, err := c.s.Fence(t.Context(), segA, st.header)
		wantErr(t, "fence a sealed one", err, storage.ErrSealed)
		wantErr(t, "open a sealed one", c.s.Create(st.header, never(t, "open")), storage.ErrSealed)
	})
}

// TestNothingOverwritesAFile: a sealed segment whose footer has rotted, or a file that nothing explains, is never taken for the rest of a
// failed open.
func TestNothingOverwritesAFile(t *testing.T) {
	inv.Covers(t, "INV-R13", "INV-R8")
	scripted(t, func(c *script) {
		c.create(segA, 0)
		c.extend(segA, 2, 100)
		c.fence(segA, nil)
		c.seal(segA, 0)
		st := c.w.now(segA)
		e, err := c.m.Stat(fileName(segA))
		c.check(err)
		rot(t, c.m, fileName(segA), e.Size-3)
		c.s.sealed.drop(segA)
		want, err := fileBytes(c.m, fileName(segA))
		c.check(err)
		wantErr(t, "open", c.s.Create(st.header, never(t, "open")), storage.ErrDamaged)
		_, err = c.s.Fence(t.Context(), segA, st.header)
		wantErr(t, "fence", err, storage.ErrDamaged)
		h, b := testBatch(t, 2, 1, 10)
		wantErr(t, "append", c.s.Append(segA, h, b, never(t, "append")), storage.ErrDamaged)
		c.check(sameFile(c.m, fileName(segA), want))
	})
}

// TestSecondLife: an id that was dropped and opened again within one journal keeps its second life only.
func TestSecondLife(t *testing.T) {
	inv.Covers(t, "INV-S13")
	scripted(t, func(c *script) {
		c.create(segA, 0)
		c.extend(segA, 2, 100)
		c.flush()
		c.drop(segA)
		c.create(segA, 0)
		c.extend(segA, 1, 50)
		c.flush()
		if err := c.recoverNow(); err != nil {
			t.Error(err)
		}
	})
}

func (c *script) recoverNow() error {
	n, err := recoverWorld(c.m.CrashClone(nil), c.w)
	if err == nil && n != len(c.w.states)-1 {
		err = errors.New("not the newest world")
	}
	return err
}

// TestOpenThatFailsLeavesNothing: no segment and no offset comes of an open that was refused or torn.
func TestOpenThatFailsLeavesNothing(t *testing.T) {
	inv.Covers(t, "INV-D6")
	for n := 0; ; n++ {
		fired := false
		scripted(t, func(c *script) {
			c.forgiving = true
			c.create(segB, 0)
			c.extend(segB, 1, 10)
			c.flush()
			ops := c.fs.Ops()
			c.fs.FailAt(ops+n, syscall.EIO)
			raw := testHeader(t, segA, 0)
			acked := false
			err := c.s.Create(raw, func(err error) { acked = err == nil })
			_, _ = c.s.j.WriteGroup()
			fired = c.fs.Fired() > 0
			if fired && (acked || err == nil && c.s.Failed() == nil) {
				t.Errorf("operation %d failed and the open was acknowledged", n)
			}
			for _, keep := range []func(memfs.Unit) bool{nil, func(memfs.Unit) bool { return true }} {
				s, err := openOn(c.m.CrashClone(keep))
				if err != nil {
					t.Errorf("operation %d: %v", n, err)
					continue
				}
				if r := s.lookup(segA); r != nil && fired && (r.tally.End != 0 || r.m.Damaged() != nil) {
					t.Errorf("operation %d: a phantom with end %d", n, r.tally.End)
				}
				if r := s.lookup(segB); r == nil || r.tally.End != 1 {
					t.Errorf("operation %d: the other segment is gone", n)
				}
				c.check(s.Close())
			}
		})
		if !fired {
			if n < 4 {
				t.Errorf("only %d operations could fail", n)
			}
			return
		}
	}
}

func TestNewerSegmentIsRefused(t *testing.T) {
	inv.Covers(t, "INV-R11")
	scripted(t, func(c *script) {
		c.create(segA, 0)
		c.create(segB, 0)
		c.extend(segA, 2, 100)
		c.flush()
		c.checkpoint()
		c.extend(segA, 2, 100)
		c.flush()
		m := c.m.CrashClone(nil)
		f, err := m.OpenWrite(fileName(segB))
		c.check(err)
		raw := testHeader(t, segB, 0)
		raw[8] = 2 // a later version, with a right CRC
		_, err = f.WriteAt(resum(raw), 0)
		c.check(errors.Join(err, f.Sync(), f.Close()))
		before := m.Dump()
		_, err = openOn(m)
		wantErr(t, "open", err, storage.ErrNewerFormat)
		if m.Dump() != before {
			t.Error("a refused start changed something")
		}
	})
}

func TestMissingJournalIsRefused(t *testing.T) {
	m := memfs.New(memfs.Options{Direct: true})
	cfg := crashConfig()
	cfg.MustExist = true
	_, err := Open(cfg, Deps{FS: m, Logger: slog.New(slog.DiscardHandler)})
	wantErr(t, "open", err, storage.ErrCorrupt)
	if list, _ := m.List("."); len(list) != 0 {
		t.Errorf("a refused start made %v", list)
	}
}

// resum gives a changed segment header its right CRC.
func resum(raw []byte) []byte {
	n := len(raw) - 4
	binary.LittleEndian.PutUint32(raw[n:], crc32.Checksum(raw[:n], crc32.MakeTable(crc32.Castagnoli)))
	return raw
}
