// Package quantity reads sizes and durations as people write them, on the command line and in files.
package quantity

import (
	"strconv"
	"strings"
	"time"

	"pando/internal/base/errs"
)

// ParseSize reads a number of bytes, with a unit of 1024: 512M, 10G, 1.5T. Invalid. Errors name op.
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
	if err != nil || !ok || !(f > 0) || num == "" { // not even NaN
		return bad()
	}

	v := f * float64(int64(1)<<shift)
	if v >= 1<<62 {
		return bad()
	}

	return int64(v), nil
}

// ParseDuration reads a duration longer than zero: 30m, 2h or 7d. Invalid. Errors name op.
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

// ParsePercent reads a share, from 0 % to below 100 %, with or without the sign. Invalid. Errors name op.
func ParsePercent(op, s string) (float64, error) {
	f, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(s), "%"), 64)
	if err != nil || f < 0 || f >= 100 || f != f {
		return 0, errs.New(errs.Invalid, op, s, "not a percentage from 0 to below 100").
			WithHint("use for example 5%%")
	}
	return f, nil
}
