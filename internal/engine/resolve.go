package engine

import (
	"pando/internal/catalog"
	"pando/internal/driver"
	"pando/internal/errs"
	"pando/internal/ref"
)

// resolve finds what a reference names: a volume, a generation (the current one
// if only the golden is named) or a snapshot. NotFound, with a hint.
func resolve(tx *catalog.Tx, op string, r ref.Ref) (catalog.Row, error) {
	golden, isGolden, err := tx.Golden(r.Name)
	if err != nil {
		return catalog.Row{}, err
	}
	if isGolden {
		n := golden.Current
		if r.At != "" {
			var ok bool
			if n, ok = r.Generation(); !ok {
				return catalog.Row{}, errs.New(errs.NotFound, op, r.String(), "%q is not the number of a generation", r.At).
					WithHint("see %s", errs.Run("golden show", r.Name))
			}
		}
		row, ok, err := tx.Generation(r.Name, n)
		if err == nil && !ok {
			err = errs.New(errs.NotFound, op, r.String(), "golden %s has no generation %d", r.Name, n).
				WithHint("see %s", errs.Run("golden show", r.Name))
		}
		return row, err
	}
	vol, ok, err := tx.Volume(r.Name)
	if err != nil {
		return catalog.Row{}, err
	}
	if !ok {
		return catalog.Row{}, errs.New(errs.NotFound, op, r.String(), "no volume or golden has this name").
			WithHint("see %s and %s", errs.Run("ls"), errs.Run("golden ls"))
	}
	if r.At == "" {
		return vol, nil
	}
	snap, ok, err := tx.Snapshot(vol.Lineage(), r.At)
	if err == nil && !ok {
		err = errs.New(errs.NotFound, op, r.String(), "volume %s has no snapshot %s", r.Name, r.At).
			WithHint("see %s", errs.Run("show", r.Name))
	}
	return snap, err
}

// resolveVolume finds a volume by name. NotFound.
func resolveVolume(tx *catalog.Tx, op, name string) (catalog.Row, error) {
	vol, ok, err := tx.Volume(name)
	if err != nil || ok {
		return vol, err
	}
	e := errs.New(errs.NotFound, op, name, "there is no such volume").WithHint("see %s", errs.Run("ls"))
	if _, isGolden, err := tx.Golden(name); err == nil && isGolden {
		e = errs.New(errs.Invalid, op, name, "it is a golden, not a volume").
			WithHint("make a volume of it: %s", errs.Run("clone", name, "VOLUME"))
	}
	return vol, e
}

// checkFree reports whether a name can be given to something new. Goldens and
// volumes share one space of names, so that a reference means one thing.
func checkFree(tx *catalog.Tx, op, name string) error {
	if _, ok, err := tx.Volume(name); err != nil {
		return err
	} else if ok {
		return errs.New(errs.Exists, op, name, "a volume has this name already").
			WithHint("choose another, or %s", errs.Run("destroy", name))
	}
	if _, ok, err := tx.Golden(name); err != nil {
		return err
	} else if ok {
		return errs.New(errs.Exists, op, name, "a golden has this name already").WithHint("choose another name")
	}
	return nil
}

// refOf is the reference of a row, as a person would write it.
func refOf(tx *catalog.Tx, r catalog.Row) string {
	switch r.Kind {
	case driver.Generation:
		return ref.Generation(r.Golden, r.Generation)
	case driver.Snapshot:
		if vol, ok, err := tx.LineageHolder(r.Volume); err == nil && ok {
			return vol.Name + "@" + r.Name
		}
		return string(r.Volume) + "@" + r.Name
	}
	return r.Name
}
