package engine

import (
	"context"
	"path/filepath"
	"slices"

	"pando/internal/catalog"
	"pando/internal/driver"
	"pando/internal/errs"
	"pando/internal/loopdev"

	"golang.org/x/sys/unix"
)

// sweepDevices takes away block devices of this pool that nothing accounts for: a
// raw volume's whose process died before it could record it, those that a reboot
// has left. A device that is mounted somewhere stays until that mount goes.
func (e *Engine) sweepDevices(ctx context.Context, s *Sweep, rows map[driver.ObjectID]catalog.Row, marked map[driver.ObjectID]bool, attached map[driver.ObjectID]catalog.Attached) error {
	a, ok := e.drv.(driver.Activator)
	if !ok {
		return e.sweepLoops(ctx, s, rows, marked, attached)
	}
	active, err := a.Active(ctx)
	if err != nil {
		return err
	}
	for _, id := range active {
		if _, has := attached[id]; has || marked[id] {
			continue
		}
		if err := e.ifUnaccounted(ctx, id, -1, func() error {
			err := a.Deactivate(ctx, id)
			switch {
			case errs.Is(err, errs.InUse):
				s.Kept = append(s.Kept, errs.Messagef("the block device of %s is held by something that Pando did not make or lost track of", e.cat.RefOf(ctx, id)))
				return nil
			case err == nil:
				s.Loops++
			}
			return err
		}); err != nil {
			return err
		}
	}
	return nil
}

// sweepLoops is sweepDevices where images are files.
func (e *Engine) sweepLoops(ctx context.Context, s *Sweep, rows map[driver.ObjectID]catalog.Row, marked map[driver.ObjectID]bool, attached map[driver.ObjectID]catalog.Attached) error {
	loops, err := loopdev.List()
	if err != nil {
		if errs.Is(err, errs.Permission) {
			return nil // not root: then this pool has no loop devices
		}
		return err
	}
	loops = e.unaccounted(ctx, loops, rows, attached)
	if len(loops) == 0 {
		return nil
	}
	images := e.imagesByFile(ctx, rows)
	for _, b := range loops {
		id, ours := images[fileID{b.Dev, b.Ino}]
		if !ours || marked[id] {
			continue
		}
		if a, ok := attached[id]; ok && a.Loop == b.Index {
			continue
		}
		if err := e.ifUnaccounted(ctx, id, b.Index, func() error { return sweepLoop(s, b, rows[id].Name) }); err != nil {
			return err
		}
	}
	return nil
}

// fileID is a file, whatever its path.
type fileID struct{ dev, ino uint64 }

// unaccounted leaves out loop devices that are recorded, and those on files of other
// filesystems than the pool's: what remains is worth a look at every image.
func (e *Engine) unaccounted(ctx context.Context, loops []loopdev.Bound, rows map[driver.ObjectID]catalog.Row, attached map[driver.ObjectID]catalog.Attached) []loopdev.Bound {
	dev, known := e.imageDevice(ctx, rows)
	recorded := map[int]fileID{}
	for _, a := range attached {
		recorded[a.Loop] = fileID{a.Dev, a.Ino}
	}
	return slices.DeleteFunc(loops, func(b loopdev.Bound) bool {
		return known && b.Dev != dev || recorded[b.Index] == fileID{b.Dev, b.Ino}
	})
}

// imageDevice is the device of the filesystem in which the images lie, if it can be found out.
func (e *Engine) imageDevice(ctx context.Context, rows map[driver.ObjectID]catalog.Row) (dev uint64, known bool) {
	for id := range rows {
		w, err := e.drv.Attachment(ctx, id)
		var st unix.Stat_t
		if err == nil && w.Image != "" && unix.Stat(filepath.Dir(w.Image), &st) == nil {
			return st.Dev, true
		}
	}
	return 0, false
}

// imagesByFile finds the images of all rows.
func (e *Engine) imagesByFile(ctx context.Context, rows map[driver.ObjectID]catalog.Row) map[fileID]driver.ObjectID {
	images := map[fileID]driver.ObjectID{}
	for id := range rows {
		w, err := e.drv.Attachment(ctx, id)
		if err != nil || w.Image == "" {
			continue
		}
		var st unix.Stat_t
		if unix.Stat(w.Image, &st) == nil {
			images[fileID{st.Dev, st.Ino}] = id
		}
	}
	return images
}

// sweepLoop takes away a loop device that nothing accounts for.
func sweepLoop(s *Sweep, b loopdev.Bound, volume string) error {
	now, err := loopdev.Lookup(b.Index)
	switch {
	case errs.Is(err, errs.NotFound), err == nil && (now.Dev != b.Dev || now.Ino != b.Ino):
		return nil // gone since it was listed
	case err != nil:
		return err
	case now.Auto:
		s.Kept = append(s.Kept, errs.Messagef("%s on volume %s is held by a mount that Pando did not make or lost track of", b.Path, volume))
		return nil
	}
	err = b.Clear()
	if err == nil {
		s.Loops++
	}
	if errs.Is(err, errs.NotFound) {
		return nil
	}
	return err
}

// opSweep is the operation of marks on what a sweep takes a device from.
const opSweep = "gc"

// ifUnaccounted calls fn if no attachment with that loop device (any, if it is negative) and nobody at work accounts
// for a block device of an object. Until it returns nobody begins to work on the object, as a device could come and go
// with every look at it.
func (e *Engine) ifUnaccounted(ctx context.Context, id driver.ObjectID, loop int, fn func() error) error {
	attached := false
	err := e.ledger.ClaimNow(ctx, opSweep, true, func(tx *catalog.Tx) ([]catalog.Mark, error) {
		a, has, err := tx.Attached(id)
		if attached = has && (loop < 0 || a.Loop == loop); err != nil || attached {
			return nil, err
		}
		return []catalog.Mark{{ID: id, Op: opSweep}}, nil
	})
	if errs.Is(err, errs.InUse) || err == nil && attached {
		return nil
	}
	if err != nil {
		return err
	}

	err = fn()
	if uerr := e.ledger.Unmark(ctx, id); err == nil {
		err = uerr
	}
	return err
}
