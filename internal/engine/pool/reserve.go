package pool

import (
	"errors"
	"os"
	"path/filepath"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// The reserve is a file that takes room away from everybody, so that a full filesystem can
// still be cleaned up. It is the last resort: what cleaning up is known to need is taken
// from the disk in its place (catalog.Preallocate), as everybody else writes into what the
// reserve gives back, too. Therefore it is given back by pieces, each just before another
// try, and taken again when there is room. A pool in a file has a second one inside: blocks
// that are there on the host as well.
const (
	reserveName       = "reserve"
	reserveBytes      = 8 << 20
	innerReserveBytes = 4 << 20
)

// reserve is one of them.
type reserve struct {
	path  string
	bytes int64
	inner bool // in the filesystem inside the file
}

func (p *Pool) reserves() []reserve {
	all := []reserve{{filepath.Join(p.Dir, reserveName), reserveBytes, false}}
	if p.Config.Backing != nil && p.isMounted() {
		all = append(all, reserve{filepath.Join(p.DataDir(), "."+reserveName), innerReserveBytes, true})
	}
	return all
}

// MakeReserve allocates the reserve, or the missing part of it, if there is room: eight times its size for a new one,
// else twice the missing part.
func (p *Pool) MakeReserve() error {
	for _, r := range p.reserves() {
		if err := r.make(); err != nil && errs.KindOf(err) != errs.NoSpace {
			return errs.Wrap("reserve space", p.Dir, err)
		}
	}
	return nil
}

// HasReserve reports whether the reserve is complete.
func (p *Pool) HasReserve() bool {
	for _, r := range p.reserves() {
		if st, err := os.Lstat(r.path); err != nil || st.Size() < r.bytes {
			return false
		}
	}
	return true
}

func (r reserve) make() error {
	st, err := os.Lstat(r.path)
	has, most := int64(0), 8*r.bytes
	if err == nil {
		has, most = st.Size(), 2*(r.bytes-st.Size())
	}
	if has >= r.bytes {
		return nil
	}

	var room unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(r.path), &room); err != nil || int64(room.Bavail)*room.Bsize < most {
		return err
	}

	f, err := os.OpenFile(r.path, os.O_CREATE|os.O_WRONLY|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}

	defer f.Close()

	if !r.inner {
		err = unix.Fallocate(int(f.Fd()), 0, has, r.bytes-has)
		if !errors.Is(err, unix.EOPNOTSUPP) {
			return err
		}
	}

	// Inside a loop-backed pool, blocks that are only allocated are holes on the host: write them.
	_, err = f.WriteAt(make([]byte, r.bytes-has), has)
	if err == nil {
		err = f.Sync()
	}

	return err
}

// SpendReserve returns bytes of the reserve, or what is left of it, to the filesystem that it is on, and reports
// whether there was anything to return. MakeReserve allocates it again.
func (p *Pool) SpendReserve(bytes int64) bool {
	spent := false
	for _, r := range p.reserves() {
		spent = shrinkReserve(r.path, bytes) || spent
	}
	return spent
}

func shrinkReserve(path string, bytes int64) bool {
	st, err := os.Lstat(path)
	if err != nil || !st.Mode().IsRegular() {
		return false
	}
	if st.Size() <= bytes {
		return os.Remove(path) == nil
	}
	return os.Truncate(path, st.Size()-bytes) == nil
}
