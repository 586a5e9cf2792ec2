// Package file keeps objects in a directory: on a disk of this host, or on a
// filesystem of a server that several hosts have mounted.
//
// # What is in the directory
//
// An object is a plain file whose path is its key: any tool can copy such a directory
// to or from a bucket while no process writes to it. The directory also holds
//
//	.pando/lock      writers hold it while they change names (flock); readers of a directory share it
//	.pando/tmp/      objects that are being written
//	.pando/reserve   blocks for what frees space, see [Store.KeepReserve]
//
// Symbolic links that lead out of the directory are not followed.
//
// # How an object is written
//
// A writer writes a file in .pando/tmp and syncs it. Then, holding the lock, it checks
// the condition, and links or renames the file to its place. Then it syncs the
// directory, and those above it that may be new. So a Put costs two fsyncs, and an
// object is complete or does not exist, however the writer ends.
//
// A writer holds a lock (flock) on its file in .pando/tmp. An unlocked file there
// belongs to a writer that was killed. The first write of another process removes it,
// but syncs all directories before: the name of an object that the dead writer had
// just created may not be durable, and readers of the object would rely on it.
//
// # Versions
//
// The version of an object consists of its modification time in nanoseconds and its
// size. The time does not depend on the clock alone: each write sets it to a later one
// than that of the object it replaces, with random digits below the second. For objects
// up to hashBytes, a hash of the content is part of the version, too, and for objects
// of any size where the filesystem does not keep nanoseconds. So two different contents
// never have the same version, and neither do two states of which one replaced the
// other.
//
// # Network filesystems
//
// Locks must work between the hosts. On NFS they do since Linux 2.6.12, unless they are
// switched off (mount options nolock, local_lock). Before it reads names, the store asks
// the server for the directory again (statx with AT_STATX_FORCE_SYNC), so that cached
// names do not hide what others wrote. sshfs has locks within one host only: do not
// write to one directory from several hosts through it.
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
	shared bool        // a network filesystem: cached names may be out of date
	mode   os.FileMode // of directories; files have it without the x

	mu      sync.Mutex
	cleaned bool
	durable map[string]identity // directories whose names are known to be durable
}

var _ objstore.Store = (*Store)(nil)

// identity distinguishes a directory from a later one with the same name.
type identity struct {
	ino   uint64
	birth unix.StatxTimestamp
}

// Open opens the store at u, "file:/dir" or "file:///dir". It writes nothing.
// NotFound if the directory does not exist; Invalid for any other URL.
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

// Create is like Open, but creates the directory, with mode 0700, if it does not exist.
// Its parent must exist, so that nothing is created where a disk should be mounted.
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
	case errors.Is(err, syscall.EEXIST): // if it is not a directory, openStore says so
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

// pathOf returns the directory that a URL names. Invalid.
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

// openStore opens an existing directory as a store.
func openStore(ctx context.Context, dir string) (*Store, error) {
	if err := objstore.Ended(ctx, "open directory", dir); err != nil {
		return nil, err
	}

	st, err := os.Stat(dir)
	if err == nil && !st.IsDir() {
		err = syscall.ENOTDIR // os.OpenRoot has a less clear error
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

// inspectRoot finds out on which kind of filesystem the directory is, and the mode for new files and directories.
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

// Close closes the directory, so that its filesystem can be unmounted. No method may be
// called after it.
func (s *Store) Close() error { return s.root.Close() }

// The operations as people know them.
const (
	reading  = "read object"
	writing  = "write object"
	listing  = "list objects"
	deleting = "delete object"
)

func (s *Store) ref(key string) string { return s.url + "/" + key }

// checkContext returns an error if the context has ended. Every operation calls it after
// checking the key.
func (s *Store) checkContext(ctx context.Context, op, key string) error {
	return objstore.Ended(ctx, op, s.ref(key))
}

func (s *Store) wrapError(op, key string, err error) error {
	return wrapSystemError(op, s.ref(key), err)
}

// wrapSystemError turns an error of the operating system into an *errs.Error.
func wrapSystemError(op, ref string, err error) error {
	var known *errs.Error
	if errors.As(err, &known) && known.Op != "" {
		return err
	}

	out := &errs.Error{Kind: errs.KindOf(err), Op: op, Ref: ref, Err: err}
	var p *os.PathError
	var l *os.LinkError
	switch { // leave out the paths of temporary files
	case errors.As(err, &p):
		out.Err = p.Err
	case errors.As(err, &l):
		out.Err = l.Err
	}

	// Add a hint.
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
	case errs.IsAny(err, syscall.ESTALE, syscall.ETIMEDOUT, syscall.EINTR, syscall.EAGAIN):
		// The server was unreachable, or another host has replaced the file.
		out.Kind = errs.IO
		return objstore.Transient(out)
	case errors.As(err, &no) && out.Kind == errs.NotFound, out.Kind == errs.Internal:
		out.Kind = errs.IO // callers have handled files that may be absent
	}

	return out
}

// object is an open object.
type object struct {
	f       *os.File // open for reading
	info    objstore.Info
	changed time.Time
}

// errDirectory says that a key is that of a directory. For readers such an object is absent.
var errDirectory = errors.New("its key is the directory of other objects")

// absent reports whether err says that there is no object with the key.
func absent(err error) bool {
	return errs.IsAny(err, syscall.ENOENT, syscall.ENOTDIR, errDirectory)
}

// openObject opens an object and determines its version. If there is no object, absent
// reports true for the error.
func (s *Store) openObject(key string) (o object, err error) {
	s.refreshNames(path.Dir(key))

	// If the file is a named pipe, opening it must not wait for a writer.
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

// checkStoreExists returns an error if the directory of the store was removed. Without this
// check, a removed store would look like an empty one.
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

	// Read in chunks, at the pace that the context allows.
	data := make([]byte, size)
	for at := 0; at < len(data); {
		chunk := data[at:min(at+objstore.PaceChunk(ctx, ioBytes), len(data))]
		n, err := o.f.ReadAt(chunk, offset+int64(at))
		if n == len(chunk) {
			err = nil
		} else if errors.Is(err, io.EOF) {
			// Writers replace objects, and never shorten them. A failing disk may.
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

// ioBytes is the number of bytes that are read or written at once. The end of the context
// is noticed in between.
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

// listDir yields the objects below dir, in order of key. It returns false if yield stopped it.
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
			continue // .pando, lost+found, or a file of another program
		}

		// Descend into directories.

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
			continue // deleted in the meantime
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

// readDir reads a directory under the shared lock, so that no writer changes names.
// Otherwise an object that is being replaced could be missing: btrfs, for example,
// moves it to a new place in the directory, which a reader that has begun earlier does
// not reach.
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

		// There was no lock file, because nothing was ever written. Has that changed?
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
