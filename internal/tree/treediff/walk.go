package treediff

import (
	"cmp"
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"pando/internal/linux/kernel"
	"pando/internal/linux/treewalk"
)

// This file is the first half of a comparison: it reads directories that are in both
// trees side by side, and compares files with the same name immediately. It collects names that
// only one side has for match.go. So only differences take memory.

// slack and slackOfBirth say how far the clock for file times may lag behind. It advances with the
// timer ticks of a processor, which are late under load and in virtual machines. slack is for
// content, where a larger value means that more files are read. slackOfBirth is for recognizing moved
// files, where a larger value means that more new files are not recognized.
const (
	slack        = time.Second
	slackOfBirth = 20 * time.Millisecond
)

type comparer struct {
	ctx         context.Context
	a, b        *os.File
	devA, devB  uint64
	o           Options
	racy        time.Time // from this time on, equal change times prove nothing; zero: they always do
	parted      time.Time // files made from this time on may be in one tree only; zero: unknown
	generations generationKind
	sem         chan struct{}
	upper       *upperLayer // of an overlay of which a is the lower layer; nil: the trees are not related that way

	dirsRead, statted, filesRead, bytesRead atomic.Int64
	leftA, leftB                            atomic.Int64 // number of names of changed inodes not seen yet

	mu           sync.Mutex
	changes      []Change
	lost, gained []*node
	linked       map[uint64]*linked
}

// linked is a file with several names, at least one of which is in both trees.
type linked struct {
	stA, stB inode
	kept     []string // paths in B
	delta    delta
}

// racySince returns the time from which on equal change times prove nothing; zero: they always do.
func racySince(younger time.Time) time.Time {
	if younger.IsZero() {
		return younger
	}
	return younger.Add(-slack)
}

func newComparer(ctx context.Context, a, b *os.File, o Options) (*comparer, error) {
	// Apply the options.
	c := &comparer{ctx: ctx, a: a, b: b, o: o, sem: make(chan struct{}, treewalk.Workers()), linked: map[uint64]*linked{}}
	if !o.SameOrigin {
		c.o.Hints = nil
	}
	if !o.Younger.IsZero() {
		c.racy, c.parted = racySince(o.Younger), o.Younger.Add(-slackOfBirth)
	}

	if o.SameOrigin {
		var err error
		if c.generations, err = generationsOf(a); err != nil {
			return nil, err
		}
	}

	stA, err := c.stat(a, "", "")
	if err != nil {
		return nil, err
	}

	stB, err := c.stat(b, "", "")
	if err != nil {
		return nil, err
	}

	c.devA, c.devB = stA.dev, stB.dev

	// Count the names that the hints name.
	if h := c.o.Hints; h != nil {
		var inA, inB int64
		for _, l := range h.Changed {
			inA, inB = inA+int64(l.A), inB+int64(l.B)
		}
		c.leftA.Store(inA)
		c.leftB.Store(inB)
	}

	return c, nil
}

// compareAll compares the trees.
func (c *comparer) compareAll() (Result, error) {
	method := "walk"
	var err error
	switch h := c.o.Hints; {
	case c.upper != nil:
		method = "overlay"
	case h == nil:
	case len(h.Changed) == 0:
		return Result{Stats: Stats{Method: h.Method, Statted: c.statted.Load()}}, nil
	default:
		method = h.Method
	}

	if err := c.compareRoots(); err != nil {
		return Result{}, err
	}

	if c.o.Hints != nil && c.o.Hints.Index != nil {
		err = c.byIndex(c.o.Hints.Index)
	} else {
		err = c.sideBySide("", "")
	}
	if err == nil {
		err = c.match()
	}
	if err != nil {
		return Result{}, err
	}

	slices.SortFunc(c.changes, func(x, y Change) int {
		return cmp.Or(cmp.Compare(x.Path, y.Path), cmp.Compare(x.Op, y.Op), cmp.Compare(x.From, y.From))
	})
	return Result{Changes: c.changes, Stats: Stats{
		Method: method, DirsRead: c.dirsRead.Load(), Statted: c.statted.Load(),
		FilesRead: c.filesRead.Load(), BytesRead: c.bytesRead.Load(),
	}}, nil
}

// compareRoots compares the root directories themselves.
func (c *comparer) compareRoots() error {
	stA, err := c.stat(c.a, "", "")
	if err != nil {
		return err
	}

	stB, err := c.stat(c.b, "", "")
	if err != nil {
		return err
	}

	if h := c.o.Hints; h != nil {
		c.countSeen(stB.ino, true, true)
	}

	d, err := c.compare(place{c.a, "", ""}, place{c.b, "", ""}, &stA, &stB)
	if err == nil {
		c.modified("", &stA, &stB, d, "")
	}

	return err
}

