package treecopy

import (
	"bytes"
	"context"
	"errors"
	"os"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
	"pando/internal/linux/treewalk"
)

// Stable is the result of CopyStable.
type Stable struct {
	Totals        // Files and Bytes are those of the source; Skipped is the sum of all copies
	Passes  int   // number of copies, including the first
	Again   int64 // directories that were copied again
	Stamp   *Stamp
	Changed []string // with Conflict: some of the changed paths
}

// CopyStable is CopyDir for a source to which programs may be writing. The copy
// is the state of the source at one moment, proved by equal Stamps before and after.
// If they differ, CopyStable copies the changed directories again, up to passes copies in
// total, at least one. Conflict: the source also changed during the last copy; the error names
// examples. Stable.Stamp is the state of the copy; with an error, the last state.
//
// The unit is a directory with the files directly in it. If hard
// links are among them, or without root, everything is copied again.
//
// After an error, dst contains parts of the tree. Data is not synced.
func CopyStable(ctx context.Context, src string, dst *os.File, opt Options, passes int) (Stable, error) {
	// Take the first stamp.
	opt.losses = &losses{}
	quiet := opt // without progress, for everything except the first copy
	quiet.Progress = nil
	var r Stable
	var err error
	if r.Stamp = opt.Before; r.Stamp == nil {
		if r.Stamp, _, err = TakeStamp(ctx, src, nil, quiet); err != nil {
			return r, err
		}
	}

	for r.Passes = 1; ; r.Passes++ {
		// Copy everything, or what has changed.
		spare := newDirtySet()
		var n Totals
		if r.Passes == 1 {
			n, err = copyTree(ctx, src, dst, opt, spare)
		} else {
			r.Again += r.Stamp.Changed()
			if opt.Pass != nil {
				opt.Pass(r.Passes, r.Stamp.Changed())
			}
			n, err = copyChanged(ctx, src, dst, quiet, r.Stamp, spare)
			if errors.Is(err, errAll) {
				opt.losses.forgetAll()
				if err = empty(ctx, dst); err == nil {
					spare = newDirtySet()
					n, err = copyTree(ctx, src, dst, quiet, spare)
				}
			}
		}

		r.Skipped.add(n.Skipped)
		if err != nil {
			return r, err
		}

		// Find what has changed in the meantime.
		before := r.Stamp
		var now Totals
		if r.Stamp, now, err = TakeStamp(ctx, src, before, quiet); err != nil {
			return r, err
		}

		r.Stamp.merge(spare)
		r.Files, r.Bytes = now.Files, now.Bytes
		r.NotKept = opt.losses.list(r.Stamp.has)
		if r.Stamp.Changed() == 0 {
			return r, nil
		}

		if r.Passes >= passes {
			r.Changed = r.Stamp.Paths(before, 5)
			return r, errs.New(errs.Conflict, op, quote(src),
				"it keeps changing: each of %d copies was overtaken by changes, for example of %s",
				r.Passes, strings.Join(r.Changed, ", ")).WithHint("stop the programs that write to it, or import a snapshot")
		}
	}
}

func (s *Skipped) add(o Skipped) {
	s.Owners += o.Owners
	s.Devices += o.Devices
	s.Xattrs += o.Xattrs
	s.KernelDirs = o.KernelDirs // each walk sees all of them, or none
}

// CopyAttrs copies the owner, mode, times, extended attributes, flags and
// project of the directory src to the directory dst, as far as its filesystem supports them. dst does
// not become immutable or append-only.
func CopyAttrs(src string, dst *os.File, opt Options) error {
	defer runtime.KeepAlive(dst)
	c := newCopier(opt)
	d, err := openSource(src, opt)
	if err != nil {
		return err
	}

	defer d.unpin()
	xs, err := c.readXattrs(&worker{}, openObject(d.src), d.path)
	if err != nil {
		return err
	}

	d.flags = readFlags(d.src)
	d.flags.flags &^= protectFlags
	return c.set.applyAttrs(openObject(int(dst.Fd())), d.path, d.attrs, xs)
}

// errAll means that everything has to be copied again.
var errAll = errors.New("copy everything")

// updater is the visitor that copies the changed directories of a Stamp again. In each
// of them it copies everything except existing subdirectories, which count on
// their own. It does not touch the rest of the tree.
type updater struct {
	*copier
	s *Stamp
}

// copyChanged copies the changed directories of s again. errAll: everything has to be copied again.
func copyChanged(
	ctx context.Context, src string, dst *os.File, opt Options, s *Stamp, spare *dirtySet,
) (Totals, error) {
	if opt.Unprivileged {
		return Totals{}, errAll // the modes in the copy may lock out the caller
	}

	u := &updater{copier: newCopier(opt), s: s}
	u.links.m = make(map[Inode]link)
	defer runtime.KeepAlive(dst)

	root, err := openSource(src, opt)
	if err != nil {
		return Totals{}, err
	}

	u.links.overlay = isOverlay(root.src)
	var st unix.Stat_t
	if root.dst, err = openRoot(dst); err == nil {
		if err = unix.Fstat(root.dst, &st); err != nil {
			err = dstErr(dst.Name(), "stat", err)
		}
	}
	if err == nil {
		u.dstID = inode(&st)
		_, root.dirty = s.dirty[rootKey]
		if root.dirty {
			err = u.clear(ctx, &worker{}, root)
		}
	}
	if err != nil {
		root.unpin()
		return Totals{}, err
	}

	// Update the tree.
	xattrs := root.xattrs // the walk drops them
	if err = newWalk(u, true, opt).sparing(spare).runWorkers(ctx, root); err == nil && root.dirty {
		err = u.set.applyRoot(int(dst.Fd()), root.path, root.attrs, xattrs)
	}

	return u.n.totals(), err
}

