package rangelog

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
	"github.com/malachilog/malachi/storage/journal"
	"github.com/malachilog/malachi/storage/segment"
	"github.com/malachilog/malachi/storage/vfs"
	"github.com/malachilog/malachi/storage/vfs/faultfs"
	"github.com/malachilog/malachi/storage/vfs/memfs"
)

// phase is what the model knows of a segment.
type phase string

const (
	phaseNone    phase = ""
	phaseOpen    phase = "open"
	phaseFenced  phase = "fenced"
	phaseSealed  phase = "sealed"
	phaseDropped phase = "dropped"
)

// segState is a segment as the entries queued so far make it. The batches are the model's own copies.
type segState struct {
	phase  phase
	header []byte
	bytes  []byte // header and batches
	end    storage.End
	digest storage.Digest
	ends   []segState // states after each batch, to cut back to
}

// world is what was queued and what was acknowledged, in the journal's order: recovery must find exactly the world after some entry, at or
// behind the last acknowledged one.
type world struct {
	states []map[storage.SegmentID]segState // after entry i; 0 is the empty world
	acked  int
}

func newWorld() *world { return &world{states: []map[storage.SegmentID]segState{{}}} }

func (w *world) now(id storage.SegmentID) segState { return w.states[len(w.states)-1][id] }

// push adds an entry's effect and returns its number for ack.
func (w *world) push(id storage.SegmentID, s segState) int {
	next := maps.Clone(w.states[len(w.states)-1])
	next[id] = s
	w.states = append(w.states, next)
	return len(w.states) - 1
}

func (w *world) ack(n int) { w.acked = max(w.acked, n) }

// script drives a store single-threaded: groups are written and given when it says so.
type script struct {
	t  testing.TB
	fs *faultfs.FS
	m  *memfs.FS
	s  *Store
	w  *world
	// forgiving: errors are expected (fault tests); the script goes on.
	forgiving bool
	errs      []error
}

func newScript(t testing.TB, direct bool) *script {
	m := memfs.New(memfs.Options{Direct: direct})
	return &script{t: t, m: m, fs: faultfs.New(m), w: newWorld()}
}

func (c *script) check(err error) bool {
	if err == nil {
		return true
	}
	c.errs = append(c.errs, err)
	if !c.forgiving {
		c.t.Fatal(err)
	}
	return false
}

// over reports that the store has failed or is not open: the rest of a forgiving script is skipped.
func (c *script) over() bool { return c.forgiving && (c.s == nil || c.s.Failed() != nil) }

func crashConfig() Config {
	return Config{Journal: journal.Config{FileBytes: 64 << 10, MaxBytes: 256 << 10, GroupBytes: 16 << 10}, DiskReserve: 1}
}

func openOn(fsys vfs.FS) (*Store, error) {
	return Open(crashConfig(), Deps{FS: fsys, Logger: slog.New(slog.DiscardHandler), NewJournalID: journal.ID{9}})
}

func (c *script) open() bool {
	s, err := openOn(c.fs)
	if !c.check(err) {
		return false
	}
	c.s = s
	return true
}

func (c *script) write() {
	if c.over() {
		return
	}
	_, err := c.s.j.WriteGroup()
	c.check(err)
}

func (c *script) give() {
	if c.over() {
		return
	}
	_, err := c.s.FollowGroup()
	c.check(err)
}

// flush writes and gives all that is queued.
func (c *script) flush() {
	if c.over() {
		return
	}
	for {
		wrote, err := c.s.j.WriteGroup()
		if !c.check(err) {
			return
		}
		gave, err := c.s.FollowGroup()
		if !c.check(err) || !wrote && !gave {
			break
		}
	}
	for c.s.j.Prepare() {
	}
}

// call runs something that waits for the journal, and writes and gives groups whenever it does.
func (c *script) call(fn func(ctx context.Context) error) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- fn(ctx) }()
	for {
		synctest.Wait()
		select {
		case err := <-done:
			return err
		default:
		}
		wrote, err1 := c.s.j.WriteGroup()
		gave, err2 := c.s.FollowGroup()
		if !wrote && !gave {
			if err1 == nil && err2 == nil {
				c.t.Error("the call waits for nothing that the journal does")
			}
			cancel()
			return <-done
		}
	}
}

