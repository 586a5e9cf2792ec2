package cli

import (
	"context"
	"fmt"

	"pando/internal/engine"
	"pando/internal/errs"
	"pando/internal/progress"
	"pando/internal/ref"
	"pando/internal/replicate"

	"github.com/spf13/cobra"
)

func (a *App) pullCommand() *cobra.Command {
	var q replicate.PullRequest
	var mount, limit string
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
	f.StringVar(&q.As, "as", "", "call it `NAME` here")
	f.BoolVar(&q.Update, "update", false, "bring a volume that is here already to the newest point")
	f.BoolVar(&q.TakeOver, "take-over", false, "become the volume's writer on the remote")
	f.StringVar(&mount, "mount", "", "mount it at `DIR`; without DIR below the pool")
	f.StringVar(&limit, "limit-rate", "", "receive at most this many `BYTES` a second, for example 50M")
	f.BoolVar(&lazy, "lazy", false, "not there yet")
	_ = f.MarkHidden("lazy")
	c.RunE = func(c *cobra.Command, args []string) (err error) {
		if lazy {
			return errs.New(errs.Unsupported, "pull", args[1], "--lazy is not there yet").WithHint("leave it out: the volume is pulled whole")
		}
		if q.Ref, err = ref.Parse("pull", args[1]); err != nil {
			return err
		}
		if q.As != "" {
			if err := ref.CheckName("pull", q.As); err != nil {
				return err
			}
		}
		if limit != "" {
			if q.LimitBytes, err = parseRate("pull", limit); err != nil {
				return err
			}
		}
		return a.withRemote("pull", args[0], func(ctx context.Context, e *engine.Engine, r *replicate.Remote) error {
			var out replicate.PullResult
			err := a.track(func(t *progress.Tracker) (err error) {
				q.Tracker = t
				out, err = replicate.Pull(ctx, e, r, q)
				return err
			})
			if err != nil {
				return err
			}
			return a.printPulled(out)
		})(c, args)
	}
	return c
}

func (a *App) printPulled(p replicate.PullResult) error {
	_ = fmt.Sprint
	return nil
}
