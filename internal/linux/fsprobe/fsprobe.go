// Package fsprobe identifies the content of a block image or file by its first bytes and
// its superblocks, and validates superblocks of ext4 and XFS.
package fsprobe

import (
	"errors"
	"hash/crc32"
	"io"
)

// Result of Probe.
type Result struct {
	Type        string // "ext4", "xfs", or "" for anything else
	SectorBytes uint32 // the largest logical sector size of a device from which it can be mounted
	Bytes       int64  // size according to the superblock; 0 if that is damaged

	Damage    string // what is wrong with the superblock, as a sentence; "" if nothing
	Backup    int64  // with Damage: the superblock is missing, and a valid copy of it is at this byte
	Elsewhere string // part of the filesystem that is on another device: "journal", "log", "realtime section"
	Dirty     bool   // ext4 only: a mount has to process its journal or its list of orphaned files
}

// maxBytes is the largest plausible size in bytes: that of the largest file.
const maxBytes = 1<<63 - 1

// superblockBytes is how much of an image Probe reads: the largest sector of XFS.
const superblockBytes = 32 << 10

// Probe reads the superblock of an image of size bytes. The Type is "" if the image is too short
// or contains something else. ext2 and ext3 count as ext4,
// whose driver mounts them. If the superblock is missing, Identify finds no other content,
// and a backup superblock is where mkfs puts one, the result is a
// damaged filesystem of that type.
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

// Logged reports whether the filesystem in an image has a log that, on the first mount after a
// power loss, makes it consistent and restores all synced data: XFS, and ext4
// with a journal that is not in writeback mode. It returns false for other content and
// damaged superblocks. The image may be in use.
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

// lost returns the result for an image whose first superblock is missing. res is that of the
// backup at byte off.
func lost(res Result, off int64) Result {
	return Result{Type: res.Type, SectorBytes: res.SectorBytes, Damage: "its superblock is gone", Backup: off}
}

// readAt reads up to n bytes at off, fewer only at the end of r.
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
