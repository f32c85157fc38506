// Package client is Malachi's Go SDK: it writes records to topics and reads them back by opaque cursor.
//
// A Client is made once and shared: all methods may be called from any goroutine. It owns its connections and, while it has
// something to send, one goroutine per busy lane; Close ends them all. Nothing is kept across a crash of the program: a record is
// safe when its result says so, not before.
//
// # Writing
//
// Produce waits for the result, ProduceAsync hands it to a function. Records are batched per lane. A lane is a stream of its own,
// with a random producer id and rising sequences, for one part of the keyspace, and has one batch in flight: so the records of a
// key are written in the order they were given to the client, also over retries. While a batch is in flight the next one fills
// (natural batching); Linger adds a wait on top. What may be retried is retried inside, with the same content and sequence, until
// DeliveryTimeout.
//
// Delivery is at least once: an error for which errors.Is(err, ErrOutcomeUnknown) holds means that the record may be in the log.
//
// # Reading
//
// Consume gives a Consumer, whose Records is an iterator and whose Cursor is the place after the last record yielded.
package client

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"
	"connectrpc.com/connect/v2/connectproto"
	"golang.org/x/sync/semaphore"

	"github.com/malachilog/malachi/gen/go/malachi/v1/malachiv1connect"
	"github.com/malachilog/malachi/services/rpc/codec"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
)

// Compressions for Config.Compression.
const (
	CompressionNone = "none"
	CompressionS2   = "s2"
	CompressionZstd = "zstd"
)

const (
	maxLanes      = 64
	maxBatchBytes = 7 << 20 // a request holds storage.MaxRequestBytes, and cutting a batch may lengthen it
	entryCost     = 64      // what a waiting record costs beside its bytes, for the buffer's bound
)

// Config is what New needs. Only Servers has no default.
type Config struct {
	// Servers are base URLs of brokers, like "http://127.0.0.1:4040". Any broker takes any call; lanes are spread over them, and
	// one that does not answer is left for the next.
	Servers []string
	// Lanes is the number of streams per topic for records with a key, and again as many for those without: at most 64. 0 means
	// 4. It is rounded up to a power of two, and raised to what aligns lanes with the topic's ranges when the topic is first
	// used.
	Lanes int
	// Linger is how long a batch waits for more records after its first. 0: it goes at once if its lane is idle, and collects
	// while another is in flight.
	Linger time.Duration
	// MaxBatchRecords ends a batch; 1 to 65536; 0 means 8192.
	MaxBatchRecords int
	// MaxBatchBytes ends a batch, in bytes before compression; 1 KiB to 7 MiB; 0 means 1 MiB. A single record may be larger.
	MaxBatchBytes int
	// Compression is "none", "s2" or "zstd"; empty means s2: it costs less time than the bytes it saves on disk, network and
	// bucket. A batch that does not shrink is sent as it is.
	Compression string
	// MaxBufferedBytes bounds the records that wait or are in flight, in bytes with 64 per record on top; at least 2 MiB; 0 means
	// 64 MiB. At the bound Produce and ProduceAsync block until there is room or their context ends.
	MaxBufferedBytes int
	// MaxBufferedRecords bounds the same in records; 0 means 1,000,000.
	MaxBufferedRecords int
	// RequestTimeout bounds one attempt of one call (a long poll: beyond its wait). 0 means 10 s.
	RequestTimeout time.Duration
	// DeliveryTimeout bounds all attempts for one batch from the first on, and how long a consumer gets no answer before it
	// fails. 0 means 2 min.
	DeliveryTimeout time.Duration
	// MinBackoff and MaxBackoff bound the wait between attempts, which doubles and is jittered. 0 means 20 ms and 2 s. A server
	// that names a delay is obeyed.
	MinBackoff time.Duration
	MaxBackoff time.Duration
	// HTTPClient replaces the client's own, for TLS, proxies or tests; its Timeout must be 0 or above RequestTimeout plus the
	// longest poll. Nil means one over HTTP/1.1 with a keep-alive connection per busy lane. Close does not close the connections
	// of a foreign one.
	HTTPClient *http.Client
}

func (c Config) withDefaults() Config {
	def := func(p *int, v int) {
		if *p == 0 {
			*p = v
		}
	}
	wait := func(p *time.Duration, v time.Duration) {
		if *p == 0 {
			*p = v
		}
	}
	def(&c.Lanes, 4)
	def(&c.MaxBatchRecords, 8192)
	def(&c.MaxBatchBytes, 1<<20)
	def(&c.MaxBufferedBytes, 64<<20)
	def(&c.MaxBufferedRecords, 1_000_000)
	wait(&c.RequestTimeout, 10*time.Second)
	wait(&c.DeliveryTimeout, 2*time.Minute)
	wait(&c.MinBackoff, 20*time.Millisecond)
	wait(&c.MaxBackoff, max(2*time.Second, c.MinBackoff))
	if c.Compression == "" {
		c.Compression = CompressionS2
	}
	return c
}

