package treediff

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"pando/internal/linux/extent"
	"pando/internal/tree/treecopy"
)

const (
	blockSize  = 4 << 10
	chunkSize  = 128 << 10
	mapMin     = 64 << 10 // reading smaller files is faster than reading their extents
	maxRanges  = 4096     // of one file; files with more are compared again by Apply
	unreadable = extent.Unknown | extent.Delalloc | extent.Encoded | extent.NotAligned | extent.Inline | extent.Tail |
		extent.Unwritten
)

// delta describes how two files differ.
type delta struct {
	content, metadata, times bool
	bytes                    int64
	ranges                   []Range
}

// compare compares two files of the same type, except their names.
func (c *comparer) compare(at, bt place, a, b *inode) (d delta, err error) {
	// Compare the metadata.
	d.times = a.mtime != b.mtime
	d.metadata = a.mode != b.mode || a.uid != b.uid || a.gid != b.gid
	if !d.metadata {
		x, err := xattrs(at.dir, at.name, at.path)
		if err != nil {
			return d, err
		}
		y, err := xattrs(bt.dir, bt.name, bt.path)
		if err != nil {
			return d, err
		}
		d.metadata = !bytes.Equal(x, y)
	}

	if !d.metadata && (a.isFile() || a.isDir()) {
		x, err := flagsAt(at)
		if err != nil {
			return d, err
		}
		y, err := flagsAt(bt)
		if err != nil {
			return d, err
		}
		d.metadata = x != y
	}

	// Compare the content.
	switch a.mode & unix.S_IFMT {
	case unix.S_IFREG:
		err = c.contents(at, bt, a.size, b.size, &d)
	case unix.S_IFLNK:
		x, err := readlink(at.dir, at.name, at.path)
		if err != nil {
			return d, err
		}
		y, err := readlink(bt.dir, bt.name, bt.path)
		if err != nil {
			return d, err
		}
		if d.content = x != y; d.content {
			d.bytes = int64(len(y))
		}
	case unix.S_IFCHR, unix.S_IFBLK:
		d.content = a.rdev != b.rdev
	}

	if c.o.Progress != nil {
		c.o.Progress(1, 0)
	}

	return d, err
}

func openFile(p place) (*os.File, error) {
	flags := unix.O_RDONLY | unix.O_NOFOLLOW | unix.O_CLOEXEC | unix.O_NONBLOCK
	fd, err := unix.Openat(int(p.dir.Fd()), p.name, flags|unix.O_NOATIME, 0)
	if err == unix.EPERM { // O_NOATIME is for the owner only
		fd, err = unix.Openat(int(p.dir.Fd()), p.name, flags, 0)
	}
	if err != nil {
		return nil, failed(p.path, "open", err)
	}
	return os.NewFile(uintptr(fd), p.path), nil
}

// contents compares the data of two regular files and adds the result to d.
func (c *comparer) contents(at, bt place, sizeA, sizeB int64, d *delta) error {
	d.content = sizeA != sizeB
	if sizeA == 0 && sizeB == 0 {
		return nil
	}

	fa, err := openFile(at)
	if err != nil {
		return err
	}

	defer fa.Close()

	fb, err := openFile(bt)
	if err != nil {
		return err
	}

	defer fb.Close()

	c.filesRead.Add(1)
	common := min(sizeA, sizeB)
	var same []Range
	if common >= mapMin && c.o.SameBlocks != nil {
		if same, err = c.sharedRanges(fa, fb, common); err != nil {
			return failed(bt.path, "reading extents", err)
		}
	}

	if err := c.readBoth(fa, fb, common, same, d); err != nil {
		return failed(bt.path, "read", err)
	}

	if sizeB > sizeA {
		if err := dataRanges(fb, sizeA, sizeB, d.addRange); err != nil {
			return failed(bt.path, "seek", err)
		}
	}

	if len(d.ranges) > maxRanges {
		d.ranges = nil
	}

	d.content = d.content || d.bytes > 0
	return nil
}

