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

// ParseDuration reads a duration of more than 0: Go's form, and days (7d). Invalid.
func ParseDuration(op, s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	if days, isDays := strings.CutSuffix(s, "d"); isDays {
		var n float64
		if n, err = strconv.ParseFloat(days, 64); err == nil {
			d = time.Duration(n * 24 * float64(time.Hour))
		}
	}
	if err != nil || d <= 0 {
		return 0, errs.New(errs.Invalid, op, s, "not a duration").WithHint("use for example 30m, 2h or 7d")
	}
	return d, nil
}
