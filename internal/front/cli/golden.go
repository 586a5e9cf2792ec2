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
		Long: `Manage goldens. A golden is a name for a series of generations. Generations are
immutable and numbered from 1. Exactly one is current: clones are made from it
unless the command names another (GOLDEN@N).`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}

	c.AddCommand(
		a.goldenImportCommand(),
		a.goldenPublishCommand(),
		a.goldenRefreshCommand(),
		a.goldenLsCommand(),
		a.goldenShowCommand(),
		a.goldenKeepCommand(),
		a.goldenSetCommand(),
		a.goldenRmCommand(),
	)

	return c
}
