package content

import (
	"context"
	"errors"
	"os"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/linux/fsprobe"
	"pando/internal/linux/kernel"
	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"
)

// Freeze says whether writes to a mounted volume are stopped while it is copied.
type Freeze int

// Values of Freeze.
const (
	// FreezeIfNeeded stops them if a copy would not be consistent otherwise. Else everything written before is flushed to
	// the device, and the log of the filesystem, which makes it consistent, is replayed in the copy.
	FreezeIfNeeded Freeze = iota
	FreezeAlways          // the copy is of one moment, including data that is not synced
	FreezeNever           // the copy is as after a power loss; an ephemeral overlay, which syncs nothing, is frozen
)

// Live is a volume, and whether it was in use when it was read.
type Live struct {
	Row    catalog.Row
	Record catalog.MountRecord

	state  State
	freeze Freeze

	lost    catalog.Lost // writes that never reached the pool, if hasLost
	hasLost bool
}

// FindLive finds out whether a volume is in use, and how it is to be copied then. Unsupported if it is to be frozen and
// cannot be.
func (acc *Access) FindLive(tx *catalog.Tx, row catalog.Row, freeze Freeze) (Live, error) {
	l := Live{Row: row, freeze: freeze}
	if row.Kind != driver.Volume {
		return l, nil
	}
	a, has, err := tx.MountRecord(row.ID)
	if err == nil && has {
		l.Record, l.state = a, acc.MountState(row, a)
		l.lost, l.hasLost, err = tx.Lost(a)
	}

	// An ephemeral overlay syncs nothing, so what a power loss would leave fits together only by chance.
	if l.mounted() && row.Ephemeral && row.IsOverlay() {
		l.freeze = FreezeAlways
	}
	if err == nil {
		err = acc.checkFreeze(l)
	}
	return l, err
}

// checkFreeze checks that a volume can be frozen, or needs no freeze, if it is to be copied at one moment. Unsupported.
func (acc *Access) checkFreeze(l Live) error {
	if l.freeze != FreezeAlways || !l.InUse() || l.mounted() || !l.Row.FS.IsImage() && acc.caps.Unsynced {
		return nil
	}

	why := "the " + acc.caps.Name + " driver cannot stop the writes to a tree of files while it copies the tree"
	if l.Row.FS == driver.None {
		why = "a raw volume has no filesystem that could be frozen"
	}
	return errs.New(errs.Unsupported, "freeze", l.Row.Name, "%s", why).
		WithHint("unmount it with %s, or do without %s: the copy then holds what was written before, and some of the rest",
			errs.Run("umount", l.Row.Name), errs.Param("freeze"))
}

// InUse reports whether programs may be writing to it.
func (l Live) InUse() bool { return l.state != NotMounted }

// mounted reports whether a filesystem in an image is in use.
func (l Live) mounted() bool {
	return l.InUse() && (l.Row.FS == driver.Ext4 || l.Row.FS == driver.XFS)
}

// Freezes reports whether copying the volume certainly freezes its filesystem. With FreezeIfNeeded, CopyLive decides,
// and records it in the mark.
func (l Live) Freezes() bool { return l.mounted() && l.freeze == FreezeAlways }

// CopyConsistency returns the consistency of a copy made now.
func (l Live) CopyConsistency() driver.Consistency {
	switch {
	case !l.InUse(), l.mounted() && l.freeze != FreezeNever:
		return driver.Clean
	case l.Row.FS.IsImage():
		return driver.Crash
	}
	return driver.Clean // the kernel copies a tree with everything written to it, or the driver ensures that
}

// Stalls of writers while a reflink holds an image.
const (
	stallAnExtent = 40 * time.Microsecond // 10 to 40 were measured
	stallExtents  = 100                   // the stall of so few is not noticed
)

// Stall returns how long a reflink of a volume may stop its writers; 0 if nobody would notice.
func (acc *Access) Stall(row catalog.Row) time.Duration {
	extents := row.Usage.Extents
	if row.Kind != driver.Volume || acc.caps.CloneCost != driver.CostExtents || extents <= stallExtents {
		return 0
	}
	return time.Duration(extents) * stallAnExtent
}

// CopyLive makes an object with the content of a volume, snapshot or generation, even while programs write to it; see
// Live.CopyConsistency. The caller has marked id.ID. It returns the kinds of errors of driver.Driver.Clone; InUse and
// Unsupported if it cannot be frozen, Conflict if it was thawed too early, or if writes overtook a slow copy; NoSpace
// or IO if data that programs have written could not be stored in the pool.
func (acc *Access) CopyLive(ctx context.Context, l Live, id driver.Identity, immutable bool, others Freezes) error {
	err := acc.copyLive(ctx, l, id, immutable, others)
	if err != nil || !l.Row.Ephemeral || id.Ephemeral {
		return err
	}
	return acc.SyncImage(ctx, id.ID) // the origin may have been written to after it was synced
}

