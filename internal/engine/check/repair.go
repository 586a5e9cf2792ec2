package check

import (
	"cmp"
	"context"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
	"pando/internal/engine/ledger"
	"pando/internal/linux/loopdev"
)

// Each repair checks again, in the transaction that claims the object, whether there is something to repair and whether
// another operation works on it. It can be repeated, and after one that was killed, the next one finishes it.

// nothingToDo is what a repair reports that turned out not to be needed.
const nothingToDo = "no longer needed"

// withMark runs do on an object of the catalogue under a mark. InUse if another process works on it.
func (c *fsck) withMark(
	ctx context.Context, op string, id driver.ObjectID, check func(*catalog.Tx, catalog.Row) error, do func() error,
) error {
	if err := c.Ledger.ClaimNow(ctx, opFsck, false, func(tx *catalog.Tx) ([]catalog.Mark, error) {
		row, ok, err := tx.Object(id)
		if err == nil && !ok {
			err = errs.New(errs.NotFound, opFsck, string(id), "it has just been destroyed")
		}
		if err == nil && check != nil {
			err = check(tx, row)
		}
		return []catalog.Mark{{ID: id, Op: op}}, err
	}); err != nil {
		return err
	}

	err := do()
	if uerr := c.Ledger.Unmark(ctx, id); err == nil {
		err = uerr
	}

	return err
}

// notMarked refuses an object that another operation works on.
func notMarked(tx *catalog.Tx, id driver.ObjectID) error {
	marks, err := tx.BlockingMarks(id, "", true)
	if err == nil && len(marks) > 0 {
		err = errs.New(errs.InUse, opFsck, string(id), "another pando (pid %d) is working on it: %s",
			marks[0].PID, marks[0].Op).
			WithHint("try again")
	}
	return err
}

// notMounted refuses what is mounted.
func (c *fsck) notMounted(tx *catalog.Tx, row catalog.Row) error {
	a, has, err := tx.MountRecord(row.ID)
	if err == nil && has && c.Content.MountState(row, a) != content.NotMounted {
		err = errs.New(errs.InUse, opFsck, row.Name, "it is mounted at %s", a.Mountpoint).
			WithHint("%s, then retry", errs.Run("umount", row.Name))
	}
	return err
}

func (c *fsck) fixMark(ctx context.Context, m catalog.Mark) (string, error) {
	said := &warnings.List{}
	ctx = warnings.Collect(ctx, said)
	if _, err := c.Ledger.CleanUp(ctx, []catalog.Mark{m}); err != nil {
		return "", err
	}
	if w := said.Messages(); len(w) > 0 {
		return "", errs.New(errs.InUse, opFsck, cmp.Or(m.Name, string(m.ID)), "%s", w[len(w)-1])
	}
	return "undone or finished", nil
}

func (c *fsck) fixIdentity(ctx context.Context, id driver.ObjectID) (string, error) {
	return "written", c.withMark(ctx, opFsck, id, nil, func() error { return c.Verbs.RestoreIdentity(ctx, id) })
}

// fixSize records the actual size of an image.
func (c *fsck) fixSize(ctx context.Context, row catalog.Row, size int64) (string, error) {
	return "noted", c.withMark(ctx, opFsck, row.ID, c.notMounted, func() error {
		if err := c.Catalog.Update(ctx, catalog.Durable, func(tx *catalog.Tx) error {
			row.SizeBytes = size
			return tx.SetIdentity(row.Identity)
		}); err != nil {
			return err
		}
		return c.Verbs.RestoreIdentity(ctx, row.ID)
	})
}

// fixMissing forgets an object whose data is missing.
func (c *fsck) fixMissing(ctx context.Context, r catalog.Row, name string) (string, error) {
	if ins, ok := c.Driver.(driver.Inspector); ok {
		if cond, err := ins.Inspect(ctx, r.Identity); err != nil || cond.Data {
			return nothingToDo, err
		}
	}

	err := c.Catalog.Update(ctx, catalog.Durable, func(tx *catalog.Tx) error {
		row, ok, err := tx.Object(r.ID)
		if err != nil || !ok {
			return err
		}

		if err := notMarked(tx, r.ID); err != nil {
			return err
		}

		// The image of a mounted volume can be unlinked and still be in use.
		if err := c.notMounted(tx, row); err != nil {
			return err
		}

		if err := tx.Bury(catalog.Tombstone{ID: r.ID, Ref: name, At: time.Now()}, "its data was missing"); err != nil {
			return err
		}

		if r.Kind == driver.Generation {
			return tx.DeleteEmptyGolden(r.Golden)
		}

		return nil
	})
	if err != nil {
		return "", err
	}

	_, err = c.fixTombstone(ctx, r.ID)
	return "forgotten", err
}

