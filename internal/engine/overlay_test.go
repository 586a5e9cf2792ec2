package engine_test

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/zfs"
	"pando/internal/engine"
	"pando/internal/engine/check"
	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"
	"pando/internal/testing/testfs"
	"pando/internal/testing/treetest"

	"golang.org/x/sys/unix"
)

// overlay makes an overlay clone.
func overlay(t *testing.T, e *engine.Engine, from, name string, mount bool) api.Object {
	t.Helper()
	out, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: from}, Name: ref.MustName(name),
		Mount: mount, Overlay: true})
	if err != nil {
		t.Fatalf("%v (hint: %s)", err, errs.HintOf(err))
	}
	return out[0]
}

// overlayPool is a kind of pool.
type overlayPool struct {
	dir  func(t *testing.T) string
	init engine.InitRequest
	fs   driver.FS // of its golden; "": the default
}

// overlayKinds returns a pool of each driver. In the guest of `make test-zfs`, which is slow, they are those of ZFS.
func overlayKinds(t *testing.T) map[string]overlayPool {
	if os.Getenv("PANDO_TEST_ZFS") != "" {
		drivers[zfs.Name] = zfs.Open
		t.Cleanup(func() { delete(drivers, zfs.Name) })
		dir := func(t *testing.T) string { return t.TempDir() }
		kinds := map[string]overlayPool{"zfs-zvol": {dir, engine.InitRequest{Driver: zfs.Name}, driver.Ext4}}
		if testfs.ZFSHasOverlays() { // else see TestOverlayRefusedOnOldZFS
			kinds["zfs-native"] = overlayPool{dir, engine.InitRequest{Driver: zfs.Name}, driver.Native}
		}
		return kinds
	}

	return map[string]overlayPool{
		"reflink":  {func(t *testing.T) string { return testfs.XFS(t, 1<<30) }, engine.InitRequest{Driver: "reflink"}, ""},
		"btrfs":    {func(t *testing.T) string { return testfs.Btrfs(t, 1<<30) }, engine.InitRequest{Driver: "btrfs"}, ""},
		"plain":    {func(t *testing.T) string { return testfs.Ext4(t, 1<<30) }, engine.InitRequest{Driver: "plain"}, ""},
		"embedded": {func(t *testing.T) string { return testfs.Ext4(t, 2<<30) }, engine.InitRequest{SizeBytes: 1 << 30}, ""},
	}
}

