package btrfsstream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
	"pando/internal/linux/treewalk"

	"golang.org/x/sys/unix"
)

// tree is the tree that Apply builds.
type tree struct {
	begin Begin
	root  *os.File
	base  *os.File // nil without a base

	// f is the last written file, and path its path. It stays open because most commands
	// are consecutive writes to one file. A command that may change what path refers to closes it.
	f    *os.File
	path string

	// times are the access and modification times of the root: the last ones in the stream or,
	// before, those of the base. They are set at the end, because streams create objects in the
	// root and then move them, and do not always restore its times afterwards.
	times []unix.Timespec

	noEncoded bool // the filesystem does not accept compressed data
	decoder   decoder
}

// Apply executes the stream s, whose Begin has been read, in the directory root, which nobody
// else may use until it returns. root is the root of an empty subvolume or, if begin.Diff is set,
// of a writable snapshot of base, the root of another subvolume, which does not change. Apply reads
// all of s, and syncs nothing. After an error the tree is unusable.
//
// Damaged: s is damaged or does not match base. Unsupported, NoSpace, IO, Permission, errors
// of reading s. It checks ctx between commands.
func Apply(ctx context.Context, s *Reader, begin Begin, root, base *os.File) error {
	t := &tree{begin: begin, root: root, base: base}
	st, err := kernel.Stat(int(root.Fd()))
	if err != nil {
		return err
	}

	t.times = []unix.Timespec{st.Atim, st.Mtim}
	err = t.all(ctx, s)
	if err == nil {
		err = unix.UtimesNanoAt(int(root.Fd()), ".", t.times, 0)
	}

	if cerr := t.closeFile(); err == nil {
		err = cerr
	}

	t.decoder.close()
	return err
}

// all executes the commands up to the end of the stream.
func (t *tree) all(ctx context.Context, s *Reader) error {
	for {
		if err := ctx.Err(); err != nil {
			return err
		}

		c, err := s.next()
		if err != nil {
			return err
		}
		if c.typ == cmdEnd {
			return s.end()
		}

		err = t.do(c)
		if errors.Is(err, unix.EPERM) && c.err == nil && t.soften(c) {
			err = t.do(c)
		}
		if c.err != nil {
			return c.err
		}
		if err != nil {
			return explain(c, err)
		}
	}
}

// explain returns the error of a command with its kind.
func explain(c *command, err error) error {
	var e *errs.Error
	if errors.As(err, &e) {
		return err
	}

	path := string(c.attr[attrPath])
	kind := errs.KindOf(err)
	switch kind {
	case errs.NoSpace, errs.IO, errs.Permission, errs.Unsupported:
		// EXDEV: a path leads out of the tree, possibly through a symbolic link.
		if !errors.Is(err, unix.EXDEV) {
			return fmt.Errorf("%s %q: %w", c.name(), path, err)
		}
	}

	var n unix.Errno
	if errors.As(err, &n) {
		return &errs.Error{Kind: errs.Damaged, Err: fmt.Errorf("the stream does not match its base: %s %q: %w",
			c.name(), path, err)}
	}

	return fmt.Errorf("%s %q: %w", c.name(), path, err)
}

// do executes one command.
func (t *tree) do(c *command) error {
	switch c.typ {
	case cmdWrite:
		return t.write(c)
	case cmdEncodedWrite:
		return t.encodedWrite(c)
	case cmdClone:
		return t.clone(c)
	case cmdTruncate:
		size := c.offset(attrSize)
		f, err := t.file(c)
		if err != nil {
			return err
		}
		return f.Truncate(size)
	case cmdFallocate:
		return t.fallocate(c)
	}

	// All other commands may change which file the path of the open one refers to.
	if err := t.closeFile(); err != nil {
		return err
	}

	switch c.typ {
	case cmdSetXattr, cmdRemoveXattr, cmdChmod, cmdChown, cmdUtimes:
		return t.setAttribute(c)
	case cmdMkfile, cmdMkdir, cmdMknod, cmdMkfifo, cmdMksock, cmdSymlink:
		return t.make(c)
	case cmdRename:
		return t.two(c.entry(attrPath), c.entry(attrPathTo), c, unix.Renameat)
	case cmdLink:
		return t.two(c.entry(attrPathLink), c.entry(attrPath), c, func(at int, name string, to int, link string) error {
			return unix.Linkat(at, name, to, link, 0)
		})
	case cmdUnlink, cmdRmdir:
		flags := 0
		if c.typ == cmdRmdir {
			flags = unix.AT_REMOVEDIR
		}
		return t.in(c.entry(attrPath), c, func(at int, name string) error { return unix.Unlinkat(at, name, flags) })
	case cmdFileattr:
		return nil // flags of inodes (chattr) are not kept, and no kernel sends them yet
	case cmdUpdateExtent:
		return damaged("the stream has no file contents")
	}

	return damaged("unexpected %s in the middle", c.name())
}

