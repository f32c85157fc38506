// Package controlplane is the cluster's memory: which brokers, topics, ranges and segments there are. It runs the Raft groups
// (root, and one per vnode of the hash ring) on dragonboat, which no other package imports, around the pure state machines of
// packages root and metadata.
//
// Every broker runs a replica of every group: three of them vote, the others follow as non-voting members. So what a broker reads is
// in its own memory, and what it proposes goes to the leader by Raft itself. The leader of a group keeps its members as they should
// be: members.go decides, membership.go carries it out.
//
// Goroutines: the Raft library's own run from Open to Close; Run owns the membership loop; everything else runs in callers'
// goroutines and in the library's. Locks: the watch lists and the membership loop's notes have mutexes that are never held over I/O
// or a callback. What is applied is published as an immutable view behind an atomic pointer, so cached reads take no lock.
//
// What survives a crash: a command that was answered is in the synced Raft log of a quorum. A command without an answer may still
// be applied; all are safe to propose again.
//
// The folder belongs to a broker id, not to a port or host: it may be moved to another machine, name or address (but never copied:
// root refuses the second process by its boot). A disk error of the Raft log ends the process.
package controlplane
