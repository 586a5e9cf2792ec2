package file

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"syscall"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"

	"golang.org/x/sys/unix"
)

// Own files of the store. No key begins with a dot.
const (
	ownDir   = ".pando"
	tmpDir   = ownDir + "/tmp"
	lockName = ownDir + "/lock"
)

// hashBytes is the size up to which a hash of an object's content is part of its
// version. The objects that Pando replaces are mostly smaller, and those that it lists
// by the thousand are mostly larger.
const hashBytes = 64 << 10

// versionOf returns the version of the object in f. See the package comment.
func versionOf(f *os.File, changed time.Time, size int64) (objstore.Version, error) {
	v := fmt.Sprintf("%x-%x", changed.UnixNano(), size)
	// A time that ends in zeros comes from a filesystem with a coarser resolution.
	if size <= hashBytes || changed.Nanosecond()%coarse == 0 {
		h := sha256.New()
		if _, err := io.Copy(h, io.NewSectionReader(f, 0, size)); err != nil {
			return "", err
		}
		v += "-" + hex.EncodeToString(h.Sum(nil)[:16])
	}
	return objstore.Version(v), nil
}

// coarse divides the nanoseconds of every time that a filesystem keeps in units of
// 100 ns or larger, and of none that [stamp] makes.
const coarse = 100

// nextTime returns the time of an object that replaces one with the time old: later
// than old, otherwise about now, with random digits below the second.
func nextTime(old time.Time) time.Time {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	drawn := int64(binary.LittleEndian.Uint64(b[:]) >> 1)
	t := time.Unix(time.Now().Unix(), drawn%1e9)
	if !t.After(old) {
		t = old.Add(1 + time.Duration(drawn%1e6))
	}
	if t.Nanosecond()%coarse == 0 {
		t = t.Add(1)
	}
	return t
}

// Put implements objstore.Store.
func (s *Store) Put(ctx context.Context, key string, data []byte, c objstore.Condition) (objstore.Version, error) {
	if err := objstore.CheckPut(key, data); err != nil {
		return "", err
	}
	if err := s.checkContext(ctx, writing, key); err != nil {
		return "", err
	}
	v, err := s.putObject(ctx, key, data, c)
	if errs.Is(err, errs.NoSpace) && len(data) < reserveBytes && objstore.MayUseReserve(ctx) && s.spendReserve() {
		v, err = s.putObject(ctx, key, data, c)
	}
	if err != nil {
		return "", s.wrapError(writing, key, err)
	}
	return v, nil
}

// putObject writes an object under a temporary name, makes it durable and gives it its name.
func (s *Store) putObject(
	ctx context.Context, key string, data []byte, c objstore.Condition,
) (objstore.Version, error) {
	if err := s.removeStaleTemps(ctx); err != nil {
		return "", err
	}

	// Do not write an object that cannot succeed. placeObject checks the condition again.
	old, _, err := s.checkCondition(key, c)
	if err != nil {
		return "", err
	}

	t, err := s.writeTemp(ctx, data, nextTime(old))
	if err != nil {
		return "", err
	}

	defer t.discard()

	if err := s.placeObject(ctx, t, key, c); err != nil {
		return "", err
	}

	// From here on the object exists. A failure to make that durable must not be
	// temporary: another attempt would find the object and consider it durable.
	if err := s.syncNames(path.Dir(key)); err != nil {
		return "", errs.New(errs.IO, writing, s.ref(key), "it was written, but may not survive a power failure: %w", err)
	}

	return versionOf(t.f, t.changed, int64(len(data)))
}

// checkCondition returns the time of the object with the key and whether it exists, and
// Conflict if the condition does not hold.
func (s *Store) checkCondition(key string, c objstore.Condition) (changed time.Time, there bool, err error) {
	o, err := s.openObject(key)
	switch {
	case errors.Is(err, errDirectory):
		return changed, false, errs.New(errs.Invalid, writing, s.ref(key), "%w", err)
	case err == nil:
		_ = o.f.Close()
	case !absent(err):
		return changed, false, err
	}

	there = err == nil
	switch {
	case c.Absent() && there:
		err = errs.New(errs.Conflict, writing, s.ref(key), "it already exists")
	case c.Version() != "" && !there:
		err = errs.New(errs.Conflict, writing, s.ref(key), "it no longer exists")
	case c.Version() != "" && o.info.Version != c.Version():
		err = errs.New(errs.Conflict, writing, s.ref(key), "another process or host changed it first")
	default:
		err = nil
	}

	return o.changed, there, err
}

// tempObject is an object that is being written.
type tempObject struct {
	s       *Store
	f       *os.File // open and locked: its writer is alive
	name    string   // "" once it has been renamed
	changed time.Time
}

