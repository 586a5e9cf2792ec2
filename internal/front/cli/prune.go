package cli

import (
	"context"
	"errors"
	"fmt"

	"pando/internal/base/errs"
	"pando/internal/base/units"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

// pruneHelp is the text of `pando prune --help`.
const pruneHelp = `Remove volumes with their snapshots, least recently used first, and generations
that are not current and have no clones that stay. pando removes objects until
--keep-free of the pool is free, and only those that --older-than and --idle
allow; without --keep-free, it removes all of those. Without any of these
options, it keeps 10 % of the pool free. --label restricts all of this to
volumes with a label, and to generations of goldens with it.

Pinned and mounted objects stay, and objects that a command is working on. A
volume counts as used when it is created, cloned, mounted, unmounted or run in.
--dry-run prints the list of candidates. Without it, pando checks each object
once more before removing it, and stops as soon as enough space is free.`

func (a *App) pruneCommand() *cobra.Command {
	var q engine.PruneRequest
	var keepFree, olderThan, idle string
	c := &cobra.Command{
		Use:     "prune",
		GroupID: "pool",
		Short:   "Remove the least recently used volumes and unused generations",
		Long:    pruneHelp,
		Example: "  pando prune --keep-free 20% --dry-run\n  pando prune --idle 7d\n" +
			"  pando prune --older-than 30d --keep-free 15%",
		Args: cobra.NoArgs,
	}

	f := c.Flags()
	f.StringVar(&keepFree, "keep-free", "",
		"remove objects until this `PERCENT` of the pool is free, for example 20% (default: 10% without other options)")
	f.StringVar(&olderThan, "older-than", "", "remove only objects created more than this `DURATION` ago, for example 7d")
	f.StringVar(&idle, "idle", "", "remove only objects last used more than this `DURATION` ago, for example 24h")
	f.BoolVar(&q.DryRun, "dry-run", false, "list what would be removed, and change nothing")

	labels := a.selectorFlag(c, "prune", "remove only objects with the label `KEY[=VALUE]` (repeatable)")

	c.RunE = func(c *cobra.Command, args []string) (err error) {
		if q.Labels, err = labels(); err != nil {
			return err
		}

		if f.Changed("keep-free") {
			if q.KeepFreePercent, err = parsePercent("prune", keepFree); err != nil {
				return err
			}
			if q.KeepFreePercent == 0 {
				return errs.New(errs.Invalid, "prune", keepFree, "--keep-free must be greater than 0 %%").
					WithHint("use for example --keep-free 20%%")
			}
		}

		if f.Changed("older-than") {
			if q.OlderThan, err = units.ParseDuration("prune", olderThan); err != nil {
				return err
			}
		}

		if f.Changed("idle") {
			if q.Idle, err = units.ParseDuration("prune", idle); err != nil {
				return err
			}
		}

		if !f.Changed("keep-free") && !f.Changed("older-than") && !f.Changed("idle") {
			q.KeepFreePercent = 10
		}

		return a.withPool(func(ctx context.Context, e *engine.Engine, _ []string) error {
			ctx, stop := a.showProgress(ctx)
			r, err := e.Prune(ctx, q)
			stop()
			if r == nil {
				return err
			}
			return errors.Join(a.printPrune(q, r), err)
		})(c, args)
	}

	return c
}

func (a *App) printPrune(q engine.PruneRequest, r *engine.PruneReport) error {
	if a.json {
		return a.printJSON(r)
	}

	if len(r.Candidates) > 0 && !a.quiet {
		t := a.table("REF", "KIND", "LAST USED", "CREATED", "EXCLUSIVE", "RESULT")
		for _, c := range r.Candidates {
			result := "destroyed"
			switch {
			case r.DryRun:
				result = "would be removed"
			case !c.Destroyed:
				result = "kept: " + c.Kept
			}
			t.row(c.Ref, string(c.Kind), formatAge(c.LastUsedAt), formatAge(c.CreatedAt), formatBytes(c.ExclusiveBytes), result)
		}

		t.flush()
	} else if a.quiet {
		for _, c := range r.Candidates {
			if c.Destroyed || r.DryRun {
				a.printf("%s\n", c.Ref)
			}
		}
	}

	percent := func(n int64) string { return fmt.Sprintf("%.1f %%", 100*float64(n)/float64(max(r.TotalBytes, 1))) }
	switch {
	case len(r.Candidates) == 0 && r.TargetBytes > 0 && r.Reached:
		a.printNote("nothing to do: %s of the pool is free", percent(r.FreeBefore))
	case len(r.Candidates) == 0:
		a.printNote("nothing is eligible for removal")
	case !r.DryRun:
		a.printNote("returned %s: %s of the pool is free, %s before",
			formatBytes(r.FreedBytes), percent(r.FreeAfter), percent(r.FreeBefore))
	}

	if !r.Reached && !r.DryRun {
		young := ""
		if q.Idle > 0 || q.OlderThan > 0 {
			young = ", or too recent"
		}
		if !q.Labels.IsZero() {
			young += ", or do not have the label " + q.Labels.String()
		}
		a.printWarning("%s of the pool is free, less than the requested %s: "+
			"all other objects are pinned, mounted, or the current generation of a golden%s",
			percent(r.FreeAfter), percent(r.TargetBytes), young)
	}

	return nil
}
