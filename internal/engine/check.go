package engine

import (
	"context"
	"io"
	"os"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/check"
	"pando/internal/engine/ledger"
	"pando/internal/engine/pool"
	"pando/internal/linux/run"
)

// opFsck is the operation of marks on objects that a check copies or repairs.
const opFsck = ledger.OpFsck

var lookProgram = run.Look // tests hide programs

// Fsck checks the pool in dir, and repairs it if q says so: see [check.Run]. NotFound, Permission, Damaged
// (pool.json), TooNew.
func Fsck(ctx context.Context, dir string, q check.Request, drivers Drivers) (_ *check.Report, err error) {
	e, err := Open(ctx, dir, drivers)
	if err != nil {
		p, perr := pool.Open(ctx, dir)
		if !errs.Is(err, errs.Damaged) || perr != nil {
			return nil, err
		}
		return check.Unreadable(p, err), nil
	}

	defer e.Close()
	ctx, end := e.ledger.Begin(ctx, opFsck)
	defer end(&err)

	if err := e.needRoot(opFsck, dir); err != nil {
		return nil, err
	}

	return check.Run(ctx, check.Pool{
		Pool: e.pool, Catalog: e.cat, Driver: e.drv, Ledger: e.ledger,
		Content: e.content, Verbs: repairs{work{e}}, Look: lookProgram,
	}, q)
}

// Rebuild recreates the catalogue of the pool in dir: see [check.Rebuild]. NotFound, Permission, InUse (an image is
// attached).
func Rebuild(ctx context.Context, dir string, drivers Drivers) (*check.Rebuilt, error) {
	p, err := pool.Open(ctx, dir)
	if err != nil {
		return nil, err
	}

	unlock, err := pool.Lock(ctx, p.Dir)
	if err != nil {
		return nil, err
	}

	defer unlock()

	d, err := openDriver(ctx, p, drivers)
	if err != nil {
		return nil, err
	}

	if c, ok := d.(io.Closer); ok {
		defer c.Close()
	}

	if d.Caps().NeedsRoot && os.Geteuid() != 0 {
		return nil, errs.New(errs.Permission, "rebuild", dir, "the %s driver needs root for this", d.Caps().Name).
			WithHint("run it as root")
	}

	return check.Rebuild(ctx, p, d)
}

// repairs provides the operations of an Engine that repairs need: see [check.Verbs].
type repairs struct{ work }

func (r repairs) Sweep(ctx context.Context) (removed int, err error) {
	s, err := r.e.sweep(ctx)
	if err != nil {
		return 0, err
	}
	return s.Garbage, nil
}

func (r repairs) LockGolden(ctx context.Context, name string) (unlock func(), err error) {
	unlock, _, err = r.e.lockGolden(ctx, name)
	return unlock, err
}

func (r repairs) WriteIdentity(ctx context.Context, id driver.Identity) error {
	return r.e.writeIdentity(ctx, id)
}

func (r repairs) RestoreIdentity(ctx context.Context, id driver.ObjectID) error {
	return r.e.restoreIdentity(ctx, id)
}

func (r repairs) Succeed(ctx context.Context, op string, find func(*catalog.Tx) (catalog.Row, error),
	mend func(ctx context.Context, copied driver.ObjectID) error) (before string, err error) {

	e := r.e
	s := &succession{e: e, op: op, next: e.newIdentity(ctx, driver.Volume)}
	if err := s.claim(ctx, func(tx *catalog.Tx) (vol, origin catalog.Row, err error) {
		vol, err = find(tx)
		return vol, vol, err
	}); err != nil {
		return "", err
	}

	// The repaired volume keeps its origin.
	s.next.Origin, s.next.OriginID = s.vol.Origin, s.vol.OriginID
	s.next.Golden, s.next.Generation = s.vol.Golden, s.vol.Generation
	err = e.drv.Clone(ctx, s.vol.ID, s.draft())
	if err == nil {
		err = mend(ctx, s.next.ID)
	}
	if err == nil {
		err = s.commit(ctx)
	}
	if err != nil {
		s.giveUp(ctx)
		return "", errs.Wrap(op, s.vol.Name, err)
	}

	return s.next.Before, nil
}
