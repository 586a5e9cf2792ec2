// Package fsprobe tells what a block image or file holds, by its first bytes and
// its superblocks, and whether the superblock of ext4 and XFS can be right.
package fsprobe

import (
	"errors"
	"hash/crc32"
	"io"
)

// Result of Probe.
type Result struct {
	Type        string // "ext4", "xfs", or "" for anything else
	SectorBytes uint32 // the largest logical sector size of a device that it can be mounted from
	Bytes       int64  // size that the filesystem says it has; 0 if its superblock is damaged

	Damage    string // what is wrong with the superblock, as a sentence; "" if nothing
	Backup    int64  // with Damage: the superblock is gone, and a good copy of it is at this byte
	Elsewhere string // what of the filesystem is on another device: "journal", "log", "realtime section"
	Dirty     bool   // of ext4: its journal, or list of orphaned files, has to be processed by a mount
}

// maxBytes is the largest size in bytes that is believed: that of the largest file.
const maxBytes = 1<<63 - 1

// superblockBytes is how much of an image Probe reads: the largest sector of XFS.
const superblockBytes = 32 << 10

// Probe reads the superblock of an image of size bytes. An image too short for
// one, or with something else in it, has Type "". ext2 and ext3 count as ext4,
// whose driver mounts them. If the superblock is gone, but Identify finds nothing
// else there and a backup superblock is where mkfs puts one, the image is a
// damaged one of that type.
func Probe(r io.ReaderAt, size int64) (Result, error) {
	b, err := readAt(r, 0, superblockBytes)
	if err != nil {
		return Result{}, err
	}

	if res := probeXFS(b); res.Type != "" {
		return res, nil
	}

	if res := probeExt(b, extOffset); res.Type != "" {
		return res, nil
	}

	c, err := Identify(r, size)
	if err != nil || c.Class != Unknown {
		return Result{}, err
	}

	res, err := backupExt(r)
	if err != nil || res.Type != "" {
		return res, err
	}

	return backupXFS(r, size)
}

// Logged reports whether the filesystem in an image has a log that makes it consistent when
// it is mounted after a power loss, with what was synced before in it: XFS, and ext4
// with a journal that is not in writeback mode. Anything else, damaged superblocks too, has none. The image
// may be in use.
func Logged(r io.ReaderAt) (bool, error) {
	b, err := readAt(r, 0, superblockBytes)
	if err != nil {
		return false, err
	}
	if res := probeXFS(b); res.Type != "" {
		return res.Damage == "", nil
	}
	if res := probeExt(b, extOffset); res.Type == "" || res.Damage != "" {
		return false, nil
	}
	return extSuper(b[extOffset : extOffset+extBytes]).logged(), nil
}

// lost is the result for an image whose first superblock is gone, given the
// backup that was found at byte off.
func lost(res Result, off int64) Result {
	return Result{Type: res.Type, SectorBytes: res.SectorBytes, Damage: "its superblock is gone", Backup: off}
}

// readAt reads up to n bytes at off. A short answer means that r ends there.
func readAt(r io.ReaderAt, off int64, n int) ([]byte, error) {
	b := make([]byte, n)
	m, err := r.ReadAt(b, off)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return b[:m], err
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// powerOfTwo reports whether n is one of min, 2*min, ... max.
func powerOfTwo(n, min, max uint32) bool { return n >= min && n <= max && n&(n-1) == 0 }
