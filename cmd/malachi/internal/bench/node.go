package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

const (
	startWithin = 30 * time.Second
	stopWithin  = 30 * time.Second
)

// Node is a broker process of our own, on a folder of its own. It is stopped and its folder removed by Stop.
type Node struct {
	API, Ops string
	PID      int

	dir    string
	cmd    *exec.Cmd
	ended  chan error
	errors bytes.Buffer // the process writes; read only after it has ended
}

// StartNode starts `exe dev` on a new folder in parent ("": the system's temporary folder) and waits until it is ready.
func StartNode(ctx context.Context, exe, parent string) (_ *Node, err error) {
	n := &Node{ended: make(chan error, 1)}
	if n.dir, err = os.MkdirTemp(parent, "malachi-bench-"); err != nil {
		return nil, fmt.Errorf("start broker: %w", err)
	}
	ready := filepath.Join(n.dir, "ready.json")
	n.cmd = exec.Command(exe, "dev", "--data", filepath.Join(n.dir, "data"), "--api", "127.0.0.1:0", "--ops", "127.0.0.1:0",
		"--ready-file", ready, "--log-level", "warn")
	n.cmd.Stderr = &n.errors
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for us: we stop it ourselves
	if err := n.cmd.Start(); err != nil {
		return nil, errors.Join(fmt.Errorf("start broker: %w", err), os.RemoveAll(n.dir))
	}
	n.PID = n.cmd.Process.Pid
	go func() { n.ended <- n.cmd.Wait() }()
	if err := n.await(ctx, ready); err != nil {
		return nil, errors.Join(fmt.Errorf("start broker: %w", err), n.Stop())
	}
	return n, nil
}

// await polls for the ready file, which is renamed into place.
func (n *Node) await(ctx context.Context, ready string) error {
	ctx, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		b, err := os.ReadFile(ready)
		if err == nil {
			return n.learn(b)
		}
		select {
		case <-tick.C:
		case err := <-n.ended:
			n.ended <- err
			return fmt.Errorf("it ended before it was ready: %s", bytes.TrimSpace(n.errors.Bytes()))
		case <-ctx.Done():
			return fmt.Errorf("not ready: %w", context.Cause(ctx))
		}
	}
}

func (n *Node) learn(b []byte) error {
	var file struct {
		Nodes []struct {
			API string `json:"api"`
			Ops string `json:"ops"`
		} `json:"nodes"`
	}
	if err := json.Unmarshal(b, &file); err != nil {
		return fmt.Errorf("ready file: %w", err)
	}
	if len(file.Nodes) != 1 {
		return fmt.Errorf("ready file names %d nodes", len(file.Nodes))
	}
	n.API, n.Ops = file.Nodes[0].API, file.Nodes[0].Ops
	return nil
}

// Dir is the folder in which the broker's data folder lies: the file system to measure.
func (n *Node) Dir() string { return n.dir }

// Stop drains the broker, waits for its end and removes the folder. An error says that it did not end well.
func (n *Node) Stop() error {
	err := n.cmd.Process.Signal(syscall.SIGTERM)
	if errors.Is(err, os.ErrProcessDone) {
		err = nil
	}
	patience := time.NewTimer(stopWithin)
	defer patience.Stop()
	select {
	case end := <-n.ended:
		if end != nil {
			err = errors.Join(err, fmt.Errorf("the broker ended badly: %w: %s", end, bytes.TrimSpace(n.errors.Bytes())))
		}
	case <-patience.C:
		err = errors.Join(err, fmt.Errorf("the broker did not stop within %s", stopWithin), n.cmd.Process.Kill(), <-n.ended)
	}
	return errors.Join(err, os.RemoveAll(n.dir))
}
