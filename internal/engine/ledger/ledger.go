// Package ledger keeps account of the work under way in a pool: which operation makes, reads or removes which object,
// and what dead operations left behind. Its books are the marks and tombstones of the catalogue.
//
// # The protocols
//
// Create: (1) mark, softly: "this operation is making object X as NAME". (2) The driver makes X, durably. (3) One
// durable commit adds the row and removes the mark: now NAME exists. An operation that dies before step 3, or fails and
// cannot undo step 2, leaves a stale mark (see Begin). The next call or command destroys X, unless X is noted as
// committed: that happens after step 3, and before success is reported (see NoteCommitted).
//
// Destroy: (1) mark. (2) One durable commit removes the row and leaves a tombstone: now NAME does not exist. (3) The
// driver removes X, and the tombstone is set to reclaimed. An operation that dies before step 3 leaves a tombstone, and
// the next command removes X.
//
// A power loss may take soft marks away. Therefore the first command after a boot compares everything in the pool with
// the catalogue.
//
// No transaction of the catalogue is open while a driver works.
package ledger

import (
	"context"

	"pando/internal/driver"
	"pando/internal/engine/catalog"
)

// Operations of marks that mean something to the ledger itself.
const (
	OpRun    = "run" // a program runs in the volume, which may be read at the same time
	OpMount  = "mount"
	OpUmount = "umount"
	OpFsck   = "fsck" // like mount and umount, it works even if the catalogue has lost commits
)

// Work is what the ledger needs from the engine to undo or finish operations. Each method can be called again after an
// interruption, and succeeds if nothing is left to do.
type Work interface {
	// Thaw thaws the filesystem that a dead operation may have left frozen while it read an object.
	Thaw(ctx context.Context, read driver.ObjectID) error

	// UndoMount removes the mount that the operation may have made at m.Mountpoint, of an object without a row.
	UndoMount(ctx context.Context, m catalog.Mark) error

	// Finish brings an operation on an object that has a row to the state before or after it, and removes its mark.
	Finish(ctx context.Context, m catalog.Mark, row catalog.Row) error

	// Remove makes the driver remove an object that no longer has a name. ref and why are for users.
	Remove(ctx context.Context, id driver.ObjectID, ref, why string) error
}

// Ledger is the account of one pool. Its methods may be called concurrently.
type Ledger struct {
	cat  *catalog.Catalog
	drv  driver.Driver
	work Work
	open *gate
}

// New returns the ledger of a pool.
func New(cat *catalog.Catalog, drv driver.Driver, work Work) *Ledger {
	return &Ledger{cat: cat, drv: drv, work: work, open: newGate()}
}
