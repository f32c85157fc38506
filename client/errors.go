package client

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connectproto"

	malachiv1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/storage"
)

// Errors to compare with errors.Is, beside the sentinels of package storage that Error.Is knows.
var (
	// ErrClosed: the client is closed or closing.
	ErrClosed = storage.ErrClosed
	// ErrOutcomeUnknown: the record was sent and its fate is not known. It may be in the log.
	ErrOutcomeUnknown = storage.ErrOutcomeUnknown
)

// Error is a call or a batch that failed for good: it can't be retried, or was until DeliveryTimeout.
type Error struct {
	// Op says what failed: "produce", "fetch", …
	Op string
	// Code is Connect's.
	Code connect.Code
	// Reason is REASON_UNSPECIFIED if the server gave none, which is so if no server answered.
	Reason malachiv1.Reason
	// Message is the server's, or the local error's.
	Message string
	// Metadata says what the reason is about. May be nil.
	Metadata map[string]string
	// RetryDelay is the server's advice; 0 for none.
	RetryDelay time.Duration
	// OutcomeUnknown: the append may have happened.
	OutcomeUnknown bool

	cause error
	local bool // no server said so
}

// Error is "op: code (REASON): message", and says when the outcome is unknown.
func (e *Error) Error() string {
	s := e.Op + ": " + e.Code.String()
	if e.Reason != malachiv1.Reason_REASON_UNSPECIFIED {
		s += " (" + e.Reason.String() + ")"
	}
	if e.Message != "" {
		s += ": " + e.Message
	}
	if e.OutcomeUnknown {
		s += "; outcome unknown"
	}
	return s
}

// Unwrap gives the local cause, such as a network error, or nil.
func (e *Error) Unwrap() error { return e.cause }

// sentinels are the errors of package storage that a reason stands for.
var sentinels = map[malachiv1.Reason]error{
	malachiv1.Reason_INVALID_ARGUMENT:   storage.ErrInvalid,
	malachiv1.Reason_INVALID_TOPIC_NAME: storage.ErrInvalid,
	malachiv1.Reason_INVALID_CURSOR:     storage.ErrInvalid,
	malachiv1.Reason_INVALID_BATCH:      storage.ErrInvalid,
	malachiv1.Reason_INVALID_RECORD:     storage.ErrInvalid,
	malachiv1.Reason_UNKNOWN_CODEC:      storage.ErrInvalid,
	malachiv1.Reason_BEYOND_END:         storage.ErrBeyondEnd,
	malachiv1.Reason_LIMIT_EXCEEDED:     storage.ErrTooLarge,
	malachiv1.Reason_TOPIC_NOT_FOUND:    storage.ErrTopicNotFound,
	malachiv1.Reason_TOPIC_EXISTS:       storage.ErrTopicExists,
	malachiv1.Reason_CONFLICT:           storage.ErrConflict,
	malachiv1.Reason_UNAVAILABLE:        storage.ErrUnavailable,
	malachiv1.Reason_NO_QUORUM:          storage.ErrUnavailable,
	malachiv1.Reason_RANGE_BLOCKED:      storage.ErrUnavailable,
	malachiv1.Reason_SHUTTING_DOWN:      storage.ErrUnavailable,
	malachiv1.Reason_STALE_ROUTE:        storage.ErrStaleRoute,
	malachiv1.Reason_OVERLOADED:         storage.ErrOverloaded,
	malachiv1.Reason_DISK_FULL:          storage.ErrDiskFull,
	malachiv1.Reason_STORAGE_FAILED:     storage.ErrStorageFailed,
	malachiv1.Reason_DATA_CORRUPT:       storage.ErrCorrupt,
}

// Is matches ErrOutcomeUnknown by the flag, and the sentinels of package storage by reason.
func (e *Error) Is(target error) bool {
	if target == ErrOutcomeUnknown {
		return e.OutcomeUnknown
	}
	s, ok := sentinels[e.Reason]
	return ok && target == s
}

