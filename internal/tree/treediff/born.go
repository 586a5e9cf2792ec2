package treediff

import (
	"encoding/binary"
	"os"

	"golang.org/x/sys/unix"
)

// This file tells whether one inode number means one object in both trees. Until the
// trees parted it does. From then on each gives the next free numbers to new files,
// so that two files with nothing in common have one number, and often one time of
// birth: that is a tick of the clock, some milliseconds, in which a program makes
// hundreds of files. The generation, which file handles hold beside the number,
// tells such files apart.

// generation is what a filesystem keeps of an inode to tell it from others that had
// or will have its number.
type generation struct {
	n     uint64
	known bool
}

// generationKind says what equal generations prove.
type generationKind int

const (
	noGenerations generationKind = iota // none that this code knows

	// ext4 draws them at random for each file that it makes.
	uniqueGenerations

	// XFS counts on from the last one when it gives a number again, so that two trees
	// come to the same. Those of btrfs are transactions, of all trees together.
	commonGenerations
)

// generationsOf says what generations are on the filesystem of f.
func generationsOf(f *os.File) (generationKind, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return noGenerations, failed("", "statfs", err)
	}
	switch int64(st.Type) {
	case unix.EXT4_SUPER_MAGIC:
		return uniqueGenerations, nil
	case unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC:
		return commonGenerations, nil
	}
	return noGenerations, nil
}

// readGeneration asks for the generation of a file; name as for statAt. It is unknown where there
// are no file handles, or where a sandbox forbids asking for them.
func (k generationKind) readGeneration(at *os.File, name string) generation {
	if k == noGenerations {
		return generation{}
	}

	flags := 0 // a symbolic link is not followed
	if name == "" {
		flags = unix.AT_EMPTY_PATH
	}

	h, _, err := unix.NameToHandleAt(int(at.Fd()), name, flags)
	if err != nil {
		return generation{}
	}

	return parseHandle(h.Type(), h.Bytes())
}

// parseHandle finds the generation in a handle of ext4, XFS or btrfs, whose layouts
// are fixed: NFS clients keep handles.
func parseHandle(typ int32, handle []byte) generation {
	const (
		ino32 = 0x01 // FILEID_INO32_GEN: 32 bits of inode number, then the generation
		ino64 = 0x81 // of XFS: 64 bits of inode number
		btrfs = 0x4d // FILEID_BTRFS_WITHOUT_PARENT: inode number and subvolume
	)
	off, ok := map[int32]int{ino32: 4, ino64: 8, btrfs: 16}[typ]
	if !ok || len(handle) < off+4 {
		return generation{}
	}
	return generation{uint64(binary.NativeEndian.Uint32(handle[off:])), true}
}

// maybeNew reports whether an inode may have been made after the trees parted.
func (c *comparer) maybeNew(i *inode) bool {
	return c.parted.IsZero() || i.btime == (unix.StatxTimestamp{}) || !timeOf(i.btime).Before(c.parted)
}

// sameObject reports whether two inodes of trees of one origin are the same object.
// A number is given again when a file is gone, but not with the same time of birth;
// what both trees made for themselves is told apart by generations. Where these do
// not help, and it is not known that the file is older than the second tree, the
// answer is no: a file that is not recognised counts as deleted and added.
func (c *comparer) sameObject(a, b *inode) bool {
	if a.ino != b.ino || a.mode&unix.S_IFMT != b.mode&unix.S_IFMT || a.btime != b.btime {
		return false
	}
	if !c.maybeNew(a) {
		return true
	}
	if a.generation != b.generation {
		return false
	}

	switch {
	case a.generation.known && c.generations == uniqueGenerations:
		return true
	case a.generation.known && c.o.Hints != nil && c.o.Hints.Parted != 0:
		return a.generation.n <= c.o.Hints.Parted
	}

	return c.parted.IsZero() // then nothing is known, and times are trusted
}
