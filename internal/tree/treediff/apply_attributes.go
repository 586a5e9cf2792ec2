package treediff

import (
	"os"
	"pando/internal/base/errs"
	"pando/internal/linux/treewalk"
	"strings"

	"golang.org/x/sys/unix"
)

// applyAttributes gives all that was made or changed its owner, mode and so on. Not
// other names of a file: that has a change of its own if this side has changed it,
// and else it is as the other side wants it. A new name that became a copy has them
// already.
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
			return nil // the other side's choice has no such file
		}
		return err
	})
}

// applyTimes gives the directories in which something was done the times that they
// have in from.
func (a *applier) applyTimes(changes []Change, rootBefore *unix.Stat_t) error {
	touched := map[string]bool{}
	moved := map[string]string{} // directories: from their old path to their new one
	for _, ch := range changes {
		if ch.Op == Renamed && ch.Type == Dir {
			moved[ch.From] = ch.Path
		}
	}

	// touch takes a path from before: what was deleted in a directory that was renamed
	// is named by the old one.
	touch := func(dir string) {
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

	rootListed := false
	for _, ch := range changes {
		rootListed = rootListed || ch.Path == "."
		if ch.Op == Modified && !ch.isNew() && ch.Type == File {
			continue
		}

		dir, _ := split(ch.Path)
		if ch.Op == Deleted {
			touch(dir)
			continue
		}

		touched[dir] = true
		if ch.Op == Renamed {
			dir, _ = split(ch.From)
			touch(dir)
		}
	}

	for dir := range touched {
		if dir == "" {
			continue
		}

		src, err := treewalk.Open(a.from, dir)
		if err != nil {
			continue // it is not in the result under this name
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

	if rootListed || touched[""] {
		return failed("", "utimensat", copyTimes(a.from, a.onto))
	}

	return failed("", "utimensat", setTimes(a.onto, rootBefore.Atim, rootBefore.Mtim))
}

func copyTimes(src, dst *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(src.Fd()), &st); err != nil {
		return err
	}
	return setTimes(dst, st.Atim, st.Mtim)
}

func setTimes(f *os.File, atime, mtime unix.Timespec) error {
	return unix.UtimesNanoAt(unix.AT_FDCWD, procPath(f, ""), []unix.Timespec{atime, mtime}, 0)
}
