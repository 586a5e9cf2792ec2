// Package engine implements Pando's operations: import, publish, clone, mount, destroy
// and the rest. Each is one call that either happens completely or leaves no trace.
//
// Package ledger describes how an interrupted operation is finished or undone.
package engine

import (
	"context"
	"io"
	"os"
	"slices"
	"sort"
	"strings"
	"sync/atomic"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
	"pando/internal/engine/ledger"
	"pando/internal/engine/pool"
	"pando/internal/linux/kernel"
)

// Drivers are the drivers of this program, by name.
type Drivers map[string]driver.Opener

// Engine is an open pool. Its methods may be called concurrently: the context of a call
// carries its state (see call) and the list that collects its warnings (see
// [warnings.Collect]).
type Engine struct {
	pool *pool.Pool
	cat  *catalog.Catalog
	drv  driver.Driver
	caps driver.Caps

	ledger *ledger.Ledger // account of the work under way

	shortLived bool // see ShortLived
	readOnly   bool
	refilled   atomic.Pointer[time.Time] // when the reserve was last found complete; nil: unknown

	content *content.Access
	policy  Policy // see SetPolicy
}

// Option is an option of Open.
type Option string

const (
	// ReadOnly opens the pool for reading: it mounts and upgrades nothing, and only methods that change nothing work.
	// Open returns Unsupported for a pool that is not mounted or has an older format; the next command that works
	// with the pool mounts and upgrades it.
	ReadOnly Option = "read-only"

	// ShortLived is for a process that ends right after Close: Close leaves the catalogue's files to the kernel. This
	// saves writing back the log of the catalogue, which waits for the disk twice; a later command does it for many.
	ShortLived Option = "short-lived"
)

// Open opens the pool in dir, and mounts it if necessary. It does no more: Maintain cleans up after processes that
// died. Call Close when done. NotFound, Damaged, TooNew, Permission.
func Open(ctx context.Context, dir string, drivers Drivers, options ...Option) (*Engine, error) {
	find := pool.Open
	if slices.Contains(options, ReadOnly) {
		find = func(_ context.Context, dir string) (*pool.Pool, error) { return pool.Read(dir) }
	}
	p, err := find(ctx, dir)
	if err != nil {
		return nil, err
	}
	return openPool(ctx, p, drivers, options...)
}

// openPool is Open for a pool that has been found.
func openPool(ctx context.Context, p *pool.Pool, drivers Drivers, options ...Option) (_ *Engine, err error) {
	readOnly := slices.Contains(options, ReadOnly)
	e := &Engine{pool: p, shortLived: slices.Contains(options, ShortLived), readOnly: readOnly}
	switch {
	case readOnly && !p.IsMounted():
		return nil, errs.New(errs.Unsupported, "open pool", p.Dir, "the pool is not mounted").
			WithHint("run %s: any command that works with the pool mounts it", errs.Run("ls"))
	case readOnly:
		e.cat, err = catalog.OpenReadOnly(ctx, p.Dir, p.Config.ID)
	default:
		e.cat, err = openCatalog(ctx, p)
	}
	if err != nil {
		return nil, err
	}

	if e.drv, err = openDriver(ctx, p, drivers); err != nil {
		_ = e.cat.Close()
		return nil, err
	}

	e.caps, e.content = e.drv.Caps(), content.New(p, e.drv, records{e.cat})
	e.ledger = ledger.New(e.cat, e.drv, work{e})
	if readOnly {
		return e, nil
	}

	if r, ok := e.drv.(driver.Spacer); ok {
		p.Room = r
		if s, ok := e.drv.(driver.Syncer); ok {
			p.Hurry = s.Sync
		}
	}

	e.cat.OnCommit(func(ids []driver.ObjectID) { ledger.NoteCommitted(e.drv, ids...) })
	e.cat.OnFull(e.spendReserve)
	return e, nil
}

func openDriver(ctx context.Context, p *pool.Pool, drivers Drivers) (driver.Driver, error) {
	opener, ok := drivers[p.Config.Driver]
	if !ok {
		return nil, errs.New(errs.Unsupported, "open pool", p.Dir, "this build of pando has no driver %q (it has %s)",
			p.Config.Driver,
			drivers.names()).
			WithHint("upgrade pando")
	}
	return opener(ctx, p.DataDir(), p.Config.ID, false)
}

func (d Drivers) names() string {
	var out []string
	for n := range d {
		out = append(out, n)
	}
	sort.Strings(out)
	return strings.Join(out, ", ")
}

// Shutdown closes the pool while it is used. Calls that work in it may end, all others return Canceled. When ctx ends,
// those still at work are cancelled: they undo what they have done, as if their own contexts had ended, and Shutdown
// returns Canceled when they have. What they could not undo, the next call of Maintain does, in whatever process.
//
// Shutdown waits, but cancels nothing, while somebody only reads and while a program runs (Run), and while an image is
// open or a point is held outside of an operation (Transfer.Begin): whoever began that has to end it. A call cannot
// shut down the pool that it works in, as it would wait for itself.
func (e *Engine) Shutdown(ctx context.Context) error {
	err := e.ledger.Stop(ctx)
	e.Close()
	return err
}

// Close releases the pool and closes all descriptors, unless ShortLived is set. All calls must have returned: see
// Shutdown. Repeated, it does nothing.
func (e *Engine) Close() {
	if e.shortLived {
		e.cat.RemoveIdleLiveFiles()
		return
	}
	_ = e.cat.Close() // commits are in the log or in the database already
	if c, ok := e.drv.(io.Closer); ok {
		_ = c.Close() // a directory that was only read
	}
	if !e.readOnly {
		catalog.Preallocate(e.pool.Dir) // the last process to close the log removes it
	}
}

// Dir returns the pool's directory.
func (e *Engine) Dir() string { return e.pool.Dir }

// PoolID returns the pool's ID, which never changes.
func (e *Engine) PoolID() string { return e.pool.Config.ID }

// Caps returns the capabilities of the pool's driver.
func (e *Engine) Caps() driver.Caps { return e.caps }

// newIdentity returns the identity of a new object, with a new ID, owned by who asks.
func (e *Engine) newIdentity(ctx context.Context, kind driver.Kind) driver.Identity {
	return driver.Identity{
		ID:        driver.NewID(),
		Kind:      kind,
		CreatedAt: time.Now().UTC(),
		BootID:    kernel.BootID(),
		Owner:     asker(ctx).UID,
	}
}

func (e *Engine) needRoot(op, what string) error {
	if e.caps.NeedsRoot && os.Geteuid() != 0 {
		return errs.New(errs.Permission, op, what, "the %s driver needs root for this", e.caps.Name).
			WithHint("run it as root")
	}
	return nil
}
