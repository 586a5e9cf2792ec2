package content

import (
	"context"
	"fmt"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/linux/kernel"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// holdersError names the processes and mount namespaces that keep a volume mounted.
func (acc *Access) holdersError(
	ctx context.Context, why Reason, row catalog.Row, a catalog.MountRecord, w driver.Attachment, dev uint64,
) error {
	if why.Gentle {
		return errs.New(errs.InUse, why.Op, row.Name, "it is in use")
	}
	if !w.Block && w.Image+w.Source+w.Tree == "" {
		w, _ = acc.drv.Attachment(ctx, row.ID) // an object that is gone has no holders
	}
	if dev == 0 {
		dev = acc.shownDevice(row, a, w)
	}

	holders, herr := mount.Holders(ctx, holdersQuery(row, a, w, dev))
	msg := "it is in use"
	if len(holders) > 0 {
		msg += ": " + mount.FormatHolders(holders)
	}
	if herr != nil && len(holders) == 0 {
		msg += fmt.Sprintf(" (not everything could be looked at: %v)", herr)
	}

	err := errs.New(errs.InUse, why.Op, row.Name, "%s", msg)
	if row.IsOverlay() && len(holders) == 0 {
		return err.WithHint("end the programs that have files of it open, perhaps since `umount --lazy`, then try again")
	}
	return err.WithHint("end what holds it, then try again")
}

// holdersQuery returns the query for the holders of a mounted volume. The files of an overlay are not those of its
// tree.
func holdersQuery(row catalog.Row, a catalog.MountRecord, w driver.Attachment, dev uint64) mount.Query {
	if w.Tree != "" && !(row.IsOverlay() && dev != 0) {
		return mount.Query{Tree: w.Tree, At: a.Mountpoint}
	}
	return mount.Query{Dev: dev, At: a.Mountpoint}
}

// shownDevice returns the st_dev that programs see in a mounted volume, wherever it is mounted: that of an overlay is
// not that of the device of its upper layer. 0: none is known.
func (acc *Access) shownDevice(row catalog.Row, a catalog.MountRecord, w driver.Attachment) uint64 {
	if row.IsOverlay() {
		if dev := acc.overlayDevice(a); dev != 0 {
			return dev
		}
	}
	if m, err := kernel.MountAt(unix.AT_FDCWD, a.Mountpoint); err == nil && m.Root && m.ID == a.MountID {
		return m.Dev
	}
	return deviceOf(a, w)
}

// Holders names the holders of a volume; "" if none is found.
func (acc *Access) Holders(ctx context.Context, row catalog.Row, a catalog.MountRecord) string {
	w, err := acc.drv.Attachment(ctx, row.ID)
	if err != nil {
		return ""
	}

	dev := acc.shownDevice(row, a, w)
	if dev == 0 && w.Tree == "" {
		return ""
	}

	q := holdersQuery(row, a, w, dev)
	holders, _ := mount.Holders(ctx, q) // those that could be found
	if len(holders) == 0 {
		return ""
	}

	return mount.FormatHolders(holders)
}

// MountHolders names who uses a destroyed object that is mounted by name, as far
// as can be found out.
func (acc *Access) MountHolders(ctx context.Context, id driver.ObjectID) string {
	w, err := acc.drv.Attachment(ctx, id)
	if err != nil || w.Source == "" {
		return ""
	}

	dev, err := sourceDevice(w)
	switch {
	case err == nil:
		return HoldersOf(ctx, dev)
	case errs.Is(err, errs.InUse):
		return "something has a file of it open, or is in it"
	}

	return ""
}

// HoldersOf names who uses a filesystem that is unmounted, and keeps it alive; "" if
// nobody is found.
func HoldersOf(ctx context.Context, dev uint64) string {
	holders, _ := mount.Holders(ctx, mount.Query{Dev: dev}) // those that could be found
	if len(holders) == 0 {
		return ""
	}
	return mount.FormatHolders(holders)
}
