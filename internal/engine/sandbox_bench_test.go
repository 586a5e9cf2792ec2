package engine_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/testing/testfs"
)

// sandboxRounds is how often the kinds of sandboxes take turns.
const sandboxRounds = 25

// BenchmarkSandbox compares a run of `true` in a sandbox, with its clone, with the same in bwrap and in runc: clone and
// mount, run, destroy. All are called by one process and take turns; the figures are medians, and x-bwrap and x-runc
// are their ratios, for which less is better. Run it with -benchtime 1x.
func BenchmarkSandbox(b *testing.B) {
	e, from := sandboxPool(b)
	kinds := []struct {
		name string
		run  func(b *testing.B, i int)
	}{
		{"pando", func(b *testing.B, _ int) {
			r, err := e.Run(b.Context(), engine.RunRequest{From: from, Sandbox: engine.Sandbox{Root: true},
				Command: []string{"/bin/busybox", "true"}})
			if err != nil || r.Exit != 0 || r.Held != nil {
				b.Fatal(r, err)
			}
		}},
		{"bwrap", func(b *testing.B, i int) {
			inClone(b, e, from, i, func(dir string) *exec.Cmd {
				return exec.Command("bwrap", "--bind", dir, "/", "--proc", "/proc", "--dev", "/dev", "--unshare-all",
					"--die-with-parent", "/bin/busybox", "true")
			})
		}},
		{"runc", func(b *testing.B, i int) {
			bundle := b.TempDir()
			inClone(b, e, from, i, func(dir string) *exec.Cmd {
				writeBundle(b, bundle, dir)
				name := "pando-bench-" + strconv.Itoa(os.Getpid()) + "-" + strconv.Itoa(i)
				return exec.Command("runc", "run", "--bundle", bundle, name)
			})
		}},
	}

	for range b.N {
		took := map[string][]float64{}
		for i := range sandboxRounds {
			for _, k := range kinds {
				if _, err := exec.LookPath(k.name); k.name != "pando" && err != nil {
					b.Logf("SKIPPED: %s is not installed", k.name)
					continue
				}
				begin := time.Now()
				k.run(b, i)
				took[k.name] = append(took[k.name], time.Since(begin).Seconds()*1000)
			}
		}

		b.ReportMetric(0, "ns/op")
		for _, k := range kinds {
			if len(took[k.name]) > 0 {
				b.ReportMetric(median(took[k.name]), k.name+"-ms")
			}
		}
		for _, other := range []string{"bwrap", "runc"} {
			if len(took[other]) > 0 {
				b.ReportMetric(median(took["pando"])/median(took[other]), "x-"+other)
			}
		}
	}
}

// sandboxPool makes a pool with a golden that has a static busybox.
func sandboxPool(b *testing.B) (*engine.Engine, ref.Ref) {
	b.Helper()
	e := emptyBenchPool(b, engine.InitRequest{Dir: filepath.Join(b.TempDir(), "pool"), SizeBytes: 2 << 30})
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		b.Skip("SKIPPED: busybox is missing: apt-get install busybox-static")
	}

	src := b.TempDir()
	program, err := os.ReadFile(busybox)
	if err == nil {
		err = os.Mkdir(filepath.Join(src, "bin"), 0o755)
	}
	if err == nil {
		err = testfs.WriteProgram(filepath.Join(src, "bin/busybox"), program)
	}
	for _, dir := range []string{"proc", "sys", "dev"} {
		if err == nil {
			err = os.Mkdir(filepath.Join(src, dir), 0o755)
		}
	}
	if err != nil {
		b.Fatal(err)
	}

	if _, err := e.Import(b.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: src,
		SizeBytes: 256 << 20}); err != nil {
		b.Fatal(err)
	}
	return e, ref.Ref{Name: "g"}
}

// inClone runs a program on a mounted ephemeral clone, which it destroys.
func inClone(b *testing.B, e *engine.Engine, from ref.Ref, i int, command func(dir string) *exec.Cmd) {
	b.Helper()
	name := "bench-" + strconv.Itoa(i)
	infos, err := e.Clone(b.Context(), engine.CloneRequest{From: from, Name: ref.MustName(name), Mount: true,
		Ephemeral: true})
	if err != nil {
		b.Fatal(err)
	}
	if out, err := command(infos[0].Mountpoint).CombinedOutput(); err != nil {
		b.Fatalf("%v: %s", err, out)
	}
	if _, err := e.Destroy(b.Context(), toDestroy(name)); err != nil {
		b.Fatal(err)
	}
}

// writeBundle writes runc's own default configuration, for a root filesystem and `true`.
func writeBundle(b *testing.B, bundle, root string) {
	b.Helper()
	file := filepath.Join(bundle, "config.json")
	if _, err := os.Stat(file); err != nil {
		if out, err := exec.Command("runc", "spec", "--bundle", bundle).CombinedOutput(); err != nil {
			b.Fatalf("%v: %s", err, out)
		}
	}

	var config map[string]any
	content, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(content, &config)
	}
	if err != nil {
		b.Fatal(err)
	}

	process := config["process"].(map[string]any)
	process["terminal"], process["args"] = false, []string{"/bin/busybox", "true"}
	config["root"].(map[string]any)["path"] = root
	if content, err = json.Marshal(config); err == nil {
		err = os.WriteFile(file, content, 0o600)
	}
	if err != nil {
		b.Fatal(err)
	}
}
