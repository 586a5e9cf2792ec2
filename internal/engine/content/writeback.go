package content

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/linux/kernel"

	"golang.org/x/sys/unix"
)

// unwritten says whether data of a mounted volume could not be written to the pool.
type unwritten struct {
	cause   error // nil: everything was written
	stopped bool  // nor can anything be from now on: the filesystem in the image has given up

	unrecorded error // why this could not be recorded: then the next umount may not know of it
}

// writeBack writes what is in memory of a filesystem or block device, given its root, to the pool. The kernel reports a
// failure once, even one of some time ago, and from then on treats the data as written: a second call succeeds.
func writeBack(root *os.File, raw bool) (u unwritten) {
	flush := func() error {
		if raw {
			return unix.Fsync(int(root.Fd()))
		}
		return unix.Syncfs(int(root.Fd()))
	}

	if u.cause = flush(); u.cause == nil {
		return u
	}

	// A second failure means that nothing can be written at all: ext4 has aborted its journal, XFS has shut down.
	u.stopped = flush() != nil
	return u
}

// writeBackMounted is writeBack for a volume that is mounted in this namespace.
func (acc *Access) writeBackMounted(ctx context.Context, row catalog.Row, a catalog.MountRecord) unwritten {
	raw := a.MountID == 0
	if raw && a.Loop < 0 && a.Dev == 0 {
		return unwritten{} // a link to a tree, which umount does not remove
	}

	if row.IsOverlay() {
		return acc.writeBackUpper(ctx, row, a)
	}

	root, err := os.Open(a.Mountpoint)
	if errors.Is(err, unix.EIO) {
		return unwritten{cause: err, stopped: true} // an XFS that has shut down is not even opened
	}
	if err != nil {
		return unwritten{} // unmounted by hand
	}

	defer root.Close()
	if m, err := kernel.MountAt(int(root.Fd()), ""); !raw && (err != nil || m.ID != a.MountID) {
		return unwritten{} // unmounted just now: this is another filesystem
	}

	return writeBack(root, raw)
}

// writeBackUpper is writeBackMounted for an overlay, which does not report the failures of its upper layer.
func (acc *Access) writeBackUpper(ctx context.Context, row catalog.Row, a catalog.MountRecord) unwritten {
	w, err := acc.drv.Attachment(ctx, row.ID)
	if err != nil {
		return unwritten{} // unmounted and destroyed by hand
	}

	m, err := acc.reopenUpper(ctx, row, a, w)
	if errs.Is(err, errs.NotFound) {
		return unwritten{} // unmounted by hand
	}
	if err != nil {
		return unwritten{cause: err, stopped: true}
	}

	defer m.Close()

	root, err := m.Open()
	if err != nil {
		return unwritten{cause: err, stopped: true}
	}

	defer root.Close()

	return writeBack(root, false)
}

// UmountWriteBack makes sure that unmounting a volume does not lose data in silence. It fails each time if data was
// lost since the volume was mounted, whichever process noticed it: a later sync that succeeds writes nothing of it.
// With discard it succeeds, and returns when pando last noticed such a loss; zero if nothing was lost. NoSpace, IO.
func (acc *Access) UmountWriteBack(
	ctx context.Context, row catalog.Row, a catalog.MountRecord, discard bool,
) (lostAt time.Time, err error) {
	u := acc.writeBackMounted(ctx, row, a)
	if u.cause == nil {
		u.cause = acc.syncIfNearlyFull(ctx, row)
	}
	if u.cause != nil {
		u.unrecorded = acc.recordLostWrites(ctx, a) // even to discard it: the umount may still be refused
	}

	lost, known, err := acc.records.LostWrites(ctx, a)
	switch {
	case err != nil && u.cause == nil:
		return lostAt, err
	case u.cause == nil && !known:
		return lostAt, nil
	case discard && known:
		return lost.At, nil
	case discard:
		return time.Now(), nil
	case u.cause == nil:
		u.cause = fmt.Errorf("writes failed before %s", lost.At.Local().Format(time.DateTime))
	}

	then := errs.Messagef("%s says how to give up the rest", errs.Run("umount", errs.Param("help")))
	return lostAt, errs.Wrap("umount", row.Name, acc.lostError(ctx, a, u, then))
}

