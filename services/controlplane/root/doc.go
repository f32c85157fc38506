// Package root is the state machine of the cluster's one root group: the cluster's id and level, the recorded ring, and the brokers
// with the boot and journal group under which they were last seen.
//
// Like package metadata it is a pure function of (state, command) and holds immutable states: an Apply makes a new State, which may
// be read from any goroutine without a lock and never changes.
package root
