package kernel

import (
	"encoding/binary"
	"errors"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Constants of tree searches (BTRFS_IOC_TREE_SEARCH_V2), which need root (CAP_SYS_ADMIN).
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

// BtrfsInode describes an inode.
type BtrfsInode struct {
	Ino     uint64
	TransID uint64 // transaction that last changed it
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

// btrfsSearch calls fn for the items of a tree of the filesystem that f is on, from the key from
// to the key to, whose leaves were written by transaction minTrans or later. tree 0 is the tree of
// the subvolume that f is in.
func btrfsSearch(
	f *os.File, tree uint64, from, to btrfsKey, minTrans uint64, fn func(key btrfsKey, item []byte) error,
) error {
	b := make([]byte, btrfsSearchHead+btrfsSearchBuffer)
	for {
		// Read the next items into b.
		clear(b[:btrfsSearchHead])
		u64 := func(off int, v uint64) { binary.NativeEndian.PutUint64(b[off:], v) }
		u32 := func(off int, v uint32) { binary.NativeEndian.PutUint32(b[off:], v) }
		u64(0, tree)
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
		if err := ioctl(f, "BTRFS_IOC_TREE_SEARCH_V2", btrfsIocTreeSearchV2, unsafe.Pointer(&b[0])); err != nil {
			return err
		}

		n := binary.NativeEndian.Uint32(b[64:])
		if n == 0 {
			return nil
		}

		last, err := eachBtrfsItem(b, n, fn)
		if err != nil {
			return err
		}

		// Continue with the key after the last one.
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

// eachBtrfsItem calls fn for each of the n items in b, and returns the key of the last one.
func eachBtrfsItem(b []byte, n uint32, fn func(key btrfsKey, item []byte) error) (last btrfsKey, err error) {
	off := btrfsSearchHead
	for range n {
		if off+btrfsItemHead > len(b) {
			return last, errShortItem
		}

		last = btrfsKey{binary.NativeEndian.Uint64(b[off+8:]), binary.NativeEndian.Uint32(b[off+24:]),
			binary.NativeEndian.Uint64(b[off+16:])}
		size := int(binary.NativeEndian.Uint32(b[off+28:]))
		off += btrfsItemHead
		if size > len(b)-off {
			return last, errShortItem
		}

		if err := fn(last, b[off:off+size]); err != nil {
			return last, err
		}

		off += size
	}

	return last, nil
}

var errShortItem = errors.New("BTRFS_IOC_TREE_SEARCH_V2: an item is shorter than its declared length")

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

// BtrfsChangedSince calls fn for each inode of the subvolume that f is in that a transaction
// after since has changed. Its cost depends on how much changed. It does not see
// uncommitted changes: see BtrfsSync.
func BtrfsChangedSince(f *os.File, since uint64, fn func(BtrfsInode) error) error {
	from, to := btrfsKey{btrfsFirstFreeObjID, 0, 0}, btrfsKey{btrfsLastFree, 255, ^uint64(0)}
	return btrfsSearch(f, 0, from, to, since+1, func(k btrfsKey, item []byte) error {
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

// errEnough ends a search early.
var errEnough = errors.New("enough")

// maxNewItems is how many items of new leaves BtrfsSame compares. A small tree is one leaf of a few hundred items,
// which each snapshot writes again.
const maxNewItems = 4096

// BtrfsSame reports whether the subvolumes that a and b are in have identical items. Both must be snapshots of the same
// subvolume, made by the transactions madeA and, later, madeB. It reads only items written after madeA. It also
// returns false if a snapshot was changed after it was made, or if there are too many items to compare.
//
// Comparing the number of the last transaction that changed the subvolumes (ctransid) would not be enough: log replay
// after a power loss changes trees without setting it.
func BtrfsSame(a, b *os.File, madeA, madeB uint64) (bool, error) {
	// Check that neither snapshot was changed after it was made.
	from, to := btrfsKey{btrfsFirstFreeObjID, 0, 0}, btrfsKey{btrfsLastFree, 255, ^uint64(0)}
	for _, x := range []struct {
		f    *os.File
		made uint64
	}{{a, madeA}, {b, madeB}} {
		changed := false
		err := btrfsSearch(x.f, 0, from, to, x.made+1, func(btrfsKey, []byte) error { changed = true; return errEnough })
		if changed || err != nil {
			return false, ifNot(err, errEnough)
		}
	}

	// Collect the items of b that were written after a was made.
	fresh := map[btrfsKey]string{}
	var first, last btrfsKey
	err := btrfsSearch(b, 0, from, to, madeA+1, func(k btrfsKey, item []byte) error {
		if len(fresh) == 0 {
			first = k
		}
		fresh[k], last = string(item), k
		if len(fresh) > maxNewItems {
			return errEnough
		}
		return nil
	})
	if err != nil || len(fresh) == 0 {
		return err == nil, ifNot(err, errEnough)
	}

	// Compare them with the items of a. Deletions are found as well, because they change the item of
	// the inode or of its directory.
	seen, same := 0, 0
	err = btrfsSearch(a, 0, first, last, 0, func(k btrfsKey, item []byte) error {
		if now, is := fresh[k]; is {
			if now != string(item) {
				return errEnough
			}
			same++
		}
		if seen++; seen > 2*maxNewItems {
			return errEnough
		}
		return nil
	})

	return err == nil && same == len(fresh), ifNot(err, errEnough)
}

// ifNot returns err, or nil if err is what.
func ifNot(err, what error) error {
	if errors.Is(err, what) {
		return nil
	}
	return err
}

// BtrfsInodeAt looks up an inode of the subvolume that f is in.
func BtrfsInodeAt(f *os.File, ino uint64) (i BtrfsInode, ok bool, err error) {
	k := btrfsKey{ino, btrfsInodeItemKey, 0}
	err = btrfsSearch(f, 0, k, k, 0, func(_ btrfsKey, item []byte) (err error) {
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
	err := btrfsSearch(f, 0, from, to, 0, func(k btrfsKey, item []byte) error {
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

// BtrfsDirPath returns the path of a directory relative to the root of the subvolume
// that f is in, without leading and trailing slashes. ok is false if no directory has
// that inode number.
func BtrfsDirPath(f *os.File, ino uint64) (path string, ok bool, err error) {
	i, ok, err := BtrfsInodeAt(f, ino)
	if err != nil || !ok || i.Mode&unix.S_IFMT != unix.S_IFDIR || i.Nlink == 0 {
		return "", false, err
	}
	path, err = subvolInodePath(f, 0, ino)
	return path, err == nil, err
}
