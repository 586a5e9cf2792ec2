package fsprobe

import (
	"bytes"
	"io"
	"iter"
	"slices"
)

// A mounted filesystem writes even if nobody uses it: each freeze and each mount changes times and counters in
// its superblock, and adds records to its log.

// maxBookkeeping is how many bytes outside of the log are compared. A filesystem with more changes was used.
const maxBookkeeping = 1 << 20

// Span is a range of an image, in bytes: [From, To).
type Span struct{ From, To int64 }

// ownFields are the parts of an image that a filesystem changes by itself: fields of its superblock, and its log.
type ownFields struct {
	superblock []byte // the beginning of the image, up to the end of its superblock
	fields     []Span // in superblock
	log        []Span // in the image
}

// OnlyBookkeeping reports whether two images contain the same filesystem with the same content. changed yields the
// ranges in which they differ; in these, only the log and the fields for mounts, freezes and times in the superblock of
// ext4 or XFS may differ. Both images must be complete without their logs, like those of unmounted or frozen
// filesystems: it checks this for ext4, but images of XFS do not show it. It returns false if it cannot tell.
//
// It reads at most 1 MiB of each image outside of the log. It does not trust numbers in the images, and returns false
// if a log is outside of its image.
func OnlyBookkeeping(was, is io.ReaderAt, size int64, changed iter.Seq2[Span, error]) (bool, error) {
	a, err := ownFieldsOf(was, size)
	if err != nil || a == nil {
		return false, err
	}

	b, err := ownFieldsOf(is, size)
	if err != nil || b == nil || !a.sameAs(b) {
		return false, err
	}

	left := int64(maxBookkeeping)
	for r, err := range changed {
		if err != nil {
			return false, err
		}
		for _, s := range b.outside(r) {
			if left -= s.To - s.From; left < 0 {
				return false, nil
			}
			if same, err := sameBytes(was, is, s); err != nil || !same {
				return false, err
			}
		}
	}

	return true, nil
}

// sameAs reports whether the superblocks are the same except for the fields that the filesystem changes by itself. It
// sets these to zero in both.
func (f *ownFields) sameAs(g *ownFields) bool {
	if !slices.Equal(f.log, g.log) || len(f.superblock) != len(g.superblock) {
		return false
	}
	for _, s := range f.fields {
		clear(f.superblock[s.From:s.To])
		clear(g.superblock[s.From:s.To])
	}
	return bytes.Equal(f.superblock, g.superblock)
}

// outside returns the parts of a range that are neither in the superblock nor in the log.
func (f *ownFields) outside(r Span) []Span {
	out := []Span{r}
	for _, hole := range append([]Span{{0, int64(len(f.superblock))}}, f.log...) {
		var left []Span
		for _, s := range out {
			if before := (Span{s.From, min(s.To, hole.From)}); before.From < before.To {
				left = append(left, before)
			}
			if behind := (Span{max(s.From, hole.To), s.To}); behind.From < behind.To {
				left = append(left, behind)
			}
		}
		out = left
	}

	return out
}

// sameBytes compares a range of two images.
func sameBytes(was, is io.ReaderAt, s Span) (bool, error) {
	a, err := readAt(was, s.From, int(s.To-s.From))
	if err != nil {
		return false, err
	}
	b, err := readAt(is, s.From, int(s.To-s.From))
	return bytes.Equal(a, b), err
}

// ownFieldsOf reads the superblock of an image of ext4 or XFS. It returns nil for other or unsuitable images.
func ownFieldsOf(r io.ReaderAt, size int64) (*ownFields, error) {
	b, err := readAt(r, 0, superblockBytes)
	if err != nil {
		return nil, err
	}

	if res := probeXFS(b); res.Type != "" {
		if res.Damage != "" || res.Elsewhere != "" {
			return nil, nil
		}
		return xfsSuper(b[:res.SectorBytes]).ownFields(size), nil
	}

	res := probeExt(b, extOffset)
	if res.Type == "" || res.Damage != "" || res.Elsewhere != "" || res.Dirty {
		return nil, nil
	}

	return extSuper(b[extOffset:extOffset+extBytes]).ownFields(r, b[:extOffset+extBytes], size)
}

