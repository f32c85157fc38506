package transport

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect/v2"
	"go.uber.org/goleak"

	"github.com/malachilog/malachi/e2e/inv"
	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/gen/go/malachi/intra/v1/intrav1connect"
	"github.com/malachilog/malachi/services/rpc"
	"github.com/malachilog/malachi/storage"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// authority signs certificates.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

type want struct {
	name       string
	from, to   time.Time
	clientOnly bool
	hosts      []string
}

var (
	longAgo = time.Date(1999, 1, 1, 0, 0, 0, 0, time.UTC) // before the clock of a synctest bubble
	farOff  = time.Date(2199, 1, 1, 0, 0, 0, 0, time.UTC)
	serial  int64
)

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t, key: newKey(t)}
	serial++
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: fmt.Sprint("authority ", serial)}, NotBefore: longAgo, NotAfter: farOff,
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	raw, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &a.key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	if a.cert, err = x509.ParseCertificate(raw); err != nil {
		t.Fatal(err)
	}
	return a
}

func pemOf(kind string, raw []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: raw})
}

func (a *authority) pem() []byte { return pemOf("CERTIFICATE", a.cert.Raw) }

func (a *authority) sign(w want) (cert, key []byte) {
	a.t.Helper()
	k := newKey(a.t)
	serial++
	if w.from.IsZero() {
		w.from = longAgo
	}
	if w.to.IsZero() {
		w.to = farOff
	}
	use := []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}
	if w.clientOnly {
		use = use[:1]
	}
	if w.hosts == nil {
		w.hosts = []string{"localhost"}
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: w.name}, NotBefore: w.from, NotAfter: w.to, ExtKeyUsage: use,
		KeyUsage: x509.KeyUsageDigitalSignature, DNSNames: w.hosts, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	if w.hosts[0] != "localhost" {
		tmpl.IPAddresses = nil
	}
	raw, err := x509.CreateCertificate(rand.Reader, tmpl, a.cert, &k.PublicKey, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		a.t.Fatal(err)
	}
	return pemOf("CERTIFICATE", raw), pemOf("PRIVATE KEY", der)
}

// put writes a file under a fresh inode, so that no clock decides whether it changed.
func put(t *testing.T, path string, b []byte) {
	t.Helper()
	if err := os.WriteFile(path+".new", b, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

// issue makes the three files of a broker.
func issue(t *testing.T, a *authority, w want) Files {
	t.Helper()
	dir := t.TempDir()
	f := Files{Cert: filepath.Join(dir, "cert.pem"), Key: filepath.Join(dir, "key.pem"), CA: filepath.Join(dir, "ca.pem")}
	cert, key := a.sign(w)
	put(t, f.Cert, cert)
	put(t, f.Key, key)
	put(t, f.CA, a.pem())
	return f
}

func mustOpen(t *testing.T, f Files, deps Deps) *Source {
	t.Helper()
	s, err := Open(f, deps)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// serve answers every connection with the name of the client, until the test ends.
func serve(t *testing.T, cfg *tls.Config) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{
		ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug),
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			name := "nobody"
			if r.TLS != nil && len(r.TLS.PeerCertificates) > 0 {
				name = r.TLS.PeerCertificates[0].Subject.CommonName
			}
			_, _ = io.WriteString(w, name)
		}),
	}
	done := make(chan struct{})
	on := l
	if cfg != nil {
		on = tls.NewListener(l, cfg)
	}
	go func() {
		defer close(done)
		_ = server.Serve(on)
	}()
	t.Cleanup(func() {
		_ = server.Close()
		<-done
	})
	return l.Addr().String()
}

// call asks addr who we are, on a fresh connection.
func call(t *testing.T, tr *http.Transport, addr string) (string, error) {
	t.Helper()
	tr.DisableKeepAlives = true
	defer tr.CloseIdleConnections()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+addr+"/", nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := (&http.Client{Transport: tr, Timeout: 10 * time.Second}).Do(req)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	return string(b), err
}

