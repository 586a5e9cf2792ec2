package cli

import (
	"context"
	"fmt"
	"os"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/base/units"
	"pando/internal/bench"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

// densityHelp is the text of `pando bench density --help`.
const densityHelp = `Measure what many sessions need that read the same tree and write a little of
it. Each session has a copy of its own, reads all files, and then overwrites
every hundredth file. The report shows the memory of the page cache and of the
kernel's inodes, the bytes read from the disk, and the time, for each number in
--sessions and for each way to make copies. They take turns:

  bare     mounts of overlayfs on the golden, by system calls alone (the floor)
  overlay  ` + "`pando clone --overlay`" + `
  clone    ` + "`pando clone`" + `
  reflink  ` + "`cp -a --reflink`" + `
  docker   containers of one image, if a Docker daemon can be reached

The sessions read GOLDEN, or DIRECTORY, which pando imports. Without either, it
creates a tree of --files files in $TMPDIR and imports that. It needs root, and
drops the page cache of the whole host again and again: run it on a host that
does nothing else. The names of everything it creates begin with ` + bench.Prefix + `,
and it removes all of that at the end, even if it is interrupted or fails. If it
is killed, the next run removes what is left.`

func (a *App) benchDensityCommand() *cobra.Command {
	var q bench.DensityConfig
	var size string
	c := &cobra.Command{
		Use:   "density [GOLDEN|DIRECTORY]",
		Short: "Measure memory, reads and time of many sessions on one golden",
		Long:  densityHelp,
		Example: `  pando bench density
  pando bench density /usr/lib/go --sessions 1,20
  pando bench density --only bare,overlay --runs 5 --json > density.json`,
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: a.completeSource,
	}

	f := c.Flags()
	f.IntSliceVar(&q.Sessions, "sessions", []int{1, 10, 100}, "measure these `NUMBERS` of sessions, separated by commas")
	f.IntVar(&q.Files, "files", 10_000, "create `N` files if there is no argument")
	f.StringVar(&size, "size", "", "create files of this `SIZE` altogether, about (default 8 KiB for each)")
	f.IntVar(&q.Runs, "runs", 3, "measure everything `N` times, and report medians")
	f.IntVar(&q.AtOnce, "at-once", 0, "let `N` sessions work at the same time (default one for each processor)")
	f.StringSliceVar(&q.Only, "only", nil,
		"measure only these `VARIANTS`, separated by commas: "+strings.Join(bench.DensityVariants, ", "))
	_ = c.RegisterFlagCompletionFunc("only", cobra.FixedCompletions(bench.DensityVariants,
		cobra.ShellCompDirectiveNoFileComp))

	c.RunE = func(c *cobra.Command, args []string) (err error) {
		if q.Source, err = benchSource(args); err != nil {
			return err
		}
		if len(args) > 0 && (c.Flags().Changed("files") || size != "") {
			return errs.New(errs.Invalid, "bench", args[0], "a source cannot be combined with --files or --size")
		}
		if c.Flags().Changed("at-once") && q.AtOnce < 1 {
			return errs.New(errs.Invalid, "bench", "--at-once", "must be at least 1 (got %d)", q.AtOnce)
		}
		if size != "" {
			if q.Bytes, err = units.ParseSize("bench", size); err != nil {
				return err
			}
		}

		return a.withPool(func(ctx context.Context, e *engine.Engine, _ []string) error {
			return a.benchDensity(ctx, e, q)
		})(c, args)
	}

	return c
}

func (a *App) benchDensity(ctx context.Context, e *engine.Engine, q bench.DensityConfig) (err error) {
	q.Engine, q.Drivers, q.TempDir = e, a.Drivers, os.TempDir()
	if q.Program, err = os.Executable(); err != nil {
		return errs.Wrap("bench", "", err)
	}

	var report *bench.DensityReport
	ctx, stop := a.showProgress(ctx)
	removed, err := bench.Clean(ctx, e)
	if err == nil {
		report, err = bench.Density(ctx, q)
	}
	stop()

	for _, name := range removed {
		a.printNote("removed leftovers of %s, which was killed", name)
	}

	if err != nil {
		return err
	}

	a.noteMissing(report)
	if a.json {
		return a.printJSON(report)
	}

	a.printDensity(report)
	return nil
}

// noteMissing says which variants could not be measured, and why.
func (a *App) noteMissing(r *bench.DensityReport) {
	said := map[string]bool{}
	for _, row := range r.Rows {
		if row.NotMeasured != "" && !said[row.Variant] {
			said[row.Variant] = true
			a.printNote("SKIPPED: %s was not measured: %s", row.Variant, row.NotMeasured)
		}
	}
}

func (a *App) printDensity(r *bench.DensityReport) {
	a.printBenchHead(&bench.Report{Pool: r.Pool, Host: r.Host, Source: r.Source})
	a.printHeading(fmt.Sprintf("Time until the last session had read everything, and written 1 %% (%d at once, medians "+
		"of %s;\nSESSION is reading and writing of one, on average)", r.AtOnce, errs.Plural(r.Runs, "run")))

	t := a.table("SESSIONS", "VARIANT", "SETUP", "READ", "WRITE", "SESSION", "/ BARE", "REMOVE")
	for _, row := range r.Rows {
		if row.NotMeasured != "" {
			continue
		}
		ratio := "-"
		for _, bare := range r.Rows {
			if bare.Variant == bench.DensityBare && bare.Sessions == row.Sessions && bare.Session > 0 {
				ratio = formatRatio(row.Session / bare.Session)
			}
		}
		t.row(fmt.Sprint(row.Sessions), row.Variant, formatDuration(row.Setup), formatDuration(row.Read),
			formatDuration(row.Write), formatDuration(row.Session), ratio, formatDuration(row.Remove))
	}

	t.flush()
	a.printHeading("Memory after reading, and reads of the disk (RESIDENT: of one session's files in the page cache;\n" +
		"SLAB: for each session)")

	t = a.table("SESSIONS", "VARIANT", "PAGE CACHE", "AFTER WRITES", "RESIDENT", "DISK READ", "SLAB RECLAIMABLE",
		"OTHER SLAB")
	for _, row := range r.Rows {
		if row.NotMeasured != "" {
			continue
		}
		disk := formatMiB(row.Disk)
		if row.NoDisk != "" {
			disk = "-"
		}
		t.row(fmt.Sprint(row.Sessions), row.Variant, formatMiB(row.Cache), formatMiB(row.CacheWritten),
			formatMiB(row.Resident), disk, formatMiB(row.Reclaimable), formatMiB(row.Unreclaimable))
	}

	t.flush()
	a.printVerdicts(r.Targets)
}

// formatMiB formats a difference of sizes, which may be negative.
func formatMiB(n float64) string { return fmt.Sprintf("%.1f MiB", n/(1<<20)) }

// benchWaitCommand is what runs in containers of `bench density`.
func (a *App) benchWaitCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "wait",
		Short:  "Wait until interrupted",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			<-c.Context().Done()
			return nil
		},
	}
}
