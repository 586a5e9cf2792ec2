package engine_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/linux/kernel"
	"pando/internal/testing/testfs"
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
					if v = out.Object; !mounted {
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
		before, err := e.Volumes(t.Context(), engine.VolumesRequest{Exact: true})
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
			cases = append(cases, refusal{"v", 1 << 30, errs.Unsupported, "enlarge the pool"})
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
		after, err := e.Volumes(t.Context(), engine.VolumesRequest{Exact: true})
		if err != nil || len(after) != 1 || after[0].SizeBytes != before[0].SizeBytes ||
			after[0].Mountpoint != before[0].Mountpoint {
			t.Errorf("%+v, %v", after, err)
		}
		checkClean(t, e)
	})
}

// TestResizeThenPowerLoss: what is synced in a volume that was resized while programs use it survives a power loss,
// also in a snapshot that is made without a freeze. XFS needs an empty log for that: the kernel does not replay what
// lies beyond the size in the superblock on disk.
func TestResizeThenPowerLoss(t *testing.T) {
	for _, c := range []struct {
		pool  string
		inner driver.FS
	}{{"xfs", driver.XFS}, {"btrfs", driver.XFS}, {"xfs", driver.Ext4}} {
		t.Run(c.pool+"/"+string(c.inner), func(t *testing.T) {
			if c.inner == driver.Ext4 && !kernel.Capable(unix.CAP_SYS_RESOURCE) {
				t.Skip("does not apply: mounted ext4 needs CAP_SYS_RESOURCE to grow (`make test-zfs` runs it)")
			}
			fs := testfs.New(t, c.pool, 1<<30)
			e := newPool(t, fs.Dir(), engine.InitRequest{Driver: "reflink"})
			size := int64(400 << 20)
			_, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: source(t), FS: c.inner,
				SizeBytes: size})
			must(t, err)
			v := clone(t, e, "g", "v", true)

			// The superblock is in the log twice, and between them what is in the new part.
			var names []string
			var want []byte
			for range 3 {
				size += 40 << 20
				resize(t, e, "v", size)
				for range 10 {
					names = append(names, "synced"+strconv.Itoa(len(names)))
					want = writeSynced(t, filepath.Join(v.Mountpoint, names[len(names)-1]), 8)
				}
				copied(t, e, names, want)
			}

			after := powerLost(t, fs, c.pool)
			checkLost(t, filepath.Join(after, "pool", "data", "objects", v.ID+".img"), c.inner, want, names...)
		})
	}
}

// copied checks the files in a snapshot of v that is made without a freeze.
func copied(t *testing.T, e *engine.Engine, names []string, want []byte) {
	t.Helper()
	name := ref.MustName("s" + strconv.Itoa(len(names)))
	_, err := e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: ref.MustName("v"), Name: name,
		Freeze: engine.FreezeNever})
	must(t, err)
	c, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.MustName("v").At(name), Name: ref.MustName("copy"),
		Mount: true})
	must(t, err)
	for _, n := range names {
		if got, err := os.ReadFile(filepath.Join(c[0].Mountpoint, n)); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %d bytes, of %d, or others: %v", n, len(got), len(want), err)
		}
	}
	destroy(t, e, "copy")
}

// TestResizeUndone: if the filesystem cannot grow, the volume keeps its size, in the catalogue, in the pool and as a
// block device, and can be resized later.
func TestResizeUndone(t *testing.T) {
	const size, more = 320 << 20, 400 << 20
	start := func(t *testing.T, e *engine.Engine, mounted bool) api.Object {
		_, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: source(t), FS: driver.XFS,
			SizeBytes: size})
		must(t, err)
		return clone(t, e, "g", "v", mounted)
	}
	check := func(t *testing.T, e *engine.Engine, err error, kind errs.Kind) {
		t.Helper()
		v, verr := e.Show(t.Context(), reference(t, "v"))
		if !errs.Is(err, kind) || verr != nil || v.SizeBytes != size {
			t.Errorf("%v, %d bytes, %v", err, v.SizeBytes, verr)
		}
		if st, err := os.Stat(imageFile(t, e, "v")); err != nil || st.Size() != size {
			t.Errorf("an image of %d bytes, %v", st.Size(), err)
		}
		checkClean(t, e)
		resize(t, e, "v", more)
	}
	try := func(ctx context.Context, e *engine.Engine) error {
		_, err := e.Resize(ctx, engine.ResizeRequest{Volume: ref.MustName("v"), SizeBytes: more})
		return err
	}

	// Another program has frozen it.
	t.Run("frozen", func(t *testing.T) {
		oneKind(t, func(t *testing.T, e *engine.Engine, _ string) {
			v := start(t, e, true)
			root, err := os.Open(v.Mountpoint)
			must(t, err)
			defer root.Close()
			must(t, kernel.Freeze(root))
			err = try(t.Context(), e)
			var st unix.Stat_t
			must(t, kernel.Thaw(root), unix.Fstat(int(root.Fd()), &st))
			sectors, serr := os.ReadFile(fmt.Sprintf("/sys/dev/block/%d:%d/size", unix.Major(st.Dev), unix.Minor(st.Dev)))
			if serr != nil || strings.TrimSpace(string(sectors)) != strconv.Itoa(size/512) {
				t.Errorf("a device of %s sectors, %v", sectors, serr)
			}
			check(t, e, err, errs.InUse)
		})
	})

	// The program that grows it is interrupted, while the volume is in use and while it is not.
	for _, mounted := range []bool{true, false} {
		t.Run("interrupted/mounted="+strconv.FormatBool(mounted), func(t *testing.T) {
			oneKind(t, func(t *testing.T, e *engine.Engine, _ string) {
				start(t, e, mounted)
				ctx, cancel := context.WithCancel(t.Context())
				engine.AtStep(t, func(step string) {
					if step == "enlarged" || step == "growing" {
						cancel()
					}
				})
				check(t, e, try(ctx, e), errs.Canceled)
			})
		})
	}
}

