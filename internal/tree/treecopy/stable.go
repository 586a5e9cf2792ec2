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
	"pando/internal/linux/treewalk"
)

// Stable is the result of CopyStable.
type Stable struct {
	Totals        // Files and Bytes are those of the source; Skipped is of all copies together
	Passes  int   // copies that were made, the first included
	Again   int64 // directories that were copied again
	Stamp   *Stamp
	Changed []string // with Conflict: some of what changed
}

// CopyStable is CopyDir for a source that may be written to at the same time: the copy
// is the source at one moment, which is proved by a Stamp before and one after.
// If they differ, what has changed is copied again, and so on: passes copies in
// all, at least one. If something changed during the last one too, the error is
// of kind Conflict and names what. Result.Stamp is the moment that the copy is
// of; with an error, the last one.
//
// What has changed is a directory with the files directly in it. Only if hard
// links are among them, or without root, everything is copied again.
//
// After an error dst holds something of the tree. Data is not synced.
func CopyStable(ctx context.Context, src string, dst *os.File, opt Options, passes int) (Stable, error) {
	opt.losses = &losses{}
	quiet := opt // for looking, which is no progress
	quiet.Progress = nil
	var r Stable
	var err error
	if r.Stamp = opt.Before; r.Stamp == nil {
		if r.Stamp, _, err = TakeStamp(ctx, src, nil, quiet); err != nil {
			return r, err
		}
	}

	for r.Passes = 1; ; r.Passes++ {
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
	s.KernelDirs = o.KernelDirs // every walk sees all of them, or none
}

// CopyAttrs gives the directory dst owner, mode, times, extended attributes, flags and
// project of the directory src, as far as they are possible there. It becomes neither
// immutable nor append-only.
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

// errAll says that only a whole new copy will do.
var errAll = errors.New("copy everything")

// updater is the visitor that copies again what a Stamp says has changed: in each
// such directory everything but the subdirectories that are still there, which
// have changed themselves or not. The rest of the tree is left alone.
type updater struct {
	*copier
	s *Stamp
}

func copyChanged(
	ctx context.Context, src string, dst *os.File, opt Options, s *Stamp, spare *dirtySet,
) (Totals, error) {
	if opt.Unprivileged {
		return Totals{}, errAll // the modes of the copy keep its owner out, too
	}

	u := &updater{copier: newCopier(opt), s: s}
	u.links.m = make(map[Inode]link)
	defer runtime.KeepAlive(dst)

	root, err := openSource(src, opt)
	if err != nil {
		return Totals{}, err
	}

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

	xattrs := root.xattrs // the walk drops them
	if err = newWalk(u, true, opt).sparing(spare).runWorkers(ctx, root); err == nil && root.dirty {
		err = u.set.applyRoot(int(dst.Fd()), root.path, root.attrs, xattrs)
	}

	return u.n.totals(), err
}

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
		return nil, changed(parent.join(e.name)) // since the stamp
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

// copyAnew copies a directory that the copy does not have, whatever the stamp says.
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
	var st unix.Stat_t
	if err := unix.Fstatat(d.src, e.name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return srcErr(d.join(e.name), "stat", err)
	}
	if st.Nlink > 1 {
		return errAll // its other links may be anywhere in the copy
	}
	return u.copier.file(w, d, e)
}

func (u *updater) leave(w *worker, d *dir) error {
	if !d.dirty && !d.whole {
		return nil
	}
	return u.copier.leave(w, d)
}

// clear makes the copy of d ready to be filled again: it loses everything but
// the subdirectories that d still has, and its attributes. A default ACL and flags
// would be inherited by what is made in it.
func (u *updater) clear(ctx context.Context, w *worker, d *dir) error {
	var err error
	if d.xattrs, err = u.readXattrs(w, openObject(d.src), d.path); err != nil {
		return err
	}

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
		// A label cannot be removed, only changed.
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

// empty removes what is in the directory dst.
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

// remove removes everything in the directory fd but the subdirectories that are
// to be kept.
func remove(ctx context.Context, fd int, keep func(name string) bool) error {
	at, err := openDir(fd, ".") // with an offset of its own
	if err != nil {
		return dstErr("", "open", err)
	}

	defer unix.Close(at)

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
