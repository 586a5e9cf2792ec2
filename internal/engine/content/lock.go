package content

import (
	"context"
	"errors"
	"hash/fnv"
	"os"
	"path/filepath"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/waiting"
	"pando/internal/driver"

	"golang.org/x/sys/unix"
)

// byteLock describes a lock that concerns one object.
type byteLock struct {
	op, ref string          // of errors
	file    string          // in the directory "locks" of the pool
	id      driver.ObjectID // chooses the byte of the file
	what    string          // for users who wait
	limit   time.Duration
}

// lockByte takes a lock, which ends with the process.
func (acc *Access) lockByte(ctx context.Context, l byteLock) (unlock func(), err error) {
	path := filepath.Join(acc.pool.Dir, "locks", l.file)
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, errs.Wrap(l.op, l.ref, err)
	}

	h := fnv.New64a()
	_, _ = h.Write([]byte(l.id)) // never fails
	at := int64(h.Sum64() >> 2)
	w := waiting.Wait{
		Op: l.op, Ref: l.ref, What: l.what, Limit: l.limit,
		Holders: func() []waiting.Process { return waiting.LockHolders(path, at) },
	}
	err = w.Until(ctx, func() (bool, error) {
		lock := unix.Flock_t{Type: unix.F_WRLCK, Start: at, Len: 1}
		err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &lock)
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.EINTR) {
			return false, nil
		}
		return err == nil, errs.Wrap(l.op, l.ref, err)
	})
	if err != nil {
		f.Close()
		return nil, err
	}

	return func() { f.Close() }, nil
}
