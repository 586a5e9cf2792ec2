package engine_test

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/linux/kernel"
	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// BenchmarkLowerLayer compares what the lower layer of overlays can be: the generation's own ext4, an EROFS made from
// it, and a compressed EROFS. They hold $PANDO_BENCH_TREE, by default the Go distribution, and take turns; figures are
// medians. It drops the page cache of the host. Run it with -benchtime 1x, and TMPDIR on the disk.
func BenchmarkLowerLayer(b *testing.B) {
	if _, err := exec.LookPath("mkfs.erofs"); err != nil {
		b.Skip("SKIPPED: needs mkfs.erofs, of the package erofs-utils")
	}
	lowers := makeLowers(b)

	for range b.N {
		for range benchRounds {
			for _, l := range lowers {
				l.measure(b)
			}
		}
		b.ReportMetric(0, "ns/op")
		for _, l := range lowers {
			b.ReportMetric(l.made.Seconds()*1000, l.name+"-made-ms")
			b.ReportMetric(float64(l.bytes>>20), l.name+"-MiB")
			b.ReportMetric(median(l.mount)*1000, l.name+"-mount-ms")
			b.ReportMetric(median(l.cold)*1000, l.name+"-cold-ms")
			b.ReportMetric(median(l.warm)*1000, l.name+"-warm-ms")
			b.ReportMetric(median(l.cache), l.name+"-cached-MiB")
		}
	}
}

// lower is a lower layer that is measured.
type lower struct {
	name, image, fs   string
	options           []string
	made              time.Duration // to make it from a golden
	bytes             int64
	mount, cold, warm []float64 // seconds
	cache             []float64 // MiB
}

// makeLowers imports a golden, and makes the others of it.
func makeLowers(b *testing.B) []*lower {
	b.Helper()
	tree := os.Getenv("PANDO_BENCH_TREE")
	if tree == "" {
		out, err := exec.Command("go", "env", "GOROOT").Output()
		if err != nil {
			b.Fatal(err)
		}
		tree = strings.TrimSpace(string(out))
	}

	e := emptyBenchPool(b, engine.InitRequest{Dir: filepath.Join(b.TempDir(), "pool"), SizeBytes: 8 << 30})
	if _, err := e.Import(b.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: tree}); err != nil {
		b.Fatal(err)
	}
	images, err := filepath.Glob(filepath.Join(e.Dir(), "data/objects/*.img"))
	if err != nil || len(images) != 1 {
		b.Fatalf("images %v: %v", images, err)
	}

	out := []*lower{{name: "ext4", image: images[0], fs: "ext4", options: []string{"noload"}}}
	for name, flags := range map[string][]string{"erofs": nil, "erofs-lz4": {"-zlz4hc"}} {
		image := filepath.Join(filepath.Dir(images[0]), "..", name+".img")
		start := time.Now()
		cmd := exec.Command("mkfs.erofs", append(flags, "--quiet", image, tree)...)
		if msg, err := cmd.CombinedOutput(); err != nil {
			b.Fatalf("%v: %s", err, msg)
		}
		out = append(out, &lower{name: name, image: image, fs: "erofs", made: time.Since(start)})
	}
	for _, l := range out {
		var st unix.Stat_t
		if err := unix.Stat(l.image, &st); err != nil {
			b.Fatal(err)
		}
		l.bytes = st.Blocks * 512
	}
	return out
}

