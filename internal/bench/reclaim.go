package bench

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/engine/catalog"
	"pando/internal/engine/pool"
	"pando/internal/linux/durable"
	"pando/internal/linux/kernel"
)

// ReclaimConfig says what to measure.
type ReclaimConfig struct {
	Engine      *engine.Engine
	Drivers     engine.Drivers
	Program     string // as of Config
	TempDir     string // likewise
	Files       int    // in the tree that is cloned
	Clones      int    // made, mounted, walked, written to and destroyed
	WriteBytes  int64  // written into each
	Goldens     int    // that gc has to decide about
	Generations int    // of each
	Volumes     int    // and so many clones of them
}

// SlabUse is the memory of one of the kernel's caches, in bytes.
type SlabUse struct {
	Cache  string `json:"cache"`
	Before int64  `json:"before_bytes"`
	Peak   int64  `json:"peak_bytes"` // with all clones mounted and walked
	After  int64  `json:"after_bytes"`
}

// ReclaimReport is what Reclaim measured.
type ReclaimReport struct {
	Driver      string    `json:"driver"`
	Clones      int       `json:"clones"`
	Files       int       `json:"files"` // in each
	MakeSeconds float64   `json:"make_seconds"`
	Destroy     float64   `json:"destroy_seconds"` // all of them, in one call
	Settle      float64   `json:"settle_seconds"`  // after that, until the pool had got everything back
	UsedBefore  int64     `json:"used_bytes_before"`
	UsedPeak    int64     `json:"used_bytes_peak"`
	UsedAfter   int64     `json:"used_bytes_after"`
	Slabs       []SlabUse `json:"slabs"`
	NoSlabs     string    `json:"no_slabs,omitempty"` // why they were not measured
	Goldens     int       `json:"goldens"`
	Generations int       `json:"generations"`
	Volumes     int       `json:"volumes"`
	GCDecides   []float64 `json:"gc_decides_seconds"` // of each run of gc: to compare the pool with the catalogue
	GCCommand   []float64 `json:"gc_command_seconds"` // the whole command
	Targets     []Target  `json:"targets"`
}

// slabCaches are those that hold the inodes and names of volumes.
var slabCaches = []string{"ext4_inode_cache", "xfs_inode", "btrfs_inode", "dentry"}

// Reclaim measures what comes back when many volumes are destroyed: space of the
// pool and memory of the kernel; and how long gc takes to decide about many
// things. It removes all that it made, also on error. Kinds as Run.
func Reclaim(ctx context.Context, c ReclaimConfig) (_ *ReclaimReport, err error) {
	for _, n := range []struct {
		name string
		n    int
	}{{"--clones", c.Clones}, {"--files", c.Files}, {"--goldens", c.Goldens}, {"--generations",
		c.Generations}, {"--volumes", c.Volumes}} {
		if n.n < 1 || n.n > MaxVolumes {
			return nil, errs.New(errs.Invalid, "bench", n.name, "must be between 1 and %d (got %d)", MaxVolumes, n.n)
		}
	}

	ctx, r, err := begin(ctx, Config{
		Engine: c.Engine, Drivers: c.Drivers, Program: c.Program, TempDir: c.TempDir,
		Files: c.Files, Tail: 20 * time.Second,
	})
	if err != nil {
		return nil, err
	}

	defer func() { err = errors.Join(err, r.end(ctx)) }()

	out := &ReclaimReport{Driver: r.pool.Config.Driver, Clones: c.Clones, Goldens: c.Goldens, Generations: c.Generations,
		Volumes: c.Volumes}
	im := &timed{}
	steps := []func() error{
		func() error { return r.findSource(ctx) },
		func() error { return r.importOnce(ctx, im, 0, false) },
		func() error { return r.reclaimClones(ctx, c, out) },
		func() error { return r.decide(ctx, c, out) },
	}

	for _, step := range steps {
		if err := step(); err != nil {
			return nil, errs.Wrap("bench", "", err)
		}
	}

	out.Files = int(r.rep.Source.Files)
	out.judge()
	return out, nil
}

