// Package foreign runs test suites that nobody wrote for Pando in its volumes: their results must be those of a plain
// ext4.
package foreign

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"pando/internal/base/ref"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/testing/testfs"
	"pando/internal/testing/treetest"
)

var drivers = engine.Drivers{reflink.Name: reflink.Open, plain.Name: plain.Open}

func TestMain(m *testing.M) {
	engine.Helper(os.Args)
	os.Exit(m.Run())
}

// outcomes are "passed", "skipped" or "failed" for each test of a suite.
type outcomes map[string]string

// suite is a test suite that lies in a directory, with the data that it works on.
type suite struct {
	fill func(t *testing.T, dir string)
	run  func(t *testing.T, dir string) outcomes
}

var suites = map[string]suite{
	"python":    {fillPython, runPython},
	"stress-ng": {fillStressNG, runStressNG},
	"fio":       {fillFio, runFio},
}

// difference is a test that ends otherwise in a place than on ext4. A comment gives the reason.
type difference struct{ suite, place, test, outcome string }

// expected must be what is seen: a difference that is gone has to go here and in docs/choosing.md, too.
var expected = []difference{}

// places are where the suites run; "ext4" is what the others are compared with.
var places = []string{"ext4", "image", "overlay", "tree overlay"}

// TestForeignSuites runs each suite on a plain ext4, in an image clone, in an overlay on the same golden, and in an
// overlay on a tree. The suites lie in the goldens with their data, so they change files of the lower layer. The
// goldens must stay as they are.
func TestForeignSuites(t *testing.T) {
	src := t.TempDir()
	for name, s := range suites {
		dir := filepath.Join(src, name)
		for _, d := range []string{dir, filepath.Join(dir, "tmp")} {
			if err := os.Mkdir(d, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		s.fill(t, dir)
	}

	images := newPool(t, testfs.XFS(t, 4<<30), "reflink", src)
	trees := newPool(t, testfs.Ext4(t, 2<<30), "plain", src)
	dirs := map[string]string{
		"ext4":         testfs.Ext4(t, 2<<30),
		"image":        clone(t, images, "image", false),
		"overlay":      clone(t, images, "overlay", true),
		"tree overlay": clone(t, trees, "overlay", true),
	}
	command(t, exec.Command("cp", "-a", src+"/.", dirs["ext4"]))

	for name, s := range suites {
		t.Run(name, func(t *testing.T) {
			compare(t, name, runIn(t, s, name, dirs))
		})
	}
}

// newPool makes a pool with the golden g of the files in src, which no test may change.
func newPool(t *testing.T, dir, driver, src string) *engine.Engine {
	t.Helper()
	q := engine.InitRequest{Dir: filepath.Join(dir, "pool"), Driver: driver}
	if _, err := engine.Init(t.Context(), q, drivers); err != nil {
		t.Fatal(err)
	}

	e, err := engine.Open(t.Context(), q.Dir, drivers)
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() {
		e.Close()
		q := engine.DeinitRequest{Dir: q.Dir, Force: true}
		if _, err := engine.Deinit(context.Background(), q, drivers, nil); err != nil {
			t.Error(err)
		}
	})

	i := engine.ImportRequest{Name: ref.MustName("g"), Source: src}
	if driver == "reflink" {
		i.SizeBytes = 1 << 30
	}
	if _, err := e.Import(t.Context(), i); err != nil {
		t.Fatal(err)
	}

	treetest.KeepImmutable(t, q.Dir)
	return e
}

func clone(t *testing.T, e *engine.Engine, name string, overlay bool) (mountpoint string) {
	t.Helper()
	out, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName(name),
		Mount: true, Overlay: overlay})
	if err != nil {
		t.Fatal(err)
	}
	return out[0].Mountpoint
}

// runIn runs a suite in all places, two at a time.
func runIn(t *testing.T, s suite, name string, dirs map[string]string) map[string]outcomes {
	t.Helper()
	results := make([]outcomes, len(places))
	for pair := range slices.Chunk([]int{0, 1, 2, 3}, 2) {
		var g sync.WaitGroup
		for _, i := range pair {
			g.Go(func() { results[i] = s.run(t, filepath.Join(dirs[places[i]], name)) })
		}
		g.Wait()
	}

	all := map[string]outcomes{}
	for i, place := range places {
		all[place] = results[i]
	}
	return all
}

// unsteady are tests that fail at times on ext4 alone, so that a difference says nothing of Pando: this one expects
// glob to follow a symbolic link to its own directory to the same depth twice.
var unsteady = map[string]bool{"test.test_glob.SymlinkLoopGlobTests.test_selflink": true}

// compare compares the outcomes of a suite in each place with those on ext4.
func compare(t *testing.T, suite string, all map[string]outcomes) {
	t.Helper()
	count := map[string]int{}
	for _, outcome := range all["ext4"] {
		count[outcome]++
	}
	t.Logf("%d tests on ext4: %v", len(all["ext4"]), count)
	if count["passed"] < 2*count["failed"] || count["passed"] < 5 {
		t.Errorf("too few tests pass on ext4 to show anything")
	}

	for _, place := range places[1:] {
		var want, got []string
		for _, d := range expected {
			if d.suite == suite && d.place == place {
				want = append(want, fmt.Sprintf("%s %s", d.test, d.outcome))
			}
		}

		tests := maps.Clone(all["ext4"])
		maps.Copy(tests, all[place])
		for _, test := range slices.Sorted(maps.Keys(tests)) {
			if outcome := all[place][test]; outcome != all["ext4"][test] && !unsteady[test] {
				got = append(got, fmt.Sprintf("%s %s", test, outcome))
			}
		}

		slices.Sort(want)
		if slices.Sort(got); !slices.Equal(got, want) {
			t.Errorf("differences of %s from ext4:\n%s\nexpected:\n%s", place, strings.Join(got, "\n"),
				strings.Join(want, "\n"))
		}
	}
}

// command runs a program that must succeed.
func command(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", cmd, err, out)
	}
}
