package syncbench

import (
	"context"
	"crypto/rand"
	"encoding/base32"
	"errors"
	"fmt"
	"io/fs"
	randv2 "math/rand/v2"
	"os"
	"path/filepath"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/linux/durable"

	"golang.org/x/sys/unix"
)

// Prefix begins the name of the directory in which a benchmark keeps its files.
const Prefix = ".pando-bench-sync-"

const lockName = "lock" // in the directory: held while the benchmark lives

// scratch is the private directory of a benchmark.
type scratch struct {
	dir   string
	lock  *os.File // nil where the filesystem does not support locks
	files map[string]file
}

// newScratch makes the directory in path, after it has removed those of benchmarks that were killed.
func newScratch(path string) (*scratch, error) {
	if err := removeLeftovers(path); err != nil {
		return nil, errs.Wrap(op, path, err)
	}

	for try := 0; ; try++ {
		s, err := tryScratch(path)
		if err == nil {
			return s, nil
		}
		// Another benchmark that cleans up may take the directory in the moment before
		// it is locked.
		if try == 10 || !errs.IsAny(err, errTaken, fs.ErrExist) {
			return nil, errs.Wrap(op, path, err)
		}
	}
}

var errTaken = errors.New("another benchmark removed it as a leftover")

func tryScratch(path string) (*scratch, error) {
	var id [5]byte
	if _, err := rand.Read(id[:]); err != nil {
		return nil, err
	}

	s := &scratch{files: map[string]file{}}
	s.dir = filepath.Join(path, Prefix+strings.ToLower(base32.StdEncoding.EncodeToString(id[:])))
	if err := os.Mkdir(s.dir, 0o700); err != nil {
		return nil, err
	}

	lock, held, err := lockDir(s.dir)
	switch {
	case errors.Is(err, fs.ErrNotExist), err == nil && !held:
		return nil, errTaken
	case errors.Is(err, errNoLocks): // then nobody removes it as a leftover, either
		err = nil
	}
	if err != nil {
		_ = os.RemoveAll(s.dir)
		return nil, err
	}

	s.lock = lock
	return s, nil
}

var errNoLocks = errors.New("the filesystem does not support locks")

// lockDir takes the lock in a directory; not held if another process has it, or has
// removed the directory in the meantime.
func lockDir(dir string) (f *os.File, held bool, err error) {
	path := filepath.Join(dir, lockName)
	f, err = os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, false, err
	}

	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		mine, err1 := f.Stat()
		there, err2 := os.Lstat(path)
		if err1 == nil && err2 == nil && os.SameFile(mine, there) {
			return f, true, nil
		}
	}

	f.Close()
	switch {
	case err == nil, errors.Is(err, unix.EWOULDBLOCK):
		return nil, false, nil
	case errs.IsAny(err, unix.ENOLCK, unix.ENOSYS, unix.EOPNOTSUPP):
		return nil, false, errNoLocks
	}

	return nil, false, fmt.Errorf("lock %s: %w", path, err)
}

// removeLeftovers removes the directories of benchmarks whose process is gone, and nothing
// else: no directory of another user, none that a benchmark that lives has locked, and none of the same
// name that was not made by one, which has no lock file.
func removeLeftovers(path string) error {
	entries, err := os.ReadDir(path)
	if err != nil {
		return err
	}

	for _, e := range entries {
		dir := filepath.Join(path, e.Name())
		if !isScratch(dir, e) {
			continue
		}
		lock, held, err := lockDir(dir)
		if err != nil || !held {
			continue // it lives, it has just gone, or it cannot be known
		}
		err = os.RemoveAll(dir)
		lock.Close()
		if err != nil {
			return err
		}
	}

	return nil
}

// isScratch reports whether a directory is one that newScratch has made for this user.
func isScratch(dir string, e fs.DirEntry) bool {
	id, ok := strings.CutPrefix(e.Name(), Prefix)
	if !ok || len(id) != 8 || strings.Trim(id, "abcdefghijklmnopqrstuvwxyz234567") != "" || !e.IsDir() {
		return false
	}

	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR || int(st.Uid) != os.Geteuid() {
		return false
	}

	inside, err := os.ReadDir(dir)
	if err != nil {
		return false
	}

	for _, f := range inside {
		if f.Name() == lockName {
			return true
		}
	}

	return len(inside) == 0 // killed before it had a lock
}

// remove takes the directory and all in it away.
func (s *scratch) remove() error {
	err := os.RemoveAll(s.dir)
	if s.lock != nil {
		s.lock.Close()
	}
	return errs.Wrap(op, s.dir, err)
}

// own gives a program a name that no other process has, by a link in the directory; false if that cannot
// be: the program is a script, which starts others, or the filesystem has no links.
func (s *scratch) own(program string) (string, bool) {
	f, err := os.Open(program)
	if err != nil {
		return program, false
	}

	defer f.Close()
	var magic [4]byte
	if _, err := f.Read(magic[:]); err != nil || string(magic[:]) != "\x7fELF" {
		return program, false
	}

	link := s.path("pfio-" + strings.TrimPrefix(filepath.Base(s.dir), Prefix))
	if err := os.Symlink(program, link); err != nil && !errors.Is(err, fs.ErrExist) {
		return program, false
	}

	if _, err := os.Stat(link); err != nil { // mounted such that links are not followed
		return program, false
	}

	return link, true
}

