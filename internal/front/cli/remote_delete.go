package cli

import (
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/remote/replicate"

	"github.com/spf13/cobra"
)

func (a *App) remoteDeleteCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "delete REMOTE REF",
		Short: "Remove a volume, a golden or one of its points from a remote",
		Long: `Remove the volume or golden REF with all its points from REMOTE, or one point
(VOLUME@SNAPSHOT, GOLDEN@N). Nothing in this pool is removed. Clones of REF on
the remote can still be pulled. The next ` + "`pando remote prune`" + ` returns the space.`,
		Example:           "  pando remote delete backup job-17\n  pando remote delete backup web@3",
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: a.completeOnRemote(2),
		RunE: func(c *cobra.Command, args []string) error {
			q, err := ref.Parse("remote delete", args[1])
			if err != nil {
				return err
			}

			r, err := a.findRemote("remote delete", args[0])
			if err != nil {
				return err
			}

			out, err := replicate.RemoveVolume(c.Context(), r, q)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(out)
			}
			if a.quiet {
				return nil
			}

			what := q.String()
			if out.Whole {
				what += " with " + errs.Plural(len(out.Points), "point")
			}

			a.printf("deleted %s from %s\n", what, r.Name)

			a.printNote("return the space with `pando remote prune %s`", r.Name)
			return nil
		},
	}
}