// overlayPools calls fn with a pool of each driver that has a golden g.
func overlayPools(t *testing.T, fn func(t *testing.T, e *engine.Engine)) {
	for name, p := range overlayKinds(t) {
		t.Run(name, func(t *testing.T) {
			if p.init.Driver == zfs.Name {
				p.init.Dataset = testfs.ZFS(t, 2<<30) + "/pando"
			}
			e := newPool(t, p.dir(t), p.init)
			src := t.TempDir()
			for path, text := range map[string]string{"file": "content", "sub/a": "a", "sub/b": "b", "gone": "x"} {
				if err := os.MkdirAll(filepath.Dir(filepath.Join(src, path)), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(src, path), []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if err := errors.Join(os.Chmod(src, 0o751), os.Chown(src, 7, 8)); err != nil {
				t.Fatal(err)
			}
			importAs(t, e, "g", src, p.fs)
			kept := treetest.KeepImmutable(t, e.Dir())
			fn(t, e)
			kept.Check(t)
		})
	}
}

// contentOf returns the files below a directory, by path.
func contentOf(t *testing.T, dir string) string {
	t.Helper()
	out, err := exec.Command("sh", "-c", `cd "$0" && find . -type f | sort | while read f; do echo "$f=$(cat "$f")"; done`,
		dir).Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.ReplaceAll(string(out), "\n", " ")
}

const lowerContent = "./file=content ./gone=x ./sub/a=a ./sub/b=b "

// changeOverlay writes, removes and renames in a mounted overlay.
func changeOverlay(t *testing.T, dir string) (content string) {
	t.Helper()
	if err := errors.Join(
		os.WriteFile(filepath.Join(dir, "new"), []byte("new"), 0o600),
		os.WriteFile(filepath.Join(dir, "file"), []byte("changed"), 0o600),
		os.Remove(filepath.Join(dir, "gone")),
		os.Rename(filepath.Join(dir, "sub"), filepath.Join(dir, "dir")),
	); err != nil {
		t.Fatal(err)
	}
	return "./dir/a=a ./dir/b=b ./file=changed ./new=new "
}

// wantClean wants fsck and gc to find nothing.
func wantClean(t *testing.T, e *engine.Engine) {
	t.Helper()
	finishRemoving(t, e)
	r, err := engine.Fsck(t.Context(), e.Dir(), check.Request{}, drivers)
	if err != nil || len(r.Findings) > 0 {
		t.Errorf("fsck: %+v %v", r.Findings, err)
	}
	g, err := e.GC(t.Context(), engine.GCRequest{Explain: true})
	if err != nil || g.Garbage > 0 || len(g.Missing) > 0 || len(g.Warnings) > 0 {
		t.Errorf("gc: %+v %v", g, err)
	}
}

// finishRemoving lets commands remove what was destroyed: in the slow guest one alone gives up before.
func finishRemoving(t *testing.T, e *engine.Engine) {
	t.Helper()
	for try := 0; e.Caps().Name == zfs.Name && try < 10; try++ {
		p, err := e.Pool(t.Context(), engine.PoolRequest{})
		if err == nil && p.TrashCount == 0 {
			return
		}
		if r, merr := e.Maintain(t.Context(), time.Now()); err != nil || merr != nil || len(r.Warnings) > 0 {
			t.Errorf("%v, %+v %v", err, r, merr)
		}
	}
}

// TestOverlay goes through the life of an overlay: two of one golden, changed, unmounted, copied, rewound, destroyed.
func TestOverlay(t *testing.T) {
	overlayPools(t, func(t *testing.T, e *engine.Engine) {
		ctx := t.Context()
		a, b := overlay(t, e, "g", "a", true), overlay(t, e, "g", "b", true)
		if !a.Overlay || a.Origin != "g@1" || a.Golden != "g" {
			t.Errorf("%+v", a)
		}
		if got := contentOf(t, a.Mountpoint); got != lowerContent {
			t.Errorf("a new overlay has %q", got)
		}
		var st unix.Stat_t
		if err := unix.Stat(a.Mountpoint, &st); err != nil || st.Mode&0o7777 != 0o755 && st.Mode&0o7777 != 0o751 {
			t.Errorf("the root has mode %o: %v", st.Mode, err)
		}

		changed := changeOverlay(t, a.Mountpoint)
		if got := contentOf(t, b.Mountpoint); got != lowerContent {
			t.Errorf("the neighbour has %q", got)
		}
		if err := os.Chmod(a.Mountpoint, 0o700); err != nil {
			t.Fatal(err)
		}
		wantClean(t, e)

		// What was changed is there after the next mount, the mode of the root included.
		if _, err := e.Umount(ctx, engine.UmountRequest{Volume: ref.MustName("a")}); err != nil {
			t.Fatal(err)
		}
		again, err := e.Mount(ctx, engine.MountRequest{Volume: ref.MustName("a")})
		if err != nil {
			t.Fatal(err)
		}
		if got := contentOf(t, again.Mountpoint); got != changed {
			t.Errorf("after an umount it has %q", got)
		}
		if err := unix.Stat(again.Mountpoint, &st); err != nil || st.Mode&0o7777 != 0o700 {
			t.Errorf("the root has mode %o after an umount: %v", st.Mode&0o7777, err)
		}

		// Copies of it have its content: a snapshot, a fork, and the volume after a rewind.
		if e.Caps().Name == "plain" {
			_, err := e.Snapshot(ctx, engine.SnapshotRequest{Volume: ref.MustName("a"), Name: ref.MustName("s")})
			if !errs.Is(err, errs.InUse) || errs.HintOf(err) == "" {
				t.Errorf("a snapshot of a mounted overlay: %v", err)
			}
			if _, err := e.Umount(ctx, engine.UmountRequest{Volume: ref.MustName("a")}); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := e.Snapshot(ctx, engine.SnapshotRequest{Volume: ref.MustName("a"), Name: ref.MustName("s")}); err != nil {
			t.Fatal(err)
		}
		var d []string
		diff, err := e.Diff(ctx, engine.DiffRequest{A: ref.Ref{Name: "g"}, B: ref.Ref{Name: "a", At: "s"}})
		for _, c := range diff.Changes {
			d = append(d, c.Op+" "+string(c.Path))
		}
		want := []string{"modified .", "renamed dir", "modified file", "deleted gone", "added new"}
		if err != nil || !slices.Equal(d, want) || diff.Method != "overlay" {
			t.Errorf("the differences are %q by %s: %v", d, diff.Method, err)
		}
		pub, err := e.Publish(ctx, engine.PublishRequest{Golden: ref.MustName("g"), Volume: ref.MustName("a")})
		if err != nil || pub.Generation != 2 {
			t.Errorf("publish: %+v %v", pub, err)
		}
		direct := clone(t, e, "g", "direct", true)
		if got := contentOf(t, direct.Mountpoint); got != changed || direct.Overlay {
			t.Errorf("the published generation has %q", got)
		}
		destroy(t, e, "direct")
		fork := clone(t, e, "a", "fork", true)
		if got := contentOf(t, fork.Mountpoint); got != changed || !fork.Overlay {
			t.Errorf("the fork has %q", got)
		}
		if err := os.Remove(filepath.Join(fork.Mountpoint, "new")); err != nil {
			t.Fatal(err)
		}
		if _, err := e.Rewind(ctx, engine.RewindRequest{Volume: ref.MustName("a"), Snapshot: ref.MustName("s"),
			Detach: true}); err != nil {
			t.Fatal(err)
		}
		if again, err = e.Mount(ctx, engine.MountRequest{Volume: ref.MustName("a")}); err != nil {
			t.Fatal(err)
		}
		if got := contentOf(t, again.Mountpoint); got != changed || !again.Overlay {
			t.Errorf("after a rewind it has %q", got)
		}
		wantClean(t, e)

		// It moves to another generation with its changes.
		if err := os.WriteFile(filepath.Join(b.Mountpoint, "own"), []byte("own"), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := e.Umount(ctx, engine.UmountRequest{Volume: ref.MustName("b")}); err != nil {
			t.Fatal(err)
		}
		re, err := e.Rebase(ctx, engine.RebaseRequest{Volume: ref.MustName("b"), Onto: ref.Ref{Name: "g"}})
		if err != nil || re.Base != "g@1" || !re.Overlay {
			t.Errorf("rebase: %+v %v", re, err)
		}
		if b, err = e.Mount(ctx, engine.MountRequest{Volume: ref.MustName("b")}); err != nil {
			t.Fatal(err)
		}
		if got, want := contentOf(t, b.Mountpoint), changed+"./own=own "; got != want {
			t.Errorf("after a rebase it has %q, want %q", got, want)
		}
		if _, err := e.RemoveGolden(ctx, ref.Ref{Name: "g", At: "1"}); err != nil {
			t.Error(err)
		}
		if got, want := contentOf(t, b.Mountpoint), changed+"./own=own "; got != want {
			t.Errorf("without its old golden it has %q, want %q", got, want)
		}
		wantClean(t, e)

		// Flattened, it holds all files itself.
		if _, err := e.Umount(ctx, engine.UmountRequest{Volume: ref.MustName("b")}); err != nil {
			t.Fatal(err)
		}
		flat, err := e.Flatten(ctx, engine.FlattenRequest{Volume: ref.MustName("b")})
		if err != nil || !flat.Done || flat.Overlay {
			t.Fatalf("flatten: %+v %v", flat, err)
		}
		if b, err = e.Mount(ctx, engine.MountRequest{Volume: ref.MustName("b")}); err != nil {
			t.Fatal(err)
		}
		if got, want := contentOf(t, b.Mountpoint), changed+"./own=own "; got != want {
			t.Errorf("flattened it has %q, want %q", got, want)
		}
		wantClean(t, e)
		destroy(t, e, "a", "b", "fork")
		wantClean(t, e)
	})
}

// TestOverlayEphemeral: an ephemeral overlay, which the kernel marks as one that lost its syncs, can be mounted again,
// and so can its copies.
func TestOverlayEphemeral(t *testing.T) {
	overlayPools(t, func(t *testing.T, e *engine.Engine) {
		ctx := t.Context()
		out, err := e.Clone(ctx, engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("v"), Mount: true,
			Overlay: true, Ephemeral: true})
		if err != nil {
			t.Fatal(err)
		}
		changed := changeOverlay(t, out[0].Mountpoint)
		if e.Caps().Name != "plain" {
			out, err := e.Fork(ctx, engine.CloneRequest{From: ref.Ref{Name: "v"}, Name: ref.MustName("running"), Mount: true,
				Freeze: engine.FreezeNever})
			if err != nil {
				t.Fatal(err)
			}
			if got := contentOf(t, out[0].Mountpoint); got != changed {
				t.Errorf("a copy of it that was not to be frozen has %q", got)
			}
			if got := contentOf(t, clone(t, e, "v", "live", true).Mountpoint); got != changed {
				t.Errorf("a copy of it while it is mounted has %q", got)
			}
		}
		if _, err := e.Umount(ctx, engine.UmountRequest{Volume: ref.MustName("v")}); err != nil {
			t.Fatal(err)
		}
		if got := contentOf(t, clone(t, e, "v", "copy", true).Mountpoint); got != changed {
			t.Errorf("a copy of it has %q", got)
		}
		again, err := e.Mount(ctx, engine.MountRequest{Volume: ref.MustName("v")})
		if err != nil {
			t.Fatal(err)
		}
		if got := contentOf(t, again.Mountpoint); got != changed {
			t.Errorf("after an umount it has %q", got)
		}
		wantClean(t, e)
	})
}

// TestOverlaysShareLowerLayer: all overlays of one generation read one filesystem, attached once, however they were
// mounted.
func TestOverlaysShareLowerLayer(t *testing.T) {
	e := newPool(t, testfs.XFS(t, 1<<30), engine.InitRequest{Driver: "reflink"})
	importTree(t, e, "g", source(t))
	const n = 8
	var g sync.WaitGroup
	devices := make([]uint64, n)
	for i := range n {
		g.Go(func() {
			own, err := engine.Open(t.Context(), e.Dir(), drivers)
			if err != nil {
				t.Error(err)
				return
			}
			defer own.Close()
			out, err := own.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "g"},
				Name: ref.MustName(fmt.Sprint("v", i)), Mount: true, Overlay: true})
			if err != nil {
				t.Error(err)
				return
			}
			var st unix.Stat_t
			if err := unix.Stat(filepath.Join(out[0].Mountpoint, "file"), &st); err != nil {
				t.Error(err)
			}
			devices[i] = st.Ino
		})
	}
	g.Wait()

	if got := loopsOf(t, e); got != n+1 {
		t.Errorf("%d overlays have %d loop devices, want one each and one for their golden", n, got)
	}
	destroy(t, e, "v*")
	wantClean(t, e)
	if left := loopsOf(t, e); left != 0 {
		t.Errorf("%d loop devices are left", left)
	}
}

