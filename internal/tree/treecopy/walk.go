package treecopy

import (
	"cmp"
	"context"
	"fmt"
	"hash/fnv"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
	"pando/internal/linux/treewalk"
)

// This file is the parallel walk that Measure and CopyDir share.
//
// Each worker goes through a subtree depth first, with a stack of its own. It
// gives away work only when another worker is idle: a directory from
// as near the root as possible, or some of the files of its current directory.
// So there is no queue that could grow, and memory is bounded by the depth of
// the tree times the entries of one or two getdents buffers.
//
// A directory is done when all its parts are: its own reading and copying, the
// files given away, and each subdirectory. The worker that finishes the last part leaves the
// directory (which sets its times), and thereby finishes a part of its parent.
//
// The number of descriptors is bounded as well, whatever the depth: a directory has open
// descriptors only while it is pinned, and a worker pins only the top of
// its stack. Closed directories are opened again through ".." of a child.

// entry is one name in a directory of the source.
type entry struct {
	name string
	ino  uint64
	typ  uint8 // DT_*; never DT_UNKNOWN or DT_DIR for a file
}

// dir is a directory being walked. The fields above mu never change once the
// directory is known to more than one worker, except that leaving it drops xattrs.
type dir struct {
	parent *dir
	name   string // within parent; for the root, its path
	id     Inode
	attrs
	ctime  unix.Timespec
	xattrs []xattr
	kernel bool   // the root of a kernel filesystem, which is not read
	key    uint64 // of its path; see Stamp
	dirty  bool   // in an update: its files are copied again
	whole  bool   // in an update: it is new, with everything below it

	sum  atomic.Uint64 // of the digests of its entries; for a stamper
	torn atomic.Bool   // it changed while it was read; for a stamper

	cookie    int64  // where reading continues; only its reader uses it
	nameBytes int64  // space of its entries in directory blocks; only its reader writes it
	linkNames []byte // names for links, each with a NUL; guarded by the lock of links

	mu       sync.Mutex
	src, dst int   // descriptors; -1: closed, or (dst) there is no destination
	pins     int32 // number of users of the descriptors
	pending  int32 // number of unfinished parts
}

// path returns the path of d for messages.
func (d *dir) path() string {
	var names []string
	for ; d != nil; d = d.parent {
		names = append(names, d.name)
	}
	slices.Reverse(names)
	if len(names) == 1 && names[0] == "" {
		return "/"
	}
	return strings.Join(names, "/")
}

func (d *dir) join(name string) string { return strings.TrimSuffix(d.path(), "/") + "/" + name }

// tryPin pins d if its descriptors are open.
func (d *dir) tryPin() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.dst < 0 {
		return false
	}
	d.pins++
	return true
}

func (d *dir) unpin() {
	d.mu.Lock()
	d.unpinLocked()
	d.mu.Unlock()
}

func (d *dir) unpinLocked() {
	d.pins--
	if d.pins == 0 {
		d.closeLocked()
	}
}

func (d *dir) closeLocked() {
	if d.src >= 0 {
		unix.Close(d.src)
		d.src = -1
	}
	if d.dst >= 0 {
		unix.Close(d.dst)
		d.dst = -1
	}
}

// visitor handles the files and directories of a walk. Its methods are called concurrently. While one
// runs, the descriptors of its directories are open.
type visitor interface {
	// enter opens a subdirectory, with one pin and one pending part. It returns nil to
	// skip the subdirectory.
	enter(w *worker, parent *dir, e entry) (*dir, error)
	// file handles an entry that is not a directory.
	file(w *worker, d *dir, e entry) error
	// leave is called once everything below d is done.
	leave(w *worker, d *dir) error
}

// task is work that one worker gives to another: the given files of d or, without
// files, all of d. The other worker takes over one pin and one part of d.
type task struct {
	d     *dir
	files []entry
}

type walk struct {
	ctx     context.Context
	root    string // for messages
	v       visitor
	hasDst  bool
	spare   func(*dir) // if set, it is called for changed directories, which are then not errors
	workers int
	open    int // pinned directories a worker may have on its stack

	work chan task
	idle atomic.Int32 // number of workers that wait for work and are not claimed
	quit chan struct{}

	stop atomic.Bool // set by the first error
	once sync.Once
	err  error
}

