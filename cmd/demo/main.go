// Command demo does Malachi's main job on real input: it loads this repository's git history into a broker on an empty folder, kills the
// broker (kill -9) in the middle of a second load, starts it again, reads everything back and compares it record by record. It exits non-zero
// on any difference.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/malachilog/malachi/client"
	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
)

const topic = "history"

func main() {
	malachi := flag.String("malachi", "bin/malachi", "the broker's binary")
	repo := flag.String("repo", ".", "the git repository whose history is loaded")
	target := flag.Int("records", 20_000, "records of the second load; the history is repeated until there are so many")
	flag.Parse()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	if err := run(ctx, *malachi, *repo, *target); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

// commit is one record's content.
type commit struct{ author, hash, date, text string }

func run(ctx context.Context, malachi, repo string, target int) (err error) {
	history, err := readHistory(ctx, repo)
	if err != nil {
		return err
	}
	folder, err := os.MkdirTemp("", "malachi-demo")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(folder)) }()
	b := &brokerProcess{malachi: malachi, folder: folder}
	if err := b.start(ctx, "127.0.0.1:0", "127.0.0.1:0"); err != nil {
		return err
	}
	defer b.kill()
	c, err := client.New(client.Config{Servers: []string{b.node.API}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close(ctx)) }()
	if _, err := c.Admin().CreateTopic(ctx, &v1.CreateTopicRequest{Name: topic, InitialRanges: 4}); err != nil {
		return err
	}
	first, err := load(ctx, c, history, 0, len(history), nil, nil)
	if err != nil {
		return fmt.Errorf("first load: %w", err)
	}
	fmt.Printf("loaded the history: %d records, all acknowledged\n", first)

	// The broker is killed when half of the second load is acknowledged, with more in flight. The last quarter is written only afterwards: the
	// fault can't miss the load.
	var acked atomic.Int64
	half := make(chan struct{})
	dead := make(chan struct{})
	restarted := make(chan error, 1)
	go func() {
		<-half
		b.kill()
		close(dead)
		restarted <- b.restart(ctx)
	}()
	second, err := load(ctx, c, history, len(history), target, func() {
		if acked.Add(1) == int64(target/2) {
			close(half)
		}
	}, func(n int) {
		if n == target*3/4 {
			<-dead
		}
	})
	if err != nil {
		return fmt.Errorf("second load: %w", err)
	}
	if err := <-restarted; err != nil {
		return err
	}
	fmt.Printf("loaded %d more; the broker was killed when %d of them were acknowledged, and started again: all acknowledged\n", second, target/2)
	return compare(ctx, c, history, len(history)+target)
}

// readHistory returns the commits, oldest first, each with its message and the files it changed.
func readHistory(ctx context.Context, repo string) ([]commit, error) {
	out, err := exec.CommandContext(ctx, "git", "-C", repo, "log", "--reverse", "--numstat", "--date=iso-strict",
		"--format=%x01%an <%ae>%x02%H%x02%cd%x02%B%x02").Output()
	if err != nil {
		return nil, fmt.Errorf("read git history of %s: %w", repo, err)
	}
	var all []commit
	for _, part := range bytes.Split(out, []byte{1})[1:] {
		f := strings.SplitN(string(part), "\x02", 5)
		if len(f) != 5 {
			return nil, fmt.Errorf("git log printed %q", part)
		}
		all = append(all, commit{f[0], f[1], f[2], f[3] + f[4]})
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%s has no commit", repo)
	}
	return all, nil
}

// number is the header that says which record of the whole load this is.
const number = "n"

func (c commit) record(n int) client.Record {
	return client.Record{Key: []byte(c.author), Value: []byte(c.text), Headers: []client.Header{
		{Key: "hash", Value: []byte(c.hash)}, {Key: "date", Value: []byte(c.date)}, {Key: number, Value: strconv.AppendInt(nil, int64(n), 10)},
	}}
}

// load writes records [from, from+count) and returns how many were acknowledged. acked is called for each; before is called before the n-th is
// given to the client.
func load(ctx context.Context, c *client.Client, history []commit, from, count int, acked func(), before func(n int)) (int64, error) {
	var done atomic.Int64
	var failed atomic.Pointer[error]
	for n := from; n < from+count; n++ {
		if before != nil {
			before(n - from)
		}
		err := c.ProduceAsync(ctx, topic, history[n%len(history)].record(n), func(r client.Result) {
			if r.Err != nil {
				failed.CompareAndSwap(nil, &r.Err)
				return
			}
			done.Add(1)
			if acked != nil {
				acked()
			}
		})
		if err != nil {
			return done.Load(), err
		}
	}
	if err := c.Flush(ctx); err != nil {
		return done.Load(), err
	}
	if err := failed.Load(); err != nil {
		return done.Load(), *err
	}
	return done.Load(), nil
}

