package cli

import (
	"context"
	"fmt"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/base/units"
	"pando/internal/engine"
	"pando/internal/remote/replicate"

	"github.com/spf13/cobra"
)

// remotePruneHelp is the text of `pando remote prune --help`.
const remotePruneHelp = `Remove points from REMOTE that no --keep rule keeps (of all volumes, or of
VOLUME...), and then all data that no remaining point needs. Without a rule, all
points stay, and only deleted points and leftovers of interrupted pushes are
removed. The newest point of each volume always stays.

Hours, days, weeks, months and years are in UTC and counted back from the newest
point of each volume, so a volume that is no longer pushed does not lose points
over time. Which point is newer is known without clocks; one that is dated later
than the newest takes no other's place.

A segment is removed when no point needs any part of it. If REMOTE takes more
than 1.5 times the space that its points need, prune reads the segments with the
most waste, writes the needed parts into packs, and deletes the segments; many
small segments become few packs. --max-repack limits how much one run rewrites:
it rewrites the most wasteful segments first, and the next run continues. Older
versions of pando cannot read REMOTE after repacking.

Other hosts can push, pull and prune at the same time; nothing that they need is
removed. The data of a push whose host failed stays until two prunes, at least
--patience apart, have seen no activity of that push. If the list of points of a
volume is damaged or lost, all its data stays (run ` + "`pando remote repair`" + ` to
rebuild the list). If anything else cannot be read, nothing is deleted.

Prune fails and changes nothing (damaged) while REMOTE lacks a list of points
that this pool has seen, or has an older version of it, because the data of the
missing points would be removed. --accept-rollback continues with the lists on
REMOTE, and drops the rest.`

func (a *App) remotePruneCommand() *cobra.Command {
	var q replicate.PruneRequest
	var patience, maxRepack string
	c := &cobra.Command{
		Use:   "prune REMOTE [VOLUME...]",
		Short: "Remove old points from a remote, and return their space",
		Long:  remotePruneHelp,
		Example: `  pando remote prune backup --keep-last 10 --keep-daily 14 --keep-monthly 6 --dry-run
  pando remote prune backup job-17 --keep-within 48h
  pando remote prune backup --keep-last 10 --max-repack 5G`,
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: a.completeOnRemote(0),
	}

	f := c.Flags()
	keep := retentionFlags(f)
	f.BoolVar(&q.DryRun, "dry-run", false, "list what would be removed, and change nothing")
	f.StringVar(&patience, "patience", "",
		fmt.Sprintf("treat commands without activity for this `DURATION` as dead (default %v)",
			replicate.DefaultPatience))
	f.BoolVar(&q.AcceptRollback, "accept-rollback", false,
		"continue even if the remote has lost lists of points, or was restored to older ones")
	f.StringVar(&maxRepack, "max-repack", "",
		"rewrite at most `SIZE` bytes of wasteful segments, for example 5G, or 0 for none (default: no limit)")

	c.RunE = a.withPool(func(ctx context.Context, e *engine.Engine, args []string) (err error) {
		if q.Policy, err = keep.parse("remote prune"); err != nil {
			return err
		}

		if f.Changed("patience") {
			if q.Patience, err = units.ParseDuration("remote prune", patience); err != nil {
				return err
			}
		}

		q.MaxRepack = -1
		if f.Changed("max-repack") {
			if q.MaxRepack, err = parseMaxRepack(maxRepack); err != nil {
				return err
			}
		}

		for _, n := range args[1:] {
			if err := ref.CheckName("remote prune", n); err != nil {
				return err
			}
		}

		if len(args) > 1 && q.Policy.IsZero() {
			return errs.New(errs.Invalid, "remote prune", args[1],
				"no --keep rule given").WithHint("add for example --keep-last 10; `pando remote prune --help` lists the rules")
		}

		q.Names = args[1:]
		r, err := a.findRemote("remote prune", args[0])
		if err != nil {
			return err
		}

		ctx, stop := a.showProgress(ctx)
		out, err := replicate.Prune(ctx, e, r, q)
		stop()
		if err != nil {
			return err
		}

		return a.printRemotePruned(r.Name, out)
	})

	return c
}

