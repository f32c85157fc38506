package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/malachilog/malachi/client"
	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
)

type consumeFlags struct {
	from                         string
	count                        int64
	exitAtEnd, follow, failOnGap bool
}

func newConsume(std streams) *cobra.Command {
	var f consumeFlags
	cmd := &cobra.Command{
		Use:               "consume TOPIC",
		ValidArgsFunction: completeTopic,
		Short:             "Read records",
		Long: "Read records: those that are there, then new ones as they come, until Ctrl-C; or up to the end with --exit-at-end, or -n of them.\n\n" +
			"-o text writes each value and a newline, the bytes as they are. -o json writes one malachi.v1.Record a line, which a produce\n" +
			"call takes as it is.\n\n" +
			"At its end it tells on stderr the cursor to go on with. Exit code 7: interrupted before -n records or the end; 8: data that does\n" +
			"not verify was left out.",
		Example: "  malachi consume orders --exit-at-end\n" +
			"  malachi consume orders --from -15m -o json\n" +
			"  malachi consume orders --from @2026-01-31T12:00:00Z -n 10",
		Args: oneArg("topic"),
	}
	fl := cmd.Flags()
	fl.StringVar(&f.from, "from", "earliest", "`PLACE` to begin: earliest, latest, a cursor, @TIME (RFC 3339, a date, or Unix seconds), or -15m for so long ago")
	fl.Int64VarP(&f.count, "count", "n", 0, "stop after `N` records")
	fl.BoolVar(&f.exitAtEnd, "exit-at-end", false, "stop when everything that was acknowledged has been read")
	fl.BoolVar(&f.follow, "follow", false, "wait for new records until Ctrl-C (the default without -n and --exit-at-end)")
	fl.BoolVar(&f.failOnGap, "fail-on-gap", false, "stop with an error where data was trimmed or lost, instead of telling it on stderr")
	out := outputFlag(cmd, "text is one value a line, json one record a line", "text", "json")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		switch {
		case fl.Changed("count") && f.count < 1:
			return usage("-n %d: want at least 1", f.count)
		case f.follow && f.exitAtEnd:
			return usage("--follow and --exit-at-end exclude each other")
		}
		start, err := parseStart(f.from, time.Now())
		if err != nil {
			return err
		}
		return consume(cmd, std, args[0], f, start, out.value)
	}
	return cmd
}

// parseStart reads --from.
func parseStart(s string, now time.Time) (client.Start, error) {
	switch {
	case s == "earliest":
		return client.Earliest(), nil
	case s == "latest":
		return client.Latest(), nil
	case strings.HasPrefix(s, "@"):
		t, err := parseTime(s[1:])
		if err != nil {
			return client.Start{}, usage("--from %q: %w", s, err)
		}
		return client.At(t), nil
	case strings.HasPrefix(s, "-"):
		d, err := parseDuration(s[1:])
		if err != nil {
			return client.Start{}, usage("--from %q: %w", s, err)
		}
		return client.At(now.Add(-d)), nil
	case len(s) < 20: // shorter than any cursor
		return client.Start{}, usage("--from %q%s", s, didYouMean(s, []string{"earliest", "latest"}, "want earliest, latest, a cursor, @TIME or -15m"))
	}
	return client.Cursor(s), nil
}

// parseTime reads RFC 3339, a date (its beginning in UTC), or Unix seconds.
func parseTime(s string) (time.Time, error) {
	for _, layout := range []string{time.RFC3339Nano, "2006-01-02T15:04:05", time.DateOnly} {
		if t, err := time.Parse(layout, s); err == nil {
			return t, nil
		}
	}
	if n, err := strconv.ParseInt(s, 10, 64); err == nil && n > -1<<33 && n < 1<<33 {
		return time.Unix(n, 0), nil
	}
	return time.Time{}, errors.New("want a time such as @2026-01-31T12:00:00Z, @2026-01-31 or @1767225600")
}

