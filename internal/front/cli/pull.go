package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/remote/replicate"
	"pando/internal/service/restore"

	"github.com/spf13/cobra"
)

// pullHelp is the text of `pando pull --help`.
const pullHelp = `Restore each REF from a remote into this pool: NAME (its newest point),
VOLUME@SNAPSHOT or GOLDEN@N. A volume arrives together with the snapshot that was
pulled; a generation keeps its number. If REF was cloned from something that this
pool does not have, pando restores that first, so that clones share the same
blocks as on the host that pushed them.

REF may be a pattern for names on the remote, for example 'job-*'. Nothing is
pulled if the remote lacks any REF. If there are several remotes, --from names
one; without it, the first of several words may be a remote.

Every block is authenticated before it is written. An interrupted pull leaves
nothing behind.

--update brings a volume that was pulled before to its newest point, and keeps
its previous content as a snapshot. It fails if the volume is mounted, or if it
has changes that are not on the remote.

--take-over makes this pool the writer of the volume on the remote; use it when
the host that pushed the volume has failed. If that host is still running, its
next push fails (conflict), and its data stays intact.`

func (a *App) pullCommand() *cobra.Command {
	var q restore.Request
	var from, limit, as string
	var lazy bool
	c := &cobra.Command{
		Use:     "pull [REMOTE] REF...",
		GroupID: "remotes",
		Short:   "Restore volumes and goldens from a remote",
		Long:    pullHelp,
		Example: `  pando pull job-17 --mount
  pando pull job-17@before-upgrade --from backup --as old
  pando pull db --take-over --mount /srv/db`,
		Args: cobra.MinimumNArgs(1),
		ValidArgsFunction: func(c *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
			remote := from
			if remote == "" {
				remote, _ = a.takeRemote(append(args, word))
			}
			if _, err := a.findRemote("complete", remote); err != nil { // there are several
				return a.completeRemotes(c, args, word)
			}
			return a.completeListed(c, remote, word)
		},
	}

	f := c.Flags()
	f.StringVar(&from, "from", "", "pull from this `REMOTE` (default: the only remote of the pool)")
	f.StringVar(&as, "as", "", "call the volume or golden `NAME` in this pool (default: its name on the remote)")
	f.BoolVar(&q.Pull.Update, "update", false, "bring a volume that was pulled before to its newest point")
	f.BoolVar(&q.Pull.TakeOver, "take-over", false, "make this pool the writer of the volume on the remote")
	f.StringVar(&q.MountDir, "mount", "", "mount the volume at `DIR`; without DIR, below the pool")
	f.StringVar(&limit, "limit-rate", "",
		"receive at most this many `BYTES` per second, for example 50M (default: no limit)")
	f.BoolVar(&lazy, "lazy", false, "not supported yet")
	_ = f.MarkHidden("lazy")
	labels := a.labelFlag(c, "pull", "the volume or golden")
	_ = c.RegisterFlagCompletionFunc("from", a.completeRemotes)

	c.RunE = func(c *cobra.Command, args []string) (err error) {
		if lazy {
			return errs.New(errs.Unsupported, "pull", args[0], "--lazy is not supported yet").
				WithHint("remove --lazy to pull the whole volume")
		}

		if as != "" {
			if q.Pull.As, err = ref.ParseName("pull", as); err != nil {
				return err
			}
		}

		if q.Labels, err = labels(); err != nil {
			return err
		}
		q.Mount = c.Flags().Changed("mount")

		if limit != "" {
			if q.Pull.LimitBytes, err = parseRate("pull", limit); err != nil {
				return err
			}
		}

		return a.withPool(func(ctx context.Context, e *engine.Engine, args []string) error {
			if from == "" {
				from, args = a.takeRemote(args)
			}
			r, err := a.findRemote("pull", from)
			if err != nil {
				return err
			}
			what, err := a.onRemote(ctx, r, "pull", args)
			switch {
			case err != nil:
				return a.notRemote(err, "from")
			case what.many && !q.Pull.As.IsZero():
				return errs.New(errs.Invalid, "pull", as, "--as can name only one volume or golden")
			case what.many && q.MountDir != "":
				return errs.New(errs.Invalid, "pull", q.MountDir, "only one volume can be mounted at a directory").
					WithHint("use --mount without a directory, or pull them one by one")
			}
			return a.notRemote(a.pullEach(ctx, e, r, what, q), "from")
		})(c, args)
	}

	return c
}

// pullEach pulls what was chosen on a remote. What could not be labeled or mounted afterwards counts as pulled.
func (a *App) pullEach(
	ctx context.Context, e *engine.Engine, r *replicate.Remote, what chosen, q restore.Request,
) error {
	var afterwards []error
	err := doEach(ctx, a, what, "could not be pulled", func(one ref.Ref) (replicate.Pulled, error) {
		q.Pull.Ref = one
		ctx, stop := a.showProgress(ctx)
		out, err := restore.Pull(ctx, e, r, q)
		stop()
		if err != nil && out.Ref != "" {
			afterwards = append(afterwards, err)
			err = nil
		}
		return out, err
	}, func(p replicate.Pulled) error { return a.printPulled(r.Name, p) })
	return a.allButLast(errors.Join(append(afterwards, err)...))
}

func (a *App) printPulled(remote string, p replicate.Pulled) error {
	for _, n := range p.Notes {
		if !p.Unchanged {
			a.printNote("%s", n)
		}
	}

	if len(p.Origins) > 0 {
		a.printNote("restored the origin first: %s", strings.Join(p.Origins, ", "))
	}

	name := p.Object.Ref

	if a.quiet {
		if p.Mounted() {
			name = p.Mountpoint
		}
		return a.printf("%s\n", name)
	}

	words := fmt.Sprintf("pulled %s@%s from %s: %s read, %s written, in %s", p.Volume, p.Point, remote,
		formatBytes(p.ReadBytes),
		formatBytes(p.WrittenBytes), formatSeconds(p.Seconds))
	if p.Unchanged {
		words = fmt.Sprintf("%s@%s is up to date", p.Volume, p.Point)
	}
	if p.TookOver {
		words += "; this pool is now its writer"
	}
	if p.Mounted() {
		words += "; mounted at " + p.Mountpoint
	}

	return a.printf("%s  %s\n", name, words)
}

// formatSeconds formats how long something formatSeconds.
func formatSeconds(seconds float64) string {
	if seconds < 10 {
		return fmt.Sprintf("%.1f s", seconds)
	}
	return time.Duration(seconds * float64(time.Second)).Round(time.Second).String()
}
