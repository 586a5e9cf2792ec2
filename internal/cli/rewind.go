package cli

import (
	"cmp"
	"context"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) rewindCommand() *cobra.Command {
	var detach bool
	c := &cobra.Command{
		Use:     "rewind VOLUME SNAPSHOT",
		GroupID: "volumes",
		Short:   "Make a volume what it was when a snapshot was taken",
		Long: `Makes VOLUME what it was when SNAPSHOT (a name, or VOLUME@NAME) was taken. What
it was before stays as a snapshot called before-rewind-TIME, so that nothing is
lost, and all other snapshots stay too.

A mounted volume is refused: programs must not see a filesystem change under
them. With --detach it is unmounted first, which still fails if something uses
it, and mounted again after.`,
		Args:              usage(cobra.ExactArgs(2)),
		ValidArgsFunction: a.completeSnapshots,
		RunE: a.with(func(ctx context.Context, e *engine.Engine, args []string) error {
			q, err := rewindRequest(args[0], args[1])
			if err != nil {
				return err
			}

			q.Detach = detach
			var out engine.Rewound
			err = a.track(func(t *progress.Tracker) (err error) {
				q.Tracker = t
				out, err = e.Rewind(ctx, q)
				return err
			})
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(out)
			}
			if a.quiet {
				return nil
			}

			return a.printf("%s is what it was; before: %s\n", out.Name, out.Before)
		}),
	}

	c.Flags().BoolVar(&detach, "detach", false, "unmount it first, and mount it again where it was")
	return c
}

// rewindRequest reads a volume, and a snapshot of it by its name or whole reference. Invalid, NotFound.
func rewindRequest(volume, snapshot string) (q engine.RewindRequest, err error) {
	r, err := ref.Parse("rewind", snapshot)
	if err != nil {
		return q, err
	}

	name := cmp.Or(r.At, r.Name)
	if r.At != "" && r.Name != volume {
		return q, errs.New(errs.Invalid, "rewind", volume, "%s is a snapshot of another volume", r).
			WithHint("make a volume of it: `pando clone %s NEW`", r)
	}

	if q.Snapshot, err = ref.ParseName("rewind", name); err != nil {
		return q, err
	}

	q.Volume, err = existingVolume("rewind", volume)
	return q, err
}