// loopsOf counts the loop devices on images of a pool.
func loopsOf(t *testing.T, e *engine.Engine) (n int) {
	t.Helper()
	all, err := loopdev.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range all {
		if strings.HasPrefix(b.File, e.Dir()+"/") {
			n++
		}
	}
	return n
}

// TestGoldenOfOverlaysRemoved: a golden can be removed at any time. What overlays need stays until the last of them is
// gone, even if the catalogue was rebuilt in between.
func TestGoldenOfOverlaysRemoved(t *testing.T) {
	for _, rebuilt := range []bool{false, true} {
		t.Run(fmt.Sprint("rebuilt ", rebuilt), func(t *testing.T) {
			overlayPools(t, func(t *testing.T, e *engine.Engine) {
				ctx := t.Context()
				overlay(t, e, "g", "a", false)
				b := overlay(t, e, "g", "b", true)
				changed := changeOverlay(t, b.Mountpoint)
				r, err := e.RemoveGolden(ctx, ref.Ref{Name: "g"})
				if err != nil || len(r.Failed) > 0 || len(r.Destroyed) != 1 || r.Destroyed[0].HeldBy != "2 overlays" {
					t.Fatalf("%+v %v", r, err)
				}
				if all, err := e.Goldens(ctx); err != nil || len(all) > 0 {
					t.Errorf("there are still goldens: %+v %v", all, err)
				}
				if _, err := e.Clone(ctx, engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("c"),
					Overlay: true}); !errs.Is(err, errs.NotFound) {
					t.Errorf("a clone of the removed golden: %v", err)
				}
				wantClean(t, e)

				if rebuilt {
					// It is unmounted wherever it is: nothing would know of it.
					if _, err := e.Umount(ctx, engine.UmountRequest{Volume: ref.MustName("b")}); err != nil {
						t.Fatal(err)
					}
					elsewhere := t.TempDir()
					if _, err := e.Mount(ctx, engine.MountRequest{Volume: ref.MustName("b"), Dir: elsewhere}); err != nil {
						t.Fatal(err)
					}
					if _, err := engine.Rebuild(ctx, e.Dir(), drivers); err != nil {
						t.Fatal(err)
					}
					if left, err := os.ReadDir(elsewhere); err != nil || len(left) > 0 {
						t.Errorf("it is still mounted, with %v: %v", left, err)
					}
					again := open(t, e.Dir())
					defer again.Close()
					e = again
					if all, err := e.Goldens(ctx); err != nil || len(all) > 0 {
						t.Errorf("the rebuild brought the golden back: %+v %v", all, err)
					}
					if b, err = e.Mount(ctx, engine.MountRequest{Volume: ref.MustName("b")}); err != nil {
						t.Fatal(err)
					}
				}

				// Another golden of that name has nothing to do with it.
				importAs(t, e, "g", source(t), driver.FS(b.FS))
				wantClean(t, e)
				destroy(t, e, "a")
				if got := contentOf(t, b.Mountpoint); got != changed {
					t.Errorf("the overlay has %q", got)
				}
				d, err := e.Show(ctx, ref.Ref{Name: "b"})
				if err != nil || d.Layers == nil || !d.Layers.LowerRemoved || d.Layers.Lower != "g@1" {
					t.Errorf("%+v %v", d.Layers, err)
				}

				// The last one takes it away.
				objects, err := e.Pool(ctx, engine.PoolRequest{})
				if err != nil {
					t.Fatal(err)
				}
				destroy(t, e, "b")
				finishRemoving(t, e)
				now, err := e.Pool(ctx, engine.PoolRequest{})
				if err != nil || now.TrashCount != 0 || now.PhysicalBytes >= objects.PhysicalBytes {
					t.Errorf("before the last overlay went: %+v\nthen: %+v %v", objects, now, err)
				}
				wantClean(t, e)
			})
		})
	}
}

