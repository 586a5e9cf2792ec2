package ledger

import (
	"context"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/linux/kernel"
)

// A row tells that an object is in use. But a catalogue can lose rows: its log is cut or damaged, or an old copy is
// restored. So no whole object is destroyed only because it has no row, unless it is proved that it never had one:
//
//   - The driver notes beside the object that it was committed, before the operation that made it reports success
//     (driver.Committer). Within a boot, no note means no success.
//   - Where a driver cannot, the catalogue must be known to have every commit that was waited for (catalog.Continuous).
//   - After a reboot neither proves anything: the note may have been lost with the power. An object without a note is
//     kept for strayAge, so that users can recover it. Where a driver does not make notes, it stays for ever.

// strayAge is how long an object is kept that was probably being made when the host went down.
const strayAge = 7 * 24 * time.Hour

// NoteCommitted notes beside objects that they are in the catalogue. Notes that fail now are made by the first command
// after the next boot.
func NoteCommitted(d driver.Driver, ids ...driver.ObjectID) {
	c, ok := d.(driver.Committer)
	if !ok {
		return
	}
	for _, id := range ids {
		_ = c.Commit(id)
	}
}

// neverCommitted reports whether it is certain that no command ever reported success for an object that has no row and
// that a dead operation was making.
func (l *Ledger) neverCommitted(ctx context.Context, m catalog.Mark) (bool, error) {
	_, err := l.drv.Attachment(ctx, m.ID)
	if errs.Is(err, errs.NotFound) {
		return true, nil // incomplete or missing
	}
	if kernel.EarlierBoot(m.BootID, m.At) {
		return false, nil
	}

	c, ok := l.drv.(driver.Committer)
	if !ok {
		return l.cat.Continuous(), nil
	}

	was, err := c.Committed(m.ID)
	switch {
	case errs.Is(err, errs.NotFound):
		return true, nil
	case errs.Is(err, errs.Damaged), errs.Is(err, errs.TooNew):
		return false, nil
	}

	return err == nil && !was, err
}

// IsGarbage reports whether an object may be destroyed that has no row and that no operation works on. hasTombstone:
// there is a tombstone of it.
func (l *Ledger) IsGarbage(o driver.Object, hasTombstone bool) bool {
	if !o.Whole || hasTombstone || o.Identity.Kind == driver.Scratch {
		return true
	}
	if !kernel.EarlierBoot(o.Identity.BootID, o.Identity.CreatedAt) {
		return false
	}
	old := time.Since(o.Identity.CreatedAt) > strayAge
	return o.Identity.Ephemeral || l.notesCommits() && IsUnfinished(o) && old
}

// notesCommits reports whether the driver notes committed objects. If not, the age of an object without a row says
// nothing: it may have been in use for years.
func (l *Ledger) notesCommits() bool {
	_, ok := l.drv.(driver.Committer)
	return ok
}

// IsUnfinished reports whether an object without a row looks as if it was being made when the host went down.
func IsUnfinished(o driver.Object) bool {
	return !o.Committed && kernel.EarlierBoot(o.Identity.BootID, o.Identity.CreatedAt)
}

// StrayText describes an object without a row, and what will happen to it.
func (l *Ledger) StrayText(o driver.Object) errs.Message {
	what := string(o.Identity.Kind) + " " + Describe(o.Identity)
	back := errs.Messagef("%s would bring it back", errs.Run("init", errs.Param("rebuild")))
	if !IsUnfinished(o) {
		return errs.Messagef("%s is in the pool but not in the catalogue: %s", what, back)
	}

	text := errs.Messagef("%s was being made when the host went down, or the catalogue lost it: %s", what, back)
	if !l.notesCommits() {
		return text
	}

	until := o.Identity.CreatedAt.Add(strayAge).Local().Format("2006-01-02 15:04")
	return errs.Messagef("%s, until %s", text, until)
}

// Describe returns the name in the identity of an object without a row; "" if its identity has none.
func Describe(i driver.Identity) string {
	switch i.Kind {
	case driver.Generation:
		return i.Golden
	case driver.Volume, driver.Snapshot:
		return i.Name
	}
	return string(i.ID)
}
