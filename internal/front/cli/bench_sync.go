package cli

import (
	"context"
	"path/filepath"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/base/units"
	"pando/internal/engine"
	"pando/internal/observe/syncbench"

	"github.com/spf13/cobra"
)

// syncFlags is what the command line asks of a measurement.
type syncFlags struct {
	profile, length, size, p99, html string
	runs, writers                    int
	quick, list                      bool
}

// benchSyncHelp is the text of `pando bench sync --help`.
const benchSyncHelp = `Write and sync in a directory as a database does (--profile), using fio, and
report how many syncs per second the storage made and how long they took: p50,
p95, p99, p99.9 and the longest. These are the times of the call that makes a
commit durable, not of the write before it. A time line shows stalls. For each
layer below the directory (filesystem, loop device, filesystem of the pool,
partition, disk), pando counts whether the flushes arrived that the syncs need.
If fewer arrived, if a layer does not pass them on, or if pando cannot prove
that they arrived, the verdict is FAIL with the name of the layer, and pando
ends with exit code 20.

Without an argument, pando measures the current directory. An argument without a
slash that names a volume of the pool is that volume; write ./NAME for a
directory with the same name. A volume that is not mounted is mounted for the
run. Directories need no pool. The benchmark removes its files at the end, even
if it is interrupted; while it runs, it needs as much space as they take
(--list, --size).

The default is one run of two minutes, which covers several cycles of writeback
and of transaction groups. Runs differ, so use --runs 3 or more for reports that
you want to compare with ` + "`pando bench compare`" + `. Other work of the host at the
same time is measured as well. --quick (5 s) shows whether syncs reach the disk,
without a verdict on speed.`

func (a *App) benchSyncCommand() *cobra.Command {
	var q syncFlags
	c := &cobra.Command{
		Use:   "sync [PATH|VOLUME]",
		Short: "Measure the cost of syncs as databases make them, and prove that they reach the disk",
		Long:  benchSyncHelp,
		Example: `  pando bench sync /var/lib/postgresql
  pando bench sync --list
  pando bench sync job-17 --profile innodb --runs 3 --html before.html
  pando bench sync /srv --runs 3 --json > before.json
  pando bench sync /srv --p99 2ms`,
		Args: cobra.MaximumNArgs(1),
		ValidArgsFunction: func(c *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
			if strings.Contains(word, "/") || len(args) > 0 {
				return nil, cobra.ShellCompDirectiveFilterDirs
			}
			names, _ := a.completeArgs(aVolume)(c, args, word)
			dirs, _ := filepath.Glob(word + "*/") // the pattern is of what is typed, and no harm if bad
			return append(names, dirs...), cobra.ShellCompDirectiveNoSpace | cobra.ShellCompDirectiveNoFileComp
		},
	}

	f := c.Flags()
	f.StringVar(&q.profile, "profile", "postgres", "write and sync as this `PROFILE` does (--list prints all)")
	f.BoolVar(&q.list, "list", false, "list the profiles and what they model, and measure nothing")
	f.StringVar(&q.length, "time", "", "measure for this `DURATION` in each run (default 2m, or 5s with --quick)")
	f.IntVar(&q.runs, "runs", 1, "measure `N` times; 3 or more, to compare reports")
	f.BoolVar(&q.quick, "quick", false, "measure for 5 s whether syncs reach the disk, without a verdict on speed")
	f.IntVar(&q.writers, "writers", 0, "write with `N` writers at once (default: as in the profile)")
	f.StringVar(&q.size, "size", "", "use files of `SIZE` bytes in total (default: as in the profile)")
	f.StringVar(&q.p99, "p99", "", "find the highest rate of syncs whose p99 is at most this `DURATION`, for example 2ms")
	f.StringVar(&q.html, "html", "", "also write the report to `FILE`, as an HTML page")
	_ = c.MarkFlagFilename("html", "html", "htm")
	_ = c.RegisterFlagCompletionFunc("profile", func(*cobra.Command, []string, string) ([]string,
		cobra.ShellCompDirective) {
		var out []string
		for _, p := range syncbench.Profiles() {
			out = append(out, p.Name+"\t"+p.Title)
		}
		return out, cobra.ShellCompDirectiveNoFileComp
	})

	c.RunE = func(c *cobra.Command, args []string) error {
		if q.list {
			if len(args) > 0 {
				return errs.New(errs.Invalid, "bench sync", args[0], "--list takes no argument")
			}
			return a.printProfiles(syncbench.Profiles())
		}

		config, err := q.config(c)
		if err != nil {
			return err
		}

		// Before the run, which takes minutes.
		if q.html != "" {
			if q.html, err = pagePath("bench sync", q.html); err != nil {
				return err
			}
		}

		config.Version = a.Version
		return a.benchSync(c.Context(), config, args, q.html)
	}

	return c
}