// TestSizeTooLarge: a size that pool or filesystem cannot have is refused before anything changes, and the size that
// the hint names works.
func TestSizeTooLarge(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, top string) {
		for _, fs := range []driver.FS{driver.Ext4, driver.XFS} {
			_, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName(string(fs)), Source: source(t), FS: fs,
				SizeBytes: 320 << 20})
			must(t, err)
		}
		clone(t, e, "ext4", "v-ext4", false)
		clone(t, e, "xfs", "v-xfs", false)
		clone(t, e, "xfs", "used", true)

		asked := map[string]func(size int64) error{
			"import": func(size int64) error {
				_, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("golden"), Source: source(t),
					FS: driver.Ext4, SizeBytes: size})
				return err
			},
			"clone": func(size int64) error {
				_, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "ext4"}, Name: ref.MustName("n"),
					SizeBytes: size})
				return err
			},
			"clones": func(size int64) error {
				_, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "xfs"}, Name: ref.MustName("m"),
					Count: 3, SizeBytes: size})
				return err
			},
		}
		for _, v := range []string{"v-ext4", "v-xfs", "used"} {
			asked["resize "+v] = func(size int64) error {
				_, err := e.Resize(t.Context(), engine.ResizeRequest{Volume: ref.MustName(v), SizeBytes: size})
				return err
			}
		}

		before, err := e.Volumes(t.Context(), engine.VolumesRequest{Exact: true})
		must(t, err)
		hints := map[string]int64{}
		for name, ask := range asked {
			for _, size := range []int64{1 << 59, 100 << 40, 64 << 30} { // the pool has 512 MiB
				err := ask(size)
				m := regexp.MustCompile(`(\d+)([GM])\b`).FindStringSubmatch(errs.HintOf(err))
				if !errs.Is(err, errs.Invalid) && !errs.Is(err, errs.NoSpace) || m == nil {
					t.Fatalf("%s of %d: %v (hint %q)", name, size, err, errs.HintOf(err))
				}
				n, _ := strconv.ParseInt(m[1], 10, 64)
				hints[name] = n << map[string]int{"M": 20, "G": 30}[m[2]]
			}
		}
		_, err = e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "xfs"}, Name: ref.MustName("m"), Count: 100,
			SizeBytes: 20 << 30})
		if !errs.Is(err, errs.NoSpace) || !strings.Contains(errs.HintOf(err), "use at most") {
			t.Errorf("many that do not fit together: %v (hint %q)", err, errs.HintOf(err))
		}

		after, err := e.Volumes(t.Context(), engine.VolumesRequest{Exact: true})
		for i := range after {
			after[i].MeasuredAt = before[i].MeasuredAt
		}
		if err != nil || !reflect.DeepEqual(before, after) {
			t.Errorf("%+v before, %+v after, %v", before, after, err)
		}
		checkClean(t, e)
		for name, ask := range asked {
			if err := ask(hints[name]); err != nil || hints[name] < 1<<30 {
				t.Errorf("%s of %d, as in the hint: %v", name, hints[name], err)
			}
			for _, v := range []string{"n", "m-1", "m-2", "m-3"} {
				_, _ = e.Destroy(t.Context(), toDestroy(v))
			}
		}
		checkClean(t, e)
	})
}

// TestResizeAdds: a size can be added to the one that the volume has.
func TestResizeAdds(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, _ string) {
		rawGolden(t, e, "disk", 4<<20)
		clone(t, e, "disk", "v", false)
		for _, want := range []int64{5 << 20, 6 << 20} {
			out, err := e.Resize(t.Context(), engine.ResizeRequest{Volume: ref.MustName("v"), SizeBytes: 1<<20 - 7, Add: true})
			if err != nil || out.SizeBytes != want {
				t.Errorf("%+v, %v", out, err)
			}
		}
	})
}

// TestResizeInFullPool: if the pool fills up while a volume grows, the volume keeps its size and its files.
func TestResizeInFullPool(t *testing.T) {
	for _, fs := range []driver.FS{driver.Ext4, driver.XFS} {
		t.Run(string(fs), func(t *testing.T) {
			oneKind(t, func(t *testing.T, e *engine.Engine, _ string) {
				src := source(t)
				_, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: src, FS: fs,
					SizeBytes: 320 << 20})
				must(t, err)
				clone(t, e, "g", "v", false)
				fill := filepath.Join(e.Dir(), "data", "filler")
				engine.AtStep(t, func(step string) {
					if step != "growing" {
						return
					}
					for _, size := range []int{1 << 20, 4 << 10} {
						f, err := os.OpenFile(fill, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
						must(t, err)
						for err == nil {
							if _, err = f.Write(make([]byte, size)); err == nil {
								err = f.Sync()
							}
						}
						f.Close()
					}
				})
				_, err = e.Resize(t.Context(), engine.ResizeRequest{Volume: ref.MustName("v"), SizeBytes: 20 << 30})
				must(t, os.Remove(fill))
				v, verr := e.Show(t.Context(), reference(t, "v"))
				if err == nil || verr != nil || v.SizeBytes != 320<<20 {
					t.Errorf("%v, %d bytes, %v", err, v.SizeBytes, verr)
				}
				checkClean(t, e)
				m, merr := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName("v")})
				must(t, merr)
				treetest.Compare(t, src, m.Mountpoint, treetest.Times)
			})
		})
	}
}
