package engine

import (
	"context"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
)

// succession replaces the content of a volume, which is not in use, in one
// commit. The successor is another object, made beside it; with the commit it
// takes over the name, and the old object becomes a snapshot of the volume.
//
// In the pool, the successor's identity says which object it replaces and the new name of
// that object, so a crash between the commit and the renaming of the old object loses
// nothing: the next command finishes it, and so does a rebuild.
type succession struct {
	e    *Engine
	op   string
	vol  catalog.Row
	next driver.Identity         // of the successor; the caller makes the object, with the identity draft
	row  catalog.Row             // of the successor, after commit
	also func(*catalog.Tx) error // further changes in the same commit; may be nil

	settled bool // after commit: nothing is left to the next command
}

// claim reserves the volume and the origin of its successor; look finds both. It fills in
// next, whose ID the caller has set.
func (s *succession) claim(ctx context.Context, look func(*catalog.Tx) (vol, origin catalog.Row, err error)) error {
	fresh := s.next
	return s.e.ledger.Claim(ctx, s.op, true, func(tx *catalog.Tx) ([]catalog.Mark, error) {
		vol, origin, err := look(tx)
		if err != nil {
			return nil, err
		}

		n := fresh
		n.Name, n.Volume, n.Replaces = vol.Name, vol.Lineage(), vol.ID
		n.Before = "before-" + s.op + "-" + timestampName(time.Now())
		n = n.WithContentOf(origin.Identity)
		n.SizeBytes = max(vol.SizeBytes, origin.SizeBytes)
		n.Origin, n.OriginID = tx.RefOf(origin), origin.ID
		n.Golden, n.Generation = origin.Golden, origin.Generation
		n.CreatedAt, n.ExpiresAt, n.Pinned, n.Ephemeral = vol.CreatedAt, vol.ExpiresAt, vol.Pinned, vol.Ephemeral
		n.Labels, n.Owner = vol.Labels, vol.Owner
		if n.Order, err = tx.NextPlace(time.Now()); err != nil {
			return nil, err
		}

		s.vol, s.next = vol, n
		return []catalog.Mark{
			{ID: vol.ID, Op: s.op},
			{ID: n.ID, Op: s.op, Reads: origin.ID},
		}, nil
	})
}

// draft returns the successor's identity while it is being made: until it is complete,
// every process may treat it as garbage.
func (s *succession) draft() driver.Identity {
	id := s.next
	id.Kind = driver.Scratch
	return id
}

// commit replaces the volume with the successor, which the driver has made. Durable on
// return, unless it is ephemeral. On error nothing has changed, and the caller
// gives up.
func (s *succession) commit(ctx context.Context) error {
	e, now := s.e, time.Now()
	s.row = catalog.Row{Identity: s.next, UsedAt: now}
	if e.cheapUsage(s.next.FS) {
		u, err := e.drv.Usage(ctx, s.next.ID)
		if err != nil {
			return err
		}
		s.row.Usage, s.row.MeasuredAt = u, now
	}

	if err := e.writeIdentity(ctx, s.next); err != nil {
		return err
	}

	old := catalog.Row{Identity: s.vol.Identity.Predecessor(s.next)}
	if err := e.cat.Update(ctx, catalog.Durability(!s.next.Ephemeral), func(tx *catalog.Tx) error {
		if err := tx.ReplaceVolume(s.vol.ID, old, s.row); err != nil {
			return err
		}
		if s.also != nil {
			if err := s.also(tx); err != nil {
				return err
			}
		}
		return tx.Unmark(s.next.ID)
	}); err != nil {
		return err
	}

	// Only the old object's identity remains to be written. If this process dies
	// first, its mark stays, and the next command writes it.
	ctx = context.WithoutCancel(ctx)
	if err := e.writeIdentity(ctx, old.Identity); err != nil {
		warnings.Add(ctx, "%s has been replaced, but the identity of its previous state could not be written yet: %v",
			s.vol.Name,
			err)
		return nil
	}

	if err := e.ledger.Unmark(ctx, s.vol.ID); err != nil {
		warnings.Add(ctx, "%s: %v", s.vol.Name, err)
		return nil
	}

	s.settled = true
	return nil
}

// giveUp removes what was made of the successor, and the marks, after a failure between claim and commit. What it
// cannot remove is left to the next command.
func (s *succession) giveUp(ctx context.Context) {
	s.e.ledger.DestroyUnfinished(ctx, s.next.ID)
	_ = s.e.ledger.Unmark(ctx, s.vol.ID)
}

// dropPredecessor destroys the previous object of a volume after commit, if nobody needs
// it. If that fails, the object stays as the snapshot that it has become.
func (s *succession) dropPredecessor(ctx context.Context) {
	e := s.e
	if !s.settled {
		return // its mark must stay; commit has warned about it
	}

	before := s.vol.Name + "@" + s.next.Before
	var old catalog.Row
	var ok bool
	err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		old, ok, err = tx.Object(s.vol.ID)
		return err
	})
	if err == nil && ok {
		o := destroyOptions{force: true, why: "nobody needs the former state of its volume"}
		err = e.destroyRows(ctx, []doomed{{row: old, ref: before}}, o).firstFailure()
	}
	if err != nil {
		warnings.Add(ctx, "%s has been replaced, but its previous state could not be destroyed, and remains as snapshot "+
			"%s: %v",
			s.vol.Name, before, err)
	}
}

// writeIdentity replaces the identity of an object in the pool.
func (e *Engine) writeIdentity(ctx context.Context, id driver.Identity) error {
	rw, ok := e.drv.(driver.Rewriter)
	if !ok {
		return errs.New(errs.Unsupported, "write identity", id.Ref(), "the %s driver cannot change the identity of an object",
			e.caps.Name)
	}
	return rw.SetIdentity(ctx, id)
}
