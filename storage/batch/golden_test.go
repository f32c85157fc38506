package batch

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/malachilog/malachi/storage"
)

// freeze writes fixtures that do not exist yet. One that exists is never written again: it is what some disk holds.
var freeze = flag.Bool("freeze", false, "write missing fixtures")

type fixture struct {
	Options Options
	Stamp   *stamp `json:",omitempty"`
	Records []Record
}

type stamp struct {
	Base       storage.Offset
	AppendTime storage.Time
	Slice      storage.Slice
}

func fixtures() map[string]fixture {
	id := storage.ProducerID{0xde, 0xad, 0xbe, 0xef, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
	mixed := []Record{
		{Key: []byte("user-1"), Value: []byte("first"), Time: 1_700_000_000_123_456_789},
		{Key: []byte{}, Value: []byte("empty key"), Time: 1_700_000_000_000_000_000},
		{Value: []byte("no key"), Time: 1_700_000_001_000_000_000},
		{Key: []byte("user-1"), Value: []byte{}, Headers: []RecordHeader{
			{[]byte("trace"), []byte{0, 1, 0xff}}, {[]byte("trace"), []byte{}}, {[]byte("größe"), []byte("300")},
		}, Time: -5},
		{Key: bytes.Repeat([]byte("k"), 200), Value: bytes.Repeat([]byte("value "), 60), Time: 1_700_000_000_123_456_790},
	}
	return map[string]fixture{
		"none":        {Options: Options{Kind: KindData, Codec: CodecNone, Producer: id, Epoch: 3, Sequence: 1 << 40}, Records: mixed},
		"s2":          {Options: Options{Kind: KindData, Codec: CodecS2, Producer: id, Sequence: 1}, Records: mixed},
		"zstd":        {Options: Options{Kind: KindData, Codec: CodecZstd, Producer: id, Sequence: 2}, Records: mixed},
		"no-producer": {Options: Options{Kind: KindData, Codec: CodecNone}, Records: mixed[:3]},
		"control":     {Options: Options{Kind: KindControl, Codec: CodecNone, Slice: storage.Slice{Prefix: 5, Depth: 3}}, Records: []Record{{Value: []byte("epoch"), Time: 1}}},
		"stamped": {Options: Options{Kind: KindData, Codec: CodecNone, Producer: id, Sequence: 9}, Records: mixed[:1],
			Stamp: &stamp{Base: 1 << 33, AppendTime: 1_800_000_000_000_000_000, Slice: storage.Slice{Prefix: uint32(storage.PositionOfKey([]byte("user-1")) >> 61), Depth: 3}}},
	}
}

func TestFrozenBatches(t *testing.T) {
	if *freeze {
		for name, f := range fixtures() {
			writeFixture(t, name, f)
		}
	}
	files, err := filepath.Glob("testdata/*.hex")
	if err != nil || len(files) < 6 {
		t.Fatalf("%d fixtures, %v", len(files), err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(file, ".hex")
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		frozen, err := hex.DecodeString(strings.Join(strings.Fields(string(text)), ""))
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		text, err = os.ReadFile(name + ".json")
		if err != nil {
			t.Fatal(err)
		}
		var want fixture
		if err := json.Unmarshal(text, &want); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		h, got := decode(t, frozen)
		if d := cmp.Diff(want.Records, got); d != "" {
			t.Errorf("%s: records (-frozen +decoded):\n%s", file, d)
		}
		if h.Codec != want.Options.Codec || h.Kind != want.Options.Kind || h.Producer != want.Options.Producer ||
			h.Epoch != want.Options.Epoch || h.Sequence != want.Options.Sequence {
			t.Errorf("%s: header %+v", file, h)
		}
		if _, err := Check(frozen); err != nil {
			t.Errorf("%s: %v", file, err)
		}
		if h.Codec == CodecNone { // compressors may change how they say it, the plain form may not
			if again := encodeFixture(t, want); !bytes.Equal(again, frozen) {
				t.Errorf("%s: encodes to other bytes:\n%s", file, cmp.Diff(hex.Dump(frozen), hex.Dump(again)))
			}
		}
	}
}

func encodeFixture(t *testing.T, f fixture) []byte {
	var b Builder
	keyless := KeylessPosition(f.Options.Producer, f.Options.Sequence)
	if f.Options.Producer.IsZero() {
		keyless = f.Options.Slice.First()
	}
	for i := range f.Records {
		if err := b.Add(&f.Records[i], keyless); err != nil {
			t.Fatal(err)
		}
	}
	out, err := b.Build(nil, f.Options)
	if err != nil {
		t.Fatal(err)
	}
	if f.Stamp != nil {
		Stamp(out, f.Stamp.Base, f.Stamp.AppendTime, f.Stamp.Slice)
	}
	return out
}

func writeFixture(t *testing.T, name string, f fixture) {
	path := filepath.Join("testdata", name)
	if _, err := os.Stat(path + ".hex"); !errors.Is(err, fs.ErrNotExist) {
		return
	}
	dump := hex.EncodeToString(encodeFixture(t, f))
	var lines strings.Builder
	for len(dump) > 0 {
		n := min(64, len(dump))
		lines.WriteString(dump[:n] + "\n")
		dump = dump[n:]
	}
	text, err := json.MarshalIndent(f, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.WriteFile(path+".json", append(text, '\n'), 0o644), os.WriteFile(path+".hex", []byte(lines.String()), 0o644)); err != nil {
		t.Fatal(err)
	}
}
