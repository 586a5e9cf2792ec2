package cli

import (
	"context"
	"errors"
	"fmt"

	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) destroyCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "destroy REF...",
		Aliases: []string{"rm"},
		GroupID: "volumes",
		Short:   "Destroy volumes and snapshots",
		Long: `Destroys volumes (with their snapshots) and snapshots (VOLUME@SNAP). REF may be a
quoted glob over the names of volumes. What is mounted and idle is unmounted;
what is in use stays, and who uses it is named. If a name is unknown nothing is
destroyed.`,
		Example:           "  pando destroy job-17\n  pando destroy 'agent-*'",
		Args:              usage(cobra.MinimumNArgs(1)),
		ValidArgsFunction: a.completeVolumes(0),
		RunE: a.with(func(ctx context.Context, e *engine.Engine, args []string) error {
			what, err := ref.ParsePatterns("destroy", args...)
			if err != nil {
				return err
			}

			var report *engine.DestroyReport
			err = a.track(func(t *progress.Tracker) (err error) {
				report, err = e.Destroy(ctx, engine.DestroyRequest{What: what, Tracker: t})
				return err
			})
			if report == nil {
				return err
			}

			return errors.Join(a.printDestroyed(report), err)
		}),
	}
}

// shownFailures is how many errors people are shown of one command; JSON has all of them.
const shownFailures = 3

// printDestroyed prints what was destroyed; what was not is the error.
func (a *App) printDestroyed(r *engine.DestroyReport) error {
	if a.json {
		if r.Destroyed == nil {
			r.Destroyed = []engine.Destroyed{}
		}
		if err := a.printJSON(r.Destroyed); err != nil {
			return err
		}
	} else if !a.quiet {
		for _, d := range r.Destroyed {
			if err := a.printf("destroyed %s\n", d.Ref); err != nil {
				return err
			}
		}
	}

	for _, d := range r.Destroyed {
		if !d.Reclaimed {
			if d.HeldBy != "" {
				a.warn("%s is destroyed, its space will be returned when nobody uses it any more: %s", d.Ref, d.HeldBy)
				continue
			}
			a.warn("%s is destroyed, its space will be returned by the next command", d.Ref)
		}
	}

	switch len(r.Failed) {
	case 0:
		return nil
	case 1:
		return r.Failed[0]
	}

	// The last one is printed by the caller, and decides the exit code.
	last := len(r.Failed) - 1
	shown := r.Failed[:last]
	if !a.json && len(r.Failed) > shownFailures {
		shown = shown[:shownFailures-1]
	}

	for _, err := range shown {
		a.printError(err)
	}

	if more := last - len(shown); more > 0 {
		fmt.Fprintf(a.Stderr, "pando: and %d more could not be destroyed; the last one:\n", more) // with --quiet too
	}

	return r.Failed[last]
}
