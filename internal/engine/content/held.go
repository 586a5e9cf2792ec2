package content

import (
	"context"
	"errors"
	"os"
	"sync"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/linux/kernel"
	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// copyPatience is how long a copy of a mount in another namespace may last without being a reason to refuse: a process
// that makes a namespace gets copies of all mounts, and drops most of them.
const (
	copyPatience = 500 * time.Millisecond
	copyPoll     = 20 * time.Millisecond
)

// releaseGrace is how long a block device may take to disappear before the reason is searched for.
const releaseGrace = 100 * time.Millisecond

// imageState asks the kernel whether an image is attached, by any process in any namespace. If that cannot be
// determined, the image counts as attached.
func (acc *Access) imageState(row catalog.Row, a catalog.MountRecord) State {
	on, err := acc.imageAttached(row.ID)
	switch {
	case errs.Is(err, errs.NotFound), errs.Is(err, errs.Damaged), errs.Is(err, errs.TooNew):
		on = a.Loop >= 0 && loopHolds(a) // the driver cannot tell the path of its image
	case err != nil:
		on = true
	}
	if on {
		return HeldElsewhere
	}
	return NotMounted
}

// loopHolds reports whether the recorded loop device still has the recorded image behind it.
func loopHolds(a catalog.MountRecord) bool {
	b, err := loopdev.Lookup(a.Loop)
	return err == nil && b.Dev == a.Dev && b.Ino == a.Ino
}

// mountedAgain reports whether the recorded image is mounted at its place by another mount than the recorded one: an
// umount was killed after it had restored the mount, or it was mounted by hand.
func mountedAgain(a catalog.MountRecord) bool {
	m, err := kernel.MountAt(unix.AT_FDCWD, a.Mountpoint)
	switch {
	case err != nil || !m.Root:
		return false
	case a.Loop < 0: // the driver's own device
		return m.Dev == a.Dev
	}
	return m.Dev == loopdev.DeviceNumber(a.Loop) && loopHolds(a)
}

// treeState looks for the mounts of a tree in all mount namespaces. If that cannot be determined, the tree counts as
// mounted.
func (acc *Access) treeState(row catalog.Row, a catalog.MountRecord) State {
	w, err := acc.attachmentOf(context.Background(), row)
	if errs.Is(err, errs.NotFound) {
		return NotMounted
	}
	if err != nil || w.Tree == "" && !row.IsOverlay() {
		return HeldElsewhere // its driver would have to run a program to tell more
	}

	t, err := acc.tables.recentTables()
	if err != nil {
		return HeldElsewhere
	}

	if found, err := mountsOf(t, row, a, w); err != nil || len(found) > 0 || !t.Complete() {
		return HeldElsewhere
	}

	return NotMounted
}

// mountsOf finds where a volume is mounted, other than at the place in its mount record.
func mountsOf(
	t *mount.Tables, row catalog.Row, a catalog.MountRecord, w driver.Attachment,
) ([]mount.Holder, error) {
	q := mount.Query{Tree: w.Tree}
	if row.IsOverlay() {
		q = mount.Query{Dev: t.OverlayDevice(overlayName(row.ID))}
	}
	if ns, err := kernel.MountNamespace(); err == nil && ns == a.MountNS {
		q.At = a.Mountpoint
	}

	switch {
	case row.IsOverlay(), w.Tree != "":
	case w.Image != "":
		q.Dev = deviceOf(a, w)
	default: // mounted by name
		if m, err := kernel.MountAt(unix.AT_FDCWD, a.Mountpoint); err == nil && m.Root && m.ID == a.MountID {
			q.Dev = m.Dev
		}
	}

	if q.Tree == "" && q.Dev == 0 {
		return nil, nil // it is mounted nowhere, or its driver does not destroy mounted trees
	}

	found, err := t.Mounts(q)
	if errs.Is(err, errs.NotFound) {
		return nil, nil // the tree is not there
	}

	return found, err
}

// tablesCache keeps the mount tables for callers that check many volumes.
type tablesCache struct {
	mu   sync.Mutex
	last *mount.Tables
	till time.Time
}

// recentTables returns tables that are at most ten times as old as reading them took: a caller that asks again and
// again spends at most a tenth of the time on them.
func (c *tablesCache) recentTables() (*mount.Tables, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	start := time.Now()
	if c.last != nil && start.Before(c.till) {
		return c.last, nil
	}
	t, err := mount.ReadTables(context.Background())
	if err == nil {
		c.last, c.till = t, time.Now().Add(10*time.Since(start))
	}
	return t, err
}

// Reason says why something is unmounted or detached.
type Reason struct {
	Op     string // for errors
	Gentle bool   // the user did not ask for it: volumes in use are left alone, without searching for their holders
}

// Volume is a volume that is to be unmounted or destroyed.
type Volume struct {
	Row       catalog.Row
	Record    catalog.MountRecord
	HasRecord bool // it has a mount record, Record
}

// InUse finds the volumes that are in use in a way that an umount would not notice in time, and changes nothing. It
// reads all mount tables at most once for all of them. It returns one error for each, nil or InUse.
//
//   - The mounts of trees do not know each other: unmounting one of them and removing the tree succeeds while another
//     namespace has a copy.
//   - An umount of a filesystem in an image shows whether another namespace has a copy; then it is mounted again. A
//     Gentle Reason does not go even that far.
//   - An image may be attached although it has no mount record.
func (acc *Access) InUse(ctx context.Context, why Reason, volumes []Volume) []error {
	out := make([]error, len(volumes))
	var t *mount.Tables
	for i, v := range volumes {
		if v.Row.Kind != driver.Volume {
			continue
		}

		image := v.Row.FS.IsImage()
		if image && v.HasRecord && !v.Row.IsOverlay() && (!why.Gentle || v.Record.MountID == 0) {
			continue // the umount shows it
		}

		w, err := acc.attachmentOf(ctx, v.Row)
		if err != nil {
			continue // it is damaged or gone: nothing of it can be mounted by a path
		}

		used := false
		switch {
		case image && !v.HasRecord:
			if used, err = acc.staysAttached(ctx, why, v.Row.ID, w); err != nil && !errs.Is(err, errs.NotFound) {
				out[i] = err
			}
		case v.HasRecord && v.Record.MountID == 0 && !image: // a symbolic link
			if why.Gentle {
				users, _ := mount.TreeUsers(ctx, w.Tree, false)
				used = len(users) > 0
			}
		case v.HasRecord && acc.Settled(ctx, why, v.Row, v.Record) == HeldElsewhere:
			used = true
		case len(volumes) <= fewVolumes && v.Row.IsOverlay() && v.HasRecord && mountedOnce(ctx, v.Record):
		default:
			if t == nil {
				if t, err = mount.ReadTables(ctx); err != nil {
					out[i] = err
					continue
				}
			}
			found, err := mountsOf(t, v.Row, v.Record, w)
			if err != nil {
				out[i] = err
				continue
			}
			used = len(found) > 0 && (why.Gentle || !acc.waitCopiesGone(ctx, v.Row, v.Record, w))
		}

		if used {
			out[i] = acc.usedError(ctx, why, v, w)
		}
	}

	return out
}

// fewVolumes are so few that counting the copies of each mount costs less than reading mount tables.
const fewVolumes = 4

// mountedOnce reports whether an overlay is mounted where its record says, and nowhere else. If that cannot be
// determined quickly, it reports false.
func mountedOnce(ctx context.Context, a catalog.MountRecord) bool {
	m, err := kernel.MountAt(unix.AT_FDCWD, a.Mountpoint)
	if err != nil || !m.Root || !m.Unique || m.ID != a.MountID {
		return false
	}
	n, err := mount.CountCopies(ctx, m.Dev, m.ID)
	return err == nil && n == 0
}

// usedError explains why a volume is in use, even one without a mount record.
func (acc *Access) usedError(ctx context.Context, why Reason, v Volume, w driver.Attachment) error {
	if v.HasRecord {
		return acc.heldError(ctx, why, v.Row, v.Record, w)
	}

	on, err := loopdev.On(w.Image)
	if err != nil || len(on) == 0 {
		return acc.heldError(ctx, why, v.Row, catalog.MountRecord{Loop: -1}, w) // the driver's own device, or gone by now
	}

	if holders, err := mount.Holders(ctx, mount.Query{Dev: loopdev.DeviceNumber(on[0].Index)}); err != nil ||
		len(holders) > 0 {
		return acc.heldError(ctx, why, v.Row, catalog.MountRecord{Loop: on[0].Index}, w)
	}

	return errs.New(errs.InUse, why.Op, v.Row.Name, "it is in use: %s is attached to its image", on[0].Path).
		WithHint("if nothing needs the device, detach it with `losetup -d %s`", on[0].Path)
}

// releaseUnheld waits until the image of a volume that was just unmounted is no longer a block device, which is
// normally at once. false: it is held, or does not disappear in time.
func (acc *Access) releaseUnheld(
	ctx context.Context, row catalog.Row, a catalog.MountRecord, w driver.Attachment, dev uint64, going bool,
) (bool, error) {
	free, err := acc.releaseDevice(ctx, row.ID, w, releaseGrace, going)
	if free || err != nil {
		return free, err
	}
	if dev != 0 {
		if holders, _ := mount.Holders(ctx, mount.Query{Dev: dev, At: a.Mountpoint}); len(holders) > 0 {
			return false, nil
		}
	}
	return acc.releaseDevice(ctx, row.ID, w, ReleaseWait, going)
}

// waitCopiesGone waits a moment for the copies of a mount in other namespaces to end, as those of a container that is
// just being started do.
func (acc *Access) waitCopiesGone(
	ctx context.Context, row catalog.Row, a catalog.MountRecord, w driver.Attachment,
) bool {
	for end := time.Now().Add(copyPatience); time.Now().Before(end) && ctx.Err() == nil; time.Sleep(copyPoll) {
		t, err := mount.ReadTables(ctx)
		if err != nil {
			return false
		}
		if found, err := mountsOf(t, row, a, w); err == nil && len(found) == 0 {
			return true
		}
	}
	return false
}

// restoreUnmounted mounts a volume again that Unmount has unmounted, but that another mount namespace keeps: the same
// device at the same place, with the same options. If this process is killed before it has recorded the new mount,
// MountState recognizes it.
func (acc *Access) restoreUnmounted(
	ctx context.Context, row catalog.Row, a *catalog.MountRecord, w driver.Attachment, attrs mount.Attributes,
) error {
	ctx = context.WithoutCancel(ctx)
	m, err := acc.remountDetached(ctx, row, *a, w, attrs.ReadOnly())
	if err != nil {
		return err
	}
	defer m.Close()
	return acc.restoreMount(ctx, m, a, attrs)
}

// remountDetached mounts the filesystem of an attached image once more, detached. maybeReadOnly: the filesystem may be
// read-only as a whole, and is then mounted read-only. NotFound: its block device no longer exists.
func (acc *Access) remountDetached(
	ctx context.Context, row catalog.Row, a catalog.MountRecord, w driver.Attachment, maybeReadOnly bool,
) (*mount.Detached, error) {
	// The open device keeps its number, and what is behind it, until the mount holds it.
	var f *os.File
	var err error
	if w.Block {
		f, err = acc.activateDevice(ctx, row.ID)
	} else if f, err = os.Open(loopdev.DevicePath(a.Loop)); err == nil && !loopHolds(a) {
		f.Close()
		err = errs.New(errs.NotFound, "mount", row.Name, "its block device no longer exists")
	}
	if err != nil {
		return nil, errs.Wrap("mount", row.Name, err)
	}

	defer f.Close()

	if w.Block { // the driver was not asked before
		if w, err = acc.drv.Attachment(ctx, row.ID); err != nil {
			return nil, err
		}
	}

	options := mountOptions(row, w)
	m, err := mount.Device(string(w.FS), f.Name(), options, false)
	if errors.Is(err, unix.EBUSY) && maybeReadOnly {
		m, err = mount.Device(string(w.FS), f.Name(), options, true)
	}

	return m, err
}

// restoreMount moves a mount that remountDetached has made to the volume's mount point, and records it.
func (acc *Access) restoreMount(
	ctx context.Context, m *mount.Detached, a *catalog.MountRecord, attrs mount.Attributes,
) error {
	if err := m.SetAttributes(attrs); err != nil {
		return err
	}
	if err := acc.showOwner(*a, m.Owner, m); err != nil {
		return err
	}
	info, err := acc.moveMountBack(m, a.Mountpoint)
	if err != nil {
		return err
	}
	a.MountID = info.ID
	return acc.records.RecordRemount(context.WithoutCancel(ctx), *a)
}

// moveMountBack moves a detached mount to the directory at path, whatever happens to the names above it.
func (acc *Access) moveMountBack(m *mount.Detached, path string) (kernel.MountInfo, error) {
	p, err := acc.OpenPlace(path)
	if err != nil {
		return kernel.MountInfo{}, err
	}
	defer p.Close()
	dir, err := p.OpenDir()
	if err != nil {
		return kernel.MountInfo{}, errs.Wrap("mount", path, err)
	}
	defer dir.Close()
	return m.MoveToDir(dir)
}
