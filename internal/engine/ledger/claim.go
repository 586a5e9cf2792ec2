package ledger

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/waiting"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/linux/kernel"
)

// waitLimit is how long a command waits for another one that works on the same object, before it gives up.
const waitLimit = 15 * time.Second

// Check reads the catalogue in the transaction that claims, and returns the marks to write. It may run several times.
type Check func(*catalog.Tx) ([]catalog.Mark, error)

// Claim writes marks in one soft transaction, after check has run in it. Marks of other live operations on the same
// objects or names make it wait for up to 15 seconds, and so do marks on objects to be read; it cleans up marks of dead
// operations. With readers, operations that only read the objects block it too. InUse, and the errors of check.
func (l *Ledger) Claim(ctx context.Context, op string, readers bool, check Check) error {
	return l.claim(ctx, waitLimit, op, readers, check)
}

// ClaimNow is Claim without waiting for others.
func (l *Ledger) ClaimNow(ctx context.Context, op string, readers bool, check Check) error {
	return l.claim(ctx, time.Nanosecond, op, readers, check)
}

func (l *Ledger) claim(ctx context.Context, patience time.Duration, op string, readers bool, check Check) error {
	if err := l.cat.LostError(); err != nil && !slices.Contains([]string{OpMount, OpUmount, OpFsck}, op) {
		return err
	}

	c := &claim{Ledger: l, op: op, readers: readers, check: check}
	w := waiting.Wait{
		Op: op, What: "another pando's work", Limit: patience,
		GiveUp:  func() error { return c.blockedError(ctx) },
		Holders: func() []waiting.Process { return Processes(c.blocking) },
	}
	return w.Until(ctx, func() (bool, error) { return c.tryMark(ctx) })
}

// claim is a claim that is being tried.
type claim struct {
	*Ledger
	op      string
	readers bool
	check   Check

	blocking []catalog.Mark // marks that blocked the last try
	done     Cleaned        // result of cleaning up those of dead operations
}

var errBlocked = errs.New(errs.InUse, "", "", "blocked")

// tryMark writes the marks that check returns, and reports whether it could.
func (c *claim) tryMark(ctx context.Context) (bool, error) {
	for {
		err := c.cat.Update(ctx, catalog.Soft, c.markUnlessBlocked)
		if err != errBlocked {
			return err == nil, err
		}

		// Marks of dead operations no longer block once they are cleaned up.
		if c.done, err = c.CleanUp(ctx, c.blocking); err != nil {
			return false, err
		}

		if c.done.Marks > 0 {
			continue
		}

		// Waiting only helps against InUse.
		if err := c.cleanUpError(ctx); err != nil && !errs.Is(err, errs.InUse) {
			return false, err
		}

		// Nobody waits for a person at a shell.
		if i := slices.IndexFunc(c.blocking, func(m catalog.Mark) bool { return m.Op == OpShell }); i >= 0 {
			c.blocking = c.blocking[i:]
			return false, c.blockedError(ctx)
		}

		return false, nil
	}
}

// markUnlessBlocked writes the marks that check returns, unless other operations block them: then it keeps their marks
// in c.blocking, and returns errBlocked.
func (c *claim) markUnlessBlocked(tx *catalog.Tx) error {
	c.blocking = nil
	marks, err := c.check(tx)
	if err != nil {
		return err
	}

	for _, m := range marks {
		b, err := tx.BlockingMarks(m.ID, m.Name, c.readers)
		if err != nil {
			return err
		}

		c.blocking = append(c.blocking, b...)
		if m.Reads == "" {
			continue
		}

		if b, err = tx.BlockingMarks(m.Reads, "", false); err != nil {
			return err
		}

		for _, x := range b {
			// A volume in which a program runs can be read.
			if x.Op != OpRun {
				c.blocking = append(c.blocking, x)
			}
		}
	}

	// Write the marks.
	if len(c.blocking) > 0 {
		return errBlocked
	}

	for _, m := range marks {
		if err := tx.Mark(m); err != nil {
			return err
		}
	}

	return nil
}