func newWalk(v visitor, hasDst bool, opt Options) *walk {
	n := opt.Workers
	if n <= 0 {
		n = min(max(2*runtime.GOMAXPROCS(0), 4), 16)
	}
	open := 32
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &lim) == nil {
		open = max(2, min(open, int(min(lim.Cur, 1<<20))/(8*n)))
	}
	return &walk{v: v, hasDst: hasDst, workers: n, open: open, work: make(chan task), quit: make(chan struct{})}
}

// runWorkers walks root, which has one pin and one pending part, and returns the
// first error once every worker has stopped and every descriptor is closed.
func (t *walk) runWorkers(ctx context.Context, root *dir) error {
	t.ctx, t.root = ctx, root.path()
	root.pins++ // keep it open until the end, for hard links
	var wg sync.WaitGroup
	for i := range t.workers {
		wg.Go(func() {
			w := &worker{t: t, dents: make([]byte, 32<<10)}
			if i == 0 {
				w.walkSubtree(root)
			}
			w.serve()
		})
	}

	wg.Wait()
	return t.err
}

// stopped reports whether to stop, because of an error or a cancellation.
func (t *walk) stopped() bool {
	if t.stop.Load() {
		return true
	}
	err := t.ctx.Err()
	t.failWalk(errs.Wrap(op, quote(t.root), err))
	return err != nil
}

// failWalk records the first error and stops the walk.
func (t *walk) failWalk(err error) {
	if err == nil {
		return
	}
	t.once.Do(func() {
		t.err = err
		t.stop.Store(true)
	})
}

// failIn is failWalk for an error in d. If the walk has spare, changes of the source do not stop it.
func (t *walk) failIn(d *dir, err error) {
	// Exists: a directory to which a program writes may list a name twice, so the copy
	// has it already.
	if t.spare != nil && errs.Is(err, errs.Conflict, errs.Exists) {
		t.spare(d)
		return
	}
	t.failWalk(err)
}

// claim reserves an idle worker, to which the caller must send a task, or call unclaim. It returns false if
// there is none.
func (t *walk) claim() bool {
	for {
		n := t.idle.Load()
		if n <= 0 {
			return false
		}
		if t.idle.CompareAndSwap(n, n-1) {
			return true
		}
	}
}

func (t *walk) unclaim() { t.idle.Add(1) }

// worker is one goroutine of a walk, with its buffers.
type worker struct {
	t     *walk
	stack []frame
	dents []byte // for getdents
	data  []byte // for file contents; see buffer
	names []byte // for attribute names
	value []byte // for an attribute value
	hash  []byte // for digests

	cloneDev uint64 // the source device to which the next two apply
	noClone  bool   // FICLONE does not work from there
	noRange  bool   // copy_file_range does not work from there
}

// frame is a directory on a worker's stack.
type frame struct {
	d        *dir
	subs     []entry // subdirectories that were read but not walked yet
	eof      bool
	unpinned bool
}

// serve does the work that other workers give away, until the walk ends.
func (w *worker) serve() {
	for {
		w.t.idle.Add(1)
		select {
		case k := <-w.t.work:
			if k.files != nil {
				for _, e := range k.files {
					w.visitFile(k.d, e)
				}
				w.finishPart(k.d)
			} else {
				w.walkSubtree(k.d)
			}
		case <-w.t.quit:
			return
		}
	}
}

// walkSubtree walks the subtree d, and takes over one pin and one part of d.
func (w *worker) walkSubtree(d *dir) {
	w.stack = append(w.stack[:0], frame{d: d, eof: d.kernel})
	for len(w.stack) > 0 {
		w.share()
		f := &w.stack[len(w.stack)-1]
		switch {
		case w.t.stopped():
			w.pop()
		case len(f.subs) > 0:
			if child := w.enter(f); child != nil {
				w.push(child)
			}
		case !f.eof:
			w.readEntries(f)
		default:
			w.pop()
		}
	}
}

