package treediff

import (
	"cmp"
	"context"
	"errors"
	"os"
	"slices"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
	"pando/internal/linux/treewalk"
	"pando/internal/tree/treecopy"
)

// stageName is a temporary directory in the root of the tree. Renamed files are first moved
// there, so that names can be swapped and directories moved into each other.
const stageName = ".pando-apply"

// ApplyOptions say how Apply handles a tree that differs from the first tree of the comparison. The
// zero value is for a tree that equals it wherever the changes concern it.
type ApplyOptions struct {
	// Force replaces files that are in the way of a change, and copies missing files
	// from the second tree.
	Force bool
	// Keep keeps a deleted directory that contains other files.
	Keep bool
	// Progress is called with the numbers of changes applied and bytes written since its last call.
	Progress func(changes, bytes int64)
}

// Apply makes the changes that Compare found between some tree and from in
// the tree below the open directory onto. Afterwards, the changed paths are the same as
// in from: content, names, hard links, owners, modes, times, attributes, flags.
// It writes only the differing ranges of changed files. Directories get the times of
// from only if the changes were found with Options.Times.
//
// The caller owns onto: nobody else may use it until Apply returns. Nothing is durable,
// and after an error only some changes have been made. Conflict: a path is not as the changes
// expect. NoSpace, Canceled, IO.
func Apply(ctx context.Context, changes []Change, from, onto *os.File, o ApplyOptions) error {
	a := &applier{ctx: ctx, from: from, onto: onto, o: o, staged: map[string]int{}, skipped: map[string]bool{}}
	err := a.applyAll(changes)
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
	staged     map[string]int // name in the stage, by Change.From

	mu      sync.Mutex
	skipped map[string]bool // with Keep: paths at which the other side's state stays
	copied  map[string]bool // paths that have the attributes of from, "" for the root

	softened []softened // files to be made immutable or append-only again
}

// taken reports whether to skip a change that failed with err because, with Keep, its path
// exists or its directory does not.
func (a *applier) taken(ch *Change, err error) bool {
	if !a.o.Keep || !errs.Is(err, errs.Exists, errs.Conflict) {
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.skipped[ch.Path] = true
	return true
}

func (a *applier) addProgress(n, bytes int64) {
	if a.o.Progress != nil {
		a.o.Progress(n, bytes)
	}
}

// applyAll makes the changes, step by step.
func (a *applier) applyAll(changes []Change) error {
	if len(changes) == 0 {
		return nil
	}

	// Prepare the tree.
	rootBefore, err := kernel.Stat(int(a.onto.Fd()))
	if err != nil {
		return failed("", "stat", err)
	}

	defer a.closeSoftened()

	if err := a.unprotect(changes); err != nil {
		return errs.Wrap("apply", "", err)
	}

	if err := unix.Mkdirat(int(a.onto.Fd()), stageName, 0o700); err != nil {
		return failed(stageName, "mkdir", err)
	}

	if a.stage, err = treewalk.Open(a.onto, stageName); err != nil {
		return failed(stageName, "open", err)
	}

	defer a.stage.Close()

	// Make the changes. Times and flags come last.
	for _, step := range []func([]Change) error{a.moveOut, a.moveIn, a.applyFiles, a.missing, a.applyLinks,
		a.applyContents, a.applyAttributes} {
		if err := step(changes); err != nil {
			return err
		}
	}

	if err := unix.Unlinkat(int(a.onto.Fd()), stageName, unix.AT_REMOVEDIR); err != nil {
		return failed(stageName, "rmdir", err)
	}

	if err := a.applyTimes(changes, &rootBefore); err != nil {
		return err
	}

	return a.applyFlags(changes)
}

// moveOut removes deleted paths, and moves renamed ones into the stage, the deepest
// first.
func (a *applier) moveOut(changes []Change) error {
	// List the paths.
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

	// Move or remove them.
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

		// The path may not exist. With Keep, it may have been in a directory that the other side has replaced.
		if (a.o.Force || a.o.Keep) && errs.IsAny(err, unix.ENOENT, unix.ENOTDIR, unix.ELOOP) {
			err = nil
		}
		if err != nil {
			return failed(l.path, "remove", err)
		}
	}

	return nil
}

// remove removes a file or directory. With Keep or Force, it succeeds if that does not exist.
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

// removeAll removes a directory and everything in it.
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

// moveIn creates the added directories, and moves renamed paths to their new place.
func (a *applier) moveIn(changes []Change) error {
	// List the changes, parent directories first.
	var coming []Change
	for _, ch := range changes {
		if ch.Op == Renamed || ch.isNew() && ch.Type == Dir {
			coming = append(coming, ch)
		}
	}

	slices.SortFunc(coming, func(x, y Change) int {
		return cmp.Or(cmp.Compare(depth(x.Path), depth(y.Path)), cmp.Compare(x.Path, y.Path))
	})

	// Make them.
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
			err = a.clearWay(dir, name, false)
			if err == nil {
				err = a.copyFile(ch.Path)
			}
		case !isStaged && ch.Op == Renamed:
			err = a.copyTree(ch.Path)
		case isStaged:
			if err = a.clearWay(dir, name, false); err == nil {
				err = unix.Renameat(int(a.stage.Fd()), strconv.Itoa(n), int(dir.Fd()), name)
			}
		default:
			if err = a.clearWay(dir, name, true); err == nil {
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

		a.addProgress(1, 0)
	}

	return nil
}

// clearWay removes a path that is in the way of a new file, with Force.
func (a *applier) clearWay(dir *os.File, name string, forDir bool) error {
	if !a.o.Force {
		return nil
	}

	st, err := kernel.Lstat(int(dir.Fd()), name)
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

// parent opens the directory of a path in onto. With Force, it creates a missing directory.
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
	if err = a.clearWay(up, upName, true); err == nil {
		if err = unix.Mkdirat(int(up.Fd()), upName, 0o700); err == nil {
			err = a.copyAttributes(dirPath)
		}
	}
	if err == nil {
		dir, err = treewalk.Open(a.onto, dirPath)
	}

	return dir, name, failed(dirPath, "make", err)
}

// copyAttributes copies the attributes of a path from one tree to the other.
func (a *applier) copyAttributes(path string) error {
	a.rememberFlags(path)
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

// copyFile copies a file that is not a directory from one tree to the other, in which the path
// must not exist.
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

	a.rememberFlags(path)

	// Copy the attributes again, because the file may have inherited an ACL.
	return treecopy.CopyAttributes(a.ctx, src, name, dst, name)
}

// copyTree copies a directory with all its content.
func (a *applier) copyTree(path string) error {
	dst, name, err := a.parent(path)
	if err != nil {
		return err
	}

	err = a.clearWay(dst, name, true)
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

// parallel calls fn concurrently for the changes for which is returns true. With Force, it calls fn
// sequentially, because in a tree that the changes do not expect, two of the
// files may be the same.
func (a *applier) parallel(changes []Change, is func(*Change) bool, fn func(*Change) error) error {
	workers := treewalk.Workers()
	if a.o.Force {
		workers = 0 // besides this goroutine
	}

	c := &comparer{ctx: a.ctx, sem: make(chan struct{}, workers)}
	t := c.tasks()
	for i := range changes {
		if ch := &changes[i]; is(ch) {
			t.start(func() error { return fn(ch) })
		}
		if a.ctx.Err() != nil {
			break
		}
	}

	return errs.Wrap("apply", "", t.wait())
}
