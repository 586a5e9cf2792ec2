package engine_test

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/engine"
	"pando/internal/linux/mount"
)

// state is what lies in a directory but below data/, with the content of files. The
// index of SQLite's log is left out: it is shared memory, which readers lock.
func state(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if p == filepath.Join(dir, "data") {
			fmt.Fprintln(&b, "data")
			return fs.SkipDir
		}
		fmt.Fprint(&b, p, " ", d.Type())
		if d.Type().IsRegular() && !strings.HasSuffix(p, "-shm") && !strings.HasSuffix(p, ".xfs") &&
			!strings.HasSuffix(p, "reserve") {
			content, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			fmt.Fprintf(&b, " %d %x", len(content), sha256.Sum256(content))
		}
		fmt.Fprintln(&b)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// TestLook: what is told of a pool is so, and telling it changes nothing.
func TestLook(t *testing.T) {
	for _, k := range poolKinds {
		t.Run(k.name, func(t *testing.T) {
			e := k.make(t)
			importTree(t, e, "g", source(t))
			importTree(t, e, "h", source(t))
			clone(t, e, "g", "idle", false)
			mounted := clone(t, e, "g", "busy", true)
			dir := e.Dir()
			before := state(t, dir)
			v, err := engine.Look(t.Context(), dir, drivers)
			if err != nil || v.Trouble != nil {
				t.Fatal(err, v)
			}
			if after := state(t, dir); after != before {
				t.Errorf("looking changed the pool:\n%s\nwas\n%s", after, before)
			}
			if v.Dir != dir || v.Driver != e.Caps().Name || v.Data != filepath.Join(dir, "data") || v.Working != 0 {
				t.Errorf("%+v", v)
			}
			if len(v.Goldens) != 2 || v.Goldens[0].Ref != "g@1" || v.Goldens[1].Ref != "h@1" {
				t.Fatalf("goldens %+v", v.Goldens)
			}
			for _, g := range v.Goldens {
				if fi, err := os.Stat(g.Image); err != nil || fi.IsDir() != g.Tree {
					t.Errorf("%+v: %v", g, err)
				}
			}
			images := 0
			if e.Caps().FS[0].IsImage() {
				images = 1
			}
			if len(v.Attached) != images {
				t.Errorf("attached %v", v.Attached)
			}
			for image, name := range v.Attached {
				if _, err := os.Stat(image); err != nil || name != "busy" {
					t.Errorf("%s of %q: %v", image, name, err)
				}
			}
			if os.Geteuid() == 0 && (len(v.Mounts) != 1 || v.Mounts[mounted.Mountpoint] != "busy") {
				t.Errorf("mounts %v, not %s", v.Mounts, mounted.Mountpoint)
			}
		})
	}
}

// TestLookAtTrouble: a pool that cannot be opened is still looked at.
func TestLookAtTrouble(t *testing.T) {
	if _, err := engine.Look(t.Context(), t.TempDir(), drivers); !errs.Is(err, errs.NotFound) {
		t.Errorf("no pool: %v", err)
	}
	for _, k := range poolKinds {
		t.Run(k.name, func(t *testing.T) {
			e := k.make(t)
			dir := e.Dir()
			e.Close()
			file := filepath.Join(dir, "catalog.db")
			whole, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if v, err := engine.Look(t.Context(), dir, drivers); err != nil || v.Trouble != nil {
				t.Errorf("closed: %v, %v", err, v)
			}
			if err := os.WriteFile(file, []byte(strings.Repeat("damage ", 2000)), 0o600); err != nil {
				t.Fatal(err)
			}
			v, err := engine.Look(t.Context(), dir, drivers)
			if err != nil || !errs.Is(v.Trouble, errs.Damaged) {
				t.Errorf("a damaged catalogue: %v, %+v", err, v)
			}
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
			if v, err = engine.Look(t.Context(), dir, drivers); err != nil || !errs.Is(v.Trouble, errs.Damaged) {
				t.Errorf("a missing catalogue: %v, %+v", err, v)
			}
			if err := os.WriteFile(file, whole, 0o600); err != nil {
				t.Fatal(err)
			}
			if k.name != "reflink" {
				return
			}
			if err := mount.Unmount(filepath.Join(dir, "data")); err != nil {
				t.Fatal(err)
			}
			if v, err = engine.Look(t.Context(), dir, drivers); err != nil || !errs.Is(v.Trouble, errs.Unsupported) {
				t.Errorf("not mounted: %v, %+v", err, v)
			}
			if at, err := mount.Below(dir); err != nil || len(at) != 0 {
				t.Errorf("looking has mounted %v, %v", at, err)
			}
			open(t, dir).Close()
		})
	}
}
