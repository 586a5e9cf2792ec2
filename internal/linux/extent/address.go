package extent

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Address identifies the content of an image by the place of its blocks: files of one
// filesystem (XFS or btrfs) with the same address at the same moment had the same bytes at
// that moment. It is "" if that cannot be guaranteed: if some of the data has no stable
// address or is not written yet, or on other filesystems. Address writes dirty data first.
//
// A write to shared blocks gives the written file new blocks. So the content at an address
// stays the same as long as a file that nobody writes to has it, and two files with the
// same address have had it since they were identical: reading a map in several steps,
// while a program writes, cannot make two maps equal.
func Address(f *os.File) (string, error) {
	size, _, err := bothSizes(f, f)
	if err != nil {
		return "", unlessUnsupported(err)
	}

	realtime := false
	if isXFS(f) {
		if realtime, err = onRealtime(f); err != nil {
			return "", fmt.Errorf("%s: FSGETXATTR: %w", f.Name(), err)
		}
	}

	sum := sha256.New()
	fmt.Fprintf(sum, "%d %t\n", size, realtime)
	write := func(x Extent) { fmt.Fprintf(sum, "%d %d %d\n", x.Logical, x.Physical, x.Length) }
	var last Extent // neighbours are joined, because the kernel may split them anywhere
	known := true
	err = Scan(f, true, func(x Extent) error {
		if x.Flags&^(Last|Shared|merged) != 0 {
			known = false
			return nil
		}
		if x.Logical == last.End() && x.Physical-x.Logical == last.Physical-last.Logical {
			last.Length += x.Length
			return nil
		}
		write(last)
		last = x
		return nil
	})
	if err != nil || !known {
		return "", err
	}

	write(last)
	return hex.EncodeToString(sum.Sum(nil)), nil
}

// merged means that the filesystem has joined pieces that are not one extent.
const merged Flags = 0x1000

func isXFS(f *os.File) bool {
	var sf unix.Statfs_t
	return unix.Fstatfs(int(f.Fd()), &sf) == nil && int64(sf.Type) == xfsMagic
}

func unlessUnsupported(err error) error {
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	return err
}
