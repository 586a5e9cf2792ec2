// Package kernel contains system calls that golang.org/x/sys lacks, and small
// typed wrappers for others. It knows nothing about
// Pando. Errors are system error numbers, wrapped with the name of the call.
package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Requests missing from golang.org/x/sys; from include/uapi/linux/fs.h,
// fs/ext4/ext4.h and fs/xfs/libxfs/xfs_fs.h. The values hold for architectures
// with the generic ioctl encoding (amd64, arm64, riscv64).
const (
	fsIocFIEMAP     = 0xc020660b
	fsIocFITRIM     = 0xc0185879
	fsIocFIFREEZE   = 0xc0045877
	fsIocFITHAW     = 0xc0045878
	fsIocFSGETXATTR = 0x801c581f
	fsIocFSSETXATTR = 0x401c5820
	ext4IocResizeFS = 0x40086610 // _IOW('f', 16, __u64)
	xfsIocFSGROWFS  = 0x4010586e // _IOW('X', 110, struct xfs_growfs_data)
	xfsIocFSGEOM    = 0x8100587e // _IOR('X', 126, struct xfs_fsop_geom)
)

// ioctl makes a call, which errors name.
func ioctl(f *os.File, name string, req uintptr, arg unsafe.Pointer) error {
	defer runtime.KeepAlive(f)
	if err := fdIoctl(int(f.Fd()), req, arg); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// Reflink makes dst share all blocks of src (FICLONE). Both are regular files
// of the same filesystem. Not durable until dst is synced. EOPNOTSUPP, EXDEV or
// EINVAL: the filesystem cannot do that.
func Reflink(dst, src *os.File) error {
	err := unix.IoctlFileClone(int(dst.Fd()), int(src.Fd()))
	runtime.KeepAlive(dst)
	runtime.KeepAlive(src)
	if err != nil {
		return fmt.Errorf("FICLONE: %w", err)
	}
	return nil
}

type trimRange struct{ start, len, minlen uint64 }

// Trim discards free ranges of at least minLen bytes of the mounted filesystem that dir is
// on, and returns the number of discarded bytes. EINVAL: minLen is longer than any range can be
// (with ext4, 8 MiB or more).
func Trim(dir *os.File, minLen int64) (int64, error) {
	r := trimRange{len: ^uint64(0), minlen: uint64(minLen)}
	if err := ioctl(dir, "FITRIM", fsIocFITRIM, unsafe.Pointer(&r)); err != nil {
		return 0, err
	}
	return int64(r.len), nil
}

// Freeze suspends writes to the filesystem that dir is on, and leaves it clean on
// its device, until Thaw. EBUSY: it is already frozen.
func Freeze(dir *os.File) error {
	return ioctl(dir, "FIFREEZE", fsIocFIFREEZE, nil)
}

// Thaw undoes Freeze. EINVAL: the filesystem is not frozen.
func Thaw(dir *os.File) error {
	return ioctl(dir, "FITHAW", fsIocFITHAW, nil)
}

// GrowExt4 enlarges the mounted ext4 that dir is on to size bytes. It cannot shrink a
// filesystem; growing to the current size does nothing. EPERM without
// CAP_SYS_RESOURCE, which root lacks in many containers. There, resize2fs(8) can still
// grow unmounted filesystems.
func GrowExt4(dir *os.File, size int64) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(dir.Fd()), &st); err != nil {
		return fmt.Errorf("fstatfs: %w", err)
	}

	blocks := uint64(size / int64(st.Bsize))
	err := ioctl(dir, "EXT4_IOC_RESIZE_FS", ext4IocResizeFS, unsafe.Pointer(&blocks))
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("EXT4_IOC_RESIZE_FS needs the capability CAP_SYS_RESOURCE: %w", unix.EPERM)
	}

	return err
}

type xfsGrowData struct {
	newBlocks uint64
	imaxpct   uint32
	_         uint32
}

// IsXFS reports whether path is on XFS. It returns false if that cannot be determined.
func IsXFS(path string) bool {
	var st unix.Statfs_t
	return unix.Statfs(path, &st) == nil && int64(st.Type) == unix.XFS_SUPER_MAGIC
}

