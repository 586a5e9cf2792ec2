package treecopy

import (
	"fmt"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
)

const (
	bufferSize = 256 << 10 // of a worker; files up to this size take one read and one write
	// cloneMin is the size of the smallest file that is cloned. Cloning first forces a file's dirty pages to
	// disk, one file after the other, so copying small files is faster.
	cloneMin  = 64 << 10
	rangeSize = 8 << 20 // of one copy_file_range, which delays cancellation
)

func (w *worker) buffer() []byte {
	if w.data == nil {
		w.data = make([]byte, bufferSize)
	}
	return w.data
}

// regular copies a regular file.
func (c *copier) regular(w *worker, d *dir, e entry) error {
	path := func() string { return d.join(e.name) }

	// Open the source. O_NONBLOCK: if it has just been replaced by a fifo, do not wait for a writer.
	src, err := openNoAtime(d.src, e.name, unix.O_NONBLOCK)
	if err != nil {
		return srcErr(path(), "open", err)
	}

	defer unix.Close(src)

	st, err := kernel.Stat(src)
	if err != nil {
		return srcErr(path(), "stat", err)
	}

	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return changed(path())
	}

	// Create the copy, or link to an earlier one.
	dst := -1
	create := func() (err error) {
		dst, err = c.createRegular(d, e.name, &st)
		return err
	}

	if st.Nlink > 1 {
		linked, err := c.links.create(d, e.name, &st, create)
		if err != nil {
			return err
		}
		if linked {
			c.n.addProgress(1, 0)
			return nil
		}
	} else if err := create(); err != nil {
		return err
	}

	f := file{w: w, n: c.n, src: src, dst: dst, st: &st, path: path}
	err = c.fill(d, e.name, &f)

	// Some filesystems report write errors only now.
	if cerr := unix.Close(dst); cerr != nil && cerr != unix.EINTR && err == nil {
		err = dstErr(path(), "close", cerr)
	}
	if err == nil {
		c.n.addProgress(1, f.remaining())
	}

	return err
}

// createRegular creates the copy of a regular file and returns its descriptor.
func (c *copier) createRegular(d *dir, name string, st *unix.Stat_t) (int, error) {
	// The copy must not be setuid before it has its owner; apply sets the rest of the mode.
	mode := st.Mode & 0o777
	if c.set.unprivileged {
		mode |= 0o200 // to set attributes
	}

	dst, err := retry(func() (int, error) {
		return unix.Openat(d.dst, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, mode)
	})
	if err != nil {
		return -1, dstErr(d.join(name), "create", err)
	}

	return dst, nil
}

// fill copies the data and attributes of a regular file to its new copy.
func (c *copier) fill(d *dir, name string, f *file) error {
	a := attrsOf(f.st)
	a.flags = readFlags(f.src)
	setHints(f.dst, a.flags)
	if c.noFlags {
		a.flags = fileFlags{}
	}

	if err := f.copy(); err != nil {
		return err
	}

	if err := f.check(); err != nil {
		return err
	}

	xs, err := c.readXattrs(f.w, openObject(f.src), f.path)
	if err != nil {
		return err
	}

	c.postponeFlags(d, name, uint64(f.st.Nlink), &a)
	return c.set.applyAttrs(openObject(f.dst).in(d.key), f.path, a, xs)
}

// file copies the data of one regular file.
type file struct {
	w        *worker
	n        *counters
	src, dst int
	st       *unix.Stat_t
	path     func() string

	expect  int64 // bytes that Measure counts, all of which are reported to Progress
	counted int64 // bytes reported so far
}

// addCopied counts n bytes as copied.
func (f *file) addCopied(n int64) {
	if n = min(n, f.expect-f.counted); n > 0 {
		f.counted += n
		f.n.addProgress(0, n)
	}
}

func (f *file) remaining() int64 { return f.expect - f.counted }

// check returns an error if the source has changed since it was opened.
func (f *file) check() error {
	now, err := kernel.Stat(f.src)
	if err != nil {
		return srcErr(f.path(), "stat", err)
	}

	var how []string
	if now.Size != f.st.Size {
		how = append(how, fmt.Sprintf("its size from %d to %d", f.st.Size, now.Size))
	}
	if now.Mtim != f.st.Mtim {
		how = append(how, "its content")
	}
	if now.Ctim != f.st.Ctim {
		how = append(how, "its inode")
	}
	if how != nil {
		return changed(f.path(), how...)
	}

	return nil
}

// full reports whether a file is completely allocated, as far as stat can tell.
// Compressed files, and files stored in their inode, look sparse to it.
func full(st *unix.Stat_t) bool { return st.Blocks*512 >= st.Size }

// copy copies the data, by the fastest method that works.
func (f *file) copy() error {
	size := f.st.Size
	f.expect = size
	if !full(f.st) {
		n, err := dataBytes(f.src, size)
		if err != nil {
			return srcErr(f.path(), "seek", err)
		}
		f.expect = n
	}

	if size >= cloneMin {
		if done, err := f.clone(); done || err != nil {
			return err
		}
	}

	if size < bufferSize && f.expect == size { // the buffer needs one more byte, to detect that the file grew
		return f.copySmall()
	}

	return f.extents()
}

