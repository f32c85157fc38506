package floor

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// What is measured depends on the machine; that it was measured, and that nothing is left behind, does not.
func TestMeasureGivesAllAndLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	f, err := Measure(t.Context(), dir, 0)
	if err != nil {
		t.Fatal(err)
	}
	if f.Barrier <= 0 || f.RoundTrip <= 0 || f.DirectMBps <= 0 || f.LoopbackMBps <= 0 {
		t.Errorf("floor %+v: something is not above zero", f)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestMeasureEndsWithItsContext(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Measure(ctx, dir, time.Hour); !errors.Is(err, context.Canceled) {
		t.Fatalf("error %v, want the context's", err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

// The yardstick must not be made of what it measures.
func TestImportsNothingOfOurs(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	for pkg := range strings.FieldsSeq(string(out)) {
		if first, _, _ := strings.Cut(pkg, "/"); strings.Contains(first, ".") && !strings.HasPrefix(pkg, "golang.org/x/sys/") &&
			!strings.HasSuffix(pkg, "/internal/floor") {
			t.Errorf("depends on %s", pkg)
		}
	}
}
