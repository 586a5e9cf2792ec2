package engine

import (
	"cmp"
	"context"
	"errors"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/check"
	"pando/internal/engine/content"
	"pando/internal/engine/pool"
)

const opDeinit = "deinit"

// DeinitReport says what Deinit removed.
type DeinitReport struct {
	Dir       string `json:"dir"`
	Destroyed int    `json:"destroyed"` // volumes, snapshots and generations

	Warnings []errs.Message `json:"warnings,omitempty"` // things outside of the pool that could not be removed
}

// DeinitRequest says which pool to remove.
type DeinitRequest struct {
	Dir      string
	Force    bool // destroy everything in it
	LoseKeys bool // even if nobody can read the data of a remote without the keys in this pool

	// LastKeys returns the names of the remotes of which the pool in dir has the only key. Nil: all remotes count.
	LastKeys func(ctx context.Context, dir string) ([]string, error)
}

// Deinit removes a pool and leaves no file, mount or loop device. It refuses a pool that
// holds anything, unless Force is set, one that is in use, and one that has the only key
// of a remote, unless LoseKeys is set. If it refuses, it has destroyed and unmounted
// nothing. If it is interrupted, call it again. NotFound, InUse, Conflict (the keys).
func Deinit(ctx context.Context, q DeinitRequest, drivers Drivers) (*DeinitReport, error) {
	abs, err := filepath.Abs(q.Dir)
	if err != nil {
		return nil, errs.Wrap(opDeinit, q.Dir, err)
	}

	q.Dir = abs
	report := &DeinitReport{Dir: abs}
	if !pool.DeinitInterrupted(abs) {
		if err = emptyPool(ctx, q, drivers, report); err != nil {
			return nil, err
		}
	}

	unlock, err := pool.Lock(ctx, abs)
	if err != nil {
		return nil, err
	}

	defer unlock()
	return report, pool.Remove(ctx, abs, drivers.unmakePool)
}

// emptyPool destroys everything in a pool. If anything is in use, or does not belong to
// the pool, it fails before it destroys anything.
func emptyPool(ctx context.Context, q DeinitRequest, drivers Drivers, report *DeinitReport) error {
	// Check the keys first: they are no part of the catalogue.
	p, err := pool.Read(q.Dir)
	if err != nil {
		return err
	}
	if err := q.refuseRemotes(ctx, p); err != nil {
		return err
	}

	// Open the pool. If its catalogue is damaged, all that can be done is to destroy what the driver lists.
	e, err := Open(ctx, q.Dir, drivers)
	if err == nil {
		if _, err = e.Maintain(ctx); err != nil {
			e.Close()
		}
	}
	if errs.Is(err, errs.Damaged) && q.Force {
		report.Destroyed, err = forceEmpty(ctx, q.Dir, drivers)
		return err
	}

	if err != nil {
		return err
	}

	defer e.Close()

	ctx, end := e.ledger.Begin(ctx)
	defer end()

	said := &warnings.List{}
	ctx = warnings.Collect(ctx, said)
	defer func() { report.Warnings = said.Messages() }()

	// Check that the pool can be emptied.
	if err := e.needRoot(opDeinit, q.Dir); err != nil {
		return err
	}

	// Objects that the catalogue has lost are still in the pool, perhaps mounted, and are not garbage.
	if err := e.cat.LostError(); err != nil && q.Force {
		report.Destroyed, err = forceEmpty(ctx, q.Dir, drivers)
		return err
	} else if err != nil {
		return err
	}

	rows, err := e.deinitRows(ctx)
	if err != nil {
		return err
	}

	if n := countNamed(rows); n > 0 && !q.Force {
		return errs.New(errs.InUse, opDeinit, q.Dir, "the pool still holds %s",
			countOf(n, "volume, snapshot or generation", "volumes, snapshots and generations")).
			WithHint("list them with %s and %s; %s says how to remove a pool with everything in it", errs.Run("ls"),
				errs.Run("golden ls"), errs.Run(opDeinit, errs.Param("help")))
	}

	if err := e.pool.OnlyOurs(); err != nil {
		return err
	}

	// Unmount all volumes, or none if one is in use.
	if err := e.umountAll(ctx); err != nil {
		return err
	}

	return e.destroyAll(ctx, q.Dir, rows, q.Force, report)
}

