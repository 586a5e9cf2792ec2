package catalog

import (
	"fmt"
	"strings"

	"pando/internal/api"
	"pando/internal/base/ref"
	"pando/internal/driver"
)

// Former names are the names that a volume or golden had before it was renamed. They lead to the heads on remotes that
// it was pushed to. A rebuild loses them.

// namesPrefix begins the keys of former names in the table meta.
const namesPrefix = "names-"

// volumeNamesKey is the key of the former names of a volume, given its lineage.
func volumeNamesKey(lineage driver.ObjectID) string { return namesPrefix + string(lineage) }

// goldenNamesKey is the key of the former names of a golden. No other golden gets the same key, not even one that has
// the name later. No name contains @.
func goldenNamesKey(g Golden) string {
	return fmt.Sprintf("%s%s@%d", namesPrefix, g.Name, toNano(g.CreatedAt))
}

// FormerNames returns the former names of a volume, the last one first.
func (t *Tx) FormerNames(vol Row) ([]string, error) { return t.namesAt(volumeNamesKey(vol.Lineage())) }

// FormerGoldenNames returns the former names of a golden, the last one first. The first name that it ever had is always
// among them.
func (t *Tx) FormerGoldenNames(g Golden) ([]string, error) { return t.namesAt(goldenNamesKey(g)) }

func (t *Tx) namesAt(key string) ([]string, error) {
	text, err := t.Meta(key)
	return strings.Fields(text), err
}

// RenameVolume gives a volume another name. Exists if it is taken.
func (t *Tx) RenameVolume(vol Row, name string) error {
	former, err := t.FormerNames(vol)
	if err != nil {
		return err
	}
	if err := t.putNames(volumeNamesKey(vol.Lineage()), vol.Name, former); err != nil {
		return err
	}
	return t.setName(vol, name)
}

// RenameSnapshot gives a snapshot another name. Exists if its volume has a snapshot of that name.
func (t *Tx) RenameSnapshot(snap Row, name string) error { return t.setName(snap, name) }

func (t *Tx) setName(r Row, name string) error {
	if _, err := t.exec(`UPDATE objects SET name=? WHERE id=?`, name, r.ID); err != nil {
		return err
	}
	before := t.RefOf(r)
	r.Name = name
	return t.noteObject(api.EventRename, r, t.RefOf(r), before)
}

// RenameGolden gives a golden another name, in its own row and in the rows of everything that descends from it. Exists
// if the name is taken.
func (t *Tx) RenameGolden(g Golden, name string) error {
	former, err := t.FormerGoldenNames(g)
	if err != nil {
		return err
	}

	if _, err := t.exec(`UPDATE goldens SET name=? WHERE name=?`, name, g.Name); err != nil {
		return err
	}
	if _, err := t.exec(`UPDATE objects SET golden=? WHERE golden=?`, name, g.Name); err != nil {
		return err
	}

	if err := t.forgetMeta(goldenNamesKey(g)); err != nil {
		return err
	}
	now := g
	now.Name = name
	if err := t.putNames(goldenNamesKey(now), g.Name, former); err != nil {
		return err
	}
	return t.noteGolden(api.EventRename, now, g.Name)
}

// formerNamesMost limits how many former names are kept.
const formerNamesMost = 8

// putNames writes former names: the newest ones, and the first of all.
func (t *Tx) putNames(key, last string, former []string) error {
	all := append([]string{last}, former...)
	if len(all) > formerNamesMost {
		all = append(all[:formerNamesMost-1], all[len(all)-1])
	}
	return t.SetMeta(key, strings.Join(all, " "))
}

// forgetMeta removes a value of the table meta. Absent is success.
func (t *Tx) forgetMeta(key string) error {
	_, err := t.exec(`DELETE FROM meta WHERE key = ?`, key)
	return err
}

// Family lists the generations of a golden, and everything that descends from one.
func (t *Tx) Family(golden string) (ids []driver.ObjectID, err error) {
	err = t.eachRow(`SELECT id FROM objects WHERE golden = ? ORDER BY id`, []any{golden}, func(s scanner) error {
		var id driver.ObjectID
		err := s.Scan(&id)
		ids = append(ids, id)
		return wrap("read catalogue", t.c.path, err)
	})
	return ids, err
}

// CurrentOrigins replaces the names in the origins of rows by those that these objects have now. References to objects
// that no longer exist stay as they were, and are marked (OriginGone).
func (t *Tx) CurrentOrigins(rows []Row) error {
	update := t.OriginUpdater()
	for i := range rows {
		if err := update(&rows[i]); err != nil {
			return err
		}
	}
	return nil
}

// OriginUpdater returns a func that does for one row what CurrentOrigins does for many. It looks each origin up once.
func (t *Tx) OriginUpdater() func(*Row) error {
	known := map[driver.ObjectID]ref.Ref{}
	return func(r *Row) (err error) {
		if r.Origin == "" || r.OriginID == "" {
			return nil
		}

		now, ok := known[r.OriginID]
		if !ok {
			if now, err = t.namesOf(r.OriginID); err != nil {
				return err
			}
			known[r.OriginID] = now
		}

		was, err := ref.Parse("", r.Origin)
		if r.OriginGone = now.Name == ""; r.OriginGone || err != nil {
			return nil
		}
		if was.Name = now.Name; was.At != "" && now.At != "" {
			was.At = now.At
		}
		r.Origin = was.String()
		return nil
	}
}

// namesOf returns the names in the reference of an object: none if it does not exist.
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
