package placement

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/malachilog/malachi/e2e/inv"
	"github.com/malachilog/malachi/storage"
)

func zoned(zones ...string) (out []Broker) {
	for i, z := range zones {
		out = append(out, Broker{ID: storage.BrokerID(i + 1), Attributes: map[string]string{"zone": z}})
	}
	return out
}

func mustChoose(t interface {
	Helper()
	Fatalf(string, ...any)
}, key uint64, brokers []Broker, n int, rules Rules) []storage.BrokerID {
	t.Helper()
	got, err := Choose(key, brokers, n, rules)
	if err != nil {
		t.Fatalf("choose %d of %+v by %+v: %v", n, brokers, rules, err)
	}
	return got
}

func domainsOf(brokers []Broker, ids []storage.BrokerID) map[string]int {
	out := map[string]int{}
	for _, b := range brokers {
		if slices.Contains(ids, b.ID) {
			out[b.Attributes["zone"]]++
		}
	}
	return out
}

func drawBrokers(t *rapid.T) []Broker {
	ids := rapid.SliceOfNDistinct(rapid.Uint64Range(1, 1<<62), 1, 9, rapid.ID[uint64]).Draw(t, "ids")
	var out []Broker
	for i, id := range ids {
		b := Broker{ID: storage.BrokerID(id), Attributes: map[string]string{"zone": rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, fmt.Sprint("zone", i))}}
		switch rapid.IntRange(0, 9).Draw(t, fmt.Sprint("state", i)) {
		case 0:
			b.Absent = true
		case 1:
			b.Draining = true
		case 2:
			b.Skewed = true
		}
		out = append(out, b)
	}
	return out
}

func fit(brokers []Broker) []Broker {
	return slices.DeleteFunc(slices.Clone(brokers), func(b Broker) bool { return b.Absent || b.Draining || b.Skewed })
}

// TestChoiceKeepsTheRules draws brokers and rules and looks at every choice.
func TestChoiceKeepsTheRules(t *testing.T) {
	inv.Covers(t, "INV-M8")
	rapid.Check(t, func(t *rapid.T) {
		brokers, n := drawBrokers(t), rapid.IntRange(1, 5).Draw(t, "n")
		rules := Rules{SpreadBy: rapid.SampledFrom([]string{"", "zone"}).Draw(t, "spread"), Avoid: map[storage.BrokerID]bool{}}
		for _, b := range brokers {
			if rapid.IntRange(0, 3).Draw(t, "avoid") == 0 {
				rules.Avoid[b.ID] = true
			}
		}
		key := rapid.Uint64().Draw(t, "key")
		good := fit(brokers)
		got, err := Choose(key, brokers, n, rules)
		if len(good) == 0 {
			var short *Shortage
			if !errors.As(err, &short) || !errors.Is(err, storage.ErrUnavailable) || short.Absent+short.Draining+short.Skewed != len(brokers) {
				t.Fatalf("of no fit broker: %v, %v", got, err)
			}
			return
		}
		if err != nil || len(got) != min(n, len(good)) {
			t.Fatalf("chose %v of %d fit, wanted %d: %v", got, len(good), n, err)
		}
		seen := map[storage.BrokerID]bool{}
		avoided := 0
		for _, id := range got {
			if seen[id] || !slices.ContainsFunc(good, func(b Broker) bool { return b.ID == id }) {
				t.Fatalf("%s is chosen twice or unfit: %v", id, got)
			}
			seen[id] = true
			if rules.Avoid[id] {
				avoided++
			}
		}
		free := slices.DeleteFunc(slices.Clone(good), func(b Broker) bool { return rules.Avoid[b.ID] })
		if want := max(0, len(got)-len(free)); avoided != want {
			t.Fatalf("%d avoided brokers in %v, %d are needed", avoided, got, want)
		}
		if rules.Avoid[got[0]] && len(free) > 0 {
			t.Fatalf("an avoided broker is first: %v", got)
		}
		shuffled := rapid.Permutation(brokers).Draw(t, "shuffled")
		if again := mustChoose(t, key, shuffled, n, rules); !slices.Equal(got, again) {
			t.Fatalf("another order of the brokers: %v, was %v", again, got)
		}
		if rules.SpreadBy != "" && len(rules.Avoid) == 0 {
			spread(t, good, got)
		}
	})
}

