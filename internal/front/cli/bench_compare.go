package cli

import (
	"fmt"
	"math"
	"strconv"

	"pando/internal/base/errs"
	"pando/internal/observe/syncbench"

	"github.com/spf13/cobra"
)

func (a *App) benchCompareCommand() *cobra.Command {
	force := false
	c := &cobra.Command{
		Use:   "compare A B",
		Short: "Compare two reports of `pando bench sync`, beyond noise",
		Long: `Read two reports printed by ` + "`pando bench sync --json`" + `, and tell for each figure
whether B is faster or slower than A, or whether the difference is no greater
than the difference between runs of the same work.

The noise is estimated from the runs of each report (Welch's t interval of the
ratio, at 99 %), which needs reports with --runs 3 or more. If a report has only
one run, the noise is estimated from the fluctuation within it, and changes
below 25 % do not count. The comparison cannot tell your change from drift over
time or between two sessions: measure A, B and A again.

Reports with different profiles, writers, block or file sizes are refused
without --force. pando prints differences in kernels, hosts and layers, and
first of all whether a report failed its proof, because figures of syncs that
did not reach the disk are meaningless. The exit code does not tell what
changed; --json does.`,
		Example: "  pando bench sync /srv --runs 3 --json > before.json\n  pando bench sync /srv --runs 3 --json > " +
			"after.json\n  pando bench compare before.json after.json",
		Args: cobra.ExactArgs(2),
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) > 1 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return []string{"json"}, cobra.ShellCompDirectiveFilterFileExt
		},
	}

	c.Flags().BoolVar(&force, "force", false, "compare reports of different work")

	c.RunE = func(_ *cobra.Command, args []string) error {
		var r [2]*syncbench.Report
		for i, path := range args {
			var err error
			if r[i], err = syncbench.Read(path); err != nil {
				return err
			}
		}

		cmp, err := syncbench.Compare(r[0], r[1], args[0], args[1], force)
		if err != nil {
			return err
		}
		if a.json {
			return a.printJSON(cmp)
		}

		return a.printComparison(cmp)
	}

	return c
}

func (a *App) printComparison(c *syncbench.Comparison) error {
	if a.quiet {
		return a.printf("%s\n", c.Summary)
	}

	for _, s := range c.Unproven {
		a.printf("%s", wrapHanging("FAIL: ", s+"."))
	}

	a.printFields("A", sideText(c.A), "B", sideText(c.B))

	for _, s := range c.Differences {
		a.printf("%s", wrapHanging("not the same work: ", s))
	}

	for _, s := range c.Warnings {
		a.printf("%s", wrapHanging("note: ", s))
	}

	a.printf("\n")

	t := a.table("", "A", "B", "B / A", "NOISE", "VERDICT")
	for _, x := range c.Changes {
		value := formatDuration
		if x.Unit != "s" {
			value = formatRate
		}

		over, noise, verdict := "-", "-", x.Verdict
		if x.Ratio > 0 {
			over = strconv.FormatFloat(x.Ratio, 'f', 2, 64) + "x"
			if x.Ratio >= 100 || x.Ratio < 0.01 {
				over = strconv.FormatFloat(x.Ratio, 'g', 3, 64) + "x"
			}
		}

		if x.Noise >= 0 {
			noise = noiseText(x.Noise)
		}
		if x.Why != "" {
			verdict += ": " + x.Why
		}

		t.row(x.Figure, value(x.A), value(x.B), over, noise, verdict)
	}

	t.flush()

	basis := "NOISE is the smallest change that counts, estimated from the differences between runs."
	if c.Basis == syncbench.InsideRuns {
		basis = "NOISE is the smallest change that counts, estimated from the fluctuation within a run."
	}

	return a.printf("%s\n%s", wrapText(basis, "", syncWidth), wrapHanging("Result: ", c.Summary+"."))
}

// noiseText is a factor less one: in percent, or as a factor if it is large.
func noiseText(v float64) string {
	switch {
	case v >= 1000:
		return "> 1000x"
	case v >= 1:
		return formatRatio(1 + v)
	}
	return strconv.FormatFloat(math.Ceil(v*1000-1e-6)/10, 'f', 1, 64) + " %"
}

func sideText(s syncbench.Side) string {
	return fmt.Sprintf("%s: %s of %s on %s, %s, %s", s.Name, errs.Plural(s.Runs, "run"), formatDuration(s.Seconds), s.Path,
		s.Host,
		s.Verdict)
}

// formatRate writes a rate.
func formatRate(v float64) string {
	switch {
	case v >= 99.5:
		return formatThousands(int64(math.Round(v)))
	case v >= 9.95:
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return strconv.FormatFloat(v, 'f', 2, 64)
}
