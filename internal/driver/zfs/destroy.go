package zfs

import (
	"context"
	"slices"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/linux/zfs"
)

// destroyTries limits how often Destroy retries: other processes may clone and destroy the object in between.
const destroyTries = 30

// Destroy implements driver.Driver. InUse if the object is mounted and in use, or
// its block device is open.
func (d *Driver) Destroy(ctx context.Context, id driver.ObjectID) error {
	const op = "destroy"
	if !driver.ValidID(string(id)) {
		return errs.New(errs.Invalid, op, string(id), "not the ID of an object")
	}

	d.memo.forget(id)
	d.forgetOrigin(id)
	half := d.mayBeHalfMade(id)
	err := d.destroyDataset(ctx, id)
	if err == nil && !half {
		return nil // nearly always: one program
	}
	if err != nil && !errs.Is(err, errs.NotFound) {
		return err
	}

	if err := d.destroyHalves(ctx, id); err != nil {
		return err
	}

	if half {
		d.forgetMaking(id)
	}

	return nil
}

// destroyDataset removes the dataset of an object. NotFound if there is none.
func (d *Driver) destroyDataset(ctx context.Context, id driver.ObjectID) error {
	const op = "destroy"
	ds := d.dataset(id)
	for range destroyTries {
		err := d.runChange(ctx, "destroy", ds)
		switch {
		case err == nil:
			return nil
		case zfs.Is(err, zfs.Absent):
			return d.absentError(ctx, op, id)
		case !zfs.Is(err, zfs.HasChildren, zfs.HasClones):
			return err
		}

		nodes, err := d.listDatasets(ctx, "-r", ds)
		if zfs.Is(err, zfs.Absent) {
			return d.absentError(ctx, op, id)
		}
		if err != nil {
			return err
		}

		if again, err := d.untie(ctx, nodes); err != nil {
			return err
		} else if !again {
			return d.moveToGraveyard(ctx, nodes[0])
		}
	}

	return errs.New(errs.Conflict, op, string(id), "other processes keep cloning it").WithHint("try again")
}

// untie removes from a dataset, given with all below it, what keeps it from being destroyed, as far as it is Pando's.
// It reports whether that was all; changes by other processes in the meantime show when the caller tries again.
func (d *Driver) untie(ctx context.Context, nodes []*node) (bool, error) {
	n := nodes[0]
	var ours []string
	for _, s := range n.snaps {
		if d.isOwnSnap(s) && !s.deferred {
			ours = append(ours, s.name)
		}
	}

	if len(ours) > 0 {
		// ZFS destroys those without clones now, and the others with their last clone.
		err := d.runChange(ctx, "destroy", "-d", n.name+"@"+strings.Join(ours, ","))
		if err != nil && !zfs.Is(err, zfs.Absent) {
			return false, err
		}
	}

	if len(nodes) > 1 {
		return false, nil // it contains a dataset that is not Pando's
	}

	for _, s := range slices.Backward(n.snaps) {
		if len(s.clones) == 0 {
			continue
		}
		// All older snapshots move with this one.
		return d.promoteOne(ctx, s)
	}

	// There are no clones: only a foreign snapshot or a hold can prevent the destruction.
	return !slices.ContainsFunc(n.snaps, func(s *snap) bool { return !d.isOwnSnap(s) || s.holds > 0 }), nil
}

// promoteOne promotes one of Pando's clones of a snapshot, so that the snapshot moves
// there. It reports whether it did, or another process may have.
func (d *Driver) promoteOne(ctx context.Context, s *snap) (bool, error) {
	for _, c := range s.clones {
		parent := zfs.ParentOf(c)
		if n := (&node{name: c}); parent != d.root && parent != d.graveyardDataset() {
			continue
		} else if _, ok := n.id(); !ok {
			continue
		}
		err := d.runChange(ctx, "promote", c)
		switch {
		case err == nil, zfs.Is(err, zfs.Absent, zfs.NotAClone):
			return true, nil // done, or the clone was destroyed, or another process was first
		case !zfs.Is(err, zfs.SameSnapshot, zfs.OtherKey, zfs.KeyMissing):
			return false, err
		}
	}

	return false, nil
}

