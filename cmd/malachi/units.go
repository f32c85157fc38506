package main

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

const day = 24 * time.Hour

// parseDuration reads a duration with its unit, such as 90s, 1h30m or 7d. It is not negative.
func parseDuration(s string) (time.Duration, error) {
	bad := errors.New("want a duration with its unit, such as 200ms, 15m, 1h30m or 7d")
	rest, total := s, time.Duration(0)
	if days, after, ok := strings.Cut(s, "d"); ok {
		n, err := strconv.ParseUint(days, 10, 31)
		if err != nil || time.Duration(n) > math.MaxInt64/day {
			return 0, bad
		}
		if rest, total = after, time.Duration(n)*day; rest == "" {
			return total, nil
		}
	}
	d, err := time.ParseDuration(rest)
	if err != nil || d < 0 || strings.HasPrefix(rest, "+") || strings.HasPrefix(rest, "-") || rest == "0" || total > math.MaxInt64-d {
		return 0, bad
	}
	return total + d, nil
}

var sizeUnits = []struct {
	name string
	size uint64
}{
	{"kib", 1 << 10}, {"mib", 1 << 20}, {"gib", 1 << 30}, {"tib", 1 << 40},
	{"kb", 1e3}, {"mb", 1e6}, {"gb", 1e9}, {"tb", 1e12}, {"b", 1}, {"", 1},
}

// parseSize reads a number of bytes, such as 1048576, 256MiB or 1.5GB.
func parseSize(s string) (uint64, error) {
	lower := strings.ToLower(strings.TrimSpace(s))
	for _, u := range sizeUnits {
		digits, ok := strings.CutSuffix(lower, u.name)
		if !ok {
			continue
		}
		digits = strings.TrimSpace(digits)
		if n, err := strconv.ParseUint(digits, 10, 63); err == nil && n <= math.MaxInt64/u.size {
			return n * u.size, nil
		}
		f, err := strconv.ParseFloat(digits, 64)
		if err == nil && u.size > 1 && strings.Trim(digits, "0123456789.") == "" && f*float64(u.size) < 1<<62 {
			return uint64(f * float64(u.size)), nil
		}
		break
	}
	return 0, fmt.Errorf("want a size, such as 1048576, 256MiB or 2GiB")
}
