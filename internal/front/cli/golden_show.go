package cli

import (
	"context"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) goldenShowCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "show GOLDEN[@N]",
		Short: "Describe a golden and its generations",
		Long: `Describe GOLDEN and list its generations, or describe generation N, with figures
measured now.`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeGoldens,
		RunE: a.withPool(func(ctx context.Context, e *engine.Engine, args []string) error {
			r, err := ref.Parse("golden show", args[0])
			if err != nil {
				return err
			}

			d, err := e.Show(ctx, r)
			if err != nil {
				return err
			}

			if d.Kind != api.KindGeneration {
				return errs.New(errs.NotFound, "golden show", args[0], "this is a %s, not a golden", d.Kind).
					WithHint("run `pando show %s` to describe it", args[0])
			}

			return a.printShown(ctx, e, r, d)
		}),
	}
	a.formatFlag(c)
	return c
}