// Validate reports every fault at once, joined; each wraps storage.ErrInvalid. Zero values stand for their defaults.
func (c Config) Validate() error {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf(format+": %w", append(args, storage.ErrInvalid)...))
	}
	if len(c.Servers) == 0 {
		bad("client config: Servers is empty")
	}
	for _, s := range c.Servers {
		u, err := url.Parse(s)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" {
			bad("client config: server %.200q: want http://host:port or https://host:port", s)
		}
	}
	d := c.withDefaults()
	within := func(name string, v, low, high int) {
		if v < low || v > high {
			bad("client config: %s is %d, want %d to %d", name, v, low, high)
		}
	}
	within("Lanes", d.Lanes, 1, maxLanes)
	within("MaxBatchRecords", d.MaxBatchRecords, 1, storage.MaxBatchRecords)
	within("MaxBatchBytes", d.MaxBatchBytes, 1<<10, maxBatchBytes)
	within("MaxBufferedBytes", d.MaxBufferedBytes, 2*storage.MaxRecordBytes, 1<<40)
	within("MaxBufferedRecords", d.MaxBufferedRecords, 1, 1<<30)
	if _, err := batch.ParseCodec(d.Compression); err != nil {
		bad("client config: Compression is %.40q, want none, s2 or zstd", c.Compression)
	}
	for name, v := range map[string]time.Duration{
		"Linger": c.Linger, "RequestTimeout": c.RequestTimeout, "DeliveryTimeout": c.DeliveryTimeout,
		"MinBackoff": c.MinBackoff, "MaxBackoff": c.MaxBackoff,
	} {
		if v < 0 {
			bad("client config: %s is negative", name)
		}
	}
	if d.MinBackoff > d.MaxBackoff {
		bad("client config: MinBackoff %s is above MaxBackoff %s", d.MinBackoff, d.MaxBackoff)
	}
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(errs...)
}

// server is one broker's services.
type server struct {
	produce malachiv1connect.ProduceServiceClient
	fetch   malachiv1connect.FetchServiceClient
	admin   malachiv1connect.AdminServiceClient
}

// Client talks to one cluster. See the package comment.
type Client struct {
	cfg     Config
	codec   batch.Codec
	servers atomic.Pointer[[]*server] // those of the configuration, then those that brokers have named
	// at is the server that calls begin with; whoever finds it dead moves it on.
	at atomic.Uint32
	// start runs a lane until it has nothing to send; its context ends when Close gives up.
	start func(run func(context.Context))
	abort context.CancelFunc
	lanes sync.WaitGroup
	close func() // of idle connections

	bytes   *semaphore.Weighted
	records *semaphore.Weighted
	bufs    sync.Pool // *pending
	closed  atomic.Bool

	dial func(base string) server

	mu     sync.Mutex
	topics map[string]*topic
	others map[string]*server // all of servers, by base URL
}

// New makes a client. It does no I/O: whether the servers answer shows at the first call.
func New(cfg Config) (*Client, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	cfg.Servers = slices.Clone(cfg.Servers)
	compression, err := batch.ParseCodec(cfg.Compression)
	if err != nil {
		return nil, err
	}
	ctx, abort := context.WithCancel(context.Background())
	c := &Client{
		cfg: cfg, codec: compression, abort: abort, close: func() {}, topics: map[string]*topic{}, others: map[string]*server{},
		bytes: semaphore.NewWeighted(int64(cfg.MaxBufferedBytes)), records: semaphore.NewWeighted(int64(cfg.MaxBufferedRecords)),
		bufs: sync.Pool{New: func() any { return new(pending) }},
	}
	c.start = func(run func(context.Context)) { c.lanes.Go(func() { run(ctx) }) }
	hc := cfg.HTTPClient
	if hc == nil {
		t := ownTransport()
		hc, c.close = &http.Client{Transport: t}, t.CloseIdleConnections
	}
	options := []connecthttp.Option{
		connecthttp.WithCodecs(codec.New(), connectproto.NewJSONCodec()),
		connecthttp.WithCompressors(), // payloads are compressed already, or not worth it
		connecthttp.WithReadMaxBytes(2*storage.MaxBatchBytes + 1<<20),
	}
	c.dial = func(base string) server {
		conn := connect.NewClient(connecthttp.NewTransport(hc, strings.TrimRight(base, "/"), options...))
		return server{
			produce: malachiv1connect.NewProduceServiceClient(conn),
			fetch:   malachiv1connect.NewFetchServiceClient(conn),
			admin:   malachiv1connect.NewAdminServiceClient(conn),
		}
	}
	var all []*server
	for _, base := range cfg.Servers {
		s := c.dial(base)
		all = append(all, &s)
		c.others[strings.TrimRight(base, "/")] = &s
	}
	c.servers.Store(&all)
	return c, nil
}

