package content

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/linux/kernel"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// lettingGoTries is how often something that a volume in use does not permit is tried again while nobody is found who
// uses the volume, or only children between fork and exec, where a busy host may keep them for long. The waits double
// from 1 ms on.
const lettingGoTries = 9

// unlessHeld does what a volume in use does not permit. What held it a moment ago and cannot be found any more was
// about to let go, and a child between fork and exec is: then it is tried again. InUse, with the holders.
func (acc *Access) unlessHeld(
	ctx context.Context, why Reason, row catalog.Row, a catalog.MountRecord, w driver.Attachment, dev uint64,
	do func() error,
) error {
	for tries := 0; ; tries++ {
		err := do()
		if !errs.Is(err, errs.InUse) {
			return err
		}
		if why.Gentle {
			return errs.New(errs.InUse, why.Op, row.Name, "it is in use")
		}

		AtStep("refused")
		holders, herr := acc.findHolders(ctx, row, a, w, dev)
		if !lettingGo(holders) || tries >= lettingGoTries || ctx.Err() != nil {
			return heldBy(why, row, holders, herr)
		}
		time.Sleep(time.Millisecond << tries)
	}
}

// TillLetGo finds holders until those found are not about to let go.
func TillLetGo(ctx context.Context, find func() ([]mount.Holder, error)) ([]mount.Holder, error) {
	for tries := 0; ; tries++ {
		holders, err := find()
		if len(holders) == 0 || !lettingGo(holders) || tries >= lettingGoTries || ctx.Err() != nil {
			return holders, err
		}
		AtStep("refused")
		time.Sleep(time.Millisecond << tries)
	}
}

// Settled is OwnMountState after what is about to let go of a volume that is not mounted as recorded has let go.
func (acc *Access) Settled(ctx context.Context, why Reason, row catalog.Row, a catalog.MountRecord) State {
	state := acc.OwnMountState(row, a)
	if state != HeldElsewhere {
		return state
	}

	w, err := acc.attachmentOf(ctx, row)
	if err != nil {
		return state // it is damaged or gone
	}

	_ = acc.unlessHeld(ctx, why, row, a, w, 0, func() error {
		if state = acc.OwnMountState(row, a); state == HeldElsewhere {
			return errs.New(errs.InUse, why.Op, row.Name, "it is mounted elsewhere")
		}
		return nil
	})
	return state
}

// lettingGo reports whether all holders, if any, are processes that have inherited files and not executed a program
// yet, or that have ended since they were found.
func lettingGo(holders []mount.Holder) bool {
	for _, h := range holders {
		if h.PID == 0 || !kernel.BeforeExec(h.PID) && kernel.ProcStart(h.PID) != 0 {
			return false
		}
		if slices.ContainsFunc(h.How, func(how string) bool { return !strings.HasPrefix(how, "fd ") }) {
			return false
		}
	}
	return true
}

// unmountUnheld unmounts a volume. InUse, with the holders.
func (acc *Access) unmountUnheld(
	ctx context.Context, why Reason, row catalog.Row, a catalog.MountRecord, w driver.Attachment, dev uint64,
) error {
	return acc.unlessHeld(ctx, why, row, a, w, dev, func() error {
		return acc.unmountAt(a.Mountpoint, a.MountID, why.Gentle)
	})
}

// holdersError names the processes and mount namespaces that keep a volume mounted.
func (acc *Access) holdersError(
	ctx context.Context, why Reason, row catalog.Row, a catalog.MountRecord, w driver.Attachment, dev uint64,
) error {
	if why.Gentle {
		return errs.New(errs.InUse, why.Op, row.Name, "it is in use")
	}
	holders, err := acc.findHolders(ctx, row, a, w, dev)
	return heldBy(why, row, holders, err)
}

// findHolders finds those processes and mount namespaces. With an error there may be others.
func (acc *Access) findHolders(
	ctx context.Context, row catalog.Row, a catalog.MountRecord, w driver.Attachment, dev uint64,
) ([]mount.Holder, error) {
	if !w.Block && w.Image+w.Source+w.Tree == "" {
		w, _ = acc.drv.Attachment(ctx, row.ID) // an object that is gone has no holders
	}
	if dev == 0 {
		dev = deviceOf(a, w)
	}

	q := holdersQuery(row, a, w, dev)
	if q.Dev == 0 && q.Tree == "" {
		return nil, nil // no device is behind its image
	}
	return mount.Holders(ctx, q)
}

// heldBy is the error that names them.
func heldBy(why Reason, row catalog.Row, holders []mount.Holder, herr error) error {
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

// Holders names the holders of a volume; "" if none is found.
func (acc *Access) Holders(ctx context.Context, row catalog.Row, a catalog.MountRecord) string {
	w, err := acc.drv.Attachment(ctx, row.ID)
	if err != nil {
		return ""
	}

	dev := uint64(0)
	if m, err := kernel.MountAt(unix.AT_FDCWD, a.Mountpoint); err == nil && m.Root && m.ID == a.MountID {
		dev = m.Dev
	} else {
		dev = deviceOf(a, w)
	}

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
