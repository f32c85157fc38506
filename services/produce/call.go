package produce

import (
	"context"
	"fmt"
	"sync"

	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/services/replica"
	"github.com/malachilog/malachi/services/rpc"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
)

// item is one batch of a call, or one part of a batch that was cut; then whole is the batch.
type item struct {
	index   int
	indexes []int32 // of the request's records, if it carried records
	records int
	header  batch.Header
	data    []byte
	whole   *item

	// Guarded by call.mu from the first submit on.
	parts    int // answers outstanding
	appended bool
	at       storage.Time
	err      error
}

// call waits for the outcomes of one request's batches.
type call struct {
	mu      sync.Mutex
	items   []*item
	waiting int
	ended   bool
	over    chan struct{}
}

func newCall(items []*item) *call {
	for _, it := range items {
		it.parts = 1
	}
	return &call{items: items, waiting: len(items), over: make(chan struct{})}
}

// expect says that an item was cut into n parts, each of which is answered.
func (c *call) expect(it *item, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	it.parts = n
}

// refuse is an answer that nothing of it was appended.
func (c *call) refuse(it *item, err error) { c.answer(it, replica.Appended{}, err, false) }

// done is the answer of the append path.
func (c *call) done(it *item, a replica.Appended, err error) { c.answer(it, a, err, true) }

func (c *call) answer(it *item, a replica.Appended, err error, tried bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if it.whole != nil {
		it = it.whole
	}
	if c.ended || it.parts == 0 {
		return
	}
	it.appended = it.appended || tried
	it.at = max(it.at, a.AppendTime)
	if err != nil && it.err == nil {
		it.err = err
	}
	if it.parts--; it.parts == 0 {
		if c.waiting--; c.waiting == 0 {
			close(c.over)
		}
	}
}

// wait waits for all answers, or for the deadline: what was submitted and not answered by then is of unknown outcome.
func (c *call) wait(ctx context.Context) {
	select {
	case <-c.over:
		return
	case <-ctx.Done():
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = true
	for _, it := range c.items {
		if it.parts > 0 && it.err == nil {
			it.appended = true
			it.err = fmt.Errorf("no answer from a quorum within the deadline: %w", storage.ErrOutcomeUnknown)
		}
	}
}

// response is the answer; the call itself fails only if nothing was tried.
func (c *call) response(observe func(records, bytes int, outcome string)) (*v1.ProduceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := &v1.ProduceResponse{Results: make([]*v1.ProduceResult, 0, len(c.items))}
	tried := false
	for _, it := range c.items {
		r := &v1.ProduceResult{RecordCount: int32(it.records), Index: int32(it.index), RecordIndexes: it.indexes}
		outcome := "ok"
		if it.err != nil {
			r.Error = rpc.ResultError(it.err)
			// Of a batch that was cut some parts may be in the log while others were refused.
			r.Error.Detail.OutcomeUnknown = r.Error.Detail.OutcomeUnknown || it.appended
			outcome = r.Error.Detail.Reason.String()
		} else {
			r.AppendTime = rpc.Timestamp(it.at)
		}
		tried = tried || it.appended
		if observe != nil {
			observe(it.records, len(it.data), outcome)
		}
		out.Results = append(out.Results, r)
	}
	if !tried && len(c.items) > 0 {
		return nil, c.items[0].err
	}
	return out, nil
}
