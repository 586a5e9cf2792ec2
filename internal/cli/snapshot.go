package cli

import (
	"cmp"
	"context"
	"time"

	"pando/internal/engine"
	"pando/internal/errs"
	"pando/internal/progress"
	"pando/internal/ref"

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

func (a *App) rewindCommand() *cobra.Command {
	var detach bool
	c := &cobra.Command{
		Use:     "rewind VOLUME SNAPSHOT",
		GroupID: "volumes",
		Short:   "Make a volume what it was when a snapshot was taken",
		Long: `Makes VOLUME what it was when SNAPSHOT (a name, or VOLUME@NAME) was taken. What
it was before stays as a snapshot called before-rewind-TIME, so that nothing is
lost, and all other snapshots stay too.

A mounted volume is refused: programs must not see a filesystem change under
them. With --detach it is unmounted first, which still fails if something uses
it, and mounted again after.`,
		Args:              usage(cobra.ExactArgs(2)),
		ValidArgsFunction: a.completeSnapshots,
		RunE: a.with(func(ctx context.Context, e *engine.Engine, args []string) error {
			q, err := rewindRequest(args[0], args[1])
			if err != nil {
				return err
			}
			q.Detach = detach
			var out engine.Rewound
			err = a.track(func(t *progress.Tracker) (err error) {
				q.Tracker = t
				out, err = e.Rewind(ctx, q)
				return err
			})
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(out)
			}
			if a.quiet {
				return nil
			}
			return a.printf("%s is what it was; before: %s\n", out.Name, out.Before)
		}),
	}
	c.Flags().BoolVar(&detach, "detach", false, "unmount it first, and mount it again where it was")
	return c
}

// rewindRequest reads a volume, and a snapshot of it by its name or whole reference. Invalid, NotFound.
func rewindRequest(volume, snapshot string) (q engine.RewindRequest, err error) {
	r, err := ref.Parse("rewind", snapshot)
	if err != nil {
		return q, err
	}
	name := cmp.Or(r.At, r.Name)
	if r.At != "" && r.Name != volume {
		return q, errs.New(errs.Invalid, "rewind", volume, "%s is a snapshot of another volume", r).
			WithHint("make a volume of it: `pando clone %s NEW`", r)
	}
	if q.Snapshot, err = ref.ParseName("rewind", name); err != nil {
		return q, err
	}
	q.Volume, err = existingVolume("rewind", volume)
	return q, err
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

func (a *App) pinCommand() *cobra.Command {
	var span string
	c := &cobra.Command{
		Use:     "pin REF",
		GroupID: "volumes",
		Short:   "Keep a volume, snapshot or generation from being destroyed",
		Long: `Nothing destroys what is pinned: no destroy, prune, gc, ttl or retention, only
` + "`pando deinit --force`" + `. A pin ends after --for, or with ` + "`pando unpin`" + `.`,
		Example:           "  pando pin job-17 --for 2h\n  pando pin web@3",
		Args:              usage(cobra.ExactArgs(1)),
		ValidArgsFunction: a.completeRefs(1),
	}
	c.Flags().StringVar(&span, "for", "", "for this `DURATION`, for example 2h or 7d (default: until it is unpinned)")
	c.RunE = a.with(func(ctx context.Context, e *engine.Engine, args []string) error {
		r, err := ref.Parse("pin", args[0])
		if err != nil {
			return err
		}
		var d time.Duration // 0: until it is unpinned
		if c.Flags().Changed("for") {
			if d, err = parseTTL("pin", span); err != nil {
				return err
			}
		}
		out, err := e.Pin(ctx, r, d)
		if err != nil {
			return err
		}
		if a.json {
			return a.printJSON(out)
		}
		if d == 0 {
			a.note("%s is pinned until `pando unpin %s`", r, r)
		} else {
			a.note("%s is pinned until %s", r, out.PinnedUntil.Local().Format("2006-01-02 15:04:05 MST"))
		}
		return nil
	})
	return c
}

func (a *App) unpinCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "unpin REF",
		GroupID:           "volumes",
		Short:             "Undo pin",
		Args:              usage(cobra.ExactArgs(1)),
		ValidArgsFunction: a.completeRefs(1),
		RunE: a.with(func(ctx context.Context, e *engine.Engine, args []string) error {
			r, err := ref.Parse("unpin", args[0])
			if err != nil {
				return err
			}
			out, err := e.Unpin(ctx, r)
			if err != nil || !a.json {
				return err
			}
			return a.printJSON(out)
		}),
	}
}
