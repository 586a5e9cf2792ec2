package treecopy

import (
	"bytes"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
)

// attrs are the attributes that a copy keeps, besides extended ones.
type attrs struct {
	mode         uint32 // as st_mode, with the type
	uid, gid     uint32
	atime, mtime unix.Timespec
	flags        fileFlags
}

// attrsOf returns the attributes in st, which are all except the flags.
func attrsOf(st *unix.Stat_t) attrs {
	return attrs{mode: st.Mode, uid: st.Uid, gid: st.Gid, atime: st.Atim, mtime: st.Mtim}
}

type xattr struct {
	name  string
	value []byte
}

const (
	aclAccess  = "system.posix_acl_access"
	aclDefault = "system.posix_acl_default"
)

// foreignXattrs are prefixes of attributes that have a meaning only on the filesystem
// of the source.
var foreignXattrs = []string{
	"system.nfs4", "system.cifs", "system.smb3", "smb3.", "cifs.", "btrfs.", "afs.", "lustre.", "ceph.", "xfsroot.",
	"security.evm", // a signature that includes the inode number
}

func foreign(name string) bool {
	return slices.ContainsFunc(foreignXattrs, func(p string) bool { return strings.HasPrefix(name, p) })
}

// double reports whether an attribute is another name of a POSIX ACL. XFS lists both.
func double(name string) bool { return strings.HasPrefix(name, "trusted.SGI_ACL_") }

// object is a file in the source or the destination: an open one (fd >= 0), or
// a name in a directory, which is not followed if it is a symbolic link.
type object struct {
	fd   int
	at   int
	name string
	key  uint64 // of its directory; see losses
}

func openObject(fd int) object               { return object{fd: fd} }
func namedObject(at int, name string) object { return object{fd: -1, at: at, name: name} }
func (o object) in(key uint64) object        { o.key = key; return o }
func (o object) procPath() string            { return "/proc/self/fd/" + strconv.Itoa(o.at) + "/" + o.name }
func (o object) stat(st *unix.Stat_t) error {
	if o.fd >= 0 {
		return unix.Fstat(o.fd, st)
	}
	return unix.Fstatat(o.at, o.name, st, unix.AT_SYMLINK_NOFOLLOW)
}

func (o object) chown(uid, gid int) error {
	if o.fd >= 0 {
		return unix.Fchown(o.fd, uid, gid)
	}
	return unix.Fchownat(o.at, o.name, uid, gid, unix.AT_SYMLINK_NOFOLLOW)
}

// chmod must not be used on symbolic links.
func (o object) chmod(mode uint32) error {
	if o.fd >= 0 {
		return unix.Fchmod(o.fd, mode)
	}
	return unix.Fchmodat(o.at, o.name, mode, 0)
}

func (o object) utimes(atime, mtime unix.Timespec) error {
	if o.fd >= 0 {
		return futimens(o.fd, atime, mtime)
	}
	return unix.UtimesNanoAt(o.at, o.name, []unix.Timespec{atime, mtime}, unix.AT_SYMLINK_NOFOLLOW)
}

func (o object) setxattr(name string, value []byte) error {
	if o.fd >= 0 {
		return unix.Fsetxattr(o.fd, name, value, 0)
	}
	return unix.Lsetxattr(o.procPath(), name, value, 0)
}

func (o object) listxattr(buf []byte) (int, error) {
	if o.fd >= 0 {
		return unix.Flistxattr(o.fd, buf)
	}
	return unix.Llistxattr(o.procPath(), buf)
}

func (o object) getxattr(name string, buf []byte) (int, error) {
	if o.fd >= 0 {
		return unix.Fgetxattr(o.fd, name, buf)
	}
	return unix.Lgetxattr(o.procPath(), name, buf)
}

// xattrNames returns the names of the extended attributes of a file that are copied.
func (c *copier) xattrNames(w *worker, o object, path func() string) ([]string, error) {
	if w.names == nil {
		w.names = make([]byte, 64<<10) // XATTR_LIST_MAX
	}

	n, err := o.listxattr(w.names)
	if err != nil {
		if err == unix.EOPNOTSUPP {
			return nil, nil
		}
		return nil, c.xattrErr(o, path(), "listxattr", err)
	}

	var out []string
	for raw := range bytes.SplitSeq(w.names[:n], []byte{0}) {
		name := string(raw)
		if name == "" || double(name) {
			continue
		}
		if foreign(name) {
			c.n.xattrs.Add(1)
			continue
		}
		out = append(out, name)
	}

	return out, nil
}

