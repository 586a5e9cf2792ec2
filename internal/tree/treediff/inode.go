package treediff

import (
	"bytes"
	"errors"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
)

const op = "compare"

// failed returns the error of a failed system call on a tree. If a file or an attribute
// no longer exists, another process has removed it, and the error is a Conflict.
func failed(path, call string, err error) error {
	if err == nil {
		return nil
	}

	var known *errs.Error
	if errors.As(err, &known) && known.Op != "" {
		return err
	}

	path = quote(shown(path))
	switch {
	case errs.IsAny(err, unix.ENOENT, unix.ELOOP, unix.ENOTDIR, unix.ESTALE, unix.ENODATA):
		return errs.New(errs.Conflict, op, path, "%s: %w: it has just changed", call, err).
			WithHint("stop the programs that write to it, then retry")
	}

	e := errs.New(errs.KindOf(err), op, path, "%s: %w", call, err)
	if errors.Is(err, unix.EMLINK) {
		return e.WithHint("the volume's filesystem does not support so many hard links to one file")
	}
	return e
}

// quote quotes a path for a message, if necessary.
func quote(path string) string {
	q := strconv.Quote(path)
	if q[1:len(q)-1] == path {
		return path
	}
	return q
}

// inode is the metadata of a file.
type inode struct {
	dev, ino     uint64
	mode         uint32
	uid, gid     uint32
	nlink        uint32
	rdev         uint64
	size         int64
	mtime, ctime unix.StatxTimestamp
	btime        unix.StatxTimestamp // zero if the filesystem does not record it
	mount        bool                // something else is mounted on it

	generation generation // only for files that may be new in their tree: see comparer.stat
}

// stat is statAt, and also reads the generation of files that may be new in their tree, because only those
// can be confused with other files.
func (c *comparer) stat(at *os.File, name, path string) (inode, error) {
	c.statted.Add(1)
	i, err := statAt(at, name, path)
	if err == nil && c.o.SameOrigin && c.maybeNew(&i) {
		i.generation = c.generations.readGeneration(at, name)
	}
	return i, err
}

// statAt returns the metadata of the file name in the directory at, or of at itself if name is "".
func statAt(at *os.File, name, path string) (inode, error) {
	var st unix.Statx_t
	flags := unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT
	if name == "" {
		flags |= unix.AT_EMPTY_PATH
	}

	const mask = unix.STATX_BASIC_STATS | unix.STATX_BTIME
	if err := unix.Statx(int(at.Fd()), name, flags, mask, &st); err != nil {
		return inode{}, failed(path, "statx", err)
	}

	i := inode{
		dev: unix.Mkdev(st.Dev_major, st.Dev_minor), ino: st.Ino,
		mode: uint32(st.Mode), uid: st.Uid, gid: st.Gid, nlink: st.Nlink,
		rdev: unix.Mkdev(st.Rdev_major, st.Rdev_minor),
		size: int64(st.Size), mtime: st.Mtime, ctime: st.Ctime,
		mount: name != "" && st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0,
	}

	if st.Mask&unix.STATX_BTIME != 0 {
		i.btime = st.Btime
	}

	return i, nil
}

func (i *inode) fileType() uint8 { return uint8(i.mode & unix.S_IFMT >> 12) }
func (i *inode) isDir() bool     { return i.mode&unix.S_IFMT == unix.S_IFDIR }
func (i *inode) isFile() bool    { return i.mode&unix.S_IFMT == unix.S_IFREG }

// bytes returns the size for a Change.
func (i *inode) bytes() int64 {
	switch i.mode & unix.S_IFMT {
	case unix.S_IFREG, unix.S_IFLNK:
		return i.size
	}
	return 0
}

func typeOf(dt uint8) Type {
	switch dt {
	case unix.DT_DIR:
		return Dir
	case unix.DT_LNK:
		return Symlink
	case unix.DT_CHR:
		return Char
	case unix.DT_BLK:
		return Block
	case unix.DT_FIFO:
		return Fifo
	case unix.DT_SOCK:
		return Socket
	}

	return File
}

// itself returns what tells an inode of a tree to which nobody writes from all others in it. Its number is not enough:
// an overlay whose layers are subvolumes of one btrfs shows two files under one number.
func (i inode) itself() inode {
	i.mount, i.generation = false, generation{}
	return i
}

// unchanged reports whether two inodes of the same object have the same metadata, which proves that the
// object has not changed. A change time at or after the time after, unless that is zero, proves nothing.
func unchanged(a, b *inode, after time.Time) bool {
	if a.size != b.size || a.mtime != b.mtime || a.ctime != b.ctime || a.mode != b.mode ||
		a.uid != b.uid || a.gid != b.gid || a.rdev != b.rdev || a.nlink != b.nlink {
		return false
	}
	if a.btime == (unix.StatxTimestamp{}) && a.ctime.Nsec == 0 {
		return false // on a filesystem with a resolution of seconds, many changes have the same time
	}
	return after.IsZero() || timeOf(b.ctime).Before(after)
}

func timeOf(t unix.StatxTimestamp) time.Time { return time.Unix(t.Sec, int64(t.Nsec)) }

// procPath returns a path for system calls that take no directory descriptor.
func procPath(at *os.File, name string) string {
	p := "/proc/self/fd/" + strconv.Itoa(int(at.Fd()))
	if name == "" {
		return p
	}
	return p + "/" + name
}

// xattrs returns the extended attributes of a file, including ACLs, sorted and encoded in one byte string.
func xattrs(at *os.File, name, path string) ([]byte, error) {
	list, get := unix.Llistxattr, unix.Lgetxattr
	if name == "" { // follow the link in /proc
		list, get = unix.Listxattr, unix.Getxattr
	}

	p := procPath(at, name)
	var small [1024]byte
	buf := small[:]
	n, err := list(p, buf)
	if err == unix.ERANGE {
		buf = make([]byte, 64<<10)
		n, err = list(p, buf)
	}
	if err == unix.EOPNOTSUPP || err == nil && n == 0 {
		return nil, nil
	}
	if err != nil {
		return nil, failed(path, "listxattr", err)
	}

	names := strings.Split(strings.TrimSuffix(string(buf[:n]), "\x00"), "\x00")
	slices.Sort(names)
	var out bytes.Buffer
	value := make([]byte, 64<<10)
	for _, x := range names {
		if strings.HasPrefix(x, "trusted.SGI_ACL_") {
			continue // XFS lists ACLs by that name too
		}
		n, err := get(p, x, value)
		if err != nil {
			return nil, failed(path, "getxattr", err)
		}
		out.WriteString(strconv.Quote(x))
		out.WriteString(strconv.Quote(string(value[:n])))
	}

	return out.Bytes(), nil
}

func readlink(at *os.File, name, path string) (string, error) {
	buf := make([]byte, 4097)
	n, err := unix.Readlinkat(int(at.Fd()), name, buf)
	if err != nil {
		return "", failed(path, "readlink", err)
	}
	return string(buf[:n]), nil
}
