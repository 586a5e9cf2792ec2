package kernel

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// blkZName is BLKZNAME, _IOR(0x12, 125, char[256]) of OpenZFS's
// include/os/linux/kernel/linux/blkdev_compat.h: the name of a zvol.
const blkZName = 0x8100127d

// ZvolName returns the name of the zvol whose block device dev is. ENOTTY or EINVAL: dev is not
// the device of a zvol.
func ZvolName(dev *os.File) (string, error) {
	var name [256]byte
	if err := ioctl(dev, "BLKZNAME", blkZName, unsafe.Pointer(&name)); err != nil {
		return "", err
	}
	return unix.ByteSliceToString(name[:]), nil
}
