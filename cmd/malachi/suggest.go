package main

import (
	"fmt"
	"strings"
)

// nearest gives the candidate that takes the fewest edits to become, if that is close enough to be meant.
func nearest(word string, candidates []string) (best string, found bool) {
	limit := max(2, len(word)/3)
	for _, c := range candidates {
		d := distance(strings.ToLower(word), strings.ToLower(c))
		if d <= limit && d < max(len(word), len(c)) {
			best, found, limit = c, true, d-1
		}
	}
	return best, found
}

// didYouMean ends an error about an unknown word.
func didYouMean(word string, candidates []string, otherwise string) string {
	if best, ok := nearest(word, candidates); ok {
		return fmt.Sprintf("; did you mean %s?", best)
	}
	return "; " + otherwise
}

// distance is the number of bytes to insert, delete, change, or swap with their neighbour to make b of a. Words from outside are cut:
// none that is meant is longer.
func distance(a, b string) int {
	a, b = a[:min(len(a), 64)], b[:min(len(b), 64)]
	before, prev, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		before, prev, row = prev, row, before
		row[0] = i + 1
		for j := range len(b) {
			change := 1
			if a[i] == b[j] {
				change = 0
			}
			row[j+1] = min(prev[j]+change, prev[j+1]+1, row[j]+1)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				row[j+1] = min(row[j+1], before[j-1]+1)
			}
		}
	}
	return row[len(b)]
}
