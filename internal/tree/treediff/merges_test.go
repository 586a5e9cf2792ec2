package treediff

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/testing/testfs"
)

// mergeCase is a merge in which one side has changed a file or its names, and the
// other what is at one of them. Both start from the file "p" with the content
// "base", from "pair", which is called "twin" too, from the symbolic link "s", and
// from a file in each of the directories "d" and "e".
type mergeCase struct {
	mine, theirs func(e *sideEdits)
	moves        bool // it takes a common origin to see what theirs has done
	how          ApplyOptions
	want         map[string]string // by path: the content; "->x" of a symlink, "" if nothing is there
	modes        map[string]os.FileMode
	linked       [2]string // two names of one file
	apart        [2]string // two files
}

// sideEdits makes the changes of one side.
type sideEdits struct {
	t   *testing.T
	dir string
}

func (e *sideEdits) at(path string) string { return filepath.Join(e.dir, path) }

func (e *sideEdits) must(errs ...error) {
	e.t.Helper()
	if err := errors.Join(errs...); err != nil {
		e.t.Fatal(err)
	}
}

func (e *sideEdits) write(path, text string) {
	e.t.Helper()
	e.must(os.WriteFile(e.at(path), []byte(text), 0o644))
}

func (e *sideEdits) replace(path, text string) {
	e.t.Helper()
	e.write(path+".new", text)
	e.must(os.Rename(e.at(path+".new"), e.at(path)))
}

func (e *sideEdits) link(old, path string)    { e.t.Helper(); e.must(os.Link(e.at(old), e.at(path))) }
func (e *sideEdits) move(old, path string)    { e.t.Helper(); e.must(os.Rename(e.at(old), e.at(path))) }
func (e *sideEdits) remove(path string)       { e.t.Helper(); e.must(os.Remove(e.at(path))) }
func (e *sideEdits) chmod(p string, m uint32) { e.t.Helper(); e.must(unix.Chmod(e.at(p), m)) }

// toSymlink puts a symbolic link where a file is.
func (e *sideEdits) toSymlink(path string) {
	e.t.Helper()
	e.remove(path)
	e.must(os.Symlink("x", e.at(path)))
}

func (e *sideEdits) show(path string) string {
	if to, err := os.Readlink(e.at(path)); err == nil {
		return "->" + to
	}
	b, err := os.ReadFile(e.at(path))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		e.t.Fatal(err)
	}
	return string(b)
}

