package broker

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync/atomic"
	"syscall"
	"time"

	"connectrpc.com/connect/v2"

	"github.com/malachilog/malachi/gen/go/malachi/intra/v1/intrav1connect"
	"github.com/malachilog/malachi/services/coordinator"
	"github.com/malachilog/malachi/services/replica"
	"github.com/malachilog/malachi/services/rpc"
	"github.com/malachilog/malachi/services/transport"
)

// ErrPortInUse: another process listens there.
var ErrPortInUse = errors.New("port in use")

// network is what a broker listens on and calls others with.
type network struct {
	cfg    Config
	source *transport.Source // nil without TLS
	keys   *transport.KeyFile
	// Listeners, of bare TCP.
	api, ops, rpc net.Listener
	raft, gossip  string // addresses for libraries that listen for themselves
	peers         *rpc.Peers
	peerServer    *http.Server
	peerHandler   atomic.Pointer[http.Handler]
}

// open takes the ports: one in use must not cost a boot.
func (n *network) open(deps transport.Deps) (err error) {
	if n.cfg.Insecure {
		deps.Logger.Warn("insecure: true: ports beyond loopback may be served without transport security")
	}
	if n.cfg.TLS.Cert != "" {
		if n.source, err = transport.Open(n.cfg.TLS, deps); err != nil {
			return err
		}
	}
	if n.cfg.GossipKeys != "" {
		if n.keys, err = transport.OpenKeys(n.cfg.GossipKeys, deps); err != nil {
			return err
		}
	}
	for _, l := range []struct {
		to         *net.Listener
		name, addr string
	}{{&n.api, "api", n.cfg.API}, {&n.ops, "ops", n.cfg.Ops}, {&n.rpc, "rpc", n.cfg.RPC}} {
		if *l.to, err = listen(l.name, l.addr); err != nil {
			return err
		}
	}
	for _, l := range []struct {
		to         *string
		name, addr string
	}{{&n.raft, "raft", n.cfg.Raft}, {&n.gossip, "gossip", n.cfg.Gossip}} {
		probe, err := listen(l.name, l.addr) // the libraries listen for themselves, later; this is to find out, and to know the port
		if err != nil {
			return err
		}
		*l.to = probe.Addr().String()
		if err := probe.Close(); err != nil {
			return fmt.Errorf("listen for %s: %w", l.name, err)
		}
	}
	return nil
}

func listen(name, addr string) (net.Listener, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil && !errors.Is(err, syscall.EADDRINUSE) {
		err = fmt.Errorf("listen for %s: %w", name, err)
	}
	return l, portError(name, addr, err)
}

// portError says in plain words that a port is in use.
func portError(name, addr string, err error) error {
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("%s %s: %w: another process listens there; choose another address for %s", name, addr, ErrPortInUse, name)
	}
	return err
}

// mutual reports whether brokers show each other certificates.
func (n *network) mutual() bool { return n.source != nil && n.source.Mutual() }

// advertised is a listener's address as others reach it.
func (n *network) advertised(addr string) string {
	if n.cfg.Advertise == "" {
		return addr
	}
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return addr
	}
	return net.JoinHostPort(n.cfg.Advertise, port)
}

// public wraps a listener for clients.
func (n *network) public(l net.Listener, name string, deps transport.Deps) net.Listener {
	l = transport.Watch(l, name, n.source != nil, deps)
	if n.source == nil {
		return l
	}
	return tls.NewListener(l, n.source.Server())
}

// between wraps the listener for other brokers.
func (n *network) between(deps transport.Deps) net.Listener {
	l := transport.Watch(n.rpc, "rpc", n.mutual(), deps)
	if !n.mutual() {
		return l
	}
	return tls.NewListener(l, n.source.MutualServer())
}

// scheme of the public ports.
func (n *network) scheme() string {
	if n.source != nil {
		return "https"
	}
	return "http"
}

// servePeers begins to answer other brokers: who this is, and nothing else until it is registered.
func (n *network) servePeers(b *Broker) func() error {
	n.answer(rpc.PeerHandler(b.log, func(s *connect.Server) { intrav1connect.RegisterClusterServiceHandler(s, b.founding) }))
	n.peerServer = &http.Server{
		Handler:           http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { (*n.peerHandler.Load()).ServeHTTP(w, r) }),
		ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 5 * time.Minute, ErrorLog: quietLog(b.log),
	}
	l := n.between(b.transportDeps())
	return func() error {
		if err := n.peerServer.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serve rpc: %w", err)
		}
		return nil
	}
}

func (n *network) answer(h http.Handler) { n.peerHandler.Store(&h) }

// registered lets the other brokers reach replicas and coordinator: not before root has accepted this boot.
func (n *network) registered(b *Broker) {
	n.answer(rpc.PeerHandler(b.log, func(s *connect.Server) {
		intrav1connect.RegisterClusterServiceHandler(s, b.founding)
		intrav1connect.RegisterReplicaServiceHandler(s, replica.NewServer(b.replicas))
		intrav1connect.RegisterCoordinatorServiceHandler(s, coordinator.NewServer(b.coord))
	}))
}

func (n *network) close() (errs []error) {
	if n.peerServer != nil {
		errs = append(errs, n.peerServer.Close())
	}
	if n.peers != nil {
		n.peers.Close()
	}
	for _, l := range []net.Listener{n.api, n.ops, n.rpc} {
		if l != nil {
			if err := l.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
				errs = append(errs, err)
			}
		}
	}
	return errs
}