// setAttribute executes a command that changes attributes of one file.
func (t *tree) setAttribute(c *command) error {
	switch c.typ {
	case cmdSetXattr:
		name, value := c.text(attrXattrName), c.bytes(attrXattrData)
		return t.in(c.path(attrPath), c, func(at int, file string) error {
			return unix.Lsetxattr(procPath(at, file), name, value, 0)
		})
	case cmdRemoveXattr:
		name := c.text(attrXattrName)
		return t.in(c.path(attrPath), c, func(at int, file string) error {
			return unix.Lremovexattr(procPath(at, file), name)
		})
	case cmdChmod:
		mode := c.u64(attrMode)
		return t.in(c.path(attrPath), c, func(at int, name string) error { return chmod(at, name, uint32(mode)&0o7777) })
	case cmdChown:
		uid, gid := c.u64(attrUID), c.u64(attrGID)
		return t.in(c.path(attrPath), c, func(at int, name string) error { return chown(at, name, uid, gid) })
	}

	times := []unix.Timespec{c.time(attrAtime), c.time(attrMtime)} // cmdUtimes
	if c.path(attrPath) == root && c.err == nil {
		t.times = times
		return nil
	}

	return t.in(c.path(attrPath), c, func(at int, name string) error {
		return unix.UtimesNanoAt(at, name, times, unix.AT_SYMLINK_NOFOLLOW)
	})
}

// soften removes the flags "immutable" and "append only" from the files of a command and their
// directories, and reports whether any was set. Streams do not contain these flags, so received
// trees do not have them, but the base of a difference may have been made on this host.
func (t *tree) soften(c *command) (some bool) {
	for _, a := range []int{attrPath, attrPathTo, attrPathLink} {
		if c.typ == cmdSymlink && a == attrPathLink {
			continue // the target of a symbolic link
		}
		p := string(c.attr[a])
		for _, path := range []string{p, p[:max(strings.LastIndexByte(p, '/'), 0)]} {
			if c.have&(1<<a) == 0 {
				continue
			}
			_ = below(t.root, path, func(at int, name string) error {
				some = kernel.Unprotect(at, name) != 0 || some
				return nil
			})
		}
	}

	return some
}

// procPath names a file for calls that take no directory.
func procPath(at int, name string) string { return "/proc/self/fd/" + strconv.Itoa(at) + "/" + name }

// in calls fn with the directory that contains path and the name in it, for the root with the root
// itself and ".". If the command is invalid, it returns c.err instead. It follows no symbolic link, and
// path cannot lead out of the tree.
func (t *tree) in(path string, c *command, fn func(at int, name string) error) error {
	if c.err != nil {
		return c.err
	}
	return below(t.root, path, fn)
}

// below is in without a command.
func below(root *os.File, path string, fn func(at int, name string) error) error {
	dir, name := "", path
	if i := strings.LastIndexByte(path, '/'); i >= 0 {
		dir, name = path[:i], path[i+1:]
	}

	if name == "" {
		name = "."
	}
	if dir == "" {
		return fn(int(root.Fd()), name)
	}

	d, err := treewalk.OpenFlags(root, dir, unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return err
	}

	defer d.Close()
	return fn(int(d.Fd()), name)
}

// two is in for two paths.
func (t *tree) two(a, b string, c *command, fn func(aDir int, a string, bDir int, b string) error) error {
	return t.in(a, c, func(aDir int, a string) error {
		return t.in(b, c, func(bDir int, b string) error { return fn(aDir, a, bDir, b) })
	})
}

// make creates an empty regular file, or a file of another type.
func (t *tree) make(c *command) error {
	var target string
	var mode, rdev uint64
	switch c.typ {
	case cmdSymlink:
		target = c.text(attrPathLink)
	case cmdMknod:
		mode, rdev = c.u64(attrMode), c.u64(attrRdev)
		if k := uint32(mode) & unix.S_IFMT; k != unix.S_IFCHR && k != unix.S_IFBLK && k != unix.S_IFIFO &&
			k != unix.S_IFSOCK {
			return damaged("mknod with mode %o", mode)
		}
	}

	return t.in(c.entry(attrPath), c, func(at int, name string) error {
		var err error
		switch c.typ {
		case cmdMkfile:
			var fd int
			if fd, err = unix.Openat(at, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC,
				0o600); err == nil {
				err = unix.Close(fd)
			}
		case cmdMkdir:
			err = unix.Mkdirat(at, name, 0o700)
		case cmdMknod:
			err = unix.Mknodat(at, name, uint32(mode)&unix.S_IFMT|0o600, int(decodeDev(rdev)))
		case cmdMkfifo:
			err = unix.Mknodat(at, name, unix.S_IFIFO|0o600, 0)
		case cmdMksock:
			err = unix.Mknodat(at, name, unix.S_IFSOCK|0o600, 0)
		case cmdSymlink:
			err = unix.Symlinkat(target, at, name)
		}
		if err != nil {
			return err
		}

		return bare(at, name)
	})
}

// decodeDev is new_decode_dev of the kernel.
func decodeDev(d uint64) uint64 {
	return unix.Mkdev(uint32(d&0xfff00)>>8, uint32(d&0xff|d>>12&0xfff00))
}

