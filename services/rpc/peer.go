package rpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"runtime/debug"
	"sync"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"
	"connectrpc.com/connect/v2/connectproto"

	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/services/rpc/codec"
	"github.com/malachilog/malachi/storage"
)

// ErrHolderFailed: the copy that was to be read from could not ship verified batches up to the end that it claims.
var ErrHolderFailed = errors.New("the holder cannot ship what it claims")

// refusals gives each error of the vocabulary that brokers tell each other its number, the more telling ones first.
var refusals = []struct {
	err     error
	refusal intrav1.Refusal
	code    connect.Code
}{
	{ErrHolderFailed, intrav1.Refusal_REFUSAL_HOLDER_FAILED, connect.CodeFailedPrecondition},
	{storage.ErrStorageFailed, intrav1.Refusal_REFUSAL_STORAGE_FAILED, connect.CodeFailedPrecondition},
	{storage.ErrDiskFull, intrav1.Refusal_REFUSAL_DISK_FULL, connect.CodeResourceExhausted},
	{storage.ErrOverloaded, intrav1.Refusal_REFUSAL_OVERLOADED, connect.CodeResourceExhausted},
	{storage.ErrFenced, intrav1.Refusal_REFUSAL_FENCED, connect.CodeFailedPrecondition},
	{storage.ErrSealed, intrav1.Refusal_REFUSAL_SEALED, connect.CodeFailedPrecondition},
	{storage.ErrGap, intrav1.Refusal_REFUSAL_GAP, connect.CodeOutOfRange},
	{storage.ErrStaleBoot, intrav1.Refusal_REFUSAL_STALE_BOOT, connect.CodeFailedPrecondition},
	{storage.ErrStaleRoute, intrav1.Refusal_REFUSAL_STALE_ROUTE, connect.CodeFailedPrecondition},
	{storage.ErrUnknownSegment, intrav1.Refusal_REFUSAL_UNKNOWN_SEGMENT, connect.CodeNotFound},
	{storage.ErrTopicNotFound, intrav1.Refusal_REFUSAL_TOPIC_NOT_FOUND, connect.CodeNotFound},
	{storage.ErrDamaged, intrav1.Refusal_REFUSAL_DAMAGED, connect.CodeDataLoss},
	{storage.ErrCorrupt, intrav1.Refusal_REFUSAL_CORRUPT, connect.CodeDataLoss},
	{storage.ErrConflict, intrav1.Refusal_REFUSAL_CONFLICT, connect.CodeFailedPrecondition},
	{storage.ErrTooLarge, intrav1.Refusal_REFUSAL_TOO_LARGE, connect.CodeInvalidArgument},
	{storage.ErrInvalid, intrav1.Refusal_REFUSAL_INVALID, connect.CodeInvalidArgument},
	{storage.ErrBeyondEnd, intrav1.Refusal_REFUSAL_BEYOND_END, connect.CodeOutOfRange},
	{storage.ErrClosed, intrav1.Refusal_REFUSAL_CLOSED, connect.CodeUnavailable},
	{storage.ErrUnavailable, intrav1.Refusal_REFUSAL_UNAVAILABLE, connect.CodeUnavailable},
}

// RefusalOf is the number of an error of the vocabulary; REFUSAL_UNAVAILABLE for any other.
func RefusalOf(err error) intrav1.Refusal {
	for _, r := range refusals {
		if errors.Is(err, r.err) {
			return r.refusal
		}
	}
	return intrav1.Refusal_REFUSAL_UNAVAILABLE
}

// PeerError is what one broker tells another of an error; nil for none.
func PeerError(err error) *intrav1.PeerError {
	if err == nil {
		return nil
	}
	return &intrav1.PeerError{Refusal: RefusalOf(err), Text: err.Error(), OutcomeUnknown: errors.Is(err, storage.ErrOutcomeUnknown)}
}

// FromPeer is the error that PeerError told of, with the sentinels it had; nil for none.
func FromPeer(broker storage.BrokerID, e *intrav1.PeerError) error {
	if e == nil {
		return nil
	}
	err := Refused(e.GetRefusal())
	if e.GetOutcomeUnknown() {
		err = fmt.Errorf("%w: %w", storage.ErrOutcomeUnknown, err)
	}
	return fmt.Errorf("broker %s: %.300s: %w", broker, e.GetText(), err)
}

// Refused is the sentinel of a number; storage.ErrUnavailable for one that this build does not know.
func Refused(n intrav1.Refusal) error {
	for _, r := range refusals {
		if r.refusal == n {
			return r.err
		}
	}
	return storage.ErrUnavailable
}

