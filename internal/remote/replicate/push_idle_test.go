package replicate

import (
	"os"
	"path/filepath"
	"testing"

	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/btrfs"
	"pando/internal/engine"
	"pando/internal/testing/storetest"
	"pando/internal/testing/testfs"

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

// TestPushIdleTree: a tree in which nothing has changed gets no new point, mounted or not; whatever changes makes one.
func TestPushIdleTree(t *testing.T) {
	w := worldOn(t, testfs.Btrfs(t, 512<<20), btrfs.Name, "file:"+filepath.Join(t.TempDir(), "remote"))
	w.importTree("g", mib)
	w.clone("g", "v")
	vol := ref.MustName("v")
	w.mount(vol)
	w.push("v")

	idle := func(why string) {
		t.Helper()
		puts := w.store.Count(storetest.Put)
		for range 2 {
			out := w.push("v")
			writes, snapshots := w.store.Count(storetest.Put)-puts, w.pushSnapshots("v")
			if !out[0].Unchanged || out[0].UploadedBytes != 0 || writes != 0 || len(snapshots) != 1 {
				t.Errorf("%s: %+v, %d writes, snapshots %v", why, out[0], writes, snapshots)
			}
		}
	}
	idle("mounted")
	w.umount(vol)
	idle("unmounted")
	for i := range 3 {
		w.write("v", "new", uint64(i), 64<<10)
		if out := w.push("v"); out[0].Unchanged || out[0].Full {
			t.Errorf("what has changed was not pushed: %+v", out[0])
		}
		idle("after a change")
	}

	// What is there is sent again if somebody asks for it, or if it is damaged.
	full := func(why string, q PushRequest) {
		t.Helper()
		q.Refs = []ref.Ref{{Name: "v"}}
		if out, err := Push(t.Context(), w.e, w.r, q); err != nil || out[0].Unchanged || !out[0].Full {
			t.Errorf("%s: %+v, %v", why, out, err)
		}
		idle("after " + why)
	}
	full("a full push", PushRequest{Full: true})
	rp := w.open()
	if err := w.store.Delete(t.Context(), "segments/"+w.segmentsOf(rp, "v")[0].String()); err != nil {
		t.Fatal(err)
	}
	full("a lost segment", PushRequest{})
	h, _, err := rp.Head(t.Context(), "v")
	if err != nil {
		t.Fatal(err)
	}
	newest, _, err := newestOf(t.Context(), rp, h)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.store.Delete(t.Context(), "manifests/"+newest.Manifest.String()); err != nil {
		t.Fatal(err)
	}
	full("a lost manifest", PushRequest{})
}
