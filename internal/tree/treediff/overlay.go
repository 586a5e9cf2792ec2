package treediff

import (
	"context"
	"errors"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/linux/treewalk"
)

// This file compares the lower layer of an overlay (overlayfs) with what the overlay shows. Of a directory that the
// overlay merges from both layers, only entries in the upper layer can differ. All others show what they are in the
// trees: this file neither interprets whiteouts nor follows redirects.

// CompareOverlay compares lower with merged: the overlay of the directories lower and upper, in which upper/ is the
// only layer above lower. Result is that of Compare without Options.SameOrigin, with Stats.Method "overlay", but
// CompareOverlay reads only directories that are in upper, were deleted, or are new to their place. So its cost depends
// on what has changed. Moved and replaced directories are compared entirely.
//
// The overlay must be mounted with index=off and metacopy=off, and with redirect_dir=on if upper contains
// redirects. Nobody may write to it, to upper or to lower until CompareOverlay returns. The process needs
// CAP_SYS_ADMIN, without which the kernel hides overlay attributes.
//
// Files in lower that overlayfs itself interprets are hidden in merged: devices with the number 0:0, and attributes
// whose names begin with trusted.overlay. CompareOverlay reports them only where it reads them.
//
// Without an index, a changed file with several names becomes a file of its own under the name by which it was changed.
// Options.SameOrigin, Younger and Hints have no meaning here. SameBlocks suits layers on one filesystem.
//
// In one detail the result differs from that of Compare: if some names of a file in lower have moved with a directory,
// and others have not, Change.Link of the moved ones does not name the others. Such changes have nothing but the names.
func CompareOverlay(ctx context.Context, lower, upper, merged *os.File, o Options) (Result, error) {
	if os.Geteuid() != 0 {
		return Result{}, errs.New(errs.Permission, op, "", "only root can read the upper layer of an overlay")
	}

	o.SameOrigin, o.Hints = false, nil
	c, err := newComparer(ctx, lower, merged, o)
	if err != nil {
		return Result{}, err
	}

	c.upper = &upperLayer{root: upper, merged: map[string]bool{}}
	return c.compareAll()
}

// upperLayer is the upper layer of an overlay.
type upperLayer struct {
	root *os.File

	mu     sync.Mutex
	merged map[string]bool // visited directories that merge the directories with the same path in both layers
}

// open opens a directory of the upper layer if the overlay merges it with the directory of the same path in the lower
// layer. Otherwise, it returns nil. The directory above it must have been opened before.
func (u *upperLayer) open(path string) (*os.File, error) {
	if dir, _ := split(path); path != "" && !u.isMerged(dir) {
		return nil, nil
	}

	f, err := treewalk.Open(u.root, path)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV):
		return nil, nil // the overlay shows something else
	case err != nil:
		return nil, err
	}

	// An opaque directory hides the one in the lower layer, and a redirected one is merged with another.
	for _, name := range []string{"trusted.overlay.opaque", "trusted.overlay.redirect"} {
		_, err := unix.Fgetxattr(int(f.Fd()), name, nil)
		if err == unix.ENODATA || err == unix.EOPNOTSUPP {
			continue
		}
		f.Close()
		return nil, err
	}

	u.mu.Lock()
	defer u.mu.Unlock()
	u.merged[path] = true
	return f, nil
}

func (u *upperLayer) isMerged(path string) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.merged[path]
}

// namesInUpper returns the entries that a directory has in both trees, of those that are in the upper layer, where it
// is open as fu.
func (c *comparer) namesInUpper(fu, fa, fb *os.File, path string) (as, bs []treewalk.Dirent, err error) {
	entries, err := c.readNames(fu, path)
	if err != nil {
		return nil, nil, err
	}

	for _, e := range entries {
		if as, err = c.lookUp(as, fa, e.Name, join(path, e.Name)); err != nil {
			return nil, nil, err
		}
		if bs, err = c.lookUp(bs, fb, e.Name, join(path, e.Name)); err != nil {
			return nil, nil, err
		}
	}

	return as, bs, nil
}

// lookUp adds an entry of the directory at to the list if it exists.
func (c *comparer) lookUp(list []treewalk.Dirent, at *os.File, name, path string) ([]treewalk.Dirent, error) {
	st, err := c.stat(at, name, path)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENAMETOOLONG):
		return list, nil
	case err != nil:
		return nil, err
	}
	return append(list, treewalk.Dirent{Ino: st.ino, Type: st.fileType(), Name: name}), nil
}

// seenThrough returns what an inode has in common with the same inode seen through an overlay, which is enough to
// recognize it. Overlayfs adds the number of the layer to inode numbers, above the lower 32 bits.
func (i inode) seenThrough() inode {
	i.dev, i.ino, i.mount, i.generation = 0, i.ino&0xffffffff, false, generation{}
	return i
}

// matchUnread matches files of lower that have names in directories that were not read. Under these names, they are
// also in merged, so no other file can have taken their place.
func (c *comparer) matchUnread(as, bs []*node) {
	if c.upper == nil {
		return
	}

	inB := make(map[inode]*object, len(bs))
	for _, n := range bs {
		inB[n.st.seenThrough()] = n.obj
	}

	for _, n := range as {
		o := n.obj
		if n.typ == unix.DT_DIR || o.unread || int(n.st.nlink) <= len(o.lost) {
			continue
		}

		o.unread = true
		if b := inB[n.st.seenThrough()]; b != nil && !b.isMatched() {
			o.merge(b)
		}
	}
}

// matchSeenThrough merges objects that are the same inode and have a place in common. An overlay shows files of its
// lower layer, and may show another file under one of their names, which matchByPlace would take for the same.
func matchSeenThrough(as, bs []*node) {
	places := make(map[where]*node, len(as))
	for _, n := range as {
		places[n.where()] = n
	}

	for _, g := range bs {
		l := places[g.where()]
		if l == nil || l.obj.isMatched() || g.obj.isMatched() || l.st.seenThrough() != g.st.seenThrough() {
			continue
		}
		l.obj.merge(g.obj)
	}
}
