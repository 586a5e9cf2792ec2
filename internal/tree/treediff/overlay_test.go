package treediff

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"pando/internal/testing/faulttest"
	"pando/internal/testing/treetest"
)

// TestOverlayRandom: whatever is done in an overlay, CompareOverlay finds what a comparison of all files finds.
func TestOverlayRandom(t *testing.T) {
	for kind := range layerKinds {
		t.Run(kind, func(t *testing.T) {
			l := newLayers(t, kind)
			rounds(t, 6, func(t *testing.T, r *rand.Rand, edits int) {
				lower := l.lower.empty()
				e := &treetest.Editor{T: t, R: r, Dir: lower}
				e.Fill()
				moreLinks(t, lower, r)
				nextTick()
				l.overlay(t, lower).editAtRandom(r, edits)
			})
		})
	}
}

// moreLinks gives files of a tree more names.
func moreLinks(t *testing.T, dir string, r *rand.Rand) {
	e := newOverlayEditor(&overlay{sideEdits: sideEdits{t, dir}}, r)
	for range 15 {
		_ = os.Link(e.pick(false), e.name())
	}
}

// editAtRandom edits the overlay, checks it, and does so again when it has been mounted anew.
func (o *overlay) editAtRandom(r *rand.Rand, edits int) {
	o.t.Helper()
	e := newOverlayEditor(o, r)
	for range 2 {
		for range edits {
			e.edit()
		}
		o.check()
		o.remount()
		if o.check(); o.t.Failed() {
			return
		}
	}
	o.unmount()
}

// TestOverlayEverything: a lower layer with every kind of file.
func TestOverlayEverything(t *testing.T) {
	for _, kind := range []string{"tmpfs", "ext4 on ext4"} {
		t.Run(kind, func(t *testing.T) {
			l := newLayers(t, kind)
			lower := l.lower.empty()
			treetest.Build(t, lower)
			if err := os.Remove(filepath.Join(lower, "special/whiteout")); err != nil {
				t.Fatal(err) // overlayfs hides it
			}
			nextTick()
			o := l.overlay(t, lower)
			e := newOverlayEditor(o, faulttest.Rand(t))
			for range 25 {
				e.edit()
			}
			o.remount()
			o.check()
		})
	}
}

