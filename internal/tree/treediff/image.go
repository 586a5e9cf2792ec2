package treediff

import (
	"context"
	"os"
	"sort"
	"time"

	"pando/internal/linux/extent"
)

// ImageDelta contains the ranges in which two images may differ, judged by the addresses
// of their blocks. Its cost depends on the number of extents; no data is read.
type ImageDelta struct {
	ranges []Range // sorted, not adjacent
}

// CompareImages compares the extent maps of two images on one filesystem. The images
// must exist unchanged as long as the result is used. ok is
// false if the filesystem has no extent maps. Extents without a reliable address
// count as different.
func CompareImages(a, b *os.File) (d *ImageDelta, ok bool, err error) {
	sa, err := a.Stat()
	if err != nil {
		return nil, false, failed(a.Name(), "stat", err)
	}

	sb, err := b.Stat()
	if err != nil {
		return nil, false, failed(b.Name(), "stat", err)
	}

	xs, err := allExtents(a)
	if err != nil {
		return nil, false, failed(a.Name(), "reading extents", err)
	}

	ys, err := allExtents(b)
	if err != nil {
		return nil, false, failed(b.Name(), "reading extents", err)
	}
	if xs == nil || ys == nil {
		return nil, false, nil
	}

	d = &ImageDelta{}
	common := min(sa.Size(), sb.Size())
	d.scan(xs, ys, common)
	if end := max(sa.Size(), sb.Size()); end > common {
		d.addRange(common, end)
	}

	return d, true, nil
}

// allExtents returns all extents of a file, nil only if the filesystem has no extent maps.
func allExtents(f *os.File) ([]extent.Extent, error) {
	out := []extent.Extent{}
	err := extent.Scan(f, true, func(x extent.Extent) error {
		out = append(out, x)
		return nil
	})
	if noMaps(err) {
		return nil, nil
	}
	return out, err
}

// scan goes through both maps side by side. Bytes in no extent are holes.
func (d *ImageDelta) scan(xs, ys []extent.Extent, size int64) {
	const mustBeSame = extent.Unwritten // besides the address
	const untrusted = unreadable &^ extent.Unwritten
	for off := int64(0); off < size; {
		for len(xs) > 0 && xs[0].End() <= off {
			xs = xs[1:]
		}

		for len(ys) > 0 && ys[0].End() <= off {
			ys = ys[1:]
		}

		end := size
		in := func(l []extent.Extent) *extent.Extent {
			if len(l) == 0 {
				return nil
			}
			if l[0].Logical > off {
				end = min(end, l[0].Logical)
				return nil
			}
			end = min(end, l[0].End())
			return &l[0]
		}

		x, y := in(xs), in(ys)
		same := x == nil && y == nil
		if x != nil && y != nil {
			same = (x.Flags|y.Flags)&untrusted == 0 && x.Flags&mustBeSame == y.Flags&mustBeSame &&
				x.Physical-x.Logical == y.Physical-y.Logical
		}

		if !same {
			d.addRange(off, end)
		}

		off = end
	}
}

func (d *ImageDelta) addRange(from, to int64) {
	if n := len(d.ranges); n > 0 && d.ranges[n-1].To == from {
		d.ranges[n-1].To = to
		return
	}
	d.ranges = append(d.ranges, Range{from, to})
}

// Empty reports whether the images are certainly the same.
func (d *ImageDelta) Empty() bool { return len(d.ranges) == 0 }

// firstEndingAfter returns the index of the first range that ends after off.
func (d *ImageDelta) firstEndingAfter(off int64) int {
	return sort.Search(len(d.ranges), func(i int) bool { return d.ranges[i].To > off })
}

// within calls fn for the parts of [from, to) that may differ.
func (d *ImageDelta) within(from, to int64, fn func(from, to int64) error) error {
	for i := d.firstEndingAfter(from); i < len(d.ranges) && d.ranges[i].From < to; i++ {
		if err := fn(max(from, d.ranges[i].From), min(to, d.ranges[i].To)); err != nil {
			return err
		}
	}
	return nil
}

// SameBlocks is Options.SameBlocks for the filesystems in the two images, whose
// addresses are offsets in the images.
func (d *ImageDelta) SameBlocks(x, y, n int64) (same bool, bytes int64) {
	if x != y {
		return false, n
	}
	i := d.firstEndingAfter(x)
	switch {
	case i == len(d.ranges):
		return true, n
	case d.ranges[i].From > x:
		return true, min(n, d.ranges[i].From-x)
	}
	return false, min(n, d.ranges[i].To-x)
}

// Ext4Hints finds the inodes that differ between the ext4 filesystems in two
// images, by reading the parts of their inode tables that may differ. It returns nil without an error
// for other images: without ext4, not unmounted cleanly, of different
// geometry, or with features that this code does not support. younger is
// Options.Younger: files that were changed in both images after it, within one tick of the
// clock, may differ even though their inodes are the same.
func Ext4Hints(ctx context.Context, a, b *os.File, d *ImageDelta, younger time.Time) (*Hints, error) {
	sizeA, err := a.Stat()
	if err != nil {
		return nil, failed(a.Name(), "stat", err)
	}

	sizeB, err := b.Stat()
	if err != nil {
		return nil, failed(b.Name(), "stat", err)
	}

	la, err := readExt4(a, sizeA.Size())
	if err != nil || la == nil {
		return nil, failed(a.Name(), "reading ext4", err)
	}

	lb, err := readExt4(b, sizeB.Size())
	if err != nil || lb == nil || !la.sameAs(lb) {
		return nil, failed(b.Name(), "reading ext4", err)
	}

	h := &Hints{Method: "ext4", Changed: map[uint64]Links{}}
	err = la.changed(ctx, lb, a, b, d, racySince(younger), func(ino uint64, links Links) { h.Changed[ino] = links })
	if err != nil {
		return nil, failed(b.Name(), "reading inode tables", err)
	}

	return h, nil
}
