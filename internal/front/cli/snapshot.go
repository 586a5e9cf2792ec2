package cli

import (
	"context"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

// snapshotHelp is the text of `pando snapshot --help`.
const snapshotHelp = `Keep the current state of VOLUME as VOLUME@NAME (default: the current time).
Programs may go on using VOLUME. The snapshot contains everything written before
the command began, and its filesystem is consistent: pando flushes all data to
the device, clones the image in one step, and replays the log of the filesystem
in the clone. Writes that programs make while the command runs are in the
snapshot as they would be after a power loss: everything synced is there, in the
order in which it was synced.

With --freeze, pando holds back writes for about 30 ms, and the snapshot is a
single point in time even for data that was not synced. Filesystems without a
log (ext2) are always frozen. The filesystem is always thawed again, even if
pando is killed.

` + "`pando show VOLUME@NAME`" + ` shows the consistency of a snapshot:

  clean  complete and consistent; no log is left to replay
  crash  one point in time of a filesystem in use, as after a power loss: with
         --no-freeze, or of an attached raw volume (--fs none)

Pools without reflinks (driver plain) copy a volume in use, and copy files again
that change during the copy. If the volume does not stop changing, pando fails
(conflict).

Snapshots can be cloned, compared, published and rewound to. Destroying the
volume destroys its snapshots.`

func (a *App) snapshotCommand() *cobra.Command {
	var q engine.SnapshotRequest
	var labels func() (driver.Labels, error)
	c := &cobra.Command{
		Use:               "snapshot VOLUME [NAME]",
		Aliases:           []string{"snap"},
		GroupID:           "volumes",
		Short:             "Take an immutable snapshot of a volume, even while it is in use",
		Long:              snapshotHelp,
		Example:           "  pando snapshot job-17 before-upgrade\n  pando rewind job-17 before-upgrade",
		Args:              cobra.RangeArgs(1, 2),
		ValidArgsFunction: a.completeVolumes(1),
		RunE: a.withPool(func(ctx context.Context, e *engine.Engine, args []string) (err error) {
			if q.Volume, err = ref.ParseName("snapshot", args[0]); err != nil {
				return err
			}

			if len(args) > 1 {
				if args[1] == "" {
					return errs.New(errs.Invalid, "snapshot", `""`, "the name is empty").
						WithHint("remove the argument to name the snapshot after the current time")
				}
				if q.Name, err = ref.ParseName("snapshot", args[1]); err != nil {
					return err
				}
			}

			if q.Labels, err = labels(); err != nil {
				return err
			}

			ctx, stop := a.showProgress(ctx)
			out, err := e.Snapshot(ctx, q)
			stop()
			if err != nil {
				return err
			}
			return a.printResult(out, out.Ref, "%s  %s\n", out.Ref, out.Consistency)
		}),
	}

	freezeFlags(c.Flags(), &q.Freeze)
	labels = a.labelFlag(c, "snapshot", "the snapshot")
	return c
}

// existingVolume parses the name of an existing volume. NotFound, in the words of the engine, if s cannot be a name:
// no volume has it then. Other verbs call that Invalid; flatten, iostat and rewind have always called it NotFound, and
// their exit codes stay as they are.
func existingVolume(op, s string) (ref.Name, error) {
	name, err := ref.ParseName(op, s)
	if err != nil {
		return ref.Name{}, errs.New(errs.NotFound, op, s, "no volume has this name").
			WithHint("list volumes with %s", errs.Run("ls"))
	}
	return name, nil
}
