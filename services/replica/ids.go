package replica

import (
	"fmt"

	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/storage"
)

// SegmentKey is a segment's id on the wire.
func SegmentKey(id storage.SegmentID) *intrav1.SegmentKey {
	return &intrav1.SegmentKey{Range: RangeKey(id.Range), Seq: id.Seq}
}

// RangeKey is a range's id on the wire.
func RangeKey(id storage.RangeID) *intrav1.RangeKey {
	return &intrav1.RangeKey{Topic: id.Topic[:], Timeline: uint64(id.Timeline), Seq: id.Seq}
}

// ParseSegmentKey reads what SegmentKey made. storage.ErrInvalid.
func ParseSegmentKey(k *intrav1.SegmentKey) (storage.SegmentID, error) {
	r, err := ParseRangeKey(k.GetRange())
	return storage.SegmentID{Range: r, Seq: k.GetSeq()}, err
}

// ParseRangeKey reads what RangeKey made. storage.ErrInvalid.
func ParseRangeKey(k *intrav1.RangeKey) (storage.RangeID, error) {
	id := storage.RangeID{Timeline: storage.Timeline(k.GetTimeline()), Seq: k.GetSeq()}
	if copy(id.Topic[:], k.GetTopic()) != len(id.Topic) || len(k.GetTopic()) != len(id.Topic) || id.Topic.IsZero() {
		return storage.RangeID{}, fmt.Errorf("range key with a topic uid of %d bytes: %w", len(k.GetTopic()), storage.ErrInvalid)
	}
	return id, nil
}
