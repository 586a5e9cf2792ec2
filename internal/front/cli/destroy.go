package cli

import (
	"context"
	"errors"

	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) destroyCommand() *cobra.Command {
	c := &cobra.Command{
		Use:     "destroy [REF...]",
		Aliases: []string{"rm"},
		GroupID: "volumes",
		Short:   "Destroy volumes and snapshots",
		Long: `Destroy volumes with all their snapshots, or single snapshots (VOLUME@SNAPSHOT).
REF may be a quoted glob that matches names of volumes, or with an @ snapshots:
'job-17@*'. Mounted volumes that are idle are unmounted first. Volumes in use are
kept, and pando names the processes that use them. If any name is unknown,
nothing is destroyed.

With --label, destroy only those that have the label, of REF or, without REF, of
all volumes. VALUE may be a quoted glob. Of several labels with different keys,
a volume must have all. ` + "`pando ls --filter label=KEY=VALUE`" + ` lists what it would
destroy.`,
		Example: "  pando destroy job-17\n  pando destroy 'agent-*'\n  pando destroy 'job-17@*'\n" +
			"  pando destroy --label team=search",
		ValidArgsFunction: a.completeEvery(destroyable),
	}

	labels := a.selectorFlag(c, "destroy", "destroy only what has the label `KEY[=VALUE]` (repeatable)")
	c.Args = func(c *cobra.Command, args []string) error {
		if c.Flags().Changed("label") {
			return nil
		}
		return cobra.MinimumNArgs(1)(c, args)
	}
	c.RunE = func(c *cobra.Command, args []string) error {
		chosen, err := labels()
		if err != nil {
			return err
		}

		return a.withPool(func(ctx context.Context, e *engine.Engine, args []string) error {
			return a.destroy(ctx, e, args, chosen)
		})(c, args)
	}

	return c
}

// destroy destroys what args name, as far as its labels are chosen.
func (a *App) destroy(ctx context.Context, e *engine.Engine, args []string, chosen driver.LabelSelector) error {
	q := engine.DestroyRequest{Labels: chosen}
	var err error
	if len(args) > 0 {
		if q.What, err = ref.ParsePatterns("destroy", args...); err != nil {
			return err
		}
	}

	ctx, stop := a.showProgress(ctx)
	report, err := e.Destroy(ctx, q)
	stop()
	if report == nil {
		return err
	}

	return errors.Join(a.printDestroyed(report), err)
}

// printDestroyed prints what was destroyed; what was not is the error.
func (a *App) printDestroyed(r *engine.DestroyReport) error {
	if a.json {
		if r.Destroyed == nil {
			r.Destroyed = []engine.Destroyed{}
		}
		a.printJSON(r.Destroyed)
	} else if !a.quiet {
		for _, d := range r.Destroyed {
			a.printf("destroyed %s\n", d.Ref)
		}
	}

	for _, d := range r.Destroyed {
		if !d.Reclaimed {
			if d.HeldBy != "" {
				a.printWarning("%s is destroyed, but its space is returned only when nothing uses it any more: %s", d.Ref, d.HeldBy)
				continue
			}
			a.printWarning("%s is destroyed; the next pando command returns its space", d.Ref)
		}
	}

	return a.allButLastOf(r.Failed, "could not be destroyed")
}
