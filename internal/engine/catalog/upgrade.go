package catalog

import (
	"context"
	"fmt"
)

// upgrades[i] leads from version i+1 of the schema to the next. Each step may be repeated.
var upgrades []func(*Tx) error

// version is the present version of the schema, in the database's user_version.
func version() int { return 1 + len(upgrades) }

// upgrade brings an older catalogue to this version, in one durable transaction.
func (c *Catalog) upgrade(ctx context.Context) error {
	return c.Update(ctx, Durable, func(tx *Tx) error {
		// Another process may have been faster.
		var from int
		if err := tx.queryRow(`PRAGMA user_version`).Scan(&from); err != nil {
			return wrap("upgrade catalogue", c.path, err)
		}
		for v := from; v < version(); v++ {
			if err := upgrades[v-1](tx); err != nil {
				return err
			}
		}
		_, err := tx.exec(fmt.Sprintf(`PRAGMA user_version = %d`, version()))
		return err
	})
}
