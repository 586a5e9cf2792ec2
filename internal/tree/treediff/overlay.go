package treediff

import (
	"cmp"
	"context"
	"errors"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/linux/treewalk"
)

// This file compares the lower layer of an overlay (overlayfs) with what the overlay shows. Of a directory that the
// overlay merges from both layers, only entries in the upper layer can differ. All others show what they are in the
// trees: this file does not interpret whiteouts, and redirects tell it only what has been moved.

// CompareOverlay compares lower with merged, which is an overlay of the directory upper above lower, without further
// layers. Its result is that of Compare without Options.SameOrigin, with Stats.Method "overlay", except that it
// recognizes moved directories: overlayfs keeps what they were. It reads only directories that are in upper, or new or
// deleted in merged, so its cost depends on what has changed. Moved and replaced directories are listed entirely; in
// moved ones, it reads files that are in upper. Options.SameOrigin, Younger and Hints have no meaning; SameBlocks suits
// layers that are on one filesystem.
//
// The overlay must be mounted with index=off and metacopy=off, and with redirect_dir=on if upper contains redirects. It
// may be in use, but nobody may write to it, to upper or to lower until CompareOverlay returns. The process needs
// CAP_SYS_ADMIN, because the kernel hides the attributes of overlayfs from others. All names of files in lower must be
// below lower.
//
// Overlayfs hides two things in lower: devices with the number 0:0, and attributes whose names begin with
// trusted.overlay. These differences are reported only for paths that are read anyway.
//
// A file in lower with several names becomes a file of its own under the name by which it was changed. If a directory
// with some of its names was moved, Compare gives the Renamed changes of these names a Link to a name that stayed, but
// CompareOverlay does not look for it. Such changes consist of nothing but the name.
//
// Damaged: upper contains what overlayfs does not write, and cannot show. Permission: the process is not root.
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
	if notInLayer(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}

	redirect, opaque, err := redirectOf(f)
	if err != nil || opaque || redirect != "" {
		f.Close()
		return nil, err
	}

	u.mu.Lock()
	defer u.mu.Unlock()
	u.merged[path] = true
	return f, nil
}

// redirectOf returns with which directory of the lower layer an overlay merges a directory of its upper layer: with
// none if it is opaque, else with that of the same path, unless it has a redirect. That is a path from the root of the
// layer if it begins with a slash, else another name in the same directory.
func redirectOf(dir *os.File) (redirect string, opaque bool, err error) {
	read := func(name string) (string, error) {
		value := make([]byte, unix.PathMax)
		n, err := unix.Fgetxattr(int(dir.Fd()), name, value)
		if err == unix.ENODATA || err == unix.EOPNOTSUPP {
			return "", nil
		}
		return string(value[:max(n, 0)]), err
	}

	o, err := read("trusted.overlay.opaque")
	if err != nil {
		return "", false, err
	}
	redirect, err = read("trusted.overlay.redirect")
	return redirect, o != "" && o != "x", err // x: it contains whiteouts
}

// lowerDir is what an overlay shows of its lower layer in one of its directories.
type lowerDir struct {
	path    string // path of the directory in the lower layer, if known is set
	known   bool   // the upper layer tells which directory it is
	nothing bool   // the directory is opaque
}

// shows finds out what an overlay shows of its lower layer in the directory at a path. above is what it shows in the
// directory above. The result is zero if the upper layer does not tell.
func (u *upperLayer) shows(path string, above lowerDir) (lowerDir, error) {
	f, err := treewalk.Open(u.root, path)
	if notInLayer(err) {
		return lowerDir{}, nil
	}
	if err != nil {
		return lowerDir{}, err
	}
	defer f.Close()

	redirect, opaque, err := redirectOf(f)
	_, name := split(path)
	switch {
	case err != nil || opaque:
		return lowerDir{nothing: opaque}, err
	case strings.HasPrefix(redirect, "/"):
		return lowerDir{path: redirect[1:], known: true}, nil
	case above.known:
		return lowerDir{path: join(above.path, cmp.Or(redirect, name)), known: true}, nil
	}
	return lowerDir{}, nil
}

// notInLayer reports whether a path leads nowhere in a layer: the overlay shows something else there.
func notInLayer(err error) bool {
	return errs.IsAny(err, unix.ENOENT, unix.ENOTDIR, unix.ELOOP, unix.EXDEV)
}

// showsOther reports whether an overlay shows at pathB another directory than that at pathA in the lower layer.
func (c *comparer) showsOther(pathA, pathB string) (bool, error) {
	if c.upper == nil {
		return false, nil
	}
	dir, _ := split(pathB)
	lower, err := c.upper.shows(pathB, lowerDir{path: dir, known: c.upper.isMerged(dir)})
	return lower.nothing || lower.known && lower.path != pathA, failed(pathB, "read in the upper layer", err)
}

// matchRedirected merges directories of an overlay that have been moved with what they were in the lower layer. What is
// in them is in the same place then. The directories above come first in bs.
func (c *comparer) matchRedirected(as, bs []*node) error {
	if c.upper == nil || c.o.placesOnly {
		return nil
	}

	lost := map[string]*node{}
	for _, n := range as {
		if n.typ == unix.DT_DIR {
			lost[n.path] = n
		}
	}

	shows := map[*node]lowerDir{}
	for _, g := range bs {
		if g.typ != unix.DT_DIR {
			continue
		}

		above := shows[g.parent]
		if g.parent == nil {
			above = lowerDir{path: g.dir, known: c.upper.isMerged(g.dir)}
		}
		lower, err := c.upper.shows(g.path, above)
		if err != nil {
			return failed(g.path, "read in the upper layer", err)
		}

		shows[g] = lower
		if l := lost[lower.path]; lower.known && l != nil && !l.obj.isMatched() {
			l.obj.merge(g.obj)
		}
	}

	return nil
}

// isSeenThrough reports whether a gained name is the same file of the lower layer that a lost name was. An inode that
// was copied up has its own times of birth and change.
func (c *comparer) isSeenThrough(l, g *node) bool {
	return c.upper != nil && g.typ != unix.DT_DIR && l.st.seenThrough() == g.st.seenThrough()
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
			return nil, nil, notShown(join(path, e.Name), err)
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

// isHidden reports whether a file cannot be looked up although its directory lists it. That is how an overlay shows
// files of its lower layer that look like whiteouts, in directories that are only in that layer.
func isHidden(dir *os.File, e treewalk.Dirent) bool {
	var st unix.Stat_t
	return (e.Type == unix.DT_CHR || e.Type == unix.DT_REG) &&
		unix.Fstatat(int(dir.Fd()), e.Name, &st, unix.AT_SYMLINK_NOFOLLOW) == unix.ENOENT
}

// notShown returns the error of a file that is in the upper layer, but cannot be looked up in the overlay. Overlayfs
// refuses attributes that it would not have written itself, and does not even list such files.
func notShown(path string, err error) error {
	for _, refused := range []error{unix.EINVAL, unix.EPERM, unix.EACCES, unix.ESTALE} {
		if errors.Is(err, refused) {
			return errs.New(errs.Damaged, op, quote(shown(path)), "overlayfs cannot show it: %w: the upper layer is damaged",
				refused)
		}
	}
	return err
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
