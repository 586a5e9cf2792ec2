package treediff

import (
	"cmp"
	"errors"
	"os"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"pando/internal/linux/treewalk"
)

// This file is the second half of a comparison: it combines names that only one tree has
// (lost, gained) into changes. It lists everything below lost and gained directories,
// because their content may have moved elsewhere.

// node is a name that only one of the trees has in this place.
type node struct {
	parent  *node  // nil: its directory is in both trees
	dir     string // with a nil parent, the directory's path in B
	path    string // in its own tree
	name    string
	ino     uint64
	typ     uint8
	trusted bool   // the inode number means the same in the other tree
	st      *inode // nil until it is needed
	obj     *object
	kids    []*node
}

// object is one inode with all its lost and gained names.
type object struct {
	lost, gained []*node
	kept         *linked // the names that it has in both trees; nil if there are none
	unread       bool    // it has more names, which are in both trees
}

// where identifies the place of a name. It is equal in both trees if the directory
// is the same object.
type where struct {
	obj  *object
	dir  string
	name string
}

func (n *node) where() where {
	if n.parent != nil {
		return where{obj: n.parent.obj, name: n.name}
	}
	return where{dir: n.dir, name: n.name}
}

// match finds out what happened to the lost and gained names, and reports it.
func (c *comparer) match() error {
	if c.o.SameOrigin && (c.o.Hints == nil || c.o.Hints.Index == nil) {
		if err := c.movedDirs(); err != nil {
			return err
		}
	}

	// List everything below lost and gained directories.
	if err := c.expand(c.a, c.lost, false); err != nil {
		return err
	}

	if err := c.expand(c.b, c.gained, true); err != nil {
		return err
	}

	// Find out which names belong to the same object.
	as, bs := flatten(c.lost), flatten(c.gained)
	objA := objects(as, func(o *object, n *node) { o.lost = append(o.lost, n) })
	objB := objects(bs, func(o *object, n *node) { o.gained = append(o.gained, n) })
	if c.o.SameOrigin {
		c.matchByInode(objA, objB)
	} else {
		if err := c.matchRedirected(as, bs); err != nil {
			return err
		}
		c.matchUnread(as, bs)
		matchSeenThrough(as, bs)
	}

	if err := c.matchByPlace(as, bs); err != nil {
		return err
	}

	return c.report(as, bs)
}

// movedDirs finds directories that were lost in one place and gained in another,
// and compares their content without listing it first.
func (c *comparer) movedDirs() error {
	for {
		// Find the next moved directory.
		lost := map[uint64]*node{}
		for _, n := range c.lost {
			if n.trusted && n.typ == unix.DT_DIR && n.obj == nil {
				lost[n.ino] = n
			}
		}

		var a, b *node
		for _, n := range c.gained {
			if n.typ != unix.DT_DIR || !n.trusted || n.obj != nil || lost[n.ino] == nil {
				continue
			}

			l := lost[n.ino]
			if err := c.statNodes(c.a, l); err != nil {
				return err
			}

			if err := c.statNodes(c.b, n); err != nil {
				return err
			}

			if c.sameObject(l.st, n.st) {
				a, b = l, n
				break
			}
		}

		if a == nil {
			return nil
		}

		// Compare its content, which may find further ones.
		o := &object{lost: []*node{a}, gained: []*node{b}}
		a.obj, b.obj = o, o
		if err := c.sideBySide(a.path, b.path); err != nil {
			return err
		}
	}
}

// expand lists everything below the directories among the nodes.
func (c *comparer) expand(root *os.File, roots []*node, inB bool) error {
	for _, n := range roots {
		if n.obj != nil || n.typ != unix.DT_DIR {
			if err := c.statNodes(root, n); err != nil {
				return err
			}
			continue
		}
		if err := c.expandDir(root, n, inB); err != nil {
			return err
		}
	}

	return nil
}

