package treecopy

import (
	"bytes"
	"context"
	"errors"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
)

// CopyDir copies everything below the directory src into the empty directory dst,
// and the attributes of src itself except its mode. It includes other filesystems mounted
// below src, except those of the kernel (see Skipped).
//
// The path src may lead through symbolic links.
//
// After an error or a cancellation, dst contains a part of the tree. On return, all
// work has stopped. Data is not synced.
func CopyDir(ctx context.Context, src string, dst *os.File, opt Options) (Totals, error) {
	return copyTree(ctx, src, dst, opt, nil)
}

// copyTree is CopyDir. With spare, changes during the copy are not errors: copyTree adds the changed
// directories to spare, and the content of their copies is undefined.
func copyTree(ctx context.Context, src string, dst *os.File, opt Options, spare *dirtySet) (Totals, error) {
	// Open the destination.
	c := newCopier(opt)
	c.links.m = make(map[Inode]link)
	defer runtime.KeepAlive(dst)

	rootFD, err := openRoot(dst)
	if err != nil {
		return Totals{}, err
	}

	defer unix.Close(rootFD)

	st, err := kernel.Stat(rootFD)
	if err != nil {
		return Totals{}, dstErr(dst.Name(), "stat", err)
	}

	c.dstID = inode(&st)

	// Open the source.
	root, err := openSource(src, opt)
	if err != nil {
		return Totals{}, err
	}

	if err := c.exclude(root); err != nil {
		root.unpin()
		return Totals{}, err
	}

	xattrs, err := c.readXattrs(&worker{}, openObject(root.src), root.path)
	if err != nil {
		root.unpin()
		return Totals{}, err
	}

	stage, err := openStage(rootFD, opt)
	if err != nil {
		root.unpin()
		return Totals{}, err
	}

	c.links.overlay = isOverlay(root.src)

	// Copy the tree, then set flags and the attributes of the root.
	root.flags = readFlags(root.src)
	root.dst, c.staged = stage.fd, stage.name != "" // from now on, the walk owns the descriptor
	if err = newWalk(c, true, opt).sparing(spare).runWorkers(ctx, root); err == nil {
		err = stage.finish()
	}
	if err == nil {
		err = c.late.applyLate(ctx, &c.set, dst, func(i lateItem) string { return i.dir.(*dir).join(i.name) })
	}
	if err == nil {
		err = c.set.applyRoot(rootFD, root.path, root.attrs, xattrs)
	}

	return c.n.totals(), err
}

// applyRoot sets the attributes of a volume's root. Without ownRoot, other users must be
// able to enter it, and it must be possible to create files in it.
func (s *setter) applyRoot(fd int, path func() string, a attrs, xs []xattr) error {
	o := openObject(fd).in(rootKey)
	setHints(fd, a.flags)
	if !s.ownRoot {
		a.mode = unix.S_IFDIR | 0o755
		if a.flags.flags&protectFlags != 0 {
			s.n.countLoss(LostRootFlags, o, path)
		}
		a.flags.flags &^= protectFlags
	}
	return s.applyAttrs(o, path, a, xs)
}

// openSource opens the root of a source. The result has one pin and one pending part.
func openSource(src string, opt Options) (*dir, error) {
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS}
	by, err := retry(func() (int, error) {
		if opt.Resolved {
			return unix.Openat2(unix.AT_FDCWD, src, &how)
		}
		return unix.Open(src, int(how.Flags), 0)
	})

	fd := -1
	if err == nil {
		fd, err = openDir(by, ".")
		unix.Close(by)
	}
	if err == unix.ENOTDIR {
		return nil, errs.New(errs.Invalid, op, quote(src), "it is not a directory")
	}

	if err == unix.ELOOP && opt.Resolved {
		return nil, errs.New(errs.Conflict, op, quote(src),
			"this directory, or one above it, was replaced with a symbolic link").
			WithHint("check who can write to the directories above it, then retry")
	}

	if err != nil {
		return nil, sysErr(src, "open", err)
	}

	d := &dir{name: strings.TrimRight(src, "/"), key: rootKey, src: fd, dst: -1, pins: 1, pending: 1}
	st, err := kernel.Stat(fd)
	if err != nil {
		d.unpin()
		return nil, srcErr(src, "stat", err)
	}

	d.setStat(&st)
	return d, nil
}

