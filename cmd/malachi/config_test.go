package main

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/services/broker"
)

func snake(name string) string {
	var b strings.Builder
	runes := []rune(name)
	for i, r := range runes {
		if unicode.IsUpper(r) && i > 0 && (unicode.IsLower(runes[i-1]) || i+1 < len(runes) && unicode.IsLower(runes[i+1])) {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}

// Every field of the broker's Config can be set, under its name in snake case, and there are no other keys than log_level.
func TestEveryFieldHasAKey(t *testing.T) {
	want := map[string]bool{"log_level": true}
	for _, f := range reflect.VisibleFields(reflect.TypeFor[broker.Config]()) {
		switch f.Name {
		case "Version": // of the build
		case "TLS":
			for _, of := range reflect.VisibleFields(f.Type) {
				want["tls_"+snake(of.Name)] = true
			}
		default:
			want[snake(f.Name)] = true
		}
	}
	for _, k := range keyNames() {
		if !want[k] {
			t.Errorf("key %s belongs to no field", k)
		}
		delete(want, k)
	}
	for k := range want {
		t.Errorf("no key %s", k)
	}
}

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "server.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// The example loads, and names every key: set, or commented out where there is no default.
func TestExampleConfiguration(t *testing.T) {
	const path = "../../deploy/server.example.yaml"
	if _, err := loadConfig(path, nil); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range keyNames() {
		if !strings.Contains(string(b), "\n"+key+": ") && !strings.Contains(string(b), "\n# "+key+": ") {
			t.Errorf("the example does not name %s", key)
		}
	}
}

func TestEnvironmentWinsOverTheFile(t *testing.T) {
	path := write(t, "data: /a\nsegment_max_age: 2h\nsegment_max_bytes: 1048576\nbootstrap: true\n")
	cfg, err := loadConfig(path, []string{
		"MALACHI_SEGMENT_MAX_AGE=30m", "MALACHI_DISK_RESERVE=1.5GiB", "MALACHI_BOOTSTRAP=false", "OTHER=1",
		"MALACHI_SERVER=http://x:1", "MALACHI_SERVICE_HOST=10.0.0.1", "MALACHI_PORT=tcp://10.0.0.1:4040", "MALACHI_API_PORT_4040_TCP_ADDR=10.0.0.1",
	})
	if err != nil {
		t.Fatal(err)
	}
	got := []any{cfg.Data, cfg.SegmentMaxAge, cfg.SegmentMaxBytes, cfg.DiskReserve, cfg.Bootstrap}
	want := []any{"/a", 30 * time.Minute, int64(1 << 20), uint64(3 << 29), false}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// A bad configuration never starts: every case is refused as usage, with all of its faults at once.
func TestBadConfigurationIsRefused(t *testing.T) {
	inv.Covers(t, "INV-O5")
	for name, c := range map[string]struct {
		yaml string
		env  []string
		want []string // one for each fault
	}{
		"no data":          {yaml: "bootstrap: true\n", want: []string{"data: name a folder"}},
		"empty file":       {yaml: "", want: []string{"data: name a folder"}},
		"unknown key":      {yaml: "data: /a\nsegment_max_byte: 1MiB\n", want: []string{"segment_max_byte: no such key; did you mean segment_max_bytes?"}},
		"wrong case":       {yaml: "Data: /a\n", want: []string{"Data: no such key; did you mean data?", "data: name a folder"}},
		"nested key":       {yaml: "data: /a\ndisk:\n  reserve: 1GiB\n", want: []string{"disk.reserve: no such key; did you mean disk_reserve?"}},
		"far from any key": {yaml: "data: /a\nzzzzzzzz: 1\n", want: []string{"zzzzzzzz: no such key; the keys are data, raft_dir,"}},
		"unknown variable": {yaml: "data: /a\n", env: []string{"MALACHI_SEGMENT_AGE=1h"}, want: []string{"MALACHI_SEGMENT_AGE: no key has this variable; did you mean MALACHI_SEGMENT_MAX_AGE?"}},
		"lower variable":   {yaml: "data: /a\n", env: []string{"MALACHI_api=127.0.0.1:0"}, want: []string{"MALACHI_api: no key has this variable; did you mean MALACHI_API?"}},
		"bad variable":     {yaml: "data: /a\n", env: []string{"MALACHI_VNODES=many"}, want: []string{`MALACHI_VNODES "many": want a whole number`}},
		"no unit":          {yaml: "data: /a\nsegment_max_age: 90\n", want: []string{`segment_max_age "90": want a duration with its unit`}},
		"negative":         {yaml: "data: /a\nsegment_max_age: -1h\nvnodes: -1\n", want: []string{`segment_max_age "-1h": want a duration`, `vnodes "-1": want`}},
		"zero":             {yaml: "data: /a\nsegment_max_bytes: 0\ndrain_grace: 0\n", want: []string{"segment_max_bytes \"0\": 0 is not a value", "drain_grace \"0\": 0 is not a value"}},
		"null":             {yaml: "data:\n", want: []string{"data: want one value", "data: name a folder"}},
		"list":             {yaml: "data: /a\napi: [127.0.0.1:1]\n", want: []string{"api: want one value"}},
		"yes for true":     {yaml: "data: /a\nbootstrap: \"yes\"\n", want: []string{`bootstrap "yes": want true or false`}},
		"twice":            {yaml: "data: /a\ndata: /b\n", want: []string{"data"}},
		"no yaml":          {yaml: "data: [\n", want: []string{"server.yaml"}},
		"every interface":  {yaml: "data: /a\napi: :4040\n", want: []string{`api ":4040": name the host`}},
		"not loopback":     {yaml: "data: /a\nops: 0.0.0.0:4041\n", want: []string{`ops "0.0.0.0:4041" listens on every interface`, "ops: 0.0.0.0:4041 can be reached"}},
		"same port":        {yaml: "data: /a\nops: 127.0.0.1:4040\n", want: []string{"api has this port already"}},
		"bad port":         {yaml: "data: /a\nraft: 127.0.0.1:99999\n", want: []string{`raft "127.0.0.1:99999": want a port`}},
		"many": {
			yaml: "data: /a\nvnodez: 3\nvnodes: 5000\nelection_timeout: 1ms\nsegment_max_bytes: 1KiB\njournal_file_bytes: 1MiB\nlog_level: loud\n",
			env:  []string{"MALACHI_OPS=4041", "MALACHI_JOURNAL_MAX_BYTES=big"},
			want: []string{"vnodez", "vnodes 5000", "election_timeout 1ms", "segment_max_bytes 1024", "journal_file_bytes 1048576", `log_level "loud"`,
				`ops "4041"`, `MALACHI_JOURNAL_MAX_BYTES "big"`},
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := loadConfig(write(t, c.yaml), c.env)
			if err == nil {
				t.Fatal("it was taken")
			}
			if code := exitCode(err); code != exitUsage {
				t.Errorf("exit code %d", code)
			}
			text := message(err)
			for _, w := range c.want {
				if !strings.Contains(text, w) {
					t.Errorf("%q is missing in: %s", w, text)
				}
			}
			if n := strings.Count(text, "\n"); len(c.want) > 1 && n != len(c.want) || len(c.want) == 1 && n > 0 {
				t.Errorf("want %d faults, got: %s", len(c.want), text)
			}
		})
	}
}

func TestConfigurationFileIsBounded(t *testing.T) {
	_, err := loadConfig(write(t, "data: /a\n#"+strings.Repeat("x", maxConfig)), nil)
	if exitCode(err) != exitUsage {
		t.Errorf("got %v", err)
	}
	_, err = loadConfig(filepath.Join(t.TempDir(), "none.yaml"), nil)
	if exitCode(err) != exitNotFound {
		t.Errorf("got %v", err)
	}
	if _, err = loadConfig(t.TempDir(), nil); exitCode(err) != exitUsage {
		t.Errorf("got %v", err)
	}
}
