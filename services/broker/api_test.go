package broker_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/malachilog/malachi/client"
	"github.com/malachilog/malachi/client/clienttest"
	"github.com/malachilog/malachi/e2e/inv"
	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/gen/go/malachi/v1/malachiv1connect"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
)

// post is what curl does.
func post(t *testing.T, s *clienttest.Server, method, body string) (int, map[string]any) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL()+"/malachi.v1."+method, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	return answer(t, req)
}

func answer(t *testing.T, req *http.Request) (int, map[string]any) {
	t.Helper()
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	var out map[string]any
	if err := json.Unmarshal(b, &out); err != nil {
		t.Fatalf("%s: %v", b, err)
	}
	return res.StatusCode, out
}

// reason is the Reason of a Connect error in JSON.
func reason(out map[string]any) string {
	details, _ := out["details"].([]any)
	if len(details) == 0 {
		return ""
	}
	debug, _ := details[0].(map[string]any)["debug"].(map[string]any)
	r, _ := debug["reason"].(string)
	return r
}

// TestCurlDoesTheWholeJob is the three calls, with nothing but HTTP.
func TestCurlDoesTheWholeJob(t *testing.T) {
	s := clienttest.Start(t)
	if code, out := post(t, s, "AdminService/CreateTopic", `{"name":"orders","initialRanges":4}`); code != 200 {
		t.Fatalf("%d %v", code, out)
	}
	code, out := post(t, s, "ProduceService/Produce", `{"topic":"orders","records":[{"key":{"text":"u1"},"value":{"json":{"b":[1,2.5,"x"],"a":1}},"headers":[{"key":"h","value":{"text":"x"}}]}]}`)
	if code != 200 {
		t.Fatalf("%d %v", code, out)
	}
	code, out = post(t, s, "FetchService/Fetch", `{"topic":"orders","cursor":"","maxRecords":10,"waitMs":0,"encoding":"TEXT"}`)
	records, _ := out["records"].([]any)
	if code != 200 || len(records) != 1 || out["cursor"] == "" {
		t.Fatalf("%d %v", code, out)
	}
	rec := records[0].(map[string]any)
	if got := rec["value"].(map[string]any)["text"]; got != `{"a":1,"b":[1,2.5,"x"]}` {
		t.Errorf("stored is %v, want canonical JSON", got)
	}
	// Reads answer HTTP GET, uncached.
	q := url.Values{"connect": {"v1"}, "encoding": {"json"}, "message": {`{"topic":"orders","encoding":"JSON"}`}}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL()+"/malachi.v1.FetchService/Fetch?"+q.Encode(), nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK || res.Header.Get("Cache-Control") != "no-store" {
		t.Errorf("GET: %d, Cache-Control %q", res.StatusCode, res.Header.Get("Cache-Control"))
	}
	// The cursor goes on behind the record.
	if _, out = post(t, s, "FetchService/Fetch", fmt.Sprintf(`{"topic":"orders","cursor":%q,"wantAtTail":true}`, out["cursor"])); out["records"] != nil || out["atTail"] != true {
		t.Errorf("at the end: %v", out)
	}
}

