package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// devNode is one broker process of a development cluster.
type devNode struct {
	number                      int
	folder, config, ready, log  string
	api, ops, rpc, raft, gossip string
	cmd                         *exec.Cmd
	exited                      chan struct{}
	err                         error
}

// devCluster runs one process per node, from a configuration file that it writes for each, until ctx ends or all have ended.
func devCluster(ctx context.Context, f devFlags, std streams) error {
	// A child ends with the thread that started it: if this process dies, no broker is left behind.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if f.readyFile != "" {
		if err := os.Remove(f.readyFile); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove old ready file: %w", err)
		}
	}
	nodes, err := planNodes(f)
	if err != nil {
		return err
	}
	defer stopNodes(nodes, std)
	for _, n := range nodes {
		if err := n.start(std); err != nil {
			return fmt.Errorf("start node %d: %w", n.number, err)
		}
	}
	ready, err := awaitNodes(ctx, nodes)
	if err != nil || ready == nil {
		return err
	}
	if f.readyFile != "" {
		if err := writeReadyFile(f.readyFile, *ready); err != nil {
			return fmt.Errorf("write ready file: %w", err)
		}
	}
	greetCluster(*ready, f, std)
	return watchNodes(ctx, nodes, std)
}

// planNodes gives every node its ports and folder, and writes its configuration.
func planNodes(f devFlags) ([]*devNode, error) {
	var nodes []*devNode
	var founders []string
	for i := range f.nodes {
		n := &devNode{number: i + 1, exited: make(chan struct{})}
		n.folder = filepath.Join(absolute(f.data), fmt.Sprintf("node%d", n.number))
		n.config, n.ready, n.log = n.folder+".yaml", n.folder+".ready", n.folder+".log"
		var err error
		for _, p := range []struct {
			to    *string
			given string
		}{{&n.api, loopback(f.api)}, {&n.ops, loopback(f.ops)}, {&n.rpc, beside(f.api, 4042)}, {&n.raft, beside(f.api, 4043)}, {&n.gossip, beside(f.api, 4044)}} {
			if *p.to, err = shifted(p.given, 100*i); err != nil {
				return nil, err
			}
		}
		nodes, founders = append(nodes, n), append(founders, n.rpc)
	}
	if err := os.MkdirAll(f.data, 0o755); err != nil {
		return nil, fmt.Errorf("data folder: %w", err)
	}
	for _, n := range nodes {
		text := strings.Join([]string{
			"# Written by `malachi dev --nodes`; it is written again at each start of that.",
			"data: " + strconv.Quote(n.folder), "api: " + n.api, "ops: " + n.ops, "rpc: " + n.rpc, "raft: " + n.raft, "gossip: " + n.gossip,
			fmt.Sprintf("bootstrap_expect: %d", len(nodes)), "founders: [" + strings.Join(founders, ", ") + "]", "join: [" + strings.Join(founders, ", ") + "]",
			"vnodes: 4", "disk_reserve: 64MiB", "log_level: " + f.logLevel, "",
		}, "\n")
		if err := os.WriteFile(n.config, []byte(text), 0o644); err != nil {
			return nil, fmt.Errorf("write configuration: %w", err)
		}
	}
	return nodes, nil
}

// beside is the default address of a port between brokers, or any free one where the API's is free too.
func beside(api string, port int) string {
	if _, p, err := net.SplitHostPort(loopback(api)); err == nil && p == "0" {
		port = 0
	}
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
}

// shifted is an address with its port moved up; port 0 becomes one that is free now.
func shifted(addr string, by int) (string, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return "", usage("address %q: want host:port", addr)
	}
	n, err := strconv.Atoi(port)
	if err != nil || n < 0 || n+by > 65535 {
		return "", usage("address %q: want a port from 0 to %d", addr, 65535-by)
	}
	if n > 0 {
		return net.JoinHostPort(host, strconv.Itoa(n+by)), nil
	}
	l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		return "", fmt.Errorf("find a free port: %w", err)
	}
	return l.Addr().String(), l.Close()
}

