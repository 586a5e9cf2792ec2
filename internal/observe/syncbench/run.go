package syncbench

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/observe/stack"

	"golang.org/x/sys/unix"
)

// op is what errors say was being done.
const op = "bench sync"

// Config says what to measure.
type Config struct {
	Path   string // a directory
	Volume string // its name, if it is one's; for the report only

	// NotDurable says why nothing in Path needs to survive a power loss, without a full stop; "": it must. Then the
	// verdict is FAIL by design, even if all syncs reach the disk.
	NotDurable string

	Profile string // its name
	Version string // of Pando; for the report only

	Duration  time.Duration // of a run; 0: 2 minutes, 5 s if Quick
	Runs      int           // 0: 1
	Quick     bool          // the report says that it is no verdict on speed
	Writers   int           // 0: the profile's
	SizeBytes int64         // of all files; 0: the profile's
	P99       time.Duration // of the syncs, to find the most syncs a second that keep it; 0: no search

	brief bool // allow runs shorter than shortest, for tests
}

// Defaults of a Config.
const (
	usualDuration = 2 * time.Minute
	quickDuration = 5 * time.Second
	// shortest is what a time line and a look at single syncs need.
	shortest   = time.Second
	maxWriters = 1024
)

// Measure measures a profile in the filesystem of a directory, and returns when all its files are
// removed and fio has ended, even if it fails or ctx ends. A report with a verdict of FAIL is no error.
//
// Invalid: the Config, or the path is not a directory. Unsupported: no fio, or the path is in memory.
// NoSpace: before or during the run. Canceled: ctx has ended. Any number may run at the same time,
// but their figures are then those of all.
func Measure(ctx context.Context, c Config) (report *Report, err error) {
	d, err := c.complete()
	if err != nil {
		return nil, err
	}

	path, below, err := target(ctx, c.Path)
	if err != nil {
		return nil, err
	}

	p, err := d.plan(c.SizeBytes, c.Writers)
	if err != nil {
		return nil, err
	}

	program, version, err := fioVersion(ctx)
	if err != nil {
		return nil, err
	}

	s, err := newScratch(path)
	if err != nil {
		return nil, err
	}

	defer func() {
		if e := s.remove(); e != nil && err == nil {
			report, err = nil, e
		}
	}()

	r := &Report{
		Kind: "pando bench sync", Format: Format, Pando: c.Version, Started: time.Now(), Path: path, Volume: c.Volume,
		Quick: c.Quick, Seconds: c.Duration.Seconds(), Host: host(version), Profile: p.Profile, Layers: layers(ctx,
			below), Runs: []Run{},
	}

	r.Profile.Command = p.command(path, c.Duration)
	b := &bench{Config: c, definition: d, scratch: s, stack: below}
	b.program, b.named = s.own(program)
	if err := s.layout(ctx, p.files); err != nil {
		return nil, err
	}

	for i := range c.Runs {
		what := ""
		if c.Runs > 1 {
			what = fmt.Sprintf("run %d of %d", i+1, c.Runs)
		}
		one, err := b.prove(ctx, p, what)
		if err != nil {
			return nil, err
		}
		r.Runs = append(r.Runs, *one)
	}

	var note string
	if c.P99 > 0 {
		if r.Target, note, err = b.search(ctx); err != nil {
			return nil, err
		}
	}

	r.Verdict = verdict(r, note, c.NotDurable)
	return r, nil
}

// complete checks a Config and fills in what is usual.
func (c *Config) complete() (*definition, error) {
	d, err := define(c.Profile)
	if err != nil {
		return nil, err
	}

	if c.Duration == 0 {
		c.Duration = usualDuration
		if c.Quick {
			c.Duration = quickDuration
		}
	}

	if c.Runs == 0 {
		c.Runs = 1
	}
	if c.Writers == 0 {
		c.Writers = d.Writers
	}

	switch {
	case c.Duration < shortest && !c.brief:
		return nil, errs.New(errs.Invalid, op, "", "a run must last at least %s (got %s)", shortest, c.Duration)
	case c.Runs < 0:
		return nil, errs.New(errs.Invalid, op, "", "the number of runs must be between 1 and %d (got %d)", MaxRuns, c.Runs)
	case c.Writers < 0 || c.Writers > maxWriters:
		return nil, errs.New(errs.Invalid, op, "", "the number of writers must be between 1 and %d (got "+
			"%d)", maxWriters, c.Writers)
	case c.SizeBytes < 0:
		return nil, errs.New(errs.Invalid, op, "", "the size must not be negative (got %d)", c.SizeBytes)
	case c.P99 < 0:
		return nil, errs.New(errs.Invalid, op, "", "the p99 must not be negative (got %s)", c.P99)
	}

	return &d, nil
}

