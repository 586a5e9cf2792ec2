package cli

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"pando/internal/observe/iostat"

	"golang.org/x/term"
)

// iostatText prints samples for people.
type iostatText struct {
	a        *App
	terminal *os.File // nil: lines that follow each other
	drawn    int      // lines on the terminal that are drawn over
	since    int      // lines since the last header
	width    int      // of the names
	told     []string // notes that were printed
}

// headerEvery is how many lines follow a header where they are not drawn over.
const headerEvery = 20

var iostatHeads = []string{"APP/s", "WRITE/s", "REQ/s", "FLUSH/s", "SYNC/s", "P50", "P99", "MAX", "OTHERS/s", "REST/s",
	"AMP"}

// iostatRow is a line: a name and figures.
type iostatRow struct {
	name  string
	cells []string
}

func (p *iostatText) printSample(s *iostat.Sample) error {
	p.notes(s.Missing)
	rows := iostatRows(s)
	for _, r := range rows {
		p.width = max(p.width, utf8.RuneCountInString(r.name))
	}

	p.width = max(p.width, len("VOLUME"))
	var b strings.Builder
	if p.terminal == nil {
		stamp := s.Time.Format("15:04:05")
		for _, r := range rows {
			if p.since%(headerEvery+1) == 0 && !p.a.quiet {
				b.WriteString("TIME      " + p.line(iostatRow{"VOLUME", iostatHeads}))
				p.since++
			}
			if !p.a.quiet {
				b.WriteString(stamp + "  ")
			}
			b.WriteString(p.line(r))
			p.since++
		}

		if len(rows) == 0 && !p.a.quiet {
			b.WriteString(stamp + "  no volume is mounted\n")
		}

		return p.a.printf("%s", b.String())
	}

	lines := []string{p.line(iostatRow{"VOLUME", iostatHeads})}
	for _, r := range rows {
		lines = append(lines, p.line(r))
	}

	if len(rows) == 0 {
		lines = append(lines, "no volume is mounted\n")
	}

	width, height, err := term.GetSize(int(p.terminal.Fd()))
	known := err == nil && width > 0
	if known && height > 2 && len(lines) > height-1 {
		hidden := len(lines) - (height - 2)
		lines = append(lines[:height-2], fmt.Sprintf("... and %d more\n", hidden))
	}

	if p.drawn > 0 {
		fmt.Fprintf(&b, "\x1b[%dA", p.drawn) // up
	}

	b.WriteString("\x1b[J") // and empty from there
	for _, l := range lines {
		if l = strings.TrimSuffix(l, "\n"); known && utf8.RuneCountInString(l) > width {
			l = string([]rune(l)[:width]) // a line that wraps would be two
		}
		b.WriteString(l + "\n")
	}

	p.drawn = len(lines)
	return p.a.printf("%s", b.String())
}

// notes tells what is not measured, once.
func (p *iostatText) notes(missing []string) {
	for _, m := range missing {
		if !slices.Contains(p.told, m) {
			p.told = append(p.told, m)
			p.a.printNote("%s", m)
			p.drawn = 0 // what was drawn stays above
		}
	}
}

// line is a row in columns that keep their places from one interval to the next.
func (p *iostatText) line(r iostatRow) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%-*s", p.width, r.name)
	for _, c := range r.cells {
		fmt.Fprintf(&b, "  %9s", c)
	}
	return strings.TrimRight(b.String(), " ") + "\n"
}

func iostatRows(s *iostat.Sample) []iostatRow {
	rate := func(n int64) string { return formatBytes(int64(float64(max(n, 0)) / max(s.Seconds, 0.001))) }
	often := func(n int64) string {
		return strconv.FormatFloat(float64(n)/max(s.Seconds, 0.001), 'f', 0, 64)
	}
	var rows []iostatRow
	for _, t := range s.Targets {
		c := slices.Repeat([]string{"-"}, len(iostatHeads))
		if t.ApplicationBytes != nil {
			c[0] = rate(*t.ApplicationBytes)
		}

		if t.Own != nil {
			c[1], c[2] = rate(t.Own.WrittenBytes), often(t.Own.Writes)
			if t.Own.Flushes != nil {
				c[3] = often(*t.Own.Flushes)
			}
		}

		if y := t.Syncs; y != nil && y.Source != "flushes" {
			c[4] = often(y.Count)
		}

		if t.Syncs != nil {
			c[5], c[6], c[7] = syncCells(t.Syncs.Latency)
		}
		if t.Amplification != nil {
			c[10] = amplification(*t.Amplification)
		}

		rows = append(rows, iostatRow{oneLine(t.Name), c})
	}

	for _, l := range s.Layers {
		c := slices.Repeat([]string{"-"}, len(iostatHeads))
		c[1], c[2] = rate(l.WrittenBytes), often(l.Writes)
		if l.Flushes != nil {
			c[3] = often(*l.Flushes)
		}
		c[8], c[9], c[10] = rate(othersBytes(l)), rate(l.RestBytes), layerAmplification(s, l.Name)
		rows = append(rows, iostatRow{"  " + l.Name, c})
	}

	return rows
}

