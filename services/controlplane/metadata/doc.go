// Package metadata is the state machine of one vnode: the topics whose names hash into its arcs, with their ranges and segments.
//
// It is a pure function of (state, command). It reads no clock, no configuration, no randomness and no identity of its own node:
// times, uids and nonces come in the command. So every replica that applied the same log holds the same state, and a snapshot of
// equal states is byte-identical.
//
// A proposal that timed out may still be applied later, and is then proposed again by its caller. So every command either carries
// a nonce that its effect records, or is a compare-and-set on a version that never comes back; meeting its own effect it changes
// nothing and answers what is recorded. The nonces of a topic outlive it in its tombstone: a late creation does not revive what
// was deleted, and a late deletion does not hit the next life of the name.
//
// State is immutable values behind copy-on-write trees. A Machine has one writer (Apply, Restore); View hands out a state that
// never changes again and may be read from any goroutine without a lock. Taking a View, which is also all that a snapshot needs to
// prepare, costs the same whatever the state holds.
package metadata
