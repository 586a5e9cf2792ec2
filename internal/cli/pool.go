package cli

import (
	"context"

	"pando/internal/base/progress"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) poolCommand() *cobra.Command {
	c := &cobra.Command{
		Use:     "pool",
		GroupID: "pool",
		Short:   "Manage the pool itself",
		Long:    `Manage the pool itself.`,
	}
	c.AddCommand(a.poolResizeCommand(), a.poolMoveCommand())
	return c
}

func (a *App) poolResizeCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "resize SIZE",
		Short: "Enlarge a pool that lies in a file, while it is in use",
		Long: `Enlarge the file of the pool to SIZE, for example 200G, and the filesystem on it.
Volumes may be in use. The file is sparse: it takes space only when data is
written. A pool cannot shrink.

Pools on ZFS, btrfs or XFS without a file of their own use the room of that
filesystem, and need no command.`,
		Example: "  pando pool resize 200G",
		Args:    cobra.ExactArgs(1),
		RunE: a.withPool(func(ctx context.Context, e *engine.Engine, args []string) error {
			size, err := parseSize("pool resize", args[0])
			if err != nil {
				return err
			}

			out, err := e.ResizePool(ctx, size)
			if err != nil {
				return err
			}
			return a.printResult(out, "", "%s  %s -> %s\n", out.Dir, formatBytes(out.BeforeBytes), formatBytes(out.SizeBytes))
		}),
	}
}

func (a *App) poolMoveCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "move DIR",
		Short: "Move a pool that lies in a file to another disk",
		Long: `Copy the pool to DIR, a new or empty directory, and then remove it here. Volumes
must be unmounted; commands that use the pool in the meantime fail. Snapshots,
goldens, sharing, remotes and keys stay as they are.

If it fails or is interrupted, the pool stays where it is. If pando is killed, the
next command that uses the pool undoes the move, or says that it is complete.

Use the pool with --pool DIR or PANDO_POOL=DIR afterwards. Pools on ZFS, btrfs or
XFS without a file of their own cannot be moved: push their volumes to a remote,
for example in a directory of the other disk, and pull them into a new pool.`,
		Example: "  pando pool move /mnt/nvme/pando",
		Args:    cobra.ExactArgs(1),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return nil, cobra.ShellCompDirectiveFilterDirs
		},
		RunE: func(c *cobra.Command, args []string) error {
			var tracker *progress.Tracker
			stop := a.showProgress(&tracker)
			out, err := engine.MovePool(c.Context(), a.poolDir(), args[0], a.Drivers, tracker)
			stop()
			if err != nil {
				return err
			}

			for _, w := range out.Warnings {
				a.printWarning("%s", w)
			}
			if err := a.printResult(out, "", "%s -> %s  %s copied\n", out.From, out.Dir, formatBytes(out.Bytes)); err != nil {
				return err
			}
			a.printNote("use it with --pool %s or PANDO_POOL=%s", out.Dir, out.Dir)
			return nil
		},
	}
}