// TestOverlayWithEqualNumbers: on btrfs, where both layers are subvolumes of one filesystem, an overlay shows new files
// under inode numbers that its golden's files have too. They are not taken for names of one file.
func TestOverlayWithEqualNumbers(t *testing.T) {
	overlayPools(t, func(t *testing.T, e *engine.Engine) {
		const files = 40
		src := t.TempDir()
		mustAll(t, os.Mkdir(filepath.Join(src, "d"), 0o755))
		for i := range files {
			mustAll(t, os.WriteFile(filepath.Join(src, "d", strconv.Itoa(i)), []byte("golden"), 0o644))
		}
		importTree(t, e, "many", src)

		v := overlay(t, e, "many", "v", true)
		mustAll(t, os.Rename(filepath.Join(v.Mountpoint, "d"), filepath.Join(v.Mountpoint, "moved")))
		for i := range files {
			mustAll(t, os.WriteFile(filepath.Join(v.Mountpoint, "new"+strconv.Itoa(i)), []byte("change"), 0o644))
		}
		want := shownFiles(t, v.Mountpoint)

		if _, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")}); err != nil {
			t.Fatal(err)
		}
		if _, err := e.Publish(t.Context(), engine.PublishRequest{Golden: ref.MustName("many"),
			Volume: ref.MustName("v")}); err != nil {
			t.Fatal(err)
		}
		if got := shownFiles(t, clone(t, e, "many", "next", true).Mountpoint); !maps.Equal(got, want) {
			t.Errorf("what was published has %q,\nwant %q", got, want)
		}
		wantClean(t, e)
		destroy(t, e, "v", "next")
	})
}

