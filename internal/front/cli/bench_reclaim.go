package cli

import (
	"context"
	"fmt"
	"os"

	"pando/internal/base/errs"
	"pando/internal/base/units"
	"pando/internal/bench"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) benchReclaimCommand() *cobra.Command {
	var q bench.ReclaimConfig
	var write string
	c := &cobra.Command{
		Use:   "reclaim",
		Short: "Measure how much space and memory destroyed volumes return",
		Long: `Create --clones clones of a tree of --files files, mount them all, read the
attributes of every file in each, and write --write bytes of random data into
each. Then destroy them in one call. The report shows the used space of the pool
and the kernel's memory for inodes and names before, with all clones, and
afterwards, when both have settled. Then fill the pool with --goldens goldens of
--generations generations and with --volumes volumes, and measure how long
` + "`pando gc`" + ` takes to check them.

The names of everything it creates begin with ` + bench.Prefix + `, and it removes all of that
at the end. If it is killed, ` + "`pando bench clone --clean`" + ` removes what is left.`,
		Example: "  pando bench reclaim\n  pando bench reclaim --goldens 1000 --volumes 10000",
		Args:    cobra.NoArgs,
	}

	f := c.Flags()
	f.IntVar(&q.Clones, "clones", 1000, "create and destroy `N` clones")
	f.IntVar(&q.Files, "files", 2000, "create `N` files in the tree to clone")
	f.StringVar(&write, "write", "1M", "write `SIZE` bytes into each clone")
	f.IntVar(&q.Goldens, "goldens", 100, "create `N` goldens for gc to check")
	f.IntVar(&q.Generations, "generations", 10, "create `N` generations of each golden")
	f.IntVar(&q.Volumes, "volumes", 1000, "create `N` volumes for gc to check")

	c.RunE = func(c *cobra.Command, args []string) (err error) {
		if q.WriteBytes, err = units.ParseSize("bench", write); err != nil {
			return err
		}

		return a.withPool(func(ctx context.Context, e *engine.Engine, _ []string) error {
			q.Engine, q.Drivers, q.TempDir = e, a.Drivers, os.TempDir()
			if q.Program, err = os.Executable(); err != nil {
				return errs.Wrap("bench", "", err)
			}

			ctx, stop := a.showProgress(ctx)
			report, err := bench.Reclaim(ctx, q)
			stop()

			switch {
			case err != nil:
				return errs.Wrap("bench", "", err)
			case a.json:
				return a.printJSON(report)
			}

			return a.printReclaim(report)
		})(c, args)
	}

	return c
}

func (a *App) printReclaim(r *bench.ReclaimReport) error {
	a.printFields(
		"driver", r.Driver,
		"clones", fmt.Sprintf("%d of a tree of %d files, each mounted, walked and written to, in %s", r.Clones, r.Files,
			formatDuration(r.MakeSeconds)),
		"destroyed", fmt.Sprintf("in %s, %s each; settled %s later", formatDuration(r.Destroy),
			formatDuration(r.Destroy/float64(r.Clones)), formatDuration(r.Settle)),
		"gc", fmt.Sprintf("the whole command %s, with %d goldens of %d generations and %d volumes",
			formatDuration(r.GCCommand[len(r.GCCommand)/2]), r.Goldens, r.Generations, r.Volumes),
	)

	a.printHeading("Used by the clones, and returned")

	t := a.table("", "BEFORE", "WITH ALL", "AFTER")
	t.row("used space of the pool", formatBytes(r.UsedBefore), formatBytes(r.UsedPeak), formatBytes(r.UsedAfter))
	for _, s := range r.Slabs {
		t.row("kernel memory, "+s.Cache, formatBytes(s.Before), formatBytes(s.Peak), formatBytes(s.After))
	}

	if r.NoSlabs != "" {
		t.row("kernel memory", "not measured: "+r.NoSlabs)
	}

	t.flush()

	a.printVerdicts(r.Targets)
	return nil
}
