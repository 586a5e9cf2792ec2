package bench

import (
	"cmp"
	"context"
	"errors"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/driver"
	"pando/internal/engine"
)

// DensityConfig says what to measure.
type DensityConfig struct {
	Engine   *engine.Engine
	Drivers  engine.Drivers
	Program  string // as of Config
	TempDir  string // likewise
	Source   string // likewise
	Files    int    // in a generated tree
	Bytes    int64  // likewise, of their data; 0: as usual for source code
	Sessions []int  // numbers of sessions, one after the other
	Runs     int    // of which figures are medians
	AtOnce   int    // sessions that work at the same time; 0: one for each processor
	Only     []string
}

// MaxSessions is the most sessions that density measures.
const MaxSessions = 10_000

// DensityReport is what Density measured.
type DensityReport struct {
	Pool    PoolReport   `json:"pool"`
	Host    HostReport   `json:"host"`
	Source  SourceReport `json:"source"`
	Runs    int          `json:"runs"`
	AtOnce  int          `json:"at_once"`
	Rows    []DensityRow `json:"rows"`
	Targets []Target     `json:"targets"`
}

// DensityRow is what a number of sessions needs that each have a copy of one tree. Figures are medians of the runs.
type DensityRow struct {
	Variant       string  `json:"variant"`
	Sessions      int     `json:"sessions"`
	NotMeasured   string  `json:"not_measured,omitempty"` // why there are no figures
	Setup         float64 `json:"setup_seconds"`          // until all copies exist and are mounted
	Read          float64 `json:"read_seconds"`           // until the last session has read all, from an empty page cache
	Write         float64 `json:"write_seconds"`          // until the last has written
	Session       float64 `json:"session_seconds"`        // reading and writing of one session, on average
	Remove        float64 `json:"remove_seconds"`         // until no copy exists any more
	Cache         float64 `json:"page_cache_bytes"`       // after reading, more than just before
	CacheWritten  float64 `json:"page_cache_after_write_bytes"`
	Resident      float64 `json:"resident_bytes"`                       // of the files of the last session, after reading
	Disk          float64 `json:"disk_read_bytes"`                      // while they read
	NoDisk        string  `json:"disk_read_not_measured,omitempty"`     // why Disk is not known
	Reclaimable   float64 `json:"slab_reclaimable_bytes_per_session"`   // after reading, more than before
	Unreclaimable float64 `json:"slab_unreclaimable_bytes_per_session"` // likewise
}

// Names of what density measures, side by side.
const (
	DensityBare    = "bare"
	DensityOverlay = "overlay"
	DensityClone   = "clone"
	DensityReflink = "reflink"
	DensityDocker  = "docker"
)

// DensityVariants are all names, the floor first.
var DensityVariants = []string{DensityBare, DensityOverlay, DensityClone, DensityReflink, DensityDocker}

func (c *DensityConfig) check() error {
	within := func(what string, n, most int) error {
		if n >= 1 && n <= most {
			return nil
		}
		return errs.New(errs.Invalid, "bench", what, "must be between 1 and %d (got %d)", most, n)
	}

	all := []error{within("--files", c.Files, MaxFiles), within("--runs", c.Runs, 100),
		within("--at-once", cmp.Or(c.AtOnce, 1), MaxSessions)}
	for _, n := range c.Sessions {
		all = append(all, within("--sessions", n, MaxSessions))
	}

	for _, err := range all {
		if err != nil {
			return err
		}
	}

	for _, name := range c.Only {
		if !slices.Contains(DensityVariants, name) {
			return errs.New(errs.Invalid, "bench", "--only", "there is no variant %q", name).
				WithHint("choose from %s", strings.Join(DensityVariants, ", "))
		}
	}

	switch most := int64(c.Files) * 4 * meanBytes; {
	case len(c.Sessions) == 0:
		return errs.New(errs.Invalid, "bench", "--sessions", "needs at least one number")
	case c.Bytes > most:
		return errs.New(errs.Invalid, "bench", "--size", "%d files can have %d bytes at most", c.Files, most).
			WithHint("use more %s", errs.Param("files"))
	case os.Geteuid() != 0:
		return errs.New(errs.Permission, "bench", "", "dropping the page cache needs root").
			WithHint("run the benchmark as root")
	}

	return nil
}

