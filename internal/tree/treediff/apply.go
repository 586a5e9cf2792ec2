package treediff

import (
	"cmp"
	"context"
	"errors"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/linux/treewalk"
	"pando/internal/tree/treecopy"
)

// stageName is the directory, in the root of the tree, through which what is
// renamed goes: so names can be swapped, and moved into each other.
const stageName = ".pando-apply"

// ApplyOptions say how Apply deals with a tree that is not the first one. The
// zero value is for a tree that is, as far as the changes concern it.
type ApplyOptions struct {
	// Force: what is in the way of a change is replaced, what is missing is
	// copied from the second tree.
	Force bool
	// Keep: a directory that is to be deleted, but holds something else, stays.
	Keep bool
	// Progress is told of changes that are done, and bytes written.
	Progress func(changes, bytes int64)
}

// Apply makes the changes, which Compare found between some tree and from, in
// the tree below the open directory onto, so that the changed paths are what
// they are in from: content, names, hard links, owners, modes, times, attributes, flags.
// Of changed files only the ranges that differ are written. Times of directories
// are those of from only if the changes were found with Options.Times.
//
// The caller owns onto: nobody else uses it meanwhile, nothing is made durable,
// and after an error it is in between. Conflict if a path is not as the changes
// expect, NoSpace, Canceled, IO.
func Apply(ctx context.Context, changes []Change, from, onto *os.File, o ApplyOptions) error {
	a := &applier{ctx: ctx, from: from, onto: onto, o: o, staged: map[string]int{}, skipped: map[string]bool{}}
	err := a.run(changes)
	var e *errs.Error
	if errors.As(err, &e) && (e.Op == "import" || e.Op == op) {
		e.Op = "apply"
	}
	return err
}

type applier struct {
	ctx        context.Context
	from, onto *os.File
	o          ApplyOptions
	stage      *os.File
	staged     map[string]int // by Change.From: name in the stage

	mu      sync.Mutex
	skipped map[string]bool // with Keep: paths at which the other side's choice stands
	copied  map[string]bool // paths that have the attributes of from, "" for the root

	softened []softened // what is to become immutable or append-only again
}

// taken reports whether a change is to be left out because, with Keep, its path
// is taken, or the directory for it is not there.
func (a *applier) taken(ch *Change, err error) bool {
	if !a.o.Keep || !errs.Is(err, errs.Exists) && !errs.Is(err, errs.Conflict) {
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.skipped[ch.Path] = true
	return true
}

func (a *applier) done(n, bytes int64) {
	if a.o.Progress != nil {
		a.o.Progress(n, bytes)
	}
}

func (a *applier) run(changes []Change) error {
	if len(changes) == 0 {
		return nil
	}
	var rootBefore unix.Stat_t
	if err := unix.Fstat(int(a.onto.Fd()), &rootBefore); err != nil {
		return failed("", "stat", err)
	}
	defer a.closeSoftened()
	if err := a.unprotect(changes); err != nil {
		return errs.Wrap("apply", "", err)
	}
	if err := unix.Mkdirat(int(a.onto.Fd()), stageName, 0o700); err != nil {
		return failed(stageName, "mkdir", err)
	}
	var err error
	if a.stage, err = treewalk.Open(a.onto, stageName); err != nil {
		return failed(stageName, "open", err)
	}
	defer a.stage.Close()
	for _, step := range []func([]Change) error{a.out, a.in, a.files, a.missing, a.links, a.contents, a.attributes} {
		if err := step(changes); err != nil {
			return err
		}
	}
	if err := unix.Unlinkat(int(a.onto.Fd()), stageName, unix.AT_REMOVEDIR); err != nil {
		return failed(stageName, "rmdir", err)
	}
	if err := a.times(changes, &rootBefore); err != nil {
		return err
	}
	return a.flags(changes)
}

// out takes away what is deleted, and into the stage what is renamed; what is
// deeper in the tree comes first.
func (a *applier) out(changes []Change) error {
	type leaving struct {
		path   string
		rename bool
	}
	var all []leaving
	for _, ch := range changes {
		switch {
		case ch.Op == Renamed:
			all = append(all, leaving{ch.From, true})
		case ch.Op == Deleted, ch.replaced, ch.TypeBefore != "":
			all = append(all, leaving{ch.Path, false})
		}
	}
	slices.SortFunc(all, func(x, y leaving) int {
		return cmp.Or(-cmp.Compare(depth(x.path), depth(y.path)), cmp.Compare(x.path, y.path))
	})
	for i, l := range all {
		if err := a.ctx.Err(); err != nil {
			return errs.Wrap("apply", "", err)
		}
		dirPath, name := split(l.path)
		dir, err := treewalk.Open(a.onto, dirPath)
		if err == nil {
			if l.rename {
				if err = unix.Renameat(int(dir.Fd()), name, int(a.stage.Fd()), strconv.Itoa(i)); err == nil {
					a.staged[l.path] = i
				}
			} else {
				err = a.remove(dir, name)
			}
			dir.Close()
		}
		// With Keep, what was in a directory that the other side has replaced.
		if (a.o.Force || a.o.Keep) && (errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) ||
			errors.Is(err, unix.ELOOP)) {
			err = nil
		}
		if err != nil {
			return failed(l.path, "remove", err)
		}
	}
	return nil
}

