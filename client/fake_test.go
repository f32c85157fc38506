package client

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"
	"connectrpc.com/connect/v2/connectproto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	malachiv1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/gen/go/malachi/v1/malachiv1connect"
	"github.com/malachilog/malachi/services/rpc/codec"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
)

// fault is what the fake does with one Produce.
type fault int

const (
	fine           fault = iota
	refuse               // unavailable, nothing done
	refuseInResult       // the same, said of the batch and not of the request
	loseReply            // apply, then break the connection
	cutReply             // apply, then break the connection in the middle of the answer
	lieCount             // apply, then speak of another number of records
	noResult             // apply, then answer without a result
	invalid              // refuse for good
)

// fakeRange is one range's batches, stamped.
type fakeRange struct {
	slice   storage.Slice
	batches [][]byte
	end     uint64
	start   uint64 // below it all is trimmed
}

// fake is a broker that stores in memory, with one topic "t". It knows a (producer, sequence) again, as a later Malachi does: so
// a record stored twice means that the client changed its content or its name.
type fake struct {
	malachiv1connect.UnimplementedProduceServiceHandler
	malachiv1connect.UnimplementedFetchServiceHandler

	mu       sync.Mutex
	ranges   []*fakeRange
	seen     map[string][]byte // producer/sequence -> batch
	last     map[storage.ProducerID]uint64
	flying   map[storage.ProducerID]bool
	faults   func(n int) fault // nil: none; n counts the calls from 0
	calls    int
	fetches  int
	fetchErr func(n int) error
	hold     chan struct{} // if set, Produce waits for it before it does anything
	arrived  chan struct{} // gets one per Produce that waits
	grown    chan struct{} // closed and replaced at each append
	pageMax  int           // records of a page; 0: what was asked for
	bad      []string      // broken promises of the client
	requests []int         // records of each batch that came, in order
	atTail   func(n int) *bool
	forget   bool // store nothing: for measuring
}

func newFake(depth uint8) *fake {
	f := &fake{seen: map[string][]byte{}, last: map[storage.ProducerID]uint64{}, flying: map[storage.ProducerID]bool{},
		grown: make(chan struct{}), arrived: make(chan struct{}, 1000)}
	for i := range uint32(1) << depth {
		f.ranges = append(f.ranges, &fakeRange{slice: storage.Slice{Prefix: i, Depth: depth}})
	}
	return f
}

// set changes f's orders while it runs.
func (f *fake) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

// sent gives the records of the batches that came since the last call.
func (f *fake) sent() []int {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := f.requests
	f.requests = nil
	return out
}

// serve runs f on loopback for the length of the test; wrap may be nil.
func (f *fake) serve(t testing.TB) string {
	t.Helper()
	s := connect.NewServer()
	malachiv1connect.RegisterProduceServiceHandler(s, f)
	malachiv1connect.RegisterFetchServiceHandler(s, f)
	mux := http.NewServeMux()
	connecthttp.Mount(mux, s, connecthttp.WithCodecs(codec.New(), connectproto.NewJSONCodec()), connecthttp.WithCompressors(),
		connecthttp.WithReadMaxBytes(storage.MaxRequestBytes))
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var cut bool
		r = r.WithContext(context.WithValue(r.Context(), cutKey{}, &cut))
		rec := &bytes.Buffer{}
		mux.ServeHTTP(&cutter{ResponseWriter: w, cut: &cut, body: rec}, r)
	}))
	t.Cleanup(web.Close)
	t.Cleanup(func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		for _, s := range f.bad {
			t.Errorf("the client broke a promise: %s", s)
		}
	})
	return web.URL
}

type cutKey struct{}

// cutter writes half of the body and breaks the connection, if told to.
type cutter struct {
	http.ResponseWriter
	cut  *bool
	body *bytes.Buffer
}

func (c *cutter) Write(b []byte) (int, error) {
	if !*c.cut {
		return c.ResponseWriter.Write(b)
	}
	_, _ = c.ResponseWriter.Write(b[:len(b)/2])
	c.ResponseWriter.(http.Flusher).Flush()
	panic(http.ErrAbortHandler)
}

func detailed(code connect.Code, reason malachiv1.Reason) error {
	d, err := connectproto.NewErrorDetail(&malachiv1.ErrorDetail{Reason: reason, RetryDelay: durationpb.New(time.Millisecond),
		Metadata: map[string]string{"topic": "t"}})
	if err != nil {
		return err
	}
	return connect.NewError(code, "as told").WithDetail(d)
}

