package catalog

import (
	"context"
	"fmt"
	"strings"
)

// upgrades[i] leads from version i+1 to the next. Each step may be repeated.
var upgrades = []func(*Tx) error{func(t *Tx) error {
	for _, c := range [][2]string{
		{"goldens", "keep INTEGER NOT NULL DEFAULT 0"},
		{"objects", "pinned INTEGER NOT NULL DEFAULT 0"},
		{"objects", "consistency TEXT NOT NULL DEFAULT ''"},
		{"marks", "freezes INTEGER NOT NULL DEFAULT 0"},
	} {
		if err := t.addColumn(c[0], c[1]); err != nil {
			return err
		}
	}

	if _, err := t.exec(`CREATE INDEX IF NOT EXISTS lineage ON objects(volume) WHERE volume <> ''`); err != nil {
		return err
	}

	// Volumes did not record the generation that they descend from.
	_, err := t.exec(`UPDATE objects SET (golden, generation) = (SELECT g.golden, g.generation FROM objects g
		WHERE g.id = objects.origin_id)
		WHERE kind = 'volume' AND golden = '' AND origin_id IN (SELECT id FROM objects WHERE kind = 'generation')`)
	return err
}, func(t *Tx) error {
	again := strings.NewReplacer("CREATE TABLE", "CREATE TABLE IF NOT EXISTS", "CREATE INDEX",
		"CREATE INDEX IF NOT EXISTS")
	_, err := t.exec(again.Replace(remoteSchema))
	return err
}, func(t *Tx) error {
	return t.addColumn("remote_heads", "next INTEGER NOT NULL DEFAULT 0")
}, func(t *Tx) error {
	if err := t.addColumn("objects", "lower TEXT NOT NULL DEFAULT ''"); err != nil {
		return err
	}
	if _, err := t.exec(`CREATE INDEX IF NOT EXISTS lower_layer ON objects(lower) WHERE lower <> ''`); err != nil {
		return err
	}
	_, err := t.exec(`CREATE INDEX IF NOT EXISTS layer_name ON objects(name) WHERE kind = 'layer'`)
	return err
}, func(t *Tx) error {
	return t.addColumn("goldens", "overlay TEXT NOT NULL DEFAULT ''")
}, func(t *Tx) error {
	return t.addColumn("goldens", "source TEXT NOT NULL DEFAULT ''")
}, func(t *Tx) error {
	return t.addColumn("objects", "mirror INTEGER NOT NULL DEFAULT 0")
}, func(t *Tx) error {
	if err := t.addColumn("goldens", "labels TEXT NOT NULL DEFAULT ''"); err != nil {
		return err
	}
	return t.addColumn("objects", "labels TEXT NOT NULL DEFAULT ''")
}, func(t *Tx) error {
	return t.addColumn("objects", "ord INTEGER NOT NULL DEFAULT 0")
}}

// addColumn adds a column, given as its definition, unless it is there.
func (t *Tx) addColumn(table, definition string) error {
	name, _, _ := strings.Cut(definition, " ")
	var n int
	if err := t.queryRow(`SELECT count(*) FROM pragma_table_info(?) WHERE name = ?`, table, name).Scan(&n); err != nil ||
		n > 0 {
		return wrap("upgrade catalogue", t.c.path, err)
	}
	_, err := t.exec(`ALTER TABLE ` + table + ` ADD COLUMN ` + definition)
	return err
}

// upgrade brings an older catalogue to this version, in one durable transaction.
func (c *Catalog) upgrade(ctx context.Context, from int) error {
	return c.Update(ctx, Durable, func(tx *Tx) error {
		// Another process may have been faster.
		if err := tx.queryRow(`PRAGMA user_version`).Scan(&from); err != nil {
			return wrap("upgrade catalogue", c.path, err)
		}
		for v := from; v < Version; v++ {
			if err := upgrades[v-1](tx); err != nil {
				return err
			}
		}
		_, err := tx.exec(fmt.Sprintf(`PRAGMA user_version = %d`, Version))
		return err
	})
}