// spread demands that no domain has two more than another that has some to give.
func spread(t *rapid.T, good []Broker, got []storage.BrokerID) {
	chosen, all := domainsOf(good, got), map[string]int{}
	for _, b := range good {
		all[b.Attributes["zone"]]++
	}
	for a, n := range chosen {
		for b, m := range all {
			if n > chosen[b]+1 && chosen[b] < m {
				t.Fatalf("%d of %q and %d of %q, which has %d: %v", n, a, chosen[b], b, m, got)
			}
		}
	}
}

// TestOneMoreBrokerMovesLittle adds a broker: a choice stays, or takes the new one in the place of one.
func TestOneMoreBrokerMovesLittle(t *testing.T) {
	inv.Covers(t, "INV-M8")
	rapid.Check(t, func(t *rapid.T) {
		brokers, n := fit(drawBrokers(t)), rapid.IntRange(1, 5).Draw(t, "n")
		if len(brokers) == 0 {
			return
		}
		fresh := Broker{ID: 1 << 63, Attributes: map[string]string{"zone": rapid.SampledFrom([]string{"a", "b", "c", "d"}).Draw(t, "zone of the new")}}
		rules := Rules{SpreadBy: rapid.SampledFrom([]string{"", "zone"}).Draw(t, "spread")}
		key := rapid.Uint64().Draw(t, "key")
		before := mustChoose(t, key, brokers, n, rules)
		after := mustChoose(t, key, append(slices.Clone(brokers), fresh), n, rules)
		var gone, come []storage.BrokerID
		for _, id := range before {
			if !slices.Contains(after, id) {
				gone = append(gone, id)
			}
		}
		for _, id := range after {
			if !slices.Contains(before, id) {
				come = append(come, id)
			}
		}
		if len(gone) > 1 || len(come) > 1 || len(come) == 1 && come[0] != fresh.ID || len(gone) == 1 && len(come) == 0 {
			t.Fatalf("%v became %v", before, after)
		}
		if back := mustChoose(t, key, brokers, n, rules); !slices.Equal(back, before) {
			t.Fatalf("a broker that came and went left %v, was %v", back, before)
		}
		kept := rules
		kept.Keep = before
		if same := mustChoose(t, key, append(slices.Clone(brokers), fresh), n, kept); len(before) == n && !slices.Equal(slices.Sorted(slices.Values(same)), slices.Sorted(slices.Values(before))) {
			t.Fatalf("asked to keep %v it took %v", before, same)
		}
	})
}

func TestPrimariesAndCopiesAreSpreadEvenly(t *testing.T) {
	brokers := zoned("a", "b", "c", "a", "b")
	first, all := map[storage.BrokerID]int{}, map[storage.BrokerID]int{}
	const keys = 5000
	for i := range uint32(keys) {
		got := mustChoose(t, KeyOfSegment(storage.SegmentID{Range: storage.RangeID{Topic: storage.TopicUID{7}, Seq: i % 50}, Seq: i / 50}), brokers, 3, Rules{})
		first[got[0]]++
		for _, id := range got {
			all[id]++
		}
	}
	for _, b := range brokers {
		if n := first[b.ID]; n < keys/5*8/10 || n > keys/5*12/10 {
			t.Errorf("broker %s is first %d times of %d", b.ID, n, keys)
		}
		if n := all[b.ID]; n < keys*3/5*9/10 || n > keys*3/5*11/10 {
			t.Errorf("broker %s is chosen %d times", b.ID, n)
		}
	}
	if KeyOfGroup(1) == KeyOfGroup(2) || KeyOfGroup(0) == KeyOfSegment(storage.SegmentID{}) {
		t.Error("keys that should differ are one")
	}
}

