package cli

import (
	"context"
	"strings"

	"pando/internal/base/units"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) resizeCommand() *cobra.Command {
	var q engine.ResizeRequest
	return &cobra.Command{
		Use:     "resize VOLUME [+]SIZE",
		GroupID: "volumes",
		Short:   "Enlarge a volume, even while it is in use",
		Long: `Enlarge the block device of VOLUME to SIZE, for example 64G, or by SIZE if that
begins with a plus, and the filesystem on it. VOLUME may be mounted: programs see
more free space, and need not stop. Space is used only when it is written to.

A volume cannot shrink. So a size that the filesystem cannot grow to, that is
larger than 64 times the pool, or whose tables do not fit into the pool, is
refused, and the largest size that works is named. If the filesystem does not
grow, the volume keeps its size.

Snapshots and goldens keep their size. A rewind to a smaller snapshot keeps the
size of the volume. Volumes that are trees (drivers btrfs and plain) share the
space of the pool and have no size; overlays can be resized after a flatten.`,
		Example:           "  pando resize job-17 64G\n  pando resize job-17 +16G",
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: a.completeArgs(aVolume),
		RunE: func(c *cobra.Command, args []string) (err error) {
			size, add := strings.CutPrefix(args[1], "+")
			q.Add = add
			if q.SizeBytes, err = units.ParseSize("resize", size); err != nil {
				return err
			}

			return a.withPool(func(ctx context.Context, e *engine.Engine, _ []string) (err error) {
				if q.Volume, err = volumeName(ctx, e, "resize", args[0]); err != nil {
					return err
				}
				ctx, stop := a.showProgress(ctx)
				out, err := e.Resize(ctx, q)
				stop()
				if err != nil {
					return err
				}
				return a.printResult(out, "", "%s  %s -> %s\n", out.Name, formatBytes(out.BeforeBytes),
					formatBytes(out.SizeBytes))
			})(c, args)
		},
	}
}
