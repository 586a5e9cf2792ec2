package cli

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/observe/iostat"

	"github.com/spf13/cobra"
	"golang.org/x/term"
)

// iostatRequest is what is to be watched, and how.
type iostatRequest struct {
	volumes  []string
	paths    []string
	interval time.Duration
	count    int
	tail     time.Duration
	command  []string
}

// shortestInterval is as often as it makes sense: the kernel's own counts of flushes have
// a resolution of a few milliseconds.
const shortestInterval = 100 * time.Millisecond

// iostatHelp is the text of `pando iostat --help`.
const iostatHelp = `Print every --interval what volumes write: the bytes that their filesystems pass
to their devices, requests, flushes, syncs of programs and their duration, and
the write amplification, which is the bytes at the disk for each byte of the
volume. Below are the layers that volumes share, once each, with the writes that
came from elsewhere. Without VOLUME, pando watches all mounted volumes of the
pool as they come and go. --path watches the filesystem of a directory, and
needs no pool.

The first interval is measured like every other, and is not the average since
boot. Ctrl-C ends the command with exit code 0. With --json, pando prints one
line of JSON for each interval.

With COMMAND, pando runs the command and measures writes until they have died
down, in two parts: while the command runs, and after it (the tail, at most
--tail). The output of the command goes to standard output and the table to
standard error; with --json it is the other way round. The exit code is that of
the command. pando syncs the watched filesystems first, so that earlier writes
do not count.

docs/iostat.md explains what is counted, and what cannot be told apart.`

func (a *App) iostatCommand() *cobra.Command {
	q := iostatRequest{interval: time.Second, tail: time.Minute}
	c := &cobra.Command{
		Use:     "iostat [VOLUME...] [--path DIR...] [-- COMMAND [ARG...]]",
		GroupID: "tools",
		Short:   "Show what volumes write at each layer, down to the disk",
		Long:    iostatHelp,
		Example: "  pando iostat\n  pando iostat job --interval 5s --count 12\n  pando iostat --path /var/lib/postgresql " +
			"--json\n  pando iostat job -- make -C /mnt/job",
		Args: cobra.ArbitraryArgs, ValidArgsFunction: a.completeEvery(aVolume),
	}

	f := c.Flags()
	f.StringArrayVar(&q.paths, "path", nil, "watch the filesystem of `DIR`; may be repeated")
	f.DurationVar(&q.interval, "interval", q.interval, "print every `DURATION`, at least 100ms")
	f.IntVar(&q.count, "count", 0, "end after `N` intervals (default: when interrupted)")
	f.DurationVar(&q.tail, "tail", q.tail, "wait at most this `DURATION` for writes to end after COMMAND")
	_ = c.MarkFlagDirname("path")
	c.RunE = func(c *cobra.Command, args []string) error {
		if n := c.ArgsLenAtDash(); n >= 0 {
			args, q.command = args[:n], args[n:]
			if len(q.command) == 0 {
				return errs.New(errs.Invalid, "watch", "", "no command after --").
					WithHint("run `pando iostat VOLUME -- COMMAND`")
			}
		}

		switch {
		case q.interval < shortestInterval:
			return errs.New(errs.Invalid, "watch", "", "--interval must be at least %s (got %s)", shortestInterval, q.interval).
				WithHint("use for example --interval 1s")
		case q.count < 0:
			return errs.New(errs.Invalid, "watch", "", "--count must not be negative (got %d)", q.count).
				WithHint("remove --count to run until interrupted")
		case q.tail < 0:
			return errs.New(errs.Invalid, "watch", "", "--tail must not be negative (got %s)", q.tail)
		case len(q.command) > 0 && (f.Changed("interval") || f.Changed("count")):
			return errs.New(errs.Invalid, "watch", "",
				"--interval and --count cannot be combined with a command, which is measured as a whole").
				WithHint("remove them; --tail sets how long to wait for writes after the command")
		case len(q.command) == 0 && f.Changed("tail"):
			return errs.New(errs.Invalid, "watch", "", "--tail needs a command").
				WithHint("run `pando iostat VOLUME -- COMMAND`")
		}

		q.volumes = args
		return a.watchVolumes(c.Context(), q)
	}

	return c
}

