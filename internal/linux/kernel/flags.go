package kernel

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Flags of a file that chattr(1) sets, as FS_IOC_GETFLAGS has them (linux/fs.h).
const (
	FlagCompress       = 0x4
	FlagSync           = 0x8
	FlagImmutable      = 0x10
	FlagAppend         = 0x20
	FlagNoDump         = 0x40
	FlagNoAtime        = 0x80
	FlagEncrypted      = 0x800
	FlagDirSync        = 0x10000
	FlagVerity         = 0x100000
	FlagNoCow          = 0x800000
	FlagProjectInherit = 0x20000000
	FlagCasefold       = 0x40000000
)

// Hints of XFS about extents, in FSXAttr.XFlags.
const (
	XFlagExtentSize        = 0x800
	XFlagExtentSizeInherit = 0x1000
	XFlagCowExtentSize     = 0x10000
)

// FSXAttr is struct fsxattr of linux/fs.h.
type FSXAttr struct {
	XFlags        uint32
	ExtentSize    uint32 // bytes
	Extents       uint32
	Project       uint32
	CowExtentSize uint32 // bytes
	_             [8]byte
}

// GetFlags returns the flags of an open file. ENOTTY or EOPNOTSUPP: the filesystem has no flags.
func GetFlags(fd int) (uint32, error) {
	var flags int32 // the kernel writes 32 bits, although the ioctl number says long
	err := fdIoctl(fd, unix.FS_IOC_GETFLAGS, unsafe.Pointer(&flags))
	return uint32(flags), err
}

// SetFlags replaces the flags of an open file. EPERM: changing "immutable" or "append-only"
// needs CAP_LINUX_IMMUTABLE. EOPNOTSUPP or EINVAL: the filesystem does not support one of the flags.
func SetFlags(fd int, flags uint32) error {
	v := int32(flags)
	return fdIoctl(fd, unix.FS_IOC_SETFLAGS, unsafe.Pointer(&v))
}

// GetFSXAttr returns the project and the hints of an open file. ENOTTY or
// EOPNOTSUPP: the filesystem does not support them.
func GetFSXAttr(fd int) (x FSXAttr, err error) {
	err = fdIoctl(fd, fsIocFSGETXATTR, unsafe.Pointer(&x))
	return x, err
}

// SetFSXAttr replaces the project, the hints, and the flags in XFlags of an open file.
func SetFSXAttr(fd int, x FSXAttr) error {
	return fdIoctl(fd, fsIocFSSETXATTR, unsafe.Pointer(&x))
}

func fdIoctl(fd int, req uintptr, arg unsafe.Pointer) error {
	for {
		_, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), req, uintptr(arg))
		switch e {
		case unix.EINTR:
			continue
		case 0:
			return nil
		}
		return e
	}
}

// Numbers of file_getattr(2) and file_setattr(2), which exist since Linux 6.17. They are the
// same on every architecture that Go supports except MIPS.
const (
	sysFileGetattr = 468
	sysFileSetattr = 469
)

// fileAttr is struct file_attr of linux/fs.h.
type fileAttr struct {
	xflags                                   uint64
	extentSize, extents, project, cowExtents uint32
}

// SpecialProject returns the project of a special file in the directory at: a symbolic link, a
// device, a fifo or a socket, which cannot be opened without side effects. ENOSYS: the kernel is too
// old. EOPNOTSUPP: the filesystem does not support it.
func SpecialProject(at int, name string) (uint32, error) {
	a, err := fileGetattr(at, name)
	return a.project, err
}

// SetSpecialProject sets the project of a special file: see SpecialProject.
func SetSpecialProject(at int, name string, project uint32) error {
	a, err := fileGetattr(at, name)
	if err != nil || a.project == project {
		return err
	}
	a.project = project
	return fileAttrCall(sysFileSetattr, at, name, &a)
}

func fileGetattr(at int, name string) (a fileAttr, err error) {
	err = fileAttrCall(sysFileGetattr, at, name, &a)
	return a, err
}

