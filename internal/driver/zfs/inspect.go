package zfs

import (
	"context"

	"pando/internal/base/errs"
	"pando/internal/driver"
)

// Inspect implements driver.Inspector.
func (d *Driver) Inspect(ctx context.Context, id driver.Identity) (driver.Condition, error) {
	var c driver.Condition
	o, err := d.readObject(ctx, "inspect", id.ID)
	if errs.Is(err, errs.NotFound) {
		return c, nil
	}
	if err != nil {
		return c, err
	}

	c.Data, c.SizeBytes = true, o.node.size
	own := o.node.ownSnap() != nil
	switch to := id.Kind.Immutable(); {
	case id.FS.IsImage() != o.node.volume:
		c.Err = errs.New(errs.Damaged, "open", string(id.ID), "its dataset is not of the type for %s", id.FS)
	case to && !own:
		c.Mode = "its dataset has no snapshot " + string(id.ID)
	case to && !o.node.readOnly:
		c.Mode = "its dataset is writable"
	case !to && own:
		c.Mode = "it has the snapshot of an immutable object"
	case !to && o.node.readOnly:
		c.Mode = "its dataset is read-only"
	}

	return c, nil
}

// Restore implements driver.Inspector.
func (d *Driver) Restore(ctx context.Context, id driver.Identity) error {
	o, err := d.readObject(ctx, "write identity", id.ID)
	if err != nil {
		return err
	}
	return d.writeIdentity(ctx, o, id)
}
