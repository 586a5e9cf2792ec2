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
		Long: `Unmounts VOLUME and gives the space of files that were deleted in it back to the
pool. If something uses it, the processes and mount namespaces are named.

What is in memory is written to the pool first. If some of it cannot be, because the pool
is full, umount fails and VOLUME stays mounted, so that it can be copied elsewhere. A
second umount gives it up.`,
		Args:              usage(cobra.ExactArgs(1)),
		ValidArgsFunction: a.completeVolumes(1),
		RunE: a.with(func(ctx context.Context, e *engine.Engine, args []string) error {
			volume, err := ref.ParseName("umount", args[0])
			if err != nil {
				return err
			}

			v, err := e.Umount(ctx, engine.UmountRequest{Volume: volume})
			if err != nil {
				return err
			}

			switch {
			case a.json:
				return a.printJSON(v)
			case a.quiet:
				return nil
			}

			return a.printf("%s  not mounted\n", v.Name)
		}),
	}
}
