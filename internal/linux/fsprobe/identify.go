package fsprobe

import (
	"bytes"
	"encoding/binary"
	"io"
	"unicode"
	"unicode/utf8"
)

// Class says what users can do with content other than ext4 and XFS.
type Class int

const (
	Unknown     Class = iota
	Filesystem        // another filesystem: mount it
	Partitions        // a table of partitions: choose one of them
	Container         // encrypted, or a part of a volume group: open it first
	VirtualDisk       // the file format of a hypervisor: convert it
	SparseImage       // of Android: convert it
	Swap              // contains no files
	Archive           // unpack it
	Text              // nothing to import
	Program           // nothing to import
)

// Content is the result of Identify.
type Content struct {
	Class  Class
	Name   string // "GPT", "LUKS", "btrfs"; for a VirtualDisk qemu-img's name of the format
	Phrase string // "a qcow2 disk image": what follows "it is"
}

// signature is a magic string at a fixed offset.
type signature struct {
	off          int64
	magic        string
	class        Class
	name, phrase string // of Content
}

// signatures are those of libblkid, qemu and file(1). Partition tables come last, because
// images of filesystems may have them as well.
var signatures = []signature{
	{0, "QFI\xfb", VirtualDisk, "qcow2", "a qcow2 disk image"},
	{0, "QED\x00", VirtualDisk, "qed", "a QED disk image"},
	{0, "KDMV", VirtualDisk, "vmdk", "a VMDK disk image"},
	{0, "COWD", VirtualDisk, "vmdk", "a VMDK disk image"},
	{0, "# Disk DescriptorFile", VirtualDisk, "vmdk", "the description of a VMDK disk image"},
	{0, "vhdxfile", VirtualDisk, "vhdx", "a VHDX disk image"},
	{0, "conectix", VirtualDisk, "vpc", "a VHD disk image"},
	{0, "WithoutFreeSpace", VirtualDisk, "parallels", "a Parallels disk image"},
	{0, "WithouFreSpacExt", VirtualDisk, "parallels", "a Parallels disk image"},
	{64, "\x7f\x10\xda\xbe", VirtualDisk, "vdi", "a VDI disk image"},
	{0, "\x3a\xff\x26\xed", SparseImage, "sparse", "an Android sparse image"},

	{0, "LUKS\xba\xbe", Container, "LUKS", "encrypted with LUKS"},
	{3, "-FVE-FS-", Container, "BitLocker", "encrypted with BitLocker"},
	{512, "LABELONE", Container, "LVM", "a physical volume of LVM"},
	{0, "LABELONE", Container, "LVM", "a physical volume of LVM"},
	{1024, "LABELONE", Container, "LVM", "a physical volume of LVM"},
	{1536, "LABELONE", Container, "LVM", "a physical volume of LVM"},
	{4096, "\xfc\x4e\x2b\xa9", Container, "MD", "a member of an MD RAID"},
	{0, "\xfc\x4e\x2b\xa9", Container, "MD", "a member of an MD RAID"},
	{4096 + 24, "\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81",
		Container, "bcache", "a bcache device"},

	{4096 + 24, "\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef",
		Filesystem, "bcachefs", "a bcachefs image"},
	{65536 + 64, "_BHRfS_M", Filesystem, "btrfs", "a btrfs image"},
	{32769, "CD001", Filesystem, "iso9660", "an ISO 9660 image"},
	{32769, "BEA01", Filesystem, "udf", "a UDF image"},
	{0, "hsqs", Filesystem, "squashfs", "a squashfs image"},
	{0, "\x45\x3d\xcd\x28", Filesystem, "cramfs", "a cramfs image"},
	{1024, "\xe2\xe1\xf5\xe0", Filesystem, "erofs", "an EROFS image"},
	{1024, "\x10\x20\xf5\xf2", Filesystem, "f2fs", "an F2FS image"},
	{3, "NTFS    ", Filesystem, "ntfs", "an NTFS image"},
	{3, "EXFAT   ", Filesystem, "exfat", "an exFAT image"},
	{82, "FAT32   ", Filesystem, "vfat", "a FAT image"},
	{54, "FAT16   ", Filesystem, "vfat", "a FAT image"},
	{54, "FAT12   ", Filesystem, "vfat", "a FAT image"},
	{54, "FAT     ", Filesystem, "vfat", "a FAT image"},
	{65536 + 52, "ReIsErFs", Filesystem, "reiserfs", "a ReiserFS image"},
	{65536 + 52, "ReIsEr2Fs", Filesystem, "reiserfs", "a ReiserFS image"},
	{65536 + 52, "ReIsEr3Fs", Filesystem, "reiserfs", "a ReiserFS image"},
	{32768, "JFS1", Filesystem, "jfs", "a JFS image"},
	{1024, "H+\x00\x04", Filesystem, "hfsplus", "an HFS+ image"},
	{1024, "HX\x00\x05", Filesystem, "hfsplus", "an HFS+ image"},
	{32, "NXSB", Filesystem, "apfs", "an APFS image"},
	{65536, "\x01\x16\x19\x70", Filesystem, "gfs2", "a GFS2 image"},

	{4096 - 10, "SWAPSPACE2", Swap, "swap", "swap space"},
	{4096 - 10, "SWAP-SPACE", Swap, "swap", "swap space"},
	{16384 - 10, "SWAPSPACE2", Swap, "swap", "swap space"},
	{65536 - 10, "SWAPSPACE2", Swap, "swap", "swap space"},

	{0, "PK\x03\x04", Archive, "zip", "a zip archive"},
	{0, "7z\xbc\xaf\x27\x1c", Archive, "7z", "a 7z archive"},
	{0, "Rar!\x1a\x07", Archive, "rar", "a rar archive"},
	{0, "070701", Archive, "cpio", "a cpio archive"},
	{0, "070702", Archive, "cpio", "a cpio archive"},
	{0, "070707", Archive, "cpio", "a cpio archive"},
	{0, "!<arch>\n", Archive, "ar", "an ar archive or a Debian package"},
	{0, "\xed\xab\xee\xdb", Archive, "rpm", "an RPM package"},
	{0, "\x7fELF", Program, "ELF", "a program or library"},

	{512, "EFI PART", Partitions, "GPT", "a disk with a GPT partition table"},
	{4096, "EFI PART", Partitions, "GPT", "a disk with a GPT partition table"},
}