// overlayCases are changes of the tree that fillForOverlay makes, and what CompareOverlay reports.
var overlayCases = []struct {
	name string
	edit func(o *overlay)
	want string
}{
	{"nothing", func(*overlay) {}, ""},
	{"copied up", func(o *overlay) {
		o.open("file")
		o.open("d/s/g")
		o.chmod("e", 0o755)
		o.must(unix.Lsetxattr(o.at("sym"), "trusted.x", nil, 0), unix.Lremovexattr(o.at("sym"), "trusted.x"))
	}, ""},
	{"same bytes", func(o *overlay) { o.write("file", "base") }, ""},
	{"same file again", func(o *overlay) { o.remove("file"); o.write("file", "base") }, ""},
	{"written", func(o *overlay) { o.write("d/f", "more") }, "modified d/f +content"},
	{"truncated", func(o *overlay) { o.must(os.Truncate(o.at("large"), 5000)) }, "modified large +content"},
	{"sparse", func(o *overlay) { o.writeAt("sparse", 512<<10) }, "modified sparse +content"},
	{"removed", func(o *overlay) { o.remove("file"); o.remove("d/s/g") }, "deleted d/s/g, deleted file"},
	{"root", func(o *overlay) { o.chmod("", 0o700) }, "modified . +metadata"},

	// Other types.
	{"file to directory", func(o *overlay) {
		o.remove("file")
		o.must(os.Mkdir(o.at("file"), 0o755))
		o.write("file/in", "")
	}, "modified file which was another file, added file/in"},
	{"directory to file", func(o *overlay) { o.removeAll("d"); o.write("d", "") },
		"modified d which was another directory, deleted d/f, deleted d/k, deleted d/s, deleted d/s/g"},
	{"file to symlink", func(o *overlay) { o.toSymlink("file") }, "modified file which was another file"},
	{"symlink", func(o *overlay) { o.toSymlink("sym") }, "modified sym +content"},
	{"device", func(o *overlay) { o.remove("dev"); o.mknod("dev", unix.S_IFCHR|0o600, unix.Mkdev(1, 5)) },
		"modified dev +content"},
	{"device to fifo", func(o *overlay) { o.remove("dev"); o.mknod("dev", unix.S_IFIFO|0o600, 0) },
		"modified dev which was another char device"},

	// Attributes.
	{"metadata", func(o *overlay) {
		acl := treetest.ACL([3]uint32{1, 7, 1<<32 - 1}, [3]uint32{2, 6, 1000}, [3]uint32{4, 4, 1<<32 - 1},
			[3]uint32{16, 7, 1<<32 - 1}, [3]uint32{32, 0, 1<<32 - 1})
		o.must(unix.Setxattr(o.at("file"), "user.x", []byte("1"), 0), os.Lchown(o.at("sym"), 7, 8),
			unix.Setxattr(o.at("d/s"), "system.posix_acl_default", []byte(acl), 0),
			unix.Setxattr(o.at("e/f"), "system.posix_acl_access", []byte(acl), 0), unix.Chmod(o.at("dev"), 0o644))
	}, "modified d/s +metadata, modified dev +metadata, modified e/f +metadata, modified file +metadata, " +
		"modified sym +metadata"},

	// Opaque directories.
	{"opaque", func(o *overlay) { o.removeAll("d"); o.must(os.MkdirAll(o.at("d/s"), 0o755)); o.write("d/n", "new") },
		"deleted d/f, deleted d/k, added d/n, deleted d/s/g"},
	{"opaque with the same", func(o *overlay) {
		o.removeAll("e")
		o.must(os.Mkdir(o.at("e"), 0o755))
		o.write("e/f", "in e")
	}, ""},

	// Redirected directories.
	{"moved", func(o *overlay) { o.move("e", "n") }, "renamed e to n"},
	{"moved, with changes", func(o *overlay) {
		o.move("d", "n")
		o.remove("n/f")
		o.write("n/new", "")
		o.write("n/s/g", "changed")
	}, "deleted d/f, renamed d to n, added n/new, modified n/s/g +content"},
	{"moved into a new one", func(o *overlay) { o.must(os.Mkdir(o.at("n"), 0o755)); o.move("e", "n/e") },
		"added n, renamed e to n/e"},
	{"moved, and another in its place", func(o *overlay) { o.move("d", "n"); o.move("e", "d"); o.move("n/s", "d/s") },
		"renamed e to d, renamed d/s to d/s, renamed d to n"},
	{"moved and back", func(o *overlay) { o.move("d/s", "n"); o.move("n", "d/s") }, ""},
	{"moved over an empty one", func(o *overlay) { o.remove("e/f"); o.must(unix.Rename(o.at("d/s"), o.at("e"))) },
		"deleted e, renamed d/s to e, deleted e/f"},
	{"moved, and a new one", func(o *overlay) { o.move("e", "n"); o.must(os.Mkdir(o.at("e"), 0o755)); o.write("e/g", "") },
		"added e, added e/g, renamed e to n"},
	{"moved within moved", func(o *overlay) {
		o.move("d", "x")
		o.move("x/s", "x/t")
		o.write("x/t/g", "deeper")
		o.move("e", "x/t/e")
		o.move("x", "e")
	}, "renamed d to e, renamed d/s to e/t, renamed e to e/t/e, modified e/t/g +content"},
	{"exchanged", func(o *overlay) { o.exchange("d", "e") }, "renamed e to d, renamed d to e"},

	// Hard links, which part when they are copied up.
	{"first of the links", func(o *overlay) { o.write("h/1", "own") }, "modified h/1 which was another file"},
	{"last of the links", func(o *overlay) { o.write("h/3", "own") }, "modified h/3 which was another file"},
	{"links copied up", func(o *overlay) { o.open("h/2") }, "modified h/2 which was another file"},
	{"all links", func(o *overlay) { o.write("h/1", "x"); o.write("h/2", "y"); o.write("h/3", "linked") },
		"modified h/1 +content, modified h/2 which was another file, modified h/3 which was another file"},
	{"a link less", func(o *overlay) { o.remove("h/2") }, "deleted h/2"},
	{"a link more", func(o *overlay) { o.link("file", "n"); o.link("h/3", "o") },
		"modified h/3 which was another file, added n as file, added o as h/3"},
	{"two links", func(o *overlay) { o.write("h/1", "own"); o.remove("h/2"); o.link("h/1", "h/2") },
		"modified h/1 which was another file, modified h/2 which was another file as h/1"},
	{"all links moved", func(o *overlay) { o.move("h", "n") },
		"renamed h to n"},
	{"a link moved with its directory", func(o *overlay) { o.move("d", "n") }, "renamed d to n"},
	{"a link moved and changed", func(o *overlay) { o.move("d", "n"); o.write("n/k", "own") },
		"deleted d/k, renamed d to n, added n/k"},
}

