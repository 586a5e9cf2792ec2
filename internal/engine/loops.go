package engine

import (
	"context"

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
		if busy, err := e.attachedOrMarked(ctx, id); err != nil {
			return err
		} else if busy {
			continue // since the catalogue was read
		}
		switch err := a.Deactivate(ctx, id); {
		case errs.Is(err, errs.InUse):
			s.Kept = append(s.Kept, errs.Messagef("the block device of %s is held by something that Pando did not make or lost track of", e.nameOf(ctx, id)))
		case err != nil:
			return err
		default:
			s.Loops++
		}
	}
	return nil
}

// sweepLoops is sweepDevices where images are files.
func (e *Engine) sweepLoops(ctx context.Context, s *Sweep, rows map[driver.ObjectID]catalog.Row, marked map[driver.ObjectID]bool, attached map[driver.ObjectID]catalog.Attached) error {
	type inode struct{ dev, ino uint64 }
	loops, err := loopdev.List()
	if err != nil {
		if errs.Is(err, errs.Permission) {
			return nil // not root: then this pool has no loop devices
		}
		return err
	}
	if len(loops) == 0 {
		return nil
	}
	images := map[inode]driver.ObjectID{}
	for id := range rows {
		w, err := e.drv.Attachment(ctx, id)
		if err != nil || w.Image == "" {
			continue
		}
		var st unix.Stat_t
		if unix.Stat(w.Image, &st) == nil {
			images[inode{st.Dev, st.Ino}] = id
		}
	}
	for _, b := range loops {
		id, ours := images[inode{b.Dev, b.Ino}]
		if !ours || marked[id] {
			continue
		}
		if a, ok := attached[id]; ok && a.Loop == b.Index {
			continue
		}
		if b.Auto {
			s.Kept = append(s.Kept, errs.Messagef("%s on volume %s is held by a mount that Pando did not make or lost track of", b.Path, rows[id].Name))
			continue
		}
		if busy, err := e.attachedOrMarked(ctx, id); err != nil {
			return err
		} else if busy {
			continue // attached since the catalogue was read
		}
		if err := b.Clear(); err != nil && !errs.Is(err, errs.NotFound) {
			return err
		}
		s.Loops++
	}
	return nil
}

func (e *Engine) attachedOrMarked(ctx context.Context, id driver.ObjectID) (yes bool, err error) {
	err = e.cat.View(ctx, func(tx *catalog.Tx) error {
		_, attached, err := tx.Attached(id)
		if err != nil {
			return err
		}
		marks, err := tx.Blocking(id, "", false)
		yes = attached || len(marks) > 0
		return err
	})
	return yes, err
}
