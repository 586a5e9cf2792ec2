// Package bench measures what Pando claims, on the pool and the data that a
// person has, and says for each claim whether it holds there.
//
// Figures are ratios within one run wherever that is possible: Pando and a bare
// program that makes the same system calls (the floor) take turns, one clone
// each, so that whatever else the machine does meets both. What cannot be
// measured is in the report with the reason, never left out.
package bench

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/engine/pool"
	"pando/internal/linux/durable"
	"pando/internal/linux/treewalk"
	"pando/internal/observe/iostat"

	"golang.org/x/sys/unix"
)

// Config says what to measure.
type Config struct {
	Engine  *engine.Engine
	Drivers engine.Drivers
	Program string        // the executable of pando, which is measured
	TempDir string        // where a tree is made if there is no source
	Source  string        // a directory, or a golden; "": a generated tree
	Files   int           // in a generated tree
	Bytes   int64         // of its data, about; 0: as usual for source code
	Clones  int           // made one by one, of each kind
	Volumes int           // that the pool holds when the large figures are taken
	Rounds  int           // of copies, imports and phases of the neighbour
	Tail    time.Duration // how long to wait for writing to end, at most
	Idle    time.Duration // of each phase in which the neighbour is alone
	Overlay bool          // measure overlays instead of other clones
	Mounted bool          // mount the volumes that fill the pool
	Keep    bool          // leave the golden and the volumes
}

const (
	baseVolumes = 10
	warmUps     = 2  // clones that do not count, before each series
	tailBatch   = 20 // clones whose writes are measured together
	fillBatch   = 1000
	maxCommands = 20 // runs of each command
)

// Limits of Config.
const (
	MaxClones  = 10_000
	MaxVolumes = 1_000_000
	MaxFiles   = 10_000_000
)

func (c *Config) check() error {
	bad := func(what string, n, least, most int) error {
		return errs.New(errs.Invalid, "bench", what, "must be between %d and %d (got %d)", least, most, n)
	}
	switch {
	case c.Clones < 1 || c.Clones > MaxClones:
		return bad("--clones", c.Clones, 1, MaxClones)
	case c.Volumes < 0 || c.Volumes > MaxVolumes:
		return bad("--volumes", c.Volumes, 0, MaxVolumes)
	case c.Rounds < 1 || c.Rounds > 100:
		return bad("--rounds", c.Rounds, 1, 100)
	case c.Files < 1 || c.Files > MaxFiles:
		return bad("--files", c.Files, 1, MaxFiles)
	case c.Tail < 0 || c.Idle < 0:
		return errs.New(errs.Invalid, "bench", "", "durations must not be negative")
	}

	return nil
}

// run is a benchmark under way.
type run struct {
	Config
	eng     *engine.Engine
	pool    *pool.Pool
	drv     driver.Driver
	scratch *scratch
	meter   *meter
	rep     *Report
	tracker *progress.Tracker

	source   string            // tree that is copied and imported
	noImport string            // why source cannot be imported
	copyDir  string            // copy of source in the pool's filesystem; "": there is none
	golden   ref.Ref           // golden that clones are made of
	att      driver.Attachment // attachment of the golden
	floor    floor             // nil: see Report.NoFloor
	next     int               // number of the next copy of the floor, and the next clone
	fillers  []string          // names of series of volumes that only fill the pool
}

// Run measures, and removes all that it made, also on error and when ctx ends.
// Invalid, NotFound (the source), Permission, and the kinds of what it measures.
func Run(ctx context.Context, c Config) (_ *Report, err error) {
	if err := c.check(); err != nil {
		return nil, err
	}

	ctx, r, err := begin(ctx, c)
	if err != nil {
		return nil, err
	}

	defer func() { err = errors.Join(err, r.end(ctx)) }()

	for _, phase := range []func(context.Context) error{
		r.describe, r.findSource, r.copies, r.openGolden, r.reflinks,
		r.fillBase, r.pairs, r.tails, r.neighbours,
		r.fillAll, r.pairs, r.commands, r.unfill, r.pairs,
	} {
		if err := phase(ctx); err != nil {
			return nil, errs.Wrap("bench", "", err)
		}
	}

	if c.Keep {
		r.rep.Kept = r.scratch.name
	}

	r.rep.judge()
	return r.rep, nil
}

