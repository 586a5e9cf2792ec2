package cli

import (
	"context"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/base/units"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) setCommand() *cobra.Command {
	var ttl string
	c := &cobra.Command{
		Use:     "set VOLUME... --ttl DURATION|none",
		GroupID: "volumes",
		Short:   "Set how long volumes last",
		Long: `Set the time limit of each VOLUME, which counts from now: the first command after
it has passed destroys the volume, mounted or not, unless it is pinned or in use.
With --ttl none, the volume stays until somebody destroys it. VOLUME may be a
pattern. If any volume is unknown, nothing changes.

` + "`pando golden set`" + ` sets the properties of goldens, and ` + "`pando label set`" + ` labels.`,
		Example:           "  pando set job-17 --ttl 2h\n  pando set 'agent-*' --ttl none",
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: a.completeEvery(aVolume),
	}
	c.Flags().StringVar(&ttl, "ttl", "", "destroy the volume after this `DURATION`, for example 2h or 7d; none: never")

	c.RunE = a.withPool(func(ctx context.Context, e *engine.Engine, args []string) error {
		const op = "set"
		var d time.Duration // 0: no limit
		var err error
		switch {
		case !c.Flags().Changed("ttl"):
			return errs.New(errs.Invalid, op, args[0], "there is nothing to set").
				WithHint("add for example %s", errs.Param("ttl", "2h"))
		case ttl != "none":
			if d, err = units.ParseDuration(op, ttl); err != nil {
				return err
			}
		}

		what, err := choose(ctx, e, op, args, aVolume)
		if err != nil {
			return err
		}
		return doEach(ctx, a, what, "could not be set", func(r ref.Ref) (out api.Object, err error) {
			q := engine.ExpireRequest{TTL: d}
			if q.Volume, err = ref.ParseName(op, r.Name); err != nil {
				return out, err
			}
			return e.Expire(ctx, q)
		}, func(out api.Object) error {
			if out.ExpiresAt == nil {
				return a.printResult(nil, out.Name, "%s has no time limit\n", out.Name)
			}
			until := out.ExpiresAt.Local().Format("2006-01-02 15:04:05 MST")
			return a.printResult(nil, out.Name, "%s expires at %s\n", out.Name, until)
		})
	})
	return c
}
