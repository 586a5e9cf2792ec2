package replicate

import (
	"os"
	"path/filepath"
	"testing"

	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/objstore/storetest"
	"pando/internal/ref"

	"golang.org/x/sys/unix"
)

// TestPushIdle: a mounted volume that nobody uses gets no new point, however often it is pushed, whatever its
// filesystem writes by itself. One byte, one attribute, one file less make one.
func TestPushIdle(t *testing.T) {
	for _, fs := range []driver.FS{driver.Ext4, driver.XFS} {
		t.Run(string(fs), func(t *testing.T) {
			w := newWorld(t)
			src := t.TempDir()
			for _, name := range []string{"one", "two", "three"} {
				if err := os.WriteFile(filepath.Join(src, name), []byte(name), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			vol := ref.MustName("v")
			q := engine.ImportRequest{Name: ref.MustName("g"), Source: src, FS: fs}
			if _, err := w.e.Import(t.Context(), q); err != nil {
				t.Fatal(err)
			}
			w.clone("g", "v")
			dir := w.mount(vol)
			w.push("v")

			idle := func(why string) {
				t.Helper()
				puts := w.store.Count(storetest.Put)
				for range 3 {
					out := w.push("v")
					if !out[0].Unchanged || w.store.Count(storetest.Put) != puts || len(w.pushSnapshots("v")) != 1 {
						t.Errorf("%s: %+v, %d writes, snapshots %v",
							why, out[0], w.store.Count(storetest.Put)-puts, w.pushSnapshots("v"))
					}
				}
			}
			idle("after its first push")
			if err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_NOATIME, ""); err != nil {
				t.Fatal(err)
			}
			idle("mounted with other options")
			w.umount(vol)
			idle("unmounted")
			dir = w.mount(vol)
			if _, err := os.ReadFile(filepath.Join(dir, "one")); err != nil {
				t.Fatal(err)
			}
			idle("mounted again, and read")

			file := filepath.Join(dir, "one")
			for _, c := range []struct {
				what   string
				change func() error
			}{
				{"a byte", func() error { return os.WriteFile(file, []byte("onE"), 0o600) }},
				{"a mode", func() error { return os.Chmod(file, 0o640) }},
				{"an attribute", func() error { return unix.Setxattr(file, "user.a", []byte("b"), 0) }},
				{"a name", func() error { return os.Rename(file, file+"-renamed") }},
				{"a file less", func() error { return os.Remove(filepath.Join(dir, "two")) }},
				{"an empty directory", func() error { return os.Mkdir(filepath.Join(dir, "empty"), 0o700) }},
			} {
				if err := c.change(); err != nil {
					t.Fatal(err)
				}
				if out := w.push("v"); out[0].Unchanged {
					t.Errorf("%s has changed, and nothing was pushed: %+v", c.what, out[0])
				}
				idle("after " + c.what)
			}
			w.umount(vol)
			w.push("v") // what files had that are gone may be given back by now
			idle("at the end")
			w.checkPoint(w.open(), "v", w.image("v@"+w.pushSnapshots("v")[0]))
		})
	}
}

func (w *world) mount(volume ref.Name) string {
	w.t.Helper()
	i, err := w.e.Mount(w.t.Context(), engine.MountRequest{Volume: volume})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _, _ = w.e.Umount(w.t.Context(), engine.UmountRequest{Volume: volume}) })
	return i.Mountpoint
}

func (w *world) umount(volume ref.Name) {
	w.t.Helper()
	if _, err := w.e.Umount(w.t.Context(), engine.UmountRequest{Volume: volume}); err != nil {
		w.t.Fatal(err)
	}
}
