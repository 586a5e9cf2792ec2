package bench

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/linux/kernel"

	"golang.org/x/sys/unix"
)

// writeEvery: sessions write every so many files, which is 1 %.
const writeEvery = 100

// measure gives n sessions their copies, lets them read and write, and removes the copies.
func (d *density) measure(ctx context.Context, v variant, n int) (row DensityRow, err error) {
	row = DensityRow{Variant: v.name(), Sessions: n}
	title := v.name() + ", " + errs.Plural(n, "session") + ": "
	d.tracker.StartOf(progress.RunningBenchmark, title+"setting up", 0, 0)
	err = v.prepare(ctx)
	if reason, is := missing(err); is {
		row.NotMeasured = reason
		return row, nil
	}
	if err != nil {
		return row, err
	}

	if err := d.dropCaches(); err != nil {
		return row, err
	}

	before, err := kernel.ReadMemory()
	if err != nil {
		return row, err
	}

	defer func() { // also what a failed setup has made
		start := time.Now()
		d.tracker.StartOf(progress.RunningBenchmark, title+"removing", 0, 0)
		err = errors.Join(err, v.remove(context.WithoutCancel(ctx)))
		row.Remove = time.Since(start).Seconds()
	}()

	start := time.Now()
	dirs, err := v.setup(ctx, n)
	row.Setup = time.Since(start).Seconds()
	if reason, is := missing(err); is {
		row.NotMeasured = reason
		return row, nil
	}
	if err != nil {
		return row, err
	}

	d.tracker.StartOf(progress.RunningBenchmark, title+"reading", int64(n)*d.rep.Source.Files, int64(n)*d.rep.Source.Bytes)
	err = d.work(ctx, v, dirs, before, &row)
	return row, err
}

// missing reports whether an error of a setup means that there are no figures of the variant here, and why.
func missing(err error) (string, bool) {
	if reason, is := isCopyError(err); is {
		return reason, true
	}
	if errs.Is(err, errs.Unsupported) {
		return err.Error(), true
	}
	return "", false
}

// work lets the sessions read everything and then write. before is the memory before they had copies.
func (d *density) work(ctx context.Context, v variant, dirs []string, before kernel.Memory, row *DensityRow) error {
	if err := d.dropCaches(); err != nil {
		return err
	}

	// Read, from an empty page cache. What others do on the host in the meantime counts, so the time is short.
	meter := v.meter()
	empty, err := kernel.ReadMemory()
	if err != nil {
		return err
	}

	start, err := readSoFar(meter)
	if err != nil {
		row.NoDisk = err.Error()
	}

	read, last, err := d.sessions(ctx, dirs, func(dir string) error {
		_, _, err := readFiles(ctx, dir, d.tracker)
		return err
	})
	if err != nil {
		return err
	}

	// Look at what that took. Nothing is written yet, which would be memory of each session's own.
	end, err := readSoFar(meter)
	if err != nil {
		row.NoDisk = err.Error()
	}

	m, err := kernel.ReadMemory()
	if err != nil {
		return err
	}

	n := float64(len(dirs))
	row.Read, row.Disk = last.Seconds(), float64(end-start)
	row.Cache = float64(cached(m) - cached(empty))
	row.Reclaimable = float64(m.SReclaimable-before.SReclaimable) / n
	row.Unreclaimable = float64(m.Slab-m.SReclaimable-before.Slab+before.SReclaimable) / n
	if row.Resident, err = residentTree(dirs[len(dirs)-1]); err != nil {
		return err
	}

	// Write.
	write, last, err := d.sessions(ctx, dirs, func(dir string) error { return writeShare(ctx, dir) })
	if err != nil {
		return err
	}

	if m, err = kernel.ReadMemory(); err != nil {
		return err
	}

	row.Write, row.Session = last.Seconds(), (read+write).Seconds()/n
	row.CacheWritten = float64(cached(m) - cached(empty))
	return nil
}

// cached is the page cache, without what tmpfs holds: that is not a cache.
func cached(m kernel.Memory) int64 { return m.Cached + m.Buffers - m.Shmem }

// readSoFar returns what was read from the device that copies are on.
func readSoFar(m *meter) (int64, error) {
	all, err := m.read()
	if err != nil {
		return 0, err
	}
	return all[0].ReadBytes, nil
}

// sessions calls fn for all directories, --at-once at the same time. It returns the sum of the times that the calls
// took, and the time until the last returned.
func (d *density) sessions(
	ctx context.Context, dirs []string, fn func(dir string) error,
) (sum, last time.Duration, err error) {
	var workers sync.WaitGroup
	var lock sync.Mutex
	queue := make(chan string, len(dirs))
	for _, dir := range dirs {
		queue <- dir
	}

	close(queue)

	start := time.Now()
	for range min(d.c.AtOnce, len(dirs)) {
		workers.Go(func() {
			for dir := range queue {
				began := time.Now()
				failed := fn(dir)
				lock.Lock()
				sum += time.Since(began)
				err = errors.Join(err, failed)
				lock.Unlock()
				if failed != nil {
					return
				}
			}
		})
	}

	workers.Wait()
	return sum, time.Since(start), err
}

// writeShare overwrites the data of 1 % of the files below dir.
func writeShare(ctx context.Context, dir string) error {
	noise, i := rand.NewChaCha8([32]byte{1}), 0
	return eachFile(dir, func(path string, d os.DirEntry) error {
		i++
		if i%writeEvery != 1 {
			return ctx.Err()
		}

		st, err := d.Info()
		if err != nil {
			return err
		}

		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return err
		}

		data := make([]byte, st.Size())
		noise.Read(data)
		_, err = f.Write(data)
		return errors.Join(err, f.Close())
	})
}

// residentTree returns how much of the files below dir is in the page cache.
func residentTree(dir string) (bytes float64, err error) {
	return bytes, eachFile(dir, func(path string, _ os.DirEntry) error {
		f, err := os.Open(path)
		if err != nil {
			return err
		}

		defer f.Close()

		n, err := kernel.Resident(f)
		bytes += float64(n)
		return err
	})
}

// eachFile calls fn for all regular files below dir, sorted by name.
func eachFile(dir string, fn func(path string, d os.DirEntry) error) error {
	return filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		return fn(path, d)
	})
}

// dropCaches writes out the pool, and removes all from the kernel's caches that is not in use. Freeing the inodes of
// overlays puts those below them into the caches, without pages: so inodes are dropped twice. To look through the pages
// takes long on a host that has many.
func (d *density) dropCaches() error {
	unix.Sync()
	for _, what := range []string{"3", "2"} { // pages and inodes, inodes
		if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte(what), 0); err != nil {
			return errs.Wrap("bench", "/proc/sys/vm/drop_caches", err)
		}
	}
	return nil
}