// addRange counts a range as different.
func (d *delta) addRange(from, to int64) {
	d.bytes += to - from
	if len(d.ranges) > maxRanges {
		return
	}
	if n := len(d.ranges); n > 0 && d.ranges[n-1].To == from {
		d.ranges[n-1].To = to
		return
	}
	d.ranges = append(d.ranges, Range{from, to})
}

var buffers = sync.Pool{New: func() any { b := make([]byte, 2*chunkSize); return &b }}

// readBoth compares the first size bytes of two files, except the ranges that
// are known to be the same and those that are holes in both.
func (c *comparer) readBoth(fa, fb *os.File, size int64, same []Range, d *delta) error {
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)

	x, y := (*buf)[:chunkSize], (*buf)[chunkSize:]
	s := &skipper{same: same, a: data{f: fa, size: size}, b: data{f: fb, size: size}}
	for off := int64(0); ; {
		// Find the next bytes to compare.
		var err error
		if off, err = s.next(c.ctx, off, size); err != nil || off >= size {
			return err
		}

		end := min(size, (off/chunkSize+1)*chunkSize)
		if len(s.same) > 0 {
			end = min(end, s.same[0].From)
		}

		// Read them from both files.
		n := int(end - off)
		if err := readFull(fa, x[:n], off); err != nil {
			return err
		}

		if err := readFull(fb, y[:n], off); err != nil {
			return err
		}

		c.bytesRead.Add(2 * int64(n))
		if c.o.Progress != nil {
			c.o.Progress(0, int64(n))
		}

		d.addDifferent(x[:n], y[:n], off)
		off = end
	}
}

// addDifferent counts the blocks in which x and y, which begin at off, differ.
func (d *delta) addDifferent(x, y []byte, off int64) {
	if bytes.Equal(x, y) {
		return
	}
	for i, n := 0, len(x); i < n; {
		to := min(n, i+blockSize-int((off+int64(i))%blockSize))
		if !bytes.Equal(x[i:to], y[i:to]) {
			d.addRange(off+int64(i), off+int64(to))
		}
		i = to
	}
}

// skipper finds the parts of two files that have to be compared.
type skipper struct {
	same []Range // known to be the same; those already passed are removed
	a, b data
}

// next returns the first offset from off on that is neither known to be the same nor a hole in both files; size or
// more if there is none.
func (s *skipper) next(ctx context.Context, off, size int64) (int64, error) {
	for off < size {
		if err := ctx.Err(); err != nil {
			return 0, err
		}

		for len(s.same) > 0 && s.same[0].To <= off {
			s.same = s.same[1:]
		}

		if len(s.same) > 0 && s.same[0].From <= off {
			off = s.same[0].To
			continue
		}

		na, err := s.a.nextOffset(off)
		if err != nil {
			return 0, err
		}

		nb, err := s.b.nextOffset(off)
		if err != nil {
			return 0, err
		}

		next := min(na, nb)
		if next >= size {
			return size, nil
		}

		if next = next / blockSize * blockSize; next <= off {
			return off, nil
		}

		off = next
	}

	return off, nil
}

func readFull(f *os.File, p []byte, off int64) error {
	n, err := f.ReadAt(p, off)
	if n == len(p) {
		return nil
	}
	if errors.Is(err, io.EOF) {
		return unix.ESTALE // it became shorter
	}
	return err
}

// data finds the ranges of a file that are not holes.
type data struct {
	f        *os.File
	size     int64
	from, to int64 // the last range found
}

// nextOffset returns the first offset of data at or after off, size if there is none.
func (d *data) nextOffset(off int64) (int64, error) {
	if off < d.to {
		return max(off, d.from), nil
	}
	from, to, err := treecopy.NextData(d.f, off, d.size)
	if err != nil {
		return 0, err
	}
	d.from, d.to = from, to
	return from, nil
}

// dataRanges calls fn for the data in a range of a file.
func dataRanges(f *os.File, off, end int64, fn func(from, to int64)) error {
	for off < end {
		from, to, err := treecopy.NextData(f, off, end)
		if err != nil {
			return err
		}
		if from < to {
			fn(from, to)
		}
		off = max(to, from)
	}
	return nil
}

