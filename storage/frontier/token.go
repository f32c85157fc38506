package frontier

import (
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"google.golang.org/protobuf/proto"

	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/storage"
)

// tokenVersion is the first byte of a decoded token.
const tokenVersion = 1

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Token is f as an opaque cursor: base64url of a version byte, a protobuf Cursor, and CRC32C. It is no secret and no proof: whoever makes
// one by hand reads what it says, of this topic, and nothing else.
func (f *Frontier) Token() (string, error) {
	m := &intrav1.Cursor{TopicUid: f.Topic[:], Rotation: f.Rotation}
	for _, p := range f.Positions {
		m.Positions = append(m.Positions, &intrav1.CursorPosition{
			Timeline: uint64(p.Range.Timeline), RangeSeq: p.Range.Seq, Prefix: p.Slice.Prefix, Depth: uint32(p.Slice.Depth), Offset: uint64(p.Offset),
		})
	}
	b, err := proto.MarshalOptions{Deterministic: true}.MarshalAppend([]byte{tokenVersion}, m)
	if err != nil {
		return "", fmt.Errorf("encode cursor: %w", err)
	}
	b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
	s := base64.RawURLEncoding.EncodeToString(b)
	if len(s) > storage.MaxCursorBytes {
		return "", fmt.Errorf("cursor of %d bytes, limit %d: %w", len(s), storage.MaxCursorBytes, storage.ErrTooLarge)
	}
	return s, nil
}

// Parse reads a token of the given topic. What comes is not trusted: its size bounds what is allocated, and the result is a checked frontier.
// Errors: ErrMalformed; storage.ErrTooLarge.
func Parse(token string, topic storage.TopicUID) (Frontier, error) {
	if len(token) > storage.MaxCursorBytes {
		return Frontier{}, fmt.Errorf("cursor of %d bytes, limit %d: %w", len(token), storage.MaxCursorBytes, storage.ErrTooLarge)
	}
	b, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil || len(b) < 5 {
		return Frontier{}, fmt.Errorf("it is not base64url of a token: %w", ErrMalformed)
	}
	body, sum := b[:len(b)-4], binary.LittleEndian.Uint32(b[len(b)-4:])
	if body[0] != tokenVersion {
		return Frontier{}, fmt.Errorf("version %d: %w", body[0], ErrMalformed)
	}
	if crc32.Checksum(body, castagnoli) != sum {
		return Frontier{}, fmt.Errorf("checksum: %w", ErrMalformed)
	}
	m := new(intrav1.Cursor)
	if err := proto.Unmarshal(body[1:], m); err != nil || len(m.GetTopicUid()) != len(topic) || len(m.ProtoReflect().GetUnknown()) > 0 {
		return Frontier{}, fmt.Errorf("it does not decode: %w", ErrMalformed)
	}
	f := Frontier{Topic: storage.TopicUID(m.GetTopicUid()), Rotation: m.GetRotation()}
	if f.Topic != topic {
		return Frontier{}, fmt.Errorf("it is of another topic, or of an earlier one of this name: %w", ErrMalformed)
	}
	if len(m.GetPositions()) > MaxPositions {
		return Frontier{}, fmt.Errorf("%d positions: %w", len(m.GetPositions()), ErrMalformed)
	}
	f.Positions = make([]Position, 0, len(m.GetPositions()))
	for _, p := range m.GetPositions() {
		if p.GetDepth() > storage.MaxDepth {
			return Frontier{}, fmt.Errorf("slice depth %d: %w", p.GetDepth(), ErrMalformed)
		}
		f.Positions = append(f.Positions, Position{
			Range:  storage.RangeID{Topic: topic, Timeline: storage.Timeline(p.GetTimeline()), Seq: p.GetRangeSeq()},
			Slice:  storage.Slice{Prefix: p.GetPrefix(), Depth: uint8(p.GetDepth())},
			Offset: storage.Offset(p.GetOffset()),
		})
	}
	return f, f.Check()
}
