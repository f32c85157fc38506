package rangelog

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/journal"
	"github.com/malachilog/malachi/storage/vfs"
	"github.com/malachilog/malachi/storage/vfs/memfs"
)

// TestManyAtOnce: many goroutines append to many segments while checkpoints, seals, drops and reads run; then a restart finds all of it.
func TestManyAtOnce(t *testing.T) {
	inv.Covers(t, "INV-D2", "INV-D4", "INV-D14", "INV-S13")
	const workers, rolls, batches = 12, 3, 40
	fs := memfs.New(memfs.Options{Direct: true})
	s := openStore(t, fs)
	stop := run(t, s)
	ctx, cancel := context.WithCancel(t.Context())
	var side, work sync.WaitGroup
	side.Go(func() { // a checkpoint after the other
		for ctx.Err() == nil {
			done := make(chan error, 1)
			ok, err := s.Checkpoint(func(err error) { done <- err })
			if err != nil && !errors.Is(err, storage.ErrOverloaded) {
				t.Errorf("checkpoint: %v", err)
				return
			}
			if ok {
				<-done
			}
		}
	})
	side.Go(func() { // readers of whatever there is
		for ctx.Err() == nil {
			ids, err := s.List()
			if err != nil {
				t.Errorf("list: %v", err)
				return
			}
			for _, id := range ids {
				i, err := s.Info(id)
				if err == nil {
					_, err = s.Read(id, i.Base, i.Written, 16<<10, nil)
				}
				if err != nil && !errors.Is(err, storage.ErrUnknownSegment) && !errors.Is(err, storage.ErrCorrupt) {
					t.Errorf("read of %s: %v", id, err)
					return
				}
			}
		}
	})
	ends := make([][rolls + 1]storage.End, workers)
	for w := range workers {
		work.Go(func() {
			base := storage.Offset(0)
			for roll := range uint32(rolls) {
				id := testID(uint32(w), roll)
				create(t, s, id, base)
				for b := range batches {
					n := b%5 + 1
					h, data := testBatch(t, base, n, 50)
					for {
						err := s.await(ctx, func(done func(error)) error { return s.Append(id, h, data, done) })
						if err == nil {
							break
						}
						if !errors.Is(err, storage.ErrOverloaded) {
							t.Errorf("append: %v", err)
							return
						}
					}
					base += storage.Offset(n)
				}
				ends[w][roll] = storage.EndBefore(base)
				if roll == rolls-1 {
					return // stays open
				}
				v, err := s.Fence(ctx, id, nil)
				if err == nil {
					err = s.Seal(ctx, id, v.End, v.Digest)
				}
				if err == nil && v.End != storage.EndBefore(base) {
					err = fmt.Errorf("vote %d, appended %d", v.End, base)
				}
				if err == nil && w%4 == 0 && roll == 0 {
					err = s.Drop(ctx, id)
				}
				if err != nil {
					t.Errorf("end of %s: %v", id, err)
					return
				}
			}
		})
	}
	work.Wait()
	cancel()
	side.Wait()
	stop()
	if _, err := Verify(fs, nil); err != nil {
		t.Errorf("verify: %v", err)
	}
	s = openStore(t, fs.CrashClone(nil))
	stop = run(t, s)
	for w := range workers {
		from := storage.Offset(0)
		for roll := range uint32(rolls) {
			id, end := testID(uint32(w), roll), ends[w][roll]
			if roll == rolls-1 {
				if v, err := s.Fence(t.Context(), id, nil); err != nil || v.End != end {
					t.Errorf("%s: vote %d of %d, %v", id, v.End, end, err)
					continue
				}
			}
			if w%4 == 0 && roll == 0 {
				_, err := s.Info(id)
				wantErr(t, "dropped", err, storage.ErrUnknownSegment)
			} else {
				readAllRecords(t, s, id, from, end)
			}
			from = end.Next()
		}
	}
	stop()
}

const helperVar = "MALACHI_RANGELOG_HELPER"

