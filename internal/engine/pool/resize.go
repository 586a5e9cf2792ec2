package pool

import (
	"cmp"
	"context"
	"errors"
	"math"
	"os"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/freeze"
	"pando/internal/linux/fsprobe"
	"pando/internal/linux/kernel"
	"pando/internal/linux/loopdev"

	"golang.org/x/sys/unix"
)

const opResize = "pool resize"

// sizeUnit is what sizes of backing files are rounded up to, in bytes.
const sizeUnit = 1 << 20

// foreignWait is how long a resize waits if another program has frozen the pool's filesystem.
const foreignWait = 2 * time.Second

// AtStep is called between the steps of a resize, with the name of what was done last. For tests.
var AtStep = func(step string) {}

// Resized is the result of Resize.
type Resized struct {
	BeforeBytes int64 // size of the pool before
	SizeBytes   int64 // size that it has now
}

// Resize enlarges a loop-backed pool while it is in use: its file, the block device, and the filesystem on it. With
// add, size is added to the size that the pool has. A process that dies in between leaves a pool that works, of the old
// size or the new one, and the next Open records which. Durable on return, and the log of the filesystem is empty
// then: see emptyLog. It returns Unsupported if the pool is not loop-backed, Invalid if size is smaller than the pool
// or larger than its filesystem can be, NoSpace if the filesystem below has less, and InUse if another program has
// frozen the pool's filesystem, or as Lock does. Then nothing has changed.
func (p *Pool) Resize(ctx context.Context, size int64, add bool) (r Resized, err error) {
	unlock, err := Lock(ctx, p.Dir)
	if err != nil {
		return r, err
	}
	defer unlock()

	now, err := Read(p.Dir) // another process may have enlarged it
	if err != nil {
		return r, err
	}
	if now.Config.Backing == nil {
		return r, errs.New(errs.Unsupported, opResize, p.Dir,
			"the pool has no size of its own: it uses the filesystem or zpool that it is in").
			WithHint("enlarge that; the pool then has the space at once")
	}

	g, err := now.openGrowing()
	if err != nil {
		return r, err
	}
	defer g.close()

	// Check what is possible before anything changes.
	r.BeforeBytes, err = g.bytes()
	if err != nil {
		return r, err
	}
	if add {
		size += min(r.BeforeBytes, math.MaxInt64-sizeUnit-size)
	}
	asked := size
	size = (size + sizeUnit - 1) / sizeUnit * sizeUnit
	if err := g.check(r.BeforeBytes, size, asked); err != nil {
		return r, err
	}

	if size > now.Config.Backing.SizeBytes {
		err = g.run(ctx, size)
	}
	r.SizeBytes = now.Config.Backing.SizeBytes
	return r, err
}

// finishResize ends a resize of a process that died: it thaws the filesystem, empties its log, and records its size.
// It does nothing while another process resizes the pool. What it cannot do is left to the next Open.
func (p *Pool) finishResize(ctx context.Context) {
	if p.Config.Backing == nil || !p.Config.Backing.Growing || os.Geteuid() != 0 {
		return
	}

	unlock, ok := tryLock(p.Dir)
	if !ok {
		return
	}
	defer unlock()

	now, err := Read(p.Dir)
	if err != nil || now.Config.Backing == nil || !now.Config.Backing.Growing {
		return
	}
	g, err := now.openGrowing()
	if err != nil {
		return
	}
	defer g.close()

	// The guard thaws what a dead process has frozen, unless both were killed.
	if err := kernel.Thaw(g.data); err != nil && !errors.Is(err, unix.EINVAL) { // not frozen
		return
	}
	if g.settle(ctx) == nil {
		p.Config.Backing = now.Config.Backing
	}
}

// growing is a loop-backed pool that is being enlarged. The caller holds the lock.
type growing struct {
	p      *Pool
	data   *os.File // directory of the driver, on the pool's own filesystem
	file   *os.File // backing file
	device *os.File // loop device between them
	frozen bool     // the filesystem was frozen at least once
}

// openGrowing opens the file of a loop-backed pool, the filesystem on it, and the block device between them. Conflict
// if the filesystem at data/ is not the one in the file.
func (p *Pool) openGrowing() (_ *growing, err error) {
	g := &growing{p: p}
	defer func() {
		if err != nil {
			g.close()
			err = errs.Wrap(opResize, p.Dir, err)
		}
	}()

	var inData, ofFile unix.Stat_t
	if g.data, err = os.Open(p.DataDir()); err == nil {
		err = unix.Fstat(int(g.data.Fd()), &inData)
	}
	if err != nil {
		return nil, err
	}
	if g.file, err = os.OpenFile(p.BackingFile(), os.O_RDWR, 0); err == nil {
		err = unix.Fstat(int(g.file.Fd()), &ofFile)
	}
	if err != nil {
		return nil, err
	}

	b, err := loopdev.LookupNumber(inData.Dev)
	if err == nil && b.SameFile(&ofFile) {
		g.device, err = b.Hold()
		return g, err
	}
	if err != nil && !errs.Is(err, errs.NotFound) {
		return nil, err
	}
	return nil, errs.New(errs.Conflict, opResize, p.Dir, "%s is not the filesystem in %s", p.DataDir(), p.BackingFile()).
		WithHint("try again; if that does not help, another filesystem is mounted on %s: unmount it", p.DataDir())
}

