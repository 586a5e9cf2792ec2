package content

import (
	"context"
	"os"

	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/linux/kernel"

	"golang.org/x/sys/unix"
)

// OwnMountState is MountState for a caller that is about to use or unmount a volume. A pool that was copied while
// volumes were mounted has a catalogue that records the mounts of the original: to the copy they are not mounted.
func (acc *Access) OwnMountState(row catalog.Row, a catalog.MountRecord) State {
	state := acc.MountState(row, a)
	if state != Mounted {
		return state
	}

	// If the object is damaged or gone, the attachment is zero, and nothing is compared.
	w, _ := acc.attachmentOf(context.Background(), row)
	return ownMountState(state, row, a, w)
}

// ownMountState is OwnMountState where MountState and the attachment are known; the zero attachment is not compared.
func ownMountState(state State, row catalog.Row, a catalog.MountRecord, w driver.Attachment) State {
	if state == Mounted && isOriginals(row, a, w) {
		return NotMounted
	}
	return state
}

// isOriginals reports whether a recorded mount exists, but is of the pool that this one was copied from. A driver that
// keeps no files in the pool has no such copies.
func isOriginals(row catalog.Row, a catalog.MountRecord, w driver.Attachment) bool {
	if w.Block || w.Image+w.Tree == "" || row.IsOverlay() && w.Tree != "" {
		return false
	}

	var own unix.Stat_t
	if err := unix.Stat(w.Image+w.Tree, &own); err != nil { // an object has one of them
		return false
	}

	switch {
	case w.Image != "":
		return a.Loop >= 0 && (own.Dev != a.Dev || own.Ino != a.Ino)
	case a.MountID != 0:
		m, err := kernel.MountAt(unix.AT_FDCWD, a.Mountpoint)
		return err == nil && m.Root && (own.Dev != m.Dev || own.Ino != m.Ino)
	}

	there, err := os.Stat(a.Mountpoint) // where the link leads
	tree, terr := os.Stat(w.Tree)
	return err == nil && terr == nil && !os.SameFile(there, tree)
}
