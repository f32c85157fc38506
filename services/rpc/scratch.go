package rpc

import (
	"context"
	"sync"

	"connectrpc.com/connect/v2"
	"golang.org/x/sync/semaphore"
)

const (
	// maxScratch is the largest piece that is kept for later calls.
	maxScratch = 9 << 20
	// pageBudget bounds the memory of all answers that are being made or sent: readers that do not read must not take a broker's memory.
	pageBudget = 512 << 20
	// An answer's bytes stand in memory once as read and once encoded; as JSON they are base64 or escaped text, and built in steps.
	binaryCost, jsonCost = 2, 5
)

// scratches are pieces of memory that no call uses, per process like Connect's own buffers.
var scratches = sync.Pool{New: func() any { return new([]byte) }}

// scratch is what one call holds.
type scratch struct {
	budget *semaphore.Weighted
	cost   int64
	held   []*[]byte
	taken  int64
}

type scratchKey struct{}

func withScratch(ctx context.Context, budget *semaphore.Weighted) (context.Context, *scratch) {
	s := &scratch{budget: budget, cost: binaryCost}
	if info, ok := connect.CallInfoForServerContext(ctx); ok && info.Codec == connect.CodecNameJSON {
		s.cost = jsonCost
	}
	return context.WithValue(ctx, scratchKey{}, s), s
}

// Scratch returns n bytes of any content for a response, or nil if the answers under way hold all the memory that answers may have. They are
// the call's until it has ended, or, in a stream, until Sent: Connect has encoded what was sent by then. Outside of a call it is make. For the
// handler's goroutine only.
func Scratch(ctx context.Context, n int) []byte {
	s, ok := ctx.Value(scratchKey{}).(*scratch)
	if !ok {
		return make([]byte, n)
	}
	if !s.budget.TryAcquire(int64(n) * s.cost) {
		return nil
	}
	s.taken += int64(n) * s.cost
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
	s.budget.Release(s.taken)
	s.taken = 0
}
