package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/malachilog/malachi/client"
	"github.com/malachilog/malachi/storage"
)

const (
	// stopGrace is how long an interrupted produce waits for the records that are under way.
	stopGrace = 10 * time.Second
	// progressEvery is how often a terminal is told how far a command is.
	progressEvery = 500 * time.Millisecond
)

type produceFlags struct {
	file, key, keySep string
	headers           []string
	compression       string
	linger, timeout   time.Duration
}

func newProduce(std streams) *cobra.Command {
	var f produceFlags
	cmd := &cobra.Command{
		Use:               "produce TOPIC",
		ValidArgsFunction: completeTopic,
		Short:             "Write lines as records",
		Long: "Write the lines of stdin or of a file as records, one each. A line is bytes: everything up to the newline, which is not stored;\n" +
			"an empty line is an empty value. Records of one key keep their order; between others there is none.\n\n" +
			"Failures that may pass are tried again for --timeout. The first other failure ends the reading; what is under way is waited for.\n" +
			"The last line on stderr says how many records were stored. Exit code 7: some were, but not all. A record whose outcome is\n" +
			"unknown may be in the topic.",
		Example: "  echo hello | malachi produce orders\n" +
			"  malachi produce orders --file orders.txt --key-sep : --header source=import",
		Args: oneArg("topic"),
	}
	fl := cmd.Flags()
	fl.StringVarP(&f.file, "file", "f", "-", "read `FILE`; - is stdin")
	fl.StringVarP(&f.key, "key", "k", "", "key of every record; without it and --key-sep records have none")
	fl.StringVar(&f.keySep, "key-sep", "", "cut each line at the first occurrence of this: key before it, value after it")
	fl.StringArrayVar(&f.headers, "header", nil, "a header of every record, `key=value`; order is kept; may be repeated")
	fl.StringVar(&f.compression, "compression", client.CompressionS2, "none, s2 or zstd")
	fl.DurationVar(&f.linger, "linger", 0, "wait so long for more records before a batch goes")
	fl.DurationVar(&f.timeout, "timeout", 2*time.Minute, "how long a batch is tried again before it fails")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		template, err := f.template(cmd)
		if err != nil {
			return err
		}
		return produce(cmd, std, args[0], f, template)
	}
	return cmd
}

// template is what all records have in common.
func (f *produceFlags) template(cmd *cobra.Command) (client.Record, error) {
	var r client.Record
	keyed, sep := cmd.Flags().Changed("key"), cmd.Flags().Changed("key-sep")
	switch {
	case keyed && sep:
		return r, usage("--key and --key-sep exclude each other")
	case sep && f.keySep == "":
		return r, usage("--key-sep is empty: name what stands between key and value")
	case keyed:
		r.Key = []byte(f.key) // empty is a key too
	}
	pairs, err := parsePairs("header", f.headers)
	if err != nil {
		return r, err
	}
	for _, p := range pairs {
		if !utf8.ValidString(p[0]) {
			return r, usage("--header %q: a header's key is UTF-8 text", p[0])
		}
		r.Headers = append(r.Headers, client.Header{Key: p[0], Value: []byte(p[1])})
	}
	return r, nil
}

func produce(cmd *cobra.Command, std streams, topic string, f produceFlags, template client.Record) error {
	ctx := cmd.Context()
	if f.timeout <= 0 {
		return usage("--timeout %v: want more than 0", f.timeout)
	}
	s, err := openSession(cmd, client.Config{Compression: f.compression, Linger: f.linger, DeliveryTimeout: f.timeout})
	if err != nil {
		return err
	}
	defer s.quit()
	in := std.in
	if f.file != "-" {
		file, err := os.Open(f.file)
		if err != nil {
			return fmt.Errorf("read lines: %w", err)
		}
		defer func() { _ = file.Close() }() // it was only read
		in = file
	}
	if err := s.check(ctx, topic); err != nil {
		return err
	}
	j := &job{session: s, topic: topic, template: template, sep: []byte(f.keySep), lines: newLines(in, len(f.keySep))}
	work, stop := context.WithCancelCause(ctx) // ends at the first failure or an interruption
	defer stop(nil)
	j.stop = stop
	j.run(work, std)
	return j.end(ctx, std)
}

// job is one produce. Its reader goroutine may sit in a read that nothing ends (a terminal, a pipe); it is left there when the process
// exits, and adds nothing once the work's context has ended.
type job struct {
	session  *session
	topic    string
	template client.Record
	sep      []byte
	lines    *lines
	stop     context.CancelCauseFunc // ends the reading

	mu       sync.Mutex
	taken    int // records that the client took
	stored   int
	unknown  int
	failures int
	first    error // with its line
	atEnd    bool  // all input was taken
}