// compare reads everything back. Every acknowledged record must be there with its bytes, each key in the order it was written. A record may come
// twice only because a batch was in flight at the kill and was sent again.
func compare(ctx context.Context, c *client.Client, history []commit, total int) error {
	consumer, err := c.Consume(topic, client.ConsumeConfig{From: client.Earliest(), ExitAtEnd: true})
	if err != nil {
		return err
	}
	seen := make([]bool, total)
	newest := map[string]int{}
	read, twice := 0, 0
	for r, err := range consumer.Records(ctx) {
		if err != nil {
			return err
		}
		read++
		n, err := check(r, history, total)
		if err != nil {
			return err
		}
		if seen[n] {
			twice++
			continue
		}
		seen[n] = true
		if last, ok := newest[string(r.Key)]; ok && n < last {
			return fmt.Errorf("key %q: record %d comes after record %d", r.Key, n, last)
		}
		newest[string(r.Key)] = n
	}
	for n, ok := range seen {
		if !ok {
			return fmt.Errorf("record %d was acknowledged and is not there", n)
		}
	}
	fmt.Printf("read back %d records of %d key(s): all %d acknowledged ones are there, byte for byte and in order; %d came twice (resent after the kill)\n",
		read, len(newest), total, twice)
	return nil
}

func check(r client.Record, history []commit, total int) (int, error) {
	n := -1
	for _, h := range r.Headers {
		if h.Key == number {
			var err error
			if n, err = strconv.Atoi(string(h.Value)); err != nil {
				return 0, fmt.Errorf("header %s is %q", number, h.Value)
			}
		}
	}
	if n < 0 || n >= total {
		return 0, fmt.Errorf("a record that was never written: %d", n)
	}
	want := history[n%len(history)].record(n)
	same := bytes.Equal(want.Key, r.Key) && bytes.Equal(want.Value, r.Value) && len(want.Headers) == len(r.Headers)
	for i := 0; same && i < len(want.Headers); i++ {
		same = want.Headers[i].Key == r.Headers[i].Key && bytes.Equal(want.Headers[i].Value, r.Headers[i].Value)
	}
	if !same {
		return 0, fmt.Errorf("record %d differs from what was written", n)
	}
	return n, nil
}

// brokerProcess is `malachi dev` as a process of its own.
type brokerProcess struct {
	malachi, folder string
	cmd             *exec.Cmd
	node            struct{ API, Ops string }
}

// start runs the broker and waits until it is ready.
func (b *brokerProcess) start(ctx context.Context, api, ops string) error {
	ready := filepath.Join(b.folder, "ready.json")
	if err := os.Remove(ready); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	b.cmd = exec.CommandContext(ctx, b.malachi, "dev", "--data", filepath.Join(b.folder, "data"), "--api", api, "--ops", ops,
		"--ready-file", ready, "--log-level", "warn")
	var log bytes.Buffer
	b.cmd.Stderr = &log
	if err := b.cmd.Start(); err != nil {
		return fmt.Errorf("start broker: %w", err)
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for range 1500 {
		body, err := os.ReadFile(ready)
		if err == nil {
			var file struct{ Nodes []struct{ API, Ops string } }
			if err := json.Unmarshal(body, &file); err != nil || len(file.Nodes) != 1 {
				return fmt.Errorf("ready file holds %q", body)
			}
			b.node = file.Nodes[0]
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return fmt.Errorf("the broker did not become ready:\n%s", log.String())
}

// kill ends the broker without warning.
func (b *brokerProcess) kill() {
	if err := b.cmd.Process.Kill(); err == nil {
		_ = b.cmd.Wait() // it was killed: that is what it says
	}
}

// restart starts the killed broker again on its folder and ports.
func (b *brokerProcess) restart(ctx context.Context) error {
	return b.start(ctx, strings.TrimPrefix(b.node.API, "http://"), strings.TrimPrefix(b.node.Ops, "http://"))
}
