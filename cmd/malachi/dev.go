package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/malachilog/malachi/services/broker"
)

type devFlags struct {
	data, api, ops, readyFile, logLevel string
}

func newDev(std streams) *cobra.Command {
	var f devFlags
	cmd := &cobra.Command{
		Use:   "dev",
		Short: "Run one broker with everything embedded, for development",
		Long: "Run one broker with everything embedded, on loopback. Records are as durable as in production: only the sizes are small\n" +
			"(replication factor 1, 4 metadata shards).",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return dev(cmd.Context(), f, std) },
	}
	fl := cmd.Flags()
	fl.StringVar(&f.data, "data", "malachi-data", "data folder; made if missing")
	fl.StringVar(&f.api, "api", "127.0.0.1:4040", "address of the public API; port 0 takes a free one")
	fl.StringVar(&f.ops, "ops", "127.0.0.1:4041", "address of the operations port; port 0 takes a free one")
	fl.StringVar(&f.readyFile, "ready-file", "", "write where the broker listens to this file once it is ready")
	fl.StringVar(&f.logLevel, "log-level", "info", "debug, info, warn or error")
	return cmd
}

// loopback fills in the host of ":port": dev never listens beyond this machine.
func loopback(addr string) string {
	if strings.HasPrefix(addr, ":") {
		return "127.0.0.1" + addr
	}
	return addr
}

func newLogger(std streams, level string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, usage("--log-level %q: want debug, info, warn or error", level)
	}
	return slog.New(slog.NewTextHandler(std.err, &slog.HandlerOptions{Level: l})), nil
}

func dev(ctx context.Context, f devFlags, std streams) error {
	log, err := newLogger(std, f.logLevel)
	if err != nil {
		return err
	}
	b, err := broker.Open(ctx, broker.Config{
		Data: f.data, API: loopback(f.api), Ops: loopback(f.ops), Raft: "127.0.0.1:0", Bootstrap: true, Vnodes: 4,
		ElectionTimeout: 200 * time.Millisecond, DiskReserve: 64 << 20, Version: version,
	}, log)
	if err != nil {
		return err
	}
	return serveBroker(ctx, b, f.data, f.readyFile, restartCommand(f, b), std)
}

// restartCommand starts this broker again on the same folder and ports.
func restartCommand(f devFlags, b *broker.Broker) string {
	self, err := os.Executable()
	if err != nil {
		self = "malachi"
	}
	return fmt.Sprintf("%s dev --data %s --api %s --ops %s", quoteArg(self), quoteArg(f.data), b.APIAddr(), b.OpsAddr())
}

// quoteArg quotes a word for a POSIX shell where that is needed.
func quoteArg(s string) string {
	if s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:=@%+,") == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

func serveBroker(ctx context.Context, b *broker.Broker, data, readyFile, restart string, std streams) error {
	done := make(chan error, 1)
	go func() { done <- b.Run(ctx) }()
	if err := announce(b, data, readyFile, restart, std); err != nil {
		return err
	}
	return <-done
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

func announce(b *broker.Broker, data, readyFile, restart string, std streams) error {
	abs, err := filepath.Abs(data)
	if err != nil {
		return err
	}
	api, ops := "http://"+b.APIAddr(), "http://"+b.OpsAddr()
	fmt.Fprintf(std.err, `
Malachi %s is ready. Data is in %s.

  malachi --server %s topic create orders --ranges 4
  echo hello | malachi --server %s produce orders
  malachi --server %s consume orders --from earliest --exit-at-end

  curl -sS %s/malachi.v1.AdminService/CreateTopic -H 'Content-Type: application/json' -d '{"name":"events"}'
  curl -sS %s/malachi.v1.ProduceService/Produce -H 'Content-Type: application/json' \
    -d '{"topic":"events","records":[{"key":{"text":"u1"},"value":{"json":{"a":1}}}]}'
  curl -sS %s/malachi.v1.FetchService/Fetch -H 'Content-Type: application/json' -d '{"topic":"events","encoding":"TEXT"}'

Operations: %s/readyz %s/metrics. Stop with Ctrl-C.
`, version, abs, api, api, api, api, api, api, ops, ops)
	if readyFile == "" {
		return nil
	}
	body, err := json.Marshal(map[string]any{"nodes": []readyNode{{
		ID: b.ID().String(), PID: os.Getpid(), Data: abs, API: api, Ops: ops, Restart: restart,
	}}})
	if err != nil {
		return err
	}
	temp := readyFile + ".tmp"
	if err := os.WriteFile(temp, append(body, '\n'), 0o644); err != nil {
		return fmt.Errorf("write ready file: %w", err)
	}
	if err := os.Rename(temp, readyFile); err != nil {
		return fmt.Errorf("write ready file: %w", err)
	}
	return nil
}

// noArgs refuses words that a command does not take.
func noArgs(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usage("%q is not expected here", args[0])
	}
	return nil
}
