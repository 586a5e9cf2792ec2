package cli

import (
	"context"
	"os"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/source/git"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// gitRef are the flags of clone that choose what is checked out in the clones of a golden that comes from git.
type gitRef struct {
	revision string
	offline  bool
}

func (g *gitRef) addFlags(f *pflag.FlagSet) {
	f.StringVar(&g.revision, "git-ref", "",
		"check out a `BRANCH`, tag or commit of the repository that the golden comes from")
	f.BoolVar(&g.offline, "git-offline", false, "with --git-ref: fetch nothing, and use what the golden has")
}

func (g *gitRef) check(from string) error {
	if g.offline && g.revision == "" {
		return errs.New(errs.Invalid, "clone", from, "--git-offline needs --git-ref").WithHint("add --git-ref, or remove it")
	}
	return nil
}

// clone is git.Checkout of the revision.
func (g *gitRef) clone(ctx context.Context, e *engine.Engine, q engine.CloneRequest) ([]api.Object, error) {
	at := git.CheckoutRequest{Revision: g.revision, Offline: g.offline, Env: os.Environ()}
	return git.Checkout(ctx, e, at, q)
}

// gitSource are the flags of golden import that describe a repository.
type gitSource struct {
	is     bool
	source git.Source
}

func (g *gitSource) addFlags(f *pflag.FlagSet) {
	f.BoolVar(&g.is, "git", false, "SOURCE is the URL of a git repository: https://..., ssh://... or file:///...")
	f.IntVar(&g.source.Depth, "depth", 0, "with --git: fetch the last `N` commits of each branch (default: all)")
	f.BoolVar(&g.source.Submodules, "submodules", false, "with --git: fetch submodules, too")
	f.BoolVar(&g.source.LFS, "lfs", false, "with --git: fetch the files of Git LFS, not only pointers to them")
	f.StringVar(&g.source.Prepare, "prepare", "",
		"with --git: run `COMMAND` in the work tree after a checkout, for example 'npm ci'")
	f.StringSliceVar(&g.source.PrepareKey, "prepare-key", nil,
		"with --prepare: run it again only if this `FILE` differs, for example package-lock.json; can be repeated")
}

// gitFlags are those that only make sense with --git.
var gitFlags = []string{"depth", "submodules", "lfs", "prepare", "prepare-key"}

// check returns an error if flags contradict each other.
func (g *gitSource) check(f *pflag.FlagSet, source string) error {
	bad := func(format string, args ...any) error {
		return errs.New(errs.Invalid, "import", source, format, args...)
	}
	if !g.is {
		for _, name := range gitFlags {
			if f.Changed(name) {
				return bad("--%s needs --git", name)
			}
		}
		return nil
	}

	for _, name := range []string{"fs", "size", "force", "adopt", "replace", "as"} {
		if f.Changed(name) {
			return bad("--git and --%s cannot be combined", name)
		}
	}
	if f.Changed("depth") && g.source.Depth < 1 {
		return bad("--depth must be at least 1 (got %d)", g.source.Depth)
	}
	return nil
}

// importGit imports a repository.
func (a *App) importGit(ctx context.Context, e *engine.Engine, g gitSource, q engine.ImportRequest) error {
	g.source.URL = q.Source
	m := git.ImportRequest{Golden: q.Name, Source: g.source, Env: os.Environ(), Update: q.Update, Keep: q.Keep,
		Overlay: q.Overlay, Labels: q.Labels}
	ctx, stop := a.showProgress(ctx)
	out, err := git.Import(ctx, e, m)
	stop()
	if err != nil {
		return err
	}
	return a.printMade(out)
}

func (a *App) goldenRefreshCommand() *cobra.Command {
	var period string
	c := &cobra.Command{
		Use:   "refresh NAME",
		Short: "Fetch what is new in the repository of a golden, as its next generation",
		Long: `Fetch what is new in the git repository that golden NAME was imported from, and
make it the next generation. All branches and tags become as they are there, also
if they were deleted or rewritten. If nothing is new, there is no new generation.
It continues the newest generation that it or golden import made. Nothing of a
generation that was published from a volume is in the new one.

The command of --prepare runs again, unless the files of --prepare-key are the same.
If anything fails, for example because the repository cannot be reached, the golden
stays as it is.

With --every, pando goes on refreshing until it is interrupted, and retries after
errors.`,
		Example:           "  pando golden refresh repo\n  pando golden refresh repo --every 5m",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeArgs(aGolden),
	}
	c.Flags().StringVar(&period, "every", "", "refresh again after each `DURATION`, for example 10m, until interrupted")
	c.RunE = func(c *cobra.Command, args []string) error {
		var every time.Duration
		if c.Flags().Changed("every") {
			var err error
			if every, err = parseEvery("refresh", period); err != nil {
				return err
			}
		}

		return a.withPool(func(ctx context.Context, e *engine.Engine, _ []string) error {
			name, err := goldenName(ctx, e, "refresh", args[0])
			if err != nil {
				return err
			}

			round := func(ctx context.Context) (bool, error) {
				q := git.RefreshRequest{Golden: name, Env: os.Environ()}
				ctx, stop := a.showProgress(ctx)
				out, err := git.Refresh(ctx, e, q)
				stop()
				if err != nil {
					return false, err
				}
				if every > 0 && out.Unchanged {
					return true, nil
				}
				return true, a.printMade(out)
			}
			if every > 0 {
				return a.repeat(ctx, every, "refreshing", round)
			}
			_, err = round(ctx)
			return err
		})(c, args)
	}
	return c
}

// printMade prints the result of an import from git or a refresh.
func (a *App) printMade(out git.Made) error {
	if a.json {
		return a.printJSON(out)
	}

	a.noteRemoved(out.Removed)
	at := out.Commit
	if len(at) > 12 {
		at = at[:12]
	}
	switch {
	case out.Unchanged:
		a.printNote("nothing is new in %s", out.URL)
	case out.Branch == "":
		a.printNote("at commit %s", at)
	default:
		a.printNote("at %s of branch %s", at, out.Branch)
	}

	return a.printf("%s\n", ref.Generation(out.Golden, out.Generation))
}