// copySmall copies a file that fits into the buffer.
func (f *file) copySmall() error {
	buf := f.w.buffer()
	size := int(f.st.Size)
	n, err := retry(func() (int, error) { return unix.Pread(f.src, buf[:size+1], 0) })
	if err != nil {
		return srcErr(f.path(), "read", err)
	}
	if n != size {
		return changed(f.path(), fmt.Sprintf("%d bytes of %d", n, size))
	}
	return f.writeChunk(buf[:n], 0)
}

func (f *file) writeChunk(p []byte, off int64) error {
	return writeAt(f.dst, p, off, f.path)
}

// writeAt writes all of p, or returns a dstErr.
func writeAt(fd int, p []byte, off int64, path func() string) error {
	for len(p) > 0 {
		n, err := retry(func() (int, error) { return unix.Pwrite(fd, p, off) })
		if err == nil && n == 0 {
			err = unix.EIO
		}
		if err != nil {
			return dstErr(path(), "write", err)
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// clone shares the source's blocks. False without an error: the filesystems do not support that.
func (f *file) clone() (bool, error) {
	if f.w.cloneDev != uint64(f.st.Dev) {
		f.w.cloneDev, f.w.noClone, f.w.noRange = uint64(f.st.Dev), false, false
	}
	if f.w.noClone {
		return false, nil
	}

	err := retry0(func() error { return unix.IoctlFileClone(f.dst, f.src) })
	switch err {
	case nil:
		return true, nil
	case unix.ENOSPC, unix.EDQUOT, unix.EIO:
		return false, dstErr(f.path(), "clone", err)
	}

	f.w.noClone = true
	return false, nil
}

// extents copies the data of the file and leaves out its holes.
func (f *file) extents() error {
	size := f.st.Size
	var end int64 // end of the last data
	for off := int64(0); off < size; {
		from, to, err := nextData(f.src, off, size)
		if err != nil {
			return srcErr(f.path(), "seek", err)
		}
		if from < to {
			if err := f.copyRange(from, to); err != nil {
				return err
			}
			end = to
		}
		off = to
	}

	if end < size {
		if err := retry0(func() error { return unix.Ftruncate(f.dst, size) }); err != nil {
			return dstErr(f.path(), "truncate", err)
		}
	}

	return nil
}

// nextData returns the first range of data at or after off. If there is none, the range is empty and
// at size.
func nextData(fd int, off, size int64) (from, to int64, err error) {
	from, err = unix.Seek(fd, off, unix.SEEK_DATA)
	if err == unix.ENXIO {
		return size, size, nil
	}
	if err == unix.EINVAL || err == unix.EOPNOTSUPP { // the filesystem does not report holes
		return off, size, nil
	}
	if err != nil {
		return 0, 0, err
	}

	to, err = unix.Seek(fd, from, unix.SEEK_HOLE)
	if err != nil && err != unix.ENXIO {
		return 0, 0, err
	}
	if err != nil || to > size {
		to = size
	}

	return min(from, size), max(to, min(from, size)), nil
}

// dataBytes returns how many bytes of a file are data.
func dataBytes(fd int, size int64) (int64, error) {
	var sum int64
	for off := int64(0); off < size; {
		from, to, err := nextData(fd, off, size)
		if err != nil {
			return 0, err
		}
		sum += to - from
		off = to
	}
	return sum, nil
}

// copyRange copies the bytes from..to.
func (f *file) copyRange(from, to int64) error {
	for from < to {
		if f.w.t.stopped() {
			return errs.New(errs.Canceled, op, quote(f.path()), "stopped") // the walk returns its first error
		}
		n, err := f.copyStep(from, to-from)
		if err != nil {
			return err
		}
		if n == 0 {
			return changed(f.path()) // it became shorter
		}
		from += n
		f.addCopied(n)
	}

	return nil
}

// copyStep copies up to n bytes at off and returns how many; 0 means end of file.
func (f *file) copyStep(off, n int64) (int64, error) {
	if !f.w.noRange && n >= bufferSize {
		roff, woff := off, off
		done, err := retry(func() (int, error) {
			return unix.CopyFileRange(f.src, &roff, f.dst, &woff, int(min(n, rangeSize)), 0)
		})
		switch err {
		case nil:
			if done > 0 {
				return int64(done), nil
			}
			// Some filesystems return 0 if they do not support it.
		case unix.ENOSPC, unix.EDQUOT, unix.EFBIG:
			return 0, dstErr(f.path(), "copy_file_range", err)
		default:
			f.w.noRange = true
		}
	}

	buf := f.w.buffer()
	buf = buf[:min(int64(len(buf)), n)]
	done, err := retry(func() (int, error) { return unix.Pread(f.src, buf, off) })
	if err != nil {
		return 0, srcErr(f.path(), "read", err)
	}

	return int64(done), f.writeChunk(buf[:done], off)
}
