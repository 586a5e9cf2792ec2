package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"pando/internal/catalog"
	"pando/internal/driver"
	"pando/internal/errs"
	"pando/internal/kernel"
	"pando/internal/loopdev"
	"pando/internal/mount"

	"golang.org/x/sys/unix"
)

// trimMinBytes is the shortest free range that is given back to the pool when a
// volume is unmounted. Shorter ones are not worth an extent of their own.
const trimMinBytes = 128 << 10

// releaseWait is how long a block device may take to vanish after its last
// mount has gone.
const releaseWait = 10 * time.Second

// canMount reports whether this process may mount.
func canMount() bool { return os.Geteuid() == 0 }

// attach makes an object usable at t. On error nothing is attached. The caller
// has marked the object with the mount point.
func (e *Engine) attach(ctx context.Context, row catalog.Row, t target) (catalog.Attached, error) {
	a := catalog.Attached{ID: row.ID, Mountpoint: t.path, Loop: -1, BootID: kernel.BootID(), At: time.Now()}
	what, err := e.drv.Attachment(ctx, row.ID)
	if err != nil {
		return a, err
	}
	if what.ReadOnly {
		return a, errs.New(errs.Invalid, "mount", row.Name, "generations and snapshots are never attached").
			WithHint("make a volume of it with %s", errs.Run("clone"))
	}
	if a.MountNS, err = kernel.MountNamespace(); err != nil {
		return a, errs.Wrap("mount", row.Name, err)
	}
	switch {
	case what.Tree != "":
		return e.attachTree(a, what, t)
	case what.Source != "":
		return e.attachSource(a, what, t)
	}
	return e.attachImage(ctx, a, what, t)
}

// attachSource mounts a filesystem by its name.
func (e *Engine) attachSource(a catalog.Attached, what driver.Attachment, t target) (catalog.Attached, error) {
	m, err := mount.Device(what.Type, what.Source, what.Options, false)
	if err != nil {
		return a, err
	}
	defer m.Close()
	return a, e.putAt(m, &a, t)
}

func (e *Engine) attachTree(a catalog.Attached, what driver.Attachment, t target) (catalog.Attached, error) {
	if t.link {
		return a, e.linkTo(what.Tree, t.path)
	}
	m, err := mount.Tree(what.Tree, false)
	if err != nil {
		return a, err
	}
	defer m.Close()
	return a, e.putAt(m, &a, t)
}

func (e *Engine) attachImage(ctx context.Context, a catalog.Attached, what driver.Attachment, t target) (catalog.Attached, error) {
	raw := what.FS == driver.None
	dev, err := e.openDevice(ctx, a.ID, what, loopdev.Options{DirectIO: true, KeepOpen: raw})
	if err != nil {
		return a, err
	}
	defer dev.close() // a mount holds it by then, or it vanishes
	a.Loop, a.Dev, a.Ino = dev.loop, dev.dev, dev.ino
	if raw {
		a.Mountpoint = dev.path
		if err := e.linkTo(dev.path, t.path); err != nil {
			if !what.Block {
				_ = e.clearLoops(what.Image)
			}
			return a, err
		}
		return a, nil
	}
	m, err := mount.Device(string(what.FS), dev.path, what.Options, false)
	if err != nil {
		return a, e.blameFull(ctx, err)
	}
	defer m.Close()
	return a, e.putAt(m, &a, t)
}

// where says how an attachment stands now.
type where int

const (
	gone      where = iota // not attached any more: a reboot, or somebody's umount
	here                   // as recorded
	elsewhere              // not as recorded, but something still holds the block device
)

// look compares a recorded attachment with the kernel: in O(1), but for a tree that was mounted
// in another mount namespace or under another boot ID, for which it looks into all of them.
// The kernel decides; the record only says where to look, and that a reboot came between.
func (e *Engine) look(row catalog.Row, a catalog.Attached) where {
	before := kernel.EarlierBoot(a.BootID, a.At)
	ns, err := kernel.MountNamespace()
	sameNS := !before && err == nil && ns == a.MountNS
	switch {
	case a.MountID == 0 && a.Loop < 0 && a.Dev != 0: // a raw block device of the driver's own
		if on, err := e.deviceActive(row.ID, a); err == nil && on && !before {
			return here
		}
		return e.lookImage(row, a)
	case a.MountID == 0 && a.Loop < 0: // a symbolic link to the tree
		if _, err := os.Readlink(a.Mountpoint); err == nil && !before {
			return here
		}
		return gone
	case a.MountID == 0: // a raw block device
		if b, err := loopdev.Lookup(a.Loop); err == nil && !before && e.isImage(row.ID, b) {
			return here
		}
		return e.lookImage(row, a)
	case sameNS && mount.IsMounted(a.Mountpoint, a.MountID):
		return here
	case a.Loop >= 0 || a.Dev != 0:
		state := e.lookImage(row, a)
		if state == elsewhere && sameNS && mountedAgain(a) {
			return here
		}
		return state
	case before, sameNS:
		return gone
	}
	return e.lookTree(row, a)
}

