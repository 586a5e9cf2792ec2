// Package extent reads the extent map of a file: where its bytes are on the filesystem.
//
// It follows the rules that other tools learnt by losing data: read pages until the
// kernel sets LAST, and never rely on the address of an extent without a stable one
// (delayed allocation, unknown, encoded, inline).
package extent

import (
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Flags of an extent, as FIEMAP reports them (linux/fiemap.h).
type Flags uint32

const (
	Last         Flags = 0x0001
	Unknown      Flags = 0x0002
	Delalloc     Flags = 0x0004
	Encoded      Flags = 0x0008 // compressed or encrypted
	NotAligned   Flags = 0x0100
	Inline       Flags = 0x0200 // data is stored in metadata
	Tail         Flags = 0x0400
	Unwritten    Flags = 0x0800 // allocated, reads as zero
	Shared       Flags = 0x2000
	fiemapSync         = 0x1
	fsIocFIEMAP        = 0xc020660b
	pageExtents        = 512
	fiemapExtent       = 56
	fiemapHeader       = 32
	maxFileBytes       = ^uint64(0)
)

// Extent is one piece of a file. Bytes not in any extent are holes.
type Extent struct {
	Logical  int64 // offset in the file, bytes
	Physical int64 // offset on the device, bytes; meaningless for Delalloc, Unknown, Inline
	Length   int64 // bytes
	Flags    Flags
}

// End returns the first offset after the extent.
func (e Extent) End() int64 { return e.Logical + e.Length }

// Scan calls fn for each extent of f in order of offset. With sync, it writes dirty
// data first, so that no extent is Delalloc. EOPNOTSUPP: the filesystem does not support
// FIEMAP.
func Scan(f *os.File, sync bool, fn func(Extent) error) error {
	p := newPager(f, sync)
	for {
		x, ok, err := p.next()
		if err != nil || !ok {
			return err
		}
		if err := fn(x); err != nil {
			return err
		}
	}
}

// pager reads the map of a file page by page, so that its memory does not depend on the
// number of extents.
type pager struct {
	f     *os.File
	buf   [fiemapHeader + pageExtents*fiemapExtent]byte
	n, i  int    // number of extents in buf, and how many of them were returned
	start uint64 // of the next page
	sync  bool   // write dirty data before reading the next page, which is the first
	done  bool   // the last page was read
}

func newPager(f *os.File, sync bool) *pager { return &pager{f: f, sync: sync} }

func (p *pager) u64(off int) *uint64 { return (*uint64)(unsafe.Pointer(&p.buf[off])) }
func (p *pager) u32(off int) *uint32 { return (*uint32)(unsafe.Pointer(&p.buf[off])) }

// next returns the next extent, or false after the last.
func (p *pager) next() (Extent, bool, error) {
	if p.i == p.n {
		if err := p.page(); err != nil || p.n == 0 {
			return Extent{}, false, err
		}
	}

	o := fiemapHeader + p.i*fiemapExtent
	p.i++
	return Extent{
		Logical:  int64(*p.u64(o)),
		Physical: int64(*p.u64(o + 8)),
		Length:   int64(*p.u64(o + 16)),
		Flags:    Flags(*p.u32(o + 40)),
	}, true, nil
}

// page reads the next page of the map; n is 0 after the last.
func (p *pager) page() error {
	p.n, p.i = 0, 0
	for !p.done {
		clear(p.buf[:fiemapHeader])
		*p.u64(0) = p.start
		*p.u64(8) = maxFileBytes - p.start
		if p.sync {
			*p.u32(16) = fiemapSync
		}

		*p.u32(24) = pageExtents
		_, _, e := unix.Syscall(unix.SYS_IOCTL, p.f.Fd(), fsIocFIEMAP, uintptr(unsafe.Pointer(&p.buf[0])))
		if e == unix.EINTR {
			continue
		}
		if e != 0 {
			return fmt.Errorf("FIEMAP: %w", e)
		}

		p.sync = false // once is enough
		n := int(*p.u32(20))
		if n == 0 {
			p.done = true
			return nil
		}

		last := fiemapHeader + (n-1)*fiemapExtent
		end := *p.u64(last) + *p.u64(last + 16)
		p.done = Flags(*p.u32(last + 40))&Last != 0
		if end <= p.start && !p.done {
			return fmt.Errorf("FIEMAP: the filesystem returned the same range again at byte %d", p.start)
		}

		p.n, p.start = n, end
		return nil
	}

	return nil
}

// Usage is the space that one file takes, in bytes.
type Usage struct {
	Exclusive int64 // used by this file only
	Shared    int64 // shared with other files, by reflinks or snapshots
	Extents   int64
}

// Add adds v to u.
func (u *Usage) Add(v Usage) {
	u.Exclusive += v.Exclusive
	u.Shared += v.Shared
	u.Extents += v.Extents
}

// Measure adds up the extents of f. With sync, it writes dirty data first, so that it
// counts. Inline data in metadata counts as exclusive.
func Measure(f *os.File, sync bool) (Usage, error) {
	var u Usage
	err := Scan(f, sync, func(x Extent) error {
		u.Extents++
		if x.Flags&Shared != 0 {
			u.Shared += x.Length
		} else {
			u.Exclusive += x.Length
		}
		return nil
	})
	return u, err
}
