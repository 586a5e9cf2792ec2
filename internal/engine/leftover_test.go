package engine_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// TestMountPointThatStays: a mount point that Pando made and cannot remove does not keep the
// volume from being unmounted, used and destroyed.
func TestMountPointThatStays(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, top string) {
		importTree(t, e, "g", source(t))
		clone(t, e, "g", "v", false)
		parent := filepath.Join(top, "parent")
		must(t, os.Mkdir(parent, 0o700))
		dir := filepath.Join(parent, "point")

		for what, forbid := range map[string]func() (allow func()){
			"read-only": func() func() {
				must(t, unix.Mount("", parent, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
				return func() { must(t, unix.Mount("", parent, "", unix.MS_BIND|unix.MS_REMOUNT, "")) }
			},
			"immutable": func() func() {
				setImmutable(t, parent, true)
				return func() { setImmutable(t, parent, false) }
			},
		} {
			must(t, unix.Mount(parent, parent, "", unix.MS_BIND, ""))
			_, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName("v"), Dir: dir})
			must(t, err)
			allow := forbid()
			ctx, warnings := listen(t)
			if _, err := e.Umount(ctx, engine.UmountRequest{Volume: ref.MustName("v")}); err != nil {
				t.Errorf("%s: umount: %v", what, err)
			}
			if w := warnings(); strings.Count(w, "\n") > 0 || !strings.Contains(w, dir) {
				t.Errorf("%s: warnings %q, wanted one about %s", what, w, dir)
			}
			if _, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName("v")}); err != nil {
				t.Errorf("%s: mount: %v", what, err)
			}
			_, err = e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")})
			allow()
			if werr := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); werr == nil {
				t.Errorf("%s: the directory that stays takes writes", what)
			}
			setImmutable(t, dir, false)
			must(t, err, os.Remove(dir), mount.Unmount(parent))
		}
		destroy(t, e, "v")
	})
}
