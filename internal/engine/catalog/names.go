package catalog

import (
	"strings"

	"pando/internal/driver"
)

// Former names are those that a volume or golden had before it was renamed. They lead to the heads that it was pushed
// to. A rebuild loses them.

// namesKey is the key of the former names of a volume, given its lineage, in the table meta.
func namesKey(lineage driver.ObjectID) string { return "names-" + string(lineage) }

// goldenNamesKey is namesKey for a golden, given its name. Names of goldens contain no @.
func goldenNamesKey(name string) string { return "names-@" + name }

// FormerNames returns the former names of a volume, the last one first.
func (t *Tx) FormerNames(vol Row) ([]string, error) { return t.namesAt(namesKey(vol.Lineage())) }

// FormerGoldenNames returns the former names of a golden, the last one first.
func (t *Tx) FormerGoldenNames(name string) ([]string, error) { return t.namesAt(goldenNamesKey(name)) }

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
	if err := t.putNames(namesKey(vol.Lineage()), vol.Name, former); err != nil {
		return err
	}
	t.noteRename(vol, name)
	return t.setName(vol.ID, name)
}

// RenameSnapshot gives a snapshot another name. Exists if its volume has one of that name.
func (t *Tx) RenameSnapshot(snap Row, name string) error {
	t.noteRename(snap, name)
	return t.setName(snap.ID, name)
}

func (t *Tx) setName(id driver.ObjectID, name string) error {
	_, err := t.exec(`UPDATE objects SET name=? WHERE id=?`, name, id)
	return err
}

// RenameGolden gives a golden, and the base of all that descends from it, another name. Exists if it is taken.
func (t *Tx) RenameGolden(from, to string) error {
	former, err := t.FormerGoldenNames(from)
	if err != nil {
		return err
	}

	if _, err := t.exec(`UPDATE goldens SET name=? WHERE name=?`, to, from); err != nil {
		return err
	}
	if _, err := t.exec(`UPDATE objects SET golden=? WHERE golden=?`, to, from); err != nil {
		return err
	}
	if err := t.forget(goldenNamesKey(from)); err != nil {
		return err
	}
	if _, err := t.exec(`UPDATE OR REPLACE meta SET key=? WHERE key=?`, goldenPushedKey(to),
		goldenPushedKey(from)); err != nil {
		return err
	}
	t.addNote(Change{Kind: Renamed, Object: GoldenKind, Ref: to, RefBefore: from})
	return t.putNames(goldenNamesKey(to), from, former)
}

// formerNamesMost limits how many former names are kept.
const formerNamesMost = 8

func (t *Tx) putNames(key, last string, former []string) error {
	all := append([]string{last}, former...)
	return t.SetMeta(key, strings.Join(all[:min(len(all), formerNamesMost)], " "))
}

// forget removes values of the table meta. Absent is success.
func (t *Tx) forget(keys ...string) error {
	for _, key := range keys {
		if _, err := t.exec(`DELETE FROM meta WHERE key = ?`, key); err != nil {
			return err
		}
	}
	return nil
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