// begin opens what a run needs; end closes and removes it. What is measured gets the context that begin returns, and
// reports no progress of its own.
func begin(ctx context.Context, c Config) (_ context.Context, r *run, err error) {
	r = &run{Config: c, eng: c.Engine, rep: &Report{}, tracker: progress.From(ctx)}
	ctx = progress.With(ctx, nil)
	if c.Engine.Caps().NeedsRoot && os.Geteuid() != 0 {
		return ctx, nil, errs.New(errs.Permission, "bench", "", "pools of the %s driver need root for this",
			c.Engine.Caps().Name).
			WithHint("run the benchmark as root")
	}

	if r.pool, err = pool.Read(r.eng.Dir()); err != nil {
		return ctx, nil, err
	}

	if r.drv, err = c.Drivers[r.pool.Config.Driver](ctx, r.pool.DataDir(), r.pool.Config.ID, false); err != nil {
		return ctx, nil, err
	}

	if s, ok := r.drv.(driver.Spacer); ok {
		r.pool.Room = s
	}

	if r.scratch, err = newScratch(ctx, r.pool); err != nil {
		r.closeDriver()
		return ctx, nil, err
	}

	r.meter = newMeter(ctx, c.Tail, r.pool.DataDir(), r.pool.Dir)
	return ctx, r, nil
}

func (r *run) end(ctx context.Context) error {
	defer r.closeDriver()
	return r.cleanUp(context.WithoutCancel(ctx))
}

func (r *run) closeDriver() {
	if d, ok := r.drv.(interface{ Close() error }); ok {
		_ = d.Close()
	}
}

// cleanUp removes what the run made. What it cannot remove, Clean will.
func (r *run) cleanUp(ctx context.Context) error {
	r.tracker.Start(progress.CleaningUp, 0, 0)
	if r.floor != nil {
		r.floor.close()
	}

	var all []error
	if !r.Keep {
		all = append(all, destroyRun(ctx, r.eng, r.scratch.name))
	}

	if errors.Join(all...) != nil {
		r.scratch.lock.Close() // the directory stays, so that Clean finds the rest
		return errors.Join(all...)
	}

	return r.scratch.remove(ctx)
}

// name is the name of something of this run.
func (r *run) name(what string) string { return r.scratch.name + "-" + what }

// describe records where the figures come from.
func (r *run) describe(ctx context.Context) error {
	p, err := r.eng.Pool(ctx, engine.PoolRequest{})
	if err != nil {
		return err
	}

	r.rep.Pool = PoolReport{
		Dir: p.Dir, Driver: p.Driver, LoopBacked: p.Backing != "", TotalBytes: p.TotalBytes, FreeBytes: p.FreeBytes,
		Volumes: p.VolumeCount, Devices: r.meter.devs,
	}
	if r.meter.err != nil {
		r.rep.Pool.NoDevices = r.meter.err.Error()
	}

	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return err
	}

	var si unix.Sysinfo_t
	if err := unix.Sysinfo(&si); err != nil {
		return err
	}

	r.rep.Host = HostReport{CPUs: runtime.NumCPU(), MemoryBytes: int64(si.Totalram) * int64(si.Unit),
		Kernel: unix.ByteSliceToString(u.Release[:])}
	r.rep.Clones, r.rep.Rounds, r.rep.Overlay, r.rep.Mounted = r.Clones, r.Rounds, r.Overlay, r.Mounted
	return nil
}

// findSource decides what is copied and cloned.
func (r *run) findSource(ctx context.Context) error {
	src := &r.rep.Source
	var other api.Kind
	if q, err := ref.Parse("bench", r.Source); r.Source != "" && err == nil {
		d, err := r.eng.Show(ctx, q)
		other = d.Kind
		if err == nil && d.Kind == api.KindGeneration {
			src.Kind, src.Name = "golden", r.Source
			r.golden = q
			r.noImport = "the source is a golden already: give a directory to measure an import"
			return r.mountSource(ctx)
		}
		if err != nil && !errs.Is(err, errs.NotFound) {
			return err
		}
	}

	if r.Source == "" {
		src.Kind = "generated"
		return r.generate(ctx)
	}

	src.Kind = "directory"
	abs, err := filepath.Abs(r.Source)
	if err != nil {
		return err
	}

	st, err := os.Stat(abs)
	switch there := err == nil && st.IsDir(); {
	case !there && other != "":
		return errs.New(errs.Invalid, "bench", r.Source, "it is a %s, not a golden", string(other)).
			WithHint("name a golden, for example one published from it with %s",
				errs.Run("golden publish", "NAME", "VOLUME"))
	case !there:
		return errs.New(errs.NotFound, "bench", r.Source, "neither a golden nor a directory").
			WithHint("run %s to list goldens, or remove the argument to use a generated tree", errs.Run("golden ls"))
	}

	src.Name, r.source = abs, abs
	src.Files, src.Bytes, err = readTree(ctx, abs, r.tracker)
	return err
}

