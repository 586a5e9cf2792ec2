package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Requests of btrfs, from include/uapi/linux/btrfs.h.
const (
	btrfsIocSync          = 0x00009408 // _IO(0x94, 8)
	btrfsIocSnapCreateV2  = 0x50009417
	btrfsIocSubvolCreate2 = 0x50009418
	btrfsIocSetFlags      = 0x4008941a // _IOW(0x94, 26, __u64)
	btrfsIocGetFlags      = 0x80089419 // _IOR(0x94, 25, __u64)
	btrfsIocInoLookup     = 0xd0009412 // _IOWR(0x94, 18, struct btrfs_ioctl_ino_lookup_args)
	btrfsIocGetSubvolInfo = 0x81f8943c
	btrfsIocSnapDestroyV2 = 0x5000943f
	btrfsIocScrubProgress = 0xc400941d // _IOWR(0x94, 29, struct btrfs_ioctl_scrub_args)
	btrfsIocDevInfo       = 0xd000941e // _IOWR(0x94, 30, struct btrfs_ioctl_dev_info_args)
)

const (
	btrfsSubvolReadOnly = 1 << 1
	btrfsSubvolSpecByID = 1 << 4

	btrfsRootTreeID     = 1
	btrfsRootRefKey     = 156
	btrfsFirstFreeObjID = 256 // inode number of the root of every subvolume
	btrfsArgBytes       = 4096
	btrfsVolNameOffset  = 56 // in struct btrfs_ioctl_vol_args_v2
	btrfsVolNameMax     = 4039
)

// IsBtrfs reports whether f is on btrfs.
func IsBtrfs(f *os.File) (bool, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return false, fmt.Errorf("fstatfs: %w", err)
	}
	return int64(st.Type) == unix.BTRFS_SUPER_MAGIC, nil
}

// IsSubvolRoot reports whether ino is the inode number of subvolume roots, which no other
// directory on btrfs has.
func IsSubvolRoot(ino uint64) bool { return ino == btrfsFirstFreeObjID }

// volArgs is struct btrfs_ioctl_vol_args_v2.
type volArgs [btrfsArgBytes]byte

func newVolArgs(fd int64, flags uint64, name string) (*volArgs, error) {
	if len(name) == 0 || len(name) > btrfsVolNameMax {
		return nil, unix.ENAMETOOLONG
	}
	var a volArgs
	binary.NativeEndian.PutUint64(a[0:], uint64(fd))
	binary.NativeEndian.PutUint64(a[16:], flags)
	copy(a[btrfsVolNameOffset:], name)
	return &a, nil
}

func volIoctl(call string, dir *os.File, req uintptr, fd int64, flags uint64, name string) error {
	a, err := newVolArgs(fd, flags, name)
	if err != nil {
		return fmt.Errorf("%s: %w", call, err)
	}
	return ioctl(dir, call, req, unsafe.Pointer(a))
}

// SubvolCreate makes an empty subvolume called name in dir. It is not durable
// until dir is synced, which commits a transaction (older kernels
// commit in the call itself). EEXIST; ENOTTY if dir is not on btrfs.
func SubvolCreate(dir *os.File, name string) error {
	return volIoctl("BTRFS_IOC_SUBVOL_CREATE_V2", dir, btrfsIocSubvolCreate2, 0, 0, name)
}

// SubvolSnapshot makes a subvolume called name in dir with the content of the
// subvolume whose root src is, at one moment. Dirty data of src is written
// first. The call commits a transaction: on return the new subvolume, and all
// names made in this filesystem before the call, are durable. EEXIST, EINVAL if
// src is not the root of a subvolume, EXDEV if it is on a different filesystem.
func SubvolSnapshot(dir *os.File, name string, src *os.File, readOnly bool) error {
	var flags uint64
	if readOnly {
		flags = btrfsSubvolReadOnly
	}
	return volIoctl("BTRFS_IOC_SNAP_CREATE_V2", dir, btrfsIocSnapCreateV2, int64(src.Fd()), flags, name)
}

// SubvolDestroy removes the subvolume called name from dir; a background thread
// of the kernel frees its space. ENOENT; ENOTEMPTY if it contains subvolumes.
// It also removes a subvolume that is mounted elsewhere or contains mount points:
// the kernel detaches those mounts.
func SubvolDestroy(dir *os.File, name string) error {
	return volIoctl("BTRFS_IOC_SNAP_DESTROY_V2", dir, btrfsIocSnapDestroyV2, 0, 0, name)
}

