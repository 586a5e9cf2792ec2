package engine_test

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/testing/testfs"
	"pando/internal/testing/treetest"

	"golang.org/x/sys/unix"
)

// seen is what treetest does not compare of a file.
type seen struct {
	listed fs.FileMode // type, as the directory lists it
	links  uint64
	device bool // is that of the root
	data   bool // SEEK_DATA finds something
}

// see looks at all files of a tree. Each must have an inode number of its own, which its directory also lists, and that
// stays the same.
func see(t *testing.T, dir string) map[string]seen {
	t.Helper()
	var root unix.Stat_t
	if err := unix.Lstat(dir, &root); err != nil {
		t.Fatal(err)
	}

	out, inodes := map[string]seen{}, map[uint64]string{}
	if err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}

		rel, _ := filepath.Rel(dir, path)
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}

		if other, ok := inodes[st.Ino]; ok && st.Nlink == 1 {
			t.Errorf("%s and %s have one inode number", other, rel)
		}
		inodes[st.Ino] = rel

		s := seen{listed: d.Type(), links: uint64(st.Nlink), device: st.Dev == root.Dev}
		if info, err := os.Lstat(path); err != nil || info.Mode().Type() != d.Type() {
			t.Errorf("%s is listed as %v: %v", rel, d.Type(), err)
		}

		if d.Type().IsRegular() {
			f, err := os.Open(path)
			if err != nil {
				return err
			}
			defer f.Close()
			_, err = f.Seek(0, unix.SEEK_DATA)
			s.data = err == nil
		}
		out[rel] = s
		return nil
	}); err != nil {
		t.Fatal(err)
	}

	return out
}

// seenDifferences lists how the tree in b differs from that in a.
func seenDifferences(t *testing.T, a, b string, ignore treetest.Field) []string {
	t.Helper()
	fa, err := treetest.Fingerprint(a)
	if err != nil {
		t.Fatal(err)
	}
	fb, err := treetest.Fingerprint(b)
	if err != nil {
		t.Fatal(err)
	}
	out := treetest.Diff(fa, fb, ignore|treetest.Atime)

	sa, sb := see(t, a), see(t, b)
	for _, path := range slices.Sorted(maps.Keys(sa)) {
		x, y := sa[path], sb[path]
		if x.links != y.links {
			out = append(out, fmt.Sprintf("%q: links: %d, but %d", path, x.links, y.links))
		}
		if x.links = y.links; x != y {
			out = append(out, fmt.Sprintf("%q: %+v, but %+v", path, x, y))
		}
	}
	return out
}

// beforeChange and afterChange are the differences of an overlay, as docs/choosing.md lists them.
var (
	beforeChange = []string{`"size": attributes: map["trusted.overlay.opaque":"y"], but map[]`, `".": links: 14, but 1`}
	afterChange  = []string{
		`"hard/a/b/c/third": mode: 100640, but 100600`,
		`"hard/first": mode: 100640, but 100600`,
		`"hard/second": hard link to: hard/a/b/c/third, but `,
		`"hard/z/fourth": mode: 100640, but 100600`,
		`"size": attributes: map["trusted.overlay.opaque":"y"], but map[]`,
		`"size/4095": flags: 0x40, but 0x0`,
		`"sparse/middle": data: 0-4096 8388608-8396800 20967424-20971521, but 0-1048576 8388608-9437184 20967424-20971521`,
		`"zz-last": mode: 100640, but 100600`,
		`".": links: 14, but 1`, `"acl": links: 3, but 1`, `"hard": links: 4, but 1`, `"hard/second": links: 5, but 1`,
		`"mode": links: 2, but 1`, `"moved": links: 15, but 1`, `"size": links: 2, but 1`, `"sparse": links: 2, but 1`,
		`"special": links: 2, but 1`, `"xattr": links: 3, but 1`,
	}
)

