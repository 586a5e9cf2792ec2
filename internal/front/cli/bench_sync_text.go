package cli

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"unicode/utf8"

	"pando/internal/base/errs"
	"pando/internal/observe/syncbench"
)

// syncWidth is that of text and tables: of the smallest terminal in use.
const syncWidth = 80

// showSync prints a report as the flags say.
func (a *App) showSync(r *syncbench.Report) error {
	switch {
	case a.json:
		return a.printJSON(r)
	case a.quiet:
		return a.printf("%s\n", r.Verdict.Result)
	}

	for _, print := range []func(*syncbench.Report){
		a.printSyncHead, a.printSyncRuns, a.printTarget, a.printTimelines, a.printLayers, a.printSyncVerdict,
	} {
		print(r)
	}

	return nil
}

func (a *App) printProfiles(all []syncbench.Profile) error {
	if a.json {
		return a.printJSON(all)
	}

	for i, p := range all {
		if a.quiet {
			a.printf("%s\n", p.Name)
			continue
		}

		if i > 0 {
			a.printf("\n")
		}

		a.printf("%s\n%s%s", p.Name, wrapText(p.Title, "  ", syncWidth),
			wrapText(workText(p)+".", "  ", syncWidth))

		if p.Models != "" {
			a.printf("%s", wrapText(p.Models, "  ", syncWidth))
		}
	}

	return nil
}

// workText is what a profile does, in figures.
func workText(p syncbench.Profile) string {
	out := errs.Plural(p.Writers, "writer")
	if p.Bytes > 0 {
		out += ", writes of " + formatBytes(p.Bytes)
	}

	switch {
	case p.PerSync == 1 && strings.HasPrefix(p.Sync, "write"):
		out += ", each of which waits for the disk: " + p.Sync
	case p.PerSync > 0:
		out += ", " + errs.Plural(p.PerSync, "write") + " to each " + p.Sync
	}

	if p.File > 0 {
		out += ", " + formatBytes(p.File) + " of files"
	}

	return out
}

// wrapHanging is a text in lines after a head. The others begin where the text of the first
// does, or after a long head a little to the right.
func wrapHanging(head, text string) string {
	n := utf8.RuneCountInString(head)
	if n > 12 {
		const indent = "    "
		return strings.TrimPrefix(wrapText(head+text, indent, syncWidth), indent)
	}
	indent := strings.Repeat(" ", n)
	return head + strings.TrimPrefix(wrapText(text, indent, syncWidth), indent)
}

func (a *App) printSyncHead(r *syncbench.Report) {
	var chain []string
	for _, l := range r.Layers {
		s := l.Name
		if l.Role != "" {
			s += " (" + l.Role + ")"
		}
		chain = append(chain, s)
	}

	var words []string
	for _, w := range r.Profile.Command {
		words = append(words, quoteArgument(w))
	}

	path := r.Path
	if r.Volume != "" {
		path += " (volume " + r.Volume + ")"
	}

	quick := ""
	if r.Quick {
		quick = "shorter than the cycles of writeback, so no verdict on speed"
	}

	for _, f := range [][2]string{
		{"path", path}, {"layers", strings.Join(chain, " > ")}, {"profile", r.Profile.Name + ": " + r.Profile.Title}, {"work",
			workText(r.Profile)},
		{"host", fmt.Sprintf("%s, %s, %s, Linux %s, %s", r.Host.Name, errs.Plural(r.Host.CPUs, "processor"),
			formatBytes(r.Host.MemoryBytes), r.Host.Kernel, r.Host.Fio)},
		{"command", strings.Join(words, " ")}, {"quick", quick},
	} {
		if f[1] == "" {
			continue
		}
		a.printf("%s", wrapHanging(fmt.Sprintf("%-9s", f[0]), f[1]))
	}
}

// quoteArgument is a word of a command line that is not its first: --name=value needs no quotes.
func quoteArgument(s string) string {
	if name, value, ok := strings.Cut(s, "="); ok && value != "" && shellWord(name) == name && shellWord(value) == value {
		return s
	}
	return shellWord(s)
}

