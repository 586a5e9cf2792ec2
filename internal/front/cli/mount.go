package cli

import (
	"context"

	"pando/internal/base/ref"
	"pando/internal/engine"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// rightsFlags adds the flags of what a mounted volume may.
func rightsFlags(f *pflag.FlagSet, may *engine.Rights) {
	f.BoolVar(&may.Dev, "dev", false,
		"let device nodes in the volume open devices of this host, even where other users can reach it")
	f.BoolVar(&may.SUID, "suid", false,
		"let setuid and setgid bits in the volume take effect, even where other users can reach it")
}

func (a *App) mountCommand() *cobra.Command {
	var may engine.Rights
	var shell bool
	c := &cobra.Command{
		Use:     "mount VOLUME [DIR]",
		GroupID: "volumes",
		Short:   "Mount a volume at a directory or below the pool",
		Long: `Mount VOLUME at DIR and print the mount point. DIR must be empty; pando creates
it if it does not exist. Without DIR, the volume is mounted at its place below
the pool. A volume with --fs none is attached as a block device. Without root, a
volume of the plain driver is linked instead of mounted.

If users other than root can reach the mount point, the volume is mounted nosuid
and nodev, because its content could otherwise give them control of this host.
Allow both with --suid and --dev, for example for root filesystems and Docker's
data. Only root can reach the place below the pool.`,
		Example: "  cd $(pando mount -q job-17)\n  pando mount job-17 /srv/job-17\n  pando mount --dev --suid " +
			"rootfs /srv/rootfs",
		Args:              cobra.RangeArgs(1, 2),
		ValidArgsFunction: a.completeVolumes(1),
		RunE: a.withPool(func(ctx context.Context, e *engine.Engine, args []string) error {
			if err := a.checkShell("mount", shell, false); err != nil {
				return err
			}

			volume, err := ref.ParseName("mount", args[0])
			if err != nil {
				return err
			}

			q := engine.MountRequest{Volume: volume, May: may}
			if len(args) > 1 {
				q.Dir = args[1]
			}

			v, err := e.Mount(ctx, q)
			if err != nil {
				return err
			}

			if shell {
				return a.printShell(v)
			}
			return a.printResult(v, v.Mountpoint, "%s  mounted at %s\n", v.Name, v.Mountpoint)
		}),
	}

	rightsFlags(c.Flags(), &may)
	shellFlag(c, &shell)
	return c
}
