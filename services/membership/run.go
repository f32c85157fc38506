package membership

import (
	"context"
	"fmt"
	"log"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/malachilog/malachi/storage"
)

const (
	maxRejoinDelay = 30 * time.Second
	seedsEvery     = time.Minute
	bookEvery      = time.Second
	// joinAtOnce bounds the addresses that one round asks, each of which may take streamTimeout.
	joinAtOnce = 4
)

// attempt is when an address is asked next.
type attempt struct {
	next  time.Time
	delay time.Duration
}

// Run joins and keeps joined until ctx ends; then it tells the others that it leaves, closes, and returns nil.
func (m *Membership) Run(ctx context.Context) error {
	tick := time.NewTicker(m.cfg.Rejoin)
	defer tick.Stop()
	asked := map[string]attempt{}
	var lastBook, lastSeeds time.Time
	for round := true; ; {
		if round {
			m.rejoin(ctx, asked, &lastSeeds)
		}
		m.sendMeta()
		if round || time.Since(lastBook) >= bookEvery {
			m.saveBook()
			lastBook = time.Now()
		}
		select {
		case <-ctx.Done():
			m.saveBook()
			return m.leave()
		case <-tick.C:
			round = true
		case <-m.poke:
			round = false
		}
	}
}

// rejoin asks who is not there, and seeds, for their members.
func (m *Membership) rejoin(ctx context.Context, asked map[string]attempt, lastSeeds *time.Time) {
	now := time.Now()
	missing, alone, there := m.missing()
	targets := missing
	if alone || now.Sub(*lastSeeds) >= seedsEvery {
		*lastSeeds = now
		targets = append(targets, m.cfg.Seeds...)
		if alone && m.deps.Discover != nil {
			targets = append(targets, m.deps.Discover(ctx)...)
		}
	}
	for k := range asked {
		if !slices.Contains(targets, k) {
			delete(asked, k)
		}
	}
	slices.SortStableFunc(targets, func(a, b string) int { return asked[a].next.Compare(asked[b].next) })
	done := 0
	var failed []string
	for _, t := range slices.Compact(targets) {
		a := asked[t]
		if ctx.Err() != nil || done == joinAtOnce || now.Before(a.next) {
			break
		}
		done++
		err := m.join(ctx, t, there)
		a.delay = min(max(2*a.delay, m.cfg.Rejoin), maxRejoinDelay)
		if err == nil {
			a.delay = m.cfg.Rejoin
		} else {
			failed = append(failed, t+" ("+oneLine(err)+")")
		}
		a.next = time.Now().Add(a.delay)
		asked[t] = a
	}
	if _, alone, _ := m.missing(); alone && len(failed) > 0 && ctx.Err() == nil && m.told.may("alone", time.Minute) {
		m.log.Warn("no other broker is found by gossip; looking on", "tried", strings.Join(failed, ", "))
	}
}

// missing returns the gossip addresses of known brokers that are not there, whether no other is there, and the addresses of those that are.
func (m *Membership) missing() (addresses []string, alone bool, there map[string]bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	there = map[string]bool{}
	for _, n := range m.nodes {
		there[n.gossip] = true
	}
	alone = true
	for id, e := range m.book {
		if id == m.cfg.Self {
			continue
		}
		if _, n := m.head(id); n != nil {
			alone = false
		} else if e.Gossip != "" {
			addresses = append(addresses, e.Gossip)
		}
	}
	slices.Sort(addresses)
	return addresses, alone, there
}

// join exchanges members with whoever listens at a host:port, at all addresses that its name has.
func (m *Membership) join(ctx context.Context, target string, there map[string]bool) error {
	host, port, err := net.SplitHostPort(target)
	if err != nil {
		return err
	}
	ips := []string{host}
	if net.ParseIP(host) == nil {
		if ips, err = net.DefaultResolver.LookupHost(ctx, host); err != nil {
			return err
		}
	}
	for _, ip := range ips[:min(len(ips), joinAtOnce)] {
		a := net.JoinHostPort(ip, port)
		if there[a] {
			continue
		}
		if _, jerr := m.list.Join([]string{a}); jerr != nil {
			if notOurKey(jerr.Error()) {
				m.tellKey(a)
			}
			err = jerr
			continue
		}
		return nil
	}
	return err
}

// sendMeta sends what Update has left.
func (m *Membership) sendMeta() {
	m.mu.Lock()
	resend := m.resend
	m.resend = false
	m.mu.Unlock()
	if !resend {
		return
	}
	if err := m.list.UpdateNode(time.Second); err != nil {
		m.log.Debug("what this broker tells of itself may reach the others late", "error", err)
	}
}

