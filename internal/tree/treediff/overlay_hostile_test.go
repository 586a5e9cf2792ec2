package treediff

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/testing/treetest"
)

// listsHidden are the changes of an overlay with a directory that lists a file which overlayfs hides.
const listsHidden = "added n"

// strangeUppers are upper layers that overlayfs does not make, for the lower layer of fillForOverlay. The functions get
// the root of the upper layer. Where want is the kind of an error, overlayfs does not show everything; where it is
// "either", that depends on the kernel.
var strangeUppers = []struct {
	name string
	make func(e *sideEdits)
	want string
}{
	{"redirect to above", func(e *sideEdits) { e.redirect("d", "../secret") }, "damaged"},
	{"redirect to above root", func(e *sideEdits) { e.redirect("d", "/../secret") }, "damaged"},
	{"redirect to above in between", func(e *sideEdits) { e.redirect("d", "/e/../../secret") }, "damaged"},
	{"redirect to itself", func(e *sideEdits) { e.redirect("d", "d") }, ""},
	{"redirect to its own parent", func(e *sideEdits) { e.redirect("d", "."); e.redirect("d/s", "/d") }, "damaged"},
	{"redirect to root", func(e *sideEdits) { e.redirect("d", "/") }, "damaged"},
	{"empty redirect", func(e *sideEdits) { e.redirect("d", "") }, "damaged"},
	{"redirects in a circle", func(e *sideEdits) { e.redirect("d", "/d/s"); e.redirect("d/s", "/d") }, "either"},
	{"redirect to nowhere", func(e *sideEdits) { e.redirect("d", "/nowhere") },
		"deleted d/f, deleted d/k, deleted d/s, deleted d/s/g"},
	{"redirect to a file", func(e *sideEdits) { e.redirect("d", "/e/f") },
		"deleted d/f, deleted d/k, deleted d/s, deleted d/s/g"},
	{"redirect to a symbolic link", func(e *sideEdits) { e.redirect("d", "/sym") },
		"deleted d/f, deleted d/k, deleted d/s, deleted d/s/g"},
	{"long redirect", func(e *sideEdits) { e.redirect("d", "/"+strings.Repeat("x", 300)) },
		"deleted d/f, deleted d/k, deleted d/s, deleted d/s/g"},
	{"very long redirect", func(e *sideEdits) { e.redirect("d", strings.Repeat("/xxxxxxxxx", 3000)) }, "either"},
	{"two redirects to one directory", func(e *sideEdits) { e.redirect("d", "/e"); e.redirect("x", "/e") }, "either"},
	{"two redirects to a directory that is gone", func(e *sideEdits) {
		e.mknod("e", unix.S_IFCHR, 0)
		e.redirect("x", "/e")
		e.redirect("y", "/e")
	}, "either"}, // overlayfs refuses the second
	{"redirect of the root", func(e *sideEdits) { e.redirect("", "/e") }, ""},
	{"opaque root", func(e *sideEdits) { e.mark("", "opaque", "y") }, ""},
	{"opaque, but how", func(e *sideEdits) { e.mkdir("d"); e.mark("d", "opaque", "garbage") }, ""},
	{"opaque and empty", func(e *sideEdits) { e.mkdir("d"); e.mark("d", "opaque", "") }, ""},
	{"metacopy", func(e *sideEdits) {
		e.mkdir("d")
		e.write("d/f", "")
		e.mark("d/f", "metacopy", "")
		e.mark("d/f", "redirect", "/../secret/file")
	}, "damaged"},
	{"origin of another", func(e *sideEdits) { e.mkdir("d"); e.mark("d", "origin", "garbage") }, "either"},
	{"whiteout of nothing", func(e *sideEdits) { e.mknod("nothing", unix.S_IFCHR, 0) }, ""},
	{"whiteout in a new directory", func(e *sideEdits) { e.mkdir("n"); e.mknod("n/x", unix.S_IFCHR, 0) }, listsHidden},
	{"whiteouts of everything", func(e *sideEdits) {
		for _, name := range []string{"d", "e", "h", "file", "k", "large", "sparse", "sym", "dev"} {
			e.mknod(name, unix.S_IFCHR, 0)
		}
	}, "deleted d, deleted d/f, deleted d/k, deleted d/s, deleted d/s/g, deleted dev, deleted e, deleted e/f, " +
		"deleted file, deleted h, deleted h/1, deleted h/2, deleted h/3, deleted k, deleted large, deleted sparse, " +
		"deleted sym"},
	{"whiteout by attribute in a directory that has none", func(e *sideEdits) {
		e.mkdir("e")
		e.write("e/f", "")
		e.mark("e/f", "whiteout", "")
	}, "either"},
	{"long names", func(e *sideEdits) {
		name := strings.Repeat("n", 255)
		e.mkdir(name)
		e.write(name+"/"+name, "")
	}, "added " + strings.Repeat("n", 255) + ", added " + strings.Repeat("n", 255) + "/" + strings.Repeat("n", 255)},
	{"links to a whiteout", func(e *sideEdits) {
		e.mknod("file", unix.S_IFCHR, 0)
		e.link("file", "large")
		e.link("file", "new")
	}, "deleted file, deleted large"},
}