// remove removes a file or directory. Not there is success with Keep or Force.
func (a *applier) remove(dir *os.File, name string) error {
	err := unlinkAt(dir, name, 0)
	if err == unix.EISDIR {
		err = unlinkAt(dir, name, unix.AT_REMOVEDIR)
	}
	switch {
	case err == unix.ENOTEMPTY && a.o.Force:
		return a.removeAll(dir, name)
	case err == unix.ENOTEMPTY && a.o.Keep, err == unix.ENOENT && (a.o.Keep || a.o.Force):
		return nil
	}
	return err
}

func (a *applier) removeAll(dir *os.File, name string) error {
	f, err := treewalk.Open(dir, name)
	if err != nil {
		return err
	}
	err = func() error {
		defer f.Close()
		entries, err := treewalk.ReadDirents(f)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if e.Type == unix.DT_DIR {
				err = a.removeAll(f, e.Name)
			} else {
				err = unlinkAt(f, e.Name, 0)
			}
			if err != nil {
				return err
			}
		}
		return nil
	}()
	if err != nil {
		return err
	}
	return unlinkAt(dir, name, unix.AT_REMOVEDIR)
}

// in makes the added directories and puts what was renamed in its new place.
func (a *applier) in(changes []Change) error {
	var coming []Change
	for _, ch := range changes {
		if ch.Op == Renamed || ch.isNew() && ch.Type == Dir {
			coming = append(coming, ch)
		}
	}
	slices.SortFunc(coming, func(x, y Change) int {
		return cmp.Or(cmp.Compare(depth(x.Path), depth(y.Path)), cmp.Compare(x.Path, y.Path))
	})
	for _, ch := range coming {
		if err := a.ctx.Err(); err != nil {
			return errs.Wrap("apply", "", err)
		}
		n, isStaged := a.staged[ch.From]
		isStaged = isStaged && ch.Op == Renamed
		dir, name, err := a.parent(ch.Path)
		if err != nil && !isStaged && a.taken(&ch, err) {
			continue
		}
		if err != nil {
			return err
		}
		switch {
		case !isStaged && ch.Type != Dir:
			err = a.clear(dir, name, false)
			if err == nil {
				err = a.copyFile(ch.Path)
			}
		case !isStaged && ch.Op == Renamed:
			err = a.copyTree(ch.Path)
		case isStaged:
			if err = a.clear(dir, name, false); err == nil {
				err = unix.Renameat(int(a.stage.Fd()), strconv.Itoa(n), int(dir.Fd()), name)
			}
		default:
			if err = a.clear(dir, name, true); err == nil {
				err = unix.Mkdirat(int(dir.Fd()), name, 0o700)
				if err == unix.EEXIST && a.o.Force {
					err = nil
				}
			}
		}
		dir.Close()
		err = failed(ch.Path, "make", err)
		if err != nil && (isStaged || !a.taken(&ch, err)) {
			return err
		}
		a.done(1, 0)
	}
	return nil
}

// clear takes away what is in the way of a new file, with Force.
func (a *applier) clear(dir *os.File, name string, forDir bool) error {
	if !a.o.Force {
		return nil
	}
	var st unix.Stat_t
	err := unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if err == unix.ENOENT {
		return nil
	}
	if err != nil {
		return err
	}
	if forDir && st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return nil
	}
	return a.remove(dir, name)
}

