//go:build !race

package founding

const raceDetector = false