// TestOverlayShowsWhatImagesShow compares an overlay with another clone of its golden, which has one of everything,
// before and after changes.
func TestOverlayShowsWhatImagesShow(t *testing.T) {
	pools := map[string]func(t *testing.T) *engine.Engine{
		"reflink": func(t *testing.T) *engine.Engine {
			return newPool(t, testfs.XFS(t, 1<<30), engine.InitRequest{Driver: "reflink"})
		},
		"plain": func(t *testing.T) *engine.Engine {
			return newPool(t, testfs.Ext4(t, 1<<30), engine.InitRequest{Driver: "plain"})
		},
	}
	for name, pool := range pools {
		t.Run(name, func(t *testing.T) {
			// Make a golden of everything that a tree can hold. Whiteouts have a test of their own.
			e := pool(t)
			src := filepath.Join(testfs.Ext4(t, 512<<20), "src")
			mustAll(t, os.Mkdir(src, 0o755))
			treetest.Build(t, src)
			mustAll(t, os.Remove(filepath.Join(src, "special/whiteout")),
				treetest.SetFlags(filepath.Join(src, "size/4095"), treetest.NoDump),
				unix.Setxattr(filepath.Join(src, "size"), "trusted.overlay.opaque", []byte("y"), 0))
			importTree(t, e, "g", src)
			treetest.KeepImmutable(t, e.Dir())

			other, over := clone(t, e, "g", "other", true).Mountpoint, overlay(t, e, "g", "over", true).Mountpoint
			if got := seenDifferences(t, other, over, 0); !slices.Equal(got, beforeChange) {
				t.Errorf("before the first change: %s\nwant %s", strings.Join(got, "\n"), strings.Join(beforeChange, "\n"))
			}

			// Change the same in both.
			for dir, wantOld := range map[string]bool{other: false, over: true} {
				p := func(name string) string { return filepath.Join(dir, name) }
				early, text := mapFile(t, p("xattr/user"))
				mustAll(t, os.WriteFile(p("xattr/user"), []byte("other text"), 0o644), appendTo(p("sparse/middle"), "x"),
					appendTo(p("acl/file"), "x"), os.Chmod(p("size/4095"), 0o600), os.Chmod(p("hard/second"), 0o640),
					os.Chmod(p("special/block"), 0o600), os.Rename(p("dirs"), p("moved")),
					unix.Setxattr(p("size/1"), "user.new", []byte("1"), 0), os.Remove(p("mode/0444")))
				if same := string(early[:10]) == text; same != wantOld {
					t.Errorf("%s: mapped before the first change, the file is the same: %v", dir, same)
				}
				mustAll(t, unix.Munmap(early))
			}
			if got := seenDifferences(t, other, over, treetest.Times); !slices.Equal(got, afterChange) {
				t.Errorf("after changes: %s\nwant %s", strings.Join(got, "\n"), strings.Join(afterChange, "\n"))
			}
			destroy(t, e, "other", "over")
		})
	}
}

// mapFile maps a file, and returns its content as well.
func mapFile(t *testing.T, path string) (mapped []byte, text string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}

	defer f.Close()

	mapped, err = unix.Mmap(int(f.Fd()), 0, 10, unix.PROT_READ, unix.MAP_SHARED)
	mustAll(t, err)
	return mapped, string(mapped)
}

func appendTo(path, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

func mustAll(t *testing.T, all ...error) {
	t.Helper()
	if err := errors.Join(all...); err != nil {
		t.Fatal(err)
	}
}

// hostileAttributes are those that overlayfs gives a meaning, with values that would lead elsewhere or hide something.
var hostileAttributes = map[string]string{"opaque": "y", "redirect": "/../../etc", "origin": "garbage", "whiteout": "",
	"protattr": "i", "impure": "y", "nlink": "U+1", "uuid": "0123456789abcdef"}

// setHostile gives a file all attributes of overlayfs.
func setHostile(path string) error {
	for name, value := range hostileAttributes {
		if err := unix.Lsetxattr(path, "trusted.overlay."+name, []byte(value), 0); err != nil {
			return fmt.Errorf("%s %s: %w", path, name, err)
		}
	}
	return nil
}

// buildHostile makes a tree of files that look like those that overlayfs keeps in an upper layer.
func buildHostile(t *testing.T, dir string) {
	t.Helper()
	p := func(name string) string { return filepath.Join(dir, name) }
	for name, value := range hostileAttributes {
		mustAll(t, os.MkdirAll(p("dirs/"+name), 0o755), os.MkdirAll(p("files"), 0o755),
			os.WriteFile(p("dirs/"+name+"/passwd"), []byte("own"), 0o644), os.WriteFile(p("files/"+name), []byte("own"), 0o644),
			unix.Setxattr(p("dirs/"+name), "trusted.overlay."+name, []byte(value), 0),
			unix.Setxattr(p("files/"+name), "trusted.overlay."+name, []byte(value), 0))
	}

	mustAll(t, os.MkdirAll(p("white"), 0o755), os.WriteFile(p("white/by-attribute"), nil, 0o644),
		os.WriteFile(p("white/not"), []byte("own"), 0o644), unix.Mknod(p("white/device"), unix.S_IFCHR, 0),
		unix.Setxattr(p("white"), "trusted.overlay.opaque", []byte("x"), 0),
		unix.Setxattr(p("white/by-attribute"), "trusted.overlay.whiteout", nil, 0), setHostile(dir),
		os.MkdirAll(p("refused"), 0o755), os.WriteFile(p("refused/file"), []byte("own"), 0o644),
		unix.Setxattr(p("refused/file"), "trusted.overlay.metacopy", nil, 0))
}

// shownFiles returns the content of the files in a tree, by path. Files that are only listed are left out.
func shownFiles(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	if err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}

		rel, _ := filepath.Rel(dir, path)
		var st unix.Stat_t
		err = unix.Lstat(path, &st)
		switch {
		case err == unix.ENOENT, err == unix.EPERM:
		case err != nil:
			return err
		case st.Mode&unix.S_IFMT == unix.S_IFREG:
			text, err := os.ReadFile(path)
			out[rel] = string(text)
			return err
		default:
			out[rel] = d.Type().String()
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return out
}

// TestHostileGolden: files of a golden, imported from a directory or an archive, may look like those that overlayfs
// keeps in an upper layer. Overlays on it show nothing but its files, however they are copied or merged.
func TestHostileGolden(t *testing.T) {
	overlayPools(t, func(t *testing.T, e *engine.Engine) {
		src := filepath.Join(testfs.Ext4(t, 64<<20), "src")
		mustAll(t, os.Mkdir(src, 0o755))
		buildHostile(t, src)
		archive := filepath.Join(t.TempDir(), "src.tar")
		if out, err := exec.Command("tar", "--xattrs", "--xattrs-include=*", "-C", src, "-cf", archive, ".").
			CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}

		neighbour := overlay(t, e, "g", "neighbour", true)
		for name, from := range map[string]string{"directory": src, "archive": archive} {
			t.Run(name, func(t *testing.T) {
				importTree(t, e, name, from)
				kept := treetest.KeepImmutable(t, e.Dir())
				useHostile(t, e, name)
				kept.Check(t)
			})
		}

		if got := contentOf(t, neighbour.Mountpoint); got != lowerContent {
			t.Errorf("the neighbour has %q", got)
		}
		wantClean(t, e)
		destroy(t, e, "neighbour")
	})
}

