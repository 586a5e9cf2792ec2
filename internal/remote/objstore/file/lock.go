package file

import (
	"context"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path"
	"syscall"
	"time"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// nameLock is held while names are read and changed, never while data is written or
// synced. Closing it releases it, and so does the end of the process.
type nameLock struct{ f *os.File }

func (l *nameLock) release() { _ = l.f.Close() }

// lockPatience is how long to wait for the lock. A running process never holds it for
// more than an instant.
var lockPatience = time.Minute

// lockNames takes the lock of the store for changing names.
func (s *Store) lockNames(ctx context.Context) (*nameLock, error) {
	for {
		f, err := s.root.OpenFile(lockName, os.O_RDWR|os.O_CREATE, s.mode&0o666)
		if errors.Is(err, syscall.ENOENT) {
			if err := s.makeDirs(ownDir); err != nil {
				return nil, err
			}
			continue
		}

		if err != nil {
			return nil, err
		}

		if st, err := f.Stat(); err == nil && st.Size() == 0 && st.Mode().Perm() != s.mode&0o666 {
			_ = f.Chmod(s.mode & 0o666) // its owner does it
		}

		return s.waitForLock(ctx, f, unix.LOCK_EX)
	}
}

// lockNamesShared takes the lock for reading names. It returns nil if nothing was ever
// written.
func (s *Store) lockNamesShared(ctx context.Context) (*nameLock, error) {
	f, err := s.root.OpenFile(lockName, os.O_RDONLY, 0)
	if absent(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return s.waitForLock(ctx, f, unix.LOCK_SH)
}

// waitForLock polls for the lock: a call that waits in the kernel would not notice the
// end of the context.
func (s *Store) waitForLock(ctx context.Context, f *os.File, how int) (*nameLock, error) {
	pause := 50 * time.Microsecond
	for start := time.Now(); ; {
		err := flock(f, how|unix.LOCK_NB)
		if err == nil {
			return &nameLock{f}, nil
		}

		if errors.Is(err, syscall.EWOULDBLOCK) {
			err = nil
			if time.Since(start) > lockPatience {
				err = errs.New(errs.InUse, "lock remote", s.url, "another process has held %s for %s", lockName, lockPatience).
					WithHint("find a stopped or hung pando with `fuser -v` on that file, on each host that uses the remote")
			}
		}

		// Pause for a random time, each time longer.
		if err == nil {
			timer := time.NewTimer(pause/2 + rand.N(pause))
			select {
			case <-timer.C:
			case <-ctx.Done():
				timer.Stop()
				err = ctx.Err()
			}
			pause = min(2*pause, 5*time.Millisecond)
		}
		if err != nil {
			_ = f.Close()
			return nil, err
		}
	}
}

func flock(f *os.File, how int) error {
	for {
		err := unix.Flock(int(f.Fd()), how)
		switch {
		case errors.Is(err, syscall.EINTR):
			continue
		case errs.IsAny(err, syscall.ENOLCK, syscall.EOPNOTSUPP, syscall.ENOSYS, syscall.EINVAL):
			return errs.New(errs.Unsupported, "lock remote", f.Name(), "%w", os.NewSyscallError("flock", err)).
				WithHint("use a filesystem with file locks for the remote; mount NFS without nolock")
		}
		if err != nil {
			return os.NewSyscallError("flock", err)
		}
		return nil
	}
}

// refreshNames refreshes the names that this host has cached of a directory, and of those
// above it, from the server.
func (s *Store) refreshNames(dir string) {
	if !s.shared {
		return
	}

	root, err := s.root.Open(".")
	if err != nil {
		return // the operation that follows will fail as well
	}

	defer root.Close()

	// Begin at the top: the kernel looks directories up by their cached parents.
	var chain []string
	for ; dir != "."; dir = path.Dir(dir) {
		chain = append(chain, dir)
	}

	chain = append(chain, ".")
	for i := len(chain) - 1; i >= 0; i-- {
		var st unix.Statx_t
		_ = unix.Statx(int(root.Fd()), chain[i], unix.AT_STATX_FORCE_SYNC|unix.AT_SYMLINK_NOFOLLOW,
			unix.STATX_MTIME|unix.STATX_CTIME, &st)
	}
}

// removeStaleTemps removes the files that killed writers have left, once in the life of a
// store, before it first writes. The package comment says why it syncs directories.
func (s *Store) removeStaleTemps(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()

	if s.cleaned {
		return nil
	}

	entries, err := s.readNames(tmpDir)
	if err != nil && !absent(err) {
		return err
	}

	// Find the files that are not locked, and lock them.
	var stale []*tempObject
	defer func() {
		for _, t := range stale {
			_ = t.f.Close()
		}
	}()

	for _, e := range entries {
		if !e.Type().IsRegular() {
			continue
		}

		t, err := s.lockStale(tmpDir + "/" + e.Name())
		if err != nil {
			return err
		}
		if t != nil {
			stale = append(stale, t)
		}
	}

	// Sync all names before removing them.
	if len(stale) > 0 {
		if err := s.syncAllNames(ctx, "."); err != nil {
			return err
		}
	}

	for _, t := range stale {
		if err := s.root.Remove(t.name); err != nil && !absent(err) {
			return err
		}
	}

	s.cleaned = true
	return nil
}

// lockStale locks a temporary file that a killed writer has left. It returns nil if the
// writer still works, or has finished.
func (s *Store) lockStale(name string) (*tempObject, error) {
	f, err := s.root.OpenFile(name, os.O_RDWR|unix.O_NONBLOCK, 0)
	if absent(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}

	err = flock(f, unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		if _, gone := s.root.Lstat(name); !absent(gone) {
			return &tempObject{s: s, f: f, name: name}, nil
		}
	}

	_ = f.Close()
	if errors.Is(err, syscall.EWOULDBLOCK) {
		err = nil
	}
	return nil, err
}

// syncAllNames makes all names below a directory durable.
func (s *Store) syncAllNames(ctx context.Context, dir string) error {
	if err := ctx.Err(); err != nil {
		return err
	}

	entries, err := s.readNames(dir)
	if err == nil {
		_, err = s.syncDir(dir)
	}
	if dir != "." && absent(err) {
		return nil
	}
	if err != nil {
		return err
	}

	for _, e := range entries {
		if e.IsDir() && e.Name() != ownDir && e.Name() != "lost+found" {
			if err := s.syncAllNames(ctx, path.Join(dir, e.Name())); err != nil && !errors.Is(err, fs.ErrPermission) {
				return err
			}
		}
	}

	return nil
}
