//go:build race

package founding

const raceDetector = true