func TestBrokersKnowEachOther(t *testing.T) {
	ours, theirs := newAuthority(t), newAuthority(t)
	a := mustOpen(t, issue(t, ours, want{name: "a"}), Deps{})
	b := mustOpen(t, issue(t, ours, want{name: "b"}), Deps{})
	stranger := mustOpen(t, issue(t, theirs, want{name: "stranger"}), Deps{})
	addr := serve(t, a.MutualServer())
	if who, err := call(t, b.Transport(), addr); err != nil || who != "b" {
		t.Fatalf("%q, %v", who, err)
	}
	// By a name that the certificate has, too; not by one that it lacks.
	_, port, _ := net.SplitHostPort(addr)
	if who, err := call(t, b.Transport(), "localhost:"+port); err != nil || who != "b" {
		t.Fatalf("%q, %v", who, err)
	}
	elsewhere := mustOpen(t, issue(t, ours, want{name: "c", hosts: []string{"elsewhere"}}), Deps{})
	if _, err := call(t, b.Transport(), serve(t, elsewhere.MutualServer())); err == nil || !strings.Contains(err.Error(), "a certificate for another name") {
		t.Fatalf("another name: %v", err)
	}
	_, err := stranger.Dial(t.Context(), "tcp", addr)
	if !errors.Is(err, storage.ErrUnavailable) || !strings.Contains(err.Error(), addr+" shows a certificate that our authorities have not signed") {
		t.Fatalf("a server of other authorities: %v", err)
	}
	if _, err := b.Dial(t.Context(), "tcp", serve(t, nil)); err == nil || !strings.Contains(err.Error(), "answers without TLS") {
		t.Fatalf("a server without TLS: %v", err)
	}
}

// TestOnlyBrokersAreServed goes to a mutual listener with no certificate, and with one of other authorities.
func TestOnlyBrokersAreServed(t *testing.T) {
	ours, theirs := newAuthority(t), newAuthority(t)
	a := mustOpen(t, issue(t, ours, want{name: "a"}), Deps{})
	addr := serve(t, a.MutualServer())
	roots := x509.NewCertPool()
	roots.AddCert(ours.cert)
	cert, key := theirs.sign(want{name: "stranger"})
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	for name, cfg := range map[string]*tls.Config{
		"none": {RootCAs: roots}, "a stranger's": {RootCAs: roots, Certificates: []tls.Certificate{pair}},
		"old TLS": {RootCAs: roots, Certificates: []tls.Certificate{a.now.Load().cert}, MaxVersion: tls.VersionTLS12},
	} {
		if who, err := call(t, &http.Transport{TLSClientConfig: cfg}, addr); err == nil {
			t.Errorf("with the certificate %s it is served as %q", name, who)
		}
	}
	// The listener for anyone serves whoever trusts it.
	f := issue(t, ours, want{name: "api"})
	f.CA = ""
	api := mustOpen(t, f, Deps{})
	if who, err := call(t, &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}, serve(t, api.Server())); err != nil || who != "nobody" {
		t.Fatalf("%q, %v", who, err)
	}
	if api.Mutual() || !a.Mutual() {
		t.Fatal("mutual is told wrongly")
	}
	for name, use := range map[string]func(){
		"server": func() { api.MutualServer() }, "client": func() { api.Client("x") }, "transport": func() { api.Transport() },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: without authorities it is handed out", name)
				}
			}()
			use()
		}()
	}
}