// fillForOverlay makes a lower layer.
func fillForOverlay(t *testing.T, dir string) {
	t.Helper()
	e := &sideEdits{t, dir}
	e.must(os.MkdirAll(e.at("d/s"), 0o755), os.Mkdir(e.at("e"), 0o755), os.Mkdir(e.at("h"), 0o755))
	for path, text := range map[string]string{
		"file": "base", "d/f": "in d", "d/s/g": "deep", "e/f": "in e", "h/1": "linked", "k": "two names",
		"large": strings.Repeat("0123456789abcdef", 4096),
	} {
		e.write(path, text)
	}
	e.link("h/1", "h/2")
	e.link("h/1", "h/3")
	e.link("k", "d/k")
	e.must(os.Symlink("base", e.at("sym")), unix.Mknod(e.at("dev"), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))))
	e.writeAt("sparse", 0)
	e.must(os.Truncate(e.at("sparse"), 1<<20))
	nextTick()
}

func (e *sideEdits) open(path string) {
	e.t.Helper()
	f, err := os.OpenFile(e.at(path), os.O_RDWR, 0)
	e.must(err, f.Close())
}

func (e *sideEdits) writeAt(path string, off int64) {
	e.t.Helper()
	f, err := os.OpenFile(e.at(path), os.O_RDWR|os.O_CREATE, 0o644)
	e.must(err)
	_, err = f.WriteAt([]byte("data"), off)
	e.must(err, f.Close())
}

func (e *sideEdits) removeAll(path string) { e.t.Helper(); e.must(os.RemoveAll(e.at(path))) }

func (e *sideEdits) mknod(path string, mode uint32, dev uint64) {
	e.t.Helper()
	e.must(unix.Mknod(e.at(path), mode, int(dev)))
}

func (e *sideEdits) exchange(x, y string) {
	e.t.Helper()
	e.must(unix.Renameat2(unix.AT_FDCWD, e.at(x), unix.AT_FDCWD, e.at(y), unix.RENAME_EXCHANGE))
}

// TestOverlayCases: each thing that overlayfs writes to an upper layer.
func TestOverlayCases(t *testing.T) {
	for _, kind := range []string{"tmpfs", "xfs on tmpfs", "ext4"} {
		l := newLayers(t, kind)
		lower := l.lower.empty()
		fillForOverlay(t, lower)
		for _, c := range overlayCases {
			t.Run(kind+"/"+c.name, func(t *testing.T) {
				o := l.overlay(t, lower)
				c.edit(o)
				for range 2 {
					if got := summary(withoutTimes(o.check().Changes)); got != c.want {
						t.Errorf("the changes are %s\nnot %s", got, c.want)
					}
					o.remount()
				}
			})
		}
	}
}

// withoutTimes leaves out changes of nothing but times.
func withoutTimes(changes []Change) []Change {
	return slices.DeleteFunc(slices.Clone(changes), func(ch Change) bool { return ch.TimesOnly() })
}

// TestOverlayRanges: of a large file that was copied up, the written blocks are reported.
func TestOverlayRanges(t *testing.T) {
	l := newLayers(t, "ext4 on ext4")
	lower := l.lower.empty()
	fillForOverlay(t, lower)
	o := l.overlay(t, lower)
	o.writeAt("large", 20000)
	changes := withoutTimes(o.check().Changes)
	if len(changes) != 1 || !slices.Equal(changes[0].ranges, []Range{{16384, 20480}}) || changes[0].ChangedBytes != 4096 {
		t.Errorf("%+v", changes)
	}
}

// TestOverlayCost: the cost depends on what has changed, not on the size of lower.
func TestOverlayCost(t *testing.T) {
	l := newLayers(t, "tmpfs")
	var stats []Stats
	for _, n := range []int{500, 5000} {
		lower := l.lower.empty()
		grow(t, lower, n)
		o := l.overlay(t, lower)
		o.write("0/0/1", "changed")
		o.chmod("0/1/60", 0o600)
		o.remove("0/2/100")
		o.write("0/3/new", "new")
		o.move("0/4/200", "0/5/moved")
		o.move("0/6", "0/7/moved directory")
		o.write("0/7/moved directory/300", "changed")
		r, err := o.compare(Options{})
		o.must(err)
		if len(r.Changes) != 8 {
			t.Errorf("the changes are %s", summary(r.Changes))
		}
		stats = append(stats, r.Stats)
	}

	if stats[0] != stats[1] {
		t.Errorf("the cost is %+v, and that of the larger tree %+v", stats[0], stats[1])
	}
	if s := stats[1]; s.DirsRead > 11 || s.Statted > 170 || s.FilesRead > 3 {
		t.Errorf("the cost is %+v", s)
	}
}
