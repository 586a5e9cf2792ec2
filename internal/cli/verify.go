package cli

import (
	"pando/internal/errs"
	"pando/internal/progress"
	"pando/internal/ref"
	"pando/internal/replicate"

	"github.com/spf13/cobra"
)

func (a *App) verifyCommand() *cobra.Command {
	var q replicate.VerifyRequest
	var read string
	c := &cobra.Command{
		Use:     "verify [REMOTE [NAME...]]",
		GroupID: "remotes",
		Short:   "Check what a remote holds",
		Long: `Checks that everything that the volumes on REMOTE (all, or NAME...) need is there
and belongs together: each point, the lists of its blocks, and each segment with
the size that it must have. With --read-data the data is read too, and each block
authenticated; --read-data=5% reads a sample, drawn anew each time.

What is wrong is reported with the volume, the point and the range of bytes that
it affects. Nothing is changed. The exit code is 0 if nothing is wrong, otherwise
that of damaged (see ` + "`pando exit-codes`" + `).`,
		Example:           "  pando verify backup\n  pando verify backup job-17 --read-data\n  pando verify backup --read-data=5%",
		ValidArgsFunction: a.completeOnRemote(0),
	}
	c.Flags().StringVar(&read, "read-data", "", "read and check all data, or a `PERCENT` of it")
	c.Flags().Lookup("read-data").NoOptDefVal = "100%"
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
		var out replicate.Verified
		if err := a.track(func(t *progress.Tracker) (err error) {
			q.Tracker = t
			out, err = replicate.Verify(c.Context(), r, q)
			return err
		}); err != nil {
			return err
		}
		_ = out
		return nil
	}
	return c
}

// parseSample reads which part of the data is to be read, above 0 to 100 %.
// Invalid.
func parseSample(s string) (float64, error) {
	if s == "100%" || s == "100" {
		return 100, nil
	}
	p, err := parsePercent("verify", s)
	if err != nil || p == 0 {
		return 0, errs.New(errs.Invalid, "verify", s, "not a percentage above 0 and up to 100").WithHint("write for example --read-data=5%%, or --read-data for everything")
	}
	return p, nil
}
