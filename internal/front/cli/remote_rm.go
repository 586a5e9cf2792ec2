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
		Short:   "Forget a remote, and keep its data",
		Long: `Forget the remote NAME: its address, this pool's key, and the records of pushes.
pando also removes this pool's key from the repository. Data on the remote
stays; with another key, the remote can be added again.

The command fails (conflict) if no other key opens the repository, because its
data would then be unreadable, and if pando cannot reach the repository to check
that. With --force, the pool's copy of the list of keys is enough. Give up what
nobody can read afterwards with --force --lose-keys.`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeRemotes,
		RunE: a.withPool(func(ctx context.Context, e *engine.Engine, args []string) error {
			access, err := a.remoteAccess()
			if err != nil {
				return err
			}

			q.Name = args[0]
			out, err := replicate.Forget(ctx, e, q, access)
			if err != nil {
				return err
			}

			if out.KeyError != nil {
				a.printWarning("could not remove this pool's key from the repository; the key no longer works without the "+
					"pool's copy: %v", out.KeyError)
			}

			return a.printResult(out, "", "forgot %s\n", out.Name)
		}),
	}

	c.Flags().BoolVar(&q.Force, "force", false, "forget the remote even if it cannot be reached")
	c.Flags().BoolVar(&q.LoseKeys, "lose-keys", false,
		"with --force: even if nobody can read the remote afterwards, or it is not known who can")
	return c
}
