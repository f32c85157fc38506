package batch

import (
	"bytes"
	"errors"
	"testing"

	"github.com/malachilog/malachi/storage"
)

func seeds(f *testing.F) {
	for _, codec := range codecs {
		f.Add(build(f, sample(3), Options{Codec: codec, Producer: storage.ProducerID{1}, Sequence: 5}))
	}
	f.Add(build(f, []Record{{}}, Options{Kind: KindControl}))
	f.Add(build(f, []Record{
		{Key: []byte{}, Headers: []RecordHeader{{[]byte("h"), []byte("x")}}, Time: 7}, {Value: []byte("v"), Time: -7}, {Key: []byte("k"), Time: 9},
	}, Options{}))
	f.Add(forge([]byte{1, 0x80, 0, 0}, 4, 1, CodecNone, nil))
	f.Add(make([]byte, HeaderSize+4))
}

func typed(err error) bool {
	return errors.Is(err, storage.ErrCorrupt) || errors.Is(err, storage.ErrInvalid) || errors.Is(err, storage.ErrTooLarge) ||
		errors.Is(err, storage.ErrNewerFormat)
}

// FuzzHeader: a header that is taken is written back to the same bytes; all else fails with a typed error.
func FuzzHeader(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, err := ParseHeader(b); err != nil && !typed(err) {
			t.Fatalf("untyped: %v", err)
		}
		b = resum(bytes.Clone(b))
		h, err := ParseHeader(b)
		if err != nil {
			if !typed(err) {
				t.Fatalf("untyped: %v", err)
			}
			return
		}
		var again [HeaderSize]byte
		h.put(again[:])
		sealHeader(again[:])
		if !bytes.Equal(again[:], b[:HeaderSize]) {
			t.Fatalf("%x is written back as %x", b[:HeaderSize], again)
		}
		if h.Records == 0 || h.Size() > storage.MaxBatchBytes || h.PlainBytes > storage.MaxBatchBytes {
			t.Fatalf("beyond the limits: %+v", h)
		}
	})
}

// FuzzCheck: what passes decodes, and, uncompressed, is the only encoding of its records.
func FuzzCheck(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		b = resum(bytes.Clone(b))
		h, err := Check(b)
		if err != nil {
			if !typed(err) {
				t.Fatalf("untyped: %v", err)
			}
			return
		}
		got, records, err := decodeAll(b)
		if err != nil || got != h || len(records) != int(h.Records) {
			t.Fatalf("passes Check, but decodes to %d of %d records: %v", len(records), h.Records, err)
		}
		var bld Builder
		for i := range records {
			if err := bld.Add(&records[i], h.KeylessPosition()); err != nil {
				t.Fatalf("passes Check, but the builder refuses record %d: %v", i, err)
			}
		}
		again, err := bld.Build(nil, Options{Kind: h.Kind, Producer: h.Producer, Epoch: h.Epoch, Sequence: h.Sequence, Slice: h.Slice})
		if err != nil {
			t.Fatal(err)
		}
		if h.Codec == CodecNone && !bytes.Equal(again[HeaderSize:], b[HeaderSize:]) {
			t.Fatalf("two encodings of the same records:\n%x\n%x", b[HeaderSize:], again[HeaderSize:])
		}
	})
}

// FuzzDecoder: never a panic, never more records than said, always a typed end.
func FuzzDecoder(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		h, records, err := decodeAll(resum(bytes.Clone(b)))
		if err != nil && !typed(err) {
			t.Fatalf("untyped: %v", err)
		}
		if len(records) > int(h.Records) || err == nil && len(records) != int(h.Records) {
			t.Fatalf("%d records of %d, %v", len(records), h.Records, err)
		}
	})
}

// FuzzSplit: parts are whole batches that together have every record.
func FuzzSplit(f *testing.F) {
	seeds(f)
	low, high := storage.Slice{}.Halves()
	l, r := high.Halves()
	f.Fuzz(func(t *testing.T, b []byte) {
		b = resum(bytes.Clone(b))
		parts, err := Split(b, []storage.Slice{low, l, r})
		if err != nil {
			if !typed(err) {
				t.Fatalf("untyped: %v", err)
			}
			return
		}
		h, err := Check(b)
		if err != nil {
			t.Fatalf("Split takes what Check refuses: %v", err)
		}
		n := 0
		for _, p := range parts {
			ph, err := Check(p.Data)
			if err != nil {
				t.Fatalf("part for %s: %v", p.Slice, err)
			}
			n += int(ph.Records)
		}
		if n != int(h.Records) {
			t.Fatalf("%d records of %d in the parts", n, h.Records)
		}
	})
}