func (c *script) create(id storage.SegmentID, base storage.Offset) {
	if c.over() {
		return
	}
	raw := testHeader(c.t, id, base)
	n := c.w.push(id, segState{phase: phaseOpen, header: raw, bytes: raw, end: storage.EndBefore(base)})
	c.check(c.s.Create(raw, c.acks(n)))
}

func (c *script) acks(n int) func(error) {
	return func(err error) {
		if err == nil {
			c.w.ack(n)
		}
	}
}

// with is the state after one more batch.
func (st segState) with(h *batch.Header, b []byte) segState {
	st.ends = append(slices.Clone(st.ends), st)
	st.bytes = append(slices.Clone(st.bytes), b...)
	st.digest = segment.Chain(st.digest, b)
	st.end = h.End()
	return st
}

func (c *script) extend(id storage.SegmentID, records, valueBytes int) {
	if c.over() {
		return
	}
	st := c.w.now(id)
	h, b := testBatch(c.t, st.end.Next(), records, valueBytes)
	kind := c.s.Append
	if st.phase == phaseFenced {
		kind = c.s.Recovered
	}
	n := c.w.push(id, st.with(h, b))
	if !c.check(kind(id, h, b, c.acks(n))) { // refused: it never was
		c.w.states = c.w.states[:n]
	}
}

func (c *script) fence(id storage.SegmentID, header []byte) Vote {
	if c.over() {
		return Vote{}
	}
	st := c.w.now(id)
	if st.phase == phaseNone {
		st = segState{header: header, bytes: header, end: 0, phase: phaseOpen}
		c.w.push(id, st)
	}
	n := len(c.w.states) - 1
	if st.phase != phaseFenced {
		st.phase = phaseFenced
		n = c.w.push(id, st)
	}
	var v Vote
	err := c.call(func(ctx context.Context) (err error) { v, err = c.s.Fence(ctx, id, header); return err })
	if c.check(err) {
		c.w.ack(n)
		if v.End != st.end || v.Digest != st.digest || v.Pos != int64(len(st.bytes)) {
			c.t.Errorf("vote of %s: end %d pos %d digest %x, want %d, %d, %x", id, v.End, v.Pos, v.Digest, st.end, len(st.bytes), st.digest)
		}
	}
	return v
}

// seal seals the segment with all but the last cut batches.
func (c *script) seal(id storage.SegmentID, cut int) {
	if c.over() {
		return
	}
	st := c.w.now(id)
	if cut > 0 {
		st = st.ends[len(st.ends)-cut]
		st.phase = phaseFenced
		c.w.push(id, st)
	}
	st.phase = phaseSealed
	n := c.w.push(id, st)
	if c.check(c.call(func(ctx context.Context) error { return c.s.Seal(ctx, id, st.end, st.digest) })) {
		c.w.ack(n)
	}
}

func (c *script) drop(id storage.SegmentID) {
	if c.over() {
		return
	}
	st := c.w.now(id)
	st.phase = phaseDropped
	n := c.w.push(id, st)
	if c.check(c.call(func(ctx context.Context) error { return c.s.Drop(ctx, id) })) {
		c.w.ack(n)
	}
}

func (c *script) checkpoint() {
	if c.over() {
		return
	}
	_, err := c.s.Checkpoint(nil)
	if c.check(err) {
		c.flush()
	}
}

func (c *script) closeStore() {
	if c.s != nil {
		c.check(c.s.Close())
	}
	c.s = nil
}

