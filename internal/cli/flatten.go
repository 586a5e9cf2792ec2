package cli

import (
	"context"

	"pando/internal/base/progress"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) flattenCommand() *cobra.Command {
	var q engine.FlattenRequest
	c := &cobra.Command{
		Use:     "flatten VOLUME",
		GroupID: "volumes",
		Short:   "Copy a volume so that it shares nothing with any other",
		Long: `A ZFS clone keeps the blocks of what it was cloned from, also of what the pool has
destroyed since; ` + "`pando gc --explain`" + ` shows what that takes. This copies the volume
within the pool, and puts the copy in its place. It costs what the volume refers
to, which is said first. Other drivers tie nothing: there it does nothing.

The volume must not be mounted. Its snapshots stay as they are. Killed before the copy
is in its place, nothing has changed; killed after that, what the volume was stays as
its snapshot before-flatten-TIME, until that is destroyed.`,
		Example:           "  pando flatten job-17 --dry-run\n  pando flatten job-17",
		Args:              usage(cobra.ExactArgs(1)),
		ValidArgsFunction: a.completeVolumes(1),
		RunE: a.with(func(ctx context.Context, e *engine.Engine, args []string) (err error) {
			if q.Volume, err = existingVolume("flatten", args[0]); err != nil {
				return err
			}

			q.Plan = func(f engine.Flatten) {
				if !a.json {
					a.note("flattening %s reads and writes up to %s; the pool has %s free", args[0], size(f.CostBytes),
						size(f.FreeBytes))
				}
			}

			var out engine.Flatten
			err = a.track(func(t *progress.Tracker) (err error) {
				q.Tracker = t
				out, err = e.Flatten(ctx, q)
				return err
			})

			switch {
			case err != nil:
				return err
			case a.json:
				return a.printJSON(out)
			case !out.Tied:
				a.note("%s is independent already: the %s driver ties nothing to what it was cloned from", args[0], e.Caps().Name)
			case out.Done && out.Snapshots > 0:
				a.note("%s shares nothing any more; %s stay as they are", args[0], plural(out.Snapshots, "snapshot"))
			case out.Done:
				a.note("%s shares nothing any more", args[0])
			}

			return nil
		}),
	}

	c.Flags().BoolVar(&q.DryRun, "dry-run", false, "only say what it would cost")
	return c
}
