package broker

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/storage"
)

func TestValidateReportsEveryFault(t *testing.T) {
	inv.Covers(t, "INV-O5")
	if err := (Config{Data: "d"}).Validate(); err != nil {
		t.Errorf("the defaults: %v", err)
	}
	err := Config{
		API: "10.0.0.1:4040", Ops: ":4041", Raft: "127.0.0.1:http", Vnodes: 1025, ElectionTimeout: time.Hour, DrainGrace: -1, SegmentMaxBytes: 1,
		SegmentMaxAge: 1, JournalFileBytes: 16<<20 + 1, JournalMaxBytes: 1 << 20,
	}.Validate()
	if !errors.Is(err, storage.ErrInvalid) {
		t.Fatal(err)
	}
	want := []string{"data", "api", "ops", "raft", "vnodes", "election_timeout", "drain_grace", "segment_max_bytes", "segment_max_age",
		"journal_file_bytes", "journal_max_bytes"}
	lines := strings.Split(err.Error(), "\n")
	if len(lines) != len(want) {
		t.Errorf("want %d faults, got:\n%v", len(want), err)
	}
	for _, key := range want {
		found := false
		for _, l := range lines {
			found = found || strings.HasPrefix(l, key+" ") || strings.HasPrefix(l, key+":")
		}
		if !found {
			t.Errorf("%s is not told in:\n%v", key, err)
		}
	}
	// One port for two listeners would let the first of them win.
	err = Config{Data: "d", API: "127.0.0.1:9", Ops: "localhost:9"}.Validate()
	if err == nil || !strings.Contains(err.Error(), "api has this port already") {
		t.Errorf("got %v", err)
	}
	if err = (Config{Data: "d", API: "127.0.0.1:0", Ops: "127.0.0.1:0", RPC: "127.0.0.1:0", Raft: "127.0.0.1:0", Gossip: "127.0.0.1:0"}).Validate(); err != nil {
		t.Error(err)
	}
}

// A path that cannot be a data folder is refused as one, and nothing is made of it.
func TestPathThatIsNoFolder(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, data := range []string{file, filepath.Join(file, "below")} {
		_, err := Open(t.Context(), Config{Data: data, API: "127.0.0.1:0", Ops: "127.0.0.1:0", RPC: "127.0.0.1:0", Raft: "127.0.0.1:0", Gossip: "127.0.0.1:0", Bootstrap: true},
			slog.New(slog.DiscardHandler))
		if !errors.Is(err, storage.ErrFolderRefused) {
			t.Errorf("%s: %v", data, err)
		}
	}
}
