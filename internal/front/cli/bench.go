package cli

import (
	"context"
	"os"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/bench"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) benchCommand() *cobra.Command {
	c := &cobra.Command{
		Use:     "bench",
		GroupID: "tools",
		Short:   "Measure clones, sessions, reclaim, replication and syncs on this host",
		Args:    cobra.NoArgs,
		RunE:    func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(a.benchCloneCommand(), a.benchReclaimCommand(), a.benchReplicateCommand(), a.benchSyncCommand(),
		a.benchDensityCommand(), a.benchReportCommand(), a.benchCompareCommand(), a.benchExecCommand(),
		a.benchWaitCommand())
	return c
}

func (a *App) benchCloneCommand() *cobra.Command {
	var q bench.Config
	var clean bool
	c := &cobra.Command{
		Use:   "clone [GOLDEN|DIRECTORY]",
		Short: "Measure clones, destroys, imports and commands on this pool",
		Long: `Measure what clones cost on this pool in time, processor time, bytes written and
later writes, beside copies with cp and with reflinks, and a bare program that
makes the same system calls (the raw floor). The report also shows how these
figures depend on the number of volumes, how long whole commands take, and how
much the writes of another volume slow down. It ends with a verdict for each
target: PASS, FAIL, or the reason why there is none. The exit code tells only
whether pando could measure.

pando clones GOLDEN, or imports DIRECTORY and clones that. Without an argument,
it creates a tree of --files files, sized like source code, in $TMPDIR and
imports that. If the argument is both, the golden is used. The pool needs space
for a few full copies of the tree. With the default of 1,000 volumes, the
benchmark takes a few minutes. Run it on a host that does nothing else.

The names of everything it creates in the pool begin with ` + bench.Prefix + `, and it removes
all of that at the end, even if it is interrupted or fails. If it is killed, the
next ` + "`pando bench clone`" + ` removes what is left; --clean does only that.`,
		Example: `  pando bench clone
  pando bench clone /srv/repo --volumes 10000
  pando bench clone web --json > clone.json`,
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: a.completeSource,
	}

	f := c.Flags()
	f.IntVar(&q.Clones, "clones", 100, "create `N` clones in each series")
	f.IntVar(&q.Volumes, "volumes", 1000, "measure again with `N` volumes in the pool")
	f.IntVar(&q.Rounds, "rounds", 3, "repeat copies, imports and measurements of the neighbour `N` times")
	f.IntVar(&q.Files, "files", 10_000, "create `N` files if there is no argument")
	f.DurationVar(&q.Tail, "tail", time.Minute, "wait at most this `DURATION` for writes to end after an operation")
	f.DurationVar(&q.Idle, "idle", 3*time.Second, "measure the neighbour alone for this `DURATION` in each phase")
	f.BoolVar(&q.Overlay, "overlay", false, "clone with --overlay, and compare with bare mounts of overlayfs")
	f.BoolVar(&q.Mounted, "mounted", false, "mount the volumes that fill the pool")
	f.BoolVar(&q.Keep, "keep", false, "keep the golden and the volumes")
	f.BoolVar(&clean, "clean", false, "only remove leftovers of killed runs")

	c.RunE = a.withPool(func(ctx context.Context, e *engine.Engine, args []string) error {
		q.Engine, q.Drivers, q.TempDir = e, a.Drivers, os.TempDir()
		var err error
		if q.Program, err = os.Executable(); err != nil {
			return errs.Wrap("bench", "", err)
		}

		if clean && len(args) > 0 {
			return errs.New(errs.Invalid, "bench", args[0], "--clean takes no argument")
		}
		if q.Source, err = benchSource(args); err != nil {
			return err
		}
		return a.benchClone(ctx, q, clean)
	})

	return c
}

// completeSource completes what a benchmark reads: a golden or a directory.
func (a *App) completeSource(c *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	names, d := a.completeArgs(aGolden)(c, args, word)
	return names, d &^ cobra.ShellCompDirectiveNoFileComp
}

// benchSource is what a benchmark reads: its argument, if there is one. Invalid.
func benchSource(args []string) (string, error) {
	if len(args) == 0 {
		return "", nil
	}
	if args[0] == "" {
		return "", errs.New(errs.Invalid, "bench", `""`, "the source is empty")
	}
	return args[0], nil
}

func (a *App) benchClone(ctx context.Context, q bench.Config, clean bool) error {
	var report *bench.Report
	ctx, stop := a.showProgress(ctx)
	progress.From(ctx).StartOf(progress.RunningBenchmark, "removing leftovers of killed runs", 0, 0)
	removed, err := bench.Clean(ctx, q.Engine)
	if err == nil && !clean {
		report, err = bench.Run(ctx, q)
	}
	stop()

	for _, name := range removed {
		a.printNote("removed leftovers of %s, which was killed", name)
	}

	switch {
	case err != nil:
		return err
	case clean && a.json:
		return a.printJSON(bench.Cleaned{Removed: append([]string{}, removed...)})
	case clean:
		return nil
	case report.Kept != "":
		a.printNote("kept the volumes and goldens whose names begin with %s; remove them with `pando destroy '%s-*'` and "+
			"`pando golden rm`",
			report.Kept, report.Kept)
	}

	if a.json {
		return a.printJSON(report)
	}

	return a.printBench(report)
}

// benchExecCommand measures a program from a small process: see bench.Measure.
func (a *App) benchExecCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "exec -- COMMAND...",
		Short:  "Run a program and print the resources it used, as JSON",
		Hidden: true,
		Args:   cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			u, err := bench.Measure(c.Context(), args)
			if err != nil {
				return err
			}
			return a.printJSON(u)
		},
	}
}
