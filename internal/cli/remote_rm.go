package cli

import (
	"context"

	"pando/internal/engine"
	"pando/internal/remote/replicate"

	"github.com/spf13/cobra"
)

func (a *App) remoteRmCommand() *cobra.Command {
	var q replicate.RemoveRequest
	c := &cobra.Command{
		Use:     "rm NAME",
		Aliases: []string{"remove"},
		Short:   "Forget a remote; what it holds stays",
		Long: `Makes this pool forget the remote NAME: its address, this pool's key to it, and
what was noted of pushes. Nothing of what was pushed is removed; with another key
the remote can be added again. This pool's key is taken out of the repository.

pando refuses (conflict) if no other key opens the repository, because its data would be
unreadable from then on. It refuses too if it cannot reach the repository to check that.
--force forgets the remote anyway.`,
		Args:              usage(cobra.ExactArgs(1)),
		ValidArgsFunction: a.completeRemotes,
		RunE: a.with(func(ctx context.Context, e *engine.Engine, args []string) error {
			access, err := a.remoteAccess()
			if err != nil {
				return err
			}

			q.Name, q.Access = args[0], access
			out, err := replicate.Forget(ctx, e, q)
			if err != nil {
				return a.knownRemotes(err)
			}
			if out.KeyError != nil {
				a.warn("this pool's key stays in the repository, where nobody can use it any more: %v", out.KeyError)
			}

			switch {
			case a.json:
				return a.printJSON(out)
			case a.quiet:
				return nil
			}

			return a.printf("forgot %s\n", out.Name)
		}),
	}

	c.Flags().BoolVar(&q.Force, "force", false, "also if no other key opens the repository, or it cannot be reached")
	return c
}
