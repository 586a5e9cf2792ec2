package cli

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"pando/internal/engine"
	"pando/internal/errs"
	"pando/internal/progress"
	"pando/internal/ref"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

func (a *App) destroyCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "destroy REF...",
		Aliases: []string{"rm"},
		GroupID: "volumes",
		Short:   "Destroy volumes and snapshots",
		Long: `Destroys volumes (with their snapshots) and snapshots (VOLUME@SNAP). REF may be a
quoted glob over the names of volumes. What is mounted and idle is unmounted;
what is in use stays, and who uses it is named. If a name is unknown nothing is
destroyed.`,
		Example:           "  pando destroy job-17\n  pando destroy 'agent-*'",
		Args:              usage(cobra.MinimumNArgs(1)),
		ValidArgsFunction: a.completeVolumes(0),
		RunE: a.with(func(ctx context.Context, e *engine.Engine, args []string) error {
			what, err := ref.ParsePatterns("destroy", args...)
			if err != nil {
				return err
			}
			var report *engine.DestroyReport
			err = a.track(func(t *progress.Tracker) (err error) {
				report, err = e.Destroy(ctx, engine.DestroyRequest{What: what, Tracker: t})
				return err
			})
			if report == nil {
				return err
			}
			return errors.Join(a.printDestroyed(report), err)
		}),
	}
}

// shownFailures is how many errors people are shown of one command; JSON has all of them.
const shownFailures = 3

// printDestroyed prints what was destroyed; what was not is the error.
func (a *App) printDestroyed(r *engine.DestroyReport) error {
	if a.json {
		if r.Destroyed == nil {
			r.Destroyed = []engine.Destroyed{}
		}
		if err := a.printJSON(r.Destroyed); err != nil {
			return err
		}
	} else if !a.quiet {
		for _, d := range r.Destroyed {
			if err := a.printf("destroyed %s\n", d.Ref); err != nil {
				return err
			}
		}
	}
	for _, d := range r.Destroyed {
		if !d.Reclaimed {
			if d.HeldBy != "" {
				a.warn("%s is destroyed, its space will be returned when nobody uses it any more: %s", d.Ref, d.HeldBy)
				continue
			}
			a.warn("%s is destroyed, its space will be returned by the next command", d.Ref)
		}
	}
	switch len(r.Failed) {
	case 0:
		return nil
	case 1:
		return r.Failed[0]
	}
	// The last one is printed by the caller, and decides the exit code.
	last := len(r.Failed) - 1
	shown := r.Failed[:last]
	if !a.json && len(r.Failed) > shownFailures {
		shown = shown[:shownFailures-1]
	}
	for _, err := range shown {
		a.printError(err)
	}
	if more := last - len(shown); more > 0 {
		fmt.Fprintf(a.Stderr, "pando: and %d more could not be destroyed; the last one:\n", more) // with --quiet too
	}
	return r.Failed[last]
}