// othersBytes is what came from devices that no target is on.
func othersBytes(l iostat.LayerSample) (n int64) {
	for _, f := range l.From {
		if !f.Watched {
			n += f.WrittenBytes
		}
	}
	return n
}

// layerAmplification is that down to a layer, if only one target wrote: it would have
// all that nobody is known to have written, and of several each would.
func layerAmplification(s *iostat.Sample, layer string) string {
	out, n := "-", 0
	for _, t := range s.Targets {
		for _, p := range t.Steps {
			if p.Layer == layer && p.Amplification != nil {
				out, n = amplification(*p.Amplification), n+1
			}
		}
	}

	if n != 1 {
		return "-"
	}

	return out
}

// syncCells are median, 99th percentile and maximum; "~" stands before a mean where
// only that is known.
func syncCells(l *iostat.Latency) (p50, p99, most string) {
	switch {
	case l == nil:
		return "-", "-", "-"
	case l.P50 == nil:
		return "~" + formatDuration(l.Mean), "-", "-"
	}
	return formatDuration(*l.P50), formatDuration(*l.P99), formatDuration(*l.Max)
}

func amplification(x float64) string {
	digits := 2
	if x >= 100 {
		digits = 0
	}
	return strconv.FormatFloat(x, 'f', digits, 64) + "x"
}

// printOperation prints what a command did, on standard error: standard output is the
// command's.
func (a *App) printOperation(o *iostat.Outcome) error {
	if a.quiet {
		return nil
	}

	to := *a
	to.Stdout = a.Stderr
	to.printf("\npando: %s ran for %s, exit code %d; it and the processes it waited for wrote %s, on all "+
		"filesystems\n",
		oneLine(o.Command[0]), formatDuration(o.Seconds), o.Exit, formatBytes(o.DirtiedBytes))

	tail := fmt.Sprintf("pando: writes continued for %s after it", formatDuration(o.Tail.Seconds))
	switch {
	case o.Tail.Quiet && o.Tail.Seconds == 0:
		tail = "pando: nothing was written after it"
	case !o.Tail.Quiet:
		of := "of the watched filesystems"
		if o.Tail.Scope == "host" {
			of = "of the whole host"
		}
		tail = fmt.Sprintf("pando: writes had not died down after %s; %s %s were still in memory",
			formatDuration(o.After.Seconds),
			formatBytes(o.Tail.UnwrittenBytes), of)
	}

	to.printf("%s\n", tail)

	t := to.table("VOLUME", "APP", "DURING", "AFTER", "WRITTEN", "FLUSHES", "SYNCS", "P50", "P99", "MAX", "BEFORE/s",
		"OTHERS", "REST", "AMP")
	for _, x := range o.Total.Targets {
		t.row(operationTarget(o, x)...)
	}
	for _, l := range o.Total.Layers {
		t.row(operationLayer(o, l)...)
	}

	t.flush()

	for _, m := range o.Total.Missing {
		a.printNote("%s", m)
	}

	return to.unprinted
}

// operationColumns is the number of columns of printOperation's table.
const operationColumns = 14

// operationTarget returns the row of a volume or path.
func operationTarget(o *iostat.Outcome, x iostat.TargetSample) []string {
	row := slices.Repeat([]string{"-"}, operationColumns)
	row[0] = oneLine(x.Name)
	if x.ApplicationBytes != nil {
		row[1] = formatBytes(*x.ApplicationBytes)
	}

	own := func(s *iostat.Sample) string {
		for _, y := range s.Targets {
			if y.Name == x.Name && y.Own != nil {
				return formatBytes(y.Own.WrittenBytes)
			}
		}
		return "-"
	}

	row[2], row[3], row[4], row[10] = own(o.During), own(o.After), own(o.Total), own(o.Before)
	if x.Own != nil && x.Own.Flushes != nil {
		row[5] = strconv.FormatInt(*x.Own.Flushes, 10)
	}

	if y := x.Syncs; y != nil {
		if y.Source != "flushes" {
			row[6] = strconv.FormatInt(y.Count, 10)
		}
		row[7], row[8], row[9] = syncCells(y.Latency)
	}

	if x.Amplification != nil {
		row[13] = amplification(*x.Amplification)
	}

	return row
}

// operationLayer returns the row of a layer.
func operationLayer(o *iostat.Outcome, l iostat.LayerSample) []string {
	layer := func(s *iostat.Sample, name string) iostat.LayerSample {
		for _, l := range s.Layers {
			if l.Name == name {
				return l
			}
		}
		return iostat.LayerSample{}
	}

	row := slices.Repeat([]string{"-"}, operationColumns)
	row[0] = "  " + l.Name
	row[2], row[3], row[4] = formatBytes(layer(o.During, l.Name).WrittenBytes), formatBytes(layer(o.After,
		l.Name).WrittenBytes), formatBytes(l.WrittenBytes)
	row[10] = formatBytes(int64(float64(layer(o.Before, l.Name).WrittenBytes) / max(o.Before.Seconds, 0.001)))
	if l.Flushes != nil {
		row[5] = strconv.FormatInt(*l.Flushes, 10)
	}
	row[11], row[12], row[13] = formatBytes(othersBytes(l)), formatBytes(max(l.RestBytes, 0)), layerAmplification(o.Total,
		l.Name)
	return row
}