// target finds out what the path is, and refuses what cannot or must not be measured.
// It writes nothing.
func target(ctx context.Context, path string) (string, *stack.Stack, error) {
	if path == "" {
		path = "."
	}

	st, err := os.Stat(path)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return "", nil, errs.New(errs.NotFound, op, path, "directory does not exist")
		}
		return "", nil, errs.Wrap(op, path, err)
	}

	switch {
	case st.IsDir():
	case st.Mode()&os.ModeDevice != 0 && st.Mode()&os.ModeCharDevice == 0:
		return "", nil, errs.New(errs.Invalid, op, path, "is a block device: measuring it would overwrite its data").
			WithHint("use a directory in a filesystem on it")
	default:
		return "", nil, errs.New(errs.Invalid, op, path, "is not a directory").
			WithHint("use the directory: %s", filepath.Dir(path))
	}

	below, err := stack.Of(ctx, path)
	if err != nil {
		return "", nil, errs.Wrap(op, path, err)
	}

	for _, l := range below.Layers {
		if l.Kind == stack.InMemory {
			return "", nil, errs.New(errs.Unsupported, op, path,
				"is on %s, which keeps its files in memory: syncs do nothing there", l.FSType).
				WithHint("use a directory on a disk")
		}
		if l.Kind != stack.Overlay {
			break // an overlay's files are on its upper layer
		}
	}

	if err := unix.Access(below.Path, unix.W_OK|unix.X_OK); err != nil {
		return "", nil, errs.Wrap(op, path, &os.PathError{Op: "write to", Path: below.Path, Err: err})
	}

	return below.Path, below, nil
}

// bench is a benchmark that runs.
type bench struct {
	Config
	definition *definition
	program    string // fio
	named      bool   // by a name that no other process has
	scratch    *scratch
	stack      *stack.Stack
	seen       func(*sample) // nil, or called with each sample
}

// start starts fio for a plan whose files are laid out, and returns its samples at the end. The progress says that it
// measures what.
func (b *bench) start(
	ctx context.Context, p *plan, d time.Duration, what string, begin func(*exec.Cmd) error,
	during func(context.Context) error,
) ([]*sample, error) {
	tasks := []func(context.Context) error{}
	if during != nil {
		tasks = append(tasks, during)
	}

	if p.Calls.Unwritten {
		r, err := newRenewer(b.scratch, p)
		if err != nil {
			return nil, err
		}
		tasks = append(tasks, r.run)
	}

	total := int64(d.Round(time.Second).Seconds())
	progress.From(ctx).StartOf(progress.Measuring, what, total, 0)
	var shown int64
	seen := func(s *sample) {
		if now := min(s.ms/1000, total); now > shown {
			progress.From(ctx).Add(now-shown, 0)
			shown = now
		}
		if b.seen != nil {
			b.seen(s)
		}
	}

	// Directory ".", where fio is started, whatever the path has in it.
	return fio(ctx, b.program, b.scratch.dir, p.arguments(".", d), begin, all(tasks), seen)
}

// all does several things at once; the error is the first one.
func all(tasks []func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		ctx, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		failed := make(chan error, len(tasks))
		for _, t := range tasks {
			go func() {
				err := t(ctx)
				if err != nil {
					cancel(err)
				}
				failed <- err
			}()
		}

		var first error
		for range tasks {
			if err := <-failed; err != nil && first == nil {
				first = err
			}
		}

		return first
	}
}
