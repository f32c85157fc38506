//go:build mutate

package replication

const mutated = true
