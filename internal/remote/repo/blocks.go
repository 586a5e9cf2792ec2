package repo

import "math/bits"

// frameBlocks is the number of blocks in a full frame of data.
const frameBlocks = FrameBytes / BlockBytes

// BlockSet is a set of blocks of a frame's content. Each block has BlockBytes, except possibly the last.
type BlockSet [frameBlocks / 64]uint64

// AllBlocks contains every block.
var AllBlocks = BlockSet{^uint64(0), ^uint64(0)}

// Add adds the blocks that overlap the byte range [from, to).
func (b *BlockSet) Add(from, to int64) {
	for i := max(from, 0) / BlockBytes; i*BlockBytes < to && i < frameBlocks; i++ {
		b[i/64] |= 1 << (i % 64)
	}
}

// Has reports whether the set contains block i.
func (b *BlockSet) Has(i int) bool { return b[i/64]&(1<<(i%64)) != 0 }

// Count returns how many of the first n blocks are in the set.
func (b *BlockSet) Count(n int) int {
	c := 0
	for i := range b {
		c += bits.OnesCount64(b.maskedWord(i, n))
	}
	return c
}

// maskedWord returns word i of the set with all but the first n blocks cleared.
func (b *BlockSet) maskedWord(i, n int) uint64 {
	if left := n - 64*i; left < 64 {
		return b[i] & (1<<max(left, 0) - 1)
	}
	return b[i]
}

// isSubsetOf reports whether o contains every one of the first n blocks that b contains.
func (b *BlockSet) isSubsetOf(o *BlockSet, n int) bool {
	for i := range b {
		if b.maskedWord(i, n)&^o[i] != 0 {
			return false
		}
	}
	return true
}

// covers reports whether the set contains every block that overlaps the byte range [from, to).
func (b *BlockSet) covers(from, to int64) bool {
	var want BlockSet
	want.Add(from, to)
	return want.isSubsetOf(b, frameBlocks)
}

// Blocks returns the number of blocks in the frame's content.
func (f Frame) Blocks() int { return int(f.Plain+BlockBytes-1) / BlockBytes }

// eachRun calls fn for every run of consecutive blocks in the set, as a byte range of a content of size bytes.
func (b *BlockSet) eachRun(size int, fn func(from, to int)) {
	total := (size + BlockBytes - 1) / BlockBytes
	for i := 0; i < total; i++ {
		if !b.Has(i) {
			continue
		}
		from := i
		for i < total && b.Has(i) {
			i++
		}
		fn(from*BlockBytes, min(i*BlockBytes, size))
	}
}
