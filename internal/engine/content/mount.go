package content

import (
	"context"
	"errors"
	"os"
	"slices"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/linux/kernel"
	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// trimMinBytes is the shortest free range that is returned to the pool when a volume is unmounted. Shorter ones are not
// worth an extent of their own.
const trimMinBytes = 128 << 10

// Mount makes a volume usable at t, and returns its mount record. On error nothing is mounted. The caller has marked
// the object with the mount point.
func (acc *Access) Mount(ctx context.Context, row catalog.Row, t Target) (catalog.MountRecord, error) {
	a := catalog.MountRecord{ID: row.ID, Mountpoint: t.Path, Loop: -1, BootID: kernel.BootID(), At: time.Now(),
		Owner: t.May.Owner}
	what, err := acc.drv.Attachment(ctx, row.ID)
	if err != nil {
		return a, err
	}

	if what.ReadOnly {
		return a, errs.New(errs.Invalid, "mount", row.Name, "generations and snapshots cannot be mounted").
			WithHint("make a volume from it with %s", errs.Run("clone"))
	}

	if a.MountNS, err = kernel.MountNamespace(); err != nil {
		return a, errs.Wrap("mount", row.Name, err)
	}

	switch {
	case row.IsOverlay():
		return acc.mountOverlay(ctx, row, a, what, t)
	case what.Tree != "":
		return acc.mountTree(a, what, t)
	case what.Source != "":
		a, err := acc.mountSource(a, what, t)
		return a, acc.blameKey(ctx, row.ID, row.Name, err)
	}

	return acc.mountImage(ctx, row, a, what, t)
}

// mountSource mounts a filesystem that the kernel knows by its name.
func (acc *Access) mountSource(a catalog.MountRecord, what driver.Attachment, t Target) (catalog.MountRecord, error) {
	m, err := mount.Device(what.Type, what.Source, what.Options, false)
	if err != nil {
		return a, err
	}
	defer m.Close()
	return a, acc.placeOwned(m, &a, t)
}

// placeOwned is placeMount for a mount that may show another owner.
func (acc *Access) placeOwned(m *mount.Detached, a *catalog.MountRecord, t Target) error {
	if err := acc.showOwner(*a, m.Owner, m); err != nil {
		return err
	}
	return acc.placeMount(m, a, t)
}

func (acc *Access) mountTree(a catalog.MountRecord, what driver.Attachment, t Target) (catalog.MountRecord, error) {
	if t.link {
		return a, acc.makeMountLink(what.Tree, t.Path)
	}
	m, err := mount.Tree(what.Tree, false)
	if err != nil {
		return a, err
	}
	defer m.Close()
	return a, acc.placeOwned(m, &a, t)
}

func (acc *Access) mountImage(
	ctx context.Context, row catalog.Row, a catalog.MountRecord, what driver.Attachment, t Target,
) (catalog.MountRecord, error) {
	raw := what.FS == driver.None
	dev, err := acc.openVolume(ctx, row, what, loopdev.Options{DirectIO: !dropsSyncs(row, what), KeepOpen: raw})
	if err != nil {
		return a, err
	}

	defer dev.close() // by then a mount holds the device, or it disappears

	a.Loop, a.Dev, a.Ino = dev.loop, dev.dev, dev.ino
	if raw {
		a.Mountpoint = dev.path
		if err := acc.makeMountLink(dev.path, t.Path); err != nil {
			if !what.Block {
				_ = acc.clearLoops(what.Image)
			}
			return a, err
		}
		return a, nil
	}

	m, err := mount.Device(string(what.FS), dev.path, mountOptions(row, what), false)
	if err != nil {
		return a, acc.BlameFull(ctx, err)
	}

	defer m.Close()

	return a, acc.placeOwned(m, &a, t)
}

// State says how a recorded mount stands now.
type State int

const (
	NotMounted    State = iota // no longer mounted: after a reboot, or an umount by hand
	Mounted                    // as recorded
	HeldElsewhere              // not as recorded, but something still holds the block device
)

// MountState compares a mount record with the kernel, in O(1) except for a tree that was mounted in another mount
// namespace or under another boot ID: for that it searches all namespaces. The kernel decides; the record only says
// where to look, and whether a reboot came between.
func (acc *Access) MountState(row catalog.Row, a catalog.MountRecord) State {
	before := kernel.EarlierBoot(a.BootID, a.At)
	ns, err := kernel.MountNamespace()
	sameNS := !before && err == nil && ns == a.MountNS
	switch {
	case a.MountID == 0 && a.Loop < 0 && a.Dev != 0: // a raw block device of the driver's own
		if on, err := acc.deviceActive(row.ID, a); err == nil && on && !before {
			return Mounted
		}
		return acc.imageState(row, a)
	case a.MountID == 0 && a.Loop < 0: // a symbolic link to the tree
		if _, err := os.Readlink(a.Mountpoint); err == nil && !before {
			return Mounted
		}
		return NotMounted
	case a.MountID == 0: // a raw block device
		if b, err := loopdev.Lookup(a.Loop); err == nil && !before && acc.isImage(row.ID, b) {
			return Mounted
		}
		return acc.imageState(row, a)
	case sameNS && mount.IsMounted(a.Mountpoint, a.MountID):
		return Mounted
	case a.Loop >= 0 || a.Dev != 0:
		state := acc.imageState(row, a)
		if state == HeldElsewhere && sameNS && mountedAgain(a) {
			return Mounted
		}
		return state
	case row.IsOverlay() && acc.upperStaysInUse(row, releaseGrace):
		return HeldElsewhere // unmounted by hand, while programs use it
	case before, sameNS:
		return NotMounted
	}

	return acc.treeState(row, a)
}

// deviceActive reports whether the driver's own block device of a raw volume exists.
func (acc *Access) deviceActive(id driver.ObjectID, a catalog.MountRecord) (bool, error) {
	drv, ok := acc.drv.(driver.Activator)
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

// Unmount undoes Mount. stays: the volume is not about to be destroyed, so its free space is returned to the pool.
// InUse, with the holders. It is not an error if the volume was unmounted by hand.
func (acc *Access) Unmount(ctx context.Context, why Reason, row catalog.Row, a catalog.MountRecord, stays bool) error {
	w, err := acc.attachmentOf(ctx, row)
	if err != nil && !errs.Is(err, errs.NotFound) && !errs.Is(err, errs.Damaged) {
		return err
	}

	// Handle a volume that is no longer mounted as recorded.
	state := ownMountState(acc.MountState(row, a), row, a, w)
	if state == HeldElsewhere {
		state = acc.Settled(ctx, why, row, a)
	}
	switch state {
	case NotMounted:
		return acc.RemoveTarget(ctx, row.Name, a)
	case HeldElsewhere:
		if err := acc.RestoreFrozen(ctx, why, row, a); err != nil {
			return err
		}
		return acc.heldError(ctx, why, row, a, w)
	}

	if a.MountID == 0 {
		if a.Loop >= 0 || a.Dev != 0 {
			if err := acc.releaseRawDevice(ctx, why, row, a, w); err != nil {
				return err
			}
		}
		return acc.RemoveTarget(ctx, row.Name, a)
	}

	if row.IsOverlay() {
		if err := acc.unmountOverlay(ctx, why, row, a, w, stays); err != nil {
			return err
		}
		return acc.RemoveTarget(ctx, row.Name, a)
	}

	// Unmount it. A copy of the mount in a namespace that is just being made may end soon: then try once more.
	copied, err := acc.unmountFilesystem(ctx, why, row, &a, w, stays)
	if copied && !why.Gentle && acc.waitCopiesGone(ctx, row, a, w) {
		_, err = acc.unmountFilesystem(ctx, why, row, &a, w, stays)
	}
	if err != nil {
		return err
	}

	return acc.RemoveTarget(ctx, row.Name, a)
}

// unmountFilesystem unmounts a volume. copied: it is mounted again, as another mount namespace has a copy of the mount,
// and a says how.
func (acc *Access) unmountFilesystem(
	ctx context.Context, why Reason, row catalog.Row, a *catalog.MountRecord, w driver.Attachment, stays bool,
) (copied bool, err error) {
	var dev uint64
	if m, err := kernel.MountAt(unix.AT_FDCWD, a.Mountpoint); err == nil {
		dev = m.Dev
		if m.Root {
			a.MountID = m.ID // it may have been mounted again by a process that was killed: see MountState
		}
	}

	// Return free space to the pool, then unmount.
	attrs := mount.AttributesOf(a.Mountpoint)
	if stays && w.Image != "" {
		Trim(a.Mountpoint)
	}

	// Each command tries to unmount expired volumes, and must not be slower for that.
	err = acc.unmountUnheld(ctx, why, row, *a, w, dev)
	if err != nil && !errs.Is(err, errs.NotFound) {
		return false, err
	}
	if w.Image == "" {
		return false, nil
	}

	// A frozen filesystem outlives its umount.
	AtStep("unmounted")
	if err := acc.restoreFrozen(ctx, why, row, a, w, attrs); err != nil {
		return false, err
	}

	// Wait until the block device disappears.
	free, err := acc.releaseUnheld(ctx, row, *a, w, dev, !stays)
	if free && err == nil {
		return false, nil
	}

	// Something else holds the device: mount the volume again.
	failed := acc.restoreUnmounted(ctx, row, a, w, attrs)
	if errs.Is(failed, errs.NotFound) {
		return false, nil // the device was released after all
	}
	if err != nil { // for example interrupted
		return false, errors.Join(err, failed)
	}

	held := acc.holdersError(ctx, why, row, *a, w, dev)
	if failed != nil {
		return false, errs.New(errs.InUse, why.Op, row.Name, "%w; it could not be mounted at %s again: %w",
			errors.Unwrap(held), a.Mountpoint, failed).
			WithHint("%s", errs.HintIn(held))
	}

	return true, held
}

// attachmentOf returns the part of the driver's Attachment that is needed to unmount: where the driver keeps no files,
// asking it means running a program.
func (acc *Access) attachmentOf(ctx context.Context, row catalog.Row) (driver.Attachment, error) {
	_, own := acc.drv.(driver.Activator)
	switch {
	case own && row.FS.IsImage():
		return driver.Attachment{Image: "of " + row.Name, Block: true, FS: row.FS}, nil
	case own:
		return driver.Attachment{FS: row.FS}, nil
	}
	return acc.drv.Attachment(ctx, row.ID)
}

// Trim returns the free space of a mounted filesystem to the pool. Deletions must have been synced: ext4 frees their
// blocks when it commits, and an umount waits for that. A failure costs space, not data.
func Trim(dir string) {
	f, err := os.Open(dir)
	if err != nil {
		return
	}
	defer f.Close()
	trimRoot(f)
}

// trimRoot is Trim for an open root directory.
func trimRoot(f *os.File) {
	waitDeletedFreed(f)
	_, _ = kernel.Trim(f, trimMinBytes)
}

// How long waitDeletedFreed waits while no space is freed, and in total.
const (
	deletedQuiet = 2 * time.Millisecond
	deletedMost  = 100 * time.Millisecond
)

// waitDeletedFreed waits while XFS frees deleted files, which it does in the background, even after a sync; asking for
// its free space hurries it. Space that it has not freed by then stays with the volume until the next umount.
func waitDeletedFreed(f *os.File) {
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

// releaseRawDevice takes a raw volume's block device away. InUse: it stays as it was.
func (acc *Access) releaseRawDevice(
	ctx context.Context, why Reason, row catalog.Row, a catalog.MountRecord, w driver.Attachment,
) error {
	if !w.Block {
		if err := acc.clearLoops(w.Image); err != nil {
			return err
		}
	}

	if w.Block {
		// ZFS takes a device away even from processes that have it open.
		if holders, _ := mount.Holders(ctx, mount.Query{Dev: a.Dev}); len(holders) > 0 {
			return acc.heldError(ctx, why, row, a, w)
		}
	}

	free, err := acc.releaseUnheld(ctx, row, a, w, deviceOf(a, w), false)
	if err != nil {
		return err
	}

	if !free {
		if b, err := loopdev.Lookup(a.Loop); err == nil && !w.Block && acc.isImage(row.ID, b) {
			_ = b.Keep() // else it disappears with its last holder
		}
		return acc.heldError(ctx, why, row, a, w)
	}

	return nil
}

// HeldError explains why a mounted volume is in use: it names the holders. InUse.
func (acc *Access) HeldError(ctx context.Context, why Reason, row catalog.Row, a catalog.MountRecord) error {
	return acc.heldError(ctx, why, row, a, driver.Attachment{})
}

// heldError explains why a volume that is not where it was mounted is in use.
func (acc *Access) heldError(
	ctx context.Context, why Reason, row catalog.Row, a catalog.MountRecord, w driver.Attachment,
) error {
	if !why.Gentle {
		if !w.Block && w.Image+w.Source+w.Tree == "" {
			w, _ = acc.attachmentOf(ctx, row) // an object that is gone cannot be frozen
		}
		if err := acc.frozenElsewhereError(ctx, why, row, a, w); err != nil {
			return err
		}
	}
	return acc.holdersError(ctx, why, row, a, w, deviceOf(a, w))
}

// deviceOf returns the st_dev of the filesystem in an attached image, or of one that is mounted by name; 0 if there is
// none.
func deviceOf(a catalog.MountRecord, w driver.Attachment) uint64 {
	switch {
	case a.Loop >= 0:
		return loopdev.DeviceNumber(a.Loop)
	case a.Dev != 0:
		return a.Dev // of the driver's own device
	case w.Source != "":
		dev, _ := mountedDevice(w) // a filesystem that cannot be mounted tells nothing
		return dev
	}
	return 0
}

// mountOptions returns the options with which a volume's filesystem is mounted.
func mountOptions(row catalog.Row, w driver.Attachment) []string {
	if !dropsSyncs(row, w) {
		return w.Options
	}
	return append(slices.Clone(w.Options), w.NoSync...)
}
