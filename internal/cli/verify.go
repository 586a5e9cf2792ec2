package cli

import (
	"fmt"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/remote/replicate"

	"github.com/spf13/cobra"
)

func (a *App) verifyCommand() *cobra.Command {
	var q replicate.VerifyRequest
	var read string
	var repair bool
	c := &cobra.Command{
		Use:     "verify [REMOTE [NAME...]]",
		GroupID: "remotes",
		Short:   "Check what a remote holds",
		Long: `Checks that everything that the volumes on REMOTE (all, or NAME...) need is there
and belongs together: each point, the lists of its blocks, and each segment with
the size that it must have. With --read-data the data is read too, and each block
authenticated; --read-data=5% reads a sample, drawn anew each time.

What is wrong is reported with the volume, the point and the range of bytes that
it affects; what several points need is reported once, with the first of them and
their number. So is a list of points that this pool has seen and that is lost, or was
put back to an older one. Nothing on the remote is changed. The exit code is 0 if
nothing is wrong, otherwise that of damaged (see ` + "`pando exit-codes`" + `).

With --repair, points are made whole again whose snapshots or generations are in this
pool: what is missing or damaged of them is sent once more, and then all is checked
again. What this pool does not have is listed, with the host that could bring it back.
The exit code is 0 if nothing is wrong any more. Damage inside segments is found only
with --read-data. Lists of points are made anew by ` + "`pando remote repair`" + `.`,
		Example: "  pando verify backup\n  pando verify backup job-17 --read-data\n  pando verify backup --read-data=5%\n" +
			"  pando verify backup --read-data --repair",
		ValidArgsFunction: a.completeOnRemote(0),
	}

	c.Flags().StringVar(&read, "read-data", "", "read and check all data, or a `PERCENT` of it")
	c.Flags().Lookup("read-data").NoOptDefVal = "100%"
	c.Flags().BoolVar(&repair, "repair", false, "send again what is missing or damaged, if this pool has it")

	c.RunE = func(c *cobra.Command, args []string) (err error) {
		if c.Flags().Changed("read-data") {
			if q.ReadPercent, err = parseSample(read); err != nil {
				return err
			}
		}

		name := ""
		if len(args) > 0 {
			name, args = args[0], args[1:]
		}

		for _, n := range args {
			if err := ref.CheckName("verify", n); err != nil {
				return err
			}
		}

		q.Names = args
		r, err := a.remote("verify", name)
		if err != nil {
			return err
		}

		ctx, tell := a.reporting(c.Context())
		defer tell()

		if e, err := a.open(ctx); err != nil && repair {
			return err
		} else if err != nil {
			a.warn("lists of points that were put back to older ones are not noticed, as this pool cannot be opened: %v", err)
		} else {
			defer e.Close()
			q.Pool = e
		}

		var out *replicate.Verified
		if err := a.track(func(t *progress.Tracker) (err error) {
			q.Tracker = t
			if repair {
				out, err = replicate.VerifyRepair(ctx, q.Pool, r, q)
			} else {
				out, err = replicate.Verify(ctx, r, q)
			}
			return err
		}); err != nil {
			return err
		}

		if err := a.printVerified(out, q.ReadPercent); err != nil {
			return err
		}

		if out.TotalProblems > 0 {
			a.exit = errs.Damaged.Codes().Exit
		}

		return nil
	}

	return c
}

func (a *App) printVerified(v *replicate.Verified, percent float64) error {
	if a.json {
		return a.printJSON(v)
	}

	if err := a.printRepairedPoints(v.Repaired); err != nil {
		return err
	}

	for _, w := range v.Warnings {
		a.warn("%s", oneLine(w.String()))
	}

	if len(v.Problems) > 0 {
		t := a.table("WHERE", "BYTES", "OBJECT", "PROBLEM")
		for _, p := range v.Problems {
			where, bytes := orDash(p.Volume), "-"
			if p.Point != "" {
				where += "@" + p.Point
			}
			if p.Length > 0 {
				bytes = fmt.Sprintf("%d to %d", p.Offset, p.Offset+p.Length-1)
			}
			t.row(where, bytes, orDash(p.Object), oneLine(p.Message+p.Count()))
		}

		if err := t.flush(); err != nil {
			return err
		}

		if err := a.printf("\n"); err != nil {
			return err
		}
	}

	problems := "none"
	if v.TotalProblems > 0 {
		problems = itoa(v.TotalProblems)
	}
	if a.quiet && v.TotalProblems == 0 {
		return nil
	}

	read, garbage, working, unknown := "nothing of the data (--read-data)", "", "", ""
	switch {
	case percent >= 100:
		read = fmt.Sprintf("all data: %s", size(v.ReadBytes))
	case percent > 0:
		read = fmt.Sprintf("a sample: %s in %s", size(v.ReadBytes), plural(v.ReadSegments, "segment"))
	}

	if v.GarbageCount > 0 {
		garbage = fmt.Sprintf("%s in %s, which the next `pando remote prune` removes", size(v.GarbageBytes),
			plural(v.GarbageCount, "object"))
	}

	if v.WorkingBytes > 0 {
		working = size(v.WorkingBytes) + " of who is at work"
	}

	if n := len(v.Unknown); n > 0 {
		unknown = fmt.Sprintf("%s that Pando did not write, for example %s", plural(n, "object"), v.Unknown[0])
	}

	return a.fields(
		"checked", fmt.Sprintf("%s with %s, in %s (%s)", plural(v.Volumes, "volume"), plural(v.Points, "point"),
			plural(v.Segments, "segment"), size(v.SegmentBytes)),
		"read", read, "not needed", garbage, "in work", working, "unknown", unknown, "problems", problems,
	)
}

// printRepairedPoints says of each point that was not whole what came of it.
func (a *App) printRepairedPoints(points []replicate.RepairedPoint) error {
	if len(points) == 0 || a.quiet {
		return nil
	}

	t := a.table("POINT", "RESULT", "SENT", "FROM", "WHY")
	for _, p := range points {
		result := "repaired"
		if !p.Repaired {
			result = "not repaired"
		}
		t.row(p.Volume+"@"+p.Point, result, size(p.UploadedBytes), orDash(p.Ref), orDash(oneLine(p.Left())))
	}

	if err := t.flush(); err != nil {
		return err
	}

	return a.printf("\n")
}

// parseSample reads which part of the data is to be read, above 0 to 100 %.
// Invalid.
func parseSample(s string) (float64, error) {
	if s == "100%" || s == "100" {
		return 100, nil
	}
	p, err := parsePercent("verify", s)
	if err != nil || p == 0 {
		return 0, errs.New(errs.Invalid, "verify", s,
			"not a percentage above 0 and up to 100").WithHint("write for example --read-data=5%%, or --read-data for everything")
	}
	return p, nil
}