// measure mounts an overlay on the layer, and reads all its files twice.
func (l *lower) measure(b *testing.B) {
	b.Helper()
	unix.Sync()
	if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0); err != nil {
		b.Fatal(err)
	}
	upper := b.TempDir()
	for _, d := range []string{mount.UpperDir, mount.WorkDir} {
		if err := os.Mkdir(filepath.Join(upper, d), 0o755); err != nil {
			b.Fatal(err)
		}
	}

	start := time.Now()
	m := l.overlay(b, upper)
	defer m.Close()
	l.mount = append(l.mount, time.Since(start).Seconds())
	root, err := m.Open()
	if err != nil {
		b.Fatal(err)
	}
	defer root.Close()

	before := cachedBytes(b)
	for _, took := range []*[]float64{&l.cold, &l.warm} {
		start = time.Now()
		readAll(b, fmt.Sprintf("/proc/self/fd/%d", root.Fd()))
		*took = append(*took, time.Since(start).Seconds())
	}
	l.cache = append(l.cache, float64(cachedBytes(b)-before)/(1<<20))
}

// overlay mounts the layer and an overlay on it.
func (l *lower) overlay(b *testing.B, upper string) *mount.Detached {
	b.Helper()
	image, err := os.Open(l.image)
	if err != nil {
		b.Fatal(err)
	}
	defer image.Close()
	d, err := loopdev.Attach(b.Context(), image, loopdev.Options{ReadOnly: true, DirectIO: true})
	if err != nil {
		b.Fatal(err)
	}
	defer d.Close()
	low, err := mount.Device(l.fs, d.Path, l.options, true)
	if err != nil {
		b.Fatal(err)
	}
	defer low.Close()
	up, err := mount.Tree(upper, false)
	if err != nil {
		b.Fatal(err)
	}
	defer up.Close()
	m, err := mount.Overlay{Lower: low, Upper: up, Name: "bench", Options: []string{"index=off", "xino=on"}}.Mount()
	if err != nil {
		b.Fatal(err)
	}
	return m
}

// readAll reads every file below dir.
func readAll(b *testing.B, dir string) {
	b.Helper()
	buf := make([]byte, 1<<20)
	if err := filepath.WalkDir(dir+"/.", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{f}, buf)
		return err
	}); err != nil {
		b.Fatal(err)
	}
}

// cachedBytes returns how much of files is in memory.
func cachedBytes(b *testing.B) int64 {
	b.Helper()
	m, err := kernel.ReadMemory()
	if err != nil {
		b.Fatal(err)
	}
	return m.Cached
}

// BenchmarkCopyUp measures the first opening of a large file of the golden for writing in an overlay, which copies the
// file: in images, and in trees on btrfs and ext4. Run it with -benchtime 1x, and TMPDIR on the disk.
func BenchmarkCopyUp(b *testing.B) {
	const size = 1 << 30
	for name, pool := range map[string]struct {
		driver string
		dir    func(testing.TB, int64) string
	}{"image": {"reflink", testfs.XFS}, "btrfs": {"btrfs", testfs.Btrfs}, "plain": {"plain", testfs.Ext4}} {
		b.Run(name, func(b *testing.B) {
			dir := filepath.Join(pool.dir(b, 12<<30), "pool")
			e := emptyBenchPool(b, engine.InitRequest{Dir: dir, Driver: pool.driver})
			src := b.TempDir()
			if err := exec.Command("sh", "-c", "head -c 1G /dev/urandom >"+src+"/large").Run(); err != nil {
				b.Fatal(err)
			}
			if _, err := e.Import(b.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: src}); err != nil {
				b.Fatal(err)
			}
			var took []float64
			for i := range b.N * 5 {
				out, err := e.Clone(b.Context(), engine.CloneRequest{From: ref.Ref{Name: "g"},
					Name: ref.MustName(fmt.Sprint("v", i)), Mount: true, Overlay: true})
				if err != nil {
					b.Fatal(err)
				}
				start := time.Now()
				f, err := os.OpenFile(filepath.Join(out[0].Mountpoint, "large"), os.O_RDWR, 0)
				if err != nil {
					b.Fatal(err)
				}
				took = append(took, time.Since(start).Seconds())
				f.Close()
				if _, err := e.Destroy(b.Context(), toDestroy(out[0].Name)); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(median(took)*1000, "ms/GiB")
			b.ReportMetric(size/median(took)/(1<<20), "MiB/s")
		})
	}
}
