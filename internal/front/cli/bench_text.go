package cli

import (
	"fmt"
	"math"
	"strconv"

	"pando/internal/base/errs"
	"pando/internal/bench"
)

// printBench prints a benchmark's tables.
func (a *App) printBench(r *bench.Report) error {
	for _, print := range []func(*bench.Report){
		a.printBenchHead, a.printOperations, a.printSeries, a.printCommands, a.printNeighbour, a.printTargets,
	} {
		print(r)
	}
	return nil
}

func (a *App) printBenchHead(r *bench.Report) {
	p := r.Pool
	pool := fmt.Sprintf("%s, driver %s", p.Dir, p.Driver)
	if p.LoopBacked {
		pool += ", XFS in a sparse file"
	}

	devices := p.NoDevices
	if devices == "" {
		for i, d := range p.Devices {
			if i > 0 {
				devices += " on "
			}
			devices += d.Name
		}
	} else {
		devices = "not measured: " + devices
	}

	source := fmt.Sprintf("%s %s", r.Source.Kind, r.Source.Name)
	if r.Source.Kind == "generated" {
		source = "a generated tree"
	}

	source += fmt.Sprintf(": %d files, %s of data", r.Source.Files, formatBytes(r.Source.Bytes))
	golden := fmt.Sprintf("%s, %s in %s", r.Source.FS, formatBytes(r.Source.LogicalBytes),
		errs.Plural(int(r.Source.Extents), "extent"))
	a.printFields(
		"pool", pool, "devices", devices,
		"host", fmt.Sprintf("%s, %s, Linux %s", errs.Plural(r.Host.CPUs, "processor"), formatBytes(r.Host.MemoryBytes),
			r.Host.Kernel),
		"source", source, "golden", golden, "raw floor", orMissing("", r.NoFloor),
	)
}

func orMissing(s, reason string) string {
	if reason != "" {
		return "not measured: " + reason
	}
	return s
}

func (a *App) printHeading(s string) {
	a.printf("\n%s\n", s)
}

func (a *App) printOperations(r *bench.Report) {
	a.printHeading("Cost of operations, and bytes written (SYS is processor time in the kernel; bytes are " +
		"per operation;\n" +
		"AFTER counts from its return until the disk is quiet)")

	heads := []string{"OPERATION", "WALL P50", "+SYNCFS", "SYS"}
	for _, d := range r.Pool.Devices {
		heads = append(heads, d.Name+" DURING", "AFTER", "FLUSHES")
	}

	t := a.table(append(heads, "LAST WRITE", "PEAK MEMORY")...)
	for _, op := range r.Operations {
		if op.NotMeasured != "" {
			t.row(op.Name, "not measured: "+op.NotMeasured)
			continue
		}

		cells := []string{op.Name, formatDuration(op.Wall.P50), "-", formatDuration(op.Sys)}
		if op.Synced.Count > 0 {
			cells[2] = formatDuration(op.Synced.P50)
		}

		for _, d := range op.Devices {
			cells = append(cells, formatBytes(int64(d.During)), formatBytes(int64(d.After)), formatFlushes(d.Flushes))
		}

		last := "-"
		if op.Tail != nil {
			last = "+" + formatDuration(op.Tail.Seconds)
			if !op.Tail.Quiet {
				last += ", not quiet yet"
			}
		}

		peak := "-"
		if op.MaxRSS > 0 {
			peak = formatBytes(op.MaxRSS)
		}

		t.row(append(cells, last, peak)...)
	}

	t.flush()
	if r.OthersBytes() < loudBytes {
		return
	}

	a.printf(
		"Other programs wrote up to %s per second at the same time, which the figures of devices include.\n",
		formatBytes(int64(r.OthersBytes())),
	)
}

// loudDrift of the raw floor makes durations doubtful.
const loudDrift = 1.3

// loudBytes a second, written by others, make the figures of devices doubtful.
const loudBytes = 256 << 10

func formatFlushes(f float64) string {
	if f < 0 {
		return "not counted"
	}
	return strconv.FormatFloat(f, 'f', 1, 64)
}