// writeTemp writes a file in .pando/tmp and waits until it is durable.
func (s *Store) writeTemp(ctx context.Context, data []byte, changed time.Time) (*tempObject, error) {
	t, err := s.newTemp(ctx)
	if err != nil {
		return nil, err
	}

	if err = t.writeContent(ctx, data); err == nil {
		err = t.setTimeAndSync(changed)
	}
	if err != nil {
		t.discard()
		return nil, err
	}

	return t, nil
}

// writeContent writes the content, and sets the mode that all files of the store have.
func (t *tempObject) writeContent(ctx context.Context, data []byte) error {
	st, err := t.f.Stat()
	if err != nil {
		return err
	}

	if want := t.s.mode & 0o666; st.Mode().Perm() != want {
		if err := t.f.Chmod(want); err != nil {
			return err
		}
	}

	for rest := data; len(rest) > 0; {
		n := objstore.PaceChunk(ctx, min(len(rest), ioBytes))
		if _, err := t.f.Write(rest[:n]); err != nil {
			return err
		}
		if err := objstore.Pace(ctx, n); err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		rest = rest[n:]
	}

	return nil
}

// newTemp creates and locks an empty file in .pando/tmp.
func (s *Store) newTemp(ctx context.Context) (*tempObject, error) {
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}

		name := tmpDir + "/" + rand.Text()
		f, err := s.root.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, s.mode&0o666)
		if errors.Is(err, syscall.ENOENT) {
			if err := s.makeDirs(tmpDir); err != nil {
				return nil, err
			}
			continue
		}

		if err != nil {
			return nil, err
		}

		t := &tempObject{s: s, f: f, name: name}
		err = flock(f, unix.LOCK_EX|unix.LOCK_NB)
		if errors.Is(err, syscall.EWOULDBLOCK) { // another process considers it stale
			_ = f.Close()
			continue
		}

		if err != nil {
			t.discard()
			return nil, err
		}

		// It may have been removed as stale before it was locked.
		var st unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &st); err != nil {
			t.discard()
			return nil, os.NewSyscallError("fstat", err)
		}

		if st.Nlink > 0 {
			return t, nil
		}

		_ = f.Close()
	}
}

// setTimeAndSync sets the time of the file, and makes the file durable.
func (t *tempObject) setTimeAndSync(changed time.Time) error {
	ts := unix.NsecToTimespec(changed.UnixNano())
	if err := unix.UtimesNanoAt(int(t.f.Fd()), "", []unix.Timespec{ts, ts}, unix.AT_EMPTY_PATH); err != nil {
		// Before Linux 5.8, utimensat works on a descriptor only through /proc.
		p := fmt.Sprintf("/proc/self/fd/%d", t.f.Fd())
		if unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{ts, ts}, 0) != nil {
			return os.NewSyscallError("utimensat", err)
		}
	}

	if err := t.f.Sync(); err != nil {
		return err
	}

	// The filesystem may round it.
	st, err := t.f.Stat()
	if err != nil {
		return err
	}

	t.changed = st.ModTime()
	return nil
}

// discard closes the file, and removes it if it is still in .pando/tmp. If that fails,
// the next writer removes it.
func (t *tempObject) discard() {
	if t.name != "" {
		_ = t.s.root.Remove(t.name)
	}
	_ = t.f.Close()
}

// placeObject links or renames a durable file to its key, if the condition holds.
func (s *Store) placeObject(ctx context.Context, t *tempObject, key string, c objstore.Condition) error {
	l, err := s.lockNames(ctx)
	if err != nil {
		return err
	}

	defer l.release()

	// Directories may disappear in the meantime, if a person deletes another object
	// in them without this lock.
	for range 100 {
		old, there, err := s.checkCondition(key, c)
		if err != nil {
			return err
		}

		if there && !t.changed.After(old) && t.changed.Nanosecond()%coarse != 0 {
			if err := t.setTimeAndSync(nextTime(old)); err != nil {
				return err
			}
		}

		if there {
			err = s.renameTemp(t, key)
		} else if err = s.root.Link(t.name, key); cannotLink(err) {
			err = s.renameTemp(t, key)
		}

		switch {
		case err == nil:
			return nil
		case errors.Is(err, syscall.ENOENT):
			err = s.makeDirs(path.Dir(key))
		case errs.IsAny(err, syscall.EEXIST, syscall.EISDIR):
			err = nil // changed without the lock: try again
		}

		switch {
		case errs.IsAny(err, syscall.ENOTDIR, syscall.EEXIST):
			return errs.New(errs.Invalid, writing, s.ref(key), "a part of its key is the key of another object")
		case err != nil:
			return err
		}
	}

	return errs.New(errs.IO, writing, s.ref(key), "other programs keep changing the remote's directory")
}

func (s *Store) renameTemp(t *tempObject, key string) error {
	err := s.root.Rename(t.name, key)
	if err == nil {
		t.name = ""
	}
	return err
}

