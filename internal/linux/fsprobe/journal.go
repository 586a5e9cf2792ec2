package fsprobe

import (
	"encoding/binary"
	"io"
)

// The superblock of a journal is its first block; see Documentation/filesystems/ext4 and include/linux/jbd2.h. Its
// numbers are big endian.
const (
	journalMagic  = 0xC03B3998
	journalErrno  = 32 // s_errno, set by jbd2_journal_abort
	journalHeader = 36 // bytes read of it
)

// JournalAborted reports whether an ext4 has aborted its journal: nothing can be written to it any more until it has
// been mounted anew. r is the block device on which it is mounted, read through the kernel's memory, which has the mark
// even if it could not be written. False for other content and for an ext4 without a journal of its own.
func JournalAborted(r io.ReaderAt, size int64) (bool, error) {
	b, err := readAt(r, extOffset, extBytes)
	if err != nil || len(b) < extBytes || extSuper(b).u16(56) != extMagic {
		return false, err
	}

	log, err := extSuper(b).journal(r, size)
	if err != nil || len(log) == 0 {
		return false, err
	}

	j, err := readAt(r, log[0].From, journalHeader)
	if err != nil || len(j) < journalHeader || binary.BigEndian.Uint32(j) != journalMagic {
		return false, err
	}

	return binary.BigEndian.Uint32(j[journalErrno:]) != 0, nil
}
