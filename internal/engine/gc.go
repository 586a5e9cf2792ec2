package engine

import (
	"context"
	"time"

	"pando/internal/catalog"
	"pando/internal/driver"
	"pando/internal/errs"
	"pando/internal/kernel"
	"pando/internal/pool"

	"os"

	"golang.org/x/sys/unix"
)

// Sweep is what a comparison of the whole pool with the catalogue found.
type Sweep struct {
	Objects  int      `json:"objects"`           // looked at
	Garbage  int      `json:"garbage"`           // removed: half made, half destroyed, ephemeral of another boot
	Loops    int      `json:"loop_devices"`      // detached
	Detached int      `json:"stale_attachments"` // forgotten: not attached any more
	Kept     []string `json:"kept,omitempty"`    // what is there and not understood
	Missing  []string `json:"missing,omitempty"` // what the catalogue has and the pool has not
}

func (e *Engine) syncer() (driver.Syncer, bool) {
	s, ok := e.drv.(driver.Syncer)
	return s, ok
}

// sweepAfterBoot sweeps once a boot, in one process.
func (e *Engine) sweepAfterBoot(ctx context.Context) (*Sweep, error) {
	unlock, err := pool.Lock(ctx, e.pool.Dir)
	if err != nil {
		return nil, err
	}
	defer unlock()
	var last string
	if err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		last, err = tx.Meta("boot")
		return err
	}); err != nil {
		return nil, err
	}
	if last == kernel.BootID() {
		return nil, nil // another process was first
	}
	s, err := e.sweep(ctx, last)
	if err != nil {
		return nil, err
	}
	return s, e.cat.Update(ctx, catalog.Durable, func(tx *catalog.Tx) error { return tx.SetMeta("boot", kernel.BootID()) })
}

// sweep compares all that the driver has with all that the catalogue has, and
// removes what is provably garbage. lostBoot is the boot whose end may have
// taken soft marks away ("": none): what was made in it and is in no row was in
// the making. Anything else that is whole but unknown means that the catalogue
// is older than the pool (restored from a copy, say): it is kept and reported.
func (e *Engine) sweep(ctx context.Context, lostBoot string) (*Sweep, error) {
	s := &Sweep{}
	// First the pool, then the catalogue: whatever is made meanwhile has its
	// mark or row by then.
	var objects []driver.Object
	for o, err := range e.drv.List(ctx) {
		if err != nil {
			return nil, err
		}
		objects = append(objects, o)
	}
	s.Objects = len(objects)
	rows := map[driver.ObjectID]catalog.Row{}
	marked := map[driver.ObjectID]bool{}
	var marks []catalog.Mark
	var buried map[driver.ObjectID]bool
	var attached map[driver.ObjectID]catalog.Attached
	err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		if marks, err = tx.Marks(); err != nil {
			return err
		}
		if buried, err = tx.Buried(); err != nil {
			return err
		}
		if attached, err = tx.AllAttached(); err != nil {
			return err
		}
		return tx.Rows("", func(r catalog.Row) error { rows[r.ID] = r; return nil })
	})
	if err != nil {
		return nil, err
	}
	for _, m := range marks {
		marked[m.ID] = true
	}

	whole := map[driver.ObjectID]bool{}
	for _, o := range objects {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		_, known := rows[o.ID]
		if known || marked[o.ID] {
			whole[o.ID] = o.Whole
			if known && o.Err != nil {
				s.Kept = append(s.Kept, "the identity of "+e.nameOf(ctx, o.ID)+" cannot be read: "+o.Err.Error())
			}
			continue
		}
		if o.Err != nil {
			s.Kept = append(s.Kept, "object "+string(o.ID)+": "+o.Err.Error())
			continue
		}
		i := o.Identity
		garbage := !o.Whole || buried[o.ID] || i.Kind == driver.Scratch ||
			lostBoot != "" && i.BootID == lostBoot || i.Ephemeral && i.BootID != kernel.BootID()
		if !garbage {
			if _, err := e.drv.Attachment(ctx, o.ID); errs.Is(err, errs.NotFound) {
				continue // destroyed and forgotten since it was listed
			}
			s.Kept = append(s.Kept, string(i.Kind)+" "+describe(i)+" is in the pool but not in the catalogue: `pando init --rebuild` would bring it back")
			continue
		}
		if err := e.drv.Destroy(ctx, o.ID); err != nil {
			s.Kept = append(s.Kept, "garbage "+string(o.ID)+": "+err.Error())
			continue
		}
		s.Garbage++
	}
	for id, r := range rows {
		if r.Ephemeral && r.BootID != kernel.BootID() && !marked[id] {
			a, has := attached[id]
			if err := e.destroyRow(ctx, r, a, has); err != nil {
				s.Kept = append(s.Kept, r.Name+": "+err.Error())
			} else {
				s.Garbage++
			}
			delete(attached, id)
			continue
		}
		if !whole[id] {
			// Made after the list was read, maybe: look again.
			if _, err := e.drv.Attachment(ctx, id); errs.Is(err, errs.NotFound) {
				s.Missing = append(s.Missing, e.nameOf(ctx, id))
			}
		}
	}
	if err := e.sweepAttachments(ctx, s, rows, marked, attached); err != nil {
		return nil, err
	}
	if err := e.cat.RemoveStaleOwners(marks); err != nil {
		return nil, err
	}
	return s, e.forgetReclaimed(ctx)
}

