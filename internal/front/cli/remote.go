package cli

import (
	"pando/internal/remote/replicate"

	"github.com/spf13/cobra"
)

func (a *App) remoteCommand() *cobra.Command {
	c := &cobra.Command{
		Use:     "remote",
		Aliases: []string{"remotes"},
		GroupID: "remotes",
		Short:   "Manage remotes",
		Long: `Manage remotes. A remote is an encrypted repository in object storage or in a
directory, to which volumes and goldens are pushed and from which they are
pulled. All data is encrypted and authenticated on this host before it is
uploaded: the operator of the storage sees neither contents nor names.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}

	c.AddCommand(
		a.remoteAddCommand(),
		a.remoteLsCommand(),
		a.remoteRmCommand(),
		a.remoteDeleteCommand(),
		a.remotePruneCommand(),
		a.remoteRepairCommand(),
		a.remoteWriterCommand(),
		a.remoteKeyCommand(),
	)

	return c
}

// completeRemotes completes the name of a remote, once.
func (a *App) completeRemotes(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	all, err := replicate.List(a.poolDir())
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return all, cobra.ShellCompDirectiveNoFileComp
}
