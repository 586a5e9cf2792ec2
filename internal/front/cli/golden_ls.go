package cli

import (
	"context"

	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) goldenLsCommand() *cobra.Command {
	c := &cobra.Command{
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
				c := g.Current
				t.row(
					g.Name, itoa(c.Generation), itoa(g.GenerationCount), itoa(g.VolumeCount), string(c.FS),
					formatBytes(c.LogicalBytes), itoa(int(c.Extents)), formatAge(c.CreatedAt),
				)
			}

			return t.flush()
		}),
	}
	a.formatFlag(c)
	return c
}
