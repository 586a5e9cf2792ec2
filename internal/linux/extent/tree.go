package extent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"pando/internal/linux/kernel"
	"pando/internal/linux/treewalk"

	"golang.org/x/sys/unix"
)

// TreeOptions are the options of MeasureTree. The zero value suits everything except
// snapshots on a filesystem that stores small files in its metadata.
type TreeOptions struct {
	// InlineSharedUntil is when the tree became a copy-on-write copy of another tree. The
	// filesystem does not report whether data inline in metadata is shared. In files unchanged
	// since this time, it counts as shared, in others as exclusive.
	InlineSharedUntil time.Time

	// Nested includes nested subvolumes.
	Nested bool

	// Each, if not nil, is called for each extent, by one goroutine at a time. The extents of a
	// file with several names are passed once.
	Each func(TreeExtent)
}

// TreeExtent is an extent of a file in a tree.
type TreeExtent struct {
	Extent
	Inode   uint64    // inode number of the file, which is the same in btrfs snapshots of the tree
	Changed time.Time // when the file's data or attributes last changed
}

// fileID identifies a file, whatever its names.
type fileID struct{ dev, ino uint64 }

// MeasureTree adds up the extents of all regular files below dir (see Measure). It counts
// a file with several names once, skips other filesystems mounted inside, and
// enters nested subvolumes only with o.Nested. If the filesystem has no extent maps, the space
// allocated to a file counts as exclusive, in one extent. Errors
// name the file that could not be read. The tree may change while MeasureTree runs: then the
// result mixes several states, and files that disappear do not count.
func MeasureTree(ctx context.Context, dir string, o TreeOptions) (Usage, error) {
	root, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return Usage{}, err
	}

	defer root.Close()
	st, err := kernel.Stat(int(root.Fd()))
	if err != nil {
		return Usage{}, &fs.PathError{Op: "stat", Path: dir, Err: err}
	}

	m := &treeMeter{dir: dir, dev: st.Dev, opt: o, linked: map[fileID]struct{}{}}
	if err := treewalk.Walk(ctx, root, treewalk.Funcs{Open: m.open, Visit: m.visit}); err != nil {
		return Usage{}, err
	}

	return m.sum, nil
}

type treeMeter struct {
	dir   string
	dev   uint64
	opt   TreeOptions
	noMap atomic.Bool // the filesystem has no extent maps

	mu     sync.Mutex
	sum    Usage
	linked map[fileID]struct{} // files with several names that were already counted
}

func (m *treeMeter) open(d *treewalk.Dir) (*os.File, error) {
	f, err := treewalk.Open(d.Root(), d.Path())
	switch {
	case err == nil:
		return f, nil
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
		return nil, nil // removed, or no longer a directory
	case errors.Is(err, unix.EXDEV):
		return nil, nil // a mount
	}
	return nil, &fs.PathError{Op: "open", Path: m.dir + "/" + d.Path(), Err: err}
}

func (m *treeMeter) visit(d *treewalk.Dir, f *os.File) ([]string, error) {
	st, err := kernel.Stat(int(f.Fd()))
	if err != nil {
		return nil, &fs.PathError{Op: "stat", Path: m.dir + "/" + d.Path(), Err: err}
	}

	if st.Dev != m.dev && !m.opt.Nested {
		return nil, nil // a subvolume
	}

	var subdirs []string
	var sum Usage
	for {
		entries, err := f.ReadDir(1024)
		for _, e := range entries {
			switch {
			case e.IsDir():
				subdirs = append(subdirs, e.Name())
			case e.Type().IsRegular():
				u, err := m.file(f, st.Dev, e.Name())
				if err != nil {
					return nil, &fs.PathError{Op: "measure", Path: m.dir + "/" + d.Join(e.Name()), Err: err}
				}
				sum.Add(u)
			}
		}
		if err == io.EOF || errors.Is(err, unix.ENOENT) { // removed in the meantime
			break
		}
		if err != nil {
			return nil, &fs.PathError{Op: "read", Path: m.dir + "/" + d.Path(), Err: err}
		}
	}

	m.mu.Lock()
	m.sum.Add(sum)
	m.mu.Unlock()
	return subdirs, nil
}

// file measures one regular file, or returns zero if it was already counted or does not count.
func (m *treeMeter) file(dir *os.File, dev uint64, name string) (Usage, error) {
	// Skip files that do not count.
	st, err := kernel.Lstat(int(dir.Fd()), name)
	if errors.Is(err, unix.ENOENT) {
		return Usage{}, nil
	}
	if err != nil {
		return Usage{}, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Dev != dev || st.Blocks == 0 {
		return Usage{}, nil // it was replaced, has another file mounted on it, or has no blocks
	}

	if st.Nlink > 1 {
		m.mu.Lock()
		id := fileID{st.Dev, st.Ino}
		_, again := m.linked[id]
		m.linked[id] = struct{}{}
		m.mu.Unlock()
		if again {
			return Usage{}, nil
		}
	}

	// Read its extent map.
	allocated := Usage{Exclusive: st.Blocks * 512, Extents: 1}
	if m.noMap.Load() {
		return allocated, nil
	}

	// O_NONBLOCK: if the file has just been replaced by a fifo, opening it does not wait.
	fd, err := unix.Openat(int(dir.Fd()), name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ELOOP) {
		return Usage{}, nil
	}
	if err != nil {
		return Usage{}, fmt.Errorf("open: %w", err)
	}

	f := os.NewFile(uintptr(fd), name)
	defer f.Close()

	var u Usage
	err = Scan(f, true, func(x Extent) error {
		u.Extents++
		inlineShared := x.Flags&Inline != 0 && !changedSince(&st, m.opt.InlineSharedUntil)
		if x.Flags&Shared != 0 || inlineShared {
			u.Shared += x.Length
		} else {
			u.Exclusive += x.Length
		}
		m.each(&st, x)
		return nil
	})
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOTTY) {
		m.noMap.Store(true)
		return allocated, nil
	}

	return u, err
}

func (m *treeMeter) each(st *unix.Stat_t, x Extent) {
	if m.opt.Each == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.opt.Each(TreeExtent{Extent: x, Inode: st.Ino, Changed: time.Unix(st.Ctim.Unix())})
}

// changedSince reports whether the file's data or attributes changed after t.
func changedSince(st *unix.Stat_t, t time.Time) bool {
	return time.Unix(st.Ctim.Unix()).After(t)
}
