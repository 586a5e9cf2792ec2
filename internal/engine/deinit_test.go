package engine_test

import (
	"os"
	"path/filepath"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
)

// TestDeinitRefusedChangesNothing: what stops the removal of a pool is found out before
// anything is destroyed.
func TestDeinitRefusedChangesNothing(t *testing.T) {
	eachKind(t, func(t *testing.T, e *engine.Engine, top string) {
		importTree(t, e, "g", source(t))
		clone(t, e, "g", "a", false)
		clone(t, e, "g", "b", true)
		v := clone(t, e, "g", "c", true)
		for what, stop := range map[string]func() (end func()){
			"a volume in use": func() func() {
				f, err := os.Open(v.Mountpoint)
				must(t, err)
				return func() { must(t, f.Close()) }
			},
			"a file of somebody's": func() func() {
				file := filepath.Join(top, "pool", "mnt", "file")
				must(t, os.WriteFile(file, nil, 0o600))
				return func() { must(t, os.Remove(file)) }
			},
		} {
			end := stop()
			_, err := engine.Deinit(t.Context(), filepath.Join(top, "pool"), true, drivers)
			end()
			if !errs.Is(err, errs.InUse) {
				t.Fatalf("%s: %v, wanted an error of kind %s", what, err, errs.InUse)
			}
			for _, name := range []string{"g", "a", "b", "c"} {
				if _, err := e.Show(t.Context(), ref.Ref{Name: name}); err != nil {
					t.Errorf("%s: %v", what, err)
				}
			}
		}
	})
}
