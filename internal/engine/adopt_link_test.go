package engine_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/engine"
)

// TestReplaceCopiesNothingElse: whoever may rename the directory above the one that is
// replaced does not get a copy of one of root's into its place.
func TestReplaceCopiesNothingElse(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, top string) {
		dir := liveTree(t, top)
		secret := filepath.Join(top, "root")
		must(t, os.MkdirAll(filepath.Join(secret, filepath.Base(dir)), 0o700))
		d := detour{dir: filepath.Dir(dir), aside: filepath.Dir(dir) + ".aside", to: secret}
		engine.AtStep(t, func(s string) {
			if s == "copying" {
				must(t, d.take())
			}
		})
		_, err := adopt(t, e, "g", dir, true)
		must(t, d.end())
		if !errs.Is(err, errs.Conflict) || !strings.Contains(err.Error(), "symbolic link") {
			t.Errorf("%v, wanted an error about a symbolic link", err)
		}
	})
}
