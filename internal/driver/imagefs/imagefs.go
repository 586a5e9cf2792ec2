// Package imagefs makes the filesystems inside images and block devices: it has
// the options for mkfs and for mounting them.
package imagefs

import (
	"context"
	"strconv"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/linux/run"
)

// SectorBytes is the sector size that filesystems are made for. It is the logical
// sector size of the loop devices under images: with 4096, direct I/O through
// them stays aligned on every disk, and XFS does not write its log in pieces of
// 512 bytes, which the filesystem below would have to serialise.
const SectorBytes = 4096

// Smallest sizes of images that the filesystems accept.
const (
	minExt4Bytes = 16 << 20
	minXFSBytes  = 300 << 20
	minRawBytes  = SectorBytes
)

// MinBytes returns the size of the smallest image that can hold fs, in bytes.
func MinBytes(fs driver.FS) int64 {
	switch fs {
	case driver.Ext4:
		return minExt4Bytes
	case driver.XFS:
		return minXFSBytes
	}
	return minRawBytes
}

// CheckSize refuses an image that is too small for its filesystem: Invalid.
func CheckSize(id driver.Identity) error {
	if least := MinBytes(id.FS); id.SizeBytes < least {
		return errs.New(errs.Invalid, "create", id.Name, "%d bytes is too small for %s: at least %d", id.SizeBytes, id.FS,
			least).
			WithHint("use a larger %s", errs.Param("size"))
	}
	return nil
}

// Make makes a filesystem in the image or on the block device at path, which is
// size bytes long and reads as zeros. None makes nothing.
func Make(ctx context.Context, kind driver.FS, path string, size int64) error {
	var err error
	switch kind {
	case driver.Ext4:
		// The image reads as zeros, so nothing has to be zeroed, neither now nor
		// later by the kernel (mount option noinit_itable). A journal larger than
		// 64 MiB would only make clones larger: a clone that fills it uses that
		// much space of its own.
		args := []string{"-q", "-F", "-b", "4096", "-m", "0",
			"-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard"}
		if size >= 2<<30 {
			args = append(args, "-J", "size=64")
		}
		_, err = run.Program(ctx, "mkfs.ext4", append(args, path)...)
	case driver.XFS:
		_, err = run.Program(ctx, "mkfs.xfs", "-q", "-f", "-K", "-m", "reflink=1", "-s", "size="+strconv.Itoa(SectorBytes),
			path)
	}

	return err
}

// MountOptions returns the mount options that a clone's filesystem needs.
func MountOptions(kind driver.FS) []string {
	switch kind {
	case driver.Ext4:
		// The options stored in an image may come from anybody: errors=panic would crash the host.
		return []string{"noinit_itable", "errors=remount-ro"}
	case driver.XFS:
		return []string{"nouuid"} // clones carry the UUID of their origin
	}
	return nil
}

// NoSyncOptions returns further mount options for a volume that does not survive a reboot: its filesystem then passes
// no flush to its block device, and commits rarely on its own. nil: it has no such options. It must keep its journal,
// because copies of a mounted volume replay it.
//
// XFS flushes whatever its mount options. Only its block device could drop the flushes, but a loop device keeps that
// setting after it is detached: it would also drop those of the next file that any program attaches to it.
func NoSyncOptions(kind driver.FS) []string {
	if kind == driver.Ext4 {
		return []string{"barrier=0", "commit=300"}
	}
	return nil
}
