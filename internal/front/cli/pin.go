package cli

import (
	"context"
	"time"

	"pando/internal/base/ref"
	"pando/internal/base/units"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) pinCommand() *cobra.Command {
	var span string
	c := &cobra.Command{
		Use:     "pin REF",
		GroupID: "volumes",
		Short:   "Protect a volume, snapshot or generation from being destroyed",
		Long: `Protect REF from destroy, prune, gc, --ttl and retention; only
` + "`pando deinit --force`" + ` destroys a pinned object. The pin ends when the duration
of --for has passed, or with ` + "`pando unpin`" + `.`,
		Example:           "  pando pin job-17 --for 2h\n  pando pin web@3",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeRefs(1),
	}

	c.Flags().StringVar(&span, "for", "", "pin for this `DURATION`, for example 2h or 7d (default: until unpinned)")

	c.RunE = a.withPool(func(ctx context.Context, e *engine.Engine, args []string) error {
		r, err := ref.Parse("pin", args[0])
		if err != nil {
			return err
		}

		var d time.Duration // 0: until it is unpinned
		if c.Flags().Changed("for") {
			if d, err = units.ParseDuration("pin", span); err != nil {
				return err
			}
		}

		out, err := e.Pin(ctx, engine.PinRequest{Ref: r, For: d})
		if err != nil {
			return err
		}
		if a.json {
			return a.printJSON(out)
		}

		if out.PinnedUntil == nil {
			a.printNote("%s is pinned until you run `pando unpin %s`", r, r)
		} else {
			a.printNote("%s is pinned until %s", r, out.PinnedUntil.Local().Format("2006-01-02 15:04:05 MST"))
		}

		return nil
	})

	return c
}

func (a *App) unpinCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "unpin REF",
		GroupID: "volumes",
		Short:   "Remove a pin",
		Long: `Remove the pin of REF, so that it can be destroyed again. It is not an error if
REF is not pinned.`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeRefs(1),
		RunE: a.withPool(func(ctx context.Context, e *engine.Engine, args []string) error {
			r, err := ref.Parse("unpin", args[0])
			if err != nil {
				return err
			}
			out, err := e.Unpin(ctx, r)
			if err != nil || !a.json {
				return err
			}
			return a.printJSON(out)
		}),
	}
}
