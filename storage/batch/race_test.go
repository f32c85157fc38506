//go:build race

package batch

// Under the race detector a sync.Pool drops items at random, so counts of pooled allocations say nothing.
const raceDetector = true
