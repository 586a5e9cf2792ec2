package treecopy

import (
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"pando/internal/linux/kernel"
)

// Attributes are the properties of a file besides its names and its content.
type Attributes struct {
	Mode         uint32 // as st_mode, with the type
	UID, GID     uint32
	Atime, Mtime unix.Timespec
	Flags        uint32 // kernel.Flag...: those that copies keep, and hints
	Project      uint32
	Hints        Hints
	Xattrs       []Xattr // including ACLs
}

// Hints say how the source's filesystem stores a file. Other filesystems may ignore them.
type Hints struct{ XFlags, ExtentSize, CowExtentSize uint32 }

// Xattr is an extended attribute.
type Xattr struct {
	Name  string
	Value []byte
}

func (a *Attributes) fileFlags() fileFlags {
	return fileFlags{flags: a.Flags & (keepMask | hintFlags | storedFlags), project: a.Project, hints: kernel.FSXAttr{
		XFlags: a.Hints.XFlags & hintXFlags, ExtentSize: a.Hints.ExtentSize, CowExtentSize: a.Hints.CowExtentSize,
	}}
}

func (a *Attributes) setFlags(f fileFlags) {
	a.Flags, a.Project = f.flags, f.project
	a.Hints = Hints{f.hints.XFlags, f.hints.ExtentSize, f.hints.CowExtentSize}
}

// HasFlags reports whether a contains anything that SetFlags sets.
func (a *Attributes) HasFlags() bool {
	return a.Flags&(keepMask|storedFlags) != 0 || a.Project != 0
}

// Protected reports whether a file with these attributes cannot be changed, renamed or removed.
func (a *Attributes) Protected() bool { return a.Flags&protectFlags != 0 }

// WithoutFlags returns a without the flags and the project that SetFlags sets.
func (a Attributes) WithoutFlags() Attributes {
	a.Flags &= hintFlags
	a.Project = 0
	return a
}

// AttributeReader reads the attributes of files, one after the other.
type AttributeReader struct {
	c *copier
	w *worker
}

// NewAttributeReader returns a reader. It uses only the option Unprivileged.
func NewAttributeReader(opt Options) *AttributeReader {
	return &AttributeReader{c: newCopier(opt), w: &worker{}}
}

// Read returns the attributes and the stat of name in dir ("": dir itself). It does not follow symbolic links. It
// returns the errors of CopyDir.
func (r *AttributeReader) Read(dir *os.File, name string) (a Attributes, st unix.Stat_t, err error) {
	o := objectIn(dir, name)
	path := func() string { return dir.Name() + "/" + name }
	if err = o.stat(&st); err != nil {
		return a, st, srcErr(path(), "stat", err)
	}

	var flags fileFlags
	switch fd, err := kernel.OpenForFlags(o.dirAndName()); err {
	case nil:
		flags = readFlags(fd)
		unix.Close(fd)
	case unix.EOPNOTSUPP:
		flags = readSpecialFlags(int(dir.Fd()), name)
	}

	a, err = r.read(o, path, &st)
	a.setFlags(flags)
	return a, st, err
}

// ReadFile is Read for an open file or directory; path is for messages.
func (r *AttributeReader) ReadFile(f *os.File, path string) (a Attributes, st unix.Stat_t, err error) {
	o := openObject(int(f.Fd()))
	if err = o.stat(&st); err != nil {
		return a, st, srcErr(path, "stat", err)
	}
	a, err = r.read(o, func() string { return path }, &st)
	a.setFlags(readFlags(o.fd))
	return a, st, err
}

func (r *AttributeReader) read(o object, path func() string, st *unix.Stat_t) (Attributes, error) {
	a := Attributes{Mode: st.Mode, UID: st.Uid, GID: st.Gid, Atime: st.Atim, Mtime: st.Mtim}
	xs, err := r.c.readXattrs(r.w, o, path)
	for _, x := range xs {
		a.Xattrs = append(a.Xattrs, Xattr{x.name, x.value})
	}
	return a, err
}

// AttributeWriter makes special files and sets attributes, one file after the other. It follows no symbolic links.
type AttributeWriter struct {
	c *copier
	w *worker
}

// NewAttributeWriter returns a writer. It uses only the option Unprivileged.
func NewAttributeWriter(opt Options) *AttributeWriter {
	return &AttributeWriter{c: newCopier(opt), w: &worker{}}
}

