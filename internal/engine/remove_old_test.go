package engine_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
)

// removeOld imports a directory and removes it.
func removeOld(ctx context.Context, e *engine.Engine, name, dir string, replace bool) (engine.Imported, error) {
	q := engine.ImportRequest{Name: ref.MustName(name), Source: dir, Adopt: replace, Replace: replace, RemoveOld: true}
	if e.Caps().FS[0].IsImage() {
		q.SizeBytes = 64 << 20
	}
	return e.Import(ctx, q)
}

// TestRemoveOld: the directory is gone after the import, and its golden has its files.
func TestRemoveOld(t *testing.T) {
	eachKind(t, func(t *testing.T, e *engine.Engine, top string) {
		for _, replace := range []bool{false, true} {
			dir := liveTree(t, top)
			name := "g"
			if replace {
				name = "r"
			}
			out, err := removeOld(t.Context(), e, name, dir, replace)
			if err != nil || out.OldRemoved == "" || out.Files == 0 {
				t.Fatalf("replace %v: %+v, %v", replace, out, err)
			}

			want := 0 // entries beside it
			if replace {
				want = 1
				if b, err := os.ReadFile(filepath.Join(dir, "sub", "file")); err != nil || string(b) != "content" {
					t.Errorf("the volume has %q, %v", b, err)
				}
			}
			if got := entries(t, filepath.Dir(dir)); len(got) != want {
				t.Errorf("replace %v: %v is left", replace, got)
			}
		}
	})
}

// TestRemoveOldTooLate: what happens to the directory between the copy and the last check keeps it from being removed:
// it is whole at its place, with what was written.
func TestRemoveOldTooLate(t *testing.T) {
	eachKind(t, func(t *testing.T, e *engine.Engine, top string) {
		dir := liveTree(t, top)
		beside := filepath.Dir(dir)
		late := func() {
			t.Helper()
			if got := entries(t, beside); len(got) != 1 || got[0] != filepath.Base(dir) {
				t.Errorf("left %v", got)
			}
			if b, err := os.ReadFile(filepath.Join(dir, "sub", "file")); err != nil || string(b) != "content" {
				t.Errorf("%q, %v", b, err)
			}
		}

		// A file is written when the directory has its other name already.
		engine.AtStep(t, func(step string) {
			if step == "old moved" {
				found, _ := filepath.Glob(dir + ".pando-old-*")
				if err := os.WriteFile(filepath.Join(found[0], "sub", "late"), nil, 0o600); err != nil {
					t.Error(err)
				}
			}
		})
		_, err := removeOld(t.Context(), e, "g", dir, false)
		wantKind(t, err, errs.Conflict, "golden g@1 is ready", "sub/late")
		if _, err := os.Stat(filepath.Join(dir, "sub", "late")); err != nil {
			t.Error(err)
		}
		late()

		// A process works in it.
		var undo func()
		engine.AtStep(t, func(step string) {
			if step == "old moved" {
				found, _ := filepath.Glob(dir + ".pando-old-*")
				undo = holdDir(t, found[0])
			}
		})
		_, err = removeOld(t.Context(), e, "h", dir, false)
		undo()
		wantKind(t, err, errs.InUse, "golden h@1 is ready")
		late()
	})
}

// holdDir starts a process whose working directory is dir.
func holdDir(t *testing.T, dir string) (end func()) {
	t.Helper()
	return hold(t, `cd "$0" && echo && read x`, dir)
}

// TestRemoveOldInterrupted: an interrupt leaves a part of the directory, which the same import finishes, or gc.
func TestRemoveOldInterrupted(t *testing.T) {
	eachKind(t, func(t *testing.T, e *engine.Engine, top string) {
		for _, again := range []bool{true, false} {
			dir := filepath.Join(top, "dir")
			manyFiles(t, dir)
			ctx, cancel := context.WithCancel(t.Context())
			engine.AtStep(t, func(step string) {
				if step == "old recorded" {
					cancel()
				}
			})
			name := "g"
			if again {
				name = "r"
			}
			_, err := removeOld(ctx, e, name, dir, false)
			cancel()
			wantKind(t, err, errs.Canceled, "partly removed")
			if left, _ := filepath.Glob(dir + "*"); len(left) != 1 || !strings.Contains(left[0], ".pando-old-") {
				t.Fatalf("left %v", left)
			}

			if again {
				out, err := removeOld(t.Context(), e, name, dir, false)
				if err != nil || out.Golden != name || out.Generation != 1 {
					t.Errorf("the same import: %+v, %v", out, err)
				}
			} else if r, err := e.GC(t.Context(), false); err != nil || len(r.OldDirs) != 1 || r.OldDirs[0] != dir {
				t.Errorf("gc: %+v, %v", r, err)
			}
			if left, _ := filepath.Glob(dir + "*"); len(left) > 0 {
				t.Errorf("left %v", left)
			}
		}
	})
}