// copyWriteBack writes back the data of a volume in use that is about to be copied. root is that of its filesystem, or
// its block device.
func (acc *Access) copyWriteBack(ctx context.Context, l Live, root *os.File) error {
	u := writeBack(root, l.Row.FS == driver.None)
	if u.cause == nil {
		u.cause = acc.SyncEphemeral(ctx, l.Row)
	}
	if u.cause == nil {
		return nil
	}
	u.unrecorded = acc.recordLostWrites(ctx, l.Record)
	return acc.lostError(ctx, l.Record, u, errs.Messagef("have programs write it again"))
}

// warnLost warns that a copy lacks data that is known to be lost.
func warnLost(ctx context.Context, l Live) {
	if l.InUse() && l.hasLost {
		warnings.AddEach(ctx, "writes to %s failed before %s: the copy lacks them, unless programs have written them again",
			l.Row.Name, l.lost.At.Local().Format(time.DateTime))
	}
}

// FlushToMeasure writes back the data of a mounted volume, so that it counts when the volume is measured.
func (acc *Access) FlushToMeasure(ctx context.Context, row catalog.Row, a catalog.MountRecord) {
	u := acc.writeBackMounted(ctx, row, a)
	if u.cause == nil {
		return
	}
	u.unrecorded = acc.recordLostWrites(ctx, a)
	warnings.AddEach(ctx, "%s: %v", row.Name, acc.lostError(ctx, a, u, ""))
}

// recordLostWrites records that writes were lost in a mounted volume: the kernel does not report it again. Trees share
// the pool's filesystem, which does not say whose writes it has lost: it is recorded for all mounted ones. In a pool
// that is full to the last byte it may fail, even though it may spend the pool's reserve.
func (acc *Access) recordLostWrites(ctx context.Context, a catalog.MountRecord) error {
	var shared func(catalog.MountRecord) bool
	if acc.sharesFilesystem(a) {
		shared = acc.sharesFilesystem
	}
	return acc.records.NoteLostWrites(context.WithoutCancel(ctx), a, shared)
}

// sharesFilesystem reports whether a mounted volume is a tree in the pool's filesystem.
func (acc *Access) sharesFilesystem(a catalog.MountRecord) bool {
	_, own := acc.drv.(driver.Activator) // such a driver gives each tree a filesystem
	return !own && a.Loop < 0 && a.Dev == 0
}

// lostError explains which data could not be written: NoSpace if the pool is full, else IO. The volume stays as it is,
// with all data still in memory. then is the end of the hint.
func (acc *Access) lostError(ctx context.Context, a catalog.MountRecord, u unwritten, then errs.Message) error {
	kind, free := errs.IO, errs.Message("")
	s, err := acc.pool.Space(context.WithoutCancel(ctx))
	if errs.Is(u.cause, errs.NoSpace) || err == nil && s.FreeBytes < nearlyFull {
		kind, free = errs.NoSpace, errs.Messagef("%s; ", errs.FreeSpace())
	}
	what := "some data written to it could not be stored in the pool"
	if u.stopped {
		what = "it can no longer write to the pool, and some data written to it is only in memory"
	}
	cause := fmt.Errorf("%s: %w", what, u.cause)
	if u.unrecorded != nil {
		cause = fmt.Errorf("%w (pando could not record this, and the next umount may discard that data: %w)", cause,
			u.unrecorded)
	}
	return (&errs.Error{Kind: kind, Err: cause}).
		WithHint("%scopy what you need out of %s, where it can still be read; %s", free, a.Mountpoint, then)
}
