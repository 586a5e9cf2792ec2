package pool

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/waiting"

	"golang.org/x/sys/unix"
)

// lockLimit is how long Lock waits: the holder of the lock may have to compare a large pool with its catalogue.
var lockLimit = time.Minute

// Lock keeps other processes from making, mounting or removing the pool. InUse, with the holders of the lock, after a
// minute.
func Lock(ctx context.Context, dir string) (unlock func(), err error) {
	path := filepath.Join(dir, "lock")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, errs.Wrap("lock pool", dir, err)
	}

	w := waiting.Wait{
		Op: "lock pool", Ref: dir, What: "the lock of the pool", Limit: lockLimit,
		Holders: func() []waiting.Process { return waiting.LockHolders(path, 0) },
	}
	err = w.Until(ctx, func() (bool, error) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, unix.EINTR) {
			return false, nil
		}
		return err == nil, errs.Wrap("lock pool", dir, err)
	})
	if err != nil {
		f.Close()
		return nil, err
	}

	return func() { f.Close() }, nil
}

// tryLock is Lock that does not wait: ok reports whether it has the lock.
func tryLock(dir string) (unlock func(), ok bool) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, false
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, false
	}
	return func() { f.Close() }, true
}
