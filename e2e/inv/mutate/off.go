//go:build !mutate

// Package mutate holds the switches that turn single safety rules off, to prove that a test notices. They exist only in binaries
// built with the tag "mutate"; in every other build On is a constant false that the compiler removes.
package mutate

// On reports whether the safety rule of this name is switched off: never, in this build.
func On(string) bool { return false }
