package catalog

import (
	"context"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
)

// Resolve finds the object that a reference names: a volume, a generation (the current one if only the golden is named)
// or a snapshot. NotFound; Permission within a scope.
func (t *Tx) Resolve(op string, r ref.Ref) (Row, error) {
	golden, isGolden, err := t.goldenInScope(op, r.Name)
	if err != nil {
		return Row{}, err
	}
	if isGolden {
		return t.resolveGeneration(op, r, golden)
	}

	vol, ok, err := t.volumeInScope(op, r.Name)
	if err != nil {
		return Row{}, err
	}

	if !ok {
		return Row{}, errs.New(errs.NotFound, op, r.String(), "no volume or golden has this name").
			WithHint("list volumes with %s, and goldens with %s", errs.Run("ls"), errs.Run("golden ls"))
	}

	if r.At == "" {
		return vol, nil
	}

	snap, ok, err := t.Snapshot(vol.Lineage(), r.At)
	if err == nil && !ok {
		err = errs.New(errs.NotFound, op, r.String(), "volume %s has no snapshot %s", r.Name, r.At).
			WithHint("list its snapshots with %s", errs.Run("show", r.Name))
	}

	return snap, err
}

// resolveGeneration is Resolve for the name of a golden, with or without a number.
func (t *Tx) resolveGeneration(op string, r ref.Ref, golden Golden) (Row, error) {
	n := golden.Current
	if r.At != "" {
		var ok bool
		if n, ok = r.Generation(); !ok {
			return Row{}, errs.New(errs.NotFound, op, r.String(), "%q is not the number of a generation", r.At).
				WithHint("list its generations with %s", errs.Run("golden show", r.Name))
		}
	}

	row, ok, err := t.Generation(r.Name, n)
	if err == nil && !ok {
		err = errs.New(errs.NotFound, op, r.String(), "golden %s has no generation %d", r.Name, n).
			WithHint("list its generations with %s", errs.Run("golden show", r.Name))
	}

	return row, err
}

// goldenInScope is Golden for a name that a user gave. Permission.
func (t *Tx) goldenInScope(op, name string) (Golden, bool, error) {
	g, ok, err := t.Golden(name)
	if err == nil && ok {
		ok, err = ScopeOf(t.ctx).admitGolden(op, name)
	}
	return g, ok, err
}

// volumeInScope is Volume for a name that a user gave. Permission.
func (t *Tx) volumeInScope(op, name string) (Row, bool, error) {
	vol, ok, err := t.Volume(name)
	if err == nil && ok {
		ok, err = ScopeOf(t.ctx).admitVolume(op, vol)
	}
	if !ok {
		vol = Row{}
	}
	return vol, ok, err
}

// ResolveVolume finds a volume by name. NotFound; Invalid if it is a golden; Permission within a scope.
func (t *Tx) ResolveVolume(op, name string) (Row, error) {
	vol, ok, err := t.volumeInScope(op, name)
	if err != nil || ok {
		return vol, err
	}
	e := errs.New(errs.NotFound, op, name, "no volume has this name").WithHint("list volumes with %s", errs.Run("ls"))
	if _, isGolden, err := t.Golden(name); err == nil && isGolden && ScopeOf(t.ctx).SeesGolden(name) {
		e = errs.New(errs.Invalid, op, name, "it is a golden, not a volume").
			WithHint("make a volume from it: %s", errs.Run("clone", name, "VOLUME"))
	}
	return vol, e
}

// ByID finds the volume or snapshot of the user that a reference was to, by its ID: a volume even if it was renamed, or
// rewound, which gives its ID to a snapshot.
func (t *Tx) ByID(was ref.Ref, id driver.ObjectID) (Row, bool, error) {
	row, ok, err := t.Object(id)
	if err != nil || !ok || row.Kind == driver.Generation || row.Kind == driver.Volume && was.At != "" {
		return Row{}, false, err
	}

	vol := row
	if row.Kind == driver.Snapshot {
		if vol, ok, err = t.LineageHolder(row.Volume); err != nil || !ok {
			return Row{}, false, err
		}
	}
	if was.At == "" {
		row = vol
	}
	return row, ScopeOf(t.ctx).Has(vol), nil
}

