package content

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/linux/kernel"
	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"
	"pando/internal/tree/treecopy"

	"golang.org/x/sys/unix"
)

// An overlay is mounted from two layers: its own object, the upper layer, which holds what programs change, and the
// generation that it was cloned from, the lower layer, which nothing changes. All overlays on one generation mount it
// from the same block device, so the kernel gives them one instance of its filesystem, and with that one page cache.
// Nothing is mounted anywhere but at the overlay's own mount point, so nothing is left when the last overlay goes.

// OverlayOptions are the mount options of overlays. index and metacopy stay off because they tie the upper layer to
// the inodes of the lower one, which a rebase or a pull replaces. redirect_dir lets programs rename directories of the
// lower layer; xino gives all files inode numbers that stay the same. The syncs of an ephemeral overlay end at once.
func OverlayOptions(ephemeral bool) []string {
	options := []string{"index=off", "metacopy=off", "redirect_dir=on", "xino=on"}
	if ephemeral {
		options = append(options, "volatile")
	}
	return options
}

// overlayPrefix begins the names of overlays in mount tables.
const overlayPrefix = "pando:"

// overlayName returns the name of an overlay in mount tables: by that it is recognized.
func overlayName(id driver.ObjectID) string { return overlayPrefix + string(id) }

// OverlayID returns the object on which a mount is an overlay, maybe one of another pool.
func OverlayID(m mount.Entry) (id driver.ObjectID, ok bool) {
	name, _ := mount.SplitOverlaySource(m.Source)
	text, ok := strings.CutPrefix(name, overlayPrefix)
	return driver.ObjectID(text), ok && m.FSType == "overlay" && driver.ValidID(text)
}

// mountOverlay mounts an overlay, whose upper layer what describes, at t.
func (acc *Access) mountOverlay(
	ctx context.Context, row catalog.Row, a catalog.MountRecord, what driver.Attachment, t Target,
) (catalog.MountRecord, error) {
	if t.link {
		return a, errs.New(errs.Permission, "mount", row.Name, "mounting an overlay needs root").WithHint("run it as root")
	}

	upper, err := acc.mountUpper(ctx, row, &a, what, false)
	if err != nil {
		return a, acc.BlameFull(ctx, err)
	}

	defer upper.Close()

	lower, err := acc.mountLower(ctx, row.Lower)
	if err != nil {
		return a, err
	}

	defer acc.releaseLower(ctx, row.Identity) // it stays if the overlay is mounted
	defer lower.Close()

	if err := prepareUpper(ctx, lower, upper); err != nil {
		return a, acc.BlameFull(ctx, err)
	}

	// An overlay shows owners as its layers do.
	rootOwner := func() (mount.Owner, error) { return upper.OwnerOf(mount.UpperDir) }
	if err := acc.showOwner(a, rootOwner, lower, upper); err != nil {
		return a, err
	}

	m, err := mount.Overlay{Lower: lower, Upper: upper, Name: overlayName(row.ID), UpperPath: upperPath(a, what),
		Options: OverlayOptions(row.Ephemeral)}.Mount()
	if err != nil {
		return a, acc.BlameFull(ctx, err)
	}

	defer m.Close()

	return a, acc.placeMount(m, &a, t)
}

// upperPath returns where the upper layer of an overlay is: a block device, or a directory; "" if it has no path.
func upperPath(a catalog.MountRecord, what driver.Attachment) string {
	switch {
	case a.Loop >= 0:
		return loopdev.DevicePath(a.Loop)
	case what.Block:
		return what.Image
	}
	return what.Tree
}

// mountUpper mounts the filesystem of an upper layer, detached, and notes its block device in a. With readOnly nothing
// is written to a tree. A dataset is mounted in one way for all: a read-only mount fails while another mount, even one
// that the kernel is about to drop, is not.
func (acc *Access) mountUpper(
	ctx context.Context, row catalog.Row, a *catalog.MountRecord, what driver.Attachment, readOnly bool,
) (*mount.Detached, error) {
	switch {
	case what.Tree != "":
		return mount.Tree(what.Tree, readOnly)
	case what.Source != "":
		return acc.mountLayer(ctx, row.ID, what, what.ReadOnly)
	}

	dev, err := acc.openVolume(ctx, row, what, loopdev.Options{DirectIO: !dropsSyncs(row, what)})
	if err != nil {
		return nil, err
	}

	defer dev.close() // by then a mount holds the device, or it disappears

	a.Loop, a.Dev, a.Ino = dev.loop, dev.dev, dev.ino
	return mount.Device(string(what.FS), dev.path, upperOptions(row, what), what.Block && what.ReadOnly)
}

