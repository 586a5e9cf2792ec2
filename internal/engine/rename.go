package engine

import (
	"cmp"
	"context"
	"slices"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
)

const opRename = "rename"

// RenameRequest says what gets which name.
type RenameRequest struct {
	Ref  ref.Ref  // volume, golden or snapshot to rename
	Name ref.Name // new name; for a snapshot, its name within its volume
}

// renamed returns the reference after the rename.
func (q RenameRequest) renamed() ref.Ref {
	if q.Ref.At == "" {
		return q.Name.Ref()
	}
	return ref.Ref{Name: q.Ref.Name, At: q.Name.String()}
}

// Renamed is the result of Rename.
type Renamed struct {
	api.Object
	Before string `json:"ref_before"` // reference until now
}

// Rename gives a volume, snapshot or golden another name. All rows change in one commit: after a crash everything has
// the old name, or everything has the new one. A volume may be mounted, and stays mounted where it is. Everything that
// descends from a golden follows it, which takes a moment for each object. Heads on remotes belong to the volume or
// golden and not to its name, and stay as they are. If the golden is being built or refreshed, Rename waits until that
// ends. Durable on return. It returns NotFound, Exists, Invalid (a generation; the same name), or InUse (another pando
// works on it, or on something that descends from the golden).
func (e *Engine) Rename(ctx context.Context, q RenameRequest) (_ Renamed, err error) {
	ctx, end := e.ledger.Begin(ctx, opRename)
	defer end(&err)

	full := q.Ref.String()
	if err := cmp.Or(q.Name.Required(opRename), e.needRoot(opRename, full)); err != nil {
		return Renamed{}, err
	}

	if err := e.awaitGolden(ctx, q.Ref.Name); err != nil {
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
		return Renamed{}, errs.New(errs.Invalid, opRename, full, "it already has this name").
			WithHint("choose another name")
	}

	r := &renaming{q, e}
	if row.Kind == driver.Generation {
		err = r.renameGolden(ctx)
	} else {
		err = r.renameObject(ctx)
	}
	if err != nil {
		return Renamed{}, err
	}

	var info api.Object
	err = e.cat.View(ctx, func(tx *catalog.Tx) error {
		info, err = e.describe(tx, opRename, q.renamed())
		return err
	})
	return Renamed{Object: info, Before: full}, err
}

// renaming is a rename under way.
type renaming struct {
	RenameRequest
	e *Engine
}

// renameObject renames a volume or snapshot.
func (q *renaming) renameObject(ctx context.Context) error {
	e := q.e
	var row catalog.Row
	name := q.Name.String()
	return e.changeRows(ctx, rowsChange{op: opRename, find: func(tx *catalog.Tx) (
		[]catalog.Mark, error,
	) {
		var err error
		if row, err = tx.Resolve(opRename, q.Ref); err != nil {
			return nil, err
		}

		m := catalog.Mark{ID: row.ID, Op: opRename, Name: q.renamed().String()}
		switch row.Kind {
		case driver.Generation:
			return nil, errs.New(errs.Conflict, opRename, q.Ref.String(), "it has been replaced by a golden in the meantime").
				WithHint("try again")
		case driver.Snapshot:
			_, taken, err := tx.Snapshot(row.Volume, name)
			if err == nil && taken {
				err = errs.New(errs.Exists, opRename, m.Name, "volume %q already has a snapshot named %q", q.Ref.Name, q.Name).
					WithHint("choose another name")
			}
			return []catalog.Mark{m}, err
		}

		if err := tx.CheckFree(opRename, name); err != nil {
			return nil, err
		}
		return []catalog.Mark{m}, q.checkNoLink(tx, row)
	}, change: func(tx *catalog.Tx) error {
		if row.Kind == driver.Snapshot {
			return tx.RenameSnapshot(row, name)
		}
		return tx.RenameVolume(row, name)
	}})
}

// checkNoLink returns InUse if the place of a volume below the pool is a symbolic link: the link has the name of the
// volume, and another volume of that name would replace it.
func (q *renaming) checkNoLink(tx *catalog.Tx, row catalog.Row) error {
	e := q.e
	a, has, err := tx.MountRecord(row.ID)
	if err != nil || !has || a.MountID != 0 || e.content.MountState(row, a) == content.NotMounted {
		return err
	}
	return errs.New(errs.InUse, opRename, row.Name, "it is used through a symbolic link that has its name, %s",
		e.pool.DefaultMountpoint(row.Name)).
		WithHint("unmount it first with %s", errs.Run("umount", row.Name))
}

// renameGolden renames a golden. Everything that descends from it has its name in its identity, so all of that is
// marked, and nothing of it may be copied in the meantime: the copy would get the old name.
func (q *renaming) renameGolden(ctx context.Context) error {
	e := q.e
	before, name := q.Ref.Name, q.Name.String()
	unlock, err := q.lockRenamed(ctx, before, name)
	if err != nil {
		return err
	}
	defer unlock()

	return e.changeRows(ctx, rowsChange{op: opRename, readers: true, find: func(tx *catalog.Tx) (
		marks []catalog.Mark, err error,
	) {
		current, err := currentGeneration(tx, opRename, before)
		if err != nil {
			return nil, err
		}
		if err := checkGoldenFree(tx, name); err != nil {
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
	}, change: func(tx *catalog.Tx) error {
		g, _, err := tx.Golden(before)
		if err != nil {
			return err
		}
		return tx.RenameGolden(g, name)
	}})
}

// checkGoldenFree refuses a name for a golden that is in use. A removed golden keeps its name as long as something
// descends from it, which would seem to descend from the renamed one. Exists.
func checkGoldenFree(tx *catalog.Tx, name string) error {
	if err := tx.CheckFree(opRename, name); err != nil {
		return err
	}

	family, err := tx.Family(name)
	if err != nil || len(family) == 0 {
		return err
	}
	row, _, err := tx.Object(family[0])
	if err != nil {
		return err
	}
	return errs.New(errs.Exists, opRename, name, "a golden that was removed had this name, and %s still descends from it",
		tx.RefOf(row)).WithHint("choose another name")
}

// lockRenamed locks both names of a golden, and their sources: no other process builds or refreshes one of them. The
// locks are taken in the order in which a refresh takes them, and of several in order of their names.
func (q *renaming) lockRenamed(ctx context.Context, before, name string) (unlock func(), err error) {
	names := []string{before, name}
	slices.Sort(names)

	var unlocks []func()
	unlock = func() {
		for _, fn := range unlocks {
			fn()
		}
	}
	for _, n := range []string{sourceOf(names[0]), sourceOf(names[1]), names[0], names[1]} {
		one, _, err := q.e.lockGolden(ctx, n)
		if err != nil {
			unlock()
			return nil, err
		}
		unlocks = append(unlocks, one)
	}
	return unlock, nil
}