func (a *App) printSyncRuns(r *syncbench.Report) {
	a.printHeading("Duration of syncs: " + r.Profile.Sync)

	t := a.table("RUN", "SYNCS/S", "WRITES/S", "P50", "P95", "P99", "P99.9", "MAX")
	writes := false
	for i, x := range r.Runs {
		t.row(append([]string{itoa(i + 1), formatRate(x.SyncsPerSecond), formatRate(x.WritesPerSecond)},
			latencyCells(x.Sync)...)...)
		writes = writes || x.Write != nil
	}

	t.flush()
	a.explainIndicative(r)
	if !writes {
		return
	}

	a.printHeading("Duration of the writes before them, to memory only")

	t = a.table("RUN", "P50", "P95", "P99", "P99.9", "MAX")
	for i, x := range r.Runs {
		if x.Write != nil {
			t.row(append([]string{itoa(i + 1)}, latencyCells(*x.Write)...)...)
		}
	}

	t.flush()
}

func latencyCells(l syncbench.Latency) []string {
	cell := func(name string, seconds float64) string {
		if slices.Contains(l.Indicative, name) {
			return "~" + formatDuration(seconds)
		}
		return formatDuration(seconds)
	}
	return []string{cell("p50", l.P50), cell("p95", l.P95), cell("p99", l.P99), cell("p999", l.P999),
		formatDuration(l.Max)}
}

// explainIndicative says what the marks in the table mean, if there are any.
func (a *App) explainIndicative(r *syncbench.Report) {
	for _, x := range r.Runs {
		if len(x.Sync.Indicative) > 0 {
			a.printf("~ indicative: fewer than 10 syncs of the run took longer\n")
			return
		}
	}
}

func (a *App) printTarget(r *syncbench.Report) {
	g := r.Target
	if g == nil {
		return
	}

	a.printHeading("Highest rate of syncs with a p99 of at most " + formatDuration(g.P99))

	t := a.table("WRITERS", "SYNCS/S", "P99", "WITHIN")
	for _, s := range g.Steps {
		keeps := "no"
		if s.Keeps {
			keeps = "yes"
		}
		t.row(itoa(s.Writers), formatRate(s.SyncsPerSecond), formatDuration(s.P99), keeps)
	}

	t.flush()

	if g.Best == 0 {
		a.printf("No step is within the limit.\n")
		return
	}

	a.printf("%s syncs/s, by %s\n", formatRate(g.Best), errs.Plural(g.Writers, "writer"))
}

// utf8Terminal reports whether the locale's character set is UTF-8.
func utf8Terminal() bool {
	for _, name := range []string{"LC_ALL", "LC_CTYPE", "LANG"} {
		if v := os.Getenv(name); v != "" {
			v = strings.ToLower(v)
			return strings.Contains(v, "utf-8") || strings.Contains(v, "utf8")
		}
	}
	return false
}

const (
	sparkWidth  = 60 // columns of a time line
	shownStalls = 6  // of a run; --json and --html have all
)

// drawSparkline draws rates from 0 to high in so many columns at most, and under it a mark at
// each column with a stall; "" if there is none.
func drawSparkline(run *syncbench.Run, high float64, columns int, unicode bool) (bars, marks string) {
	levels := []rune("_.,-=+*#")
	if unicode {
		levels = []rune("▁▂▃▄▅▆▇█")
	}

	n := min(len(run.Timeline), columns)
	for i := range n {
		part := run.Timeline[i*len(run.Timeline)/n : (i+1)*len(run.Timeline)/n]
		syncs, length := 0.0, 0.0
		for _, m := range part {
			syncs += m.Syncs * m.Length
			length += m.Length
		}

		level := 0
		if high > 0 && length > 0 {
			level = int(syncs / length / high * float64(len(levels)))
		}

		bars += string(levels[min(max(level, 0), len(levels)-1)])
		from, to := part[0].At-part[0].Length, part[len(part)-1].At
		const close = 1e-6 // edges meet
		if slices.ContainsFunc(run.Stalls, func(s syncbench.Stall) bool { return s.From < to-close && s.To > from+close }) {
			marks += "!"
		} else {
			marks += " "
		}
	}

	return bars, strings.TrimRight(marks, " ")
}