// enter opens a subdirectory if it, a directory below it or its parent has changed.
func (u *updater) enter(w *worker, parent *dir, e entry) (*dir, error) {
	if parent.whole {
		return u.copyAnew(w, parent, e)
	}

	key := childKey(parent, e.name)
	_, dirty := u.s.dirty[key]
	_, way := u.s.way[key]
	if !dirty && !way && !parent.dirty {
		return nil, nil
	}

	fd, err := openDir(parent.dst, e.name)
	if err == unix.ENOENT && parent.dirty {
		return u.copyAnew(w, parent, e)
	}
	if err == unix.ENOENT || err == unix.ENOTDIR || err == unix.ELOOP {
		return nil, changed(parent.join(e.name)) // after the stamp
	}
	if err != nil {
		return nil, dstErr(parent.join(e.name), "open", err)
	}

	if !dirty && !way {
		unix.Close(fd)
		return nil, nil
	}

	d, err := u.enterSource(parent, e)
	if d == nil {
		unix.Close(fd)
		return nil, err
	}

	d.dst, d.dirty = fd, dirty
	if dirty {
		err = u.clear(w.t.ctx, w, d)
	}
	if err != nil {
		d.unpin()
		return nil, err
	}

	return d, nil
}

// copyAnew copies a directory that the copy does not have, regardless of the stamp.
func (u *updater) copyAnew(w *worker, parent *dir, e entry) (*dir, error) {
	d, err := u.copier.enter(w, parent, e)
	if d != nil {
		d.whole = true
		u.n.losses.forget(d.key)
	}
	return d, err
}

func (u *updater) file(w *worker, d *dir, e entry) error {
	if !d.dirty && !d.whole {
		return nil
	}
	st, err := kernel.Lstat(d.src, e.name)
	if err != nil {
		return srcErr(d.join(e.name), "stat", err)
	}
	if st.Nlink > 1 {
		return errAll // its other names may be anywhere in the copy
	}
	return u.copier.file(w, d, e)
}

func (u *updater) leave(w *worker, d *dir) error {
	if !d.dirty && !d.whole {
		return nil
	}
	return u.copier.leave(w, d)
}

// clear prepares the copy of d to be filled again. It removes everything except
// the subdirectories that d still has, and also attributes and flags, because new entries would inherit
// a default ACL and flags.
func (u *updater) clear(ctx context.Context, w *worker, d *dir) error {
	// Read the new attributes.
	var err error
	if d.xattrs, err = u.readXattrs(w, openObject(d.src), d.path); err != nil {
		return err
	}

	// Remove the old ones.
	d.flags = readFlags(d.src)
	u.n.losses.forget(d.key)
	if err := clearFlags(d.dst); err != nil {
		return dstErr(d.path(), "clearing flags", err)
	}

	names := make([]byte, 64<<10)
	n, err := unix.Flistxattr(d.dst, names)
	if err != nil && err != unix.EOPNOTSUPP {
		return dstErr(d.path(), "listxattr", err)
	}

	for raw := range bytes.SplitSeq(names[:max(n, 0)], []byte{0}) {
		name := string(raw)
		// An SELinux label cannot be removed, only changed.
		if name == "" || foreign(name) || double(name) || name == "security.selinux" {
			continue
		}
		if err := unix.Fremovexattr(d.dst, name); err != nil && err != unix.ENODATA {
			return dstErr(d.path(), "removing attribute "+quote(name), err)
		}
	}

	return remove(ctx, d.dst, func(name string) bool {
		var st unix.Stat_t
		return !d.kernel && unix.Fstatat(d.src, name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil &&
			st.Mode&unix.S_IFMT == unix.S_IFDIR
	})
}

// empty removes everything in the directory dst.
func empty(ctx context.Context, dst *os.File) error {
	defer runtime.KeepAlive(dst)
	fd, err := openRoot(dst)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := clearFlags(fd); err != nil {
		return dstErr(dst.Name(), "clearing flags", err)
	}
	return remove(ctx, fd, func(string) bool { return false })
}

// remove removes everything in the directory fd except the subdirectories for which keep
// returns true.
func remove(ctx context.Context, fd int, keep func(name string) bool) error {
	at, err := openDir(fd, ".") // with an offset of its own
	if err != nil {
		return dstErr("", "open", err)
	}

	defer unix.Close(at)

	// List all entries before removing any.
	var doomed []treewalk.Dirent
	for buf := make([]byte, 32<<10); ; {
		n, err := retry(func() (int, error) { return unix.Getdents(at, buf) })
		if err != nil {
			return dstErr("", "getdents", err)
		}
		if n == 0 {
			break
		}
		for e := range treewalk.Dirents(buf[:n]) {
			if e.Name != "." && e.Name != ".." {
				doomed = append(doomed, e)
			}
		}
	}

	for _, e := range doomed {
		isDir := e.Type == unix.DT_DIR
		if e.Type == unix.DT_UNKNOWN {
			var st unix.Stat_t
			isDir = unix.Fstatat(fd, e.Name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR
		}

		switch {
		case isDir && keep(e.Name):
		case isDir:
			if err := treewalk.Remove(ctx, "/proc/self/fd/"+strconv.Itoa(fd)+"/"+e.Name); err != nil {
				return err
			}
		default:
			if err := treewalk.Unlink(fd, e.Name, 0); err != nil && err != unix.ENOENT {
				return dstErr(e.Name, "unlink", err)
			}
		}
	}

	return nil
}
