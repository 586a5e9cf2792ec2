package cli

import (
	"context"

	"pando/internal/api"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

// labelHelp is the text of `pando label --help`.
const labelHelp = `Show the labels of REF: a volume, a golden or VOLUME@SNAPSHOT. Labels are keys
with values that say what an object is for; ls, destroy and prune choose objects
by them. Commands that create something set labels with --label.

A key has 1 to 63 of the characters a-z, A-Z, 0-9, '.', '_', '/' and '-', and
begins with a letter or digit. A value has up to 253 printable characters. An
object has at most 64 labels, with 4096 bytes of JSON together.

Clones, forks and snapshots do not inherit labels. A golden has one set of labels
for all its generations. Labels are not pushed to remotes.`

func (a *App) labelCommand() *cobra.Command {
	c := &cobra.Command{
		Use:     "label REF",
		GroupID: "volumes",
		Short:   "Show and change the labels of volumes, snapshots and goldens",
		Long:    labelHelp,
		Example: `  pando label set job-17 team=search ticket=4711
  pando label job-17
  pando label rm job-17 ticket
  pando ls --filter label=team=search
  pando destroy --label team=search`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeArgs(labelled),
		RunE:              a.withPool(a.listLabels),
	}
	c.AddCommand(a.labelSetCommand(), a.labelRmCommand(), a.labelLsCommand())
	return c
}

func (a *App) labelLsCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "ls REF",
		Aliases: []string{"list"},
		Short:   "List the labels of a volume, snapshot or golden",
		Long: `List the labels of REF as KEY=VALUE, in the order of their keys. With -q, list only
the keys.`,
		Example:           "  pando label ls job-17\n  pando label ls web --json",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeArgs(labelled),
		RunE:              a.withPool(a.listLabels),
	}
}

func (a *App) listLabels(ctx context.Context, e *engine.Engine, args []string) error {
	r, err := ref.Parse("label", args[0])
	if err != nil {
		return err
	}

	labels, err := e.Labels(ctx, r)
	if err != nil {
		return err
	}

	if a.json {
		return a.printJSON(api.Labelled{Ref: r.String(), Labels: labels})
	}

	all := labels.Map()
	for _, k := range labels.Keys() {
		if a.quiet {
			a.printf("%s\n", k)
		} else {
			a.printf("%s=%s\n", k, all[k])
		}
	}
	if len(all) == 0 {
		a.printNote("%s has no labels; add one with `pando label set %s KEY=VALUE`", r, r)
	}

	return nil
}

func (a *App) labelSetCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "set REF KEY=VALUE...",
		Short: "Add labels to a volume, snapshot or golden, or change them",
		Long: `Give REF the labels, all at once. A key that REF has already gets the new value;
its other labels stay. Volumes may be in use.`,
		Example:           "  pando label set job-17 team=search ticket=4711\n  pando label set web stage=production",
		Args:              cobra.MinimumNArgs(2),
		ValidArgsFunction: a.completeRefAndLabels,
		RunE: a.withPool(func(ctx context.Context, e *engine.Engine, args []string) error {
			labels, err := driver.ParseLabels("label", args[1:])
			if err != nil {
				return err
			}
			return a.setLabels(ctx, e, args[0], engine.LabelRequest{Set: labels.Map()})
		}),
	}
}

func (a *App) labelRmCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "rm REF KEY...",
		Aliases: []string{"remove"},
		Short:   "Remove labels from a volume, snapshot or golden",
		Long: `Remove the labels with these keys from REF, all at once. It is not an error if REF
does not have one of them.`,
		Example:           "  pando label rm job-17 ticket",
		Args:              cobra.MinimumNArgs(2),
		ValidArgsFunction: a.completeLabelKeys,
		RunE: a.withPool(func(ctx context.Context, e *engine.Engine, args []string) error {
			for _, k := range args[1:] {
				if err := driver.CheckLabelKey("label", k); err != nil {
					return err
				}
			}
			return a.setLabels(ctx, e, args[0], engine.LabelRequest{Remove: args[1:]})
		}),
	}
}

// setLabels changes labels of what word names, and prints the result.
func (a *App) setLabels(ctx context.Context, e *engine.Engine, word string, q engine.LabelRequest) (err error) {
	if q.Ref, err = ref.Parse("label", word); err != nil {
		return err
	}

	ctx, stop := a.showProgress(ctx)
	out, err := e.SetLabels(ctx, q)
	stop()
	if err != nil {
		return err
	}
	return a.printResult(api.Labelled{Ref: q.Ref.String(), Labels: out.Labels}, "", "%s  %s\n", q.Ref,
		orDash(out.Labels.String()))
}

// completeLabelKeys completes a reference, and then the keys of its labels.
func (a *App) completeLabelKeys(c *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	if len(args) == 0 {
		return a.completeArgs(labelled)(c, args, word)
	}

	return a.completeWords(c, func(ctx context.Context, e *engine.Engine) ([]string, error) {
		r, err := ref.Parse("label", args[0])
		if err != nil {
			return nil, err
		}
		labels, err := e.Labels(ctx, r)
		return labels.Keys(), err
	})
}

// completeRefAndLabels completes a reference, and then labels that are in use.
func (a *App) completeRefAndLabels(c *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	if len(args) == 0 {
		return a.completeArgs(labelled)(c, args, word)
	}
	return a.completeLabels(c, args, word)
}

// completeLabels completes labels that are in use.
func (a *App) completeLabels(c *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	return a.completeWords(c, func(ctx context.Context, e *engine.Engine) ([]string, error) { return e.LabelsInUse(ctx) })
}

// labelFlag adds the flag --label to a command that creates something. The function that it returns reads it.
func (a *App) labelFlag(c *cobra.Command, op, what string) func() (driver.Labels, error) {
	words := c.Flags().StringArray("label", nil, "give "+what+" the label `KEY=VALUE` (repeatable)")
	_ = c.RegisterFlagCompletionFunc("label", a.completeLabels)
	return func() (driver.Labels, error) { return driver.ParseLabels(op, *words) }
}

// selectorFlag adds the flag --label to a command that chooses objects by their labels. The function that it returns
// reads it.
func (a *App) selectorFlag(c *cobra.Command, op, usage string) func() (driver.LabelSelector, error) {
	words := c.Flags().StringArray("label", nil, usage)
	_ = c.RegisterFlagCompletionFunc("label", a.completeLabels)
	return func() (driver.LabelSelector, error) { return driver.ParseLabelSelector(op, *words...) }
}