// sweepAttachments forgets attachments that are gone, and detaches loop devices
// on images that no attachment and no working process accounts for.
func (e *Engine) sweepAttachments(ctx context.Context, s *Sweep, rows map[driver.ObjectID]catalog.Row, marked map[driver.ObjectID]bool, attached map[driver.ObjectID]catalog.Attached) error {
	used := map[string]bool{}
	for id, a := range attached {
		row := rows[id]
		if marked[id] || row.ID != "" && e.look(row, a) != gone {
			used[a.Mountpoint] = true
			used[e.defaultMountpoint(row.Name)] = true
			continue
		}
		if err := e.removeTarget(row.Name, a); err != nil {
			return err
		}
		if err := e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error { return tx.Detach(id) }); err != nil {
			return err
		}
		delete(attached, id)
		s.Detached++
	}
	if err := e.sweepLoops(ctx, s, rows, marked, attached); err != nil {
		return err
	}
	// Marks may have come since; a mount point that is being made is only
	// removed if it is empty and unused, and mounting makes it again.
	if len(marked) == 0 {
		return e.removeStaleTargets(used)
	}
	return nil
}

func describe(i driver.Identity) string {
	switch i.Kind {
	case driver.Generation:
		return i.Golden
	case driver.Volume, driver.Snapshot:
		return i.Name
	}
	return string(i.ID)
}

// GCReport is what gc did.
type GCReport struct {
	Sweep
	Reclaimed    int      `json:"reclaimed"`        // destroyed earlier, returned now
	Undone       int      `json:"undone"`           // interrupted operations cleaned up
	FreedBytes   int64    `json:"freed_bytes"`      // free space of the pool, after minus before; other writers count
	TrimmedBytes int64    `json:"trimmed_bytes"`    // of a loop-backed pool: free ranges reported to the file below
	HostFreed    int64    `json:"host_freed_bytes"` // of a loop-backed pool: disk space that the file gave back
	Duration     float64  `json:"duration_seconds"` //
	Warnings     []string `json:"warnings,omitempty"`
}

// GC cleans up everything that can be: what Open does, a full comparison of the
// pool with the catalogue, and, on a loop-backed pool, returning free space to
// the filesystem below.
func (e *Engine) GC(ctx context.Context) (*GCReport, error) {
	start := time.Now()
	e.pool.SpendReserve()
	defer func() { _ = e.pool.MakeReserve() }()
	before, err := e.pool.Space()
	if err != nil {
		return nil, err
	}
	unlock, err := pool.Lock(ctx, e.pool.Dir)
	if err != nil {
		return nil, err
	}
	defer unlock()
	var graves []catalog.Tombstone
	if err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		graves, err = tx.Unreclaimed(0)
		return err
	}); err != nil {
		return nil, err
	}
	e.reclaimUntil = time.Time{}
	e.reclaim(ctx, graves)
	s, err := e.sweep(ctx, "")
	if err != nil {
		return nil, err
	}
	r := &GCReport{Sweep: *s}
	if e.Recovery.Swept != nil { // this very command was the first of the boot
		r.Garbage += e.Recovery.Swept.Garbage
		r.Detached += e.Recovery.Swept.Detached
	}
	r.Reclaimed, r.Undone, r.Warnings = e.Recovery.Reclaimed, e.Recovery.Undone, e.Recovery.Warnings
	if e.pool.Config.Backing != nil {
		if err := e.trimBacking(r); err != nil {
			return nil, err
		}
	}
	after, err := e.pool.Space()
	if err != nil {
		return nil, err
	}
	r.FreedBytes = max(0, before.UsedBytes-after.UsedBytes)
	r.Duration = time.Since(start).Seconds()
	return r, nil
}

// trimBacking returns the pool's free space to the sparse file it lies in.
func (e *Engine) trimBacking(r *GCReport) error {
	dir, err := os.Open(e.pool.DataDir())
	if err != nil {
		return errs.Wrap("gc", e.pool.Dir, err)
	}
	defer dir.Close()
	blocks := func() int64 {
		var st unix.Stat_t
		if unix.Stat(e.pool.BackingFile(), &st) != nil {
			return 0
		}
		return st.Blocks * 512
	}
	before := blocks()
	r.TrimmedBytes, err = kernel.Trim(dir, 64<<10)
	if err != nil {
		r.Warnings = append(r.Warnings, "free space could not be returned to the host: "+err.Error())
		return nil
	}
	r.HostFreed = max(0, before-blocks())
	return nil
}
