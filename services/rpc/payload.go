package rpc

import (
	"bytes"
	"encoding/json"
	"math"
	"slices"
	"strconv"
	"time"
	"unicode/utf16"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
)

const (
	// maxExactInt is the largest integer below which every integer has a float64 of its own.
	maxExactInt = 1<<53 - 1
	// maxJSONDepth bounds the nesting of a json payload.
	maxJSONDepth = 100
)

// Bytes returns the bytes that a payload stands for; nil only if no form is set. The result may alias p.
func Bytes(p *v1.Payload) ([]byte, error) {
	switch f := p.GetForm().(type) {
	case *v1.Payload_Data:
		return notNil(f.Data), nil
	case *v1.Payload_Text:
		return notNil([]byte(f.Text)), nil
	case *v1.Payload_Json:
		return appendJSON(nil, f.Json, 0)
	}
	return nil, nil
}

func notNil(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}

// appendJSON writes v as canonical JSON (RFC 8785): members ordered by the UTF-16 units of their names, shortest escapes, numbers as
// ECMAScript prints them.
func appendJSON(b []byte, v *structpb.Value, depth int) ([]byte, error) {
	if depth > maxJSONDepth {
		return nil, Fail(v1.Reason_LIMIT_EXCEEDED, map[string]string{"limit": "json_depth"}, "json payload is nested deeper than %d levels", maxJSONDepth)
	}
	var err error
	switch k := v.GetKind().(type) {
	case *structpb.Value_NullValue:
		return append(b, "null"...), nil
	case *structpb.Value_BoolValue:
		return strconv.AppendBool(b, k.BoolValue), nil
	case *structpb.Value_NumberValue:
		return appendNumber(b, k.NumberValue)
	case *structpb.Value_StringValue:
		return appendString(b, k.StringValue), nil
	case *structpb.Value_ListValue:
		b = append(b, '[')
		for i, e := range k.ListValue.GetValues() {
			if i > 0 {
				b = append(b, ',')
			}
			if b, err = appendJSON(b, e, depth+1); err != nil {
				return nil, err
			}
		}
		return append(b, ']'), nil
	case *structpb.Value_StructValue:
		names := make([]string, 0, len(k.StructValue.GetFields()))
		for n := range k.StructValue.GetFields() {
			names = append(names, n)
		}
		slices.SortFunc(names, compareUTF16)
		b = append(b, '{')
		for i, n := range names {
			if i > 0 {
				b = append(b, ',')
			}
			b = append(appendString(b, n), ':')
			if b, err = appendJSON(b, k.StructValue.GetFields()[n], depth+1); err != nil {
				return nil, err
			}
		}
		return append(b, '}'), nil
	}
	return nil, Fail(v1.Reason_INVALID_RECORD, nil, "json payload holds a value without a kind")
}

func compareUTF16(a, b string) int {
	return slices.Compare(utf16.Encode([]rune(a)), utf16.Encode([]rune(b)))
}

// appendNumber prints a number as ECMAScript does: encoding/json follows the same rule. What a float64 cannot hold exactly may have been
// changed on the way here, so it is refused rather than stored.
func appendNumber(b []byte, f float64) ([]byte, error) {
	if math.IsNaN(f) || math.IsInf(f, 0) || math.Abs(f) > maxExactInt {
		return nil, Fail(v1.Reason_INVALID_JSON_NUMBER, map[string]string{"limit": "±(2^53-1)"},
			"a number in a json payload lies beyond ±(2^53-1) and would be changed by JSON readers: send the payload as text")
	}
	if f == 0 {
		f = 0 // no negative zero
	}
	n, err := json.Marshal(f)
	if err != nil {
		return nil, Fail(v1.Reason_INVALID_JSON_NUMBER, nil, "a number in a json payload cannot be written")
	}
	return append(b, n...), nil
}

func appendString(b []byte, s string) []byte {
	b = append(b, '"')
	for _, r := range s {
		switch r {
		case '"', '\\':
			b = append(b, '\\', byte(r))
		case '\b':
			b = append(b, `\b`...)
		case '\t':
			b = append(b, `\t`...)
		case '\n':
			b = append(b, `\n`...)
		case '\f':
			b = append(b, `\f`...)
		case '\r':
			b = append(b, `\r`...)
		default:
			if r < 0x20 {
				const hex = "0123456789abcdef"
				b = append(b, '\\', 'u', '0', '0', hex[r>>4], hex[r&15])
			} else {
				b = utf8.AppendRune(b, r)
			}
		}
	}
	return append(b, '"')
}

// Payload returns bytes in the form that a reader asked for. b nil means absent and gives nil. Text and data alias b.
func Payload(b []byte, enc v1.Encoding) *v1.Payload {
	if b == nil {
		return nil
	}
	if enc == v1.Encoding_JSON {
		if v := parseJSON(b); v != nil {
			return &v1.Payload{Form: &v1.Payload_Json{Json: v}}
		}
	}
	if (enc == v1.Encoding_TEXT || enc == v1.Encoding_JSON) && utf8.Valid(b) {
		return &v1.Payload{Form: &v1.Payload_Text{Text: string(b)}}
	}
	return &v1.Payload{Form: &v1.Payload_Data{Data: b}}
}

// parseJSON returns the value if b is canonical JSON, so that writing it again gives the same bytes; else nil.
func parseJSON(b []byte) *structpb.Value {
	if !json.Valid(b) {
		return nil
	}
	v := new(structpb.Value)
	if err := protojson.Unmarshal(b, v); err != nil {
		return nil
	}
	again, err := appendJSON(nil, v, 0)
	if err != nil || !bytes.Equal(again, b) {
		return nil
	}
	return v
}

// RecordFrom converts a record of the API; now is its time if it has none. The result aliases r.
func RecordFrom(r *v1.Record, now storage.Time) (batch.Record, error) {
	key, err := Bytes(r.GetKey())
	if err != nil {
		return batch.Record{}, err
	}
	value, err := Bytes(r.GetValue())
	if err != nil {
		return batch.Record{}, err
	}
	out := batch.Record{Key: key, Value: value, Time: now}
	if t := r.GetTime(); t != nil {
		if err := t.CheckValid(); err != nil || t.AsTime().Before(time.Unix(0, math.MinInt64)) || t.AsTime().After(time.Unix(0, math.MaxInt64)) {
			return batch.Record{}, Fail(v1.Reason_INVALID_RECORD, nil, "record time is out of range: years 1678 to 2261 can be kept")
		}
		out.Time = storage.Time(t.AsTime().UnixNano())
	}
	for _, h := range r.GetHeaders() {
		v, err := Bytes(h.GetValue())
		if err != nil {
			return batch.Record{}, err
		}
		out.Headers = append(out.Headers, batch.RecordHeader{Key: []byte(h.GetKey()), Value: v})
	}
	return out, nil
}

// RecordTo converts a stored record for a reader. The result aliases r, which must stay unchanged until it was sent.
func RecordTo(r *batch.Record, appended storage.Time, enc v1.Encoding) *v1.FetchedRecord {
	out := &v1.FetchedRecord{
		Key: Payload(r.Key, enc), Value: Payload(notNil(r.Value), enc), Time: Timestamp(r.Time), AppendTime: Timestamp(appended),
	}
	for _, h := range r.Headers {
		out.Headers = append(out.Headers, &v1.Header{Key: string(h.Key), Value: Payload(notNil(h.Value), enc)})
	}
	return out
}

// Timestamp converts a time.
func Timestamp(t storage.Time) *timestamppb.Timestamp { return timestamppb.New(time.Unix(0, int64(t))) }
