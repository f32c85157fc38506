// Package inv ties tests to the list of what must never happen (docs/invariants.md). A test that proves a line calls Covers with
// its id; `go run ./e2e/inv/invcheck` prints the ids that no test covers and the ids that tests name but the list does not know.
package inv

import (
	"regexp"
	"testing"
)

var id = regexp.MustCompile(`^INV-[A-Z]\d+$`)

// Covers declares that t proves the named invariants. A malformed id fails the test. The declaration itself is found by reading
// the test sources, so it must be a call with literal ids.
func Covers(t testing.TB, ids ...string) {
	t.Helper()
	if len(ids) == 0 {
		t.Fatal("inv.Covers needs at least one id")
	}
	for _, s := range ids {
		if !id.MatchString(s) {
			t.Fatalf("inv.Covers: %q is not an invariant id", s)
		}
	}
}
