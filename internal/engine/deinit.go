package engine

import (
	"cmp"
	"context"
	"errors"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/check"
	"pando/internal/engine/content"
	"pando/internal/engine/pool"
)

// DeinitReport says what Deinit removed.
type DeinitReport struct {
	Dir       string `json:"dir"`             // directory of the pool
	Destroyed int    `json:"destroyed_count"` // number of volumes, snapshots and generations that were destroyed

	Warnings []errs.Message `json:"warnings,omitempty"` // things outside of the pool that could not be removed
}

// DeinitRequest says which pool to remove.
type DeinitRequest struct {
	Dir   string
	Force bool // remove a pool even if it holds volumes, goldens and remotes
}

// MayForget returns an error if a pool's remotes must not be forgotten: the pool may hold the only key to what is
// stored there.
type MayForget func(ctx context.Context, remotes []string) error

// Deinit removes a pool and leaves no file, mount or loop device. It refuses a pool that
// holds anything, unless Force is set, and one that is in use. If it refuses, it has changed
// nothing. If it is interrupted, call it again. With Force, it asks mayForget before anything is changed; nil: remotes
// may be forgotten. NotFound, InUse, and the errors of mayForget.
func Deinit(
	ctx context.Context, q DeinitRequest, drivers Drivers, mayForget MayForget,
) (*DeinitReport, error) {
	abs, err := filepath.Abs(q.Dir)
	if err != nil {
		return nil, errs.Wrap(opDeinit, q.Dir, err)
	}
	q.Dir = abs

	d := &deinit{DeinitRequest: q, drivers: drivers, mayForget: mayForget, report: &DeinitReport{Dir: abs}}
	defer d.release()

	if pool.DeinitInterrupted(abs) {
		err = d.lock(ctx)
	} else {
		err = d.emptyPool(ctx)
	}
	if err != nil {
		return nil, err
	}

	return d.report, pool.Remove(ctx, abs, drivers.unmakePool)
}

const opDeinit = "deinit"

// deinit is a Deinit under way.
type deinit struct {
	DeinitRequest
	drivers   Drivers
	mayForget MayForget
	report    *DeinitReport
	e         *Engine // engine of the pool; nil until it is open

	// unlock unlocks the pool, which one deinit at a time locks from before it looks who uses the pool: a second look at
	// the same time would unmount volumes. nil: it is not locked.
	unlock func()
}

// lock locks the pool once it is open, as opening it may need the lock, too.
func (d *deinit) lock(ctx context.Context) (err error) {
	d.unlock, err = pool.Lock(ctx, d.Dir)
	return err
}

// lockPool is lock for a pool that another deinit may have removed in the meantime. NotFound if it has.
func (d *deinit) lockPool(ctx context.Context) error {
	if err := d.lock(ctx); err != nil {
		return err
	}
	_, err := pool.Read(d.Dir)
	return err
}

// release unlocks the pool if it is locked.
func (d *deinit) release() {
	if d.unlock != nil {
		d.unlock()
	}
}

