package engine

import (
	"context"
	"errors"
	"hash/fnv"
	"os"
	"path/filepath"
	"time"

	"pando/internal/catalog"
	"pando/internal/content"
	"pando/internal/driver"
	"pando/internal/errs"
	"pando/internal/freeze"
	"pando/internal/kernel"
	"pando/internal/ledger"
	"pando/internal/waiting"

	"golang.org/x/sys/unix"
)

const (
	// freezeWait is how long a command waits to freeze a volume that others have frozen. Each of them
	// has it for some milliseconds, and there may be many.
	freezeWait = time.Minute

	// foreignWait is how long it waits if nobody of Pando's has frozen it.
	foreignWait = 2 * time.Second

	// extentTime is what a copy may take for each extent, several times what it does take.
	extentTime = 200 * time.Microsecond

	// freezeTries is how often a copy is made anew whose filesystem was thawed too early.
	freezeTries = 3
)

// lockFreeze keeps other processes from freezing the same volume: the kernel lets only one freeze a
// filesystem, and whoever thaws it thaws it for all. The lock is a byte of one file, chosen by the
// ID, and ends with the process.
func (e *Engine) lockFreeze(ctx context.Context, row catalog.Row) (unlock func(), err error) {
	path := filepath.Join(e.pool.Dir, "locks", "freezes")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, errs.Wrap("freeze", row.Name, err)
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(row.ID)) // never fails
	at := int64(h.Sum64() >> 2)
	w := waiting.Wait{
		Op: "freeze", Ref: row.Name, What: "the right to freeze " + row.Name, Limit: freezeWait,
		Holders: func() []waiting.Process { return waiting.LockHolders(path, at) },
	}
	err = w.Until(ctx, func() (bool, error) {
		l := unix.Flock_t{Type: unix.F_WRLCK, Start: at, Len: 1}
		err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &l)
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.EINTR) {
			return false, nil
		}
		return err == nil, errs.Wrap("freeze", row.Name, err)
	})
	if err != nil {
		f.Close()
		return nil, err
	}
	return func() { f.Close() }, nil
}

// copyFrozen calls copy with what freezes a mounted volume meanwhile, root being that of its filesystem. Others that
// freeze it are waited for. If it was thawed before the copy was done, the copy is made anew, and
// Conflict after some times. mark is the object whose mark says from here on that the volume may be frozen.
func (e *Engine) copyFrozen(ctx context.Context, l live, root *os.File, mark driver.ObjectID, copy func(quiet func(func() error) error) error) error {
	if err := e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error { return tx.MarkFreezes(mark) }); err != nil {
		return err
	}
	limit := freeze.Limit + time.Duration(l.row.Usage.Extents)*extentTime
	quiet := func(take func() error) error {
		unlock, err := e.lockFreeze(ctx, l.row)
		if err != nil {
			return err
		}
		defer unlock()
		return freeze.Do(ctx, root, limit, func() error {
			content.AtStep("frozen")
			return take()
		})
	}

	broken := 0
	foreign := time.Time{}
	w := waiting.Wait{
		Op: "freeze", Ref: l.row.Name, What: l.row.Name + ", which is frozen", Limit: freezeWait,
		Holders: func() []waiting.Process { return e.freezing(ctx, l.row.ID, mark) },
	}
	return w.Until(ctx, func() (bool, error) {
		err := copy(quiet)
		switch {
		case errors.Is(err, freeze.ErrBroken):
			broken++
			return false, failIf(broken == freezeTries, err)
		case !errors.Is(err, freeze.ErrFrozen):
			return err == nil, err
		}

		// Nobody of Pando's who lives has frozen it, or only now.
		ours, err := e.thawDead(ctx, l.row.ID, mark)
		if err != nil || ours {
			foreign = time.Time{}
			return false, err
		}
		if foreign.IsZero() {
			foreign = time.Now()
		}
		return false, failIf(time.Since(foreign) > foreignWait, errs.New(errs.InUse, "freeze", l.row.Name, "%w", freeze.ErrFrozen).
			WithHint("thaw it with `fsfreeze --unfreeze %s` if nothing needs it frozen, or take it as it is with %s", l.att.Mountpoint, errs.Param("no-freeze")))
	})
}

func failIf(cond bool, err error) error {
	if cond {
		return err
	}
	return nil
}

// freezeMarks are the marks of those who may have frozen a volume, but for that on the object but.
func (e *Engine) freezeMarks(ctx context.Context, volume, but driver.ObjectID) (out []catalog.Mark, err error) {
	err = e.cat.View(ctx, func(tx *catalog.Tx) error {
		marks, err := tx.Marks()
		for _, m := range marks {
			if m.Freezes && m.Reads == volume && m.ID != but {
				out = append(out, m)
			}
		}
		return err
	})
	return out, err
}

// freezing are the processes that may have frozen a volume, for people.
func (e *Engine) freezing(ctx context.Context, volume, but driver.ObjectID) []waiting.Process {
	marks, err := e.freezeMarks(ctx, volume, but)
	if err != nil {
		return nil
	}
	return ledger.Processes(marks)
}

// thawDead cleans up behind dead processes that may have left a volume frozen, and reports whether there
// are marks of such, dead or alive, besides that on the object but.
func (e *Engine) thawDead(ctx context.Context, volume, but driver.ObjectID) (ours bool, err error) {
	marks, err := e.freezeMarks(ctx, volume, but)
	if err != nil || len(marks) == 0 {
		return false, err
	}
	_, err = e.ledger.CleanUp(ctx, marks)
	return true, err
}

// thawFor thaws what a dead process may have left frozen while it copied the
// object id: its guard has died with it. Whoever has it frozen now is waited for.
func (e *Engine) thawFor(ctx context.Context, id driver.ObjectID) error {
	var l live
	err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		row, ok, err := tx.Get(id)
		if err == nil && ok {
			l, err = e.lookLive(tx, row, FreezeAlways)
		}
		return err
	})
	if err != nil || !l.mounted() {
		return err
	}
	unlock, err := e.lockFreeze(ctx, l.row)
	if err != nil {
		return err
	}
	defer unlock()

	root, release, err := e.openMounted(ctx, l)
	if err != nil {
		return err
	}
	defer release()
	if err := kernel.Thaw(root); err != nil && !errors.Is(err, unix.EINVAL) { // not frozen
		return errs.Wrap("thaw", l.row.Name, err)
	}
	return nil
}