func TestHardDomains(t *testing.T) {
	hard := Rules{SpreadBy: "zone", MinDomains: 3, Hard: true}
	for key := range uint64(50) {
		got := mustChoose(t, key, zoned("a", "a", "a", "b", "c"), 3, hard)
		if d := domainsOf(zoned("a", "a", "a", "b", "c"), got); len(d) != 3 {
			t.Fatalf("domains %v", d)
		}
	}
	_, err := Choose(1, zoned("a", "a", "b"), 3, hard)
	var short *Shortage
	if !errors.As(err, &short) || short.WantedDomains != 3 || short.Domains != 2 || !strings.Contains(err.Error(), `3 values of attribute "zone" and finds 2`) {
		t.Fatalf("two zones for three: %v", err)
	}
	brokers := zoned("a", "a", "b", "c")
	brokers[3].Draining = true
	if _, err := Choose(1, brokers, 3, hard); err == nil || !strings.HasSuffix(err.Error(), ", 1 draining") {
		t.Fatalf("what is missing is not told: %v", err)
	}
	// Where a broker without the attribute is, nobody knows: it is no third zone, and gives way to one.
	if got, err := Choose(1, zoned("a", "b", ""), 3, hard); err == nil || !strings.Contains(err.Error(), "finds 2") {
		t.Fatalf("an unknown zone for a third: %v, %v", got, err)
	}
	for key := range uint64(50) {
		if got := mustChoose(t, key, zoned("a", "b", "", "c", ""), 3, hard); slices.Contains(got, 3) || slices.Contains(got, 5) {
			t.Fatalf("an unknown zone in the place of a known one: %v", got)
		}
	}
	soft := hard
	soft.Hard = false
	if got := mustChoose(t, 1, zoned("a", "a", "b"), 3, soft); len(got) != 3 {
		t.Fatalf("soft: %v", got)
	}
	// What failed lately is still better than too few domains, but not first.
	hard.Avoid = map[storage.BrokerID]bool{5: true}
	for key := range uint64(50) {
		got := mustChoose(t, key, zoned("a", "a", "a", "b", "c"), 3, hard)
		if !slices.Contains(got, 5) || got[0] == 5 {
			t.Fatalf("the only broker of a zone is avoided: %v", got)
		}
	}
	hard.Keep = []storage.BrokerID{1, 2}
	if got := mustChoose(t, 1, zoned("a", "a", "a", "b", "c"), 3, hard); len(domainsOf(zoned("a", "a", "a", "b", "c"), got)) != 3 {
		t.Fatalf("keeping two of a zone broke the hard rule: %v", got)
	}
}

func TestTooFewAndBadArguments(t *testing.T) {
	brokers := zoned("a", "b", "c")
	brokers[0].Absent, brokers[1].Skewed = true, true
	_, err := Choose(1, brokers, 3, Rules{Min: 2})
	if !errors.Is(err, storage.ErrUnavailable) || err.Error() != "placement needs 2 brokers and finds 1, 1 absent, 1 with a wrong clock" {
		t.Fatalf("too few: %v", err)
	}
	if got := mustChoose(t, 1, brokers, 3, Rules{}); !slices.Equal(got, []storage.BrokerID{3}) {
		t.Fatalf("a set may be smaller: %v", got)
	}
	for name, call := range map[string]func() ([]storage.BrokerID, error){
		"none wanted":    func() ([]storage.BrokerID, error) { return Choose(1, brokers, 0, Rules{}) },
		"fewer than min": func() ([]storage.BrokerID, error) { return Choose(1, brokers, 1, Rules{Min: 2}) },
		"twice":          func() ([]storage.BrokerID, error) { return Choose(1, append(brokers, brokers[2]), 3, Rules{}) },
	} {
		if got, err := call(); !errors.Is(err, storage.ErrInvalid) {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

// TestDrainingAndAbsentAreNotChosen is TestChoiceKeepsTheRules for the one rule, by hand.
func TestDrainingAndAbsentAreNotChosen(t *testing.T) {
	inv.Covers(t, "INV-M8")
	states := map[string]func(*Broker){
		"absent": func(b *Broker) { b.Absent = true }, "draining": func(b *Broker) { b.Draining = true }, "skewed": func(b *Broker) { b.Skewed = true },
	}
	for _, name := range slices.Sorted(maps.Keys(states)) {
		for key := range uint64(20) {
			brokers := zoned("a", "b", "c", "d")
			states[name](&brokers[1])
			rules := Rules{Avoid: map[storage.BrokerID]bool{1: true, 3: true}, Keep: []storage.BrokerID{2}}
			if got := mustChoose(t, key, brokers, 4, rules); slices.Contains(got, 2) || len(got) != 3 || got[0] != 4 {
				t.Fatalf("%s: %v", name, got)
			}
		}
	}
}