func TestBadInput(t *testing.T) {
	s := clienttest.Start(t)
	post(t, s, "AdminService/CreateTopic", `{"name":"a"}`)
	post(t, s, "AdminService/CreateTopic", `{"name":"b"}`)
	post(t, s, "ProduceService/Produce", `{"topic":"a","records":[{"value":{"text":"kept"}}]}`)
	_, out := post(t, s, "FetchService/Fetch", `{"topic":"a"}`)
	cursorOfA := out["cursor"].(string)
	long := strings.Repeat("x", 300)
	big := strings.Repeat("x", 1<<20+1)
	good := build(t, "v")
	corrupt := bytes.Clone(good)
	corrupt[len(corrupt)-1] ^= 1
	for _, c := range []struct{ method, body, reason string }{
		{"ProduceService/Produce", `{"topic":"nope","records":[{"value":{"text":"v"}}]}`, "TOPIC_NOT_FOUND"},
		{"FetchService/Fetch", `{"topic":"nope"}`, "TOPIC_NOT_FOUND"},
		{"AdminService/DescribeTopic", `{"name":"nope"}`, "TOPIC_NOT_FOUND"},
		{"AdminService/DeleteTopic", `{"name":"nope"}`, "TOPIC_NOT_FOUND"},
		{"AdminService/CreateTopic", `{"name":"../x"}`, "INVALID_TOPIC_NAME"},
		{"AdminService/CreateTopic", `{"name":""}`, "INVALID_TOPIC_NAME"},
		{"AdminService/CreateTopic", `{"name":"` + long + `"}`, "INVALID_TOPIC_NAME"},
		{"ProduceService/Produce", `{"topic":"../x","records":[{"value":{"text":"v"}}]}`, "INVALID_TOPIC_NAME"},
		{"AdminService/CreateTopic", `{"name":"c","initialRanges":3}`, "INVALID_ARGUMENT"},
		{"AdminService/CreateTopic", `{"name":"c","initialRanges":512}`, "INVALID_ARGUMENT"},
		{"AdminService/CreateTopic", `{"name":"a"}`, "TOPIC_EXISTS"},
		{"AdminService/CreateTopic", `{"nam":"c"}`, "INVALID_ARGUMENT"},
		{"AdminService/ListTopics", `{"page":{"pageSize":5000}}`, "INVALID_ARGUMENT"},
		{"AdminService/ListTopics", `{"page":{"pageToken":"!!"}}`, "INVALID_ARGUMENT"},
		{"ProduceService/Produce", `{"topic":"a"}`, "INVALID_ARGUMENT"},
		{"ProduceService/Produce", `{"topic":"a","records":[{"value":{"text":"` + big + `"}}]}`, "LIMIT_EXCEEDED"},
		{"ProduceService/Produce", `{"topic":"a","records":[{"value":{"json":12345678901234567890}}]}`, "INVALID_JSON_NUMBER"},
		{"ProduceService/Produce", `{"topic":"a","records":[{"value":{"json":[9007199254740993]}}]}`, "INVALID_JSON_NUMBER"},
		{"ProduceService/Produce", `{"topic":"a","batches":["` + base64.StdEncoding.EncodeToString(corrupt) + `"]}`, "INVALID_BATCH"},
		{"ProduceService/Produce", `{"topic":"a","batches":["` + base64.StdEncoding.EncodeToString(good[:50]) + `"]}`, "INVALID_BATCH"},
		{"ProduceService/Produce", `{"topic":"a","batches":["AAAA"]}`, "INVALID_BATCH"},
		{"ProduceService/Produce", `{"topic":"a","batches":["` + base64.StdEncoding.EncodeToString(withCodec(good, 9)) + `"]}`, "UNKNOWN_CODEC"},
		{"FetchService/Fetch", `{"topic":"a","cursor":"garbage"}`, "INVALID_CURSOR"},
		{"FetchService/Fetch", `{"topic":"b","cursor":"` + cursorOfA + `"}`, "INVALID_CURSOR"},
		{"FetchService/Fetch", `{"topic":"a","cursor":"` + strings.Repeat("A", 257<<10) + `"}`, "LIMIT_EXCEEDED"},
		{"FetchService/Fetch", `{"topic":"a","maxRecords":-1}`, "INVALID_ARGUMENT"},
		{"FetchService/Fetch", `{"topic":"a","waitMs":60001}`, "INVALID_ARGUMENT"},
		{"FetchService/Fetch", `{"topic":"a","encoding":77}`, "INVALID_ARGUMENT"},
		{"ProduceService/Produce", `{"topic":"a","records":[{"value":{"text":"` + strings.Repeat("y", 9<<20) + `"}}]}`, "LIMIT_EXCEEDED"},
	} {
		code, out := post(t, s, c.method, c.body)
		if got := reason(out); code == 200 || got != c.reason {
			t.Errorf("%s %.60s: %d %s, want %s (%.200v)", c.method, c.body, code, got, c.reason, out)
		}
		if out["message"] == "" {
			t.Errorf("%s %.60s: no message", c.method, c.body)
		}
	}
	if _, out := post(t, s, "FetchService/Fetch", `{"topic":"a"}`); len(out["records"].([]any)) != 1 {
		t.Errorf("bad input has left something behind: %v", out)
	}
}

