package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/malachilog/malachi/services/broker"
	"github.com/malachilog/malachi/storage"
)

// readyEvery is how often a starting broker is asked whether it serves.
const readyEvery = 5 * time.Millisecond

// launch is one run of a broker.
type launch struct {
	cfg       broker.Config
	level     slog.Level
	readyFile string
	// restart is the command line that starts this broker again.
	restart func(*broker.Broker) string
	// greet, if not nil, is called once the broker serves.
	greet func(*broker.Broker)
}

// run serves until ctx ends or the broker fails.
func (l launch) run(ctx context.Context, std streams) error {
	roomyHeap()
	// An old ready file would tell whoever waits for it about a process that is gone.
	if l.readyFile != "" {
		if err := os.Remove(l.readyFile); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove old ready file: %w", err)
		}
	}
	log := slog.New(slog.NewTextHandler(std.err, &slog.HandlerOptions{Level: l.level}))
	b, err := broker.Open(ctx, l.cfg, log)
	if err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("start: %w", errInterrupted)
		}
		if errors.Is(err, storage.ErrCorrupt) {
			return fmt.Errorf("%w: %w", storage.ErrFolderRefused, err)
		}
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	done := make(chan error, 1)
	go func() { done <- b.Run(ctx) }()
	err = l.announce(ctx, b, done)
	if err != nil {
		stop()
	}
	return errors.Join(err, <-done)
}

// announce waits until the broker serves and tells it. done is left to the caller.
func (l launch) announce(ctx context.Context, b *broker.Broker, done chan error) error {
	tick := time.NewTicker(readyEvery)
	defer tick.Stop()
	for b.Ready() != nil {
		select {
		case <-ctx.Done():
			return nil
		case err := <-done:
			done <- err
			return nil
		case <-tick.C:
		}
	}
	if l.readyFile != "" {
		if err := l.writeReady(b); err != nil {
			return fmt.Errorf("write ready file: %w", err)
		}
	}
	if l.greet != nil {
		l.greet(b)
	}
	return nil
}

// readyNode is one node of the ready file.
type readyNode struct {
	ID      string `json:"id"`
	PID     int    `json:"pid"`
	Data    string `json:"data"`
	API     string `json:"api"`
	Ops     string `json:"ops"`
	Restart string `json:"restart"`
}

// writeReady writes the file by rename: who sees it sees all of it.
func (l launch) writeReady(b *broker.Broker) error {
	data, err := filepath.Abs(l.cfg.Data)
	if err != nil {
		return err
	}
	return writeReadyFile(l.readyFile, readyNodes{Nodes: []readyNode{{
		ID: b.ID().String(), PID: os.Getpid(), Data: data, API: b.Scheme() + "://" + b.APIAddr(), Ops: b.Scheme() + "://" + b.OpsAddr(), Restart: l.restart(b),
	}}})
}

// readyNodes is the ready file.
type readyNodes struct {
	Nodes []readyNode `json:"nodes"`
}

func writeReadyFile(path string, r readyNodes) error {
	body, err := json.Marshal(r)
	if err != nil {
		return err
	}
	temp := path + ".tmp"
	if err := os.WriteFile(temp, append(body, '\n'), 0o644); err != nil {
		return err
	}
	return os.Rename(temp, path)
}

// parseLevel reads --log-level.
func parseLevel(s string) (l slog.Level, err error) {
	if err := l.UnmarshalText([]byte(s)); err != nil {
		return 0, usage("--log-level %q: want debug, info, warn or error", s)
	}
	return l, nil
}

// self is the absolute path of this program.
func self() string {
	path, err := os.Executable()
	if err != nil {
		return "malachi"
	}
	return path
}

// absolute makes a path independent of the folder it was given in.
func absolute(path string) string {
	if abs, err := filepath.Abs(path); err == nil {
		return abs
	}
	return path
}

// quoteArgs writes words as a command line for a POSIX shell.
func quoteArgs(words ...string) string {
	quoted := make([]string, len(words))
	for i, w := range words {
		quoted[i] = quoteArg(w)
	}
	return strings.Join(quoted, " ")
}

// quoteArg quotes a word for a POSIX shell where that is needed.
func quoteArg(s string) string {
	const plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:=@%+,"
	if s != "" && strings.Trim(s, plain) == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