// CheckFree refuses a name that is in use. Goldens and volumes share one name space, so that a reference has one
// meaning. Exists.
func (t *Tx) CheckFree(op, name string) error {
	scope := ScopeOf(t.ctx)
	hidden := errs.New(errs.Exists, op, name, "the name %q is taken", name).WithHint("choose another name")
	if vol, ok, err := t.Volume(name); err != nil {
		return err
	} else if ok && !scope.sees(vol) {
		return hidden
	} else if ok {
		return errs.New(errs.Exists, op, name, "volume %q already exists", name).
			WithHint("choose another name, or %s", errs.Run("destroy", name))
	}

	if _, ok, err := t.Golden(name); err != nil {
		return err
	} else if ok && !scope.SeesGolden(name) {
		return hidden
	} else if ok {
		return errs.New(errs.Exists, op, name, "golden %q already exists", name).WithHint("choose another name")
	}

	return nil
}

// RefOf returns the reference of a row, as a person would write it.
func (t *Tx) RefOf(r Row) string {
	switch r.Kind {
	case driver.Generation:
		return ref.Generation(r.Golden, r.Generation)
	case driver.Layer:
		if r.Name != "" {
			return r.Name // a template
		}
		return ref.Generation(r.Golden, r.Generation)
	case driver.Snapshot:
		if vol, ok, err := t.LineageHolder(r.Volume); err == nil && ok {
			return vol.Name + "@" + r.Name
		}
		return string(r.Volume) + "@" + r.Name
	}
	return r.Name
}

// CurrentOrigins replaces the names in the origins of rows by those that these objects have now. References to objects
// that no longer exist stay as they were.
func (t *Tx) CurrentOrigins(rows []Row) error {
	known := map[driver.ObjectID]ref.Ref{}
	for i := range rows {
		r := &rows[i]
		if r.Origin == "" || r.OriginID == "" {
			continue
		}

		now, ok := known[r.OriginID]
		if !ok {
			var err error
			if now, err = t.namesOf(r.OriginID); err != nil {
				return err
			}
			known[r.OriginID] = now
		}

		was, err := ref.Parse("", r.Origin)
		if err != nil || now.Name == "" {
			continue
		}
		if was.Name = now.Name; was.At != "" && now.At != "" {
			was.At = now.At
		}
		r.Origin = was.String()
	}
	return nil
}

// namesOf returns the names in the reference of an object: no name if it has none, or does not exist.
func (t *Tx) namesOf(id driver.ObjectID) (ref.Ref, error) {
	o, ok, err := t.Object(id)
	if err != nil || !ok {
		return ref.Ref{}, err
	}

	switch o.Kind {
	case driver.Volume:
		return ref.Ref{Name: o.Name}, nil
	case driver.Snapshot:
		vol, _, err := t.LineageHolder(o.Volume)
		return ref.Ref{Name: vol.Name, At: o.Name}, err
	}
	return ref.Ref{Name: o.Golden}, nil
}

// ResolvePoint finds a snapshot, generation, or layer that was a generation, by its ID. NotFound; Invalid if it is
// another object.
func (t *Tx) ResolvePoint(op string, id driver.ObjectID) (Row, error) {
	row, ok, err := t.Object(id)
	switch {
	case err != nil:
		return row, err
	case !ok:
		return row, errs.New(errs.NotFound, op, string(id), "there is no such object").
			WithHint("it may have been destroyed; list volumes with %s", errs.Run("ls"))
	case row.Kind != driver.Snapshot && row.Kind != driver.Generation && !row.WasGeneration():
		return row, errs.New(errs.Invalid, op, t.RefOf(row), "it is a %s, which is not immutable", string(row.Kind))
	}
	return row, nil
}

// RefOf returns the reference of an object, for messages: its ID if it has no other, or if the scope of ctx hides it.
func (c *Catalog) RefOf(ctx context.Context, id driver.ObjectID) string {
	name := string(id)
	_ = c.View(ctx, func(tx *Tx) error {
		r, ok, err := tx.Object(id)
		if err == nil && ok && tx.shows(r) {
			name = tx.RefOf(r)
		}
		return err
	})
	return name
}
