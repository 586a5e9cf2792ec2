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
		Use:     "rewind VOLUME@SNAPSHOT | VOLUME SNAPSHOT",
		GroupID: "volumes",
		Short:   "Return a volume to the state of a snapshot",
		Long: `Return VOLUME to its state in SNAPSHOT. The previous
content stays as the snapshot before-rewind-TIME, and all other snapshots stay
too.

The volume must not be mounted, because programs must not see a filesystem
change under them. With --detach, pando unmounts it first, which fails if
something uses it, and mounts it again afterwards.`,
		Example:           "  pando rewind job-17@before-upgrade",
		Args:              cobra.RangeArgs(1, 2),
		ValidArgsFunction: a.completeRewind,
		RunE: a.withPool(func(ctx context.Context, e *engine.Engine, args []string) error {
			q, err := rewindRequest(ctx, e, args)
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

// rewindRequest reads a snapshot: its reference, or its volume and then its name or reference. Invalid, NotFound.
func rewindRequest(ctx context.Context, e *engine.Engine, args []string) (q engine.RewindRequest, err error) {
	r, err := ref.Parse("rewind", args[len(args)-1])
	if err != nil {
		return q, err
	}

	if len(args) == 1 {
		if r.At == "" {
			return q, errs.New(errs.Invalid, "rewind", args[0], "no snapshot is named").
				WithHint("name one as %s@SNAPSHOT; list them with %s", r.Name, errs.Run("show", r.Name))
		}
		if q.Snapshot, err = ref.ParseName("rewind", r.At); err != nil {
			return q, err
		}
		q.Volume, err = ref.ParseName("rewind", r.Name)
		return q, err
	}

	if q.Volume, err = volumeName(ctx, e, "rewind", args[0]); err != nil {
		return q, err
	}
	if r.At != "" && r.Name != args[0] {
		return q, errs.New(errs.Invalid, "rewind", args[0], "%s is a snapshot of another volume", r).
			WithHint("clone that snapshot instead: %s", errs.Run("clone", r, "NEW"))
	}
	q.Snapshot, err = ref.ParseName("rewind", cmp.Or(r.At, r.Name))
	return q, err
}
