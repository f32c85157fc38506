//go:build !race

package rangelog

const raceEnabled = false
