package treediff

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// This file knows as much of the on-disk layout of ext4 as is needed to find inode tables
// (Documentation/filesystems/ext4 of the kernel). Anybody may have written the image, so no number
// in it is trusted: an image with offsets outside of it, or with unknown features, is rejected.

const (
	ext4Magic        = 0xef53
	ext4SuperOffset  = 1024
	ext4SuperBytes   = 1024
	ext4MaxGroups    = 1 << 21
	ext4RootInode    = 2
	ext4EAInodeFlag  = 0x200000
	ext4InodeUninit  = 0x1
	ext4MinInodeSize = 128

	// compatible features
	ext4SparseSuper2 = 0x200
	// incompatible ones
	ext4Filetype = 0x2
	ext4MetaBG   = 0x10
	ext4Extents  = 0x40
	ext464Bit    = 0x80
	ext4FlexBG   = 0x200
	ext4EAInode  = 0x400
	ext4CsumSeed = 0x2000
	ext4LargeDir = 0x4000
	ext4Inline   = 0x8000
	ext4Known    = ext4Filetype | ext4MetaBG | ext4Extents | ext464Bit | ext4FlexBG | ext4EAInode | ext4CsumSeed |
		ext4LargeDir | ext4Inline
	// read-only compatible features
	ext4SparseSuper   = 0x1
	ext4GdtCsum       = 0x10
	ext4Bigalloc      = 0x200
	ext4MetadataCsum  = 0x400
	ext4OrphanPresent = 0x10000
)

// ext4Layout describes where the inode tables of an ext4 are.
type ext4Layout struct {
	uuid                         [16]byte
	compat, incompat, roCompat   uint32
	inodes, inodesPerGroup       uint32
	inodeSize, firstInode        uint32
	orphanFile                   uint32
	blockSize                    int64
	blocks, firstBlock, perGroup uint64
	descSize                     int64
	groups                       []ext4Group
}

type ext4Group struct {
	table int64  // offset in the image, bytes
	used  uint32 // inodes at its beginning that may be in use
}

// readExt4 reads the superblock and the group descriptors. It returns nil if the image is not a cleanly
// unmounted ext4 that this code supports.
func readExt4(r io.ReaderAt, size int64) (*ext4Layout, error) {
	// Read the superblock.
	var sb [ext4SuperBytes]byte
	if ok, err := readAt(r, sb[:], ext4SuperOffset, size); !ok {
		return nil, err
	}

	u16 := func(off int) uint32 { return uint32(binary.LittleEndian.Uint16(sb[off:])) }
	u32 := func(off int) uint32 { return binary.LittleEndian.Uint32(sb[off:]) }
	l := &ext4Layout{
		compat: u32(0x5c), incompat: u32(0x60), roCompat: u32(0x64),
		inodes: u32(0), inodesPerGroup: u32(0x28), inodeSize: u16(0x58), firstInode: u32(0x54), orphanFile: u32(0x280),
		blocks: uint64(u32(4)), firstBlock: uint64(u32(0x14)), perGroup: uint64(u32(0x20)), descSize: 32,
	}

	// Reject what is not supported or invalid.
	copy(l.uuid[:], sb[0x68:])
	const revDynamic = 1
	switch {
	case u16(0x38) != ext4Magic, u32(0x4c) < revDynamic, u32(0x18) > 6:
		return nil, nil
	case l.incompat&^ext4Known != 0: // needs_recovery is among these
		return nil, nil
	case l.roCompat&(ext4Bigalloc|ext4OrphanPresent) != 0, l.compat&ext4SparseSuper2 != 0:
		return nil, nil
	case u32(0xe8) != 0: // files to be deleted at the next mount
		return nil, nil
	}

	l.blockSize = 1024 << u32(0x18)
	if l.incompat&ext464Bit != 0 {
		l.blocks |= uint64(u32(0x150)) << 32
		l.descSize = int64(u16(0xfe))
		if l.descSize < 64 || l.descSize > l.blockSize || l.descSize&(l.descSize-1) != 0 {
			return nil, nil
		}
	}

	switch {
	case l.blocks == 0 || l.blocks > uint64(size)/uint64(l.blockSize), l.firstBlock >= l.blocks, l.perGroup == 0,
		l.inodesPerGroup == 0:
		return nil, nil
	case l.inodeSize < ext4MinInodeSize, int64(l.inodeSize) > l.blockSize, l.inodeSize&(l.inodeSize-1) != 0:
		return nil, nil
	case l.firstInode <= ext4RootInode:
		return nil, nil
	}

	n := (l.blocks - l.firstBlock + l.perGroup - 1) / l.perGroup
	if n > ext4MaxGroups || uint64(l.inodes) != n*uint64(l.inodesPerGroup) {
		return nil, nil
	}

	// Read the group descriptors.
	ok, err := l.readGroups(r, size, int(n), int64(u32(0x104)))
	if !ok {
		return nil, err
	}

	return l, nil
}

