package batch

import (
	"testing"

	"github.com/malachilog/malachi/storage"
)

// Allocations are per batch, not per record: the same number for 1, 10 and 1000 records.
func TestAllocationsPerBatchAreConstant(t *testing.T) {
	for _, codec := range codecs {
		if raceDetector && codec != CodecNone {
			continue
		}
		for _, n := range []int{1, 10, 1000} {
			records := sample(n)
			records[0].Headers = []RecordHeader{{[]byte("h"), []byte("v")}}
			b := build(t, records, Options{Codec: codec})
			var d Decoder
			var bld Builder
			var dst []byte
			fails := 0
			count := func(err error) {
				if err != nil {
					fails++
				}
			}
			for name, f := range map[string]func(){
				"ParseHeader": func() { _, err := ParseHeader(b); count(err) },
				"Verify":      func() { _, err := Verify(b); count(err) },
				"Stamp":       func() { Stamp(b, 5, 6, storage.Slice{}) },
				"Check":       func() { _, err := Check(b); count(err) },
				"Decoder": func() {
					_, err := d.Open(b)
					count(err)
					var r Record
					for d.Next(&r) {
					}
					count(d.Err())
				},
				"Build": func() {
					bld.Reset()
					for i := range records {
						count(bld.Add(&records[i], 0))
					}
					var err error
					dst, err = bld.Build(dst[:0], Options{Codec: codec})
					count(err)
				},
			} {
				f()                                                // buffers and pools reach their size
				if got := testing.AllocsPerRun(50, f); got > 0.5 { // a collection may empty a pool in between
					t.Errorf("%s, %s, %d records: %.2f allocations", name, codec, n, got)
				}
			}
			if fails > 0 {
				t.Errorf("%s, %d records: %d calls failed", codec, n, fails)
			}
		}
	}
}

func BenchmarkBatch(b *testing.B) {
	for _, codec := range codecs {
		records := sample(100)
		for i := range records {
			records[i].Value = text(256, byte(i))
		}
		data := build(b, records, Options{Codec: codec})
		run := func(name string, f func() error) {
			b.Run(codec.String()+"/"+name, func(b *testing.B) {
				b.ReportAllocs()
				b.SetBytes(100 * 256)
				for b.Loop() {
					if err := f(); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/100, "ns/record")
			})
		}
		var bld Builder
		var dst []byte
		run("Build", func() (err error) {
			bld.Reset()
			for i := range records {
				if err := bld.Add(&records[i], 0); err != nil {
					return err
				}
			}
			dst, err = bld.Build(dst[:0], Options{Codec: codec})
			return err
		})
		run("Check", func() error { _, err := Check(data); return err })
		run("Verify", func() error { _, err := Verify(data); return err })
		var d Decoder
		run("Decode", func() error {
			_, err := d.Open(data)
			for r := (Record{}); d.Next(&r); {
			}
			return err
		})
		low, high := storage.Slice{}.Halves()
		run("Split", func() error { _, err := Split(data, []storage.Slice{low, high}); return err })
	}
}
