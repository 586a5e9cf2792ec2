package cli

import (
	"context"
	"time"

	"pando/internal/api"
	"pando/internal/base/ref"
	"pando/internal/base/units"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) pinCommand() *cobra.Command {
	var span string
	c := &cobra.Command{
		Use:     "pin REF...",
		GroupID: "volumes",
		Short:   "Protect volumes, snapshots and generations from being destroyed",
		Long: `Protect what each REF names from destroy, prune, gc, --ttl and retention; only
` + "`pando deinit --force`" + ` destroys a pinned object. The pin ends when the duration
of --for has passed, or with ` + "`pando unpin`" + `.`,
		Example:           "  pando pin job-17 --for 2h\n  pando pin web@3 'release-*@*'",
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: a.completeEvery(anyRef),
	}

	c.Flags().StringVar(&span, "for", "", "pin for this `DURATION`, for example 2h or 7d (default: until unpinned)")

	c.RunE = a.withPool(func(ctx context.Context, e *engine.Engine, args []string) error {
		var d time.Duration // 0: until it is unpinned
		if c.Flags().Changed("for") {
			var err error
			if d, err = units.ParseDuration("pin", span); err != nil {
				return err
			}
		}

		what, err := choose(ctx, e, "pin", args, anyRef)
		if err != nil {
			return err
		}
		return doEach(ctx, a, what, "could not be pinned", func(r ref.Ref) (api.Object, error) {
			return e.Pin(ctx, engine.PinRequest{Ref: r, For: d})
		}, func(out api.Object) error {
			if out.PinnedUntil == nil {
				a.printNote("%s is pinned until you run `pando unpin %s`", out.Ref, out.Ref)
			} else {
				a.printNote("%s is pinned until %s", out.Ref, out.PinnedUntil.Local().Format("2006-01-02 15:04:05 MST"))
			}
			return nil
		})
	})

	return c
}

func (a *App) unpinCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "unpin REF...",
		GroupID: "volumes",
		Short:   "Remove pins",
		Long: `Remove the pin of each REF, so that it can be destroyed again. It is not an error
if a REF is not pinned.`,
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: a.completeEvery(anyRef),
		RunE: a.withPool(func(ctx context.Context, e *engine.Engine, args []string) error {
			what, err := choose(ctx, e, "unpin", args, anyRef)
			if err != nil {
				return err
			}
			return doEach(ctx, a, what, "could not be unpinned", func(r ref.Ref) (api.Object, error) { return e.Unpin(ctx, r) },
				func(api.Object) error { return nil })
		}),
	}
}
