package content

import (
	"context"
	"errors"
	"os"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/waiting"
	"pando/internal/engine/catalog"
	"pando/internal/linux/freeze"
	"pando/internal/linux/kernel"

	"golang.org/x/sys/unix"
)

const (
	// freezeWait is how long a command waits to freeze a volume that others have frozen. Each keeps it frozen for some
	// milliseconds, and there may be many.
	freezeWait = time.Minute

	// foreignWait is how long it waits if no pando process has frozen it.
	foreignWait = 2 * time.Second

	// extentTime is the time that a copy may take for each extent, several times what was measured.
	extentTime = 200 * time.Microsecond

	// freezeTries is how often a copy is made again whose filesystem was thawed too early.
	freezeTries = 3
)

// Freezes is the record of the operations that freeze the volume to be copied.
type Freezes interface {
	// Note records that this copy may freeze the volume from here on.
	Note(ctx context.Context) error

	// Processes returns the processes whose copies may have frozen it, for users.
	Processes(ctx context.Context) []waiting.Process

	// CleanUp thaws filesystems that dead processes may have left frozen, and reports whether another pando process, dead
	// or alive, may have frozen the volume.
	CleanUp(ctx context.Context) (ours bool, err error)
}

// lockFreeze keeps other processes from freezing the same volume: the kernel lets only one freeze a filesystem, and a
// thaw by any of them thaws it for all. The lock is a byte of one file, chosen by the ID, and ends with the process.
func (acc *Access) lockFreeze(ctx context.Context, row catalog.Row) (unlock func(), err error) {
	return acc.lockByte(ctx, byteLock{
		op: "freeze", ref: row.Name, file: "freezes", id: row.ID, what: "the right to freeze " + row.Name, limit: freezeWait})
}

// copyFrozen calls copy with a func that keeps a mounted volume frozen while it runs; root is that of its filesystem.
// It waits for others that freeze the volume. If the volume was thawed before the copy was done, the copy is made
// again, and after some tries that is Conflict. others records from here on that the volume may be frozen.
func (acc *Access) copyFrozen(
	ctx context.Context, l Live, root *os.File, others Freezes, copy func(quiet func(func() error) error) error,
) error {
	if err := others.Note(ctx); err != nil {
		return err
	}

	limit := freeze.Limit + time.Duration(l.Row.Usage.Extents)*extentTime
	quiet := func(take func() error) error {
		unlock, err := acc.lockFreeze(ctx, l.Row)
		if err != nil {
			return err
		}
		defer unlock()
		return freeze.Do(ctx, root, limit, func() error {
			AtStep("frozen")
			return take()
		})
	}

	// Copy, until neither others nor an early thaw get in the way.
	broken := 0
	foreign := time.Time{}
	w := waiting.Wait{
		Op: "freeze", Ref: l.Row.Name, What: l.Row.Name + ", which is frozen", Limit: freezeWait,
		Holders: func() []waiting.Process { return others.Processes(ctx) },
	}
	return w.Until(ctx, func() (bool, error) {
		err := copy(quiet)
		switch {
		case errors.Is(err, freeze.ErrBroken):
			broken++
			return false, errorIf(broken == freezeTries, err)
		case !errors.Is(err, freeze.ErrFrozen):
			return err == nil, err
		}

		// No live pando process has frozen it, or one just did.
		ours, err := others.CleanUp(ctx)
		if err != nil || ours {
			foreign = time.Time{}
			return false, err
		}

		if foreign.IsZero() {
			foreign = time.Now()
		}

		return false, errorIf(time.Since(foreign) > foreignWait, frozenError(l))
	})
}

// frozenError says that something other than Pando has frozen a volume.
func frozenError(l Live) error {
	return errs.New(errs.InUse, "freeze", l.Row.Name, "%w", freeze.ErrFrozen).
		WithHint("thaw it with `fsfreeze --unfreeze %s` if nothing needs it frozen; a copy can be made as it is with %s",
			l.Record.Mountpoint, errs.Param("no-freeze"))
}

func errorIf(cond bool, err error) error {
	if cond {
		return err
	}
	return nil
}

// Thaw thaws a volume that a dead process may have left frozen while it copied it, if its guard died with it. It waits
// for live processes that keep it frozen now.
func (acc *Access) Thaw(ctx context.Context, l Live) error {
	if !l.mounted() {
		return nil
	}

	unlock, err := acc.lockFreeze(ctx, l.Row)
	if err != nil {
		return err
	}

	defer unlock()

	root, release, err := acc.openMounted(ctx, l)
	if err != nil {
		return err
	}

	defer release()
	if err := kernel.Thaw(root); err != nil && !errors.Is(err, unix.EINVAL) { // not frozen
		return errs.Wrap("thaw", l.Row.Name, err)
	}

	return nil
}