func (acc *Access) copyLive(ctx context.Context, l Live, id driver.Identity, immutable bool, others Freezes) error {
	lc, canLive := acc.drv.(driver.LiveCopier)
	simple := func() error {
		if immutable {
			return acc.drv.Snapshot(ctx, l.Row.ID, id)
		}
		return acc.drv.Clone(ctx, l.Row.ID, id)
	}

	warnLost(ctx, l)

	switch {
	case !l.InUse():
		if err := acc.SyncEphemeral(ctx, l.Row); err != nil {
			return err
		}
		return simple()
	case l.mounted() && l.freeze != FreezeNever:
		if !canLive {
			return errs.New(errs.Unsupported, "freeze", l.Row.Name, "the %s driver cannot copy a volume in use", acc.caps.Name)
		}
		return acc.copyMounted(ctx, l, id, immutable, lc, others)
	case l.Row.FS.IsImage():
		if err := acc.flushBeforeCopy(ctx, l); err != nil {
			return err
		}
		return simple()
	case l.Row.IsOverlay() && !acc.caps.Atomic:
		return errs.New(errs.InUse, "copy", l.Row.Name, "the %s driver cannot copy an overlay that is mounted",
			acc.caps.Name).
			WithHint("unmount it first with %s", errs.Run("umount", l.Row.Name))
	case canLive && !acc.caps.Atomic:
		return lc.CopyLive(ctx, l.Row.ID, id, immutable, nil)
	}

	return simple()
}

// copyMounted copies an image whose filesystem is mounted. Everything written before is in the copy, and nothing has to
// be replayed in it, unless it is a volume.
func (acc *Access) copyMounted(
	ctx context.Context, l Live, id driver.Identity, immutable bool, lc driver.LiveCopier, others Freezes,
) error {
	root, release, err := acc.openMounted(ctx, l)
	if err != nil {
		return err
	}

	defer release()

	freezes, err := acc.mustFreeze(ctx, l, immutable)
	if err != nil {
		return err
	}

	// Everything written before the command began is in the copy. Flush even before a freeze: then data is not written
	// while other processes are stopped.
	if err := acc.copyWriteBack(ctx, l, root); err != nil {
		return err
	}

	// Copy.
	if !freezes {
		err = lc.CopyLive(ctx, l.Row.ID, id, immutable, nil)
	} else if err = acc.copyFrozen(ctx, l, root, others, func(quiet func(func() error) error) error {
		return lc.CopyLive(ctx, l.Row.ID, id, immutable, quiet)
	}); err == nil {
		err = acc.checkFrozenCopy(ctx, l, root)
	}

	// Replay the log in the copy. A frozen ext4 has nothing in its log; a frozen XFS does. A volume is mounted, which
	// replays it, before it is read.
	if err != nil || id.Kind == driver.Volume || freezes && l.Row.FS == driver.Ext4 {
		return err
	}

	return acc.replayCopy(ctx, l, id.ID)
}

// mustFreeze reports whether a mounted volume has to be frozen while it is copied.
func (acc *Access) mustFreeze(ctx context.Context, l Live, immutable bool) (bool, error) {
	if l.freeze == FreezeAlways {
		return true, nil
	}

	w, err := acc.drv.Attachment(ctx, l.Row.ID)
	if err != nil {
		return false, err
	}
	if w.Block && immutable {
		return true, nil // a log cannot be replayed in a snapshot of a device
	}

	path := w.Image
	if w.Block {
		dev, err := acc.activateDevice(ctx, l.Row.ID)
		if err != nil {
			return false, err
		}
		defer dev.Close() // it stays, as it is mounted
		path = dev.Name()
	}

	f, err := os.Open(path)
	if err != nil {
		return false, errs.Wrap("freeze", l.Row.Name, err)
	}

	defer f.Close()

	logged, err := fsprobe.Logged(f)
	return !logged, errs.Wrap("freeze", l.Row.Name, err)
}

// replayCopy replays the log in a copy of a mounted filesystem, which leaves the copy as an umount would. Everything is
// on the disk when it returns.
func (acc *Access) replayCopy(ctx context.Context, l Live, id driver.ObjectID) error {
	if w, err := acc.drv.Attachment(ctx, id); err != nil || w.Block && w.ReadOnly {
		return err // nothing can be written to a snapshot of a device; it was frozen
	}

	err := acc.WithImage(ctx, id, ImageOptions{}, func(*os.File) error { return nil })
	if err == nil || ctx.Err() != nil {
		return err
	}

	var known *errs.Error
	if errors.As(err, &known) && known.Hint == "" {
		return (&errs.Error{Kind: known.Kind, Op: "replay the log of a copy of", Ref: l.Row.Name, Err: err}).
			WithHint("retry with %s, which leaves nothing to replay, or with %s", errs.Param("freeze"), errs.Param("no-freeze"))
	}

	return err
}