// parent opens the directory of a path in onto. With Force it is made if it is
// not there.
func (a *applier) parent(path string) (dir *os.File, name string, err error) {
	dirPath, name := split(path)
	dir, err = treewalk.Open(a.onto, dirPath)
	if err == nil || !a.o.Force || dirPath == "" {
		return dir, name, failed(dirPath, "open", err)
	}
	up, upName, err := a.parent(dirPath)
	if err != nil {
		return nil, "", err
	}
	defer up.Close()
	if err = a.clear(up, upName, true); err == nil {
		if err = unix.Mkdirat(int(up.Fd()), upName, 0o700); err == nil {
			err = a.copyAttributes(dirPath)
		}
	}
	if err == nil {
		dir, err = treewalk.Open(a.onto, dirPath)
	}
	return dir, name, failed(dirPath, "make", err)
}

func (a *applier) copyAttributes(path string) error {
	a.note(path)
	if path == "" || path == "." {
		return treecopy.CopyAttributes(a.ctx, a.from, "", a.onto, "")
	}
	dirPath, name := split(path)
	src, err := treewalk.Open(a.from, dirPath)
	if err != nil {
		return failed(dirPath, "open", err)
	}
	defer src.Close()
	dst, err := treewalk.Open(a.onto, dirPath)
	if err != nil {
		return failed(dirPath, "open", err)
	}
	defer dst.Close()
	return treecopy.CopyAttributes(a.ctx, src, name, dst, name)
}

// copyFile copies what is no directory from one tree to the other, where nothing
// has its path.
func (a *applier) copyFile(path string) error {
	dst, name, err := a.parent(path)
	if err != nil {
		return err
	}
	defer dst.Close()
	dirPath, _ := split(path)
	src, err := treewalk.Open(a.from, dirPath)
	if err != nil {
		return failed(dirPath, "open", err)
	}
	defer src.Close()
	if err := treecopy.CopyEntry(a.ctx, src, dst, name); err != nil {
		return err
	}
	a.note(path)
	// Again, because of the ACL that it has inherited.
	return treecopy.CopyAttributes(a.ctx, src, name, dst, name)
}

// copyTree copies a directory with all that is in it.
func (a *applier) copyTree(path string) error {
	dst, name, err := a.parent(path)
	if err != nil {
		return err
	}
	err = a.clear(dst, name, true)
	if err == nil {
		if err = unix.Mkdirat(int(dst.Fd()), name, 0o700); err == unix.EEXIST {
			err = nil
		}
	}
	dst.Close()
	if err != nil {
		return failed(path, "mkdir", err)
	}
	src, err := treewalk.Open(a.from, path)
	if err != nil {
		return failed(path, "open", err)
	}
	defer src.Close()
	entries, err := treewalk.ReadDirents(src)
	if err != nil {
		return failed(path, "getdents", err)
	}
	for _, e := range entries {
		p := join(path, e.Name)
		if e.Type == unix.DT_DIR {
			err = a.copyTree(p)
		} else {
			err = a.replaceFile(p)
		}
		if err != nil {
			return err
		}
	}
	return a.copyAttributes(path)
}

// replaceFile makes path in onto a copy of the file in from.
func (a *applier) replaceFile(path string) error {
	dir, name, err := a.parent(path)
	if err != nil {
		return err
	}
	defer dir.Close()
	err = unlinkAt(dir, name, 0)
	switch {
	case err == unix.ENOENT:
	case err == unix.EISDIR && a.o.Force:
		err = a.remove(dir, name)
		fallthrough
	default:
		if err != nil {
			return failed(path, "unlink", err)
		}
	}
	return a.copyFile(path)
}

// parallel calls fn for the changes that it is for, several at once. With Force
// one after the other: in a tree that is not as the changes expect, two of their
// files may be one.
func (a *applier) parallel(changes []Change, is func(*Change) bool, fn func(*Change) error) error {
	workers := treewalk.Workers()
	if a.o.Force {
		workers = 0 // beside this one
	}
	c := &comparer{ctx: a.ctx, sem: make(chan struct{}, workers)}
	t := c.tasks()
	for i := range changes {
		if ch := &changes[i]; is(ch) {
			t.do(func() error { return fn(ch) })
		}
		if a.ctx.Err() != nil {
			break
		}
	}
	return errs.Wrap("apply", "", t.wait())
}

