package kernel

import (
	"encoding/binary"
	"os"
	"unsafe"
)

// xfsGeomReflink is XFS_FSOP_GEOM_FLAGS_REFLINK.
const xfsGeomReflink = 1 << 20

// xfsGeometry returns the struct xfs_fsop_geom of the mounted XFS that dir is on: blocksize u32, rtextsize,
// agblocks, agcount, logblocks, sectsize, inodesize, imaxpct, datablocks u64 and more. ENOTTY on other filesystems.
func xfsGeometry(dir *os.File) (geom [256]byte, err error) {
	if err := ioctl(dir, "XFS_IOC_FSGEOMETRY", xfsIocFSGEOM, unsafe.Pointer(&geom[0])); err != nil {
		return geom, err
	}
	return geom, nil
}

// XFSReflinks reports whether files on the mounted XFS that dir is on can share
// blocks, because it was made with reflink=1. It needs no privileges. ENOTTY on other filesystems.
func XFSReflinks(dir *os.File) (bool, error) {
	geom, err := xfsGeometry(dir)
	if err != nil {
		return false, err
	}
	const flagsAt = 92
	return binary.NativeEndian.Uint32(geom[flagsAt:])&xfsGeomReflink != 0, nil
}
