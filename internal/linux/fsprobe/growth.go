package fsprobe

import "io"

// Growth says how far a filesystem can grow, and what that writes.
type Growth struct {
	Bytes      int64 // its size now, 0 for one that is still to be made
	LimitBytes int64 // the largest size that it can have

	pieceBytes int64 // it grows by groups of this size
	pieceCost  int64 // bytes that are written for each
	fixedCost  int64 // bytes that are written in any case
	mostCost   int64 // 0: no limit
}

// Bytes that are written for each group, more than were measured: 1.9 KiB for an ext4 whose inode tables are
// initialised later, 27 KiB for XFS with sectors of 4 KiB.
const (
	extGroupCost = 2 << 10
	xfsGroupCost = 40 << 10
)

// xfsMostGroups is how many allocation groups an XFS may be grown to. XFS keeps some of each in memory, and enlarging
// it to so many takes about five seconds; more of them take more than proportionally longer.
const xfsMostGroups = 16 << 10

// Cost is about how many bytes are written when the filesystem gets a size.
func (g Growth) Cost(size int64) int64 {
	if size <= g.Bytes || g.pieceBytes == 0 {
		return 0
	}
	cost := g.fixedCost + (size-g.Bytes+g.pieceBytes-1)/g.pieceBytes*g.pieceCost
	if g.mostCost > 0 {
		cost = min(cost, g.mostCost)
	}
	return cost
}

// Grows reports whether the filesystem is smaller than size, by more than a block.
func (g Growth) Grows(size int64) bool { return g.pieceBytes > 0 && g.Bytes+4096 <= size }

// Largest is the largest size, up to limit, that costs no more than room bytes; 0 if even making it costs more.
func (g Growth) Largest(limit, room int64) int64 {
	limit = min(limit, g.LimitBytes)
	switch {
	case g.Cost(limit) <= room:
		return limit
	case room < g.fixedCost:
		return g.Bytes
	}
	return min(limit, g.Bytes+(room-g.fixedCost)/g.pieceCost*g.pieceBytes)
}

// NewGrowth describes making a filesystem of a type, with the options that Pando has for it: its tables, and its
// journal or log.
func NewGrowth(kind string) Growth {
	switch kind {
	case "ext4": // mkfs refuses more inodes than 2^32, and makes one for at least 64 KiB if it is large
		return Growth{LimitBytes: 255 << 40, pieceBytes: 128 << 20, pieceCost: extGroupCost, fixedCost: 64 << 20}
	case "xfs": // its log has up to 2 GiB
		return Growth{LimitBytes: maxBytes, pieceBytes: 128 << 20, pieceCost: 64 << 10, fixedCost: 64 << 20,
			mostCost: 2200 << 20}
	}
	return Growth{LimitBytes: maxBytes}
}

// ReadGrowth reads how far the filesystem in an image can grow. Of other content and damaged superblocks it knows
// nothing: that grows for free.
func ReadGrowth(r io.ReaderAt) (Growth, error) {
	b, err := readAt(r, 0, superblockBytes)
	if err != nil {
		return Growth{}, err
	}
	if res := probeXFS(b); res.Type != "" && res.Damage == "" {
		return xfsSuper(b).growth(res.Bytes), nil
	}
	if res := probeExt(b, extOffset); res.Type != "" && res.Damage == "" {
		return extSuper(b[extOffset : extOffset+extBytes]).growth(res.Bytes), nil
	}
	return NewGrowth(""), nil
}

// growth: see xfs_growfs_data_private in the kernel.
func (s xfsSuper) growth(size int64) Growth {
	group := int64(s.u32(4)) * int64(s.u32(84))
	return Growth{Bytes: size, LimitBytes: max(size, group*xfsMostGroups), pieceBytes: group, pieceCost: xfsGroupCost}
}

// growth: see ext4_resize_fs in the kernel, and adjust_fs_info in resize2fs.
func (s extSuper) growth(size int64) Growth {
	block := s.blockBytes()
	group := int64(s.u32(32)) * block

	// The number of a block or an inode has 32 bits, unless there is a feature for more. The descriptors of all groups
	// must fit in one.
	descriptor := int64(32)
	most := int64(1<<32-1) * block
	if s.incompat()&extIncompat64 != 0 {
		descriptor, most = max(32, int64(s.u16(254))), maxBytes
	}
	if perGroup := int64(s.u32(40)); perGroup > 0 {
		most = min(most, product((1<<32-2)/perGroup, group))
	}
	most = min(most, product(int64(s.u32(32))/2*(block/descriptor), group))

	// Without checksums of the groups, their inode tables are zeroed at once.
	cost := int64(extGroupCost)
	if s.roCompat()&(extROChecksum|extROGroupChecksum) == 0 {
		inode := int64(s.u16(88))
		if s.u32(76) < extRevisionWithSize {
			inode = extOldInodeBytes
		}
		cost = 2*block + int64(s.u32(40))*inode
	}

	return Growth{Bytes: size, LimitBytes: max(size, most), pieceBytes: group, pieceCost: cost}
}

// product is a*b, or the largest int64: hostile superblocks can have any numbers. Both are at least 0.
func product(a, b int64) int64 {
	if a > 0 && b > maxBytes/a {
		return maxBytes
	}
	return a * b
}
