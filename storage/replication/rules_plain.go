//go:build !mutate

package replication

// mutated is whether this binary can switch rules off by name.
const mutated = false