func (d *dir) setStat(st *unix.Stat_t) {
	d.id, d.attrs, d.ctime = inode(st), attrsOf(st), st.Ctim
}

// common contains what Measure and CopyDir have in common.
type common struct {
	n        *counters
	excluded map[Inode]bool
}

func newCommon(opt Options) common {
	c := common{n: newCounters(opt), excluded: make(map[Inode]bool)}
	for _, id := range opt.Exclude {
		c.excluded[id] = true
	}
	return c
}

func (c *common) exclude(root *dir) error {
	if c.excluded[root.id] {
		return errs.New(errs.Invalid, op, quote(root.path()), "it is excluded because it contains the pool")
	}
	return nil
}

// enterSource opens a subdirectory of the source. It returns nil if that is excluded.
func (c *common) enterSource(parent *dir, e entry) (*dir, error) {
	fd, err := openDir(parent.src, e.name)
	if err != nil {
		return nil, srcErr(parent.join(e.name), "open", err)
	}

	d := &dir{parent: parent, name: e.name, key: childKey(parent, e.name), src: fd, dst: -1, pins: 1, pending: 1}
	st, err := kernel.Stat(fd)
	if err != nil {
		d.unpin()
		return nil, srcErr(d.path(), "stat", err)
	}

	d.setStat(&st)
	if c.excluded[d.id] {
		d.unpin()
		return nil, nil
	}

	if d.id.Dev != parent.id.Dev && kernelFS(fd) {
		d.kernel = true
		c.n.kernelDirs.Add(1)
	}

	return d, nil
}

// kernelFS reports whether fd is on a filesystem whose files are not data but
// interfaces of the running kernel.
func kernelFS(fd int) bool {
	var st unix.Statfs_t
	if unix.Fstatfs(fd, &st) != nil {
		return false
	}

	switch uint32(st.Type) {
	case unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP_SUPER_MAGIC, unix.CGROUP2_SUPER_MAGIC,
		unix.DEBUGFS_MAGIC, unix.TRACEFS_MAGIC, unix.SECURITYFS_MAGIC, unix.SELINUX_MAGIC, unix.SMACK_MAGIC,
		unix.BPF_FS_MAGIC, unix.PSTOREFS_MAGIC, unix.EFIVARFS_MAGIC, unix.DEVPTS_SUPER_MAGIC,
		unix.BINFMTFS_MAGIC, unix.NSFS_MAGIC, unix.RDTGROUP_SUPER_MAGIC, unix.AUTOFS_SUPER_MAGIC,
		0x62656570 /* configfs */, 0x19800202 /* mqueue */, 0x65735543 /* fusectl */, 0x67596969 /* rpc_pipefs */ :
		return true
	}

	return false
}

// copier is the visitor of CopyDir.
type copier struct {
	common
	set     setter
	dstID   Inode
	links   links
	staged  bool // the entries of the root are moved at the end
	noFlags bool // copy no flags except hints

	mu   sync.Mutex
	late lateFlags
}

func newCopier(opt Options) *copier {
	c := &copier{common: newCommon(opt)}
	c.set = setter{n: c.n, unprivileged: opt.Unprivileged, ownRoot: opt.OwnRoot}
	return c
}

// postponeFlags removes flags that would be in the way of the copy from the attributes of
// name in d, so that they are set at the end. nlink is the number of names of the file.
func (c *copier) postponeFlags(d *dir, name string, nlink uint64, a *attrs) {
	if a.flags.none() || nlink <= 1 && !(c.staged && d.parent == nil) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.late.items = append(c.late.items, lateItem{d, d.key, name, a.flags})
	a.flags = fileFlags{}
}