// upperOptions returns the options with which the filesystem of an upper layer is mounted. An upper layer holds little:
// without them ext4 reads its block bitmaps in advance, 1 MiB of memory for 32 GiB (since Linux 5.9).
func upperOptions(row catalog.Row, what driver.Attachment) []string {
	options := mountOptions(row, what)
	if what.FS == driver.Ext4 {
		options = append(slices.Clone(options), "no_prefetch_block_bitmaps")
	}
	return options
}

// mountLayer mounts a layer that the kernel knows by its name, detached. ZFS refuses to mount a dataset while another
// process is mounting it for the first time or unmounting it for the last (zpl_mount_impl of OpenZFS): so it retries
// for a while.
func (acc *Access) mountLayer(
	ctx context.Context, id driver.ObjectID, what driver.Attachment, readOnly bool,
) (*mount.Detached, error) {
	end := time.Now().Add(layerWait)
	for {
		m, err := mount.Device(what.Type, what.Source, what.Options, readOnly)
		if !errors.Is(err, unix.EBUSY) || ctx.Err() != nil || time.Now().After(end) {
			return m, acc.blameKey(ctx, id, what.Source, err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// mountLower mounts a lower layer read-only, detached.
func (acc *Access) mountLower(ctx context.Context, id driver.ObjectID) (*mount.Detached, error) {
	what, err := acc.drv.Attachment(ctx, id)
	if err != nil {
		return nil, err
	}

	switch {
	case what.Tree != "":
		return mount.Tree(what.Tree, true)
	case what.Source != "":
		return acc.mountLayer(ctx, id, what, true)
	}

	// Nothing may be written to the device, not even a log that is replayed: a generation has none.
	options := append([]string{lowerOption(what.FS)}, what.Options...)
	if what.Block {
		dev, err := acc.activateDevice(ctx, id)
		if err != nil {
			return nil, err
		}
		defer dev.Close()
		return mount.Device(string(what.FS), dev.Name(), options, true)
	}

	dev, err := acc.holdLowerDevice(ctx, id, what)
	if err != nil {
		return nil, err
	}

	defer dev.Close() // by then the mount holds the device

	return mount.Device(string(what.FS), dev.Name(), options, true)
}

// releaseLower removes the driver's own block device of the lower layer of an overlay, unless another overlay uses it.
// One that is left is harmless: gc removes it.
func (acc *Access) releaseLower(ctx context.Context, id driver.Identity) {
	a, own := acc.drv.(driver.Activator)
	if !own || !id.FS.IsImage() {
		return
	}
	if held, err := a.Held(ctx, id.Lower); err == nil && !held {
		_ = a.Deactivate(context.WithoutCancel(ctx), id.Lower)
	}
}

// lowerOption returns the mount option that keeps a filesystem from replaying its log.
func lowerOption(fs driver.FS) string {
	if fs == driver.XFS {
		return "norecovery"
	}
	return "noload"
}

// layerWait is how long a layer may be busy, with many processes that mount it at once on a slow machine.
const layerWait = 5 * time.Second

// lowerWait is how long a command waits for others that attach the lower layer of an overlay.
const lowerWait = time.Minute

// holdLowerDevice opens the loop device of a lower layer, which it attaches unless another overlay has done that. The
// lock lasts until the device is open: two processes must not attach a device each.
func (acc *Access) holdLowerDevice(
	ctx context.Context, id driver.ObjectID, what driver.Attachment,
) (*os.File, error) {
	unlock, err := acc.lockByte(ctx, byteLock{
		op: "mount", ref: string(id), file: "lowers", id: id, what: "the lower layer", limit: lowerWait})
	if err != nil {
		return nil, err
	}

	defer unlock()

	// Use the device that another overlay has attached, if it is still there.
	index, known, err := acc.records.LowerLoop(ctx, id)
	if err != nil {
		return nil, err
	}
	if known {
		if b, err := loopdev.Lookup(index); err == nil && acc.isImage(id, b) {
			if f, err := b.Hold(); err == nil {
				return f, nil
			}
		}
	}

	// Attach one, and record it.
	image, err := os.Open(what.Image)
	if err != nil {
		return nil, errs.Wrap("mount", what.Image, err)
	}

	defer image.Close()

	d, err := attach(ctx, image, loopdev.Options{ReadOnly: true, DirectIO: true, SectorBytes: what.SectorBytes})
	if err != nil {
		return nil, err
	}

	defer d.Close()

	if err := acc.records.SetLowerLoop(ctx, id, d.Index); err != nil {
		return nil, err
	}

	b, err := loopdev.Lookup(d.Index)
	if err != nil {
		return nil, err
	}
	return b.Hold()
}

// prepareUpper gives the root directory of an overlay the attributes of the lower one, before the overlay is mounted
// for the first time: later ones are the user's. The kernel makes a directory in WorkDir at the first mount.
func prepareUpper(ctx context.Context, lower, upper *mount.Detached) error {
	to, err := upper.Open()
	if err != nil {
		return err
	}

	defer to.Close()

	if err := checkUpper(to, mount.UpperDir, mount.WorkDir, usedDir); err != nil {
		return err
	}

	if err := forgetVolatile(to); err != nil {
		return err
	}

	if unused, err := isUnused(to); err != nil || !unused {
		return err
	}

	from, err := lower.Open()
	if err != nil {
		return err
	}

	defer from.Close()

	if err := treecopy.CopyAttributes(ctx, from, "", to, mount.UpperDir); err != nil {
		return err
	}
	return dropOverlayAttributes(to, mount.UpperDir)
}

// usedDir is the directory that the kernel makes in an upper layer at the first mount.
const usedDir = mount.WorkDir + "/work"

// checkUpper checks that the names in the root of an upper layer are directories. One that comes from elsewhere may
// have links to other files of this host in their place.
func checkUpper(root *os.File, names ...string) error {
	for _, name := range names {
		var st unix.Stat_t
		err := unix.Fstatat(int(root.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
		if err == nil && st.Mode&unix.S_IFMT != unix.S_IFDIR {
			err = unix.ENOTDIR
		}
		if errors.Is(err, unix.ENOENT) && name == usedDir {
			continue // it was never mounted
		}
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
			return errs.New(errs.Damaged, "mount", root.Name(),
				"this is not the upper layer of an overlay: %s: %w", name, err).
				WithHint("rewind the volume to an older snapshot, or pull an older point of it")
		}
		if err != nil {
			return errs.Wrap("mount", root.Name(), err)
		}
	}
	return nil
}

// isUnused reports whether an upper layer, given its root, was never mounted.
func isUnused(root *os.File) (bool, error) {
	var st unix.Stat_t
	err := unix.Fstatat(int(root.Fd()), usedDir, &st, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) {
		return true, nil
	}
	return false, errs.Wrap("mount", root.Name(), err)
}

// forgetVolatile removes the marker by which overlayfs refuses to mount an upper layer again that was mounted volatile:
// its files may be incomplete after a power loss, which an ephemeral volume does not survive, and copies of one are
// synced.
func forgetVolatile(root *os.File) error {
	inside, err := os.OpenRoot(filepath.Join("/proc/self/fd", strconv.Itoa(int(root.Fd())))) // follows no link to outside
	if err != nil {
		return errs.Wrap("mount", root.Name(), err)
	}
	defer inside.Close()
	return errs.Wrap("mount", root.Name(), inside.RemoveAll(usedDir+"/incompat")) // has only volatile/dirty
}

// dropOverlayAttributes removes the attributes that overlayfs gives a meaning, which the files of a user may have.
func dropOverlayAttributes(dir *os.File, name string) error {
	path := filepath.Join("/proc/self/fd", strconv.Itoa(int(dir.Fd())), name)
	for _, attribute := range []string{"opaque", "redirect", "origin", "impure", "nlink", "metacopy", "uuid"} {
		err := unix.Lremovexattr(path, "trusted.overlay."+attribute)
		if err != nil && !errors.Is(err, unix.ENODATA) && !errors.Is(err, unix.EOPNOTSUPP) {
			return errs.Wrap("mount", dir.Name(), err)
		}
	}
	return nil
}

// reopenUpper mounts the upper layer of a mounted overlay once more, detached: the overlay itself cannot be frozen,
// trimmed, or asked which writes failed. It is the same instance of the filesystem.
func (acc *Access) reopenUpper(
	ctx context.Context, row catalog.Row, a catalog.MountRecord, w driver.Attachment,
) (*mount.Detached, error) {
	switch {
	case w.Tree != "":
		return mount.Tree(w.Tree, false)
	case w.Source != "":
		return mount.Device(w.Type, w.Source, w.Options, false)
	}
	return acc.remountDetached(ctx, row, a, w, true)
}

// overlayDevice returns the st_dev of a mounted overlay, wherever it is mounted; 0 if it is mounted nowhere, as far as
// can be seen.
func (acc *Access) overlayDevice(a catalog.MountRecord) uint64 {
	if m, err := kernel.MountAt(unix.AT_FDCWD, a.Mountpoint); err == nil && m.Root && m.ID == a.MountID {
		return m.Dev
	}
	t, err := acc.tables.recentTables()
	if err != nil {
		return 0
	}
	return t.OverlayDevice(overlayName(a.ID))
}

// upperStaysInUse reports whether the upper layer of an overlay, no image, is still in use after a time: the kernel may
// release it a moment after the umount.
func (acc *Access) upperStaysInUse(row catalog.Row, most time.Duration) bool {
	end := time.Now().Add(most)
	for wait := time.Millisecond; acc.upperInUse(row); wait *= 2 {
		if time.Now().After(end) {
			return true
		}
		time.Sleep(wait)
	}
	return false
}

// upperInUse reports whether an overlay that is mounted somewhere, or whose files are open, uses an upper layer that is
// no image. If that cannot be determined, it counts as in use. An image is in use as long as its block device exists.
func (acc *Access) upperInUse(row catalog.Row) bool {
	if row.FS.IsImage() {
		return false
	}

	ctx := context.Background()
	what, err := acc.drv.Attachment(ctx, row.ID)
	if err != nil {
		return !errs.Is(err, errs.NotFound)
	}

	var upper [2]*mount.Detached
	for i := range upper {
		if upper[i], err = acc.mountUpper(ctx, row, &catalog.MountRecord{}, what, false); err != nil {
			return true
		}
		defer upper[i].Close()
	}

	lower, err := acc.mountLower(ctx, row.Lower)
	if err != nil {
		return true
	}
	defer lower.Close()

	used, err := mount.Overlay{Lower: lower, Upper: upper[0], Name: "pando"}.UpperInUse(upper[1])
	return used || err != nil
}

// isOverlayAt reports whether the overlay on an object is what is mounted at path.
func isOverlayAt(id driver.ObjectID, path string) bool {
	table, err := mount.Table("self")
	if err != nil {
		return false
	}
	e, ok := mount.At(table, path)
	on, overlay := OverlayID(e)
	return ok && overlay && on == id
}

// unmountOverlay unmounts an overlay. Unlike a filesystem in an image it cannot be mounted again while something holds
// it: two overlays with one upper layer would destroy it. So InUse has looked for copies of the mount before.
func (acc *Access) unmountOverlay(
	ctx context.Context, why Reason, row catalog.Row, a catalog.MountRecord, w driver.Attachment, stays bool,
) error {
	dev := acc.overlayDevice(a)
	if stays && w.Image != "" {
		acc.trimUpper(ctx, row, a, w)
	}

	err := acc.unmountUnheld(ctx, why, row, a, w, dev)
	if err != nil && !errs.Is(err, errs.NotFound) {
		return err
	}

	if w.Image == "" {
		if acc.upperStaysInUse(row, copyPatience) {
			return acc.holdersError(ctx, why, row, a, w, dev)
		}
		return nil
	}

	free, err := acc.releaseUnheld(ctx, row, a, w, dev, !stays)
	if err == nil && !free {
		return acc.holdersError(ctx, why, row, a, w, dev)
	}
	acc.releaseLower(ctx, row.Identity)
	return err
}

// trimUpper returns free space of an upper layer to the pool.
func (acc *Access) trimUpper(ctx context.Context, row catalog.Row, a catalog.MountRecord, w driver.Attachment) {
	m, err := acc.reopenUpper(ctx, row, a, w)
	if err != nil {
		return // it costs space, not data
	}
	defer m.Close()
	_ = withRoot(m, func(root *os.File) error {
		trimRoot(root)
		return nil
	})
}
