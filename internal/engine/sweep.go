package engine

import (
	"cmp"
	"context"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
	"pando/internal/engine/ledger"
	"pando/internal/engine/pool"
	"pando/internal/linux/kernel"
)

// Sweep is the result of comparing the whole pool with the catalogue.
type Sweep struct {
	Objects int `json:"object_count"` // number of objects that were checked
	// number of objects that were removed: incomplete ones, or ephemeral ones of another boot
	Garbage int `json:"garbage_count"`
	Loops   int `json:"loop_device_count"` // number of loop devices that were detached
	// number of mount records that were removed, as nothing was mounted any more
	StaleMounts int            `json:"stale_mount_count"`
	Kept        []errs.Message `json:"kept,omitempty"` // objects that stay because they are not understood
	// references to objects that the catalogue has, but not the pool
	Missing []string `json:"missing,omitempty"`
}

func (e *Engine) syncer() (driver.Syncer, bool) {
	s, ok := e.drv.(driver.Syncer)
	return s, ok
}

// sweepAfterBoot sweeps once per boot, in one process; nil if another process was first.
func (e *Engine) sweepAfterBoot(ctx context.Context) (*Sweep, error) {
	unlock, err := pool.Lock(ctx, e.pool.Dir)
	if err != nil {
		return nil, err
	}

	defer unlock()
	var last catalog.Swept
	if err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		last, err = tx.Swept()
		return err
	}); err != nil {
		return nil, err
	}

	if !last.BeforeBoot() {
		return nil, nil // another process was first
	}

	s, err := e.sweep(ctx)
	if err != nil {
		return nil, err
	}

	return s, e.cat.Update(ctx, catalog.Durable, func(tx *catalog.Tx) error { return tx.SetSwept() })
}

// sweep compares all objects of the driver with the catalogue, and removes those that
// are provably garbage (see ledger.IsGarbage). It keeps and reports other objects that
// the catalogue does not know.
func (e *Engine) sweep(ctx context.Context) (*Sweep, error) {
	s := &Sweep{}

	// List the pool first and read the catalogue second: by then, objects created
	// in the meantime have a mark or a row.
	var objects []driver.Object
	for o, err := range e.drv.List(ctx) {
		if err != nil {
			return nil, err
		}
		objects = append(objects, o)
	}

	s.Objects = len(objects)
	c, err := readSweepView(ctx, e.cat)
	if err != nil {
		return nil, err
	}
	w := &sweeping{e, s, c}

	// Remove objects that are garbage.
	whole := make(map[driver.ObjectID]bool, len(objects))
	for _, o := range objects {
		if err := ctx.Err(); err != nil {
			return nil, err
		}

		_, known := c.rows[o.ID]
		if !known && !c.marked[o.ID] {
			w.sweepUnknown(ctx, o, c.tombstones[o.ID])
			continue
		}

		whole[o.ID] = o.Whole
		if known && o.Whole && !o.Committed {
			ledger.NoteCommitted(e.drv, o.ID) // the note was lost with the power
		}
		if known && o.Err != nil {
			s.Kept = append(s.Kept, errs.Messagef("cannot read the identity of %s: %v", e.cat.RefOf(ctx, o.ID), o.Err))
		}
	}

	w.sweepEphemeral(ctx)

	// Find rows without an object.
	for id := range c.rows {
		if !whole[id] {
			// It may have been created after the pool was listed: check again.
			if _, err := e.drv.Attachment(ctx, id); errs.Is(err, errs.NotFound) {
				s.Missing = append(s.Missing, e.cat.RefOf(ctx, id))
			}
		}
	}

	// Forget what is no longer mounted, what dead processes left, and tombstones without an object.
	if err := w.sweepMountRecords(ctx); err != nil {
		return nil, err
	}

	if err := e.cat.RemoveStaleOwners(c.marks); err != nil {
		return nil, err
	}

	return s, e.ledger.ForgetReclaimed(ctx)
}

// sweepView is what the catalogue says of objects, as far as a sweep needs it.
type sweepView struct {
	rows       map[driver.ObjectID]catalog.Row
	marks      []catalog.Mark
	marked     map[driver.ObjectID]bool // that have a mark
	tombstones map[driver.ObjectID]bool
	mounts     map[driver.ObjectID]catalog.MountRecord
}

// sweeping is a sweep under way.
type sweeping struct {
	e     *Engine
	found *Sweep
	view  *sweepView
}

