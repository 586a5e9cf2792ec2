package cli

import (
	"cmp"
	"context"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) rewindCommand() *cobra.Command {
	var detach bool
	c := &cobra.Command{
		Use:     "rewind VOLUME SNAPSHOT",
		GroupID: "volumes",
		Short:   "Return a volume to the state of a snapshot",
		Long: `Return VOLUME to its state in SNAPSHOT (a name, or VOLUME@NAME). The previous
content stays as the snapshot before-rewind-TIME, and all other snapshots stay
too.

The volume must not be mounted, because programs must not see a filesystem
change under them. With --detach, pando unmounts it first, which fails if
something uses it, and mounts it again afterwards.`,
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: a.completeSnapshots,
		RunE: a.withPool(func(ctx context.Context, e *engine.Engine, args []string) error {
			q, err := rewindRequest(args[0], args[1])
			if err != nil {
				return err
			}

			q.Detach = detach
			ctx, stop := a.showProgress(ctx)
			out, err := e.Rewind(ctx, q)
			stop()
			if err != nil {
				return err
			}
			return a.printResult(out, "", "%s rewound; previous content: %s\n", out.Name, out.Before)
		}),
	}

	c.Flags().BoolVar(&detach, "detach", false, "unmount the volume first, and mount it again afterwards")
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
			WithHint("clone that snapshot instead: `pando clone %s NEW`", r)
	}

	if q.Snapshot, err = ref.ParseName("rewind", name); err != nil {
		return q, err
	}

	q.Volume, err = existingVolume("rewind", volume)
	return q, err
}
