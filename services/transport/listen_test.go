package transport

import (
	"bytes"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/storage"
)

func keyLines(of ...byte) []byte {
	var b bytes.Buffer
	b.WriteString("# gossip\n\n")
	for _, k := range of {
		b.WriteString(base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{k}, 32)) + "\n")
	}
	return b.Bytes()
}

func TestKeyFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys")
	var log lines
	put(t, path, keyLines(1))
	k, err := OpenKeys(path, Deps{Logger: log.logger()})
	if err != nil || len(k.Keys()) != 1 || k.Keys()[0][0] != 1 {
		t.Fatalf("%v", err)
	}
	var used [][]byte
	refuse := errors.New("not now")
	fail := error(nil)
	use := func(keys [][]byte) error {
		if fail == nil {
			used = keys
		}
		return fail
	}
	reload := func(changed bool, fault string) {
		t.Helper()
		got, err := k.Reload(use)
		if got != changed || (err == nil) != (fault == "") || err != nil && !strings.Contains(err.Error(), fault) {
			t.Fatalf("reload: %v, %v; want %v, %q", got, err, changed, fault)
		}
	}
	reload(false, "")
	put(t, path, keyLines(2, 1))
	reload(true, "")
	if len(used) != 2 || used[0][0] != 2 || !equalKeys(used, k.Keys()) {
		t.Fatalf("used %d keys", len(used))
	}
	put(t, path, append(keyLines(2, 1), "# the same\n"...))
	reload(false, "")
	secret := base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{7}, 20))
	for fault, text := range map[string]string{
		"line 1 is a key of 20 bytes, want 16, 24 or 32": secret + "\n", "line 2 is not base64": "\n?secret?", "holds no key": "# nothing\n",
		"line 4 repeats a key": string(keyLines(1, 1)), "line 19 is one key more than 16": string(keyLines(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17)),
	} {
		put(t, path, []byte(text))
		reload(false, fault)
		reload(false, "")
		_, err := OpenKeys(path, Deps{})
		var fe *FileError
		if !errors.As(err, &fe) || !errors.Is(err, storage.ErrInvalid) || !strings.Contains(err.Error(), fault) {
			t.Errorf("want %q: %v", fault, err)
		}
		if strings.Contains(err.Error()+log.text(), "secret") || strings.Contains(err.Error()+log.text(), secret) {
			t.Errorf("a key is told: %v", err)
		}
	}
	if n := log.count("the ones before stay in use"); n != 5 || len(k.Keys()) != 2 {
		t.Fatalf("told %d times of 5 faults, %d keys", n, len(k.Keys()))
	}
	fail = refuse
	put(t, path, keyLines(3))
	reload(false, "not now")
	if k.Keys()[0][0] != 2 {
		t.Fatal("keys that were refused are said to be in use")
	}
	if _, err := OpenKeys(path+"-none", Deps{}); err == nil || !strings.Contains(err.Error(), "gossip keys file "+path+"-none: there is none") {
		t.Fatalf("no file: %v", err)
	}
}

func TestStrangersAreTold(t *testing.T) {
	now := time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		tls             bool
		good, bad, line string
	}{
		{true, "\x16\x03\x01", "GET / HTTP/1.1\r\n", "a peer without TLS called a TLS port"},
		{false, "GET / HTTP/1.1\r\n", "\x16\x03\x01", "a peer with TLS called a port without TLS"},
	} {
		var log lines
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		w := Watch(l, "rpc", c.tls, Deps{Logger: log.logger(), Now: func() time.Time { return now }})
		send := func(text string) {
			t.Helper()
			out, err := net.Dial("tcp", l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer out.Close()
			in, err := w.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer in.Close()
			if _, err := io.WriteString(out, text); err != nil {
				t.Fatal(err)
			}
			got := make([]byte, len(text))
			if _, err := io.ReadFull(in, got); err != nil || string(got) != text {
				t.Fatalf("%q came as %q: %v", text, got, err)
			}
		}
		send(c.good)
		if log.text() != "" {
			t.Fatalf("a good peer is told of: %s", log.text())
		}
		send(c.bad)
		send(c.bad)
		send(c.bad)
		if log.count(c.line) != 1 || log.count("\n") != 1 || log.count("port=rpc") != 1 || log.count("peer=127.0.0.1") != 1 {
			t.Fatalf("three strangers: %s", log.text())
		}
		now = now.Add(strangerEvery)
		send(c.bad)
		if log.count(c.line) != 2 || log.count("more_before=2") != 1 {
			t.Fatalf("a minute later: %s", log.text())
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Accept(); !errors.Is(err, net.ErrClosed) {
			t.Fatalf("accept of a closed listener: %v", err)
		}
	}
}

// TestWatchUnderTLS sees that the wrapper changes nothing for who speaks well.
func TestWatchUnderTLS(t *testing.T) {
	ours := newAuthority(t)
	a := mustOpen(t, issue(t, ours, want{name: "a"}), Deps{})
	var log lines
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	on := tls.NewListener(Watch(l, "rpc", true, Deps{Logger: log.logger()}), a.MutualServer())
	defer on.Close()
	done := make(chan error, 1)
	go func() {
		c, err := on.Accept()
		if err == nil {
			_, err = io.WriteString(c, "hello")
			_ = c.Close()
		}
		done <- err
	}()
	c, err := a.Dial(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if b, err := io.ReadAll(c); string(b) != "hello" || err != nil {
		t.Fatalf("%q, %v", b, err)
	}
	if err := <-done; err != nil || log.text() != "" {
		t.Fatalf("%v %s", err, log.text())
	}
}

func TestRequireSecure(t *testing.T) {
	inv.Covers(t, "INV-O5")
	for _, c := range []struct {
		addr             string
		secure, insecure bool
		ok               bool
	}{
		{"127.0.0.1:4042", false, false, true}, {"[::1]:4042", false, false, true}, {"localhost:4042", false, false, true}, {"127.9.9.9:1", false, false, true},
		{"0.0.0.0:4042", false, false, false}, {":4042", false, false, false}, {"[::]:4042", false, false, false}, {"10.0.0.1:4042", false, false, false},
		{"broker-1:4042", false, false, false}, {"localhost.example.com:1", false, false, false},
		{"0.0.0.0:4042", true, false, true}, {"0.0.0.0:4042", false, true, true}, {"nonsense", true, true, false},
	} {
		err := RequireSecure(c.addr, c.secure, c.insecure)
		if (err == nil) != c.ok || err != nil && (!errors.Is(err, storage.ErrInvalid) || strings.Contains(err.Error(), "\n")) {
			t.Errorf("%+v: %v", c, err)
		}
	}
	if err := RequireSecure("0.0.0.0:4042", false, false); !strings.Contains(err.Error(), "0.0.0.0:4042 can be reached from other machines") || !strings.Contains(err.Error(), "insecure: true") {
		t.Errorf("it does not say what to do: %v", err)
	}
}
