package cli

import (
	"context"
	"fmt"
	"os"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/bench"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) benchReclaimCommand() *cobra.Command {
	var q bench.ReclaimConfig
	var write string
	c := &cobra.Command{
		Use:   "reclaim",
		Short: "Measure what comes back when volumes are destroyed",
		Long: `Makes --clones clones of a tree of --files files, mounts them all, looks at every
file in each and writes --write of noise into it; destroys them in one call; and
shows the used space of the pool and the kernel's memory for inodes and names
before, with all of them, and after, when both have settled. Then it fills the
pool with --goldens goldens of --generations generations and --volumes volumes,
and measures how long ` + "`pando gc`" + ` takes to decide about them.

Everything it makes has a name that begins with ` + bench.Prefix + ` and is removed at the
end; if it is killed, ` + "`pando bench clone --clean`" + ` removes what is left.`,
		Example: "  pando bench reclaim\n  pando bench reclaim --goldens 1000 --volumes 10000",
		Args:    usage(cobra.NoArgs),
	}

	f := c.Flags()
	f.IntVar(&q.Clones, "clones", 1000, "clones that are made and destroyed")
	f.IntVar(&q.Files, "files", 2000, "files in the tree that they are clones of")
	f.StringVar(&write, "write", "1M", "bytes written into each clone")
	f.IntVar(&q.Goldens, "goldens", 100, "goldens that gc decides about")
	f.IntVar(&q.Generations, "generations", 10, "generations of each")
	f.IntVar(&q.Volumes, "volumes", 1000, "volumes that gc decides about")

	c.RunE = func(c *cobra.Command, args []string) (err error) {
		if q.WriteBytes, err = parseSize("bench", write); err != nil {
			return err
		}

		return a.with(func(ctx context.Context, e *engine.Engine, _ []string) error {
			q.Engine, q.Drivers, q.TempDir = e, a.Drivers, os.TempDir()
			if q.Program, err = os.Executable(); err != nil {
				return errs.Wrap("bench", "", err)
			}

			var report *bench.ReclaimReport
			err := a.track(func(t *progress.Tracker) (err error) {
				q.Tracker = t
				report, err = bench.Reclaim(ctx, q)
				return err
			})

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
	if err := a.fields(
		"driver", r.Driver,
		"clones", fmt.Sprintf("%d of a tree of %d files, each mounted, walked and written to, in %s", r.Clones, r.Files,
			duration(r.MakeSeconds)),
		"destroyed", fmt.Sprintf("in %s, %s each; settled %s later", duration(r.Destroy),
			duration(r.Destroy/float64(r.Clones)), duration(r.Settle)),
		"gc", fmt.Sprintf("the whole command %s, with %d goldens of %d generations and %d volumes",
			duration(r.GCCommand[len(r.GCCommand)/2]), r.Goldens, r.Generations, r.Volumes),
	); err != nil {
		return err
	}

	if err := a.heading("What they took, and what came back"); err != nil {
		return err
	}

	t := a.table("", "BEFORE", "WITH ALL", "AFTER")
	t.row("used space of the pool", size(r.UsedBefore), size(r.UsedPeak), size(r.UsedAfter))
	for _, s := range r.Slabs {
		t.row("kernel memory, "+s.Cache, size(s.Before), size(s.Peak), size(s.After))
	}

	if r.NoSlabs != "" {
		t.row("kernel memory", "not measured: "+r.NoSlabs)
	}

	if err := t.flush(); err != nil {
		return err
	}

	return a.printVerdicts(r.Targets)
}
