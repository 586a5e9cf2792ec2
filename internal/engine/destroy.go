package engine

import (
	"context"
	"path"
	"time"

	"pando/internal/catalog"
	"pando/internal/driver"
	"pando/internal/errs"
	"pando/internal/progress"
	"pando/internal/ref"

	"golang.org/x/sync/errgroup"
)

// destroyBatch objects share their commits.
const (
	destroyBatch   = 64
	destroyWorkers = 4
)

// Destroyed says what became of one object.
type Destroyed struct {
	Ref            string `json:"ref"`
	ID             string `json:"id"`
	Kind           string `json:"kind"`
	ExclusiveBytes int64  `json:"exclusive_bytes"` // when last measured
	Reclaimed      bool   `json:"reclaimed"`       // the driver has removed it; if not, the next command will
}

// DestroyReport is the result of Destroy.
type DestroyReport struct {
	Destroyed []Destroyed
	Failed    []error // one for each that still exists
}

// Destroy removes volumes, with their snapshots, and snapshots. refs may hold
// quoted globs over the names of volumes. All names are resolved before
// anything is done: if one is unknown, nothing is destroyed. After that, one
// that is in use does not save the others. What is mounted and idle is
// unmounted. NotFound, Invalid.
func (e *Engine) Destroy(ctx context.Context, refs []string, t *progress.Tracker) (*DestroyReport, error) {
	if err := e.needRoot("destroy", ""); err != nil {
		return nil, err
	}
	rows, err := e.toDestroy(ctx, refs)
	if err != nil {
		return nil, err
	}
	return e.destroyRows(ctx, rows, t), ctx.Err()
}

func (e *Engine) destroyRows(ctx context.Context, rows []doomed, t *progress.Tracker) *DestroyReport {
	report := &DestroyReport{}
	e.pool.SpendReserve()
	defer func() { _ = e.pool.MakeReserve() }() // or the next one does
	t.Start("destroying", int64(len(rows)), 0)
	for len(rows) > 0 && ctx.Err() == nil {
		batch := rows[:min(destroyBatch, len(rows))]
		rows = rows[len(batch):]
		e.destroySome(ctx, batch, report)
		t.Add(int64(len(batch)), 0)
	}
	return report
}

// doomed is an object that is to be destroyed.
type doomed struct {
	row catalog.Row
	ref string
}

// toDestroy resolves references and globs, without repeats. The snapshots of a
// volume come before it.
func (e *Engine) toDestroy(ctx context.Context, refs []string) ([]doomed, error) {
	var out []doomed
	seen := map[driver.ObjectID]bool{}
	err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		add := func(r catalog.Row) error {
			if seen[r.ID] {
				return nil
			}
			if r.Kind == driver.Volume {
				snaps, err := tx.Snapshots(r.ID)
				if err != nil {
					return err
				}
				for _, s := range snaps {
					if !seen[s.ID] {
						seen[s.ID] = true
						out = append(out, doomed{s, r.Name + "@" + s.Name})
					}
				}
			}
			seen[r.ID] = true
			out = append(out, doomed{r, refOf(tx, r)})
			return nil
		}
		for _, s := range refs {
			if ref.IsGlob(s) {
				if err := e.addMatches(tx, s, add); err != nil {
					return err
				}
				continue
			}
			r, err := ref.Parse("destroy", s)
			if err != nil {
				return err
			}
			row, err := resolve(tx, "destroy", r)
			if err != nil {
				return err
			}
			if row.Kind == driver.Generation {
				return errs.New(errs.Invalid, "destroy", s, "it is a golden, not a volume").WithHint("remove it with `pando golden rm %s`", s)
			}
			if err := add(row); err != nil {
				return err
			}
		}
		return nil
	})
	return out, err
}

func (e *Engine) addMatches(tx *catalog.Tx, pattern string, add func(catalog.Row) error) error {
	if _, err := path.Match(pattern, ""); err != nil {
		return errs.New(errs.Invalid, "destroy", pattern, "the pattern is malformed").WithHint("use * ? and [a-z]")
	}
	var matched []catalog.Row
	if err := tx.Rows(driver.Volume, func(r catalog.Row) error {
		if ok, _ := path.Match(pattern, r.Name); ok {
			matched = append(matched, r)
		}
		return nil
	}); err != nil {
		return err
	}
	if len(matched) == 0 {
		return errs.New(errs.NotFound, "destroy", pattern, "no volume matches").WithHint("see `pando ls`")
	}
	for _, r := range matched {
		if err := add(r); err != nil {
			return err
		}
	}
	return nil
}

// destroyOne is an object on its way out.
type destroyOne struct {
	doomed
	att    catalog.Attached
	has    bool
	failed error
	skip   bool // gone meanwhile
}

