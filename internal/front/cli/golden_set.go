package cli

import (
	"context"
	"slices"
	"strings"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

// goldenProperties are what `golden set` can set, with their values for completion.
var goldenProperties = map[string][]string{
	"keep":    {"1", "3", "10", "all"},
	"overlay": {"never", "default", "allowed"},
}

func (a *App) goldenSetCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "set GOLDEN PROPERTY=VALUE...",
		Short: "Set properties of a golden",
		Long: `Set properties of GOLDEN. They hold for all of its generations, and stay when it
is published again:

  overlay=allowed  clones are overlays if --overlay is given (the default)
  overlay=default  clones are overlays unless --overlay=false is given, or the
                   pool cannot make them
  overlay=never    --overlay is refused: for databases and Docker data directories
  keep=N|all       keep the newest N generations, as with ` + "`pando golden keep`",
		Example: `  pando golden set web overlay=default
  pando golden set db overlay=never keep=3`,
		Args:              cobra.MinimumNArgs(2),
		ValidArgsFunction: a.completeGoldenSet,
		RunE: func(c *cobra.Command, args []string) error {
			q, err := parseProperties(args[1:])
			if err != nil {
				return err
			}

			return a.withPool(func(ctx context.Context, e *engine.Engine, _ []string) (err error) {
				if q.Golden, err = goldenName(ctx, e, "golden set", args[0]); err != nil {
					return err
				}
				return a.setGolden(ctx, e, q)
			})(c, args)
		},
	}
}

// parseProperties reads the properties that `golden set` is given. Invalid.
func parseProperties(args []string) (q engine.SetRequest, err error) {
	const op = "golden set"
	seen := map[string]bool{}
	for _, arg := range args {
		key, value, ok := strings.Cut(arg, "=")
		if _, known := goldenProperties[key]; !ok || !known {
			return q, errs.New(errs.Invalid, op, arg, "not a property").WithHint("use keep=N or overlay=POLICY")
		}
		if seen[key] {
			return q, errs.New(errs.Invalid, op, arg, "%s is set twice", key).WithHint("set it once")
		}
		seen[key] = true

		switch key {
		case "keep":
			if q.Keep, err = parseKeep(op, value); err == nil && q.Keep == nil {
				err = errs.New(errs.Invalid, op, arg, "the number of generations is empty").
					WithHint("use a number of at least 1, or all")
			}
		case "overlay":
			q.Overlay, err = parseOverlayPolicy(op, value)
		}
		if err != nil {
			return q, err
		}
	}

	return q, nil
}

// parseOverlayPolicy reads a policy for overlays. Invalid.
func parseOverlayPolicy(op, s string) (*driver.OverlayPolicy, error) {
	p, err := driver.ParseOverlayPolicy(op, s)
	return &p, err
}

func (a *App) setGolden(ctx context.Context, e *engine.Engine, q engine.SetRequest) error {
	removed, err := e.SetGolden(ctx, q)
	if err != nil {
		return err
	}

	if !a.json {
		a.noteRemoved(removed)
		return nil
	}

	return a.printGoldenSet(ctx, e, q.Golden, removed)
}

// printGoldenSet prints as JSON what a golden is, and what was removed.
func (a *App) printGoldenSet(ctx context.Context, e *engine.Engine, name ref.Name, removed []string) error {
	current, err := e.Show(ctx, name.Ref())
	if err != nil {
		return err
	}
	g, err := e.Golden(ctx, current)
	if err != nil {
		return err
	}
	return a.printJSON(api.GoldenSet{Golden: g, Removed: append([]string{}, removed...)})
}

// completeGoldenSet completes a golden, and then properties with their values.
func (a *App) completeGoldenSet(c *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	if len(args) == 0 {
		return a.completeArgs(aGolden)(c, args, word)
	}

	var out []string
	for key, values := range goldenProperties {
		for _, v := range values {
			out = append(out, key+"="+v)
		}
	}
	slices.Sort(out)
	return out, cobra.ShellCompDirectiveNoFileComp
}

// overlayPolicyFlag adds the flag --overlay to a command that makes generations. The function that it returns reads it;
// nil: it was not given.
func overlayPolicyFlag(c *cobra.Command, op string) func() (*driver.OverlayPolicy, error) {
	s := c.Flags().String("overlay", "",
		"from now on, clones of the golden are overlays: `default`, never or allowed, as in golden set (default: unchanged)")
	c.Flags().Lookup("overlay").NoOptDefVal = string(driver.OverlayDefault)
	return func() (*driver.OverlayPolicy, error) {
		if !c.Flags().Changed("overlay") {
			return nil, nil
		}
		return parseOverlayPolicy(op, *s)
	}
}
