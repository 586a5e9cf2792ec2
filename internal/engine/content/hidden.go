package content

import (
	"context"
	"os"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/mountpoint"
	"pando/internal/linux/kernel"
	"pando/internal/linux/mount"
)

// Hidden is the mount of a volume that only a program in a mount namespace of its own sees: it is attached nowhere, and
// the program gets a copy of it. If this process is killed, the kernel drops both. Methods must not be called
// concurrently.
type Hidden struct{ m *mount.Detached }

// Mounted reports whether there is a mount.
func (h *Hidden) Mounted() bool { return h != nil && h.m != nil }

// Copy returns the descriptor of a copy of the mount, detached.
func (h *Hidden) Copy() (*mount.Detached, error) { return h.m.Copy() }

// Close unmounts it, if it is mounted, unless a copy still exists.
func (h *Hidden) Close() {
	if h.Mounted() {
		h.m.Close()
		h.m = nil
	}
}

// take takes a mount for a program that gets none of the rights in Rights.
func (h *Hidden) take(m *mount.Detached, a *catalog.MountRecord) error {
	if err := m.Restrict(true, true); err != nil {
		return err
	}
	info, err := m.Info()
	if err != nil {
		return errs.Wrap("mount", a.Mountpoint, err)
	}
	a.MountID, a.MountNS = info.ID, 0
	h.m = m.Take()
	return nil
}

// hide keeps a mount for a program. It makes the directory where HiddenWriteBack may have to attach it: in a full pool,
// that would be too late. Whatever unmounts the volume removes the directory.
func (acc *Access) hide(m *mount.Detached, a *catalog.MountRecord, t Target) error {
	p, err := acc.OpenPlace(t.Path)
	if err != nil {
		return err
	}

	defer p.Close()

	if _, err = acc.makeTarget(p, t); err == nil {
		err = prepareAt(p, a.ID)
	}
	if err == nil {
		err = t.Hide.take(m, a)
	}
	if err != nil {
		_ = p.RemoveDir(isMadeFor(a.ID, true))
	}

	return err
}

// prepareAt is prepareMade for a directory that is not open.
func prepareAt(p *mountpoint.Place, id driver.ObjectID) error {
	dir, err := p.OpenDir()
	if err != nil {
		return errs.Wrap("mount", "", err)
	}
	defer dir.Close()
	return prepareMade(dir, id, false)
}

// HiddenWriteBack is UmountWriteBack for a hidden mount whose program has ended. If data was lost, the volume is then
// mounted where all can see it, a says where, and h has no mount any more.
func (acc *Access) HiddenWriteBack(ctx context.Context, row catalog.Row, a *catalog.MountRecord, h *Hidden) error {
	u, err := acc.writeBackHidden(ctx, row, *a, h)
	if err != nil {
		return err
	}
	if u.cause == nil {
		u.cause = acc.syncIfNearlyFull(ctx, row)
	}
	_, known, err := acc.records.LostWrites(ctx, *a)
	if err != nil || u.cause == nil && !known {
		return err
	}
	if u.cause != nil {
		acc.recordLostWrites(ctx, *a, u, false)
	}

	// What was lost can still be read, as long as the volume is mounted.
	if a.MountNS, err = kernel.MountNamespace(); err != nil {
		return errs.Wrap("mount", row.Name, err)
	}
	if err := acc.placeMount(h.m, a, Target{Path: a.Mountpoint, owner: row.Owner}); err != nil {
		return errs.New(errs.KindOf(err), "umount", row.Name,
			"data that programs wrote could not be stored, and is lost, as the volume could not be mounted: %w", err).
			WithHint("free space before the next run with %s and %s, or use a larger pool", errs.Run("destroy"), errs.Run("gc"))
	}
	h.Close()
	if err := acc.records.RecordRemount(context.WithoutCancel(ctx), *a); err != nil {
		return err
	}
	return acc.UmountWriteBack(ctx, row, *a)
}

func (acc *Access) writeBackHidden(
	ctx context.Context, row catalog.Row, a catalog.MountRecord, h *Hidden,
) (u unwritten, err error) {
	if row.IsOverlay() {
		return acc.writeBackUpper(ctx, row, a), nil
	}
	err = withRoot(h.m, func(root *os.File) error {
		u = writeBack(root, false)
		return nil
	})
	if errs.Is(err, errs.IO) {
		return unwritten{cause: err, stopped: true}, nil // an XFS that has shut down is not even opened
	}
	return u, err
}

// EndHidden unmounts a hidden mount whose program has ended. stays: as for Unmount. free: nothing else uses the volume;
// otherwise the mount record says how it stands.
func (acc *Access) EndHidden(
	ctx context.Context, row catalog.Row, a catalog.MountRecord, h *Hidden, stays bool,
) (free bool, err error) {
	w, err := acc.attachmentOf(ctx, row)
	if err != nil {
		h.Close()
		return false, nil // it is damaged or gone: the caller finds out
	}

	switch {
	case !stays || w.Image == "":
	case row.IsOverlay():
		acc.trimUpper(ctx, row, a, w)
	default:
		_ = withRoot(h.m, func(root *os.File) error {
			trimRoot(root)
			return nil
		})
	}

	AtStep("unmounting")
	h.Close()
	AtStep("unmounted")

	if w.Image == "" {
		return !row.IsOverlay() || !acc.upperStaysInUse(row, copyPatience), nil
	}

	// Another command may be copying it.
	if free, err = acc.releaseDevice(ctx, row.ID, w, copyPatience, !stays); err == nil && !free {
		free, err = acc.releaseUnheld(ctx, row, a, w, deviceOf(a, w), !stays)
	}
	if free && row.IsOverlay() {
		acc.releaseLower(ctx, row.Identity)
	}
	return free, err
}

// hiddenPatience is how long the processes of a sandbox may take to end that was killed.
const hiddenPatience = 2 * time.Second

// WaitHiddenGone waits a moment until a mount is gone that only the program of a killed process had, and reports
// whether it is.
func (acc *Access) WaitHiddenGone(ctx context.Context, row catalog.Row, a catalog.MountRecord) bool {
	for end := time.Now().Add(hiddenPatience); ; time.Sleep(copyPoll) {
		if acc.MountState(row, a) == NotMounted {
			return true
		}
		if time.Now().After(end) || ctx.Err() != nil {
			return false
		}
	}
}

// hiddenSourceState is MountState for a hidden mount of a filesystem that is mounted by name.
func (acc *Access) hiddenSourceState(w driver.Attachment) State {
	dev, err := mountedDevice(w)
	if err != nil {
		return HeldElsewhere
	}
	t, err := mount.ReadTables(context.Background())
	if err != nil {
		return HeldElsewhere
	}
	if found, err := t.Mounts(mount.Query{Dev: dev}); err != nil || len(found) > 0 {
		return HeldElsewhere
	}
	return NotMounted
}
