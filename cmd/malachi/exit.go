package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"strings"

	"connectrpc.com/connect/v2"

	"github.com/malachilog/malachi/client"
	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/services/broker"
	"github.com/malachilog/malachi/storage"
)

// Exit codes, frozen.
const (
	exitOK          = 0
	exitOther       = 1
	exitUsage       = 2
	exitNotFound    = 3
	exitDenied      = 4
	exitConflict    = 5
	exitUnavailable = 6
	exitPartly      = 7
	exitCheck       = 8
	exitFolder      = 78
)

// usageError is a fault of the command line or of a configuration.
type usageError struct{ error }

// Unwrap gives the cause.
func (e usageError) Unwrap() error { return e.error }

func usage(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// Outcomes that only the command line knows.
var (
	errPartly      = errors.New("partly done")
	errCheck       = errors.New("check failed")
	errInterrupted = errors.New("interrupted")
	errNothingHere = errors.New("nothing here")
)

// exitCode is the frozen meaning of an error.
func exitCode(err error) int {
	if err == nil {
		return exitOK
	}
	// What a command has found out about its own work comes first: it wraps the cause.
	for _, known := range []struct {
		err  error
		code int
	}{
		{errPartly, exitPartly},
		{errCheck, exitCheck},
		{storage.ErrFolderRefused, exitFolder},
		{broker.ErrPortInUse, exitOther},
		{errInterrupted, exitOther},
		{errNothingHere, exitNotFound},
	} {
		if errors.Is(err, known.err) {
			return known.code
		}
	}
	if _, ok := errors.AsType[usageError](err); ok {
		return exitUsage
	}
	if e, ok := errors.AsType[*client.Error](err); ok {
		return callCode(e)
	}
	switch {
	case errors.Is(err, storage.ErrNewerFormat):
		return exitFolder
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, storage.ErrTopicNotFound):
		return exitNotFound
	case errors.Is(err, storage.ErrConflict), errors.Is(err, storage.ErrTopicExists):
		return exitConflict
	case errors.Is(err, storage.ErrInvalid), errors.Is(err, storage.ErrTooLarge):
		return exitUsage
	case errors.Is(err, storage.ErrCorrupt):
		return exitCheck
	}
	return exitOther
}

// callCode is the meaning of what a broker answered, or of its silence.
func callCode(e *client.Error) int {
	if e.Reason == v1.Reason_LIMIT_EXCEEDED {
		return exitUsage // Connect has one code for "too much asked" and "too busy"
	}
	switch e.Code {
	case connect.CodeInvalidArgument, connect.CodeOutOfRange:
		return exitUsage
	case connect.CodeNotFound:
		return exitNotFound
	case connect.CodePermissionDenied, connect.CodeUnauthenticated:
		return exitDenied
	case connect.CodeAlreadyExists, connect.CodeFailedPrecondition, connect.CodeAborted:
		return exitConflict
	case connect.CodeUnavailable, connect.CodeResourceExhausted, connect.CodeDeadlineExceeded:
		return exitUnavailable
	case connect.CodeDataLoss:
		return exitCheck
	}
	return exitOther
}

// callError is a failed call with what a person can do about it.
type callError struct {
	server string
	err    *client.Error
}

// Unwrap gives the *client.Error.
func (e *callError) Unwrap() error { return e.err }

// hints says what to do about a reason.
var hints = map[v1.Reason]string{
	v1.Reason_TOPIC_NOT_FOUND: "see malachi topic list, or create it with malachi topic create",
	v1.Reason_INVALID_CURSOR:  "begin with --from earliest, latest or a time, or with a cursor of this topic",
	v1.Reason_BEYOND_END:      "the cursor is not of this topic's data: begin with --from earliest, latest or a time",
	v1.Reason_DISK_FULL:       "free or add disk space on the broker; reads go on",
	v1.Reason_STORAGE_FAILED:  "the broker's disk has failed: see its log, then restart it",
}

// Error is one line that says what happened and what to do.
func (e *callError) Error() string {
	if op, ok := errors.AsType[*net.OpError](e.err); ok && op.Op == "dial" {
		return fmt.Sprintf("no broker answers at %s: start one with malachi dev, or name another with --server (%v)", e.server, op.Err)
	}
	s := e.err.Message
	if s == "" {
		s = e.err.Op + ": " + e.err.Code.String()
	}
	switch reason := e.err.Reason; {
	case reason != v1.Reason_REASON_UNSPECIFIED:
		s += " (" + reason.String() + ")"
	case e.err.Code == connect.CodeDeadlineExceeded:
		s = fmt.Sprintf("the broker at %s did not answer in time: %s", e.server, s)
	default:
		s = fmt.Sprintf("%s: is there a Malachi broker at %s? (%s)", s, e.server, e.err.Code)
	}
	if hint := hints[e.err.Reason]; hint != "" {
		s += ": " + hint
	}
	if e.err.OutcomeUnknown && e.err.Code != connect.CodeUnimplemented {
		s += "; whether it was done is not known"
	}
	return s
}

// failed makes the error of a call, or of the reader's own interruption.
func failed(ctx context.Context, server, op string, err error) error {
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil && errors.Is(context.Cause(ctx), context.Canceled):
		return fmt.Errorf("%s: %w", op, errInterrupted)
	}
	return &callError{server, client.AsError(op, err)}
}

// message is an error's text on one line; only a list of faults has one line for each.
func message(err error) string {
	if f, ok := errors.AsType[faults](err); ok {
		return f.Error()
	}
	lines := strings.Split(strings.TrimSpace(err.Error()), "\n")
	for i, l := range lines {
		lines[i] = strings.TrimSuffix(l, ": "+storage.ErrInvalid.Error()) // the rest of the line says it better
	}
	return strings.Join(lines, "; ")
}
