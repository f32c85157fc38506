// Package rpc is what the public services share on the wire: the catalogue that gives every error its Connect code and Reason, the handler
// that mounts the services with their limits, codec, CORS, health and reflection, and the conversion of payloads.
package rpc

import (
	"context"
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connectproto"
	"google.golang.org/protobuf/types/known/durationpb"

	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
)

// codes gives each Reason its Connect code. This is the only place where codes are assigned.
var codes = map[v1.Reason]connect.Code{
	v1.Reason_INVALID_ARGUMENT:    connect.CodeInvalidArgument,
	v1.Reason_INVALID_TOPIC_NAME:  connect.CodeInvalidArgument,
	v1.Reason_INVALID_CURSOR:      connect.CodeInvalidArgument,
	v1.Reason_BEYOND_END:          connect.CodeOutOfRange,
	v1.Reason_UNKNOWN_RANGE:       connect.CodeInvalidArgument,
	v1.Reason_INVALID_BATCH:       connect.CodeInvalidArgument,
	v1.Reason_INVALID_RECORD:      connect.CodeInvalidArgument,
	v1.Reason_INVALID_JSON_NUMBER: connect.CodeInvalidArgument,
	v1.Reason_LIMIT_EXCEEDED:      connect.CodeResourceExhausted,
	v1.Reason_UNKNOWN_CODEC:       connect.CodeInvalidArgument,
	v1.Reason_TOPIC_NOT_FOUND:     connect.CodeNotFound,
	v1.Reason_TOPIC_EXISTS:        connect.CodeAlreadyExists,
	v1.Reason_CONFLICT:            connect.CodeFailedPrecondition,
	v1.Reason_SEGMENT_NOT_FOUND:   connect.CodeNotFound,
	v1.Reason_RANGE_NOT_FOUND:     connect.CodeNotFound,
	v1.Reason_UNAVAILABLE:         connect.CodeUnavailable,
	v1.Reason_NO_QUORUM:           connect.CodeUnavailable,
	v1.Reason_STALE_ROUTE:         connect.CodeUnavailable,
	v1.Reason_OVERLOADED:          connect.CodeResourceExhausted,
	v1.Reason_DISK_FULL:           connect.CodeResourceExhausted,
	v1.Reason_STORAGE_FAILED:      connect.CodeUnavailable,
	v1.Reason_SHUTTING_DOWN:       connect.CodeUnavailable,
	v1.Reason_DEADLINE:            connect.CodeDeadlineExceeded,
	v1.Reason_RANGE_BLOCKED:       connect.CodeUnavailable,
	v1.Reason_DATA_LOST:           connect.CodeDataLoss,
	v1.Reason_DATA_TRIMMED:        connect.CodeDataLoss,
	v1.Reason_DATA_CORRUPT:        connect.CodeDataLoss,
	v1.Reason_STALE_SEQUENCE:      connect.CodeFailedPrecondition,
	v1.Reason_FENCED_PRODUCER:     connect.CodeFailedPrecondition,
	v1.Reason_RESPLIT:             connect.CodeUnavailable,
	v1.Reason_INTERNAL:            connect.CodeInternal,
	v1.Reason_UNIMPLEMENTED:       connect.CodeUnimplemented,
}

// sentinels gives each error of the vocabulary its Reason. The first that errors.Is finds counts, so the more telling ones come first.
var sentinels = []struct {
	err    error
	reason v1.Reason
	retry  time.Duration // 0: the same call will not do better later
}{
	{batch.ErrUnknownCodec, v1.Reason_UNKNOWN_CODEC, 0},
	{storage.ErrTooLarge, v1.Reason_LIMIT_EXCEEDED, 0},
	{storage.ErrTopicNotFound, v1.Reason_TOPIC_NOT_FOUND, 0},
	{storage.ErrTopicExists, v1.Reason_TOPIC_EXISTS, 0},
	{storage.ErrConflict, v1.Reason_CONFLICT, 0},
	{storage.ErrUnknownSegment, v1.Reason_SEGMENT_NOT_FOUND, 0},
	{storage.ErrBeyondEnd, v1.Reason_BEYOND_END, 0},
	{storage.ErrStorageFailed, v1.Reason_STORAGE_FAILED, time.Second},
	{storage.ErrDiskFull, v1.Reason_DISK_FULL, time.Second},
	{storage.ErrOverloaded, v1.Reason_OVERLOADED, 20 * time.Millisecond},
	{storage.ErrFenced, v1.Reason_STALE_ROUTE, 50 * time.Millisecond},
	{storage.ErrSealed, v1.Reason_STALE_ROUTE, 50 * time.Millisecond},
	{storage.ErrGap, v1.Reason_STALE_ROUTE, 50 * time.Millisecond},
	{storage.ErrStaleBoot, v1.Reason_STALE_ROUTE, 50 * time.Millisecond},
	{storage.ErrStaleRoute, v1.Reason_STALE_ROUTE, 50 * time.Millisecond},
	{storage.ErrDamaged, v1.Reason_DATA_CORRUPT, 0},
	{storage.ErrCorrupt, v1.Reason_DATA_CORRUPT, 0},
	{storage.ErrNewerFormat, v1.Reason_INVALID_BATCH, 0},
	{storage.ErrOutcomeUnknown, v1.Reason_NO_QUORUM, 100 * time.Millisecond},
	{storage.ErrFolderRefused, v1.Reason_UNAVAILABLE, time.Second},
	{storage.ErrClosed, v1.Reason_SHUTTING_DOWN, time.Second},
	{storage.ErrUnavailable, v1.Reason_UNAVAILABLE, 100 * time.Millisecond},
	{storage.ErrInvalid, v1.Reason_INVALID_ARGUMENT, 0},
	{context.DeadlineExceeded, v1.Reason_DEADLINE, 0},
}