// busyCheckpoint is a checkpoint during whose syncs more is appended, made durable and given.
func (c *script) busyCheckpoint(ids ...storage.SegmentID) {
	if c.over() {
		return
	}
	syncs := 0
	c.fs.Inject(func(op faultfs.Op) error {
		if op.Kind != faultfs.Sync && op.Kind != faultfs.SyncDir || !bytes.HasPrefix([]byte(op.Name), []byte(segmentsDir)) {
			return nil
		}
		if syncs++; syncs == 2 { // the first file is synced, the rest is not
			for _, id := range ids {
				c.extend(id, 2, 700)
			}
			c.flush()
		}
		return nil
	})
	_, err := c.s.Checkpoint(nil)
	ok := c.check(err)
	syncs += 2 // the rule stays, and does nothing more
	if ok {
		if syncs < 4 {
			c.t.Error("the checkpoint had nothing to sync")
		}
		c.flush()
	}
}

var (
	segA, segB, segC = testID(0, 0), testID(1, 0), testID(2, 0)
	segA2, segA3     = testID(0, 1), testID(0, 2)
)

// part1 is a first life: opens, appends of several sizes, checkpoints under load, fence, recovery by a pass, cut, seals, drops, a roll.
func (c *script) part1() {
	c.create(segA, 0)
	c.write()
	c.create(segB, 0)
	c.extend(segA, 3, 100)
	c.flush()
	c.extend(segA, 1, 2000)
	c.extend(segB, 5, 50)
	c.extend(segA, 2, 300)
	c.write()
	c.extend(segB, 1, 900) // durable, not given
	c.write()
	c.give()
	c.flush()
	c.extend(segA, 4, 5000) // larger than a group may grow
	c.extend(segB, 1, 10)
	c.flush()
	c.busyCheckpoint(segA, segB)
	c.extend(segA, 1, 3000)
	c.extend(segB, 1, 500)
	c.write()
	if !c.over() {
		c.check(c.s.j.CloseGroup())
	}
	c.fence(segA, nil)
	c.extend(segA, 2, 800)
	c.extend(segA, 1, 400)
	c.flush()
	c.checkpoint()
	c.extend(segB, 2, 600)
	c.flush()
}

func (c *script) part2() {
	c.seal(segA, 1)
	c.create(segA2, c.w.now(segA).end.Next())
	c.extend(segA2, 2, 900)
	c.extend(segB, 1, 900)
	c.flush()
	c.checkpoint()
	c.fence(segB, nil)
	c.seal(segB, 0)
	c.drop(segB)
	c.fence(segC, testHeader(c.t, segC, 0))
	c.drop(segC)
	for range 3 { // round and round through the journal's files
		c.extend(segA2, 3, 5000)
		c.flush()
		c.extend(segA2, 1, 2000)
		c.flush()
		c.checkpoint()
	}
	c.extend(segA2, 1, 1500)
	c.write()
}

// part3 is a second life after an orderly stop.
func (c *script) part3() {
	c.closeStore()
	if !c.open() {
		return
	}
	c.create(segC2, 0)
	c.extend(segC2, 3, 300)
	c.fence(segA2, nil)
	c.extend(segA2, 1, 700)
	c.seal(segA2, 0)
	c.create(segA3, c.w.now(segA2).end.Next())
	c.extend(segA3, 1, 100)
	c.flush()
	c.busyCheckpoint(segA3, segC2)
	c.fence(segC2, nil)
	c.seal(segC2, 0)
	c.drop(segA)
	c.extend(segA3, 1, 4000)
	c.flush()
	c.closeStore()
}

var segC2 = testID(2, 1)

// crasher checks clones. It belongs to one script.
type crasher struct {
	c       *script
	states  int
	inside  int // of them crashes inside recovery
	failed  int
	every   int // look only at each nth operation and set: 1 is all
	ops     int
	classes map[string]int
}

// hook is called by the file system after each operation.
func (k *crasher) hook(op memfs.Op) {
	if op.Kind == memfs.OpAllocate || k.failed > 0 {
		return
	}
	if k.ops++; k.ops%k.every != 0 {
		return
	}
	m := k.c.m
	units := m.Unsynced()
	at := map[memfs.Unit]int{}
	for i, u := range units {
		at[u] = i
	}
	k.crash(op, "none", m.CrashClone(nil))
	if len(units) == 0 {
		return
	}
	k.crash(op, "all", m.CrashClone(func(memfs.Unit) bool { return true }))
	for i := range units {
		k.crash(op, "single", m.CrashClone(func(u memfs.Unit) bool { return at[u] == i }))
		if len(units) > 1 {
			k.crash(op, "all but one", m.CrashClone(func(u memfs.Unit) bool { return at[u] != i }))
		}
	}
	for seed := range uint64(32) {
		k.crash(op, "subset", m.CrashClone(func(u memfs.Unit) bool { return coin(uint64(k.ops)*64+seed, uint64(at[u])) }))
	}
}

