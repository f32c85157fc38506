package controlplane

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/storage"
)

// victim is what the child process of TestKilledAtAnyTime does: found or reopen, register, then create topics and print each name
// once its creation was answered, until it is killed.
func victim(dir string, boot storage.Boot) error {
	ctx := context.Background()
	c, err := Open(ctx, Config{Dir: dir, Vnodes: 4, ElectionTimeout: 200 * time.Millisecond},
		Identity{Cluster: storage.ClusterID{4}, Broker: 0x44, Founding: true}, Deps{})
	if err != nil {
		return err
	}
	if err := c.Register(ctx, boot, uint64(boot), nil); err != nil {
		return err
	}
	fmt.Println("ready")
	for i := 0; ; i++ {
		name := fmt.Sprintf("boot-%d-topic-%d", boot, i)
		if _, err := c.CreateTopic(ctx, NewTopic{Name: name}); err != nil {
			return err
		}
		fmt.Println(name)
	}
}

// TestKilledAtAnyTime kills a process over and over, during the founding of its cluster and while it creates topics. Each next
// start must come up with one and the same cluster, and with every topic whose creation was answered.
func TestKilledAtAnyTime(t *testing.T) {
	if dir := os.Getenv("MALACHI_TEST_VICTIM"); dir != "" {
		boot, err := strconv.ParseUint(os.Getenv("MALACHI_TEST_BOOT"), 10, 64)
		if err == nil {
			err = victim(dir, storage.Boot(boot))
		}
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	inv.Covers(t, "INV-M11")
	dir := t.TempDir() + "/raft"
	var answered []string
	ready := 0
	const starts = 16
	for boot := range starts {
		// Early kills first: every few milliseconds of the founding. The last ones hit the load, however slow the machine is.
		wait, load := time.Duration(5+boot*boot*3)*time.Millisecond, 0
		if boot >= starts-4 {
			wait, load = 0, 100
		}
		lines, stderr := killed(t, dir, boot+1, wait, load)
		if len(lines) > 0 && lines[0] == "ready" {
			ready++
			answered = append(answered, lines[1:]...)
		}
		if stderr != "" {
			t.Fatalf("start %d, killed after %v or %d lines, said: %s", boot+1, wait, load, stderr)
		}
	}
	if ready == 0 || ready == starts || len(answered) == 0 {
		t.Fatalf("%d of %d starts came up, %d topics: the kills missed what they were for", ready, starts, len(answered))
	}
	t.Logf("%d of %d starts came up before their kill; %d topics answered", ready, starts, len(answered))
	n := newNode(t)
	n.cfg.Dir, n.boot, n.group = dir, starts, starts
	n.id = Identity{Cluster: storage.ClusterID{4}, Broker: 0x44}
	c := n.start()
	for _, name := range answered {
		if _, ok := c.CachedTopic(name); !ok {
			t.Fatalf("%s was answered and is gone", name)
		}
	}
	if ring := c.Ring(); len(ring.Vnodes) != 4 || ring.Version != 1 {
		t.Fatalf("ring %+v", ring)
	}
}

// killed runs the victim for a while, or until it has printed so many lines, kills it, and returns its whole lines and what it
// complained of.
func killed(t *testing.T, dir string, boot int, wait time.Duration, load int) (lines []string, stderr string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestKilledAtAnyTime$")
	cmd.Env = append(os.Environ(), "MALACHI_TEST_VICTIM="+dir, "MALACHI_TEST_BOOT="+strconv.Itoa(boot))
	var complaints strings.Builder
	cmd.Stderr = &complaints
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if load == 0 {
		timer := time.AfterFunc(wait, func() { _ = cmd.Process.Kill() })
		defer timer.Stop()
	}
	r := bufio.NewReader(out)
	for {
		l, err := r.ReadString('\n')
		if err != nil {
			if err != io.EOF {
				t.Fatal(err)
			}
			break // a line without its end was cut off
		}
		lines = append(lines, strings.TrimSuffix(l, "\n"))
		if load > 0 && len(lines) == load {
			_ = cmd.Process.Kill()
		}
	}
	_ = cmd.Wait() // it was killed
	return lines, strings.TrimSpace(complaints.String())
}
