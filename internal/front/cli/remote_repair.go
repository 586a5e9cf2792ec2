package cli

import (
	"cmp"
	"context"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/engine"
	"pando/internal/remote/replicate"

	"github.com/spf13/cobra"
)

func (a *App) remoteRepairCommand() *cobra.Command {
	var q replicate.RepairRequest
	c := &cobra.Command{
		Use:   "repair REMOTE",
		Short: "Rebuild damaged or lost lists of points, and restore a lost config",
		Long: `If the object with the keys of the remote ("config") is damaged or missing,
pando restores this pool's copy of it. It never replaces an intact config, and
never uses a copy older than the newest config that this pool has seen.

A remote has a list of points for each volume and golden. pando rebuilds a
damaged or missing list from the points themselves. All points whose data exists
come back, even points that were deleted but not yet pruned. Incomplete points
are listed too, so that no prune removes what is left of them; the newest point
of the list is a complete one.

Any pool that can open REMOTE can repair it. The command overwrites only lists
that cannot be read, and keeps copies of them in the pool. If this pool pushed
the newest point of a volume, it stays the writer of that volume. Otherwise a
pool has to take the volume over before it can push to it
(` + "`pando pull --take-over`" + `).

The exit code is that of damaged (` + "`pando exit-codes`" + ` lists exit codes) if a list
could not be rebuilt, or a point is still incomplete.`,
		Example:           "  pando remote repair backup --dry-run\n  pando remote repair backup",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeRemotes,
	}

	c.Flags().BoolVar(&q.DryRun, "dry-run", false, "list what would be repaired, and change nothing")

	c.RunE = a.withPool(func(ctx context.Context, e *engine.Engine, args []string) error {
		r, err := a.findRemote("remote repair", args[0])
		if err != nil {
			return err
		}

		ctx, stop := a.showProgress(ctx)
		out, err := replicate.Repair(ctx, e, r, q)
		stop()
		if err != nil {
			return err
		}

		return a.printRepaired(r.Name, out)
	})

	return c
}

func (a *App) printRepaired(remote string, out *replicate.Repaired) error {
	for _, v := range out.Volumes {
		if !v.Repaired || len(v.Broken) > 0 {
			a.exit = errs.Damaged.Codes().Exit
		}
	}

	switch {
	case a.json:
		return a.printJSON(out)
	case a.quiet:
		return nil
	case out.ConfigRestored && out.DryRun:
		return a.printf("config  missing, damaged or out of date: would be restored from this pool's copy\n")
	case out.ConfigRestored:
		a.printf("config  was missing, damaged or out of date: restored from this pool's copy\n")
	}

	if len(out.Volumes) > 0 {
		t := a.table("VOLUME", "WAS", "POINTS", "NOT WHOLE", "RESULT")
		for _, v := range out.Volumes {
			t.row(cmp.Or(v.Volume, v.Object), describeDamage(v), itoa(len(v.Points)), orDash(strings.Join(v.Broken, ", ")),
				repairResult(v, out.DryRun))
		}
		t.flush()
		a.printf("\n")
	}

	for _, v := range out.Volumes {
		switch {
		case !v.Repaired:
			a.printWarning("%s: %s", cmp.Or(v.Volume, v.Object), oneLine(v.Reason))
		case !v.Writer && !v.Part:
			a.printNote("%s has no writer now; on the host that pushes it, take it over with "+
				"`pando pull %s --from %s --take-over --update`", v.Volume, v.Volume, remote)
		}
	}

	lost := ""
	if n := len(out.Lost); n > 0 {
		lost = errs.Plural(n, "point") + " of unknown volumes that cannot be read, for example " + out.Lost[0]
	}

	tables := ""
	if n := len(out.Tables); n > 0 && out.DryRun {
		tables = errs.Plural(n, "table") + " of packs would be rebuilt"
	} else if n > 0 {
		tables = errs.Plural(n, "table") + " of packs rebuilt"
	}

	a.printFields("good", errs.Plural(out.Checked, "list")+" of points", "packs", tables, "lost", lost)
	return nil
}

func describeDamage(v replicate.RepairedVolume) string {
	if v.Missing {
		return "missing"
	}
	return "damaged"
}

func repairResult(v replicate.RepairedVolume, dry bool) string {
	switch {
	case !v.Repaired:
		return "not repaired"
	case dry:
		return "would be repaired"
	}
	return "repaired"
}
