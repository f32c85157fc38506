package replica

import (
	"context"
	"sync"
	"time"

	"github.com/malachilog/malachi/storage"
)

// turnWait is how long a request waits for the one before it.
const turnWait = 100 * time.Millisecond

// turns lets the numbered requests of each sender be taken in order, though several are on their way at once. It only saves work: what may be
// appended is judged by offsets, so a number that never comes, or a sender that begins anew, costs a wait and nothing else.
type turns struct {
	mu    sync.Mutex
	lines map[storage.BrokerID]*line
}

// line is one sender's requests.
type line struct {
	boot    storage.Boot
	next    uint64
	waiting map[uint64]chan struct{}
}

// enter waits until it is the request's turn, or a little. The returned function ends the turn; it must be called once.
func (t *turns) enter(ctx context.Context, from storage.BrokerID, boot storage.Boot, number uint64) (leave func()) {
	if number == 0 {
		return func() {}
	}
	l, turn := t.queue(from, boot, number)
	if turn != nil {
		timer := time.NewTimer(turnWait)
		defer timer.Stop()
		select {
		case <-turn:
		case <-timer.C:
		case <-ctx.Done():
		}
	}
	return func() { t.leave(l, number) }
}

func (t *turns) queue(from storage.BrokerID, boot storage.Boot, number uint64) (*line, chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	l := t.lines[from]
	if l == nil || l.boot != boot { // senders are members of the cluster: their number is bounded
		if t.lines == nil {
			t.lines = map[storage.BrokerID]*line{}
		}
		l = &line{boot: boot, next: number, waiting: map[uint64]chan struct{}{}}
		t.lines[from] = l
	}
	if number <= l.next {
		return l, nil
	}
	turn := make(chan struct{})
	l.waiting[number] = turn
	return l, turn
}

func (t *turns) leave(l *line, number uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(l.waiting, number)
	if number < l.next {
		return
	}
	l.next = number + 1
	if turn := l.waiting[l.next]; turn != nil {
		delete(l.waiting, l.next)
		close(turn)
	}
}
