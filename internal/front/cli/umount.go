package cli

import (
	"context"

	"pando/internal/base/ref"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) umountCommand() *cobra.Command {
	var discard bool
	c := &cobra.Command{
		Use:     "umount VOLUME",
		GroupID: "volumes",
		Short:   "Unmount a volume",
		Long: `Unmount VOLUME, and return the space of files deleted in it to the pool. If
something uses the volume, pando names the processes and mount namespaces and
leaves it mounted.

Data in memory is written to the pool first. If that fails, for example because
the pool is full, or if it has failed since VOLUME was mounted, umount fails and
VOLUME stays mounted, so that you can copy the data elsewhere. --discard gives it
up.`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeVolumes(1),
		RunE: a.withPool(func(ctx context.Context, e *engine.Engine, args []string) error {
			volume, err := ref.ParseName("umount", args[0])
			if err != nil {
				return err
			}

			v, err := e.Umount(ctx, engine.UmountRequest{Volume: volume, Discard: discard})
			if err != nil {
				return err
			}

			return a.printResult(v, "", "%s  not mounted\n", v.Name)
		}),
	}
	c.Flags().BoolVar(&discard, "discard", false, "give up data that could not be stored in the pool")
	return c
}
