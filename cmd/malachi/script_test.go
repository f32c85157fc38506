package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/malachilog/malachi/client/clienttest"
	"github.com/malachilog/malachi/storage/datadir"
)

// startLimit is how long a process may take to be ready on a busy machine; what it does take is not measured here.
const startLimit = 30 * time.Second

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"malachi": main})
}

// TestScripts runs the real program. Scripts have a broker at $MALACHI_SERVER, shared: each has topics of its own. Those that stop or
// kill a broker start one.
func TestScripts(t *testing.T) {
	shared := clienttest.Start(t)
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(e *testscript.Env) error {
			e.Setenv("MALACHI_SERVER", shared.URL())
			e.Setenv("OPS", shared.OpsURL())
			e.Setenv("SHARED_OPS", shared.OpsURL()) // ready sets the other two
			e.Setenv("HOME", e.WorkDir)
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"code": cmdCode, "ready": cmdReady, "grab": cmdGrab, "newer": cmdNewer, "busy": cmdBusy,
		},
	})
}

// cmdCode is `code N word...`: run malachi with the words and demand exit code N.
func cmdCode(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) == 0 {
		ts.Fatalf("usage: code N word...")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec("malachi", args[1:]...)
	got := 0
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		got = exit.ExitCode()
	} else {
		ts.Check(err)
	}
	if got != want {
		ts.Fatalf("exit code %d, want %d", got, want)
	}
}

// await calls f until it is true.
func await(ts *testscript.TestScript, what string, f func() bool) {
	ctx, cancel := context.WithTimeout(context.Background(), startLimit)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !f() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			ts.Fatalf("%s did not come within %v", what, startLimit)
		}
	}
}

// cmdReady is `ready FILE`: wait for a ready file and set MALACHI_SERVER, OPS, ID, NODE_PID and RESTART from it.
func cmdReady(ts *testscript.TestScript, _ bool, args []string) {
	file := ts.MkAbs(args[0])
	await(ts, file, func() bool {
		_, err := os.Stat(file)
		return err == nil
	})
	b, err := os.ReadFile(file)
	ts.Check(err)
	var ready struct{ Nodes []readyNode }
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	ts.Check(d.Decode(&ready))
	if len(ready.Nodes) != 1 {
		ts.Fatalf("%d nodes in %s", len(ready.Nodes), b)
	}
	n := ready.Nodes[0]
	ts.Setenv("MALACHI_SERVER", n.API)
	ts.Setenv("OPS", n.Ops)
	ts.Setenv("ID", n.ID)
	ts.Setenv("NODE_PID", strconv.Itoa(n.PID))
	ts.Setenv("RESTART", n.Restart)
	if !filepath.IsAbs(n.Data) {
		ts.Fatalf("data folder %s is not absolute", n.Data)
	}
}

// cmdGrab is `grab VAR FILE REGEXP`: set VAR to the first group. FILE may be stdout or stderr.
func cmdGrab(ts *testscript.TestScript, _ bool, args []string) {
	m := regexp.MustCompile(args[2]).FindStringSubmatch(ts.ReadFile(args[1]))
	if m == nil {
		ts.Fatalf("no match for %s", args[2])
	}
	ts.Setenv(args[0], m[1])
}

// cmdNewer is `newer FOLDER`: make a data folder one of a later format.
func cmdNewer(ts *testscript.TestScript, _ bool, args []string) {
	ts.Check(makeNewer(ts.MkAbs(args[0])))
}

func makeNewer(folder string) error {
	path := filepath.Join(folder, "MALACHI")
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	m, err := datadir.Parse(b)
	if err != nil {
		return err
	}
	m.Format++
	if b, err = m.Encode(); err != nil {
		return err
	}
	return os.WriteFile(path, b, 0o600)
}

// cmdBusy is `busy FILE`: wait until a file has something in it.
func cmdBusy(ts *testscript.TestScript, _ bool, args []string) {
	file := ts.MkAbs(args[0])
	await(ts, file, func() bool {
		st, err := os.Stat(file)
		return err == nil && st.Size() > 0
	})
}

// hashTree is a digest of every name and byte below a folder.
func hashTree(t *testing.T, folder string) string {
	t.Helper()
	h := sha256.New()
	err := filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		fmt.Fprintln(h, path)
		_, err = io.Copy(h, f)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}

