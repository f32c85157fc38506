// Package clienttest runs a real Malachi broker inside a test: the same code, disk and wire as in production, on a temporary folder and free
// loopback ports.
package clienttest

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/malachilog/malachi/client"
	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/services/broker"
)

// Server is a running broker. It is stopped when its test ends. Safe for concurrent use, but for Restart and Stop.
type Server struct {
	folder string
	cfg    broker.Config
	log    *slog.Logger

	url, ops string
	cancel   context.CancelFunc
	done     chan error
}

// Start runs a broker on a new folder. It fails the test if that is not possible.
func Start(t testing.TB) *Server {
	t.Helper()
	s, err := Open(t.TempDir(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Errorf("stop broker: %v", err)
		}
	})
	return s
}

// Open runs a broker on a folder of the caller's, outside of a test: for examples and TestMain. Stop it.
func Open(folder string, log *slog.Logger) (*Server, error) {
	s := &Server{folder: folder, log: log, cfg: broker.Config{
		Data: folder, API: "127.0.0.1:0", Ops: "127.0.0.1:0", RPC: "127.0.0.1:0", Raft: "127.0.0.1:0", Gossip: "127.0.0.1:0", Bootstrap: true, Vnodes: 4,
		ElectionTimeout: 200 * time.Millisecond, DiskReserve: 64 << 20, JournalFileBytes: 16 << 20, JournalMaxBytes: 128 << 20,
	}}
	return s, s.start()
}

func (s *Server) start() error {
	ctx, cancel := context.WithCancel(context.Background())
	b, err := broker.Open(ctx, s.cfg, s.log)
	if err != nil {
		cancel()
		return fmt.Errorf("start broker: %w", err)
	}
	s.cancel, s.done = cancel, make(chan error, 1)
	s.url, s.ops = "http://"+b.APIAddr(), "http://"+b.OpsAddr()
	s.cfg.API, s.cfg.Ops = b.APIAddr(), b.OpsAddr() // a restart keeps its addresses
	go func() { s.done <- b.Run(ctx) }()
	return nil
}

// URL is the base URL of the API, for client.Config.Servers, curl or a browser.
func (s *Server) URL() string { return s.url }

// OpsURL is the base URL of the operations port.
func (s *Server) OpsURL() string { return s.ops }

// Stop drains the broker and waits for it. A second Stop does nothing.
func (s *Server) Stop() error {
	if s.cancel == nil {
		return nil
	}
	s.cancel()
	s.cancel = nil
	return <-s.done
}

// Restart drains the broker and starts it again on its folder and addresses.
func (s *Server) Restart() error {
	if err := s.Stop(); err != nil {
		return err
	}
	return s.start()
}

// Client returns a client of this broker with the given topics created; it is closed when the test ends.
func (s *Server) Client(t testing.TB, topics ...string) *client.Client {
	t.Helper()
	c, err := client.New(client.Config{Servers: []string{s.url}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Errorf("close client: %v", err)
		}
	})
	for _, name := range topics {
		if _, err := c.Admin().CreateTopic(t.Context(), &v1.CreateTopicRequest{Name: name}); err != nil {
			t.Fatal(err)
		}
	}
	return c
}