// SubvolDestroyID is SubvolDestroy for the subvolume numbered id, wherever it
// is in the filesystem that f is on.
func SubvolDestroyID(f *os.File, id uint64) error {
	var a volArgs
	binary.NativeEndian.PutUint64(a[16:], btrfsSubvolSpecByID)
	binary.NativeEndian.PutUint64(a[btrfsVolNameOffset:], id)
	return ioctl(f, fmt.Sprintf("BTRFS_IOC_SNAP_DESTROY_V2 %d", id), btrfsIocSnapDestroyV2, unsafe.Pointer(&a))
}

// SubvolInfo describes a subvolume.
type SubvolInfo struct {
	ID       uint64
	ReadOnly bool
	Snapshot bool      // it was made as a snapshot of another subvolume, which may no longer exist
	Created  time.Time // with the resolution of file times

	UUID, ParentUUID [16]byte // ParentUUID: of the subvolume that it is a snapshot of
	MadeBy           uint64   // transaction that made it; older content has a lower number

	ReceivedUUID [16]byte // UUID of the subvolume that it was received from, or zero; see SubvolSetReceived
	ChangedBy    uint64   // transaction that last changed it
}

// SubvolInfoOf describes the subvolume that f is in. It needs no privileges.
func SubvolInfoOf(f *os.File) (SubvolInfo, error) {
	var b [504]byte // struct btrfs_ioctl_get_subvol_info_args
	if err := ioctl(f, "BTRFS_IOC_GET_SUBVOL_INFO", btrfsIocGetSubvolInfo, unsafe.Pointer(&b)); err != nil {
		return SubvolInfo{}, err
	}

	const treeID, flags, uuid, parentUUID, receivedUUID, ctransid, otransid, otime = 0, 288, 296, 312, 328, 344, 352, 392
	return SubvolInfo{
		ID:       binary.NativeEndian.Uint64(b[treeID:]),
		ReadOnly: binary.NativeEndian.Uint64(b[flags:])&1 != 0, // BTRFS_ROOT_SUBVOL_RDONLY
		Snapshot: [16]byte(b[parentUUID:]) != [16]byte{},
		Created:  time.Unix(int64(binary.NativeEndian.Uint64(b[otime:])), int64(binary.NativeEndian.Uint32(b[otime+8:]))),
		UUID:     [16]byte(b[uuid:]), ParentUUID: [16]byte(b[parentUUID:]), MadeBy: binary.NativeEndian.Uint64(b[otransid:]),
		ReceivedUUID: [16]byte(b[receivedUUID:]), ChangedBy: binary.NativeEndian.Uint64(b[ctransid:]),
	}, nil
}

// SubvolSetReadOnly makes the subvolume whose root f is read-only or writable.
// A change commits a transaction. Files that are open for writing stay writable.
func SubvolSetReadOnly(f *os.File, readOnly bool) error {
	var flags uint64
	if err := ioctl(f, "BTRFS_IOC_SUBVOL_GETFLAGS", btrfsIocGetFlags, unsafe.Pointer(&flags)); err != nil {
		return err
	}

	if flags&btrfsSubvolReadOnly != 0 == readOnly {
		return nil
	}

	flags ^= btrfsSubvolReadOnly
	return ioctl(f, "BTRFS_IOC_SUBVOL_SETFLAGS", btrfsIocSetFlags, unsafe.Pointer(&flags))
}

// SubvolChild is a subvolume directly inside another.
type SubvolChild struct {
	ID   uint64
	Dir  string // its parent directory, relative to the root of the outer subvolume; "" for that root
	Name string
}

