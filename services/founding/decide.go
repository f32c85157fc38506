package founding

import (
	"fmt"
	"slices"
	"strings"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	"github.com/malachilog/malachi/storage"
)

// Order is what a broker of no cluster was told to do. The zero value: join, and nothing else.
type Order struct {
	// List are the addresses of the brokers that are to found a cluster together, this one among them, sorted.
	List []string
	// Init: this broker alone was told to found one.
	Init bool
	// IgnoreUnreachable goes with Init: seeds that can't be asked are taken to have no cluster.
	IgnoreUnreachable bool
}

func (o Order) wants() bool { return o.Init || len(o.List) > 0 }

// Standing is how a broker stands to clusters at one instant.
type Standing struct {
	Broker storage.BrokerID
	// Address is where it says that it is called.
	Address string
	// Cluster is zero for none.
	Cluster storage.ClusterID
	Order   Order
	// Joining: a call that may make it a member is under way.
	Joining bool
}

// Answer is what one asked address has answered in one round.
type Answer struct {
	// Asked is the address that was called.
	Asked string
	// Reached is false if nothing came back in time; then the rest is empty, and says nothing.
	Reached bool
	Broker  storage.BrokerID
	Cluster storage.ClusterID
	Wants   bool
	List    []string
	Joining bool
}

// AnswerOf is what a broker that stands so answers.
func AnswerOf(asked string, s Standing) Answer {
	a := Answer{Asked: asked, Reached: true, Broker: s.Broker, Cluster: s.Cluster, Joining: s.Joining}
	if s.Cluster.IsZero() {
		a.Wants, a.List = s.Order.wants(), s.Order.List
	}
	return a
}

// Action is what to do after a round.
type Action uint8

// The actions.
const (
	// Wait: ask again later.
	Wait Action = iota
	// Found a cluster now.
	Found
	// Join the cluster of Verdict at one of the addresses of Verdict.
	Join
)

// Verdict is what a round comes to.
type Verdict struct {
	Do      Action
	Cluster storage.ClusterID
	At      []string
	// Why says what is waited for.
	Why string
}

func wait(format string, args ...any) Verdict { return Verdict{Why: fmt.Sprintf(format, args...)} }

// Decide is the founding rule. It is PURE. self has no cluster, and answered its own order to others before the first question of this round
// was sent; answers are those to questions of this round alone, one for each address of the list and of the seeds.
//
// A list founds by its lowest address, and only after every address of it, the own one too, has answered in one round: a broker of its own,
// of no cluster, not about to be of one, with the same list. A broker told to found alone does so only after all its seeds have answered that
// they have no cluster and no order. Who meets a cluster joins it, whatever the order.
//
// Why two never found: under one list only one broker may. Two with orders that differ ask each other, as a list is agreed by all on it and
// an order to one broker asks its seeds; each made its order known before it asked, so at least one sees the other's. A broker that is about
// to join says so, so it can't be counted as free by one and be taken in by another.
//
// The limit: a newcomer that is on no list may be told that it was admitted to a cluster in the very moment in which that cluster's only disk
// is lost and its brokers found anew. It then belongs to a cluster that is no more, and has to be given an empty folder.
func Decide(self Standing, answers []Answer) Verdict {
	if v, ok := meet(answers); ok {
		return v
	}
	switch {
	case len(self.Order.List) > 0:
		return decideList(self, answers)
	case self.Order.Init:
		return decideInit(self, answers)
	}
	reached := 0
	for _, a := range answers {
		if a.Reached && a.Broker != self.Broker {
			reached++
		}
	}
	if reached == 0 {
		return wait("no seed answers (%d asked)", len(answers))
	}
	return wait("%d of %d seeds answer, and none belongs to a cluster yet", reached, len(answers))
}

// meet joins a cluster that an answer tells of.
func meet(answers []Answer) (Verdict, bool) {
	v := Verdict{Do: Join}
	for _, a := range answers {
		if !a.Reached || a.Cluster.IsZero() || mutate.On("founding.ignore-marker") {
			continue
		}
		if !v.Cluster.IsZero() && v.Cluster != a.Cluster {
			return wait("%s belongs to cluster %s and %s to cluster %s: name brokers of one cluster", v.At[0], v.Cluster, a.Asked, a.Cluster), true
		}
		v.Cluster = a.Cluster
		v.At = append(v.At, a.Asked)
	}
	return v, len(v.At) > 0
}

func decideList(self Standing, answers []Answer) Verdict {
	list := self.Order.List
	owner := map[storage.BrokerID]string{}
	for _, address := range list {
		i := slices.IndexFunc(answers, func(a Answer) bool { return a.Asked == address })
		if i < 0 || !answers[i].Reached {
			if mutate.On("founding.found-without-all") {
				continue
			}
			return wait("%s of the founding list does not answer", address)
		}
		a := answers[i]
		switch other, twice := owner[a.Broker]; {
		case twice:
			return wait("%s and %s of the founding list are one broker, %s: a copied folder, or two names of one address", other, address, a.Broker)
		case address == self.Address && a.Broker != self.Broker:
			return wait("another broker, %s, answers at this one's address %s", a.Broker, address)
		case a.Joining && !mutate.On("founding.ignore-joining"):
			return wait("%s is about to join a cluster", address)
		case !slices.Equal(a.List, list) && !mutate.On("founding.ignore-lists"):
			return wait("%s was started with another founding list: %s", address, listText(a.List))
		}
		owner[a.Broker] = address
	}
	if v, ok := rival(self, answers, func(a Answer) bool { return slices.Contains(list, a.Asked) }, false); ok {
		return v
	}
	if list[0] != self.Address && !mutate.On("founding.any-may-found") {
		return wait("%s, the lowest of the founding list, has to found the cluster", list[0])
	}
	return Verdict{Do: Found}
}

func decideInit(self Standing, answers []Answer) Verdict {
	if v, ok := rival(self, answers, func(Answer) bool { return false }, self.Order.IgnoreUnreachable); ok {
		return v
	}
	return Verdict{Do: Found}
}

// rival looks, among the answers that are not passed over, for a reason not to found.
func rival(self Standing, answers []Answer, pass func(Answer) bool, ignoreUnreachable bool) (Verdict, bool) {
	for _, a := range answers {
		switch {
		case pass(a) || a.Reached && a.Broker == self.Broker:
		case !a.Reached && !ignoreUnreachable && !mutate.On("founding.found-without-all"):
			return wait("seed %s does not answer, so it is not known whether it belongs to a cluster", a.Asked), true
		case a.Reached && a.Wants && !mutate.On("founding.ignore-rival"):
			return wait("%s has an order to found a cluster too", a.Asked), true
		case a.Reached && a.Joining && !mutate.On("founding.ignore-joining"):
			return wait("%s is about to join a cluster", a.Asked), true
		}
	}
	return Verdict{}, false
}

func listText(list []string) string {
	if len(list) == 0 {
		return "none"
	}
	return strings.Join(list, ", ")
}