func (c *copier) enter(w *worker, parent *dir, e entry) (*dir, error) {
	d, err := c.enterSource(parent, e)
	if d == nil {
		return nil, err
	}
	err = c.makeDir(w, parent, d)
	if err != nil {
		d.unpin()
		return nil, err
	}
	c.n.addProgress(1, 0)
	return d, nil
}

func (c *copier) makeDir(w *worker, parent, d *dir) error {
	if d.id == c.dstID {
		return errs.New(errs.Invalid, op, quote(d.path()), "the source contains the destination")
	}

	var err error
	if d.xattrs, err = c.readXattrs(w, openObject(d.src), d.path); err != nil {
		return err
	}

	d.flags = readFlags(d.src)
	err = retry0(func() error { return unix.Mkdirat(parent.dst, d.name, 0o700) })
	if err == unix.EEXIST && parent.parent == nil && d.name == lostFound {
		err = nil // a fresh ext4 has it
	}
	if err != nil {
		return dstErr(d.path(), "mkdir", err)
	}

	if d.dst, err = openDir(parent.dst, d.name); err != nil {
		return dstErr(d.path(), "open", err)
	}

	return nil
}

func (c *copier) leave(w *worker, d *dir) error {
	if d.parent == nil {
		return nil // CopyDir does the root, after the staging
	}
	setHints(d.dst, d.flags)
	c.postponeFlags(d.parent, d.name, 1, &d.attrs)
	return c.set.applyAttrs(openObject(d.dst).in(d.key), d.path, d.attrs, d.xattrs)
}

func (c *copier) file(w *worker, d *dir, e entry) error {
	if e.typ == unix.DT_REG {
		return c.regular(w, d, e)
	}

	st, err := kernel.Lstat(d.src, e.name)
	if err != nil {
		return srcErr(d.join(e.name), "stat", err)
	}

	if uint8(st.Mode&unix.S_IFMT>>12) != e.typ {
		return changed(d.join(e.name))
	}

	if st.Nlink > 1 {
		linked, err := c.links.create(d, e.name, &st, func() error { return c.special(d, e.name, &st) })
		if linked || err != nil {
			c.n.addProgress(1, 0)
			return skipped(err)
		}
	} else if err := c.special(d, e.name, &st); err != nil {
		c.n.addProgress(1, 0)
		return skipped(err)
	}

	path := func() string { return d.join(e.name) }
	xs, err := c.readXattrs(w, namedObject(d.src, e.name), path)
	if err != nil {
		return err
	}

	c.n.addProgress(1, 0)
	a := attrsOf(&st)
	if !c.noFlags {
		a.flags = readSpecialFlags(d.src, e.name)
	}

	c.postponeFlags(d, e.name, uint64(st.Nlink), &a)
	return c.set.applyAttrs(namedObject(d.dst, e.name).in(d.key), path, a, xs)
}

// errSkipped means that a file was left out and counted.
var errSkipped = errors.New("skipped")

func skipped(err error) error {
	if err == errSkipped {
		return nil
	}
	return err
}

// special makes a symbolic link, device node, fifo or socket.
func (c *copier) special(d *dir, name string, st *unix.Stat_t) error {
	if st.Mode&unix.S_IFMT == unix.S_IFLNK {
		buf := make([]byte, max(int(st.Size)+1, 256))
		n, err := retry(func() (int, error) { return unix.Readlinkat(d.src, name, buf) })
		if err != nil {
			return srcErr(d.join(name), "readlink", err)
		}
		if n == len(buf) {
			return changed(d.join(name))
		}
		return c.set.symlink(string(buf[:n]), namedObject(d.dst, name).in(d.key), func() string { return d.join(name) })
	}

	return c.set.mknod(namedObject(d.dst, name).in(d.key), st.Mode, st.Rdev, func() string { return d.join(name) })
}

