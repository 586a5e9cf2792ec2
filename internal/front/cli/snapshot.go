package cli

import (
	"cmp"
	"context"
	"strings"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

// snapshotHelp is the text of `pando snapshot --help`.
const snapshotHelp = `Keep the current state of VOLUME as VOLUME@NAME (default: the current time).
Several volumes can be named as VOLUME@NAME or by quoted globs; of two words, the
second is a NAME. If any volume is unknown, no snapshot is taken.

Programs may go on using VOLUME. The snapshot contains everything written before
the command began, and its filesystem is consistent: pando flushes all data to
the device, clones the image in one step, and replays the log of the filesystem
in the clone. Writes that programs make while the command runs are in the
snapshot as they would be after a power loss: everything synced is there, in the
order in which it was synced.

With --freeze, pando holds back writes for about 30 ms, and the snapshot is a
single point in time even for data that was not synced. Filesystems without a
log (ext2) and ephemeral overlays are always frozen. The filesystem is always
thawed again, even if pando is killed. Trees of files on btrfs and plain pools
and raw volumes cannot be frozen.

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
		Use:     "snapshot VOLUME[@NAME]... | VOLUME NAME",
		Aliases: []string{"snap"},
		GroupID: "volumes",
		Short:   "Take immutable snapshots of volumes, even while they are in use",
		Long:    snapshotHelp,
		Example: "  pando snapshot job-17@before-upgrade\n  pando rewind job-17@before-upgrade\n" +
			"  pando snapshot 'agent-*' nightly",
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: a.completeEvery(aVolume),
		RunE: a.withPool(func(ctx context.Context, e *engine.Engine, args []string) (err error) {
			if q.Labels, err = labels(); err != nil {
				return err
			}

			what, err := snapshotsToTake(ctx, e, args)
			if err != nil {
				return err
			}

			return doEach(ctx, a, what, "could not be taken", func(r ref.Ref) (out api.Object, err error) {
				if q.Volume, err = ref.ParseName("snapshot", r.Name); err != nil {
					return out, err
				}
				if q.Name = (ref.Name{}); r.At != "" {
					if q.Name, err = ref.ParseName("snapshot", r.At); err != nil {
						return out, err
					}
				}
				ctx, stop := a.showProgress(ctx)
				defer stop()
				return e.Snapshot(ctx, q)
			}, func(out api.Object) error {
				return a.printResult(nil, out.Ref, "%s  %s\n", out.Ref, out.Consistency)
			})
		}),
	}

	freezeFlags(c.Flags(), &q.Freeze)
	labels = a.labelFlag(c, "snapshot", "the snapshot")
	return c
}

// snapshotsToTake returns the references that snapshots are to have; those without an @ get the current time as their
// name. Invalid, NotFound.
func snapshotsToTake(ctx context.Context, e *engine.Engine, args []string) (chosen, error) {
	// Two words are a volume, or a glob, and a name.
	name := ""
	if len(args) == 2 && !strings.Contains(args[0]+args[1], "@") && !ref.IsGlob(args[1]) {
		if args[1] == "" {
			return chosen{}, errs.New(errs.Invalid, "snapshot", `""`, "the name is empty").
				WithHint("remove the argument to name the snapshot after the current time")
		}
		if err := ref.CheckName("snapshot", args[1]); err != nil {
			return chosen{}, err
		}
		args, name = args[:1], args[1]
	}

	// Find the volumes, each with the name that its snapshot gets.
	out := chosen{many: len(args) > 1 || ref.IsGlob(args[0])}
	for _, word := range args {
		volume, at, has := strings.Cut(word, "@")
		if has {
			if err := ref.CheckName("snapshot", at); err != nil {
				return chosen{}, err
			}
		}
		p, err := ref.ParsePattern("snapshot", volume)
		found := []ref.Ref{p.Ref}
		if err == nil && out.many {
			found, err = e.Match(ctx, engine.MatchRequest{Op: "snapshot", What: []ref.Pattern{p}, Kinds: aVolume})
		}
		if err != nil {
			return chosen{}, err
		}
		for _, r := range found {
			out.refs = append(out.refs, ref.Ref{Name: r.Name, At: cmp.Or(at, name)})
		}
	}
	return out, nil
}
