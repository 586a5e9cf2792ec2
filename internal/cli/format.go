package cli

import (
	"bufio"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"pando/internal/base/errs"
)

// parseSize reads a size: a number with an optional K, M, G, T, P (powers of
// 1024; KB, KiB and lower case too). Invalid.
func parseSize(op, s string) (int64, error) {
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

// parsePercent reads "5%", "5" or "0.5%". Invalid.
func parsePercent(op, s string) (float64, error) {
	f, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(s), "%"), 64)
	if err != nil || f < 0 || f >= 100 || f != f {
		return 0, errs.New(errs.Invalid, op, s, "not a percentage from 0 to below 100").
			WithHint("use for example 5%%")
	}
	return f, nil
}

// parseTTL reads a duration: Go's form, and days (7d). Invalid.
func parseTTL(op, s string) (time.Duration, error) {
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

// formatBytes formats bytes for people.
func formatBytes(n int64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return strconv.FormatInt(n, 10) + " B"
	}
	f, i := float64(n)/1024, 0
	for f >= 1023.95 && i < len(units)-1 {
		f /= 1024
		i++
	}
	return strconv.FormatFloat(f, 'f', 1, 64) + " " + units[i:i+1] + "iB"
}

// shellWord makes s one word of a shell command.
func shellWord(s string) string {
	if strings.IndexFunc(s, func(r rune) bool {
		return !strings.ContainsRune("/._-+:@%,", r) && (r > unicode.MaxASCII || !unicode.IsLetter(r) && !unicode.IsDigit(r))
	}) < 0 {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// formatAge formats a time relative to now.
func formatAge(t time.Time) string {
	if t.IsZero() {
		return "never"
	}
	d := time.Since(t)
	if d < 0 {
		return "in " + formatSpan(-d)
	}
	return formatSpan(d) + " ago"
}

func formatSpan(d time.Duration) string {
	switch {
	case d < time.Minute:
		return strconv.Itoa(int(d/time.Second)) + " s"
	case d < time.Hour:
		return strconv.Itoa(int(d/time.Minute)) + " min"
	case d < 48*time.Hour:
		return strconv.Itoa(int(d/time.Hour)) + " h"
	}
	return strconv.Itoa(int(d/(24*time.Hour))) + " d"
}

func orDash[T ~string](s T) string {
	if s == "" {
		return "-"
	}
	return string(s)
}

// table prints columns, as wide as their widest cell. It holds all rows until flush.
type table struct {
	a    *App
	rows [][]string
}

// columnGap is the room between two columns.
const columnGap = 2

func (a *App) table(heads ...string) *table { return &table{a, [][]string{heads}} }

func (t *table) row(cells ...string) { t.rows = append(t.rows, cells) }

// flush writes the rows, in large pieces: there may be tens of thousands.
func (t *table) flush() error {
	if t.a.unprinted != nil {
		return t.a.unprinted
	}

	var widths []int
	for _, row := range t.rows {
		for i, cell := range row {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}

	const blank = "                                "
	w := bufio.NewWriterSize(t.a.Stdout, 64<<10)
	for _, row := range t.rows {
		for i, cell := range row {
			w.WriteString(cell) // an error comes back from Flush
			if i == len(row)-1 {
				break
			}
			for n := widths[i] + columnGap - utf8.RuneCountInString(cell); n > 0; n -= len(blank) {
				w.WriteString(blank[:min(n, len(blank))])
			}
		}
		w.WriteByte('\n')
	}

	return t.a.written(w.Flush())
}
