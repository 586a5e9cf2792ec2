package cli

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/base/units"
	"pando/internal/bench"

	"github.com/spf13/cobra"
)

// benchReplicateHelp is the text of `pando bench replicate --help`.
const benchReplicateHelp = `Create two pools and a repository in DIR, write JSON records into a volume of
the first, push it, and restore it in the second. Then let the volume grow
--appends times, and push and refresh each time; push without changes a few
times (the floor of latency); and restore everything into an empty pool. The
restored data is compared with the original. The benchmark measures whole
commands, each followed by a syncfs. Pushes use --no-freeze, because all data is
on the disk before each; --freeze measures pushes that freeze.

The same data then goes through a bare pipeline of read, zstd, AES-GCM and write
in this process, ` + "`btrfs send | zstd`" + ` (without encryption), restic, and
Litestream (the records as rows of an SQLite database), one after the other, if
they are installed.

A --size is DATA+GROWTH, for example 10G+1M. Sizes for which there is no space
are skipped, and the report says so. pando removes everything at the end; the
next run in the same DIR removes leftovers of a killed run.`

func (a *App) benchReplicateCommand() *cobra.Command {
	q := bench.ReplicateConfig{}
	var sizes []string
	var alone bool
	c := &cobra.Command{
		Use:   "replicate",
		Short: "Measure pushes and restores, beside other tools",
		Long:  benchReplicateHelp,
		Example: "  pando bench replicate\n  pando bench replicate --size 1G+1M --size 10G+1M --alone\n  pando bench " +
			"replicate --dir /mnt/fast --json > replicate.json",
		Args: cobra.NoArgs,
	}

	f := c.Flags()
	f.StringVar(&q.Dir, "dir", "", "work in `DIR` (default $TMPDIR)")
	f.StringVar(&q.Driver, "driver", "auto", "create the pools with `DRIVER`")
	f.StringArrayVar(&sizes, "size", nil,
		"measure with this `DATA+GROWTH` in bytes; may be repeated (default 100M+1M, 500M+5M, 2G+10M, 10G+50M)")
	f.IntVar(&q.Appends, "appends", 5, "let the data grow `N` times")
	f.BoolVar(&q.Freeze, "freeze", false, "let each push freeze the filesystem for its snapshot (push --freeze)")
	f.BoolVar(&alone, "alone", false, "measure only pando and the pipeline, not the other tools")
	f.StringSliceVar(&q.Only, "only", nil,
		"measure only these `CONTENDERS`, separated by commas: pando, pipeline, btrfs-send, restic, litestream")

	c.RunE = func(c *cobra.Command, _ []string) (err error) {
		q.Peers = !alone
		if q.Scenarios, err = parseScenarios(sizes); err != nil {
			return err
		}

		if q.Program, err = os.Executable(); err != nil {
			return errs.Wrap("bench", "", err)
		}

		if q.Dir == "" {
			q.Dir = os.TempDir()
		}

		if q.Dir, err = filepath.Abs(q.Dir); err != nil {
			return err
		}

		ctx, stop := a.showProgress(c.Context())
		report, err := bench.Replicate(ctx, q)
		stop()

		switch {
		case err != nil:
			return err
		case a.json:
			return a.printJSON(report)
		}

		return a.printReplicate(report)
	}

	return c
}

func parseScenarios(sizes []string) ([]bench.Scenario, error) {
	if len(sizes) == 0 {
		return bench.Scenarios, nil
	}

	var out []bench.Scenario
	for _, s := range sizes {
		data, growth, ok := strings.Cut(s, "+")
		if !ok {
			return nil, errs.New(errs.Invalid, "bench", s, "--size must be DATA+GROWTH (got %q)", s).
				WithHint("use for example --size 10G+1M")
		}

		base, err := units.ParseSize("bench", data)
		if err != nil {
			return nil, err
		}

		more, err := units.ParseSize("bench", growth)
		if err != nil {
			return nil, err
		}

		out = append(out, bench.Scenario{Base: base, Append: more})
	}

	return out, nil
}

func (a *App) printReplicate(r *bench.ReplicateReport) error {
	for _, s := range r.Scenarios {
		head := fmt.Sprintf("%s, growing by %s", formatBytes(s.Base), formatBytes(s.Append))
		if s.Skipped != "" {
			a.printf("\n%s: not measured: %s\n", head, s.Skipped)
			continue
		}

		a.printHeading(head)

		t := a.table("", "PUSH", "STORED", "RESTORE", "PUSH GROWTH", "STORED", "REFRESH", "PUSH NOTHING", "RESTORE ALL",
			"/ PANDO")
		var own *bench.Transfer
		for i := range s.Transfers {
			x := &s.Transfers[i]
			if x.Name == "pando" {
				own = x
			}

			if x.Skipped != "" {
				t.row(x.Name, "not measured: "+x.Skipped)
				continue
			}

			against := "-"
			if own != nil && own.RestoreAll > 0 {
				against = formatRatio(x.RestoreAll / own.RestoreAll)
			}

			refresh := "-"
			if len(x.Refreshes) > 0 {
				refresh = formatDuration(bench.Median(x.Refreshes))
			}

			t.row(x.Name, formatDuration(x.Push), formatBytes(x.PushBytes), formatDuration(x.Restore),
				formatDuration(bench.Median(x.Appends)),
				formatBytes(x.AppendBytes),
				refresh, formatDuration(bench.Median(x.Idle)), formatDuration(x.RestoreAll), against)
		}

		t.flush()

		if s.Decode > 0 {
			a.printf("decrypting and decompressing everything takes %s; writing everything takes %s\n",
				formatDuration(s.Decode),
				formatDuration(s.Disk))
		}
	}

	a.printVerdicts(r.Targets)
	return nil
}