// leave tells the others, then closes.
func (m *Membership) leave() error {
	m.ending.Lock()
	defer m.ending.Unlock()
	if m.closed {
		return nil
	}
	if err := m.list.Leave(leaveTimeout); err != nil {
		m.log.Debug("the others will notice by themselves that this broker is gone", "error", err)
	}
	m.closed = true
	return m.list.Shutdown()
}

// Close stops listening without a word to the others. Run does it by itself. A second call does nothing.
func (m *Membership) Close() error {
	m.ending.Lock()
	defer m.ending.Unlock()
	if m.closed {
		return nil
	}
	m.closed = true
	return m.list.Shutdown()
}

// SetKeys replaces the keys while running, first the one that encrypts. To rotate, give every broker old and new, then new and old, then the
// new alone. storage.ErrInvalid: a key of another length, none at all, or the gossip was opened without keys; nothing changes then.
func (m *Membership) SetKeys(keys [][]byte) error {
	if err := checkKeys(keys); err != nil {
		return err
	}
	if m.ring == nil || len(keys) == 0 {
		return fmt.Errorf("gossip keys can't be turned on or off while running: restart with them: %w", storage.ErrInvalid)
	}
	for _, k := range keys {
		if err := m.ring.AddKey(slices.Clone(k)); err != nil {
			return err
		}
	}
	keep := func(k []byte) bool {
		return slices.ContainsFunc(keys, func(o []byte) bool { return slices.Equal(o, k) })
	}
	drop := slices.DeleteFunc(slices.Clone(m.ring.GetKeys()), keep)
	if len(drop) > 0 {
		// Removing any but the last key would move the others in an array that readers hold, so those that go are brought to the end first:
		// each use moves a key to the front.
		for _, k := range slices.Backward(keys) {
			if err := m.ring.UseKey(k); err != nil {
				return err
			}
		}
		for range drop {
			all := m.ring.GetKeys()
			if err := m.ring.RemoveKey(all[len(all)-1]); err != nil {
				return err
			}
		}
	}
	return m.ring.UseKey(keys[0])
}

func checkKeys(keys [][]byte) error {
	for i, k := range keys {
		if n := len(k); n != 16 && n != 24 && n != 32 {
			return fmt.Errorf("gossip key %d has %d bytes, want 16, 24 or 32: %w", i+1, n, storage.ErrInvalid)
		}
	}
	return nil
}

// notOurKey recognises the library's words for gossip that one side encrypts and the other can't read.
func notOurKey(text string) bool {
	return containsAny(strings.ToLower(text), "could decrypt", "decrypt packet failed", "unsupported encryption version", "encryption is configured but", "encryption is not configured")
}

func (m *Membership) tellKey(at string) {
	host, _, err := net.SplitHostPort(at)
	if err != nil {
		host = at
	}
	if m.told.may("key "+host, 10*time.Minute) {
		m.log.Warn("gossip with this address can't be read: the keys of the two sides differ, or one has none", "address", at)
	}
}

// libraryLog passes on what the library says: at Debug, but for what a person has to know.
func (m *Membership) libraryLog() *log.Logger { return log.New((*libraryLines)(m), "", 0) }

type libraryLines Membership

// Write takes one line.
func (l *libraryLines) Write(b []byte) (int, error) {
	m := (*Membership)(l)
	text := strings.TrimSpace(string(b))
	_, from, incoming := strings.Cut(text, "from=")
	switch {
	case incoming && notOurKey(text): // of its own calls join tells
		m.tellKey(from)
	case containsAny(text, "UDP probes failed", "without encryption", "queue full"):
		if m.told.may(class(text), time.Minute) {
			m.log.Warn("gossip: " + text)
		}
	default:
		m.log.Debug(text)
	}
	return len(b), nil
}

// class is a line without what changes from one to the next.
func class(text string) string {
	return strings.Map(func(r rune) rune {
		if r >= '0' && r <= '9' {
			return -1
		}
		return r
	}, text[:min(len(text), 200)])
}

func containsAny(s string, parts ...string) bool {
	return slices.ContainsFunc(parts, func(p string) bool { return strings.Contains(s, p) })
}

func oneLine(err error) string {
	s := strings.Join(strings.Fields(err.Error()), " ")
	s = strings.TrimPrefix(s, "1 error occurred: * ")
	return s[:min(len(s), 200)]
}

// rarely lets a thing be said once in a while. The zero value is ready.
type rarely struct {
	mu   sync.Mutex
	last map[string]time.Time
}

// maxTold bounds what is remembered; beyond it everything may be said again.
const maxTold = 256

func (r *rarely) may(what string, every time.Duration) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	if t, ok := r.last[what]; ok && now.Sub(t) < every {
		return false
	}
	if r.last == nil || len(r.last) >= maxTold {
		r.last = map[string]time.Time{}
	}
	r.last[what] = now
	return true
}
