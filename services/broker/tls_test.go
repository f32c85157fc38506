package broker_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/malachilog/malachi/client"
	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/services/broker"
	"github.com/malachilog/malachi/services/transport"
)

// certificates writes an authority and one certificate that it has signed for loopback.
func certificates(t *testing.T) (files transport.Files, pool *x509.CertPool) {
	t.Helper()
	dir := t.TempDir()
	file := func(name, kind string, der []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	key := func() *ecdsa.PrivateKey {
		k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	caKey, leafKey := key(), key()
	ca := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	leaf := &x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "broker"}, NotBefore: ca.NotBefore, NotAfter: ca.NotAfter,
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"localhost"},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	caDER, err := x509.CreateCertificate(rand.Reader, ca, ca, &caKey.PublicKey, caKey)
	if err != nil {
		t.Fatal(err)
	}
	leafDER, err := x509.CreateCertificate(rand.Reader, leaf, ca, &leafKey.PublicKey, caKey)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(leafKey)
	if err != nil {
		t.Fatal(err)
	}
	root, err := x509.ParseCertificate(caDER)
	if err != nil {
		t.Fatal(err)
	}
	pool = x509.NewCertPool()
	pool.AddCert(root)
	return transport.Files{Cert: file("leaf.pem", "CERTIFICATE", leafDER), Key: file("leaf.key", "PRIVATE KEY", keyDER), CA: file("ca.pem", "CERTIFICATE", caDER)}, pool
}

// free are addresses with ports that were free a moment ago.
func free(t *testing.T, n int) (out []string) {
	t.Helper()
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = l.Close() }()
		out = append(out, l.Addr().String())
	}
	return out
}

// logs collects what brokers say.
type logs struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logs) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(b)
}

func (l *logs) has(text string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.buf.String(), text)
}

// secured founds a cluster of three brokers with the given security.
func secured(t *testing.T, files transport.Files, keys string, said *logs) (brokers []*broker.Broker, rpc []string) {
	t.Helper()
	ports := free(t, 15)
	rpc = []string{ports[2], ports[7], ports[12]}
	log := slog.New(slog.NewTextHandler(said, nil))
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })
	opened := make(chan *broker.Broker, 3)
	for i := range 3 {
		p := ports[5*i:]
		cfg := config(t.TempDir())
		cfg.Bootstrap, cfg.BootstrapExpect, cfg.Founders, cfg.Join = false, 3, rpc, rpc
		cfg.API, cfg.Ops, cfg.RPC, cfg.Raft, cfg.Gossip = p[0], p[1], p[2], p[3], p[4]
		cfg.TLS, cfg.GossipKeys, cfg.DrainGrace = files, keys, time.Second
		running.Go(func() {
			b, err := broker.Open(ctx, cfg, log)
			opened <- b
			if err != nil {
				t.Errorf("open: %v", err)
				return
			}
			if err := b.Run(ctx); err != nil {
				t.Errorf("run: %v", err)
			}
		})
	}
	for range 3 {
		if b := <-opened; b != nil {
			brokers = append(brokers, b)
		}
	}
	if len(brokers) != 3 {
		t.Fatal("not all brokers opened")
	}
	return brokers, rpc
}

// TestClusterOverTLS: three brokers with certificates and gossip keys found a cluster and take records; who comes without is told so and refused,
// at the ports for clients and at those for brokers.
func TestClusterOverTLS(t *testing.T) {
	files, pool := certificates(t)
	keys := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(keys, []byte(base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{7}, 32))+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	said := &logs{}
	brokers, rpc := secured(t, files, keys, said)
	hc := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}}
	var servers []string
	for _, b := range brokers {
		servers = append(servers, "https://"+b.APIAddr())
	}
	c, err := client.New(client.Config{Servers: servers, HTTPClient: hc})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := c.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	}()
	if _, err := c.Admin().CreateTopic(t.Context(), &v1.CreateTopicRequest{Name: "t", InitialRanges: 4}); err != nil {
		t.Fatal(err)
	}
	for i := range 40 {
		if err := c.Produce(t.Context(), "t", client.Record{Key: fmt.Append(nil, i), Value: []byte("x")}); err != nil {
			t.Fatal(err)
		}
	}
	consumer, err := c.Consume("t", client.ConsumeConfig{ExitAtEnd: true})
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, err := range consumer.Records(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		n++
	}
	if n != 40 {
		t.Errorf("read %d records of 40", n)
	}

	// Without TLS: refused, and told in one line.
	if res, err := http.Get("http://" + brokers[0].APIAddr() + "/"); err == nil {
		_ = res.Body.Close()
		if res.StatusCode != http.StatusBadRequest {
			t.Errorf("a plaintext client is answered %s", res.Status)
		}
	}
	if !said.has("without TLS") && !said.has("plaintext") && !said.has("no TLS") {
		t.Error("nobody is told of a plaintext client")
	}
	// A client without a certificate at a port for brokers.
	conn, err := tls.Dial("tcp", rpc[0], &tls.Config{RootCAs: pool})
	if err == nil {
		_, err = conn.Read(make([]byte, 1))
		_ = conn.Close()
	}
	if err == nil {
		t.Error("a caller without a certificate is taken for a broker")
	}
}
