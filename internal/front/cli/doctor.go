package cli

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/units"
	"pando/internal/observe/doctor"

	"github.com/spf13/cobra"
)

// doctorHelp is the text of `pando doctor --help`.
const doctorHelp = `Examine this host, and the pool if there is one, for known causes of data loss,
leaks and slow storage: filesystems and disks that drop syncs, loop devices and
mounts left over in any mount namespace, the current cost of mounts, memory used
by inodes, limits that are nearly reached, missing programs and kernel features,
the clock, and hung tasks. --list prints the names of all checks; docs/doctor.md
has their thresholds and sources. Each finding comes with its evidence and with
commands that fix it.

doctor changes nothing: it does not clean up, mount or upgrade the pool. Without
root, it skips the checks that would have to guess, and says so.

The exit code tells how bad the worst finding is, with --json too: 0 for none or
only notes, 21 for a warning, 22 for a critical one.

With --zfs POOL, doctor examines the deduplication of a zpool instead: which
datasets use it, how much memory and disk space its table takes and how much
space it saves, how much of that are copies of trees and volumes, which clones
would share without a table, whether block cloning works there, and the steps to
change over, with the names of this zpool. It needs no pando pool, and writes
nothing to the zpool, not even access times. It looks for copies for --time, in
mounted filesystems and in volumes that have a device, and needs root to open
them safely. Figures that are not known exactly are printed as a range, and
unknown ones as unknown. The exit code is 0. To check a pool for damage, use
` + "`pando fsck`" + `.`

func (a *App) doctorCommand() *cobra.Command {
	var q doctor.ZFSRequest
	var h doctor.HostRequest
	limit := "20s"
	list := false
	c := &cobra.Command{
		Use:     "doctor [--zfs POOL]",
		GroupID: "tools",
		Short:   "Find causes of data loss, leaks and slow storage on this host",
		Long:    doctorHelp,
		Example: "  pando doctor\n  pando doctor --only mount-leaks,loop-leaks\n  pando doctor --json | jq " +
			"'.checks[].findings[] | {code, severity, title}'\n  pando doctor --zfs tank --time 5m",
		Args: cobra.NoArgs,
	}

	f := c.Flags()
	f.StringVar(&q.Pool, "zfs", "", "examine the deduplication of this `ZPOOL` instead")
	f.StringSliceVar(&h.Only, "only", nil, "run only these `CHECKS`, separated by commas")
	f.BoolVar(&list, "list", false, "list the checks, and run none")
	f.StringVar(&limit, "time", limit, "limit each check, or with --zfs the search for copies, to this `DURATION`")

	_ = c.RegisterFlagCompletionFunc("zfs", func(c *cobra.Command, _ []string, _ string) ([]string,
		cobra.ShellCompDirective) {
		ctx := c.Context()
		if ctx == nil {
			ctx = context.Background()
		}
		pools, err := doctor.Pools(ctx)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return pools, cobra.ShellCompDirectiveNoFileComp
	})

	_ = c.RegisterFlagCompletionFunc("only", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		var names []string
		for _, k := range doctor.Checks() {
			names = append(names, k.Name+"\t"+k.Title)
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	})

	c.RunE = func(c *cobra.Command, _ []string) error {
		d, err := units.ParseDuration("doctor", limit)
		if err != nil {
			return err
		}

		d = min(d, 24*time.Hour)
		zpool := c.Flags().Changed("zfs")
		switch {
		case zpool && (list || h.Only != nil):
			return errs.New(errs.Invalid, "doctor", q.Pool,
				"--zfs cannot be combined with --only or --list").WithHint("remove --only and --list, or remove --zfs")
		case zpool && q.Pool == "":
			return errs.New(errs.Invalid, "doctor", "",
				"--zfs must not be empty").WithHint("name a zpool: `pando doctor --zfs POOL`")
		case c.Flags().Changed("only") && len(h.Only) == 0:
			return errs.New(errs.Invalid, "doctor", "",
				"--only must not be empty").WithHint("run `pando doctor --list` to list the checks")
		case list:
			return a.printChecks()
		case zpool:
			return a.doctorZFS(c.Context(), q, d)
		}

		h.PatienceEach = d
		return a.doctorHost(c.Context(), h)
	}

	return c
}

// doctorZFS looks at a zpool.
func (a *App) doctorZFS(ctx context.Context, q doctor.ZFSRequest, limit time.Duration) error {
	q.Limit = limit
	ctx, stop := a.showProgress(ctx)
	r, err := doctor.ZFS(ctx, q)
	stop()
	if err != nil {
		return err
	}
	return a.printZFSReport(r)
}

// printCodes prints the code of each finding, for --quiet.
func (a *App) printCodes(reports ...doctor.Report) {
	for _, r := range reports {
		for _, f := range r.Findings {
			a.printf("%s\n", f.Code)
		}
	}
}