// deviceActive reports whether a raw volume's own block device is there.
func (e *Engine) deviceActive(id driver.ObjectID, a catalog.Attached) (bool, error) {
	drv, ok := e.drv.(driver.Activator)
	if !ok {
		return false, nil
	}
	var st unix.Stat_t
	if err := unix.Stat(a.Mountpoint, &st); err != nil || st.Rdev != a.Dev {
		return false, nil
	}
	active, err := drv.Active(context.Background())
	return slices.Contains(active, id), err
}

// imageAttached reports whether an object's image is a block device now, and in
// use if it is the driver's own device.
func (e *Engine) imageAttached(id driver.ObjectID) (bool, error) {
	if a, ok := e.drv.(driver.Activator); ok {
		return a.Held(context.Background(), id)
	}
	w, err := e.drv.Attachment(context.Background(), id)
	if err != nil || w.Image == "" {
		return false, err
	}
	return loopdev.Attached(w.Image)
}

func (e *Engine) isImage(id driver.ObjectID, b loopdev.Bound) bool {
	w, err := e.drv.Attachment(context.Background(), id)
	if err != nil || w.Image == "" {
		return false
	}
	var st unix.Stat_t
	return unix.Stat(w.Image, &st) == nil && b.SameFile(&st)
}

// detach undoes attach. stays: the volume is not about to be destroyed, so its
// free space is given back to the pool. InUse, with who holds it. Somebody else's
// umount is no error.
func (e *Engine) detach(ctx context.Context, op string, row catalog.Row, a catalog.Attached, stays bool) error {
	w, err := e.attachmentOf(ctx, row)
	if err != nil && !errs.Is(err, errs.NotFound) && !errs.Is(err, errs.Damaged) {
		return err
	}
	switch e.lookOwn(row, a) {
	case gone:
		return e.removeTarget(ctx, row.Name, a)
	case elsewhere:
		return e.heldError(ctx, op, row, a, w)
	}
	if a.MountID == 0 {
		if a.Loop >= 0 || a.Dev != 0 {
			if err := e.clearRaw(ctx, op, row, a, w); err != nil {
				return err
			}
		}
		return e.removeTarget(ctx, row.Name, a)
	}
	copied, err := e.unmount(ctx, op, row, &a, w, stays)
	if copied && !gentle(op) && e.copiesEnd(ctx, a, w) {
		_, err = e.unmount(ctx, op, row, &a, w, stays)
	}
	if err != nil {
		return err
	}
	return e.removeTarget(ctx, row.Name, a)
}

// unmount takes a mounted volume down. copied: it is mounted again, as another mount namespace
// has a copy, and a says how.
func (e *Engine) unmount(ctx context.Context, op string, row catalog.Row, a *catalog.Attached, w driver.Attachment, stays bool) (copied bool, err error) {
	var dev uint64
	if m, err := kernel.MountAt(unix.AT_FDCWD, a.Mountpoint); err == nil {
		dev = m.Dev
		if m.Root {
			a.MountID = m.ID // it may have been mounted again by a process that was killed: see look
		}
	}
	attrs := mount.AttributesOf(a.Mountpoint)
	if stays && w.Image != "" {
		trimAt(a.Mountpoint)
	}
	// Each command tries what is expired, and must not be slower for that.
	err = e.unmountAt(a.Mountpoint, a.MountID, op == opExpire || op == opPrune)
	if errs.Is(err, errs.InUse) {
		return false, e.heldBy(ctx, op, row, *a, w, dev)
	}
	if err != nil && !errs.Is(err, errs.NotFound) {
		return false, err
	}
	if w.Image == "" {
		return false, nil
	}
	free, err := e.releaseUnheld(ctx, row, *a, w, dev, !stays)
	if err != nil || free {
		return false, err
	}
	failed := e.mountAgain(ctx, row, a, w, attrs)
	if errs.Is(failed, errs.NotFound) {
		return false, nil // it has been released after all
	}
	held := e.heldBy(ctx, op, row, *a, w, dev)
	if failed != nil {
		return false, errs.New(errs.InUse, op, row.Name, "%w; it could not be mounted at %s again: %w", errors.Unwrap(held), a.Mountpoint, failed).
			WithHint("%s", errs.HintIn(held))
	}
	return true, held
}