// symlink makes a symbolic link. If the target is too long for the filesystem, it counts the link as lost
// and returns errSkipped.
func (s *setter) symlink(target string, o object, path func() string) error {
	err := unix.Symlinkat(target, o.at, o.name)
	switch {
	case err == unix.ENAMETOOLONG && len(target) > len(o.name): // XFS supports at most 1023 bytes
		s.n.countLoss(LostSymlinks, o, path)
		return errSkipped
	case err != nil:
		return dstErr(path(), "symlink", err)
	}
	return nil
}

// mknod makes a device node, fifo or socket that only its owner can use.
// If the filesystem does not support the device number, it counts the node as lost and returns errSkipped.
func (s *setter) mknod(o object, mode uint32, rdev uint64, path func() string) error {
	err := unix.Mknodat(o.at, o.name, mode&unix.S_IFMT|0o600, int(rdev))
	isDevice := mode&unix.S_IFMT == unix.S_IFBLK || mode&unix.S_IFMT == unix.S_IFCHR
	switch {
	case err == unix.EPERM && s.unprivileged:
		s.n.devices.Add(1)
		return errSkipped
	case err == unix.EINVAL && isDevice: // XFS supports 14 and 18 bits
		s.n.countLoss(LostDevices, o, path)
		return errSkipped
	case err != nil:
		return dstErr(path(), "mknod", err)
	}

	return nil
}

// links remembers the first copied name of each file with several hard links. It removes an
// entry when it has seen all names of the file. There may be half a million entries, so
// they are small.
type links struct {
	mu      sync.Mutex
	m       map[Inode]link
	overlay bool // see linkID
}

type link struct {
	d    *dir
	name uint32 // offset in d.linkNames
	left uint32 // number of names not seen yet
}

// create creates name in d, a copy of the source's inode st. It calls makeIt for the first
// name of the inode, and makes hard links to that for the others, even if its content
// is still being copied.
func (l *links) create(d *dir, name string, st *unix.Stat_t, makeIt func() error) (linked bool, err error) {
	// Create the first name.
	id := linkID(st, l.overlay)
	l.mu.Lock()
	first, ok := l.m[id]
	if !ok {
		defer l.mu.Unlock()
		if err := makeIt(); err != nil {
			return false, err
		}
		l.m[id] = link{d, uint32(len(d.linkNames)), uint32(st.Nlink - 1)}
		d.linkNames = append(append(d.linkNames, name...), 0)
		return false, nil
	}

	// Link the others to it.
	rest := first.d.linkNames[first.name:]
	old := string(rest[:bytes.IndexByte(rest, 0)])
	first.left--
	if first.left == 0 {
		delete(l.m, id)
	} else {
		l.m[id] = first
	}

	l.mu.Unlock()
	err = linkTo(first.d, old, d, name)
	if err != nil {
		return true, dstErr(d.join(name), "link", err)
	}

	return true, nil
}

// linkTo makes name in d a hard link to old in from.
func linkTo(from *dir, old string, d *dir, name string) error {
	if from == d {
		return unix.Linkat(d.dst, old, d.dst, name, 0)
	}

	// Walk down from the nearest open directory above it. Nobody else writes to the copy, so no
	// component is a symbolic link.
	var down []string
	for ; !from.tryPin(); from = from.parent { // the root stays open until the end
		down = append(down, from.name)
	}

	defer from.unpin()

	at, rel := from.dst, ""
	for _, n := range slices.Backward(down) {
		rel += n + "/"
		if len(rel) <= unix.PathMax-2*256 {
			continue
		}
		next, err := unix.Openat(at, rel, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if at != from.dst {
			unix.Close(at)
		}
		if err != nil {
			return err
		}
		at, rel = next, ""
	}

	err := unix.Linkat(at, rel+old, d.dst, name, 0)
	if at != from.dst {
		unix.Close(at)
	}

	return err
}