// config reads the flags. Invalid.
func (q *syncFlags) config(c *cobra.Command) (out syncbench.Config, err error) {
	const op = "bench sync"
	out = syncbench.Config{Profile: q.profile, Runs: q.runs, Quick: q.quick, Writers: q.writers}
	known := false
	for _, p := range syncbench.Profiles() {
		known = known || p.Name == q.profile
	}

	switch {
	case !known:
		return out, errs.New(errs.Invalid, op, q.profile, "unknown profile").
			WithHint("%s", suggestProfile(q.profile))
	case q.runs < 1:
		return out, errs.New(errs.Invalid, op, "", "--runs must be between 1 and %d (got %d)", syncbench.MaxRuns, q.runs).
			WithHint("use 1, or 3 or more to compare reports")
	case q.runs > syncbench.MaxRuns:
		return out, errs.New(errs.Invalid, op, "", "--runs must be between 1 and %d (got %d)", syncbench.MaxRuns, q.runs)
	case c.Flags().Changed("writers") && q.writers < 1:
		return out, errs.New(errs.Invalid, op, "", "--writers must be at least 1 (got %d)", q.writers).
			WithHint("remove --writers to use as many as the profile has")
	}

	if c.Flags().Changed("time") {
		if out.Duration, err = units.ParseDuration(op, q.length); err != nil {
			return out, err
		}
	}

	if c.Flags().Changed("size") {
		if out.SizeBytes, err = units.ParseSize(op, q.size); err != nil {
			return out, err
		}
	}

	if c.Flags().Changed("p99") {
		if out.P99, err = time.ParseDuration(q.p99); err != nil || out.P99 <= 0 {
			return out, errs.New(errs.Invalid, op, q.p99, "not a duration").
				WithHint("use for example --p99 2ms or --p99 500us")
		}
	}

	return out, nil
}

// suggestProfile is a hint for a name that is none.
func suggestProfile(name string) string {
	var names []string
	best := ""
	for _, p := range syncbench.Profiles() {
		names = append(names, p.Name)
		if best == "" && name != "" && (strings.HasPrefix(p.Name, strings.ToLower(name)) ||
			strings.HasPrefix(strings.ToLower(name), p.Name)) {
			best = p.Name
		}
	}

	hint := "the profiles are " + strings.Join(names, ", ") + "; run `pando bench sync --list` to describe them"
	for _, alias := range [][2]string{{"mysql", "innodb"}, {"maria", "innodb"}, {"pg", "postgres"}, {"psql", "postgres"},
		{"sqlite", "sqlite-full"}} {
		if best == "" && strings.HasPrefix(strings.ToLower(name), alias[0]) {
			best = alias[1]
		}
	}

	if best != "" {
		return "did you mean " + best + "? " + strings.ToUpper(hint[:1]) + hint[1:]
	}

	return hint
}

// benchSync measures a directory or a volume, and prints what it has found.
func (a *App) benchSync(ctx context.Context, q syncbench.Config, args []string, page string) error {
	target, done, err := a.syncTarget(ctx, args)
	if err != nil {
		return err
	}

	q.Path, q.Volume, q.NotDurable = target.path, target.volume, target.notDurable
	ctx, stop := a.showProgress(ctx)
	report, err := syncbench.Measure(ctx, q)
	stop()

	// The figures are worth more than what goes wrong with the volume afterwards.
	after := done()
	if err != nil {
		return err
	}
	if report.Verdict.Result != syncbench.Pass {
		a.exit = exitUnproven
	}

	if err := a.showSync(report); err != nil {
		return err
	}

	if page != "" {
		if err := a.writePage("bench sync", page, report); err != nil {
			return err
		}
	}

	return after
}

// syncTarget is what to measure.
type syncTarget struct {
	path       string // a directory
	volume     string // its name, if it is one's
	notDurable string // why nothing in that volume is durable
}

// syncTarget returns what to measure, and what to do afterwards.
func (a *App) syncTarget(ctx context.Context, args []string) (to syncTarget, done func() error, err error) {
	nothing := func() error { return nil }
	if len(args) == 0 {
		return syncTarget{path: "."}, nothing, nil
	}

	word := args[0]
	e, found, err := a.volumeOrPath(ctx, argument{op: "bench sync", text: word, kind: "directory", suggestClone: true},
		a.openPool)
	if e == nil {
		return syncTarget{path: word}, nothing, err
	}

	if found.FS == "none" {
		e.Close()
		return to, nil, errs.New(errs.Invalid, "bench sync", word,
			"the volume is a block device without a filesystem, and measuring would overwrite it").
			WithHint("measure a volume with a filesystem")
	}

	name := ref.MustName(word)
	ctx, tell := a.collectWarnings(ctx)
	v, err := e.Mount(ctx, engine.MountRequest{Volume: name})
	if err != nil {
		e.Close()
		return to, nil, err
	}

	to = syncTarget{path: v.Mountpoint, volume: word}
	if found.Ephemeral {
		to.notDurable = word + " is an ephemeral volume: a reboot removes it, so its syncs buy nothing"
	}

	return to, func() error {
		defer e.Close()
		defer tell()
		if found.Mounted() {
			return nil
		}
		_, err := e.Umount(context.WithoutCancel(ctx), engine.UmountRequest{Volume: name})
		return err
	}, nil
}
