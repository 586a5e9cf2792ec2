package engine

import (
	"cmp"
	"context"
	"maps"
	"slices"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
)

const opLabel = "label"

// LabelRequest says how to change the labels of an object. Its other labels stay.
type LabelRequest struct {
	Ref    ref.Ref           // volume, golden or snapshot whose labels change
	Set    map[string]string // labels to set, in place of the values that their keys have
	Remove []string          // keys of labels to remove; those that it does not have are ignored
}

// SetLabels changes the labels of a volume, a snapshot or a golden, all at once: after a crash it has the old ones or
// the new ones. Volumes may be in use. Clones do not inherit labels. Durable on return. NotFound, Invalid (a key or
// value, too many labels, a generation), InUse (another pando works on it).
func (e *Engine) SetLabels(ctx context.Context, q LabelRequest) (_ api.Object, err error) {
	ctx, end := e.ledger.Begin(ctx, opLabel)
	defer end(&err)

	full := q.Ref.String()
	if err := e.needRoot(opLabel, full); err != nil {
		return api.Object{}, err
	}

	if err := e.awaitGolden(ctx, q.Ref.Name); err != nil {
		return api.Object{}, err
	}

	row, err := e.labelled(ctx, q.Ref)
	if err != nil {
		return api.Object{}, err
	}

	// Nobody may publish the golden in the meantime: the new generation would have the old labels.
	if row.Kind == driver.Generation {
		unlock, _, err := e.lockGolden(ctx, q.Ref.Name)
		if err != nil {
			return api.Object{}, err
		}
		defer unlock()
	}

	if err := e.changeRow(ctx, opLabel, func(tx *catalog.Tx) (driver.ObjectID, error) {
		row, err = resolveLabelled(tx, q.Ref)
		return row.ID, err
	}, func(tx *catalog.Tx) error {
		return changeLabels(tx, row, q)
	}); err != nil {
		return api.Object{}, err
	}

	var info api.Object
	err = e.cat.View(ctx, func(tx *catalog.Tx) error {
		info, err = e.describe(tx, opLabel, q.Ref)
		return err
	})
	return info, err
}

// changeLabels changes the labels in the rows of the catalogue. Invalid.
func changeLabels(tx *catalog.Tx, row catalog.Row, q LabelRequest) error {
	full := q.Ref.String()
	if row.Kind != driver.Generation {
		labels, err := row.Labels.With(opLabel, q.Set, q.Remove...)
		if err != nil {
			return errs.Wrap(opLabel, full, err)
		}
		return cmp.Or(tx.SetLabels(row.ID, labels), checkIdentityFits(tx, opLabel, row.ID, labelsLeave))
	}

	g, _, err := tx.Golden(row.Golden)
	if err == nil {
		g.Labels, err = g.Labels.With(opLabel, q.Set, q.Remove...)
	}
	if err != nil {
		return errs.Wrap(opLabel, full, err)
	}
	return cmp.Or(tx.PutGolden(g), checkIdentityFits(tx, opLabel, row.ID, labelsLeave))
}

// labelsLeave is what an identity must be able to grow by beside its labels: by a pin, a rewind, longer names.
const labelsLeave = 1024 // bytes

// Labels returns the labels of a volume, a snapshot or a golden. NotFound, Invalid (a generation).
func (e *Engine) Labels(ctx context.Context, r ref.Ref) (driver.Labels, error) {
	if err := e.awaitGolden(ctx, r.Name); err != nil {
		return driver.Labels{}, err
	}

	row, err := e.labelled(ctx, r)
	return row.Labels, err
}

// LabelsInUse lists the labels of volumes and goldens as KEY=VALUE, sorted and without repeats.
func (e *Engine) LabelsInUse(ctx context.Context) ([]string, error) {
	words := map[string]bool{}
	add := func(l driver.Labels) {
		for k, v := range l.Map() {
			words[k+"="+v] = true
		}
	}

	err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		goldens, err := visibleGoldens(tx, opLabel)
		if err != nil {
			return err
		}
		for _, g := range goldens {
			add(g.Labels)
		}
		return visibleVolumes(tx, opLabel, func(r catalog.Row) error { add(r.Labels); return nil })
	})
	return slices.Sorted(maps.Keys(words)), err
}

// labelled finds what can have labels, with its labels. NotFound, Invalid (a generation).
func (e *Engine) labelled(ctx context.Context, r ref.Ref) (row catalog.Row, err error) {
	err = e.cat.View(ctx, func(tx *catalog.Tx) error {
		if row, err = resolveLabelled(tx, r); err != nil || row.Kind != driver.Generation {
			return err
		}

		g, _, err := tx.Golden(row.Golden)
		row.Labels = g.Labels
		return err
	})
	return row, err
}

func resolveLabelled(tx *catalog.Tx, r ref.Ref) (catalog.Row, error) {
	row, err := tx.Resolve(opLabel, r)
	if err == nil && row.Kind == driver.Generation && r.At != "" {
		return row, errs.New(errs.Invalid, opLabel, r.String(), "generations have no labels of their own").
			WithHint("use the labels of the golden: %s", errs.Run("label ls", r.Name))
	}
	return row, err
}
