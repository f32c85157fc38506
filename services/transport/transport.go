// Package transport is how brokers and clients reach each other safely: TLS from files, mutual between brokers, the keys of the gossip, and
// plain words for what goes wrong.
//
// Files are looked at every few seconds by Run and taken over by new connections when they changed; connections that exist go on. A file
// that can't be used leaves the last good ones in place and is told of once. The Raft library reads its certificate once, when it opens.
//
// A Source and a KeyFile start no goroutine but in Run, and are safe for concurrent use. They never log or put into an error what a key says.
package transport

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	"github.com/malachilog/malachi/storage"
)

const (
	// lookEvery is how often files are looked at.
	lookEvery = 3 * time.Second
	// maxFileBytes bounds what is read of a file.
	maxFileBytes = 1 << 20
	// expiryWarning is how long before a certificate's end it is told of, once a day.
	expiryWarning = 7 * 24 * time.Hour
	// handshakeTimeout bounds a handshake that this side begins.
	handshakeTimeout = 5 * time.Second
)

// Files name PEM files: a certificate with what it was signed by, its private key, and the authorities that others' certificates are
// verified against.
type Files struct {
	Cert, Key string
	// CA may be empty: then the Source serves TLS to anyone, and is no good between brokers.
	CA string
}

// FileError says which file can't be used, what is wrong with it, and what to do, in one line.
type FileError struct {
	// What the file should hold: "certificate", "private key", "authorities", "gossip keys".
	What string
	Path string
	// Fault is what is wrong, Advice what to do.
	Fault, Advice string
	Cause         error
}

// Error is one line.
func (e *FileError) Error() string {
	path := e.Path
	if path == "" {
		path = "(none)"
	}
	return fmt.Sprintf("%s file %s: %s: %s", e.What, path, e.Fault, e.Advice)
}

// Unwrap is storage.ErrInvalid, and the cause if there is one.
func (e *FileError) Unwrap() []error {
	if e.Cause == nil {
		return []error{storage.ErrInvalid}
	}
	return []error{storage.ErrInvalid, e.Cause}
}

// Deps are the collaborators of a Source or KeyFile.
type Deps struct {
	// Logger takes what reloading finds. Default: none.
	Logger *slog.Logger
	// Now is the clock that certificates are judged by. Default time.Now.
	Now func() time.Time
}

func (d Deps) withDefaults() Deps {
	if d.Logger == nil {
		d.Logger = slog.New(slog.DiscardHandler)
	}
	if d.Now == nil {
		d.Now = time.Now
	}
	return d
}

// material is what the files held at one time. It is never changed.
type material struct {
	cert  tls.Certificate
	roots *x509.CertPool // nil: no CA file
}

// Source is the certificate, key and authorities of a broker, as the files last had them.
type Source struct {
	files Files
	deps  Deps
	now   atomic.Pointer[material]

	mu      sync.Mutex // of Reload
	stamps  stamps
	expires time.Time // that the end of the certificate was told of last
}

// Open reads the files. Errors: *FileError.
func Open(files Files, deps Deps) (*Source, error) {
	s := &Source{files: files, deps: deps.withDefaults()}
	s.stamps = look(files.Cert, files.Key, files.CA)
	m, err := s.load()
	if err != nil {
		return nil, err
	}
	s.now.Store(m)
	return s, nil
}

// load reads and checks the files against each other.
func (s *Source) load() (*material, error) {
	certPEM, err := read("certificate", s.files.Cert)
	if err != nil {
		return nil, err
	}
	keyPEM, err := read("private key", s.files.Key)
	if err != nil {
		return nil, err
	}
	if !hasBlock(certPEM, "CERTIFICATE") {
		return nil, &FileError{What: "certificate", Path: s.files.Cert, Fault: "it holds no PEM certificate", Advice: "name a file with -----BEGIN CERTIFICATE-----"}
	}
	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil { // the library's text names the kind of fault and nothing of the key
		return nil, &FileError{
			What: "private key", Path: s.files.Key, Fault: "it does not go with certificate " + s.files.Cert,
			Advice: "give the key that the certificate was made for, unencrypted PEM", Cause: err,
		}
	}
	if pair.Leaf == nil {
		if pair.Leaf, err = x509.ParseCertificate(pair.Certificate[0]); err != nil {
			return nil, &FileError{What: "certificate", Path: s.files.Cert, Fault: "it does not parse", Advice: "make it anew", Cause: err}
		}
	}
	m := &material{cert: pair}
	if now := s.deps.Now(); now.After(pair.Leaf.NotAfter) {
		return nil, &FileError{What: "certificate", Path: s.files.Cert, Fault: "it ended on " + pair.Leaf.NotAfter.UTC().Format(time.RFC3339), Advice: "renew it"}
	} else if now.Before(pair.Leaf.NotBefore) {
		return nil, &FileError{
			What: "certificate", Path: s.files.Cert, Fault: "it begins only on " + pair.Leaf.NotBefore.UTC().Format(time.RFC3339),
			Advice: "check this machine's clock, or the certificate",
		}
	}
	if s.files.CA == "" {
		return m, nil
	}
	return m, s.loadAuthorities(m)
}

