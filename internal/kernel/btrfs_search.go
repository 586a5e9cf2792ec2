package kernel

import (
	"encoding/binary"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Searching the tree of a subvolume (BTRFS_IOC_TREE_SEARCH_V2). It needs root
// (CAP_SYS_ADMIN).
const (
	btrfsIocTreeSearchV2 = 0xc0709411 // _IOWR(0x94, 17, struct btrfs_ioctl_search_args_v2)

	btrfsInodeItemKey   = 1
	btrfsInodeRefKey    = 12
	btrfsInodeExtrefKey = 13

	btrfsSearchHead   = 112 // a key of 104 bytes and the size of the buffer
	btrfsSearchBuffer = 64<<10 + 256
	btrfsItemHead     = 32           // struct btrfs_ioctl_search_header
	btrfsLastFree     = ^uint64(255) // BTRFS_LAST_FREE_OBJECTID
)

// BtrfsInode is what the item of an inode says.
type BtrfsInode struct {
	Ino     uint64
	TransID uint64 // of the transaction that changed it last
	Nlink   uint32
	Mode    uint32
}

// BtrfsName is one name of an inode.
type BtrfsName struct {
	Dir  uint64 // inode number of the directory
	Name string
}

type btrfsKey struct {
	objectid uint64
	typ      uint32
	offset   uint64
}

// btrfsSearch calls fn for the items of the subvolume that f is in, from the key
// from to the key to, whose leaves were written by a transaction from minTrans on.
func btrfsSearch(f *os.File, from, to btrfsKey, minTrans uint64, fn func(key btrfsKey, item []byte) error) error {
	b := make([]byte, btrfsSearchHead+btrfsSearchBuffer)
	for {
		clear(b[:btrfsSearchHead])
		u64 := func(off int, v uint64) { binary.NativeEndian.PutUint64(b[off:], v) }
		u32 := func(off int, v uint32) { binary.NativeEndian.PutUint32(b[off:], v) }
		u64(8, from.objectid)
		u64(16, to.objectid)
		u64(24, from.offset)
		u64(32, to.offset)
		u64(40, minTrans)
		u64(48, ^uint64(0)) // max_transid
		u32(56, from.typ)
		u32(60, to.typ)
		u32(64, ^uint32(0)) // nr_items
		u64(104, btrfsSearchBuffer)
		if err := ioctl(f, btrfsIocTreeSearchV2, unsafe.Pointer(&b[0])); err != nil {
			return fmt.Errorf("BTRFS_IOC_TREE_SEARCH_V2: %w", err)
		}
		n := binary.NativeEndian.Uint32(b[64:])
		if n == 0 {
			return nil
		}
		off := btrfsSearchHead
		var last btrfsKey
		for range n {
			if off+btrfsItemHead > len(b) {
				return errShortItem
			}
			last = btrfsKey{binary.NativeEndian.Uint64(b[off+8:]), binary.NativeEndian.Uint32(b[off+24:]), binary.NativeEndian.Uint64(b[off+16:])}
			size := int(binary.NativeEndian.Uint32(b[off+28:]))
			off += btrfsItemHead
			if size > len(b)-off {
				return errShortItem
			}
			if err := fn(last, b[off:off+size]); err != nil {
				return err
			}
			off += size
		}
		from = last
		if from.offset++; from.offset == 0 {
			if from.typ++; from.typ > 255 {
				from.typ = 0
				if from.objectid++; from.objectid == 0 {
					return nil
				}
			}
		}
		if from.objectid > to.objectid {
			return nil
		}
	}
}

func parseBtrfsInode(ino uint64, item []byte) (BtrfsInode, error) {
	if len(item) < 56 { // struct btrfs_inode_item, little endian, packed
		return BtrfsInode{}, errShortItem
	}
	return BtrfsInode{
		Ino:     ino,
		TransID: binary.LittleEndian.Uint64(item[8:]),
		Nlink:   binary.LittleEndian.Uint32(item[40:]),
		Mode:    binary.LittleEndian.Uint32(item[52:]),
	}, nil
}

// BtrfsChangedSince calls fn for the inodes of the subvolume that f is in which
// a transaction after since has changed. It costs by what has changed. What is
// not committed is not seen: see BtrfsSync.
func BtrfsChangedSince(f *os.File, since uint64, fn func(BtrfsInode) error) error {
	from, to := btrfsKey{btrfsFirstFreeObjID, 0, 0}, btrfsKey{btrfsLastFree, 255, ^uint64(0)}
	return btrfsSearch(f, from, to, since+1, func(k btrfsKey, item []byte) error {
		if k.typ != btrfsInodeItemKey {
			return nil
		}
		i, err := parseBtrfsInode(k.objectid, item)
		if err != nil || i.TransID <= since {
			return err
		}
		return fn(i)
	})
}

// BtrfsInodeAt looks up an inode of the subvolume that f is in.
func BtrfsInodeAt(f *os.File, ino uint64) (i BtrfsInode, ok bool, err error) {
	k := btrfsKey{ino, btrfsInodeItemKey, 0}
	err = btrfsSearch(f, k, k, 0, func(_ btrfsKey, item []byte) (err error) {
		ok = true
		i, err = parseBtrfsInode(ino, item)
		return err
	})
	return i, ok, err
}

// BtrfsNames lists the names of an inode of the subvolume that f is in.
func BtrfsNames(f *os.File, ino uint64) ([]BtrfsName, error) {
	var out []BtrfsName
	from, to := btrfsKey{ino, btrfsInodeRefKey, 0}, btrfsKey{ino, btrfsInodeExtrefKey, ^uint64(0)}
	err := btrfsSearch(f, from, to, 0, func(k btrfsKey, item []byte) error {
		head := 10 // struct btrfs_inode_ref: index, length of the name
		if k.typ == btrfsInodeExtrefKey {
			head = 18 // and before them the directory
		}
		for len(item) > 0 {
			if len(item) < head {
				return errShortItem
			}
			dir, n := k.offset, int(binary.LittleEndian.Uint16(item[head-2:]))
			if k.typ == btrfsInodeExtrefKey {
				dir = binary.LittleEndian.Uint64(item)
			}
			if len(item) < head+n {
				return errShortItem
			}
			out = append(out, BtrfsName{dir, string(item[head : head+n])})
			item = item[head+n:]
		}
		return nil
	})
	return out, err
}

// BtrfsDirPath is the path of a directory relative to the root of the subvolume
// that f is in, without slashes at its ends. ok is false if there is no directory
// of that number.
func BtrfsDirPath(f *os.File, ino uint64) (path string, ok bool, err error) {
	i, ok, err := BtrfsInodeAt(f, ino)
	if err != nil || !ok || i.Mode&unix.S_IFMT != unix.S_IFDIR || i.Nlink == 0 {
		return "", false, err
	}
	path, err = subvolInodePath(f, 0, ino)
	return path, err == nil, err
}
