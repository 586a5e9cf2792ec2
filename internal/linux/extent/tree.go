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

	"pando/internal/linux/treewalk"

	"golang.org/x/sys/unix"
)

// TreeOptions say how MeasureTree counts. The zero value is right but for
// snapshots of a filesystem that keeps small files in its metadata.
type TreeOptions struct {
	// InlineSharedUntil is the moment at which the tree became a copy of
	// another that shares everything with it. Data inline in metadata has no
	// blocks of its own to ask about: in files that have not changed since, it
	// counts as shared, in others as exclusive.
	InlineSharedUntil time.Time

	// Nested takes in subvolumes nested inside.
	Nested bool

	// Each, if not nil, is called for each extent, also of files with several names
	// only once, by one goroutine at a time.
	Each func(TreeExtent)
}

// TreeExtent is a piece of a file in a tree.
type TreeExtent struct {
	Extent
	Inode   uint64    // of the file: the same in the copies that snapshots of btrfs are
	Changed time.Time // of the file: when its data or attributes changed last
}

// fileID is a file, whatever its names.
type fileID struct{ dev, ino uint64 }

// MeasureTree adds up the extents of all regular files below dir (see Measure):
// a file with several names once, other filesystems mounted inside not at all,
// and subvolumes nested inside only with o.Nested. Where the filesystem has no extent maps, what it
// says is allocated to a file counts as exclusive, in one extent. The error
// names the file that could not be read; files that vanish in the meantime do not
// count. It may run while the tree changes: the result is then of no one moment.
func MeasureTree(ctx context.Context, dir string, o TreeOptions) (Usage, error) {
	root, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return Usage{}, err
	}

	defer root.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(root.Fd()), &st); err != nil {
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
	linked map[fileID]struct{} // seen, of files with several names
}

func (m *treeMeter) open(d *treewalk.Dir) (*os.File, error) {
	f, err := treewalk.Open(d.Root(), d.Path())
	switch {
	case err == nil:
		return f, nil
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
		return nil, nil // gone, or no longer a directory
	case errors.Is(err, unix.EXDEV):
		return nil, nil // a mount
	}
	return nil, &fs.PathError{Op: "open", Path: m.dir + "/" + d.Path(), Err: err}
}

func (m *treeMeter) visit(d *treewalk.Dir, f *os.File) ([]string, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
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

func (m *treeMeter) file(dir *os.File, dev uint64, name string) (Usage, error) {
	var st unix.Stat_t
	err := unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) {
		return Usage{}, nil
	}
	if err != nil {
		return Usage{}, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Dev != dev || st.Blocks == 0 {
		return Usage{}, nil // exchanged in the meantime, a file mounted over it, or nothing in it
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

	allocated := Usage{Exclusive: st.Blocks * 512, Extents: 1}
	if m.noMap.Load() {
		return allocated, nil
	}

	// O_NONBLOCK: should it be a fifo by now, this must not wait for a writer.
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
