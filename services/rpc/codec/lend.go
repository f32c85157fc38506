package codec

import (
	"bytes"
	"context"
	"net/http"
	"sync"
)

const (
	lendFrom    = 32 << 10 // smaller messages are cheaper to copy
	recycleUpTo = 16 << 20 // a larger buffer is left to the collector
)

// buffers are the ones that are not with Connect. Per process, like Connect's own pool, with which it trades.
var buffers = sync.Pool{New: func() any { return new(bytes.Buffer) }}

type leaseKey struct{}

// lease is one HTTP request's claim on its receive buffer.
type lease struct {
	mu  sync.Mutex
	buf *bytes.Buffer // nil: nothing kept, or recycled
}

// Lending wraps the HTTP handler that connecthttp.Mount filled. The first large message of a request is then decoded without
// copying its bytes fields, and the RPC handler may call Recycle. One that never does loses nothing but the reuse of the buffer.
func Lending(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), leaseKey{}, new(lease))))
	})
}

// Recycle gives the memory behind the bytes fields of ctx's request message to later requests. ctx is the RPC handler's. The
// caller warrants that nobody reads these bytes any more: no queue, no cache, no goroutine; after a cancelled or timed-out append
// it can't, and must not call Recycle. The bytes fields of the message must not be touched afterwards. Without Lending, or a
// second time, it does nothing.
func Recycle(ctx context.Context) {
	l, ok := ctx.Value(leaseKey{}).(*lease)
	if !ok {
		return
	}
	l.mu.Lock()
	buf := l.buf
	l.buf = nil
	l.mu.Unlock()
	if buf != nil && buf.Cap() <= recycleUpTo {
		buf.Reset()
		buffers.Put(buf)
	}
}

// keep takes buf's memory away from Connect for the request's lease and puts a spare one in its place.
func keep(ctx context.Context, buf *bytes.Buffer) bool {
	l, ok := ctx.Value(leaseKey{}).(*lease)
	if !ok || buf.Len() < lendFrom {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.buf != nil { // one a request: a long stream must not pile them up
		return false
	}
	spare := buffers.Get().(*bytes.Buffer)
	*spare, *buf = *buf, *spare
	l.buf = spare
	return true
}