// fixTombstone removes what is left of a destroyed object.
func (c *fsck) fixTombstone(ctx context.Context, id driver.ObjectID) (string, error) {
	if err := c.Catalog.View(ctx, func(tx *catalog.Tx) error { return notMarked(tx, id) }); err != nil {
		return "", err
	}
	if err := c.Verbs.Remove(ctx, id, string(id), "destroyed earlier"); err != nil {
		return "", err
	}
	return "removed", c.Catalog.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error { return tx.SetReclaimed(id) })
}

// fixHalf removes an incomplete object that nothing knows.
func (c *fsck) fixHalf(ctx context.Context, id driver.ObjectID) (string, error) {
	if err := c.Catalog.View(ctx, func(tx *catalog.Tx) error {
		if _, known, err := tx.Object(id); err != nil || known {
			return cmp.Or(err, error(errs.New(errs.Conflict, opFsck, string(id), "it is now in the catalogue")))
		}
		return notMarked(tx, id)
	}); err != nil {
		return "", err
	}
	return "removed", c.Driver.Destroy(ctx, id)
}

// fixUnknown adds a whole object to the catalogue. It writes no mark: an object with a mark and without a row is
// destroyed if the process dies.
func (c *fsck) fixUnknown(ctx context.Context, id driver.Identity) (string, error) {
	was, what := id, ""
	if err := c.Catalog.View(ctx, func(tx *catalog.Tx) (err error) {
		id, what, err = nameFor(tx, id)
		return err
	}); err != nil {
		return "", err
	}

	if id != was {
		if err := c.Verbs.WriteIdentity(ctx, id); err != nil {
			return "", err
		}
	}

	row := catalog.Row{Identity: id, UsedAt: time.Now()}
	if id.FS.IsImage() {
		u, err := c.Driver.Usage(ctx, id.ID)
		if err != nil {
			return "", err
		}
		row.Usage, row.MeasuredAt = u, time.Now()
	}

	err := c.Catalog.Update(ctx, catalog.Durable, func(tx *catalog.Tx) error {
		if err := notMarked(tx, id.ID); err != nil {
			return err
		}

		if id.Kind == driver.Volume {
			if err := tx.CheckFree(opFsck, id.Name); err != nil {
				return err
			}
		}

		if id.Kind == driver.Generation {
			g, _, err := tx.Golden(id.Golden)
			if err != nil {
				return err
			}

			g.Name = id.Golden
			addGeneration(&g, id)
			if err := tx.PutGolden(g); err != nil {
				return err
			}
		}
		return tx.PutObject(row)
	})

	return "added as " + what, err
}

// nameFor finds a name for an object that is to be added, as a rebuild would.
func nameFor(tx *catalog.Tx, id driver.Identity) (driver.Identity, string, error) {
	if id.Kind == driver.Generation {
		return id, "golden " + ledger.Describe(id), nil
	}

	if id.Kind == driver.Snapshot {
		vol, ok, err := tx.LineageHolder(id.Volume)
		if err != nil {
			return id, "", err
		}
		if ok {
			if _, taken, err := tx.Snapshot(id.Volume, id.Name); err != nil {
				return id, "", err
			} else if taken {
				id.Name = freeName(id.Name, string(id.ID))
			}
			return id, "snapshot " + vol.Name + "@" + id.Name, nil
		}
		id = orphanVolume(id)
	}

	if err := tx.CheckFree(opFsck, id.Name); errs.Is(err, errs.Exists) {
		id.Name = freeName(id.Name, string(id.ID))
	} else if err != nil {
		return id, "", err
	}

	if _, taken, err := tx.LineageHolder(id.Lineage()); err != nil {
		return id, "", err
	} else if taken {
		id.Volume = "" // another volume has its snapshots
	}

	id.Replaces, id.Before = "", ""
	return id, "volume " + id.Name, nil
}

