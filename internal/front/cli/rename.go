package cli

import (
	"context"
	"strings"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) renameCommand() *cobra.Command {
	var q engine.RenameRequest
	return &cobra.Command{
		Use:     "rename REF NEW",
		GroupID: "volumes",
		Short:   "Give a volume, snapshot or golden another name",
		Long: `Give REF, a volume, a golden or VOLUME@SNAPSHOT, the name NEW. Its content, its
snapshots and generations stay, and so does everything that was cloned from it.

A mounted volume stays mounted where it is, and programs notice nothing; the
next mount below the pool uses the new name. A raw volume (--fs none) must be
unmounted first. A golden cannot be renamed while ` + "`pando run`" + ` or a push uses one
of its clones.

The remote keeps the name under which the volume or golden was first pushed, and
later pushes go there.`,
		Example:           "  pando rename job-17 job-17-failed\n  pando rename db@before-upgrade v14",
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: a.completeArgs(labelled),
		RunE: func(c *cobra.Command, args []string) (err error) {
			if q.Ref, err = ref.Parse("rename", args[0]); err != nil {
				return err
			}
			if q.Name, err = parseNewName(q.Ref, args[1]); err != nil {
				return err
			}

			return a.withPool(func(ctx context.Context, e *engine.Engine, _ []string) error {
				ctx, stop := a.showProgress(ctx)
				out, err := e.Rename(ctx, q)
				stop()
				if err != nil {
					return err
				}
				return a.printRenamed(ctx, e, q, out)
			})(c, args)
		},
	}
}

// printRenamed prints the result of a rename.
func (a *App) printRenamed(ctx context.Context, e *engine.Engine, q engine.RenameRequest, out engine.Renamed) error {
	now := q.Name.Ref()
	if q.Ref.At != "" {
		now = ref.Ref{Name: q.Ref.Name, At: q.Name.String()}
	}
	if !a.json {
		return a.printResult(nil, now.String(), "%s  renamed to %s\n", out.Before, now)
	}

	if out.Kind != api.KindGeneration {
		return a.printJSON(out)
	}
	d, err := e.Show(ctx, now)
	if err != nil {
		return err
	}
	g, err := e.Golden(ctx, d)
	if err != nil {
		return err
	}
	return a.printJSON(api.GoldenRenamed{Golden: g, Before: out.Before})
}

// parseNewName parses the new name of r. That of a snapshot may be written with its volume. Invalid.
func parseNewName(r ref.Ref, word string) (ref.Name, error) {
	if !strings.Contains(word, "@") {
		return ref.ParseName("rename", word)
	}

	to, err := ref.Parse("rename", word)
	if err != nil {
		return ref.Name{}, err
	}
	if r.At == "" || to.Name != r.Name {
		return ref.Name{}, errs.New(errs.Invalid, "rename", word, "a rename does not move anything to another volume").
			WithHint("give only the new name; make a volume of it with %s", errs.Run("clone", r.String(), "VOLUME"))
	}
	return ref.ParseName("rename", to.At)
}