// loadAuthorities reads the CA file and sees whether other brokers, who have the same one, will accept this certificate.
func (s *Source) loadAuthorities(m *material) error {
	caPEM, err := read("authorities", s.files.CA)
	if err != nil {
		return err
	}
	m.roots = x509.NewCertPool()
	if !m.roots.AppendCertsFromPEM(caPEM) {
		return &FileError{What: "authorities", Path: s.files.CA, Fault: "it holds no PEM certificate", Advice: "name the certificate of who signs the brokers' certificates"}
	}
	between := x509.NewCertPool()
	for _, raw := range m.cert.Certificate[1:] {
		if c, err := x509.ParseCertificate(raw); err == nil {
			between.AddCert(c)
		}
	}
	for _, use := range []struct {
		key  x509.ExtKeyUsage
		name string
	}{{x509.ExtKeyUsageServerAuth, "server"}, {x509.ExtKeyUsageClientAuth, "client"}} {
		_, err := m.cert.Leaf.Verify(x509.VerifyOptions{
			Roots: m.roots, Intermediates: between, CurrentTime: s.deps.Now(), KeyUsages: []x509.ExtKeyUsage{use.key},
		})
		if err != nil {
			return &FileError{
				What: "certificate", Path: s.files.Cert, Fault: fmt.Sprintf("as a %s it is not accepted by authorities %s (%v)", use.name, s.files.CA, err),
				Advice: "have it signed by one of them, for use as server and as client", Cause: err,
			}
		}
	}
	return nil
}

// Reload looks at the files once, and takes them over if they changed and can be used. It reports whether it did; the error of files that
// can't be used is returned, and logged, once per change of them.
func (s *Source) Reload() (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.warnOfEnd()
	stamps := look(s.files.Cert, s.files.Key, s.files.CA) // before the reading: a change in between is found the next time
	if stamps.same(s.stamps) {
		return false, nil
	}
	s.stamps = stamps
	m, err := s.load()
	if err != nil {
		s.deps.Logger.Warn("changed TLS files can't be used; the ones before stay in use", "error", err)
		return false, err
	}
	s.now.Store(m)
	s.deps.Logger.Info("TLS files taken over", "certificate", s.files.Cert, "until", m.cert.Leaf.NotAfter.UTC().Format(time.RFC3339))
	return true, nil
}

// warnOfEnd tells once a day of a certificate that is about to end.
func (s *Source) warnOfEnd() {
	now, end := s.deps.Now(), s.now.Load().cert.Leaf.NotAfter
	if end.Sub(now) < expiryWarning && now.Sub(s.expires) >= 24*time.Hour {
		s.expires = now
		s.deps.Logger.Warn("the TLS certificate ends soon, or has ended: renew it", "certificate", s.files.Cert, "until", end.UTC().Format(time.RFC3339))
	}
}

// Run looks at the files every few seconds until ctx ends. It returns nil.
func (s *Source) Run(ctx context.Context) error {
	return every(ctx, func() { _, _ = s.Reload() }) // Reload has logged it
}

func every(ctx context.Context, do func()) error {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			do()
		}
	}
}

// Server is the configuration of a listener for anyone: the certificate of the moment, no question for the caller's. It offers HTTP/2 and
// HTTP/1.1, so an http.Server with Protocols of its own must have both.
func (s *Source) Server() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
		return &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{s.now.Load().cert}, NextProtos: []string{"h2", "http/1.1"}}, nil
	}}
}

// MutualServer is the configuration of a listener for brokers only: the caller must show a certificate that the authorities of the moment
// have signed for clients. HTTP/1.1 only. It panics without a CA file: Mutual tells.
func (s *Source) MutualServer() *tls.Config {
	s.mustBeMutual()
	return &tls.Config{MinVersion: tls.VersionTLS13, GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
		m := s.now.Load()
		auth := tls.RequireAndVerifyClientCert
		if mutate.On("transport.any-client") {
			auth = tls.NoClientCert
		}
		return &tls.Config{
			MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{m.cert}, ClientCAs: m.roots, ClientAuth: auth,
			NextProtos: []string{"http/1.1"}, // the faster one for the large calls between brokers
		}, nil
	}}
}

