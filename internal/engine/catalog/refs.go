package catalog

import (
	"context"
	"slices"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
)

// Found is what a transaction has found for a caller.
type Found struct {
	Ref   string      // reference to an object, or a name that is free
	Kind  driver.Kind // kind of the object; "": there is none
	Owner uint32      // user ID of the object's owner
}

// OnFind sets the func that is called when a transaction has found an object that a caller names by its reference or
// ID, or that a name which a caller wants is free. The transaction returns its errors in place of what it has found. A
// NotFound hides what was found: the transaction returns the error for a name that nothing has.
func (c *Catalog) OnFind(fn func(ctx context.Context, op string, f Found) error) { c.onFind = fn }

// Ask calls the func of OnFind for an object.
func (t *Tx) Ask(op string, r Row) error {
	if t.c.onFind == nil {
		return nil
	}
	return t.c.onFind(t.ctx, op, Found{t.RefOf(r), r.Kind, r.Owner})
}

// asked returns what was found, if it may be.
func (t *Tx) asked(op string, r Row, err error) (Row, error) {
	if err == nil {
		err = t.Ask(op, r)
	}
	if err != nil {
		return Row{}, err
	}
	return r, nil
}

// Resolve finds the object that a reference names: a volume, a generation (the current one if only the golden is named)
// or a snapshot. NotFound, and errors of OnFind.
func (t *Tx) Resolve(op string, r ref.Ref) (Row, error) { return t.ResolveKind(op, r) }

// ResolveKind is Resolve for something of one of some kinds; a golden is named without a number, a generation with one.
// Invalid if it is of another kind.
func (t *Tx) ResolveKind(op string, r ref.Ref, kinds ...api.Kind) (Row, error) {
	row, err := t.resolve(op, r, kinds)
	if row, err = t.found(op, r, kinds, row, err); err != nil || len(kinds) == 0 {
		return row, err
	}
	if is := kindNamed(r, row); !slices.Contains(kinds, is) {
		return Row{}, wrongKind(op, r, is, kinds[0])
	}
	return row, nil
}

// found returns what was found by a reference, or not, as who asks may know of it.
func (t *Tx) found(op string, r ref.Ref, kinds []api.Kind, row Row, err error) (Row, error) {
	if err == nil {
		err = t.Ask(op, row)
	}
	if errs.Is(err, errs.NotFound) && t.hides(op, r.Name) {
		err = t.unknown(op, r, kinds)
	}
	if err != nil {
		return Row{}, err
	}
	return row, nil
}

// hides reports whether a policy hides the volume or golden with a name, so that nothing may be said about what belongs
// to it.
func (t *Tx) hides(op, name string) bool {
	if t.c.onFind == nil {
		return false
	}
	if g, ok, err := t.Golden(name); err != nil || ok {
		return ok && errs.Is(t.AskGolden(op, g), errs.NotFound)
	}
	v, ok, err := t.Volume(name)
	return err == nil && ok && errs.Is(t.Ask(op, v), errs.NotFound)
}

// kindNamed is the kind of what a reference names, given the row that it leads to.
func kindNamed(r ref.Ref, row Row) api.Kind {
	if row.Kind == driver.Generation && r.At == "" {
		return api.KindGolden
	}
	return api.Kind(row.Kind)
}

// resolve is Resolve without OnFind. If nothing has the name, the error speaks of the kinds that were looked for.
func (t *Tx) resolve(op string, r ref.Ref, kinds []api.Kind) (Row, error) {
	golden, isGolden, err := t.Golden(r.Name)
	if err != nil {
		return Row{}, err
	}
	if isGolden {
		return t.resolveGeneration(op, r, golden)
	}

	vol, ok, err := t.Volume(r.Name)
	if err != nil {
		return Row{}, err
	}

	if !ok {
		return Row{}, t.unknown(op, r, kinds)
	}

	if r.At == "" {
		return vol, nil
	}

	snap, ok, err := t.Snapshot(vol.Lineage(), r.At)
	if err == nil && !ok {
		err = t.unknownSnapshot(op, r, vol)
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

// ResolveGolden finds a golden by name; ok is false if there is none. Errors of OnFind.
func (t *Tx) ResolveGolden(op, name string) (g Golden, ok bool, err error) {
	if g, ok, err = t.Golden(name); err != nil || !ok {
		return g, ok, err
	}
	return g, true, t.AskGolden(op, g)
}

// AskGolden calls the func of OnFind for a golden.
func (t *Tx) AskGolden(op string, g Golden) error {
	if t.c.onFind == nil {
		return nil
	}
	return t.c.onFind(t.ctx, op, Found{g.Name, driver.Generation, g.Owner})
}

// AskFree calls the func of OnFind for a name that is free.
func (t *Tx) AskFree(op, name string) error {
	if t.c.onFind == nil {
		return nil
	}
	return t.c.onFind(t.ctx, op, Found{Ref: name})
}

// ResolveVolume is ResolveKind for a volume. NotFound, Invalid, errors of OnFind.
func (t *Tx) ResolveVolume(op, name string) (Row, error) {
	r, kinds := ref.Ref{Name: name}, []api.Kind{api.KindVolume}
	if vol, ok, err := t.Volume(name); err != nil || ok {
		return t.found(op, r, kinds, vol, err)
	}
	return t.ResolveKind(op, r, kinds...)
}

// CheckFree refuses a name that is in use. Goldens and volumes share one name space, so that a reference has one
// meaning. Exists, and errors of OnFind.
func (t *Tx) CheckFree(op, name string) error {
	var volume, golden bool
	err := t.queryRow(`SELECT EXISTS (SELECT 1 FROM objects WHERE kind = 'volume' AND name = ?1),
		EXISTS (SELECT 1 FROM goldens WHERE name = ?1)`, name).Scan(&volume, &golden)
	switch {
	case err != nil:
		return wrap("read catalogue", t.c.path, err)
	case volume:
		return errs.New(errs.Exists, op, name, "volume %q already exists", name).WithHint("choose another name")
	case golden:
		return errs.New(errs.Exists, op, name, "golden %q already exists", name).WithHint("choose another name")
	}
	return t.AskFree(op, name)
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

// ResolvePoint finds a snapshot, generation, or layer that was a generation, by its ID. NotFound; Invalid if it is
// another object; errors of OnFind.
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
	return t.asked(op, row, nil)
}

// RefOf returns the reference of an object, for messages: its ID if it has no other.
func (c *Catalog) RefOf(ctx context.Context, id driver.ObjectID) string {
	name := string(id)
	_ = c.View(ctx, func(tx *Tx) error {
		r, ok, err := tx.Object(id)
		if err == nil && ok {
			name = tx.RefOf(r)
		}
		return err
	})
	return name
}
