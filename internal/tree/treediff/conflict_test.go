package treediff

import (
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"pando/internal/testing/testfs"
	"pando/internal/testing/treetest"
)

// merge is what a rebase does: base -> mine and base -> theirs, put together on a
// copy of theirs.
func merge(t *testing.T, w world, base, mine, theirs, onto string, pick func(*Merge) ([]Change, ApplyOptions)) *Merge {
	t.Helper()
	o := Options{SameOrigin: w.sameOrigin, Times: true}
	own := compareTrees(t, base, mine, o).Changes
	other := compareTrees(t, base, theirs, o).Changes
	fm, err := os.Open(mine)
	if err != nil {
		t.Fatal(err)
	}
	defer fm.Close()
	ft, err := os.Open(theirs)
	if err != nil {
		t.Fatal(err)
	}
	defer ft.Close()
	m, err := Conflicts(t.Context(), own, other, fm, ft)
	if err != nil {
		t.Fatal(err)
	}
	changes, how := pick(m)
	if changes != nil {
		applyTo(t, changes, mine, onto, how)
	}
	return m
}

// fingerprint leaves out what a merge does not promise. It adds to links the
// paths of hard links: a change under one name is one under the others, also
// under those that only the other side has made.
func fingerprint(t *testing.T, dir string, links map[string]bool) map[string]treetest.Entry {
	t.Helper()
	f, err := treetest.Fingerprint(dir)
	if err != nil {
		t.Fatal(err)
	}
	for p, e := range f {
		if e.Link != "" {
			links[p] = true
		}
		e.Atime, e.Mtime, e.Link, e.Data = unix.Timespec{}, unix.Timespec{}, "", ""
		f[p] = e
	}
	return f
}

func equalAt(x, y map[string]treetest.Entry, p string) bool {
	a, inA := x[p]
	b, inB := y[p]
	return inA == inB && len(treetest.Diff(map[string]treetest.Entry{p: a}, map[string]treetest.Entry{p: b}, 0)) == 0
}

// inRenamed reports whether a path is in a directory that mine has renamed: that
// takes along what theirs has changed in it.
func inRenamed(m *Merge, path string) bool {
	return slices.ContainsFunc(m.Changes, func(ch Change) bool {
		return ch.Op == Renamed && ch.Type == Dir && below(path, ch.Path)
	})
}

// TestRandomMerges: without conflicts, each path is what the side that changed it
// has made of it. With conflicts, each choice can be carried out. Theirs is what
// the other side has, also where mine has changed nothing; with ours, all that mine
// has changed is mine.
func TestRandomMerges(t *testing.T) {
	clean, withConflicts := 0, 0
	run := func(t *testing.T, w world) {
		rounds(t, 25, func(t *testing.T, r *rand.Rand, _ int) {
			base := w.empty()
			e := &treetest.Editor{T: t, R: r, Dir: base}
			e.Fill()
			w.settle(base)
			nextTick()
			mine, theirs := w.copy(base), w.copy(base)
			edits := []int{2, 4, 8, 30}[r.IntN(4)]
			for _, dir := range []string{mine, theirs} {
				e.Dir = dir
				for range edits {
					e.Edit()
				}
				w.settle(dir)
			}
			links := map[string]bool{}
			fb, fm, ft := fingerprint(t, base, links), fingerprint(t, mine, links), fingerprint(t, theirs, links)
			all := maps.Clone(fb)
			maps.Copy(all, fm)
			maps.Copy(all, ft)
			onto := w.copy(theirs)
			m := merge(t, w, base, mine, theirs, onto, func(m *Merge) ([]Change, ApplyOptions) {
				if len(m.Conflicts) > 0 {
					return nil, ApplyOptions{}
				}
				return m.Changes, ApplyOptions{}
			})
			if len(m.Conflicts) == 0 {
				clean++
				got := fingerprint(t, onto, links)
				for p := range all {
					want, who := fb, "nobody"
					if !equalAt(fb, fm, p) {
						want, who = fm, "mine"
					} else if !equalAt(fb, ft, p) {
						want, who = ft, "theirs"
					}
					if !equalAt(got, want, p) && !links[p] {
						t.Errorf("%q was changed by %s, but is %+v, not %+v", p, who, got[p], want[p])
					}
				}
				return
			}
			withConflicts++
			// Nothing that both have changed differently may go unnoticed.
			paths := map[string]bool{}
			for _, c := range m.Conflicts {
				paths[c.Path] = true
			}
			merge(t, w, base, mine, theirs, onto, func(m *Merge) ([]Change, ApplyOptions) {
				return append([]Change{}, m.Clean()...), ApplyOptions{Keep: true}
			})
			got := fingerprint(t, onto, links)
			moved := map[string]string{} // directories by mine, with what theirs has in them
			for _, ch := range m.Clean() {
				if ch.Op == Renamed && ch.Type == Dir {
					moved[ch.From] = ch.Path
				}
			}
			for p := range paths {
				at := got
				if now := movedTo(moved, p); now != p {
					at = map[string]treetest.Entry{}
					if e, ok := got[now]; ok {
						at[p] = e
					}
				}
				if !equalAt(at, ft, p) && p != "." && !links[p] {
					t.Errorf("with theirs %q is %+v, not %+v", p, at[p], ft[p])
				}
			}
			for p := range all {
				if equalAt(fb, fm, p) && !equalAt(got, ft, p) && !links[p] {
					t.Errorf("with theirs %q, which mine has not changed, is %+v, not %+v", p, got[p], ft[p])
				}
			}
			ours := w.copy(theirs)
			m = merge(t, w, base, mine, theirs, ours, func(m *Merge) ([]Change, ApplyOptions) {
				return append([]Change{}, m.Changes...), ApplyOptions{Force: true}
			})
			got = fingerprint(t, ours, links)
			for p := range all {
				if !equalAt(fb, fm, p) && !equalAt(got, fm, p) && !links[p] && !inRenamed(m, p) {
					t.Errorf("with ours %q is %+v, not %+v", p, got[p], fm[p])
				}
			}
			if t.Failed() {
				for _, c := range m.Conflicts {
					t.Logf("%+v", c)
				}
			}
		})
	}
	t.Run("copies", func(t *testing.T) { run(t, copies(t, testfs.New(t, "xfs", 400<<20).Dir())) })
	t.Run("snapshots", func(t *testing.T) { run(t, snapshots(t)) })
	if clean == 0 || withConflicts == 0 {
		t.Errorf("%d merges without conflicts and %d with: not both were tried", clean, withConflicts)
	}
}