// enter opens the next subdirectory of f.
func (w *worker) enter(f *frame) *dir {
	last := len(f.subs) - 1
	e := f.subs[last]
	f.subs = f.subs[:last]
	child, err := w.t.v.enter(w, f.d, e)
	if err != nil {
		w.t.failIn(f.d, err)
		return nil
	}

	if child != nil {
		f.d.mu.Lock()
		f.d.pending++
		f.d.mu.Unlock()
	}

	return child
}

func (w *worker) push(d *dir) {
	w.stack = append(w.stack, frame{d: d, eof: d.kernel})
	if i := len(w.stack) - 1 - w.t.open; i >= 0 && !w.stack[i].unpinned {
		w.stack[i].unpinned = true
		w.stack[i].d.unpin()
	}
}

func (w *worker) pop() {
	top := len(w.stack) - 1
	d := w.stack[top].d
	w.stack[top] = frame{}
	w.stack = w.stack[:top]
	if top > 0 {
		if below := &w.stack[top-1]; below.unpinned {
			below.unpinned = false
			w.t.failWalk(w.t.pin(below.d, d, true)) // with its source, to read and enter the rest
		}
	}
	w.finishPart(d)
}

// share gives subtrees to idle workers, those nearest to the root first.
func (w *worker) share() {
	for i := 0; i < len(w.stack) && w.t.idle.Load() > 0 && !w.t.stopped(); i++ {
		f := &w.stack[i]
		for !f.unpinned && len(f.subs) > 0 {
			if i == len(w.stack)-1 && len(f.subs) == 1 && f.eof {
				return // this is all the remaining work of this worker
			}
			if !w.t.claim() {
				return
			}
			child := w.enter(f)
			if child == nil {
				w.t.unclaim()
				continue
			}
			w.t.work <- task{d: child}
		}
	}
}

// readEntries reads the next entries of f, visits the files among them, and adds
// the subdirectories to f.subs.
func (w *worker) readEntries(f *frame) {
	// Read the entries.
	d := f.d
	var files []entry
	for {
		n, err := retry(func() (int, error) { return unix.Getdents(d.src, w.dents) })
		if err != nil {
			f.eof = true
			w.t.failIn(d, srcErr(d.path(), "getdents", err))
			break
		}

		if n == 0 {
			f.eof = true
			w.t.failIn(d, d.check())
			break
		}

		if files, err = w.parse(f, w.dents[:n], files); err != nil {
			f.eof = true
			w.t.failIn(d, err)
			break
		}

		// A buffer that is far from full is probably the last. In that case, read the end of
		// the directory as well, so that share knows how much work is left.
		if n > len(w.dents)/2 || len(files)+len(f.subs) > 1024 {
			break
		}
	}

	// Sort by inode number, so that disks are read more or less sequentially.
	slices.SortFunc(files, func(a, b entry) int { return cmp.Compare(a.ino, b.ino) })

	// Visit the files, or give some of them to an idle worker.
	for len(files) > 0 && !w.t.stopped() {
		w.share()
		if len(files) >= 16 && w.t.claim() {
			n := max(8, min(len(files)/2, 128))
			d.mu.Lock()
			d.pins++
			d.pending++
			d.mu.Unlock()
			w.t.work <- task{d: d, files: files[:n]}
			files = files[n:]
			continue
		}

		n := min(8, len(files))
		for _, e := range files[:n] {
			w.visitFile(d, e)
		}

		files = files[n:]
	}
}

func (w *worker) visitFile(d *dir, e entry) {
	if !w.t.stopped() {
		w.t.failIn(d, w.t.v.file(w, d, e))
	}
}

// parse sorts the entries of a getdents buffer into files and f.subs.
func (w *worker) parse(f *frame, buf []byte, files []entry) ([]entry, error) {
	d := f.d
	for e := range treewalk.Dirents(buf) {
		d.cookie = e.Off
		name, typ := e.Name, e.Type
		if name == "." || name == ".." {
			continue
		}

		if typ == unix.DT_UNKNOWN {
			st, err := kernel.Lstat(d.src, name)
			if err != nil {
				return files, srcErr(d.join(name), "stat", err)
			}
			typ = uint8(st.Mode & unix.S_IFMT >> 12)
		}

		d.nameBytes += int64(8 + (len(name)+3)&^3)
		if e := (entry{name, e.Ino, typ}); typ == unix.DT_DIR {
			f.subs = append(f.subs, e)
		} else {
			files = append(files, e)
		}
	}

	return files, nil
}

// check returns an error if d has changed since it was opened.
func (d *dir) check() error {
	st, err := kernel.Stat(d.src)
	if err != nil {
		return srcErr(d.path(), "stat", err)
	}
	if st.Mtim != d.mtime || st.Ctim != d.ctime {
		return changed(d.path())
	}
	return nil
}

// pin pins d. If d is closed, it is opened through its child, which is open; source says whether to open
// the source as well. The pin counts even with an error.
func (t *walk) pin(d, child *dir, source bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()

	d.pins++
	if t.stopped() {
		return nil // the child may be closed, and nobody will use d
	}

	if t.hasDst && d.dst < 0 {
		fd, err := openDir(child.dst, "..")
		if err != nil {
			return dstErr(d.path(), "open", err)
		}
		d.dst = fd
	}

	if source && d.src < 0 {
		fd, err := openDir(child.src, "..")
		if err != nil {
			return srcErr(d.path(), "open", err)
		}

		d.src = fd
		st, err := kernel.Stat(fd)
		if err != nil {
			return srcErr(d.path(), "stat", err)
		}

		if inode(&st) != d.id {
			return changed(d.path())
		}

		if d.cookie != 0 {
			if _, err := unix.Seek(fd, d.cookie, unix.SEEK_SET); err != nil {
				return srcErr(d.path(), "seek", err)
			}
		}
	}

	return nil
}

// finishPart finishes one part of d and releases a pin. If it was the last part, it
// leaves d and finishes a part of d's parent, and so on.
func (w *worker) finishPart(d *dir) {
	for {
		d.mu.Lock()
		d.pending--
		last := d.pending == 0
		if !last {
			d.unpinLocked()
		}

		d.mu.Unlock()
		if !last {
			return
		}

		p := d.parent
		if p != nil {
			// Pin the parent before d gets its final mode, which may forbid access to "..".
			w.t.failWalk(w.t.pin(p, d, false))
		}

		if !w.t.stopped() {
			w.t.failWalk(w.t.v.leave(w, d))
		}

		d.xattrs = nil
		d.unpin()
		if p == nil {
			d.unpin() // the pin of runWorkers
			close(w.t.quit)
			return
		}

		d = p
	}
}

// openDir opens a directory in a directory, never a symbolic link.
func openDir(at int, name string) (int, error) {
	return openNoAtime(at, name, unix.O_DIRECTORY)
}

// openNoAtime opens name in at for reading, if possible without changing its
// access time.
func openNoAtime(at int, name string, flags int) (int, error) {
	flags |= unix.O_RDONLY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := retry(func() (int, error) { return unix.Openat(at, name, flags|unix.O_NOATIME, 0) })
	if err == unix.EPERM { // O_NOATIME is for the owner only
		fd, err = retry(func() (int, error) { return unix.Openat(at, name, flags, 0) })
	}
	return fd, err
}

// linkID returns what all names of a file have in common, and no other file has. An overlay whose layers are subvolumes
// of one btrfs shows files of both under one inode number, so in overlays the rest of the inode counts, too.
func linkID(st *unix.Stat_t, overlay bool) Inode {
	id := inode(st)
	if overlay {
		h := fnv.New64a()
		fmt.Fprint(h, st.Ctim, st.Mtim, st.Size, st.Mode, st.Uid, st.Gid, st.Nlink, st.Rdev)
		id.Dev ^= h.Sum64()
	}
	return id
}

// isOverlay reports whether an open directory is in an overlay, as far as can be found out.
func isOverlay(fd int) bool {
	var st unix.Statfs_t
	return unix.Fstatfs(fd, &st) == nil && st.Type == unix.OVERLAYFS_SUPER_MAGIC
}

func inode(st *unix.Stat_t) Inode { return Inode{Dev: uint64(st.Dev), Ino: st.Ino} }

// futimens sets both times of an open file.
func futimens(fd int, atime, mtime unix.Timespec) error {
	ts := [2]unix.Timespec{atime, mtime}
	_, _, errno := unix.Syscall6(unix.SYS_UTIMENSAT, uintptr(fd), 0, uintptr(unsafe.Pointer(&ts)), 0, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}
