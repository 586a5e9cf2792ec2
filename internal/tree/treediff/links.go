package treediff

import (
	"os"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/linux/treewalk"
)

// This file applies the changes of files with several names. Two names are the same
// file in the tree in which the changes were found (from). In the tree to which
// they are applied, a name may refer to another file now, so each one is checked.

// isNew reports whether a change creates a new file, possibly in place of another.
func (ch *Change) isNew() bool {
	return ch.Op == Added || ch.Op == Modified && (ch.replaced || ch.TypeBefore != "")
}

// newName reports whether a change adds a name to a file.
func (ch *Change) newName() bool { return ch.Link != "" && ch.isNew() }

// relinked reports whether a change turns a name of something other than a regular file into
// a name of another file.
func (ch *Change) relinked() bool {
	return ch.Link != "" && ch.Op == Modified && ch.Content && ch.Type != File && !ch.isNew()
}

// ownFiles turns new names of missing files into files of their own. Several names of the same
// missing file become names of one new file.
func ownFiles(changes []Change, missing func(path string) bool) {
	first := map[string]string{} // from the path of the missing file to that of the new one
	for i := range changes {
		ch := &changes[i]
		if !ch.newName() || !missing(ch.Link) {
			continue
		}
		if path, ok := first[ch.Link]; ok {
			ch.Link = path
			continue
		}
		first[ch.Link] = ch.Path
		ch.Link, ch.Content = "", true
	}
}

// applyLinks makes the hard links.
func (a *applier) applyLinks(changes []Change) error {
	for i := range changes {
		ch := &changes[i]
		if !ch.newName() && !ch.relinked() {
			continue
		}
		err := a.applyLink(ch)
		if err != nil && a.taken(ch, err) {
			continue
		}
		if err != nil {
			return err
		}
		a.addProgress(1, 0)
	}

	return nil
}

// applyLink makes the path of a change a name of the file ch.Link. If that file does not exist, the
// path becomes a copy.
func (a *applier) applyLink(ch *Change) error {
	dir, name, err := a.parent(ch.Path)
	if err != nil {
		return err
	}

	defer dir.Close()

	// moveOut has already removed other replaced files, unless they stay.
	if ch.relinked() || a.o.Force {
		err = a.unlink(dir, name)
	}

	linked := false
	if err == nil {
		linked, err = a.linkTo(ch, dir, name)
	}
	if err == nil && !linked {
		err = a.copyFile(ch.Path)
	}

	return failed(ch.Path, "link", err)
}

// unlink removes a file, and with Force also a directory. It succeeds if the file does not exist.
func (a *applier) unlink(dir *os.File, name string) error {
	err := unlinkAt(dir, name, 0)
	if err == unix.EISDIR && a.o.Force {
		err = a.remove(dir, name)
	}
	if err == unix.ENOENT {
		return nil
	}
	return err
}

// linkTo makes name in dir another name of the file at ch.Link. It returns false if
// that does not exist or has another type than the change says.
func (a *applier) linkTo(ch *Change, dir *os.File, name string) (bool, error) {
	if a.skipped[ch.Link] {
		return false, nil
	}

	old, st, err := lookUp(a.onto, ch.Link)
	if err == nil {
		defer old.Close()
		if typeOf(uint8(st.Mode&unix.S_IFMT>>12)) != ch.Type {
			return false, nil
		}
		_, oldName := split(ch.Link)
		err = unix.Linkat(int(old.Fd()), oldName, int(dir.Fd()), name, 0)
	}

	switch err {
	case unix.ENOENT, unix.ENOTDIR, unix.ELOOP, unix.EPERM:
		return false, nil
	}

	return err == nil, err
}

// linkOtherNames updates files whose content was changed under another name, but
// which are files of their own in this tree. It works sequentially, because several may
// be names of one file.
func (a *applier) linkOtherNames(changes []Change) error {
	for i := range changes {
		ch := &changes[i]
		if !ch.Content || ch.Link == "" || ch.isNew() || ch.Type != File {
			continue
		}
		if err := a.ctx.Err(); err != nil {
			return errs.Wrap("apply", "", err)
		}
		if a.oneFile(ch.Path, ch.Link) {
			continue // the change of that name has updated both
		}
		if err := a.contentUnlessKept(ch); err != nil {
			return err
		}
	}

	return nil
}

// oneFile reports whether two paths are names of one file.
func (a *applier) oneFile(x, y string) bool {
	stX, errX := fileAt(a.onto, x)
	stY, errY := fileAt(a.onto, y)
	return errX == nil && errY == nil && stX.Dev == stY.Dev && stX.Ino == stY.Ino
}

func fileAt(root *os.File, path string) (unix.Stat_t, error) {
	dir, st, err := lookUp(root, path)
	if err == nil {
		dir.Close()
	}
	return st, err
}

// lookUp opens the directory of a path and stats the path.
func lookUp(root *os.File, path string) (dir *os.File, st unix.Stat_t, err error) {
	dirPath, name := split(path)
	if dir, err = treewalk.Open(root, dirPath); err != nil {
		return nil, st, err
	}
	if err = unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		dir.Close()
		return nil, st, err
	}
	return dir, st, nil
}
