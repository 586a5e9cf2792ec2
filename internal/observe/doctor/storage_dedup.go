package doctor

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"pando/internal/base/errs"
)

// deduplicators are programs that search btrfs and XFS for equal blocks.
var deduplicators = []string{"bees", "beesd", "duperemove", "dduper"}

// checkDedup finds dedup tables that cost much, and deduplicating programs.
func checkDedup(ctx context.Context, _ *host, c *Report) error {
	// Dedup tables: only what their memory costs; `pando doctor --zfs` reports the rest.
	pools, why := zpools(ctx)
	for _, p := range pools {
		f := &Facts{Pool: p}
		if err := f.readDDT(ctx); err != nil {
			why = fmt.Sprintf("the dedup table of zpool %s: %v", p, err)
			continue
		}

		f.readMemory()
		var table Report
		f.findUnknownTable(&table)
		f.findTableMemory(&table)
		for _, x := range table.Findings {
			x.Subject, x.Title = p, fmt.Sprintf("zpool %s: %s", p, x.Title)
			x.Do = []Step{step("list its cost and savings, and the steps to stop using dedup",
				"pando doctor --zfs "+word(p))}
			c.find(x)
		}
	}

	// Programs.
	running, err := c.findDeduplicators(ctx)
	if err != nil {
		return err
	}

	c.measure(count("zpools", "zpools", len(pools)),
		count("programs", "programs that deduplicate", running))
	verb := " that deduplicate"
	if running == 1 {
		verb = " that deduplicates"
	}

	c.Summary = errs.JoinSet("; ", errs.Plural(len(pools), "zpool"), errs.Plural(running, "program")+verb, why)

	return nil
}

// findDeduplicators reports running programs that deduplicate, and returns their number.
func (c *Report) findDeduplicators(ctx context.Context) (running int, err error) {
	err = eachProcess(ctx, func(pid int, dir string) {
		name := readText(dir, "comm")
		if !slices.Contains(deduplicators, name) {
			return
		}

		running++
		exe, err := os.Readlink(filepath.Join(dir, "exe"))
		if err != nil {
			exe = name
		}

		c.find(Finding{
			Code: "dedup-program", Severity: Note, Subject: fmt.Sprint(pid),
			Title:    fmt.Sprintf("%s is running (process %d): it makes the filesystem share equal blocks", name, pid),
			Measured: []Figure{words("program", "program", exe)},
			Why: "It competes with other programs for the disk, locks the files it compares, and splits extents, which makes " +
				"images slow to clone. Clones of a golden share their blocks without it.",
			Do: []Step{{Text: "exclude the pool from it; the check fragmentation shows its effect on goldens"}},
		})
	})
	return running, err
}
