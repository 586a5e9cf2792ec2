package cli

import (
	"github.com/spf13/cobra"
)

func (a *App) goldenCommand() *cobra.Command {
	c := &cobra.Command{
		Use:     "golden",
		Aliases: []string{"goldens"},
		GroupID: "goldens",
		Short:   "Import, publish, list and remove goldens",
		Long: `A golden is a name for a series of generations. A generation is immutable and
numbered from 1; clones are made from the current one unless another is named
(GOLDEN@N).`,
		Args: usage(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}

	c.AddCommand(
		a.goldenImportCommand(),
		a.goldenPublishCommand(),
		a.goldenLsCommand(),
		a.goldenShowCommand(),
		a.goldenKeepCommand(),
		a.goldenRmCommand(),
	)

	return c
}
