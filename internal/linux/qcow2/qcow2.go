// Package qcow2 reads and writes disk images in QEMU's format qcow2 (docs/interop/qcow2.rst of QEMU), version 3.
package qcow2

import (
	"encoding/binary"
	"fmt"
	"io"
)

// ClusterBytes is the unit of space in an image, QEMU's default.
const ClusterBytes = 1 << clusterBits

const (
	clusterBits   = 16
	headerBytes   = 104
	refcountOrder = 4                // refcounts have 1<<4 bits
	refcounts     = ClusterBytes / 2 // in a block of refcounts
	pointers      = ClusterBytes / 8 // in a table
	copied        = 1 << 63          // in a pointer: the refcount is exactly 1
	sectorBytes   = 512              // QEMU rounds the size of a disk up to whole ones
	maxBytes      = 1 << 55          // keeps all numbers far below the limits of the format
)

// Range is a range of clusters of the disk, [From, To).
type Range struct{ From, To int64 }

// Layout is where everything is in an image. All metadata precedes the data, so that an image can be written to a pipe.
type Layout struct {
	size   int64 // of the disk, bytes
	ranges []Range

	tableClusters, blocks int64 // of refcounts
	l1Clusters, l2s       int64
	data                  int64 // clusters
}

// Plan lays out the image of a disk of size bytes, with data only in these ranges, which are in order, do not overlap,
// and end within the disk.
func Plan(size int64, ranges []Range) (*Layout, error) {
	if size <= 0 || size > maxBytes || size%sectorBytes != 0 {
		return nil, fmt.Errorf("a disk of %d bytes cannot be a qcow2 image", size)
	}

	l := &Layout{size: size, ranges: ranges}
	last := int64(0)
	tables := int64(-1) // the number of the last table with data
	for _, r := range ranges {
		if r.From < last || r.To <= r.From || r.To > divUp(size, ClusterBytes) {
			return nil, fmt.Errorf("range %d to %d is out of order, or outside the disk", r.From, r.To)
		}

		l.data += r.To - r.From
		first, end := max(r.From/pointers, tables+1), (r.To-1)/pointers
		l.l2s += max(end-first+1, 0)
		last, tables = r.To, end
	}

	// Refcounts count their own clusters too.
	l.l1Clusters = max(divUp(l.l1Size(), pointers), 1)
	for {
		total := l.Clusters()
		blocks := divUp(total, refcounts)
		table := divUp(blocks, pointers)
		if blocks == l.blocks && table == l.tableClusters {
			return l, nil
		}
		l.blocks, l.tableClusters = blocks, table
	}
}

func divUp(n, unit int64) int64 { return (n + unit - 1) / unit }

// l1Size returns how many pointers the first level has: one for each table of the second level.
func (l *Layout) l1Size() int64 { return divUp(divUp(l.size, ClusterBytes), pointers) }

// Clusters returns the length of the image in clusters.
func (l *Layout) Clusters() int64 {
	return 1 + l.tableClusters + l.blocks + l.l1Clusters + l.l2s + l.data
}

// Offsets of the parts, in clusters.
func (l *Layout) blocksAt() int64 { return 1 + l.tableClusters }
func (l *Layout) l1At() int64     { return l.blocksAt() + l.blocks }
func (l *Layout) l2At() int64     { return l.l1At() + l.l1Clusters }
func (l *Layout) dataAt() int64   { return l.l2At() + l.l2s }

// WriteMetadata writes everything that precedes the data. The clusters of the data follow, in the order of the
// ranges; the last cluster of the disk is filled up with zeros.
func (l *Layout) WriteMetadata(w io.Writer) error {
	c := &clusterWriter{w: w, b: make([]byte, 0, ClusterBytes)}

	// The header.
	h := c.b[:headerBytes]
	clear(h)
	copy(h, "QFI\xfb")
	be := binary.BigEndian
	be.PutUint32(h[4:], 3)
	be.PutUint32(h[20:], clusterBits)
	be.PutUint64(h[24:], uint64(l.size))
	be.PutUint32(h[36:], uint32(l.l1Size()))
	be.PutUint64(h[40:], uint64(l.l1At()*ClusterBytes))
	be.PutUint64(h[48:], ClusterBytes) // the table of refcounts is the second cluster
	be.PutUint32(h[56:], uint32(l.tableClusters))
	be.PutUint32(h[96:], refcountOrder)
	be.PutUint32(h[100:], headerBytes)
	c.b = h
	c.fillUp()

	// The refcounts: a table of blocks, and the blocks, in which each cluster has the count 1.
	for i := range l.blocks {
		c.put64(uint64((l.blocksAt() + i) * ClusterBytes))
	}

	c.fillUp()
	for range l.Clusters() {
		c.put16(1)
	}

	c.fillUp()
	l.writeTables(c)
	return c.err
}

// writeTables writes the two levels of tables that lead to the data.
func (l *Layout) writeTables(c *clusterWriter) {
	// The first level points to those tables of the second one that have data.
	next, done := l.l2At(), int64(0)
	for _, r := range l.ranges {
		for ; done <= (r.To-1)/pointers; done++ {
			if done < r.From/pointers {
				c.put64(0)
				continue
			}
			c.put64(uint64(next*ClusterBytes) | copied)
			next++
		}
	}

	for ; done < l.l1Clusters*pointers; done++ {
		c.put64(0)
	}

	// The second level points to the data.
	next, done = l.dataAt(), 0
	for _, r := range l.ranges {
		if table := r.From / pointers; table > (done-1)/pointers || done == 0 {
			c.fillUp()
			done = table * pointers
		}
		for ; done < r.From; done++ {
			c.put64(0)
		}
		for ; done < r.To; done++ {
			c.put64(uint64(next*ClusterBytes) | copied)
			next++
		}
	}

	c.fillUp()
}

// clusterWriter writes numbers into clusters. After an error it writes nothing more.
type clusterWriter struct {
	w   io.Writer
	b   []byte // the cluster, as far as it is filled
	err error
}

func (c *clusterWriter) put64(n uint64) {
	c.b = binary.BigEndian.AppendUint64(c.b, n)
	c.writeIfFull()
}

func (c *clusterWriter) put16(n uint16) {
	c.b = binary.BigEndian.AppendUint16(c.b, n)
	c.writeIfFull()
}

// fillUp fills a cluster that was begun with zeros.
func (c *clusterWriter) fillUp() {
	if n := len(c.b); n > 0 {
		c.b = c.b[:ClusterBytes]
		clear(c.b[n:])
		c.writeIfFull()
	}
}

func (c *clusterWriter) writeIfFull() {
	if len(c.b) < ClusterBytes {
		return
	}
	if c.err == nil {
		_, c.err = c.w.Write(c.b)
	}
	c.b = c.b[:0]
}
