package batch

import (
	"fmt"
	"slices"

	"github.com/malachilog/malachi/storage"
)

// Part is what one slice gets of a batch that Split cut.
type Part struct {
	// Slice is the one asked for; the part's header carries it.
	Slice storage.Slice
	// Data is a batch of its own.
	Data []byte
	// Indexes are the places that the part's records had in the whole batch, rising.
	Indexes []uint32
}

// Split cuts a data batch into one per slice that has records, in the order of slices, which must be disjoint and in keyspace
// order. The records keep their order inside a part; kind, codec, producer id, epoch, sequence and times go over; base offset and
// append time are 0 again. The same batch and slices give the same parts, so a resend is cut alike. The batch is checked as Check
// does.
//
// Split takes about twice the uncompressed length in memory, and 4 bytes a record. Errors: as Check; storage.ErrInvalid also for
// slices that overlap, are out of order, or leave out a record; storage.ErrTooLarge if times far apart make a part longer than a
// batch may be.
func Split(b []byte, into []storage.Slice) ([]Part, error) {
	for i, s := range into {
		if !s.Valid() || i > 0 && into[i-1].Last() >= s.First() {
			return nil, fmt.Errorf("split batch: slice %d (%s) is invalid, overlaps or is out of order: %w", i, s, storage.ErrInvalid)
		}
	}
	h, err := Verify(b)
	if err != nil {
		return nil, fmt.Errorf("split batch: %w", err)
	}
	if h.Kind != KindData {
		return nil, fmt.Errorf("split batch: it is a control batch: %w", storage.ErrInvalid)
	}
	plain, buf, err := plainPayload(&h, b)
	if err != nil {
		return nil, fmt.Errorf("split batch: %w", err)
	}
	defer releasePlain(buf)
	if err := checkRecords(h, plain); err != nil {
		return nil, fmt.Errorf("split batch: %w", err)
	}
	return cut(&h, plain, into)
}

// cut goes over the records once; each goes to the builder of its slice.
func cut(h *Header, plain []byte, into []storage.Slice) ([]Part, error) {
	type piece struct {
		Builder
		indexes []uint32
	}
	pieces := make([]*piece, len(into))
	w := walker{rest: plain, first: h.FirstTime, keep: true}
	var r Record
	for i := range h.Records {
		if err := w.next(&r); err != nil {
			return nil, fmt.Errorf("split batch: record %d: %w", i, err)
		}
		p := h.KeylessPosition()
		if r.Key != nil {
			p = storage.PositionOfKey(r.Key)
		}
		at, _ := slices.BinarySearchFunc(into, p, func(s storage.Slice, p storage.Position) int {
			if s.Last() < p {
				return -1
			}
			return 1 // the first slice that ends at p or later
		})
		if at == len(into) || !into[at].Holds(p) {
			return nil, fmt.Errorf("split batch: no slice holds record %d: %w", i, storage.ErrInvalid)
		}
		if pieces[at] == nil {
			pieces[at] = &piece{}
		}
		if err := pieces[at].add(&r, p); err != nil {
			return nil, fmt.Errorf("split batch: part for slice %s: %w", into[at], err)
		}
		pieces[at].indexes = append(pieces[at].indexes, i)
	}
	var parts []Part
	for i, p := range pieces {
		if p == nil {
			continue
		}
		data, err := p.Build(nil, Options{Codec: h.Codec, Producer: h.Producer, Epoch: h.Epoch, Sequence: h.Sequence, Slice: into[i]})
		if err != nil {
			return nil, fmt.Errorf("split batch: part for slice %s: %w", into[i], err)
		}
		parts = append(parts, Part{Slice: into[i], Data: data, Indexes: p.indexes})
	}
	return parts, nil
}
