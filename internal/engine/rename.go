package engine

import (
	"cmp"
	"context"
	"slices"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
)

const opRename = "rename"

// RenameRequest says what gets which name.
type RenameRequest struct {
	Ref     ref.Ref  // a volume, a golden, or VOLUME@SNAPSHOT
	Name    ref.Name // of a snapshot: within its volume
	Tracker *progress.Tracker
}

// Renamed is the result of Rename.
type Renamed struct {
	Info
	Before string `json:"name_before"` // reference until now
}

// Rename gives a volume, snapshot or golden another name. The switch is one commit: after a crash it has its old name
// or the new one, everywhere. A volume may be mounted, and stays where it is. All that descends from a golden follows
// it, which takes a moment for each volume. Heads in remotes belong to the object, not to its name, and stay as they
// are. Durable on return. NotFound, Exists, Invalid (a generation; the same name), InUse (another pando works on it, or
// on what descends from the golden).
func (e *Engine) Rename(ctx context.Context, q RenameRequest) (Renamed, error) {
	ctx, end := e.ledger.Begin(ctx)
	defer end()

	full := q.Ref.String()
	if err := cmp.Or(q.Name.Required(opRename), e.needRoot(opRename, full)); err != nil {
		return Renamed{}, err
	}

	var row catalog.Row
	if err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		row, err = tx.Resolve(opRename, q.Ref)
		return err
	}); err != nil {
		return Renamed{}, err
	}

	// Only names can be changed, and only to others.
	if row.Kind == driver.Generation && q.Ref.At != "" {
		return Renamed{}, errs.New(errs.Invalid, opRename, full, "generations have numbers, not names").
			WithHint("rename the golden with all its generations: %s", errs.Run("rename", q.Ref.Name, q.Name.String()))
	}
	if cmp.Or(q.Ref.At, q.Ref.Name) == q.Name.String() {
		return Renamed{}, errs.New(errs.Invalid, opRename, full, "it has this name already")
	}

	var err error
	if row.Kind == driver.Generation {
		err = e.renameGolden(ctx, q)
	} else {
		err = e.renameObject(ctx, q)
	}
	if err != nil {
		return Renamed{}, err
	}

	now := ref.Ref{Name: q.Ref.Name, At: q.Name.String()}
	if q.Ref.At == "" {
		now = q.Name.Ref()
	}

	var info Info
	err = e.cat.View(ctx, func(tx *catalog.Tx) error {
		info, err = e.infoOf(tx, opRename, now)
		return err
	})
	return Renamed{Info: info, Before: full}, err
}

// renameObject renames a volume or snapshot.
func (e *Engine) renameObject(ctx context.Context, q RenameRequest) error {
	var row catalog.Row
	return e.changeRows(ctx, opRename, false, q.Tracker, func(tx *catalog.Tx) ([]catalog.Mark, error) {
		var err error
		if row, err = tx.Resolve(opRename, q.Ref); err != nil {
			return nil, err
		}
		if err := e.checkUnchanged(ctx, tx, opRename, row); err != nil {
			return nil, err
		}

		name := q.Name.String()
		if row.Kind == driver.Snapshot {
			name = q.Ref.Name + "@" + name
			_, taken, serr := tx.Snapshot(row.Volume, q.Name.String())
			if err = serr; taken {
				err = errs.New(errs.Exists, opRename, name, "volume %q already has a snapshot named %q", q.Ref.Name, q.Name).
					WithHint("choose another name")
			}
		} else {
			err = tx.CheckFree(opRename, name)
		}

		return []catalog.Mark{{ID: row.ID, Op: opRename, Name: name}}, err
	}, func(tx *catalog.Tx) error {
		if row.Kind == driver.Snapshot {
			return tx.RenameSnapshot(row, q.Name.String())
		}
		return tx.RenameVolume(row, q.Name.String())
	})
}

// renameGolden renames a golden. Everything that descends from it names it in its identity, so all of that is marked,
// and nobody may be copying any of it: the copy would have the old name.
func (e *Engine) renameGolden(ctx context.Context, q RenameRequest) error {
	before, name := q.Ref.Name, q.Name.String()
	names := []string{before, name}
	slices.Sort(names) // two renames at once do not wait for each other
	for _, n := range names {
		unlock, _, err := e.lockGolden(ctx, n, q.Tracker)
		if err != nil {
			return err
		}
		defer unlock()
	}

	return e.changeRows(ctx, opRename, true, q.Tracker, func(tx *catalog.Tx) (marks []catalog.Mark, err error) {
		current, err := currentGeneration(tx, opRename, before)
		if err != nil {
			return nil, err
		}
		if err := e.checkGoldenUnchanged(ctx, tx, opRename, current); err != nil {
			return nil, err
		}
		if err := tx.CheckFree(opRename, name); err != nil {
			return nil, err
		}

		ids, err := tx.Family(before)
		for _, id := range ids {
			m := catalog.Mark{ID: id, Op: opRename}
			if id == current {
				m.Name = name
			}
			marks = append(marks, m)
		}
		return marks, err
	}, func(tx *catalog.Tx) error {
		g, _, err := tx.Golden(before)
		if err != nil {
			return err
		}

		was := e.goldenLineage(g)
		g.Name = name
		return cmp.Or(tx.RenameGolden(before, name), tx.MoveRemoteHeads(was, e.goldenLineage(g)))
	})
}
