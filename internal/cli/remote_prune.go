package cli

import (
	"context"
	"fmt"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/remote/replicate"

	"github.com/spf13/cobra"
)

func (a *App) remotePruneCommand() *cobra.Command {
	var q replicate.PruneRequest
	var patience, maxRepack string
	c := &cobra.Command{
		Use:   "prune REMOTE [VOLUME...]",
		Short: "Remove points that need not be kept, and return their space",
		Long: `Removes from REMOTE the points of each volume (or of VOLUME...) that no --keep rule
keeps, and then what nothing needs any more. Without a rule all points stay, and only
what was deleted or left by interrupted pushes goes. Whatever the rules say, the
newest point of each volume stays.

Hours, days, weeks, months and years are those of UTC, counted from the newest point
of each volume: a volume that nobody pushes loses nothing by waiting.

Of what stays, only a part may be needed: a segment goes when nothing in it is. If REMOTE
takes more than 1.5 times what its points need, prune reads the segments with the most
waste, writes what is needed of them into packs, and deletes them; many small ones become
few. --max-repack bounds how much one run rewrites: it does the most wasteful part first,
and the next run goes on. Programs older than this one cannot read REMOTE after that.

It may run while others push, pull and prune, from any host; nothing that they need
is removed. What a push had sent when its host died stays until two prunes, at least
--patience apart, have seen no sign of life from it. Of a volume whose list of points
is damaged or lost nothing goes (see ` + "`pando remote repair`" + `); if anything else cannot be
read, nothing is deleted.

Nothing is changed at all (damaged) while REMOTE lacks a list of points that this pool
has seen, or has an older one: what only the newer one names would be removed.
--accept-rollback goes on with what is there, and forgets the rest.`,
		Example: `  pando remote prune backup --keep-last 10 --keep-daily 14 --keep-monthly 6 --dry-run
  pando remote prune backup job-17 --keep-within 48h
  pando remote prune backup --keep-last 10 --max-repack 5G`,
		Args:              usage(cobra.MinimumNArgs(1)),
		ValidArgsFunction: a.completeOnRemote(0),
	}

	f := c.Flags()
	keep := retentionFlags(f)
	f.BoolVar(&q.DryRun, "dry-run", false, "only show what would go")
	f.StringVar(&patience, "patience", "",
		fmt.Sprintf("believe that who gives no sign of life for this `DURATION` is dead (default %v)",
			replicate.DefaultPatience))
	f.BoolVar(&q.AcceptRollback, "accept-rollback", false,
		"go on if the remote has lost lists of points, or was put back to older ones")
	f.StringVar(&maxRepack, "max-repack", "",
		"rewrite at most `SIZE` of wasteful objects, for example 5G; 0 for none (default: no limit)")

	c.RunE = a.with(func(ctx context.Context, e *engine.Engine, args []string) (err error) {
		q.Pool = e
		if q.Policy, err = keep.parse("remote prune"); err != nil {
			return err
		}

		if f.Changed("patience") {
			if q.Patience, err = parseTTL("remote prune", patience); err != nil {
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
				"no --keep rule says which of its points stay").WithHint("for example --keep-last 10; see `pando remote prune " +
				"--help`")
		}

		q.Names = args[1:]
		r, err := a.remote("remote prune", args[0])
		if err != nil {
			return err
		}

		var out *replicate.Pruned
		if err := a.track(func(t *progress.Tracker) (err error) {
			q.Tracker = t
			out, err = replicate.Prune(ctx, r, q)
			return err
		}); err != nil {
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
	return parseSize("remote prune", s)
}

func (a *App) printRemotePruned(remote string, p *replicate.Pruned) error {
	if a.json {
		return a.printJSON(p)
	}

	for _, v := range p.Accepted {
		a.warn("the list of points of %s was lost or put back to an older one: what is there counts from now on", v)
	}

	for _, d := range p.Damaged {
		a.warn("the list of points of %s is damaged or lost: they all stay, with what they need", d)
	}

	if len(p.Damaged) > 0 {
		a.note("make it anew with `pando remote repair %s`", remote)
	}
	if p.KeptAll != "" {
		a.warn("nothing was deleted: %s", p.KeptAll)
	}

	if len(p.Unreadable) > 0 {
		a.note("send again what is missing with `pando verify %s --repair` or `pando push VOLUME --full` on the host that "+
			"writes the volume; `pando remote repair %s` makes lost tables of what was moved anew; then prune again",
			remote, remote)
	}

	for _, w := range p.Ended {
		a.note("ended a %s of %s (pid %d), which gave no sign of life since %s", w.Kind, w.Host, w.PID,
			w.RenewedAt.Local().Format("2006-01-02 15:04:05"))
	}

	if a.quiet {
		for _, x := range p.Points {
			if err := a.printf("%s@%s\n", x.Volume, x.Name); err != nil {
				return err
			}
		}
		return nil
	}

	result := "removed"
	if p.DryRun {
		result = "would go"
	}

	if len(p.Points) > 0 {
		t := a.table("POINT", "CREATED", "RESULT")
		for _, x := range p.Points {
			t.row(x.Volume+"@"+x.Name, ago(x.CreatedAt), result)
		}
		if err := t.flush(); err != nil {
			return err
		}
		if err := a.printf("\n"); err != nil {
			return err
		}
	}

	freed := fmt.Sprintf("%s in %s", size(p.FreedBytes), plural(p.Segments, "segment"))
	if p.DryRun {
		freed = "would be " + freed
	}

	held, used := "", size(p.UsedBytes)
	if p.HeldBytes > 0 {
		held = size(p.HeldBytes) + " for who may still be at work"
	}

	if p.NeededBytes > 0 {
		times := float64(p.UsedBytes) / float64(p.NeededBytes)
		used += fmt.Sprintf(", %.2f times the %s that points need", times, size(p.NeededBytes))
	}

	return a.fields("kept", plural(p.Kept, "point"), "returned", freed, "repacked", repackedText(p),
		"held", held, "used", used)
}

// repackedText says what was, or would be, rewritten; "" if nothing.
func repackedText(p *replicate.Pruned) string {
	if p.RepackedObjects == 0 {
		return ""
	}
	text := fmt.Sprintf("%s in %s", size(p.RepackedBytes), plural(p.RepackedObjects, "object"))
	if p.DryRun {
		return "would be " + text + ", into " + size(p.PackedBytes)
	}
	return text + ", into " + size(p.PackedBytes) + " in " + plural(p.Packs, "pack")
}
