package treediff

import (
	"context"
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"pando/internal/linux/kernel"
)

// BtrfsHints asks btrfs which inodes of two subvolumes have changed since they
// were identical, based on transaction numbers. common is a subvolume that both
// are or descend from, nil if none is known or left. BtrfsHints returns nil without an error if the
// kernel cannot tell: not on btrfs, without root, with nested subvolumes, or without a known relation.
func BtrfsHints(ctx context.Context, a, b, common *os.File) (*Hints, error) {
	for _, f := range []*os.File{a, b} {
		if is, err := kernel.IsBtrfs(f); err != nil || !is {
			return nil, failed("", "statfs", err)
		}
	}

	if os.Geteuid() != 0 {
		return nil, nil
	}

	// Commit, because only committed changes are found.
	if err := kernel.BtrfsSync(b); err != nil && !errors.Is(err, unix.EROFS) {
		return nil, failed("", "sync", err)
	}

	// Find the transaction at which they were identical.
	ia, err := kernel.SubvolInfoOf(a)
	if err != nil {
		return nil, failed("", "subvolume", err)
	}

	ib, err := kernel.SubvolInfoOf(b)
	if err != nil {
		return nil, failed("", "subvolume", err)
	}

	var since uint64
	switch none := [16]byte{}; {
	case ib.ParentUUID == ia.UUID:
		since = ib.MadeBy
	case ia.ParentUUID == ib.UUID:
		since = ia.MadeBy
	case ia.ParentUUID == ib.ParentUUID && ia.ParentUUID != none:
		since = min(ia.MadeBy, ib.MadeBy)
	case common != nil:
		ic, err := kernel.SubvolInfoOf(common)
		if err != nil {
			return nil, failed("", "subvolume", err)
		}
		since = ic.MadeBy
	default:
		return nil, nil
	}

	// Collect the inodes that have changed since.
	h := &Hints{Method: "btrfs", Parted: since, Changed: map[uint64]Links{}, Index: btrfsIndex{a, b}}
	for _, x := range []struct {
		f  *os.File
		id uint64
	}{{a, ia.ID}, {b, ib.ID}} {
		inside, err := kernel.SubvolChildren(x.f, x.id)
		if err != nil {
			return nil, failed("", "subvolumes", err)
		}
		if len(inside) > 0 {
			return nil, nil
		}

		err = kernel.BtrfsChangedSince(x.f, since, func(i kernel.BtrfsInode) error {
			h.Changed[i.Ino] = Links{}
			return ctx.Err()
		})
		if err != nil {
			return nil, failed("", "looking for what has changed", err)
		}
	}

	return h, nil
}

// btrfsIndex is the Index of two subvolumes.
type btrfsIndex struct{ a, b *os.File }

func (x btrfsIndex) side(inB bool) *os.File {
	if inB {
		return x.b
	}
	return x.a
}

func (x btrfsIndex) Names(inB bool, ino uint64) ([]Name, error) {
	names, err := kernel.BtrfsNames(x.side(inB), ino)
	out := make([]Name, len(names))
	for i, n := range names {
		out[i] = Name(n)
	}
	return out, err
}

func (x btrfsIndex) DirPath(inB bool, ino uint64) (string, bool, error) {
	return kernel.BtrfsDirPath(x.side(inB), ino)
}