func (a *App) printSeries(r *bench.Report) {
	a.printHeading("Clones and destroys inside one process, alternating with the raw floor")

	t := a.table("VOLUMES", "WHAT", "TIMES", "P50", "P99", "MAX", "P50 / FLOOR")
	for _, s := range r.Series {
		for _, row := range []struct {
			what        string
			dist, floor bench.Dist
		}{
			{"raw floor: clone + mount", s.FloorClone, bench.Dist{}},
			{"Pando: clone + mount", s.PandoClone, s.FloorClone},
			{"raw floor: umount + unlink", s.FloorDestroy, bench.Dist{}},
			{"  the same + one durable row", s.FloorForget, bench.Dist{}},
			{"Pando: destroy", s.PandoDestroy, s.FloorForget},
		} {
			if row.dist.Count == 0 {
				t.row(itoa(s.Volumes), row.what, orMissing("-", r.NoFloor))
				continue
			}
			over := "-"
			if row.floor.P50 > 0 {
				over = formatRatio(row.dist.P50 / row.floor.P50)
			}
			t.row(append([]string{itoa(s.Volumes), row.what}, append(distCells(row.dist), over)...)...)
		}
	}

	t.flush()

	if r.NoFloor != "" {
		return
	}

	if r.Drift > loudDrift {
		a.printf("The host was not idle: the raw floor changed by %s between the first series and the last. "+
			"Run the benchmark again.\n", formatRatio(r.Drift))
	}

	a.printHeading("Steps of the raw floor, p50")

	heads := []string{"VOLUMES"}
	for _, s := range r.Series[0].Steps {
		heads = append(heads, s.Name)
	}

	t = a.table(heads...)
	for _, s := range r.Series {
		cells := []string{itoa(s.Volumes)}
		for _, step := range s.Steps {
			cells = append(cells, formatDuration(step.Dist.P50))
		}
		t.row(cells...)
	}

	t.flush()
}

func distCells(d bench.Dist) []string {
	return []string{strconv.FormatInt(d.Count, 10), formatDuration(d.P50), formatDuration(d.P99), formatDuration(d.Max)}
}

func (a *App) printCommands(r *bench.Report) {
	a.printHeading("Whole commands, process start included")
	t := a.table("VOLUMES", "COMMAND", "TIMES", "P50", "P99", "MAX", "USER", "SYS", "PEAK MEMORY")
	for _, c := range r.Commands {
		t.row(append(append([]string{itoa(c.Volumes), c.Line}, distCells(c.Wall)...), formatDuration(c.User),
			formatDuration(c.Sys),
			formatBytes(c.MaxRSS))...)
	}
	t.flush()
}

func (a *App) printNeighbour(r *bench.Report) {
	const title = "A neighbour: repeated 8 KiB writes with fdatasync in another volume, while ..."
	a.printHeading(title)

	t := a.table("WHILE", "WRITES", "P50", "P99", "MAX", "P99 / IDLE")
	idle := 0.0
	for _, p := range r.Neighbour {
		if p.While == bench.WhileIdle {
			idle = p.Write.P99
		}
		if p.NotMeasured != "" {
			t.row(p.While, "not measured: "+p.NotMeasured)
			continue
		}
		over := "-"
		if idle > 0 {
			over = formatRatio(p.Write.P99 / idle)
		}
		t.row(append(append([]string{p.While}, distCells(p.Write)...), over)...)
	}

	t.flush()
}

func (a *App) printTargets(r *bench.Report) { a.printVerdicts(r.Targets) }

func (a *App) printVerdicts(targets []bench.Target) {
	a.printHeading("Targets")

	t := a.table("TARGET", "WANTED", "MEASURED", "VERDICT", "AT")
	for _, g := range targets {
		measured := "-"
		if g.Measured != nil {
			measured = formatQuantity(*g.Measured, g.Unit)
		}

		verdict := map[string]string{bench.Pass: "PASS", bench.Fail: "FAIL", bench.NotMeasured: "not measured"}[g.Verdict]
		at := g.At
		if g.Reason != "" {
			at = g.Reason
			if g.At != "" {
				at += " (" + g.At + ")"
			}
		}

		relation := map[string]string{bench.AtMost: "at most ", bench.LessThan: "under ", bench.AtLeast: "at least ",
			bench.MoreThan: "over "}[g.Relation]
		t.row(g.Name, relation+formatQuantity(g.Target, g.Unit), measured, verdict, at)
	}

	t.flush()
}

// formatQuantity formats a figure of a target.
func formatQuantity(v float64, unit string) string {
	switch unit {
	case bench.Seconds:
		return formatDuration(v)
	case bench.Bytes:
		return formatBytes(int64(v))
	case bench.Ratio:
		return formatRatio(v)
	}
	return strconv.FormatFloat(v, 'f', -1, 64)
}

// formatRatio formats a formatRatio with three digits.
func formatRatio(v float64) string {
	switch {
	case v >= 100:
		return strconv.FormatFloat(v, 'f', 0, 64) + "x"
	case v >= 10:
		return strconv.FormatFloat(v, 'f', 1, 64) + "x"
	}
	return strconv.FormatFloat(v, 'f', 2, 64) + "x"
}

// formatDuration formats seconds with three digits in a unit that suits.
func formatDuration(s float64) string {
	unit := "s"
	switch {
	case s == 0:
		return "0 s"
	case s < 0.9995e-3:
		s, unit = s*1e6, "us"
	case s < 0.9995:
		s, unit = s*1e3, "ms"
	}
	digits := 2 - int(math.Floor(math.Log10(math.Abs(s))+1e-9))
	return strconv.FormatFloat(s, 'f', min(max(digits, 0), 2), 64) + " " + unit
}