// ownFields returns the times of mounts and writes, the counters of mounts and of bytes written, the last mount point,
// and the checksum. b is the beginning of the image.
func (s extSuper) ownFields(r io.ReaderAt, b []byte, size int64) (*ownFields, error) {
	log, err := s.journal(r, size)
	if err != nil || len(log) == 0 {
		return nil, err
	}

	f := &ownFields{superblock: b, log: log}
	for _, own := range []Span{
		{44, 54},     // s_mtime, s_wtime, s_mnt_count
		{136, 200},   // s_last_mounted
		{376, 384},   // s_kbytes_written
		{628, 630},   // s_wtime_hi, s_mtime_hi
		{1020, 1024}, // s_checksum
	} {
		f.fields = append(f.fields, Span{extOffset + own.From, extOffset + own.To})
	}

	return f, nil
}

// The inode of the journal; see Documentation/filesystems/ext4.
const (
	extJournalInode = 8
	extInodeExtents = 0x80000
	extExtentMagic  = 0xF30A
	extDescBytes    = 64
	extMaxLength    = 32768 // larger numbers mark unwritten extents
	extMapBytes     = 60    // size of the extent tree's root in an inode
)

// journal returns the location of the journal, in order of its blocks, or nil if it cannot tell.
func (s extSuper) journal(r io.ReaderAt, size int64) ([]Span, error) {
	if s.u32(92)&extCompatJournal == 0 || s.u32(224) != extJournalInode || s.u32(76) < extRevisionWithSize {
		return nil, nil
	}

	// Find the inode table in the descriptor of the first group.
	block := s.blockBytes()
	desc, err := readAt(r, (int64(s.u32(20))+1)*block, extDescBytes)
	if err != nil || len(desc) < extDescBytes {
		return nil, err
	}

	table := uint64(extSuper(desc).u32(8))
	if s.incompat()&extIncompat64 != 0 {
		table |= uint64(extSuper(desc).u32(40)) << 32
	}
	if table >= s.blocks() {
		return nil, nil
	}

	// Read the extents in the journal's inode.
	b, err := readAt(r, int64(table)*block+int64(extJournalInode-1)*int64(s.u16(88)), extOldInodeBytes)
	if err != nil || len(b) < extOldInodeBytes {
		return nil, err
	}

	inode := extSuper(b)
	if inode.u32(32)&extInodeExtents == 0 {
		return nil, nil
	}

	log, err := s.extents(r, inode[40:40+extMapBytes], true)
	for _, l := range log {
		if l.To > size {
			return nil, nil
		}
	}

	return log, err
}

// extents returns the extents of a node of an extent tree. root says that the node is in an inode and may refer to
// leaves. It returns nil if node is invalid or the tree is deeper.
func (s extSuper) extents(r io.ReaderAt, node extSuper, root bool) (out []Span, err error) {
	const header, entry = 12, 12
	count, depth := int(node.u16(2)), node.u16(6)
	if node.u16(0) != extExtentMagic || count == 0 || header+count*entry > len(node) || depth > 1 || depth == 1 && !root {
		return nil, nil
	}

	block := s.blockBytes()
	for i := range count {
		e := node[header+i*entry:]
		if depth == 1 {
			leaf := uint64(e.u16(8))<<32 | uint64(e.u32(4))
			if leaf == 0 || leaf >= s.blocks() {
				return nil, nil
			}

			b, err := readAt(r, int64(leaf)*block, int(block))
			if err != nil || len(b) < int(block) {
				return nil, err
			}

			below, err := s.extents(r, b, false)
			if err != nil || below == nil {
				return nil, err
			}

			out = append(out, below...)
			continue
		}

		blocks, start := int64(e.u16(4)), uint64(e.u16(6))<<32|uint64(e.u32(8))
		if blocks == 0 || blocks > extMaxLength || start == 0 || start >= s.blocks() {
			return nil, nil
		}

		out = append(out, Span{int64(start) * block, (int64(start) + blocks) * block})
	}

	return out, nil
}

// ownFields returns the counters that each mount recomputes from the allocation groups, the checksum, and the position
// of the last change in the log.
func (s xfsSuper) ownFields(size int64) *ownFields {
	if s.version() < 5 {
		return nil
	}

	// A block number has the allocation group in its high bits.
	group, start := s.u64(48)>>s[124], s.u64(48)&(1<<s[124]-1)
	blocks, block := s.u32(96), int64(s.u32(4))
	if group >= uint64(s.u32(88)) || start >= uint64(s.u32(84)) || blocks == 0 || blocks > s.u32(84) {
		return nil
	}

	from := (int64(group)*int64(s.u32(84)) + int64(start)) * block
	log := Span{from, from + int64(blocks)*block}
	if log.To > size {
		return nil
	}

	return &ownFields{superblock: s, log: []Span{log}, fields: []Span{
		{128, 152}, // sb_icount, sb_ifree, sb_fdblocks
		{224, 228}, // sb_crc
		{240, 248}, // sb_lsn
	}}
}