// TestImportOfOverlayWithEqualNumbers: on btrfs, an overlay can show a file of the golden and another under one inode
// number. An import of the mounted overlay does not join them, even if both have several names.
func TestImportOfOverlayWithEqualNumbers(t *testing.T) {
	overlayPools(t, func(t *testing.T, e *engine.Engine) {
		const files = 40
		make := func(dir, name, text string) {
			mustAll(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644),
				os.Link(filepath.Join(dir, name), filepath.Join(dir, name+"-again")))
		}
		src := t.TempDir()
		for i := range files {
			make(src, strconv.Itoa(i), "golden")
		}
		importTree(t, e, "many", src)
		made, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "many"}, Name: ref.MustName("v"),
			Mount: true, MountDir: filepath.Join(t.TempDir(), "v"), Overlay: true})
		if err != nil {
			t.Fatal(err)
		}
		v := made[0]
		for i := range files {
			make(v.Mountpoint, "new"+strconv.Itoa(i), "change")
		}
		want := shownFiles(t, v.Mountpoint)

		importTree(t, e, "again", v.Mountpoint)
		w := clone(t, e, "again", "w", true)
		if got := shownFiles(t, w.Mountpoint); !maps.Equal(got, want) {
			t.Errorf("what was imported has %q,\nwant %q", got, want)
		}
		for _, name := range []string{"7", "new7"} {
			var one, two unix.Stat_t
			mustAll(t, unix.Stat(filepath.Join(w.Mountpoint, name), &one),
				unix.Stat(filepath.Join(w.Mountpoint, name+"-again"), &two))
			if one.Ino != two.Ino || one.Nlink != 2 {
				t.Errorf("%s is not one file any more: %+v, %+v", name, one, two)
			}
		}
		destroy(t, e, "v", "w")
	})
}

