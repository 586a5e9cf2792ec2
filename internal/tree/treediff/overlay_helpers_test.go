package treediff

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"pando/internal/linux/treewalk"
	"pando/internal/testing/testfs"
	"pando/internal/testing/treetest"
	"pando/internal/tree/treecopy"
)

// overlayOptions are those of the overlays that CompareOverlay is for.
const overlayOptions = "index=off,metacopy=off,redirect_dir=on,xino=on"

// layers are where overlays are made: lower layers on one filesystem, upper layers on another or the same.
type layers struct {
	lower   world
	upperIn string
	n       int
}

// layerKinds are the pairs of filesystems on which the tests run. An empty upper is that of lower.
var layerKinds = map[string]struct{ lower, upper string }{
	"tmpfs":         {"tmpfs", ""},
	"ext4 on ext4":  {"ext4", "ext4"},
	"ext4":          {"ext4", ""},
	"xfs on tmpfs":  {"xfs", "tmpfs"},
	"btrfs on ext4": {"btrfs", "ext4"},
}

func newLayers(t *testing.T, kind string) *layers {
	t.Helper()
	k := layerKinds[kind]
	dir := testfs.New(t, k.lower, 600<<20).Dir()
	l := &layers{lower: copies(t, dir), upperIn: dir}
	if k.upper != "" {
		l.upperIn = testfs.New(t, k.upper, 600<<20).Dir()
	}
	return l
}

// overlay is one overlay. It is a tree to be edited: sideEdits works on merged.
type overlay struct {
	sideEdits
	in                  *layers
	lower, upper, work_ string
}

// overlay makes an overlay on lower, and unmounts it at the end of the test.
func (l *layers) overlay(t *testing.T, lower string) *overlay {
	t.Helper()
	l.n++
	top := filepath.Join(l.upperIn, fmt.Sprint("overlay", l.n))
	o := &overlay{sideEdits{t, filepath.Join(top, "merged")}, l, lower, filepath.Join(top, "upper"), filepath.Join(top,
		"work")}
	for _, dir := range []string{top, o.upper, o.work_, o.dir} {
		o.must(os.Mkdir(dir, 0o755))
	}

	// The root of the overlay has the attributes of upper.
	src, dst := openDir(t, lower), openDir(t, o.upper)
	o.must(treecopy.CopyAttributes(t.Context(), src, "", dst, ""), src.Close(), dst.Close())

	o.mount()
	t.Cleanup(o.unmount)
	return o
}

func (o *overlay) mount() { o.t.Helper(); o.must(o.tryMount()) }

func (o *overlay) tryMount() error {
	return unix.Mount("overlay", o.dir, "overlay", 0,
		"lowerdir="+o.lower+",upperdir="+o.upper+",workdir="+o.work_+","+overlayOptions)
}

// unmount unmounts it, unless that has been done.
func (o *overlay) unmount() {
	o.t.Helper()
	if err := unix.Unmount(o.dir, 0); err != nil && err != unix.EINVAL {
		o.t.Error(err)
	}
}

// remount forgets what the kernel knows of the layers.
func (o *overlay) remount() { o.t.Helper(); o.unmount(); o.mount() }

func (o *overlay) compare(opts Options) (Result, error) {
	lower, upper, merged := openDir(o.t, o.lower), openDir(o.t, o.upper), openDir(o.t, o.dir)
	defer lower.Close()
	defer upper.Close()
	defer merged.Close()
	return CompareOverlay(o.t.Context(), lower, upper, merged, opts)
}

// check compares the overlay in both ways, which must find the same but for moved directories, and applies the changes.
func (o *overlay) check() Result {
	o.t.Helper()
	for _, opts := range []Options{{}, {Times: true}} {
		opts.placesOnly = true
		got, err := o.compare(opts)
		if err != nil {
			o.t.Fatal(err)
		}
		want := compareTrees(o.t, o.lower, o.dir, opts)
		o.sameChanges(want.Changes, got.Changes)
	}

	return o.applies()
}

// applies compares the overlay, and applies the changes to a copy of lower, which must make it what the overlay is.
func (o *overlay) applies() Result {
	o.t.Helper()
	got, err := o.compare(Options{Times: true})
	if err != nil {
		o.t.Fatal(err)
	}
	if got.Stats.Method != "overlay" {
		o.t.Errorf("the method is %q", got.Stats.Method)
	}

	onto := o.in.lower.copy(o.lower)
	applyTo(o.t, got.Changes, o.dir, onto, ApplyOptions{})
	if !mustEqual(o.t, o.dir, onto) {
		for _, ch := range got.Changes {
			o.t.Logf("%+v", ch)
		}
	}
	o.must(treewalk.Remove(o.t.Context(), onto)) // also immutable files
	return got
}

func (o *overlay) sameChanges(want, got []Change) {
	o.t.Helper()
	want, got = withoutSpareLinks(want), withoutSpareLinks(got)
	if len(want) == 0 && len(got) == 0 || reflect.DeepEqual(want, got) {
		return
	}

	for i := 0; i < len(want) || i < len(got); i++ {
		w, g := "nothing", "nothing"
		if i < len(want) {
			w = fmt.Sprintf("%+v", want[i])
		}
		if i < len(got) {
			g = fmt.Sprintf("%+v", got[i])
		}
		if w != g {
			o.t.Fatalf("of %d and %d changes, number %d is\n%s, but CompareOverlay says\n%s", len(want), len(got), i, w, g)
		}
	}
}

