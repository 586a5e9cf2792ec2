package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/units"
	"pando/internal/engine"
	"pando/internal/observe/diagnose"

	"github.com/spf13/cobra"
)

func (a *App) diagnoseCommand() *cobra.Command {
	length := "30s"
	c := &cobra.Command{
		Use:     "diagnose PATH|VOLUME",
		GroupID: "tools",
		Short:   "Find out why syncs are slow while a workload runs",
		Long: `Watch a running system for --for, and report why syncing files below PATH (a
file, a directory or a block device) or in VOLUME takes as long as it does:
which processes sync and how long that takes, in which layer the time is spent,
and which of the usual causes contribute. Causes are ranked, each with its
evidence and the next step: syncs that do not reach the disk, a slow log device
or disk, other processes and control groups that write, limits of control
groups, throttled writers, deep queues, scrub, balance and discard, slow
commits, full or fragmented filesystems, processors and memory. It also reads
what PostgreSQL, MySQL and SQLite databases there are set to keep after a power
failure.

diagnose causes no load and writes nothing. An argument with a slash is a path;
any other is a volume if one has this name, and otherwise a path. Run it as root
to see the most; without root, it reports what it could not see. When
interrupted, it prints what it has found so far and exits with 130. Otherwise
the exit code is 0, whatever it finds.`,
		Example: "  pando diagnose /var/lib/postgresql\n  pando diagnose job-17 --for 2m\n  pando diagnose " +
			"/srv/db --json | jq '.causes[] | {rank, code, share}'",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeVolumeOrPath,
	}

	c.Flags().StringVar(&length, "for", length, "watch for this `DURATION`, from 1s to 24h")

	c.RunE = func(c *cobra.Command, args []string) error {
		d, err := units.ParseDuration("diagnose", length)
		if err != nil {
			return err
		}

		const least, most = time.Second, 24 * time.Hour
		if d < least || d > most {
			return errs.New(errs.Invalid, "diagnose", length, "--for must be between 1s and 24h (got %s)", length).
				WithHint("remove --for: the default, 30s, is usually enough")
		}

		q := diagnose.Request{For: d}
		if q.Path, q.Volume, err = a.diagnosedPath(c.Context(), args[0]); err != nil {
			return err
		}

		ctx, stop := a.showProgress(c.Context())
		r, err := diagnose.Watch(ctx, q)
		stop()
		if err != nil {
			return err
		}

		if r.Interrupted {
			a.exit = errs.Canceled.Codes().Exit
		}

		return a.printDiagnosis(r)
	}

	return c
}

// diagnosedPath returns the path to watch, and the name of the volume if it is where a volume is mounted.
func (a *App) diagnosedPath(ctx context.Context, word string) (path, volume string, err error) {
	const op = "diagnose"
	e, v, err := a.volumeOrPath(ctx, argument{op: op, text: word, kind: "path"}, a.openReadOnly)
	if err != nil {
		return "", "", err
	}
	if e == nil {
		return word, "", nil
	}
	defer e.Close()

	if v.Mountpoint == "" {
		return "", "", errs.New(errs.Invalid, op, word, "the volume is not mounted").
			WithHint("mount it: `pando mount %s`", word)
	}
	return v.Mountpoint, v.Name, nil
}

// completeVolumeOrPath completes names of volumes, and leaves paths to the shell.
func (a *App) completeVolumeOrPath(c *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	names, d := a.completeArgs(aVolume)(c, args, word)
	return names, d &^ cobra.ShellCompDirectiveNoFileComp &^ cobra.ShellCompDirectiveError
}

// printDiagnosis prints a report: the verdict and figures, the causes, what to do next, and what was not examined.
func (a *App) printDiagnosis(r *diagnose.Report) error {
	if a.json {
		return a.printJSON(r)
	}

	if a.quiet {
		for _, c := range r.Causes {
			a.printf("%s\n", c.Code)
		}
		return nil
	}

	name := r.Path
	if r.Volume != "" {
		name = r.Volume + " (" + r.Path + ")"
	}

	var layers []string
	for _, l := range r.Layers {
		s := l.Name
		if l.Role != "" {
			s += " (" + l.Role + ")"
		}
		layers = append(layers, s)
	}

	// Print the verdict and the figures.
	a.printf("%s\n", wrapText(oneLine(name)+": "+oneLine(r.Verdict)+".", "", doctorWidth))
	a.printFields(
		"watched", fmt.Sprintf("%.1f s, with events recorded for %.1f s", r.Seconds, r.Traced),
		"layers", oneLine(strings.Join(layers, " > ")),
		"syncs", a.diagnosedSyncs(r.Syncs),
		"where", diagnosedParts(r.Syncs.Where),
	)
	a.printDiagnosedProcesses(r.Syncs.Processes)
	a.printDiagnosedDevices(r.Devices)
	a.printDiagnosedWriters(r.Writers)
	a.printBullets("Databases", diagnosedDatabases(r.Databases))

	// Print the causes, and what follows from them.
	for _, c := range r.Causes {
		a.printCause(c)
	}

	var missing []string
	for _, m := range r.NotLooked {
		missing = append(missing, m.What+": "+m.Why)
	}

	a.printBullets("Next", r.Next)

	a.printBullets("Not examined", missing)
	return nil
}

// diagnosedDatabases describes databases by the settings on which their durability depends.
func diagnosedDatabases(all []diagnose.Database) (out []string) {
	for _, db := range all {
		who := db.Kind + " at " + showPath(engine.Path(db.Path))
		if db.PID > 0 {
			who += fmt.Sprintf(" (pid %d)", db.PID)
		}

		var settings []string
		for _, s := range db.Settings {
			settings = append(settings, fmt.Sprintf("%s = %s (%s)", s.Name, s.Value, s.From))
		}
		out = append(out, who+": "+strings.Join(settings, ", "))
	}
	return out
}

