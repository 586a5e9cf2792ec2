package cli

import (
	"context"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) cloneCommand() *cobra.Command {
	return a.cloning(&cobra.Command{
		Use:     "clone REF VOLUME",
		GroupID: "volumes",
		Short:   "Make a private, writable volume from a golden, a snapshot or a volume",
		Long: `Makes VOLUME from REF: GOLDEN (its current generation), GOLDEN@N, VOLUME@SNAP, or
another VOLUME, which may be in use (see ` + "`pando fork --help`" + `). The new volume
shares all blocks with its origin until either is written. Neither can be seen
from the other, and either can be destroyed at any time.

With --count N it makes VOLUME-1 to VOLUME-N: all of them, or none.`,
		Example: `  pando clone web job-17
  pando clone web job-17 --mount /srv/job-17
  pando clone web agent --count 100 --mount
  pando clone web@3 old --size 200G --ttl 2h`,
		ValidArgsFunction: a.completeRefs(1),
	}, "clone", (*engine.Engine).Clone)
}

func (a *App) forkCommand() *cobra.Command {
	return a.cloning(&cobra.Command{
		Use:     "fork VOLUME NEW",
		GroupID: "volumes",
		Short:   "Make a volume from another one that may be running",
		Long: `Makes NEW from VOLUME as it is now, while programs go on using VOLUME. Everything
written before the command began is in NEW, and its filesystem is consistent. What
programs write while the command runs is there as after a power loss: what they
synced is, in its order. With --freeze their writes wait for a moment (some 30 ms),
and NEW is one moment also of what was not synced.

Without reflinks (driver plain) VOLUME is copied; what changes meanwhile is copied
again, and if it never comes to rest the fork is refused (conflict).`,
		Example:           "  pando fork agent-1 agent-1b --mount\n  pando fork db db-copy --no-freeze",
		ValidArgsFunction: a.completeVolumes(1),
	}, "fork", (*engine.Engine).Fork)
}

// cloning adds to a command what clone and fork have in common.
func (a *App) cloning(
	c *cobra.Command, op string, run func(*engine.Engine, context.Context, engine.CloneRequest) ([]engine.Info, error),
) *cobra.Command {
	var q engine.CloneRequest
	var sizeFlag, ttl string
	c.Args = usage(cobra.ExactArgs(2))
	f := c.Flags()
	f.IntVar(&q.Count, "count", 0, "make this many: VOLUME-1 to VOLUME-`N`")
	f.StringVar(&q.MountDir, "mount", "", "mount it at `DIR` (of many: at DIR/VOLUME-i); without DIR below the pool")
	f.StringVar(&sizeFlag, "size", "", "make it this large, for example 200G; the filesystem inside grows too")
	f.StringVar(&ttl, "ttl", "", "destroy it after this `DURATION`, for example 2h or 7d")
	f.BoolVar(&q.Ephemeral, "ephemeral", false, "do not wait for the disk; the volume is gone after a reboot")
	rightsFlags(f, &q.May)
	freezeFlags(f, &q.Freeze)

	c.RunE = func(c *cobra.Command, args []string) (err error) {
		if q.From, err = ref.Parse(op, args[0]); err != nil {
			return err
		}

		if q.Name, err = ref.ParseName("clone", args[1]); err != nil {
			return err
		}

		q.Mount = c.Flags().Changed("mount")
		if (q.May.Dev || q.May.SUID) && !q.Mount {
			return errs.New(errs.Invalid, op, args[1], "--dev and --suid are about the mount").
				WithHint("add --mount, or leave them for `pando mount`")
		}

		if c.Flags().Changed("count") && q.Count < 1 {
			return errs.New(errs.Invalid, op, args[1], "a count of %d is not at least 1", q.Count)
		}

		if c.Flags().Changed("size") {
			if q.SizeBytes, err = parseSize(op, sizeFlag); err != nil {
				return err
			}
		}

		if c.Flags().Changed("ttl") {
			if q.TTL, err = parseTTL(op, ttl); err != nil {
				return err
			}
		}

		return a.with(func(ctx context.Context, e *engine.Engine, _ []string) error {
			var out []engine.Info
			err := a.track(func(t *progress.Tracker) (err error) {
				q.Tracker = t
				out, err = run(e, ctx, q)
				return err
			})
			if err != nil {
				return err
			}
			return a.printClones(out, c.Flags().Changed("count"))
		})(c, args)
	}

	return c
}

func (a *App) printClones(out []engine.Info, many bool) (err error) {
	if a.json {
		if many {
			return a.printJSON(out)
		}
		return a.printJSON(out[0])
	}

	for _, v := range out {
		switch {
		case a.quiet && v.Mounted():
			err = a.printf("%s\n", v.Mountpoint)
		case a.quiet:
			err = a.printf("%s\n", v.Name)
		case v.Mounted():
			err = a.printf("%s  mounted at %s\n", v.Name, v.Mountpoint)
		default:
			err = a.printf("%s\n", v.Name)
		}
		if err != nil {
			return err
		}
	}

	return nil
}