// density is a benchmark of density under way.
type density struct {
	*run
	c    DensityConfig
	runs map[[2]string][]DensityRow // by variant and number of sessions
}

// Density measures what many sessions need that read the same tree and write a little of it: memory, reads of the
// disk, time. Each variant gives every session a copy of its own. It drops the page cache of the host again and again,
// and removes all that it made, also on error. Kinds as Run; NoSpace: the pool is too small, before anything is cloned.
func Density(ctx context.Context, c DensityConfig) (_ *DensityReport, err error) {
	if err := c.check(); err != nil {
		return nil, err
	}

	c.AtOnce = cmp.Or(c.AtOnce, runtime.NumCPU())
	c.Sessions = slices.Compact(slices.Sorted(slices.Values(c.Sessions)))
	ctx, r, err := begin(ctx, Config{Engine: c.Engine, Drivers: c.Drivers, Program: c.Program, TempDir: c.TempDir,
		Source: c.Source, Files: c.Files, Bytes: c.Bytes, Tail: time.Second})
	if err != nil {
		return nil, err
	}

	defer func() { err = errors.Join(err, r.end(ctx)) }()

	d := &density{run: r, c: c, runs: map[[2]string][]DensityRow{}}
	for _, step := range []func(context.Context) error{r.describe, r.findSource, d.checkSpace, d.importSource, d.rounds} {
		if err := step(ctx); err != nil {
			return nil, errs.Wrap("bench", "", err)
		}
	}

	out := &DensityReport{Pool: r.rep.Pool, Host: r.rep.Host, Source: r.rep.Source, Runs: c.Runs, AtOnce: c.AtOnce,
		Rows: d.medians()}
	out.judge()
	return out, nil
}

// checkSpace returns an error if the copies will not fit in the pool. At any time there are those of one variant.
func (d *density) checkSpace(context.Context) error {
	src, n := d.rep.Source, int64(slices.Max(d.c.Sessions))
	each := src.Bytes/25 + src.Files<<10 + 2<<20 // what is written, inodes, an empty filesystem
	if d.eng.Caps().CloneCost == driver.CostData && d.wants(DensityClone) {
		each += src.Bytes + src.Files<<12
	}

	need := 2*(src.Bytes+src.Files<<12) + n*each // the golden, and what cp copies
	if need <= d.rep.Pool.FreeBytes {
		return nil
	}
	return errs.New(errs.NoSpace, "bench", "", "%d sessions need about %d MiB in the pool, and %d MiB are free", n,
		need>>20, d.rep.Pool.FreeBytes>>20).
		WithHint("use fewer %s, or a smaller tree", errs.Param("sessions"))
}

// importSource makes the golden, unless the source is one.
func (d *density) importSource(ctx context.Context) error {
	d.tracker.StartOf(progress.RunningBenchmark, "importing the source", 0, 0)
	if err := d.importOnce(ctx, &timed{op: Operation{NotMeasured: d.noImport}}, 0, false); err != nil {
		return err
	}

	golden, err := d.eng.Show(ctx, d.golden)
	if err != nil {
		return err
	}

	src := &d.rep.Source
	src.FS, src.Extents, src.SizeBytes, src.LogicalBytes = golden.FS, golden.Extents, golden.SizeBytes, golden.LogicalBytes
	d.att, err = d.drv.Attachment(ctx, driver.ObjectID(golden.ID))
	return err
}

func (d *density) wants(name string) bool {
	return len(d.c.Only) == 0 || slices.Contains(d.c.Only, name)
}

