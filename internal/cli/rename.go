package cli

import (
	"context"
	"strings"

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
next mount below the pool uses the new name. A golden cannot be renamed while
` + "`pando run`" + ` uses one of its clones.

Pushes go on where they were: the remote keeps the name that the volume was
first pushed with.`,
		Example:           "  pando rename job-17 job-17-failed\n  pando rename db@before-upgrade db@v14",
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: a.completeRefs(1),
		RunE: func(c *cobra.Command, args []string) (err error) {
			if q.Ref, err = ref.Parse("rename", args[0]); err != nil {
				return err
			}
			if q.Name, err = newName(q.Ref, args[1]); err != nil {
				return err
			}

			return a.withCalls(func(ctx context.Context, e calls, _ []string) error {
				stop := a.showProgress(&q.Tracker)
				out, err := e.Rename(ctx, q)
				stop()
				if err != nil {
					return err
				}

				name := q.Name.Ref()
				if q.Ref.At != "" {
					name = ref.Ref{Name: q.Ref.Name, At: q.Name.String()}
				}
				return a.printResult(out, name.String(), "%s  renamed to %s\n", out.Before, name)
			})(c, args)
		},
	}
}

// newName parses the new name of what r refers to. The name of a snapshot may be written with its volume.
func newName(r ref.Ref, word string) (ref.Name, error) {
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