// A folder of a newer format is refused with 78 by every command that opens one, and not a byte of it changes.
func TestNewerFolderIsLeftAlone(t *testing.T) {
	folder := t.TempDir()
	s, err := clienttest.Open(folder, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
	if err := makeNewer(folder); err != nil {
		t.Fatal(err)
	}
	before := hashTree(t, folder)
	config := write(t, "data: "+folder+"\napi: 127.0.0.1:0\nops: 127.0.0.1:0\nrpc: 127.0.0.1:0\nraft: 127.0.0.1:0\ngossip: 127.0.0.1:0\nbootstrap: true\n")
	for _, args := range [][]string{{"dev", "--data", folder, "--api", ":0", "--ops", ":0"}, {"server", "--config", config}} {
		var errOut bytes.Buffer
		code := run(t.Context(), args, streams{in: strings.NewReader(""), out: io.Discard, err: &errOut})
		if code != exitFolder || strings.Count(errOut.String(), "\n") != 1 || !strings.Contains(errOut.String(), "newer version") {
			t.Errorf("%s: exit %d: %s", args[0], code, errOut.String())
		}
	}
	if hashTree(t, folder) != before {
		t.Error("the folder was changed")
	}
}

// The commands that dev prints work when pasted, wherever the program and the data lie.
func TestPrintedCommandsWork(t *testing.T) {
	if _, err := exec.LookPath("curl"); err != nil {
		t.Skip("no curl on this machine")
	}
	found, err := exec.LookPath("malachi") // put there by testscript.Main
	if err != nil {
		t.Fatal(err)
	}
	odd := filepath.Join(t.TempDir(), "it's a $folder")
	if err := os.Mkdir(odd, 0o700); err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(odd, "malachi")
	b, err := os.ReadFile(found)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(program, b, 0o700); err != nil {
		t.Fatal(err)
	}
	ready := filepath.Join(odd, "ready file.json")
	dev := exec.CommandContext(t.Context(), program, "dev", "--data", "the data", "--api", ":0", "--ops", ":0", "--ready-file", ready)
	dev.Dir = odd
	var errOut bytes.Buffer
	dev.Stderr = &errOut
	ended := make(chan error, 1)
	if err := dev.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { ended <- dev.Wait() }()
	restart := waitReady(t, ready, ended).Restart
	if err := dev.Process.Signal(os.Interrupt); err != nil { // also to have all of its output
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Fatalf("dev: %v\n%s", err, errOut.String())
	}
	if err := os.Remove(ready); err != nil { // it stays for whoever wants the restart command
		t.Fatal(err)
	}

	// The restart command, from another folder, then everything that was printed.
	again := exec.CommandContext(t.Context(), "sh", "-c", "exec "+restart)
	again.Dir = t.TempDir()
	again.Stderr = &bytes.Buffer{}
	if err := again.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { ended <- again.Wait() }()
	waitReady(t, ready, ended)
	var script []string
	for line := range strings.Lines(errOut.String()) {
		if strings.HasPrefix(line, "  ") {
			script = append(script, strings.TrimSpace(line))
		}
	}
	if len(script) != 6 {
		t.Fatalf("%d commands in:\n%s", len(script), errOut.String())
	}
	sh := exec.CommandContext(t.Context(), "sh", "-e", "-c", strings.Join(script, "\n"))
	sh.Dir = t.TempDir()
	out, err := sh.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []string{"greetings", "stored 1 record", "hello\n", `"name":"events"`, `"recordCount":1`, `{"text":"u1"}`} {
		if !strings.Contains(strings.ReplaceAll(string(out), `": `, `":`), want) {
			t.Errorf("%s is missing in:\n%s", want, out)
		}
	}
	if err := again.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
}

func waitReady(t *testing.T, file string, ended chan error) readyNode {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(startLimit)
	for {
		if b, err := os.ReadFile(file); err == nil {
			var ready struct{ Nodes []readyNode }
			if err := json.Unmarshal(b, &ready); err != nil || len(ready.Nodes) != 1 {
				t.Fatalf("ready file %s: %v", b, err)
			}
			if ready.Nodes[0].PID != 0 {
				return ready.Nodes[0]
			}
		}
		select {
		case err := <-ended:
			t.Fatalf("it ended: %v", err)
		case <-limit:
			t.Fatal("not ready in time")
		case <-tick.C:
		}
	}
}