// GrowXFS enlarges the mounted XFS that dir is on to size bytes.
func GrowXFS(dir *os.File, size int64) error {
	geom, err := xfsGeometry(dir)
	if err != nil {
		return err
	}

	blockSize := int64(binary.NativeEndian.Uint32(geom[0:]))
	imaxpct := binary.NativeEndian.Uint32(geom[28:])
	have := int64(binary.NativeEndian.Uint64(geom[32:]))
	want := size / blockSize
	if want <= have {
		return nil
	}

	g := xfsGrowData{newBlocks: uint64(want), imaxpct: imaxpct}
	return ioctl(dir, "XFS_IOC_FSGROWFSDATA", xfsIocFSGROWFS, unsafe.Pointer(&g))
}

// XFSBytes returns the size of the mounted XFS that dir is on.
func XFSBytes(dir *os.File) (int64, error) {
	geom, err := xfsGeometry(dir)
	if err != nil {
		return 0, err
	}
	return int64(binary.NativeEndian.Uint32(geom[0:])) * int64(binary.NativeEndian.Uint64(geom[32:])), nil
}

// XFSSectorBytes returns the sector size of the mounted XFS that dir is on: the unit in
// which it writes its log, fixed by mkfs. It needs no privileges. ENOTTY on other filesystems.
func XFSSectorBytes(dir *os.File) (int, error) {
	geom, err := xfsGeometry(dir)
	if err != nil {
		return 0, err
	}
	return int(binary.NativeEndian.Uint32(geom[20:])), nil
}

// statxMntIDUnique and statxMntID are STATX_MNT_ID_UNIQUE (Linux 6.8) and
// STATX_MNT_ID; statxAttrMountRoot is STATX_ATTR_MOUNT_ROOT.
const (
	statxMntID         = 0x1000
	statxMntIDUnique   = 0x4000
	statxAttrMountRoot = 0x2000
)

// MountInfo describes the mount at a path, as statx reports it.
type MountInfo struct {
	ID     uint64 // of the mount; never reused if Unique
	Unique bool   // since Linux 6.8
	Root   bool   // the path is the root of the mount
	Dev    uint64 // st_dev of the filesystem
	Ino    uint64
}

// MountAt describes the mount that contains path (or, with path "", fd), in O(1): it
// does not read the mount table. It does not follow symbolic links.
func MountAt(fd int, path string) (MountInfo, error) {
	var st unix.Statx_t
	flags := unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT | unix.AT_STATX_DONT_SYNC
	if path == "" {
		flags |= unix.AT_EMPTY_PATH
	}

	if err := unix.Statx(fd, path, flags, unix.STATX_INO|statxMntIDUnique|statxMntID, &st); err != nil {
		return MountInfo{}, fmt.Errorf("statx: %w", err)
	}

	return MountInfo{
		ID:     st.Mnt_id,
		Unique: st.Mask&statxMntIDUnique != 0,
		Root:   st.Attributes&statxAttrMountRoot != 0,
		Dev:    unix.Mkdev(st.Dev_major, st.Dev_minor),
		Ino:    st.Ino,
	}, nil
}

// MountNamespace returns the number of the mount namespace of the calling process.
func MountNamespace() (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/mnt", &st); err != nil {
		return 0, fmt.Errorf("stat /proc/self/ns/mnt: %w", err)
	}
	return st.Ino, nil
}

// ProcStart returns the start time of a process in clock ticks since boot. Together with its PID
// and the boot ID, it identifies the process forever. 0: there is no such process, or it
// is a zombie.
func ProcStart(pid int) uint64 {
	const state, threads, start = 0, 17, 19
	fields := procStat(pid)
	if len(fields) <= start {
		return 0
	}

	// The first thread may have ended while others are running.
	if (fields[state] == "Z" || fields[state] == "X") && (fields[threads] == "0" || fields[threads] == "1") {
		return 0
	}

	var n uint64
	_, _ = fmt.Sscan(fields[start], &n)
	return n
}

// BeforeExec reports whether a process has been forked and has not executed a program yet: most are about to, and then
// close the files that they have inherited. It may also be one that never will.
func BeforeExec(pid int) bool {
	const flags, forkNoExec = 6, 0x40 // PF_FORKNOEXEC in include/linux/sched.h
	fields := procStat(pid)
	if len(fields) <= flags {
		return false
	}
	n, err := strconv.ParseUint(fields[flags], 10, 64)
	return err == nil && n&forkNoExec != 0
}

// procStat returns the fields of /proc/PID/stat from the third one on, which proc(5) calls state; nil if there is no
// such process.
func procStat(pid int) []string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil
	}

	// The command, in parentheses, may contain any character, so fields are counted from the last ')'.
	i := strings.LastIndexByte(string(b), ')')
	if i < 0 {
		return nil
	}
	return strings.Fields(string(b[i+1:]))
}