// reclaimClones fills memory and disk with clones, and looks at what comes back.
func (r *run) reclaimClones(ctx context.Context, c ReclaimConfig, out *ReclaimReport) error {
	// One clone first, so that what a first mount leaves in memory is there
	// already.
	if err := r.busyClones(ctx, "warm", 1, 0); err != nil {
		return err
	}

	if err := r.destroy(ctx, r.name("warm")+"-*"); err != nil {
		return err
	}

	before, slabs, err := r.settledAll(ctx)
	if err != nil {
		out.NoSlabs = err.Error()
	}

	start := time.Now()
	if err := r.busyClones(ctx, "many", c.Clones, c.WriteBytes); err != nil {
		return err
	}

	if err := durable.SyncFS(r.pool.DataDir()); err != nil {
		return err
	}

	out.MakeSeconds = time.Since(start).Seconds()
	peak, err := r.pool.Space(ctx)
	if err != nil {
		return err
	}

	slabPeak, _ := readSlabs()
	r.tracker.StartOf(progress.RunningBenchmark, "destroying the clones", 0, 0)
	start = time.Now()
	if err := r.destroy(ctx, r.name("many")+"-*"); err != nil {
		return err
	}

	out.Destroy = time.Since(start).Seconds()
	after, slabAfter, err := r.settledAll(ctx)
	if err != nil && out.NoSlabs == "" {
		out.NoSlabs = err.Error()
	}

	out.Settle = time.Since(start).Seconds() - out.Destroy
	out.UsedBefore, out.UsedPeak, out.UsedAfter = before.UsedBytes, peak.UsedBytes, after.UsedBytes
	if out.NoSlabs == "" {
		for _, name := range slabCaches {
			if slabPeak[name] > 0 {
				out.Slabs = append(out.Slabs, SlabUse{name, slabs[name], slabPeak[name], slabAfter[name]})
			}
		}
	}

	return nil
}

// busyClones makes and mounts n clones, looks at every file in each, and writes
// bytes of noise into it.
func (r *run) busyClones(ctx context.Context, what string, n int, bytes int64) error {
	r.tracker.StartOf(progress.RunningBenchmark, "cloning, mounting and walking", int64(n), 0)
	noise := rand.NewChaCha8([32]byte{1})
	for done := 0; done < n; {
		batch := min(100, n-done)
		name := r.name(what) + "-" + itoa(done)
		infos, err := r.eng.Clone(ctx, engine.CloneRequest{From: r.golden, Name: ref.MustName(name), Count: batch,
			Mount: true})
		if err != nil {
			return err
		}

		for _, v := range infos {
			if err := ctx.Err(); err != nil {
				return err
			}

			if err := filepath.WalkDir(v.Mountpoint, func(_ string, d os.DirEntry, err error) error {
				if err == nil {
					_, err = d.Info()
				}
				return err
			}); err != nil {
				return err
			}

			if bytes > 0 {
				if err := writeNoise(filepath.Join(v.Mountpoint, "noise"), noise, bytes); err != nil {
					return err
				}
			}

			r.tracker.Add(1, 0)
		}

		done += batch
	}

	return nil
}

func writeNoise(path string, noise io.Reader, n int64) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	_, err = io.CopyN(f, noise, n)
	return errors.Join(err, f.Sync(), f.Close())
}

// settledAll waits until neither the pool nor the kernel's caches give back more.
func (r *run) settledAll(ctx context.Context) (pool.Space, map[string]int64, error) {
	if err := r.eng.Sync(ctx); err != nil {
		return pool.Space{}, nil, err
	}

	s, err := r.pool.WaitFreed(ctx, 20*time.Second)
	if err != nil {
		return s, nil, err
	}

	last, err := readSlabs()
	for still := 0; err == nil && still < 5; still++ {
		if err := sleep(ctx, 100*time.Millisecond); err != nil {
			return s, nil, err
		}
		var now map[string]int64
		if now, err = readSlabs(); err == nil && sum(now) < sum(last) {
			still = -1
		}
		last = now
	}

	return s, last, err
}

func sum(m map[string]int64) (n int64) {
	for _, v := range m {
		n += v
	}
	return n
}

// readSlabs reads the memory that the caches take. Permission without root.
func readSlabs() (map[string]int64, error) {
	all, err := kernel.SlabCaches()
	if err != nil {
		return nil, err
	}

	out := map[string]int64{}
	for _, c := range all {
		if slices.Contains(slabCaches, c.Name) {
			out[c.Name] = c.Bytes
		}
	}

	return out, nil
}

// decide fills the pool with goldens, generations and volumes, and runs gc.
func (r *run) decide(ctx context.Context, c ReclaimConfig, out *ReclaimReport) error {
	origin, err := r.eng.Show(ctx, r.golden)
	if err != nil {
		return err
	}

	cat, err := catalog.Open(ctx, r.pool.Dir, r.pool.Config.ID)
	if err != nil {
		return err
	}

	defer cat.Close()

	from := driver.ObjectID(origin.ID)
	if r.eng.Caps().CloneCost == driver.CostData { // full copies would fill the disk
		q, err := r.tiny(ctx)
		if err != nil {
			return err
		}
		d, err := r.eng.Show(ctx, q)
		if err != nil {
			return err
		}
		from, origin = driver.ObjectID(d.ID), d
	}

	base := driver.Identity{FS: driver.FS(origin.FS), SizeBytes: origin.SizeBytes, CreatedAt: time.Now().UTC(),
		BootID: bootID(), OriginID: from, Origin: r.golden.String()}
	if err := r.createMany(ctx, cat, c, base); err != nil {
		return err
	}

	return r.measureGC(ctx, c.Goldens*c.Generations+c.Volumes, out)
}

