package batch

import (
	"bytes"
	"encoding/binary"
	"errors"
	"runtime"
	"testing"

	"github.com/klauspost/compress/s2"
	"github.com/klauspost/compress/zstd"

	"github.com/malachilog/malachi/storage"
)

// forge makes a batch of any payload under a header that says whatever edit wants, with right CRCs.
func forge(payload []byte, plain int, records uint32, codec Codec, edit func(h *Header)) []byte {
	h := Header{Kind: KindData, Codec: codec, PayloadBytes: uint32(len(payload)), PlainBytes: uint32(plain), Records: records,
		Highest: ^storage.Position(0)}
	if edit != nil {
		edit(&h)
	}
	b := append(make([]byte, HeaderSize), payload...)
	h.put(b)
	return resum(b)
}

// everyWay runs b through all that reads a payload; each must fail with want.
func everyWay(t *testing.T, name string, b []byte, want error) {
	t.Helper()
	if _, err := Check(b); !errors.Is(err, want) {
		t.Errorf("%s: Check: %v, want %v", name, err, want)
	}
	if _, _, err := decodeAll(b); !errors.Is(err, want) {
		t.Errorf("%s: Decoder: %v, want %v", name, err, want)
	}
	if _, err := Split(b, []storage.Slice{{}}); !errors.Is(err, want) {
		t.Errorf("%s: Split: %v, want %v", name, err, want)
	}
}

func TestHostileRecords(t *testing.T) {
	rec := func(parts ...any) []byte {
		var b []byte
		for _, p := range parts {
			switch p := p.(type) {
			case int:
				b = append(b, byte(p))
			case uint64:
				b = binary.AppendUvarint(b, p)
			case []byte:
				b = append(b, p...)
			}
		}
		return b
	}
	zero := func(n int) []byte { return make([]byte, n) }
	tests := map[string]struct {
		payload []byte
		records uint32
		want    error
	}{
		"unknown flag":            {rec(2, 0, 0, 0), 1, storage.ErrInvalid},
		"value longer than rest":  {rec(0, 9, 0, 0), 1, storage.ErrInvalid},
		"value length 2^63":       {rec(0, uint64(1<<63), 0, 0), 1, storage.ErrInvalid},
		"length over 64 bits":     {rec(0, bytes.Repeat([]byte{0xff}, 12)), 1, storage.ErrInvalid},
		"length in long spelling": {rec(0, []byte{0x81, 0x00}, 0, 0, 0), 1, storage.ErrInvalid},
		"zero in long spelling":   {rec(0, []byte{0x80, 0x00}, 0, 0), 1, storage.ErrInvalid},
		"cut off number":          {rec(0, 0, 0, 0x80), 1, storage.ErrInvalid},
		"key too long":            {rec(1, uint64(storage.MaxKeyBytes+1), zero(storage.MaxKeyBytes+1), 0, 0, 0), 1, storage.ErrTooLarge},
		"value too long":          {rec(0, uint64(storage.MaxRecordBytes+1), zero(storage.MaxRecordBytes+1), 0, 0), 1, storage.ErrTooLarge},
		"too many headers":        {rec(0, 0, 65, zero(130), 0), 1, storage.ErrTooLarge},
		"2^60 headers":            {rec(0, 0, uint64(1<<60), 0), 1, storage.ErrTooLarge},
		"header key too long":     {rec(0, 0, 1, uint64(257), zero(257), 0, 0), 1, storage.ErrTooLarge},
		"header key no UTF-8":     {rec(0, 0, 1, 1, 0xff, 0, 0), 1, storage.ErrInvalid},
		"count too high":          {rec(0, 4, zero(4), 0, 0), 2, storage.ErrInvalid},
		"count too low":           {rec(0, 0, 0, 0, 0, 0, 0, 0), 1, storage.ErrInvalid},
		"rubbish after the last":  {rec(0, 0, 0, 0, 7), 1, storage.ErrInvalid},
	}
	for name, tt := range tests {
		everyWay(t, name, forge(tt.payload, len(tt.payload), tt.records, CodecNone, nil), tt.want)
		z := forge(s2.Encode(nil, tt.payload), len(tt.payload), tt.records, CodecS2, nil)
		everyWay(t, name+" in s2", z, tt.want)
	}
}