// TestOverlayLargerThanGolden: an overlay can hold more than its golden has room for, and what becomes of it has all.
func TestOverlayLargerThanGolden(t *testing.T) {
	e := newPool(t, testfs.XFS(t, 2<<30), engine.InitRequest{Driver: "reflink"})
	ctx := t.Context()
	q := engine.ImportRequest{Name: ref.MustName("g"), Source: source(t), SizeBytes: 64 << 20}
	if _, err := e.Import(ctx, q); err != nil {
		t.Fatal(err)
	}
	out, err := e.Clone(ctx, engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("v"), Mount: true,
		Overlay: true, SizeBytes: 512 << 20})
	if err != nil {
		t.Fatal(err)
	}
	const size = 200 << 20
	if err := os.WriteFile(filepath.Join(out[0].Mountpoint, "large"), make([]byte, size), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := e.Publish(ctx, engine.PublishRequest{Golden: ref.MustName("g"), Volume: ref.MustName("v")}); err != nil {
		t.Fatal(err)
	}
	if _, err := e.Umount(ctx, engine.UmountRequest{Volume: ref.MustName("v")}); err != nil {
		t.Fatal(err)
	}
	if _, err := e.Flatten(ctx, engine.FlattenRequest{Volume: ref.MustName("v")}); err != nil {
		t.Fatal(err)
	}
	flat, err := e.Mount(ctx, engine.MountRequest{Volume: ref.MustName("v")})
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range []api.Object{flat, clone(t, e, "g", "w", true)} {
		if st, err := os.Stat(filepath.Join(v.Mountpoint, "large")); err != nil || st.Size() != size {
			t.Errorf("%s has %+v: %v", v.Name, st, err)
		}
	}
	wantClean(t, e)
}