// emptyPool destroys everything in a pool. If anything is in use, or does not belong to
// the pool, it fails before it destroys anything.
func (d *deinit) emptyPool(ctx context.Context) (err error) {
	dir, force := d.Dir, d.Force

	// Open the pool. If its catalogue is damaged, all that can be done is to destroy what the driver lists.
	e, err := Open(ctx, dir, d.drivers)
	if err == nil {
		if _, err = e.Maintain(ctx, time.Now()); err != nil {
			e.Close()
		}
	}
	if errs.Is(err, errs.Damaged) && force {
		d.report.Destroyed, err = d.forceEmpty(ctx)
		return err
	}

	if err != nil {
		return err
	}
	defer e.Close()
	d.e = e

	ctx, end := e.ledger.Begin(ctx, opDeinit)
	defer end(&err)

	said := &warnings.List{}
	ctx = warnings.Collect(ctx, said)
	defer func() { d.report.Warnings = said.Messages() }()

	// Check that the pool can be emptied.
	if err := e.needRoot("deinit", dir); err != nil {
		return err
	}

	// Objects that the catalogue has lost are still in the pool, perhaps mounted, and are not garbage.
	if err := e.cat.LostError(); err != nil && force {
		d.report.Destroyed, err = d.forceEmpty(ctx)
		return err
	} else if err != nil {
		return err
	}

	if err := d.lockPool(ctx); err != nil {
		return err
	}

	rows, err := d.deinitRows(ctx)
	if err != nil {
		return err
	}

	if n := countNamed(rows); n > 0 && !force {
		return errs.New(errs.InUse, "deinit", dir, "the pool still holds %s",
			countOf(n, "volume, snapshot or generation", "volumes, snapshots and generations")).
			WithHint("list them with %s and %s", errs.Run("ls", errs.Param("tree")), errs.Run("golden ls"))
	}

	if err := e.pool.OnlyOurs(); err != nil {
		return err
	}

	volumes, err := d.unmountable(ctx)
	if err != nil {
		return err
	}

	if err := d.checkRemotes(ctx, e.pool); err != nil {
		return err
	}

	// Nothing is in the way.
	for _, v := range volumes {
		if err := d.umountOne(ctx, v.Row); err != nil {
			return err
		}
	}

	return d.destroyAll(ctx, rows)
}

// checkRemotes fails if the pool has remotes that must not be forgotten. InUse.
func (d *deinit) checkRemotes(ctx context.Context, p *pool.Pool) error {
	remotes, err := p.Remotes()
	switch {
	case err != nil || len(remotes) == 0:
		return err
	case !d.Force:
		return errs.New(errs.InUse, opDeinit, d.Dir, "the pool holds the keys of remotes: %s",
			strings.Join(remotes, ", ")).
			WithHint("remove them with %s", errs.Run("remote rm", "NAME"))
	case d.mayForget == nil:
		return nil
	}
	return d.mayForget(ctx, remotes)
}

// deinitRows lists all volumes, generations, and snapshots without a volume. Other snapshots are destroyed with their
// volume.
func (d *deinit) deinitRows(ctx context.Context) ([]doomed, error) {
	e := d.e
	var all []catalog.Row
	lineages := map[driver.ObjectID]bool{}
	if err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		return tx.Rows("", func(r catalog.Row) error {
			if r.Kind == driver.Volume {
				lineages[r.Lineage()] = true
			}
			all = append(all, r)
			return nil
		})
	}); err != nil {
		return nil, err
	}

	var rows []doomed
	for _, r := range all {
		if r.Kind != driver.Snapshot || !lineages[r.Volume] {
			rows = append(rows, doomed{row: r, ref: cmp.Or(r.Name, r.Golden)})
		}
	}

	return rows, nil
}

// countNamed counts the rows of what users made: no layers, which are there only for overlays.
func countNamed(rows []doomed) (n int64) {
	for _, r := range rows {
		if r.row.Kind != driver.Layer {
			n++
		}
	}
	return n
}

// destroyAll destroys rows, which are all that the catalogue has, then what a sweep finds, and then, if forced, the
// objects that only the driver knows. It counts them in report.
func (d *deinit) destroyAll(ctx context.Context, rows []doomed) error {
	e := d.e
	// Destroy volumes before their origins, which looks better to users who watch.
	destroyed := e.destroyRows(ctx, rows, destroyOptions{force: true})
	d.report.Destroyed = len(destroyed.Destroyed)
	if len(destroyed.Failed) > 0 {
		return destroyed.Failed[0]
	}

	if err := ctx.Err(); err != nil {
		return err
	}

	if _, err := e.sweep(ctx); err != nil {
		return err
	}

	// Destroy objects that the catalogue does not know, if forced.
	n, err := destroyListed(ctx, e.drv, d.Force)
	d.report.Destroyed += n
	if err != nil {
		return err
	}

	return checkOnlyOurs(ctx, e.drv, d.Dir)
}