func (f *fake) Produce(ctx context.Context, r *malachiv1.ProduceRequest) (*malachiv1.ProduceResponse, error) {
	if r.Topic != "t" {
		return nil, detailed(connect.CodeNotFound, malachiv1.Reason_TOPIC_NOT_FOUND)
	}
	f.mu.Lock()
	n, hold := f.calls, f.hold
	f.calls++
	what := fine
	if f.faults != nil {
		what = f.faults(n)
	}
	f.mu.Unlock()
	if hold != nil {
		f.arrived <- struct{}{}
		select {
		case <-hold:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	switch what {
	case refuse:
		return nil, detailed(connect.CodeUnavailable, malachiv1.Reason_UNAVAILABLE)
	case invalid:
		return nil, detailed(connect.CodeInvalidArgument, malachiv1.Reason_INVALID_BATCH)
	case refuseInResult:
		return &malachiv1.ProduceResponse{Results: []*malachiv1.ProduceResult{{Error: &malachiv1.ProduceError{Code: "resource_exhausted",
			Detail: &malachiv1.ErrorDetail{Reason: malachiv1.Reason_OVERLOADED}}}}}, nil
	}
	resp := &malachiv1.ProduceResponse{}
	for i, b := range r.Batches {
		res, err := f.apply(b)
		if err != nil {
			return nil, err
		}
		res.Index = int32(i)
		resp.Results = append(resp.Results, res)
	}
	switch what {
	case loseReply:
		panic(http.ErrAbortHandler)
	case cutReply:
		*ctx.Value(cutKey{}).(*bool) = true
	case lieCount:
		resp.Results[0].RecordCount++
	case noResult:
		resp.Results = nil
	}
	return resp, nil
}

func (f *fake) apply(b []byte) (*malachiv1.ProduceResult, error) {
	h, err := batch.Check(b)
	if err != nil {
		return nil, connect.Errorf(connect.CodeInvalidArgument, "batch: %v", err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.forget {
		return &malachiv1.ProduceResult{RecordCount: int32(h.Records), AppendTime: timestamppb.Now()}, nil
	}
	complain := func(format string, args ...any) { f.bad = append(f.bad, fmt.Sprintf(format, args...)) }
	if h.Producer.IsZero() {
		complain("no producer id")
	}
	f.requests = append(f.requests, int(h.Records))
	res := &malachiv1.ProduceResult{RecordCount: int32(h.Records), AppendTime: timestamppb.Now()}
	name := fmt.Sprintf("%s/%d", h.Producer, h.Sequence)
	if before, ok := f.seen[name]; ok {
		if !bytes.Equal(before, b) {
			complain("%s was sent again with other content", name)
		}
		res.Duplicate = true
		return res, nil
	}
	if h.Sequence <= f.last[h.Producer] {
		complain("%s sends sequence %d after %d", h.Producer, h.Sequence, f.last[h.Producer])
	}
	f.last[h.Producer] = h.Sequence
	f.seen[name] = bytes.Clone(b)
	var into []storage.Slice
	for _, r := range f.ranges {
		into = append(into, r.slice)
	}
	parts, err := batch.Split(b, into)
	if err != nil {
		return nil, err
	}
	for _, p := range parts {
		r := f.ranges[slices.Index(into, p.Slice)]
		batch.Stamp(p.Data, storage.Offset(r.end), storage.Time(time.Now().UnixNano()), p.Slice)
		r.batches = append(r.batches, p.Data)
		r.end += uint64(len(p.Indexes))
	}
	close(f.grown)
	f.grown = make(chan struct{})
	return res, nil
}

func (f *fake) GetRoutes(_ context.Context, r *malachiv1.GetRoutesRequest) (*malachiv1.GetRoutesResponse, error) {
	if r.Topic != "t" {
		return nil, detailed(connect.CodeNotFound, malachiv1.Reason_TOPIC_NOT_FOUND)
	}
	resp := &malachiv1.GetRoutesResponse{}
	for _, r := range f.ranges {
		resp.Routes = append(resp.Routes, &malachiv1.Route{Slice: &malachiv1.KeySlice{Prefix: r.slice.Prefix, Depth: uint32(r.slice.Depth)}})
	}
	return resp, nil
}

// place is what the fake's cursors hold: the next offset of each range, and which range comes first.
type place struct {
	Next []uint64
	Turn int
}

func (p place) token() string {
	text, err := json.Marshal(p)
	if err != nil {
		panic(err)
	}
	return base64.RawURLEncoding.EncodeToString(text)
}

func parsePlace(s string, ranges int) (place, error) {
	var p place
	text, err := base64.RawURLEncoding.DecodeString(s)
	if err == nil {
		err = json.Unmarshal(text, &p)
	}
	if err != nil || len(p.Next) != ranges {
		return p, detailed(connect.CodeInvalidArgument, malachiv1.Reason_INVALID_CURSOR)
	}
	return p, nil
}

func (f *fake) GetCursor(_ context.Context, r *malachiv1.GetCursorRequest) (*malachiv1.GetCursorResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	p := place{Next: make([]uint64, len(f.ranges))}
	for i, fr := range f.ranges {
		switch at := r.GetStart().GetAt().(type) {
		case *malachiv1.StartPosition_Latest:
			p.Next[i] = fr.end
		case *malachiv1.StartPosition_Time:
			p.Next[i] = fr.end
			for _, b := range slices.Backward(fr.batches) {
				if h, err := batch.ParseHeader(b); err == nil && int64(h.AppendTime) >= at.Time.AsTime().UnixNano() {
					p.Next[i] = uint64(h.Base)
				}
			}
		}
	}
	return &malachiv1.GetCursorResponse{Cursor: p.token()}, nil
}

func (f *fake) Fetch(ctx context.Context, r *malachiv1.FetchRequest) (*malachiv1.FetchResponse, error) {
	f.mu.Lock()
	n := f.fetches
	f.fetches++
	fail := f.fetchErr
	f.mu.Unlock()
	if fail != nil {
		if err := fail(n); err != nil {
			return nil, err
		}
	}
	wait, cancel := context.WithTimeout(ctx, time.Duration(r.WaitMs)*time.Millisecond)
	defer cancel()
	for {
		f.mu.Lock()
		resp, err := f.pageLocked(r, n)
		grown := f.grown
		f.mu.Unlock()
		if err != nil || len(resp.Batches) > 0 || len(resp.Gaps) > 0 || r.WaitMs == 0 {
			return resp, err
		}
		select {
		case <-grown:
		case <-wait.Done():
			return resp, nil
		}
	}
}

func (f *fake) pageLocked(r *malachiv1.FetchRequest, n int) (*malachiv1.FetchResponse, error) {
	p, err := parsePlace(r.Cursor, len(f.ranges))
	if err != nil {
		return nil, err
	}
	limit := int(r.MaxRecords)
	if f.pageMax > 0 {
		limit = f.pageMax
	}
	bytes := int(r.MaxBytes)
	resp := &malachiv1.FetchResponse{}
	for i := range f.ranges {
		at := (p.Turn + i) % len(f.ranges)
		fr := f.ranges[at]
		if p.Next[at] < fr.start {
			if r.FailOnGap {
				return nil, detailed(connect.CodeDataLoss, malachiv1.Reason_DATA_TRIMMED)
			}
			skipped := fr.start - p.Next[at]
			resp.Gaps = append(resp.Gaps, &malachiv1.Gap{Kind: malachiv1.Gap_TRIMMED, Offsets: &skipped, Range: fr.slice.String()})
			p.Next[at] = fr.start
		}
		for _, b := range fr.batches {
			h, err := batch.ParseHeader(b)
			if err != nil {
				return nil, err
			}
			if uint64(h.End()) <= p.Next[at] || limit <= 0 || bytes <= 0 {
				continue
			}
			resp.Batches = append(resp.Batches, &malachiv1.RawBatch{Data: b, SkipRecords: int32(max(p.Next[at], uint64(h.Base)) - uint64(h.Base))})
			p.Next[at] = uint64(h.End())
			limit -= int(h.Records)
			bytes -= len(b)
		}
	}
	p.Turn = (p.Turn + 1) % len(f.ranges)
	resp.Cursor = p.token()
	if r.WantAtTail && len(resp.Batches) == 0 {
		tail := true
		resp.AtTail = &tail
		if f.atTail != nil {
			resp.AtTail = f.atTail(n)
		}
	}
	return resp, nil
}