// TestOverlayRefused: what overlays cannot be made from or used for is refused with a hint, and changes nothing.
func TestOverlayRefused(t *testing.T) {
	e := newPool(t, testfs.XFS(t, 1<<30), engine.InitRequest{Driver: "reflink"})
	ctx := t.Context()
	importTree(t, e, "g", source(t))
	clone(t, e, "g", "v", false)
	for what, err := range map[string]error{
		"of a volume": func() error {
			_, err := e.Clone(ctx, engine.CloneRequest{From: ref.Ref{Name: "v"}, Name: ref.MustName("w"), Overlay: true})
			return err
		}(),
		"of a snapshot": func() error {
			snapshot(t, e, "v", "s")
			q := engine.CloneRequest{From: ref.Ref{Name: "v", At: "s"}, Name: ref.MustName("w"), Overlay: true}
			_, err := e.Clone(ctx, q)
			return err
		}(),
	} {
		if !errs.Is(err, errs.Invalid) && !errs.Is(err, errs.Unsupported) || errs.HintOf(err) == "" {
			t.Errorf("%s: %v", what, err)
		}
	}
	wantClean(t, e)
}

// TestOverlayRefusedOnOldZFS: where overlayfs cannot keep changes in a dataset, that is said, with the version and what
// to do, and nothing is left.
func TestOverlayRefusedOnOldZFS(t *testing.T) {
	zpool := testfs.ZFS(t, 1<<30)
	if testfs.ZFSHasOverlays() {
		t.Skip("does not apply: this OpenZFS has what overlayfs needs (`make test-zfs ZFS=2.1` runs it)")
	}

	drivers[zfs.Name] = zfs.Open
	t.Cleanup(func() { delete(drivers, zfs.Name) })
	e := newPool(t, t.TempDir(), engine.InitRequest{Driver: zfs.Name, Dataset: zpool + "/pando"})
	importTree(t, e, "g", source(t))
	_, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("v"), Overlay: true})
	if !errs.Is(err, errs.Unsupported) || !strings.Contains(err.Error(), "OpenZFS 2.1") ||
		!strings.Contains(errs.HintOf(err), "2.2") {
		t.Errorf("%v (hint: %s)", err, errs.HintOf(err))
	}

	// A golden whose clones are overlays by default has others here.
	policy := driver.OverlayDefault
	if _, err := e.SetGolden(t.Context(), engine.SetRequest{Golden: ref.MustName("g"), Overlay: &policy}); err != nil {
		t.Fatal(err)
	}
	out, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("v"),
		GoldenDecides: true})
	if err != nil || out[0].Overlay {
		t.Errorf("%+v %v", out, err)
	}
	wantClean(t, e)
}

