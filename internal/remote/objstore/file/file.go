// Package file keeps objects in a directory: on a disk of this host, or on a
// filesystem of a server that several hosts have mounted.
//
// # What is in the directory
//
// An object is a plain file whose path is its key: such a directory can be copied
// to and from a bucket by any tool while nobody writes to it. Besides there is
//
//	.pando/lock   who changes names holds it (flock); readers of a directory share it
//	.pando/tmp/   objects that are being written
//
// Symbolic links out of the directory are not followed, whoever made them.
//
// # How an object is written
//
// Into a file in .pando/tmp, which is synced; then, with the lock held, the
// condition is looked at and the file linked or renamed to its place; then the
// directory is synced, and those above it that may be new. So a Put costs two
// fsyncs, and an object is whole or not there, whatever ends the writer.
//
// A writer holds a lock (flock) on its file in .pando/tmp. A file there that
// nobody has locked is of a writer that was killed. The first write of another
// one removes it, but first syncs all directories: the name of an object that the
// dead writer had just made may not be durable, and who finds the object would rely
// on it.
//
// # Versions
//
// The version of an object is its time of modification in nanoseconds and its size.
// The time is not left to the clock: each write sets it to a later one than that of
// the object it replaces, with random digits below the second. Up to hashBytes a
// hash of the content is a part of the version, too; where the filesystem does not
// keep nanoseconds, whatever the size. So two different contents never have the same
// version, and neither do two states of which one replaced the other.
//
// # Filesystems of servers
//
// Locks must work between the hosts. NFS does that since Linux 2.6.12, if its locks
// have not been switched off (mount option nolock, local_lock). Before names are
// looked at, the directory is asked for anew (statx with AT_STATX_FORCE_SYNC), so
// that what this host remembers of it does not hide what others wrote. sshfs has
// locks within one host only: do not write to one directory from several by it.
package file

import (
	"context"
	"errors"
	"io"
	"iter"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"

	"golang.org/x/sys/unix"
)

// Store is a directory. It is safe for concurrent use by any number of processes.
type Store struct {
	root   *os.Root
	url    string
	shared bool        // a filesystem of a server: what is remembered of names may be old
	mode   os.FileMode // of directories; files have it without the x

	mu      sync.Mutex
	cleaned bool
	durable map[string]identity // directories whose names are known to be durable
}

var _ objstore.Store = (*Store)(nil)

// identity tells a directory from a later one of the same name.
type identity struct {
	ino   uint64
	birth unix.StatxTimestamp
}

// Open opens the store that u, "file:/dir" or "file:///dir", names. It writes
// nothing. NotFound if there is no such directory; Invalid for a URL that is
// not one of these.
func Open(ctx context.Context, u *url.URL) (objstore.Store, error) {
	dir, err := pathOf(u)
	if err != nil {
		return nil, err
	}
	s, err := openStore(ctx, dir)
	if err != nil {
		return nil, err
	}
	return s, nil
}

// Create is Open, but makes the directory, with mode 0700, if it is not there; the
// one above it must be: a path of a disk that is not mounted is not filled in.
func Create(ctx context.Context, u *url.URL) (objstore.Store, error) {
	dir, err := pathOf(u)
	if err != nil {
		return nil, err
	}

	if err := objstore.Ended(ctx, "make directory", dir); err != nil {
		return nil, err
	}

	switch err := os.Mkdir(dir, 0o700); {
	case err == nil:
		parent, err := os.Open(filepath.Dir(dir))
		if err == nil {
			err = errors.Join(parent.Sync(), parent.Close())
		}
		if err != nil {
			return nil, wrapSystemError("make directory", dir, err)
		}
	case errors.Is(err, syscall.EEXIST): // also if it is no directory: open says it
	case errors.Is(err, syscall.ENOENT):
		return nil, errs.New(errs.NotFound, "make directory", dir, "%s does not exist", filepath.Dir(dir)).
			WithHint("create it, or mount the disk it belongs to")
	default:
		return nil, wrapSystemError("make directory", dir, err)
	}

	s, err := openStore(ctx, dir)
	if err != nil {
		return nil, err
	}

	return s, nil
}

