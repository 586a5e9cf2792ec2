//go:build linux && (amd64 || arm64)

package crash

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pando/internal/testing/faulttest"
)

// catalogue is what its files hold, by extension; one that is missing is not in it.
type catalogue map[string][]byte

func (w *world) saveCatalogue() catalogue {
	w.t.Helper()
	c := catalogue{}
	for _, ext := range []string{"", "-wal"} {
		b, err := os.ReadFile(filepath.Join(w.dir, "catalog.db"+ext))
		if os.IsNotExist(err) {
			continue
		}
		if err != nil {
			w.t.Fatal(err)
		}
		c[ext] = b
	}
	return c
}

func (w *world) putBack(c catalogue) {
	w.t.Helper()
	for _, ext := range []string{"", "-wal", "-shm"} {
		path := filepath.Join(w.dir, "catalog.db"+ext)
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			w.t.Fatal(err)
		}
		if b, ok := c[ext]; ok {
			if err := os.WriteFile(path, b, 0o600); err != nil {
				w.t.Fatal(err)
			}
		}
	}
}

// TestCatalogueGoesBackAtEveryStep kills commands at every step, and puts the catalogue back
// to a state before other volumes were made, which were reported as done: they stay, with
// their content, whatever is run, until somebody destroys them.
func TestCatalogueGoesBackAtEveryStep(t *testing.T) {
	t.Parallel()
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			for _, op := range operations {
				if !slices.Contains([]string{"clone-mount", "publish", "destroy", "run"}, op.name) {
					continue
				}
				t.Run(op.name, func(t *testing.T) {
					t.Parallel()
					w := newWorld(t, k)
					w.initPool()
					w.importGolden("g")
					w.pando("clone", "g", "base")
					old := []catalogue{w.saveCatalogue()}
					w.pando("clone", "g", "durable")
					old = append(old, w.saveCatalogue())
					w.pando("snapshot", "durable", "s")

					n := 0
					sweep := w.sweepOf(faulttest.Plan{Mode: faulttest.KillBefore}, 4)
					sweep.Each(t, func(p faulttest.Plan) faulttest.Result {
						op.prepare(w)
						return w.traced(p, op.command(w)...)
					}, func(faulttest.Result) {
						w.putBack(old[n%len(old)])
						n++
						w.checkLost()
					})
					w.pando("deinit", "--force")
					w.nothingLeft()
				})
			}
		})
	}
}

// checkLost checks that a catalogue that went back is noticed, and that a rebuild brings
// back all that there was.
func (w *world) checkLost() {
	w.t.Helper()
	for _, args := range [][]string{{"clone", "g", "other"}, {"gc"}, {"destroy", "base"}, {"run", "g", "--", "true"}} {
		if _, err := w.try(args...); err == nil || !strings.Contains(err.Error(), "it lost its last") {
			w.t.Errorf("pando %s went on with a catalogue that went back: %v", strings.Join(args, " "), err)
		}
	}
	w.pando("ls")
	w.pando("init", "--rebuild")
	if got := w.pando("ls", "-q"); !strings.Contains(got, "base\n") || !strings.Contains(got, "durable\n") {
		w.t.Errorf("after the rebuild there are only %q", got)
	}
	w.pando("clone", "durable@s", "look", "--mount")
	w.sameTree(w.source, filepath.Join(w.dir, "mnt", "look"))
	w.pando("destroy", "look")
}