// sideBySide compares the directory at pathA in one tree with the one at pathB in
// the other, and everything below.
func (c *comparer) sideBySide(pathA, pathB string) error {
	rootA, err := treewalk.Open(c.a, pathA)
	if err != nil {
		return failed(pathA, "open", err)
	}

	defer rootA.Close()

	rootB, err := treewalk.Open(c.b, pathB)
	if err != nil {
		return failed(pathB, "open", err)
	}

	defer rootB.Close()

	return treewalk.Walk(c.ctx, rootB, treewalk.Funcs{
		Open: func(d *treewalk.Dir) (*os.File, error) {
			if c.o.Hints != nil && d.Path() != "" && c.leftA.Load() <= 0 && c.leftB.Load() <= 0 {
				return nil, nil // all names that may differ have been seen
			}
			f, err := treewalk.Open(rootB, d.Path())
			if errors.Is(err, unix.EXDEV) {
				return nil, nil // a mount
			}
			return f, failed(under(pathB, d.Path()), "open", err)
		},
		Visit: func(d *treewalk.Dir, fb *os.File) ([]string, error) {
			rel := d.Path()
			return c.visit(rootA, rel, fb, under(pathA, rel), under(pathB, rel))
		},
	})
}

func under(root, rel string) string {
	if rel == "" {
		return root
	}
	return join(root, rel)
}

// mayDiffer reports whether an inode of the main subvolume may have changed, according to the hints.
func (c *comparer) mayDiffer(ino uint64) bool {
	if c.o.Hints == nil {
		return true
	}
	_, ok := c.o.Hints.Changed[ino]
	return ok
}

// unchanged reports whether two inodes of one object are certainly the same.
// Inodes in the hints have changed, even if the resolution of times is too coarse to show it.
func (c *comparer) unchanged(a, b *inode) bool {
	if c.o.Hints != nil && a.dev == c.devA && c.mayDiffer(a.ino) {
		return false
	}
	return unchanged(a, b, c.racy)
}

// countSeen counts the names of changed inodes that the walk has seen, so that it can end early.
func (c *comparer) countSeen(ino uint64, inA, inB bool) {
	if c.o.Hints == nil || !c.mayDiffer(ino) {
		return
	}
	if inA {
		c.leftA.Add(-1)
	}
	if inB {
		c.leftB.Add(-1)
	}
}

// visit compares one directory, which is open in the second tree as fb. It returns the
// subdirectories to enter.
func (c *comparer) visit(rootA *os.File, rel string, fb *os.File, pathA, pathB string) ([]string, error) {
	var fa *os.File
	openA := func() (err error) {
		if fa != nil {
			return nil
		}
		fa, err = treewalk.Open(rootA, rel)
		return failed(pathA, "open", err)
	}

	st, err := kernel.Stat(int(fb.Fd()))
	if err != nil {
		return nil, failed(pathB, "stat", err)
	}

	if c.o.Hints == nil || c.mayDiffer(st.Ino) {
		err := openA()
		if errors.Is(err, unix.EXDEV) {
			return nil, nil // a mount
		}
		if err != nil {
			return nil, err
		}
		defer fa.Close()
		return c.merge(fa, fb, pathA, pathB, true)
	}

	// The directory has not changed, so it has the same entries in both trees.
	entries, err := c.readNames(fb, pathB)
	if err != nil {
		return nil, err
	}

	t := c.tasks()
	var subdirs []string
	for _, e := range entries {
		if e.Type == unix.DT_DIR {
			subdirs = append(subdirs, e.Name)
		}
		if !c.mayDiffer(e.Ino) {
			continue
		}
		c.countSeen(e.Ino, true, true)
		if err = openA(); err != nil {
			break
		}
		t.start(func() error {
			return c.compareBoth(place{fa, e.Name, join(pathA, e.Name)}, place{fb, e.Name, join(pathB, e.Name)}, true)
		})
	}

	err = cmp.Or(t.wait(), err)
	if fa != nil {
		fa.Close()
	}

	return subdirs, err
}

// readNames returns the entries of a directory, sorted, without those that an overlay lists but hides.
func (c *comparer) readNames(f *os.File, path string) ([]treewalk.Dirent, error) {
	c.dirsRead.Add(1)
	entries, err := treewalk.ReadDirents(f)
	if err != nil {
		return nil, failed(path, "getdents", err)
	}

	if c.upper != nil {
		entries = slices.DeleteFunc(entries, func(e treewalk.Dirent) bool { return isHidden(f, e) })
	}
	slices.SortFunc(entries, func(x, y treewalk.Dirent) int { return strings.Compare(x.Name, y.Name) })
	return entries, nil
}