func (s *scratch) path(name string) string { return filepath.Join(s.dir, name) }

// layout makes the files of a plan, of those that are there where that can be, and makes them
// durable. NoSpace before anything is written if there is no room.
func (s *scratch) layout(ctx context.Context, files []file) error {
	missing, err := s.reuse(files)
	if err != nil {
		return err
	}

	var need int64
	for _, f := range missing {
		need += f.bytes
	}

	if err := s.room(need); err != nil {
		return err
	}

	progress.From(ctx).Start(progress.CreatingFiles, 0, need)
	for _, f := range missing {
		if err := s.create(ctx, f); err != nil {
			return s.full(err, need)
		}
	}

	return s.syncfs()
}

// syncfs waits until all that the filesystem has in memory is on its disk, so that what was there
// before is not written during a run.
func (s *scratch) syncfs() error {
	if err := durable.SyncFS(s.dir); err != nil {
		return s.full(err, 0)
	}
	return nil
}

// reuse gives files that are there, and not wanted by their names, the names of wanted ones of the
// same size, removes what is left, and returns what has to be made.
func (s *scratch) reuse(wanted []file) (missing []file, err error) {
	want := map[string]file{}
	for _, f := range wanted {
		want[f.name] = f
	}

	var spare []file
	for name, f := range s.files {
		if want[name] != f {
			spare = append(spare, f)
			delete(s.files, name)
		}
	}

	// Out of the way first: the names of some may be wanted for others.
	for i := range spare {
		name := fmt.Sprintf("spare.%d", i)
		if err := os.Rename(s.path(spare[i].name), s.path(name)); err != nil {
			return nil, errs.Wrap(op, s.dir, err)
		}
		spare[i].name = name
	}

	for _, f := range wanted {
		if _, there := s.files[f.name]; there {
			continue
		}

		found := false
		for i, o := range spare {
			if found = o.bytes == f.bytes && o.written && f.written; found {
				if err := os.Rename(s.path(o.name), s.path(f.name)); err != nil {
					return nil, errs.Wrap(op, s.dir, err)
				}
				s.files[f.name] = f
				spare = append(spare[:i], spare[i+1:]...)
				break
			}
		}

		if !found {
			missing = append(missing, f)
		}
	}

	for _, o := range spare {
		if err := os.Remove(s.path(o.name)); err != nil {
			return nil, errs.Wrap(op, s.dir, err)
		}
	}

	return missing, nil
}

// room refuses what does not fit, with some room for metadata.
func (s *scratch) room(need int64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(s.dir, &st); err != nil {
		return errs.Wrap(op, s.dir, &os.PathError{Op: "statfs", Path: s.dir, Err: err})
	}
	free := int64(st.Bavail) * st.Bsize
	if need += need / 32; free >= need {
		return nil
	}
	return noRoom(filepath.Dir(s.dir), need).
		WithHint("free some space, or use smaller files: %s (in bytes), at most %d", errs.Param("size"), free*9/10)
}

func noRoom(path string, need int64) *errs.Error {
	return errs.New(errs.NoSpace, op, path, "needs %.1f MiB of free space", float64(need)/float64(mib))
}

// full explains an error of a full filesystem.
func (s *scratch) full(err error, need int64) error {
	if !errs.Is(err, errs.NoSpace) {
		return errs.Wrap(op, s.dir, err)
	}
	e := errs.New(errs.NoSpace, op, filepath.Dir(s.dir), "the filesystem is full: %w", err)
	if need > 0 {
		return e.WithHint("free some space (%.1f MiB are needed), or use smaller files: %s", float64(need)/float64(mib),
			errs.Param("size"))
	}
	return e.WithHint("free some space, or use smaller files: %s", errs.Param("size"))
}

// create makes one file and, if it is to be written, fills it: with numbers that nothing can compress or
// deduplicate, as a log that was written before.
func (s *scratch) create(ctx context.Context, want file) error {
	f, err := os.OpenFile(s.path(want.name), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}

	defer f.Close()
	if !want.written {
		if err := allocate(f, want.bytes); err != nil {
			return err
		}
		progress.From(ctx).Add(0, want.bytes)
	} else if err := fill(ctx, f, want.bytes); err != nil {
		return err
	}

	if err := f.Sync(); err != nil {
		return err
	}

	s.files[want.name] = want
	return f.Close()
}

func fill(ctx context.Context, f *os.File, size int64) error {
	var seed [32]byte
	if _, err := rand.Read(seed[:]); err != nil {
		return err
	}

	random := randv2.NewChaCha8(seed)
	buf := make([]byte, mib)
	for left := size; left > 0; {
		if err := ctx.Err(); err != nil {
			return err
		}
		b := buf[:min(left, mib)]
		if _, err := random.Read(b); err != nil {
			return err
		}
		if _, err := f.Write(b); err != nil {
			return err
		}
		left -= int64(len(b))
		progress.From(ctx).Add(0, int64(len(b)))
	}

	return nil
}

// allocate gives an empty file its size and its blocks, unwritten; where the filesystem cannot allocate,
// a hole, as etcd does.
func allocate(f *os.File, size int64) error {
	for {
		err := unix.Fallocate(int(f.Fd()), 0, 0, size)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		case errs.IsAny(err, unix.EOPNOTSUPP, unix.ENOSYS):
			return f.Truncate(size)
		}
		return fmt.Errorf("allocate %s: %w", f.Name(), err)
	}
}
