package replica

import (
	"context"
	"sync"
)

// work is the goroutines of a service. They end when Run does.
type work struct {
	mu     sync.Mutex
	ctx    context.Context
	stop   context.CancelFunc
	closed bool
	all    sync.WaitGroup
}

func newWork() *work {
	w := &work{}
	w.ctx, w.stop = context.WithCancel(context.Background())
	return w
}

// start runs f on a goroutine of its own, with a context that ends with the service. False: the service has ended, f is not run.
func (w *work) start(f func(context.Context)) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return false
	}
	w.all.Go(func() { f(w.ctx) })
	return true
}

// end stops everything and returns when it has ended.
func (w *work) end() {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	w.stop()
	w.all.Wait()
}
