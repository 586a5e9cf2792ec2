package treecopy

import (
	"context"
	"os"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
)

// single returns a copier for one entry, which keeps everything that root can, except flags.
func single(ctx context.Context) (*copier, *worker) {
	c := newCopier(Options{})
	c.noFlags = true
	return c, &worker{t: &walk{ctx: ctx}}
}

// CopyEntry copies the file, symbolic link or special file called name from the
// open directory src into the open directory dst, where the name must not exist. It copies
// content, holes, owner, mode, times and attributes, but not flags (see CopyFlags) and no
// hard links: the copy is a file of its own. It returns the errors of CopyDir, and Exists if the
// name exists. It may be called concurrently.
func CopyEntry(ctx context.Context, src, dst *os.File, name string) error {
	c, w := single(ctx)
	c.links.m = make(map[Inode]link)
	d := &dir{name: src.Name(), src: int(src.Fd()), dst: int(dst.Fd()), pins: 1, pending: 1}
	st, err := kernel.Lstat(d.src, name)
	if err != nil {
		return srcErr(d.join(name), "stat", err)
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return errs.New(errs.Invalid, op, quote(d.join(name)), "it is a directory")
	}
	return c.file(w, d, entry{name: name, ino: st.Ino, typ: uint8(st.Mode & unix.S_IFMT >> 12)})
}

// CopyAttributes sets the owner, mode, times, attributes and ACLs of the file dstName in the open
// directory dst ("": dst itself) to those of srcName in src. It
// removes other attributes, and clears the flags "immutable" and
// "append-only" (see CopyFlags). It does not follow symbolic links. It returns the errors of CopyDir, and
// Conflict if dstName does not exist or has another type, because types support different
// attributes. It may be called concurrently, even
// for several names of one file that get the attributes of the same other file.
func CopyAttributes(ctx context.Context, src *os.File, srcName string, dst *os.File, dstName string) error {
	c, w := single(ctx)
	from, to := objectIn(src, srcName), objectIn(dst, dstName)
	path := func() string { return dst.Name() + "/" + dstName }
	var st, now unix.Stat_t
	if err := from.stat(&st); err != nil {
		return srcErr(path(), "stat", err)
	}

	if err := to.stat(&now); err != nil {
		return srcErr(path(), "stat", err)
	}

	if st.Mode&unix.S_IFMT != now.Mode&unix.S_IFMT {
		return errs.New(errs.Conflict, op, quote(path()),
			"its type differs from that of the file whose attributes it should get")
	}

	kernel.Unprotect(to.dirAndName())
	want, err := c.readXattrs(w, from, path)
	if err != nil {
		return err
	}

	return c.replaceAttributes(w, to, path, attrsOf(&st), want)
}

// CopyFlags sets the flags and the project of the file dstName in the open directory dst ("": dst
// itself) to those of srcName in src, as far as its
// filesystem and the caller's privileges permit. Call it last, because flags may forbid other changes. It does
// nothing if the files have different types. It returns the errors of CopyDir, and NotFound if a file does not exist.
func CopyFlags(ctx context.Context, src *os.File, srcName string, dst *os.File, dstName string) error {
	c, _ := single(ctx)
	path := func() string { return dst.Name() + "/" + dstName }
	var st, now unix.Stat_t
	from, to := objectIn(src, srcName), objectIn(dst, dstName)
	if err := from.stat(&st); err != nil {
		return sysErr(path(), "stat", err)
	}

	if err := to.stat(&now); err != nil {
		return sysErr(path(), "stat", err)
	}

	if st.Mode&unix.S_IFMT != now.Mode&unix.S_IFMT {
		return nil
	}

	srcFD, err := kernel.OpenForFlags(from.dirAndName())
	if err == unix.EOPNOTSUPP { // it only has a project
		return c.set.setFlags(to, path, readSpecialFlags(from.at, from.name))
	}
	if err != nil {
		return sysErr(path(), "open", err)
	}

	defer unix.Close(srcFD)

	return c.replaceFlags(to, path, readFlags(srcFD))
}

func objectIn(dir *os.File, name string) object {
	if name == "" {
		return openObject(int(dir.Fd()))
	}
	return namedObject(int(dir.Fd()), name)
}

// dirAndName returns o as a directory and a name, as package kernel expects.
func (o object) dirAndName() (at int, name string) {
	if o.fd >= 0 {
		return o.fd, ""
	}
	return o.at, o.name
}

func (o object) removexattr(name string) error {
	if o.fd >= 0 {
		return unix.Fremovexattr(o.fd, name)
	}
	return unix.Lremovexattr(o.procPath(), name)
}