// readBothNames returns the entries of one directory in both trees; in an overlay, only those that may differ.
func (c *comparer) readBothNames(fa, fb *os.File, pathA, pathB string) (as, bs []treewalk.Dirent, err error) {
	if c.upper != nil {
		fu, err := c.upper.open(pathB)
		if err != nil {
			return nil, nil, failed(pathB, "open in the upper layer", err)
		}
		if fu != nil {
			defer fu.Close()
			return c.namesInUpper(fu, fa, fb, pathB)
		}
	}

	if as, err = c.readNames(fa, pathA); err != nil {
		return nil, nil, err
	}

	bs, err = c.readNames(fb, pathB)
	return as, bs, err
}

// merge compares the entries of one directory in both trees, and returns the subdirectories that both
// have. common says whether to compare files that both have under the same name.
func (c *comparer) merge(fa, fb *os.File, pathA, pathB string, common bool) (subdirs []string, err error) {
	var stA, stB unix.Stat_t
	if err := unix.Fstat(int(fa.Fd()), &stA); err != nil {
		return nil, failed(pathA, "stat", err)
	}

	if err := unix.Fstat(int(fb.Fd()), &stB); err != nil {
		return nil, failed(pathB, "stat", err)
	}

	as, bs, err := c.readBothNames(fa, fb, pathA, pathB)
	if err != nil {
		return nil, err
	}

	// Go through the sorted names of both side by side.
	m := &dirMerge{c: c, fa: fa, fb: fb, pathA: pathA, pathB: pathB, common: common, t: c.tasks(),
		trusted: c.o.SameOrigin && uint64(stA.Dev) == c.devA && uint64(stB.Dev) == c.devB}
	for err == nil && (len(as) > 0 || len(bs) > 0) {
		switch {
		case len(bs) == 0 || len(as) > 0 && as[0].Name < bs[0].Name:
			m.lose(as[0])
			as = as[1:]
		case len(as) == 0 || as[0].Name > bs[0].Name:
			m.gain(bs[0])
			bs = bs[1:]
		default:
			err = m.both(as[0], bs[0])
			as, bs = as[1:], bs[1:]
		}
	}

	err = cmp.Or(m.t.wait(), err)
	c.mu.Lock()
	c.lost, c.gained = append(c.lost, m.lost...), append(c.gained, m.gained...)
	c.mu.Unlock()
	return m.subdirs, err
}

// dirMerge is one run of merge.
type dirMerge struct {
	c               *comparer
	fa, fb          *os.File
	pathA, pathB    string
	common, trusted bool // trusted: inode numbers mean the same in both directories
	t               *tasks
	lost, gained    []*node
	subdirs         []string
}

// lose records a name that only A has.
func (m *dirMerge) lose(e treewalk.Dirent) {
	m.c.countSeen(e.Ino, true, false)
	m.lost = append(m.lost, &node{dir: m.pathB, path: join(m.pathA, e.Name), name: e.Name, ino: e.Ino, typ: e.Type,
		trusted: m.trusted})
}

// gain records a name that only B has.
func (m *dirMerge) gain(e treewalk.Dirent) {
	m.c.countSeen(e.Ino, false, true)
	m.gained = append(m.gained, &node{dir: m.pathB, path: join(m.pathB, e.Name), name: e.Name, ino: e.Ino, typ: e.Type,
		trusted: m.trusted})
}

// both compares entries that have the same name in both trees.
func (m *dirMerge) both(ea, eb treewalk.Dirent) (err error) {
	at, bt := place{m.fa, ea.Name, join(m.pathA, ea.Name)}, place{m.fb, eb.Name, join(m.pathB, eb.Name)}
	same := ea.Type == eb.Type && (!m.trusted || ea.Ino == eb.Ino)
	if !same && m.trusted && ea.Type == unix.DT_DIR && eb.Type == unix.DT_DIR {
		if same, err = m.c.bothSubvolumes(at, bt); err != nil {
			return err
		}
	}

	if same && ea.Type == unix.DT_DIR {
		other, err := m.c.showsOther(at.path, bt.path)
		if err != nil {
			return err
		}
		same = !other
	}

	if !same {
		m.lose(ea)
		m.gain(eb)
		return nil
	}

	if ea.Type == unix.DT_DIR {
		m.subdirs = append(m.subdirs, ea.Name)
	}
	m.c.countSeen(ea.Ino, true, true)
	if !m.trusted || ea.Ino != eb.Ino || m.common && m.c.mayDiffer(ea.Ino) {
		m.t.start(func() error { return m.c.compareBoth(at, bt, m.trusted) })
	}

	return nil
}