func build(t *testing.T, values ...string) []byte {
	t.Helper()
	var b batch.Builder
	for _, v := range values {
		if err := b.Add(&batch.Record{Value: []byte(v), Time: 1}, 0); err != nil {
			t.Fatal(err)
		}
	}
	out, err := b.Build(nil, batch.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// withCodec is b with another codec byte and a right header CRC.
func withCodec(b []byte, codec byte) []byte {
	b = bytes.Clone(b)
	b[6] = codec
	batch.Stamp(b, 0, 0, storage.Slice{})
	return b
}

// TestEveryProtocol writes and reads over Connect, gRPC and gRPC-Web, in binary and in JSON: the same bytes are stored.
func TestEveryProtocol(t *testing.T) {
	s := clienttest.Start(t)
	value, err := structpb.NewValue(map[string]any{"z": 1, "a": []any{true, nil, 0.1, 1.0, "ü\u2028\"\\\n"}})
	if err != nil {
		t.Fatal(err)
	}
	asJSON, err := protojson.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	h2 := &http.Transport{Protocols: new(http.Protocols)}
	h2.Protocols.SetUnencryptedHTTP2(true)
	defer h2.CloseIdleConnections()
	for name, o := range map[string][]connecthttp.Option{
		"connect": nil, "json": {connecthttp.WithProtoJSON()}, "grpc": {connecthttp.WithGRPC()}, "grpcweb": {connecthttp.WithGRPCWeb()},
		"get": {connecthttp.WithHTTPGet()},
	} {
		c := connect.NewClient(connecthttp.NewTransport(&http.Client{Transport: h2}, s.URL(), o...))
		admin, produce, fetch := malachiv1connect.NewAdminServiceClient(c), malachiv1connect.NewProduceServiceClient(c), malachiv1connect.NewFetchServiceClient(c)
		if _, err := admin.CreateTopic(t.Context(), &v1.CreateTopicRequest{Name: name}); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if _, err := produce.Produce(t.Context(), &v1.ProduceRequest{Topic: name, Records: []*v1.Record{{
			Key: &v1.Payload{Form: &v1.Payload_Data{Data: []byte{}}}, Value: &v1.Payload{Form: &v1.Payload_Json{Json: value}},
		}}}); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		post(t, s, "ProduceService/Produce", `{"topic":"`+name+`","records":[{"value":{"json":`+string(asJSON)+`}}]}`)
		page, err := fetch.Fetch(t.Context(), &v1.FetchRequest{Topic: name, Encoding: v1.Encoding_DATA})
		if err != nil || len(page.GetRecords()) != 2 {
			t.Fatalf("%s: %v, %v", name, page, err)
		}
		a, b := page.GetRecords()[0], page.GetRecords()[1]
		if !bytes.Equal(a.GetValue().GetData(), b.GetValue().GetData()) {
			t.Errorf("%s stored %q, curl %q", name, a.GetValue().GetData(), b.GetValue().GetData())
		}
		if a.GetKey() == nil || b.GetKey() != nil {
			t.Errorf("%s: empty and absent keys: %v, %v", name, a.GetKey(), b.GetKey())
		}
		again, err := fetch.Fetch(t.Context(), &v1.FetchRequest{Topic: name, Encoding: v1.Encoding_JSON})
		if err != nil || !proto.Equal(again.GetRecords()[0].GetValue().GetJson(), value) {
			t.Errorf("%s: JSON comes back as %v, %v", name, again.GetRecords(), err)
		}
		_, err = admin.DescribeTopic(t.Context(), &v1.DescribeTopicRequest{Name: "nope"})
		if e := client.AsError("describe", err); e.Reason != v1.Reason_TOPIC_NOT_FOUND || connect.CodeOf(err) != connect.CodeNotFound {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

// TestFairAndOrderedOverRanges reads a topic of several ranges with tiny budgets while it is written: every record once, every key in order, no
// range starved.
func TestFairAndOrderedOverRanges(t *testing.T) {
	inv.Covers(t, "INV-C9", "INV-C8")
	s := clienttest.Start(t)
	c := s.Client(t)
	if _, err := c.Admin().CreateTopic(t.Context(), &v1.CreateTopicRequest{Name: "t", InitialRanges: 8}); err != nil {
		t.Fatal(err)
	}
	const keys, each = 40, 25
	for n := range each {
		var recs []client.Record
		for k := range keys {
			recs = append(recs, client.Record{Key: fmt.Appendf(nil, "key-%d", k), Value: fmt.Appendf(nil, "%d", n)})
		}
		if err := c.Produce(t.Context(), "t", recs...); err != nil {
			t.Fatal(err)
		}
	}
	for _, budget := range []int{1, 3, 7, 1000} {
		fetch := malachiv1connect.NewFetchServiceClient(connect.NewClient(connecthttp.NewTransport(http.DefaultClient, s.URL())))
		next := map[string]int{}
		cursor, pages, firstSeen := "", 0, map[string]int{}
		for total := 0; total < keys*each; pages++ {
			page, err := fetch.Fetch(t.Context(), &v1.FetchRequest{Topic: "t", Cursor: cursor, MaxRecords: int32(budget), Encoding: v1.Encoding_TEXT})
			if err != nil {
				t.Fatal(err)
			}
			if len(page.GetRecords()) == 0 || len(page.GetRecords()) > budget {
				t.Fatalf("a page of %d records for a budget of %d, after %d", len(page.GetRecords()), budget, total)
			}
			for _, r := range page.GetRecords() {
				k := r.GetKey().GetText()
				if _, seen := firstSeen[k]; !seen {
					firstSeen[k] = total
				}
				if want := fmt.Sprint(next[k]); r.GetValue().GetText() != want {
					t.Fatalf("key %s: record %s where %s is due", k, r.GetValue().GetText(), want)
				}
				next[k]++
				total++
			}
			cursor = page.GetCursor()
		}
		if budget == 1 {
			ranges := map[int]bool{}
			for _, at := range firstSeen {
				if at < 16 {
					ranges[at] = true
				}
			}
			if len(ranges) < 8 {
				t.Errorf("of the first 16 pages only %d brought a new key: some range starves", len(ranges))
			}
		}
		if page, err := fetch.Fetch(t.Context(), &v1.FetchRequest{Topic: "t", Cursor: cursor}); err != nil || len(page.GetRecords()) != 0 {
			t.Errorf("behind the end: %v, %v", page, err)
		}
	}
}

// TestWaitIsWokenOrEnds: a fetch that waits is woken by a record, and otherwise ends with its cursor.
func TestWaitIsWokenOrEnds(t *testing.T) {
	inv.Covers(t, "INV-C10")
	s := clienttest.Start(t)
	c := s.Client(t, "t")
	fetch := malachiv1connect.NewFetchServiceClient(connect.NewClient(connecthttp.NewTransport(http.DefaultClient, s.URL())))
	page, err := fetch.Fetch(t.Context(), &v1.FetchRequest{Topic: "t", WaitMs: 30})
	if err != nil || page.GetCursor() == "" || len(page.GetRecords()) != 0 {
		t.Fatalf("nothing came: %v, %v", page, err)
	}
	type result struct {
		page *v1.FetchResponse
		err  error
	}
	got := make(chan result, 1)
	go func() {
		p, err := fetch.Fetch(t.Context(), &v1.FetchRequest{Topic: "t", Cursor: page.GetCursor(), WaitMs: 60000})
		got <- result{p, err}
	}()
	if err := c.Produce(t.Context(), "t", client.Record{Value: []byte("x")}); err != nil {
		t.Fatal(err)
	}
	select {
	case r := <-got:
		if r.err != nil || len(r.page.GetRecords()) != 1 {
			t.Fatalf("%v, %v", r.page, r.err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the waiting fetch was not woken")
	}
}

// TestSubscribe streams records as they come, with heartbeats between, and resumes.
func TestSubscribe(t *testing.T) {
	s := clienttest.Start(t)
	c := s.Client(t, "t")
	fetch := malachiv1connect.NewFetchServiceClient(connect.NewClient(connecthttp.NewTransport(http.DefaultClient, s.URL())))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := fetch.Subscribe(ctx, &v1.SubscribeRequest{Topic: "t", HeartbeatMs: 100, Encoding: v1.Encoding_TEXT})
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	beats, values, cursor := 0, []string{}, ""
	for n := 0; beats < 2 || len(values) < 3; n++ {
		if n < 3 {
			if err := c.Produce(t.Context(), "t", client.Record{Value: fmt.Appendf(nil, "%d", n)}); err != nil {
				t.Fatal(err)
			}
		}
		m, err := stream.Receive()
		if err != nil {
			t.Fatal(err)
		}
		if m.GetHeartbeat() {
			beats++
		}
		for _, r := range m.GetPage().GetRecords() {
			values = append(values, r.GetValue().GetText())
		}
		if cursor = m.GetPage().GetCursor(); cursor == "" {
			t.Fatal("a message without a cursor")
		}
	}
	if strings.Join(values, " ") != "0 1 2" {
		t.Errorf("streamed %v", values)
	}
	if page, err := fetch.Fetch(t.Context(), &v1.FetchRequest{Topic: "t", Cursor: cursor}); err != nil || len(page.GetRecords()) != 0 {
		t.Errorf("the stream's last cursor is not behind what it gave: %v, %v", page, err)
	}
	// A drain ends the stream with a reason.
	ended := make(chan error, 1)
	go func() {
		for {
			if _, err := stream.Receive(); err != nil {
				ended <- err
				return
			}
		}
	}()
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; client.AsError("subscribe", err).Reason != v1.Reason_SHUTTING_DOWN {
		t.Errorf("the stream ended with %v", err)
	}
}

// TestRestart: after a restart the old segment is closed by a pass and the range goes on, by itself; nothing is lost, nothing comes twice.
func TestRestart(t *testing.T) {
	inv.Covers(t, "INV-S16", "INV-D5")
	s := clienttest.Start(t)
	c := s.Client(t, "t")
	want := 0
	for range 4 {
		for range 10 {
			if err := c.Produce(t.Context(), "t", client.Record{Value: fmt.Appendf(nil, "%d", want)}); err != nil {
				t.Fatal(err)
			}
			want++
		}
		if err := s.Restart(); err != nil {
			t.Fatal(err)
		}
	}
	consumer, err := c.Consume("t", client.ConsumeConfig{ExitAtEnd: true})
	if err != nil {
		t.Fatal(err)
	}
	got := 0
	for r, err := range consumer.Records(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		if string(r.Value) != fmt.Sprint(got) {
			t.Fatalf("record %d is %s", got, r.Value)
		}
		got++
	}
	if got != want {
		t.Errorf("read %d of %d", got, want)
	}
	segs, err := c.Admin().ListSegments(t.Context(), &v1.ListSegmentsRequest{Topic: "t"})
	if err != nil {
		t.Fatal(err)
	}
	end := uint64(0)
	for _, seg := range segs.GetSegments() {
		if seg.GetState() != v1.Segment_SEALED || seg.GetBase() != end {
			t.Errorf("segment %s: %s from %d, the one before ended at %d", seg.GetId(), seg.GetState(), seg.GetBase(), end)
		}
		end = seg.GetEnd()
	}
	if end != uint64(want) {
		t.Errorf("segments end at %d", end)
	}
}

// TestDeletedTopicNeverMeetsItsNextLife: delete frees the name at once, removes the data, and cursors of the old life are refused.
func TestDeletedTopicNeverMeetsItsNextLife(t *testing.T) {
	s := clienttest.Start(t)
	c := s.Client(t, "t")
	if err := c.Produce(t.Context(), "t", client.Record{Value: []byte("old")}); err != nil {
		t.Fatal(err)
	}
	fetch := malachiv1connect.NewFetchServiceClient(connect.NewClient(connecthttp.NewTransport(http.DefaultClient, s.URL())))
	page, err := fetch.Fetch(t.Context(), &v1.FetchRequest{Topic: "t"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Admin().DeleteTopic(t.Context(), &v1.DeleteTopicRequest{Name: "t"}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Admin().CreateTopic(t.Context(), &v1.CreateTopicRequest{Name: "t"}); err != nil {
		t.Fatal(err)
	}
	if p, err := fetch.Fetch(t.Context(), &v1.FetchRequest{Topic: "t"}); err != nil || len(p.GetRecords()) != 0 {
		t.Errorf("the new topic begins with %v, %v", p, err)
	}
	if _, err := fetch.Fetch(t.Context(), &v1.FetchRequest{Topic: "t", Cursor: page.GetCursor()}); client.AsError("fetch", err).Reason != v1.Reason_INVALID_CURSOR {
		t.Errorf("a cursor of the old life: %v", err)
	}
}

// TestProduceAnswersPerRun: records of several ranges are answered per run, with the indexes of each.
func TestProduceAnswersPerRun(t *testing.T) {
	s := clienttest.Start(t)
	post(t, s, "AdminService/CreateTopic", `{"name":"t","initialRanges":16}`)
	var recs []string
	for i := range 64 {
		recs = append(recs, fmt.Sprintf(`{"key":{"text":"k%d"},"value":{"text":"v"}}`, i))
	}
	_, out := post(t, s, "ProduceService/Produce", `{"topic":"t","records":[`+strings.Join(recs, ",")+`]}`)
	seen := map[float64]bool{}
	results, _ := out["results"].([]any)
	for _, r := range results {
		for _, i := range r.(map[string]any)["recordIndexes"].([]any) {
			if seen[i.(float64)] {
				t.Errorf("record %v is answered twice", i)
			}
			seen[i.(float64)] = true
		}
	}
	if len(seen) != 64 || len(results) < 8 {
		t.Errorf("%d records in %d results", len(seen), len(results))
	}
}

// TestOps asks the operations port.
func TestOps(t *testing.T) {
	s := clienttest.Start(t)
	for _, p := range []string{"/livez", "/readyz", "/startupz", "/metrics", "/debug/pprof/"} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.OpsURL()+p, nil)
		if err != nil {
			t.Fatal(err)
		}
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(res.Body)
		if err = errors.Join(err, res.Body.Close()); err != nil {
			t.Fatal(err)
		}
		if res.StatusCode != http.StatusOK {
			t.Errorf("%s: %d %s", p, res.StatusCode, b)
		}
		if p == "/metrics" && !bytes.Contains(b, []byte("malachi_journal_barriers_total")) {
			t.Error("no journal metrics")
		}
	}
	// A browser's preflight, and the headers that gRPC-Web must be able to read.
	req, err := http.NewRequestWithContext(t.Context(), http.MethodOptions, s.URL()+"/malachi.v1.FetchService/Fetch", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Origin", "http://localhost:5173")
	req.Header.Set("Access-Control-Request-Method", "POST")
	req.Header.Set("Access-Control-Request-Headers", "connect-protocol-version,content-type") // sorted, as browsers send it
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if res.Header.Get("Access-Control-Allow-Origin") != "http://localhost:5173" || res.Header.Get("Access-Control-Allow-Headers") == "" {
		t.Errorf("preflight: %v", res.Header)
	}
	req.Header.Set("Origin", "http://page.example") // somebody's page on the web has no business with a broker on this machine
	if res, err = http.DefaultClient.Do(req); err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if o := res.Header.Get("Access-Control-Allow-Origin"); o != "" {
		t.Errorf("a foreign page is allowed: %q", o)
	}
	req2, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL()+"/malachi.v1.AdminService/ListTopics", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	req2.Header.Set("Origin", "http://localhost:5173")
	req2.Header.Set("Content-Type", "application/json")
	res, err = http.DefaultClient.Do(req2)
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if e := res.Header.Get("Access-Control-Expose-Headers"); !strings.Contains(strings.ToLower(e), "grpc-status") {
		t.Errorf("exposed headers: %q", e)
	}
}

// TestPagesDoNotShareMemory reads several topics at once, in every encoding: no call sees the bytes of another.
func TestPagesDoNotShareMemory(t *testing.T) {
	s := clienttest.Start(t)
	c := s.Client(t, "t0", "t1", "t2", "t3")
	for i := range 4 {
		var recs []client.Record
		for range 200 {
			recs = append(recs, client.Record{Key: []byte("k"), Value: bytes.Repeat([]byte{byte('a' + i)}, 500+100*i)})
		}
		if err := c.Produce(t.Context(), fmt.Sprintf("t%d", i), recs...); err != nil {
			t.Fatal(err)
		}
	}
	fetch := malachiv1connect.NewFetchServiceClient(connect.NewClient(connecthttp.NewTransport(http.DefaultClient, s.URL())))
	var wg sync.WaitGroup
	for g := range 8 {
		i := g % 4
		want := string(bytes.Repeat([]byte{byte('a' + i)}, 500+100*i))
		wg.Go(func() {
			for n := range 40 {
				enc := []v1.Encoding{v1.Encoding_DATA, v1.Encoding_TEXT, v1.Encoding_RAW}[n%3]
				page, err := fetch.Fetch(t.Context(), &v1.FetchRequest{Topic: fmt.Sprintf("t%d", i), Encoding: enc, MaxRecords: int32(50 + n)})
				if err != nil {
					t.Error(err)
					return
				}
				for _, r := range page.GetRecords() {
					if string(r.GetValue().GetData())+r.GetValue().GetText() != want {
						t.Errorf("topic t%d, %s: a record of another page", i, enc)
						return
					}
				}
				for _, b := range page.GetBatches() {
					if _, err := batch.Verify(b.GetData()); err != nil {
						t.Errorf("topic t%d: %v", i, err)
						return
					}
				}
			}
		})
	}
	wg.Wait()
}
