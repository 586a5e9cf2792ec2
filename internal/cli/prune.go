package cli

import (
	"context"
	"errors"
	"fmt"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) pruneCommand() *cobra.Command {
	var q engine.PruneRequest
	var keepFree, olderThan, idle string
	c := &cobra.Command{
		Use:     "prune",
		GroupID: "pool",
		Short:   "Remove the least recently used volumes and unused generations",
		Long: `Removes volumes (with their snapshots), the least recently used first, and
generations from which no volume or snapshot was made and which are not current:
as many as it takes until --keep-free of the pool is free, and only what
--older-than and --idle allow; without --keep-free, all of that. Without any of
them it keeps 10 % free.

What is pinned, mounted or being worked on stays. A volume was used when it was
made, cloned, mounted, unmounted or run in. --dry-run shows the list; without it
each thing is checked once more, at the moment when it goes, and the pruning ends
as soon as enough is free.`,
		Example: "  pando prune --keep-free 20% --dry-run\n  pando prune --idle 7d\n" +
			"  pando prune --older-than 30d --keep-free 15%",
		Args: usage(cobra.NoArgs),
	}

	f := c.Flags()
	f.StringVar(&keepFree, "keep-free", "", "remove until this `PERCENT` of the pool is free, for example 20%")
	f.StringVar(&olderThan, "older-than", "", "only what was made longer than this `DURATION` ago, for example 7d")
	f.StringVar(&idle, "idle", "", "only what was last used longer than this `DURATION` ago, for example 24h")
	f.BoolVar(&q.DryRun, "dry-run", false, "only show what would go")

	c.RunE = func(c *cobra.Command, args []string) (err error) {
		if f.Changed("keep-free") {
			if q.KeepFreePercent, err = parsePercent("prune", keepFree); err != nil {
				return err
			}
			if q.KeepFreePercent == 0 {
				return errs.New(errs.Invalid, "prune", keepFree, "0 %% is always free").
					WithHint("write for example --keep-free 20%%")
			}
		}

		if f.Changed("older-than") {
			if q.OlderThan, err = parseTTL("prune", olderThan); err != nil {
				return err
			}
		}

		if f.Changed("idle") {
			if q.Idle, err = parseTTL("prune", idle); err != nil {
				return err
			}
		}

		if !f.Changed("keep-free") && !f.Changed("older-than") && !f.Changed("idle") {
			q.KeepFreePercent = 10
		}

		return a.with(func(ctx context.Context, e *engine.Engine, _ []string) error {
			var r *engine.PruneReport
			err := a.track(func(t *progress.Tracker) (err error) {
				q.Tracker = t
				r, err = e.Prune(ctx, q)
				return err
			})
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
				result = "would go"
			case !c.Destroyed:
				result = "stays: " + c.Kept
			}
			t.row(c.Ref, c.Kind, ago(c.LastUsedAt), ago(c.CreatedAt), size(c.ExclusiveBytes), result)
		}

		if err := t.flush(); err != nil {
			return err
		}
	} else if a.quiet {
		for _, c := range r.Candidates {
			if c.Destroyed || r.DryRun {
				if err := a.printf("%s\n", c.Ref); err != nil {
					return err
				}
			}
		}
	}

	percent := func(n int64) string { return fmt.Sprintf("%.1f %%", 100*float64(n)/float64(max(r.TotalBytes, 1))) }
	switch {
	case len(r.Candidates) == 0 && r.TargetBytes > 0 && r.Reached:
		a.note("nothing to do: %s of the pool is free", percent(r.FreeBefore))
	case len(r.Candidates) == 0:
		a.note("nothing is eligible for removal")
	case !r.DryRun:
		a.note("returned %s: %s of the pool is free, %s before",
			size(r.FreedBytes), percent(r.FreeAfter), percent(r.FreeBefore))
	}

	if !r.Reached && !r.DryRun {
		young := ""
		if q.Idle > 0 || q.OlderThan > 0 {
			young = ", or too young"
		}
		a.warn("%s of the pool is free, less than the %s wanted: "+
			"what is left is pinned, mounted, or the current generation of a golden%s",
			percent(r.FreeAfter), percent(r.TargetBytes), young)
	}

	return nil
}
