package engine

import (
	"cmp"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
	"pando/internal/engine/mountpoint"
	"pando/internal/linux/durable"
	"pando/internal/linux/treewalk"
	"pando/internal/tree/treecopy"

	"golang.org/x/sys/unix"
)

// An import with RemoveOld deletes its source. These steps follow when the golden
// is durable:
//
//  1. Check that DIR is still what was copied, and that nobody uses it.
//  2. Mark the removal, and record durably that DIR is being moved to ASIDE.
//  3. Rename DIR to ASIDE, and check both again.
//  4. Record durably that ASIDE is being deleted.
//  5. Delete ASIDE, then the record and the mark.
//
// A process that dies between steps 2 and 4 leaves a mark, and the next command
// renames ASIDE back to DIR (putBackOld). After step 4 the record stays, without a
// live mark: gc, and the next import with RemoveOld, delete the rest. With Replace,
// the exchange has already moved DIR to ASIDE, and the removal begins with step 4.

const opRemoveOld = "remove-old"

// checkRemoveOld refuses a source that cannot be removed before any work is done.
func (e *Engine) checkRemoveOld(ctx context.Context, q *ImportRequest, src *source) error {
	if src.kind != "directory" {
		return errs.New(errs.Invalid, opRemoveOld, q.Source, "only a directory can be removed after the import").
			WithHint("remove %s", errs.Param("remove-old"))
	}

	// The removal relies on the stamp of the directory.
	q.Adopt = true
	if q.Replace {
		return nil
	}

	if err := e.resolveOwn(q, src); err != nil {
		return err
	}

	if err := e.checkMovable(src.path, "remove-old"); err != nil {
		return err
	}

	return e.checkUnused(ctx, src.path, "remove-old")
}

// removeOld deletes the directory that was imported: its old content, if a volume has replaced it. On error the
// generation stays, and the directory is unchanged or recorded for deletion. InUse, Conflict (it has changed).
func (e *Engine) removeOld(ctx context.Context, q ImportRequest, src *source, out *Imported) error {
	golden := ref.Generation(out.Golden, out.Generation)
	dir := cmp.Or(out.Aside, src.path)
	if len(out.Warnings) > 0 {
		return errs.New(errs.Conflict, opRemoveOld, dir,
			"golden %s is ready, but the directory was not removed, because the import gave a warning: %s", golden,
			out.Warnings[0]).
			WithHint("remove it yourself if that does not matter: `rm -rf %s`", errs.ShellWord(dir))
	}

	r, err := e.moveOld(ctx, src, out)
	if err != nil {
		hint := errs.Messagef("retry with %s",
			errs.Run("golden import", errs.Param("update"), q.Name, src.path, errs.Param("remove-old")))
		if out.Aside != "" {
			hint = errs.Messagef("remove it yourself when nothing uses it: `rm -rf %s`", errs.ShellWord(dir))
		}
		if h := errs.HintIn(err); h != "" {
			hint = errs.Messagef("%s; then %s", h, hint)
		}
		return errs.New(errs.KindOf(err), opRemoveOld, dir, "golden %s is ready, but the directory was not removed: %s",
			golden, aboutDir(err, dir)).WithHint("%s", hint)
	}

	content.AtStep("old recorded")
	q.Tracker.Start("removing "+dir, src.files, 0)
	if err := e.deleteOld(ctx, r, q.Tracker); err != nil {
		return errs.New(errs.KindOf(err), opRemoveOld, r.Path,
			"golden %s is ready, but the old directory is only partly removed: %w", golden, err).
			WithHint("remove the rest with %s", errs.Run("gc"))
	}

	out.OldRemoved = dir
	return nil
}

// moveOld does steps 1 to 4. On error the directory is where it was.
func (e *Engine) moveOld(ctx context.Context, src *source, out *Imported) (r catalog.Removal, err error) {
	r.ID = driver.NewID()
	r.Path = cmp.Or(out.Aside, asidePath(src.path, r.ID))
	if out.Aside == "" {
		if err := e.checkMovable(src.path, "remove-old"); err != nil {
			return r, err
		}
	}

	from := cmp.Or(out.Aside, src.path)
	before := src.stamp
	if out.Aside != "" {
		before = src.stamp.Moved()
	}
	if err := e.checkOld(ctx, from, before, src); err != nil {
		return r, err
	}

	// Note which directory it is.
	var st unix.Stat_t
	if err := unix.Lstat(from, &st); err != nil {
		return r, errs.Wrap(opRemoveOld, from, err)
	}

	r.Ino = st.Ino
	r.Deleting = out.Aside != ""
	if err := e.ledger.Claim(ctx, opRemoveOld, false, func(*catalog.Tx) ([]catalog.Mark, error) {
		return []catalog.Mark{{ID: r.ID, Op: opRemoveOld, Mountpoint: r.Path}}, nil
	}); err != nil {
		return r, err
	}

	if err := e.recordRemoval(ctx, r); err != nil || r.Deleting {
		return r, err
	}

	// Move it, and see whether somebody was faster.
	if err := e.renameOld(src.path, r.Path); err != nil {
		return r, e.undoRemoval(ctx, r, err)
	}

	content.AtStep("old moved")
	if err := e.checkOld(ctx, r.Path, src.stamp.Moved(), src); err != nil {
		return r, e.undoRemoval(ctx, r, err)
	}

	r.Deleting = true
	if err := e.recordRemoval(ctx, r); err != nil {
		return r, err // the next command finds out which of the two is recorded
	}

	return r, nil
}

// checkOld checks that a directory is what was copied, and that nobody uses it. Conflict, InUse.
func (e *Engine) checkOld(ctx context.Context, dir string, before *treecopy.Stamp, src *source) error {
	stamp, _, err := treecopy.TakeStamp(ctx, dir, before, e.sourceOptions(src, nil))
	if err != nil {
		return err
	}

	if stamp.Changed() > 0 {
		return errs.New(errs.Conflict, opRemoveOld, dir, "it has changed since it was copied: %s",
			strings.Join(stamp.Paths(src.stamp, 5), ", ")).
			WithHint("stop the programs that write to it")
	}

	return e.checkUnused(ctx, dir, "remove-old")
}

func (e *Engine) recordRemoval(ctx context.Context, r catalog.Removal) error {
	return e.cat.Update(ctx, catalog.Durable, func(tx *catalog.Tx) error { return tx.SetRemoval(r) })
}

// renameOld renames an old directory within its parent, durably. Exists: there is something at to.
func (e *Engine) renameOld(from, to string) error {
	place, err := e.content.OpenPlace(from)
	if err != nil {
		return err
	}

	defer place.Close()
	err = unix.Renameat2(place.Fd(), place.Name(), place.Fd(), filepath.Base(to), unix.RENAME_NOREPLACE)
	if err != nil {
		return errs.Wrap(opRemoveOld, from, err)
	}

	return errs.Wrap(opRemoveOld, from, durable.SyncDir(filepath.Dir(from)))
}

// undoRemoval moves the directory back after err, and returns err. What fails is left to the next command.
func (e *Engine) undoRemoval(ctx context.Context, r catalog.Removal, err error) error {
	ctx = context.WithoutCancel(ctx)
	if e.moveBack(ctx, r) == nil {
		_ = e.forgetRemoval(ctx, r)
	}
	return err
}

// moveBack gives an old directory its name again, if it was moved.
func (e *Engine) moveBack(ctx context.Context, r catalog.Removal) error {
	err := e.renameOld(r.Path, adoptedDir(r.Path))
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil // it was never moved
	case errors.Is(err, unix.EEXIST):
		warnings.Add(ctx, "an interrupted import moved %s to %s, and now there is another: compare them",
			adoptedDir(r.Path), r.Path)
		return nil
	}
	return err
}

// forgetRemoval ends a removal.
func (e *Engine) forgetRemoval(ctx context.Context, r catalog.Removal) error {
	return e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error {
		if err := tx.ForgetRemoval(r.ID); err != nil {
			return err
		}
		return tx.Unmark(r.ID)
	})
}

// putBackOld cleans up after a removal that has died: what may be deleted stays recorded for gc, and a directory that
// was only moved gets its name again.
func (e *Engine) putBackOld(ctx context.Context, m catalog.Mark) error {
	var r catalog.Removal
	var recorded bool
	if err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		r, recorded, err = tx.Removal(m.ID)
		return err
	}); err != nil || !recorded || r.Deleting {
		return err
	}

	if err := e.moveBack(ctx, r); err != nil {
		return err
	}

	return e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error { return tx.ForgetRemoval(r.ID) })
}

// deleteOld does step 5. It deletes only the directory that was recorded.
func (e *Engine) deleteOld(ctx context.Context, r catalog.Removal, t *progress.Tracker) error {
	place, err := e.content.OpenPlace(r.Path)
	if err != nil {
		return err
	}

	defer place.Close()
	dir, err := place.OpenDir()
	if errors.Is(err, os.ErrNotExist) {
		return e.forgetRemoval(ctx, r)
	}
	if err != nil {
		return errs.Wrap(opRemoveOld, r.Path, err)
	}

	is, err := mountpoint.FileInode(dir)
	dir.Close()
	if err != nil {
		return errs.Wrap(opRemoveOld, r.Path, err)
	}

	if is.Ino != r.Ino {
		warnings.Add(ctx, "%s is not the directory that an interrupted import was removing: it stays", r.Path)
		return e.forgetRemoval(ctx, r)
	}

	path := "/proc/self/fd/" + strconv.Itoa(place.Fd()) + "/" + place.Name()
	if err := treewalk.RemoveCounted(ctx, path, func(n int64) { t.Add(n, 0) }); err != nil {
		return errs.Wrap(opRemoveOld, r.Path, err)
	}

	// The record must not be gone before the directory is.
	if err := durable.SyncDir(filepath.Dir(r.Path)); err != nil {
		return errs.Wrap(opRemoveOld, r.Path, err)
	}

	return e.forgetRemoval(context.WithoutCancel(ctx), r)
}

// finishRemovals deletes what interrupted imports have left of their old directories, and returns the names that these
// had. What it cannot delete stays recorded, with a warning.
func (e *Engine) finishRemovals(ctx context.Context, t *progress.Tracker) (dirs []string, err error) {
	var all []catalog.Removal
	if err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		all, err = tx.Removals()
		return err
	}); err != nil {
		return nil, err
	}

	for _, r := range all {
		gone, err := e.finishRemoval(ctx, r, t)
		if cerr := ctx.Err(); cerr != nil {
			return dirs, cerr
		}
		if err != nil {
			warnings.Add(ctx, "%s could not be removed: %v", r.Path, err)
		}
		if gone {
			dirs = append(dirs, adoptedDir(r.Path))
		}
	}

	return dirs, nil
}

// finishRemoval finishes one removal, unless another process works on it.
func (e *Engine) finishRemoval(ctx context.Context, r catalog.Removal, t *progress.Tracker) (gone bool, err error) {
	there := false
	err = e.ledger.ClaimNow(ctx, opRemoveOld, false, func(tx *catalog.Tx) ([]catalog.Mark, error) {
		if r, there, err = tx.Removal(r.ID); err != nil || !there {
			return nil, err
		}
		return []catalog.Mark{{ID: r.ID, Op: opRemoveOld, Mountpoint: r.Path}}, nil
	})
	if errs.Is(err, errs.InUse) {
		return false, nil
	}
	if err != nil || !there {
		return false, err
	}

	if !r.Deleting { // the mark was lost with the power
		if err := e.moveBack(ctx, r); err != nil {
			return false, err
		}
		return false, e.forgetRemoval(ctx, r)
	}

	t.Start("removing "+r.Path, 0, 0)
	err = e.deleteOld(ctx, r, t)
	return err == nil, err
}

// resumeRemoval finishes interrupted removals. If one was of this import's source, which is gone, the import had
// already made its golden: info describes it, and done is true.
func (e *Engine) resumeRemoval(ctx context.Context, q ImportRequest) (info Info, done bool, err error) {
	dirs, err := e.finishRemovals(ctx, q.Tracker)
	if err != nil {
		return Info{}, false, err
	}

	abs, err := filepath.Abs(q.Source)
	if err != nil || !slices.Contains(dirs, abs) {
		return Info{}, false, err
	}

	if _, err := os.Lstat(abs); !errors.Is(err, os.ErrNotExist) {
		return Info{}, false, nil
	}

	return e.currentGeneration(ctx, q.Name.String())
}