// readSweepView reads the catalogue for a sweep, in one transaction.
func readSweepView(ctx context.Context, cat *catalog.Catalog) (*sweepView, error) {
	c := &sweepView{rows: map[driver.ObjectID]catalog.Row{}, marked: map[driver.ObjectID]bool{}}
	err := cat.View(ctx, func(tx *catalog.Tx) (err error) {
		if c.marks, err = tx.Marks(); err != nil {
			return err
		}
		if c.tombstones, err = tx.TombstoneIDs(); err != nil {
			return err
		}
		if c.mounts, err = tx.MountRecords(); err != nil {
			return err
		}
		return tx.Rows("", func(r catalog.Row) error { c.rows[r.ID] = r; return nil })
	})
	if err != nil {
		return nil, err
	}

	for _, m := range c.marks {
		c.marked[m.ID] = true
	}

	return c, nil
}

// sweepUnknown removes an object without a row or a mark if it is provably garbage, and otherwise reports it.
func (w *sweeping) sweepUnknown(ctx context.Context, o driver.Object, tombstone bool) {
	e, s := w.e, w.found
	if o.Err != nil {
		s.Kept = append(s.Kept, errs.Messagef("object %s: %v", string(o.ID), o.Err))
		return
	}

	garbage := e.ledger.IsGarbage(o, tombstone)
	if garbage && !tombstone && w.objectInUse(ctx, o) {
		s.Kept = append(s.Kept, errs.Messagef("%s %s is in use but not in the catalogue", string(o.Identity.Kind),
			ledger.Describe(o.Identity)))
		return
	}

	if !garbage {
		if _, err := e.drv.Attachment(ctx, o.ID); errs.Is(err, errs.NotFound) {
			return // destroyed since it was listed
		}
		s.Kept = append(s.Kept, e.ledger.StrayText(o))
		return
	}

	if err := e.removeObject(ctx, o.ID, cmp.Or(ledger.Describe(o.Identity), string(o.ID)),
		"left by an interrupted operation or an earlier boot"); err != nil {
		s.Kept = append(s.Kept, errs.Messagef("cannot remove garbage %s: %v", string(o.ID), err))
		return
	}

	s.Garbage++
}

// sweepEphemeral destroys the ephemeral objects of earlier boots, except those in use,
// and removes them from the rows and mounts of c.
func (w *sweeping) sweepEphemeral(ctx context.Context) {
	e, s, c := w.e, w.found, w.view
	var going []content.Volume
	for id, r := range c.rows {
		if r.Ephemeral && kernel.EarlierBoot(r.BootID, r.CreatedAt) && !c.marked[id] {
			a, has := c.mounts[id]
			going = append(going, content.Volume{Row: r, Record: a, HasRecord: has})
		}
	}

	if len(going) == 0 {
		return
	}

	for i, err := range e.content.InUse(ctx, reasonFor(opExpire), going) {
		v := going[i]
		if err == nil {
			err = e.destroyUnused(ctx, v.Row, v.Record, v.HasRecord, "it was ephemeral, and the host has started again")
		}
		if err != nil {
			s.Kept = append(s.Kept, errs.Messagef("%s: %v", v.Row.Name, err))
			continue
		}
		s.Garbage++
		delete(c.rows, v.Row.ID)
		delete(c.mounts, v.Row.ID)
	}
}

// objectInUse reports whether an object that no row names is in use.
func (w *sweeping) objectInUse(ctx context.Context, o driver.Object) bool {
	id := o.Identity
	id.Kind = driver.Volume // whatever it was meant to become
	return o.Whole && w.e.content.InUse(ctx, reasonFor(opExpire),
		[]content.Volume{{Row: catalog.Row{Identity: id}}})[0] != nil
}

// sweepMountRecords forgets the mount records of what is no longer mounted, and detaches block
// devices that no mount record and no working process accounts for.
func (w *sweeping) sweepMountRecords(ctx context.Context) error {
	e, s, c := w.e, w.found, w.view
	used := map[string]bool{}
	for id, a := range c.mounts {
		row := c.rows[id]
		if c.marked[id] || row.ID != "" && e.content.MountState(row, a) != content.NotMounted {
			used[a.Mountpoint] = true
			used[e.pool.DefaultMountpoint(row.Name)] = true
			continue
		}

		if err := e.content.RemoveTarget(ctx, row.Name, a); err != nil {
			return err
		}

		if err := e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error { return tx.ForgetMount(id) }); err != nil {
			return err
		}

		delete(c.mounts, id)
		s.StaleMounts++
	}

	if err := w.sweepDevices(ctx); err != nil {
		return err
	}

	// There may be new marks by now. That does no harm: a mount point that is being
	// created is only removed if it is empty and unused, and mounting recreates it.
	if len(c.marked) == 0 {
		return e.content.RemoveStaleTargets(used)
	}

	return nil
}
