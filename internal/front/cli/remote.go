package cli

import (
	"context"
	"strings"
	"time"

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

// completionTime limits how long completion waits for a remote.
const completionTime = 5 * time.Second

// completeOnRemote completes the name of a remote and then its volumes, in the first n arguments (0: all).
func (a *App) completeOnRemote(n int) completer {
	return func(c *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
		if len(args) == 0 {
			return a.completeRemotes(c, args, word)
		}
		if n > 0 && len(args) >= n {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}

		ctx := c.Context()
		if ctx == nil {
			ctx = context.Background()
		}

		ctx, cancel := context.WithTimeout(ctx, completionTime)
		defer cancel()

		r, err := a.findRemote("complete", args[0])
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}

		l, err := replicate.Volumes(ctx, r)
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}

		defer l.Close()

		var out []string
		name, _, point := strings.Cut(word, "@")
		for _, v := range l.Volumes {
			out = append(out, v.Name)
			if point && v.Name == name {
				for p, err := range l.Points(ctx, &v) {
					if err != nil {
						break
					}
					out = append(out, v.Name+"@"+p.Name)
				}
			}
		}

		return out, cobra.ShellCompDirectiveNoFileComp
	}
}
