package catalog

import (
	"pando/internal/driver"
)

// BuildResult finds the newest generation of a golden that was built under a key.
func (t *Tx) BuildResult(golden, key string) (Row, bool, error) {
	return t.findRow(`build_key <> '' AND golden = ? AND build_key = ? AND kind = 'generation'
		ORDER BY generation DESC LIMIT 1`, golden, key)
}

// LastBuild finds the newest generation of a golden that a command has built.
func (t *Tx) LastBuild(golden string) (Row, bool, error) {
	// The + keeps SQLite from sorting all results by an index that has another order.
	return t.findRow(`kind = 'generation' AND golden = ? AND +build_key <> '' ORDER BY generation DESC LIMIT 1`, golden)
}

// SetUnsealed notes that a generation is to be stored in fewer extents when there is time.
func (t *Tx) SetUnsealed(id driver.ObjectID) error {
	_, err := t.exec(`INSERT OR IGNORE INTO unsealed (id) VALUES (?)`, id)
	return err
}

// SetSealed removes the note of SetUnsealed. Absent is success.
func (t *Tx) SetSealed(id driver.ObjectID) error {
	_, err := t.exec(`DELETE FROM unsealed WHERE id = ?`, id)
	return err
}

// Unsealed lists at most limit generations with a note of SetUnsealed (0: all).
func (t *Tx) Unsealed(limit int) ([]driver.ObjectID, error) {
	if limit <= 0 {
		limit = -1
	}

	var out []driver.ObjectID
	err := t.eachRow(`SELECT id FROM unsealed LIMIT ?`, []any{limit}, func(s scanner) error {
		var id driver.ObjectID
		err := s.Scan(&id)
		out = append(out, id)
		return wrap("read catalogue", t.c.path, err)
	})
	return out, err
}
