package treediff

import (
	"context"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/linux/treewalk"
	"pando/internal/tree/treecopy"
)

// applyFiles copies the added files.
func (a *applier) applyFiles(changes []Change) error {
	var mu sync.Mutex // for making directories that are missing
	return a.parallel(changes, func(ch *Change) bool {
		return ch.isNew() && ch.Type != Dir && ch.Link == ""
	}, func(ch *Change) error {
		if a.o.Force {
			mu.Lock()
			defer mu.Unlock()
			return a.replaceFile(ch.Path)
		}
		a.addProgress(1, ch.ChangedBytes)
		if err := a.copyFile(ch.Path); err != nil && !a.taken(ch, err) {
			return err
		}
		return nil
	})
}

// missing copies, with Force, files to be changed that do not exist or have another type.
// It runs before new names of files are made, which need those files.
func (a *applier) missing(changes []Change) error {
	if !a.o.Force {
		return nil
	}

	for i := range changes {
		ch := &changes[i]
		if ch.Op == Deleted || ch.Path == "." || ch.newName() {
			continue
		}

		dir, name, err := a.parent(ch.Path)
		if err != nil {
			return err
		}

		var st unix.Stat_t
		err = unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
		switch {
		case err == nil && typeOf(uint8(st.Mode&unix.S_IFMT>>12)) == ch.Type:
		case ch.Type != Dir:
			err = a.replaceFile(ch.Path)
		default:
			if err = a.clearWay(dir, name, true); err == nil {
				err = unix.Mkdirat(int(dir.Fd()), name, 0o700)
			}
		}

		dir.Close()
		if err != nil {
			return failed(ch.Path, "make", err)
		}
	}

	return nil
}

// applyContents updates the content of files.
func (a *applier) applyContents(changes []Change) error {
	err := a.parallel(changes, func(ch *Change) bool {
		return ch.Content && ch.Link == "" && !ch.isNew() && ch.Op != Deleted && ch.Type != Dir
	}, func(ch *Change) error {
		defer a.addProgress(1, ch.ChangedBytes)
		if ch.Type != File {
			return a.replaceFile(ch.Path)
		}
		return a.contentUnlessKept(ch)
	})
	if err != nil {
		return err
	}

	return a.linkOtherNames(changes)
}

// contentUnlessKept is applyContent, but succeeds with Keep if the file no longer exists.
func (a *applier) contentUnlessKept(ch *Change) error {
	err := a.applyContent(ch)
	if a.o.Keep && errs.Is(err, errs.Conflict) {
		return nil // the other side, which takes precedence, has no such file
	}
	return err
}

// applyContent updates the content of one regular file.
func (a *applier) applyContent(ch *Change) error {
	// Open both files.
	dirPath, name := split(ch.Path)
	srcDir, err := treewalk.Open(a.from, dirPath)
	if err != nil {
		return failed(dirPath, "open", err)
	}

	defer srcDir.Close()

	src, err := openFile(place{srcDir, name, ch.Path})
	if err != nil {
		return err
	}

	defer src.Close()

	dst, st, err := a.openChanged(ch.Path)
	if err != nil && a.o.Force {
		return a.replaceFile(ch.Path)
	}
	if err != nil {
		return err
	}

	defer dst.Close()

	// Find the ranges to write.
	ranges := ch.ranges
	if a.o.Force || st.Size != ch.SizeBefore || ch.Link != "" || ranges == nil && ch.ChangedBytes > 0 {
		// The ranges are unknown, or for another base, so compare the files.
		var d delta
		c := &comparer{ctx: a.ctx}
		if err := c.readBoth(src, dst, min(st.Size, ch.SizeAfter), nil, &d); err != nil {
			return failed(ch.Path, "read", err)
		}
		if len(d.ranges) > maxRanges {
			d.ranges = []Range{{0, min(st.Size, ch.SizeAfter)}}
		}
		if ch.SizeAfter > st.Size {
			d.ranges = append(d.ranges, Range{st.Size, ch.SizeAfter})
		}
		ranges = d.ranges
	}

	// Write them.
	if st.Size != ch.SizeAfter {
		if err := unix.Ftruncate(int(dst.Fd()), ch.SizeAfter); err != nil {
			return failed(ch.Path, "truncate", err)
		}
	}

	for _, r := range ranges {
		if err := a.copyRange(src, dst, r, ch.SizeAfter); err != nil {
			return failed(ch.Path, "write", err)
		}
	}

	return nil
}

// openChanged opens a regular file of onto. Conflict: it has another type, which must not be
// opened, because opening a device may have side effects.
func (a *applier) openChanged(path string) (*os.File, unix.Stat_t, error) {
	st, err := fileAt(a.onto, path)
	if err != nil {
		return nil, st, failed(path, "stat", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, st, errs.New(errs.Conflict, op, quote(path), "not a regular file")
	}

	f, err := treewalk.OpenFlags(a.onto, path, unix.O_RDWR|unix.O_NONBLOCK)
	return f, st, failed(path, "open", err)
}

// copyRange makes a range of dst the same as in src, including holes.
func (a *applier) copyRange(src, dst *os.File, r Range, size int64) error {
	for off := r.From; off < r.To; {
		from, to, err := treecopy.NextData(src, off, size)
		if err != nil {
			return err
		}

		from, to = min(from, r.To), min(to, r.To)
		if from > off {
			if err := punch(dst, off, from); err != nil {
				return err
			}
		}

		if err := copyData(a.ctx, src, dst, from, to); err != nil {
			return err
		}

		off = max(from, to)
	}

	return nil
}

// punch makes a hole, or writes zeros where the filesystem does not support holes.
func punch(f *os.File, from, to int64) error {
	err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, from, to-from)
	if err != unix.EOPNOTSUPP && err != unix.ENOSYS {
		return err
	}

	zero := make([]byte, chunkSize)
	for from < to {
		n, err := f.WriteAt(zero[:min(int64(len(zero)), to-from)], from)
		if err != nil {
			return err
		}
		from += int64(n)
	}

	return nil
}

func copyData(ctx context.Context, src, dst *os.File, from, to int64) error {
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	for from < to {
		if err := ctx.Err(); err != nil {
			return err
		}
		p := (*buf)[:min(int64(len(*buf)), to-from)]
		if err := readFull(src, p, from); err != nil {
			return err
		}
		if _, err := dst.WriteAt(p, from); err != nil {
			return err
		}
		from += int64(len(p))
	}

	return nil
}