// readAt fills p from off. ok is false if that is outside the image.
func readAt(r io.ReaderAt, p []byte, off, size int64) (ok bool, err error) {
	if off < 0 || off > size-int64(len(p)) {
		return false, nil
	}
	n, err := r.ReadAt(p, off)
	if n == len(p) {
		return true, nil
	}
	if errors.Is(err, io.EOF) {
		return false, nil
	}
	return false, err
}

// readGroups reads the descriptors, block by block. The blocks follow the superblock or, from number firstMeta
// on, are in the groups that they describe. ok is false if the image is invalid.
func (l *ext4Layout) readGroups(r io.ReaderAt, size int64, n int, firstMeta int64) (ok bool, err error) {
	perBlock := int(l.blockSize / l.descSize)
	tableBytes := int64(l.inodesPerGroup) * int64(l.inodeSize)
	buf := make([]byte, l.blockSize)
	l.groups = make([]ext4Group, 0, min(n, 1<<16))
	for first := 0; first < n; first += perBlock {
		index := int64(first / perBlock)
		block := int64(l.firstBlock) + 1 + index
		if l.incompat&ext4MetaBG != 0 && index >= firstMeta {
			block = int64(l.firstBlock) + int64(first)*int64(l.perGroup)
			if l.hasSuper(first) {
				block++
			}
		}

		if block > size/l.blockSize {
			return false, nil
		}

		if ok, err := readAt(r, buf, block*l.blockSize, size); !ok {
			return false, err
		}

		for i := first; i < min(n, first+perBlock); i++ {
			d := buf[int64(i-first)*l.descSize:]
			table := uint64(binary.LittleEndian.Uint32(d[0x8:]))
			unused := uint32(binary.LittleEndian.Uint16(d[0x1c:]))
			if l.descSize >= 64 {
				table |= uint64(binary.LittleEndian.Uint32(d[0x28:])) << 32
				unused |= uint32(binary.LittleEndian.Uint16(d[0x32:])) << 16
			}

			g := ext4Group{used: l.inodesPerGroup}

			// The marks of unused inodes are valid only with checksums.
			if l.roCompat&(ext4GdtCsum|ext4MetadataCsum) != 0 {
				if binary.LittleEndian.Uint16(d[0x12:])&ext4InodeUninit != 0 {
					g.used = 0
				} else if unused > l.inodesPerGroup {
					return false, nil
				} else {
					g.used -= unused
				}
			}

			if table >= l.blocks || int64(table)*l.blockSize > size-tableBytes {
				return false, nil
			}

			g.table = int64(table) * l.blockSize
			l.groups = append(l.groups, g)
		}
	}

	return true, nil
}

// hasSuper reports whether a group begins with a copy of the superblock.
func (l *ext4Layout) hasSuper(group int) bool {
	if group <= 1 || l.roCompat&ext4SparseSuper == 0 {
		return true
	}

	for _, base := range []int{3, 5, 7} {
		n := base
		for n < group {
			n *= base
		}
		if n == group {
			return true
		}
	}

	return false
}

// sameAs reports whether both have the same inodes in the same places.
func (l *ext4Layout) sameAs(o *ext4Layout) bool {
	return l.uuid == o.uuid && l.incompat == o.incompat && l.inodes == o.inodes && l.inodesPerGroup == o.inodesPerGroup &&
		l.inodeSize == o.inodeSize && l.firstInode == o.firstInode && l.orphanFile == o.orphanFile &&
		l.blockSize == o.blockSize && l.blocks == o.blocks &&
		slices.EqualFunc(l.groups, o.groups, func(x, y ext4Group) bool { return x.table == y.table })
}

