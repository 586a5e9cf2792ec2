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

// waitLimit is how long a command waits for another that is at work on the same thing, before it says so and gives
// up.
const waitLimit = 15 * time.Second

// Check looks at the catalogue in the transaction that claims, and says what to mark. It may run several times.
type Check func(*catalog.Tx) ([]catalog.Mark, error)

// Claim writes marks in one soft transaction after check has looked at what is there. Marks of other living
// operations on the same objects or names make it wait, for up to 15 seconds, and so do marks on what is to be read;
// marks of dead ones it cleans up. readers: those who read the objects are in the way too. InUse, and the errors of
// check.
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

	blocking []catalog.Mark // what was in the way the last time
	done     Cleaned        // what became of those of dead operations
}

var errBlocked = errs.New(errs.InUse, "", "", "blocked")

// tryMark marks what is to be marked, and reports whether it could.
func (c *claim) tryMark(ctx context.Context) (bool, error) {
	for {
		err := c.cat.Update(ctx, catalog.Soft, c.markUnlessBlocked)
		if err != errBlocked {
			return err == nil, err
		}

		// Those of dead operations are in nobody's way, once they are cleaned up.
		if c.done, err = c.CleanUp(ctx, c.blocking); err != nil {
			return false, err
		}

		if c.done.Marks > 0 {
			continue
		}

		// What is not in use does not change by waiting.
		if err := c.cleanUpError(ctx); err != nil && !errs.Is(err, errs.InUse) {
			return false, err
		}

		return false, nil
	}
}

// markUnlessBlocked marks what check asks for, unless others are at work on it: then it notes their marks, and
// returns errBlocked.
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

// blockedError explains what was in the way.
func (c *claim) blockedError(ctx context.Context) error {
	if err := c.cleanUpError(ctx); err != nil {
		return err
	}

	b := c.blocking[0]
	who := "another pando"

	// Only a process that lives is named, as far as that can be seen from here.
	if !kernel.EarlierBoot(b.BootID, b.At) && b.Start != 0 && kernel.ProcStart(b.PID) == b.Start {
		who += fmt.Sprintf(" (pid %d)", b.PID)
	}

	return errs.New(errs.InUse, c.op, cmp.Or(b.Name, c.cat.RefOf(ctx, b.ID)), "%s is working on it: %s", who, b.Op).
		WithHint("wait until it finishes, or stop it")
}

// cleanUpError explains that what a dead operation has left is in the way, and could not be cleaned up; nil if it is
// not so.
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

// Processes are the processes that are at work under marks, each once.
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

// UnmarkFailed removes the mark of a failed operation, unless the failure has left something that only cleaning up can
// put
// right: then the mark stays for the next command, as if this process had died here.
func (l *Ledger) UnmarkFailed(ctx context.Context, id driver.ObjectID, failure error) {
	switch errs.KindOf(failure) {
	case errs.InUse, errs.Canceled, errs.Invalid, errs.NotFound, errs.Conflict:
		_ = l.Unmark(ctx, id)
	}
}

// DestroyUnfinished destroys objects that were being made and removes their marks, even if ctx has ended. Work it
// cannot finish is
// left to the next command.
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

// Held are immutable objects that nobody destroys before Release.
type Held struct {
	Rows []catalog.Row
	Refs []string

	l     *Ledger
	marks []driver.ObjectID
}

// Hold finds snapshots and generations, and keeps them from being destroyed while they are read. IDs that are "" are
// left out. NotFound, Invalid (a volume), InUse.
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
			m := catalog.Mark{ID: driver.NewID(), Op: op, Reads: id} // of nothing that will ever be
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

// Release lets them go. If that fails, the next command does.
func (h *Held) Release(ctx context.Context) { _ = h.l.Unmark(ctx, h.marks...) }
