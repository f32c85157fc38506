package batch

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/storage"
)

var codecs = []Codec{CodecNone, CodecS2, CodecZstd}

// clone makes r independent of whatever it aliases.
func clone(r Record) Record {
	r.Key, r.Value = bytes.Clone(r.Key), append([]byte{}, r.Value...)
	hs := r.Headers
	r.Headers = nil
	for _, h := range hs {
		r.Headers = append(r.Headers, RecordHeader{append([]byte{}, h.Key...), append([]byte{}, h.Value...)})
	}
	return r
}

func build(t testing.TB, records []Record, o Options) []byte {
	t.Helper()
	var b Builder
	for i := range records {
		if err := b.Add(&records[i], KeylessPosition(o.Producer, o.Sequence)); err != nil {
			t.Fatalf("add record %d: %v", i, err)
		}
	}
	out, err := b.Build(nil, o)
	if err != nil {
		t.Fatalf("build: %v", err)
	}
	return out
}

func decode(t testing.TB, b []byte) (Header, []Record) {
	t.Helper()
	h, records, err := decodeAll(b)
	if err != nil {
		t.Fatalf("decode: %v", err)
	}
	return h, records
}

func decodeAll(b []byte) (Header, []Record, error) {
	var d Decoder
	h, err := d.Open(b)
	if err != nil {
		return h, nil, err
	}
	var out []Record
	for r := (Record{}); d.Next(&r); {
		out = append(out, clone(r))
	}
	return h, out, d.Err()
}

func text(n int, seed byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = 'a' + (seed+byte(i%7))%26
	}
	return b
}

func sample(n int) []Record {
	out := make([]Record, n)
	for i := range out {
		out[i] = Record{Key: fmt.Appendf(nil, "user-%d", i%17), Value: text(100, byte(i)), Time: storage.Time(1e18 + int64(i)*1000)}
	}
	return out
}

// resum repairs both CRCs, so that a test reaches what they guard.
func resum(b []byte) []byte {
	if len(b) >= HeaderSize {
		binary.LittleEndian.PutUint32(b[offPayloadCRC:], crc32.Checksum(b[HeaderSize:], castagnoli))
		sealHeader(b)
	}
	return b
}

func genRecord(t *rapid.T) Record {
	r := Record{Value: rapid.SliceOfN(rapid.Byte(), 0, 60).Draw(t, "value"), Time: storage.Time(rapid.Int64().Draw(t, "time"))}
	if rapid.Bool().Draw(t, "keyed") {
		r.Key = append([]byte{}, rapid.SliceOfN(rapid.Byte(), 0, 20).Draw(t, "key")...)
	}
	for range rapid.IntRange(0, 3).Draw(t, "headers") {
		r.Headers = append(r.Headers, RecordHeader{
			Key:   []byte(rapid.StringN(0, 8, 32).Draw(t, "hkey")),
			Value: append([]byte{}, rapid.SliceOfN(rapid.Byte(), 0, 10).Draw(t, "hvalue")...),
		})
	}
	return clone(r)
}

func genOptions(t *rapid.T) Options {
	o := Options{Kind: KindData, Codec: rapid.SampledFrom(codecs).Draw(t, "codec")}
	if rapid.Bool().Draw(t, "named") {
		copy(o.Producer[:], rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "producer"))
		o.Epoch, o.Sequence = rapid.Uint32().Draw(t, "epoch"), rapid.Uint64().Draw(t, "sequence")
	}
	return o
}

func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		records := rapid.SliceOfN(rapid.Custom(genRecord), 1, 40).Draw(rt, "records")
		o := genOptions(rt)
		b := build(t, records, o)
		checked, err := Check(b)
		if err != nil {
			rt.Fatalf("check: %v", err)
		}
		h, got := decode(t, b)
		if h != checked {
			rt.Fatalf("Check says %+v, Open %+v", checked, h)
		}
		if d := cmp.Diff(records, got); d != "" {
			rt.Fatalf("records (-built +decoded):\n%s", d)
		}
		if h.Producer != o.Producer || h.Epoch != o.Epoch || h.Sequence != o.Sequence || int(h.Records) != len(records) {
			rt.Fatalf("header %+v of options %+v", h, o)
		}
		// The other way round: what was decoded encodes to the same bytes.
		o.Codec, o.Kind = h.Codec, h.Kind
		if again := build(t, got, o); !bytes.Equal(again, b) {
			rt.Fatal("encoding what was decoded gives other bytes")
		}
		var put [HeaderSize]byte
		h.put(put[:])
		sealHeader(put[:])
		if !bytes.Equal(put[:], b[:HeaderSize]) {
			rt.Fatal("a parsed header is not written back as it was")
		}
	})
}