// destroySome takes a batch through the protocol, each step for all of them.
func (e *Engine) destroySome(ctx context.Context, batch []doomed, report *DestroyReport) {
	items := make([]*destroyOne, len(batch))
	for i, d := range batch {
		items[i] = &destroyOne{doomed: d}
	}
	// A live mark in the way of one must not hold up the rest, so they are
	// claimed one by one if together does not work at once.
	if err := e.claimDestroy(ctx, items); err != nil {
		if len(items) == 1 {
			items[0].failed = err
		} else {
			for _, it := range items {
				it.failed = e.claimDestroy(ctx, []*destroyOne{it})
			}
		}
	}
	parallel(items, func(it *destroyOne) {
		if it.has {
			it.failed = e.detach(ctx, "destroy", it.row, it.att, false)
		}
	})
	var going []*destroyOne
	for _, it := range items {
		switch {
		case it.skip:
		case it.failed != nil:
			e.letGo(ctx, it.row.ID, it.failed)
			report.Failed = append(report.Failed, errs.Wrap("destroy", it.ref, it.failed))
		default:
			going = append(going, it)
		}
	}
	if len(going) == 0 {
		return
	}
	durable := catalog.Soft // an ephemeral volume that a power loss brings back is destroyed again
	for _, it := range going {
		durable = durable || catalog.Durability(!it.row.Ephemeral)
	}
	err := e.cat.Update(ctx, durable, func(tx *catalog.Tx) error {
		for _, it := range going {
			if err := tx.Delete(it.row.ID); err != nil {
				return err
			}
			if it.row.Kind == driver.Generation {
				if err := tx.DeleteEmptyGolden(it.row.Golden); err != nil {
					return err
				}
			}
			if err := tx.Bury(catalog.Tombstone{ID: it.row.ID, Ref: it.ref, Bytes: it.row.Usage.ExclusiveBytes, At: time.Now()}); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		for _, it := range going {
			e.letGo(ctx, it.row.ID, err) // it is unmounted already, which recovery will note
			report.Failed = append(report.Failed, errs.Wrap("destroy", it.ref, err))
		}
		return
	}
	// From here on they do not exist, whatever happens.
	parallel(going, func(it *destroyOne) { it.failed = e.drv.Destroy(context.WithoutCancel(ctx), it.row.ID) })
	_ = e.cat.Update(context.WithoutCancel(ctx), catalog.Soft, func(tx *catalog.Tx) error { // else the next command does it again
		for _, it := range going {
			if it.failed == nil {
				if err := tx.Reclaimed(it.row.ID); err != nil {
					return err
				}
			}
			if err := tx.Unmark(it.row.ID); err != nil {
				return err
			}
		}
		return nil
	})
	for _, it := range going {
		report.Destroyed = append(report.Destroyed, Destroyed{
			Ref: it.ref, ID: string(it.row.ID), Kind: string(it.row.Kind),
			ExclusiveBytes: it.row.Usage.ExclusiveBytes, Reclaimed: it.failed == nil,
		})
	}
}

func (e *Engine) claimDestroy(ctx context.Context, items []*destroyOne) error {
	return e.claim(ctx, "destroy", true, func(tx *catalog.Tx) ([]catalog.Mark, error) {
		var marks []catalog.Mark
		for _, it := range items {
			it.skip = false
			row, ok, err := tx.Get(it.row.ID)
			if err != nil {
				return nil, err
			}
			if !ok {
				it.skip = true // somebody else was faster
				continue
			}
			it.row = row
			if it.att, it.has, err = tx.Attached(row.ID); err != nil {
				return nil, err
			}
			marks = append(marks, catalog.Mark{ID: row.ID, Op: "destroy"})
		}
		return marks, nil
	})
}

// parallel runs fn for the items that have not failed.
func parallel(items []*destroyOne, fn func(*destroyOne)) {
	if len(items) == 1 {
		if it := items[0]; !it.skip && it.failed == nil {
			fn(it)
		}
		return
	}
	var g errgroup.Group
	g.SetLimit(destroyWorkers)
	for _, it := range items {
		if it.skip || it.failed != nil {
			continue
		}
		g.Go(func() error { fn(it); return nil })
	}
	_ = g.Wait()
}

// destroyRow destroys an object for which this process, or a dead one whose
// grave it holds, has a mark already, or which nobody can be working on.
func (e *Engine) destroyRow(ctx context.Context, row catalog.Row, att catalog.Attached, has bool) error {
	if has {
		if err := e.detach(ctx, "destroy", row, att, false); err != nil {
			return err
		}
	}
	err := e.cat.Update(ctx, catalog.Durability(!row.Ephemeral), func(tx *catalog.Tx) error {
		if err := tx.Delete(row.ID); err != nil {
			return err
		}
		return tx.Bury(catalog.Tombstone{ID: row.ID, Ref: row.Name, Bytes: row.Usage.ExclusiveBytes, At: time.Now()})
	})
	if err != nil {
		return err
	}
	derr := e.drv.Destroy(ctx, row.ID)
	return e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error {
		if derr == nil {
			if err := tx.Reclaimed(row.ID); err != nil {
				return err
			}
		}
		return tx.Unmark(row.ID)
	})
}