// parseMaxRepack reads how much may be rewritten: 0 is nothing.
func parseMaxRepack(s string) (int64, error) {
	if s == "0" {
		return 0, nil
	}
	return units.ParseSize("remote prune", s)
}

func (a *App) printRemotePruned(remote string, p *replicate.Pruned) error {
	if a.json {
		return a.printJSON(p)
	}

	a.printPruneNotes(remote, p)
	if a.quiet {
		for _, x := range p.Points {
			a.printf("%s@%s\n", x.Volume, x.Name)
		}
		return nil
	}

	// Print the removed points.
	result := "removed"
	if p.DryRun {
		result = "would be removed"
	}

	if len(p.Points) > 0 {
		t := a.table("POINT", "CREATED", "RESULT")
		for _, x := range p.Points {
			t.row(x.Volume+"@"+x.Name, formatAge(x.CreatedAt), result)
		}
		t.flush()
		a.printf("\n")
	}

	// Print what the remote holds now.
	freed := fmt.Sprintf("%s in %s", formatBytes(p.FreedBytes), errs.Plural(p.Segments, "segment"))
	if p.DryRun {
		freed = "would be " + freed
	}

	held, used := "", formatBytes(p.UsedBytes)
	if p.HeldBytes > 0 {
		held = formatBytes(p.HeldBytes) + " for commands that may still be at work"
	}

	if p.NeededBytes > 0 {
		times := float64(p.UsedBytes) / float64(p.NeededBytes)
		used += fmt.Sprintf(", %.2f times the %s that points need", times, formatBytes(p.NeededBytes))
	}

	a.printFields("kept", errs.Plural(p.Kept, "point"), "returned", freed, "repacked", repackedText(p),
		"held", held, "used", used)
	return nil
}

// printPruneNotes warns about lists of points that were lost or damaged, and about data that could not be read.
func (a *App) printPruneNotes(remote string, p *replicate.Pruned) {
	for _, v := range p.Accepted {
		a.printWarning("the list of points of %s was lost or restored to an older version; continuing with what the "+
			"remote holds", v)
	}

	for _, d := range p.Damaged {
		a.printWarning("the list of points of %s is damaged or lost: kept all its points and their data", d)
	}

	if len(p.Damaged) > 0 {
		a.printNote("rebuild the list with `pando remote repair %s`", remote)
	}
	if p.KeptAll != "" {
		a.printWarning("nothing was deleted: %s", p.KeptAll)
	}

	if len(p.Unreadable) > 0 {
		a.printNote("send missing data again with `pando verify %s --repair` or `pando push VOLUME --full` on the host that "+
			"writes the volume, and rebuild lost tables of packs with `pando remote repair %s`; then prune again",
			remote, remote)
	}

	for _, w := range p.Ended {
		if w.Unreadable {
			a.printNote("ended an operation whose record cannot be read, and that showed no life in the meantime")
			continue
		}
		a.printNote("ended a %s of %s (pid %d), inactive since %s", w.Op, w.Host, w.PID,
			w.RenewedAt.Local().Format("2006-01-02 15:04:05"))
	}
}

// repackedText says what was, or would be, rewritten; "" if nothing.
func repackedText(p *replicate.Pruned) string {
	if p.RepackedObjects == 0 {
		return ""
	}
	text := fmt.Sprintf("%s in %s", formatBytes(p.RepackedBytes), errs.Plural(p.RepackedObjects, "object"))
	if p.DryRun {
		return "would be " + text + ", into " + formatBytes(p.PackedBytes)
	}
	return text + ", into " + formatBytes(p.PackedBytes) + " in " + errs.Plural(p.Packs, "pack")
}