var mergeCases = map[string]mergeCase{
	"new name, file changed": {
		mine:   func(e *sideEdits) { e.link("p", "q") },
		theirs: func(e *sideEdits) { e.write("p", "theirs"); e.chmod("p", 0o600) },
		want:   map[string]string{"p": "theirs", "q": "theirs"},
		modes:  map[string]os.FileMode{"p": 0o600},
		linked: [2]string{"p", "q"},
	},
	"new name, file became a symlink": {
		mine:   func(e *sideEdits) { e.link("p", "q") },
		theirs: func(e *sideEdits) { e.toSymlink("p") },
		want:   map[string]string{"p": "->x", "q": "base"},
	},
	"new name, file moved and another made": {
		mine:   func(e *sideEdits) { e.link("p", "q") },
		theirs: func(e *sideEdits) { e.move("p", "r"); e.write("p", "theirs") },
		moves:  true,
		want:   map[string]string{"p": "theirs", "q": "base", "r": "base"},
	},
	"new name, directory moved and another made": {
		mine:   func(e *sideEdits) { e.link("d/p", "q") },
		theirs: func(e *sideEdits) { e.move("d", "f"); e.move("e", "d") },
		moves:  true,
		want:   map[string]string{"d/p": "in e", "q": "in d", "f/p": "in d"},
	},
	"new names, file removed": {
		mine:   func(e *sideEdits) { e.link("p", "q"); e.link("p", "r") },
		theirs: func(e *sideEdits) { e.remove("p") },
		want:   map[string]string{"p": "", "q": "base", "r": "base"},
		linked: [2]string{"q", "r"},
	},
	"both moved it, new name": {
		mine:   func(e *sideEdits) { e.move("p", "m"); e.link("m", "q") },
		theirs: func(e *sideEdits) { e.move("p", "m") },
		want:   map[string]string{"p": "", "m": "base", "q": "base"},
	},
	"theirs: new name of a changed file that became a symlink": {
		mine:   func(e *sideEdits) { e.must(unix.Setxattr(e.at("p"), "user.1", []byte("x"), 0)); e.link("p", "q") },
		theirs: func(e *sideEdits) { e.toSymlink("p") },
		how:    ApplyOptions{Keep: true},
		want:   map[string]string{"p": "->x", "q": "base"},
	},
	"theirs: new name of a file changed on both sides": {
		mine:   func(e *sideEdits) { e.write("p", "mine"); e.link("p", "q"); e.link("p", "r") },
		theirs: func(e *sideEdits) { e.write("p", "theirs"); e.chmod("p", 0o600) },
		how:    ApplyOptions{Keep: true},
		want:   map[string]string{"p": "theirs", "q": "mine", "r": "mine"},
		modes:  map[string]os.FileMode{"p": 0o600, "q": 0o644},
		linked: [2]string{"q", "r"},
		apart:  [2]string{"p", "q"},
	},
	"theirs: two names changed, one removed": {
		mine:   func(e *sideEdits) { e.write("pair", "mine") },
		theirs: func(e *sideEdits) { e.remove("pair") },
		how:    ApplyOptions{Keep: true},
		want:   map[string]string{"pair": "", "twin": "mine"},
	},
	"ours: new name of a changed file that became a symlink": {
		mine:   func(e *sideEdits) { e.write("p", "mine"); e.link("p", "q") },
		theirs: func(e *sideEdits) { e.toSymlink("p") },
		how:    ApplyOptions{Force: true},
		want:   map[string]string{"p": "mine", "q": "mine"},
		linked: [2]string{"p", "q"},
	},
	"ours: new name of a file in a moved directory, where another is": {
		mine:   func(e *sideEdits) { e.move("d", "m"); e.link("m/p", "q") },
		theirs: func(e *sideEdits) { e.move("d/p", "r"); e.write("d/p", "theirs") },
		how:    ApplyOptions{Force: true},
		moves:  true,
		want:   map[string]string{"m/p": "theirs", "q": "in d"}, // the directory takes it along
	},
	"ours: one changed the mode, one the content": {
		mine:   func(e *sideEdits) { e.chmod("p", 0o640) },
		theirs: func(e *sideEdits) { e.write("p", "theirs") },
		how:    ApplyOptions{Force: true},
		want:   map[string]string{"p": "base"},
		modes:  map[string]os.FileMode{"p": 0o640},
	},
	"ours: one changed the content, one the mode": {
		mine:   func(e *sideEdits) { e.write("p", "mine") },
		theirs: func(e *sideEdits) { e.chmod("p", 0o600) },
		how:    ApplyOptions{Force: true},
		want:   map[string]string{"p": "mine"},
		modes:  map[string]os.FileMode{"p": 0o644},
	},
	"ours: one moved it, one changed it": {
		mine:   func(e *sideEdits) { e.move("p", "q") },
		theirs: func(e *sideEdits) { e.write("p", "theirs"); e.chmod("p", 0o600) },
		how:    ApplyOptions{Force: true},
		want:   map[string]string{"p": "", "q": "base"},
		modes:  map[string]os.FileMode{"q": 0o644},
	},
	"ours: one changed the owner of a symlink, one its target": {
		mine:   func(e *sideEdits) { e.must(os.Lchown(e.at("s"), 1000, 1000)) },
		theirs: func(e *sideEdits) { e.toSymlink("s") },
		how:    ApplyOptions{Force: true},
		want:   map[string]string{"s": "->base"},
	},
	"ours: one name moved, file changed": {
		mine:   func(e *sideEdits) { e.move("twin", "q") },
		theirs: func(e *sideEdits) { e.write("pair", "theirs"); e.chmod("pair", 0o600) },
		how:    ApplyOptions{Force: true},
		moves:  true,
		want:   map[string]string{"pair": "theirs", "q": "theirs", "twin": ""},
		modes:  map[string]os.FileMode{"q": 0o600},
	},
	"ours: two names changed, one removed": {
		mine:   func(e *sideEdits) { e.write("pair", "mine") },
		theirs: func(e *sideEdits) { e.remove("pair") },
		how:    ApplyOptions{Force: true},
		want:   map[string]string{"pair": "mine", "twin": "mine"},
	},
	"ours: two names changed, one replaced": {
		mine:   func(e *sideEdits) { e.write("pair", "mine") },
		theirs: func(e *sideEdits) { e.replace("pair", "theirs") },
		how:    ApplyOptions{Force: true},
		want:   map[string]string{"pair": "mine", "twin": "mine"},
	},
}

