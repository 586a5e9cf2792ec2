package fsprobe

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
)

// The superblock of ext2, ext3 and ext4 is at byte 1,024; see
// Documentation/filesystems/ext4 and fs/ext4/ext4.h.
const (
	extOffset = 1024
	extBytes  = 1024
	extMagic  = 0xEF53

	extCompatJournal    = 0x4
	extIncompatReplay   = 0x4 // the journal has to be replayed
	extIncompatDevice   = 0x8 // an external journal, not a filesystem
	extIncompat64       = 0x80
	extROGroupChecksum  = 0x10
	extROBigalloc       = 0x200
	extROChecksum       = 0x400
	extROOrphans        = 0x10000
	extChecksumCRC32C   = 1
	extMaxBlockShift    = 6 // 64 KiB
	extClustersPerByte  = 8 // a bitmap is one block
	extOldInodeBytes    = 128
	extRevisionWithSize = 1
)

// Default mount options in a superblock: how the journal treats data.
const (
	extJournalModes     = 0x60
	extJournalWriteback = 0x60 // data is not ordered, so after a crash a file may contain old data of the disk
)

// logged reports whether mounting makes the filesystem consistent after a power loss: it has a journal, and writes
// data before the metadata that refers to it.
func (s extSuper) logged() bool {
	return s.u32(92)&extCompatJournal != 0 && s.u32(256)&extJournalModes != extJournalWriteback
}

// extSuper is a superblock of ext2, ext3 or ext4.
type extSuper []byte

func (s extSuper) u16(off int) uint16 { return binary.LittleEndian.Uint16(s[off:]) }
func (s extSuper) u32(off int) uint32 { return binary.LittleEndian.Uint32(s[off:]) }

func (s extSuper) incompat() uint32 { return s.u32(96) }
func (s extSuper) roCompat() uint32 { return s.u32(100) }
func (s extSuper) blockBytes() int64 {
	return int64(1024) << s.u32(24)
}

func (s extSuper) blocks() uint64 {
	n := uint64(s.u32(4))
	if s.incompat()&extIncompat64 != 0 {
		n |= uint64(s.u32(336)) << 32
	}
	return n
}

// probeExt interprets a superblock at byte off of b.
func probeExt(b []byte, off int) Result {
	if len(b) < off+extBytes {
		return Result{}
	}

	s := extSuper(b[off : off+extBytes])
	if s.u16(56) != extMagic || s.incompat()&extIncompatDevice != 0 || s.u32(24) > extMaxBlockShift {
		return Result{}
	}

	res := Result{
		Type:        "ext4",
		SectorBytes: uint32(min(s.blockBytes(), 4096)),
		Damage:      s.damage(),
		Dirty:       s.incompat()&extIncompatReplay != 0 || s.roCompat()&extROOrphans != 0 || s.u32(232) != 0,
	}

	if res.Damage == "" {
		res.Bytes = s.blockBytes() * int64(s.blocks())
	}
	if s.u32(92)&extCompatJournal != 0 && s.u32(224) == 0 {
		res.Elsewhere = "journal"
	}

	return res
}

// damage describes what is wrong with a superblock, by the rules with which the kernel
// refuses to mount it. It returns "" for a valid one.
func (s extSuper) damage() string {
	if s.roCompat()&extROChecksum != 0 {
		// The kernel's CRC is not inverted at the end, unlike Go's.
		if s[373] != extChecksumCRC32C || s.u32(1020) != ^crc32.Checksum(s[:1020], castagnoli) {
			return "the checksum of its superblock is wrong"
		}
	}

	var (
		block     = s.blockBytes()
		first     = uint64(s.u32(20))
		perGroup  = uint64(s.u32(32))
		inodes    = uint64(s.u32(40))
		inodeSize = uint32(s.u16(88))
	)
	if s.u32(76) < extRevisionWithSize {
		inodeSize = extOldInodeBytes
	}

	switch {
	case s.blocks() == 0 || s.blocks() > uint64(maxBytes/block):
		return fmt.Sprintf("its superblock counts %d blocks", s.blocks())
	case first >= s.blocks() || block > 1024 && first != 0 || first > 1:
		return fmt.Sprintf("its superblock has a wrong first block, %d", first)
	case !powerOfTwo(inodeSize, extOldInodeBytes, uint32(block)):
		return fmt.Sprintf("its superblock has a wrong size of inodes, %d bytes", inodeSize)
	case perGroup == 0 || s.roCompat()&extROBigalloc == 0 && perGroup > uint64(block)*extClustersPerByte:
		return fmt.Sprintf("its superblock has a wrong number of blocks in a group, %d", perGroup)
	case inodes == 0 || inodes > uint64(block)*extClustersPerByte:
		return fmt.Sprintf("its superblock has a wrong number of inodes in a group, %d", inodes)
	}

	groups := (s.blocks() - first + perGroup - 1) / perGroup
	if groups*inodes != uint64(s.u32(0)) {
		return fmt.Sprintf("its superblock counts %d inodes instead of %d", s.u32(0), groups*inodes)
	}

	return ""
}

// backupExt looks for the first backup superblock, which is in block group 1.
// By default, a group has as many blocks as a block has bits.
func backupExt(r io.ReaderAt) (Result, error) {
	for shift := range extMaxBlockShift + 1 {
		block := int64(1024) << shift
		off := block * block * 8
		if shift == 0 {
			off += block // group 0 begins with block 1
		}
		b, err := readAt(r, off, extBytes)
		if err != nil {
			return Result{}, err
		}
		res := probeExt(b, 0)
		if s := extSuper(b); res.Type != "" && res.Damage == "" && s.blockBytes() == block && s.u16(90) == 1 {
			return lost(res, off), nil
		}
	}

	return Result{}, nil
}
