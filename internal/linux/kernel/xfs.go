package kernel

import (
	"encoding/binary"
	"fmt"
	"os"
	"unsafe"
)

// xfsGeomReflink is XFS_FSOP_GEOM_FLAGS_REFLINK.
const xfsGeomReflink = 1 << 20

// XFSReflinks reports whether files on the mounted XFS that dir is on may share
// blocks: it was made with reflink=1. It needs no privileges. ENOTTY elsewhere.
func XFSReflinks(dir *os.File) (bool, error) {
	var geom [256]byte // struct xfs_fsop_geom: see GrowXFS
	if err := ioctl(dir, xfsIocFSGEOM, unsafe.Pointer(&geom[0])); err != nil {
		return false, fmt.Errorf("XFS_IOC_FSGEOMETRY: %w", err)
	}
	const flagsAt = 92
	return binary.NativeEndian.Uint32(geom[flagsAt:])&xfsGeomReflink != 0, nil
}