// TestMain lets this binary be the process that TestKill9 kills.
func TestMain(m *testing.M) {
	if dir := os.Getenv(helperVar); dir != "" {
		if err := appendForEver(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func killConfig() Config {
	return Config{Journal: journal.Config{FileBytes: 1 << 20, MaxBytes: 8 << 20}, DiskReserve: 1, CheckpointEvery: 20 * time.Millisecond}
}

// appendForEver opens a new segment in dir, appends, and prints every end that was acknowledged.
func appendForEver(dir string) error {
	fs, err := vfs.NewOS(dir)
	if err != nil {
		return err
	}
	s, err := Open(killConfig(), Deps{FS: fs, Logger: discard, NewJournalID: journal.ID{4}})
	if err != nil {
		return err
	}
	ran := make(chan error, 1)
	go func() { ran <- s.Run(context.Background()) }()
	seq, err := strconv.Atoi(os.Getenv(helperVar + "_SEQ"))
	if err != nil {
		return err
	}
	id, t := testID(0, uint32(seq)), &testing.T{}
	if err := s.await(context.Background(), func(done func(error)) error { return s.Create(testHeader(t, id, 0), done) }); err != nil {
		return err
	}
	fmt.Println("end 0")
	for base := storage.Offset(0); ; {
		n := int(base)%7 + 1
		h, b := testBatch(t, base, n, 100+int(base)%3000)
		err := s.await(context.Background(), func(done func(error)) error { return s.Append(id, h, b, done) })
		if errors.Is(err, storage.ErrOverloaded) {
			continue
		}
		if err != nil {
			return err
		}
		base += storage.Offset(n)
		fmt.Println("end", base)
	}
}

// TestKill9 kills a process that appends to a real disk, at random moments, and reads back everything that it said was acknowledged.
func TestKill9(t *testing.T) {
	inv.Covers(t, "INV-D3", "INV-D12")
	if testing.Short() {
		t.Skip("needs some seconds and a real disk")
	}
	dir := t.TempDir()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	acked := map[storage.SegmentID]storage.End{}
	total := uint64(0)
	for round := range uint32(10) {
		id := testID(0, round)
		end := killOnce(t, dir, round, time.Duration(50+r.IntN(400))*time.Millisecond)
		acked[id] = end
		total += uint64(end)
		fs, err := vfs.NewOS(dir)
		if err != nil {
			t.Fatal(err)
		}
		s, err := Open(killConfig(), Deps{FS: fs, Logger: discard})
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		stop := run(t, s)
		v, err := s.Fence(t.Context(), id, nil)
		if err != nil || v.End < end {
			t.Fatalf("round %d: recovered %d, acknowledged %d, %v", round, v.End, end, err)
		}
		if err := s.Seal(t.Context(), id, v.End, v.Digest); err != nil {
			t.Fatal(err)
		}
		for id, end := range acked {
			readAllRecords(t, s, id, 0, end)
		}
		stop()
		if _, err := Verify(fs, nil); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		if err := fs.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if total < 100 {
		t.Errorf("only %d records were acknowledged in all rounds", total)
	}
	t.Logf("%d records acknowledged before 10 kills", total)
}

// killOnce runs the helper, kills it after a while, and returns the last end that it acknowledged.
func killOnce(t *testing.T, dir string, seq uint32, after time.Duration) (end storage.End) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), helperVar+"="+dir, fmt.Sprintf("%s_SEQ=%d", helperVar, seq))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	started := false
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if !started {
			started = true
			time.AfterFunc(after, func() { _ = cmd.Process.Kill() })
		}
		var n uint64
		if _, err := fmt.Sscanf(lines.Text(), "end %d", &n); err == nil {
			end = storage.End(n)
		}
	}
	if err := cmd.Wait(); err == nil || cmd.ProcessState.Exited() {
		t.Fatalf("the helper was not killed: %v", err)
	}
	if !started {
		t.Fatal("the helper never started")
	}
	return end
}