// identifyBytes is how much of the image Identify reads: up to the end of the first label
// of ZFS, which is behind all other signatures.
const identifyBytes = 256 << 10

// Identify identifies the content of a file of size bytes that is neither ext4 nor XFS.
// If it cannot, the Class is Unknown, without an error.
func Identify(r io.ReaderAt, size int64) (Content, error) {
	b, err := readAt(r, 0, identifyBytes)
	if err != nil {
		return Content{}, err
	}

	for _, s := range signatures {
		if hasAt(b, s.off, s.magic) {
			return Content{s.class, s.name, s.phrase}, nil
		}
	}

	switch {
	case hasAt(b, extOffset+56, "\x53\xef") && extSuper(b[extOffset:]).incompat()&extIncompatDevice != 0:
		return Content{Container, "ext4 journal", "the external journal of an ext4"}, nil
	case isZFS(b):
		return Content{Container, "zfs", "a member of a zpool"}, nil
	case isMBR(b):
		return Content{Partitions, "MBR", "a disk with an MBR partition table"}, nil
	case isText(b):
		return Content{Text, "text", "a text file"}, nil
	}

	// Check the footer of a VHD of fixed size, in which the plain disk comes first.
	if size >= 512 {
		foot, err := readAt(r, size-512, 8)
		if err != nil {
			return Content{}, err
		}
		if string(foot) == "conectix" {
			return Content{VirtualDisk, "vpc", "a VHD disk image"}, nil
		}
	}

	return Content{}, nil
}

func hasAt(b []byte, off int64, magic string) bool {
	return int64(len(b)) >= off && bytes.HasPrefix(b[off:], []byte(magic))
}

// isZFS reports whether b contains an uberblock. A ring of them, of at least 1 KiB each, follows the
// first 128 KiB of a label.
func isZFS(b []byte) bool {
	const magic = 0x00bab10c
	for off := 128 << 10; off+8 <= len(b); off += 1024 {
		if binary.LittleEndian.Uint64(b[off:]) == magic || binary.BigEndian.Uint64(b[off:]) == magic {
			return true
		}
	}
	return false
}

// isMBR reports whether b is a boot record with a plausible partition table. Boot
// sectors of filesystems end with the same two bytes.
func isMBR(b []byte) bool {
	if !hasAt(b, 510, "\x55\xaa") {
		return false
	}

	used := 0
	for e := 446; e < 510; e += 16 {
		kind, sectors := b[e+4], binary.LittleEndian.Uint32(b[e+12:])
		if b[e]&0x7f != 0 || (kind == 0) != (sectors == 0) {
			return false
		}
		if kind != 0 {
			used++
		}
	}

	return used > 0
}

// textBytes is how much of a file isText checks.
const textBytes = 4096

func isText(b []byte) bool {
	if len(b) > textBytes {
		b = b[:textBytes]
		for range utf8.UTFMax { // the last rune may have been cut
			if r, n := utf8.DecodeLastRune(b); r == utf8.RuneError && n == 1 {
				b = b[:len(b)-1]
			}
		}
	}

	for len(b) > 0 {
		r, n := utf8.DecodeRune(b)
		if r == utf8.RuneError && n == 1 || !unicode.IsPrint(r) && !unicode.IsSpace(r) && r != '\x1b' {
			return false
		}
		b = b[n:]
	}

	return true
}