func consume(cmd *cobra.Command, std streams, topic string, f consumeFlags, start client.Start, format string) error {
	ctx := cmd.Context()
	s, err := openSession(cmd, client.Config{})
	if err != nil {
		return err
	}
	defer s.quit()
	if err := s.check(ctx, topic); err != nil {
		return err
	}
	c, err := s.Consume(topic, client.ConsumeConfig{
		From: start, ExitAtEnd: f.exitAtEnd, FailOnGap: f.failOnGap,
		OnGap: func(g client.Gap) { say(std.err, "malachi: gap: %s", gapText(g)) },
	})
	if err != nil {
		return usageError{err}
	}
	w := newRecordWriter(std.out, format)
	n, damaged, err := readAll(ctx, c, f.count, w, std)
	if werr := w.flush(); werr != nil {
		return werr // what was not written must not be behind the cursor that is told
	}
	if at := c.Cursor(); at != "" && (n > 0 || err == nil || ctx.Err() != nil) {
		say(std.err, "malachi: read %d %s; go on with --from %s", n, plural(int(n), "record"), quoteArg(at))
	}
	switch {
	case errors.As(err, new(*writeError)):
		return err
	case ctx.Err() != nil && f.count == 0 && !f.exitAtEnd: // the way to end it
	case ctx.Err() != nil && err != nil:
		return fmt.Errorf("read %d %s: %w: %w", n, plural(int(n), "record"), errPartly, errInterrupted)
	case err != nil:
		return failed(ctx, s.server, "consume", err)
	}
	if damaged > 0 {
		return fmt.Errorf("damaged batches were left out: %d: %w", damaged, errCheck)
	}
	return nil
}

// readAll writes records until the iteration ends or there are count of them; 0 is no bound.
func readAll(ctx context.Context, c *client.Consumer, count int64, w *recordWriter, std streams) (n int64, damaged int, err error) {
	for r, err := range c.Records(ctx) {
		if bad, ok := errors.AsType[*client.BatchError](err); ok {
			damaged++
			say(std.err, "malachi: damaged: %v", bad)
			continue
		}
		if err == nil {
			err = w.write(&r)
		}
		if err != nil {
			return n, damaged, err
		}
		if n++; n == count {
			break
		}
	}
	return n, damaged, nil
}

func gapText(g client.Gap) string {
	kind := "trimmed"
	if g.Lost {
		kind = "lost"
	}
	if g.Offsets < 0 {
		return fmt.Sprintf("an unknown number of records of range %s was %s", g.Range, kind)
	}
	return fmt.Sprintf("%d %s of range %s: %s", g.Offsets, plural(int(g.Offsets), "offset"), g.Range, kind)
}

// flushAfter is how long a written record may wait for company.
const flushAfter = 10 * time.Millisecond

// recordWriter writes records through a buffer, and flushes soon after the last one of a burst.
type recordWriter struct {
	format string

	mu    sync.Mutex
	w     *bufio.Writer
	timer *time.Timer
	armed bool
	err   error // the first failure
}

func newRecordWriter(w io.Writer, format string) *recordWriter {
	r := &recordWriter{format: format, w: bufio.NewWriterSize(w, 256<<10)}
	r.timer = time.AfterFunc(time.Hour, func() { r.note(r.flushNow()) })
	r.timer.Stop()
	return r
}

func (w *recordWriter) note(err error) {
	if err != nil {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.err == nil {
			w.err = err
		}
	}
}

// writeError is a failure to write to stdout.
type writeError struct{ error }

// Unwrap gives the cause.
func (e *writeError) Unwrap() error { return e.error }

func (w *recordWriter) flushNow() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.armed = false
	if err := w.w.Flush(); err != nil {
		return &writeError{fmt.Errorf("write records: %w", err)}
	}
	return nil
}

// flush ends the writing.
func (w *recordWriter) flush() error {
	w.timer.Stop()
	return w.flushNow()
}

// write adds one record. It reports failures of earlier ones too.
func (w *recordWriter) write(r *client.Record) error {
	var line []byte
	if w.format == "json" {
		var err error
		if line, err = recordJSON(r); err != nil {
			return err
		}
	} else {
		line = r.Value
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil {
		return w.err
	}
	_, err := w.w.Write(line)
	if err == nil {
		err = w.w.WriteByte('\n')
	}
	if err != nil {
		return &writeError{fmt.Errorf("write records: %w", err)}
	}
	if !w.armed {
		w.armed = true
		w.timer.Reset(flushAfter)
	}
	return nil
}

// recordJSON is one malachi.v1.Record on one line.
func recordJSON(r *client.Record) ([]byte, error) {
	m := &v1.Record{Value: payload(r.Value), Time: timestamppb.New(r.Time)}
	if r.Key != nil {
		m.Key = payload(r.Key)
	}
	for _, h := range r.Headers {
		m.Headers = append(m.Headers, &v1.Header{Key: h.Key, Value: payload(h.Value)})
	}
	b, err := protojson.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode record: %w", err)
	}
	var line bytes.Buffer
	if err := json.Compact(&line, b); err != nil { // protojson's own spaces differ from run to run
		return nil, fmt.Errorf("encode record: %w", err)
	}
	return line.Bytes(), nil
}

// payload is text where the bytes are text, else data.
func payload(b []byte) *v1.Payload {
	if utf8.Valid(b) {
		return &v1.Payload{Form: &v1.Payload_Text{Text: string(b)}}
	}
	return &v1.Payload{Form: &v1.Payload_Data{Data: b}}
}
