package cli

import (
	"bufio"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"pando/internal/base/quantity"
)

// parseSize reads a size: a number with an optional K, M, G, T, P (powers of
// 1024; KB, KiB and lower case too). Invalid.
func parseSize(op, s string) (int64, error) { return quantity.ParseSize(op, s) }

// parsePercent reads "5%", "5" or "0.5%". Invalid.
func parsePercent(op, s string) (float64, error) { return quantity.ParsePercent(op, s) }

// parseTTL reads a duration: Go's form, and days (7d). Invalid.
func parseTTL(op, s string) (time.Duration, error) { return quantity.ParseDuration(op, s) }

// formatBytes formats bytes for people.
func formatBytes(n int64) string { return quantity.FormatBytes(n) }

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

func formatSpan(d time.Duration) string { return quantity.FormatSpan(d) }

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
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
