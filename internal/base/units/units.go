// Package units reads sizes and durations as users write them.
package units

import (
	"strconv"
	"strings"
	"time"

	"pando/internal/base/errs"
)

// ParseSize reads a size in bytes: a number with an optional K, M, G, T, P, E (powers of 1024; KB, KiB and lower case
// too). Invalid.
func ParseSize(op, s string) (int64, error) {
	bad := func() (int64, error) {
		return 0, errs.New(errs.Invalid, op, s, "not a size").
			WithHint("use a number of bytes, or a number with a unit: 512M, 10G, 1.5T")
	}
	num := strings.TrimRight(s, "KMGTPEkmgtpeiBb")
	unit := strings.ToUpper(s[len(num):])
	unit = strings.TrimSuffix(strings.TrimSuffix(unit, "B"), "I")
	shift, ok := map[string]int{"": 0, "K": 10, "M": 20, "G": 30, "T": 40, "P": 50, "E": 60}[unit]
	f, err := strconv.ParseFloat(num, 64)
	if err != nil || !ok || f <= 0 || num == "" {
		return bad()
	}

	v := f * float64(int64(1)<<shift)
	if v >= 1<<62 {
		return bad()
	}

	return int64(v), nil
}

// maxDays is the longest duration that users may write, in days: 100 years. The times that it leads to can be stored.
const maxDays = 36500

// ParseDuration reads a duration of more than 0 and at most 36500 days: Go's form, and days (7d). Invalid.
func ParseDuration(op, s string) (time.Duration, error) {
	const day = 24 * time.Hour
	d, err := time.ParseDuration(s)
	if days, isDays := strings.CutSuffix(s, "d"); isDays {
		var n float64
		if n, err = strconv.ParseFloat(days, 64); err == nil {
			d = time.Duration(min(n, maxDays+1) * float64(day))
		}
	}

	switch {
	case err != nil || d <= 0:
		return 0, errs.New(errs.Invalid, op, s, "not a duration").WithHint("use for example 30m, 2h or 7d")
	case d > maxDays*day:
		return 0, errs.New(errs.Invalid, op, s, "the duration is too long").WithHint("use at most %dd", maxDays)
	}
	return d, nil
}