func (e *sideEdits) mkdir(path string) { e.t.Helper(); e.must(os.MkdirAll(e.at(path), 0o755)) }

func (e *sideEdits) mark(path, name, value string) {
	e.t.Helper()
	e.must(unix.Lsetxattr(e.at(path), "trusted.overlay."+name, []byte(value), 0))
}

func (e *sideEdits) redirect(path, to string) {
	e.t.Helper()
	e.mkdir(path)
	e.mark(path, "redirect", to)
}

// TestOverlayStrangeUppers: an upper layer need not be what overlayfs wrote. What counts is what the overlay shows.
func TestOverlayStrangeUppers(t *testing.T) {
	l := newLayers(t, "xfs on tmpfs")
	lower := l.lower.empty()
	fillForOverlay(t, lower)
	for _, dir := range []string{lower, l.upperIn} {
		secret := &sideEdits{t, filepath.Join(filepath.Dir(lower), "secret")}
		if dir == l.upperIn {
			secret.dir = filepath.Join(dir, "secret")
		}
		secret.mkdir("")
		secret.write("file", "not to be seen")
	}

	for _, c := range strangeUppers {
		t.Run(c.name, func(t *testing.T) {
			o := l.overlay(t, lower)
			o.unmount()
			c.make(&sideEdits{t, o.upper})
			if err := o.tryMount(); err != nil {
				t.Logf("overlayfs refuses it: %v", err)
				return
			}

			o.finds(c.want)
		})
	}
}

// finds compares the overlay. want describes the changes; see strangeUppers.
func (o *overlay) finds(want string) {
	o.t.Helper()
	got, err := o.compare(Options{})
	words := summary(got.Changes)
	if err != nil {
		words = string(errs.KindOf(err))
	}
	if words != want && want != "either" {
		o.t.Errorf("the changes are %q, not %q", words, want)
	}

	// Compare misses files that overlayfs cannot show, because it does not list them. It fails if it lists them.
	if err == nil && want != listsHidden {
		places, err := o.compare(Options{placesOnly: true})
		o.must(err)
		o.applies()
		o.sameChanges(compareTrees(o.t, o.lower, o.dir, Options{}).Changes, places.Changes)
	}
}

// TestOverlayAttributeWhiteouts: a whiteout may be a file with an attribute, which not all calls hide.
func TestOverlayAttributeWhiteouts(t *testing.T) {
	l := newLayers(t, "tmpfs")
	lower := l.lower.empty()
	fillForOverlay(t, lower)
	o := l.overlay(t, lower)
	o.unmount()
	e := &sideEdits{t, o.upper}
	e.mkdir("d")
	e.write("d/f", "")
	e.mark("d/f", "whiteout", "")
	e.mark("d", "opaque", "x")
	o.mount()

	r, err := o.compare(Options{})
	o.must(err)
	want := "deleted d/f"
	if _, err := os.Lstat(o.at("d/f")); err == nil {
		want = "modified d/f +content" // before Linux 6.7
	}
	if got := summary(r.Changes); got != want {
		t.Errorf("the changes are %s", got)
	}
}

// TestOverlayOnOverlayFiles: what overlayfs hides in lower is not a change, and not looked for.
func TestOverlayOnOverlayFiles(t *testing.T) {
	l := newLayers(t, "tmpfs")
	lower := l.lower.empty()
	fillForOverlay(t, lower)
	e := &sideEdits{t, lower}
	e.mknod("d/s/whiteout", unix.S_IFCHR, 0)
	e.mark("e", "opaque", "y")
	o := l.overlay(t, lower)
	o.write("h/new", "new")
	r, err := o.compare(Options{})
	o.must(err)
	if got := summary(r.Changes); got != "added h/new" {
		t.Errorf("the changes are %s", got)
	}
}

// TestOverlayFlags: flags and projects are those that the overlay shows, also of files that were copied up.
func TestOverlayFlags(t *testing.T) {
	l := newLayers(t, "ext4 on ext4")
	lower := l.lower.empty()
	fillForOverlay(t, lower)
	e := &sideEdits{t, lower}
	for path, flags := range map[string]uint32{"file": treetest.NoAtime, "d/f": treetest.NoDump, "e": treetest.NoDump} {
		e.must(treetest.SetFlags(e.at(path), flags))
	}
	treetest.BuildFlags(t, lower, treetest.Immutable|treetest.Append|treetest.NoDump|treetest.NoAtime|treetest.Sync, false)
	nextTick()

	o := l.overlay(t, lower)
	treetest.Removable(t, o.dir)
	o.open("file")
	o.open("d/f")
	o.chmod("e", 0o755)
	o.must(treetest.SetFlags(o.at("large"), treetest.Immutable),
		treetest.SetFlags(o.at("flags/log"), treetest.Append|treetest.Sync))
	o.check()
	o.remount()
	o.check()
}