func (r *run) generate(ctx context.Context) (err error) {
	r.source = filepath.Join(r.TempDir, tempPrefix+r.scratch.name)

	// The link first: it is how others find the tree if this process is killed.
	if err := os.Symlink(r.source, filepath.Join(r.scratch.outer, sourceName)); err != nil {
		return errs.Wrap("bench", r.source, err)
	}

	if err := os.Mkdir(r.source, 0o755); err != nil {
		return errs.Wrap("bench", r.source, err)
	}

	if err := generate(ctx, r.source, r.Files, r.Bytes, r.tracker); err != nil {
		return err
	}

	if err := durable.SyncFS(r.source); err != nil {
		return err
	}

	src := &r.rep.Source
	src.Files, src.Bytes, err = readTree(ctx, r.source, r.tracker)
	return err
}

// mountSource makes the tree in a golden readable: in a clone of it.
func (r *run) mountSource(ctx context.Context) error {
	dir, err := r.clone(ctx, r.name("source"))
	if err != nil {
		return err
	}

	st, err := os.Stat(dir)
	if err != nil || !st.IsDir() {
		return errs.New(errs.Unsupported, "bench", r.Source, "the golden has no filesystem that can be mounted").
			WithHint("use another golden, or a directory")
	}

	r.source = dir
	src := &r.rep.Source
	src.Files, src.Bytes, err = readTree(ctx, dir, r.tracker)
	return err
}

// clone makes and mounts a volume as an embedding program would, and returns
// where.
func (r *run) clone(ctx context.Context, name string) (string, error) {
	infos, err := r.eng.Clone(ctx, engine.CloneRequest{From: r.golden, Name: ref.MustName(name), Mount: true,
		Overlay: r.Overlay})
	if err != nil {
		return "", err
	}
	return infos[0].Mountpoint, nil
}

func (r *run) destroy(ctx context.Context, names ...string) error {
	what, err := ref.ParsePatterns("bench", names...)
	if err != nil {
		return err
	}
	report, err := r.eng.Destroy(ctx, engine.DestroyRequest{What: what})
	if report != nil {
		err = errors.Join(append(report.Failed, err)...)
	}
	return err
}

// openGolden looks up what the clones are made of, and opens the floor.
func (r *run) openGolden(ctx context.Context) error {
	d, err := r.eng.Show(ctx, r.golden)
	if err != nil {
		return err
	}

	src := &r.rep.Source
	src.FS, src.Extents, src.SizeBytes, src.LogicalBytes = d.FS, d.Extents, d.SizeBytes, d.LogicalBytes
	if r.att, err = r.drv.Attachment(ctx, driver.ObjectID(d.ID)); err != nil {
		return err
	}

	open := r.openFloor
	if r.Overlay {
		open = r.openOverlayFloor
	}
	if r.floor, err = open(ctx); err != nil {
		r.rep.NoFloor = err.Error()
	}
	return nil
}

func (r *run) openFloor(context.Context) (floor, error) {
	return newFloor(r.att, filepath.Join(r.scratch.inner, imagesName), r.scratch.outer, r.scratch.dataset)
}

// openOverlayFloor opens the floor of overlays, which copies the upper layer of an overlay that stays until the end.
func (r *run) openOverlayFloor(ctx context.Context) (floor, error) {
	upper, err := r.emptyUpper(ctx)
	if err != nil {
		return nil, err
	}

	return newOverlayFloor(ctx, r.att, upper, filepath.Join(r.scratch.inner, imagesName), r.scratch.outer)
}

