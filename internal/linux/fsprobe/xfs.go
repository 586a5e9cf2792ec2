package fsprobe

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
)

// Each allocation group of XFS begins with a superblock, the first one at byte 0;
// see fs/xfs/libxfs/xfs_format.h. Everything except the checksum is big endian.
const (
	xfsMagic      = 0x58465342 // "XFSB"
	xfsBytes      = 512        // the smallest sector
	xfsMinSector  = 512
	xfsMaxSector  = 32 << 10
	xfsMinBlock   = 512
	xfsMaxBlock   = 64 << 10
	xfsMinInode   = 256
	xfsMaxInode   = 2048
	xfsMinAGBytes = 16 << 20
	xfsZoned      = 1 << 9 // incompatible feature: the realtime section may be in the same image
)

// xfsSuper is a superblock of XFS, at least as long as its sector.
type xfsSuper []byte

func (s xfsSuper) u16(off int) uint16 { return binary.BigEndian.Uint16(s[off:]) }
func (s xfsSuper) u32(off int) uint32 { return binary.BigEndian.Uint32(s[off:]) }
func (s xfsSuper) u64(off int) uint64 { return binary.BigEndian.Uint64(s[off:]) }

func (s xfsSuper) version() uint16 { return s.u16(100) & 0xf }

// probeXFS interprets the first superblock of an image, with which b begins.
func probeXFS(b []byte) Result {
	res := probeAnyXFS(b)
	// When mkfs is done, it clears this flag, but only in the first superblock.
	if res.Type != "" && res.Damage == "" && b[126] != 0 {
		res.Damage, res.Bytes = "its superblock says that mkfs.xfs or xfs_copy was interrupted while making it", 0
	}
	return res
}

// probeAnyXFS interprets the superblock of any allocation group, with which b begins.
func probeAnyXFS(b []byte) Result {
	if len(b) < xfsBytes {
		return Result{}
	}

	s := xfsSuper(b)
	if s.u32(0) != xfsMagic {
		return Result{}
	}

	res := Result{Type: "xfs", SectorBytes: uint32(s.u16(102)), Damage: s.damage()}
	if !powerOfTwo(res.SectorBytes, xfsMinSector, xfsMaxSector) {
		res.SectorBytes = xfsMinSector
	}
	if res.Damage == "" {
		res.Bytes = int64(s.u32(4)) * int64(s.u64(8))
	}

	switch {
	case s.u64(48) == 0:
		res.Elsewhere = "log"
	case s.u64(16) != 0 && (s.version() < 5 || s.u32(216)&xfsZoned == 0):
		res.Elsewhere = "realtime section"
	}

	return res
}

// damage describes what is wrong with a superblock, by the rules with which the kernel
// refuses to mount it. It returns "" for a valid one.
func (s xfsSuper) damage() string {
	block, sector, inode := s.u32(4), uint32(s.u16(102)), uint32(s.u16(104))
	switch {
	case !powerOfTwo(sector, xfsMinSector, xfsMaxSector) || s[121] > 31 || 1<<s[121] != sector:
		return fmt.Sprintf("its superblock has a wrong size of sectors, %d bytes", sector)
	case len(s) < int(sector):
		return "it ends within the superblock"
	case s.version() >= 5 && !s.checksumOK(int(sector)):
		return "the checksum of its superblock is wrong"
	case s.version() < 4 || s.version() > 5:
		return fmt.Sprintf("its superblock has an unknown version, %d", s.version())
	case !powerOfTwo(block, xfsMinBlock, xfsMaxBlock) || s[120] > 31 || 1<<s[120] != block:
		return fmt.Sprintf("its superblock has a wrong size of blocks, %d bytes", block)
	case !powerOfTwo(inode, xfsMinInode, xfsMaxInode):
		return fmt.Sprintf("its superblock has a wrong size of inodes, %d bytes", inode)
	}

	blocks, groupBlocks, groups := s.u64(8), uint64(s.u32(84)), uint64(s.u32(88))
	switch {
	case blocks == 0 || blocks > maxBytes/uint64(block):
		return fmt.Sprintf("its superblock counts %d blocks", blocks)
	case groups == 0 || groupBlocks == 0 || blocks > groups*groupBlocks || blocks <= (groups-1)*groupBlocks:
		return fmt.Sprintf("its superblock counts %d blocks in %d groups of %d", blocks, groups, groupBlocks)
	}

	return ""
}

func (s xfsSuper) checksumOK(sector int) bool {
	const at = 224
	sum := crc32.Update(0, castagnoli, s[:at])
	sum = crc32.Update(sum, castagnoli, make([]byte, 4))
	sum = crc32.Update(sum, castagnoli, s[at+4:sector])
	return binary.LittleEndian.Uint32(s[at:]) == sum
}

// backupXFS looks for the superblock of an allocation group after the first.
// Their positions follow from the size of the image and the number of groups:
// mkfs makes 4, or more in large filesystems and on striped disks.
func backupXFS(r io.ReaderAt, size int64) (Result, error) {
	for _, block := range []int64{4096, 1024} {
		for groups := int64(2); groups <= 64 && size/groups >= xfsMinAGBytes; groups++ {
			off := (size/block + groups - 1) / groups * block
			b, err := readAt(r, off, superblockBytes)
			if err != nil {
				return Result{}, err
			}
			if res := probeAnyXFS(b); res.Type != "" && res.Damage == "" {
				return lost(res, off), nil
			}
		}
	}

	return Result{}, nil
}