// TestConflicts: the kinds of conflicts, and what is none.
func TestConflicts(t *testing.T) {
	dir := Change{Op: Deleted, Path: "d", Type: Dir}
	in := Change{Op: Deleted, Path: "d/f", Type: File}
	mod := Change{Op: Modified, Path: "d/f", Type: File, Content: true}
	add := Change{Op: Added, Path: "d/new", Type: File, Content: true}
	times := Change{Op: Modified, Path: "d", Type: Dir, Times: true}
	top := t.TempDir()
	for side, text := range map[string]string{"mine": "1", "theirs": "2"} {
		if err := os.MkdirAll(top+"/"+side+"/d", 0o755); err != nil {
			t.Fatal(err)
		}
		for f, c := range map[string]string{"f": text, "new": text, "same": "same"} {
			if err := os.WriteFile(top+"/"+side+"/d/"+f, []byte(c), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	mv := func(from, to string, ty Type) Change { return Change{Op: Renamed, From: from, Path: to, Type: ty} }
	same := Change{Op: Added, Path: "d/same", Type: File, Content: true}
	for name, c := range map[string]struct {
		mine, theirs []Change
		want         []string
	}{
		"nothing in common":           {[]Change{mod}, []Change{add}, nil},
		"both deleted":                {[]Change{dir, in}, []Change{dir, in}, nil},
		"the same added":              {[]Change{same}, []Change{same}, nil},
		"times":                       {[]Change{times}, []Change{times, add}, nil},
		"add and add":                 {[]Change{add}, []Change{add}, []string{"d/new"}},
		"modify and modify":           {[]Change{mod}, []Change{mod}, []string{"d/f"}},
		"modify and delete":           {[]Change{mod}, []Change{in}, []string{"d/f"}},
		"delete and modify":           {[]Change{in}, []Change{mod}, []string{"d/f"}},
		"directory deleted, file new": {[]Change{dir, in}, []Change{add}, []string{"d/new"}},
		"file new, directory deleted": {[]Change{add}, []Change{dir, in}, []string{"d/new"}},
		"directory moved, file new":   {[]Change{mv("d", "e", Dir)}, []Change{add}, []string{"d/new"}},
		"file new, directory moved":   {[]Change{add}, []Change{mv("d", "e", Dir)}, []string{"d/new"}},
		"moved and made again": {[]Change{mod}, []Change{mv("d", "e", Dir), {Op: Added, Path: "d", Type: Dir}},
			[]string{"d/f"}},
		"renamed twice": {[]Change{mv("x", "y", File)}, []Change{mv("x", "z", File)}, []string{"x"}},
		"renamed and deleted": {[]Change{mv("x", "y", File)}, []Change{{Op: Deleted, Path: "x", Type: File}},
			[]string{"x"}},
		"file and directory": {[]Change{{Op: Modified, Path: "d", Type: File, TypeBefore: Dir, Content: true}},
			[]Change{mod}, []string{"d/f"}},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := Conflicts(t.Context(), c.mine, c.theirs, openDir(t, top+"/mine"), openDir(t, top+"/theirs"))
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, x := range m.Conflicts {
				got = append(got, x.Path)
				if x.Mine == "" || x.Theirs == "" {
					t.Errorf("nothing is said of %q", x.Path)
				}
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("conflicts %q, wanted %q", got, c.want)
			}
		})
	}
}

// TestCleanKeepsDirectories: a directory of which something stays is in the way of what
// was to take its name, and what was to take that one's.
func TestCleanKeepsDirectories(t *testing.T) {
	m := &Merge{Changes: []Change{
		{Op: Deleted, Path: "d/sub/f", Type: File}, // which the other side has changed
		{Op: Deleted, Path: "d/sub", Type: Dir},
		{Op: Deleted, Path: "d", Type: Dir},
		{Op: Renamed, Path: "d", From: "x", Type: File},
		{Op: Renamed, Path: "x", From: "y", Type: File},
		{Op: Renamed, Path: "free", From: "z", Type: File},
	}, changes: make([]bool, 6)}
	m.changes[0] = true
	var got []string
	for _, ch := range m.Clean() {
		if ch.Op == Renamed {
			got = append(got, ch.Path)
		}
	}
	if !slices.Equal(got, []string{"free"}) {
		t.Errorf("it still renames to %q", got)
	}
}
