package rpc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"strings"
	"testing"

	"connectrpc.com/connect/v2"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/structpb"
	"pgregory.net/rapid"

	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
)

// TestEverySentinelHasAReason reads the vocabulary's source, so that a new sentinel without a catalogue entry fails here.
func TestEverySentinelHasAReason(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "../../storage/errors.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	catalogue, err := os.ReadFile("errors.go")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	ast.Inspect(file, func(n ast.Node) bool {
		if id, ok := n.(*ast.Ident); ok && strings.HasPrefix(id.Name, "Err") {
			found++
			if !strings.Contains(string(catalogue), "{storage."+id.Name+",") {
				t.Errorf("storage.%s has no entry: clients would be told an internal error", id.Name)
			}
		}
		return true
	})
	if found < 20 {
		t.Errorf("only %d sentinels found: this test looks in the wrong place", found)
	}
}

func TestEveryReasonHasACode(t *testing.T) {
	for n, name := range v1.Reason_name {
		if _, ok := codes[v1.Reason(n)]; !ok && n != 0 {
			t.Errorf("%s has no Connect code", name)
		}
	}
}

func TestDescribe(t *testing.T) {
	for _, c := range []struct {
		err     error
		code    connect.Code
		reason  v1.Reason
		retry   bool
		unknown bool
	}{
		{storage.ErrTopicNotFound, connect.CodeNotFound, v1.Reason_TOPIC_NOT_FOUND, false, false},
		{fmt.Errorf("x: %w", storage.ErrOverloaded), connect.CodeResourceExhausted, v1.Reason_OVERLOADED, true, false},
		{fmt.Errorf("%w: %w", storage.ErrOutcomeUnknown, storage.ErrStorageFailed), connect.CodeUnavailable, v1.Reason_STORAGE_FAILED, true, true},
		{storage.ErrOutcomeUnknown, connect.CodeUnavailable, v1.Reason_NO_QUORUM, true, true},
		{batch.ErrUnknownCodec, connect.CodeInvalidArgument, v1.Reason_UNKNOWN_CODEC, false, false},
		{Fail(v1.Reason_BEYOND_END, nil, "x"), connect.CodeOutOfRange, v1.Reason_BEYOND_END, false, false},
		{fmt.Errorf("x: %w", context.DeadlineExceeded), connect.CodeDeadlineExceeded, v1.Reason_DEADLINE, false, false},
	} {
		code, text, d, known := Describe(c.err)
		if !known || code != c.code || d.GetReason() != c.reason || (d.GetRetryDelay() != nil) != c.retry || d.GetOutcomeUnknown() != c.unknown {
			t.Errorf("%v: %s %v known %v", c.err, code, d, known)
		}
		if !strings.Contains(text, c.err.Error()) {
			t.Errorf("%v: text %q", c.err, text)
		}
	}
	code, text, _, known := Describe(errors.New("the password is 1234"))
	if known || code != connect.CodeInternal || strings.Contains(text, "1234") {
		t.Errorf("an error that nobody worded reaches the client: %s %q", code, text)
	}
}

func TestCanonicalJSON(t *testing.T) {
	for in, want := range map[string]string{
		`{"b":1,"a":[true,null,"x"]}`:       `{"a":[true,null,"x"],"b":1}`,
		`1.0`:                               `1`,
		`-0`:                                `0`,
		`1e3`:                               `1000`,
		`0.000001`:                          `0.000001`,
		`1e-7`:                              `1e-7`,
		`"\u00e9\u2028\/\u001f\n"`:          "\"é\u2028/\\u001f\\n\"",
		`{"\ud83d\ude00":1,"\ufb33":2}`:     "{\"\U0001F600\":1,\"\ufb33\":2}", // by UTF-16 units, not by code points
		`9007199254740991`:                  `9007199254740991`,
		`{"a":{"z":{},"y":[]},"":"empty"}`:  `{"":"empty","a":{"y":[],"z":{}}}`,
		`"<&>"`:                             `"<&>"`,
		`[1.5,-2.25,123456789.125,1e15,10]`: `[1.5,-2.25,123456789.125,1000000000000000,10]`,
	} {
		v := new(structpb.Value)
		if err := protojson.Unmarshal([]byte(in), v); err != nil {
			t.Fatal(err)
		}
		got, err := Bytes(&v1.Payload{Form: &v1.Payload_Json{Json: v}})
		if err != nil || string(got) != want {
			t.Errorf("%s: %s, %v, want %s", in, got, err, want)
		}
		// What was stored is given back as JSON only because it survives the way round.
		if p := Payload(got, v1.Encoding_JSON); p.GetJson() == nil {
			t.Errorf("%s is not given back as JSON", got)
		}
	}
	for _, in := range []string{`12345678901234567890`, `9007199254740992`, `[-9007199254740993]`, `1e300`} {
		v := new(structpb.Value)
		if err := protojson.Unmarshal([]byte(in), v); err != nil {
			t.Fatal(err)
		}
		_, err := Bytes(&v1.Payload{Form: &v1.Payload_Json{Json: v}})
		var e *Error
		if !errors.As(err, &e) || e.Reason != v1.Reason_INVALID_JSON_NUMBER || !strings.Contains(e.Text, "text") {
			t.Errorf("%s: %v", in, err)
		}
	}
	deep := structpb.NewNullValue()
	for range 200 {
		deep = structpb.NewListValue(&structpb.ListValue{Values: []*structpb.Value{deep}})
	}
	if _, err := Bytes(&v1.Payload{Form: &v1.Payload_Json{Json: deep}}); err == nil {
		t.Error("bottomless nesting is taken")
	}
}

