package cli

import (
	"context"

	"pando/internal/base/errs"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

// noteFlattenCost prints what a flatten costs, unless there is nothing to do.
func (a *App) noteFlattenCost(f engine.Flatten) {
	if f.Tied {
		a.printNote("flattening %s reads and writes up to %s; the pool has %s free", f.Name, formatBytes(f.CostBytes),
			formatBytes(f.FreeBytes))
	}
}

func (a *App) flattenCommand() *cobra.Command {
	var q engine.FlattenRequest
	c := &cobra.Command{
		Use:     "flatten VOLUME",
		GroupID: "volumes",
		Short:   "Make a volume independent of its golden: an overlay, or a clone on ZFS",
		Long: `Replace an overlay by a volume that holds all its files: a clone of its golden,
with its changes.

On ZFS, copy VOLUME within the pool and put the copy in its place. A ZFS clone keeps the
blocks of its origin, even after the pool has destroyed the origin;
` + "`pando gc --explain`" + ` shows how much space that takes. Flattening reads and
writes as many bytes as the volume refers to, and prints that number first.
Other drivers do not tie clones to their origins, so the command does nothing
to clones that are not overlays.

The volume must not be mounted. Its snapshots stay as they are. If pando is
killed before the copy is in place, nothing has changed. If it is killed later,
the previous content stays as the snapshot before-flatten-TIME until you destroy
it.`,
		Example:           "  pando flatten job-17 --dry-run\n  pando flatten job-17",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeArgs(aVolume),
		RunE: a.withPool(func(ctx context.Context, e *engine.Engine, args []string) (err error) {
			if q.Volume, err = volumeName(ctx, e, "flatten", args[0]); err != nil {
				return err
			}

			if !q.DryRun && !a.json {
				cost := q
				cost.DryRun = true
				f, err := e.Flatten(ctx, cost)
				if err != nil {
					return err
				}
				a.noteFlattenCost(f)
			}

			ctx, stop := a.showProgress(ctx)
			out, err := e.Flatten(ctx, q)
			stop()

			switch {
			case err != nil:
				return err
			case a.json:
				return a.printJSON(out)
			case !out.Tied:
				a.printNote("%s is independent already: the %s driver does not tie clones to their origins", args[0], e.Caps().Name)
			case q.DryRun:
				a.noteFlattenCost(out)
			case out.Done && out.WasOverlay:
				a.printNote("%s is no longer an overlay: it holds all its files", args[0])
			case out.Done && out.Snapshots > 0:
				a.printNote("%s no longer shares blocks with other objects; kept %s", args[0],
					errs.Plural(out.Snapshots, "snapshot"))
			case out.Done:
				a.printNote("%s no longer shares blocks with other objects", args[0])
			}

			return nil
		}),
	}

	c.Flags().BoolVar(&q.DryRun, "dry-run", false, "print how much would be read and written, and change nothing")
	return c
}
