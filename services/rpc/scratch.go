package rpc

import (
	"context"
	"sync"
)

// maxScratch is the largest piece that is kept for later calls.
const maxScratch = 9 << 20

// scratches are pieces of memory that no call uses, per process like Connect's own buffers.
var scratches = sync.Pool{New: func() any { return new([]byte) }}

// scratch is what one call holds.
type scratch struct{ held []*[]byte }

type scratchKey struct{}

func withScratch(ctx context.Context) (context.Context, *scratch) {
	s := new(scratch)
	return context.WithValue(ctx, scratchKey{}, s), s
}

// Scratch returns n bytes of any content for a response. They are the call's until it has ended, or, in a stream, until Sent: Connect has
// encoded what was sent by then. Outside of a call it is make. For the handler's goroutine only.
func Scratch(ctx context.Context, n int) []byte {
	s, ok := ctx.Value(scratchKey{}).(*scratch)
	if !ok {
		return make([]byte, n)
	}
	b := scratches.Get().(*[]byte)
	if cap(*b) < n {
		*b = make([]byte, n)
	}
	s.held = append(s.held, b)
	return (*b)[:n]
}

// Sent gives back what Scratch has given in this call: nothing of it may be used any more.
func Sent(ctx context.Context) {
	if s, ok := ctx.Value(scratchKey{}).(*scratch); ok {
		s.release()
	}
}

func (s *scratch) release() {
	for _, b := range s.held {
		if cap(*b) <= maxScratch {
			scratches.Put(b)
		}
	}
	s.held = s.held[:0]
}