func (a *App) printTimelines(r *syncbench.Report) {
	high, stalled := 0.0, 0
	for i := range r.Runs {
		for _, m := range r.Runs[i].Timeline {
			high = max(high, m.Syncs)
		}
		stalled += len(r.Runs[i].Stalls)
	}

	if high == 0 {
		return
	}

	title := fmt.Sprintf("Syncs per second over time, up to %s", formatRate(high))
	if stalled > 0 {
		title += " (!: a stall)"
	}

	a.printHeading(title)

	for i := range r.Runs {
		x := &r.Runs[i]
		if len(x.Timeline) == 0 {
			continue
		}

		bars, marks := drawSparkline(x, high, sparkWidth, utf8Terminal())
		head := fmt.Sprintf("run %-3d ", i+1)
		a.printf("%s%s %s\n", head, bars, formatDuration(x.Timeline[len(x.Timeline)-1].At))

		if marks != "" {
			a.printf("%*s%s\n", len(head), "", marks)
		}

		for j, s := range x.Stalls {
			if j == shownStalls {
				a.printf("%*sand %d more (--json and --html have all)\n", len(head), "", len(x.Stalls)-j)
				break
			}
			line := fmt.Sprintf("%*s%.0f to %.0f s: ", len(head), "", s.From, s.To)
			a.printf("%s", line+strings.TrimLeft(wrapText(s.Words, strings.Repeat(" ", len(line)), syncWidth),
				" "))
		}
	}
}

func (a *App) printLayers(r *syncbench.Report) {
	title := "Flushes and writes that arrived at each layer"
	if len(r.Runs) > 1 {
		title += ", all runs"
	}

	var methods []string
	for _, x := range r.Runs {
		s := string(x.Proof.Method)
		if x.Proof.NoTraces != "" {
			s += ", not by tracepoints: " + x.Proof.NoTraces
		}
		if s != "" && !slices.Contains(methods, s) {
			methods = append(methods, s)
		}
	}

	if len(methods) > 0 {
		title += " (by " + strings.Join(methods, "; ") + ")"
	}

	a.printf("\n%s", wrapText(title, "", syncWidth))

	layers := syncbench.SumLayers(r.Runs)
	if len(layers) == 0 {
		a.printf("Nothing was counted.\n")
		return
	}

	others := slices.ContainsFunc(layers, func(l *syncbench.LayerSum) bool { return l.OthersFlushes > 0 })
	heads := []string{"LAYER", "NEEDED", "FLUSHES", "FUA"}
	if others {
		heads = append(heads, "OTHERS'")
	}

	t := a.table(append(heads, "WRITES", "BYTES", "RESULT")...)
	for _, l := range layers {
		needed := "-"
		if l.Needed > 0 {
			needed = formatThousands(l.Needed)
		}

		name := strings.Repeat(" ", min(max(l.Depth, 0), 8)) + oneLine(l.Name)
		if l.Role != "" {
			name += " (" + l.Role + ")"
		}

		cells := []string{shortenMiddle(name, 24), needed, formatCount(l.Flushes), formatCount(l.FUA)}
		if others {
			cells = append(cells, formatCount(l.OthersFlushes))
		}

		bytes := "-"
		if l.WrittenBytes >= 0 {
			bytes = formatBytes(l.WrittenBytes)
		}

		t.row(append(cells, formatCount(l.Writes), bytes, string(l.Result))...)
	}

	t.flush()

	for _, l := range layers {
		for _, w := range l.Failures {
			a.printf("%s", wrapHanging("  ", oneLine(l.Name)+": "+w))
		}
	}
}

func formatCount(n int64) string {
	if n < 0 {
		return "-"
	}
	return formatThousands(n)
}

// shortenMiddle leaves out the middle of what is longer than n characters.
func shortenMiddle(s string, n int) string {
	r := []rune(s)
	if len(r) <= n {
		return s
	}
	head := (n - 3) / 2
	return string(r[:head]) + "..." + string(r[len(r)-(n-3-head):])
}

// printSyncVerdict prints it last, where a person looks first.
func (a *App) printSyncVerdict(r *syncbench.Report) {
	head := r.Verdict.Result
	switch {
	case r.Verdict.ByDesign != "":
		head += " by design"
	case r.Verdict.Layer != "":
		head += " at " + r.Verdict.Layer
	}

	rest, more := r.Verdict.Short()
	reason := "could not prove that synced data reached the disk"
	if r.Verdict.ByDesign != "" {
		reason = r.Verdict.ByDesign
	}
	if r.Verdict.Result == syncbench.Pass {
		reason = "every sync reached the disk, in every run"
		if len(rest) > 0 {
			reason, rest = rest[0], rest[1:]
		}
	}

	a.printf("\n%s", wrapHanging(head+": ", reason))

	for _, w := range rest {
		a.printf("%s", wrapHanging("  - ", w))
	}

	if more > 0 {
		a.printf("  - %s more from the other runs (--json has all)\n", errs.Plural(more, "reason"))
	}
}
