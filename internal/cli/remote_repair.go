package cli

import (
	"cmp"
	"context"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/engine"
	"pando/internal/remote/replicate"

	"github.com/spf13/cobra"
)

func (a *App) remoteRepairCommand() *cobra.Command {
	var q replicate.RepairRequest
	c := &cobra.Command{
		Use:   "repair REMOTE",
		Short: "Rebuild damaged or lost lists of points, and put back a lost config",
		Long: `If the object with the keys of a remote ("config") is damaged or gone, the copy that
this pool has is put back. It is never put over one that is good, and never if this
pool has seen a newer one than its copy.

A remote keeps one list of points for each volume and golden. If such a list is
damaged or gone, this command makes it anew from the points themselves: all whose
data is there come back, also those that were deleted and not yet pruned. Points
of which something is missing are listed, too, so that no prune removes what is
left of them; the newest point is one that is whole.

Any pool that can open REMOTE can do it. It writes only over lists that cannot be
read, and keeps a copy of these in the pool. If this pool pushed the newest point of
a volume, it stays its writer; otherwise a pool has to take the volume over before it
can push it (` + "`pando pull --take-over`" + `).

The exit code is that of damaged (see ` + "`pando exit-codes`" + `) if a list could not be
made anew, or a point could not be brought back whole.`,
		Example:           "  pando remote repair backup --dry-run\n  pando remote repair backup",
		Args:              usage(cobra.ExactArgs(1)),
		ValidArgsFunction: a.completeRemotes,
	}

	c.Flags().BoolVar(&q.DryRun, "dry-run", false, "only show what would be done")

	c.RunE = a.with(func(ctx context.Context, e *engine.Engine, args []string) error {
		r, err := a.remote("remote repair", args[0])
		if err != nil {
			return err
		}

		var out *replicate.Repaired
		if err := a.track(func(t *progress.Tracker) (err error) {
			q.Tracker = t
			out, err = replicate.Repair(ctx, e, r, q)
			return err
		}); err != nil {
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
		return a.printf("config  is missing, damaged or out of date: this pool's copy would be put back\n")
	case out.ConfigRestored:
		if err := a.printf("config  was missing, damaged or out of date: put back this pool's copy\n"); err != nil {
			return err
		}
	}

	if len(out.Volumes) > 0 {
		t := a.table("VOLUME", "WAS", "POINTS", "NOT WHOLE", "RESULT")
		for _, v := range out.Volumes {
			t.row(cmp.Or(v.Volume, v.Object), wasLost(v), itoa(len(v.Points)), orDash(strings.Join(v.Broken, ", ")),
				repairResult(v, out.DryRun))
		}
		if err := t.flush(); err != nil {
			return err
		}
		if err := a.printf("\n"); err != nil {
			return err
		}
	}

	for _, v := range out.Volumes {
		switch {
		case !v.Repaired:
			a.warn("%s: %s", cmp.Or(v.Volume, v.Object), oneLine(v.Reason))
		case !v.Writer && !v.Part:
			a.note("%s has no writer now: on the host that is to push it, take it over with "+
				"`pando pull %s %s --take-over --update`", v.Volume, remote, v.Volume)
		}
	}

	lost := ""
	if n := len(out.Lost); n > 0 {
		lost = plural(n, "point") + " of unknown volumes that cannot be read, for example " + out.Lost[0]
	}

	tables := ""
	if n := len(out.Tables); n > 0 && out.DryRun {
		tables = plural(n, "table") + " of what was moved would be made anew"
	} else if n > 0 {
		tables = plural(n, "table") + " of what was moved made anew"
	}

	return a.fields("good", plural(out.Checked, "list")+" of points", "packs", tables, "lost", lost)
}

func wasLost(v replicate.RepairedVolume) string {
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
