package treediff

import (
	"errors"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"pando/internal/linux/kernel"
	"pando/internal/linux/treewalk"
	"pando/internal/tree/treecopy"
)

// This file handles flags (chattr) and project IDs, which count as metadata. Immutable and
// append-only files cannot be changed, linked to, renamed or deleted, so Apply
// first clears those flags of all files that it works on, and sets flags last.

// comparedFlags are the flags that users set. The others describe how a
// filesystem stores a file.
const comparedFlags = kernel.FlagSync | kernel.FlagImmutable | kernel.FlagAppend | kernel.FlagNoDump |
	kernel.FlagNoAtime | kernel.FlagDirSync | kernel.FlagProjectInherit

// fileFlags are the flags and the project of a file, zero if the filesystem does not support them.
type fileFlags struct{ flags, project uint32 }

// flagsAt returns the flags of a file or directory. Other types are not opened and have no flags.
func flagsAt(p place) (f fileFlags, err error) {
	fd, err := kernel.OpenForFlags(int(p.dir.Fd()), p.name)
	if err == unix.EOPNOTSUPP {
		return f, nil
	}
	if err != nil {
		return f, failed(p.path, "open", err)
	}

	defer unix.Close(fd)
	if flags, err := kernel.GetFlags(fd); err == nil {
		f.flags = flags & comparedFlags
	}

	if x, err := kernel.GetFSXAttr(fd); err == nil {
		f.project = x.Project
	}

	return f, nil
}

// softened is a file whose flags "immutable" or "append-only" were cleared.
type softened struct {
	path     string // before renames
	flags    uint32 // the cleared flags
	dev, ino uint64
	file     *os.File // set if it has other names, because only those may be left in the end
}

// unprotect clears the flags "immutable" and "append-only" of all paths in the changes and of the directories above
// them, and remembers them. It ignores missing paths, which later steps report.
func (a *applier) unprotect(changes []Change) error {
	seen := map[string]bool{}
	for i := range changes {
		ch := &changes[i]
		for _, p := range []string{ch.Path, ch.From, ch.Link} {
			for ; p != "" && p != "." && !seen[p]; p, _ = split(p) {
				if err := a.ctx.Err(); err != nil {
					return err
				}
				seen[p] = true
				if err := a.soften(p); err != nil {
					return err
				}
			}
		}
	}

	return a.soften("")
}

// soften clears the flags of a path of onto.
func (a *applier) soften(path string) error {
	dirPath, name := split(path)
	dir, err := treewalk.Open(a.onto, dirPath)
	if err != nil {
		return nil
	}

	defer dir.Close()

	fd, err := kernel.OpenForFlags(int(dir.Fd()), name)
	if err != nil {
		return nil
	}

	f := os.NewFile(uintptr(fd), path)
	defer func() { closeUnlessNil(f) }()

	taken := kernel.UnprotectFile(fd)
	if taken == 0 {
		return nil
	}

	st, err := kernel.Stat(fd)
	if err != nil {
		return failed(path, "stat", err)
	}

	s := softened{path: path, flags: taken, dev: uint64(st.Dev), ino: st.Ino}
	if st.Mode&unix.S_IFMT == unix.S_IFREG && st.Nlink > 1 {
		s.file, f = f, nil
	}

	a.softened = append(a.softened, s)
	return nil
}

func closeUnlessNil(f *os.File) {
	if f != nil {
		f.Close()
	}
}

// closeSoftened closes what unprotect has left open.
func (a *applier) closeSoftened() {
	for _, s := range a.softened {
		closeUnlessNil(s.file)
	}
}

// applyFlags restores the cleared flags, and then sets the flags of all files that were made
// or changed to those in from.
func (a *applier) applyFlags(changes []Change) error {
	moved := map[string]string{} // from their old path to their new one
	for _, ch := range changes {
		if ch.Op == Renamed {
			moved[ch.From] = ch.Path
		}
	}

	for _, s := range a.softened {
		if err := a.protect(s, movedTo(moved, s.path)); err != nil {
			return err
		}
	}

	for path := range a.copied {
		if err := a.copyFlags(path); err != nil {
			return err
		}
	}

	return nil
}

// movedTo returns the new path of a file after it, or a directory above it, was renamed.
func movedTo(moved map[string]string, path string) string {
	for p := path; p != ""; p, _ = split(p) {
		if to, ok := moved[p]; ok {
			return to + strings.TrimPrefix(path, p)
		}
	}
	return path
}

// copyFlags copies the flags of a path, if that still exists: with Force and
// Keep, something else may have taken its place.
func (a *applier) copyFlags(path string) error {
	dirPath, name := split(path)
	src, err := treewalk.Open(a.from, dirPath)
	if err != nil {
		return ignoreGone(path, err)
	}

	defer src.Close()
	dst, err := treewalk.Open(a.onto, dirPath)
	if err != nil {
		return ignoreGone(path, err)
	}

	defer dst.Close()
	return ignoreGone(path, treecopy.CopyFlags(a.ctx, src, name, dst, name))
}

// protect restores the flags of a file that soften cleared, if the file still exists. path is
// its current path in onto.
func (a *applier) protect(s softened, path string) error {
	if s.file != nil {
		return failed(path, "setting flags", kernel.Protect(int(s.file.Fd()), s.flags))
	}

	dirPath, name := split(path)
	dir, err := treewalk.Open(a.onto, dirPath)
	if err != nil {
		return ignoreGone(path, err)
	}

	defer dir.Close()

	fd, err := kernel.OpenForFlags(int(dir.Fd()), name)
	if err != nil {
		return ignoreGone(path, err)
	}

	defer unix.Close(fd)

	st, err := kernel.Stat(fd)
	if err != nil {
		return failed(path, "stat", err)
	}

	if uint64(st.Dev) != s.dev || st.Ino != s.ino {
		return nil // the file no longer exists, and this is another
	}

	return failed(path, "setting flags", kernel.Protect(fd, s.flags))
}

func ignoreGone(path string, err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) ||
		errors.Is(err, unix.ELOOP) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	return failed(path, "setting flags", err)
}

// rememberFlags remembers a path whose attributes were copied, so that applyFlags copies its flags.
func (a *applier) rememberFlags(path string) {
	if path == "." {
		path = ""
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.copied == nil {
		a.copied = map[string]bool{}
	}
	a.copied[path] = true
}

// unlinkAt is unlinkat(2), also for immutable and append-only files.
func unlinkAt(dir *os.File, name string, flags int) error {
	return treewalk.Unlink(int(dir.Fd()), name, flags)
}
