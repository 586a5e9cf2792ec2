package cli

import (
	"fmt"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/engine/check"

	"github.com/spf13/cobra"
)

func (a *App) fsckCommand() *cobra.Command {
	var q check.Request
	c := &cobra.Command{
		Use:     "fsck [REF...]",
		GroupID: "pool",
		Short:   "Check the pool, its catalogue and the filesystems inside images",
		Long: `Compare the contents of the pool with the catalogue, and check the filesystems
inside images with e2fsck and xfs_repair: those of REF..., or all. Volumes may
be in use: each filesystem is checked on a copy of a single point in time, which
takes no space and is removed again. Without --repair, nothing is changed.

With --repair, pando repairs what it finds: differences between pool and
catalogue, and filesystems of volumes that are not mounted. It repairs a copy,
which replaces the volume only if a second check finds it clean; the damaged
content stays as the snapshot before-fsck-TIME. Volumes in use, snapshots and
goldens are never repaired.

The exit code is 0 if there are no problems, or if all of them were repaired,
and that of damaged otherwise (` + "`pando exit-codes`" + ` lists exit codes). Notes do
not count as problems: the next command or gc takes care of them.`,
		Example:           "  pando fsck\n  pando fsck job-17 --repair\n  pando fsck --json | jq '.findings[]'",
		ValidArgsFunction: a.completeEvery(anyRef),
	}

	c.Flags().BoolVar(&q.Repair, "repair", false, "mend what is found")

	c.RunE = func(c *cobra.Command, args []string) error {
		for _, s := range args {
			r, err := ref.Parse("fsck", s)
			if err != nil {
				return err
			}
			q.Refs = append(q.Refs, r)
		}

		ctx, stop := a.showProgress(c.Context())
		r, err := engine.Fsck(ctx, a.poolDir(), q, a.Drivers)
		stop()
		if err != nil {
			return err
		}

		if !r.OK {
			a.exit = errs.Damaged.Codes().Exit
		}

		return a.printFsck(r, q.Repair)
	}

	return c
}

// printFsck prints the findings and, on standard error, a summary.
func (a *App) printFsck(r *check.Report, repair bool) error {
	if a.json {
		return a.printJSON(r)
	}

	if len(r.Findings) > 0 {
		a.printFindings(r, repair)
	}

	for _, n := range r.Notes {
		a.printNote("%s", n)
	}

	// Say what was checked.
	k := r.Checked
	inside := errs.Plural(k.Images, "filesystem")
	if k.Trees > 0 {
		inside = errs.Plural(k.Trees, "tree")
	}
	if k.Shared > 0 {
		inside += fmt.Sprintf(" (and %s with the same blocks)", errs.Plural(k.Shared, "image"))
	}
	if k.Busy > 0 {
		a.printNote("%s left out: other commands are at work on them", errs.Plural(k.Busy, "object"))
	}

	a.printNote("checked %s, %s and the catalogue: %s", errs.Plural(k.Objects, "object"), inside, fsckVerdict(r))
	return nil
}

// fsckVerdict sums up how many findings were repaired, and how many are left.
func fsckVerdict(r *check.Report) string {
	left, repaired := 0, 0
	for _, f := range r.Findings {
		switch {
		case f.Repaired != "":
			repaired++
		case f.Severity != "note":
			left++
		}
	}

	switch {
	case left > 0 && repaired > 0:
		return fmt.Sprintf("%d repaired, %d still wrong", repaired, left)
	case left > 0:
		return fmt.Sprintf("%d wrong", left)
	case repaired > 0:
		return fmt.Sprintf("%d repaired", repaired)
	}

	return "nothing is wrong"
}

// printFindings prints a table of the findings, then their details.
func (a *App) printFindings(r *check.Report, repair bool) {
	last := "REPAIR"
	if repair {
		last = "RESULT"
	}

	t := a.table("SEVERITY", "CODE", "WHERE", "WHAT", last)
	for _, f := range r.Findings {
		result := renderMessage(f.Repair)
		switch {
		case repair && f.Repaired != "":
			result = f.Repaired
		case f.Failed != "":
			result = "not repaired: " + f.Failed
		}
		t.row(f.Severity, f.Code, f.Ref, oneLine(renderMessage(f.Message)), orDash(oneLine(result)))
	}

	t.flush()

	for _, f := range r.Findings {
		if f.Detail == "" || a.quiet {
			continue
		}
		a.printf("\n%s:\n", f.Ref)
		for l := range strings.Lines(f.Detail) {
			a.printf("  %s\n", strings.TrimRight(l, "\n"))
		}
	}
}

// oneLine keeps a text from breaking a table.
func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }
