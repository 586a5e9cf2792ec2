// Package fsprobe tells what filesystem a block image holds, by its superblock.
package fsprobe

import (
	"encoding/binary"
	"io"
)

// Result of Probe.
type Result struct {
	Type        string // "ext4", "xfs", or "" for anything else
	SectorBytes uint32 // the largest logical sector size of a device that it can be mounted from
	Bytes       int64  // size that the filesystem says it has
}

// Superblock fields: ext4 from Documentation/filesystems/ext4 (super block at
// byte 1,024), XFS from fs/xfs/libxfs/xfs_format.h (big endian, at byte 0).
const (
	extMagic           = 0xEF53
	extIncompatJournal = 0x0008     // an external journal device, not a filesystem
	xfsMagic           = 0x58465342 // "XFSB"
)

// Probe reads the superblock of an image. An image too short for one, or with
// something else in it, has Type "". ext2 and ext3 count as ext4, whose driver
// mounts them.
func Probe(r io.ReaderAt) (Result, error) {
	var b [4096]byte
	n, err := r.ReadAt(b[:], 0)
	if err != nil && err != io.EOF {
		return Result{}, err
	}
	if n < 2048 {
		return Result{}, nil
	}
	if binary.BigEndian.Uint32(b[0:]) == xfsMagic {
		block := int64(binary.BigEndian.Uint32(b[4:]))
		return Result{
			Type:        "xfs",
			SectorBytes: uint32(binary.BigEndian.Uint16(b[102:])),
			Bytes:       block * int64(binary.BigEndian.Uint64(b[8:])),
		}, nil
	}
	sb := b[1024:]
	if binary.LittleEndian.Uint16(sb[56:]) == extMagic && binary.LittleEndian.Uint32(sb[96:])&extIncompatJournal == 0 {
		shift := binary.LittleEndian.Uint32(sb[24:])
		if shift > 6 {
			return Result{}, nil
		}
		block := int64(1024) << shift
		blocks := int64(binary.LittleEndian.Uint32(sb[4:]))
		if binary.LittleEndian.Uint32(sb[96:])&0x80 != 0 { // 64bit
			blocks |= int64(binary.LittleEndian.Uint32(sb[336:])) << 32
		}
		return Result{Type: "ext4", SectorBytes: uint32(min(block, 4096)), Bytes: block * blocks}, nil
	}
	return Result{}, nil
}