// checkFrozenCopy makes sure that data written between copyWriteBack and the freeze reached the pool: freezing writes
// it, and does not report what it could not write. In a pool with free space it could write everything.
func (acc *Access) checkFrozenCopy(ctx context.Context, l Live, root *os.File) error {
	if s, err := acc.pool.Space(ctx); err != nil || s.FreeBytes >= nearlyFull {
		return err
	}
	return acc.copyWriteBack(ctx, l, root)
}

// flushBeforeCopy writes what programs have written to an image that is in use, as far as
// can be without waiting for them.
func (acc *Access) flushBeforeCopy(ctx context.Context, l Live) error {
	if l.Row.FS != driver.None && l.state != Mounted {
		return nil
	}

	root, err := os.Open(l.Record.Mountpoint)
	if err != nil {
		return nil // it was unmounted just now, or is used where it cannot be seen
	}

	defer root.Close()
	m, err := kernel.MountAt(int(root.Fd()), "")
	if l.Record.MountID != 0 && (err != nil || m.ID != l.Record.MountID) {
		return nil
	}

	return acc.copyWriteBack(ctx, l, root)
}

// openMounted opens the root of the filesystem in an image that is mounted, also
// if that is in another mount namespace.
func (acc *Access) openMounted(ctx context.Context, l Live) (*os.File, func(), error) {
	if l.state == Mounted && !l.Row.IsOverlay() { // an overlay cannot be frozen: its upper layer can
		f, err := os.Open(l.Record.Mountpoint)
		if err != nil {
			return nil, nil, errs.Wrap("freeze", l.Row.Name, err)
		}

		// If it has been unmounted just now, this is another filesystem: the
		// pool's, or the host's, which must not be frozen.
		if m, err := kernel.MountAt(int(f.Fd()), ""); err != nil || m.ID != l.Record.MountID {
			f.Close()
			return nil, nil, errs.New(errs.Conflict, "freeze", l.Row.Name, "it has just been unmounted").
				WithHint("try again")
		}
		return f, func() { f.Close() }, nil
	}

	return acc.mountAgain(ctx, l)
}

// mountAgain mounts the filesystem in an image that is mounted a second time, where nobody sees it, and opens its root.
// The same block device again is the same filesystem.
func (acc *Access) mountAgain(ctx context.Context, l Live) (*os.File, func(), error) {
	w, err := acc.drv.Attachment(ctx, l.Row.ID)
	if err != nil {
		return nil, nil, err
	}

	dev, done, err := acc.reopenDevice(ctx, l, w)
	if err != nil {
		return nil, nil, err
	}

	m, err := mount.Device(string(w.FS), dev, mountOptions(l.Row, w), false)
	done()
	if err != nil {
		return nil, nil, acc.BlameFull(ctx, err)
	}

	f, err := m.Open()
	if err != nil {
		m.Close()
		return nil, nil, err
	}

	return f, func() { f.Close(); m.Close() }, nil
}

// WithMounted calls fn with the root of the files of a volume in use, as its users see them, even if another filesystem
// is mounted over it. It does nothing if the volume is not in use.
func (acc *Access) WithMounted(ctx context.Context, l Live, fn func(root *os.File) error) error {
	if !l.InUse() {
		return nil
	}

	if l.mounted() && !l.Row.IsOverlay() {
		root, done, err := acc.mountAgain(ctx, l)
		if err != nil {
			return err
		}
		defer done()
		return fn(root)
	}

	// The files of a tree, or of an overlay, are where it is mounted.
	root, err := os.Open(l.Record.Mountpoint)
	if err != nil {
		return errs.Wrap("open", l.Row.Name, err)
	}
	defer root.Close()
	return fn(root)
}

// reopenDevice is the block device that a volume's image is attached as, open until
// done.
func (acc *Access) reopenDevice(
	ctx context.Context, l Live, w driver.Attachment,
) (path string, done func(), err error) {
	if w.Block {
		f, err := acc.activateDevice(ctx, l.Row.ID)
		if err != nil {
			return "", nil, err
		}
		return f.Name(), func() { f.Close() }, nil
	}

	b, err := loopdev.Lookup(l.Record.Loop)
	if err == nil && acc.isImage(l.Row.ID, b) {
		f, err := b.Hold()
		if err == nil {
			return b.Path, func() { f.Close() }, nil
		}
		if !errs.Is(err, errs.NotFound) {
			return "", nil, err
		}
	}

	return "", nil, errs.New(errs.InUse, "freeze", l.Row.Name, "its image is not attached to the recorded loop device").
		WithHint("copy it without a freeze: add %s", errs.Param("no-freeze"))
}