// sharedRanges returns the ranges of the first size bytes that both files have in the same blocks.
func (c *comparer) sharedRanges(fa, fb *os.File, size int64) ([]Range, error) {
	xs, err := extents(fa)
	if err != nil || xs == nil {
		return nil, err
	}

	ys, err := extents(fb)
	if err != nil {
		return nil, err
	}

	var out []Range
	for len(xs) > 0 && len(ys) > 0 {
		x, y := xs[0], ys[0]
		lo, hi := max(x.Logical, y.Logical), min(x.End(), y.End(), size)
		for lo < hi {
			same, n := c.o.SameBlocks(x.Physical+lo-x.Logical, y.Physical+lo-y.Logical, hi-lo)
			n = min(max(n, 1), hi-lo)
			if same {
				if k := len(out); k > 0 && out[k-1].To == lo {
					out[k-1].To = lo + n
				} else {
					out = append(out, Range{lo, lo + n})
				}
			}
			lo += n
		}

		if x.End() <= y.End() {
			xs = xs[1:]
		}
		if y.End() <= x.End() {
			ys = ys[1:]
		}
	}

	// Only whole blocks can be skipped.
	for i := range out {
		out[i].From = (out[i].From + blockSize - 1) / blockSize * blockSize
		if out[i].To < size {
			out[i].To = out[i].To / blockSize * blockSize
		}
	}

	return slices.DeleteFunc(out, func(r Range) bool { return r.From >= r.To }), nil
}

// extents returns the extents of a file that have a reliable address, or nil if the
// filesystem has no extent maps.
func extents(f *os.File) ([]extent.Extent, error) {
	var out []extent.Extent
	err := extent.Scan(f, true, func(x extent.Extent) error {
		if x.Flags&unreadable == 0 {
			out = append(out, x)
		}
		return nil
	})
	if noMaps(err) {
		return nil, nil
	}
	return out, err
}

// noMaps reports whether an error says that the filesystem has no extent maps.
func noMaps(err error) bool { return errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOTTY) }

// CompareFiles compares the content of two open files, such as block images. If they are on
// one filesystem, it reads only ranges in different blocks. It
// returns the ranges of b that differ, in blocks of 4 KiB, and their total length. Behind the
// end of a, all data of b differs, but no holes. ranges is nil if there are more than 4096.
func CompareFiles(ctx context.Context, a, b *os.File) (ranges []Range, changedBytes int64, stats Stats, err error) {
	var stA, stB unix.Stat_t
	if err = unix.Fstat(int(a.Fd()), &stA); err == nil {
		err = unix.Fstat(int(b.Fd()), &stB)
	}
	if err == nil {
		stA.Size, err = deviceSize(a, &stA)
	}
	if err == nil {
		stB.Size, err = deviceSize(b, &stB)
	}
	if err != nil {
		return nil, 0, stats, failed("", "stat", err)
	}

	// Find shared blocks.
	c := &comparer{ctx: ctx}
	common := min(stA.Size, stB.Size)
	stats.Method = "read"
	var same []Range
	if stA.Dev == stB.Dev && stA.Mode&unix.S_IFMT == unix.S_IFREG && stB.Mode&unix.S_IFMT == unix.S_IFREG {
		stats.Method = "extents"
		c.o.SameBlocks = func(x, y, n int64) (bool, int64) { return x == y, n }
		if same, err = c.sharedRanges(a, b, common); err != nil {
			return nil, 0, stats, failed("", "reading extents", err)
		}
	}

	// Read and compare the rest.
	var d delta
	if err = c.readBoth(a, b, common, same, &d); err == nil {
		err = dataRanges(b, min(stA.Size, stB.Size), stB.Size, d.addRange)
	}

	stats.FilesRead, stats.BytesRead = 1, c.bytesRead.Load()
	if len(d.ranges) > maxRanges {
		d.ranges = nil
	}

	return d.ranges, d.bytes, stats, failed("", "read", err)
}

// deviceSize returns the size of a file or of a block device, which stat does not report.
func deviceSize(f *os.File, st *unix.Stat_t) (int64, error) {
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return st.Size, nil
	}
	return f.Seek(0, io.SeekEnd)
}
