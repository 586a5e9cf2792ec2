package file

import (
	"context"
	"crypto/rand"
	"os"

	"pando/internal/remote/objstore"

	"golang.org/x/sys/unix"
)

// The reserve is a file that a removal may delete when the filesystem is full, for the blocks that its writes need. Its
// content is random, so that no filesystem stores it in less.
const (
	reserveName  = ownDir + "/reserve"
	reserveBytes = 1 << 20
	reserveLeave = 4 * reserveBytes // free space from which on a reserve is made
)

var _ objstore.Reserver = (*Store)(nil)

// KeepReserve implements objstore.Reserver. It makes the reserve if it is missing, and there is room for it.
func (s *Store) KeepReserve(ctx context.Context) error {
	if st, err := s.root.Lstat(reserveName); err == nil && st.Size() >= reserveBytes {
		return nil
	} else if err != nil && !absent(err) {
		return s.wrapError(writing, reserveName, err)
	}

	if room, err := s.hasRoom(); err != nil || !room {
		return s.wrapReserve(err)
	}
	if err := s.removeStaleTemps(ctx); err != nil {
		return s.wrapReserve(err)
	}
	return s.wrapReserve(s.writeReserve(ctx))
}

// wrapReserve wraps an error of writing the reserve; nil stays nil.
func (s *Store) wrapReserve(err error) error {
	if err == nil {
		return nil
	}
	return s.wrapError(writing, reserveName, err)
}

// hasRoom reports whether there is so much free space that a reserve takes little of it.
func (s *Store) hasRoom() (bool, error) {
	f, err := s.root.Open(".")
	if err != nil {
		return false, err
	}
	defer f.Close()

	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return false, os.NewSyscallError("fstatfs", err)
	}
	return int64(st.Bavail)*st.Bsize >= reserveLeave, nil
}

// writeReserve writes the reserve under a temporary name, and makes it durable before it gets its own.
func (s *Store) writeReserve(ctx context.Context) error {
	t, err := s.newTemp(ctx)
	if err != nil {
		return err
	}
	defer t.discard()

	content := make([]byte, reserveBytes)
	_, _ = rand.Read(content) // never fails
	if err := t.writeContent(ctx, content); err != nil {
		return err
	}
	if err := t.f.Sync(); err != nil {
		return err
	}
	return s.renameTemp(t, reserveName)
}

// spendReserve deletes the reserve, and reports whether its blocks are free then.
func (s *Store) spendReserve() bool {
	if s.root.Remove(reserveName) != nil {
		return false
	}
	_, err := s.syncDir(ownDir) // some filesystems free blocks only with a commit
	return err == nil
}
