package cli

import (
	"context"

	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) goldenLsCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List goldens",
		Long: `List the goldens with their current generation, how many generations each keeps,
and how many volumes were cloned from it.`,
		Args: cobra.NoArgs,
		RunE: a.withPool(func(ctx context.Context, e *engine.Engine, _ []string) error {
			goldens, err := e.Goldens(ctx)
			if err != nil {
				return err
			}

			switch {
			case a.json:
				return a.printJSON(goldens)
			case a.quiet:
				for _, g := range goldens {
					a.printf("%s\n", g.Name)
				}
				return nil
			case len(goldens) == 0:
				a.printNote("no goldens; create one with `pando golden import NAME SOURCE`")
				return nil
			}

			t := a.table("NAME", "CURRENT", "GENERATIONS", "VOLUMES", "FS", "LOGICAL", "EXTENTS", "PUBLISHED")
			for _, g := range goldens {
				t.row(
					g.Name, itoa(g.Generation), itoa(g.Generations), itoa(g.Volumes), string(g.FS),
					formatBytes(g.LogicalBytes), itoa(int(g.Extents)), formatAge(g.CreatedAt),
				)
			}

			return t.flush()
		}),
	}
}
