// Package engine holds what Pando does: import, publish, clone, mount, destroy
// and the rest, each as one call that either happens or leaves no trace.
//
// How operations are made whole or undone, whatever happens to the process, is described in package ledger.
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

// Drivers are the drivers that this program has, by name.
type Drivers map[string]driver.Opener

// Engine is an open pool. Its methods may be called concurrently: what a call keeps in
// mind is in its context (see call), and so is the list that takes its warnings (see
// [warnings.Collect]).
type Engine struct {
	pool *pool.Pool
	cat  *catalog.Catalog
	drv  driver.Driver
	caps driver.Caps

	ledger *ledger.Ledger // of the work under way

	shortLived bool // see ShortLived
	readOnly   bool
	refilled   atomic.Pointer[time.Time] // when all that refill takes was there; nil: maybe not now

	content *content.Access
}

// Option of Open.
type Option string

const (
	// ReadOnly opens for reading: nothing is mounted and nothing upgraded, and only methods that change nothing work.
	// A pool that is not mounted or has an older format, which the next command that works with it changes, is
	// Unsupported.
	ReadOnly Option = "read-only"

	// ShortLived is for a process that ends right after Close, which then leaves the catalogue's files to the kernel.
	// That saves writing its log back, which waits for the disk twice, and which some later command does for many.
	ShortLived Option = "short-lived"
)

// Open opens the pool in dir, which it mounts if need be, and nothing else: what dead processes left is cleaned up
// by Maintain. End it with Close. NotFound, Damaged, TooNew, Permission.
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

// openPool is Open of a pool that has been found.
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

	e.caps, e.content = e.drv.Caps(), content.New(p, e.drv, e.cat)
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
	if p.Config.Format < pool.Format {
		if err := e.upgradePool(ctx); err != nil {
			e.Close()
			return nil, err
		}
	}

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

// Close releases the pool, when all calls have returned, and leaves no descriptor open; but see ShortLived.
func (e *Engine) Close() {
	if e.shortLived {
		e.cat.RemoveIdleLiveFiles()
		return
	}
	if c, ok := e.drv.(io.Closer); ok {
		_ = c.Close() // of a directory that was only read
	}
	_ = e.cat.Close() // whatever was committed is in the log, or in the database
	if !e.readOnly {
		catalog.Preallocate(e.pool.Dir) // the log went with the last who had it open
	}
}

// Dir is the pool's directory.
func (e *Engine) Dir() string { return e.pool.Dir }

// PoolID is the pool's ID, the same for ever.
func (e *Engine) PoolID() string { return e.pool.Config.ID }

// Caps are those of the pool's driver.
func (e *Engine) Caps() driver.Caps { return e.caps }

// newIdentity begins the identity of a new object.
func (e *Engine) newIdentity(kind driver.Kind) driver.Identity {
	return driver.Identity{
		ID:        driver.NewID(),
		Kind:      kind,
		CreatedAt: time.Now().UTC(),
		BootID:    kernel.BootID(),
	}
}

func (e *Engine) needRoot(op, what string) error {
	if e.caps.NeedsRoot && os.Geteuid() != 0 {
		return errs.New(errs.Permission, op, what, "the %s driver needs root for this", e.caps.Name).
			WithHint("run it as root")
	}
	return nil
}
