package treediff

import (
	"context"
	"maps"
	"os"
	"slices"
	"sort"
	"strings"

	"golang.org/x/sys/unix"

	"pando/internal/linux/treewalk"
)

// Conflict is a path that both sides have changed differently.
type Conflict struct {
	Path   string
	Mine   string // what one side did, in words for users
	Theirs string // what the other side did
}

// Merge is the result of Conflicts: how to combine the changes of two sides to the same base.
type Merge struct {
	Conflicts []Conflict // in order of path
	Changes   []Change   // mine, except those that theirs contains as well
	changes   []bool     // which of Changes are part of a conflict
}

// Clean returns the Changes that are not in a conflict and do not depend on one that is.
// For the others, the other side's state stays. A new name of a file whose change is
// dropped becomes a file of its own.
func (m *Merge) Clean() []Change {
	// Drop changes until no remaining one depends on a dropped one.
	drop := slices.Clone(m.changes)
	var missing []string // paths that will not be created
	for again := true; again; {
		again = false
		var stays map[string]bool
		missing, stays = m.effectOfDropping(drop)
		for i, ch := range m.Changes {
			if drop[i] {
				continue
			}
			comes := ch.Op == Added || ch.Op == Renamed
			if comes && stays[ch.Path] || ch.Op != Deleted && belowAny(ch.Path, missing) {
				drop[i], again = true, true
			}
		}
	}

	// Collect the others.
	var out []Change
	left := map[string]bool{}
	for i, ch := range m.Changes {
		switch {
		case !drop[i]:
			out = append(out, ch)
		case ch.Op != Deleted:
			left[ch.Path] = true
		}
	}

	ownFiles(out, func(path string) bool { return left[path] || belowAny(path, missing) })
	return out
}

// effectOfDropping finds the effect of dropping some of the changes: the paths that are
// then missing, and those at which something stays.
func (m *Merge) effectOfDropping(drop []bool) (missing []string, stays map[string]bool) {
	stays = map[string]bool{}
	for i, ch := range m.Changes {
		if !drop[i] {
			continue
		}
		if ch.Op == Added || ch.Op == Renamed || ch.Type == Dir && (ch.replaced || ch.TypeBefore != "") {
			missing = append(missing, ch.Path)
		}

		// If a path stays, so do the directories above it.
		switch ch.Op {
		case Renamed:
			staysWithin(stays, ch.From)
		case Deleted:
			staysWithin(stays, ch.Path)
		}
	}

	return missing, stays
}

func belowAny(path string, dirs []string) bool {
	return slices.ContainsFunc(dirs, func(dir string) bool { return below(path, dir) })
}

func staysWithin(stays map[string]bool, path string) {
	for ; path != ""; path, _ = split(path) {
		stays[path] = true
	}
}

// Conflicts finds the changes of two trees that contradict each other. mine and theirs
// are the changes that Compare found between a common base and the trees whose roots
// are given. Changes with the same result are not conflicts, nor are changes of times
// only. Conflicts are paths that both sides have changed differently, paths renamed
// differently, and paths below a directory that the other side has deleted, renamed or
// replaced.
//
// A new name of a file is not a conflict. It becomes one more name of their file if they
// have changed the file, and a separate file if they have replaced it.
func Conflicts(ctx context.Context, mine, theirs []Change, mineRoot, theirsRoot *os.File) (*Merge, error) {
	m := &Merge{}
	t := newTouched(theirs)
	own := newTouched(mine)
	found := map[string]Conflict{}
	eq := &comparer{ctx: ctx, a: theirsRoot, b: mineRoot}
	for _, ch := range mine {
		if err := ctx.Err(); err != nil {
			return nil, failed("", "compare", err)
		}

		if ch.TimesOnly() {
			if _, gone := t.removedAbove(ch.Path); gone == nil && t.changesAt(ch.Path) == nil {
				m.Changes, m.changes = append(m.Changes, ch), append(m.changes, false)
			}
			continue
		}

		// Find its conflicts.
		cs, same, err := conflictsOf(eq, &ch, t, own)
		if err != nil {
			return nil, err
		}
		if same {
			continue
		}

		for _, c := range cs {
			if _, ok := found[c.Path]; !ok {
				found[c.Path] = c
			}
		}

		if len(cs) > 0 {
			ch.whole()
		}

		m.Changes, m.changes = append(m.Changes, ch), append(m.changes, len(cs) > 0)
	}

	// If both sides have changed a file, one side's version is used completely, including its names.
	ownFiles(m.Changes, func(path string) bool {
		return own.changesAt(path) == nil && t.otherInPlace(own.pathBefore(path))
	})

	for _, p := range slices.Sorted(maps.Keys(found)) {
		m.Conflicts = append(m.Conflicts, found[p])
	}

	return m, nil
}