func (a *App) printZFSReport(r *doctor.Report) error {
	switch {
	case a.json:
		return a.printJSON(r)
	case a.quiet:
		a.printCodes(*r)
		return nil
	}

	version := ""
	if r.ZFS.Version != "" {
		version = " (OpenZFS " + r.ZFS.Version + ")"
	}

	a.printf("zpool %s%s: %s.\n", r.Subject, version, r.Summary)

	for _, f := range r.Findings {
		a.printFinding(f, r.ZFS)
	}

	return nil
}

const doctorWidth = 96 // of text

func (a *App) printFinding(f doctor.Finding, facts *doctor.Facts) {
	head := string(f.Severity) + " " + f.Code
	if f.Subject != "" {
		head += " " + oneLine(f.Subject)
	}

	a.printf("\n%s\n%s", head, wrapText(f.Title, "  ", doctorWidth))

	width := 0
	for _, m := range f.Measured {
		width = max(width, len(m.Label))
	}

	for _, m := range f.Measured {
		value := figureText(m)
		if m.Note != "" {
			value += " (" + m.Note + ")"
		}
		indent := strings.Repeat(" ", width+6)
		text := strings.TrimPrefix(wrapText(value, indent, doctorWidth), indent)
		a.printf("    %-*s  %s", width, m.Label, text)
	}

	switch f.Code {
	case "zfs-dedup-datasets":
		a.printDedupDatasets(facts.Datasets)
	case "zfs-dedup-copies":
		a.printCopies(facts.Copies)
	}

	if f.Why != "" {
		a.printf("%s", wrapText(f.Why, "  ", doctorWidth))
	}

	for i, s := range f.Do {
		head := "  - "
		if len(f.Do) > 1 {
			head = fmt.Sprintf("  %d. ", i+1)
		}
		indent := strings.Repeat(" ", len(head))
		a.printf("%s%s", head, strings.TrimPrefix(wrapText(s.Text, indent, doctorWidth), indent))
		for _, c := range s.Commands {
			a.printf("%s  %s\n", indent, c)
		}
	}
}

// shownDatasets is how many rows of a table are printed; --json has all.
const shownDatasets = 20

func (a *App) printDedupDatasets(all []doctor.Dataset) {
	t := a.table("    DATASET", "TYPE", "DEDUP", "FROM", "REFERENCED", "LOGICAL")
	for _, d := range all[:min(len(all), shownDatasets)] {
		t.row("    "+d.Name, d.Type, d.Dedup, d.From, formatBytes(d.ReferencedBytes), formatBytes(d.LogicalBytes))
	}
	a.flushDatasets(t, len(all))
}

func (a *App) printCopies(c *doctor.Copies) {
	if len(c.Trees) == 0 {
		return
	}

	t := a.table("    ORIGINAL", "COPY", "COPIED", "FILES")
	rows := 0
	for _, g := range c.Trees {
		for _, k := range g.Copies {
			if rows++; rows > shownDatasets {
				continue
			}
			files := fmt.Sprintf("%d of %d", k.CopiedFiles, k.Files)
			if !k.Complete {
				files += ", incomplete: time ran out"
			}
			t.row("    "+oneLine(g.Original), oneLine(k.Path), formatBytes(k.CopiedBytes), files)
		}
	}

	a.flushDatasets(t, rows)
}

func (a *App) flushDatasets(t *table, rows int) {
	t.flush()
	if rows > shownDatasets {
		a.printf("    ... and %d more (--json has all)\n", rows-shownDatasets)
	}
}

// figureText is a figure for people: a value, a range, or "unknown".
func figureText(f doctor.Figure) string {
	switch {
	case !f.Known:
		return "unknown"
	case f.Unit == doctor.Text:
		return f.Text
	}

	one := func(v float64) string {
		switch f.Unit {
		case doctor.Bytes:
			return formatBytes(int64(v))
		case doctor.Percent:
			return strconv.FormatFloat(v, 'f', 1, 64) + " %"
		case doctor.Ratio:
			return strconv.FormatFloat(v, 'f', 2, 64) + "x"
		}
		return formatThousands(int64(v))
	}

	low, high := one(f.Low), one(f.High)
	if low == high {
		return low
	}
	if f.Unit == doctor.Percent && math.Round(f.High*10) == 1000 {
		return "at least " + low
	}

	return low + " to " + high
}

// formatThousands writes 1234567 as 1,234,567.
func formatThousands(n int64) string {
	s := strconv.FormatInt(n, 10)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// wrapText breaks a text into lines of at most width, each with an indent and a line
// break. Words are never broken.
func wrapText(text, indent string, width int) string {
	var b strings.Builder
	line := indent
	for _, w := range strings.Fields(text) {
		if line != indent && len(line)+len(w) > width {
			b.WriteString(strings.TrimRight(line, " ") + "\n")
			line = indent
		}
		line += w + " "
	}
	b.WriteString(strings.TrimRight(line, " ") + "\n")
	return b.String()
}
