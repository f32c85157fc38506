package client

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect/v2"

	"github.com/malachilog/malachi/e2e/inv"
	malachiv1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/storage"
)

// fillTopic writes n records over several keys, in many batches.
func fillTopic(t testing.TB, c *Client, from, n int) {
	t.Helper()
	for i := from; i < from+n; {
		var rs []Record
		for range 1 + i%7 {
			if i < from+n {
				rs = append(rs, Record{Key: fmt.Appendf(nil, "key-%d", i%13), Value: fmt.Append(nil, i)})
				i++
			}
		}
		if err := c.Produce(t.Context(), "t", rs...); err != nil {
			t.Fatal(err)
		}
	}
}

// Stop anywhere, go on from the token with another consumer, while records come in and pages are cut otherwise: none is lost,
// none comes twice, and the order of each key holds.
func TestResumeIsExact(t *testing.T) {
	inv.Covers(t, "INV-C9")
	for _, depth := range []uint8{0, 3} {
		for range 20 {
			seed := rand.Uint64()
			rng := rand.New(rand.NewPCG(seed, 1))
			f := newFake(depth)
			c := open(t, f.serve(t), nil)
			total := 60
			fillTopic(t, c, 0, total)
			got := map[string][]string{}
			n := 0
			token := ""
			for rounds := 0; n < total || total < 200; rounds++ {
				if rounds > 1000 {
					t.Fatalf("seed %d: no progress at %d of %d", seed, n, total)
				}
				f.mu.Lock()
				f.pageMax = 1 + rng.IntN(60)
				f.mu.Unlock()
				con, err := c.Consume("t", ConsumeConfig{From: Cursor(token), ExitAtEnd: true})
				if err != nil {
					t.Fatal(err)
				}
				stop := rng.IntN(30)
				for r, err := range con.Records(t.Context()) {
					if err != nil {
						t.Fatalf("seed %d: %v", seed, err)
					}
					got[string(r.Key)] = append(got[string(r.Key)], string(r.Value))
					n++
					if stop--; stop < 0 {
						break
					}
				}
				token = con.Cursor()
				if total < 200 && rng.IntN(3) == 0 {
					more := rng.IntN(20)
					fillTopic(t, c, total, more)
					total += more
				}
			}
			if n != total {
				t.Fatalf("seed %d: %d records read, %d written", seed, n, total)
			}
			for k, vs := range got {
				last := -1
				for _, v := range vs {
					var i int
					if _, err := fmt.Sscan(v, &i); err != nil || i <= last || fmt.Sprintf("key-%d", i%13) != k {
						t.Fatalf("seed %d: key %s reads %v", seed, k, vs)
					}
					last = i
				}
			}
		}
	}
}

// The same consumer goes on where its loop was left, and CursorAtPage repeats the page.
func TestLeaveTheLoopAndComeBack(t *testing.T) {
	f := newFake(0)
	c := open(t, f.serve(t), func(cfg *Config) { cfg.Lanes = 1 })
	fillTopic(t, c, 0, 20)
	con, err := c.Consume("t", ConsumeConfig{ExitAtEnd: true})
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for n < 20 {
		for r, err := range con.Records(t.Context()) {
			if err != nil || string(r.Value) != fmt.Sprint(n) {
				t.Fatalf("record %d: %q, %v", n, r.Value, err)
			}
			n++
			if strings.Contains(con.CursorAtPage(), tokenSep) {
				t.Fatalf("page cursor %q", con.CursorAtPage())
			}
			if n%3 == 0 {
				break
			}
		}
	}
	again, err := c.Consume("t", ConsumeConfig{From: Earliest(), ExitAtEnd: true})
	if err != nil {
		t.Fatal(err)
	}
	for range again.Records(t.Context()) {
		break
	}
	page, err := c.Consume("t", ConsumeConfig{From: Cursor(again.CursorAtPage()), ExitAtEnd: true})
	if err != nil {
		t.Fatal(err)
	}
	for r, err := range page.Records(t.Context()) {
		if err != nil || string(r.Value) != "0" {
			t.Errorf("from the page's cursor: %q, %v", r.Value, err)
		}
		break
	}
}

