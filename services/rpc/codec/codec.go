// Package codec is the binary protobuf codec that brokers and SDK use for Connect instead of the library's: it does not copy
// `bytes` fields one by one out of the received message. It knows no message by name; every message with bytes fields profits,
// all others pass through to the protobuf library, as does everything that is sent.
//
// Connect reads a message into a pooled buffer and takes the buffer back as soon as the codec returns. So the codec either copies
// the message once, exactly sized, and lets its bytes fields share that copy (always correct, and the default); or, where the
// HTTP handler is wrapped in Lending and the RPC handler says Recycle when it has done with the bytes, it keeps the buffer and
// gives Connect another: then the payload is not copied and nothing of its size is allocated.
//
// This is a leaf that both the brokers' services and the SDK import: it imports nothing of ours.
package codec

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"sync"

	"connectrpc.com/connect/v2/connectproto"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Codec is a connect.StableCodec of the name "proto". Safe for concurrent use. Give it to connecthttp.WithCodecs before the JSON
// codec.
//
// Bytes fields of what it decodes share one backing array (their capacity ends at their length): whoever keeps one small field
// for long keeps the whole message.
type Codec struct {
	*connectproto.BinaryCodec
	plans sync.Map // protoreflect.FullName -> plan
}

// New returns a codec.
func New() *Codec { return &Codec{BinaryCodec: connectproto.NewBinaryCodec()} }

// UnmarshalRead decodes one message. src is what Connect passes: the received bytes in a *bytes.Buffer; any other reader is read
// to its end.
func (c *Codec) UnmarshalRead(ctx context.Context, src io.Reader, msg any) error {
	m, ok := msg.(proto.Message)
	if !ok {
		return fmt.Errorf("decode message: %T is no protobuf message", msg)
	}
	p := c.planFor(m.ProtoReflect().Descriptor())
	if len(p) == 0 {
		return c.BinaryCodec.UnmarshalRead(ctx, src, msg)
	}
	buf, lent := src.(*bytes.Buffer)
	if !lent {
		data, err := io.ReadAll(src)
		if err != nil {
			return err // as it came: Connect tells its own errors by identity
		}
		buf = bytes.NewBuffer(data)
	}
	proto.Reset(m)
	if !p.found(buf.Bytes()) {
		return proto.UnmarshalOptions{Merge: true}.Unmarshal(buf.Bytes(), m)
	}
	data := buf.Bytes()
	switch {
	case !lent: // ours already
	case !keep(ctx, buf):
		data = bytes.Clone(data)
	}
	return p.decode(data, m)
}

// plan says which fields of a message are taken without a copy: by number, nil for a bytes field, else the plan of a message in
// which there are some. Fields of a oneof and of maps are left to the protobuf library.
type plan map[protowire.Number]step

type step struct {
	field protoreflect.FieldDescriptor
	inner plan
}

func (c *Codec) planFor(d protoreflect.MessageDescriptor) plan {
	if p, ok := c.plans.Load(d.FullName()); ok {
		return p.(plan)
	}
	p := makePlan(d, nil)
	c.plans.Store(d.FullName(), p)
	return p
}

func makePlan(d protoreflect.MessageDescriptor, above []protoreflect.FullName) plan {
	for _, name := range above {
		if name == d.FullName() {
			return nil // a message within itself: the library decodes the inner ones
		}
	}
	above = append(above, d.FullName())
	p := plan{}
	for i := range d.Fields().Len() {
		f := d.Fields().Get(i)
		switch {
		case f.ContainingOneof() != nil || f.IsMap():
		case f.Kind() == protoreflect.BytesKind:
			p[f.Number()] = step{field: f}
		case f.Kind() == protoreflect.MessageKind:
			if inner := makePlan(f.Message(), above); len(inner) > 0 {
				p[f.Number()] = step{field: f, inner: inner}
			}
		}
	}
	return p
}

// next cuts the first field off data. value is set only for length-delimited fields.
func next(data []byte) (num protowire.Number, field, value, rest []byte, err error) {
	num, typ, n := protowire.ConsumeTag(data)
	if n < 0 {
		return 0, nil, nil, nil, protowire.ParseError(n)
	}
	if typ == protowire.BytesType {
		v, m := protowire.ConsumeBytes(data[n:])
		if m < 0 {
			return 0, nil, nil, nil, protowire.ParseError(m)
		}
		return num, data[:n+m], v[:len(v):len(v)], data[n+m:], nil
	}
	m := protowire.ConsumeFieldValue(num, typ, data[n:])
	if m < 0 {
		return 0, nil, nil, nil, protowire.ParseError(m)
	}
	return num, data[:n+m], nil, data[n+m:], nil
}

// found reports whether data has a bytes field that the plan takes. What does not parse has none: the library words the error.
func (p plan) found(data []byte) bool {
	for len(data) > 0 {
		num, _, value, rest, err := next(data)
		if err != nil {
			return false
		}
		if s, ok := p[num]; ok && value != nil && (s.inner == nil || s.inner.found(value)) {
			return true
		}
		data = rest
	}
	return false
}

// decode merges data into m. Its bytes fields alias data.
func (p plan) decode(data []byte, m proto.Message) error {
	r := m.ProtoReflect()
	var others []byte
	for len(data) > 0 {
		num, field, value, rest, err := next(data)
		if err != nil {
			return fmt.Errorf("decode %s: %w", r.Descriptor().FullName(), err)
		}
		data = rest
		s, ok := p[num]
		switch {
		case !ok || value == nil: // another field, or one of this number with a type that the library calls unknown
			others = append(others, field...)
		case s.inner != nil && s.field.IsList():
			e := r.Mutable(s.field).List().AppendMutable()
			err = s.inner.decode(value, e.Message().Interface())
		case s.inner != nil:
			err = s.inner.decode(value, r.Mutable(s.field).Message().Interface())
		case s.field.IsList():
			r.Mutable(s.field).List().Append(protoreflect.ValueOfBytes(value))
		default:
			r.Set(s.field, protoreflect.ValueOfBytes(value))
		}
		if err != nil {
			return err
		}
	}
	if len(others) == 0 {
		return nil
	}
	// Strings and numbers are copied out of others, so it may go.
	return proto.UnmarshalOptions{Merge: true}.Unmarshal(others, m)
}
