package broker_test

import (
	"errors"
	"log/slog"
	"os"
	"testing"

	"github.com/malachilog/malachi/client"
	"github.com/malachilog/malachi/e2e/inv"
	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/services/broker"
	"github.com/malachilog/malachi/storage"
)

// TestRolledBackDiskStaysRefused: a data folder that was set back is refused by its boot at first, then by its journal, and goes on being refused
// however often it is started: each start writes a checkpoint, and what it writes itself proves nothing.
func TestRolledBackDiskStaysRefused(t *testing.T) {
	inv.Covers(t, "INV-D9")
	cfg := config(t.TempDir())
	cfg.RaftDir = t.TempDir() // on another volume, which is not set back
	c, stop := serve(t, cfg)
	if _, err := c.Admin().CreateTopic(t.Context(), &v1.CreateTopicRequest{Name: "t"}); err != nil {
		t.Fatal(err)
	}
	stop()
	old := t.TempDir()
	if err := os.CopyFS(old, os.DirFS(cfg.Data)); err != nil {
		t.Fatal(err)
	}
	c, stop = serve(t, cfg)
	for range 4 {
		if err := c.Produce(t.Context(), "t", client.Record{Value: []byte("x")}); err != nil {
			t.Fatal(err)
		}
	}
	stop()
	_, stop = serve(t, cfg) // root hears how far the journal is
	stop()

	cfg.Data = old
	for i := range 14 {
		b, err := broker.Open(t.Context(), cfg, slog.New(slog.DiscardHandler))
		if !errors.Is(err, storage.ErrFolderRefused) {
			t.Fatalf("start %d on the old folder: %v, %v", i+1, b, err)
		}
	}
}
