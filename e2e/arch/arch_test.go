// Package arch holds the arrows of the house plan: who may import whom, and which library is confined to which package.
package arch

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/malachilog/malachi"

type pkg struct {
	ImportPath string
	Imports    []string
}

func load(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-json=ImportPath,Imports", module+"/...")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var all []pkg
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
	if len(all) < 20 {
		t.Fatalf("only %d packages: this test looks in the wrong place", len(all))
	}
	return all
}

// rank orders the trees: a package imports only trees of a lower or equal rank. gen and e2e/inv/mutate stand beside them.
func rank(path string) int {
	for i, tree := range []string{"storage", "tiering", "services", "client", "cmd"} {
		if path == tree || strings.HasPrefix(path, tree+"/") {
			return i + 1
		}
	}
	return 0
}

// services that may be imported by other services: vocabulary of the wire, of the metadata, of placement, and of what telemetry binds. All others meet in
// services/broker.
var shared = []string{"services/rpc", "services/rpc/codec", "services/controlplane", "services/controlplane/metadata", "services/controlplane/root", "services/replica", "services/placement"}

func violations(all []pkg) (out []string) {
	only := map[string][]string{ // library prefix -> the one tree that may import it
		"github.com/lni/dragonboat":     {"services/controlplane"},
		"github.com/hashicorp/":         {"services/membership"},
		"go.opentelemetry.io/otel/sdk":  {"services/telemetry"},
		"github.com/prometheus/client_": {"services/telemetry"},
		"github.com/spf13/cobra":        {"cmd"},
	}
	pure := []string{"storage", "storage/batch", "storage/frontier", "storage/replication", "services/controlplane/metadata", "services/controlplane/root", "services/placement"}
	impure := []string{"os", "net", "net/http", "time", "math/rand", "math/rand/v2", "crypto/rand", "sync", "context"}
	// batch pools encoders; root has durations in its policy, and a test of its own forbids it the clock.
	excused := map[string]string{"storage/batch": "sync", "services/controlplane/root": "time"}
	for _, p := range all {
		from := strings.TrimPrefix(p.ImportPath, module+"/")
		for _, imp := range p.Imports {
			to, ours := strings.CutPrefix(imp, module+"/")
			if ours {
				switch {
				case strings.HasPrefix(to, "gen/"), to == "e2e/inv/mutate":
				case from == "client" || from == "client/clienttest":
					allowed := strings.HasPrefix(to, "storage") || to == "services/rpc/codec" || from == "client/clienttest" && (to == "client" || to == "services/broker")
					if !allowed {
						out = append(out, from+" imports "+to+": the SDK knows only the API, storage and the codec")
					}
				case rank(from) > 0 && rank(to) > rank(from):
					out = append(out, from+" imports "+to+", which stands above it")
				case rank(from) == 3 && rank(to) == 3 && from != "services/broker" && !slices.Contains(shared, to) && !strings.HasPrefix(to, from+"/"):
					out = append(out, from+" imports "+to+": services meet only in services/broker")
				}
				continue
			}
			for lib, owners := range only {
				if strings.HasPrefix(imp, lib) && !slices.ContainsFunc(owners, func(o string) bool { return from == o || strings.HasPrefix(from, o+"/") }) {
					out = append(out, from+" imports "+imp+", which belongs to "+owners[0])
				}
			}
			if slices.Contains(pure, from) && slices.Contains(impure, imp) && imp != excused[from] {
				out = append(out, from+" is pure and imports "+imp)
			}
		}
	}
	return out
}

func TestArrows(t *testing.T) {
	for _, v := range violations(load(t)) {
		t.Error(v)
	}
}

// TestTheCheckSees gives the check one of each fault.
func TestTheCheckSees(t *testing.T) {
	bad := []pkg{
		{module + "/storage/journal", []string{module + "/services/rpc"}},
		{module + "/services/produce", []string{module + "/services/fetch"}},
		{module + "/services/fetch", []string{"github.com/lni/dragonboat/v4"}},
		{module + "/storage/frontier", []string{"time"}},
		{module + "/client", []string{module + "/services/broker"}},
		{module + "/services/broker", []string{"github.com/hashicorp/memberlist"}},
		{module + "/services/placement", []string{"math/rand/v2"}},
	}
	if got := violations(bad); len(got) != len(bad) {
		t.Errorf("of %d faults it sees %d: %v", len(bad), len(got), got)
	}
}