func (g *growing) close() {
	for _, f := range []*os.File{g.data, g.file, g.device} {
		if f != nil {
			f.Close()
		}
	}
}

// bytes is the size of the pool: of its filesystem, which can have a little less than was asked for, or what is
// recorded.
func (g *growing) bytes() (int64, error) {
	n, err := kernel.XFSBytes(g.data)
	return max(n, g.p.Config.Backing.SizeBytes), errs.Wrap(opResize, g.p.Dir, err)
}

// check refuses a size that the pool cannot have, asked before it was rounded up. Invalid, NoSpace.
func (g *growing) check(before, size, asked int64) error {
	dir := g.p.Dir
	if size < before {
		return errs.New(errs.Invalid, opResize, dir, "the pool has %s and cannot shrink (got %s)",
			errs.FormatBytes(before), errs.FormatBytes(asked)).
			WithHint("its file is sparse: return the space that it does not use with %s", errs.Run("gc"))
	}
	if size == before {
		return nil
	}

	can, err := fsprobe.ReadGrowth(g.file)
	if err != nil {
		return errs.Wrap(opResize, dir, err)
	}
	free, err := g.p.HostFree()
	if err != nil {
		return err
	}

	var refused *errs.Error
	switch {
	case size > can.LimitBytes:
		refused = errs.New(errs.Invalid, opResize, dir, "a size of %s is too large: at most %s, the most that its "+
			"filesystem can grow to", errs.FormatBytes(size), errs.FormatBytes(can.LimitBytes))
	case size-before > free:
		refused = errs.New(errs.NoSpace, opResize, dir, "needs %s more, but its disk has only %s free",
			errs.FormatBytes(size-before), errs.FormatBytes(free))
	default:
		return nil
	}

	largest, text := errs.TypedSize(min(can.LimitBytes, before+free))
	if largest <= before {
		return refused.WithHint("free space on the filesystem below the pool, or return some to it with %s", errs.Run("gc"))
	}
	return refused.WithHint("use at most %s", errs.Run(opResize, text))
}

// run enlarges the pool to size bytes, in an order in which nothing is ever larger than what it lies on, and what is
// recorded is never larger than the filesystem. It never makes anything smaller: if growing fails, the end of the file
// is a hole that nothing uses, and the next resize uses it.
func (g *growing) run(ctx context.Context, size int64) error {
	// Record it before the filesystem is frozen for the first time, so that the next Open finishes it.
	if err := g.record(true); err != nil {
		return err
	}
	if err := g.emptyLog(ctx); err != nil {
		// If another program has frozen it, the next Open must not thaw it.
		if !g.frozen {
			err = cmp.Or(g.record(false), err)
		}
		return err
	}

	AtStep("emptied")
	err := g.grow(size)
	AtStep("grown")

	// Even on error: the filesystem may have grown.
	if serr := g.settle(context.WithoutCancel(ctx)); err == nil {
		err = serr
	}
	return errs.Wrap(opResize, g.p.Dir, err)
}

// grow makes the file, the device and the filesystem at least size bytes large.
func (g *growing) grow(size int64) error {
	st, err := g.file.Stat()
	if err == nil && st.Size() < size {
		err = g.file.Truncate(size)
	}
	if err == nil {
		err = g.file.Sync()
	}
	if err != nil {
		return err
	}

	if err := unix.IoctlSetInt(int(g.device.Fd()), unix.LOOP_SET_CAPACITY, 0); err != nil {
		return os.NewSyscallError("LOOP_SET_CAPACITY", err)
	}
	return kernel.GrowXFS(g.data, size)
}

// settle empties the log of the filesystem and records the size that it has.
func (g *growing) settle(ctx context.Context) error {
	if err := g.emptyLog(ctx); err != nil {
		return err
	}

	n, err := kernel.XFSBytes(g.data)
	if err != nil {
		return errs.Wrap(opResize, g.p.Dir, err)
	}
	g.p.Config.Backing.SizeBytes = n
	return g.record(false)
}

// record records the size of the pool, and whether it is being enlarged. Durable.
func (g *growing) record(growing bool) error {
	g.p.Config.Backing.Growing = growing
	return errs.Wrap(opResize, g.p.Dir, g.p.writeConfig())
}

// emptyLog writes everything that is in the log of the pool's filesystem to its place, by freezing it for a moment.
// Else the log could contain, after a power loss, what lies beyond the size that the superblock on disk still says,
// which XFS does not replay: synced data of all volumes would be lost. InUse: another program has frozen it.
func (g *growing) emptyLog(ctx context.Context) error {
	for deadline := time.Now().Add(foreignWait); ; {
		empty := false
		err := freeze.Do(ctx, g.data, 0, func() error {
			empty, g.frozen = true, true
			AtStep("frozen")
			return nil
		})
		switch {
		case empty && errors.Is(err, freeze.ErrBroken):
			return nil // it was thawed early, but its log was empty
		case !errors.Is(err, freeze.ErrFrozen):
			return errs.Wrap(opResize, g.p.Dir, err)
		case time.Now().After(deadline):
			return errs.New(errs.InUse, opResize, g.p.Dir, "another process has frozen the pool's filesystem").
				WithHint("thaw it with `fsfreeze --unfreeze %s` if nothing needs it frozen, and try again", g.p.DataDir())
		}

		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
}