// Lies of the header about its records: a reader can live with them, an append must not.
func TestHeaderLies(t *testing.T) {
	keyed := Record{Key: []byte("k"), Value: []byte("v"), Time: 50}
	p := storage.PositionOfKey([]byte("k"))
	payload := appendRecord(appendRecord(nil, &keyed, 50), &keyed, 50)
	honest := func(h *Header) { h.Lowest, h.Highest, h.FirstTime, h.MaxTime = p, p, 50, 50 }
	if _, err := Check(forge(payload, len(payload), 2, CodecNone, honest)); err != nil {
		t.Fatalf("the honest one: %v", err)
	}
	for name, lie := range map[string]func(h *Header){
		"lowest":  func(h *Header) { h.Lowest-- },
		"highest": func(h *Header) { h.Highest++ },
		"max":     func(h *Header) { h.MaxTime++ },
		"slice":   func(h *Header) { h.Slice = storage.Slice{Prefix: uint32(^uint64(p) >> 63), Depth: 1} },
	} {
		b := forge(payload, len(payload), 2, CodecNone, func(h *Header) { honest(h); lie(h) })
		if _, err := Check(b); !errors.Is(err, storage.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	late := keyed
	late.Time = 51
	payload = appendRecord(nil, &late, 50)
	b := forge(payload, len(payload), 1, CodecNone, func(h *Header) { honest(h); h.MaxTime = 51 })
	if _, err := Check(b); !errors.Is(err, storage.ErrInvalid) {
		t.Errorf("first record not of the first time: %v", err)
	}
}

func zstdOf(t *testing.T, plain []byte, opts ...zstd.EOption) []byte {
	t.Helper()
	e, err := zstd.NewWriter(nil, append([]zstd.EOption{zstd.WithEncoderConcurrency(1)}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	return e.EncodeAll(plain, nil)
}

// bombs are payloads that are small and large at once, or no payloads at all.
func bombs(t *testing.T) map[string][]byte {
	const plain = 1 << 20
	zeros := make([]byte, 16<<20)
	var stream bytes.Buffer // a streamed frame does not state its length
	w, err := zstd.NewWriter(&stream)
	if err != nil {
		t.Fatal(err)
	}
	for range 16 {
		if _, err := w.Write(zeros[:1<<20]); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	lying := zstdOf(t, zeros, zstd.WithEncoderCRC(false), zstd.WithSingleSegment(true))
	binary.LittleEndian.PutUint32(lying[5:], plain) // the content size of a single-segment frame
	one := zstdOf(t, make([]byte, plain))
	out := map[string][]byte{
		"zstd too long":        zstdOf(t, zeros),
		"zstd unknown length":  stream.Bytes(),
		"zstd lying length":    lying,
		"zstd two frames":      append(bytes.Clone(one), one...),
		"zstd skippable frame": append([]byte{0x50, 0x2a, 0x4d, 0x18, 4, 0, 0, 0, 1, 2, 3, 4}, one...),
		"zstd frame and more":  append(bytes.Clone(one), 0),
		"zstd cut off":         one[:len(one)-1],
		"zstd too short":       zstdOf(t, make([]byte, plain-1)),
		"zstd rubbish":         []byte("this is no frame"),
		"s2 too long":          s2.Encode(nil, zeros),
		"s2 too short":         s2.Encode(nil, make([]byte, plain-1)),
		"s2 lying length":      append(binary.AppendUvarint(nil, plain), s2.Encode(nil, zeros)[4:]...),
		"s2 rubbish":           []byte("\x80\x80\x40this is no block"),
		"s2 absurd length":     bytes.Repeat([]byte{0xff}, 10),
	}
	for i := range 100 { // RLE blocks that run over what the frame states
		if i == 0 {
			out["zstd rle flood"] = []byte{0x28, 0xb5, 0x2f, 0xfd, 0xa0, 0, 0, 0x10, 0}
		}
		block := uint32(128<<10)<<3 | 1<<1
		if i == 99 {
			block |= 1
		}
		out["zstd rle flood"] = append(out["zstd rle flood"], byte(block), byte(block>>8), byte(block>>16), 'x')
	}
	return out
}

// allocated runs f and gives the bytes that it took from the heap, without what other goroutines do: there are none here.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

func TestBombsAreBounded(t *testing.T) {
	const plain = 1 << 20
	for name, payload := range bombs(t) {
		codec := CodecZstd
		if name[0] == 's' {
			codec = CodecS2
		}
		b := forge(payload, plain, 1000, codec, nil)
		everyWay(t, name, b, storage.ErrInvalid) // also fills the pools
		n := allocated(func() {
			var d Decoder
			if _, err := d.Open(b); err == nil {
				t.Errorf("%s: opened", name)
			}
		})
		// The declared length, as much again for a frame that lies, and the tables of a fresh pooled decoder.
		if limit := uint64(2*plain + 1<<20); n > limit {
			t.Errorf("%s: %d bytes allocated for a batch that says %d, limit %d", name, n, plain, limit)
		}
	}
}

// A header alone can make nobody take memory: lengths beyond the limit stop before the payload is touched.
func TestDeclaredLengthIsBounded(t *testing.T) {
	payload := zstdOf(t, make([]byte, 16<<20))
	b := forge(payload, 16<<20, 1, CodecZstd, nil)
	n := allocated(func() { everyWay(t, "16 MiB", b, storage.ErrTooLarge) })
	if n > 64<<10 {
		t.Errorf("%d bytes allocated to refuse it", n)
	}
}