// pathOf is the directory that a URL names.
func pathOf(u *url.URL) (string, error) {
	invalid := func(why string) error {
		return errs.New(errs.Invalid, "open remote", u.Redacted(), "%s", why).
			WithHint("write it as file:/path/to/directory")
	}
	switch {
	case u.Scheme != "file":
		return "", invalid("it does not begin with file:")
	case u.Host != "" && u.Host != "localhost", u.User != nil:
		return "", invalid("it names another host, whose directory must be mounted on this one")
	case u.RawQuery != "" || u.Fragment != "" || u.ForceQuery:
		return "", invalid("the URL of a directory has no parameters")
	case u.Opaque != "" || !path.IsAbs(u.Path):
		return "", invalid("the path must begin with a slash")
	case strings.ContainsRune(u.Path, 0):
		return "", invalid("the path contains a zero byte")
	}

	return path.Clean(u.Path), nil
}

func openStore(ctx context.Context, dir string) (*Store, error) {
	if err := objstore.Ended(ctx, "open directory", dir); err != nil {
		return nil, err
	}

	st, err := os.Stat(dir)
	if err == nil && !st.IsDir() {
		err = syscall.ENOTDIR // os.OpenRoot would not say it so
	}

	var root *os.Root
	if err == nil {
		root, err = os.OpenRoot(dir)
	}

	switch {
	case errors.Is(err, syscall.ENOENT):
		return nil, errs.New(errs.NotFound, "open directory", dir, "it does not exist").
			WithHint("mount the disk it belongs to, or create a new directory with %s",
				errs.Run("remote add", errs.Param("create")))
	case errors.Is(err, syscall.ENOTDIR):
		return nil, errs.New(errs.Invalid, "open directory", dir, "it is not a directory")
	case err != nil:
		return nil, wrapSystemError("open directory", dir, err)
	}

	s := &Store{
		root: root, url: (&url.URL{Scheme: "file", Path: dir}).String(),
		durable: map[string]identity{},
	}
	if err := s.inspectRoot(); err != nil {
		_ = root.Close()
		return nil, wrapSystemError("open directory", dir, err)
	}

	return s, nil
}

// inspectRoot finds out what the directory is on, and the mode for what is made.
func (s *Store) inspectRoot() error {
	f, err := s.root.Open(".")
	if err != nil {
		return err
	}

	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}

	s.mode = st.Mode().Perm() | 0o700
	var sfs unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &sfs); err != nil {
		return os.NewSyscallError("fstatfs", err)
	}

	switch uint32(sfs.Type) {
	case unix.NFS_SUPER_MAGIC, unix.SMB_SUPER_MAGIC, unix.SMB2_SUPER_MAGIC, unix.CIFS_SUPER_MAGIC,
		unix.FUSE_SUPER_MAGIC, unix.CEPH_SUPER_MAGIC, unix.AFS_SUPER_MAGIC, unix.V9FS_MAGIC:
		s.shared = true
	}

	return nil
}

func (s *Store) String() string { return s.url }

// Close lets go of the directory, so that what it is on can be unmounted. No method
// may be called any more.
func (s *Store) Close() error { return s.root.Close() }

// The operations as people know them.
const (
	reading  = "read object"
	writing  = "write object"
	listing  = "list objects"
	deleting = "delete object"
)

func (s *Store) ref(key string) string { return s.url + "/" + key }

// checkContext is what every operation on a key begins with, once the key is known to be
// good.
func (s *Store) checkContext(ctx context.Context, op, key string) error {
	return objstore.Ended(ctx, op, s.ref(key))
}

func (s *Store) wrapError(op, key string, err error) error {
	return wrapSystemError(op, s.ref(key), err)
}

