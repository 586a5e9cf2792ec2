package catalog

import (
	"context"
	"strconv"
	"time"

	"pando/internal/api"
	"pando/internal/base/ref"
	"pando/internal/driver"
)

// An overlay needs another object, its lower layer, for as long as it exists. A generation that is destroyed before the
// overlays that need it keeps its row, as a layer: so nothing can take its object for garbage. The layer goes in the
// transaction that deletes the last of them.

// CountOverlays returns how many objects are overlays on an object.
func (t *Tx) CountOverlays(id driver.ObjectID) (n int, err error) {
	err = t.queryRow(`SELECT count(*) FROM objects WHERE lower = ?`, id).Scan(&n)
	return n, wrap("read catalogue", t.c.path, err)
}

// WasGeneration reports whether r is a generation that was removed while overlays needed it, and not a template.
func (r Row) WasGeneration() bool { return r.Kind == driver.Layer && r.Golden != "" }

// OverlayOn returns one of the overlays on an object, if there is one.
func (t *Tx) OverlayOn(id driver.ObjectID) (Row, bool, error) {
	return t.findRow(`lower = ? LIMIT 1`, id)
}

// KeepAsLayer makes a generation that is destroyed a layer, which has no name. The event says why it is destroyed.
func (t *Tx) KeepAsLayer(gen Row, why string) error {
	if err := t.noteObject(api.EventDestroy, gen, t.RefOf(gen), why); err != nil {
		return err
	}
	_, err := t.exec(`UPDATE objects SET kind = ?, pinned = 0, expires_at = 0 WHERE id = ?`, driver.Layer, gen.ID)
	return err
}

// dropUnusedLayer replaces the row of a layer by a tombstone if no overlay needs it any more.
func (t *Tx) dropUnusedLayer(id driver.ObjectID) error {
	row, ok, err := t.Object(id)
	if err != nil || !ok || row.Kind != driver.Layer {
		return err
	}
	if n, err := t.CountOverlays(id); err != nil || n > 0 {
		return err
	}
	return t.Bury(Tombstone{ID: id, Ref: ref.Generation(row.Golden, row.Generation),
		Bytes: row.Usage.ExclusiveBytes, At: time.Now()}, "")
}

// lowerKey is the key of the loop device of a lower layer in the table meta.
func lowerKey(id driver.ObjectID) string { return "lower-" + string(id) }

// LowerLoop returns the loop device that a lower layer was last attached to. It may have another file by now.
func (c *Catalog) LowerLoop(ctx context.Context, id driver.ObjectID) (index int, known bool, err error) {
	err = c.View(ctx, func(tx *Tx) error {
		text, err := tx.Meta(lowerKey(id))
		if err == nil && text != "" {
			index, err = strconv.Atoi(text)
			known = err == nil
		}
		return err
	})
	return index, known, err
}

// SetLowerLoop records the loop device that a lower layer is attached to.
func (c *Catalog) SetLowerLoop(ctx context.Context, id driver.ObjectID, index int) error {
	return c.Update(ctx, Soft, func(tx *Tx) error { return tx.SetMeta(lowerKey(id), strconv.Itoa(index)) })
}

// Template looks up an empty upper layer by its name.
func (t *Tx) Template(name string) (Row, bool, error) {
	return t.findRow(`kind = 'layer' AND name = ?`, name)
}
