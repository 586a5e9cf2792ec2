package catalog

import (
	"slices"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/base/similar"
)

// unknown is the NotFound error for a name that no volume and no golden has. It suggests a similar name of one of the
// kinds that were looked for, if who asks may see it.
func (t *Tx) unknown(op string, r ref.Ref, kinds []api.Kind) error {
	volumes := len(kinds) == 0 || slices.Contains(kinds, api.KindVolume) || slices.Contains(kinds, api.KindSnapshot)
	goldens := len(kinds) == 0 || slices.Contains(kinds, api.KindGolden) || slices.Contains(kinds, api.KindGeneration)
	what, list := "volume or golden", errs.Messagef("list volumes with %s, and goldens with %s", errs.Run("ls"),
		errs.Run("golden ls"))
	switch {
	case !goldens:
		what, list = "volume", errs.Messagef("list volumes with %s", errs.Run("ls"))
	case !volumes:
		what, list = "golden", errs.Messagef("list goldens with %s", errs.Run("golden ls"))
	}

	e := errs.New(errs.NotFound, op, r.String(), "no %s has this name", what)
	if meant := t.meant(op, r.Name, volumes, goldens); meant != "" {
		return e.WithHint("did you mean %s? %s", meant, list)
	}
	return e.WithHint("%s", list)
}

// unknownSnapshot is the NotFound error for a snapshot that a volume does not have.
func (t *Tx) unknownSnapshot(op string, r ref.Ref, vol Row) error {
	snaps, err := t.Snapshots(vol.Lineage())
	if err != nil {
		return err
	}

	var names []string
	for _, s := range snaps {
		if t.Ask(op, s) == nil {
			names = append(names, s.Name)
		}
	}

	e := errs.New(errs.NotFound, op, r.String(), "volume %s has no snapshot %s", r.Name, r.At)
	if meant := similar.Words(r.At, names); len(meant) > 0 {
		return e.WithHint("did you mean %s@%s? list its snapshots with %s", r.Name, meant[0], errs.Run("show", r.Name))
	}
	return e.WithHint("list its snapshots with %s", errs.Run("show", r.Name))
}

// meant returns the name of a volume or golden that somebody may have meant, or "".
func (t *Tx) meant(op, name string, volumes, goldens bool) string {
	var names []string
	query := `SELECT name FROM objects WHERE kind = 'volume' AND ?1 UNION ALL SELECT name FROM goldens WHERE ?2`
	if t.eachRow(query, []any{volumes, goldens}, func(s scanner) error {
		var n string
		err := s.Scan(&n)
		names = append(names, n)
		return err
	}) != nil {
		return ""
	}

	const some = 5 // names that policies are asked about
	for i, n := range similar.Words(name, names) {
		if i == some {
			break
		}
		row, err := t.resolve(op, ref.Ref{Name: n}, nil)
		if err == nil && t.Ask(op, row) == nil {
			return n
		}
	}
	return ""
}

// wrongKind is the Invalid error for a reference to something of another kind than the operation takes.
func wrongKind(op string, r ref.Ref, is, wanted api.Kind) error {
	e := errs.New(errs.Invalid, op, r.String(), "it is a %s, not a %s", is, wanted)
	ofGolden := is == api.KindGolden || is == api.KindGeneration
	switch {
	case op == "destroy" && ofGolden:
		return e.WithHint("remove it with %s", errs.Run("golden rm", r))
	case op == "golden rm":
		return e.WithHint("remove it with %s", errs.Run("destroy", r))
	case op == "ls" && ofGolden:
		return e.WithHint("describe it with %s", errs.Run("golden show", r))
	case op == "golden show":
		return e.WithHint("describe it with %s", errs.Run("show", r))
	case wanted == api.KindVolume && is != api.KindVolume:
		return e.WithHint("make a volume from it: %s", errs.Run("clone", r, "VOLUME"))
	case wanted == api.KindGolden && is == api.KindGeneration:
		return e.WithHint("name the golden: %s", r.Name)
	case wanted == api.KindGolden:
		return e.WithHint("list goldens with %s", errs.Run("golden ls"))
	}
	return e
}
