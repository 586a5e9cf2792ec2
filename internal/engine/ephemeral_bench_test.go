package engine_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"pando/internal/api"
	"pando/internal/base/ref"
	"pando/internal/engine"

	"golang.org/x/sys/unix"
)

// benchRounds is how often the two kinds of volumes take turns.
const benchRounds = 9

// BenchmarkEphemeral compares ephemeral volumes with durable ones on the same pool: the rate of writes of 8 KiB with
// an fdatasync, the time of a load like that of `apt-get install`, and the time to clone and mount. They take turns,
// and the figures are medians, with ratios for which more is better. Run it with -benchtime 1x, and TMPDIR on the disk.
func BenchmarkEphemeral(b *testing.B) {
	e := benchPool(b)
	for range b.N {
		var all [2]struct{ syncs, install, clone []float64 }
		for range benchRounds {
			for i := range all {
				v, took := benchClone(b, e, i == 1)
				all[i].clone = append(all[i].clone, took.Seconds())
				all[i].syncs = append(all[i].syncs, syncRate(b, filepath.Join(v.Mountpoint, "log"), time.Second))
				all[i].install = append(all[i].install, installPackages(b, v.Mountpoint).Seconds())
				if _, err := e.Destroy(b.Context(), toDestroy(v.Name)); err != nil {
					b.Fatal(err)
				}
			}
		}

		durable, eph := all[0], all[1]
		b.ReportMetric(0, "ns/op")
		b.ReportMetric(median(durable.syncs), "durable-syncs/s")
		b.ReportMetric(median(eph.syncs), "ephemeral-syncs/s")
		b.ReportMetric(median(eph.syncs)/median(durable.syncs), "x-syncs")
		b.ReportMetric(median(durable.install)*1000, "durable-install-ms")
		b.ReportMetric(median(eph.install)*1000, "ephemeral-install-ms")
		b.ReportMetric(median(durable.install)/median(eph.install), "x-install")
		b.ReportMetric(median(durable.clone)*1000, "durable-clone-ms")
		b.ReportMetric(median(eph.clone)*1000, "ephemeral-clone-ms")
	}
}

func median(x []float64) float64 {
	slices.Sort(x)
	return x[len(x)/2]
}

// benchClone clones and mounts the golden g.
func benchClone(b *testing.B, e *engine.Engine, ephemeral bool) (api.Object, time.Duration) {
	b.Helper()
	start := time.Now()
	out, err := e.Clone(b.Context(), engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("v"), Mount: true,
		Ephemeral: ephemeral})
	if err != nil {
		b.Fatal(err)
	}
	return out[0], time.Since(start)
}

// syncRate writes 8 KiB and syncs it, over blocks that are written already, for a time.
func syncRate(b *testing.B, path string, length time.Duration) float64 {
	b.Helper()
	const blocks = 2048
	f, err := os.Create(path)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()

	block := bytes.Repeat([]byte("8 KiB of text..."), 512)
	for range blocks {
		_, werr := f.Write(block)
		err = errors.Join(err, werr)
	}
	if err = errors.Join(err, f.Sync()); err != nil {
		b.Fatal(err)
	}

	start := time.Now()
	for n := int64(0); ; n++ {
		if _, err := f.WriteAt(block, n%blocks*int64(len(block))); err != nil {
			b.Fatal(err)
		}
		if err := unix.Fdatasync(int(f.Fd())); err != nil {
			b.Fatal(err)
		}
		if t := time.Since(start); t >= length {
			return float64(n+1) / t.Seconds()
		}
	}
}

// installPackages does what dpkg does for 20 packages of 30 files: writes each file under another name, syncs and
// renames it, and then writes, syncs and renames the list of packages.
func installPackages(b *testing.B, dir string) time.Duration {
	b.Helper()
	file, list := bytes.Repeat([]byte("a file\n"), 1700), bytes.Repeat([]byte("a package\n"), 30_000)
	put := func(path string, data []byte) error {
		f, err := os.Create(path + ".dpkg-new")
		if err != nil {
			return err
		}
		_, err = f.Write(data)
		return errors.Join(err, f.Sync(), f.Close(), os.Rename(path+".dpkg-new", path))
	}

	start := time.Now()
	for p := range 20 {
		at := filepath.Join(dir, fmt.Sprint("package", p))
		err := os.Mkdir(at, 0o755)
		for n := range 30 {
			err = errors.Join(err, put(filepath.Join(at, fmt.Sprint("file", n)), file))
		}
		if err = errors.Join(err, put(filepath.Join(dir, "status"), list)); err != nil {
			b.Fatal(err)
		}
	}
	return time.Since(start)
}
