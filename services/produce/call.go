package produce

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/malachilog/malachi/e2e/inv/mutate"
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

	// Of the goroutine that submits.
	tried   storage.SegmentID  // where it was submitted last
	primary storage.BrokerID   // of that segment
	moved   *storage.SegmentID // the segment that refused it after it was submitted there

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
	again   []*item       // refused after they were submitted; to be submitted again
	wake    chan struct{} // has a token when again has grown, or an answer has come
	open    map[storage.RangeID]onWay
}

// onWay is how many items are on their way to a range, and the segment of it that they were submitted to.
type onWay struct {
	items int
	to    storage.SegmentID
}

func newCall(items []*item) *call {
	for _, it := range items {
		it.parts = 1
	}
	return &call{items: items, waiting: len(items), over: make(chan struct{}), wake: make(chan struct{}, 1), open: map[storage.RangeID]onWay{}}
}

// expect says that an item was cut into n parts, each of which is answered.
func (c *call) expect(it *item, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	it.parts = n
}

// refuse is an answer that nothing of it was appended.
func (c *call) refuse(it *item, err error) { c.answer(it, replica.Appended{}, err, false) }

// submitted says that an item is on its way to a segment. Without it, done must not be called.
func (c *call) submitted(id storage.SegmentID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open[id.Range] = onWay{c.open[id.Range].items + 1, id}
}

// elsewhere reports whether something is on its way to another segment of the range, which may yet refuse it.
func (c *call) elsewhere(id storage.SegmentID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	o := c.open[id.Range]
	return o.items > 0 && o.to != id && !mutate.On("produce.overtake")
}

// unsubmitted takes that back: it was refused at once.
func (c *call) unsubmitted(r storage.RangeID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.answered(r)
}

// answered is called with mu held.
func (c *call) answered(r storage.RangeID) {
	o := c.open[r]
	o.items--
	c.open[r] = o
}

// done is the answer of the append path. A refusal that another head may not repeat has the item submitted again.
func (c *call) done(it *item, a replica.Appended, err error) {
	c.mu.Lock()
	c.answered(it.tried.Range)
	retry := err != nil && (again(err) || mutate.On("produce.retry-unknown")) && !c.ended
	if retry {
		c.again = append(c.again, it)
	}
	c.mu.Unlock()
	if !retry {
		c.answer(it, a, err, err == nil || errors.Is(err, storage.ErrOutcomeUnknown))
	}
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// waits reports whether an earlier item of the range was refused and is to be submitted again: then this one is, behind it.
func (c *call) waits(it *item, r storage.RangeID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, other := range c.again {
		if other.tried.Range == r && other.index < it.index {
			c.again = append(c.again, it)
			return true
		}
	}
	return false
}

// settle waits until nothing of this call is on its way to the range: what is sent to another broker, or to another segment, must not overtake
// what was sent before. False: ctx was over first.
func (c *call) settle(ctx context.Context, r storage.RangeID) bool {
	for {
		c.mu.Lock()
		n := c.open[r].items
		c.mu.Unlock()
		if n == 0 {
			return true
		}
		select {
		case <-c.wake:
		case <-ctx.Done():
			return false
		}
	}
}

// refused takes out the items to be submitted again, in the request's order.
func (c *call) refused() []*item {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := c.again
	c.again = nil
	slices.SortStableFunc(out, func(a, b *item) int { return a.index - b.index })
	return out
}

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

// wait waits for all answers, submitting again what a head refused, or for the deadline: what is on its way then is of unknown outcome.
func (c *call) wait(ctx context.Context, submit func(*item)) {
	for ctx.Err() == nil {
		if items := c.refused(); len(items) > 0 {
			for _, it := range items {
				moved := it.tried
				it.moved = &moved
				submit(it)
			}
			continue // to submit may have taken the token of what was refused meanwhile
		}
		select {
		case <-c.over:
			return
		case <-c.wake:
		case <-ctx.Done():
		}
	}
	for _, it := range c.refused() {
		c.refuse(it, errNoHead)
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
func (c *call) response(observe func(records, bytes int, outcome string), near func(*item) string) (*v1.ProduceResponse, error) {
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
			r.AppendTime, r.Server = rpc.Timestamp(it.at), near(it)
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
