package engine_test

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"testing"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/linux/mount"
	"pando/internal/linux/run"
	"pando/internal/testing/treetest"

	"golang.org/x/sys/unix"
)

// opened opens a file as somebody does who then passes the descriptor on.
func opened(t *testing.T, path string, flags int) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, flags, 0)
	must(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}

// TestImportFile: what a caller has opened is imported, whatever has become of its name and wherever its offset is.
// What the caller cannot read is refused, although this process could.
func TestImportFile(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, top string) {
		src, archive := source(t), filepath.Join(top, "x.tar")
		_, err := run.Program(t.Context(), "tar", "--format=posix", "--atime-preserve=system", "-C", src, "-cf", archive, ".")
		must(t, err)
		image := imageSource(t, "ext4")
		for name, path := range map[string]string{"archive": archive, "image": image} {
			f := opened(t, path, os.O_RDONLY)
			at, err := f.Seek(77, io.SeekStart)
			must(t, err, os.Rename(path, path+".gone"))
			out, err := e.ImportFile(t.Context(), engine.ImportRequest{Name: ref.MustName(name)}, f)
			must(t, err)
			if now, err := f.Seek(0, io.SeekCurrent); err != nil || now != at {
				t.Errorf("%s: offset %d, %v, %+v", name, now, err, out)
			}
		}
		treetest.Compare(t, src, clone(t, e, "archive", "a", true).Mountpoint, treetest.RootMode|treetest.Holes)
		was, err := os.ReadFile(image + ".gone")
		must(t, err)
		got, err := os.ReadFile(imageFile(t, e, "image"))
		if err != nil || !bytes.Equal(got[:len(was)], was) {
			t.Errorf("the image differs (%v)", err)
		}

		r, w, err := os.Pipe()
		must(t, err)
		defer w.Close()
		archive += ".gone"
		before := objects(t, e)
		for name, c := range map[string]struct {
			f    *os.File
			kind errs.Kind
		}{
			"for writing":  {opened(t, archive, os.O_WRONLY), errs.Permission},
			"only a path":  {opened(t, archive, unix.O_PATH), errs.Permission},
			"a directory":  {opened(t, src, os.O_RDONLY), errs.Invalid},
			"a pipe":       {r, errs.Invalid},
			"a device":     {opened(t, "/dev/zero", os.O_RDONLY), errs.Invalid},
			"mounted":      {opened(t, deviceOf(t, clone(t, e, "image", "i", true)), os.O_RDONLY), errs.InUse},
			"adopted file": {opened(t, archive, os.O_RDONLY), errs.Invalid},
		} {
			q := engine.ImportRequest{Name: ref.MustName("x"), Adopt: name == "adopted file"}
			if _, err := e.ImportFile(t.Context(), q, c.f); !errs.Is(err, c.kind) {
				t.Errorf("%s: %v, want %s", name, err, c.kind)
			}
			must(t, c.f.Close())
		}
		destroy(t, e, "i")
		if after := objects(t, e); len(after) != len(before) {
			t.Errorf("left %v, there was %v", after, before)
		}
	})
}

// deviceOf returns the block device that is mounted as a volume.
func deviceOf(t *testing.T, v api.Object) string {
	t.Helper()
	device, _ := mountedDevice(t, v)
	return "/dev/" + device
}

// TestMountOn: a volume is mounted on the directory that a caller has opened, and on no other.
func TestMountOn(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, top string) {
		importTree(t, e, "g", source(t))
		clone(t, e, "g", "v", false)
		dir, other := filepath.Join(top, "dir"), filepath.Join(top, "other")
		must(t, os.Mkdir(dir, 0o755), os.Mkdir(other, 0o755))
		mountOn := func(f *os.File) (api.Object, error) {
			return e.MountOn(t.Context(), engine.MountRequest{Volume: ref.MustName("v"), Dir: other}, f)
		}

		// It is found under the name that it has now.
		f := opened(t, dir, unix.O_PATH|unix.O_DIRECTORY)
		must(t, os.Rename(dir, dir+"2"))
		v, err := mountOn(f)
		if err != nil || v.Mountpoint != dir+"2" {
			t.Fatalf("%+v, %v", v, err)
		}
		if again, err := mountOn(f); err != nil || again.Mountpoint != dir+"2" {
			t.Errorf("again: %+v, %v", again, err)
		}
		_, err = e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")})
		must(t, err, os.Rename(dir+"2", dir))

		// Somebody puts another in its place, at any step, or removes it.
		for _, step := range []string{"target checked", "place opened", "directory checked"} {
			taken := false
			engine.AtStep(t, func(s string) {
				if s == step && !taken {
					taken = true
					must(t, os.Rename(dir, dir+"2"), os.Mkdir(dir, 0o755))
				}
			})
			if _, err := mountOn(f); !errs.Is(err, errs.Conflict) || !taken {
				t.Errorf("another after %q: %v, taken %v", step, err, taken)
			}
			engine.AtStep(t, func(string) {})
			must(t, os.Remove(dir), os.Rename(dir+"2", dir))
		}

		// Another is mounted above it, so that its path leads elsewhere.
		above, hiding := filepath.Join(top, "above"), filepath.Join(top, "hiding")
		must(t, os.MkdirAll(filepath.Join(above, "dir"), 0o755), os.MkdirAll(filepath.Join(hiding, "dir"), 0o755))
		hidden := opened(t, filepath.Join(above, "dir"), unix.O_PATH)
		must(t, unix.Mount(hiding, above, "", unix.MS_BIND, ""))
		if _, err := mountOn(hidden); !errs.Is(err, errs.Conflict) {
			t.Errorf("a hidden directory: %v", err)
		}
		must(t, mount.Unmount(above))

		must(t, os.Remove(dir))
		if _, err := mountOn(f); !errs.Is(err, errs.Conflict) {
			t.Errorf("a directory that is gone: %v", err)
		}
		if _, err := os.Stat(dir); err == nil {
			t.Error("it is there again")
		}

		for name, c := range map[string]struct {
			path string
			kind errs.Kind
		}{
			"a file":             {filepath.Join(e.Dir(), "pool.json"), errs.Invalid},
			"a directory within": {filepath.Join(e.Dir(), "data"), errs.Invalid},
		} {
			if _, err := mountOn(opened(t, c.path, unix.O_PATH)); !errs.Is(err, c.kind) {
				t.Errorf("%s: %v, want %s", name, err, c.kind)
			}
		}
		if d, err := e.Show(t.Context(), ref.Ref{Name: "v"}); err != nil || d.Mounted() {
			t.Errorf("%+v, %v", d, err)
		}
	})
}