// Mutual reports whether there is a CA file, which calls between brokers need.
func (s *Source) Mutual() bool { return s.files.CA != "" }

func (s *Source) mustBeMutual() {
	if !s.Mutual() {
		panic("transport: mutual TLS without a CA file")
	}
}

// Client is the configuration to call a server of this name with, as the files are now: it shows the certificate, and verifies the server's
// against the authorities and the name, a host name or IP address. A copy that is kept does not learn of new authorities: Dial does.
// It panics without a CA file.
func (s *Source) Client(serverName string) *tls.Config {
	s.mustBeMutual()
	return &tls.Config{
		MinVersion: tls.VersionTLS12, RootCAs: s.now.Load().roots, ServerName: serverName,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &s.now.Load().cert, nil },
	}
}

// Dial connects to host:port and shakes hands, with the files of the moment. A peer that speaks no TLS, or that the authorities have not
// signed, is an error that says so in one line. Its signature is that of http.Transport.DialTLSContext.
func (s *Source) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, fmt.Errorf("address %q: %w", addr, storage.ErrInvalid)
	}
	ctx, cancel := context.WithTimeout(ctx, handshakeTimeout)
	defer cancel()
	raw, err := (&net.Dialer{KeepAlive: 5 * time.Second}).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	cfg := s.Client(host)
	cfg.NextProtos = []string{"http/1.1"}
	c := tls.Client(raw, cfg)
	if err := c.HandshakeContext(ctx); err != nil {
		return nil, errors.Join(explain(addr, err), raw.Close())
	}
	return c, nil
}

// explain says in our words what a handshake failed of.
func explain(addr string, err error) error {
	var plain tls.RecordHeaderError
	var unknown x509.UnknownAuthorityError
	var name x509.HostnameError
	switch {
	case errors.As(err, &plain):
		return fmt.Errorf("%s answers without TLS: give it the TLS files, or call it without: %w: %w", addr, storage.ErrUnavailable, err)
	case errors.As(err, &unknown):
		return fmt.Errorf("%s shows a certificate that our authorities have not signed: %w: %w", addr, storage.ErrUnavailable, err)
	case errors.As(err, &name):
		return fmt.Errorf("%s shows a certificate for another name: %w: %w", addr, storage.ErrUnavailable, err)
	}
	return fmt.Errorf("TLS handshake with %s: %w: %w", addr, storage.ErrUnavailable, err)
}

// Transport returns an HTTP transport for calls between brokers, over Dial. The caller may set its other fields. It panics without a CA file.
func (s *Source) Transport() *http.Transport {
	s.mustBeMutual()
	return &http.Transport{DialTLSContext: s.Dial, TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12}}
}

// read reads a whole file, bounded.
func read(what, path string) (b []byte, err error) {
	fail := func(fault, advice string, cause error) ([]byte, error) {
		return nil, &FileError{What: what, Path: path, Fault: fault, Advice: advice, Cause: cause}
	}
	if path == "" {
		return fail("none is named", "name one", nil)
	}
	f, err := os.Open(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return fail("there is none", "make it, or correct the path", err)
	case errors.Is(err, os.ErrPermission):
		return fail("it may not be read", "let the broker's user read it", err)
	case err != nil:
		return fail("it can't be opened", "see the cause: "+err.Error(), err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	b, err = io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err != nil {
		return fail("it can't be read", "see the cause: "+err.Error(), err)
	}
	if len(b) > maxFileBytes {
		return fail(fmt.Sprintf("it is larger than %d bytes", maxFileBytes), "name the right file", storage.ErrTooLarge)
	}
	return b, nil
}

func hasBlock(b []byte, kind string) bool {
	for p, rest := pem.Decode(b); p != nil; p, rest = pem.Decode(rest) {
		if p.Type == kind {
			return true
		}
	}
	return false
}

// stamps are how files looked at one time; nil for one that is not there.
type stamps []os.FileInfo

func look(paths ...string) stamps {
	out := make(stamps, len(paths))
	for i, p := range paths {
		if info, err := os.Stat(p); err == nil {
			out[i] = info
		}
	}
	return out
}

func (s stamps) same(o stamps) bool {
	for i := range s {
		if (s[i] == nil) != (o[i] == nil) {
			return false
		}
		if s[i] != nil && (!os.SameFile(s[i], o[i]) || s[i].Size() != o[i].Size() || !s[i].ModTime().Equal(o[i].ModTime())) {
			return false
		}
	}
	return true
}

// equalKeys reports whether two rings are the same.
func equalKeys(a, b [][]byte) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if !bytes.Equal(a[i], b[i]) {
			return false
		}
	}
	return true
}