// wrapSystemError makes an error of the system one of this program.
func wrapSystemError(op, ref string, err error) error {
	var known *errs.Error
	if errors.As(err, &known) && known.Op != "" {
		return err
	}

	out := &errs.Error{Kind: errs.KindOf(err), Op: op, Ref: ref, Err: err}
	var p *os.PathError
	var l *os.LinkError
	switch { // the paths of temporary files say nothing to anybody
	case errors.As(err, &p):
		out.Err = p.Err
	case errors.As(err, &l):
		out.Err = l.Err
	}

	var no syscall.Errno
	switch {
	case out.Kind == errs.NoSpace && errors.Is(err, syscall.EDQUOT):
		out.Hint = "raise the disk quota of the remote, or free space there"
	case out.Kind == errs.NoSpace:
		out.Hint = errs.Messagef("free space on the remote's filesystem, or remove old points with %s",
			errs.Run("remote prune"))
	case errors.Is(err, syscall.EROFS):
		out.Hint = "mount the remote's filesystem read-write"
	case out.Kind == errs.Permission:
		out.Hint = "check the owner and mode of the remote's directory"
	case errors.Is(err, syscall.ESTALE), errors.Is(err, syscall.ETIMEDOUT), errors.Is(err, syscall.EINTR),
		errors.Is(err, syscall.EAGAIN):
		// A server that was away, or a file that another host has replaced.
		out.Kind = errs.IO
		return objstore.Transient(out)
	case errors.As(err, &no) && out.Kind == errs.NotFound, out.Kind == errs.Internal:
		out.Kind = errs.IO // what may be absent has been handled where it was looked for
	}

	return out
}

// object is what look finds.
type object struct {
	f       *os.File // open for reading
	info    objstore.Info
	changed time.Time
}

// errDirectory says that a key is that of a directory. To readers that is absent.
var errDirectory = errors.New("its key is the directory of other objects")

// absent reports whether err says that there is no object of the key.
func absent(err error) bool {
	return errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.ENOTDIR) || errors.Is(err, errDirectory)
}

// openObject opens an object and tells its version. An error for which absent is true
// if there is none.
func (s *Store) openObject(key string) (o object, err error) {
	s.refreshNames(path.Dir(key))

	// Should somebody have put a pipe there, opening it must not wait for a writer.
	f, err := s.root.OpenFile(key, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return o, err
	}

	defer func() {
		if err != nil {
			_ = f.Close()
		}
	}()

	st, err := f.Stat()
	switch {
	case err != nil:
		return o, err
	case st.IsDir():
		return o, errDirectory
	case !st.Mode().IsRegular():
		return o, errs.New(errs.Damaged, reading, s.ref(key), "it is not a regular file")
	}

	o = object{f: f, changed: st.ModTime(), info: objstore.Info{Key: key, Bytes: st.Size()}}
	o.info.Version, err = versionOf(f, o.changed, o.info.Bytes)
	return o, err
}

// checkStoreExists says whether the store itself has been removed, when something in it
// is not found: nothing found there means anything.
func (s *Store) checkStoreExists(op, key string) error {
	f, err := s.root.Open(".")
	if err != nil {
		return s.wrapError(op, key, err)
	}

	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return s.wrapError(op, key, os.NewSyscallError("fstat", err))
	}

	if st.Nlink == 0 {
		return errs.New(errs.IO, op, s.ref(key), "the remote's directory has been removed")
	}

	return nil
}

func (s *Store) notFoundError(op, key string) error {
	if err := s.checkStoreExists(op, key); err != nil {
		return err
	}
	return errs.New(errs.NotFound, op, s.ref(key), "no such object")
}

// Get implements objstore.Store.
func (s *Store) Get(ctx context.Context, key string, offset, length int64) ([]byte, objstore.Info, error) {
	none := objstore.Info{}
	if err := objstore.CheckGet(key, offset); err != nil {
		return nil, none, err
	}

	if err := s.checkContext(ctx, reading, key); err != nil {
		return nil, none, err
	}

	o, err := s.openObject(key)
	if absent(err) {
		return nil, none, s.notFoundError(reading, key)
	}
	if err != nil {
		return nil, none, s.wrapError(reading, key, err)
	}

	defer o.f.Close()

	size := max(o.info.Bytes-offset, 0)
	if length >= 0 {
		size = min(size, length)
	}

	if size > objstore.MaxObjectBytes {
		return nil, none, errs.New(errs.Damaged, reading, s.ref(key), "it has %d bytes, but objects have at most %d",
			o.info.Bytes, objstore.MaxObjectBytes)
	}

	data := make([]byte, size)
	for at := 0; at < len(data); {
		chunk := data[at:min(at+objstore.PaceChunk(ctx, ioBytes), len(data))]
		n, err := o.f.ReadAt(chunk, offset+int64(at))
		if n == len(chunk) {
			err = nil
		} else if errors.Is(err, io.EOF) {
			// Nobody shortens an object: it is replaced. A server's disk may.
			err = errs.New(errs.Damaged, reading, s.ref(key), "it ends after %d of %d bytes", offset+int64(at+n), o.info.Bytes)
		}
		if err == nil {
			at += n
			if err = objstore.Pace(ctx, n); err == nil {
				err = ctx.Err()
			}
		}
		if err != nil {
			return nil, none, s.wrapError(reading, key, err)
		}
	}

	return data, o.info, nil
}