// unmountable lists the volumes that have a mount record, all of which are about to be unmounted. It returns InUse
// if one of them cannot be.
func (d *deinit) unmountable(ctx context.Context) (out []content.Volume, err error) {
	e := d.e
	if err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		return tx.Rows(driver.Volume, func(r catalog.Row) error {
			v := content.Volume{Row: r}
			if v.Record, v.HasRecord, err = tx.MountRecord(r.ID); err != nil {
				return err
			}
			out = append(out, v)
			return nil
		})
	}); err != nil {
		return nil, err
	}

	if err := e.content.Busy(ctx, reasonFor(opDeinit), out); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(out, func(v content.Volume) bool { return !v.HasRecord }), nil
}

// umountOne unmounts a volume that is about to be destroyed, ignoring unwritten data.
func (d *deinit) umountOne(ctx context.Context, row catalog.Row) error {
	e := d.e
	var att catalog.MountRecord
	var has bool
	if err := e.ledger.Claim(ctx, opDeinit, false, func(tx *catalog.Tx) (_ []catalog.Mark, err error) {
		if att, has, err = tx.MountRecord(row.ID); err != nil || !has {
			return nil, err
		}
		return []catalog.Mark{{ID: row.ID, Op: "umount"}}, nil
	}); err != nil || !has {
		return err
	}

	if err := e.content.Unmount(ctx, reasonFor(opDeinit), row, att, false); err != nil {
		e.ledger.UnmarkFailed(ctx, row.ID, err)
		return errs.Wrap(opDeinit, row.Name, err)
	}

	return e.cat.Update(context.WithoutCancel(ctx), catalog.Soft, func(tx *catalog.Tx) error {
		return errors.Join(tx.ForgetMount(row.ID), tx.Unmark(row.ID))
	})
}

// checkOnlyOurs fails if the driver's dataset contains objects that are not Pando's. The
// pool then remains a pool until the user has removed them.
func checkOnlyOurs(ctx context.Context, d driver.Driver, dir string) error {
	u, ok := d.(driver.Unmaker)
	if !ok {
		return nil
	}
	foreign, err := u.Foreign(ctx)
	if err != nil || len(foreign) == 0 {
		return err
	}
	names := strings.Join(foreign[:min(len(foreign), tiesNamed)], ", ")
	return errs.New(errs.InUse, "deinit", dir, "the dataset contains objects that are not Pando's: %s", names).
		WithHint("move them away, then run %s again", errs.Run("deinit"))
}

// forceEmpty empties a pool whose catalogue cannot be read or trusted, and returns the
// number of objects destroyed.
func (d *deinit) forceEmpty(ctx context.Context) (int, error) {
	p, err := pool.Open(ctx, d.Dir)
	if err != nil {
		return 0, err
	}

	if err := d.lockPool(ctx); err != nil {
		return 0, err
	}

	if err := p.OnlyOurs(); err != nil {
		return 0, err
	}

	if err := d.checkRemotes(ctx, p); err != nil {
		return 0, err
	}

	drv, err := openDriver(ctx, p, d.drivers)
	if err != nil {
		return 0, err
	}

	if c, ok := drv.(io.Closer); ok {
		defer c.Close()
	}

	if err := check.DetachAll(ctx, p, drv); err != nil {
		return 0, err
	}

	return destroyListed(ctx, drv, true)
}

// destroyListed destroys all objects that a driver lists. InUse if there are any and
// force is not set, or if an image is attached.
func destroyListed(ctx context.Context, d driver.Driver, force bool) (int, error) {
	n := 0
	for o, err := range d.List(ctx) {
		if err != nil {
			return n, err
		}
		if !force {
			return n, errs.New(errs.InUse, "deinit", string(o.ID), "the pool holds objects that are missing from the catalogue").
				WithHint("recover them with %s", errs.Run("init", errs.Param("rebuild")))
		}
		if err := d.Destroy(ctx, o.ID); err != nil {
			return n, err
		}
		n++
	}

	return n, nil
}
