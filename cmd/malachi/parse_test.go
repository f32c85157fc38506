package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os/exec"
	"reflect"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"connectrpc.com/connect/v2"

	"github.com/malachilog/malachi/client"
	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/services/broker"
	"github.com/malachilog/malachi/storage"
)

func TestParseServer(t *testing.T) {
	for in, want := range map[string]string{
		"http://a:1":      "http://a:1",
		"https://a:1/":    "https://a:1",
		"http://a":        "http://a",
		"a:1":             "http://a:1",
		":4141":           "http://127.0.0.1:4141",
		"a":               "http://a:4040",
		"[::1]:5":         "http://[::1]:5",
		"::1":             "http://[::1]:4040",
		"":                "",
		"ftp://a:1":       "",
		"http://":         "",
		"http://a:1/path": "",
		"http://a:1?x=1":  "",
		"http://u:p@a:1":  "",
		"a b:1":           "",
	} {
		got, err := parseServer("--server", in)
		if got != want || (err == nil) != (want != "") || err != nil && exitCode(err) != exitUsage {
			t.Errorf("%q: got %q, %v; want %q", in, got, err, want)
		}
	}
}

func TestParseDuration(t *testing.T) {
	for in, want := range map[string]time.Duration{
		"90s": 90 * time.Second, "1h30m": 90 * time.Minute, "7d": 7 * day, "1d12h": 36 * time.Hour, "0s": 0, "1.5h": 90 * time.Minute,
		"": -1, "15": -1, "0": -1, "-1s": -1, "+1s": -1, "1d-1h": -1, "d": -1, "-1d": -1, "1.5d": -1, "99999999d": -1, "106751d24h": -1, "1w": -1,
	} {
		got, err := parseDuration(in)
		if want < 0 != (err != nil) || want >= 0 && got != want {
			t.Errorf("%q: got %v, %v; want %v", in, got, err, want)
		}
	}
}

func TestParseSize(t *testing.T) {
	const bad = 1 << 63
	for in, want := range map[string]uint64{
		"0": 0, "1048576": 1 << 20, "256MiB": 256 << 20, "2 GiB": 2 << 30, "1gb": 1e9, "10b": 10, "1.5KiB": 1536, "8TiB": 8 << 40,
		"": bad, "MiB": bad, "-1": bad, "1.5": bad, "1e3KiB": bad, "9223372036854775808": bad, "9000000TiB": bad, "1XiB": bad, "nanKiB": bad, "0x10": bad,
	} {
		got, err := parseSize(in)
		if (want == bad) != (err != nil) || want != bad && got != want {
			t.Errorf("%q: got %d, %v; want %d", in, got, err, want)
		}
	}
}

func TestParseStart(t *testing.T) {
	now := time.Date(2026, 2, 3, 4, 5, 6, 0, time.UTC)
	cursor := strings.Repeat("A", 40)
	for in, want := range map[string]client.Start{
		"earliest":                  client.Earliest(),
		"latest":                    client.Latest(),
		"-15m":                      client.At(now.Add(-15 * time.Minute)),
		"-1d":                       client.At(now.Add(-day)),
		"@2026-01-31":               client.At(time.Date(2026, 1, 31, 0, 0, 0, 0, time.UTC)),
		"@2026-01-31T12:00:00Z":     client.At(time.Date(2026, 1, 31, 12, 0, 0, 0, time.UTC)),
		"@2026-01-31T12:00:00.5+01": {},
		"@1767225600":               client.At(time.Unix(1767225600, 0)),
		cursor:                      client.Cursor(cursor),
	} {
		got, err := parseStart(in, now)
		if strings.HasSuffix(in, "+01") {
			if exitCode(err) != exitUsage {
				t.Errorf("%q: %v", in, err)
			}
			continue
		}
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%q: got %v, %v; want %v", in, got, err, want)
		}
	}
	for _, in := range []string{"", "now", "earlist", "-15", "-", "@", "@yesterday", "@99999999999999999999", "--15m"} {
		if _, err := parseStart(in, now); exitCode(err) != exitUsage {
			t.Errorf("%q: %v", in, err)
		}
	}
}

