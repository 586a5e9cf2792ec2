package cli

import (
	"context"
	"strconv"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

func (a *App) goldenPublishCommand() *cobra.Command {
	var q engine.PublishRequest
	var keep string
	var overlay func() (*driver.OverlayPolicy, error)
	var labels func() (driver.Labels, error)
	c := &cobra.Command{
		Use:   "publish GOLDEN VOLUME",
		Short: "Create the next generation of a golden from a volume",
		Long: `Create the next generation of GOLDEN from VOLUME, even while VOLUME is in use
(` + "`pando snapshot --help`" + ` explains --freeze and --no-freeze). If GOLDEN does not
exist, pando creates it with generation 1. Clones use the previous generation
until the new one is complete. Fragmented parts are copied into few extents, so
that later clones are fast; all other blocks stay shared.

Publishing fails (conflict) if GOLDEN has a newer generation than the one that
VOLUME was cloned from, so that it cannot undo what others have published.
--force publishes anyway.

With --preset, the generation has no files that clones must not share. A volume
with a process that the preset's rules find, such as dockerd, is refused
(in_use). VOLUME is not changed.`,
		Example: `  pando golden publish web job-17
  pando golden publish web job-17 --keep 5
  pando golden publish images session-3 --preset docker`,
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: a.completeArgs(aGolden, aVolume),
		RunE: a.withPool(func(ctx context.Context, e *engine.Engine, args []string) (err error) {
			if q.Golden, err = goldenName(ctx, e, "publish", args[0]); err != nil {
				return err
			}

			if q.Volume, err = volumeName(ctx, e, "publish", args[1]); err != nil {
				return err
			}

			if q.Keep, err = parseKeep("publish", keep); err != nil {
				return err
			}

			if q.Overlay, err = overlay(); err != nil {
				return err
			}

			added, err := labels()
			if err != nil {
				return err
			}
			q.Labels = added.Map()

			ctx, stop := a.showProgress(ctx)
			out, err := e.Publish(ctx, q)
			stop()
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(out)
			}

			a.noteRemoved(out.Removed)
			a.noteCleaned(q.Preset, out.Cleaned)
			return a.printf("%s\n", ref.Generation(out.Golden, out.Generation))
		}),
	}

	f := c.Flags()
	freezeFlags(f, &q.Freeze)
	f.BoolVar(&q.Force, "force", false, "publish even if GOLDEN has a newer generation than the origin of VOLUME")
	keepFlag(f, &keep)
	presetFlag(c, &q.Preset)
	overlay = overlayPolicyFlag(c, "publish")
	labels = a.labelFlag(c, "publish", "the golden")
	return c
}

// presetFlag adds the flag --preset.
func presetFlag(c *cobra.Command, name *string) {
	c.Flags().StringVar(name, "preset", "",
		"leave out what clones must not share, by `PRESET`: docker, or the path of a file of rules")
	_ = c.RegisterFlagCompletionFunc("preset", cobra.FixedCompletions(engine.Presets(), cobra.ShellCompDirectiveDefault))
}

// noteCleaned tells what a preset left out of a golden.
func (a *App) noteCleaned(preset string, paths []string) {
	if len(paths) > 0 {
		a.printNote("left out by preset %s: %s", preset, strings.Join(paths, ", "))
	}
}

func keepFlag(f *pflag.FlagSet, keep *string) {
	f.StringVar(keep, "keep", "", "keep the newest `N` generations of the golden from now on, or all (default: unchanged)")
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
			WithHint("use a number of at least 1, or all")
	}

	return &n, nil
}

// noteRemoved tells which generations a golden's retention has removed.
func (a *App) noteRemoved(refs []string) {
	if len(refs) > 0 {
		a.printNote("removed by the golden's retention: %s", strings.Join(refs, ", "))
	}
}
