package cli

import (
	"context"
	"errors"
	"fmt"

	"pando/internal/engine"
	"pando/internal/errs"
	"pando/internal/progress"

	"github.com/spf13/cobra"
)

func (a *App) gcCommand() *cobra.Command {
	explain := false
	c := &cobra.Command{
		Use:     "gc",
		GroupID: "pool",
		Short:   "Clean up, and return free space",
		Long: `Removes what was destroyed, what was half made when a process died, volumes whose
time to live is over, and generations that their golden does not keep; detaches
loop devices that nothing accounts for; and returns the free space of a pool in a
sparse file to the filesystem below. Every command does the urgent part of this
by itself, within a bound; gc looks at everything and takes the time it needs. It
never removes what it does not understand: that is reported.

With --explain it measures what each thing that it removes returns to the pool,
and says of everything else why it stays: pinned until when, mounted where, held
by which process in which mount namespace, made from by what.`,
		Args: usage(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			e, err := engine.Open(c.Context(), a.poolDir(), a.Drivers, engine.ShortLived)
			if err != nil {
				return err
			}
			defer e.Close()
			r, err := e.GC(c.Context(), explain)
			if err != nil {
				return err
			}
			return a.printGC(r, explain)
		},
	}
	c.Flags().BoolVar(&explain, "explain", false, "say why everything stays, and what each thing that goes returns")
	return c
}

func (a *App) printGC(r *engine.GCReport, explain bool) error {
	if a.json {
		return a.printJSON(r)
	}
	for _, w := range r.Warnings {
		a.warn("%s", w)
	}
	for _, k := range r.Kept {
		a.warn("%s", k)
	}
	for _, m := range r.Missing {
		a.warn("%s is in the catalogue, but its data is gone", m)
	}
	if a.quiet {
		return nil
	}
	host := ""
	if r.TrimmedBytes > 0 {
		host = fmt.Sprintf("%s given back by the pool's file", size(r.HostFreed))
	}
	expired, untied := "", ""
	if r.Untied > 0 {
		untied = plural(r.Untied, "thing") + " that others needed when it was destroyed"
	}
	if r.Expired+r.Retired > 0 {
		expired = fmt.Sprintf("%s whose time was over, %s not kept any more", plural(r.Expired, "volume"), plural(r.Retired, "generation"))
	}
	if err := a.fields(
		"looked at", plural(r.Objects, "object"),
		"removed", fmt.Sprintf("%s half made or half destroyed, %d destroyed earlier", plural(r.Garbage, "object"), r.Reclaimed),
		"expired", expired, "untied", untied,
		"detached", fmt.Sprintf("%s, %d stale attachments forgotten", plural(r.Loops, "block device"), r.Detached),
		"returned", size(r.FreedBytes)+" in the pool",
		"host", host,
	); err != nil || !explain {
		return err
	}
	if len(r.Freed) > 0 {
		if err := a.printf("\n"); err != nil {
			return err
		}
		t := a.table("REMOVED", "RETURNED", "WHY")
		for _, f := range r.Freed {
			bytes := "-"
			if f.Bytes >= 0 {
				bytes = size(f.Bytes)
			}
			t.row(f.Ref, bytes, f.Why)
		}
		if err := t.flush(); err != nil {
			return err
		}
	}
	if len(r.KeptThings) == 0 {
		return nil
	}
	if err := a.printf("\n"); err != nil {
		return err
	}
	t := a.table("KEPT", "KIND", "WHY")
	for _, k := range r.KeptThings {
		for i, m := range k.Why {
			why := words(m)
			switch {
			case i > 0:
				t.row("", "", why)
			case k.Kind == "tie":
				t.row(k.Ref, k.Kind, why+" ("+size(k.Bytes)+")")
			default:
				t.row(k.Ref, k.Kind, why)
			}
		}
	}
	return t.flush()
}

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
		Example: "  pando prune --keep-free 20% --dry-run\n  pando prune --idle 7d\n  pando prune --older-than 30d --keep-free 15%",
		Args:    usage(cobra.NoArgs),
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
		a.note("nothing may go")
	case !r.DryRun:
		a.note("returned %s: %s of the pool is free, %s before", size(r.FreedBytes), percent(r.FreeAfter), percent(r.FreeBefore))
	}
	if !r.Reached && !r.DryRun {
		young := ""
		if q.Idle > 0 || q.OlderThan > 0 {
			young = ", or too young"
		}
		a.warn("%s of the pool is free, less than the %s wanted: what is left is pinned, mounted, or the current generation of a golden%s",
			percent(r.FreeAfter), percent(r.TargetBytes), young)
	}
	return nil
}