// rounds measures everything --runs times. Variants take turns, and another one begins in each run.
func (d *density) rounds(ctx context.Context) error {
	var variants []variant
	for _, v := range d.variants() {
		if d.wants(v.name()) {
			variants = append(variants, v)
		}
	}

	// One session of each does not count: what the first mount leaves in memory is there already.
	for _, v := range variants {
		if _, err := d.measure(ctx, v, 1); err != nil {
			return err
		}
	}

	for run := range d.c.Runs {
		for _, n := range d.c.Sessions {
			for i := range variants {
				v := variants[(run+i)%len(variants)]
				row, err := d.measure(ctx, v, n)
				if err != nil {
					return err
				}
				key := [2]string{v.name(), itoa(n)}
				d.runs[key] = append(d.runs[key], row)
			}
		}
	}

	return nil
}

// medians makes a row of all runs of each variant and number of sessions.
func (d *density) medians() []DensityRow {
	var out []DensityRow
	for _, n := range d.c.Sessions {
		for _, name := range DensityVariants {
			if runs := d.runs[[2]string{name, itoa(n)}]; len(runs) > 0 {
				out = append(out, medianRow(runs))
			}
		}
	}
	return out
}

// medianRow returns the first row, with the median of all for each figure.
func medianRow(runs []DensityRow) DensityRow {
	out := runs[0]
	for i, figure := range out.figures() {
		var all []float64
		for r := range runs {
			all = append(all, *runs[r].figures()[i])
		}
		slices.Sort(all)
		*figure = (all[(len(all)-1)/2] + all[len(all)/2]) / 2
	}
	return out
}

func (r *DensityRow) figures() []*float64 {
	return []*float64{&r.Setup, &r.Read, &r.Write, &r.Session, &r.Remove, &r.Cache, &r.CacheWritten, &r.Resident, &r.Disk,
		&r.Reclaimable, &r.Unreclaimable}
}

// What the targets are: see judge.
const (
	densitySessions   = 100
	maxSharedCache    = 1.1
	maxSharedReads    = 1.1
	maxSessionRatio   = 1.15
	maxSlabRatio      = 1.0
	densityComparison = " overlay clones / one"
)

func (r *DensityReport) row(variant string, n int) *DensityRow {
	for i := range r.Rows {
		if r.Rows[i].Variant == variant && r.Rows[i].Sessions == n {
			return &r.Rows[i]
		}
	}
	return &DensityRow{NotMeasured: "no figures of " + variant + " with " + errs.Plural(n, "session")}
}

// judge compares overlays with one of them, and with bare mounts.
func (r *DensityReport) judge() {
	most := 0
	for _, row := range r.Rows {
		most = max(most, row.Sessions)
	}

	many, one, bare := r.row(DensityOverlay, most), r.row(DensityOverlay, 1), r.row(DensityBare, most)
	at := itoa(most) + " sessions"
	if most != densitySessions {
		at += "; the target is for " + itoa(densitySessions)
	}

	rep := &Report{}
	ratio := func(name string, target, a, b float64, reasons ...string) {
		rep.target(name, AtMost, target, Ratio, at, over(a, b), cmp.Or(reasons...))
	}

	tooFew := ""
	if most < 2 {
		tooFew = "use more --sessions"
	}

	noOne := cmp.Or(tooFew, many.NotMeasured, one.NotMeasured)
	noBare := cmp.Or(many.NotMeasured, bare.NotMeasured)
	ratio("page cache, many"+densityComparison, maxSharedCache, many.Cache, one.Cache, noOne)
	ratio("reads of the disk, many"+densityComparison, maxSharedReads, many.Disk, one.Disk, noOne, many.NoDisk)
	ratio("time per session, overlay clones / bare mounts", maxSessionRatio, many.Session, bare.Session, noBare)
	ratio("slab per session, overlay clones / bare mounts", maxSlabRatio, many.Reclaimable+many.Unreclaimable,
		bare.Reclaimable+bare.Unreclaimable, noBare)
	r.Targets = rep.Targets
}
