package cli

import (
	"context"
	"slices"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) goldenRmCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "rm GOLDEN[@N]...",
		Aliases: []string{"remove"},
		Short:   "Remove goldens, or generations that are not current",
		Long: `Remove each GOLDEN with all its generations, or only generation N. Both may be
quoted globs: 'test-*', 'web@*', which leaves out the current generation. Clones
are not affected: they keep every block that they use. If any name is unknown, or
is that of a current generation, nothing is removed.`,
		Example:           "  pando golden rm web@1\n  pando golden rm 'test-*'",
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: a.completeEvery(aGeneration),
		RunE: a.withPool(func(ctx context.Context, e *engine.Engine, args []string) error {
			what, err := toRemove(ctx, e, args)
			if err != nil {
				return err
			}

			var all engine.DestroyReport
			tried := false
			for _, r := range what {
				report, err := e.RemoveGolden(ctx, r)
				if report != nil {
					tried = true
					all.Destroyed = append(all.Destroyed, report.Destroyed...)
					all.Failed = append(all.Failed, report.Failed...)
				}
				if err != nil {
					all.Failed = append(all.Failed, err)
				}
				if ctx.Err() != nil {
					break
				}
			}
			if !tried {
				return a.allButLastOf(all.Failed, "could not be removed")
			}
			return a.printDestroyed(&all)
		}),
	}
}

// toRemove finds the goldens and generations that words name. Among several, current generations are left out if a glob
// matches them, and Invalid if they are named: once the others are gone, such a one would be the golden. NotFound.
func toRemove(ctx context.Context, e *engine.Engine, words []string) (out []ref.Ref, err error) {
	what, err := choose(ctx, e, "golden rm", words, aGeneration)
	if err != nil || !what.many {
		return what.refs, err
	}

	goldens, err := e.Goldens(ctx)
	if err != nil {
		return nil, err
	}
	current := map[string]bool{}
	for _, g := range goldens {
		current[g.Current.Ref] = true
	}

	for _, r := range what.refs {
		switch {
		case !current[r.String()]:
			out = append(out, r)
		case slices.Contains(words, r.String()):
			return nil, currentGenerationError(r)
		}
	}
	if len(out) == 0 {
		return nil, currentGenerationError(what.refs[0])
	}
	return out, nil
}

func currentGenerationError(r ref.Ref) error {
	return errs.New(errs.Invalid, "golden rm", r.String(), "it is the current generation").
		WithHint("remove the whole golden with %s", errs.Run("golden rm", r.Name))
}
