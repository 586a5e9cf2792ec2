package cli

import (
	"fmt"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/remote/replicate"

	"github.com/spf13/cobra"
)

// verifyHelp is the text of `pando verify --help`.
const verifyHelp = `Check that REMOTE has everything that its volumes (all, or NAME...) need, and
that it is consistent: each point, its lists of blocks, and each segment with
its expected size. --read-data also reads the data and authenticates each block;
--read-data=5% reads a random sample, a different one each time.

Each problem is reported with the volume, the point and the range of bytes that
it affects. A problem of several points is reported once, with the first of them
and their number. pando also reports lists of points that this pool has seen and
that are lost, or were restored to an older version. Nothing on the remote is
changed. The exit code is 0 if there are no problems, and that of damaged
otherwise (` + "`pando exit-codes`" + ` lists exit codes).

With --repair, pando sends missing and damaged data again for points whose
snapshots or generations are still in this pool, and then checks everything once
more. Points that this pool cannot repair are listed with the host that might be
able to. The exit code is 0 if no problems remain. Damage inside segments is
found only with --read-data. To rebuild lists of points, run
` + "`pando remote repair`" + `.`

func (a *App) verifyCommand() *cobra.Command {
	var q replicate.VerifyRequest
	var read string
	var repair bool
	c := &cobra.Command{
		Use:     "verify [REMOTE [NAME...]]",
		GroupID: "remotes",
		Short:   "Check the data on a remote",
		Long:    verifyHelp,
		Example: "  pando verify backup\n  pando verify backup job-17 --read-data\n  pando verify backup --read-data=5%\n" +
			"  pando verify backup --read-data --repair",
		ValidArgsFunction: a.completeOnRemote(0),
	}

	c.Flags().StringVar(&read, "read-data", "",
		"read and authenticate `PERCENT` of the data, or all data if no value is given")
	c.Flags().Lookup("read-data").NoOptDefVal = "100%"
	c.Flags().BoolVar(&repair, "repair", false, "send missing and damaged data again, if this pool has it")

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
		r, err := a.findRemote("verify", name)
		if err != nil {
			return err
		}

		ctx, tell := a.collectWarnings(c.Context())
		defer tell()

		e, err := a.openPool(ctx)
		switch {
		case err != nil && repair:
			return err
		case err != nil:
			a.printWarning("cannot detect lists of points that were restored to older versions, because this pool cannot be "+
				"opened: %v", err)
		default:
			defer e.Close()
		}

		var out *replicate.Verified
		ctx, stop := a.showProgress(ctx)
		if repair {
			out, err = replicate.VerifyRepair(ctx, e, r, q)
		} else {
			out, err = replicate.Verify(ctx, e, r, q)
		}
		stop()
		if err != nil {
			return err
		}

		a.printVerified(out, q.ReadPercent)

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

	a.printRepairedPoints(v.Repaired)

	for _, w := range v.Warnings {
		a.printWarning("%s", oneLine(w.String()))
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

		t.flush()

		a.printf("\n")
	}

	problems := "none"
	if v.TotalProblems > 0 {
		problems = itoa(v.TotalProblems)
	}
	if a.quiet && v.TotalProblems == 0 {
		return nil
	}

	read, garbage, working, unknown := "no data (use --read-data)", "", "", ""
	switch {
	case percent >= 100:
		read = fmt.Sprintf("all data: %s", formatBytes(v.ReadBytes))
	case percent > 0:
		read = fmt.Sprintf("a sample: %s in %s", formatBytes(v.ReadBytes), errs.Plural(v.ReadSegments, "segment"))
	}

	if v.GarbageCount > 0 {
		garbage = fmt.Sprintf("%s in %s, which the next `pando remote prune` removes", formatBytes(v.GarbageBytes),
			errs.Plural(v.GarbageCount, "object"))
	}

	if v.WorkingBytes > 0 {
		working = formatBytes(v.WorkingBytes) + " of commands at work"
	}

	if n := len(v.Unknown); n > 0 {
		unknown = fmt.Sprintf("%s not written by Pando, for example %s", errs.Plural(n, "object"), v.Unknown[0])
	}

	a.printFields(
		"checked", fmt.Sprintf("%s with %s, in %s (%s)", errs.Plural(v.Volumes, "volume"), errs.Plural(v.Points, "point"),
			errs.Plural(v.Segments, "segment"), formatBytes(v.SegmentBytes)),
		"read", read, "not needed", garbage, "in work", working, "unknown", unknown, "problems", problems,
	)
	return nil
}

// printRepairedPoints says of each point that was not whole what came of it.
func (a *App) printRepairedPoints(points []replicate.RepairedPoint) {
	if len(points) == 0 || a.quiet {
		return
	}

	t := a.table("POINT", "RESULT", "SENT", "FROM", "WHY")
	for _, p := range points {
		result := "repaired"
		if !p.Repaired {
			result = "not repaired"
		}
		t.row(p.Volume+"@"+p.Point, result, formatBytes(p.UploadedBytes), orDash(p.Ref), orDash(oneLine(p.Left())))
	}

	t.flush()

	a.printf("\n")
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
			"not a percentage above 0 and up to 100").WithHint("use for example --read-data=5%%, or --read-data for all data")
	}
	return p, nil
}
