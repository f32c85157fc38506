package codec

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/iotest"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"
	"connectrpc.com/connect/v2/connectproto"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	malachiv1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/gen/go/malachi/v1/malachiv1connect"
)

func messages() map[string]proto.Message {
	big := bytes.Repeat([]byte("batch"), 50_000)
	rec := &malachiv1.Record{Key: &malachiv1.Payload{Form: &malachiv1.Payload_Data{Data: []byte("k")}},
		Headers: []*malachiv1.Header{{Key: "h", Value: &malachiv1.Payload{Form: &malachiv1.Payload_Text{Text: "v"}}}}}
	page := &malachiv1.FetchResponse{
		Batches: []*malachiv1.RawBatch{{Data: []byte("one"), SkipRecords: 3}, {}, {Data: big}}, Cursor: "c",
		Gaps: []*malachiv1.Gap{{Kind: malachiv1.Gap_LOST, Offsets: proto.Uint64(4), Range: "r"}}, AtTail: proto.Bool(false),
	}
	return map[string]proto.Message{
		"empty":         &malachiv1.ProduceRequest{},
		"batches":       &malachiv1.ProduceRequest{Topic: "t", Batches: [][]byte{[]byte("one"), {}, big}},
		"records":       &malachiv1.ProduceRequest{Topic: "t", Records: []*malachiv1.Record{rec, rec}},
		"both":          &malachiv1.ProduceRequest{Topic: "t", Records: []*malachiv1.Record{rec}, Batches: [][]byte{[]byte("x")}},
		"page":          page,
		"subscribe":     &malachiv1.SubscribeResponse{Page: page, Heartbeat: true},
		"empty page":    &malachiv1.FetchResponse{Cursor: "c"},
		"no bytes":      &malachiv1.GetRoutesResponse{TopicUid: "u", Routes: []*malachiv1.Route{{Slice: &malachiv1.KeySlice{Depth: 1}}}},
		"single bytes":  wrapperspb.Bytes([]byte("v")),
		"string, bytes": &anypb.Any{TypeUrl: "type", Value: []byte("value")},
	}
}

func TestDecodesLikeTheLibrary(t *testing.T) {
	c := New()
	for name, m := range messages() {
		wire, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		unknown := protowire.AppendTag(bytes.Clone(wire), 999, protowire.BytesType)
		unknown = protowire.AppendBytes(unknown, []byte("from a later version"))
		unknown = protowire.AppendTag(unknown, 3, protowire.VarintType) // a number that is known with another type
		unknown = protowire.AppendVarint(unknown, 7)
		for what, data := range map[string][]byte{"": wire, " with unknown fields": unknown, " twice": append(bytes.Clone(wire), wire...)} {
			want, got := m.ProtoReflect().New().Interface(), m.ProtoReflect().New().Interface()
			if err := proto.Unmarshal(data, want); err != nil {
				t.Fatal(err)
			}
			for how, src := range map[string]io.Reader{
				"buffer": bytes.NewBuffer(bytes.Clone(data)), "reader": iotest.OneByteReader(bytes.NewReader(data)),
			} {
				if err := c.UnmarshalRead(t.Context(), src, got); err != nil {
					t.Fatalf("%s%s, %s: %v", name, what, how, err)
				}
				if !proto.Equal(want, got) {
					t.Errorf("%s%s, %s: got %v, want %v", name, what, how, got, want)
				}
			}
			var out bytes.Buffer
			if err := c.MarshalWrite(t.Context(), &out, got); err != nil {
				t.Fatal(err)
			}
			again := m.ProtoReflect().New().Interface()
			if err := proto.Unmarshal(out.Bytes(), again); err != nil || !proto.Equal(again, want) {
				t.Errorf("%s%s: sent as %v, %v", name, what, again, err)
			}
		}
	}
}

// Connect reuses the buffer at once; the message must not see that.
func TestMessageOutlivesTheBuffer(t *testing.T) {
	want := messages()["subscribe"]
	wire, err := proto.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	for name, ctx := range map[string]context.Context{
		"copied": t.Context(), "kept": context.WithValue(t.Context(), leaseKey{}, new(lease)),
	} {
		src := bytes.NewBuffer(bytes.Clone(wire))
		got := &malachiv1.SubscribeResponse{}
		if err := New().UnmarshalRead(ctx, src, got); err != nil {
			t.Fatal(err)
		}
		src.Reset()
		src.Write(bytes.Repeat([]byte{0xee}, len(wire)))
		if !proto.Equal(want, got) {
			t.Errorf("%s: the message changed with the buffer", name)
		}
		for _, b := range got.Page.Batches {
			_ = append(b.Data, "overrun"...)
		}
		if !proto.Equal(want, got) {
			t.Errorf("%s: appending to one field changed another", name)
		}
	}
}

