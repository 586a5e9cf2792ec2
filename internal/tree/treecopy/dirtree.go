package treecopy

import (
	"container/list"
	"context"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
)

// dirTree is the directories that Untar has made. It is the guard against
// archives that try to get out: a path is walked component by component along
// directories in it, and each is opened in its parent without following
// symbolic links (which is what openat2 with RESOLVE_BENEATH and
// RESOLVE_NO_SYMLINKS does, without its limit on the length of a path). A few
// of them are kept open. Memory is what the directories' own names take, and
// a few words each.
type dirTree struct {
	root *dirNode
	made []*dirNode // but the root; parents come before children
	kids map[dirKey]*dirNode
	lru  *list.List // the open ones but the root; the last used first

	removed func(dirKey) // told of names that remove has removed
}

type dirKey struct {
	parent *dirNode
	name   string
}

// dirNode is a directory. Its descriptor can only be used as a starting point.
type dirNode struct {
	dirKey
	meta    *dirMeta // nil if the archive does not have it (yet)
	removed bool
	fd      int           // -1: closed
	elem    *list.Element // in lru, while it is open
}

const openDirs = 64 // descriptors of a dirTree

// newDirTree takes over the descriptor of the root.
func newDirTree(root int) *dirTree {
	return &dirTree{
		root: &dirNode{fd: root},
		kids: make(map[dirKey]*dirNode),
		lru:  list.New(),
	}
}

func (t *dirTree) close() {
	for e := t.lru.Front(); e != nil; e = e.Next() {
		unix.Close(e.Value.(*dirNode).fd)
	}
	t.lru.Init()
	unix.Close(t.root.fd)
}

func (n *dirNode) path() string {
	var names []string
	for ; n.parent != nil; n = n.parent {
		names = append(names, n.name)
	}
	slices.Reverse(names)
	return strings.Join(names, "/")
}

// find returns the directory with these components below the root, or nil.
func (t *dirTree) find(path []string) *dirNode {
	n := t.root
	for _, c := range path {
		if n = t.kids[dirKey{n, c}]; n == nil {
			return nil
		}
	}
	return n
}

// openNode returns n's descriptor, which stays open until the next call or removal.
func (t *dirTree) openNode(n *dirNode) (int, error) {
	var down []*dirNode
	for ; n.fd < 0; n = n.parent {
		down = append(down, n)
	}

	if n.elem != nil {
		t.lru.MoveToFront(n.elem)
	}

	fd := n.fd
	for _, n := range slices.Backward(down) {
		next, err := openPath(fd, n.name)
		if err != nil {
			return -1, err
		}
		n.fd, n.elem = next, t.lru.PushFront(n)
		if t.lru.Len() > openDirs {
			t.closeNode(t.lru.Back().Value.(*dirNode))
		}
		fd = next
	}

	return fd, nil
}

func openPath(at int, name string) (int, error) {
	return retry(func() (int, error) {
		return unix.Openat(at, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	})
}

func (t *dirTree) closeNode(n *dirNode) {
	if n.fd >= 0 {
		unix.Close(n.fd)
		t.lru.Remove(n.elem)
		n.fd, n.elem = -1, nil
	}
}

// mkdirAll returns the directory with these components below the root and
// makes what is missing. What is not a directory is refused, but replaced if
// it is the last component and replace is set. entry is for messages.
func (t *dirTree) mkdirAll(ctx context.Context, path []string, replace bool, entry string) (*dirNode, error) {
	n := t.root
	for i, c := range path {
		key := dirKey{n, c}
		if k := t.kids[key]; k != nil {
			n = k
			continue
		}

		if err := ctx.Err(); err != nil {
			return nil, errs.Wrap(op, "", err)
		}

		last := replace && i == len(path)-1
		if err := t.mkdir(n, c, last, entry); err != nil {
			return nil, err
		}

		n = &dirNode{dirKey: key, fd: -1}
		t.kids[key] = n
		t.made = append(t.made, n)
	}

	return n, nil
}

// mkdir makes a directory that is not in the tree yet. As the last component
// of a directory entry it is the caller's alone until the end; else it has the
// mode of a directory that the archive does not have.
func (t *dirTree) mkdir(parent *dirNode, name string, last bool, entry string) error {
	at, err := t.openNode(parent)
	if err != nil {
		return dstErr(entry, "open", err)
	}

	mkdir := func() error { return unix.Mkdirat(at, name, 0o700) }
	err = retry0(mkdir)
	if err == unix.EEXIST {
		var st unix.Stat_t
		if err := unix.Fstatat(at, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return dstErr(entry, "stat", err)
		}

		switch {
		case st.Mode&unix.S_IFMT == unix.S_IFDIR && parent == t.root && name == lostFound:
			return nil // a fresh ext4 has it
		case !last && st.Mode&unix.S_IFMT == unix.S_IFLNK:
			return refuse(entry, "its name leads through %q, a symbolic link", name)
		case !last:
			return refuse(entry, "its name leads through %q, which is not a directory", name)
		}

		if err := t.remove(parent, at, name, entry); err != nil {
			return err
		}

		err = retry0(mkdir)
	}
	if err == nil && !last {
		err = unix.Fchmodat(at, name, 0o755, 0)
	}
	if err != nil {
		return dstErr(entry, "mkdir", err)
	}

	return nil
}

// remove removes a file or an empty directory from parent, whose descriptor is
// at, so that another entry can take its place.
func (t *dirTree) remove(parent *dirNode, at int, name, entry string) error {
	err := unix.Unlinkat(at, name, 0)
	if err == unix.EISDIR {
		err = unix.Unlinkat(at, name, unix.AT_REMOVEDIR)
	}

	switch err {
	case nil:
	case unix.ENOTEMPTY, unix.EEXIST:
		return refuse(entry, "it would replace a directory that is not empty")
	default:
		return dstErr(entry, "unlink", err)
	}

	key := dirKey{parent, name}
	if t.removed != nil {
		t.removed(key)
	}

	if n := t.kids[key]; n != nil {
		delete(t.kids, key)
		t.closeNode(n)
		n.removed = true
	}

	return nil
}
