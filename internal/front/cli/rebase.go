package cli

import (
	"context"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

// rebaseHelp is the text of `pando rebase --help`.
const rebaseHelp = `Make VOLUME a clone of GOLDEN@N (default: the current generation), then apply
the volume's own changes again: those that ` + "`pando diff`" + ` shows between its old
generation and the volume. The previous content stays as the snapshot
before-rebase-TIME.

A path that was changed differently in the volume and in the golden is a
conflict. pando lists conflicts and changes nothing, unless --ours keeps the
volume's version of these paths or --theirs takes the golden's.

The volume must not be mounted, and the generation that it was cloned from must
still exist.`

func (a *App) rebaseCommand() *cobra.Command {
	var q engine.RebaseRequest
	c := &cobra.Command{
		Use:               "rebase VOLUME GOLDEN[@N]",
		GroupID:           "volumes",
		Short:             "Move a volume to another generation of its golden, with its changes",
		Long:              rebaseHelp,
		Example:           "  pando rebase job-17 web\n  pando rebase job-17 web@5 --theirs",
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: a.completeArgs(aVolume, aGeneration),
		RunE: a.withPool(func(ctx context.Context, e *engine.Engine, args []string) (err error) {
			if q.Volume, err = volumeName(ctx, e, "rebase", args[0]); err != nil {
				return err
			}

			if q.Onto, err = ref.Parse("rebase", args[1]); err != nil {
				return err
			}

			ctx, stop := a.showProgress(ctx)
			out, err := e.Rebase(ctx, q)
			stop()
			if err != nil {
				if errs.Is(err, errs.Conflict) && len(out.Conflicts) > 0 {
					a.printConflicts(out.Conflicts)
				}
				return err
			}

			switch {
			case a.json:
				return a.printJSON(out)
			case a.quiet:
				return nil
			case out.Before == "":
				return a.printf("%s is already based on %s\n", out.Name, out.Base)
			}

			s := out.Stat
			note := ""
			if n := len(out.Conflicts); n > 0 {
				note = ", " + errs.Plural(n, "conflict") + " resolved"
			}

			return a.printf("%s is now based on %s, with its changes: %d added, %d modified, %d deleted, %d renamed%s; "+
				"previous content: %s\n",
				out.Name,
				ref.Generation(out.Golden, out.Generation), s.Added, s.Modified, s.Deleted, s.Renamed, note, out.Before)
		}),
	}

	c.Flags().BoolVar(&q.Ours, "ours", false, "resolve conflicts with the volume's version")
	c.Flags().BoolVar(&q.Theirs, "theirs", false, "resolve conflicts with the golden's version")
	return c
}

// printConflicts lists what keeps a rebase from being done.
func (a *App) printConflicts(cs []engine.RebaseConflict) error {
	if a.json {
		return a.printJSON(engine.Conflicts{Conflicts: cs})
	}

	for _, c := range cs {
		line := "C  " + showPath(c.Path)
		if a.quiet {
			line = showPath(c.Path)
		} else {
			line += "  (volume: " + c.Mine + "; golden: " + c.Theirs + ")"
		}
		a.printf("%s\n", line)
	}

	return nil
}