// TestPeersOverTransport calls through the dialer and the handler that brokers use.
func TestPeersOverTransport(t *testing.T) {
	a := mustOpen(t, issue(t, newAuthority(t), want{name: "a"}), Deps{})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: rpc.PeerHandler(slog.New(slog.DiscardHandler), func(s *connect.Server) {
		intrav1connect.RegisterClusterServiceHandler(s, intrav1connect.UnimplementedClusterServiceHandler{})
	})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(tls.NewListener(l, a.MutualServer()))
	}()
	peers := rpc.NewPeers(nil, a.Transport())
	_, err = intrav1connect.NewClusterServiceClient(peers.At(l.Addr().String())).Hello(t.Context(), &intrav1.HelloRequest{})
	var ce *connect.Error
	if !errors.As(err, &ce) || !ce.IsRemote() || ce.Code() != connect.CodeUnimplemented {
		t.Fatalf("the other side did not answer: %v", err)
	}
	peers.Close()
	_ = server.Close()
	<-done
}

func TestFilesAreTakenOver(t *testing.T) {
	ours, next := newAuthority(t), newAuthority(t)
	var log lines
	deps := Deps{Logger: log.logger()}
	files := issue(t, ours, want{name: "a"})
	a := mustOpen(t, files, deps)
	bFiles := issue(t, ours, want{name: "b"})
	b := mustOpen(t, bFiles, Deps{})
	addr := serve(t, a.MutualServer())
	tr := b.Transport()
	reload := func(s *Source, changed bool, fault string) {
		t.Helper()
		got, err := s.Reload()
		if got != changed || (err == nil) != (fault == "") || err != nil && !strings.Contains(err.Error(), fault) {
			t.Fatalf("reload: %v, %v; want %v, %q", got, err, changed, fault)
		}
	}
	reload(a, false, "")
	// A certificate that came before its key, and a broken one: the old stay, and it is said once.
	cert, key := ours.sign(want{name: "a again"})
	put(t, files.Cert, cert)
	reload(a, false, "does not go with certificate")
	reload(a, false, "")
	if who, err := call(t, tr, addr); err != nil || who != "b" {
		t.Fatalf("with half of the files: %q, %v", who, err)
	}
	put(t, files.Key, key)
	reload(a, true, "")
	put(t, files.Cert, []byte("nonsense"))
	reload(a, false, "holds no PEM certificate")
	if err := os.Remove(files.Cert); err != nil {
		t.Fatal(err)
	}
	reload(a, false, "there is none")
	put(t, files.Cert, cert)
	reload(a, true, "")
	if n := log.count("the ones before stay in use"); n != 3 {
		t.Fatalf("told %d times of 3 faults: %s", n, log.text())
	}
	conn, err := b.Dial(t.Context(), "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	if got := conn.(*tls.Conn).ConnectionState().PeerCertificates[0].Subject.CommonName; got != "a again" {
		t.Fatalf("it shows the certificate of %q", got)
	}
	_ = conn.Close()
	// New authorities: first both are trusted, then everyone has a new certificate, then the old are dropped. At no step is a call refused.
	both := append(ours.pem(), next.pem()...)
	step := func(name string) {
		t.Helper()
		if who, err := call(t, tr, addr); err != nil || !strings.HasPrefix(who, "b") {
			t.Fatalf("%s: %q, %v", name, who, err)
		}
	}
	for _, s := range []struct {
		of *Source
		f  Files
	}{{a, files}, {b, bFiles}} {
		put(t, s.f.CA, both)
		reload(s.of, true, "")
		step("both authorities")
	}
	for _, s := range []struct {
		of *Source
		f  Files
	}{{a, files}, {b, bFiles}} {
		cert, key := next.sign(want{name: "b and a"})
		put(t, s.f.Cert, cert)
		put(t, s.f.Key, key)
		reload(s.of, true, "")
		step("new certificates")
	}
	put(t, files.CA, next.pem())
	reload(a, true, "")
	step("the new alone")
	old := mustOpen(t, issue(t, ours, want{name: "old"}), Deps{})
	if _, err := call(t, old.Transport(), addr); err == nil {
		t.Fatal("a certificate of the dropped authorities is accepted")
	}
}