// bothSubvolumes reports whether two directories are roots of nested subvolumes, whose directory
// entries have different inode numbers in different snapshots.
func (c *comparer) bothSubvolumes(at, bt place) (bool, error) {
	a, err := c.stat(at.dir, at.name, at.path)
	if err != nil {
		return false, err
	}
	b, err := c.stat(bt.dir, bt.name, bt.path)
	return kernel.IsSubvolRoot(a.ino) && kernel.IsSubvolRoot(b.ino) && a.dev != c.devA && b.dev != c.devB, err
}

// place is a file in an open directory.
type place struct {
	dir  *os.File
	name string // "": the directory itself
	path string // in its tree
}

// compareBoth compares two files that have the same name in both trees.
func (c *comparer) compareBoth(at, bt place, trusted bool) error {
	stA, err := c.stat(at.dir, at.name, at.path)
	if err != nil {
		return err
	}

	stB, err := c.stat(bt.dir, bt.name, bt.path)
	if err != nil {
		return err
	}
	if stA.mount || stB.mount {
		return nil // the mount hides the content of the tree
	}
	if stA.fileType() != stB.fileType() {
		return failed(bt.path, "statx", unix.ESTALE)
	}

	// Also in a nested subvolume, times and numbers prove that nothing has
	// changed. But if trusted is false, a moved file is not recognized there.
	known := c.o.SameOrigin && c.sameObject(&stA, &stB)
	if known && c.unchanged(&stA, &stB) {
		return nil
	}

	if !stA.isDir() && (stA.nlink > 1 || stB.nlink > 1) {
		return c.compareLinked(at, bt, &stA, &stB, trusted, trusted && known)
	}

	d, err := c.compare(at, bt, &stA, &stB)
	if err == nil {
		c.modified(bt.path, &stA, &stB, d, "")
	}

	return err
}

// compareLinked compares two files that have several names, one of them in both trees. oneObject says that they are the
// same file.
func (c *comparer) compareLinked(at, bt place, stA, stB *inode, trusted, oneObject bool) (err error) {
	if !oneObject {
		// Postpone it: which names belong together is known only when all have been read.
		c.mu.Lock()
		defer c.mu.Unlock()
		d, _ := split(bt.path)
		c.lost = append(c.lost, &node{dir: d, path: at.path, name: at.name, ino: stA.ino, typ: stA.fileType(), st: stA,
			trusted: trusted})
		c.gained = append(c.gained, &node{dir: d, path: bt.path, name: bt.name, ino: stB.ino, typ: stB.fileType(), st: stB,
			trusted: trusted})
		return nil
	}

	c.mu.Lock()
	l := c.linked[stB.ino]
	first := l == nil
	if first {
		l = &linked{stA: *stA, stB: *stB}
		c.linked[stB.ino] = l
	}

	l.kept = append(l.kept, bt.path)
	c.mu.Unlock()
	if first {
		l.delta, err = c.compare(at, bt, stA, stB) // nobody reads it before the walk has ended
	}

	return err
}

// modified records a change of a file that is in the same place as before.
func (c *comparer) modified(path string, stA, stB *inode, d delta, link string) {
	if !d.content && !d.metadata && !(d.times && c.o.Times) {
		return
	}
	ch := Change{Op: Modified, Path: shown(path), Link: link, SizeBefore: stA.bytes(), SizeAfter: stB.bytes(),
		Type: typeOf(stB.fileType())}
	ch.addRanges(d)
	c.addChange(ch)
}

func (ch *Change) addRanges(d delta) {
	ch.Content, ch.Metadata, ch.Times = d.content, d.metadata, d.times
	if ch.Link == "" {
		ch.ChangedBytes, ch.ranges = d.bytes, d.ranges
	}
}

func (c *comparer) addChange(ch Change) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.changes = append(c.changes, ch)
}

// tasks returns a group of comparisons. They run concurrently while workers are free, of which all groups
// share a limited number, and otherwise in the goroutine that starts them.
func (c *comparer) tasks() *tasks { return &tasks{c: c} }

type tasks struct {
	c   *comparer
	wg  sync.WaitGroup
	mu  sync.Mutex
	err error
}

