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

type completer = func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective)

// What the arguments of verbs name.
var (
	aVolume     = []api.Kind{api.KindVolume}
	aGolden     = []api.Kind{api.KindGolden}
	aGeneration = []api.Kind{api.KindGolden, api.KindGeneration}
	destroyable = []api.Kind{api.KindVolume, api.KindSnapshot}
	labelled    = []api.Kind{api.KindVolume, api.KindSnapshot, api.KindGolden}
	anyRef      = []api.Kind{api.KindVolume, api.KindSnapshot, api.KindGolden, api.KindGeneration}
)

// completeArgs completes arguments that name something of these kinds, by their position, and files behind them.
func (a *App) completeArgs(kinds ...[]api.Kind) completer {
	return func(c *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
		if len(args) >= len(kinds) {
			return nil, cobra.ShellCompDirectiveDefault
		}
		return a.completeRefs(c, word, kinds[len(args)])
	}
}

// completeEvery completes any number of arguments that name something of these kinds.
func (a *App) completeEvery(kinds []api.Kind) completer {
	return func(c *cobra.Command, _ []string, word string) ([]string, cobra.ShellCompDirective) {
		return a.completeRefs(c, word, kinds)
	}
}

// completeRefs completes a reference: what stands behind an @ once that is typed.
func (a *App) completeRefs(c *cobra.Command, word string, kinds []api.Kind) ([]string, cobra.ShellCompDirective) {
	glob := "*"
	if name, _, ok := strings.Cut(word, "@"); ok {
		glob = name + "@*"
	}
	return a.completeWords(c, func(ctx context.Context, e *engine.Engine) (out []string, _ error) {
		found, err := e.Match(ctx, engine.MatchRequest{Op: "complete", What: []ref.Pattern{{Glob: glob}}, Kinds: kinds})
		if errs.Is(err, errs.NotFound) {
			return nil, nil
		}
		for _, r := range found {
			out = append(out, r.String())
		}
		return out, err
	})
}

// completeRewind completes a volume or snapshot, and then the names of the volume's snapshots.
func (a *App) completeRewind(c *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	if len(args) != 1 || strings.Contains(args[0], "@") {
		return a.completeArgs(destroyable)(c, args, word)
	}

	found, d := a.completeRefs(c, args[0]+"@", destroyable)
	for i, r := range found {
		_, found[i], _ = strings.Cut(r, "@")
	}
	return found, d
}

// completeWords completes words that it reads from the pool.
func (a *App) completeWords(
	c *cobra.Command, words func(context.Context, *engine.Engine) ([]string, error),
) ([]string, cobra.ShellCompDirective) {
	ctx := c.Context()
	if ctx == nil {
		ctx = context.Background()
	}

	e, err := a.openReadOnly(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	defer e.Close()

	out, err := words(ctx, e)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}