// moveToGraveyard hides a dataset that cannot be destroyed. As far as possible it frees the data that is not in the
// snapshots which keep the dataset.
func (d *Driver) moveToGraveyard(ctx context.Context, n *node) error {
	if err := d.checkUnused(ctx, n); err != nil {
		return err
	}

	id, _ := n.id()
	to := d.graveyardDataset() + "/" + string(id)
	err := d.runChange(ctx, "rename", n.name, to)
	if zfs.Is(err, zfs.NoParent) {
		if err := zfs.ZFS.Do(ctx, "create", "-o", "canmount=off", d.graveyardDataset()); err != nil &&
			!zfs.Is(err, zfs.Taken) {
			return err
		}
		err = d.runChange(ctx, "rename", n.name, to)
	}
	if err != nil {
		return err
	}

	if len(n.snaps) > 0 && n.written > 0 && n.children == 0 {
		// Keep only the snapshots, not data written after the last one. If a process in it prevents that, its bytes are freed
		// later.
		_ = zfs.ZFS.Do(ctx, "rollback", to+"@"+n.snaps[len(n.snaps)-1].name)
	}

	return nil
}

// checkUnused returns InUse if a dataset that is about to be renamed is in use: ZFS would
// rename it all the same.
func (d *Driver) checkUnused(ctx context.Context, n *node) error {
	if !n.volume {
		return nil // the engine has unmounted it
	}
	id, _ := n.id()
	held, err := d.Held(ctx, id)
	if err != nil || !held {
		return err
	}
	return errs.New(errs.InUse, "destroy", string(id), "its block device is in use")
}

// destroyHalves removes the snapshots of an object on other datasets: they remain when
// making the object was interrupted.
func (d *Driver) destroyHalves(ctx context.Context, id driver.ObjectID) error {
	live, inGraveyard, err := d.listNodes(ctx)
	if err != nil {
		return err
	}

	for _, n := range append(live, inGraveyard...) {
		for _, s := range n.snaps {
			if s.name != string(id) || s.deferred || !d.isOwnSnap(s) {
				continue
			}
			if err := d.runChange(ctx, "destroy", "-d", n.name+"@"+s.name); err != nil && !zfs.Is(err, zfs.Absent) {
				return err
			}
		}
	}

	return nil
}

// Reap implements driver.Tied: it destroys datasets of the graveyard that are no longer tied, and marks snapshots for
// deferred destruction that an interrupted operation has not marked.
func (d *Driver) Reap(ctx context.Context) (int, error) {
	live, inGraveyard, err := d.listNodes(ctx)
	if err != nil {
		return 0, err
	}

	gone := 0
	for _, n := range inGraveyard {
		ok, err := d.reapDataset(ctx, n.name)
		if err != nil {
			return gone, err
		}
		if ok {
			gone++
		}
	}

	// Mark snapshots of whole clones, which should go with their clones.
	whole := map[string]bool{}
	for _, n := range live {
		o := d.objectOf(n)
		whole[string(o.ID)] = o.Whole
	}

	for _, n := range live {
		for _, s := range n.snaps {
			id, _ := n.id()
			if s.deferred || s.name == string(id) || !whole[s.name] || !d.isOwnSnap(s) {
				continue
			}
			if err := d.runChange(ctx, "destroy", "-d", n.name+"@"+s.name); err != nil && !zfs.Is(err, zfs.Absent) {
				return gone, err
			}
			gone++
		}
	}

	return gone, nil
}

// reapDataset destroys a dataset of the graveyard if possible, and reports whether it did.
func (d *Driver) reapDataset(ctx context.Context, ds string) (bool, error) {
	for range destroyTries {
		err := d.runChange(ctx, "destroy", ds)
		switch {
		case err == nil:
			return true, nil
		case zfs.Is(err, zfs.Absent):
			return false, nil // another process has destroyed it
		case errs.Is(err, errs.InUse) && !zfs.Is(err, zfs.HasChildren, zfs.HasClones):
			return false, nil // a later call retries
		case !zfs.Is(err, zfs.HasChildren, zfs.HasClones):
			return false, err
		}

		nodes, err := d.listDatasets(ctx, "-r", ds)
		if zfs.Is(err, zfs.Absent) {
			return false, nil
		}
		if err != nil {
			return false, err
		}

		if again, err := d.untie(ctx, nodes); err != nil || !again {
			return false, err
		}
	}

	return false, nil
}
