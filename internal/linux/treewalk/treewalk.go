// Package treewalk visits the directories of a tree with several workers. The content
// of the tree need not be trusted: it never follows a symbolic link, and never leaves the
// tree or enters another mount. It handles any depth of nesting with one open descriptor
// for each worker.
package treewalk

import (
	"context"
	"errors"
	"os"
	"runtime"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Dir is a directory of a walk.
type Dir struct {
	root    *os.File
	parent  *Dir
	name    string
	subdirs []string // to walk, and for Leave
	pending int      // number of subdirs not left yet; guarded by walker.mu
}

// Root returns the directory at which the walk began.
func (d *Dir) Root() *os.File { return d.root }

// Path returns the path relative to the root of the tree, "" for the root.
func (d *Dir) Path() string {
	n := 0
	for p := d; p.parent != nil; p = p.parent {
		n += len(p.name) + 1
	}

	if n == 0 {
		return ""
	}

	b := make([]byte, n-1)
	for p := d; p.parent != nil; p = p.parent {
		n -= len(p.name) + 1
		copy(b[n:], p.name)
		if p.parent.parent != nil {
			b[n-1] = '/'
		}
	}

	return string(b)
}

// Join returns the path of an entry of d, relative to the root of the tree.
func (d *Dir) Join(name string) string {
	if p := d.Path(); p != "" {
		return p + "/" + name
	}
	return name
}

// Funcs are the functions that a walk calls, concurrently for different
// directories. All except Visit may be nil.
type Funcs struct {
	// Open opens d for reading. The default is Open of this package. If it returns nil
	// without an error, the walk skips the directory.
	Open func(d *Dir) (*os.File, error)

	// Visit is called once for each open directory, before
	// anything below it, and returns the subdirectories to enter.
	Visit func(d *Dir, f *os.File) (subdirs []string, err error)

	// Leave is called once for each directory with subdirectories, when all of
	// them have been left.
	Leave func(d *Dir, subdirs []string) error
}

// Workers returns how many directories a walk visits at once. Walks mostly wait for
// metadata, which disks serve faster in parallel.
func Workers() int { return min(max(4, 2*runtime.GOMAXPROCS(0)), 16) }

// Walk visits root and all directories below it. It ends with the first error of a function,
// or when ctx ends.
func Walk(ctx context.Context, root *os.File, fn Funcs) error {
	if err := ctx.Err(); err != nil {
		return err // otherwise the walk of a small tree could succeed
	}

	if fn.Open == nil {
		fn.Open = func(d *Dir) (*os.File, error) { return Open(d.root, d.Path()) }
	}

	w := &walker{fn: fn, stack: []*Dir{{root: root}}, open: 1}
	w.cond.L = &w.mu
	stop := context.AfterFunc(ctx, func() { w.fail(ctx.Err()) })
	defer stop()
	var wg sync.WaitGroup
	for range Workers() {
		wg.Go(w.work)
	}

	wg.Wait()

	// The function of ctx may still be running.
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

type walker struct {
	fn Funcs

	mu    sync.Mutex
	cond  sync.Cond
	stack []*Dir // to visit; last in, first out keeps it short
	open  int    // directories not left yet
	err   error
}

// fail ends the walk with its first error.
func (w *walker) fail(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err == nil {
		w.err = err
	}
	w.cond.Broadcast()
}

// work visits directories until the walk ends.
func (w *walker) work() {
	for {
		w.mu.Lock()
		for len(w.stack) == 0 && w.open > 0 && w.err == nil {
			w.cond.Wait()
		}
		if w.open == 0 || w.err != nil {
			w.mu.Unlock()
			return
		}

		d := w.stack[len(w.stack)-1]
		w.stack = w.stack[:len(w.stack)-1]
		w.mu.Unlock()

		if err := w.visit(d); err != nil {
			w.fail(err)
			return
		}
	}
}

// visit visits d and adds its subdirectories to the stack.
func (w *walker) visit(d *Dir) error {
	f, err := w.fn.Open(d)
	if err != nil {
		return err
	}

	if f != nil {
		d.subdirs, err = w.fn.Visit(d, f)
		f.Close()
		if err != nil {
			return err
		}
	}

	if len(d.subdirs) == 0 {
		return w.leave(d)
	}

	w.mu.Lock()
	d.pending = len(d.subdirs)
	w.open += len(d.subdirs)
	for _, name := range d.subdirs {
		w.stack = append(w.stack, &Dir{root: d.root, parent: d, name: name})
	}

	w.mu.Unlock()
	w.cond.Broadcast()
	return nil
}

// leave marks d as done, and each directory above it whose last subdirectory this was.
func (w *walker) leave(d *Dir) error {
	for {
		if len(d.subdirs) > 0 && w.fn.Leave != nil {
			if err := w.fn.Leave(d, d.subdirs); err != nil {
				return err
			}
		}

		d.subdirs = nil
		w.mu.Lock()
		w.open--
		done := w.open == 0
		up := d.parent
		if up != nil {
			up.pending--
			if up.pending > 0 {
				up = nil
			}
		}

		w.mu.Unlock()
		if done {
			w.cond.Broadcast()
		}
		if up == nil {
			return nil
		}

		d = up
	}
}

// maxPath is the length of the longest path passed to one system call. Longer paths are
// opened in steps.
const maxPath = unix.PathMax - 96

// resolve keeps a path inside its root: no symbolic link, no "..", no mount.
const resolve = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV

// Open opens the directory at path, of any length, below root for reading.
// Errors are system error numbers: EXDEV for another mount, ENOTDIR or ELOOP
// for a symbolic link.
func Open(root *os.File, path string) (*os.File, error) {
	return OpenFlags(root, path, unix.O_RDONLY|unix.O_DIRECTORY)
}

// OpenFlags is Open with other flags of open(2).
func OpenFlags(root *os.File, path string, flags uint64) (*os.File, error) {
	at := int(root.Fd())
	defer runtime.KeepAlive(root)

	if path == "" {
		path = "."
	}

	for len(path) > maxPath {
		cut := strings.LastIndexByte(path[:maxPath], '/')
		if cut <= 0 {
			return nil, unix.ENAMETOOLONG
		}
		next, err := openat2(at, path[:cut], unix.O_PATH|unix.O_DIRECTORY)
		if at != int(root.Fd()) {
			unix.Close(at)
		}
		if err != nil {
			return nil, err
		}
		at, path = next, path[cut+1:]
	}

	fd, err := openat2(at, path, flags)
	if at != int(root.Fd()) {
		unix.Close(at)
	}
	if err != nil {
		return nil, err
	}

	return os.NewFile(uintptr(fd), path), nil
}

func openat2(at int, path string, flags uint64) (int, error) {
	how := unix.OpenHow{Flags: flags | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: resolve}
	for try := 0; ; try++ {
		fd, err := unix.Openat2(at, path, &how)
		// EAGAIN: a directory was renamed somewhere on the system, so the kernel cannot tell whether
		// the path stayed inside the root.
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) && try < 1000 {
			continue
		}
		return fd, err
	}
}