// blockedError explains which operation blocks the claim.
func (c *claim) blockedError(ctx context.Context) error {
	if err := c.cleanUpError(ctx); err != nil {
		return err
	}

	b := c.blocking[0]
	who := "another pando"

	// Name only a process that is alive, as far as this host can tell.
	if !kernel.EarlierBoot(b.BootID, b.At) && b.Start != 0 && kernel.ProcStart(b.PID) == b.Start {
		who += fmt.Sprintf(" (pid %d)", b.PID)
	}

	return errs.New(errs.InUse, c.op, cmp.Or(b.Name, c.cat.RefOf(ctx, b.ID)), "%s is working on it: %s", who, b.Op).
		WithHint("wait until it finishes, or stop it")
}

// cleanUpError explains that leftovers of a dead operation block the claim and could not be cleaned up; nil if none do.
// It has the kind of the failure, and its hint.
func (c *claim) cleanUpError(ctx context.Context) error {
	for _, b := range c.blocking {
		if err := c.done.Failed[b.ID]; err != nil {
			return (&errs.Error{Kind: errs.KindOf(err), Op: c.op, Ref: cmp.Or(b.Name, c.cat.RefOf(ctx, b.ID)),
				Err: fmt.Errorf("an interrupted %s of it could not be cleaned up: %w", b.Op, err)}).
				WithHint("%s", cmp.Or(errs.HintIn(err), errs.Messagef("try again with %s", errs.Run("gc"))))
		}
	}
	return nil
}

// Processes returns the processes that own marks, each once.
func Processes(marks []catalog.Mark) (out []waiting.Process) {
	seen := map[string]bool{}
	for _, m := range marks {
		if !seen[m.Owner] {
			p := waiting.Lookup(m.PID)
			p.Op, p.Since = "pando "+m.Op, m.At
			out = append(out, p)
		}
		seen[m.Owner] = true
	}
	return out
}

// Unmark removes marks of the context's operation, even if ctx has ended. Absent is success.
func (l *Ledger) Unmark(ctx context.Context, ids ...driver.ObjectID) error {
	return l.cat.Update(context.WithoutCancel(ctx), catalog.Soft, func(tx *catalog.Tx) error {
		for _, id := range ids {
			if err := tx.Unmark(id); err != nil {
				return err
			}
		}
		return nil
	})
}

// UnmarkFailed removes the mark of a failed operation, unless the failure left something that only a clean-up can
// repair: then the mark stays for the next command, as if this process had died here.
func (l *Ledger) UnmarkFailed(ctx context.Context, id driver.ObjectID, failure error) {
	switch errs.KindOf(failure) {
	case errs.InUse, errs.Canceled, errs.Invalid, errs.NotFound, errs.Conflict:
		_ = l.Unmark(ctx, id)
	}
}

// DestroyUnfinished destroys objects that were being made and removes their marks, even if ctx has ended. Work it
// cannot finish is left to the next command.
func (l *Ledger) DestroyUnfinished(ctx context.Context, ids ...driver.ObjectID) {
	ctx = context.WithoutCancel(ctx)
	var done []driver.ObjectID
	for _, id := range ids {
		if l.drv.Destroy(ctx, id) == nil {
			done = append(done, id)
		}
	}
	_ = l.Unmark(ctx, done...)
}

// Held is a set of immutable objects that cannot be destroyed before Release.
type Held struct {
	Rows []catalog.Row
	Refs []string

	l     *Ledger
	marks []driver.ObjectID
}

// Hold finds snapshots and generations, and keeps them from being destroyed while they are read. It skips IDs that are
// "". NotFound, Invalid (a volume), InUse.
func (l *Ledger) Hold(ctx context.Context, op string, ids ...driver.ObjectID) (*Held, error) {
	h := &Held{l: l}
	err := l.Claim(ctx, op, false, func(tx *catalog.Tx) ([]catalog.Mark, error) {
		h.Rows, h.Refs, h.marks = nil, nil, nil
		var marks []catalog.Mark
		for _, id := range ids {
			if id == "" {
				continue
			}
			row, err := tx.ResolvePoint(op, id)
			if err != nil {
				return nil, err
			}
			m := catalog.Mark{ID: driver.NewID(), Op: op, Reads: id} // an ID that no object ever gets
			h.Rows, h.Refs = append(h.Rows, row), append(h.Refs, tx.RefOf(row))
			h.marks, marks = append(h.marks, m.ID), append(marks, m)
		}

		return marks, nil
	})
	if err != nil {
		return nil, err
	}

	return h, nil
}

// Release allows the objects to be destroyed again. If that fails, the next command does it.
func (h *Held) Release(ctx context.Context) { _ = h.l.Unmark(ctx, h.marks...) }