// emptyUpper makes an overlay that nothing uses, and describes its upper layer.
func (r *run) emptyUpper(ctx context.Context) (driver.Attachment, error) {
	empty, err := r.eng.Clone(ctx, engine.CloneRequest{From: r.golden, Name: ref.MustName(r.name("empty")), Overlay: true})
	if err != nil {
		return driver.Attachment{}, err
	}
	return r.drv.Attachment(ctx, driver.ObjectID(empty[0].ID))
}

// fill makes volumes until the pool holds n.
func (r *run) fill(ctx context.Context, n int) error {
	have, err := r.count(ctx)
	if err != nil {
		return err
	}

	from := r.golden
	if n > have && r.eng.Caps().CloneCost == driver.CostData && !r.Overlay {
		// Full copies of the golden would fill the disk: small ones count as much.
		if from, err = r.tiny(ctx); err != nil {
			return err
		}
	}

	r.tracker.StartOf(progress.RunningBenchmark, "creating volumes", int64(max(n-have, 0)), 0)

	for have < n {
		batch := min(fillBatch, n-have)
		name := r.name("fill" + itoa(len(r.fillers)))
		if _, err := r.eng.Clone(ctx, engine.CloneRequest{From: from, Name: ref.MustName(name), Count: batch,
			Mount: r.Mounted, Overlay: r.Overlay}); err != nil {
			return err
		}
		r.fillers = append(r.fillers, name)
		have += batch
		r.tracker.Add(int64(batch), 0)
	}

	return nil
}

// tiny makes a golden of one file.
func (r *run) tiny(ctx context.Context) (ref.Ref, error) {
	name := ref.MustName(r.name("tiny"))
	q := name.Ref()
	if _, err := r.eng.Show(ctx, q); err == nil {
		return q, nil
	}

	dir, err := os.MkdirTemp(r.scratch.outer, "tiny-")
	if err != nil {
		return q, errs.Wrap("bench", dir, err)
	}

	defer treewalk.Remove(context.WithoutCancel(ctx), dir)

	f, err := os.Create(filepath.Join(dir, "empty.tar"))
	if err != nil {
		return q, errs.Wrap("bench", dir, err)
	}

	defer f.Close()

	if _, err := f.Write(make([]byte, 10<<10)); err != nil { // a tar of nothing
		return q, errs.Wrap("bench", dir, err)
	}

	if _, err := f.Seek(0, 0); err != nil {
		return q, errs.Wrap("bench", dir, err)
	}

	_, err = r.eng.ImportStream(ctx, engine.ImportRequest{Name: name}, f)
	return q, err
}

func (r *run) fillBase(ctx context.Context) error { return r.fill(ctx, baseVolumes) }

func (r *run) fillAll(ctx context.Context) error {
	if err := r.fill(ctx, r.Volumes); err != nil {
		return err
	}
	return r.rest(ctx)
}

// rest waits until the disk is quiet: the kernel goes on writing and freeing for
// a while after many volumes have been made or destroyed.
func (r *run) rest(ctx context.Context) error {
	r.tracker.StartOf(progress.RunningBenchmark, "waiting for the disk to become quiet", 0, 0)
	if r.meter.err != nil {
		return sleep(ctx, min(r.Tail, 5*time.Second))
	}
	if err := r.meter.settle(ctx); err != nil {
		return err
	}
	_, err := r.meter.untilQuiet(ctx, iostat.DirtyBytes())
	return err
}

// unfill destroys all fillers but the first few, so that the pool is as it was
// for the first series.
func (r *run) unfill(ctx context.Context) error {
	if r.Keep {
		return nil
	}

	r.tracker.StartOf(progress.RunningBenchmark, "destroying volumes", 0, 0)
	for len(r.fillers) > 1 {
		last := r.fillers[len(r.fillers)-1]
		if err := r.destroy(ctx, last+"-*"); err != nil {
			return err
		}
		r.fillers = r.fillers[:len(r.fillers)-1]
	}

	return r.rest(ctx)
}

func (r *run) count(ctx context.Context) (int, error) {
	p, err := r.eng.Pool(ctx, engine.PoolRequest{})
	return p.VolumeCount, err
}

// isCopyError reports whether cp could not do it, and why.
func isCopyError(err error) (string, bool) {
	var c *errCopy
	if errors.As(err, &c) {
		return strings.TrimPrefix(c.msg, "bench "), true
	}
	return "", false
}