// createMany fills the pool with copies of the origin of base: goldens with their generations, then volumes.
func (r *run) createMany(ctx context.Context, cat *catalog.Catalog, c ReclaimConfig, base driver.Identity) error {
	total := c.Goldens*c.Generations + c.Volumes
	r.tracker.StartOf(progress.RunningBenchmark, "creating goldens, generations and volumes", int64(total), 0)
	var rows []catalog.Row
	var goldens []catalog.Golden
	put := func() error {
		// To every other process, an object with neither row nor mark is garbage, so the rows follow soon.
		err := cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error {
			for _, row := range rows {
				if err := tx.PutObject(row); err != nil {
					return err
				}
			}
			for _, g := range goldens {
				if err := tx.PutGolden(g); err != nil {
					return err
				}
			}
			return nil
		})

		rows, goldens = nil, nil
		return err
	}

	for i := range total {
		if err := ctx.Err(); err != nil {
			return err
		}

		// Create the object.
		var err error
		id := base
		id.ID = driver.NewID()
		if g := i / c.Generations; g < c.Goldens {
			id.Kind, id.Golden, id.Generation = driver.Generation, r.name("decide-"+itoa(g)), i%c.Generations+1
			if id.Generation == c.Generations {
				goldens = append(goldens, catalog.Golden{Name: id.Golden, Current: id.Generation, Next: id.Generation + 1,
					CreatedAt: base.CreatedAt})
			}
			err = r.createQuickly(ctx, id, true)
		} else {
			id.Kind, id.Name = driver.Volume, r.name("decide-v"+itoa(i))
			id.Golden, id.Generation = r.name("decide-"+itoa(i%c.Goldens)), 1+i%c.Generations
			err = r.createQuickly(ctx, id, false)
		}
		if err != nil {
			return errors.Join(err, put())
		}

		// Record it, many at a time.
		rows = append(rows, catalog.Row{Identity: id, UsedAt: base.CreatedAt})
		if len(rows) >= 256 {
			if err := put(); err != nil {
				return err
			}
		}

		r.tracker.Add(1, 0)
	}

	return put()
}

// measureGC runs gc three times, and checks that it has looked at all objects, of which there are at least total.
func (r *run) measureGC(ctx context.Context, total int, out *ReclaimReport) error {
	for range 3 {
		r.tracker.StartOf(progress.RunningBenchmark, "measuring gc", 0, 0)
		start := time.Now()
		text, err := r.output(ctx, "gc", "--json")
		if err != nil {
			return err
		}

		out.GCCommand = append(out.GCCommand, time.Since(start).Seconds())
		var rep engine.GCReport
		if err := json.Unmarshal(text, &rep); err != nil {
			return err
		}

		if rep.Objects < total {
			return errs.New(errs.Internal, "bench", "gc", "gc checked %d of %d objects", rep.Objects, total)
		}

		out.GCDecides = append(out.GCDecides, rep.Decided)
	}

	return nil
}

// createQuickly makes a copy of the origin of id, which need not be durable.
func (r *run) createQuickly(ctx context.Context, id driver.Identity, immutable bool) error {
	lc, ok := r.drv.(driver.LiveCopier)
	if ok && r.eng.Caps().Name == "reflink" {
		return lc.CopyLive(ctx, id.OriginID, id, immutable, nil)
	}
	if immutable {
		return r.drv.Snapshot(ctx, id.OriginID, id)
	}
	return r.drv.Clone(ctx, id.OriginID, id)
}

func bootID() string {
	b, _ := os.ReadFile("/proc/sys/kernel/random/boot_id") // "" is of no boot
	return strings.TrimSpace(string(b))
}

func (o *ReclaimReport) judge() {
	rep := &Report{}
	back := float64(o.UsedPeak - o.UsedAfter)
	rep.target("space returned / space taken", AtLeast, 0.99, Ratio, itoa(o.Clones)+" clones destroyed",
		over(back, float64(o.UsedPeak-o.UsedBefore)), "")
	var before, after int64
	for _, s := range o.Slabs {
		before, after = before+s.Before, after+s.After
	}

	rep.target("kernel memory of inodes and names, after / before", AtMost, 1.10, Ratio,
		itoa(o.Clones)+" clones of "+itoa(o.Files)+" files", over(float64(after), float64(before)), o.NoSlabs)
	slices.Sort(o.GCDecides)
	slices.Sort(o.GCCommand)
	at := itoa(o.Goldens) + " goldens with " + itoa(o.Generations) + " generations, " + itoa(o.Volumes) + " volumes"
	if o.Goldens < 1000 || o.Generations < 10 || o.Volumes < 10_000 {
		at += "; the target is for 1000 with 10, 10000"
	}

	rep.target("gc decides, p50", LessThan, 2, Seconds, at, o.GCDecides[len(o.GCDecides)/2], "")
	o.Targets = rep.Targets
}
