package zfs

import (
	"context"
	"strconv"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/linux/zfs"
)

// FlattenCost implements driver.Flattener.
func (d *Driver) FlattenCost(ctx context.Context, id driver.ObjectID) (int64, error) {
	o, err := d.readWhole(ctx, "flatten", id, true)
	if err != nil {
		return 0, err
	}
	return o.node.refer, nil
}

// checkVacant returns Exists if an ID already has a dataset.
func (d *Driver) checkVacant(ctx context.Context, id driver.Identity) error {
	_, err := zfs.ZFS.Output(ctx, "list", "-Hp", "-o", "name", d.dataset(id.ID))
	if err == nil {
		return errs.New(errs.Exists, "create", id.Ref(), "its dataset %s already exists", d.dataset(id.ID))
	}
	if zfs.Is(err, zfs.Absent) {
		return nil
	}
	return err
}

// Flatten implements driver.Flattener by `zfs send` into `zfs receive`. The copy has
// the key of the pool; the key of its origin, which may be another, must be loaded.
// If it is killed, the incomplete copy has no identity.
func (d *Driver) Flatten(
	ctx context.Context, from driver.ObjectID, id driver.Identity, progress func(done, total int64),
) error {
	const op = "flatten"
	o, err := d.readOrigin(ctx, op, from, &id, false)
	if err != nil {
		return err
	}

	prop, err := d.identityArg(id)
	if err != nil {
		return err
	}

	if err := d.checkVacant(ctx, id); err != nil {
		return err
	}

	done, err := d.noteMaking(id.ID)
	if err != nil {
		return err
	}

	return d.finishSteps(ctx, id, "", d.flatten(ctx, o, id, prop, progress), done)
}

// flatten is Flatten after its checks.
func (d *Driver) flatten(
	ctx context.Context, o object, id driver.Identity, prop string, progress func(done, total int64),
) error {
	const op = "flatten"
	// Find or make the snapshot to send.
	at := d.ownSnapName(o.ID)
	if !o.immutable {
		at = d.dataset(o.ID) + "@" + string(id.ID)
		if _, err := d.takeContent(ctx, op, o.ID, nil, "snapshot", at); err != nil {
			return err
		}
	}

	total := max(o.node.refer, 1)
	var report func(int64)
	if progress != nil {
		report = func(n int64) { progress(min(n, total), total) }
	}

	// Copy it. Without -p the stream carries no properties, so the copy has those of the
	// root. It comes with a snapshot, which must be destroyed before the identity is set.
	ds, came := d.dataset(id.ID), d.ownSnapName(id.ID)
	if d.step != nil {
		d.step([]string{"send"})
	}

	err := zfs.Copy(ctx, []string{"-L", "-c", at}, []string{"-u", came}, report)
	if zfs.Is(err, zfs.Absent) {
		d.memo.forget(o.ID)
		return d.absentError(ctx, op, o.ID)
	}

	if err != nil {
		return err
	}

	if err := d.runChange(ctx, "destroy", came); err != nil {
		return err
	}

	if !o.immutable {
		if err := d.runChange(ctx, "destroy", "-d", at); err != nil && !zfs.Is(err, zfs.Absent) {
			return err
		}
	}

	// Set the identity, which makes the copy whole.
	args := append([]string{"set", prop}, syncProps(id)...)
	if id.FS.IsImage() {
		if id.SizeBytes > o.node.size {
			if err := d.runChange(ctx, "set", "volsize="+strconv.FormatInt(id.SizeBytes, 10), ds); err != nil {
				return err
			}
		}
		if id.Soon {
			args = append(args, "volmode=dev")
		}
	}

	if err := d.finishCreate(ctx, id, d.runChange(ctx, append(args, ds)...)); err != nil {
		return err
	}

	if progress != nil {
		progress(total, total)
	}

	return nil
}
