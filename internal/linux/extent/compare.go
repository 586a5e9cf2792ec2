package extent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"os"
	"runtime"

	"pando/internal/linux/kernel"

	"golang.org/x/sys/unix"
)

// BlockBytes is the unit of ranges: they begin at a multiple of it, and end at one or at
// the end of the file.
const BlockBytes = 4096

// Range is a range of a file, in bytes.
type Range struct {
	Offset int64
	Length int64
	Zero   bool // the whole range reads as zero: a hole, or allocated and never written
}

// End returns the first offset after the range.
func (r Range) End() int64 { return r.Offset + r.Length }

// noAddress are the flags of extents whose address does not identify their content.
const noAddress = Unknown | Delalloc | Encoded | NotAligned | Inline | Tail

// Filesystems whose addresses identify content: one address space for all files, and
// data keeps its address while any file refers to it. Others have maps as well, but with
// addresses on unnamed devices (bcachefs), or without sharing (ext4).
const (
	xfsMagic     = 0x58465342
	btrfsMagic   = 0x9123683e
	flagRealtime = 0x1 // FS_XFLAG_REALTIME
)

// Compare yields, in order, the ranges of b that may differ from the same bytes of a,
// judged by the place of their blocks, without reading data. Bytes outside of these ranges
// are the same in both; the shorter file counts as continued with zeros. Neighbours are
// joined, unless only one of them is Zero.
//
// Both must be regular files on the same XFS or btrfs, and nobody may write to or remove
// them while the comparison runs, because freed addresses are reused. Dirty data is
// written first. It does not matter where the filesystem splits extents, or whether it
// shares them; a hole equals space that was allocated and never written. Data without a
// reliable address (inline, compressed, not yet allocated) counts as different, and so
// does data that was moved: no difference is ever missed.
//
// The cost is that of reading both maps; the memory is constant. An error ends the
// sequence: EOPNOTSUPP, before any range, if the filesystem does not support this
// comparison, EXDEV if the files are on different filesystems, or the error of ctx.
func Compare(ctx context.Context, a, b *os.File) iter.Seq2[Range, error] {
	return func(yield func(Range, error) bool) {
		j := &joiner{yield: yield}
		if err := compare(ctx, a, b, j); err != nil && !j.stopped {
			yield(Range{}, err)
		}
	}
}

// Comparable returns nil if Compare can compare the two files, or the error that it would
// begin with.
func Comparable(a, b *os.File) error {
	_, _, err := bothSizes(a, b)
	return err
}

func compare(ctx context.Context, a, b *os.File, j *joiner) error {
	sizeA, sizeB, err := bothSizes(a, b)
	if err != nil {
		return err
	}

	j.size = sizeB
	x, y := cursor{p: newPager(a, true)}, cursor{p: newPager(b, true)}

	// After the end of a are zeros. For the rest of its last block the filesystem does
	// not guarantee that, so this block differs if b is longer.
	endA, zerosFrom := sizeA, sizeA
	if sizeA < sizeB {
		endA, zerosFrom = down(sizeA), up(sizeA)
	}

	for off := int64(0); off < sizeB && !j.stopped; {
		if err := ctx.Err(); err != nil {
			return err
		}

		q, err := y.at(off)
		if err != nil {
			return fmt.Errorf("%s: %w", b.Name(), err)
		}

		end := min(q.end, sizeB)
		same := false
		switch {
		case off < endA:
			p, err := x.at(off)
			if err != nil {
				return fmt.Errorf("%s: %w", a.Name(), err)
			}
			end = min(end, p.end, endA)
			same = p.same(q)
		case off < zerosFrom:
			end = min(end, zerosFrom)
		default:
			same = q.zero
		}

		if !same {
			j.add(off, end, q.zero)
		}

		off = end
	}

	j.flush()
	return nil
}

// bothSizes returns the sizes of two files that can be compared.
func bothSizes(a, b *os.File) (sizeA, sizeB int64, err error) {
	var st [2]unix.Stat_t
	var magic [2]int64
	var realtime [2]bool
	for i, f := range []*os.File{a, b} {
		var sf unix.Statfs_t
		if err := unix.Fstat(int(f.Fd()), &st[i]); err != nil {
			return 0, 0, fmt.Errorf("%s: stat: %w", f.Name(), err)
		}

		if err := unix.Fstatfs(int(f.Fd()), &sf); err != nil {
			return 0, 0, fmt.Errorf("%s: statfs: %w", f.Name(), err)
		}

		magic[i] = int64(sf.Type) // the type of this field depends on the architecture
		if st[i].Mode&unix.S_IFMT != unix.S_IFREG || magic[i] != xfsMagic && magic[i] != btrfsMagic {
			return 0, 0, fmt.Errorf("%s: comparing by address: %w", f.Name(), unix.EOPNOTSUPP)
		}

		if magic[i] == xfsMagic {
			if realtime[i], err = onRealtime(f); err != nil {
				return 0, 0, fmt.Errorf("%s: FSGETXATTR: %w", f.Name(), err)
			}
		}
	}

	if st[0].Dev != st[1].Dev {
		return 0, 0, fmt.Errorf("%s and %s: %w", a.Name(), b.Name(), unix.EXDEV)
	}
	if realtime[0] != realtime[1] { // two devices with separate addresses
		return 0, 0, fmt.Errorf("%s and %s: comparing by address: %w", a.Name(), b.Name(), unix.EOPNOTSUPP)
	}

	return st[0].Size, st[1].Size, nil
}

// onRealtime reports whether the data of a file is on the realtime device of an XFS.
func onRealtime(f *os.File) (bool, error) {
	defer runtime.KeepAlive(f)
	attr, err := kernel.GetFSXAttr(int(f.Fd()))
	return attr.XFlags&flagRealtime != 0, err
}

