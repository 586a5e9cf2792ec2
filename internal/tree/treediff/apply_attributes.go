package treediff

import (
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
	"pando/internal/linux/treewalk"
)

// applyAttributes sets the owner, mode and other attributes of everything that was made or changed, except
// of new names of existing files: if this side has changed such a file, that is a change of its own,
// and otherwise the attributes of the other side stay. A new name that became a copy already
// has them.
func (a *applier) applyAttributes(changes []Change) error {
	return a.parallel(changes, func(ch *Change) bool {
		if ch.Op == Deleted || a.skipped[ch.Path] || ch.newName() {
			return false
		}
		return ch.Metadata || ch.Times || ch.Content || ch.isNew()
	}, func(ch *Change) error {
		if ch.Link != "" && a.oneFile(ch.Path, ch.Link) {
			return nil
		}
		err := a.copyAttributes(ch.Path)
		if a.o.Keep && errs.Is(err, errs.Conflict) {
			return nil // the other side, which takes precedence, has no such file
		}
		return err
	})
}

// applyTimes gives the directories in which something changed the times that they have in from, and the root those of
// rootBefore if nothing changed in it.
func (a *applier) applyTimes(changes []Change, rootBefore *unix.Stat_t) error {
	touched := touchedDirs(changes)
	for dir := range touched {
		if dir == "" {
			continue
		}

		src, err := treewalk.Open(a.from, dir)
		if err != nil {
			continue // the result has no directory of this name
		}

		if dst, err := treewalk.Open(a.onto, dir); err == nil {
			err = copyTimes(src, dst)
			dst.Close()
			if err != nil {
				src.Close()
				return failed(dir, "utimensat", err)
			}
		}

		src.Close()
	}

	rootListed := slices.ContainsFunc(changes, func(ch Change) bool { return ch.Path == "." })
	if rootListed || touched[""] {
		return failed("", "utimensat", copyTimes(a.from, a.onto))
	}

	return failed("", "utimensat", setTimes(a.onto, rootBefore.Atim, rootBefore.Mtim))
}

// touchedDirs returns the paths of directories whose entries changed, also the new paths of renamed ones.
func touchedDirs(changes []Change) map[string]bool {
	touched := map[string]bool{}
	moved := map[string]string{} // directories: from their old path to their new one
	for _, ch := range changes {
		if ch.Op == Renamed && ch.Type == Dir {
			moved[ch.From] = ch.Path
		}
	}

	// touchOld adds a directory by its old path, which is all that a deletion in a renamed directory has.
	touchOld := func(dir string) {
		touched[dir] = true
		for p, rest := dir, ""; p != ""; {
			if to, ok := moved[p]; ok {
				touched[to+rest] = true
				return
			}
			up, _ := split(p)
			rest, p = strings.TrimPrefix(dir, up), up
		}
	}

	for _, ch := range changes {
		if ch.Op == Modified && !ch.isNew() && ch.Type == File {
			continue
		}

		dir, _ := split(ch.Path)
		if ch.Op == Deleted {
			touchOld(dir)
			continue
		}

		touched[dir] = true
		if ch.Op == Renamed {
			dir, _ = split(ch.From)
			touchOld(dir)
		}
	}

	return touched
}

func copyTimes(src, dst *os.File) error {
	st, err := kernel.Stat(int(src.Fd()))
	if err != nil {
		return err
	}
	return setTimes(dst, st.Atim, st.Mtim)
}

func setTimes(f *os.File, atime, mtime unix.Timespec) error {
	return unix.UtimesNanoAt(unix.AT_FDCWD, procPath(f, ""), []unix.Timespec{atime, mtime}, 0)
}
