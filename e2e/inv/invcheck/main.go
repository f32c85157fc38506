// Command invcheck holds docs/invariants.md against the tests: it finds which test covers which line, fails on a line that is due without
// one, and turns every safety rule of e2e/inv/mutations.txt off, one at a time, demanding that the named test goes red.
//
//	go run ./e2e/inv/invcheck          check, then mutate
//	go run ./e2e/inv/invcheck -write   write the test column of docs/invariants.md
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const (
	page      = "docs/invariants.md"
	mutations = "e2e/inv/mutations.txt"
)

// due are the stages whose lines must have a test by now.
var due = []string{"one broker", "cluster"}

func main() {
	write := flag.Bool("write", false, "write the test column of "+page)
	only := flag.String("only", "", "run only mutations whose name contains this")
	flag.Parse()
	if err := run(*write, *only); err != nil {
		fmt.Fprintln(os.Stderr, "invcheck:", err)
		os.Exit(1)
	}
}

func run(write bool, only string) error {
	if only != "" {
		return mutate(only)
	}
	tests, err := covered(".")
	if err != nil {
		return err
	}
	text, err := os.ReadFile(page)
	if err != nil {
		return err
	}
	filled, missing, err := fill(string(text), tests)
	if err != nil {
		return err
	}
	if write {
		return os.WriteFile(page, []byte(filled), 0o644)
	}
	if filled != string(text) {
		return fmt.Errorf("%s is stale: go run ./e2e/inv/invcheck -write", page)
	}
	if len(missing) > 0 {
		return fmt.Errorf("due and without a test: %s", strings.Join(missing, " "))
	}
	return mutate(only)
}

// covered maps invariant ids to the tests that call inv.Covers with them.
func covered(root string) (map[string][]string, error) {
	out := map[string][]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == "node_modules" || d.Name() == "gen" || strings.HasPrefix(d.Name(), ".") && d.Name() != ".") {
			return filepath.SkipDir
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		if err != nil {
			return err
		}
		for _, decl := range file.Decls {
			if fn, ok := decl.(*ast.FuncDecl); ok {
				note(out, filepath.Dir(path), fn)
			}
		}
		return nil
	})
	return out, err
}

func note(out map[string][]string, dir string, fn *ast.FuncDecl) {
	ast.Inspect(fn, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		sel, ok := call.Fun.(*ast.SelectorExpr)
		if !ok || sel.Sel.Name != "Covers" {
			return true
		}
		for _, a := range call.Args[1:] {
			lit, ok := a.(*ast.BasicLit)
			if !ok {
				continue
			}
			id, err := strconv.Unquote(lit.Value)
			if err != nil {
				continue
			}
			name := dir + "." + fn.Name.Name
			if !slices.Contains(out[id], name) {
				out[id] = append(out[id], name)
			}
		}
		return true
	})
}

var row = regexp.MustCompile(`^\| (INV-[A-Z]\d+) \| (.*) \| ([a-z ]+) \| (.*)\|$`)

// fill writes the test column and returns the due ids that have no test. A test that names an id which the page lacks is an error.
func fill(text string, tests map[string][]string) (filled string, missing []string, err error) {
	known := map[string]bool{}
	lines := strings.Split(text, "\n")
	for i, l := range lines {
		m := row.FindStringSubmatch(l)
		if m == nil {
			continue
		}
		known[m[1]] = true
		names := slices.Clone(tests[m[1]])
		slices.Sort(names)
		cell := ""
		for k, n := range names {
			if k > 0 {
				cell += ", "
			}
			cell += "`" + n + "`"
		}
		if cell != "" {
			cell += " "
		}
		lines[i] = fmt.Sprintf("| %s | %s | %s | %s|", m[1], m[2], m[3], cell)
		if len(names) == 0 && slices.Contains(due, m[3]) {
			missing = append(missing, m[1])
		}
	}
	for id := range tests {
		if !known[id] {
			return "", nil, fmt.Errorf("a test covers %s, which %s does not list", id, page)
		}
	}
	return strings.Join(lines, "\n"), missing, nil
}

// mutation is one line: a switch, and the test that must notice it.
type mutation struct{ name, pkg, test string }

func readMutations() ([]mutation, error) {
	b, err := os.ReadFile(mutations)
	if err != nil {
		return nil, err
	}
	var out []mutation
	for n, l := range strings.Split(string(b), "\n") {
		if l = strings.TrimSpace(l); l == "" || strings.HasPrefix(l, "#") {
			continue
		}
		f := strings.Fields(l)
		if len(f) != 3 {
			return nil, fmt.Errorf("%s:%d: want switch, package and test", mutations, n+1)
		}
		out = append(out, mutation{f[0], f[1], f[2]})
	}
	return out, nil
}

// mutate builds each package's tests once, with the switches in, and runs each named test with its switch off and on: green, then red.
func mutate(only string) (err error) {
	all, err := readMutations()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "invcheck")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	built := map[string]string{}
	var bad []string
	ran := 0
	for _, m := range all {
		if !strings.Contains(m.name, only) {
			continue
		}
		bin, ok := built[m.pkg]
		if !ok {
			bin = filepath.Join(dir, strings.ReplaceAll(strings.Trim(m.pkg, "./"), "/", "_")+".test")
			build := exec.Command("go", "test", "-c", "-tags", "mutate", "-o", bin, m.pkg)
			if out, err := build.CombinedOutput(); err != nil {
				return fmt.Errorf("build tests of %s: %w\n%s", m.pkg, err, out)
			}
			built[m.pkg] = bin
		}
		ran++
		switch green, red, why := try(bin, m); {
		case !green:
			bad = append(bad, fmt.Sprintf("%s: %s fails or does not exist with the rule on\n%s", m.name, m.test, why))
		case !red:
			bad = append(bad, fmt.Sprintf("%s: %s stays green with the rule off", m.name, m.test))
		default:
			fmt.Printf("red as it must be: %-45s %s %s\n", m.name, m.pkg, m.test)
		}
	}
	for _, b := range bad {
		fmt.Println(b)
	}
	fmt.Printf("%d passed, %d failed\n", ran-len(bad), len(bad))
	if len(bad) > 0 || ran == 0 {
		return fmt.Errorf("%d of %d mutations went unnoticed", len(bad), ran)
	}
	return nil
}

var baseline = map[string]bool{}

func try(bin string, m mutation) (green, red bool, why string) {
	test := func(name string) (bool, []byte) {
		cmd := exec.Command(bin, "-test.run", "^"+m.test+"$", "-test.timeout", "5m", "-test.v")
		cmd.Dir = m.pkg
		cmd.Env = append(os.Environ(), "MALACHI_MUTATE="+name, "MALACHI_MUTATION_RUN=1")
		out, err := cmd.CombinedOutput()
		return err == nil && bytes.Contains(out, []byte("--- PASS: "+m.test)), out
	}
	key := m.pkg + m.test
	if !baseline[key] {
		ok, out := test("")
		if !ok {
			return false, false, string(out[max(0, len(out)-2000):])
		}
		baseline[key] = true
	}
	ok, _ := test(m.name)
	return true, !ok, ""
}