// What was trimmed between stop and resume must not make the resume skip what is still there.
func TestResumeAfterTrim(t *testing.T) {
	f := newFake(0)
	c := open(t, f.serve(t), func(cfg *Config) { cfg.Lanes = 1 })
	fillTopic(t, c, 0, 40)
	con, err := c.Consume("t", ConsumeConfig{ExitAtEnd: true})
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for range con.Records(t.Context()) {
		if n++; n == 10 {
			break
		}
	}
	for _, start := range []uint64{5, 10, 25} {
		f.mu.Lock()
		f.ranges[0].start = start
		f.mu.Unlock()
		var gaps []Gap
		next, err := c.Consume("t", ConsumeConfig{From: Cursor(con.Cursor()), ExitAtEnd: true, OnGap: func(g Gap) { gaps = append(gaps, g) }})
		if err != nil {
			t.Fatal(err)
		}
		want := max(10, int(start))
		for r, err := range next.Records(t.Context()) {
			if err != nil || string(r.Value) != fmt.Sprint(want) {
				t.Fatalf("start %d: %q, %v, want %d", start, r.Value, err, want)
			}
			want++
		}
		if want != 40 {
			t.Errorf("start %d: ended before record %d", start, want)
		}
		if len(gaps) != 1 || gaps[0].Lost || gaps[0].Offsets != int64(start) || gaps[0].Range == "" {
			t.Errorf("start %d: gaps %+v", start, gaps)
		}
	}
	strict, err := c.Consume("t", ConsumeConfig{FailOnGap: true, ExitAtEnd: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range strict.Records(t.Context()) {
		var e *Error
		if !errors.As(err, &e) || e.Reason != malachiv1.Reason_DATA_TRIMMED {
			t.Errorf("FailOnGap: %v", err)
		}
	}
}

func TestStarts(t *testing.T) {
	f := newFake(1)
	c := open(t, f.serve(t), nil)
	fillTopic(t, c, 0, 10)
	middle := time.Now()
	fillTopic(t, c, 10, 10)
	count := func(from Start) (n int) {
		con, err := c.Consume("t", ConsumeConfig{From: from, ExitAtEnd: true})
		if err != nil {
			t.Fatal(err)
		}
		for _, err := range con.Records(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			n++
		}
		return n
	}
	if a, b, d := count(Earliest()), count(Latest()), count(At(middle)); a != 20 || b != 0 || d != 10 {
		t.Errorf("earliest %d, latest %d, from the middle %d", a, b, d)
	}
}

// A consumer at the end waits, gets what comes at once, and ends with its context.
func TestFollow(t *testing.T) {
	f := newFake(0)
	f.fetchErr = func(n int) error {
		if n%2 == 1 {
			return detailed(connect.CodeUnavailable, malachiv1.Reason_RANGE_BLOCKED)
		}
		return nil
	}
	c := open(t, f.serve(t), nil)
	con, err := c.Consume("t", ConsumeConfig{From: Latest(), Wait: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	if err := con.begin(t.Context()); err != nil { // fix "latest" before the first record
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	next := make(chan string)
	go func() {
		defer close(next)
		for r, err := range con.Records(ctx) {
			if err != nil {
				if !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
				return
			}
			next <- string(r.Value)
		}
	}()
	for i := range 20 {
		if err := c.Produce(t.Context(), "t", Record{Value: fmt.Append(nil, i)}); err != nil {
			t.Fatal(err)
		}
		if got := <-next; got != fmt.Sprint(i) {
			t.Fatalf("got %q, want %d", got, i)
		}
	}
	cancel()
	if _, more := <-next; more {
		t.Error("a record after the end")
	}
}

func TestConsumeFails(t *testing.T) {
	f := newFake(0)
	c := open(t, f.serve(t), func(cfg *Config) { cfg.DeliveryTimeout = 300 * time.Millisecond })
	fillTopic(t, c, 0, 3)
	first := func(cfg ConsumeConfig) error {
		con, err := c.Consume("t", cfg)
		if err != nil {
			t.Fatal(err)
		}
		for _, err := range con.Records(t.Context()) {
			return err
		}
		return nil
	}
	if err := first(ConsumeConfig{From: Cursor("Zm9v")}); !errors.Is(err, storage.ErrInvalid) {
		t.Errorf("foreign cursor: %v", err)
	}
	f.set(func() {
		f.fetchErr = func(int) error { return detailed(connect.CodeUnavailable, malachiv1.Reason_NO_QUORUM) }
	})
	if err := first(ConsumeConfig{Wait: time.Millisecond}); !errors.Is(err, storage.ErrUnavailable) {
		t.Errorf("never available: %v", err)
	}
	f.set(func() { f.fetchErr, f.atTail = nil, func(int) *bool { return nil } })
	if err := first(ConsumeConfig{From: Latest(), ExitAtEnd: true}); err == nil {
		t.Error("ended without knowing that it is the end")
	}
	f.set(func() { f.atTail = func(n int) *bool { yes := true; return map[bool]*bool{true: &yes}[n%3 == 0] } })
	if err := first(ConsumeConfig{From: Latest(), ExitAtEnd: true}); err != nil {
		t.Errorf("end known at the third try: %v", err)
	}
}

// A batch that rotted is told, and the loop may go on after it.
func TestBadBatchIsToldAndLeftOut(t *testing.T) {
	f := newFake(0)
	c := open(t, f.serve(t), nil)
	for i := range 5 {
		if err := c.Produce(t.Context(), "t", Record{Value: fmt.Append(nil, i)}, Record{Value: fmt.Append(nil, i)}); err != nil {
			t.Fatal(err)
		}
	}
	b := f.ranges[0].batches[2]
	b[len(b)-1] ^= 1
	con, err := c.Consume("t", ConsumeConfig{ExitAtEnd: true})
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	var told *BatchError
	var after string
	for _, err := range con.Records(t.Context()) {
		if err != nil {
			if !errors.As(err, &told) || !errors.Is(err, storage.ErrCorrupt) || told.Base != 4 || told.Records != 2 {
				t.Fatalf("%v", err)
			}
			after = con.Cursor()
			continue
		}
		n++
	}
	if n != 8 || told == nil {
		t.Errorf("%d records, told: %v", n, told)
	}
	con, err = c.Consume("t", ConsumeConfig{From: Cursor(after), ExitAtEnd: true})
	if err != nil {
		t.Fatal(err)
	}
	for r, err := range con.Records(t.Context()) {
		if err != nil || string(r.Value) != "3" {
			t.Errorf("after the bad batch: %q, %v", r.Value, err)
		}
		break
	}
}

func TestTokens(t *testing.T) {
	done := progress{{Prefix: 5, Depth: 3}: 77, {Prefix: 0, Depth: 24}: 0}
	cursor, got, err := parseToken(formatToken("abc_-", done))
	if err != nil || cursor != "abc_-" || len(got) != 2 || got[storage.Slice{Prefix: 5, Depth: 3}] != 77 {
		t.Errorf("%q, %v, %v", cursor, got, err)
	}
	f := newFake(0)
	c := open(t, f.serve(t), nil)
	for _, bad := range []string{"a~", "a~1", "a~0.0.-1", "a~9.1.1", "a~0.25.1", "a~0.0.1,0.0.2", "a~0.0.1.2", "a~0.0.99999999999999999999", "a~~",
		strings.Repeat("a", storage.MaxCursorBytes+1), "a~" + strings.Repeat("0.0.1,", maxProgress)} {
		if _, err := c.Consume("t", ConsumeConfig{From: Cursor(bad)}); !errors.Is(err, storage.ErrInvalid) && !errors.Is(err, storage.ErrTooLarge) {
			t.Errorf("%.40q: %v", bad, err)
		}
	}
	_, err = c.Consume("t", ConsumeConfig{MaxRecords: -1, MaxBytes: 1 << 30, Wait: time.Hour})
	for _, part := range []string{"MaxRecords", "MaxBytes", "Wait"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("not told: %s in %v", part, err)
		}
	}
}

func FuzzToken(f *testing.F) {
	f.Add("abc~1.1.5,0.1.7")
	f.Add("abc")
	f.Fuzz(func(t *testing.T, s string) {
		cursor, done, err := parseToken(s)
		if err != nil {
			return
		}
		c2, d2, err := parseToken(formatToken(cursor, done))
		if err != nil || c2 != cursor || len(d2) != len(done) {
			t.Fatalf("%q: %v", s, err)
		}
	})
}