// files copies the added files.
func (a *applier) files(changes []Change) error {
	var mu sync.Mutex // for making directories that are missing
	return a.parallel(changes, func(ch *Change) bool {
		return ch.isNew() && ch.Type != Dir && ch.Link == ""
	}, func(ch *Change) error {
		if a.o.Force {
			mu.Lock()
			defer mu.Unlock()
			return a.replaceFile(ch.Path)
		}
		a.done(1, ch.ChangedBytes)
		if err := a.copyFile(ch.Path); err != nil && !a.taken(ch, err) {
			return err
		}
		return nil
	})
}

// missing copies, with Force, what was to be changed but is not there, or is
// something else. New names of files come after it: those files must be there.
func (a *applier) missing(changes []Change) error {
	if !a.o.Force {
		return nil
	}
	for i := range changes {
		ch := &changes[i]
		if ch.Op == Deleted || ch.Path == "." || ch.newName() {
			continue
		}
		dir, name, err := a.parent(ch.Path)
		if err != nil {
			return err
		}
		var st unix.Stat_t
		err = unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
		switch {
		case err == nil && typeOf(uint8(st.Mode&unix.S_IFMT>>12)) == ch.Type:
		case ch.Type != Dir:
			err = a.replaceFile(ch.Path)
		default:
			if err = a.clear(dir, name, true); err == nil {
				err = unix.Mkdirat(int(dir.Fd()), name, 0o700)
			}
		}
		dir.Close()
		if err != nil {
			return failed(ch.Path, "make", err)
		}
	}
	return nil
}

// contents brings the content of files up to date.
func (a *applier) contents(changes []Change) error {
	err := a.parallel(changes, func(ch *Change) bool {
		return ch.Content && ch.Link == "" && !ch.isNew() && ch.Op != Deleted && ch.Type != Dir
	}, func(ch *Change) error {
		defer a.done(1, ch.ChangedBytes)
		if ch.Type != File {
			return a.replaceFile(ch.Path)
		}
		return a.contentUnlessKept(ch)
	})
	if err != nil {
		return err
	}
	return a.otherNames(changes)
}

func (a *applier) contentUnlessKept(ch *Change) error {
	err := a.content(ch)
	if a.o.Keep && errs.Is(err, errs.Conflict) {
		return nil // the other side's choice has no such file
	}
	return err
}

func (a *applier) content(ch *Change) error {
	dirPath, name := split(ch.Path)
	srcDir, err := treewalk.Open(a.from, dirPath)
	if err != nil {
		return failed(dirPath, "open", err)
	}
	defer srcDir.Close()
	src, err := openFile(place{srcDir, name, ch.Path})
	if err != nil {
		return err
	}
	defer src.Close()
	dst, st, err := a.openChanged(ch.Path)
	if err != nil && a.o.Force {
		return a.replaceFile(ch.Path)
	}
	if err != nil {
		return err
	}
	defer dst.Close()
	ranges := ch.ranges
	if a.o.Force || st.Size != ch.SizeBefore || ch.Link != "" || ranges == nil && ch.ChangedBytes > 0 {
		// What is to be changed is not known, so it is found out here.
		var d delta
		c := &comparer{ctx: a.ctx}
		if err := c.readBoth(src, dst, min(st.Size, ch.SizeAfter), nil, &d); err != nil {
			return failed(ch.Path, "read", err)
		}
		if len(d.ranges) > maxRanges {
			d.ranges = []Range{{0, min(st.Size, ch.SizeAfter)}}
		}
		if ch.SizeAfter > st.Size {
			d.ranges = append(d.ranges, Range{st.Size, ch.SizeAfter})
		}
		ranges = d.ranges
	}
	if st.Size != ch.SizeAfter {
		if err := unix.Ftruncate(int(dst.Fd()), ch.SizeAfter); err != nil {
			return failed(ch.Path, "truncate", err)
		}
	}
	for _, r := range ranges {
		if err := a.copyRange(src, dst, r, ch.SizeAfter); err != nil {
			return failed(ch.Path, "write", err)
		}
	}
	return nil
}