// bare removes the attributes that a new file has inherited from its directory, such as ACLs and
// btrfs properties. The stream sets the right ones later, and often creates files in another
// directory than their final one.
func bare(at int, name string) error {
	path := procPath(at, name)
	var names [4096]byte
	n, err := unix.Llistxattr(path, names[:])
	if err == unix.EOPNOTSUPP {
		return nil
	}
	if err != nil {
		return err
	}

	for attr := range bytes.SplitSeq(names[:n], []byte{0}) {
		// Keep the labels of security modules, whose own rules govern them.
		if len(attr) == 0 || bytes.HasPrefix(attr, []byte("security.")) {
			continue
		}
		if err := unix.Lremovexattr(path, string(attr)); err != nil && err != unix.ENODATA {
			return err
		}
	}

	return nil
}

// chmod sets the mode of a file. ELOOP: it is a symbolic link, which has no mode.
func chmod(at int, name string, mode uint32) error {
	st, err := kernel.Lstat(at, name)
	if err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFLNK {
		return unix.ELOOP
	}
	return unix.Fchmodat(at, name, mode, 0)
}

// chown sets the owner of a file and restores the set-user-ID and set-group-ID bits, which the kernel
// clears. A stream contains only changes, so it would not set the bits again.
func chown(at int, name string, uid, gid uint64) error {
	if uid > 1<<32-1 || gid > 1<<32-1 {
		return unix.EINVAL
	}

	st, err := kernel.Lstat(at, name)
	if err != nil {
		return err
	}

	if err := unix.Fchownat(at, name, int(uid), int(gid), unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}

	if kind := st.Mode & unix.S_IFMT; kind == unix.S_IFLNK || kind == unix.S_IFDIR ||
		st.Mode&(unix.S_ISUID|unix.S_ISGID) == 0 {
		return nil
	}

	return unix.Fchmodat(at, name, st.Mode&0o7777, 0)
}

// openFile opens a regular file. EINVAL for other types, because opening a device or a pipe
// has side effects.
func openFile(root *os.File, path string, flags int) (*os.File, error) {
	var f *os.File
	err := below(root, path, func(at int, name string) error {
		st, err := kernel.Lstat(at, name)
		if err != nil {
			return err
		}

		if st.Mode&unix.S_IFMT != unix.S_IFREG {
			return unix.EINVAL
		}

		fd, err := unix.Openat(at, name, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}

		f = os.NewFile(uintptr(fd), path)
		return nil
	})

	return f, err
}

// file opens the file that a command writes to, unless it is open already.
func (t *tree) file(c *command) (*os.File, error) {
	path := c.entry(attrPath)
	if c.err != nil {
		return nil, c.err
	}
	if t.f != nil && t.path == path {
		return t.f, nil
	}

	if err := t.closeFile(); err != nil {
		return nil, err
	}

	f, err := openFile(t.root, path, unix.O_RDWR)
	if err != nil {
		return nil, err
	}

	t.f, t.path = f, path
	return f, nil
}

func (t *tree) closeFile() error {
	if t.f == nil {
		return nil
	}
	err := t.f.Close()
	t.f, t.path = nil, ""
	return err
}

func (t *tree) write(c *command) error {
	off, data := c.offset(attrFileOffset), c.bytes(attrData)
	f, err := t.file(c)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(data, off)
	return err
}

func (t *tree) fallocate(c *command) error {
	mode, off, n := c.u32(attrFallocateMode), c.offset(attrFileOffset), c.offset(attrSize)
	f, err := t.file(c)
	if err != nil {
		return err
	}
	return unix.Fallocate(int(f.Fd()), mode, off, n)
}

// clone makes a range of a file share the blocks of another file, which is in this tree or in
// the base.
func (t *tree) clone(c *command) error {
	off, n, from := c.offset(attrFileOffset), c.offset(attrCloneLen), c.offset(attrCloneOffset)
	uuid, path := c.uuid(attrCloneUUID), c.entry(attrClonePath)
	dst, err := t.file(c)
	if err != nil {
		return err
	}

	root := t.root
	switch {
	case uuid == t.begin.UUID:
	case t.begin.Diff && uuid == t.begin.Parent:
		root = t.base
	default:
		return damaged("it clones data from a subvolume that is not its base")
	}

	if n == 0 {
		return nil
	}

	src, err := openFile(root, path, unix.O_RDONLY)
	if err != nil {
		return err
	}

	defer src.Close()

	err = unix.IoctlFileCloneRange(int(dst.Fd()), &unix.FileCloneRange{
		Src_fd: int64(src.Fd()), Src_offset: uint64(from), Src_length: uint64(n), Dest_offset: uint64(off),
	})
	if errors.Is(err, unix.EINVAL) {
		// This filesystem may have larger blocks. A copy has the same content.
		var done int64
		done, err = io.Copy(io.NewOffsetWriter(dst, off), io.NewSectionReader(src, from, n))
		if err == nil && done < n {
			err = unix.EINVAL
		}
	}

	return err
}
