package extent

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Address names the content of an image by where it lies: files of one filesystem (an
// XFS or btrfs) with the same address at one moment had the same bytes at that moment.
// It is "" if that cannot be told: if some of it has no address of its own, is not
// written yet, or the file lies elsewhere. Dirty data is written first.
//
// A write gives the blocks that files share a new address in the file that it changes.
// So an address keeps its content as long as a file that nobody writes to has it, and two
// files that still have the same address have it from a time when they were the same:
// reading a map in several steps, while somebody writes, cannot make two maps alike.
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
	var last Extent // neighbours are one: where the kernel splits them differs
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

// merged says that the filesystem has put pieces together that are no extent of its own.
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
