package controlplane

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/malachilog/malachi/e2e/inv"
)

// pureImports are all that a state machine may import: nothing that knows a clock, a disk, a network, a process or chance.
var pureImports = map[string]bool{
	"bufio": true, "bytes": true, "encoding/binary": true, "errors": true, "fmt": true, "hash": true, "hash/crc32": true, "io": true,
	"maps": true, "math": true, "math/bits": true, "slices": true, "strings": true, "unicode/utf8": true,
	"time":                         true, // for durations: see pureTime
	"github.com/cespare/xxhash/v2": true, "github.com/google/btree": true, "google.golang.org/protobuf/proto": true,
	"github.com/malachilog/malachi/e2e/inv/mutate":                 true, // compiles to false outside mutation runs
	"github.com/malachilog/malachi/gen/go/malachi/intra/v1":        true,
	"github.com/malachilog/malachi/services/controlplane/metadata": true,
	"github.com/malachilog/malachi/storage":                        true,
}

// pureTime are the names of package time that are values and no clock.
var pureTime = map[string]bool{"Duration": true, "Millisecond": true, "Second": true, "Hour": true}

// impurities says what in a file could make two replicas differ or a machine act by itself.
func impurities(f *ast.File) []string {
	var out []string
	for _, i := range f.Imports {
		path, err := strconv.Unquote(i.Path.Value)
		if err != nil || !pureImports[path] {
			out = append(out, "imports "+i.Path.Value)
		}
	}
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.GoStmt:
			out = append(out, "starts a goroutine")
		case *ast.SelectStmt:
			out = append(out, "selects")
		case *ast.ChanType:
			out = append(out, "has a channel")
		case *ast.GenDecl:
			for _, s := range n.Specs {
				if v, ok := s.(*ast.ValueSpec); ok && n.Tok == token.VAR && len(v.Values) == 0 && f.Scope.Lookup(v.Names[0].Name) != nil {
					out = append(out, "has the global variable "+v.Names[0].Name)
				}
			}
		case *ast.SelectorExpr:
			if x, ok := n.X.(*ast.Ident); ok && (x.Name == "fmt" && strings.HasPrefix(n.Sel.Name, "Print") || x.Name == "fmt" && strings.HasPrefix(n.Sel.Name, "Scan")) {
				out = append(out, "calls fmt."+n.Sel.Name)
			}
			if x, ok := n.X.(*ast.Ident); ok && x.Name == "time" && !pureTime[n.Sel.Name] {
				out = append(out, "uses time."+n.Sel.Name)
			}
		}
		return true
	})
	return out
}

func TestStateMachinesArePure(t *testing.T) {
	inv.Covers(t, "INV-M2")
	for _, dir := range []string{"metadata", "root"} {
		names, err := filepath.Glob(filepath.Join(dir, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		files := 0
		for _, name := range names {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			f, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			files++
			for _, what := range impurities(f) {
				t.Errorf("%s %s", name, what)
			}
		}
		if files < 3 {
			t.Errorf("only %d files in %s", files, dir)
		}
	}
	// The check itself sees.
	bad, err := parser.ParseFile(token.NewFileSet(), "bad.go", `package bad
import ("math/rand"; "os"; "time")
var counter int
func f() { go f(); _ = time.Now(); _ = os.Getpid(); _ = rand.Int(); _ = make(chan int); fmt.Println(counter) }`, 0)
	if err != nil {
		t.Fatal(err)
	}
	if found := impurities(bad); len(found) != 7 {
		t.Errorf("of 7 impurities it sees %d: %v", len(found), found)
	}
}

// TestOnlyTheControlPlaneImportsTheRaftLibrary also holds the module graph to the one Pebble that the library was built for.
func TestOnlyTheControlPlaneImportsTheRaftLibrary(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-m", "all").CombinedOutput()
	if err != nil {
		t.Fatalf("go list -m all: %v\n%s", err, out)
	}
	seen := false
	for _, l := range strings.Split(string(out), "\n") {
		path, version, _ := strings.Cut(l, " ")
		if path == "github.com/cockroachdb/pebble" {
			seen = true
			if !strings.HasPrefix(version, "v0.") {
				t.Errorf("pebble %s: the Raft log needs v0", version)
			}
		}
		if strings.HasPrefix(path, "github.com/cockroachdb/pebble/v") {
			t.Errorf("a second pebble: %s", l)
		}
	}
	if !seen {
		t.Error("pebble is not in the module graph: this test looks in the wrong place")
	}
	out, err = exec.CommandContext(t.Context(), "go", "list", "-f", "{{.ImportPath}} {{.Imports}}", "github.com/malachilog/malachi/...").Output()
	if err != nil {
		t.Skipf("some package does not load: %v", err)
	}
	const self = "github.com/malachilog/malachi/services/controlplane"
	for _, l := range strings.Split(string(out), "\n") {
		pkg, imports, _ := strings.Cut(l, " ")
		if strings.Contains(imports, "github.com/lni/") != (pkg == self) && pkg != "" {
			t.Errorf("%s: imports of the Raft library belong to %s alone", pkg, self)
		}
	}
}
