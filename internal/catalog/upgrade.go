package catalog

import (
	"context"
	"fmt"
)

// upgrades[i] leads from version i+1 to the next.
var upgrades = [][]string{{
	`ALTER TABLE goldens ADD COLUMN keep INTEGER NOT NULL DEFAULT 0`,
	`ALTER TABLE objects ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0`,
	`ALTER TABLE objects ADD COLUMN consistency TEXT NOT NULL DEFAULT ''`,
	`ALTER TABLE marks ADD COLUMN freezes INTEGER NOT NULL DEFAULT 0`,
	`CREATE INDEX lineage ON objects(volume) WHERE volume <> ''`,
	// Volumes did not record the generation that they descend from.
	`UPDATE objects SET (golden, generation) = (SELECT g.golden, g.generation FROM objects g WHERE g.id = objects.origin_id)
		WHERE kind = 'volume' AND origin_id IN (SELECT id FROM objects WHERE kind = 'generation')`,
}}

// upgrade brings an older catalogue to this version, in one durable transaction.
func (c *Catalog) upgrade(ctx context.Context, from int) error {
	return c.Update(ctx, Durable, func(tx *Tx) error {
		// Another process may have been faster.
		if err := tx.row(`PRAGMA user_version`).Scan(&from); err != nil {
			return wrap("upgrade catalogue", c.path, err)
		}
		for v := from; v < Version; v++ {
			for _, stmt := range upgrades[v-1] {
				if _, err := tx.exec(stmt); err != nil {
					return err
				}
			}
		}
		_, err := tx.exec(fmt.Sprintf(`PRAGMA user_version = %d`, Version))
		return err
	})
}
