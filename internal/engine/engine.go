// Package engine holds what Pando does: import, publish, clone, mount, destroy
// and the rest, each as one call that either happens or leaves no trace.
//
// # The protocols
//
// Create: (1) mark, softly: "this operation is making object X as NAME". (2) The
// driver makes X, durably. (3) One durable commit adds the row and takes the
// mark away: now NAME exists. Who dies before (3), or fails and cannot
// undo (2), leaves a mark of an operation that is no more (see Engine.begin), and
// the next call or command destroys X, if X is not noted as committed: after
// (3), and before success is reported, it is (see neverCommitted).
//
// Destroy: (1) mark. (2) One durable commit removes the row and leaves a
// tombstone: now NAME does not exist. (3) The driver removes X, and the
// tombstone is noted as reclaimed. Who dies before (3) leaves a tombstone, and
// the next command removes X.
//
// A power loss may take soft marks away. So the first command after a boot
// compares all that is in the pool with the catalogue (see sweep).
//
// No transaction of the catalogue is open while a driver works.
package engine

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"time"

	"pando/internal/catalog"
	"pando/internal/driver"
	"pando/internal/errs"
	"pando/internal/kernel"
	"pando/internal/pool"
	"pando/internal/waiting"
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

	shortLived bool // see ShortLived
	readOnly   bool
	tables     tablesCache
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
	case readOnly && !p.Usable():
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
	e.caps = e.drv.Caps()
	if readOnly {
		return e, nil
	}

	if r, ok := e.drv.(driver.Spacer); ok {
		p.Room = r
		if s, ok := e.drv.(driver.Syncer); ok {
			p.Hurry = s.Sync
		}
	}
	e.cat.OnCommit(e.noteCommitted)
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
		return nil, errs.New(errs.Unsupported, "open pool", p.Dir, "this pando has no driver %q (it has %s)", p.Config.Driver, drivers.names()).
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

// identity begins the identity of a new object.
func (e *Engine) identity(kind driver.Kind) driver.Identity {
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

// waitLimit is how long a command waits for another that is at work on the same
// thing, before it says so and gives up.
const waitLimit = 15 * time.Second

// claim writes marks in one soft transaction after check has looked at what is
// there. Marks of other living processes on the same objects or names make it
// wait, for up to waitLimit; marks of dead ones it cleans up. So do marks on what
// is to be read. readers: those who read the objects are in the way too.
func (e *Engine) claim(ctx context.Context, op string, readers bool, check func(*catalog.Tx) ([]catalog.Mark, error)) error {
	return e.claimWithin(ctx, waitLimit, op, readers, check)
}

// claimWithin is claim with another limit to its patience.
func (e *Engine) claimWithin(ctx context.Context, patience time.Duration, op string, readers bool, check func(*catalog.Tx) ([]catalog.Mark, error)) error {
	if err := e.cat.LostError(); err != nil && op != "umount" && op != "mount" && op != opFsck {
		return err
	}
	var blocking []catalog.Mark
	var done recovered
	try := func() (bool, error) {
		for {
			err := e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) (err error) {
				blocking, err = markUnlessBlocked(tx, readers, check)
				return err
			})
			if err != errBlocked {
				return err == nil, err
			}
			// Those of dead processes are in nobody's way, once they are cleaned up.
			if done, err = e.recoverMarks(ctx, blocking); err != nil {
				return false, err
			}
			if done.cleaned > 0 {
				continue
			}
			// What is not in use does not change by waiting.
			if err := e.stuck(ctx, op, blocking, done); err != nil && !errs.Is(err, errs.InUse) {
				return false, err
			}
			return false, nil
		}
	}
	giveUp := func() error {
		if err := e.stuck(ctx, op, blocking, done); err != nil {
			return err
		}
		return e.blockedBy(ctx, op, blocking[0])
	}
	w := waiting.Wait{
		Op: op, What: "another pando's work", Limit: max(patience, time.Nanosecond), GiveUp: giveUp,
		Holders: func() []waiting.Process { return markProcesses(blocking) },
	}
	return w.Until(ctx, try)
}

