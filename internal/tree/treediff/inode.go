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

// failed reports that a system call on a tree failed. What was there a moment
// ago and is not any more, a file or an attribute of one, has been changed by
// somebody.
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
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENOTDIR),
		errors.Is(err, unix.ESTALE),
		errors.Is(err, unix.ENODATA):
		return errs.New(errs.Conflict, op, path, "%s: %w: it has just changed", call, err).
			WithHint("stop the programs that write to it, then retry")
	}

	return errs.New(errs.KindOf(err), op, path, "%s: %w", call, err)
}

// quote makes a path fit for a message.
func quote(path string) string {
	q := strconv.Quote(path)
	if q[1:len(q)-1] == path {
		return path
	}
	return q
}

// inode is what there is to know of a file without reading it.
type inode struct {
	dev, ino     uint64
	mode         uint32
	uid, gid     uint32
	nlink        uint32
	rdev         uint64
	size         int64
	mtime, ctime unix.StatxTimestamp
	btime        unix.StatxTimestamp // zero where there is none
	mount        bool                // something else is mounted there

	generation generation // only of those that may be new in their tree: see comparer.stat
}

// stat also asks for the generation of what may be new in its tree, as only that
// can be taken for something else.
func (c *comparer) stat(at *os.File, name, path string) (inode, error) {
	c.statted.Add(1)
	i, err := statAt(at, name, path)
	if err == nil && c.o.SameOrigin && c.maybeNew(&i) {
		i.generation = c.generations.readGeneration(at, name)
	}
	return i, err
}

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

// bytes is the size that a Change tells.
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

// unchanged reports whether nothing tells two inodes of the same object apart.
// What was changed after the moment is not trusted.
func unchanged(a, b *inode, after time.Time) bool {
	if a.size != b.size || a.mtime != b.mtime || a.ctime != b.ctime || a.mode != b.mode ||
		a.uid != b.uid || a.gid != b.gid || a.rdev != b.rdev || a.nlink != b.nlink {
		return false
	}
	if a.btime == (unix.StatxTimestamp{}) && a.ctime.Nsec == 0 {
		return false // a filesystem that counts in seconds: many changes fit into one
	}
	return after.IsZero() || timeOf(b.ctime).Before(after)
}

func timeOf(t unix.StatxTimestamp) time.Time { return time.Unix(t.Sec, int64(t.Nsec)) }

// procPath names a file for calls that know no directory descriptors.
func procPath(at *os.File, name string) string {
	p := "/proc/self/fd/" + strconv.Itoa(int(at.Fd()))
	if name == "" {
		return p
	}
	return p + "/" + name
}

// xattrs returns the attributes of a file, ACLs included, sorted, as one text.
func xattrs(at *os.File, name, path string) ([]byte, error) {
	list, get := unix.Llistxattr, unix.Lgetxattr
	if name == "" { // the link in /proc is to be followed
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
