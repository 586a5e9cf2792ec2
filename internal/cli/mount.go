package cli

import (
	"context"

	"pando/internal/engine"
	"pando/internal/ref"

	"github.com/spf13/cobra"
)

func (a *App) mountCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "mount VOLUME [DIR]",
		GroupID: "volumes",
		Short:   "Mount a volume at a directory, or below the pool",
		Long: `Mounts VOLUME at DIR, an empty directory (made if missing), or else at its place
below the pool, and prints where. A volume of --fs none becomes a block device.
Without root a volume of the plain driver is not mounted but linked.`,
		Example:           "  cd $(pando mount -q job-17)\n  pando mount job-17 /srv/job-17",
		Args:              usage(cobra.RangeArgs(1, 2)),
		ValidArgsFunction: a.completeVolumes(1),
		RunE: a.with(func(ctx context.Context, e *engine.Engine, args []string) error {
			if err := ref.CheckName("mount", args[0]); err != nil {
				return err
			}
			dir := ""
			if len(args) > 1 {
				dir = args[1]
			}
			v, err := e.Mount(ctx, args[0], dir)
			if err != nil {
				return err
			}
			switch {
			case a.json:
				return a.printJSON(v)
			case a.quiet:
				return a.printf("%s\n", v.Mountpoint)
			}
			return a.printf("%s  mounted at %s\n", v.Name, v.Mountpoint)
		}),
	}
}

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
			if err := ref.CheckName("umount", args[0]); err != nil {
				return err
			}
			v, err := e.Umount(ctx, args[0])
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
