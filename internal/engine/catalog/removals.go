package catalog

import (
	"fmt"
	"strconv"
	"strings"

	"pando/internal/driver"
)

// Removal is the old directory of an import that Pando deletes. It has a mark of the same ID while a process works on
// it.
type Removal struct {
	ID       driver.ObjectID
	Path     string // where the directory is moved, to be deleted
	Ino      uint64 // of the directory
	Deleting bool   // it was checked there, and may be incomplete by now; else it may still have its own name
}

const removalPrefix = "removal-"

// Modes of a removal in the table meta.
const (
	removalMoving   = "moving"
	removalDeleting = "deleting"
)

// SetRemoval records a removal.
func (t *Tx) SetRemoval(r Removal) error {
	mode := removalMoving
	if r.Deleting {
		mode = removalDeleting
	}
	return t.SetMeta(removalPrefix+string(r.ID), fmt.Sprintf("%s %d %s", mode, r.Ino, r.Path))
}

// ForgetRemoval removes what SetRemoval has recorded. Absent is success.
func (t *Tx) ForgetRemoval(id driver.ObjectID) error {
	return t.forget(removalPrefix + string(id))
}

// Removal returns a removal; ok is false if there is none with this ID.
func (t *Tx) Removal(id driver.ObjectID) (r Removal, ok bool, err error) {
	v, err := t.Meta(removalPrefix + string(id))
	if err != nil {
		return r, false, err
	}
	r, ok = parseRemoval(id, v)
	return r, ok, nil
}

// Removals lists all removals.
func (t *Tx) Removals() (out []Removal, err error) {
	err = t.eachRow(`SELECT substr(key, 9), value FROM meta WHERE key GLOB 'removal-*' ORDER BY key`, nil,
		func(s scanner) error {
			var id driver.ObjectID
			var v string
			if err := s.Scan(&id, &v); err != nil {
				return wrap("read catalogue", t.c.path, err)
			}
			if r, ok := parseRemoval(id, v); ok {
				out = append(out, r)
			}
			return nil
		})
	return out, err
}

// parseRemoval reads what SetRemoval has written. The path is last, as it may contain anything.
func parseRemoval(id driver.ObjectID, v string) (Removal, bool) {
	f := strings.SplitN(v, " ", 3)
	if len(f) != 3 {
		return Removal{}, false
	}
	ino, err := strconv.ParseUint(f[1], 10, 64)
	return Removal{ID: id, Path: f[2], Ino: ino, Deleting: f[0] == removalDeleting}, err == nil
}
