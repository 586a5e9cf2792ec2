package treediff

import (
	"encoding/binary"
	"os"

	"golang.org/x/sys/unix"
)

// This file determines whether an inode number identifies the same object in both trees. That is so until the
// trees part. From then on, each tree gives the next free numbers to new files,
// so unrelated files may have the same number, and often the same birth time,
// because a program makes hundreds of files within one tick of the clock of some milliseconds.
// The generation, which file handles contain beside the number,
// distinguishes such files.

// generation is a number with which a filesystem distinguishes an inode from earlier and later ones with the
// same inode number.
type generation struct {
	n     uint64
	known bool
}

// generationKind says what equal generations prove on a filesystem.
type generationKind int

const (
	noGenerations generationKind = iota // unknown to this code

	// ext4 assigns a random generation to each new file.
	uniqueGenerations

	// XFS increments the generation when it reuses an inode number, so two trees may
	// assign the same one. On btrfs, generations are transactions, which all trees share.
	commonGenerations
)

// generationsOf returns the kind of generations on the filesystem of f.
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

// readGeneration reads the generation of a file; see statAt for name. It is unknown without support for
// file handles, or if a sandbox forbids reading them.
func (k generationKind) readGeneration(at *os.File, name string) generation {
	if k == noGenerations {
		return generation{}
	}

	flags := 0 // do not follow a symbolic link
	if name == "" {
		flags = unix.AT_EMPTY_PATH
	}

	h, _, err := unix.NameToHandleAt(int(at.Fd()), name, flags)
	if err != nil {
		return generation{}
	}

	return parseHandle(h.Type(), h.Bytes())
}

// parseHandle returns the generation in a handle of ext4, XFS or btrfs. Their layouts
// are fixed, because NFS clients store handles.
func parseHandle(typ int32, handle []byte) generation {
	const (
		ino32 = 0x01 // FILEID_INO32_GEN: 32 bits of inode number, then the generation
		ino64 = 0x81 // XFS: 64 bits of inode number, then the generation
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

// sameObject reports whether two inodes in trees of the same origin are the same object.
// The filesystem reuses the number of a deleted file, but with another birth time.
// Generations distinguish files that each tree made itself. If they do
// not help, and the file may be younger than the second tree, sameObject returns
// false, and the file counts as deleted and added.
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

	return c.parted.IsZero() // nothing is known, so times are trusted
}
