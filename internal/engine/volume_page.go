package engine

import (
	"context"
	"path"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
)

// PageQuery selects a page of the list of volumes.
type PageQuery struct {
	After  string // list volumes with names after this one
	Limit  int    // at most this many; at least 1
	Labels driver.LabelSelector
	Golden string // only volumes that descend from this golden, or from GOLDEN@N; "": all
	Name   string // only volumes whose name matches this glob; "": all
	State  string // only volumes that are idle, or mounted, now; "": all

	// Measure says which volumes of the page are measured, as by Volumes: if their number in the pool allows it, or (All)
	// whatever that takes.
	Measure Measure
}

// Measure says what is measured for a list.
type Measure string

// What is measured.
const (
	MeasureNone Measure = ""     // the last figures are shown
	MeasureSome Measure = "some" // as Volumes does without exact
	MeasureAll  Measure = "all"  // as Volumes does with exact
)

// selects returns which rows the catalogue has to read, and what else they must meet apart from their state. Invalid.
func (q PageQuery) selects() (f catalog.VolumeFilter, and func(catalog.Row) bool, err error) {
	if _, err := path.Match(q.Name, ""); err != nil {
		return f, nil, errs.New(errs.Invalid, "list volumes", q.Name, "the pattern is malformed").
			WithHint("use *, ? and [a-z]")
	}

	f.Golden, f.Recorded = q.Golden, q.State == stateMounted
	if r, err := ref.Parse("", q.Golden); err == nil && r.At != "" {
		if n, ok := r.Generation(); ok {
			f.Golden, f.Generation = r.Name, n
		}
	}
	exact := strings.ContainsAny(q.Name, `[\`) // SQLite has other rules for these
	if !exact {
		f.Name = q.Name
	}
	return f, func(r catalog.Row) bool {
		if exact {
			if ok, _ := path.Match(q.Name, r.Name); !ok {
				return false
			}
		}
		return q.Labels.Matches(r.Labels)
	}, nil
}

// readAtOnce is how many rows are read at a time when many of them may not be selected.
const readAtOnce = 1000

// VolumePage lists the volumes that the scope admits in the order of their names, as the catalogue has them unless
// q.Measure is set. The cost depends on the volumes that it looks at, not on how many there are. more reports whether
// there are volumes after the last one.
func (e *Engine) VolumePage(ctx context.Context, q PageQuery) (page []Info, more bool, err error) {
	filter, selected, err := q.selects()
	if err != nil {
		return nil, false, err
	}
	chunk := q.Limit + 1
	if q.State != "" || !q.Labels.IsZero() {
		chunk = max(chunk, readAtOnce)
	}

	var found []catalog.Row
	var mounts map[driver.ObjectID]catalog.MountRecord
	volumes := 0
	err = e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		found, more = nil, false
		if mounts, err = tx.MountRecords(); err != nil {
			return err
		}
		if q.Measure == MeasureSome {
			n, err := tx.Count()
			if err != nil {
				return err
			}
			volumes = n.Volumes
		}

		for after := q.After; ; {
			rows, err := tx.VolumesAfter(after, chunk, filter)
			if err != nil {
				return err
			}
			for _, r := range rows {
				if after = r.Name; !selected(r) || !e.isIn(q.State, r, mounts) {
					continue
				}
				if len(found) == q.Limit {
					more = true
					return tx.CurrentOrigins(found)
				}
				found = append(found, r)
			}

			if len(rows) < chunk {
				return tx.CurrentOrigins(found) // the last ones
			}
		}
	})
	if err != nil {
		return nil, false, err
	}

	all := q.Measure == MeasureAll
	if all || q.Measure == MeasureSome && volumes <= exactUpTo && e.cheapUsage(e.caps.FS[0]) {
		if err := e.measureRows(ctx, found, all); err != nil {
			return nil, false, err
		}
	}
	for _, r := range found {
		att, has := mounts[r.ID]
		page = append(page, e.volumeNow(r, att, has))
	}
	return page, more, nil
}

// isIn reports whether a volume is in a state; "": any.
func (e *Engine) isIn(state string, r catalog.Row, mounts map[driver.ObjectID]catalog.MountRecord) bool {
	if state == "" {
		return true
	}
	a, has := mounts[r.ID]
	if !has {
		return state == stateIdle
	}
	return e.volumeNow(r, a, has).State == state
}