// Data yields, in order, the ranges of f that may contain anything but zeros; bytes
// outside of them read as zero. Zero is never set. f is a file or a block device that
// nobody writes to in the meantime. Without a map of extents it looks for holes, and
// without support for these it yields one range. An error ends the sequence.
func Data(ctx context.Context, f *os.File) iter.Seq2[Range, error] {
	return func(yield func(Range, error) bool) {
		j := &joiner{yield: yield}
		if err := data(ctx, f, j); err != nil && !j.stopped {
			yield(Range{}, err)
		}
	}
}

func data(ctx context.Context, f *os.File, j *joiner) error {
	var err error
	if j.size, err = sizeOf(f); err != nil {
		return fmt.Errorf("%s: %w", f.Name(), err)
	}

	c := cursor{p: newPager(f, true)}
	for off := int64(0); off < j.size && !j.stopped; {
		if err := ctx.Err(); err != nil {
			return err
		}

		p, err := c.at(off)
		if off == 0 && (errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOTTY)) {
			return seekData(ctx, f, j)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", f.Name(), err)
		}

		end := min(p.end, j.size)
		if !p.zero {
			j.add(off, end, false)
		}

		off = end
	}

	j.flush()
	return nil
}

// sizeOf returns the size of a file or block device.
func sizeOf(f *os.File) (int64, error) {
	st, err := kernel.Stat(int(f.Fd()))
	if err != nil || st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return st.Size, err
	}
	return f.Seek(0, io.SeekEnd)
}

func seekData(ctx context.Context, f *os.File, j *joiner) error {
	for off := int64(0); off < j.size && !j.stopped; {
		if err := ctx.Err(); err != nil {
			return err
		}

		from, err := unix.Seek(int(f.Fd()), off, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break // only a hole follows
		}

		if off == 0 && errors.Is(err, unix.EINVAL) { // a block device, or a filesystem that cannot tell
			j.add(0, j.size, false)
			break
		}

		if err != nil {
			return fmt.Errorf("%s: SEEK_DATA: %w", f.Name(), err)
		}

		to, err := unix.Seek(int(f.Fd()), from, unix.SEEK_HOLE)
		if err != nil {
			return fmt.Errorf("%s: SEEK_HOLE: %w", f.Name(), err)
		}
		if from < off || to <= from {
			return fmt.Errorf("%s: the filesystem returned the same range again at byte %d", f.Name(), off)
		}

		j.add(from, min(to, j.size), false)
		off = to
	}

	j.flush()
	return nil
}

// piece describes a range up to end: it is zero or, if trusted, has the same data as
// another piece with the same distance between logical and physical address.
type piece struct {
	end      int64
	zero     bool
	trusted  bool
	distance int64
}

// same reports whether two pieces certainly have the same content.
func (p piece) same(q piece) bool {
	if p.zero || q.zero {
		return p.zero && q.zero
	}
	return p.trusted && q.trusted && p.distance == q.distance
}

// cursor reads the map of one file in order.
type cursor struct {
	p    *pager
	x    Extent // the last one read
	done bool   // no extent follows
}

// at returns the piece at off, which must not decrease between calls.
func (c *cursor) at(off int64) (piece, error) {
	for !c.done && c.x.End() <= off {
		x, ok, err := c.p.next()
		if err != nil {
			return piece{}, err
		}
		if !ok {
			c.done = true
			break
		}
		if x.Logical < c.x.End() || x.Length <= 0 || x.Logical > math.MaxInt64-x.Length {
			return piece{}, fmt.Errorf("FIEMAP: an extent of %d bytes at %d follows one that ends at %d", x.Length, x.Logical,
				c.x.End())
		}
		c.x = x
	}

	switch {
	case c.done:
		return piece{end: math.MaxInt64, zero: true}, nil
	case c.x.Logical > off:
		return piece{end: c.x.Logical, zero: true}, nil
	case c.x.Flags&noAddress == 0 && c.x.Flags&Unwritten != 0:
		return piece{end: c.x.End(), zero: true}, nil
	}

	return piece{end: c.x.End(), trusted: c.x.Flags&noAddress == 0, distance: c.x.Physical - c.x.Logical}, nil
}

// joiner rounds ranges to blocks, joins neighbours and passes them on.
type joiner struct {
	size    int64 // of the file
	yield   func(Range, error) bool
	last    Range // not yielded yet
	stopped bool  // the consumer has stopped
}

// add adds the next range. A block that is only partly zero counts as data.
func (j *joiner) add(from, to int64, zero bool) {
	if !zero {
		j.put(down(from), min(up(to), j.size), false)
		return
	}

	first, last := up(from), down(to)
	if to == j.size {
		last = to
	}

	if first >= last {
		j.put(down(from), min(up(to), j.size), false)
		return
	}

	if from < first {
		j.put(down(from), first, false)
	}

	j.put(first, last, true)
	if last < to {
		j.put(last, min(up(to), j.size), false)
	}
}

// put adds a range of whole blocks. It may begin in the block in which the previous range,
// if it has the same kind of content, ended.
func (j *joiner) put(from, to int64, zero bool) {
	if j.last.Length > 0 && from <= j.last.End() && zero == j.last.Zero {
		j.last.Length = max(to, j.last.End()) - j.last.Offset
		return
	}
	j.flush()
	j.last = Range{Offset: from, Length: to - from, Zero: zero}
}

func (j *joiner) flush() {
	if j.last.Length > 0 && !j.stopped {
		j.stopped = !j.yield(j.last, nil)
	}
	j.last = Range{}
}

func down(n int64) int64 { return n / BlockBytes * BlockBytes }

func up(n int64) int64 { return down(n + BlockBytes - 1) }