func TestErrors(t *testing.T) {
	c := New()
	for name, data := range map[string][]byte{
		"cut off": {0x1a, 5, 1}, "bad tag": {0x1a, 1, 7, 0x07}, "no UTF-8": {0x0a, 1, 0xff, 0x1a, 1, 7},
		"length 2^63": append([]byte{0x1a, 1, 7, 0x1a}, protowire.AppendVarint(nil, 1<<63)...),
	} {
		if err := c.UnmarshalRead(t.Context(), bytes.NewBuffer(data), &malachiv1.ProduceRequest{}); err == nil {
			t.Errorf("%s: decoded", name)
		}
	}
	cause := errors.New("read limit")
	if err := c.UnmarshalRead(t.Context(), iotest.ErrReader(cause), &malachiv1.ProduceRequest{}); !errors.Is(err, cause) {
		t.Errorf("read error comes back as %v", err)
	}
	if err := c.UnmarshalRead(t.Context(), strings.NewReader(""), "no message"); err == nil {
		t.Error("a string was decoded into")
	}
}

func FuzzDecode(f *testing.F) {
	for _, m := range messages() {
		if _, ok := m.(*malachiv1.SubscribeResponse); ok {
			continue
		}
		wire, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(wire[:min(len(wire), 200)])
	}
	c := New()
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, m := range []proto.Message{&malachiv1.ProduceRequest{}, &malachiv1.SubscribeResponse{}} {
			want := m.ProtoReflect().New().Interface()
			wantErr := proto.Unmarshal(data, want)
			err := c.UnmarshalRead(t.Context(), bytes.NewBuffer(bytes.Clone(data)), m)
			if (err == nil) != (wantErr == nil) {
				t.Fatalf("%T: %v, the library says %v", m, err, wantErr)
			}
			if err == nil && !proto.Equal(want, m) {
				t.Fatalf("%T: %v, the library says %v", m, m, want)
			}
		}
	})
}

type sink struct {
	malachiv1connect.UnimplementedProduceServiceHandler
	produce func(context.Context, *malachiv1.ProduceRequest) error
}

func (s sink) Produce(ctx context.Context, r *malachiv1.ProduceRequest) (*malachiv1.ProduceResponse, error) {
	if err := s.produce(ctx, r); err != nil {
		return nil, err
	}
	return &malachiv1.ProduceResponse{}, nil
}

// serve runs s over HTTP/1.1 on loopback; wrap may be nil.
func serve(t testing.TB, s sink, c connect.Codec, wrap func(http.Handler) http.Handler) malachiv1connect.ProduceServiceClient {
	t.Helper()
	server := connect.NewServer()
	malachiv1connect.RegisterProduceServiceHandler(server, s)
	mux := http.NewServeMux()
	options := []connecthttp.Option{
		connecthttp.WithCodecs(c, connectproto.NewJSONCodec()), connecthttp.WithCompressors(), connecthttp.WithReadMaxBytes(9 << 20),
	}
	connecthttp.Mount(mux, server, options...)
	var h http.Handler = mux
	if wrap != nil {
		h = wrap(mux)
	}
	web := httptest.NewServer(h)
	t.Cleanup(web.Close)
	return malachiv1connect.NewProduceServiceClient(connect.NewClient(connecthttp.NewTransport(web.Client(), web.URL, options...)))
}

// With Lending and Recycle the same memory comes round, and every request still sees its own bytes.
func TestRecycledOverHTTP(t *testing.T) {
	var want []byte
	reused := map[*byte]int{}
	client := serve(t, sink{produce: func(ctx context.Context, r *malachiv1.ProduceRequest) error {
		if len(r.Batches) != 1 || !bytes.Equal(r.Batches[0], want) {
			return connect.NewError(connect.CodeDataLoss, "other bytes than sent")
		}
		reused[&r.Batches[0][0]]++
		Recycle(ctx)
		Recycle(ctx)
		return nil
	}}, New(), Lending)
	for i := range 50 {
		want = bytes.Repeat([]byte{byte(i)}, lendFrom*(1+i%3))
		if _, err := client.Produce(t.Context(), &malachiv1.ProduceRequest{Topic: "t", Batches: [][]byte{want}}); err != nil {
			t.Fatal(err)
		}
	}
	if len(reused) == 50 {
		t.Errorf("no buffer was used twice")
	}
	Recycle(t.Context()) // without Lending: nothing
}

// One mebibyte per request over HTTP/1.1 on loopback, client and server in one process.
func BenchmarkProduce1MiB(b *testing.B) {
	req := &malachiv1.ProduceRequest{Topic: "t", Batches: [][]byte{make([]byte, 1<<20)}}
	run := func(name string, c connect.Codec, wrap func(http.Handler) http.Handler) {
		b.Run(name, func(b *testing.B) {
			client := serve(b, sink{produce: func(ctx context.Context, r *malachiv1.ProduceRequest) error {
				if len(r.Batches[0]) != 1<<20 {
					return connect.NewError(connect.CodeDataLoss, "short")
				}
				Recycle(ctx)
				return nil
			}}, c, wrap)
			b.SetBytes(1 << 20)
			b.ReportAllocs()
			for b.Loop() {
				if _, err := client.Produce(b.Context(), req); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	run("library", connectproto.NewBinaryCodec(), nil)
	run("copied", New(), nil)
	run("lent", New(), Lending)
}