// expandDir lists everything below the directory top, except directories that the index finds in the other tree.
func (c *comparer) expandDir(root *os.File, top *node, inB bool) error {
	if err := c.statNodes(root, top); err != nil {
		return err
	}

	x := &expansion{c: c, top: top, inB: inB, dev: c.devA, dirs: map[string]*node{"": top}}
	if inB {
		x.dev = c.devB
	}

	if top.trusted {
		if moved, err := x.isElsewhere(top.ino); err != nil || moved {
			return failed(top.path, "looking for it", err)
		}
	}

	f, err := treewalk.Open(root, top.path)
	if errors.Is(err, unix.EXDEV) {
		return nil // a mount
	}
	if err != nil {
		return failed(top.path, "open", err)
	}

	defer f.Close()
	return treewalk.Walk(c.ctx, f, treewalk.Funcs{Open: x.open, Visit: x.visit})
}

// expansion is one run of expandDir.
type expansion struct {
	c   *comparer
	top *node
	inB bool
	dev uint64 // of the tree

	mu   sync.Mutex       // also for the index
	dirs map[string]*node // directories to be visited, by their path below top
}

// isElsewhere reports whether the directory with this inode number is also in the other tree.
func (x *expansion) isElsewhere(ino uint64) (bool, error) {
	if x.c.o.Hints == nil || x.c.o.Hints.Index == nil {
		return false, nil
	}
	_, ok, err := x.c.o.Hints.Index.DirPath(!x.inB, ino)
	return ok, err
}

func (x *expansion) open(d *treewalk.Dir) (*os.File, error) {
	f, err := treewalk.Open(d.Root(), d.Path())
	if errors.Is(err, unix.EXDEV) {
		return nil, nil
	}
	return f, failed(under(x.top.path, d.Path()), "open", err)
}

func (x *expansion) visit(d *treewalk.Dir, f *os.File) ([]string, error) {
	x.mu.Lock()
	n := x.dirs[d.Path()]
	delete(x.dirs, d.Path())
	x.mu.Unlock()
	entries, err := x.c.readNames(f, n.path)
	if err != nil {
		return nil, err
	}

	var subdirs []string
	for _, e := range entries {
		k := &node{parent: n, path: join(n.path, e.Name), name: e.Name, ino: e.Ino, typ: e.Type}
		st, err := x.c.stat(f, e.Name, k.path)
		if err != nil {
			return nil, err
		}

		k.st, k.trusted = &st, x.c.o.SameOrigin && st.dev == x.dev && st.ino == e.Ino
		n.kids = append(n.kids, k)
		if e.Type != unix.DT_DIR || st.mount {
			continue
		}

		enter, err := x.add(d.Join(e.Name), k)
		if err != nil {
			return nil, failed(k.path, "looking for it", err)
		}
		if enter {
			subdirs = append(subdirs, e.Name)
		}
	}

	return subdirs, nil
}

// add adds a directory to be visited, unless it is also in the other tree.
func (x *expansion) add(rel string, k *node) (bool, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if k.trusted {
		if moved, err := x.isElsewhere(k.ino); err != nil || moved {
			return false, err
		}
	}
	x.dirs[rel] = k
	return true, nil
}

// statNodes stats a node unless that has been done.
func (c *comparer) statNodes(root *os.File, n *node) error {
	if n.st != nil {
		return nil
	}

	dir, name := split(n.path)
	f, err := treewalk.Open(root, dir)
	if err != nil {
		return failed(dir, "open", err)
	}

	defer f.Close()
	st, err := c.stat(f, name, n.path)
	n.st = &st
	return err
}

// flatten lists nodes and everything below them, by depth and path.
func flatten(roots []*node) []*node {
	var out []*node
	var add func(ns []*node)
	add = func(ns []*node) {
		for _, n := range ns {
			out = append(out, n)
			add(n.kids)
		}
	}

	add(roots)
	slices.SortFunc(out, func(x, y *node) int {
		return cmp.Or(cmp.Compare(depth(x.path), depth(y.path)), strings.Compare(x.path, y.path))
	})
	return out
}