// touched finds the changes of one side by path.
type touched struct {
	at    map[string]*Change // changes that leave something at the path
	left  map[string]*Change // changes after which the old file is no longer at the path
	paths []string           // of both, sorted
}

func newTouched(changes []Change) *touched {
	t := &touched{at: map[string]*Change{}, left: map[string]*Change{}}
	for i := range changes {
		ch := &changes[i]
		if ch.TimesOnly() {
			continue
		}
		if ch.Op != Deleted {
			t.at[ch.Path] = ch
		}
		switch {
		case ch.Op == Renamed:
			t.left[ch.From] = ch
		case ch.leaves(ch.Path):
			t.left[ch.Path] = ch
		}
	}

	for p := range t.at {
		t.paths = append(t.paths, p)
	}

	for p := range t.left {
		if t.at[p] == nil {
			t.paths = append(t.paths, p)
		}
	}

	slices.Sort(t.paths)
	return t
}

// changesAt returns the changes that concern a path: one, or two if its file was renamed
// and another took its place.
func (t *touched) changesAt(path string) []*Change {
	at, left := t.at[path], t.left[path]
	switch {
	case at == nil && left == nil:
		return nil
	case at == nil || at == left:
		return []*Change{left}
	case left == nil:
		return []*Change{at}
	}
	return []*Change{left, at}
}

// removedAbove returns the change that removed a directory above path, and the path of
// that directory.
func (t *touched) removedAbove(path string) (string, *Change) {
	for dir, _ := split(path); dir != ""; dir, _ = split(dir) {
		if ch := t.left[dir]; ch != nil && ch.wasDir() {
			return dir, ch
		}
	}
	return "", nil
}

// otherInPlace reports whether the file at path, if any, is a different one than before.
func (t *touched) otherInPlace(path string) bool {
	if _, gone := t.removedAbove(path); gone != nil || t.left[path] != nil {
		return true
	}
	at := t.at[path]
	return at != nil && (at.Op != Modified || at.replaced)
}

// pathBefore returns the previous path of a file that is at path only because a directory
// above it was renamed.
func (t *touched) pathBefore(path string) string {
	for dir, _ := split(path); dir != ""; dir, _ = split(dir) {
		if ch := t.at[dir]; ch != nil && ch.Op == Renamed {
			return ch.From + strings.TrimPrefix(path, dir)
		}
	}
	return path
}

// whole extends a change to everything in the file. Because the other side has changed the file as well,
// choosing this side means more than making the changes of this side.
func (ch *Change) whole() {
	switch {
	case ch.Op == Deleted:
	case ch.Type == Dir:
		ch.Metadata = true
	case ch.Type == File || ch.Op == Renamed:
		ch.Content, ch.Metadata = true, true
	default:
		ch.Content, ch.replaced = true, true // other types cannot be modified, only replaced
	}
}

// leaves reports whether what was at path is no longer there.
func (ch *Change) leaves(path string) bool {
	return ch.Op == Deleted || ch.Op == Renamed && ch.From == path || ch.TypeBefore != ""
}

func (ch *Change) wasDir() bool { return ch.Type == Dir || ch.TypeBefore == Dir }

// pathsInside returns the changed paths below a directory at which there is a file now. With left, it
// also returns the others.
func (t *touched) pathsInside(dir string, left bool) []string {
	var out []string
	for i := sort.SearchStrings(t.paths, dir+"/"); i < len(t.paths) && below(t.paths[i], dir); i++ {
		if p := t.paths[i]; left || t.at[p] != nil {
			out = append(out, p)
		}
	}
	return out
}