// markUnlessBlocked marks what check asks for, unless others are at work on it: then it returns their marks,
// and errBlocked.
func markUnlessBlocked(tx *catalog.Tx, readers bool, check func(*catalog.Tx) ([]catalog.Mark, error)) (blocking []catalog.Mark, err error) {
	marks, err := check(tx)
	if err != nil {
		return nil, err
	}
	for _, m := range marks {
		b, err := tx.Blocking(m.ID, m.Name, readers)
		if err != nil {
			return nil, err
		}
		blocking = append(blocking, b...)
		if m.Reads == "" {
			continue
		}
		if b, err = tx.Blocking(m.Reads, "", false); err != nil {
			return nil, err
		}
		for _, x := range b {
			// A volume in which a program runs can be read.
			if x.Op != opRun {
				blocking = append(blocking, x)
			}
		}
	}
	if len(blocking) > 0 {
		return blocking, errBlocked
	}
	for _, m := range marks {
		if err := tx.Mark(m); err != nil {
			return nil, err
		}
	}
	return nil, nil
}

// stuck explains that what a dead process has left is in the way, and could not be cleaned
// up; nil if it is not so. It has the kind of the failure, and its hint.
func (e *Engine) stuck(ctx context.Context, op string, blocking []catalog.Mark, done recovered) error {
	for _, b := range blocking {
		if err := done.failed[b.ID]; err != nil {
			return (&errs.Error{Kind: errs.KindOf(err), Op: op, Ref: cmp.Or(b.Name, e.cat.RefOf(ctx, b.ID)),
				Err: fmt.Errorf("an interrupted %s of it could not be cleaned up: %w", b.Op, err)}).
				WithHint("%s", cmp.Or(errs.HintIn(err), errs.Messagef("%s tries again", errs.Run("gc"))))
		}
	}
	return nil
}

// blockedBy explains that a process is at work on something. It names only one that lives,
// as far as that can be seen from here.
func (e *Engine) blockedBy(ctx context.Context, op string, b catalog.Mark) error {
	who := "another pando"
	if !kernel.EarlierBoot(b.BootID, b.At) && b.Start != 0 && kernel.ProcStart(b.PID) == b.Start {
		who += fmt.Sprintf(" (pid %d)", b.PID)
	}
	return errs.New(errs.InUse, op, cmp.Or(b.Name, e.cat.RefOf(ctx, b.ID)), "%s is at work on it: %s", who, b.Op).
		WithHint("wait until it is done, or end it")
}

var errBlocked = errs.New(errs.InUse, "", "", "blocked")

func (e *Engine) unmark(ctx context.Context, ids ...driver.ObjectID) error {
	return e.cat.Update(context.WithoutCancel(ctx), catalog.Soft, func(tx *catalog.Tx) error {
		for _, id := range ids {
			if err := tx.Unmark(id); err != nil {
				return err
			}
		}
		return nil
	})
}

// undo destroys objects that were being made and takes their marks away. It
// works also when ctx has ended. What it cannot do, the next command will.
func (e *Engine) undo(ctx context.Context, ids ...driver.ObjectID) {
	ctx = context.WithoutCancel(ctx)
	var done []driver.ObjectID
	for _, id := range ids {
		if e.drv.Destroy(ctx, id) == nil {
			done = append(done, id)
		}
	}
	_ = e.unmark(ctx, done...)
}

// defaultMountpoint is where a volume is mounted if nobody says otherwise.
func (e *Engine) defaultMountpoint(name string) string {
	return filepath.Join(e.pool.MountDir(), name)
}

func formatBytes(n int64) string {
	switch {
	case n >= 10<<30:
		return fmt.Sprintf("%d GiB", n>>30)
	case n >= 10<<20:
		return fmt.Sprintf("%d MiB", n>>20)
	}
	return fmt.Sprintf("%d bytes", n)
}