// coin is a fair choice that depends on its arguments only.
func coin(seed, n uint64) bool {
	x := (seed+1)*0x9e3779b97f4a7c15 ^ (n+1)*0xbf58476d1ce4e5b9
	x ^= x >> 31
	x *= 0x94d049bb133111eb
	return (x^x>>29)&(1<<17) != 0
}

// crash recovers one clone and judges it; of some it also judges crashes inside that recovery and after it.
func (k *crasher) crash(op memfs.Op, class string, clone *memfs.FS) {
	if k.failed > 0 {
		return
	}
	k.states++
	k.classes[class]++
	deep := k.states%397 == 0
	var image *memfs.FS
	if deep {
		image = clone.CrashClone(nil)
	}
	found, err := k.recover(clone)
	if err != nil {
		k.fail(op, class, err)
		return
	}
	if k.states%4 == 0 { // what was recovered stays, whatever is lost now (INV-D12)
		k.states++
		again, err := k.recover(clone.CrashClone(nil))
		if err == nil && again != found {
			err = fmt.Errorf("recovered world %d, and after another power cut %d", found, again)
		}
		if err != nil {
			k.fail(op, class+", then again", err)
		}
	}
	if deep {
		k.crashInside(op, class, image)
	}
}

// crashInside crashes at every operation of a recovery.
func (k *crasher) crashInside(op memfs.Op, class string, image *memfs.FS) {
	n := 0
	image.OnOp(func(o memfs.Op) {
		if o.Kind == memfs.OpAllocate || k.failed > 0 {
			return
		}
		n++
		for i, keep := range []func(memfs.Unit) bool{nil, func(memfs.Unit) bool { return true },
			func(u memfs.Unit) bool { return coin(uint64(n), uint64(u.Index)) }} {
			k.states++
			k.inside++
			if _, err := k.recover(image.CrashClone(keep)); err != nil {
				k.fail(op, fmt.Sprintf("%s, inside recovery at %s (choice %d)", class, o, i), err)
			}
		}
	})
	if _, err := k.recover(image); err != nil {
		k.fail(op, class+", deep", err)
	}
}

func (k *crasher) fail(op memfs.Op, class string, err error) {
	k.failed++
	k.c.t.Errorf("state %d, crash at %s (operation %d), keeping %s; acknowledged %d of %d: %v",
		k.states, op, k.ops, class, k.c.w.acked, len(k.c.w.states)-1, err)
}

// recover opens a file system and says which world it holds.
func (k *crasher) recover(fsys vfs.FS) (int, error) { return recoverWorld(fsys, k.c.w) }