// cannotLink reports whether the filesystem has no hard links (FAT, some of FUSE).
// Renaming is as good then, while all writers hold the lock. Only the trace of a writer
// that is killed between this and the sync of the directory is lost.
func cannotLink(err error) bool {
	for _, no := range []syscall.Errno{syscall.EPERM, syscall.EOPNOTSUPP, syscall.ENOSYS, syscall.EMLINK} {
		if errors.Is(err, no) {
			return true
		}
	}
	return false
}

// makeDirs creates a directory and those above it. syncNames makes them durable. On
// return they may be gone again, because Delete removes empty ones.
func (s *Store) makeDirs(dir string) error {
	err := s.root.MkdirAll(dir, s.mode)

	// Ignore the umask: users who may write to the store must be able to write to
	// all of it.
	for ; err == nil && dir != "."; dir = path.Dir(dir) {
		var st os.FileInfo
		if st, err = s.root.Lstat(dir); err != nil || st.Mode().Perm() == s.mode {
			continue
		}
		inherited := st.Mode() & (os.ModeSetgid | os.ModeSticky)
		if err = s.root.Chmod(dir, s.mode|inherited); errors.Is(err, syscall.EPERM) {
			err = nil // another user owns it
		}
	}
	if errors.Is(err, syscall.ENOENT) {
		return s.checkStoreExists(writing, dir)
	}

	return err
}

// syncNames makes the names in a directory durable, and those of the directory itself
// and of all above it, unless they are known to be durable.
func (s *Store) syncNames(dir string) error {
	fresh := map[string]identity{}
	for {
		id, err := s.syncDir(dir)
		if errors.Is(err, syscall.ENOENT) {
			return nil // the object and its directory were already deleted
		}
		if err != nil {
			return err
		}

		s.mu.Lock()
		known := s.durable[dir] == id
		s.mu.Unlock()
		if known || dir == "." {
			break
		}

		fresh[dir] = id
		dir = path.Dir(dir)
	}

	s.mu.Lock()
	defer s.mu.Unlock()

	for d, id := range fresh {
		if len(s.durable) >= maxDurable {
			clear(s.durable)
		}
		s.durable[d] = id
	}

	return nil
}

// maxDurable is the number of directories that a store remembers. Each session has one.
const maxDurable = 10_000

func (s *Store) syncDir(dir string) (identity, error) {
	f, err := s.root.Open(dir)
	if err != nil {
		return identity{}, err
	}
	defer f.Close()
	var st unix.Statx_t
	if err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_INO|unix.STATX_BTIME, &st); err != nil {
		return identity{}, os.NewSyscallError("statx", err)
	}
	return identity{st.Ino, st.Btime}, f.Sync()
}

// Delete implements objstore.Store.
func (s *Store) Delete(ctx context.Context, key string) error {
	if err := objstore.CheckKey(key); err != nil {
		return err
	}
	if err := s.checkContext(ctx, deleting, key); err != nil {
		return err
	}
	if err := s.removeObject(ctx, key); err != nil {
		return s.wrapError(deleting, key, err)
	}
	return nil
}

// removeObject removes an object and the directories that are empty then. It is durable even if the object was absent.
func (s *Store) removeObject(ctx context.Context, key string) error {
	s.refreshNames(path.Dir(key))
	st, err := s.root.Lstat(key)
	if err == nil && !st.IsDir() {
		// Write only if there is an object: deleting nothing works on a read-only store.
		if err := s.removeStaleTemps(ctx); err != nil {
			return err
		}
		if err := s.unlinkLocked(ctx, key); err != nil {
			return err
		}
	} else if err != nil && !absent(err) {
		return err
	}

	dir := path.Dir(key)

	// Even if it was absent: a process that deleted it may have been killed before this.
	if _, err := s.syncDir(dir); absent(err) {
		return s.checkStoreExists(deleting, key)
	} else if err != nil {
		return err
	}

	// Remove empty directories of sessions, but keep those at the top, which are used again.
	for ; path.Dir(dir) != "."; dir = path.Dir(dir) {
		if !s.removeDir(dir) {
			break
		}
	}

	return nil
}

// unlinkLocked removes an object under the lock, and so never between the check and the
// rename of a Put.
func (s *Store) unlinkLocked(ctx context.Context, key string) error {
	l, err := s.lockNames(ctx)
	if err != nil {
		return err
	}

	defer l.release()
	st, err := s.root.Lstat(key)
	if err == nil && !st.IsDir() {
		err = s.root.Remove(key)
	}
	if absent(err) {
		return nil
	}

	return err
}

// removeDir removes a directory if it is empty, and reports whether it did.
func (s *Store) removeDir(dir string) bool {
	above, err := s.root.Open(path.Dir(dir))
	if err != nil {
		return false
	}
	defer above.Close()
	return unix.Unlinkat(int(above.Fd()), path.Base(dir), unix.AT_REMOVEDIR) == nil
}