func TestStampChangesOnlyItsFields(t *testing.T) {
	for _, codec := range codecs {
		b := build(t, sample(50), Options{Codec: codec, Producer: storage.ProducerID{1}, Sequence: 7})
		want, err := Check(b)
		if err != nil {
			t.Fatal(err)
		}
		payload := bytes.Clone(b[HeaderSize:])
		Stamp(b, 1234, 99, storage.Slice{Prefix: 1, Depth: 1})
		got, err := Verify(b)
		if err != nil {
			t.Fatalf("%s: after Stamp: %v", codec, err)
		}
		want.Base, want.AppendTime, want.Slice, want.HeaderCRC = 1234, 99, storage.Slice{Prefix: 1, Depth: 1}, got.HeaderCRC
		if got != want {
			t.Errorf("%s: Stamp changed more than its fields:\n got %+v\nwant %+v", codec, got, want)
		}
		if got.End() != 1284 {
			t.Errorf("end %d, want 1284", got.End())
		}
		if !bytes.Equal(payload, b[HeaderSize:]) {
			t.Errorf("%s: Stamp changed the payload", codec)
		}
	}
}

// Stamp computes no payload CRC: damage from before it stays visible.
func TestStampDoesNotHideDamage(t *testing.T) {
	b := build(t, sample(3), Options{})
	b[HeaderSize+9] ^= 1
	Stamp(b, 1, 1, storage.Slice{})
	if _, err := Verify(b); !errors.Is(err, storage.ErrCorrupt) {
		t.Fatalf("verify after Stamp of a damaged batch: %v", err)
	}
}

func TestEveryFlippedBitIsSeen(t *testing.T) {
	for _, codec := range codecs {
		b := build(t, sample(4), Options{Codec: codec})
		for i := range b {
			for bit := range 8 {
				b[i] ^= 1 << bit
				if _, err := Verify(b); !errors.Is(err, storage.ErrCorrupt) {
					t.Fatalf("%s: byte %d bit %d flipped: %v", codec, i, bit, err)
				}
				b[i] ^= 1 << bit
			}
		}
		for n := range b {
			if _, err := Verify(b[:n]); !errors.Is(err, storage.ErrCorrupt) {
				t.Fatalf("%s: cut to %d bytes: %v", codec, n, err)
			}
		}
		if _, err := Verify(append(b, 0)); !errors.Is(err, storage.ErrCorrupt) {
			t.Fatalf("%s: one byte too many: %v", codec, err)
		}
	}
}

func TestZeroBytesAreNoBatch(t *testing.T) {
	for _, n := range []int{0, 1, HeaderSize, 4096} {
		if _, err := ParseHeader(make([]byte, n)); !errors.Is(err, storage.ErrCorrupt) {
			t.Errorf("%d zero bytes: %v", n, err)
		}
	}
}