// objects collects the names of each inode with add. It returns objects by inode number, if that is trusted.
func objects(ns []*node, add func(*object, *node)) map[uint64]*object {
	all := map[inode]*object{}
	trusted := map[uint64]*object{}
	for _, n := range ns {
		if n.obj != nil {
			continue // a moved directory
		}

		k := n.st.itself()
		o := all[k]
		if o == nil || n.typ == unix.DT_DIR || n.st.nlink < 2 { // an overlay can show one directory twice
			o = &object{}
			all[k] = o
		}

		n.obj = o
		add(o, n)
		if n.trusted {
			trusted[n.st.ino] = o
		}
	}

	return trusted
}

// isMatched reports whether the object has been found in both trees.
func (o *object) isMatched() bool { return o.kept != nil || len(o.lost) > 0 && len(o.gained) > 0 }

// merge adds the names of b, which has no lost names, to o.
func (o *object) merge(b *object) {
	for _, n := range b.gained {
		n.obj = o
	}
	o.gained = append(o.gained, b.gained...)
	b.gained = nil
}

// matchByInode merges objects of both trees that are the same by their inode number.
func (c *comparer) matchByInode(objA, objB map[uint64]*object) {
	for ino, o := range objA {
		if l := c.linked[ino]; l != nil && c.sameObject(&l.stA, o.lost[0].st) {
			o.kept = l
		}
		if b := objB[ino]; b != nil && c.sameObject(o.lost[0].st, b.gained[0].st) {
			o.merge(b)
			delete(objB, ino)
		}
	}

	for ino, b := range objB {
		if l := c.linked[ino]; l != nil && len(b.gained) > 0 && c.sameObject(&l.stB, b.gained[0].st) {
			b.kept = l
		}
	}
}

// matchByPlace merges objects that have the same type and place, if neither has been matched yet.
// Directories come first, so that their entries can be in the same place.
func (c *comparer) matchByPlace(as, bs []*node) error {
	places := make(map[where]*node, len(as))
	for _, n := range as {
		places[n.where()] = n
	}

	for _, g := range bs {
		l := places[g.where()]
		if l == nil || l.typ != g.typ || l.obj == g.obj {
			continue
		}
		if l.obj.unread || l.obj.isMatched() || g.obj.isMatched() {
			continue
		}

		if l.typ != unix.DT_DIR && l.typ != unix.DT_REG {
			// Other types cannot be modified, only replaced.
			d, err := c.compareNodes(l, g)
			if err != nil {
				return err
			}
			if d.content {
				continue
			}
		}

		l.obj.merge(g.obj)
	}

	return nil
}

// report turns objects into changes.
func (c *comparer) report(as, bs []*node) error {
	for _, l := range c.linked {
		c.keptNames(l) // also sorts the names, for objects that need the first one
	}

	seen := map[*object]bool{}
	t := c.tasks()
	for _, n := range slices.Concat(as, bs) {
		if o := n.obj; !seen[o] {
			seen[o] = true
			t.start(func() error { return c.compareObject(o) })
		}
	}

	if err := t.wait(); err != nil {
		return err
	}

	c.sameNames()
	return nil
}

// keptNames reports a modified file under those of its names that are in both trees.
func (c *comparer) keptNames(l *linked) {
	slices.Sort(l.kept)
	for i, path := range l.kept {
		link := ""
		if i > 0 {
			link = l.kept[0]
		}
		c.modified(path, &l.stA, &l.stB, l.delta, link)
	}
}

