package main

import (
	"os"
	"runtime/debug"
)

// heapGrowth is how far a broker's heap may grow beyond what lives, in percent, before the collector runs.
const heapGrowth = 300

// heapLimit is where the collector stops being lazy.
const heapLimit = 1 << 30

// roomyHeap makes the collector run less often in a broker process. Little lives in its heap, some ten megabytes, but requests and pages
// are of megabytes: at the default it would run hundreds of times a second under load, and empty the buffer pools each time. GOGC and GOMEMLIMIT in
// the environment win.
func roomyHeap() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(heapGrowth)
	}
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(heapLimit)
	}
}