func TestHeaderRules(t *testing.T) {
	le := binary.LittleEndian
	tests := map[string]struct {
		edit func(b []byte)
		want error
	}{
		"newer version":           {func(b []byte) { b[offVersion] = 2 }, storage.ErrNewerFormat},
		"version 0":               {func(b []byte) { b[offVersion] = 0 }, storage.ErrInvalid},
		"kind 0":                  {func(b []byte) { b[offKind] = 0 }, storage.ErrInvalid},
		"kind 3":                  {func(b []byte) { b[offKind] = 3 }, storage.ErrInvalid},
		"codec 0":                 {func(b []byte) { b[offCodec] = 0 }, ErrUnknownCodec},
		"codec 4":                 {func(b []byte) { b[offCodec] = 4 }, ErrUnknownCodec},
		"control of many":         {func(b []byte) { b[offKind] = 2 }, storage.ErrInvalid},
		"depth 25":                {func(b []byte) { b[offDepth] = 25 }, storage.ErrInvalid},
		"prefix beyond depth":     {func(b []byte) { le.PutUint32(b[offPrefix:], 1) }, storage.ErrInvalid},
		"payload too long":        {func(b []byte) { le.PutUint32(b[offPayloadBytes:], storage.MaxBatchBytes) }, storage.ErrTooLarge},
		"payload 4 GiB":           {func(b []byte) { le.PutUint32(b[offPayloadBytes:], math.MaxUint32) }, storage.ErrTooLarge},
		"uncompressed too long":   {func(b []byte) { le.PutUint32(b[offPlainBytes:], math.MaxUint32) }, storage.ErrTooLarge},
		"lengths differ":          {func(b []byte) { le.PutUint32(b[offPlainBytes:], 1000) }, storage.ErrInvalid},
		"too many records":        {func(b []byte) { le.PutUint32(b[offRecords:], storage.MaxBatchRecords+1) }, storage.ErrTooLarge},
		"more records than bytes": {func(b []byte) { le.PutUint32(b[offRecords:], 60000) }, storage.ErrInvalid},
		"reserved":                {func(b []byte) { b[offReserved] = 1 }, storage.ErrInvalid},
		"positions":               {func(b []byte) { le.PutUint64(b[offLowest:], math.MaxUint64) }, storage.ErrInvalid},
		"times":                   {func(b []byte) { le.PutUint64(b[offMaxTime:], 1<<63) }, storage.ErrInvalid},
		"offset beyond the last":  {func(b []byte) { le.PutUint64(b[offBase:], math.MaxUint64) }, storage.ErrInvalid},
		"end beyond the last":     {func(b []byte) { le.PutUint64(b[offBase:], uint64(storage.MaxOffset)) }, storage.ErrInvalid},
	}
	for name, tt := range tests {
		b := build(t, sample(3), Options{})
		tt.edit(b)
		sealHeader(b)
		if _, err := ParseHeader(b); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
	if !errors.Is(ErrUnknownCodec, storage.ErrInvalid) {
		t.Error("ErrUnknownCodec must be a case of ErrInvalid")
	}
}

// A batch without a record would take no offset: nobody can build one, and none is taken.
func TestEmptyBatchIsRefused(t *testing.T) {
	inv.Covers(t, "INV-D16")
	var empty Builder
	if _, err := empty.Build(nil, Options{}); !errors.Is(err, storage.ErrInvalid) {
		t.Errorf("build without a record: %v", err)
	}
	b := build(t, sample(1), Options{})
	binary.LittleEndian.PutUint32(b[offRecords:], 0)
	sealHeader(b)
	if _, err := ParseHeader(b); !errors.Is(err, storage.ErrInvalid) {
		t.Errorf("header with count 0: %v", err)
	}
	for _, n := range []int{1, 2, 1000} {
		h, _ := decode(t, build(t, sample(n), Options{}))
		if h.End() != storage.EndAfter(h.Base, uint64(n)) {
			t.Errorf("batch of %d records ends at %d from %d", n, h.End(), h.Base)
		}
	}
}

func TestBuilderLimits(t *testing.T) {
	big := func(n int) []byte { return make([]byte, n) }
	tests := map[string]struct {
		r    Record
		want error
	}{
		"record at the limit":      {Record{Key: big(10), Value: big(storage.MaxRecordBytes - 10)}, nil},
		"record beyond":            {Record{Key: big(10), Value: big(storage.MaxRecordBytes - 9)}, storage.ErrTooLarge},
		"key at the limit":         {Record{Key: big(storage.MaxKeyBytes)}, nil},
		"key beyond":               {Record{Key: big(storage.MaxKeyBytes + 1)}, storage.ErrTooLarge},
		"headers at the limit":     {Record{Headers: make([]RecordHeader, storage.MaxHeaders)}, nil},
		"headers beyond":           {Record{Headers: make([]RecordHeader, storage.MaxHeaders+1)}, storage.ErrTooLarge},
		"header key beyond":        {Record{Headers: []RecordHeader{{Key: big(storage.MaxHeaderKey + 1)}}}, storage.ErrTooLarge},
		"header key no UTF-8":      {Record{Headers: []RecordHeader{{Key: []byte{0xff}}}}, storage.ErrInvalid},
		"header value counts, too": {Record{Headers: []RecordHeader{{Value: big(storage.MaxRecordBytes + 1)}}}, storage.ErrTooLarge},
	}
	for name, tt := range tests {
		var b Builder
		err := b.Add(&tt.r, 0)
		if !errors.Is(err, tt.want) || errors.Is(err, ErrFull) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
		if err != nil && (b.Records() != 0 || b.Bytes() != HeaderSize) {
			t.Errorf("%s: a refused record left %d records, %d bytes", name, b.Records(), b.Bytes())
		}
		if err != nil {
			continue
		}
		out, err := b.Build(nil, Options{})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if _, err := Check(out); err != nil {
			t.Errorf("%s: built, but Check says %v", name, err)
		}
	}
}

func TestBuilderFull(t *testing.T) {
	var b Builder
	r := Record{Value: make([]byte, storage.MaxRecordBytes)}
	for b.Add(&r, 0) == nil {
	}
	if err := b.Add(&r, 0); !errors.Is(err, ErrFull) {
		t.Fatalf("full by bytes: %v", err)
	}
	r.Value = make([]byte, storage.MaxBatchBytes-b.Bytes()-1-3-1-1) // flags, value length, header count, time delta
	if err := b.Add(&r, 0); err != nil {
		t.Fatalf("a record that fills the batch to the byte: %v", err)
	}
	out, err := b.Build(nil, Options{})
	if err != nil || len(out) != storage.MaxBatchBytes {
		t.Fatalf("full batch: %d bytes, %v", len(out), err)
	}
	if _, err := Check(out); err != nil {
		t.Fatal(err)
	}
	b.Reset()
	r = Record{}
	for range storage.MaxBatchRecords {
		if err := b.Add(&r, 0); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.Add(&r, 0); !errors.Is(err, ErrFull) {
		t.Fatalf("full by records: %v", err)
	}
	if out, err = b.Build(out[:0], Options{Codec: CodecZstd}); err != nil {
		t.Fatal(err)
	}
	if h, err := Check(out); err != nil || h.Records != storage.MaxBatchRecords {
		t.Fatalf("%d records, %v", h.Records, err)
	}
}

func TestBuildAppendsAndRefuses(t *testing.T) {
	var b Builder
	for _, r := range sample(2) {
		if err := b.Add(&r, 0); err != nil {
			t.Fatal(err)
		}
	}
	out, err := b.Build([]byte("front"), Options{Codec: CodecS2})
	if err != nil || string(out[:5]) != "front" {
		t.Fatalf("%q, %v", out[:5], err)
	}
	if _, err := Check(out[5:]); err != nil {
		t.Fatal(err)
	}
	for name, o := range map[string]Options{
		"codec": {Codec: 9}, "kind": {Kind: 9}, "control of two": {Kind: KindControl}, "slice": {Slice: storage.Slice{Depth: 99}},
	} {
		if out, err := b.Build([]byte("x"), o); !errors.Is(err, storage.ErrInvalid) || string(out) != "x" {
			t.Errorf("%s: %q, %v", name, out, err)
		}
	}
}

func TestIncompressibleIsStoredPlain(t *testing.T) {
	r := Record{Value: make([]byte, 4096)}
	x := uint64(88172645463325252)
	for i := range r.Value {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		r.Value[i] = byte(x)
	}
	for _, codec := range codecs {
		h, got := decode(t, build(t, []Record{r}, Options{Codec: codec}))
		if h.Codec != CodecNone || !bytes.Equal(got[0].Value, r.Value) {
			t.Errorf("%s: stored as %s", codec, h.Codec)
		}
		if h, _ := decode(t, build(t, sample(20), Options{Codec: codec})); h.Codec != codec {
			t.Errorf("%s: compressible stored as %s", codec, h.Codec)
		}
	}
}

func TestPositionsInHeader(t *testing.T) {
	id := storage.ProducerID{7}
	records := append(sample(10), Record{Value: []byte("keyless")}, Record{Key: []byte{}})
	var want []storage.Position
	for _, r := range records {
		if r.Key == nil {
			want = append(want, KeylessPosition(id, 3))
		} else {
			want = append(want, storage.PositionOfKey(r.Key))
		}
	}
	h, _ := decode(t, build(t, records, Options{Producer: id, Sequence: 3}))
	if h.Lowest != slices.Min(want) || h.Highest != slices.Max(want) {
		t.Errorf("positions %x..%x, want %x..%x", h.Lowest, h.Highest, slices.Min(want), slices.Max(want))
	}
}

func TestCodecNames(t *testing.T) {
	for _, c := range codecs {
		if got, err := ParseCodec(c.String()); got != c || err != nil {
			t.Errorf("%s: %v, %v", c, got, err)
		}
	}
	if _, err := ParseCodec("gzip"); !errors.Is(err, ErrUnknownCodec) {
		t.Errorf("gzip: %v", err)
	}
}
