package cli

import (
	"context"

	"pando/internal/base/errs"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) goldenKeepCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "keep GOLDEN N|all",
		Short: "Set how many generations a golden keeps",
		Long: `Keep the newest N generations of GOLDEN from now on. Older generations are
removed at once, and whenever a new one is published. Pinned generations stay.
Clones are not affected, but ` + "`pando rebase`" + ` needs the generation that a volume
was cloned from.`,
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: a.completeArgs(aGolden),
		RunE: a.withPool(func(ctx context.Context, e *engine.Engine, args []string) error {
			n, err := parseKeep("keep", args[1])
			if err != nil {
				return err
			}

			if n == nil {
				return errs.New(errs.Invalid, "keep", `""`, "the number of generations is empty").
					WithHint("use a number of at least 1, or all")
			}

			golden, err := goldenName(ctx, e, "keep", args[0])
			if err != nil {
				return err
			}

			removed, err := e.Keep(ctx, engine.KeepRequest{Golden: golden, Generations: *n})
			if err != nil {
				return err
			}

			if a.json {
				return a.printGoldenSet(ctx, e, golden, removed)
			}

			a.noteRemoved(removed)
			return nil
		}),
	}
}
