// Package controlplane is the cluster's memory: which brokers, topics, ranges and segments there are. It runs the Raft groups
// (root, and one per vnode of the hash ring) on dragonboat, which no other package imports, around the pure state machines of
// packages root and metadata.
//
// Goroutines: the Raft library's own run from Open to Close; everything here runs in callers' goroutines and in the library's.
// Locks: the watch lists have a mutex that is never held over I/O or a callback. What is applied is published as an immutable view
// behind an atomic pointer, so cached reads take no lock.
//
// What survives a crash: a command that was answered is in the synced Raft log of a quorum. A command without an answer may still
// be applied; all are safe to propose again.
//
// The folder belongs to a broker id, not to a port or host: it may be moved to another machine, name or address (but never copied:
// root refuses the second process by its boot). A disk error of the Raft log ends the process.
package controlplane
