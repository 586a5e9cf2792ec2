package cli

import (
	"context"
	"errors"

	"pando/internal/base/ref"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) goldenRmCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "rm GOLDEN[@N]",
		Aliases: []string{"remove"},
		Short:   "Remove a golden, or a generation that is not current",
		Long: `Remove GOLDEN with all its generations, or only generation N. Clones are not
affected: they keep every block that they use.`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeGoldens,
		RunE: a.withPool(func(ctx context.Context, e *engine.Engine, args []string) error {
			r, err := ref.Parse("golden rm", args[0])
			if err != nil {
				return err
			}
			report, err := e.RemoveGolden(ctx, r)
			if report == nil {
				return err
			}
			return errors.Join(a.printDestroyed(report), err)
		}),
	}
}
