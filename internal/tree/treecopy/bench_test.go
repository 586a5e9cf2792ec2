package treecopy

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// benchTree is what the benchmarks copy: $PANDO_BENCH_TREE or Go's own tree,
// about 15,000 files and 270 MB.
func benchTree(b *testing.B) string {
	b.Helper()
	if dir := os.Getenv("PANDO_BENCH_TREE"); dir != "" {
		return dir
	}
	out, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		b.Skipf("SKIPPED: set PANDO_BENCH_TREE: %v", err)
	}
	return strings.TrimSpace(string(out))
}

// race times two ways of filling an empty directory, in turn, each into a
// fresh one of the same new ext4, with everything written back before. It
// reports the median of each in seconds and how many times faster ours is. Use
// -benchtime=7x or so.
func race(b *testing.B, theirs, ours func(dst string)) {
	b.Helper()
	var took [2][]float64
	// A new one, where nothing has been deleted: ext4 is slow to use inodes
	// again that were freed seconds ago.
	tmp := b.TempDir()
	if os.Geteuid() == 0 {
		tmp = loopMount(b, "ext4", 64<<10)
	}
	for i := 0; b.Loop(); i++ {
		for k := range 2 {
			k = (k + i) % 2
			dst := fmt.Sprintf("%s/%d-%d", tmp, i, k)
			must(b, os.Mkdir(dst, 0o755))
			unix.Sync()
			start := time.Now()
			[2]func(string){theirs, ours}[k](dst)
			took[k] = append(took[k], time.Since(start).Seconds())
		}
	}
	median := func(v []float64) float64 {
		slices.Sort(v)
		return v[len(v)/2]
	}
	t, o := median(took[0]), median(took[1])
	b.ReportMetric(t, "theirs-s")
	b.ReportMetric(o, "ours-s")
	b.ReportMetric(t/o, "times-faster")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkCopyDir compares with cp -a.
func BenchmarkCopyDir(b *testing.B) {
	src := benchTree(b)
	for name, opt := range map[string]Options{"plain": {}, "staging": {Staging: true}} {
		b.Run(name, func(b *testing.B) {
			race(b, func(dst string) {
				run(b, "/", "cp", "-a", src+"/.", dst)
			}, func(dst string) {
				copyDir(b, src, dst, opt)
			})
		})
	}
}

// BenchmarkUntar compares with tar -x.
func BenchmarkUntar(b *testing.B) {
	needTool(b, "tar")
	src := benchTree(b)
	for _, c := range []struct{ name, flag string }{{"plain", ""}, {"gzip", "--gzip"}, {"zstd", "--zstd"}} {
		b.Run(c.name, func(b *testing.B) {
			archive := filepath.Join(b.TempDir(), "archive")
			args := []string{"--create", "--file=" + archive, "."}
			if c.flag != "" {
				args = append([]string{c.flag}, args...)
			}
			run(b, src, "tar", args...)
			race(b, func(dst string) {
				run(b, dst, "tar", "--extract", "--file="+archive, "--numeric-owner", "--same-owner", "--preserve-permissions")
			}, func(dst string) {
				_, err := Untar(bg, openFile(b, archive), openFile(b, dst), Options{})
				must(b, err)
			})
		})
	}
}

// BenchmarkMeasure walks the tree.
func BenchmarkMeasure(b *testing.B) {
	src := benchTree(b)
	for b.Loop() {
		_, err := Measure(bg, src, Options{})
		must(b, err)
	}
}

// BenchmarkMillionFiles copies a million small files in a process of its own
// and reports the most memory that it used.
func BenchmarkMillionFiles(b *testing.B) {
	if dir := os.Getenv("TREECOPY_MILLION"); dir != "" {
		must(b, os.RemoveAll(dir+"/dst"))
		must(b, os.Mkdir(dir+"/dst", 0o755))
		copyDir(b, dir+"/src", dir+"/dst", Options{Staging: true})
		return
	}
	if os.Geteuid() != 0 {
		b.Skip("SKIPPED: this benchmark needs root")
	}
	for name, build := range map[string]func(b *testing.B, dir string, files int){
		"mixed": mixedFiles, "hard links": hardLinkedFiles,
	} {
		b.Run(name, func(b *testing.B) {
			dir := mount(b, "tmpfs", "nr_inodes=0,size=16g")
			must(b, os.Mkdir(dir+"/src", 0o755))
			build(b, dir+"/src", 1000000)
			copyMany(b, dir)
		})
	}
}

// mixedFiles makes directories of all sizes, one of them huge.
func mixedFiles(b *testing.B, dir string, files int) {
	for i := range 50 {
		sub := fmt.Sprintf("%s/%d/sub/%d", dir, i%7, i)
		must(b, os.MkdirAll(sub, 0o755))
		count := files / 100
		if i == 0 {
			count = files - 49*count
		}
		for k := range count {
			name := sub + "/a file with a name " + strconv.Itoa(k)
			if k%10 == 9 {
				must(b, os.Link(sub+"/a file with a name "+strconv.Itoa(k-1), name))
			} else if k%10 == 5 {
				must(b, os.Mkdir(name, 0o755))
			} else {
				must(b, unix.Mknod(name, unix.S_IFREG|0o644, 0))
			}
		}
	}
}

// hardLinkedFiles makes pairs of hard links, as far from each other as can be.
func hardLinkedFiles(b *testing.B, dir string, files int) {
	for _, sub := range []string{"a", "b"} {
		must(b, os.Mkdir(dir+"/"+sub, 0o755))
		for k := range files / 2 {
			name := fmt.Sprintf("%s/%s/a file with a name %d", dir, sub, k)
			if sub == "a" {
				must(b, unix.Mknod(name, unix.S_IFREG|0o644, 0))
			} else {
				must(b, os.Link(fmt.Sprintf("%s/a/a file with a name %d", dir, files/2-1-k), name))
			}
		}
	}
}

// copyMany copies dir/src in another process.
func copyMany(b *testing.B, dir string) {
	want, err := Measure(bg, dir+"/src", Options{})
	must(b, err)
	var most float64
	for b.Loop() {
		cmd := exec.Command("/proc/self/exe", "-test.run=^$", "-test.bench=^BenchmarkMillionFiles$", "-test.benchtime=1x")
		cmd.Env = append(os.Environ(), "TREECOPY_MILLION="+dir)
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := cmd.Run(); err != nil {
			b.Fatalf("%v\n%s", err, &out)
		}
		if got, err := Measure(bg, dir+"/dst", Options{}); err != nil || !reflect.DeepEqual(got, want) {
			b.Fatalf("the copy has %+v, the tree %+v; %v", got, want, err)
		}
		rss := cmd.ProcessState.SysUsage().(*syscall.Rusage).Maxrss // KiB
		most = max(most, float64(rss)/1024)
	}
	b.ReportMetric(most, "MiB-RSS")
	b.ReportMetric(float64(want.Files), "files")
	if most > 200 {
		b.Errorf("%.0f MiB of memory", most)
	}
}
