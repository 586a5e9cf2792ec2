package git

import (
	"bufio"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"pando/internal/base/ref"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
)

// BenchmarkGitClone compares ways to get a work tree of one's own of a repository with 500 MB of history, or as many MB
// as PANDO_BENCH_GIT_MB says: a clone of a golden at a branch, and what git offers, from a bare repository on the same
// filesystem. They take turns. The metric of each is its median time; the first is the unit of the ratios.
func BenchmarkGitClone(b *testing.B) {
	mb := 500
	if s := os.Getenv("PANDO_BENCH_GIT_MB"); s != "" {
		mb, _ = strconv.Atoi(s)
	}
	w := newWorld(b, reflink.Name, 12<<30)
	w.fillHistory(mb)
	fs := filepath.Dir(w.e.Dir())
	bare := filepath.Join(fs, "bare.git")
	gitIn(b, fs, "clone", "-q", "--bare", w.up, bare)
	w.up = bare
	w.imports(w.source())

	n := 0
	clone := func(args ...string) func(dir string) {
		return func(dir string) { gitIn(b, fs, append(append([]string{"clone", "-q"}, args...), dir)...) }
	}
	ways := []struct {
		name string
		make func(dir string)
		gone func(dir string)
	}{
		{"pando", func(string) { w.clone(fmt.Sprint("v", n), "trunk") }, func(string) {
			if _, err := w.e.Destroy(b.Context(), engine.DestroyRequest{What: patterns(b, fmt.Sprint("v", n))}); err != nil {
				b.Fatal(err)
			}
		}},
		{"no-local", clone("--no-local", bare), nil},
		{"local", clone(bare), nil},
		{"reference", clone("--no-local", "--reference", bare, "file://"+bare), nil},
		{"shared", clone("--shared", bare), nil},
		{"worktree", func(dir string) { gitIn(b, bare, "worktree", "add", "-q", "--detach", dir) },
			func(dir string) { gitIn(b, bare, "worktree", "remove", "--force", dir) }},
	}
	times := map[string][]float64{}
	for b.Loop() {
		for _, way := range ways {
			n++
			dir := filepath.Join(fs, fmt.Sprint("d", n))
			exec.Command("sync").Run()
			start := b.Elapsed()
			way.make(dir)
			times[way.name] = append(times[way.name], (b.Elapsed()-start).Seconds()*1000)
			if way.gone != nil {
				way.gone(dir)
			}
			_ = os.RemoveAll(dir)
		}
	}

	unit := median(times["pando"])
	for _, way := range ways {
		b.ReportMetric(median(times[way.name]), way.name+"-ms")
		if way.name != "pando" {
			b.ReportMetric(median(times[way.name])/unit, way.name+"-x")
		}
	}
}

func patterns(b *testing.B, s string) []ref.Pattern {
	p, err := ref.ParsePatterns("", s)
	must(b, err)
	return p
}

func median(all []float64) float64 {
	sorted := append([]float64(nil), all...)
	for i := range sorted {
		for j := range i {
			if sorted[i] < sorted[j] {
				sorted[i], sorted[j] = sorted[j], sorted[i]
			}
		}
	}
	return sorted[len(sorted)/2]
}

// fillHistory gives the repository mb commits of 1 MB that does not compress, of which the last tenth is in the work
// tree.
func (w *world) fillHistory(mb int) {
	w.t.Helper()
	cmd := exec.Command("git", "fast-import", "--quiet")
	cmd.Dir = w.up
	in, err := cmd.StdinPipe()
	must(w.t, err)
	must(w.t, cmd.Start())
	to := bufio.NewWriterSize(in, 1<<20)
	noise := rand.NewChaCha8([32]byte{1})
	for i := range mb {
		fmt.Fprintf(to, "commit refs/heads/trunk\ncommitter a <a@example.com> %d +0000\ndata 1\nc\n", 1000000000+i)
		fmt.Fprintf(to, "M 644 inline f%d\ndata %d\n", i%max(1, mb/10), 1<<20)
		if _, err := io.CopyN(to, noise, 1<<20); err != nil {
			w.t.Fatal(err)
		}
		fmt.Fprint(to, "\n")
	}
	must(w.t, to.Flush())
	must(w.t, in.Close())
	must(w.t, cmd.Wait())
	w.upstream("reset", "-q", "--hard")
}
