package cli

import (
	"context"
	"strings"

	"pando/internal/base/units"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) poolCommand() *cobra.Command {
	c := &cobra.Command{
		Use:     "pool",
		GroupID: "pool",
		Short:   "Manage the pool itself",
		Long:    `Manage the pool itself: its size.`,
		Args:    cobra.NoArgs,
		RunE:    func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(a.poolResizeCommand())
	return c
}

func (a *App) poolResizeCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "resize [+]SIZE",
		Short: "Enlarge a pool that lies in a file, while it is in use",
		Long: `Enlarge the file of the pool to SIZE, for example 200G, or by SIZE if that begins
with a plus, and the filesystem on it. Volumes may be in use: programs that write
to them wait for some milliseconds. The file is sparse: it takes space only when
data is written.

A pool cannot shrink. So a size that its filesystem cannot grow to, or for which
the filesystem below has no space now, is refused, and the largest size that
works is named. If the command is interrupted, the pool has its old size or the
new one, and running it again completes it.

Pools on ZFS, btrfs or XFS without a file of their own use the space of that
filesystem, and need no command.`,
		Example:           "  pando pool resize 200G\n  pando pool resize +50G",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(c *cobra.Command, args []string) error {
			text, add := strings.CutPrefix(args[0], "+")
			size, err := units.ParseSize("pool resize", text)
			if err != nil {
				return err
			}

			return a.withPool(func(ctx context.Context, e *engine.Engine, _ []string) error {
				out, err := e.ResizePool(ctx, engine.PoolResizeRequest{SizeBytes: size, Add: add})
				if err != nil {
					return err
				}
				return a.printResult(out, "", "%s  %s -> %s\n", out.Dir, formatBytes(out.BeforeBytes),
					formatBytes(out.SizeBytes))
			})(c, args)
		},
	}
}
