package engine_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/linux/kernel"
	"pando/internal/testing/treetest"

	"golang.org/x/sys/unix"
)

func resize(t *testing.T, e *engine.Engine, volume string, size int64) engine.Resized {
	t.Helper()
	out, err := e.Resize(t.Context(), engine.ResizeRequest{Volume: ref.MustName(volume), SizeBytes: size})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// fsBytes returns the size of the filesystem mounted at dir.
func fsBytes(t *testing.T, dir string) int64 {
	t.Helper()
	var st unix.Statfs_t
	must(t, unix.Statfs(dir, &st))
	return int64(st.Blocks) * st.Bsize
}

// checkClean fails the test if fsck finds anything.
func checkClean(t *testing.T, e *engine.Engine) {
	t.Helper()
	if r := fsck(t, e.Dir(), false); len(r.Findings) > 0 {
		t.Errorf("fsck: %+v", r.Findings)
	}
}

// TestResize: volumes grow, idle or in use, with the filesystem on them, and keep their files. Copies, rewinds and a
// rebuilt catalogue know the new size.
func TestResize(t *testing.T) {
	for _, fs := range []driver.FS{driver.Ext4, driver.XFS} {
		t.Run(string(fs), func(t *testing.T) {
			oneKind(t, func(t *testing.T, e *engine.Engine, top string) {
				const size = 320 << 20 // XFS needs 300 MiB
				src := filepath.Join(top, "src")
				must(t, os.Mkdir(src, 0o755), os.WriteFile(filepath.Join(src, "file"), []byte("text"), 0o600))
				_, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: src, FS: fs,
					SizeBytes: size})
				must(t, err)

				for _, mounted := range []bool{false, true} {
					name := "idle"
					if mounted {
						name = "used"
					}
					v := clone(t, e, "g", name, mounted)
					_, err := e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: ref.MustName(name), Name: ref.MustName("s")})
					must(t, err)
					if mounted && fs == driver.Ext4 && !kernel.Capable(unix.CAP_SYS_RESOURCE) {
						refusedInContainer(t, e, name, size)
						continue
					}
					out := resize(t, e, name, 3*size-100) // is rounded up
					if out.SizeBytes != 3*size || out.BeforeBytes != size || out.Mountpoint != v.Mountpoint {
						t.Errorf("%+v", out)
					}
					if v = out.Info; !mounted {
						v, err = e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName(name)})
						must(t, err)
					}
					if n := fsBytes(t, v.Mountpoint); n < 2*size {
						t.Errorf("%s: the filesystem has %d bytes", name, n)
					}

					// Again is no error, and changes nothing.
					if out := resize(t, e, name, 3*size); out.SizeBytes != 3*size || out.BeforeBytes != 3*size {
						t.Errorf("%+v", out)
					}
					treetest.Compare(t, src, v.Mountpoint, treetest.RootMode|treetest.Times|treetest.Root)
					checkClean(t, e)

					// The snapshot keeps its size, and a rewind that of the volume.
					if st, err := e.Show(t.Context(), reference(t, name+"@s")); err != nil || st.SizeBytes != size {
						t.Errorf("%+v, %v", st, err)
					}
					r, err := e.Rewind(t.Context(), engine.RewindRequest{Volume: ref.MustName(name), Snapshot: ref.MustName("s"),
						Detach: true})
					if err != nil || r.SizeBytes != 3*size || fsBytes(t, r.Mountpoint) < 2*size {
						t.Errorf("%+v, %v", r, err)
					}
				}
			})
		})
	}
}

// refusedInContainer: without the capability that ext4 needs, nothing changes, and an umount helps.
func refusedInContainer(t *testing.T, e *engine.Engine, name string, size int64) {
	t.Helper()
	_, err := e.Resize(t.Context(), engine.ResizeRequest{Volume: ref.MustName(name), SizeBytes: 3 * size})
	v, verr := e.Show(t.Context(), reference(t, name))
	if !errs.Is(err, errs.Permission) || !strings.Contains(errs.HintOf(err), "umount") || verr != nil ||
		v.SizeBytes != size || v.Mountpoint == "" {
		t.Errorf("%v, %+v, %v", err, v, verr)
	}
	checkClean(t, e)
	_, err = e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName(name)})
	must(t, err)
	resize(t, e, name, 3*size)
}

// TestResizeRaw: the device of a raw volume in use grows, and the new part reads as zeros.
func TestResizeRaw(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, _ string) {
		rawGolden(t, e, "disk", 4<<20)
		v := clone(t, e, "disk", "v", true)
		resize(t, e, "v", 6<<20)
		b, err := os.ReadFile(v.Mountpoint)
		want, werr := os.ReadFile(imageFile(t, e, "disk"))
		if err := errors.Join(err, werr); err != nil || len(b) != 6<<20 || string(b[:4<<20]) != string(want) ||
			strings.Trim(string(b[4<<20:]), "\x00") != "" {
			t.Errorf("%d bytes, %v", len(b), err)
		}
		checkClean(t, e)
	})
}

// TestResizeRefuses: a refused resize changes nothing.
func TestResizeRefuses(t *testing.T) {
	eachKind(t, func(t *testing.T, e *engine.Engine, top string) {
		src := filepath.Join(top, "src")
		must(t, os.Mkdir(src, 0o755))
		q := engine.ImportRequest{Name: ref.MustName("g"), Source: src}
		image := e.Caps().FS[0].IsImage()
		if image {
			q.SizeBytes = 64 << 20
		}
		_, err := e.Import(t.Context(), q)
		must(t, err)
		clone(t, e, "g", "v", true)
		before, err := e.Volumes(t.Context(), true)
		must(t, err)

		type refusal struct {
			volume string
			size   int64
			kind   errs.Kind
			hint   string
		}
		cases := []refusal{{"none", 1 << 30, errs.NotFound, ""}, {"v", 0, errs.Invalid, ""}, {"v", -1, errs.Invalid, ""}}
		if image {
			cases = append(cases, refusal{"v", 32 << 20, errs.Invalid, "export"}, refusal{"g", 1 << 30, errs.Invalid, ""})
		} else {
			cases = append(cases, refusal{"v", 1 << 30, errs.Unsupported, "free space"})
		}
		for _, c := range cases {
			_, err := e.Resize(t.Context(), engine.ResizeRequest{Volume: ref.MustName(c.volume), SizeBytes: c.size})
			if !errs.Is(err, c.kind) || !strings.Contains(errs.HintOf(err), c.hint) {
				t.Errorf("%+v: %v (hint %q)", c, err, errs.HintOf(err))
			}
		}

		// A size that no file can have leaves the volume as it was.
		if image {
			_, err := e.Resize(t.Context(), engine.ResizeRequest{Volume: ref.MustName("v"), SizeBytes: 1<<63 - 1<<20})
			if !errs.Is(err, errs.Invalid) {
				t.Errorf("%v", err)
			}
		}
		after, err := e.Volumes(t.Context(), true)
		if err != nil || len(after) != 1 || after[0].SizeBytes != before[0].SizeBytes ||
			after[0].Mountpoint != before[0].Mountpoint {
			t.Errorf("%+v, %v", after, err)
		}
		checkClean(t, e)
	})
}
