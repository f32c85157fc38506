// Package placement decides which brokers hold a segment, or vote in a Raft group. It is PURE: a function of its arguments, the same on
// every broker and at every call.
//
// It is rendezvous hashing: each broker has a score per key, drawn from both, and the highest scores win. So a broker that comes or goes
// changes only the choices that it is or was part of, and one that flaps finds the choices it had. On top of the scores, a choice takes one
// broker of each domain (the brokers of one attribute value, such as a zone) before it takes a second of any.
package placement

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"github.com/cespare/xxhash/v2"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	"github.com/malachilog/malachi/storage"
)

// Broker is a candidate. One that is Absent, Draining or Skewed is never chosen; it only counts in what an error says.
type Broker struct {
	ID         storage.BrokerID
	Attributes map[string]string
	// Absent: membership does not see it.
	Absent bool
	// Draining, also for one that is being decommissioned: it takes nothing new.
	Draining bool
	// Skewed: its clock is too far from the others'.
	Skewed bool
}

// Rules say what a choice must be like. The zero value asks for nothing but the scores.
type Rules struct {
	// SpreadBy is the attribute whose values are the domains. Empty: every broker is a domain of its own. Brokers without the attribute
	// are spread as one domain together, which counts for no MinDomains: where they are is not known.
	SpreadBy string
	// MinDomains is how many domains the choice should reach. 0 and 1 ask for nothing.
	MinDomains int
	// Hard refuses a choice that reaches fewer than MinDomains; else MinDomains is a wish, which spreading fulfils where it can be.
	Hard bool
	// Min is the smallest choice that is of use, such as the quorum of a segment; fewer are refused. 0 stands for 1.
	Min int
	// Avoid are brokers that failed lately: taken only where there are no others, and first only if there is no other to be first.
	Avoid map[storage.BrokerID]bool
	// Keep are brokers that hold the thing already, such as the copies that heal adds to. Those that may be chosen are, before any other,
	// so a choice that keeps moves nothing that need not move.
	Keep []storage.BrokerID
}

// KeyOfSegment is the key under which a segment's set is chosen. The segments of one range have keys of their own, so new brokers take
// part in the next roll.
func KeyOfSegment(id storage.SegmentID) uint64 {
	var b [40]byte
	copy(b[:16], id.Range.Topic[:])
	binary.LittleEndian.PutUint64(b[16:], uint64(id.Range.Timeline))
	binary.LittleEndian.PutUint32(b[24:], id.Range.Seq)
	binary.LittleEndian.PutUint32(b[28:], id.Seq)
	copy(b[32:], "segment")
	return xxhash.Sum64(b[:])
}

// KeyOfGroup is the key under which the voters of a Raft group are chosen.
func KeyOfGroup(group uint64) uint64 {
	var b [16]byte
	binary.LittleEndian.PutUint64(b[:], group)
	copy(b[8:], "group")
	return xxhash.Sum64(b[:])
}

// score is the broker's draw for the key.
func score(key uint64, id storage.BrokerID) uint64 {
	var b [16]byte
	binary.LittleEndian.PutUint64(b[:], key)
	binary.LittleEndian.PutUint64(b[8:], uint64(id))
	return xxhash.Sum64(b[:])
}

// Shortage is why nothing was chosen. It is storage.ErrUnavailable: brokers that come back change it.
type Shortage struct {
	// Wanted is the least number of brokers, Fit how many may be chosen.
	Wanted, Fit int
	// WantedDomains and Domains are the same for the values of SpreadBy; WantedDomains is 0 where none are demanded.
	SpreadBy               string
	WantedDomains, Domains int
	// Why the others may not be chosen.
	Absent, Draining, Skewed int
}

// Error says what is missing.
func (s *Shortage) Error() string {
	var b strings.Builder
	if s.WantedDomains > 0 && s.Domains < s.WantedDomains {
		fmt.Fprintf(&b, "placement needs %d values of attribute %q and finds %d", s.WantedDomains, s.SpreadBy, s.Domains)
	} else {
		fmt.Fprintf(&b, "placement needs %d brokers and finds %d", s.Wanted, s.Fit)
	}
	for _, w := range []struct {
		n    int
		what string
	}{{s.Absent, "absent"}, {s.Draining, "draining"}, {s.Skewed, "with a wrong clock"}} {
		if w.n > 0 {
			fmt.Fprintf(&b, ", %d %s", w.n, w.what)
		}
	}
	return b.String()
}

// Unwrap is storage.ErrUnavailable.
func (s *Shortage) Unwrap() error { return storage.ErrUnavailable }