func TestFilesThatCannotBeUsed(t *testing.T) {
	inv.Covers(t, "INV-O5")
	ours, theirs := newAuthority(t), newAuthority(t)
	now := time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)
	deps := Deps{Now: func() time.Time { return now }}
	for fault, spoil := range map[string]func(*Files){
		"certificate file (none): none is named: name one":             func(f *Files) { f.Cert = "" },
		"private key file /nowhere: there is none: make it":            func(f *Files) { f.Key = "/nowhere" },
		"it holds no PEM certificate: name a file with":                func(f *Files) { f.Cert = f.Key },
		"it does not go with certificate":                              func(f *Files) { _, k := ours.sign(want{}); put(t, f.Key, k) },
		"it is larger than 1048576 bytes":                              func(f *Files) { put(t, f.CA, make([]byte, maxFileBytes+1)) },
		"authorities file":                                             func(f *Files) { put(t, f.CA, []byte("x")) },
		"it can't be read":                                             func(f *Files) { f.CA = filepath.Dir(f.CA) },
		"as a server it is not accepted by authorities":                func(f *Files) { put(t, f.CA, theirs.pem()) },
		"it ended on 2026-10-01T00:00:00Z: renew it":                   func(f *Files) { *f = issue(t, ours, want{to: now.AddDate(0, -1, 0)}) },
		"it begins only on 2026-12-01T00:00:00Z: check this machine's": func(f *Files) { *f = issue(t, ours, want{from: now.AddDate(0, 1, 0)}) },
		"for use as server and as client":                              func(f *Files) { *f = issue(t, ours, want{clientOnly: true}) },
	} {
		f := issue(t, ours, want{name: "a"})
		spoil(&f)
		_, err := Open(f, deps)
		var fe *FileError
		if !errors.As(err, &fe) || !errors.Is(err, storage.ErrInvalid) || !strings.Contains(err.Error(), fault) || strings.Contains(err.Error(), "\n") {
			t.Errorf("want %q: %v", fault, err)
		}
		if strings.Contains(fmt.Sprint(err), "PRIVATE") {
			t.Errorf("a key is in the error: %v", err)
		}
	}
}

func TestTheEndOfACertificateIsTold(t *testing.T) {
	now := time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)
	var log lines
	s := mustOpen(t, issue(t, newAuthority(t), want{to: now.AddDate(0, 0, 10)}), Deps{Logger: log.logger(), Now: func() time.Time { return now }})
	for _, told := range []int{0, 0, 0, 0, 1, 2} { // 10, 9, 8, 7 days before, then twice a day
		for range 2 {
			if _, err := s.Reload(); err != nil {
				t.Fatal(err)
			}
		}
		if n := log.count("ends soon"); n != told {
			t.Fatalf("on %v it was told %d times, want %d", now, n, told)
		}
		now = now.AddDate(0, 0, 1)
	}
}

func TestRunLooksAtTheFiles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours := newAuthority(t)
		files := issue(t, ours, want{name: "a"})
		s := mustOpen(t, files, Deps{})
		path := filepath.Join(t.TempDir(), "keys")
		put(t, path, keyLines(1))
		k, err := OpenKeys(path, Deps{})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var got [][]byte
		done := make(chan error, 2)
		go func() { done <- s.Run(ctx) }()
		go func() { done <- k.Run(ctx, func(keys [][]byte) error { got = keys; return nil }) }()
		cert, key := ours.sign(want{name: "a again"})
		put(t, files.Cert, cert)
		put(t, files.Key, key)
		put(t, path, keyLines(2, 1))
		<-time.After(2 * lookEvery) // by the bubble's clock
		synctest.Wait()
		if name := s.now.Load().cert.Leaf.Subject.CommonName; name != "a again" {
			t.Errorf("the certificate is that of %q", name)
		}
		if len(got) != 2 || got[0][0] != 2 || !equalKeys(got, k.Keys()) {
			t.Errorf("the keys are %d", len(got))
		}
		cancel()
		for range 2 {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	})
}

// lines keeps what is logged.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *lines) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (l *lines) count(part string) int { return strings.Count(l.text(), part) }

func (l *lines) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }
