package check

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/linux/kernel"
)

// checkInside checks the filesystems inside images, of all objects or those in q.Refs.
func (c *fsck) checkInside(ctx context.Context) error {
	rows, names, err := c.rowsToCheck(ctx)
	if err != nil {
		return err
	}

	// Check the images.
	var images []catalog.Row
	for _, row := range rows {
		switch {
		case !row.FS.IsImage():
			c.report.Checked.Trees++ // compareAll has opened it
		case row.FS == driver.None:
			c.report.Checked.Raw++
		default:
			images = append(images, row)
		}
	}

	found, err := c.checkImages(ctx, images, names)
	if err != nil {
		return err
	}

	if c.report.Checked.Trees > 0 {
		c.noteTrees()
	}

	// Report and repair, in order and one after the other.
	byRef := map[string]Finding{}
	for _, f := range found {
		byRef[f.ID] = *f
	}

	for _, row := range rows {
		if f, ok := byRef[string(row.ID)]; ok {
			progress.From(ctx).StartOf(progress.Repairing, f.Ref, 0, 0)
			c.addFindings(ctx, []Finding{f})
		}
	}

	return ctx.Err()
}

// rowsToCheck returns the rows of all objects or those in q.Refs, each once, and their references.
func (c *fsck) rowsToCheck(ctx context.Context) (rows []catalog.Row, names map[driver.ObjectID]string, err error) {
	names = map[driver.ObjectID]string{}
	err = c.Catalog.View(ctx, func(tx *catalog.Tx) error {
		add := func(r catalog.Row) error {
			if _, twice := names[r.ID]; !twice {
				rows = append(rows, r)
				names[r.ID] = ""
			}
			return nil
		}

		for _, r := range c.q.Refs {
			row, err := tx.Resolve(opFsck, r)
			if errs.Is(err, errs.NotFound) {
				continue // its data was missing, and it has been forgotten
			}
			if err != nil {
				return err
			}
			_ = add(row) // which cannot fail
		}

		if len(c.q.Refs) == 0 {
			if err := tx.Rows("", add); err != nil {
				return err
			}
		}

		for _, r := range rows { // not while reading rows: there is one connection
			names[r.ID] = tx.RefOf(r)
			if r.Kind == driver.Generation {
				names[r.ID] = fmt.Sprintf("%s@%d", r.Golden, r.Generation)
			}
		}

		return nil
	})
	return rows, names, err
}

// noteTrees adds a note that trees were not checked, and what checks them.
func (c *fsck) noteTrees() {
	note := "volumes are trees in a filesystem of the host, which only its own fsck can check"
	if c.Driver.Caps().Sharing {
		note = "volumes are trees in the pool's own filesystem, which checks what it reads; to read all of it: " +
			"`btrfs scrub start -B " + c.DataDir() + "`"
	}
	if _, outside := c.Driver.(driver.Spacer); outside {
		note = "volumes are datasets, and ZFS checks what it reads; to read all of it: `zpool scrub POOL`"
	}
	c.report.Notes = append(c.report.Notes, note)
}

// checkImage checks the filesystem in one image, on a copy. checked is false if it could not be checked, which is
// then a finding or a note. An error ends the whole check.
func (c *fsck) checkImage(ctx context.Context, row catalog.Row, name string) (_ *Finding, checked bool, err error) {
	scratch, f, err := c.copyToCheck(ctx, row, name)
	if scratch == "" {
		return f, false, err
	}
	defer c.Ledger.DestroyUnfinished(ctx, scratch)
	v, err := c.checkScratch(ctx, scratch, row.FS)
	if err != nil {
		return nil, false, err
	}
	return c.filesystemFinding(row, name, v), v.err == nil, nil
}

// copyToCheck makes a scratch copy of an image, which the caller destroys. If it could not, the finding, if any, says
// why. An error ends the whole check.
func (c *fsck) copyToCheck(ctx context.Context, row catalog.Row, name string) (driver.ObjectID, *Finding, error) {
	// Return if the filesystem cannot be checked.
	f := &Finding{Ref: name, ID: string(row.ID)}
	if _, err := c.Look(Checker(row.FS)); err != nil {
		return "", skippedFinding(f, err), nil
	}

	if ins, ok := c.Driver.(driver.Inspector); ok {
		cond, err := ins.Inspect(ctx, row.Identity)
		if err != nil || !cond.Data || cond.Err != nil || cond.SizeBytes < row.SizeBytes {
			return "", nil, err // found before
		}
	}

	// Mark the copy.
	scratch := c.scratchIdentity(row, name)
	err := c.Ledger.ClaimNow(ctx, opFsck, false, func(tx *catalog.Tx) ([]catalog.Mark, error) {
		if _, ok, err := tx.Object(row.ID); err != nil || !ok {
			return nil, cmp.Or(err, error(errs.New(errs.NotFound, opFsck, name, "it has just been destroyed")))
		}
		reads, err := c.readsUnlessDead(tx, row.ID)
		return []catalog.Mark{{ID: scratch.ID, Op: opFsck, Reads: reads}}, err
	})

	switch {
	case ctx.Err() != nil:
		return "", nil, ctx.Err()
	case errs.Is(err, errs.NotFound):
		return "", nil, nil
	case errs.Is(err, errs.InUse):
		f.Severity, f.Code, f.Message = sevNote, "busy", errs.Messagef("%v", err)
		return "", f, nil
	case err != nil:
		return "", nil, err
	}

	// Copy the image. Even while programs write, the copy is of one moment, as after a power loss. Journals survive that.
	if err := c.Driver.Clone(ctx, row.ID, scratch); err != nil {
		c.Ledger.DestroyUnfinished(ctx, scratch.ID)
		switch {
		case ctx.Err() != nil:
			return "", nil, ctx.Err()
		case errs.Is(err, errs.NotFound), errs.Is(err, errs.Damaged), errs.Is(err, errs.TooNew):
			return "", nil, nil // its identity is damaged, which was found before
		}
		return "", skippedFinding(f, err), nil
	}

	// Release the original.
	if err := c.Catalog.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error {
		return tx.StopReading(scratch.ID)
	}); err != nil {
		c.Ledger.DestroyUnfinished(ctx, scratch.ID)
		return "", nil, err
	}

	return scratch.ID, nil, nil
}

// scratchIdentity returns the identity of a copy to be checked.
func (c *fsck) scratchIdentity(row catalog.Row, name string) driver.Identity {
	return driver.Identity{
		ID: driver.NewID(), Kind: driver.Scratch, Origin: name, OriginID: row.ID,
		FS: row.FS, Sector: row.Sector, Ephemeral: true, CreatedAt: time.Now().UTC(), BootID: kernel.BootID(),
	}
}

// verdict is the result of checking a filesystem.
type verdict struct {
	wrong, detail string // "": nothing is wrong
	err           error  // it could not be checked
}

// checkScratch checks the filesystem in a scratch copy. It returns no error other than that of ctx.
func (c *fsck) checkScratch(ctx context.Context, scratch driver.ObjectID, fs driver.FS) (v verdict, err error) {
	v.wrong, v.detail, v.err = verifyFilesystem(ctx, c.Content, scratch, fs)
	return v, ctx.Err()
}

// filesystemFinding describes what is wrong with an image; nil if nothing is.
func (c *fsck) filesystemFinding(row catalog.Row, name string, v verdict) *Finding {
	f := &Finding{Ref: name, ID: string(row.ID)}
	switch {
	case v.err != nil:
		return skippedFinding(f, v.err)
	case v.wrong == "":
		return nil
	}

	f.Severity, f.Code, f.Message, f.Detail = sevError, "filesystem", errs.Messagef("%s", v.wrong), v.detail
	switch {
	case row.Kind == driver.Volume:
		f.Repair = errs.Messagef("repair a copy with %s, use that as the volume, and keep the damaged state as a snapshot",
			checkers[row.FS])
		f.fix = func(ctx context.Context) (string, error) { return c.fixInside(ctx, row) }
	case isBeforeFsck(row):
		f.Severity = sevNote
		f.Repair = errs.Messagef("none: it is the state before a repair; %s when it is no longer needed",
			errs.Run("destroy", name))
	default:
		f.Repair = adviceImmutable(row)
	}

	return f
}

// readsUnlessDead returns which object the mark of a check says that it reads: id, or "" if only dead processes have
// marks on id. A check without repair does not clean these up, and its mark then blocks nobody.
func (c *fsck) readsUnlessDead(tx *catalog.Tx, id driver.ObjectID) (driver.ObjectID, error) {
	marks, err := tx.BlockingMarks(id, "", false)
	if err != nil || len(marks) == 0 || c.q.Repair {
		return id, err
	}
	for _, m := range marks {
		if alive, err := c.Catalog.IsLive(m.Owner); err != nil || alive {
			return id, err
		}
	}
	return "", nil
}

// skippedFinding makes f say that something could not be checked.
func skippedFinding(f *Finding, err error) *Finding {
	f.Severity, f.Code, f.Message = sevWarning, "skipped", errs.Messagef("its filesystem could not be checked: %v", err)
	if f.Repair = errs.HintIn(err); f.Repair != "" {
		f.Repair = "by hand: " + f.Repair
	}
	return f
}

// checkers names the programs that repair filesystems.
var checkers = map[driver.FS]string{driver.Ext4: "e2fsck", driver.XFS: "xfs_repair"}

// Checker names the program that checks and repairs a filesystem.
func Checker(fs driver.FS) string { return checkers[fs] }

// fixInside replaces a volume by a copy whose filesystem has been repaired, and keeps the old state as a snapshot. It
// leaves a volume in use alone.
func (c *fsck) fixInside(ctx context.Context, row catalog.Row) (string, error) {
	find := func(tx *catalog.Tx) (catalog.Row, error) {
		vol, ok, err := tx.Object(row.ID)
		if err == nil && (!ok || vol.Kind != driver.Volume) {
			err = errs.New(errs.Conflict, opFsck, row.Name, "it has just been replaced or destroyed").
				WithHint("try again")
		}
		if err == nil {
			err = c.notMounted(tx, vol)
		}
		return vol, err
	}

	before, err := c.Verbs.Succeed(ctx, opFsck, find, func(ctx context.Context, copied driver.ObjectID) error {
		return c.repairCopy(ctx, copied, row.FS)
	})
	if err != nil {
		return "", err
	}

	return "repaired; as it was: " + row.Name + "@" + before, nil
}

// repairCopy repairs the filesystem in a copy, and makes sure that it is whole and on disk. Damaged if it cannot be
// repaired.
func (c *fsck) repairCopy(ctx context.Context, id driver.ObjectID, fs driver.FS) error {
	if fs != driver.None {
		if _, err := c.Look(Checker(fs)); err != nil {
			return err
		}

		_, _ = Replay(ctx, c.Content, id, fs) // a log that cannot be replayed is discarded below
		repair := func(path string) error { return c.runRepairProgram(ctx, fs, path) }
		if err := c.Content.WithPath(ctx, id, repair); err != nil {
			return err
		}

		wrong, detail, err := verifyFilesystem(ctx, c.Content, id, fs)
		if err != nil {
			return err
		}

		if wrong != "" {
			return errs.New(errs.Damaged, opFsck, string(id), "it is still damaged after the repair: %s: %s", wrong, detail).
				WithHint("clone it and save what can be read, or go back to a snapshot with %s", errs.Run("rewind"))
		}
	}

	return c.Content.WithPath(ctx, id, func(path string) error {
		f, err := os.Open(path)
		if err != nil {
			return errs.Wrap(opFsck, path, err)
		}
		defer f.Close()
		return errs.Wrap(opFsck, path, f.Sync())
	})
}

// runRepairProgram runs the repair program, first with the options that change least. Damaged if it gives up.
func (c *fsck) runRepairProgram(ctx context.Context, fs driver.FS, image string) error {
	tries := [][]string{{"-f", "-p", image}, {"-f", "-y", image}, {"-f", "-y", image}}
	good := 3 // bits in the exit code of e2fsck: errors were corrected
	if fs == driver.XFS {
		tries, good = [][]string{xfsRepair(image), xfsRepair(image, "-L")}, 0
	}

	var out string
	for _, args := range tries {
		stdout, stderr, code, err := runForExitCode(ctx, Checker(fs), args...)
		if err != nil {
			return err
		}
		out = stdout + stderr
		if code&^good == 0 {
			return nil
		}
	}

	return errs.New(errs.Damaged, opFsck, image, "%s gave up: %s", Checker(fs), tellingLines(out, image)).
		WithHint("clone it and save what can be read, or go back to a snapshot with %s", errs.Run("rewind"))
}