// compareObject reports the changes of one object under all its names.
func (c *comparer) compareObject(o *object) error {
	stay, from, to := o.names()

	// Compare the contents, once. primary is the name of the object in B whose change describes them.
	primary := ""
	var d delta
	var stA, stB *inode
	if o.kept != nil {
		primary, stA, stB = slices.Min(o.kept.kept), &o.kept.stA, &o.kept.stB
	} else if len(o.lost) > 0 && len(o.gained) > 0 {
		l, g := o.lost[0], o.gained[0]
		stA, stB = l.st, g.st
		if !c.isSeenThrough(l, g) && (!c.o.SameOrigin || !c.sameObject(stA, stB) || !c.unchanged(stA, stB)) {
			var err error
			if d, err = c.compareNodes(l, g); err != nil {
				return err
			}
		}
	}

	for _, g := range stay {
		if primary == "" {
			primary = g.path
			c.modified(g.path, stA, stB, d, "")
			continue
		}
		c.modified(g.path, stA, stB, d, primary)
	}

	// Pair lost and gained names. The rest was deleted or added.
	n := min(len(from), len(to))
	for i := range n {
		ch := Change{Op: Renamed, Path: to[i].path, From: from[i].path, Type: typeOf(to[i].typ), Link: primary,
			SizeBefore: stA.bytes(), SizeAfter: stB.bytes()}
		if primary == "" {
			primary = to[i].path
		}
		ch.addRanges(d)
		c.addChange(ch)
	}

	for _, l := range from[n:] {
		c.addChange(Change{Op: Deleted, Path: l.path, Type: typeOf(l.typ), SizeBefore: l.st.bytes()})
	}

	for _, g := range to[n:] {
		ch := Change{Op: Added, Path: g.path, Type: typeOf(g.typ), SizeAfter: g.st.bytes(), Link: primary}
		if primary == "" {
			primary = g.path
			if err := c.addedBytes(g, &ch); err != nil {
				return err
			}
		}
		c.addChange(ch)
	}

	return nil
}

// names sorts the names of an object: those in both trees (as gained), only in A, and only in B.
func (o *object) names() (stay, from, to []*node) {
	kept := map[where]bool{}
	for _, l := range o.lost {
		for _, g := range o.gained {
			if l.where() == g.where() {
				kept[l.where()] = true
				stay = append(stay, g)
			}
		}
	}

	for _, l := range o.lost {
		if !kept[l.where()] {
			from = append(from, l)
		}
	}

	for _, g := range o.gained {
		if !kept[g.where()] {
			to = append(to, g)
		}
	}

	byPath := func(x, y *node) int { return strings.Compare(x.path, y.path) }
	slices.SortFunc(stay, byPath)
	slices.SortFunc(from, byPath)
	slices.SortFunc(to, byPath)
	return stay, from, to
}

// addedBytes counts the data of an added file.
func (c *comparer) addedBytes(n *node, ch *Change) error {
	ch.Content = true
	switch {
	case n.typ == unix.DT_LNK:
		ch.ChangedBytes = n.st.size
	case n.st.isFile() && n.st.size > 0:
		p, err := c.place(c.b, n)
		if err != nil {
			return err
		}
		defer p.dir.Close()
		f, err := openFile(p)
		if err != nil {
			return err
		}
		defer f.Close()
		return failed(n.path, "seek", dataRanges(f, 0, n.st.size, func(from, to int64) { ch.ChangedBytes += to - from }))
	}

	return nil
}

// place opens the directory of a node.
func (c *comparer) place(root *os.File, n *node) (place, error) {
	dir, name := split(n.path)
	f, err := treewalk.Open(root, dir)
	return place{f, name, n.path}, failed(dir, "open", err)
}

// compareNodes compares a lost and a gained name of the same object.
func (c *comparer) compareNodes(l, g *node) (delta, error) {
	at, err := c.place(c.a, l)
	if err != nil {
		return delta{}, err
	}
	defer at.dir.Close()
	bt, err := c.place(c.b, g)
	if err != nil {
		return delta{}, err
	}
	defer bt.dir.Close()
	return c.compare(at, bt, l.st, g.st)
}

// sameNames combines a deletion and an addition of the same path into a modification that
// replaces the file.
func (c *comparer) sameNames() {
	deleted := map[string]int{}
	for i, ch := range c.changes {
		if ch.Op == Deleted {
			deleted[ch.Path] = i
		}
	}

	gone := map[int]bool{}
	for i := range c.changes {
		ch := &c.changes[i]
		d, ok := deleted[ch.Path]
		if ch.Op != Added || !ok {
			continue
		}
		gone[d] = true
		ch.Op, ch.SizeBefore, ch.replaced = Modified, c.changes[d].SizeBefore, true
		if ch.Content = true; ch.Type != c.changes[d].Type {
			ch.TypeBefore = c.changes[d].Type
		}
	}

	i := -1
	c.changes = slices.DeleteFunc(c.changes, func(Change) bool { i++; return gone[i] })
}
