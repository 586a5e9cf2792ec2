package treecopy

import (
	"cmp"

	"golang.org/x/sys/unix"

	"pando/internal/linux/kernel"
	"pando/internal/linux/treewalk"
)

const (
	stageName = ".pando-import"
	lostFound = "lost+found"
)

// stage is the directory in which a tree is built: the root of the destination or a temporary
// directory in it.
type stage struct {
	root int    // of the destination
	fd   int    // the directory to fill; its user closes it
	name string // of fd in root; "" if fd is the root
}

func openStage(root int, opt Options) (*stage, error) {
	s := &stage{root: root, name: stageName}
	if !opt.Staging || opt.Unprivileged {
		s.name = ""
	} else if err := retry0(func() error { return unix.Mkdirat(root, stageName, 0o700) }); err != nil {
		return nil, dstErr(stageName, "mkdir", err)
	}
	var err error
	if s.fd, err = openDir(root, cmp.Or(s.name, ".")); err != nil {
		return nil, dstErr(stageName, "open", err)
	}
	return s, nil
}

// finish moves everything up into the root and removes the temporary directory.
func (s *stage) finish() error {
	if s.name == "" {
		return nil
	}

	fd, err := openDir(s.root, s.name)
	if err != nil {
		return dstErr(s.name, "open", err)
	}

	defer unix.Close(fd)

	if err := s.avoidName(fd); err != nil {
		return err
	}

	// Moving entries away may hide others from a reader, so read until nothing
	// is left.
	for moved := -1; moved != 0; {
		if moved, err = s.moveAll(fd); err != nil {
			return err
		}
	}

	if err := unix.Unlinkat(s.root, s.name, unix.AT_REMOVEDIR); err != nil {
		return dstErr(s.name, "rmdir", err)
	}

	return nil
}

// avoidName renames the temporary directory while the tree has an entry of the same name.
func (s *stage) avoidName(fd int) error {
	for {
		_, err := kernel.Lstat(fd, s.name)
		if err == unix.ENOENT {
			return nil
		}
		if err != nil {
			return dstErr(s.name, "stat", err)
		}
		other := s.name + "+"
		if err := unix.Renameat2(s.root, s.name, s.root, other, unix.RENAME_NOREPLACE); err != nil {
			return dstErr(s.name, "rename", err)
		}
		s.name = other
	}
}

// moveAll reads the temporary directory once and moves the entries found into the root. It returns their number.
func (s *stage) moveAll(fd int) (moved int, err error) {
	if _, err := unix.Seek(fd, 0, unix.SEEK_SET); err != nil {
		return 0, dstErr(s.name, "seek", err)
	}

	buf := make([]byte, 32<<10)
	for {
		n, err := retry(func() (int, error) { return unix.Getdents(fd, buf) })
		if err != nil {
			return moved, dstErr(s.name, "getdents", err)
		}
		if n == 0 {
			return moved, nil
		}

		for e := range treewalk.Dirents(buf[:n]) {
			if e.Name == "." || e.Name == ".." {
				continue
			}
			if err := s.moveUp(fd, e.Name); err != nil {
				return moved, dstErr(e.Name, "rename", err)
			}
			moved++
		}
	}
}

// moveUp moves one entry into the root, where only an empty lost+found may be in its way.
func (s *stage) moveUp(fd int, name string) error {
	err := unix.Renameat2(fd, name, s.root, name, unix.RENAME_NOREPLACE)
	if err == unix.EINVAL { // a filesystem without NOREPLACE
		var st unix.Stat_t
		if err = unix.Fstatat(s.root, name, &st, unix.AT_SYMLINK_NOFOLLOW); err == unix.ENOENT {
			return unix.Renameat(fd, name, s.root, name)
		} else if err == nil {
			err = unix.EEXIST
		}
	}
	if err == unix.EEXIST && name == lostFound {
		// A fresh ext4 has one, which must be empty.
		if err = unix.Unlinkat(s.root, name, unix.AT_REMOVEDIR); err == nil {
			err = unix.Renameat(fd, name, s.root, name)
		}
	}

	return err
}
