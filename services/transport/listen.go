package transport

import (
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/malachilog/malachi/storage"
)

// handshakeByte is how a TLS connection begins; no HTTP request does.
const handshakeByte = 0x16

// strangerEvery is how often a listener tells of peers that speak the wrong way.
const strangerEvery = time.Minute

// Watch wraps a listener, underneath TLS if it has any, so that a peer without TLS at a TLS port, or with TLS at a plain one, is told of in
// one clear line a minute. It changes no byte: whoever reads refuses the peer as before. name is what the port is called in the line.
func Watch(l net.Listener, name string, tls bool, deps Deps) net.Listener {
	return &watched{Listener: l, name: name, tls: tls, deps: deps.withDefaults()}
}

type watched struct {
	net.Listener
	name string
	tls  bool
	deps Deps

	mu      sync.Mutex
	told    time.Time
	untold  int
	hasTold bool
}

// Accept implements net.Listener.
func (l *watched) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &watchedConn{Conn: c, of: l}, nil
}

type watchedConn struct {
	net.Conn
	of    *watched
	begun atomic.Bool
}

// Read implements net.Conn.
func (c *watchedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 && !c.begun.Load() && c.begun.CompareAndSwap(false, true) && (b[0] == handshakeByte) != c.of.tls {
		c.of.stranger(c.RemoteAddr().String())
	}
	return n, err
}

func (l *watched) stranger(peer string) {
	now := l.deps.Now()
	l.mu.Lock()
	if l.hasTold && now.Sub(l.told) < strangerEvery {
		l.untold++
		l.mu.Unlock()
		return
	}
	more := l.untold
	l.told, l.untold, l.hasTold = now, 0, true
	l.mu.Unlock()
	text := "a peer without TLS called a TLS port and is refused: give it the TLS files, or the right address"
	if !l.tls {
		text = "a peer with TLS called a port without TLS and is refused: give this broker the TLS files, or the peer the right address"
	}
	l.deps.Logger.Warn(text, slog.String("port", l.name), slog.String("address", l.Addr().String()), slog.String("peer", peer), slog.Int("more_before", more))
}

// RequireSecure refuses to listen at an address that other machines can reach without transport security, unless insecure says that it is
// meant. The error, storage.ErrInvalid, is one line that says what to do.
func RequireSecure(addr string, secure, insecure bool) error {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return fmt.Errorf("address %q: want host:port: %w", addr, storage.ErrInvalid)
	}
	if secure || insecure || IsLoopback(host) {
		return nil
	}
	return fmt.Errorf("%s can be reached from other machines and has no transport security: give it files of certificate, key and authorities"+
		" (for gossip: of keys), listen on 127.0.0.1, or say insecure: true: %w", addr, storage.ErrInvalid)
}

// IsLoopback reports whether a host, as written in an address, is this machine alone. A name other than localhost is not: it may come to
// mean anything.
func IsLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