// Error is a failure with its Reason already decided, for what the vocabulary has no sentinel. Text and Metadata travel to the client: no
// record bytes, tokens or secrets.
type Error struct {
	Reason   v1.Reason
	Text     string
	Metadata map[string]string
	Retry    time.Duration
	Cause    error
}

func (e *Error) Error() string {
	if e.Cause != nil {
		return e.Text + ": " + e.Cause.Error()
	}
	return e.Text
}

// Unwrap gives the cause.
func (e *Error) Unwrap() error { return e.Cause }

// Fail is an Error of the given text.
func Fail(reason v1.Reason, metadata map[string]string, format string, args ...any) *Error {
	return &Error{Reason: reason, Text: fmt.Sprintf(format, args...), Metadata: metadata}
}

// internalText is all that a client hears of an error that no catalogue entry covers: its own text might say anything.
const internalText = "internal error; the broker's log has the details"

// Describe returns the code, text and detail of an error, and whether the catalogue knew it.
func Describe(err error) (connect.Code, string, *v1.ErrorDetail, bool) {
	var own *Error
	if errors.As(err, &own) {
		d := &v1.ErrorDetail{Reason: own.Reason, Metadata: own.Metadata}
		if own.Retry > 0 {
			d.RetryDelay = durationpb.New(own.Retry)
		}
		return codes[own.Reason], own.Error(), d, true
	}
	if errors.Is(err, context.Canceled) {
		return connect.CodeCanceled, "canceled", &v1.ErrorDetail{Reason: v1.Reason_DEADLINE}, true
	}
	for _, s := range sentinels {
		if !errors.Is(err, s.err) {
			continue
		}
		d := &v1.ErrorDetail{Reason: s.reason, OutcomeUnknown: errors.Is(err, storage.ErrOutcomeUnknown)}
		if s.retry > 0 {
			d.RetryDelay = durationpb.New(s.retry)
		}
		return codes[s.reason], err.Error(), d, true
	}
	return connect.CodeInternal, internalText, &v1.ErrorDetail{Reason: v1.Reason_INTERNAL}, false
}

// wire makes the Connect error of any error. Errors that Connect itself made (a message over the limit, a body that does not parse) keep
// their code and text and get the fitting Reason.
func wire(err error) (_ *connect.Error, known bool) {
	var ce *connect.Error
	if errors.As(err, &ce) && !ce.IsRemote() {
		if len(ce.Details()) > 0 {
			return ce, true
		}
		reason := v1.Reason_INTERNAL
		switch ce.Code() {
		case connect.CodeUnknown: // Connect's word for a message that it could not even begin to decode
			return withDetail(connect.NewError(connect.CodeInvalidArgument, ce.Message()).WithCause(err), &v1.ErrorDetail{Reason: v1.Reason_INVALID_ARGUMENT}), true
		case connect.CodeResourceExhausted:
			reason = v1.Reason_LIMIT_EXCEEDED
		case connect.CodeInvalidArgument:
			reason = v1.Reason_INVALID_ARGUMENT
		case connect.CodeUnimplemented:
			reason = v1.Reason_UNIMPLEMENTED
		case connect.CodeDeadlineExceeded, connect.CodeCanceled:
			reason = v1.Reason_DEADLINE
		case connect.CodeUnavailable:
			reason = v1.Reason_UNAVAILABLE
		}
		return withDetail(ce, &v1.ErrorDetail{Reason: reason}), true
	}
	code, text, detail, known := Describe(err)
	return withDetail(connect.NewError(code, text).WithCause(err), detail), known
}

func withDetail(ce *connect.Error, d *v1.ErrorDetail) *connect.Error {
	detail, err := connectproto.NewErrorDetail(d)
	if err != nil { // a message of ours always encodes
		return ce
	}
	return ce.WithDetail(detail)
}
