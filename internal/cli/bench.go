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
		Short:   "Measure what Pando claims, here",
		Args:    usage(cobra.NoArgs),
		RunE:    func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(a.benchCloneCommand(), a.benchReclaimCommand(), a.benchReplicateCommand(), a.benchSyncCommand(),
		a.benchReportCommand(), a.benchCompareCommand(), a.benchExecCommand())
	return c
}

func (a *App) benchCloneCommand() *cobra.Command {
	var q bench.Config
	var clean bool
	c := &cobra.Command{
		Use:   "clone [GOLDEN|DIRECTORY]",
		Short: "Measure clones, destroys, imports and commands on this pool",
		Long: `Measures, on the current pool, what clones cost in time, processor time, bytes
written and later writes, beside a copy by cp, a copy by reflinks and a bare
program that makes the same system calls (the raw floor); how they depend on the
number of volumes; what whole commands take; and what another volume's writes
feel meanwhile. It ends with a verdict on each target: PASS, FAIL, or why there is
none. The exit code says only whether it could measure.

It clones GOLDEN, or imports DIRECTORY and clones that, or without an argument
makes a tree of --files files sized like source code in $TMPDIR and imports that.
A word that is both is the golden. The pool needs room for a few full copies of
the tree; with the default of 1,000 volumes it takes a few minutes. Figures are
those of a machine that does nothing else, or they are not worth much.

Everything it makes in the pool has a name that begins with ` + bench.Prefix + ` and is removed
at the end, also when it is interrupted or fails. If it is killed, the next
` + "`pando bench clone`" + ` removes what is left, and --clean does only that.`,
		Example: `  pando bench clone
  pando bench clone /srv/repo --volumes 10000
  pando bench clone web --json > clone.json`,
		Args: usage(cobra.MaximumNArgs(1)),
		ValidArgsFunction: func(c *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
			names, d := a.completeGoldens(c, args, word)
			return names, d &^ cobra.ShellCompDirectiveNoFileComp
		},
	}

	f := c.Flags()
	f.IntVar(&q.Clones, "clones", 100, "clones in each series")
	f.IntVar(&q.Volumes, "volumes", 1000, "volumes in the pool for the second half of the figures")
	f.IntVar(&q.Rounds, "rounds", 3, "repeat copies, imports and the neighbour's phases")
	f.IntVar(&q.Files, "files", 10_000, "files in the tree that is made if there is no argument")
	f.DurationVar(&q.Tail, "tail", time.Minute, "wait at most this `DURATION` for writes to end after an operation")
	f.DurationVar(&q.Idle, "idle", 3*time.Second, "`DURATION` of each phase in which the neighbour is alone")
	f.BoolVar(&q.Keep, "keep", false, "leave the golden and the volumes")
	f.BoolVar(&clean, "clean", false, "only remove what killed runs have left")

	c.RunE = a.with(func(ctx context.Context, e *engine.Engine, args []string) error {
		q.Engine, q.Drivers, q.TempDir = e, a.Drivers, os.TempDir()
		var err error
		if q.Program, err = os.Executable(); err != nil {
			return errs.Wrap("bench", "", err)
		}

		switch {
		case clean && len(args) > 0:
			return errs.New(errs.Invalid, "bench", args[0], "--clean takes no argument")
		case len(args) > 0 && args[0] == "":
			return errs.New(errs.Invalid, "bench", `""`, "the source is empty")
		case len(args) > 0:
			q.Source = args[0]
		}

		return a.benchClone(ctx, q, clean)
	})

	return c
}

func (a *App) benchClone(ctx context.Context, q bench.Config, clean bool) error {
	var report *bench.Report
	var removed []string
	err := a.track(func(t *progress.Tracker) (err error) {
		t.Start("removing what killed runs have left", 0, 0)
		if removed, err = bench.Clean(ctx, q.Engine); err != nil || clean {
			return err
		}
		q.Tracker = t
		report, err = bench.Run(ctx, q)
		return err
	})

	for _, name := range removed {
		a.note("removed what is left of %s, which was killed", name)
	}

	switch {
	case err != nil:
		return err
	case clean && a.json:
		return a.printJSON(map[string]any{"removed": append([]string{}, removed...)})
	case clean:
		return nil
	case report.Kept != "":
		a.note("kept the volumes and goldens whose names begin with %s: `pando destroy '%s-*'`, `pando golden rm`",
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
		Short:  "Run a program and print what it took, as JSON",
		Hidden: true,
		Args:   usage(cobra.MinimumNArgs(1)),
		RunE: func(c *cobra.Command, args []string) error {
			u, err := bench.Measure(c.Context(), args)
			if err != nil {
				return err
			}
			return a.printJSON(u)
		},
	}
}