// Choose returns up to n brokers for the key, fewer if there are no more, the first of which is to be the primary. Brokers are identified by
// id alone, and their order does not matter. Errors: *Shortage, storage.ErrInvalid (n below 1, a broker twice).
func Choose(key uint64, brokers []Broker, n int, rules Rules) ([]storage.BrokerID, error) {
	least := max(rules.Min, 1)
	if n < least {
		return nil, fmt.Errorf("a choice of %d brokers, of at least %d: %w", n, least, storage.ErrInvalid)
	}
	c := chooser{rules: rules, short: Shortage{Wanted: least, SpreadBy: rules.SpreadBy}}
	if err := c.load(key, brokers); err != nil {
		return nil, err
	}
	if rules.Hard && rules.MinDomains > 1 {
		c.short.WantedDomains = rules.MinDomains
	}
	c.short.Fit = len(c.fit)
	for _, b := range c.fit {
		c.domains[b.domain] = 0
	}
	c.short.Domains = len(c.domains)
	if _, unknown := c.domains[""]; unknown {
		c.short.Domains--
	}
	if len(c.fit) < least {
		return nil, &c.short
	}
	c.choose(n)
	if d := c.reached(); d < c.short.WantedDomains {
		c.short.Domains = min(c.short.Domains, d)
		return nil, &c.short
	}
	out := make([]storage.BrokerID, len(c.chosen))
	for i, b := range c.chosen {
		out[i] = b.id
	}
	return out, nil
}

type candidate struct {
	id     storage.BrokerID
	score  uint64
	domain string
	kept   bool
	avoid  bool
}

type chooser struct {
	rules   Rules
	short   Shortage
	fit     []candidate    // the highest score first
	domains map[string]int // how many of each are chosen
	chosen  []candidate
}

// load scores the brokers that may be chosen and counts the others.
func (c *chooser) load(key uint64, brokers []Broker) error {
	c.domains = map[string]int{}
	seen := make(map[storage.BrokerID]bool, len(brokers))
	for _, b := range brokers {
		if seen[b.ID] {
			return fmt.Errorf("broker %s is given twice: %w", b.ID, storage.ErrInvalid)
		}
		seen[b.ID] = true
		switch {
		case b.Absent:
			c.short.Absent++
		case b.Draining && !mutate.On("placement.use-draining"):
			c.short.Draining++
		case b.Skewed:
			c.short.Skewed++
		default:
			domain := b.ID.String()
			if c.rules.SpreadBy != "" {
				domain = b.Attributes[c.rules.SpreadBy]
			}
			c.fit = append(c.fit, candidate{
				id: b.ID, score: score(key, b.ID), domain: domain,
				kept: slices.Contains(c.rules.Keep, b.ID), avoid: c.rules.Avoid[b.ID],
			})
		}
	}
	slices.SortFunc(c.fit, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(b.score, a.score), cmp.Compare(a.id, b.id))
	})
	return nil
}

// choose takes the kept, then the good, then the avoided, each with the domains in mind, and puts the first in its place.
func (c *chooser) choose(n int) {
	c.take(n, func(b candidate) bool { return b.kept })
	c.take(n, func(b candidate) bool { return !b.avoid })
	c.take(n, func(candidate) bool { return true })
	for c.reached() < c.short.WantedDomains && c.swap() { // a hard rule counts for more than what failed lately
	}
	slices.SortFunc(c.chosen, func(a, b candidate) int {
		if a.avoid != b.avoid && !mutate.On("placement.avoided-first") {
			if a.avoid {
				return 1
			}
			return -1
		}
		return cmp.Or(cmp.Compare(b.score, a.score), cmp.Compare(a.id, b.id))
	})
}

// take adds eligible brokers until n are chosen: always the highest score among the domains of which the fewest are chosen.
func (c *chooser) take(n int, eligible func(candidate) bool) {
	for len(c.chosen) < n {
		best := -1
		for i, b := range c.fit {
			if !eligible(b) || c.has(b.id) {
				continue
			}
			if best < 0 || c.domains[b.domain] < c.domains[c.fit[best].domain] {
				best = i
			}
		}
		if best < 0 {
			return
		}
		c.add(c.fit[best])
	}
}

// swap puts the best broker of a domain that is not reached in the place of the lowest that shares its domain; kept ones go last.
func (c *chooser) swap() bool {
	in := slices.IndexFunc(c.fit, func(b candidate) bool { return b.domain != "" && c.domains[b.domain] == 0 })
	if in < 0 {
		return false
	}
	out := -1
	for i, b := range c.chosen {
		if (c.domains[b.domain] > 1 || b.domain == "") && (out < 0 || !b.kept || c.chosen[out].kept) {
			out = i
		}
	}
	if out < 0 {
		return false
	}
	c.domains[c.chosen[out].domain]--
	c.chosen = slices.Delete(c.chosen, out, out+1)
	c.add(c.fit[in])
	return true
}

func (c *chooser) add(b candidate) {
	c.domains[b.domain]++
	c.chosen = append(c.chosen, b)
}

func (c *chooser) has(id storage.BrokerID) bool {
	return slices.ContainsFunc(c.chosen, func(b candidate) bool { return b.id == id })
}

func (c *chooser) reached() (n int) {
	for d, k := range c.domains {
		if k > 0 && d != "" {
			n++
		}
	}
	return n
}