// ioBytes is how much is read or written at once, so that the end of a context is
// noticed.
const ioBytes = 1 << 20

// Stat implements objstore.Store.
func (s *Store) Stat(ctx context.Context, key string) (objstore.Info, error) {
	if err := objstore.CheckKey(key); err != nil {
		return objstore.Info{}, err
	}

	if err := s.checkContext(ctx, reading, key); err != nil {
		return objstore.Info{}, err
	}

	o, err := s.openObject(key)
	if absent(err) {
		return objstore.Info{}, s.notFoundError(reading, key)
	}
	if err != nil {
		return objstore.Info{}, s.wrapError(reading, key, err)
	}

	_ = o.f.Close() // was only read
	return o.info, nil
}

// List implements objstore.Store.
func (s *Store) List(ctx context.Context, prefix string) iter.Seq2[objstore.Info, error] {
	return func(yield func(objstore.Info, error) bool) {
		err := objstore.CheckPrefix(prefix)
		if err == nil {
			dir := path.Dir(prefix + "x")
			_, err = s.listDir(ctx, dir, prefix, func(i objstore.Info) bool { return yield(i, nil) })
		}
		if err != nil {
			yield(objstore.Info{}, s.wrapError(listing, prefix, err))
		}
	}
}

// listDir lists what is below dir, in order of key, and says whether to go on.
func (s *Store) listDir(ctx context.Context, dir, prefix string, yield func(objstore.Info) bool) (bool, error) {
	if err := ctx.Err(); err != nil {
		return false, err
	}

	entries, err := s.readDir(ctx, dir)
	if err != nil {
		if dir == "." || !absent(err) {
			return false, err
		}
		return true, s.checkStoreExists(listing, prefix)
	}

	names := make([]string, 0, len(entries))
	for _, e := range entries {
		switch {
		case e.IsDir():
			names = append(names, e.Name()+"/") // so that "a-b" comes before "a/b"
		case e.Type().IsRegular():
			names = append(names, e.Name())
		}
	}

	slices.Sort(names)

	for _, name := range names {
		key := path.Join(dir, name)
		if objstore.CheckKey(key) != nil {
			continue // .pando, lost+found, or of somebody else
		}

		if strings.HasSuffix(name, "/") {
			if !strings.HasPrefix(key+"/", prefix) && !strings.HasPrefix(prefix, key+"/") {
				continue
			}
			if more, err := s.listDir(ctx, key, prefix, yield); err != nil || !more {
				return false, err
			}
			continue
		}

		if !strings.HasPrefix(key, prefix) {
			continue
		}

		if err := ctx.Err(); err != nil {
			return false, err
		}

		o, err := s.openObject(key)
		if absent(err) {
			continue // deleted meanwhile
		}
		if err != nil {
			return false, s.wrapError(listing, key, err)
		}

		_ = o.f.Close()
		if !yield(o.info) {
			return false, nil
		}
	}

	return true, nil
}

// readDir reads a directory while nobody changes names. Without that an object
// that is just being replaced could be missing: btrfs, for one, gives it a new
// place, which a reader that has begun before does not get to.
func (s *Store) readDir(ctx context.Context, dir string) ([]os.DirEntry, error) {
	for {
		l, err := s.lockNamesShared(ctx)
		if err != nil {
			return nil, err
		}

		s.refreshNames(dir)
		entries, err := s.readNames(dir)
		if l != nil {
			l.release()
			return entries, err
		}

		// There was no lock yet, as nobody has ever written. Has somebody since?
		if _, serr := s.root.Lstat(lockName); serr != nil {
			return entries, err
		}
	}
}

func (s *Store) readNames(dir string) ([]os.DirEntry, error) {
	f, err := s.root.Open(dir)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return f.ReadDir(-1)
}
