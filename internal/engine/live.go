package engine

import (
	"context"
	"errors"
	"os"

	"pando/internal/catalog"
	"pando/internal/driver"
	"pando/internal/errs"
	"pando/internal/freeze"
	"pando/internal/kernel"
	"pando/internal/loopdev"
	"pando/internal/mount"

	"golang.org/x/sys/unix"
)

// live is a volume as it is found when something is to be made of it.
type live struct {
	row      catalog.Row
	att      catalog.Attached
	state    where
	noFreeze bool // do not stop its writes

	lost    catalog.Lost // writes that never reached the pool, if hasLost
	hasLost bool
}

// lookLive finds out whether a volume is in use.
func (e *Engine) lookLive(tx *catalog.Tx, row catalog.Row, noFreeze bool) (live, error) {
	l := live{row: row, noFreeze: noFreeze}
	if row.Kind != driver.Volume {
		return l, nil
	}
	a, has, err := tx.Attached(row.ID)
	if err == nil && has {
		l.att, l.state = a, e.look(row, a)
		l.lost, l.hasLost, err = tx.Lost(a)
	}
	return l, err
}

// inUse reports whether programs may be writing to it.
func (l live) inUse() bool { return l.state != gone }

// freezes reports whether copying it will freeze its filesystem.
func (l live) freezes() bool {
	return l.inUse() && !l.noFreeze && (l.row.FS == driver.Ext4 || l.row.FS == driver.XFS)
}

// worth says what a copy of it is worth.
func (l live) worth() driver.Consistency {
	switch {
	case !l.inUse(), l.freezes():
		return driver.Clean
	case l.row.FS.IsImage():
		return driver.Crash
	}
	return driver.Clean // the kernel takes a tree with all that was written to it, or the driver sees to it
}

// copyLive makes an object with the content of a volume, snapshot or generation,
// also while programs write to it; see worth. The caller's mark says that it may
// freeze. Kinds as driver.Driver.Clone; InUse and Unsupported if it cannot be
// frozen, Conflict if a copy that takes its time was overtaken by writes; NoSpace or IO if
// something that programs have written could not be stored in the pool.
func (e *Engine) copyLive(ctx context.Context, l live, id driver.Identity, immutable bool) error {
	lc, canLive := e.drv.(driver.LiveCopier)
	simple := func() error {
		if immutable {
			return e.drv.Snapshot(ctx, l.row.ID, id)
		}
		return e.drv.Clone(ctx, l.row.ID, id)
	}
	warnLost(ctx, l)
	switch {
	case !l.inUse():
		return simple()
	case l.freezes():
		if !canLive {
			return errs.New(errs.Unsupported, "freeze", l.row.Name, "the %s driver cannot copy a frozen volume", e.caps.Name)
		}
		root, release, err := e.openMounted(ctx, l)
		if err != nil {
			return err
		}
		defer release()
		// What is written now need not be written while others wait.
		if err := e.copyWriteBack(ctx, l, root); err != nil {
			return err
		}
		if err := lc.CopyLive(ctx, l.row.ID, id, immutable, func(take func() error) error { return freeze.Do(ctx, root, take) }); err != nil {
			return err
		}
		return e.checkFrozenCopy(ctx, l, root)
	case l.row.FS.IsImage():
		if err := e.flush(ctx, l); err != nil {
			return err
		}
		return simple()
	case canLive && !e.caps.Atomic:
		return lc.CopyLive(ctx, l.row.ID, id, immutable, nil)
	}
	return simple()
}

// checkFrozenCopy makes sure that what was written between copyWriteBack and the freeze
// reached the pool: freezing writes it, and does not say what it could not write. In a pool
// with room it could.
func (e *Engine) checkFrozenCopy(ctx context.Context, l live, root *os.File) error {
	if s, err := e.pool.Space(ctx); err != nil || s.FreeBytes >= nearlyFull {
		return err
	}
	return e.copyWriteBack(ctx, l, root)
}

// flush writes what programs have written to an image that is in use, as far as
// can be without waiting for them.
func (e *Engine) flush(ctx context.Context, l live) error {
	if l.row.FS != driver.None && l.state != here {
		return nil
	}
	root, err := os.Open(l.att.Mountpoint)
	if err != nil {
		return nil // it was unmounted just now, or is used where it cannot be seen
	}
	defer root.Close()
	if m, err := kernel.MountAt(int(root.Fd()), ""); l.att.MountID != 0 && (err != nil || m.ID != l.att.MountID) {
		return nil
	}
	return e.copyWriteBack(ctx, l, root)
}

// openMounted opens the root of the filesystem in an image that is mounted, also
// if that is in another mount namespace.
func (e *Engine) openMounted(ctx context.Context, l live) (*os.File, func(), error) {
	if l.state == here {
		f, err := os.Open(l.att.Mountpoint)
		if err != nil {
			return nil, nil, errs.Wrap("freeze", l.row.Name, err)
		}
		// If it has been unmounted just now, this is another filesystem: the
		// pool's, or the host's, which must not be frozen.
		if m, err := kernel.MountAt(int(f.Fd()), ""); err != nil || m.ID != l.att.MountID {
			f.Close()
			return nil, nil, errs.New(errs.Conflict, "freeze", l.row.Name, "it was unmounted meanwhile").WithHint("try again")
		}
		return f, func() { f.Close() }, nil
	}
	// The same block device again is the same filesystem.
	w, err := e.drv.Attachment(ctx, l.row.ID)
	if err != nil {
		return nil, nil, err
	}
	dev, done, err := e.deviceAgain(ctx, l, w)
	if err != nil {
		return nil, nil, err
	}
	m, err := mount.Device(string(w.FS), dev, w.Options, false)
	done()
	if err != nil {
		return nil, nil, e.blameFull(ctx, err)
	}
	f, err := m.Open()
	if err != nil {
		m.Close()
		return nil, nil, err
	}
	return f, func() { f.Close(); m.Close() }, nil
}

// deviceAgain is the block device that a volume's image is attached as, open until
// done.
func (e *Engine) deviceAgain(ctx context.Context, l live, w driver.Attachment) (path string, done func(), err error) {
	if w.Block {
		f, err := e.activate(ctx, l.row.ID)
		if err != nil {
			return "", nil, err
		}
		return f.Name(), func() { f.Close() }, nil
	}
	b, err := loopdev.Lookup(l.att.Loop)
	if err != nil || !e.isImage(l.row.ID, b) {
		return "", nil, errs.New(errs.InUse, "freeze", l.row.Name, "it is attached, but not as it was mounted").WithHint("take it as it is with %s", errs.Param("no-freeze"))
	}
	return b.Path, func() {}, nil
}

// thawFor thaws what a dead process may have left frozen while it copied the
// object id: its guard has died with it.
func (e *Engine) thawFor(ctx context.Context, id driver.ObjectID) error {
	var l live
	err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		row, ok, err := tx.Get(id)
		if err == nil && ok {
			l, err = e.lookLive(tx, row, false)
		}
		return err
	})
	if err != nil || !l.freezes() {
		return err
	}
	root, release, err := e.openMounted(ctx, l)
	if err != nil {
		return err
	}
	defer release()
	if err := kernel.Thaw(root); err != nil && !errors.Is(err, unix.EINVAL) { // not frozen
		return errs.Wrap("thaw", l.row.Name, err)
	}
	return nil
}