// Totals returns counts of what could not be set. Its other fields are 0.
func (s *AttributeWriter) Totals() Totals { return s.c.n.totals() }

// Set sets the attributes of name in dir ("": dir itself), which must have the type of a: owner, mode, times and
// extended attributes. It removes other extended attributes. It sets flags and the project of a, but clears none: see
// SetFlags. path is for messages. It returns the errors of CopyDir.
func (s *AttributeWriter) Set(dir *os.File, name, path string, a Attributes) error {
	at := attrs{mode: a.Mode, uid: a.UID, gid: a.GID, atime: a.Atime, mtime: a.Mtime, flags: a.fileFlags()}
	var xs []xattr
	for _, x := range a.Xattrs {
		if !foreign(x.Name) && !double(x.Name) {
			xs = append(xs, xattr{x.Name, x.Value})
		}
	}
	return s.c.replaceAttributes(s.w, objectIn(dir, name), func() string { return path }, at, xs)
}

// SetFlags sets exactly the flags and the project of a on name in dir, as far as its filesystem and the caller's
// privileges permit. Call it last, because flags may forbid other changes.
func (s *AttributeWriter) SetFlags(dir *os.File, name, path string, a Attributes) error {
	return s.c.replaceFlags(objectIn(dir, name), func() string { return path }, a.fileFlags())
}

// SetHints sets the hints of an empty file or a directory: h, and those among flags.
func (s *AttributeWriter) SetHints(f *os.File, flags uint32, h Hints) {
	a := Attributes{Flags: flags & hintFlags, Hints: h}
	setHints(int(f.Fd()), a.fileFlags())
}

// Symlink makes a symbolic link. False without an error: the target is too long for the filesystem, which is counted.
func (s *AttributeWriter) Symlink(target string, dir *os.File, name, path string) (bool, error) {
	err := s.c.set.symlink(target, namedObject(int(dir.Fd()), name), func() string { return path })
	return err == nil, skipped(err)
}

// Mknod makes a device node, fifo or socket. False without an error: the filesystem does not support the number, or
// only root can make the file, which is counted.
func (s *AttributeWriter) Mknod(mode uint32, rdev uint64, dir *os.File, name, path string) (bool, error) {
	err := s.c.set.mknod(namedObject(int(dir.Fd()), name), mode, rdev, func() string { return path })
	return err == nil, skipped(err)
}

// replaceAttributes sets the attributes of a file, and removes other extended attributes.
func (c *copier) replaceAttributes(w *worker, to object, path func() string, a attrs, want []xattr) error {
	have, err := c.xattrNames(w, to, path)
	if err != nil {
		return err
	}

	for _, name := range have {
		if slices.ContainsFunc(want, func(x xattr) bool { return x.name == name }) || name == "security.selinux" {
			continue // the system assigns the label
		}
		if err := to.removexattr(name); err != nil && err != unix.ENODATA {
			return dstErr(path(), "removing attribute "+quote(name), err)
		}
	}

	return c.set.applyAttrs(to, path, a, want)
}

// replaceFlags sets the flags and the project of a file, and clears others.
func (c *copier) replaceFlags(to object, path func() string, want fileFlags) error {
	fd, err := kernel.OpenForFlags(to.dirAndName())
	if err == unix.EOPNOTSUPP { // it has only a project
		return c.set.setFlags(to, path, want)
	}
	if err != nil {
		return sysErr(path(), "open", err)
	}

	defer unix.Close(fd)
	have := readFlags(fd)
	if have.flags&keepMask&^want.flags != 0 || have.project != 0 && have.project != want.project {
		if err := clearFlags(fd); err != nil {
			return dstErr(path(), "clearing flags", err)
		}
	}

	return c.set.setFlags(openObject(fd), path, want)
}

// NextData returns the first range of data of an open file at or after off. If there is none, the range is empty and
// at size.
func NextData(f *os.File, off, size int64) (from, to int64, err error) {
	return nextData(int(f.Fd()), off, size)
}

// OpenFile opens the regular file name in dir for reading, if possible without changing its access time. If a fifo has
// replaced the file, it does not wait. It returns the errors of CopyDir.
func OpenFile(dir *os.File, name, path string) (*os.File, error) {
	fd, err := openNoAtime(int(dir.Fd()), name, unix.O_NONBLOCK)
	if err != nil {
		return nil, srcErr(path, "open", err)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// Changed returns the error for a file that was changed while it was read.
func Changed(path string) error { return changed(path) }