func (a *App) watchVolumes(ctx context.Context, q iostatRequest) error {
	targets, err := a.iostatTargets(ctx, q, true)
	if err != nil {
		return err
	}

	w, err := iostat.New(ctx, targets)
	if err != nil {
		return err
	}

	defer w.Close()

	if len(q.command) > 0 {
		return a.measureCommand(ctx, w, q)
	}

	mounts, err := iostat.WatchMounts()
	if err != nil {
		return err
	}

	defer mounts.Close()

	show := a.iostatPrinter()
	next := time.Now()
	for n := 1; ; n++ {
		next = next.Add(q.interval)
		if late := time.Until(next); late < 0 {
			next = time.Now() // it was stopped, or the host asleep
		}

		select {
		case <-ctx.Done():
			return nil // that is how it ends
		case <-time.After(time.Until(next)):
		}

		s := w.Sample()
		if err := show(s); err != nil {
			return err
		}

		if n == q.count {
			return nil
		}
		if !mounts.Changed() {
			continue
		}

		if targets, err = a.iostatTargets(ctx, q, false); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			a.printWarning("cannot see volumes mounted since the start: %v", err)
			continue
		}

		// What cannot be watched any more comes back when it can.
		w.Set(ctx, targets)
	}
}

// iostatTargets says what is mounted where. Nothing of the pool stays open, or locked.
// At the first time, what is not there is an error; afterwards it may come back.
func (a *App) iostatTargets(ctx context.Context, q iostatRequest, first bool) ([]iostat.Target, error) {
	var out []iostat.Target
	for _, p := range q.paths {
		name, err := filepath.Abs(p)
		if err != nil {
			return nil, errs.Wrap("watch", p, err)
		}
		out = append(out, iostat.Target{Name: name, Path: name})
	}

	if len(q.volumes) == 0 && len(q.paths) > 0 {
		return out, nil
	}

	e, err := a.openReadOnly(ctx)
	if err != nil {
		return nil, err
	}

	defer e.Close()

	names := make([]ref.Name, len(q.volumes))
	for i, s := range q.volumes {
		if names[i], err = volumeName(ctx, e, "watch", s); err != nil {
			return nil, err
		}
	}
	vols, err := e.Mountpoints(ctx, "watch", names...)
	if err != nil && (first || !errs.Is(err, errs.NotFound)) {
		return nil, err
	}

	for _, v := range vols {
		if v.Mounted() {
			out = append(out, iostat.Target{Name: v.Name, Path: v.Mountpoint, Only: true})
		} else if first && len(q.volumes) > 0 {
			return nil, errs.New(errs.NotFound, "watch", v.Name, "the volume is not mounted").
				WithHint("mount it with `pando mount %s`", v.Name)
		}
	}

	if first && len(out) == 0 {
		return nil, errs.New(errs.NotFound, "watch", "", "no volume is mounted").
			WithHint("mount one with `pando mount VOLUME DIR`, or watch a directory with --path DIR")
	}

	return out, nil
}

// iostatPrinter prints samples: JSON lines, a table that is drawn anew on a terminal,
// and lines elsewhere.
func (a *App) iostatPrinter() func(*iostat.Sample) error {
	if a.json {
		enc := json.NewEncoder(a.Stdout)
		enc.SetEscapeHTML(false)
		return func(s *iostat.Sample) error { return a.written(enc.Encode(s)) }
	}
	p := &iostatText{a: a}
	if f, ok := a.Stdout.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		p.terminal = f
	}
	return p.printSample
}

// measureCommand measures a command.
func (a *App) measureCommand(ctx context.Context, w *iostat.Watcher, q iostatRequest) error {
	out := os.Stdout
	if a.json {
		out = os.Stderr // standard output is for the one value
	}

	o, err := w.AroundCommand(ctx, q.tail, q.command, foregroundSignals, os.Stdin, out, os.Stderr)
	if err != nil {
		return err
	}

	a.exit = o.Exit
	if a.json {
		return a.printJSON(o)
	}

	return a.printOperation(o)
}
