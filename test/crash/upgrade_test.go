//go:build linux && (amd64 || arm64)

package crash

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"pando/internal/driver/drivertest"
	"pando/internal/testing/faulttest"
)

// downgrade makes the pool what a pando that knew only format 1 would have left.
func (w *world) downgrade() {
	w.t.Helper()
	must := func(err error) {
		if err != nil {
			w.t.Helper()
			w.t.Fatal(err)
		}
	}
	sum := regexp.MustCompile(`,"sum":"[0-9a-f]{8}"}$`)
	for _, m := range w.metas() {
		text := strings.Replace(drivertest.ReadMeta(m), `{"v":2,`, `{"v":1,`, 1)
		must(os.Remove(m))
		must(os.Symlink(sum.ReplaceAllString(text, "}"), m))
	}
	w.sql("DELETE FROM meta WHERE key IN ('commits', 'boot_at')")
	must(os.RemoveAll(filepath.Join(w.dir, "catalog.seen")))
	config := filepath.Join(w.dir, "pool.json")
	text, err := os.ReadFile(config)
	must(err)
	older := strings.Replace(string(text), `"format": 2`, `"format": 1`, 1)
	if older == string(text) {
		w.t.Fatalf("pool.json: %s", text)
	}
	must(os.WriteFile(config, []byte(older), 0o600))
}

func (w *world) metas() []string {
	w.t.Helper()
	metas, err := filepath.Glob(filepath.Join(w.dir, "data/objects/*.meta"))
	if err != nil || len(metas) == 0 {
		w.t.Fatalf("no identities: %v", err)
	}
	return metas
}

// TestUpgradeKilled kills the first command on a pool of format 1 at every step. The next
// one finishes the upgrade, and everything is as it was.
func TestUpgradeKilled(t *testing.T) {
	t.Parallel()
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, k)
			w.initPool()
			w.importGolden("g")
			w.pando("clone", "g", "base")
			w.pando("snapshot", "base", "s")
			before := w.state()

			w.sweepOf(faulttest.Plan{Mode: faulttest.KillBefore}, 1).Each(t, func(p faulttest.Plan) faulttest.Result {
				w.downgrade()
				return w.traced(p, "ls")
			}, func(faulttest.Result) {
				if after := w.state(); after != before {
					t.Errorf("before:\n%safter:\n%s", before, after)
				}
				for _, m := range w.metas() {
					if st, err := os.Lstat(m); err != nil || st.Mode() != 0o400 {
						t.Errorf("%s: %v, %v", m, st.Mode(), err)
					}
				}
				w.check()
			})
			w.pando("deinit", "--force")
			w.nothingLeft()
		})
	}
}
