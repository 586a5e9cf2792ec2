package treecopy

import (
	"context"
	"sync"

	"pando/internal/linux/kernel"

	"golang.org/x/sys/unix"
)

// Measure walks src as CopyDir would with the same options and counts the files and
// data, for progress and for the size of the volume. It opens only directories and
// sparse files. Conflict: src changed while it was read, as for CopyDir.
func Measure(ctx context.Context, src string, opt Options) (Totals, error) {
	return measure(ctx, src, opt, nil)
}

func measure(ctx context.Context, src string, opt Options, s *stamper) (Totals, error) {
	m := &measurer{common: newCommon(opt), seen: make(map[Inode]uint64), stamp: s}
	root, err := openSource(src, opt)
	if err != nil {
		return Totals{}, err
	}

	if err := m.exclude(root); err != nil {
		root.unpin()
		return Totals{}, err
	}

	t := newWalk(m, false, opt)
	if s != nil {
		t.spare = func(d *dir) { d.torn.Store(true) }
	}

	err = t.runWorkers(ctx, root)
	return m.n.totals(), err
}

const blockSize = 4096 // the unit of Totals.Allocated

func blocks(n int64) int64 { return (n + blockSize - 1) &^ (blockSize - 1) }

// measurer is the visitor of Measure.
type measurer struct {
	common
	mu   sync.Mutex
	seen map[Inode]uint64 // number of names of hard-linked files not seen yet

	stamp *stamper // nil: take no stamp
}

func (m *measurer) enter(w *worker, parent *dir, e entry) (*dir, error) {
	d, err := m.enterSource(parent, e)
	if d != nil {
		m.n.inodes.Add(1)
		m.n.addProgress(1, 0)
		m.stamp.subdir(w, d)
	}
	return d, err
}

func (m *measurer) leave(w *worker, d *dir) error {
	// A block of a directory is about three quarters full.
	m.n.allocated.Add(max(blocks(d.nameBytes*4/3), blockSize))
	m.stamp.leave(w, d)
	return nil
}

func (m *measurer) file(w *worker, d *dir, e entry) error {
	st, err := kernel.Lstat(d.src, e.name)
	if err != nil {
		return srcErr(d.join(e.name), "stat", err)
	}

	m.stamp.file(w, d, e.name, &st)
	if st.Nlink > 1 && m.countedBefore(&st) {
		m.n.addProgress(1, 0)
		return nil
	}

	m.n.inodes.Add(1)
	var bytes int64
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		var err error
		if bytes, err = m.data(d, e.name, &st); err != nil {
			return err
		}
		m.n.allocated.Add(blocks(bytes))
	case unix.S_IFLNK:
		if st.Size >= 60 { // shorter ones are stored in the inode
			m.n.allocated.Add(blockSize)
		}
	}

	m.n.addProgress(1, bytes)
	return nil
}

// countedBefore reports whether another link to the file has been counted.
func (m *measurer) countedBefore(st *unix.Stat_t) bool {
	id := inode(st)
	m.mu.Lock()
	defer m.mu.Unlock()
	left, ok := m.seen[id]
	if !ok {
		left = uint64(st.Nlink)
	}

	if left--; left == 0 {
		delete(m.seen, id)
	} else {
		m.seen[id] = left
	}

	return ok
}

// data returns the number of bytes to copy for a file.
func (m *measurer) data(d *dir, name string, st *unix.Stat_t) (int64, error) {
	if full(st) {
		return st.Size, nil
	}

	fd, err := openNoAtime(d.src, name, unix.O_NONBLOCK)
	if err != nil {
		return 0, srcErr(d.join(name), "open", err)
	}

	defer unix.Close(fd)
	n, err := dataBytes(fd, st.Size)
	if err != nil {
		return 0, srcErr(d.join(name), "seek", err)
	}

	return n, nil
}
