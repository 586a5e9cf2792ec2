package pool

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"pando/internal/errs"

	"golang.org/x/sys/unix"
)

// The reserve is a file that takes room away from everybody, so that a full
// filesystem can still be cleaned up: destroying needs to write a few pages of
// the catalogue before it can give anything back.
const (
	reserveName  = "reserve"
	reserveBytes = 8 << 20
)

// MakeReserve takes the reserve, if it is not there and there is plenty of room.
func (p *Pool) MakeReserve() error {
	path := filepath.Join(p.Dir, reserveName)
	if exists(path) {
		return nil
	}
	var st unix.Statfs_t
	if err := unix.Statfs(p.Dir, &st); err != nil {
		return errs.Wrap("reserve space", p.Dir, err)
	}
	if int64(st.Bavail)*st.Bsize < 8*reserveBytes {
		return nil
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return nil // another process was faster
	}
	if err != nil {
		return errs.Wrap("reserve space", p.Dir, err)
	}
	defer f.Close()
	err = unix.Fallocate(int(f.Fd()), 0, 0, reserveBytes)
	if errors.Is(err, unix.EOPNOTSUPP) { // such a filesystem gets zeros
		_, err = f.Write(make([]byte, reserveBytes))
	}
	if err != nil {
		_ = os.Remove(path)
		if errs.KindOf(err) == errs.NoSpace {
			return nil
		}
		return errs.Wrap("reserve space", p.Dir, err)
	}
	return nil
}

// SpendReserve gives the reserve up if the filesystem is all but full. It comes
// back with MakeReserve. Not being able to is found out by what needs the room.
func (p *Pool) SpendReserve() {
	var st unix.Statfs_t
	if unix.Statfs(p.Dir, &st) == nil && int64(st.Bavail)*st.Bsize < reserveBytes {
		_ = os.Remove(filepath.Join(p.Dir, reserveName))
	}
}
