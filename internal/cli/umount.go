package cli

import (
	"context"

	"pando/internal/base/ref"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) umountCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "umount VOLUME",
		GroupID: "volumes",
		Short:   "Unmount a volume",
		Long: `Unmount VOLUME, and return the space of files deleted in it to the pool. If
something uses the volume, pando names the processes and mount namespaces and
leaves it mounted.

Data in memory is written to the pool first. If that fails because the pool is
full, umount fails and VOLUME stays mounted, so that you can copy the data
elsewhere. Running umount a second time discards it.`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeVolumes(1),
		RunE: a.withCalls(func(ctx context.Context, e calls, args []string) error {
			volume, err := ref.ParseName("umount", args[0])
			if err != nil {
				return err
			}

			v, err := e.Umount(ctx, engine.UmountRequest{Volume: volume})
			if err != nil {
				return err
			}

			return a.printResult(v, "", "%s  not mounted\n", v.Name)
		}),
	}
}
