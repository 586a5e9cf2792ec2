package treecopy

import (
	"container/list"
	"context"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
)

// dirTree contains the directories that Untar has made. It protects against
// archives that try to write outside of the destination: it resolves paths component by component along its
// directories, and opens each one in its parent without following
// symbolic links. (openat2 with RESOLVE_BENEATH and
// RESOLVE_NO_SYMLINKS does the same, but limits the length of a path.) It keeps a few
// directories open. A directory takes the memory of its name and a few words.
type dirTree struct {
	root *dirNode
	made []*dirNode // all except the root, parents before children
	kids map[dirKey]*dirNode
	lru  *list.List // open directories except the root, the last used first

	removed func(dirKey) // called for names that remove has removed
}

type dirKey struct {
	parent *dirNode
	name   string
}

// dirNode is a directory. Its descriptor is O_PATH, so only *at calls can use it.
type dirNode struct {
	dirKey
	meta    *dirMeta // nil unless an entry of the archive for it has been read
	removed bool
	fd      int           // -1: closed
	elem    *list.Element // in lru, while it is open
}

const openDirs = 64 // number of descriptors that a dirTree keeps open

// newDirTree returns a dirTree that owns root, the descriptor of the root.
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

// openNode returns the descriptor of n, which stays open until the next call of openNode or remove.
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
// creates missing ones. It refuses a component that is not a directory, except that with replace it replaces
// the last one. entry is for messages.
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

// mkdir creates a directory that is not in the tree yet. As the last component
// of a directory entry, it is accessible only to its owner until the end. Otherwise, it gets the
// mode of a directory that is missing in the archive.
func (t *dirTree) mkdir(parent *dirNode, name string, last bool, entry string) error {
	at, err := t.openNode(parent)
	if err != nil {
		return dstErr(entry, "open", err)
	}

	mkdir := func() error { return unix.Mkdirat(at, name, 0o700) }
	err = retry0(mkdir)
	if err == unix.EEXIST {
		st, statErr := kernel.Lstat(at, name)
		if statErr != nil {
			return dstErr(entry, "stat", statErr)
		}

		switch {
		case st.Mode&unix.S_IFMT == unix.S_IFDIR && parent == t.root && name == lostFound:
			return nil // a new ext4 has this directory
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
// at, to make room for another entry.
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