// openChanged opens a regular file of onto. Conflict if it is something else: that
// is not opened, as a device may do something then.
func (a *applier) openChanged(path string) (*os.File, unix.Stat_t, error) {
	st, err := fileAt(a.onto, path)
	if err != nil {
		return nil, st, failed(path, "stat", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, st, errs.New(errs.Conflict, op, quote(path), "it is no regular file")
	}

	f, err := treewalk.OpenFlags(a.onto, path, unix.O_RDWR|unix.O_NONBLOCK)
	return f, st, failed(path, "open", err)
}

// copyRange makes a range of dst the same as in src, holes included.
func (a *applier) copyRange(src, dst *os.File, r Range, size int64) error {
	for off := r.From; off < r.To; {
		from, to, err := nextData(src, off, size)
		if err != nil {
			return err
		}
		from, to = min(from, r.To), min(to, r.To)
		if from > off {
			if err := punch(dst, off, from); err != nil {
				return err
			}
		}
		if err := copyData(a.ctx, src, dst, from, to); err != nil {
			return err
		}
		off = max(from, to)
	}
	return nil
}

func punch(f *os.File, from, to int64) error {
	err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, from, to-from)
	if err != unix.EOPNOTSUPP && err != unix.ENOSYS {
		return err
	}
	zero := make([]byte, chunkSize)
	for from < to {
		n, err := f.WriteAt(zero[:min(int64(len(zero)), to-from)], from)
		if err != nil {
			return err
		}
		from += int64(n)
	}
	return nil
}

func copyData(ctx context.Context, src, dst *os.File, from, to int64) error {
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	for from < to {
		if err := ctx.Err(); err != nil {
			return err
		}
		p := (*buf)[:min(int64(len(*buf)), to-from)]
		if err := readFull(src, p, from); err != nil {
			return err
		}
		if _, err := dst.WriteAt(p, from); err != nil {
			return err
		}
		from += int64(len(p))
	}
	return nil
}

// attributes gives all that was made or changed its owner, mode and so on. Not
// other names of a file: that has a change of its own if this side has changed it,
// and else it is as the other side wants it. A new name that became a copy has them
// already.
func (a *applier) attributes(changes []Change) error {
	return a.parallel(changes, func(ch *Change) bool {
		if ch.Op == Deleted || a.skipped[ch.Path] || ch.newName() {
			return false
		}
		return ch.Metadata || ch.Times || ch.Content || ch.isNew()
	}, func(ch *Change) error {
		if ch.Link != "" && a.oneFile(ch.Path, ch.Link) {
			return nil
		}
		err := a.copyAttributes(ch.Path)
		if a.o.Keep && errs.Is(err, errs.Conflict) {
			return nil // the other side's choice has no such file
		}
		return err
	})
}

// times gives the directories in which something was done the times that they
// have in from.
func (a *applier) times(changes []Change, rootBefore *unix.Stat_t) error {
	touched := map[string]bool{}
	moved := map[string]string{} // directories: from their old path to their new one
	for _, ch := range changes {
		if ch.Op == Renamed && ch.Type == Dir {
			moved[ch.From] = ch.Path
		}
	}
	// touch takes a path from before: what was deleted in a directory that was renamed
	// is named by the old one.
	touch := func(dir string) {
		touched[dir] = true
		for p, rest := dir, ""; p != ""; {
			if to, ok := moved[p]; ok {
				touched[to+rest] = true
				return
			}
			up, _ := split(p)
			rest, p = strings.TrimPrefix(dir, up), up
		}
	}
	rootListed := false
	for _, ch := range changes {
		rootListed = rootListed || ch.Path == "."
		if ch.Op == Modified && !ch.isNew() && ch.Type == File {
			continue
		}
		dir, _ := split(ch.Path)
		if ch.Op == Deleted {
			touch(dir)
			continue
		}
		touched[dir] = true
		if ch.Op == Renamed {
			dir, _ = split(ch.From)
			touch(dir)
		}
	}
	for dir := range touched {
		if dir == "" {
			continue
		}
		src, err := treewalk.Open(a.from, dir)
		if err != nil {
			continue // it is not in the result under this name
		}
		if dst, err := treewalk.Open(a.onto, dir); err == nil {
			err = copyTimes(src, dst)
			dst.Close()
			if err != nil {
				src.Close()
				return failed(dir, "utimensat", err)
			}
		}
		src.Close()
	}
	if rootListed || touched[""] {
		return failed("", "utimensat", copyTimes(a.from, a.onto))
	}
	return failed("", "utimensat", setTimes(a.onto, rootBefore.Atim, rootBefore.Mtim))
}

func copyTimes(src, dst *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(src.Fd()), &st); err != nil {
		return err
	}
	return setTimes(dst, st.Atim, st.Mtim)
}

func setTimes(f *os.File, atime, mtime unix.Timespec) error {
	return unix.UtimesNanoAt(unix.AT_FDCWD, procPath(f, ""), []unix.Timespec{atime, mtime}, 0)
}
