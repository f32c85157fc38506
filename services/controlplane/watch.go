package controlplane

import (
	"context"
	"maps"
	"slices"
	"sync"

	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/storage"
)

// maxPending bounds what a Watcher collects; beyond it says All.
const maxPending = 4096

// Changes is what changed since the last Take.
type Changes struct {
	// All: look at everything (first Take, too many changes, a snapshot, a new leader).
	All    bool
	Topics []storage.TopicUID // unless All; in no order, each once
}

// Watcher collects which topics changed until they are taken, so that a slow loop sees each once and no change is lost. Take is for
// one goroutine.
type Watcher struct {
	of *watchers
	ch chan struct{}

	mu     sync.Mutex
	all    bool
	topics map[storage.TopicUID]struct{}
}

// watchers are the Watchers and the waiters of Await.
type watchers struct {
	mu      sync.Mutex
	loops   map[*Watcher]struct{}
	waiters map[storage.TopicUID]map[chan struct{}]struct{}
}

// Watch begins to collect changes of all topics of this broker's vnodes. The first Take says All. Close it when done.
func (c *ControlPlane) Watch() *Watcher {
	w := &Watcher{of: &c.changes, ch: make(chan struct{}, 1), all: true}
	poke(w.ch)
	c.changes.mu.Lock()
	defer c.changes.mu.Unlock()
	if c.changes.loops == nil {
		c.changes.loops = map[*Watcher]struct{}{}
	}
	c.changes.loops[w] = struct{}{}
	return w
}

// C has a token while there is something to Take.
func (w *Watcher) C() <-chan struct{} { return w.ch }

// Take returns what changed since the last Take. The local view holds those changes already.
func (w *Watcher) Take() Changes {
	w.mu.Lock()
	defer w.mu.Unlock()
	ch := Changes{All: w.all}
	if !w.all {
		ch.Topics = slices.Collect(maps.Keys(w.topics))
	}
	w.all, w.topics = false, nil
	return ch
}

// Close ends the watch.
func (w *Watcher) Close() {
	w.of.mu.Lock()
	defer w.of.mu.Unlock()
	delete(w.of.loops, w)
}

func (w *Watcher) add(uids []storage.TopicUID, all bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all = w.all || all || len(w.topics)+len(uids) > maxPending
	if w.all {
		w.topics = nil
	} else {
		if w.topics == nil {
			w.topics = make(map[storage.TopicUID]struct{}, len(uids))
		}
		for _, u := range uids {
			w.topics[u] = struct{}{}
		}
	}
	poke(w.ch)
}

// publish wakes whoever waits for these topics. The view that holds the changes must have been stored.
func (ws *watchers) publish(uids []storage.TopicUID) {
	if len(uids) == 0 {
		return
	}
	ws.mu.Lock()
	defer ws.mu.Unlock()
	for w := range ws.loops {
		w.add(uids, false)
	}
	for _, u := range uids {
		for ch := range ws.waiters[u] {
			poke(ch)
		}
	}
}

// publishAll wakes everybody.
func (ws *watchers) publishAll() {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	for w := range ws.loops {
		w.add(nil, true)
	}
	for _, chans := range ws.waiters {
		for ch := range chans {
			poke(ch)
		}
	}
}

// poke leaves a token unless there is one.
func poke(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

func (ws *watchers) wait(uid storage.TopicUID) (ch chan struct{}, done func()) {
	ch = make(chan struct{}, 1)
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if ws.waiters == nil {
		ws.waiters = map[storage.TopicUID]map[chan struct{}]struct{}{}
	}
	if ws.waiters[uid] == nil {
		ws.waiters[uid] = map[chan struct{}]struct{}{}
	}
	ws.waiters[uid][ch] = struct{}{}
	return ch, func() {
		ws.mu.Lock()
		defer ws.mu.Unlock()
		delete(ws.waiters[uid], ch)
		if len(ws.waiters[uid]) == 0 {
			delete(ws.waiters, uid)
		}
	}
}

// Changed returns a channel that has a token after each change of the topic, until done is called.
func (c *ControlPlane) Changed(uid storage.TopicUID) (changed <-chan struct{}, done func()) {
	return c.changes.wait(uid)
}

// Await returns the topic as soon as until is true of it in the local view: at once, or after a change. Errors: ctx's; a stop's;
// storage.ErrTopicNotFound when the local view has no topic of this uid (any more).
func (c *ControlPlane) Await(ctx context.Context, uid storage.TopicUID, until func(*metadata.Topic) bool) (*metadata.Topic, error) {
	ch, done := c.changes.wait(uid) // before the first look, so that no change falls between
	defer done()
	for {
		t, ok := c.CachedTopicByUID(uid)
		if !ok {
			return nil, storage.ErrTopicNotFound
		}
		if until(t) {
			return t, nil
		}
		select {
		case <-ch:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-c.stopped:
			return nil, c.stopErr
		case <-c.closed:
			return nil, storage.ErrClosed
		}
	}
}