// printBullets prints a title and a list; nothing if the list is empty.
func (a *App) printBullets(title string, list []string) {
	if len(list) == 0 {
		return
	}

	a.printf("\n%s\n", title)

	for _, text := range list {
		a.printBullet(text)
	}
}

func (a *App) printBullet(text string) {
	a.printf("  - %s", strings.TrimPrefix(wrapText(oneLine(text), "    ", doctorWidth), "    "))
}

func (a *App) diagnosedSyncs(s diagnose.Syncs) string {
	if s.Count < 0 {
		return "unknown"
	}

	about := "about "
	if s.Exact {
		about = ""
	}

	out := fmt.Sprintf("%s%s, %.1f/s", about, formatThousands(s.Count), s.PerSecond)
	if s.Sampled > 0 {
		out += fmt.Sprintf("; p50 %s, p99 %s, max %s", formatLatency(s.P50), formatLatency(s.P99), formatLatency(s.Max))
	}
	if s.Pending > 1 {
		out += fmt.Sprintf("; one has been waiting for %s", formatLatency(s.Pending))
	}

	return out
}

// formatLatency formats seconds for people.
func formatLatency(s float64) string {
	switch {
	case s < 1e-3:
		return fmt.Sprintf("%.0f µs", s*1e6)
	case s < 1:
		return fmt.Sprintf("%.1f ms", s*1e3)
	}
	return fmt.Sprintf("%.2f s", s)
}

func diagnosedParts(parts []diagnose.Part) string {
	var out []string
	for _, p := range parts {
		out = append(out, fmt.Sprintf("%s %.0f %%", p.Name, 100*p.Share))
	}
	return strings.Join(out, ", ")
}

// shownDiagnosed is how many rows of a table are printed; --json has all.
const shownDiagnosed = 10

func (a *App) printDiagnosedProcesses(all []diagnose.Process) {
	if len(all) == 0 {
		return
	}

	a.printf("\n")

	t := a.table("WHO SYNCS", "PID", "WHERE", "CALL", "PER S", "P50", "P99", "MAX", "CGROUP", "FILE")
	for _, p := range all[:min(len(all), shownDiagnosed)] {
		t.row(oneLine(p.Command), fmt.Sprint(p.PID), string(p.Relation), p.Call, fmt.Sprintf("%.0f", p.PerSecond),
			formatLatency(p.P50), formatLatency(p.P99), formatLatency(p.Max), oneLine(orDash(p.CGroup)), oneLine(p.File))
	}

	a.flushShortened(t, len(all))
}

func (a *App) flushShortened(t *table, rows int) {
	t.flush()
	if rows > shownDiagnosed {
		a.printf("... and %d more (--json has all)\n", rows-shownDiagnosed)
	}
}

func (a *App) printDiagnosedDevices(all []diagnose.Device) {
	if len(all) == 0 {
		return
	}

	a.printf("\n")

	t := a.table("DEVICE", "ROLE", "WRITES/S", "FLUSHES/S", "WRITE", "FLUSH", "QUEUE", "BUSY", "OF SYNCS", "FOR OTHERS")
	for _, d := range all {
		flushes := "-"
		if d.FlushesPerSecond >= 0 {
			flushes = fmt.Sprintf("%.0f", d.FlushesPerSecond)
		}
		t.row(d.Name, orDash(d.Role), fmt.Sprintf("%.0f", d.WritesPerSecond), flushes, formatLatency(d.WriteAwait),
			formatLatency(d.FlushAwait), fmt.Sprintf("%.1f", d.Queue),
			fmt.Sprintf("%.0f %%", 100*d.Busy), fmt.Sprintf("%.0f %%", 100*d.SyncShare), fmt.Sprintf("%.0f %%",
				100*d.OthersShare))
	}

	t.flush()
}

func (a *App) printDiagnosedWriters(all []diagnose.Writer) {
	if len(all) == 0 {
		return
	}

	a.printf("\n")

	t := a.table("WHO WRITES", "KIND", "PID", "WRITTEN", "REQUESTS/S", "FLUSHES/S", "SYNCS/S", "DEVICE")
	for _, w := range all[:min(len(all), shownDiagnosed)] {
		pid := "-"
		if w.PID > 0 {
			pid = fmt.Sprint(w.PID)
		}
		t.row(oneLine(w.Name), w.Kind, pid, formatBytes(w.WrittenBytes), fmt.Sprintf("%.0f", w.Requests),
			fmt.Sprintf("%.0f", w.Flushes), fmt.Sprintf("%.0f", w.Syncs), orDash(w.Device))
	}

	a.flushShortened(t, len(all))
}

func (a *App) printCause(c diagnose.Cause) {
	share := ""
	if c.Share >= 0 {
		share = fmt.Sprintf(", %.0f %% of the time of the syncs", 100*c.Share)
	}

	a.printf("\n%d. %s (%s%s)\n%s", c.Rank, c.Code, c.Confidence, share,
		wrapText(oneLine(c.Title), "   ", doctorWidth))

	for _, e := range c.Evidence {
		a.printBullet(e)
	}

	for i, n := range c.Next {
		head := "         "
		if i == 0 {
			head = "   next: "
		}
		a.printf("%s%s", head, strings.TrimPrefix(wrapText(oneLine(n), "         ", doctorWidth),
			"         "))
	}
}