// run reads and sends until the input ends, something fails, or the caller is interrupted, and waits for what is under way.
func (j *job) run(ctx context.Context, std streams) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		j.pump(ctx)
	}()
	var tick <-chan time.Time
	if isTerminal(std.err) {
		t := time.NewTicker(progressEvery)
		defer t.Stop()
		tick = t.C
		defer fmt.Fprint(std.err, "\r\x1b[K")
	}
	progress := func() {
		j.mu.Lock()
		stored, taken := j.stored, j.taken
		j.mu.Unlock()
		fmt.Fprintf(std.err, "\r\x1b[K%d stored, %d under way", stored, taken-stored)
	}
	for reading := true; reading; {
		select {
		case <-done:
			reading = false
		case <-ctx.Done():
			reading = false
		case <-tick:
			progress()
		}
	}
	closing, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, func() { // also while closing: Ctrl-C after the input's end
		if errors.Is(context.Cause(ctx), context.Canceled) {
			time.AfterFunc(stopGrace, cancel)
		}
	})()
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		_ = j.session.Close(closing) // every record's own result says more
	}()
	for {
		select {
		case <-closed:
			return
		case <-tick:
			progress()
		}
	}
}

// pump gives line after line to the client, which blocks while its buffer is full.
func (j *job) pump(ctx context.Context) {
	for {
		line, err := j.lines.next()
		if ctx.Err() != nil {
			return
		}
		if errors.Is(err, io.EOF) {
			j.mu.Lock()
			j.atEnd = true
			j.mu.Unlock()
			return
		}
		if err == nil {
			err = j.send(ctx, line)
		}
		if err != nil && ctx.Err() == nil {
			j.fail(j.lines.n, err)
			return
		}
		if err != nil {
			return
		}
	}
}

func (j *job) send(ctx context.Context, line []byte) error {
	r := j.template
	r.Value = line
	if len(j.sep) > 0 {
		key, value, ok := bytes.Cut(line, j.sep)
		if !ok {
			return usage("it has no %q between key and value", j.sep)
		}
		r.Key, r.Value = key[:len(key):len(key)], value
	}
	j.mu.Lock()
	j.taken++
	j.mu.Unlock()
	n := j.lines.n
	err := j.session.ProduceAsync(ctx, j.topic, r, func(res client.Result) { j.result(n, res) })
	if err != nil {
		j.mu.Lock()
		j.taken--
		j.mu.Unlock()
	}
	return err
}

// result is called by the client's lanes.
func (j *job) result(line int, r client.Result) {
	if r.Err != nil {
		j.fail(line, r.Err)
		return
	}
	j.mu.Lock()
	j.stored++
	j.mu.Unlock()
}

func (j *job) fail(line int, err error) {
	j.mu.Lock()
	j.failures++
	if errors.Is(err, client.ErrOutcomeUnknown) {
		j.unknown++
	}
	if j.first == nil {
		if e, ok := errors.AsType[*client.Error](err); ok {
			err = &callError{j.session.server, e}
		}
		j.first = fmt.Errorf("line %d: %w", line, err)
	}
	j.mu.Unlock()
	j.stop(errStopped)
}

// errStopped ends the reading after a failure.
var errStopped = errors.New("stopped by a failure")

// end tells what was stored.
func (j *job) end(ctx context.Context, std streams) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	text := fmt.Sprintf("stored %d %s", j.stored, plural(j.stored, "record"))
	if j.failures == 0 && j.atEnd {
		say(std.err, "%s", text)
		return nil
	}
	if lost := j.taken - j.stored; lost > 0 {
		text += fmt.Sprintf(" of %d read", j.taken)
	}
	if j.unknown > 0 {
		text += fmt.Sprintf("; the outcome of %d is unknown, so they may be in the topic", j.unknown)
	}
	cause := j.first
	if cause == nil || ctx.Err() != nil {
		cause = errInterrupted
	}
	if j.stored > 0 {
		return fmt.Errorf("%s: %w: %w", text, errPartly, cause)
	}
	return fmt.Errorf("%s: %w", text, cause)
}

func plural(n int, word string) string {
	if n == 1 {
		return word
	}
	return word + "s"
}

// lines cuts a stream at newlines, within the bound of a record.
type lines struct {
	r   *bufio.Reader
	max int
	n   int // the line that next returned last, from 1
	buf []byte
}

// newLines reads lines of at most one record's bytes and extra ones more.
func newLines(r io.Reader, extra int) *lines {
	return &lines{r: bufio.NewReaderSize(r, 256<<10), max: storage.MaxRecordBytes + extra}
}

// next gives the next line without its newline, good until the next call. A last line may lack the newline. Errors: io.EOF, or one that
// wraps storage.ErrTooLarge.
func (l *lines) next() ([]byte, error) {
	l.n++
	l.buf = l.buf[:0]
	for {
		part, err := l.r.ReadSlice('\n')
		whole := err == nil
		if whole {
			part = part[:len(part)-1]
		}
		if len(l.buf)+len(part) > l.max {
			return nil, fmt.Errorf("it is longer than %d bytes, the most that a record takes: %w", l.max, storage.ErrTooLarge)
		}
		switch {
		case whole && len(l.buf) == 0:
			return part, nil
		case whole, errors.Is(err, io.EOF) && len(l.buf)+len(part) > 0:
			l.buf = append(l.buf, part...)
			return l.buf, nil
		case errors.Is(err, bufio.ErrBufferFull):
			l.buf = append(l.buf, part...)
		case errors.Is(err, io.EOF):
			return nil, io.EOF
		default:
			return nil, fmt.Errorf("read: %w", err)
		}
	}
}