// useHostile copies, publishes and flattens an overlay on a golden of buildHostile.
func useHostile(t *testing.T, e *engine.Engine, golden string) {
	t.Helper()
	want := map[string]string{"white/not": "own"}
	for name := range hostileAttributes {
		want["dirs/"+name+"/passwd"], want["files/"+name] = "own", "own"
	}

	dir := overlay(t, e, golden, "over", true).Mountpoint
	check := func(what, dir string) {
		t.Helper()
		if got := shownFiles(t, dir); !maps.Equal(got, want) {
			t.Errorf("%s shows %q,\nwant %q", what, got, want)
		}
	}
	check("a new overlay", dir)
	for name, err := range map[string]error{"refused/file": unix.EPERM, "white/device": unix.ENOENT,
		"white/by-attribute": unix.ENOENT} {
		if _, got := os.Lstat(filepath.Join(dir, name)); !errors.Is(got, err) {
			t.Errorf("%s: %v", name, got)
		}
	}

	// Programs can set the attributes, but make no whiteouts.
	p := func(name string) string { return filepath.Join(dir, name) }
	for _, name := range []string{".", "dirs", "dirs/opaque", "white"} {
		mustAll(t, os.WriteFile(p(name+"/new"), []byte("new"), 0o644), setHostile(p(name)))
		want[filepath.Join(name, "new")] = "new"
		if err := unix.Mknod(p(name+"/device"), unix.S_IFCHR, 0); err != unix.EPERM {
			t.Errorf("mknod of a whiteout: %v", err)
		}
	}
	mustAll(t, setHostile(p("files/nlink")), os.Remove(p("files/uuid")), os.Rename(p("dirs/redirect"), p("moved")),
		os.Rename(p("white"), p("grey")))
	delete(want, "files/uuid")
	delete(want, "white/not")
	delete(want, "white/new")
	want["grey/not"], want["grey/new"] = "own", "new"
	delete(want, "dirs/redirect/passwd")
	want["moved/passwd"] = "own"
	check("a changed overlay", dir)

	// Copies of it show the same.
	if _, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("over")}); err != nil {
		t.Fatal(err)
	}
	fork := clone(t, e, "over", "fork", true)
	check("a fork", fork.Mountpoint)
	if _, err := e.Diff(t.Context(), engine.DiffRequest{A: ref.Ref{Name: golden}, B: ref.Ref{Name: "over"}}); err != nil {
		t.Error(err)
	}
	if _, err := e.Publish(t.Context(), engine.PublishRequest{Golden: ref.MustName(golden),
		Volume: ref.MustName("over")}); err != nil {
		t.Fatal(err)
	}

	// The attributes that programs set are in its lower layer now.
	check("an overlay on what was published", overlay(t, e, golden, "next", true).Mountpoint)

	// What is no overlay shows the file that overlayfs refuses.
	want["refused/file"] = "own"
	check("what was published", clone(t, e, golden, "direct", true).Mountpoint)
	if _, err := e.Flatten(t.Context(), engine.FlattenRequest{Volume: ref.MustName("over")}); err != nil {
		t.Fatal(err)
	}
	flat, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName("over")})
	if err != nil {
		t.Fatal(err)
	}
	check("the flattened overlay", flat.Mountpoint)
	destroy(t, e, "over", "fork", "next", "direct")
}
