// Package ledger keeps account of the work under way in a pool: who makes, reads or removes what, and what is left of
// operations that are no more. Its books are the marks and tombstones of the catalogue.
//
// # The protocols
//
// Create: (1) mark, softly: "this operation is making object X as NAME". (2) The driver makes X, durably. (3) One
// durable commit adds the row and takes the mark away: now NAME exists. An operation that dies before (3), or fails
// and cannot undo (2), leaves a mark of an operation that is no more (see Begin), and the next call or command
// destroys X, if X is not noted as committed: after (3), and before success is reported, it is (see NoteCommitted).
//
// Destroy: (1) mark. (2) One durable commit removes the row and leaves a tombstone: now NAME does not exist. (3) The
// driver removes X, and the tombstone is noted as reclaimed. An operation that dies before (3) leaves a tombstone,
// and the next command removes X.
//
// A power loss may take soft marks away. So the first command after a boot compares all that is in the pool with the
// catalogue.
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
	OpRun    = "run" // a program runs in the volume, which may be read meanwhile
	OpMount  = "mount"
	OpUmount = "umount"
	OpFsck   = "fsck" // with mount and umount it works also if the catalogue has lost commits
)

// Work is what the ledger needs of those who know what operations do besides what the catalogue and the driver say.
// Each can be repeated, and finds it a success that nothing is left to do.
type Work interface {
	// Thaw thaws what an operation that is no more may have left frozen while it read an object.
	Thaw(ctx context.Context, read driver.ObjectID) error

	// UndoMount takes away the mount that it may have made at m.Mountpoint of an object without a row.
	UndoMount(ctx context.Context, m catalog.Mark) error

	// Finish brings an operation on an object that has a row to the state before it or after it, and removes its
	// mark.
	Finish(ctx context.Context, m catalog.Mark, row catalog.Row) error

	// Remove makes the driver remove an object that has no name any more. ref and why are for people.
	Remove(ctx context.Context, id driver.ObjectID, ref, why string) error
}

// Ledger is the account of one pool. Its methods may be called concurrently.
type Ledger struct {
	cat  *catalog.Catalog
	drv  driver.Driver
	work Work
}

// New returns the ledger of a pool.
func New(cat *catalog.Catalog, drv driver.Driver, work Work) *Ledger {
	return &Ledger{cat: cat, drv: drv, work: work}
}

type begunKey struct{}

// Begin begins a call that marks what it works on, and must be the first thing that it does. Its marks are its own,
// and end with it: what is left of them then, as it could not be undone, the next call or command cleans up. A call
// within another is part of that.
func (l *Ledger) Begin(ctx context.Context) (_ context.Context, end func()) {
	if ctx.Value(begunKey{}) == l.cat {
		return ctx, func() {}
	}
	op := l.cat.Begin()
	return context.WithValue(op.In(ctx), begunKey{}, l.cat), op.End
}