// maxNamed bounds the servers that brokers have named.
const maxNamed = 256

// named gives the server of a base URL that a broker has told of, or nil if it is none.
func (c *Client) named(base string) *server {
	if !strings.HasPrefix(base, "http://") && !strings.HasPrefix(base, "https://") {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.others[base]
	if s == nil && len(c.others) < maxNamed {
		d := c.dial(base)
		s = &d
		c.others[base] = s
		all := append(slices.Clone(*c.servers.Load()), s) // if those of the configuration are gone, there is this one
		c.servers.Store(&all)
	}
	return s
}

// ownTransport speaks HTTP/1.1 only: for unary calls with large bodies it is about twice as fast as HTTP/2.
func ownTransport() *http.Transport {
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.Protocols = new(http.Protocols)
	t.Protocols.SetHTTP1(true)
	t.ForceAttemptHTTP2 = false
	t.DisableCompression = true
	t.MaxIdleConns = 0
	t.MaxIdleConnsPerHost = 4 * maxLanes // a busy lane has one connection; fewer idle ones would be closed and dialled for ever
	t.ReadBufferSize, t.WriteBufferSize = 64<<10, 64<<10
	return t
}

// Admin is the generated client for topics, segments and the cluster, on the server that calls begin with now. Its errors are
// Connect's; AsError makes them the SDK's.
func (c *Client) Admin() malachiv1connect.AdminServiceClient { return c.server(0).admin }

// server gives the server that the n-th lane begins with.
func (c *Client) server(n uint32) *server {
	all := *c.servers.Load()
	return all[(uint64(c.at.Load())+uint64(n))%uint64(len(all))]
}

// moveOn makes calls begin with another server than the one that at named.
func (c *Client) moveOn(at uint32) {
	if len(*c.servers.Load()) > 1 {
		c.at.CompareAndSwap(at, at+1)
	}
}

// Flush sends what lingers and returns when every record given to the client before has its result, or ctx ends. Results, bad
// ones too, go to whoever produced the records; Flush only waits. Error: ctx's.
func (c *Client) Flush(ctx context.Context) error {
	var waits []<-chan struct{}
	c.mu.Lock()
	for _, t := range c.topics {
		waits = append(waits, t.flush()...)
	}
	c.mu.Unlock()
	for _, done := range waits {
		select {
		case <-done:
		case <-ctx.Done():
			return fmt.Errorf("flush: %w", context.Cause(ctx))
		}
	}
	return nil
}

// Close flushes, then ends every goroutine and connection of the client. New records are refused with ErrClosed from its
// beginning on. If ctx ends first, what is still there fails with ErrClosed (and ErrOutcomeUnknown where it had been sent), and
// Close returns ctx's error; the goroutines have ended in any case. A second Close waits for nothing new and returns nil.
func (c *Client) Close(ctx context.Context) error {
	c.closed.Store(true)
	err := c.Flush(ctx)
	c.abort()
	c.lanes.Wait() // no lane starts any more: flush took every lane's lock after closed was set
	c.close()
	return err
}

// topicFor finds or opens the topic's lanes. Opening asks for its routes once.
func (c *Client) topicFor(ctx context.Context, name string) (*topic, error) {
	for {
		c.mu.Lock()
		t := c.topics[name]
		if t == nil {
			if c.closed.Load() {
				c.mu.Unlock()
				return nil, ErrClosed
			}
			t = &topic{client: c, name: name, ready: make(chan struct{})}
			c.topics[name] = t
			c.mu.Unlock()
			t.err = t.open(ctx)
			if t.err != nil {
				c.mu.Lock()
				delete(c.topics, name)
				c.mu.Unlock()
			}
			close(t.ready)
			return t, t.err
		}
		c.mu.Unlock()
		select {
		case <-t.ready:
		default:
			select {
			case <-t.ready:
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
		}
		if t.err == nil {
			return t, nil
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if !errors.Is(t.err, context.Canceled) && !errors.Is(t.err, context.DeadlineExceeded) {
			return nil, t.err
		}
		// Only the other caller's patience ended: try in its place.
	}
}