// withoutSpareLinks leaves Link out of changes of a name only: CompareOverlay does not look for names that stayed.
func withoutSpareLinks(changes []Change) []Change {
	out := append([]Change(nil), changes...)
	for i := range out {
		if ch := &out[i]; ch.Op == Renamed && !ch.Content && !ch.Metadata && !ch.Times {
			ch.Link = ""
		}
	}
	return out
}

// summary describes changes in a few words.
func summary(changes []Change) string {
	var words []string
	for _, ch := range changes {
		s := string(ch.Op) + " " + ch.Path
		if ch.From != "" {
			s = string(ch.Op) + " " + ch.From + " to " + ch.Path
		}
		if before, ok := ch.Replaces(); ok {
			s += " which was another " + string(before)
		}
		if ch.Link != "" {
			s += " as " + ch.Link
		}
		if ch.Op == Modified {
			for what, has := range map[string]bool{" +content": ch.Content, " +metadata": ch.Metadata} {
				if has && !strings.Contains(s, "another") {
					s += what
				}
			}
		}
		words = append(words, s)
	}
	return strings.Join(words, ", ")
}

// overlayEditor makes random changes to an overlay, mostly such that overlayfs has to do more than write a file.
type overlayEditor struct {
	*overlay
	r *rand.Rand
	e *treetest.Editor
}

func newOverlayEditor(o *overlay, r *rand.Rand) *overlayEditor {
	return &overlayEditor{o, r, &treetest.Editor{T: o.t, R: r, Dir: o.dir}}
}

// pick returns a random path, "" if there is none. dir says whether it is a directory.
func (e *overlayEditor) pick(dir bool) string {
	var all []string
	e.must(filepath.WalkDir(e.dir, func(p string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() == dir && p != e.dir && d.Name() != "lost+found" {
			all = append(all, p)
		}
		return err
	}))
	if len(all) == 0 {
		return e.at("new") // which does not exist
	}
	return all[e.r.IntN(len(all))]
}

// name returns a name in a random directory, which may be taken.
func (e *overlayEditor) name() string {
	dir := e.pick(true)
	if e.r.IntN(4) == 0 {
		dir = e.dir
	}
	return filepath.Join(dir, fmt.Sprintf("m%d", e.r.IntN(20)))
}

func (e *overlayEditor) swap(x, y string) {
	_ = unix.Renameat2(unix.AT_FDCWD, x, unix.AT_FDCWD, y, unix.RENAME_EXCHANGE)
}

// edit makes one change, if what it has chosen can be done.
func (e *overlayEditor) edit() {
	file, dir := e.pick(false), e.pick(true)
	switch e.r.IntN(24) {
	case 0, 1, 2, 3:
		_ = os.Rename(dir, e.name())
	case 4:
		_ = unix.Rename(dir, e.pick(true)) // succeeds if that is empty
	case 5: // there and back
		if os.Rename(dir, e.at("there")) == nil {
			e.must(os.Rename(e.at("there"), dir))
		}
	case 6:
		e.swap(dir, e.pick(true))
	case 7:
		e.swap(file, e.pick(e.r.IntN(2) == 0))
	case 8: // gone and made again
		e.must(os.RemoveAll(dir))
		_ = os.Mkdir(dir, 0o755)
		_ = os.WriteFile(filepath.Join(dir, "a"), []byte("again"), 0o600)
	case 9:
		e.must(os.RemoveAll(dir))
		_ = os.WriteFile(dir, []byte("was a directory"), 0o600)
	case 10: // copied up, but unchanged
		if st, err := os.Lstat(file); err == nil && st.Mode().IsRegular() {
			f, err := os.OpenFile(file, os.O_RDWR, 0)
			e.must(err, f.Close())
		}
	case 11:
		var st unix.Stat_t
		if unix.Lstat(dir, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
			e.must(unix.Chmod(dir, st.Mode&0o7777))
		}
	case 12:
		e.setACL(dir, file)
	case 13, 14:
		_ = os.Link(file, e.name())
	case 15, 16:
		_ = os.Rename(file, e.name())
	case 17: // the same bytes in another file
		if st, err := os.Lstat(file); err == nil && st.Mode().IsRegular() && st.Size() < 1<<20 {
			b, err := os.ReadFile(file)
			e.must(err, os.Remove(file), os.WriteFile(file, b, 0o644))
		}
	case 18:
		e.must(unix.Lsetxattr(e.existing(dir), "trusted.mine", []byte{byte(e.r.IntN(3))}, 0))
	case 19:
		_ = unix.Lremovexattr(e.existing(dir), "trusted.mine")
	default:
		e.e.Edit()
	}
}

func (e *overlayEditor) existing(path string) string {
	if _, err := os.Lstat(path); err != nil {
		return e.dir
	}
	return path
}

func (e *overlayEditor) setACL(paths ...string) {
	for _, p := range paths {
		const none = 0xffffffff
		acl := treetest.ACL([3]uint32{1, 7, none}, [3]uint32{2, uint32(e.r.IntN(8)), 1000}, [3]uint32{4, 4, none},
			[3]uint32{16, 7, none}, [3]uint32{32, 0, none})
		name := []string{"system.posix_acl_access", "system.posix_acl_default"}[e.r.IntN(2)]
		if st, err := os.Lstat(p); err == nil && st.Mode()&os.ModeSymlink == 0 {
			_ = unix.Setxattr(p, name, []byte(acl), 0) // files have no default
		}
	}
}