// words describes what a change did at a path.
func (ch *Change) words(path string) string {
	switch {
	case ch.Op == Renamed && ch.From == path:
		return "renamed to " + quote(ch.Path)
	case ch.Op == Renamed:
		return "renamed from " + quote(ch.From)
	case ch.TypeBefore != "":
		return "replaced by a " + string(ch.Type)
	}
	return string(ch.Op)
}

// conflictsOf returns the conflicts of one of my changes. same says that the other side
// has made the same change.
func conflictsOf(eq *comparer, ch *Change, t, own *touched) (out []Conflict, same bool, err error) {
	paths := []string{ch.Path}
	if ch.From != "" {
		paths = append(paths, ch.From)
	}

	// Compare it with changes at the same paths.
	agreed := 0
	for _, p := range paths {
		others := t.changesAt(p)
		ok := len(others) > 0
		for _, o := range others {
			same, err := agrees(eq, ch, o, p)
			if err != nil {
				return nil, false, err
			}
			if !same {
				ok = false
				out = append(out, Conflict{p, ch.words(p), o.words(p)})
				break
			}
		}

		if ok {
			agreed++
			continue
		}

		// The other side has removed a directory above. That is a conflict unless I only removed
		// something in it, or removed that directory as well.
		dir, o := t.removedAbove(p)
		_, mine := own.removedAbove(p)
		if o != nil && !(ch.Op == Deleted && o.Op == Deleted) && (mine == nil || p == ch.Path && ch.Op != Deleted) {
			out = append(out, Conflict{p, ch.words(p), "the directory " + quote(dir) + " was " + o.words(dir)})
		}
	}

	// If I removed a directory, look for changes in it.
	if old := paths[len(paths)-1]; ch.leaves(old) && ch.wasDir() {
		for _, p := range t.pathsInside(old, ch.Op == Renamed) {
			o := t.changesAt(p)[0]
			if l := own.left[p]; l != nil && o.Op == Modified {
				continue // that change reports the conflict
			}
			out = append(out, Conflict{p, "the directory " + quote(old) + " was " + ch.words(old), o.words(p)})
		}
	}

	return out, len(out) == 0 && agreed == len(paths), nil
}

// agrees reports whether two changes that both concern a path have the same result
// there.
func agrees(eq *comparer, mine, theirs *Change, path string) (bool, error) {
	if (mine.Op == Renamed && mine.From == path) || (theirs.Op == Renamed && theirs.From == path) {
		if mine.Op != Renamed || theirs.Op != Renamed || mine.From != theirs.From || mine.Path != theirs.Path {
			return false, nil
		}
		return true, nil // the file is compared at the new path
	}

	if mine.Op == Deleted || theirs.Op == Deleted {
		return mine.Op == theirs.Op, nil
	}
	if mine.Type == Dir && (mine.Op == Renamed || theirs.Op == Renamed) && mine.From != theirs.From {
		return false, nil // the moved directory brings its content with it
	}

	return eq.samePath(path)
}

// samePath reports whether both trees have the same file at a path, except for times. It does
// not compare the content of directories.
func (c *comparer) samePath(path string) (bool, error) {
	if path == "." {
		path = ""
	}

	dir, name := split(path)
	fa, err := treewalk.Open(c.a, dir)
	if err != nil {
		return false, failed(dir, "open", err)
	}

	defer fa.Close()

	fb, err := treewalk.Open(c.b, dir)
	if err != nil {
		return false, failed(dir, "open", err)
	}

	defer fb.Close()

	a, err := c.stat(fa, name, path)
	if err != nil {
		return false, err
	}

	b, err := c.stat(fb, name, path)
	if err != nil {
		return false, err
	}
	if a.mode&unix.S_IFMT != b.mode&unix.S_IFMT {
		return false, nil
	}

	d, err := c.compare(place{fa, name, path}, place{fb, name, path}, &a, &b)
	return err == nil && !d.content && !d.metadata, err
}
