package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/remote/replicate"

	"github.com/spf13/cobra"
)

func (a *App) pullCommand() *cobra.Command {
	var q replicate.PullRequest
	var mount, limit, as string
	var lazy bool
	c := &cobra.Command{
		Use:     "pull REMOTE REF",
		GroupID: "remotes",
		Short:   "Bring a volume or golden back from a remote",
		Long: `Makes REF, as REMOTE has it, in this pool: NAME (its newest point), VOLUME@SNAP or
GOLDEN@N. A volume comes with the snapshot that was pulled; a golden's generation
keeps its number. What it was cloned from comes first if it is not here yet, so
that clones share here what they shared where they came from.

Every block is authenticated before it is written. An interrupted pull leaves
nothing behind.

--update brings a volume that was pulled before to the newest point; what it was
stays as a snapshot. It is refused if the volume is mounted, or if the remote does
not know what it is now.

--take-over makes this pool the volume's writer on the remote: for when the host
that pushed it so far is gone. If it is not gone after all, its next push is
refused (conflict), and it loses nothing.`,
		Example: `  pando pull backup job-17 --mount
  pando pull backup job-17@before-upgrade --as old
  pando pull backup db --take-over --mount /srv/db`,
		Args:              usage(cobra.ExactArgs(2)),
		ValidArgsFunction: a.completeOnRemote(0),
	}

	f := c.Flags()
	f.StringVar(&as, "as", "", "call it `NAME` here")
	f.BoolVar(&q.Update, "update", false, "bring a volume that is here already to the newest point")
	f.BoolVar(&q.TakeOver, "take-over", false, "become the volume's writer on the remote")
	f.StringVar(&mount, "mount", "", "mount it at `DIR`; without DIR below the pool")
	f.StringVar(&limit, "limit-rate", "", "receive at most this many `BYTES` a second, for example 50M")
	f.BoolVar(&lazy, "lazy", false, "not there yet")
	_ = f.MarkHidden("lazy")
	c.RunE = func(c *cobra.Command, args []string) (err error) {
		if lazy {
			return errs.New(errs.Unsupported, "pull", args[1], "--lazy is not there yet").
				WithHint("leave it out: the volume is pulled whole")
		}

		if q.Ref, err = ref.Parse("pull", args[1]); err != nil {
			return err
		}

		if as != "" {
			if q.As, err = ref.ParseName("pull", as); err != nil {
				return err
			}
		}

		if limit != "" {
			if q.LimitBytes, err = parseRate("pull", limit); err != nil {
				return err
			}
		}

		return a.with(func(ctx context.Context, e *engine.Engine, _ []string) error {
			r, err := a.remote("pull", args[0])
			if err != nil {
				return err
			}

			var out replicate.Pulled
			err = a.track(func(t *progress.Tracker) (err error) {
				q.Tracker = t
				out, err = replicate.Pull(ctx, e, r, q)
				return err
			})
			if err != nil {
				return err
			}

			var merr error
			if c.Flags().Changed("mount") {
				out.Info, merr = mountPulled(ctx, e, out.Info, mount)
			}

			return errors.Join(a.printPulled(r.Name, out), merr)
		})(c, args)
	}

	return c
}

// mountPulled mounts a volume that was pulled. One that is mounted there already
// stays so.
func mountPulled(ctx context.Context, e *engine.Engine, v engine.Info, dir string) (engine.Info, error) {
	if v.Kind != "volume" {
		return v, errs.New(errs.Invalid, "mount", v.Name, "it was pulled, but it is a %s, which cannot be mounted", v.Kind).
			WithHint("make a volume of it: `pando clone %s NEW --mount`", v.Name)
	}

	name, err := ref.ParseName("mount", v.Name)
	if err != nil {
		return v, err
	}

	m, err := e.Mount(ctx, engine.MountRequest{Volume: name, Dir: dir})
	if err != nil {
		return v, err
	}

	return m, nil
}

func (a *App) printPulled(remote string, p replicate.Pulled) error {
	if a.json {
		return a.printJSON(p)
	}

	for _, n := range p.Notes {
		if !p.Unchanged {
			a.note("%s", n)
		}
	}

	if len(p.Origins) > 0 {
		a.note("restored first, as it was cloned from it: %s", strings.Join(p.Origins, ", "))
	}

	name := p.Name
	if p.Kind == "golden" {
		name = ref.Generation(p.Golden, p.Generation)
	}

	if a.quiet {
		if p.Mounted() {
			name = p.Mountpoint
		}
		return a.printf("%s\n", name)
	}

	words := fmt.Sprintf("pulled %s@%s from %s: %s read, %s written, in %s", p.Volume, p.Point, remote, size(p.ReadBytes),
		size(p.WrittenBytes), took(p.Seconds))
	if p.Unchanged {
		words = fmt.Sprintf("%s@%s is already in this pool", p.Volume, p.Point)
	}
	if p.TookOver {
		words += "; this pool writes it now"
	}
	if p.Mounted() {
		words += "; mounted at " + p.Mountpoint
	}

	return a.printf("%s  %s\n", name, words)
}

// took formats how long something took.
func took(seconds float64) string {
	if seconds < 10 {
		return fmt.Sprintf("%.1f s", seconds)
	}
	return time.Duration(seconds * float64(time.Second)).Round(time.Second).String()
}
