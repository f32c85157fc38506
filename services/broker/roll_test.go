package broker_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/malachilog/malachi/client"
	"github.com/malachilog/malachi/e2e/inv"
	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/services/broker"
	"github.com/malachilog/malachi/storage"
)

func config(folder string) broker.Config {
	return broker.Config{
		Data: folder, API: "127.0.0.1:0", Ops: "127.0.0.1:0", RPC: "127.0.0.1:0", Raft: "127.0.0.1:0", Gossip: "127.0.0.1:0", Bootstrap: true, Vnodes: 1,
		ElectionTimeout: 200 * time.Millisecond, DiskReserve: 1 << 20, JournalFileBytes: 16 << 20, JournalMaxBytes: 64 << 20,
	}
}

// apiURL is where a client's broker listens.
func apiURL(t *testing.T, c *client.Client) string {
	t.Helper()
	u, ok := urls.Load(c)
	if !ok {
		t.Fatal("a client of no broker")
	}
	return u.(string)
}

var urls sync.Map // *client.Client -> URL

// serve runs a broker and returns a client of it; stop drains both.
func serve(t *testing.T, cfg broker.Config) (c *client.Client, stop func()) {
	t.Helper()
	b, err := broker.Open(t.Context(), cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- b.Run(ctx) }()
	c, err = client.New(client.Config{Servers: []string{"http://" + b.APIAddr()}, Compression: client.CompressionNone})
	if err != nil {
		t.Fatal(err)
	}
	urls.Store(c, "http://"+b.APIAddr())
	return c, func() {
		if err := c.Close(ctx); err != nil {
			t.Error(err)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// TestRollOnSize writes many times a segment's size, with the journal recycled on the way: the segments chain without a hole, and a reader gets
// every record once and in order, across them.
func TestRollOnSize(t *testing.T) {
	inv.Covers(t, "INV-D4", "INV-D2")
	cfg := config(t.TempDir())
	cfg.SegmentMaxBytes = 1 << 20
	c, stop := serve(t, cfg)
	defer func() { stop() }()
	if _, err := c.Admin().CreateTopic(t.Context(), &v1.CreateTopicRequest{Name: "t"}); err != nil {
		t.Fatal(err)
	}
	const records, size = 3000, 32 << 10 // 96 MB: more than the journal holds
	value := bytes.Repeat([]byte("x"), size)
	failed := make(chan error, records)
	for n := range records {
		v := bytes.Clone(value)
		binary.BigEndian.PutUint32(v, uint32(n))
		if err := c.ProduceAsync(t.Context(), "t", client.Record{Key: []byte("k"), Value: v}, func(r client.Result) {
			if r.Err != nil {
				failed <- r.Err
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-failed:
		t.Fatal(err)
	default:
	}
	readAll(t, c, records, size)
	res, err := c.Admin().ListSegments(t.Context(), &v1.ListSegmentsRequest{Topic: "t", Page: &v1.PageRequest{PageSize: 1000}})
	if err != nil {
		t.Fatal(err)
	}
	end, bySize := uint64(0), 0
	for _, s := range res.GetSegments() {
		if s.GetBase() != end {
			t.Errorf("segment %s begins at %d, the one before ended at %d", s.GetId(), s.GetBase(), end)
		}
		end = s.GetEnd()
		if s.GetSealReason() == "size" {
			bySize++
		}
	}
	if end != records || bySize < 40 {
		t.Errorf("%d segments closed by size, the last ends at %d", bySize, end)
	}
	// Again after a restart, from sealed files.
	stop()
	c, stop = serve(t, cfg)
	readAll(t, c, records, size)
}

func readAll(t *testing.T, c *client.Client, records, size int) {
	t.Helper()
	consumer, err := c.Consume("t", client.ConsumeConfig{ExitAtEnd: true})
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for r, err := range consumer.Records(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		if got := binary.BigEndian.Uint32(r.Value); int(got) != n || len(r.Value) != size {
			t.Fatalf("record %d of %d bytes where %d is due", got, len(r.Value), n)
		}
		n++
	}
	if n != records {
		t.Fatalf("read %d of %d records", n, records)
	}
}

func TestConfigFaultsAreToldTogether(t *testing.T) {
	inv.Covers(t, "INV-O5")
	_, err := broker.Open(t.Context(), broker.Config{API: "nonsense", Ops: "0.0.0.0:4041", SegmentMaxBytes: 5, JournalFileBytes: 7}, slog.New(slog.DiscardHandler))
	if !errors.Is(err, storage.ErrInvalid) {
		t.Fatal(err)
	}
	for _, part := range []string{"data", "api", "ops", "advertise", "insecure", "segment_max_bytes", "journal_file_bytes"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q says nothing of %s", err, part)
		}
	}
}

func TestFolderRefusals(t *testing.T) {
	cfg := config(t.TempDir())
	_, stop := serve(t, cfg)
	if _, err := broker.Open(t.Context(), cfg, slog.New(slog.DiscardHandler)); !errors.Is(err, storage.ErrFolderRefused) {
		t.Errorf("a folder in use: %v", err)
	}
	stop()
	strange := t.TempDir()
	if err := os.WriteFile(filepath.Join(strange, "thesis.txt"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := broker.Open(t.Context(), config(strange), slog.New(slog.DiscardHandler)); !errors.Is(err, storage.ErrFolderRefused) {
		t.Errorf("somebody's folder: %v", err)
	}
	if entries, err := os.ReadDir(strange); err != nil || len(entries) != 1 {
		t.Errorf("the refused folder was changed: %v, %v", entries, err)
	}
	cfg = config(t.TempDir())
	cfg.Bootstrap = false
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if _, err := broker.Open(ctx, cfg, slog.New(slog.DiscardHandler)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("an empty folder without the order to found a cluster: %v", err)
	}
}