func (a *App) goldenCommand() *cobra.Command {
	c := &cobra.Command{
		Use:     "golden",
		Aliases: []string{"goldens"},
		GroupID: "goldens",
		Short:   "Import, publish, list and remove goldens",
		Long: `A golden is a name for a series of generations. A generation is immutable and
numbered from 1; clones are made from the current one unless another is named
(GOLDEN@N).`,
		Args: usage(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(a.goldenImportCommand(), a.goldenPublishCommand(), a.goldenLsCommand(), a.goldenShowCommand(), a.goldenKeepCommand(), a.goldenRmCommand())
	return c
}

func (a *App) goldenPublishCommand() *cobra.Command {
	var q engine.PublishRequest
	var keep string
	c := &cobra.Command{
		Use:   "publish GOLDEN VOLUME",
		Short: "Make the next generation of a golden from a volume",
		Long: `Makes the next generation of GOLDEN (the first, if there is no such golden) from
VOLUME, which may be in use and stays so (see ` + "`pando snapshot --help`" + `, also for
--freeze). Until the new generation is whole, everybody gets the one before. Fragmented parts are copied into few extents, so
that later clones are fast; the rest stays shared.

If GOLDEN has got another generation since VOLUME was made from it, publishing is
refused (conflict): whoever publishes last must not undo what others published.`,
		Example:           "  pando golden publish web job-17\n  pando golden publish web job-17 --keep 5",
		Args:              usage(cobra.ExactArgs(2)),
		ValidArgsFunction: a.completeRefs(2),
		RunE: a.with(func(ctx context.Context, e *engine.Engine, args []string) (err error) {
			if q.Golden, err = ref.ParseName("publish", args[0]); err != nil {
				return err
			}
			if q.Volume, err = ref.ParseName("publish", args[1]); err != nil {
				return err
			}
			if q.Keep, err = parseKeep("publish", keep); err != nil {
				return err
			}
			var out engine.Published
			err = a.track(func(t *progress.Tracker) (err error) {
				q.Tracker = t
				out, err = e.Publish(ctx, q)
				return err
			})
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(out)
			}
			a.noteRemoved(out.Removed)
			return a.printf("%s\n", ref.Generation(out.Golden, out.Generation))
		}),
	}
	f := c.Flags()
	freezeFlags(f, &q.Freeze)
	f.BoolVar(&q.Force, "force", false, "publish although GOLDEN has moved on")
	keepFlag(f, &keep)
	return c
}

func keepFlag(f *pflag.FlagSet, keep *string) {
	f.StringVar(keep, "keep", "", "from now on keep the newest `N` generations of the golden (all: every one)")
}

// parseKeep reads a number of generations; nil if it was not given. Invalid.
func parseKeep(op, s string) (*int, error) {
	n := 0
	switch s {
	case "":
		return nil, nil
	case "all":
		return &n, nil
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		return nil, errs.New(errs.Invalid, op, s, "not a number of generations").
			WithHint("write a number from 1, or all")
	}
	return &n, nil
}

// noteRemoved tells which generations a golden's retention has removed.
func (a *App) noteRemoved(refs []string) {
	if len(refs) > 0 {
		a.note("removed by the golden's retention: %s", strings.Join(refs, ", "))
	}
}

func (a *App) goldenKeepCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "keep GOLDEN N|all",
		Short: "Set how many generations a golden keeps",
		Long: `From now on GOLDEN keeps its newest N generations: older ones are removed at once,
and whenever it gets a new one. Pinned generations stay. Clones are not affected,
but ` + "`pando rebase`" + ` needs the generation that a volume was made from.`,
		Args:              usage(cobra.ExactArgs(2)),
		ValidArgsFunction: a.completeGoldens,
		RunE: a.with(func(ctx context.Context, e *engine.Engine, args []string) error {
			n, err := parseKeep("keep", args[1])
			if err != nil {
				return err
			}
			if n == nil {
				return errs.New(errs.Invalid, "keep", `""`, "not a number of generations").
					WithHint("write a number from 1, or all")
			}
			golden, err := ref.ParseName("keep", args[0])
			if err != nil {
				return err
			}
			removed, err := e.Keep(ctx, engine.KeepRequest{Golden: golden, Generations: *n})
			if err != nil {
				return err
			}
			if a.json {
				if removed == nil {
					removed = []string{}
				}
				return a.printJSON(map[string]any{"golden": args[0], "keep": *n, "removed": removed})
			}
			a.noteRemoved(removed)
			return nil
		}),
	}
}

func (a *App) goldenLsCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List goldens",
		Args:    usage(cobra.NoArgs),
		RunE: a.with(func(ctx context.Context, e *engine.Engine, _ []string) error {
			goldens, err := e.Goldens(ctx)
			if err != nil {
				return err
			}
			switch {
			case a.json:
				return a.printJSON(goldens)
			case a.quiet:
				for _, g := range goldens {
					if err := a.printf("%s\n", g.Name); err != nil {
						return err
					}
				}
				return nil
			case len(goldens) == 0:
				a.note("no goldens; make one with `pando golden import NAME SOURCE`")
				return nil
			}
			t := a.table("NAME", "CURRENT", "GENERATIONS", "VOLUMES", "FS", "LOGICAL", "EXTENTS", "PUBLISHED")
			for _, g := range goldens {
				t.row(g.Name, itoa(g.Generation), itoa(g.Generations), itoa(g.Volumes), g.FS, size(g.LogicalBytes), itoa(int(g.Extents)), ago(g.CreatedAt))
			}
			return t.flush()
		}),
	}
}

func (a *App) goldenShowCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "show GOLDEN[@N]",
		Short:             "Describe a golden and its generations",
		Args:              usage(cobra.ExactArgs(1)),
		ValidArgsFunction: a.completeGoldens,
		RunE: a.with(func(ctx context.Context, e *engine.Engine, args []string) error {
			r, err := ref.Parse("golden show", args[0])
			if err != nil {
				return err
			}
			d, err := e.Show(ctx, r)
			if err != nil {
				return err
			}
			if d.Kind != "golden" {
				return errs.New(errs.NotFound, "golden show", args[0], "there is no such golden; it is a %s", d.Kind).
					WithHint("see `pando show %s`", args[0])
			}
			if a.json {
				return a.printJSON(d)
			}
			return a.printDetail(d)
		}),
	}
}

func (a *App) goldenRmCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "rm GOLDEN[@N]",
		Aliases: []string{"remove"},
		Short:   "Remove a golden, or one generation that is not current",
		Long: `Removes GOLDEN with all its generations, or generation N. Clones are not affected:
they keep every block that they use.`,
		Args:              usage(cobra.ExactArgs(1)),
		ValidArgsFunction: a.completeGoldens,
		RunE: a.with(func(ctx context.Context, e *engine.Engine, args []string) error {
			r, err := ref.Parse("golden rm", args[0])
			if err != nil {
				return err
			}
			report, err := e.RemoveGolden(ctx, r)
			if report == nil {
				return err
			}
			return errors.Join(a.printDestroyed(report), err)
		}),
	}
}