// changed calls fn for each inode that differs, other than in its time of access, and for
// each that was written in both images and was changed at or after racy, unless that is zero.
func (l *ext4Layout) changed(
	ctx context.Context, o *ext4Layout, a, b io.ReaderAt, d *ImageDelta, racy time.Time, fn func(ino uint64, links Links),
) error {
	size := int64(l.inodeSize)
	x, y := make([]byte, chunkSize), make([]byte, chunkSize)
	for i, g := range l.groups {
		if err := ctx.Err(); err != nil {
			return err
		}

		first := uint64(i) * uint64(l.inodesPerGroup)
		end := g.table + int64(max(g.used, o.groups[i].used))*size
		err := d.within(g.table, end, func(from, to int64) error {
			// Whole inodes; tables begin at a block, and blocks hold whole ones.
			from = g.table + (from-g.table)/size*size
			to = min(end, g.table+(to-g.table+size-1)/size*size)
			for from < to {
				n := min(to-from, chunkSize)
				if err := readTables(a, b, x[:n], y[:n], from); err != nil {
					return err
				}
				for at := int64(0); at < n; at += size {
					index := uint64((from - g.table + at) / size)
					l.inode(first+index+1, index < uint64(g.used), index < uint64(o.groups[i].used), x[at:at+size], y[at:at+size],
						racy, fn)
				}
				from += n
			}

			return nil
		})
		if err != nil {
			return err
		}
	}

	return nil
}

func readTables(a, b io.ReaderAt, x, y []byte, off int64) error {
	if _, err := a.ReadAt(x, off); err != nil {
		return err
	}
	_, err := b.ReadAt(y, off)
	return err
}

// inode compares one raw inode. inA and inB say whether it is among the used inodes of its table.
func (l *ext4Layout) inode(ino uint64, inA, inB bool, x, y []byte, racy time.Time, fn func(uint64, Links)) {
	if ino < uint64(l.firstInode) && ino != ext4RootInode || ino == uint64(l.orphanFile) {
		return // the journal and other inodes that are in no directory
	}

	if inA && inB {
		hide(x)
		hide(y)
		if bytes.Equal(x, y) && (racy.IsZero() || ext4Ctime(x).Before(racy)) {
			return
		}
	}

	var links Links
	if inA {
		links.A = ext4Links(x)
	}
	if inB {
		links.B = ext4Links(y)
	}
	if links != (Links{}) {
		fn(ino, links)
	}
}

// hide clears the access time and the checksum, which depends on it.
func hide(inode []byte) {
	clear(inode[0x8:0xc])
	clear(inode[0x7c:0x7e])
	if len(inode) > ext4MinInodeSize {
		extra := 0x80 + int(binary.LittleEndian.Uint16(inode[0x80:]))
		if extra >= 0x84 {
			clear(inode[0x82:0x84])
		}
		if extra >= 0x90 && len(inode) >= 0x90 {
			clear(inode[0x8c:0x90])
		}
	}
}

// ext4Ctime returns the latest possible change time of an inode.
func ext4Ctime(inode []byte) time.Time {
	sec := int64(int32(binary.LittleEndian.Uint32(inode[0xc:])))
	if len(inode) > ext4MinInodeSize && binary.LittleEndian.Uint16(inode[0x80:]) >= 8 {
		extra := binary.LittleEndian.Uint32(inode[0x84:]) // 2 bits of seconds, 30 of nanoseconds
		return time.Unix(sec+int64(extra&3)<<32, int64(extra>>2))
	}
	return time.Unix(sec, 1e9-1)
}

// ext4Links returns the number of names of an inode, 1 for a directory.
func ext4Links(inode []byte) int {
	mode, links := binary.LittleEndian.Uint16(inode), binary.LittleEndian.Uint16(inode[0x1a:])
	switch {
	case mode == 0, links == 0, binary.LittleEndian.Uint32(inode[0x20:])&ext4EAInodeFlag != 0:
		return 0
	case mode&unix.S_IFMT == unix.S_IFDIR:
		return 1
	}
	return int(links)
}