// AsError makes an *Error of what a generated client returned; nil stays nil.
func AsError(op string, err error) *Error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e
	}
	e := &Error{Op: op, Code: connect.CodeOf(err), Message: err.Error(), cause: err, local: true, OutcomeUnknown: !neverSent(err)}
	ce, ok := errors.AsType[*connect.Error](err)
	if !ok {
		return e
	}
	e.Message, e.local = ce.Message(), !ce.IsRemote()
	e.OutcomeUnknown = e.OutcomeUnknown && !(ce.IsRemote() && refusal(ce.Code()))
	for _, d := range ce.Details() {
		m, err := connectproto.UnmarshalErrorDetail(d)
		if err != nil {
			continue // of a later version, or not ours
		}
		if d, ok := m.(*malachiv1.ErrorDetail); ok {
			e.setDetail(d)
			e.cause = nil // the server has said it all
		}
	}
	return e
}

// batchError makes an *Error of a batch's own failure in a request that succeeded.
func batchError(pe *malachiv1.ProduceError) *Error {
	e := &Error{Op: "produce", Message: pe.GetMessage()}
	if e.Code.UnmarshalText([]byte(pe.GetCode())) != nil {
		e.Code = connect.CodeUnknown
	}
	e.setDetail(pe.GetDetail())
	return e
}

func (e *Error) setDetail(d *malachiv1.ErrorDetail) {
	e.Reason, e.Metadata, e.OutcomeUnknown = d.GetReason(), d.GetMetadata(), d.GetOutcomeUnknown()
	e.RetryDelay = max(d.GetRetryDelay().AsDuration(), 0)
}

// refusal reports whether a server that answers with this code has done nothing.
func refusal(code connect.Code) bool {
	switch code {
	case connect.CodeInvalidArgument, connect.CodeNotFound, connect.CodeAlreadyExists, connect.CodePermissionDenied,
		connect.CodeResourceExhausted, connect.CodeFailedPrecondition, connect.CodeOutOfRange, connect.CodeUnimplemented,
		connect.CodeUnauthenticated:
		return true
	}
	return false
}

// neverSent reports whether the request certainly did not reach a server.
func neverSent(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "dial"
}

// retryable reports whether the same call may succeed later.
func (e *Error) retryable() bool {
	switch e.Reason {
	case malachiv1.Reason_UNAVAILABLE, malachiv1.Reason_NO_QUORUM, malachiv1.Reason_STALE_ROUTE, malachiv1.Reason_OVERLOADED,
		malachiv1.Reason_DISK_FULL, malachiv1.Reason_STORAGE_FAILED, malachiv1.Reason_SHUTTING_DOWN, malachiv1.Reason_DEADLINE,
		malachiv1.Reason_RANGE_BLOCKED:
		return true
	case malachiv1.Reason_REASON_UNSPECIFIED:
	default:
		_, known := malachiv1.Reason_name[int32(e.Reason)]
		return !known && e.RetryDelay > 0 // a reason of a later version
	}
	switch e.Code {
	case connect.CodeUnavailable, connect.CodeDeadlineExceeded, connect.CodeAborted:
		return true
	case connect.CodeResourceExhausted:
		return !e.local && e.RetryDelay > 0
	case connect.CodeUnknown, connect.CodeCanceled:
		return e.local // a connection that broke
	}
	return e.RetryDelay > 0
}

// backoff is the wait between attempts.
type backoff struct {
	low, high time.Duration
	next      time.Duration
}

func (c *Client) backoff() backoff { return backoff{low: c.cfg.MinBackoff, high: c.cfg.MaxBackoff} }

// wait sleeps before the next attempt, at least as long as the server asked, up to the deadline at most. It reports whether there
// is time for one more.
func (b *backoff) wait(ctx context.Context, asked time.Duration, deadline time.Time) bool {
	b.next = min(max(2*b.next, b.low), b.high)
	d := b.next/2 + rand.N(b.next/2+1)
	d = max(d, asked)
	if time.Until(deadline) < d {
		return false
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// Failure is one record that was not written for certain.
type Failure struct {
	// Index is the record's place in the call's arguments.
	Index int
	Err   error
}

// Failures is what Produce returns if some of several records failed. The others are written.
type Failures struct {
	Failed []Failure
	// Of is the number of records of the call.
	Of int
}

// Error tells how many failed, and the first one's error.
func (f *Failures) Error() string {
	return fmt.Sprintf("%d of %d records failed: first, record %d: %v", len(f.Failed), f.Of, f.Failed[0].Index, f.Failed[0].Err)
}

// Unwrap gives the different errors of the failed records.
func (f *Failures) Unwrap() []error {
	var out []error
	for _, r := range f.Failed {
		if len(out) == 0 || out[len(out)-1] != r.Err { // records of a batch share theirs
			out = append(out, r.Err)
		}
	}
	return out
}