// TestCanonicalJSONKeepsTheValue: any JSON that is stored means the same as what was sent, and is stored the same however it was spelled.
func TestCanonicalJSONKeepsTheValue(t *testing.T) {
	number := rapid.Map(rapid.Float64Range(-1e15, 1e15), func(f float64) float64 {
		if f == 0 {
			return 0 // the canonical form has no negative zero: TestCanonicalJSON holds that
		}
		return f
	})
	var value func(depth int) *rapid.Generator[any]
	value = func(depth int) *rapid.Generator[any] {
		leaves := []*rapid.Generator[any]{
			rapid.Just[any](nil), rapid.Bool().AsAny(), rapid.String().AsAny(), number.AsAny(), rapid.Int64Range(-1<<52, 1<<52).AsAny(),
		}
		if depth > 0 {
			leaves = append(leaves, rapid.SliceOfN(value(depth-1), 0, 4).AsAny(), rapid.MapOfN(rapid.String(), value(depth-1), 0, 4).AsAny())
		}
		return rapid.OneOf(leaves...)
	}
	rapid.Check(t, func(t *rapid.T) {
		sent, err := json.Marshal(value(3).Draw(t, "value"))
		if err != nil {
			t.Skip()
		}
		v := new(structpb.Value)
		if err := protojson.Unmarshal(sent, v); err != nil {
			t.Skip()
		}
		stored, err := Bytes(&v1.Payload{Form: &v1.Payload_Json{Json: v}})
		if err != nil {
			t.Fatal(err)
		}
		var a, b any
		if err := json.Unmarshal(sent, &a); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(stored, &b); err != nil {
			t.Fatalf("%s is no JSON: %v", stored, err)
		}
		x, _ := json.Marshal(a)
		y, _ := json.Marshal(b)
		if string(x) != string(y) {
			t.Fatalf("%s became %s", sent, stored)
		}
		if Payload(stored, v1.Encoding_JSON).GetJson() == nil {
			t.Fatalf("%s is not given back as JSON", stored)
		}
	})
}

func TestPayloadForms(t *testing.T) {
	for _, c := range []struct {
		bytes []byte
		enc   v1.Encoding
		want  string
	}{
		{[]byte("x"), v1.Encoding_TEXT, "text"},
		{[]byte{0xff}, v1.Encoding_TEXT, "data"},
		{[]byte{0xff}, v1.Encoding_JSON, "data"},
		{[]byte(`{"a":1}`), v1.Encoding_JSON, "json"},
		{[]byte(`{"a": 1}`), v1.Encoding_JSON, "text"}, // not canonical: it would come back as other bytes
		{[]byte(`12345678901234567890`), v1.Encoding_JSON, "text"},
		{[]byte(`{"a":1,"a":2}`), v1.Encoding_JSON, "text"},
		{[]byte("x"), v1.Encoding_DATA, "data"},
		{[]byte{}, v1.Encoding_TEXT, "text"},
	} {
		p := Payload(c.bytes, c.enc)
		got := ""
		switch p.GetForm().(type) {
		case *v1.Payload_Data:
			got = "data"
		case *v1.Payload_Text:
			got = "text"
		case *v1.Payload_Json:
			got = "json"
		}
		back, err := Bytes(p)
		if got != c.want || err != nil || string(back) != string(c.bytes) {
			t.Errorf("%q as %s: %s, back %q, %v", c.bytes, c.enc, got, back, err)
		}
	}
	if Payload(nil, v1.Encoding_TEXT) != nil {
		t.Error("an absent key is given back as something")
	}
	if b, err := Bytes(&v1.Payload{Form: &v1.Payload_Text{}}); b == nil || err != nil {
		t.Error("an empty key is stored as absent")
	}
}