// fixOrphan turns a snapshot whose volume no longer exists into a volume.
func (c *fsck) fixOrphan(ctx context.Context, r catalog.Row) (string, error) {
	id, back := orphanVolume(r.Identity), false
	err := c.withMark(ctx, opFsck, r.ID, func(tx *catalog.Tx, row catalog.Row) (err error) {
		if _, back, err = tx.LineageHolder(row.Volume); err != nil || back {
			return err
		}
		return tx.CheckFree(opFsck, id.Name)
	}, func() error {
		if back {
			return nil
		}
		if err := c.Catalog.Update(ctx, catalog.Durable, func(tx *catalog.Tx) error {
			return tx.SetIdentity(id)
		}); err != nil {
			return err
		}
		return c.Verbs.RestoreIdentity(ctx, r.ID)
	})

	if back {
		return nothingToDo, err
	}

	return "it is now volume " + id.Name, err
}

// fixGolden makes the row of a golden match its generations.
func (c *fsck) fixGolden(ctx context.Context, v *poolView, name string) (string, error) {
	unlock, err := c.Verbs.LockGolden(ctx, name)
	if err != nil {
		return "", err
	}

	defer unlock()

	done := ""
	err = c.Catalog.Update(ctx, catalog.Durable, func(tx *catalog.Tx) error {
		gens, err := tx.Generations(name)
		if err != nil {
			return err
		}

		if len(gens) == 0 {
			done = "forgotten"
			return tx.DeleteEmptyGolden(name)
		}

		g, known, err := tx.Golden(name)
		if err != nil {
			return err
		}

		was := g
		g.Name, g.Current = name, 0
		for _, r := range gens {
			id := r.Identity
			if o := v.objects[r.ID]; o.Whole {
				was := o.Identity // what the golden's row would say
				id.GoldenProperties, id.Since = was.GoldenProperties, was.Since
			}
			addGeneration(&g, id)
		}

		if known {
			g.GoldenProperties, g.CreatedAt = was.GoldenProperties, was.CreatedAt
		}

		if done = "set"; g == was {
			done = nothingToDo
		}

		return tx.PutGolden(g)
	})

	return done, err
}

// fixMountRecord removes a stale mount record.
func (c *fsck) fixMountRecord(ctx context.Context, id driver.ObjectID, name string) (string, error) {
	var a catalog.MountRecord
	var has, known bool
	if err := c.Catalog.View(ctx, func(tx *catalog.Tx) (err error) {
		if _, known, err = tx.Object(id); err == nil {
			a, has, err = tx.MountRecord(id)
		}
		return err
	}); err != nil || !has {
		return nothingToDo, err
	}

	forget := func() error {
		if err := c.Content.RemoveTarget(ctx, name, a); err != nil {
			return err
		}
		return c.Catalog.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error { return tx.ForgetMount(id) })
	}

	if !known {
		name = string(id) // has no default mount point
		return "forgotten", forget()
	}

	done := "forgotten"

	// Use the mark of an umount: if this process dies, the next command continues as after one.
	err := c.withMark(ctx, "umount", id, nil, func() error {
		row := catalog.Row{Identity: driver.Identity{ID: id, Name: name}}
		if c.Content.MountState(row, a) != content.NotMounted {
			done = nothingToDo
			return nil
		}
		return forget()
	})

	return done, err
}

// fixActiveDevice deactivates a driver's block device, if still no mount record accounts for it.
func (c *fsck) fixActiveDevice(ctx context.Context, a driver.Activator, id driver.ObjectID) (string, error) {
	return "deactivated", c.withMark(ctx, opFsck, id, func(tx *catalog.Tx, _ catalog.Row) error {
		if _, has, err := tx.MountRecord(id); err != nil || has {
			return cmp.Or(err, error(errs.New(errs.InUse, opFsck, string(id), "it has just been attached")))
		}
		return nil
	}, func() error { return a.Deactivate(ctx, id) })
}

// fixLoop detaches a loop device that no mount record accounts for.
func (c *fsck) fixLoop(ctx context.Context, id driver.ObjectID, b loopdev.Bound) (string, error) {
	done := "detached"
	err := c.withMark(ctx, opFsck, id, func(tx *catalog.Tx, _ catalog.Row) error {
		if a, has, err := tx.MountRecord(id); err != nil || has && a.Loop == b.Index {
			return cmp.Or(err, error(errs.New(errs.InUse, opFsck, b.Path, "it has just been attached")))
		}
		return nil
	}, func() error {
		err := b.Clear()
		if errs.Is(err, errs.NotFound) {
			done, err = nothingToDo, nil
		}
		return err
	})

	return done, err
}
