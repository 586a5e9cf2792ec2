package cli

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/bench"

	"github.com/spf13/cobra"
)

func (a *App) benchReplicateCommand() *cobra.Command {
	q := bench.ReplicateConfig{}
	var sizes []string
	var alone bool
	c := &cobra.Command{
		Use:   "replicate",
		Short: "Measure pushes and restores, beside other tools",
		Long: `Makes two pools and a repository in DIR, writes JSON records into a volume of the
first, pushes it, restores it in the second, lets it grow --appends times, pushes
and refreshes each time, pushes nothing a few times (the floor of latency), and
restores everything into an empty pool. What comes back is compared with what was
written. Whole commands are measured, with a syncfs behind each. Pushes are made with
--no-freeze, since all data is on the disk before each; --freeze measures the others.

The same data then goes through a bare pipeline of read, zstd, AES-GCM and write in
this process, ` + "`btrfs send | zstd`" + ` (no encryption), restic, and Litestream (the records
as rows of an SQLite database): each where it is installed, one after the other.

A --size is DATA+GROWTH, such as 10G+1M. What there is no room for is left out,
and the report says so. Everything is removed at the end; what a killed run has
left, the next one in the same DIR removes.`,
		Example: "  pando bench replicate\n  pando bench replicate --size 1G+1M --size 10G+1M --alone\n  pando bench " +
			"replicate --dir /mnt/fast --json > replicate.json",
		Args: usage(cobra.NoArgs),
	}

	f := c.Flags()
	f.StringVar(&q.Dir, "dir", "", "work in `DIR` (default $TMPDIR)")
	f.StringVar(&q.Driver, "driver", "auto", "driver of the pools")
	f.StringArrayVar(&sizes, "size", nil,
		"data and growth, `DATA+GROWTH`; repeatable (default 100M+1M, 500M+5M, 2G+10M, 10G+50M)")
	f.IntVar(&q.Appends, "appends", 5, "how often the data grows")
	f.BoolVar(&q.Freeze, "freeze", false, "let each push freeze the filesystem for its snapshot (push --freeze)")
	f.BoolVar(&alone, "alone", false, "leave the other tools out, not the pipeline")
	f.StringSliceVar(&q.Only, "only", nil, "only these `CONTENDERS`: pando, pipeline, btrfs-send, restic, litestream")

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

		var report *bench.ReplicateReport
		err = a.track(func(t *progress.Tracker) (err error) {
			q.Tracker = t
			report, err = bench.Replicate(c.Context(), q)
			return err
		})

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
			return nil, errs.New(errs.Invalid, "bench", s, "it is not DATA+GROWTH").
				WithHint("for example --size 10G+1M")
		}

		base, err := parseSize("bench", data)
		if err != nil {
			return nil, err
		}

		more, err := parseSize("bench", growth)
		if err != nil {
			return nil, err
		}

		out = append(out, bench.Scenario{Base: base, Append: more})
	}

	return out, nil
}

func (a *App) printReplicate(r *bench.ReplicateReport) error {
	for _, s := range r.Scenarios {
		head := fmt.Sprintf("%s, growing by %s", size(s.Base), size(s.Append))
		if s.Skipped != "" {
			if err := a.printf("\n%s: not measured: %s\n", head, s.Skipped); err != nil {
				return err
			}
			continue
		}

		if err := a.heading(head); err != nil {
			return err
		}

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
				against = ratio(x.RestoreAll / own.RestoreAll)
			}

			refresh := "-"
			if len(x.Refreshes) > 0 {
				refresh = duration(bench.Median(x.Refreshes))
			}

			t.row(x.Name, duration(x.Push), size(x.PushBytes), duration(x.Restore), duration(bench.Median(x.Appends)),
				size(x.AppendBytes),
				refresh, duration(bench.Median(x.Idle)), duration(x.RestoreAll), against)
		}

		if err := t.flush(); err != nil {
			return err
		}

		if s.Decode > 0 {
			if err := a.printf("only to decrypt and decompress all: %s; only to write all: %s\n", duration(s.Decode),
				duration(s.Disk)); err != nil {
				return err
			}
		}
	}

	return a.printVerdicts(r.Targets)
}