func recoverWorld(fsys vfs.FS, w *world) (n int, err error) {
	s, err := openOn(fsys)
	if err != nil {
		return 0, fmt.Errorf("recovery: %w", err)
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	return w.find(s)
}

// find returns the number of the world that the store holds, which must be an acknowledged or later one.
func (w *world) find(s *Store) (int, error) {
	var why error
	for n := w.acked; n < len(w.states); n++ {
		if why = holds(s, w.states[n]); why == nil {
			return n, nil
		}
	}
	if why == nil {
		why = errors.New("nothing was written")
	}
	for n := range w.states[:w.acked] {
		if holds(s, w.states[n]) == nil {
			return 0, fmt.Errorf("the store holds world %d, acknowledged is %d: lost", n, w.acked)
		}
	}
	return 0, fmt.Errorf("the store holds no world that ever was; of the last one: %w", why)
}

// holds says how the store differs from a world.
func holds(s *Store, world map[storage.SegmentID]segState) error {
	for id, r := range s.replicas {
		if err := s.verifyRestarted(r); err != nil {
			return err
		}
		if r.m.Damaged() != nil {
			return fmt.Errorf("segment %s: %w", id, r.m.Damaged())
		}
		if p := world[id].phase; p != phaseOpen && p != phaseFenced {
			return fmt.Errorf("segment %s is live, but is %q", id, p)
		}
	}
	for id, st := range world {
		if err := holdsSegment(s, id, st); err != nil {
			return fmt.Errorf("segment %s, %s: %w", id, st.phase, err)
		}
	}
	return nil
}

func holdsSegment(s *Store, id storage.SegmentID, st segState) error {
	r := s.lookup(id)
	switch st.phase {
	case phaseDropped:
		return nil // its file may be there or not
	case phaseSealed:
		t := tallyOf(st)
		return sameFile(s.fs, fileName(id), append(slices.Clone(st.bytes), t.Footer()...))
	}
	switch {
	case r == nil:
		return errors.New("it is not live")
	case r.m.State().String() != map[bool]string{false: "open", true: "fenced"}[st.phase == phaseFenced]:
		return fmt.Errorf("it is %s", r.m.State())
	case r.tally.End != st.end || r.tally.Digest != st.digest || r.tally.Pos != int64(len(st.bytes)):
		return fmt.Errorf("it ends at %d with %x, not at %d with %x", r.tally.End, r.tally.Digest, st.end, st.digest)
	}
	return sameFile(s.fs, fileName(id), st.bytes)
}

func tallyOf(st segState) segment.Tally {
	h, n, err := segment.ParseHeader(st.header)
	if err != nil {
		panic(err)
	}
	t := segment.NewTally(h, n)
	if err := segment.Scan(bytes.NewReader(st.bytes), &t, int64(len(st.bytes)), nil); err != nil {
		panic(err)
	}
	return t
}

func sameFile(fsys vfs.FS, name string, want []byte) error {
	got, err := fileBytes(fsys, name)
	if err != nil {
		return err
	}
	if !bytes.Equal(got, want) {
		return fmt.Errorf("%s: %d bytes are not the %d that were written", name, len(got), len(want))
	}
	return nil
}

func fileBytes(fsys vfs.FS, name string) ([]byte, error) {
	f, err := fsys.Open(name)
	if err != nil {
		return nil, err
	}
	size, err := f.Size()
	b := make([]byte, size)
	if err == nil {
		if _, err = f.ReadAt(b, 0); errors.Is(err, io.EOF) {
			err = nil
		}
	}
	return b, errors.Join(err, f.Close())
}

func TestCrash(t *testing.T) {
	inv.Covers(t, "INV-D2", "INV-D3", "INV-D4", "INV-D12", "INV-D13", "INV-D14", "INV-S5", "INV-S13", "INV-R2", "INV-R10")
	total := 0
	for _, direct := range []bool{true, false} {
		t.Run(fmt.Sprintf("direct=%v", direct), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newScript(t, direct)
				k := &crasher{c: c, every: 1, classes: map[string]int{}}
				if testing.Short() || raceEnabled {
					k.every = 20
				}
				c.m.OnOp(k.hook)
				c.open()
				c.part1()
				c.part2()
				c.part3()
				c.m.OnOp(nil)
				if n, err := recoverWorld(c.m.CrashClone(nil), c.w); err != nil || n != len(c.w.states)-1 {
					t.Errorf("at the end: world %d of %d, %v", n, len(c.w.states)-1, err)
				}
				t.Logf("%d operations, %d states (%d inside recovery), by kind %v", k.ops, k.states, k.inside, k.classes)
				total += k.states
			})
		})
	}
	if !testing.Short() && !raceEnabled && !t.Failed() && total < 20_000 {
		t.Errorf("only %d states", total)
	}
	t.Logf("crash states: %d", total)
	if testing.Verbose() {
		_, _ = fmt.Fprintf(os.Stdout, "rangelog: %d crash states checked\n", total)
	}
}
