package cli

import (
	"context"

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
		ValidArgsFunction: a.completeArgs(aGeneration),
		RunE: a.withPool(func(ctx context.Context, e *engine.Engine, args []string) error {
			r, err := ref.Parse("golden show", args[0])
			if err != nil {
				return err
			}

			// Something else with this name has another command.
			what := engine.MatchRequest{Op: "golden show", What: []ref.Pattern{{Ref: r}}, Kinds: aGeneration}
			if _, err := e.Match(ctx, what); err != nil {
				return err
			}

			d, err := e.Show(ctx, r)
			if err != nil {
				return err
			}
			return a.printShown(ctx, e, r, d)
		}),
	}
	a.formatFlag(c)
	return c
}