// SubvolChildren lists the subvolumes directly inside the subvolume numbered
// parent of the filesystem that f is on. It reads an index, not the tree. It
// needs root (CAP_SYS_ADMIN).
func SubvolChildren(f *os.File, parent uint64) ([]SubvolChild, error) {
	var out []SubvolChild
	dirs := map[uint64]string{}
	from, to := btrfsKey{parent, btrfsRootRefKey, 0}, btrfsKey{parent, btrfsRootRefKey, ^uint64(0)}
	err := btrfsSearch(f, btrfsRootTreeID, from, to, 0, func(k btrfsKey, item []byte) error {
		const header = 18 // struct btrfs_root_ref (little endian, packed); then the name
		if len(item) < header {
			return errShortItem
		}

		ino := binary.LittleEndian.Uint64(item)
		end := header + int(binary.LittleEndian.Uint16(item[16:]))
		if end > len(item) {
			return errShortItem
		}

		dir, ok := dirs[ino]
		if !ok {
			var err error
			if dir, err = subvolInodePath(f, parent, ino); err != nil {
				return err
			}
			dirs[ino] = dir
		}

		out = append(out, SubvolChild{ID: k.offset, Dir: dir, Name: string(item[header:end])})
		return nil
	})
	if err != nil {
		return nil, err
	}

	return out, nil
}

// subvolInodePath returns the path of a directory relative to the root of the
// subvolume numbered tree, without leading and trailing slashes.
func subvolInodePath(f *os.File, tree, ino uint64) (string, error) {
	if ino == btrfsFirstFreeObjID {
		return "", nil
	}

	var b [btrfsArgBytes]byte // struct btrfs_ioctl_ino_lookup_args
	binary.NativeEndian.PutUint64(b[0:], tree)
	binary.NativeEndian.PutUint64(b[8:], ino)
	if err := ioctl(f, "BTRFS_IOC_INO_LOOKUP", btrfsIocInoLookup, unsafe.Pointer(&b)); err != nil {
		return "", err
	}

	path := unix.ByteSliceToString(b[16:])
	if n := len(path); n > 0 && path[n-1] == '/' {
		path = path[:n-1]
	}

	return path, nil
}

// BtrfsDeleting reports whether the btrfs that f is on has destroyed subvolumes
// whose space it has not freed yet. ENOTTY on other filesystems, EPERM without root.
func BtrfsDeleting(f *os.File) (bool, error) {
	// A destroyed subvolume has an orphan item in the tree of roots until the
	// kernel's cleaner has dropped its tree (fs/btrfs/root-tree.c).
	const orphanObjectID, orphanItemKey = ^uint64(0) - 4, 48
	from, to := btrfsKey{orphanObjectID, orphanItemKey, 0}, btrfsKey{orphanObjectID, orphanItemKey, ^uint64(0)}
	found := false
	err := btrfsSearch(f, btrfsRootTreeID, from, to, 0, func(btrfsKey, []byte) error { found = true; return errEnough })
	return found, ifNot(err, errEnough)
}

// BtrfsSync makes the whole filesystem that f is on durable and wakes the
// thread that frees the space of destroyed subvolumes.
func BtrfsSync(f *os.File) error {
	return ioctl(f, "BTRFS_IOC_SYNC", btrfsIocSync, nil)
}

// BtrfsDeviceBytes returns how many bytes of device number id (counted from 1) the btrfs that f
// is on can use, and how many of them it has allocated to chunks. It needs no privileges.
// ENODEV: no such device. ENOTTY on other filesystems.
func BtrfsDeviceBytes(f *os.File, id uint64) (total, allocated int64, err error) {
	var b [btrfsArgBytes]byte // devid, uuid[16], bytes_used, total_bytes, ...
	binary.NativeEndian.PutUint64(b[0:], id)
	if err := ioctl(f, "BTRFS_IOC_DEV_INFO", btrfsIocDevInfo, unsafe.Pointer(&b)); err != nil {
		return 0, 0, err
	}
	return int64(binary.NativeEndian.Uint64(b[32:])), int64(binary.NativeEndian.Uint64(b[24:])), nil
}

// BtrfsScrubbing reports whether device number id of the btrfs that f is on is being
// scrubbed. It needs root (CAP_SYS_ADMIN). ENODEV: no such device. ENOTTY on other filesystems.
func BtrfsScrubbing(f *os.File, id uint64) (bool, error) {
	var b [1024]byte // devid, start, end, flags, progress
	binary.NativeEndian.PutUint64(b[0:], id)
	err := ioctl(f, "BTRFS_IOC_SCRUB_PROGRESS", btrfsIocScrubProgress, unsafe.Pointer(&b))
	if errors.Is(err, unix.ENOTCONN) {
		return false, nil
	}
	return err == nil, err
}