func fileAttrCall(call uintptr, at int, name string, a *fileAttr) error {
	p, err := unix.BytePtrFromString(name)
	if err != nil {
		return err
	}
	_, _, e := unix.Syscall6(call, uintptr(at), uintptr(unsafe.Pointer(p)), uintptr(unsafe.Pointer(a)),
		unsafe.Sizeof(*a), unix.AT_SYMLINK_NOFOLLOW, 0)
	if e != 0 {
		return e
	}
	return nil
}

// OpenForFlags opens the file or directory name in the directory at ("": at itself) for GetFlags
// and SetFlags. EOPNOTSUPP: it has another type, such as a symbolic link, whose opening may have
// side effects.
func OpenForFlags(at int, name string) (int, error) {
	if name == "" {
		name = "."
	}

	var st unix.Stat_t
	if err := unix.Fstatat(at, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return -1, err
	}

	if kind := st.Mode & unix.S_IFMT; kind != unix.S_IFREG && kind != unix.S_IFDIR {
		return -1, unix.EOPNOTSUPP
	}

	// O_NONBLOCK: if the file has just been replaced by a fifo, opening it does not wait.
	flags := unix.O_RDONLY | unix.O_NOFOLLOW | unix.O_CLOEXEC | unix.O_NONBLOCK
	fd, err := unix.Openat(at, name, flags|unix.O_NOATIME, 0)
	if err == unix.EPERM { // O_NOATIME is for the owner only
		fd, err = unix.Openat(at, name, flags, 0)
	}

	return fd, err
}

// protected are the flags that forbid changing, renaming and removing.
const protected = FlagImmutable | FlagAppend

// Unprotect clears the flags "immutable" and "append-only" of the file or directory name in
// the directory at ("": at itself), and returns the flags that it cleared: 0 if none was set, or if
// they cannot be cleared.
func Unprotect(at int, name string) uint32 {
	fd, err := OpenForFlags(at, name)
	if err != nil {
		return 0
	}
	defer unix.Close(fd)
	return UnprotectFile(fd)
}

// UnprotectFile is Unprotect for an open file or directory.
func UnprotectFile(fd int) uint32 {
	flags, err := GetFlags(fd)
	if err != nil || flags&protected == 0 || SetFlags(fd, flags&^protected) != nil {
		return 0
	}
	return flags & protected
}

// Protect sets flags of an open file that Unprotect has cleared. With 0 it does nothing.
func Protect(fd int, flags uint32) error {
	if flags == 0 {
		return nil
	}
	have, err := GetFlags(fd)
	if err != nil || have&flags == flags {
		return err // ext4 refuses even the flags that an immutable file has
	}
	return SetFlags(fd, have|flags)
}

// SetImmutable sets or clears the flag "immutable" of a file or directory. Not even root can create or
// remove entries of an immutable directory. It reports whether the flag changed.
// False without an error: it was already so, the filesystem has no such flag, or this process
// lacks CAP_LINUX_IMMUTABLE.
func SetImmutable(f *os.File, on bool) (changed bool, err error) {
	defer runtime.KeepAlive(f)
	was, err := GetFlags(int(f.Fd()))
	if err != nil {
		return false, flagsError("FS_IOC_GETFLAGS", err)
	}

	flags := was &^ FlagImmutable
	if on {
		flags |= FlagImmutable
	}
	if flags == was {
		return false, nil
	}

	if err := SetFlags(int(f.Fd()), flags); err != nil {
		return false, flagsError("FS_IOC_SETFLAGS", err)
	}

	return true, nil
}

// flagsError returns the error of a call, or nil if the flag is not supported or not permitted.
func flagsError(call string, err error) error {
	for _, e := range []error{unix.ENOTTY, unix.EOPNOTSUPP, unix.ENOSYS, unix.EINVAL, unix.EPERM, unix.EACCES} {
		if errors.Is(err, e) {
			return nil
		}
	}
	return fmt.Errorf("%s: %w", call, err)
}