func (n *devNode) start(std streams) error {
	if err := os.Remove(n.ready); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	n.cmd = exec.Command(self(), "server", "--config", n.config, "--ready-file", n.ready)
	out := &prefixed{w: std.err, prefix: fmt.Sprintf("node%d | ", n.number)}
	n.cmd.Stdout, n.cmd.Stderr = out, out
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	for _, v := range os.Environ() {
		if key, _, _ := strings.Cut(v, "="); !strings.HasPrefix(key, envPrefix) || key == envPrefix+"MUTATE" { // the file says it all
			n.cmd.Env = append(n.cmd.Env, v)
		}
	}
	if err := n.cmd.Start(); err != nil {
		return err
	}
	go func() { // it ends with the child
		n.err = n.cmd.Wait()
		close(n.exited)
	}()
	return nil
}

// prefixed puts the node's name before each line.
type prefixed struct {
	mu     sync.Mutex
	w      interface{ Write([]byte) (int, error) }
	prefix string
	line   []byte
}

// Write implements io.Writer.
func (p *prefixed) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.line = append(p.line, b...)
	for {
		i := strings.IndexByte(string(p.line), '\n')
		if i < 0 {
			return len(b), nil
		}
		if _, err := p.w.Write(append([]byte(p.prefix), p.line[:i+1]...)); err != nil {
			return len(b), err
		}
		p.line = p.line[i+1:]
	}
}

// awaitNodes returns when all serve, or nil when ctx has ended.
func awaitNodes(ctx context.Context, nodes []*devNode) (*readyNodes, error) {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	var all readyNodes
	for _, n := range nodes {
		for {
			body, err := os.ReadFile(n.ready)
			if err == nil {
				var one readyNodes
				if err := json.Unmarshal(body, &one); err != nil || len(one.Nodes) != 1 {
					return nil, fmt.Errorf("ready file of node %d: %w", n.number, err)
				}
				one.Nodes[0].Restart = quoteArgs(self(), "server", "--config", n.config)
				all.Nodes = append(all.Nodes, one.Nodes[0])
				break
			}
			select {
			case <-ctx.Done():
				return nil, nil
			case <-n.exited:
				return nil, fmt.Errorf("node %d ended before it served: %w", n.number, exitOf(n.err))
			case <-tick.C:
			}
		}
	}
	return &all, nil
}

// exitOf passes the child's exit code on.
func exitOf(err error) error {
	if err == nil {
		return errors.New("exit code 0")
	}
	return err
}

func greetCluster(ready readyNodes, f devFlags, std streams) {
	say(std.err, "\nMalachi %s is ready: %d brokers, replication factor 3. Data is in %s.\n", version, len(ready.Nodes), absolute(f.data))
	for i, n := range ready.Nodes {
		say(std.err, "  node %d  %s  pid %d  %s", i+1, n.ID, n.PID, n.API)
	}
	say(std.err, "\nA node that was killed starts again with its command:\n")
	for _, n := range ready.Nodes {
		say(std.err, "  %s", n.Restart)
	}
	m := command()
	if ready.Nodes[0].API != defaultServer {
		m += " --server " + ready.Nodes[0].API
	}
	say(std.err, "\n  %s topic create greetings --ranges 4\n  echo hello | %s produce greetings\n  %s consume greetings --exit-at-end\n\nStop all with Ctrl-C.", m, m, m)
}

// watchNodes returns when ctx has ended, or every node has.
func watchNodes(ctx context.Context, nodes []*devNode, std streams) error {
	for _, n := range nodes {
		select {
		case <-ctx.Done():
			return nil
		case <-n.exited:
			say(std.err, "malachi dev: node %d has ended (%v)", n.number, exitOf(n.err))
		}
	}
	return errors.New("all nodes have ended")
}

// stopNodes drains the nodes that this process started.
func stopNodes(nodes []*devNode, std streams) {
	for _, n := range nodes {
		if n.cmd == nil || n.cmd.Process == nil {
			continue
		}
		select {
		case <-n.exited:
		default:
			if err := n.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
				say(std.err, "malachi dev: stop node %d: %v", n.number, err)
			}
		}
	}
	for _, n := range nodes {
		if n.cmd != nil && n.cmd.Process != nil {
			<-n.exited
		}
	}
}