// PeerCallError turns what a call to another broker failed with into the vocabulary: the error that the broker told of, or
// storage.ErrUnavailable. Whether the call was carried out is not known then: callers that need it say storage.ErrOutcomeUnknown themselves.
func PeerCallError(ctx context.Context, broker storage.BrokerID, err error) error {
	if err == nil {
		return nil
	}
	var ce *connect.Error
	if errors.As(err, &ce) {
		for _, d := range ce.Details() {
			if m, derr := connectproto.UnmarshalErrorDetail(d); derr == nil {
				if told, ok := m.(*intrav1.PeerError); ok {
					return FromPeer(broker, told)
				}
			}
		}
	}
	if cerr := ctx.Err(); cerr != nil {
		return fmt.Errorf("broker %s does not answer: %w: %w", broker, storage.ErrUnavailable, cerr)
	}
	// As text: whoever asked this broker must not take the other one's Connect error for this one's own.
	return fmt.Errorf("broker %s does not answer: %w: %s", broker, storage.ErrUnavailable, err.Error())
}

// PeerHandler serves broker-to-broker calls: register the services on the server that it hands to register.
func PeerHandler(log *slog.Logger, register func(*connect.Server)) http.Handler {
	server := connect.NewServer(func(next connect.ServerFunc) connect.ServerFunc {
		return func(ctx context.Context, spec connect.Spec, stream connect.ServerStream) (err error) {
			defer func() {
				if r := recover(); r != nil {
					if r == http.ErrAbortHandler {
						panic(r)
					}
					log.Error("panic in a call of another broker", "procedure", spec.Procedure, "panic", fmt.Sprint(r), "stack", string(debug.Stack()))
					err = fmt.Errorf("panic in %s: %w", spec.Procedure, storage.ErrUnavailable)
				}
				err = peerWire(err)
			}()
			return next(ctx, spec, stream)
		}
	})
	register(server)
	mux := http.NewServeMux()
	connecthttp.Mount(mux, server, connecthttp.WithCodecs(codec.New()), connecthttp.WithCompressors(),
		connecthttp.WithReadMaxBytes(2*storage.MaxBatchBytes))
	return mux
}

// peerWire makes the Connect error of any error; Connect's own stay as they are.
func peerWire(err error) error {
	var ce *connect.Error
	if err == nil || errors.As(err, &ce) && !ce.IsRemote() {
		return err
	}
	code := connect.CodeUnavailable
	for _, r := range refusals {
		if errors.Is(err, r.err) {
			code = r.code
			break
		}
	}
	out := connect.NewError(code, err.Error()).WithCause(err)
	if detail, derr := connectproto.NewErrorDetail(PeerError(err)); derr == nil {
		out = out.WithDetail(detail)
	}
	return out
}

// Peers dials other brokers. Safe for concurrent use. A broker's address is asked for at every call, so it may change at any time.
type Peers struct {
	// Address returns host:port of a broker's peer port, if known. It must not block.
	address func(storage.BrokerID) (string, bool)
	scheme  string
	http    *http.Client

	mu      sync.Mutex
	clients map[string]*connect.Client // by address
}

// NewPeers returns a dialer. secure nil: plaintext.
func NewPeers(address func(storage.BrokerID) (string, bool), secure *http.Transport) *Peers {
	scheme, t := "https", secure
	if t == nil {
		scheme, t = "http", &http.Transport{}
	}
	t.Protocols = new(http.Protocols)
	t.Protocols.SetHTTP1(true) // for unary calls with large bodies about twice as fast as HTTP/2
	t.DisableCompression = true
	t.MaxIdleConnsPerHost = 64
	t.IdleConnTimeout = time.Minute
	t.ReadBufferSize, t.WriteBufferSize = 256<<10, 256<<10
	t.DialContext = (&net.Dialer{Timeout: time.Second, KeepAlive: 5 * time.Second}).DialContext
	return &Peers{address: address, scheme: scheme, http: &http.Client{Transport: t}, clients: map[string]*connect.Client{}}
}

// Client returns the way to a broker. storage.ErrUnavailable: no address of it is known.
func (p *Peers) Client(b storage.BrokerID) (*connect.Client, error) {
	address, ok := p.address(b)
	if !ok {
		return nil, fmt.Errorf("no address of broker %s is known: %w", b, storage.ErrUnavailable)
	}
	return p.At(address), nil
}

// At returns the way to whoever listens at an address.
func (p *Peers) At(address string) *connect.Client {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.clients[address]
	if c == nil {
		c = connect.NewClient(connecthttp.NewTransport(p.http, p.scheme+"://"+address,
			connecthttp.WithCodecs(codec.New()), connecthttp.WithCompressors(), connecthttp.WithReadMaxBytes(2*storage.MaxBatchBytes)))
		p.clients[address] = c
	}
	return c
}

// Close drops idle connections.
func (p *Peers) Close() { p.http.CloseIdleConnections() }
