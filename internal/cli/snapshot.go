package cli

import (
	"context"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) snapshotCommand() *cobra.Command {
	var q engine.SnapshotRequest
	c := &cobra.Command{
		Use:     "snapshot VOLUME [NAME]",
		Aliases: []string{"snap"},
		GroupID: "volumes",
		Short:   "Make an immutable snapshot of a volume, also while it is in use",
		Long: `Keeps VOLUME as it is now, as VOLUME@NAME (the time, if NAME is left out).
Programs may go on using VOLUME. Everything written before the command began is in
the snapshot, and its filesystem is consistent: all is put on the device, the
image is cloned in one step, and the log of the filesystem is replayed in the
clone. What programs write while the command runs is there as after a power loss:
what they synced is, in its order.

With --freeze their writes wait for a moment (some 30 ms), and the snapshot is one
moment also of what was not synced. Filesystems without a log (ext2) are always
frozen. The filesystem is always thawed again, even if pando is killed.

Each snapshot says what it is worth (` + "`pando show VOLUME@NAME`" + `):
  clean  whole and consistent, with nothing to replay
  crash  one moment of a filesystem in use, as after a power loss: --no-freeze, or
         a raw volume (--fs none) that is attached

Without reflinks (driver plain) a volume in use is copied; files that change
during the copy are copied again; if they never come to rest, pando refuses (conflict).

A snapshot can be cloned, compared, published and rewound to; it goes with its
volume.`,
		Example:           "  pando snapshot job-17 before-upgrade\n  pando rewind job-17 before-upgrade",
		Args:              usage(cobra.RangeArgs(1, 2)),
		ValidArgsFunction: a.completeVolumes(1),
		RunE: a.with(func(ctx context.Context, e *engine.Engine, args []string) (err error) {
			if q.Volume, err = ref.ParseName("snapshot", args[0]); err != nil {
				return err
			}

			if len(args) > 1 {
				if args[1] == "" {
					return errs.New(errs.Invalid, "snapshot", `""`, "the name is empty").
						WithHint("leave it out to get the time")
				}
				if q.Name, err = ref.ParseName("snapshot", args[1]); err != nil {
					return err
				}
			}

			var out engine.Info
			err = a.track(func(t *progress.Tracker) (err error) {
				q.Tracker = t
				out, err = e.Snapshot(ctx, q)
				return err
			})
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(out)
			}
			if a.quiet {
				return a.printf("%s\n", out.Name)
			}

			return a.printf("%s  %s\n", out.Name, out.Consistency)
		}),
	}

	freezeFlags(c.Flags(), &q.Freeze)
	return c
}

// existingVolume reads the name of a volume that has to be there. NotFound if it cannot be a name: then there is no
// such volume. Other verbs call that Invalid; flatten, iostat and rewind have always called it NotFound, and their
// exit codes stay as they are.
func existingVolume(op, s string) (ref.Name, error) {
	name, err := ref.ParseName(op, s)
	if err != nil {
		return ref.Name{}, errs.New(errs.NotFound, op, s, "there is no such volume").WithHint("see `pando ls`")
	}
	return name, nil
}