func (t *tasks) start(fn func() error) {
	run := func() {
		err := t.c.ctx.Err()
		if err == nil {
			err = fn()
		}
		if err != nil {
			t.mu.Lock()
			t.err = cmp.Or(t.err, err)
			t.mu.Unlock()
		}
	}

	select {
	case t.c.sem <- struct{}{}:
		t.wg.Go(func() {
			defer func() { <-t.c.sem }()
			run()
		})
	default:
		run()
	}
}

func (t *tasks) wait() error {
	t.wg.Wait()
	return t.err
}

// byIndex compares the changed inodes, which it finds through the index, and reads nothing else.
func (c *comparer) byIndex(ix Index) error {
	t := c.tasks()
	err := func() error {
		for ino := range c.o.Hints.Changed {
			if err := c.ctx.Err(); err != nil {
				return err
			}

			pa, inA, err := ix.DirPath(false, ino)
			if err != nil {
				return failed("", "looking for a directory", err)
			}

			pb, inB, err := ix.DirPath(true, ino)
			if err != nil {
				return failed("", "looking for a directory", err)
			}

			if inA && inB {
				t.start(func() error { return c.changedDir(pa, pb) })
				continue
			}

			if inA || inB {
				continue // the comparison of its parent directory finds it
			}

			if err := c.changedFile(t, ix, ino); err != nil {
				return err
			}
		}

		return nil
	}()

	return cmp.Or(t.wait(), err)
}

// changedDir compares a directory and its names.
func (c *comparer) changedDir(pathA, pathB string) error {
	fa, err := treewalk.Open(c.a, pathA)
	if err != nil {
		return failed(pathA, "open", err)
	}

	defer fa.Close()

	fb, err := treewalk.Open(c.b, pathB)
	if err != nil {
		return failed(pathB, "open", err)
	}

	defer fb.Close()

	if _, err = c.merge(fa, fb, pathA, pathB, false); err != nil || pathB == "" {
		return err // compareRoots has compared the root
	}

	stA, err := c.stat(fa, "", pathA)
	if err != nil {
		return err
	}

	stB, err := c.stat(fb, "", pathB)
	if err != nil {
		return err
	}

	if pathA != pathB {
		// If the directory itself has moved, match compares it. Otherwise, one above it has moved.
		dirA, _ := split(pathA)
		dirB, _ := split(pathB)
		if moved, err := c.movedDir(dirA, dirB, pathA, pathB); err != nil || moved {
			return err
		}
	}

	d, err := c.compare(place{fa, "", pathA}, place{fb, "", pathB}, &stA, &stB)
	if err == nil {
		c.modified(pathB, &stA, &stB, d, "")
	}

	return err
}

// movedDir reports whether a directory that is in both trees has different names or
// parents, so that it is among the lost and gained nodes.
func (c *comparer) movedDir(dirA, dirB, pathA, pathB string) (bool, error) {
	_, nameA := split(pathA)
	_, nameB := split(pathB)
	if nameA != nameB {
		return true, nil
	}

	ino := func(root *os.File, path string) (uint64, error) {
		f, err := treewalk.Open(root, path)
		if err != nil {
			return 0, failed(path, "open", err)
		}
		defer f.Close()
		st, err := c.stat(f, "", path)
		return st.ino, err
	}

	x, err := ino(c.a, dirA)
	if err != nil {
		return false, err
	}

	y, err := ino(c.b, dirB)
	return x != y, err
}

// changedFile compares a file under each name that is in both trees.
func (c *comparer) changedFile(t *tasks, ix Index, ino uint64) error {
	as, err := ix.Names(false, ino)
	if err != nil {
		return failed("", "looking for a file", err)
	}

	bs, err := ix.Names(true, ino)
	if err != nil {
		return failed("", "looking for a file", err)
	}

	for _, n := range as {
		if !slices.Contains(bs, n) {
			continue
		}

		pa, okA, err := ix.DirPath(false, n.Dir)
		if err != nil {
			return failed("", "looking for a directory", err)
		}

		pb, okB, err := ix.DirPath(true, n.Dir)
		if err != nil {
			return failed("", "looking for a directory", err)
		}
		if !okA || !okB {
			continue
		}

		t.start(func() error {
			fa, err := treewalk.Open(c.a, pa)
			if err != nil {
				return failed(pa, "open", err)
			}
			defer fa.Close()
			fb, err := treewalk.Open(c.b, pb)
			if err != nil {
				return failed(pb, "open", err)
			}
			defer fb.Close()
			return c.compareBoth(place{fa, n.Name, join(pa, n.Name)}, place{fb, n.Name, join(pb, n.Name)}, true)
		})
	}

	return nil
}