// readXattrs returns the extended attributes of a file of the source.
func (c *copier) readXattrs(w *worker, o object, path func() string) ([]xattr, error) {
	names, err := c.xattrNames(w, o, path)
	if len(names) == 0 {
		return nil, err
	}
	if w.value == nil {
		w.value = make([]byte, 64<<10) // XATTR_SIZE_MAX
	}

	var out []xattr
	for _, name := range names {
		n, err := o.getxattr(name, w.value)
		switch {
		case err == nil:
			out = append(out, xattr{name, bytes.Clone(w.value[:n])})
		case c.set.unprivileged && (err == unix.EPERM || err == unix.EACCES):
			c.n.xattrs.Add(1)
		case err == unix.ENODATA:
			return nil, changed(path(), "its attribute "+quote(name))
		default:
			return nil, c.xattrErr(o, path(), "reading attribute "+quote(name), err)
		}
	}

	return out, nil
}

// xattrErr returns the error for a failed call on o. It distinguishes a removed file from a missing /proc.
func (c *copier) xattrErr(o object, path, call string, err error) error {
	if err == unix.ENOENT && o.fd < 0 {
		var st unix.Stat_t
		if o.stat(&st) == nil {
			return errs.New(errs.Unsupported, op, quote(path), "%s: %w", call, err).WithHint("mount /proc")
		}
	}
	return srcErr(path, call, err)
}

// setter sets the attributes of files in the destination.
type setter struct {
	n            *counters
	unprivileged bool
	ownRoot      bool
}

// applyAttrs sets the attributes a and xs of o. The order matters: chown clears
// setuid, setgid and security.capability, an ACL changes the mode, and
// everything changes the times. Flags may forbid all of that, so they come last.
// Times and flags that the filesystem does not support are counted.
func (s *setter) applyAttrs(o object, path func() string, a attrs, xs []xattr) error {
	// Set the owner.
	var st unix.Stat_t
	if err := o.stat(&st); err != nil {
		return dstErr(path(), "stat", err)
	}

	mode := a.mode & 0o7777
	if st.Uid != a.uid || st.Gid != a.gid {
		err := error(unix.EPERM)
		if !s.unprivileged {
			err = o.chown(int(a.uid), int(a.gid))
		} else if st.Uid == a.uid {
			err = o.chown(-1, int(a.gid)) // possibly another group of the caller
		}
		if err != nil {
			if !s.unprivileged || err != unix.EPERM {
				return dstErr(path(), "chown", err)
			}
			s.n.owners.Add(1)
			mode &^= unix.S_ISUID | unix.S_ISGID
		}
	}

	for _, x := range xs {
		if err := s.setXattr(o, path, x); err != nil {
			return err
		}
	}

	// Set the mode. st has setuid and setgid from before the chown.
	special := mode&(unix.S_ISUID|unix.S_ISGID) != 0
	if st.Mode&unix.S_IFMT != unix.S_IFLNK && (st.Mode&0o7777 != mode || special || len(xs) > 0) {
		if err := o.chmod(mode); err != nil {
			return dstErr(path(), "chmod", err)
		}
	}

	if err := o.utimes(a.atime, a.mtime); err != nil {
		return dstErr(path(), "utimensat", err)
	}

	// Check the times: a filesystem stores the nearest ones that it supports.
	if err := o.stat(&st); err != nil {
		return dstErr(path(), "stat", err)
	}

	if st.Mtim != a.mtime || st.Atim != a.atime {
		s.n.countLoss(LostDates, o, path)
	}

	return s.setFlags(o, path, a.flags)
}

func (s *setter) setXattr(o object, path func() string, x xattr) error {
	err := o.setxattr(x.name, x.value)
	if err == nil {
		return nil
	}

	if s.unprivileged && (err == unix.EPERM || err == unix.EACCES || err == unix.EOPNOTSUPP) {
		// A security module may have set the same label already.
		have := make([]byte, len(x.value)+1)
		if n, err := o.getxattr(x.name, have); err != nil || !bytes.Equal(have[:n], x.value) {
			s.n.xattrs.Add(1)
		}
		return nil
	}

	call := "setting attribute " + quote(x.name)
	switch {
	case err == unix.EOPNOTSUPP:
		return errs.New(errs.Unsupported, op, quote(path()), "%s: %w", call, err).
			WithHint("the volume's filesystem does not support it: remove it from the source, or choose another %s",
				errs.Param("fs"))
	case err == unix.E2BIG, err == unix.ERANGE, err == unix.ENOSPC && roomy(o):
		// ext4 returns ENOSPC if a file's attributes do not fit into one block.
		return errs.New(errs.Unsupported, op, quote(path()), "%s of %d bytes: %w", call, len(x.value), err).
			WithHint("remove some of the attributes: the volume's filesystem limits their size per file")
	case err == unix.ENOENT && o.fd < 0:
		return errs.New(errs.Unsupported, op, quote(path()), "%s: %w", call, err).WithHint("mount /proc")
	}

	return dstErr(path(), call, err)
}

// roomy reports whether the filesystem of o has space left.
func roomy(o object) bool {
	fd := o.fd
	if fd < 0 {
		fd = o.at
	}
	var st unix.Statfs_t
	return unix.Fstatfs(fd, &st) == nil && st.Bavail > 64
}
