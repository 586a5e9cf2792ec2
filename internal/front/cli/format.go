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

// parsePercent reads "5%", "5" or "0.5%". Invalid.
func parsePercent(op, s string) (float64, error) {
	f, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(s), "%"), 64)
	if err != nil || f < 0 || f >= 100 || f != f {
		return 0, errs.New(errs.Invalid, op, s, "not a percentage from 0 to below 100").
			WithHint("use for example 5%%")
	}
	return f, nil
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
	a      *App
	rows   [][]string
	widths []int // widths of the columns, in letters
}

// columnGap is the room between two columns.
const columnGap = 2

func (a *App) table(heads ...string) *table { return &table{a: a, rows: [][]string{heads}} }

func (t *table) row(cells ...string) { t.rows = append(t.rows, cells) }

// flush writes the rows, in large pieces: there may be tens of thousands. Rows that are added later follow in columns
// that are at least as wide.
func (t *table) flush() error {
	if t.a.unprinted != nil {
		return t.a.unprinted
	}

	for _, row := range t.rows {
		for i, cell := range row {
			if i == len(t.widths) {
				t.widths = append(t.widths, 0)
			}
			t.widths[i] = max(t.widths[i], utf8.RuneCountInString(cell))
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
			for n := t.widths[i] + columnGap - utf8.RuneCountInString(cell); n > 0; n -= len(blank) {
				w.WriteString(blank[:min(n, len(blank))])
			}
		}
		w.WriteByte('\n')
	}

	t.rows = nil
	return t.a.written(w.Flush())
}
