package syncbench

import (
	"math"
	"strconv"
	"strings"
)

// secondsText is a time with three digits in a unit that suits.
func secondsText(s float64) string {
	unit := " s"
	switch {
	case s == 0:
		return "0 s"
	case s < 0.9995e-6:
		s, unit = s*1e9, " ns"
	case s < 0.9995e-3:
		s, unit = s*1e6, " µs"
	case s < 0.9995:
		s, unit = s*1e3, " ms"
	}

	digits := 2 - int(math.Floor(math.Log10(s)+1e-9))
	t := strconv.FormatFloat(s, 'f', min(max(digits, 0), 2), 64)
	return t + unit
}

// tickText is a round time without digits behind it that say nothing.
func tickText(s float64) string {
	t := secondsText(s)
	n, unit, _ := strings.Cut(t, " ")
	if strings.Contains(n, ".") {
		n = strings.TrimRight(strings.TrimRight(n, "0"), ".")
	}
	return n + " " + unit
}

// bytesText is a size with its unit; below 0 it is not known.
func bytesText(n int64) string {
	const units = "KMGTPE"
	switch {
	case n < 0:
		return "–"
	case n < 1024:
		return strconv.FormatInt(n, 10) + " B"
	}

	f, i := float64(n)/1024, 0
	for f >= 1023.95 && i < len(units)-1 {
		f /= 1024
		i++
	}

	return strconv.FormatFloat(f, 'f', 1, 64) + " " + units[i:i+1] + "iB"
}

// countText writes 1234567 as 1,234,567; below 0 it is not known.
func countText(n int64) string {
	if n < 0 {
		return "–"
	}
	s := strconv.FormatInt(n, 10)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// rateText is a number per second: three digits at the least.
func rateText(v float64) string {
	switch {
	case v >= 99.5:
		return countText(int64(math.Round(v)))
	case v >= 9.95:
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return strconv.FormatFloat(v, 'f', 2, 64)
}

// roundText is a round number of an axis.
func roundText(v float64) string {
	if v >= 100 || v == math.Trunc(v) {
		return countText(int64(math.Round(v)))
	}
	return strconv.FormatFloat(v, 'g', 3, 64)
}
