package cli

import (
	"context"
	"errors"
	"os"

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

With --group, all VOLUMEs get a snapshot of the same name and of one point in
time, for programs that keep their data in several volumes:

  pando snapshot VOLUME... --group [--name NAME]

pando freezes all mounted VOLUMEs at once before it copies the first of them, and
prints how long writes had to wait. Either all snapshots are taken or none. At
most one mounted VOLUME may be one that cannot be frozen: a btrfs subvolume, a
ZFS dataset, or a raw volume. With --no-freeze, pando only copies them soon after
each other: use it if --before stops the programs that write.

--before and --after run shell commands before anything is frozen and after all
is thawed, for example a checkpoint of a database. They find the names of the
volumes in PANDO_VOLUMES, separated by spaces, and that of the snapshots in
PANDO_SNAPSHOT. If --before fails, no snapshot is taken and --after does not run.
Otherwise --after always runs, with PANDO_RESULT=taken or PANDO_RESULT=failed. If
it fails, the snapshots stay, and the exit code is 12. Interrupting pando ends
the command of --before.

Snapshots can be cloned, compared, published and rewound to. Destroying the
volume destroys its snapshots.`

// snapshotOptions are the arguments and flags of a snapshot.
type snapshotOptions struct {
	volumes  []ref.Name
	name     ref.Name
	nameFlag string
	labels   driver.Labels
	group    bool
	hooks    engine.SnapshotHooks
	freeze   engine.Freeze
}

func (a *App) snapshotCommand() *cobra.Command {
	var o snapshotOptions
	var labels func() (driver.Labels, error)
	c := &cobra.Command{
		Use:     "snapshot VOLUME [NAME]",
		Aliases: []string{"snap"},
		GroupID: "volumes",
		Short:   "Take an immutable snapshot of a volume, even while it is in use",
		Long:    snapshotHelp,
		Example: "  pando snapshot job-17 before-upgrade\n  pando rewind job-17 before-upgrade\n" +
			"  pando snapshot data wal --group --name nightly --before 'psql -c checkpoint'",
		Args: cobra.MinimumNArgs(1),
		RunE: a.withCalls(func(ctx context.Context, e calls, args []string) error {
			err := o.parse(args)
			if err == nil {
				o.labels, err = labels()
			}
			if err != nil {
				return err
			}

			o.hooks.Env, o.hooks.Output = withoutSecrets(os.Environ()), a.Stderr // the result of pando is something else
			if o.group {
				return a.snapshotGroup(ctx, e, o)
			}
			return a.snapshotOne(ctx, e, o)
		}),
	}
	c.ValidArgsFunction = func(c *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
		n := 1
		if o.group {
			n = 0 // any number of them
		}
		return a.completeVolumes(n)(c, args, word)
	}

	f := c.Flags()
	f.BoolVar(&o.group, "group", false, "take snapshots of all VOLUMEs at one point in time")
	f.StringVar(&o.nameFlag, "name", "", "call the snapshots `NAME` (default: the current time)")
	f.StringVar(&o.hooks.Before, "before", "", "run `COMMAND` with sh first; if it fails, take no snapshot")
	f.StringVar(&o.hooks.After, "after", "", "run `COMMAND` with sh afterwards, even if the snapshot failed")
	freezeFlags(f, &o.freeze)
	labels = a.labelFlag(c, "snapshot", "the snapshot")
	return c
}

// parse parses the arguments.
func (o *snapshotOptions) parse(args []string) error {
	name := o.nameFlag
	if !o.group && len(args) > 1 {
		if len(args) > 2 {
			return errs.New(errs.Invalid, "snapshot", args[0], "too many arguments").
				WithHint("to snapshot several volumes at one point in time, add %s", errs.Param("group"))
		}
		if name != "" {
			return errs.New(errs.Invalid, "snapshot", args[0], "the name is given twice: %q and %q", args[1], name).
				WithHint("remove one of them; to snapshot several volumes, add %s", errs.Param("group"))
		}
		if name = args[1]; name == "" {
			return errs.New(errs.Invalid, "snapshot", `""`, "the name is empty").
				WithHint("remove the argument to name the snapshot after the current time")
		}
		args = args[:1]
	}

	for _, arg := range args {
		v, err := ref.ParseName("snapshot", arg)
		if err != nil {
			return err
		}
		o.volumes = append(o.volumes, v)
	}

	var err error
	if name != "" {
		o.name, err = ref.ParseName("snapshot", name)
	}

	return err
}

// snapshotOne takes a snapshot of one volume.
func (a *App) snapshotOne(ctx context.Context, e calls, o snapshotOptions) error {
	q := engine.SnapshotRequest{Volume: o.volumes[0], Name: o.name, Labels: o.labels, Freeze: o.freeze, Hooks: o.hooks}
	stop := a.showProgress(&q.Tracker)
	out, err := e.Snapshot(ctx, q)
	stop()
	if out.Name == "" {
		return err
	}
	return errors.Join(a.printResult(out, out.Name, "%s  %s\n", out.Name, out.Consistency), err)
}

// snapshotGroup takes snapshots of several volumes at one point in time.
func (a *App) snapshotGroup(ctx context.Context, e calls, o snapshotOptions) error {
	q := engine.SnapshotGroupRequest{Volumes: o.volumes, Name: o.name, Labels: o.labels, Freeze: o.freeze, Hooks: o.hooks}
	stop := a.showProgress(&q.Tracker)
	out, err := e.SnapshotGroup(ctx, q)
	stop()
	if len(out.Snapshots) == 0 {
		return err
	}

	if a.json {
		return errors.Join(a.printJSON(out), err)
	}

	width := 0
	for _, s := range out.Snapshots {
		width = max(width, len(s.Name))
	}
	for _, s := range out.Snapshots {
		_ = a.printResult(s, s.Name, "%-*s  %s\n", width, s.Name, s.Consistency) // Run reports what it could not write
	}
	if out.FrozenSeconds > 0 {
		a.printNote("writes were held back for %.0f ms", out.FrozenSeconds*1000)
	}

	return err
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
