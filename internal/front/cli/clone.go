package cli

import (
	"context"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/base/units"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) cloneCommand() *cobra.Command {
	return a.configureClone(&cobra.Command{
		Use:     "clone REF VOLUME",
		GroupID: "volumes",
		Short:   "Create a private, writable volume from a golden, a snapshot or a volume",
		Long: `Create VOLUME from REF: GOLDEN (its current generation), GOLDEN@N,
VOLUME@SNAPSHOT, or another VOLUME, even while that is in use (see
` + "`pando fork --help`" + `). The new volume shares all blocks with its origin until
either is written to. Neither sees the changes of the other, and they can be
destroyed in any order.

With --overlay, the volume holds only what differs from the golden. All overlays
of a golden read one copy of its files in memory, so many of them start fast.
docs/choosing.md compares them with other volumes.

Of a golden that was imported from git, --git-ref checks out a branch, tag or
commit in the new volume, and fetches what the golden does not have of it.

With --count N, pando creates VOLUME-1 to VOLUME-N: either all of them or none.

With --mount, each new volume is also mounted; ` + "`pando mount --help`" + ` explains
--dev, --suid and --owner.

With --label, each new volume gets labels (` + "`pando label --help`" + `). Those of REF are
not copied.`,
		Example: `  pando clone web job-17
  pando clone web job-17 --mount /srv/job-17
  pando clone web agent --count 100 --overlay --mount
  pando clone repo fix-123 --git-ref release-2 --mount
  pando clone web@3 old --size 200G --ttl 2h
  pando clone web job-19 --label team=search --label ticket=4711
  eval "$(pando clone web job-18 --mount --shell)"; cd "$PANDO_MOUNT"`,
		ValidArgsFunction: a.completeArgs(anyRef),
	}, "clone", (*engine.Engine).Clone)
}

func (a *App) forkCommand() *cobra.Command {
	return a.configureClone(&cobra.Command{
		Use:     "fork VOLUME NEW",
		GroupID: "volumes",
		Short:   "Create a volume from another volume, even while it is in use",
		Long: `Create NEW from the current state of VOLUME while programs go on using VOLUME.
NEW contains everything written before the command began, and its filesystem is
consistent. Writes that programs make while the command runs are in NEW as they
would be after a power loss: everything synced is there, in the order in which
it was synced. With --freeze, pando holds back writes for about 30 ms, and NEW
is a single point in time even for data that was not synced.

Pools without reflinks (driver plain) copy VOLUME, and copy files again that
change during the copy. If the volume does not stop changing, the fork fails
(conflict).`,
		Example:           "  pando fork agent-1 agent-1b --mount\n  pando fork db db-copy --no-freeze",
		ValidArgsFunction: a.completeArgs(aVolume),
	}, "fork", (*engine.Engine).Fork)
}

// configureClone adds to a command what clone and fork have in common.
func (a *App) configureClone(
	c *cobra.Command, op string, run func(*engine.Engine, context.Context, engine.CloneRequest) ([]api.Object, error),
) *cobra.Command {
	var q engine.CloneRequest
	var sizeFlag, ttl string
	var at gitRef
	c.Args = cobra.ExactArgs(2)
	f := c.Flags()
	f.IntVar(&q.Count, "count", 0, "create `N` volumes, VOLUME-1 to VOLUME-N, at most 100,000 (default: one, VOLUME)")
	f.StringVar(&q.MountDir, "mount", "",
		"mount the volume at `DIR` (with --count: at DIR/VOLUME-i); without DIR, below the pool")
	f.StringVar(&sizeFlag, "size", "",
		"grow the volume and its filesystem to `SIZE` bytes, for example 200G (default: the size of the origin)")
	f.StringVar(&ttl, "ttl", "", "destroy the volume after this `DURATION`, for example 2h or 7d (default: never)")
	f.BoolVar(&q.Ephemeral, "ephemeral", false, "do not wait for the disk; the volume does not survive a reboot")
	if op == "clone" {
		f.BoolVar(&q.Overlay, "overlay", false,
			"hold only what differs from the golden: all its overlays share its files in memory (default: as the golden says)")
		at.addFlags(f)
	}
	rightsFlags(f, &q.May)
	owner := ownerFlag(f, op)
	freezeFlags(f, &q.Freeze)
	labels := a.labelFlag(c, op, "each volume")
	var shell bool

	c.RunE = func(c *cobra.Command, args []string) (err error) {
		many := c.Flags().Changed("count")
		if err := a.checkShell(op, shell, many); err != nil {
			return err
		}

		if q.From, err = ref.Parse(op, args[0]); err != nil {
			return err
		}

		if q.Name, err = ref.ParseName("clone", args[1]); err != nil {
			return err
		}

		q.Mount = c.Flags().Changed("mount")
		q.GoldenDecides = op == "clone" && !c.Flags().Changed("overlay")
		if q.May.Owner, err = owner(c.Context()); err != nil {
			return err
		}
		if q.May != (engine.Rights{}) && !q.Mount {
			return errs.New(errs.Invalid, op, args[1], "--dev, --suid and --owner need --mount").
				WithHint("add --mount, or pass them to `pando mount`")
		}

		if many && q.Count < 1 {
			return errs.New(errs.Invalid, op, args[1], "--count must be at least 1 (got %d)", q.Count)
		}

		if c.Flags().Changed("size") {
			if q.SizeBytes, err = units.ParseSize(op, sizeFlag); err != nil {
				return err
			}
		}

		if c.Flags().Changed("ttl") {
			if q.TTL, err = units.ParseDuration(op, ttl); err != nil {
				return err
			}
		}

		if q.Labels, err = labels(); err != nil {
			return err
		}

		if err := at.check(args[0]); err != nil {
			return err
		}

		return a.withPool(func(ctx context.Context, e *engine.Engine, _ []string) error {
			// Each of several has a directory in one that is made, like the mount point of a single one.
			undo := func() {}
			if many && q.MountDir != "" {
				var err error
				if undo, err = makeDirOfMountpoints(op, q.MountDir); err != nil {
					return err
				}
			}

			ctx, stop := a.showProgress(ctx)
			var out []api.Object
			var err error
			if at.revision != "" {
				out, err = at.clone(ctx, e, q)
			} else {
				out, err = run(e, ctx, q)
			}
			stop()
			if err != nil {
				undo()
				return err
			}
			if shell {
				return a.printShell(out[0])
			}
			return a.printClones(out, many)
		})(c, args)
	}

	shellFlag(c, &shell)
	return c
}

func (a *App) printClones(out []api.Object, many bool) error {
	if a.json {
		if many {
			return a.printJSON(out)
		}
		return a.printJSON(out[0])
	}

	for _, v := range out {
		switch {
		case a.quiet && v.Mounted():
			a.printf("%s\n", v.Mountpoint)
		case a.quiet:
			a.printf("%s\n", v.Name)
		case v.Mounted():
			a.printf("%s  mounted at %s\n", v.Name, v.Mountpoint)
		default:
			a.printf("%s\n", v.Name)
		}
	}

	return nil
}