func TestNearest(t *testing.T) {
	words := []string{"produce", "consume", "topic", "segment", "dev", "server"}
	for in, want := range map[string]string{"prodcue": "produce", "topics": "topic", "SERVER": "server", "serve": "server", "consmue": "consume", "zzz": "", "": "", "x": ""} {
		if got, _ := nearest(in, words); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
	if d := distance("kitten", "sitting"); d != 3 {
		t.Errorf("distance %d, want 3", d)
	}
	if d := distance("ab", "ba"); d != 1 {
		t.Errorf("distance of a swap is %d, want 1", d)
	}
}

func TestQuoteArgSurvivesAShell(t *testing.T) {
	words := []string{"plain", "", "two words", "it's", `a"b$HOME\`, "*", "~", "new\nline", "#x", "-n", "ü", "a~1.2.3"}
	script := "for w in " + quoteArgs(words...) + `; do printf '%s\0' "$w"; done`
	out, err := exec.CommandContext(t.Context(), "sh", "-c", script).Output()
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00"); fmt.Sprint(got) != fmt.Sprint(words) || len(got) != len(words) {
		t.Errorf("got %q, want %q", got, words)
	}
}

func TestLines(t *testing.T) {
	long := strings.Repeat("x", 300<<10) // longer than the reader's buffer
	for in, want := range map[string][]string{
		"":                    nil,
		"a":                   {"a"},
		"a\n":                 {"a"},
		"a\n\nb":              {"a", "", "b"},
		"\n":                  {""},
		"a\r\n\xff\x00\n":     {"a\r", "\xff\x00"},
		long + "\ny\n" + long: {long, "y", long},
	} {
		for name, r := range map[string]io.Reader{"whole": strings.NewReader(in), "half": iotest.HalfReader(strings.NewReader(in))} {
			l := newLines(r, 0)
			var got []string
			for {
				line, err := l.next()
				if errors.Is(err, io.EOF) {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				got = append(got, string(line))
			}
			if fmt.Sprintf("%q", got) != fmt.Sprintf("%q", want) {
				t.Errorf("%.20q, %s: got %.40q", in, name, got)
			}
		}
	}
}

func TestLineLimit(t *testing.T) {
	full := strings.Repeat("x", storage.MaxRecordBytes)
	l := newLines(strings.NewReader(full+"\n"+full+"x\n"), 0)
	if line, err := l.next(); err != nil || len(line) != storage.MaxRecordBytes {
		t.Errorf("%d bytes, %v", len(line), err)
	}
	if _, err := l.next(); !errors.Is(err, storage.ErrTooLarge) {
		t.Errorf("got %v", err)
	}
	// An endless line is refused without being gathered.
	endless := newLines(bufio.NewReader(endless{}), 0)
	if _, err := endless.next(); !errors.Is(err, storage.ErrTooLarge) || cap(endless.buf) > 4*storage.MaxRecordBytes {
		t.Errorf("got %v with a buffer of %d", err, cap(endless.buf))
	}
	broken := newLines(iotest.ErrReader(errors.New("broken")), 0)
	if _, err := broken.next(); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("got %v", err)
	}
}

type endless struct{}

func (endless) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = 'x'
	}
	return len(b), nil
}

func TestRecordJSON(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	for want, r := range map[string]client.Record{
		`{"value":{"text":"v"},"time":"2026-01-02T03:04:05.000000006Z"}`:                         {Value: []byte("v"), Time: at},
		`{"key":{"text":""},"value":{"text":""},"time":"2026-01-02T03:04:05.000000006Z"}`:        {Key: []byte{}, Time: at},
		`{"key":{"data":"/w=="},"value":{"text":"a b"},"time":"2026-01-02T03:04:05.000000006Z"}`: {Key: []byte{0xff}, Value: []byte("a b"), Time: at},
		`{"value":{"text":"v"},"headers":[{"key":"h","value":{"data":"gA=="}},{"key":"h","value":{"text":"2"}}],"time":"2026-01-02T03:04:05.000000006Z"}`: {
			Value: []byte("v"), Time: at, Headers: []client.Header{{Key: "h", Value: []byte{0x80}}, {Key: "h", Value: []byte("2")}}},
	} {
		got, err := recordJSON(&r)
		if err != nil || string(got) != want {
			t.Errorf("got %s, %v\nwant %s", got, err, want)
		}
	}
}

// A record that cannot be written is an error of the command, not a cursor beyond it.
func TestRecordWriterTellsFailure(t *testing.T) {
	w := newRecordWriter(brokenWriter{}, "text")
	if err := w.write(&client.Record{Value: []byte("x")}); err != nil {
		t.Fatal(err)
	}
	var we *writeError
	if err := w.flush(); !errors.As(err, &we) {
		t.Errorf("got %v", err)
	}
}

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, errors.New("disk full") }

// The frozen exit codes.
func TestExitCodes(t *testing.T) {
	call := func(code connect.Code, reason v1.Reason) error {
		return &callError{"http://a:1", &client.Error{Code: code, Reason: reason}}
	}
	for want, errs := range map[int][]error{
		0: {nil},
		1: {errors.New("x"), errInterrupted, fmt.Errorf("api: %w", broker.ErrPortInUse), call(connect.CodeInternal, v1.Reason_INTERNAL), context.Canceled},
		2: {usage("x"), storage.ErrInvalid, storage.ErrTooLarge, call(connect.CodeInvalidArgument, v1.Reason_INVALID_CURSOR),
			call(connect.CodeOutOfRange, v1.Reason_BEYOND_END), call(connect.CodeResourceExhausted, v1.Reason_LIMIT_EXCEEDED)},
		3:  {fs.ErrNotExist, storage.ErrTopicNotFound, errNothingHere, call(connect.CodeNotFound, v1.Reason_TOPIC_NOT_FOUND)},
		4:  {call(connect.CodePermissionDenied, 0), call(connect.CodeUnauthenticated, 0)},
		5:  {call(connect.CodeAlreadyExists, v1.Reason_TOPIC_EXISTS), call(connect.CodeFailedPrecondition, v1.Reason_CONFLICT), call(connect.CodeAborted, 0), storage.ErrConflict, storage.ErrTopicExists},
		6:  {call(connect.CodeUnavailable, 0), call(connect.CodeResourceExhausted, v1.Reason_DISK_FULL), call(connect.CodeDeadlineExceeded, v1.Reason_DEADLINE)},
		7:  {fmt.Errorf("%w: %w", errPartly, storage.ErrInvalid), fmt.Errorf("%w: %w", errPartly, call(connect.CodeNotFound, 0))},
		8:  {errCheck, storage.ErrCorrupt, call(connect.CodeDataLoss, v1.Reason_DATA_CORRUPT)},
		78: {storage.ErrFolderRefused, storage.ErrNewerFormat, fmt.Errorf("%w: %w", storage.ErrFolderRefused, storage.ErrInvalid), fmt.Errorf("%w: %w", storage.ErrFolderRefused, fs.ErrNotExist)},
	} {
		for _, err := range errs {
			if got := exitCode(err); got != want {
				t.Errorf("%v: exit %d, want %d", err, got, want)
			}
		}
	}
}

// Whatever fails, a person reads one line.
func TestErrorsAreOneLine(t *testing.T) {
	var errOut bytes.Buffer
	for _, args := range [][]string{{"nope"}, {"topic", "x"}, {"produce", "--nope"}, {"dev", "--api", "x", "--ops", "y", "--data", "z"}, {"topic", "create"}} {
		errOut.Reset()
		code := run(t.Context(), args, streams{in: strings.NewReader(""), out: io.Discard, err: &errOut})
		if code != exitUsage || strings.Count(errOut.String(), "\n") != 1 {
			t.Errorf("%q: exit %d, %q", args, code, errOut.String())
		}
	}
}
