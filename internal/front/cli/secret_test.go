package cli

import (
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/remote/replicate"
)

// TestUnreadableFiles: whoever names a file with a secret or a kit that cannot be read is told what to do.
func TestUnreadableFiles(t *testing.T) {
	dir := t.TempDir()
	missing := filepath.Join(dir, "no such file")
	for _, c := range []struct {
		file string
		kind errs.Kind
		hint string
	}{
		{missing, errs.NotFound, "check the path"},
		{dir, errs.Invalid, "name a file in this directory"},
	} {
		a := &App{Stderr: &strings.Builder{}}
		_, secret := a.readSecret("remote add", c.file)
		kit := a.openKit(t.Context(), &replicate.AddRequest{}, c.file)
		for what, err := range map[string]error{"secret": secret, "kit": kit} {
			if !errs.Is(err, c.kind) || !strings.Contains(hintOf(err), c.hint) {
				t.Errorf("%s %s: %v (%v), hint %q", what, c.file, err, errs.KindOf(err), hintOf(err))
			}
		}
	}
}