// refuseRemotes fails if the pool has the only key of a remote, unless LoseKeys is set, and if it has remotes at all,
// unless Force or LoseKeys is set. Conflict, InUse.
func (q DeinitRequest) refuseRemotes(ctx context.Context, p *pool.Pool) error {
	remotes, err := p.Remotes()
	if err != nil || len(remotes) == 0 || q.LoseKeys {
		return err
	}

	last := remotes
	if q.LastKeys != nil {
		if last, err = q.LastKeys(ctx, q.Dir); err != nil {
			return err
		}
	}

	if len(last) > 0 {
		return errs.New(errs.Conflict, opDeinit, q.Dir,
			"the pool has the only key of %s (%s): without it, nobody can read the data there",
			countOf(int64(len(last)), "remote", "remotes"), strings.Join(last, ", ")).
			WithHint("export a recovery kit of each with %s, and keep it elsewhere",
				errs.Run("remote key export", last[0], "FILE", errs.Param("passphrase")))
	}

	if q.Force {
		return nil
	}
	return errs.New(errs.InUse, opDeinit, q.Dir, "the pool has remotes: %s", strings.Join(remotes, ", ")).
		WithHint("%s says how to remove a pool with everything in it", errs.Run(opDeinit, errs.Param("help")))
}

// deinitRows lists all volumes, generations, and snapshots without a volume. Other snapshots are destroyed with their
// volume.
func (e *Engine) deinitRows(ctx context.Context) ([]doomed, error) {
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
func (e *Engine) destroyAll(
	ctx context.Context, dir string, rows []doomed, force bool, report *DeinitReport,
) error {
	// Destroy volumes before their origins, which looks better to users who watch.
	destroyed := e.destroyRows(ctx, rows, destroyOptions{force: true})
	report.Destroyed = len(destroyed.Destroyed)
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
	n, err := destroyListed(ctx, e.drv, force)
	report.Destroyed += n
	if err != nil {
		return err
	}

	return checkOnlyOurs(ctx, e.drv, dir)
}

// umountAll unmounts all volumes, which are about to be destroyed. If one is in use, it
// unmounts none. InUse.
func (e *Engine) umountAll(ctx context.Context) error {
	var all []content.Volume
	if err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		if err := tx.Rows(driver.Volume, func(r catalog.Row) error {
			all = append(all, content.Volume{Row: r})
			return nil
		}); err != nil {
			return err
		}

		for i := range all {
			var err error
			if all[i].Record, all[i].HasRecord, err = tx.MountRecord(all[i].Row.ID); err != nil {
				return err
			}
		}

		return nil
	}); err != nil {
		return err
	}

	all = slices.DeleteFunc(all, func(v content.Volume) bool { return !v.HasRecord })
	for _, err := range e.content.InUse(ctx, reasonFor(opDeinit), all) {
		if err != nil {
			return err
		}
	}

	for _, v := range all {
		if err := e.content.Busy(ctx, reasonFor(opDeinit), v.Row, v.Record); err != nil {
			return err
		}
	}

	// Some uses only show when a volume is unmounted: then mount the others again.
	for i, v := range all {
		if err := e.umountOne(ctx, v.Row); err != nil {
			return errors.Join(err, e.mountAgain(context.WithoutCancel(ctx), all[:i]))
		}
	}

	return nil
}

// mountAgain mounts volumes where they were mounted. It returns the errors of those that cannot be, joined.
func (e *Engine) mountAgain(ctx context.Context, volumes []content.Volume) (err error) {
	for _, v := range volumes {
		at := v.Record.Mountpoint
		if v.Record.MountID == 0 || at == e.pool.DefaultMountpoint(v.Row.Name) {
			at = "" // the device, or the place below the pool
		}
		_, merr := e.Mount(ctx, MountRequest{Volume: ref.MustName(v.Row.Name), Dir: at, May: content.RightsOf(v.Record)})
		err = errors.Join(err, merr)
	}
	return err
}

// umountOne unmounts a volume that is about to be destroyed, ignoring unwritten data.
func (e *Engine) umountOne(ctx context.Context, row catalog.Row) error {
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
		WithHint("move them to another dataset, then run %s again", errs.Run("deinit"))
}

// forceEmpty empties a pool whose catalogue cannot be read or trusted, and returns the
// number of objects destroyed.
func forceEmpty(ctx context.Context, dir string, drivers Drivers) (int, error) {
	p, err := pool.Open(ctx, dir)
	if err != nil {
		return 0, err
	}

	d, err := openDriver(ctx, p, drivers)
	if err != nil {
		return 0, err
	}

	if c, ok := d.(io.Closer); ok {
		defer c.Close()
	}

	if err := check.DetachAll(ctx, p, d); err != nil {
		return 0, err
	}

	return destroyListed(ctx, d, true)
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
