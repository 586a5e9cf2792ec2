package content

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/linux/fsprobe"
	"pando/internal/linux/kernel"

	"golang.org/x/sys/unix"
)

// unwritten says whether data of a mounted volume could not be written to the pool.
type unwritten struct {
	cause   error // nil: everything was written
	stopped bool  // nor can anything be from now on: the filesystem in the image has given up
}

// writeBack writes what is in memory of a volume's filesystem or block device, given its root, to the pool. The kernel
// reports a failure once, even one of some time ago, and from then on treats the data as written: a second call
// succeeds.
func writeBack(root *os.File, fs driver.FS) (u unwritten) {
	flush := func() error {
		if fs == driver.None {
			return unix.Fsync(int(root.Fd()))
		}
		return unix.Syncfs(int(root.Fd()))
	}

	u.cause = flush()
	if fs == driver.Ext4 && journalAborted(root) {
		return unwritten{cause: cmp.Or(u.cause, errJournalAborted), stopped: true}
	}
	if u.cause == nil {
		return u
	}

	// A second failure means that nothing can be written at all: XFS has shut down.
	u.stopped = flush() != nil
	return u
}

var errJournalAborted = fmt.Errorf("ext4 has aborted its journal: %w", unix.EIO)

// journalAborted reports whether the mounted ext4 that root is on has given up. syncfs(2) does not always say so: it
// succeeds while ext4 has nothing to commit and has not noticed (fs/ext4/super.c, ext4_sync_fs), and, before Linux
// 6.14, always once ext4 is read-only (fs/sync.c, sync_filesystem).
func journalAborted(root *os.File) bool {
	var st unix.Stat_t
	if unix.Fstat(int(root.Fd()), &st) != nil {
		return false
	}

	device, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev)))
	if err != nil {
		return false
	}

	dev, err := os.Open(filepath.Join("/dev", filepath.Base(device)))
	if err != nil {
		return false
	}
	defer dev.Close()

	size, err := dev.Seek(0, io.SeekEnd)
	if err != nil {
		return false
	}

	aborted, err := fsprobe.JournalAborted(dev, size)
	return err == nil && aborted
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

	return writeBack(root, row.FS)
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

	return writeBack(root, row.FS)
}

// UmountWriteBack makes sure that unmounting a volume does not lose data in silence. It fails if data was lost since
// the volume was mounted, whichever process noticed first, and however often it is called: the kernel counts the data
// as written, and nobody knows whether programs have written it again. With discard, it only warns.
func (acc *Access) UmountWriteBack(ctx context.Context, row catalog.Row, a catalog.MountRecord, discard bool) error {
	u := acc.writeBackMounted(ctx, row, a)
	if u.cause == nil {
		u.cause = acc.syncIfNearlyFull(ctx, row)
	}
	if u.cause != nil {
		acc.recordLostWrites(ctx, a, u)
	}

	lost, known, err := acc.records.LostWrites(ctx, a)
	switch {
	case u.cause == nil && err != nil:
		return err
	case u.cause == nil && !known:
		return nil
	case u.cause == nil: // noticed before
		u.cause = fmt.Errorf("writes failed before %s", lost.At.Local().Format(time.DateTime))
	case !known:
		lost.At = time.Now()
	}

	if discard {
		warnings.AddEach(ctx, "%s is unmounted without data written before %s, which could not be stored in the pool",
			row.Name, lost.At.Local().Format(time.DateTime))
		return nil
	}

	then := errs.Messagef("what programs have not written again is given up by %s",
		errs.Run("umount", row.Name, errs.Param("discard")))
	return errs.Wrap("umount", row.Name, acc.lostError(ctx, a, u, then))
}

// copyWriteBack writes back the data of a volume in use that is about to be copied. root is that of its filesystem, or
// its block device.
func (acc *Access) copyWriteBack(ctx context.Context, l Live, root *os.File) error {
	u := writeBack(root, l.Row.FS)
	if u.cause == nil {
		u.cause = acc.SyncEphemeral(ctx, l.Row)
	}
	if u.cause == nil {
		return nil
	}
	acc.recordLostWrites(ctx, l.Record, u)
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
	acc.recordLostWrites(ctx, a, u)
	warnings.AddEach(ctx, "%s: %v", row.Name, acc.lostError(ctx, a, u, ""))
}

// recordLostWrites records that writes were lost in a mounted volume: the kernel does not report it again. Trees share
// the pool's filesystem, which does not say whose writes it has lost: it is recorded for all mounted ones.
func (acc *Access) recordLostWrites(ctx context.Context, a catalog.MountRecord, u unwritten) {
	l := catalog.Loss{Stopped: u.stopped}
	if acc.sharesFilesystem(a) {
		l.Shared = acc.sharesFilesystem
	}

	// In a pool that is full to the last byte, without its reserve, this may fail: then only the error that is about to be
	// returned tells of it.
	_ = acc.records.NoteLostWrites(context.WithoutCancel(ctx), a, l)
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
		kind, free = errs.NoSpace, errs.Messagef("free space with %s and %s; ", errs.Run("destroy"), errs.Run("gc"))
	}
	what := "some data written to it could not be stored in the pool"
	if u.stopped {
		what = "it can no longer write to the pool, and some data written to it is only in memory"
	}
	return (&errs.Error{Kind: kind, Err: fmt.Errorf("%s: %w", what, u.cause)}).
		WithHint("%scopy what you need out of %s, where it can still be read; %s", free, a.Mountpoint, then)
}