// attachmentOf is the driver's Attachment, as far as it is needed to detach: where
// the driver keeps no files, asking it means running a program.
func (e *Engine) attachmentOf(ctx context.Context, row catalog.Row) (driver.Attachment, error) {
	_, own := e.drv.(driver.Activator)
	switch {
	case own && row.FS.IsImage():
		return driver.Attachment{Image: "of " + row.Name, Block: true, FS: row.FS}, nil
	case own:
		return driver.Attachment{FS: row.FS}, nil
	}
	return e.drv.Attachment(ctx, row.ID)
}

// trimAt gives the free space of a mounted filesystem back. What was deleted must have been
// synced: ext4 frees it when it commits (umountWriteBack has waited for that). Not being able
// to costs space, not data.
func trimAt(dir string) {
	f, err := os.Open(dir)
	if err != nil {
		return
	}
	defer f.Close()
	settleDeleted(f)
	_, _ = kernel.Trim(f, trimMinBytes)
}

// How long settleDeleted waits for free space that does not come, and altogether.
const (
	deletedQuiet = 2 * time.Millisecond
	deletedMost  = 100 * time.Millisecond
)

// settleDeleted waits while an XFS frees deleted files, which it does in the background, also
// after a sync; asking for its free space hurries it. What it has not freed by then stays
// with the volume until it is unmounted the next time.
func settleDeleted(f *os.File) {
	var last uint64
	var still time.Duration
	const step = time.Millisecond
	for waited := time.Duration(0); waited < deletedMost && still < deletedQuiet; waited += step {
		var st unix.Statfs_t
		if err := unix.Fstatfs(int(f.Fd()), &st); err != nil || int64(st.Type) != unix.XFS_SUPER_MAGIC {
			return
		}
		if st.Bfree != last {
			last, still = st.Bfree, 0
		} else {
			still += step
		}
		time.Sleep(step)
	}
}

// clearRaw takes a raw block device away. InUse: it stays as it was.
func (e *Engine) clearRaw(ctx context.Context, op string, row catalog.Row, a catalog.Attached, w driver.Attachment) error {
	if !w.Block {
		if err := e.clearLoops(w.Image); err != nil {
			return err
		}
	}
	if w.Block {
		// ZFS takes a device away from under those who have it open.
		if holders, _ := mount.Holders(ctx, mount.Query{Dev: a.Dev}); len(holders) > 0 {
			return e.heldError(ctx, op, row, a, w)
		}
	}
	free, err := e.releaseUnheld(ctx, row, a, w, deviceOf(a, w), false)
	if err != nil {
		return err
	}
	if !free {
		if b, err := loopdev.Lookup(a.Loop); err == nil && !w.Block && e.isImage(row.ID, b) {
			_ = b.Keep() // it would vanish with who holds it now
		}
		return e.heldError(ctx, op, row, a, w)
	}
	return nil
}

// heldError explains why something that is not where it was mounted is in use.
func (e *Engine) heldError(ctx context.Context, op string, row catalog.Row, a catalog.Attached, w driver.Attachment) error {
	return e.heldBy(ctx, op, row, a, w, deviceOf(a, w))
}

// deviceOf is the st_dev of what is in an attached image, or of what is mounted by
// name; 0 if there is none.
func deviceOf(a catalog.Attached, w driver.Attachment) uint64 {
	switch {
	case a.Loop >= 0:
		return loopdev.DeviceNumber(a.Loop)
	case a.Dev != 0:
		return a.Dev // of the driver's own device
	case w.Source != "":
		dev, _ := mountedDevice(w) // of what cannot be mounted nothing can be found out
		return dev
	}
	return 0
}

// heldBy names the processes and mount namespaces that keep a volume attached.
func (e *Engine) heldBy(ctx context.Context, op string, row catalog.Row, a catalog.Attached, w driver.Attachment, dev uint64) error {
	if gentle(op) {
		return errs.New(errs.InUse, op, row.Name, "it is in use")
	}
	if !w.Block && w.Image+w.Source+w.Tree == "" {
		w, _ = e.drv.Attachment(ctx, row.ID) // of what is gone there are no holders
	}
	if dev == 0 {
		dev = deviceOf(a, w)
	}
	holders, herr := mount.Holders(ctx, queryFor(a, w, dev))
	msg := "it is in use"
	if len(holders) > 0 {
		msg += ": " + mount.FormatHolders(holders)
	}
	if herr != nil && len(holders) == 0 {
		msg += fmt.Sprintf(" (not everything could be looked at: %v)", herr)
	}
	return errs.New(errs.InUse, op, row.Name, "%s", msg).WithHint("end what holds it, then try again")
}

// queryFor asks who holds an attached volume.
func queryFor(a catalog.Attached, w driver.Attachment, dev uint64) mount.Query {
	if w.Tree != "" {
		return mount.Query{Tree: w.Tree, At: a.Mountpoint}
	}
	return mount.Query{Dev: dev, At: a.Mountpoint}
}