// TestOverlaysAtOnce: overlays of one generation can be cloned, mounted, unmounted and destroyed at the same time.
func TestOverlaysAtOnce(t *testing.T) {
	overlayPools(t, func(t *testing.T, e *engine.Engine) {
		for range 2 {
			out, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("v"),
				Mount: true, Overlay: true, Count: 6})
			if err != nil {
				t.Fatal(err)
			}
			for _, v := range out {
				if got := contentOf(t, v.Mountpoint); got != lowerContent {
					t.Errorf("%s has %q", v.Name, got)
				}
			}
			destroy(t, e, "v-*")
		}
		wantClean(t, e)
	})
}

// TestOverlayUnmountedLazily: an overlay that was unmounted by hand while a program is in it is neither mounted again
// nor destroyed before the program has left it: two overlays with one upper layer would destroy it.
func TestOverlayUnmountedLazily(t *testing.T) {
	overlayPools(t, func(t *testing.T, e *engine.Engine) {
		v := overlay(t, e, "g", "v", true)
		inside, err := os.Open(v.Mountpoint)
		if err != nil {
			t.Fatal(err)
		}
		defer inside.Close()
		if err := unix.Unmount(v.Mountpoint, unix.MNT_DETACH); err != nil {
			t.Fatal(err)
		}

		again := engine.MountRequest{Volume: ref.MustName("v")}
		if _, err := e.Mount(t.Context(), again); !errs.Is(err, errs.InUse) {
			t.Errorf("mount: %v", err)
		}
		r, err := e.Destroy(t.Context(), toDestroy("v"))
		if err != nil || len(r.Failed) != 1 || !errs.Is(r.Failed[0], errs.InUse) {
			t.Errorf("destroy: %+v %v", r, err)
		}
		if e.Caps().Name == "plain" {
			_, err := e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: ref.MustName("v"), Name: ref.MustName("s")})
			if !errs.Is(err, errs.InUse) {
				t.Errorf("snapshot: %v", err)
			}
		}

		inside.Close()
		if _, err := e.Mount(t.Context(), again); err != nil {
			t.Errorf("mount after the program has left it: %v", err)
		}
		wantClean(t, e)
	})
}

// TestOverlayHolderNamed: who has a file of an overlay open is named when it cannot be unmounted.
func TestOverlayHolderNamed(t *testing.T) {
	overlayPools(t, func(t *testing.T, e *engine.Engine) {
		v := overlay(t, e, "g", "v", true)
		f, err := os.Create(filepath.Join(v.Mountpoint, "held"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()

		_, err = e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")})
		want := fmt.Sprintf("held by pid %d ", os.Getpid())
		if !errs.Is(err, errs.InUse) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	})
}

// TestOverlayHeldInNamespace: a mount namespace that keeps a copy of the mount keeps an overlay from being unmounted
// and destroyed.
func TestOverlayHeldInNamespace(t *testing.T) {
	overlayPools(t, func(t *testing.T, e *engine.Engine) {
		v := overlay(t, e, "g", "v", true)
		_, end := copyMounts(t)
		if _, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")}); !errs.Is(err, errs.InUse) {
			t.Errorf("umount: %v", err)
		}
		r, err := e.Destroy(t.Context(), toDestroy("v"))
		if err != nil || len(r.Failed) != 1 || !errs.Is(r.Failed[0], errs.InUse) {
			t.Errorf("destroy: %+v %v", r, err)
		}
		table, err := mount.Table("self")
		if err != nil {
			t.Fatal(err)
		}
		if at, ok := mount.At(table, v.Mountpoint); !ok || at.FSType != "overlay" {
			t.Errorf("it is no longer mounted: %+v", at)
		}

		end()
		if _, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")}); err != nil {
			t.Error(err)
		}
		wantClean(t, e)
	})
}