// TestMerges: what becomes of one file. A change says of a name that it is one of
// another file's, but on the other side that may be something else.
func TestMerges(t *testing.T) {
	worlds := map[string]world{
		"copies":    copies(t, testfs.New(t, "xfs", 400<<20).Dir()),
		"snapshots": snapshots(t),
	}
	for kind, w := range worlds {
		base := w.empty()
		e := &sideEdits{t, base}
		e.must(os.Mkdir(e.at("d"), 0o755), os.Mkdir(e.at("e"), 0o755))
		e.must(os.Symlink("base", e.at("s")))
		e.write("p", "base")
		e.write("pair", "base")
		e.link("pair", "twin")
		e.write("d/p", "in d")
		e.write("e/p", "in e")
		w.settle(base)
		nextTick()
		for name, c := range mergeCases {
			if w.sameOrigin || !c.moves {
				t.Run(kind+"/"+name, func(t *testing.T) { c.run(t, w, base) })
			}
		}
	}
}

func (c mergeCase) run(t *testing.T, w world, base string) {
	mine, theirs := &sideEdits{t, w.copy(base)}, &sideEdits{t, w.copy(base)}
	c.mine(mine)
	c.theirs(theirs)
	w.settle(mine.dir)
	w.settle(theirs.dir)

	onto := &sideEdits{t, w.copy(theirs.dir)}
	m := merge(t, w, base, mine.dir, theirs.dir, onto.dir, func(m *Merge) ([]Change, ApplyOptions) {
		if c.how.Keep {
			return m.Clean(), c.how
		}
		return m.Changes, c.how
	})
	if want := c.how.Keep || c.how.Force; (len(m.Conflicts) > 0) != want {
		t.Errorf("the conflicts are %+v", m.Conflicts)
	}

	for path, want := range c.want {
		if got := onto.show(path); got != want {
			t.Errorf("%s is %q, not %q", path, got, want)
		}
	}
	for path, want := range c.modes {
		if st, err := os.Lstat(onto.at(path)); err != nil || st.Mode() != want {
			t.Errorf("%s is %v, %v, not of mode %v", path, st, err, want)
		}
	}
	if c.linked[0] != "" && !onto.oneFile(c.linked) {
		t.Errorf("%q are not one file", c.linked)
	}
	if c.apart[0] != "" && onto.oneFile(c.apart) {
		t.Errorf("%q are one file", c.apart)
	}
}

func (e *sideEdits) oneFile(paths [2]string) bool {
	a, errA := os.Lstat(e.at(paths[0]))
	b, errB := os.Lstat(e.at(paths[1]))
	e.must(errA, errB)
	return os.SameFile(a, b)
}

// TestApplyToOtherTypes: a changed file is something else in the tree that is changed.
// That is a conflict, and with Keep it stays. It is not opened: a device may do
// something when it is.
func TestApplyToOtherTypes(t *testing.T) {
	w := copies(t, t.TempDir())
	base, mine := &sideEdits{t, w.empty()}, &sideEdits{t, w.empty()}
	base.write("f", "base")
	mine.write("f", "mine")
	mine.chmod("f", 0o6755)
	changes := compareTrees(t, base.dir, mine.dir, Options{}).Changes

	for name, make := range map[string]func(path string) error{
		"symlink":   func(p string) error { return os.Symlink("x", p) },
		"directory": func(p string) error { return os.Mkdir(p, 0o700) },
		"fifo":      func(p string) error { return unix.Mkfifo(p, 0o600) },
		"socket":    func(p string) error { return unix.Mknod(p, unix.S_IFSOCK|0o600, 0) },
		"device":    func(p string) error { return unix.Mknod(p, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))) },
		"no driver": func(p string) error { return unix.Mknod(p, unix.S_IFBLK|0o600, int(unix.Mkdev(261, 9))) },
	} {
		t.Run(name, func(t *testing.T) {
			e := &sideEdits{t, w.empty()}
			e.must(make(e.at("f")))
			before, err := os.Lstat(e.at("f"))
			e.must(err)

			applyTo(t, changes, mine.dir, e.dir, ApplyOptions{Keep: true})
			after, err := os.Lstat(e.at("f"))
			e.must(err)
			if before.Mode() != after.Mode() || before.Size() != after.Size() {
				t.Errorf("it is %v now, and was %v", after.Mode(), before.Mode())
			}

			err = Apply(t.Context(), changes, openDir(t, mine.dir), openDir(t, e.dir), ApplyOptions{})
			if !errs.Is(err, errs.Conflict) {
				t.Errorf("it is no conflict, but %v", err)
			}
			e.must(os.Remove(e.at(stageName)))

			applyTo(t, changes, mine.dir, e.dir, ApplyOptions{Force: true})
			if got := e.show("f"); got != "mine" {
				t.Errorf("with Force it is %q", got)
			}
		})
	}
}
