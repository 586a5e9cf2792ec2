package engine_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/linux/kernel"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// TestDeinitRefusedChangesNothing: what stops the removal of a pool is found out before anything is destroyed or
// unmounted.
func TestDeinitRefusedChangesNothing(t *testing.T) {
	eachKind(t, func(t *testing.T, e *engine.Engine, top string) {
		importTree(t, e, "g", source(t))
		clone(t, e, "g", "a", false)
		b := clone(t, e, "g", "b", true)
		v := clone(t, e, "g", "c", true)
		for _, c := range []struct {
			what  string
			kind  errs.Kind
			again bool // it only shows when the volume is unmounted, and then the others are mounted again
			stop  func() (end func())
		}{
			{what: "a volume in use", kind: errs.InUse, stop: func() func() {
				f, err := os.Open(v.Mountpoint)
				must(t, err)
				return func() { must(t, f.Close()) }
			}},
			{what: "a file of somebody's", kind: errs.InUse, stop: func() func() {
				file := filepath.Join(top, "pool", "mnt", "file")
				must(t, os.WriteFile(file, nil, 0o600))
				return func() { must(t, os.Remove(file)) }
			}},
			{what: "a file of somebody's among the objects", kind: errs.InUse, stop: func() func() {
				file := filepath.Join(top, "pool", "data", "objects", "file")
				must(t, os.WriteFile(file, nil, 0o600))
				return func() { must(t, os.Remove(file)) }
			}},
			{what: "a volume that is mounted elsewhere, too", kind: errs.InUse, again: true, stop: func() func() {
				at := t.TempDir()
				must(t, unix.Mount(v.Mountpoint, at, "", unix.MS_BIND, ""))
				return func() { must(t, mount.Unmount(at)) }
			}},
			{what: "the only key of a remote", kind: errs.Conflict, stop: func() func() {
				dir := filepath.Join(top, "pool", "remotes", "nas")
				must(t, os.MkdirAll(dir, 0o700))
				return func() { must(t, os.RemoveAll(filepath.Dir(dir))) }
			}},
		} {
			if root := os.Geteuid() == 0; c.again && !root {
				continue
			}
			before := mountID(b.Mountpoint)
			end := c.stop()
			q := engine.DeinitRequest{Dir: filepath.Join(top, "pool"), Force: true,
				LastKeys: func(context.Context, string) ([]string, error) { return []string{"nas"}, nil }}
			_, err := engine.Deinit(t.Context(), q, drivers)
			end()
			if !errs.Is(err, c.kind) {
				t.Fatalf("%s: %v, wanted an error of kind %s", c.what, err, c.kind)
			}
			for _, name := range []string{"g", "a", "b", "c"} {
				i, err := e.Show(t.Context(), ref.Ref{Name: name})
				if err != nil || (i.Mountpoint != "") != (name == "b" || name == "c") {
					t.Errorf("%s: %s is mounted at %q, %v", c.what, name, i.Mountpoint, err)
				}
			}
			if now := mountID(b.Mountpoint); now != before && !c.again {
				t.Errorf("%s: b was unmounted and mounted again", c.what)
			}
		}
	})
}

// mountID returns the ID of the mount on a path; 0 if there is none.
func mountID(path string) uint64 {
	m, err := kernel.MountAt(unix.AT_FDCWD, path)
	if err != nil || !m.Root {
		return 0
	}
	return m.ID
}
