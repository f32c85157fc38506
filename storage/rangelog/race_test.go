//go:build race

package rangelog

// raceEnabled: the race detector slows memory down tenfold, so the long loops look at a sample.
const raceEnabled = true
