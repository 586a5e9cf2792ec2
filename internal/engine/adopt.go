package engine

import (
	"cmp"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
	"pando/internal/engine/mountpoint"
	"pando/internal/linux/durable"
	"pando/internal/linux/kernel"
	"pando/internal/linux/mount"
	"pando/internal/tree/treecopy"

	"golang.org/x/sys/unix"
)

// Adopting imports a directory that a live system is using and, with Replace,
// puts a volume of the golden in its place. These steps follow after the golden
// is published and its lock is released:
//
//  1. Mark the volume as being made, to be mounted at ASIDE, an empty directory
//     beside DIR. A process that dies before step 3 leaves what a killed clone leaves.
//  2. Clone; make ASIDE; mount the volume there.
//  3. Record the volume, durably, as mounted at ASIDE. The mark stays.
//  4. Check that DIR is still what was copied, and that nobody uses it.
//  5. Exchange DIR and ASIDE (mount.Swap). Now the volume is at DIR, and what
//     was in DIR is in ASIDE.
//  6. Record that it is mounted at DIR, and take the mark away.
//
// A process that dies between steps 3 and 6 leaves a mark, and finishAdopt learns
// from the place of the mount whether step 5 had happened. It removes only a
// volume that nobody has seen yet, and ASIDE while it is empty.

const (
	opAdopt = "adopt"

	// adoptPasses is the number of times a changing directory is copied.
	adoptPasses = 3

	// asideInfix separates the name of the directory from what makes the name of
	// ASIDE unique.
	asideInfix = ".pando-old-"

	asideIDLength = 8

	// blindWait is how long adopting waits for mount namespaces that would not see
	// the volume to end: many exist for a moment only.
	blindWait = 5 * time.Second
)

// asidePath returns where the old content of dir goes when volume id replaces it.
func asidePath(dir string, id driver.ObjectID) string {
	return dir + asideInfix + string(id[:asideIDLength])
}

// adoptedDir returns the directory that aside belongs to.
func adoptedDir(aside string) string { return aside[:max(0, len(aside)-len(asideInfix)-asideIDLength)] }

// checkAdopt refuses a source that cannot be adopted before any work is done, and
// fills in the volume's name.
func (q *importing) checkAdopt(ctx context.Context) error {
	e, src := q.e, q.src
	if !q.ReplaceVolume.IsZero() && !q.Replace {
		return errs.New(errs.Invalid, opAdopt, q.Source, "a volume name has no effect unless the directory is replaced").
			WithHint("add %s, or remove %s", errs.Param("replace"), errs.Param("as"))
	}

	if q.Replace && !q.Adopt {
		return errs.New(errs.Invalid, opAdopt, q.Source, "only an adopted directory can be replaced").
			WithHint("add %s, or remove %s", errs.Param("adopt"), errs.Param("replace"))
	}

	if !q.Adopt {
		return nil
	}

	if src.kind != SourceDirectory {
		return errs.New(errs.Invalid, opAdopt, q.Source, "not a directory").
			WithHint("remove %s to import it", errs.Param("adopt"))
	}

	if !q.Replace {
		return nil
	}

	// Nobody else may decide which directory is replaced.
	dir, err := mount.Resolve(q.Source)
	if err != nil {
		return err
	}
	if dir != src.path { // it was resolved earlier, by rules that trust everybody
		return content.MovedError(src.path)
	}

	src.resolved = true

	// Choose a name for the volume, and check that it is free.
	if q.ReplaceVolume.IsZero() {
		if q.ReplaceVolume, err = ref.ParseName(opAdopt, q.Name.String()+"-live"); err != nil { // too long
			return err
		}
	}

	if q.ReplaceVolume == q.Name {
		return errs.New(errs.Exists, opAdopt, q.Name.String(), "the golden and the volume cannot have the same name").
			WithHint("choose another name for the volume with %s", errs.Param("as"))
	}

	if err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		return tx.CheckFree(opAdopt, q.ReplaceVolume.String())
	}); err != nil {
		return err
	}

	if err := q.checkReplace(src.path); err != nil {
		return err
	}

	return checkUnused(ctx, src.path)
}

// checkReplace refuses a directory that a volume cannot replace.
func (q *importing) checkReplace(dir string) error {
	e := q.e
	if !content.CanMount() {
		return errs.New(errs.Permission, opAdopt, dir, "mounting a volume in its place needs root").
			WithHint("run it as root, or remove %s", errs.Param("replace"))
	}

	if dir == "/" {
		return errs.New(errs.Invalid, opAdopt, dir, "the root directory cannot be replaced")
	}

	if len(filepath.Base(dir))+len(asideInfix)+asideIDLength > unix.NAME_MAX {
		return errs.New(errs.Invalid, opAdopt, dir, "its name is too long to append %s for the old content",
			asideInfix)
	}

	if err := e.content.CheckOutside(opAdopt, dir); err != nil {
		return err
	}

	// The exchange renames the directory, so that must be possible.
	m, err := kernel.MountAt(unix.AT_FDCWD, dir)
	if err != nil {
		return errs.Wrap(opAdopt, dir, err)
	}

	if m.Root {
		return errs.New(errs.Invalid, opAdopt, dir, "it is a mount point, which cannot be renamed").
			WithHint("remove %s; after the import, unmount the directory and mount a clone there", errs.Param("replace"))
	}

	for _, d := range []string{dir, filepath.Dir(dir)} {
		if kernel.IsImmutable(unix.AT_FDCWD, d) {
			return errs.New(errs.Permission, opAdopt, dir,
				"%s is immutable or append-only, so the directory cannot be renamed", d).
				WithHint("run `chattr -ia %s`, or remove %s", errs.ShellWord(d), errs.Param("replace"))
		}
	}

	below, err := mount.Below(dir)
	if err != nil {
		return err
	}

	if len(below) > 0 {
		return errs.New(errs.InUse, opAdopt, dir, "%s is mounted below it", below[0]).
			WithHint("unmount it first with `umount %s`, or remove %s", errs.ShellWord(below[0]), errs.Param("replace"))
	}

	// After a crash, finishAdopt tells old from new by which directory is empty.
	full, err := hasEntries(dir)
	if err != nil {
		return errs.Wrap(opAdopt, dir, err)
	}

	if !full {
		return errs.New(errs.Invalid, opAdopt, dir, "the directory is empty: there is nothing to replace").
			WithHint("mount a volume there with %s", errs.Run("mount", "VOLUME", dir))
	}

	return nil
}

// hasEntries reports whether a directory contains anything.
func hasEntries(dir string) (bool, error) {
	f, err := os.Open(dir)
	if err != nil {
		return false, err
	}
	defer f.Close()
	names, _ := f.Readdirnames(1)
	return len(names) > 0, nil
}

// checkUnused refuses a directory that processes use: they would keep using the
// old one. The InUse error names them.
func checkUnused(ctx context.Context, dir string) error {
	users, err := content.TillLetGo(ctx, func() ([]mount.Holder, error) { return usersOf(ctx, dir) })
	if len(users) == 0 {
		// In a container there is nearly always a process that pando may not
		// examine, such as the one that started the container.
		if errs.Is(err, errs.Permission) {
			return nil
		}
		return err
	}

	return errs.New(errs.InUse, opAdopt, dir, "it is in use: %s", mount.FormatHolders(users)).
		WithHint("stop the programs that use it, which would keep using the old directory, or remove %s",
			errs.Param("replace"))
}

// usersOf finds the processes that use a directory or a bind mount of it. With an error there may be others.
func usersOf(ctx context.Context, dir string) ([]mount.Holder, error) {
	users, err := mount.TreeUsers(ctx, dir, false)
	if err == nil || errs.Is(err, errs.Permission) && len(users) == 0 {
		// A bind mount of it, in this namespace or another.
		var more []mount.Holder
		more, err = mount.Holders(ctx, mount.Query{Tree: dir})
		users = append(users, more...)
	}
	return users, err
}

// changedError adds the programs that write to a source to the error that says
// that it keeps changing.
func changedError(ctx context.Context, dir string, err error) error {
	users, _ := mount.TreeUsers(ctx, dir, true)
	if len(users) == 0 {
		return err
	}
	return errs.New(errs.KindOf(err), opAdopt, dir, "%s; programs are writing to it: %s", aboutDir(err, dir),
		mount.FormatHolders(users)).
		WithHint("stop the programs that write to it, then retry: nothing was changed")
}

// aboutDir returns the text of an error without the path of dir, which the caller
// names already. It is text and not an error so that the caller's hint is used.
func aboutDir(err error, dir string) string {
	if e, ok := err.(*errs.Error); ok && e.Ref == dir && e.Err != nil {
		return e.Err.Error()
	}
	return err.Error()
}

// copyAdopted copies an adopted directory, and copies again the directories that changed during the copy.
func (q *importing) copyAdopted(
	ctx context.Context, root *os.File, opt treecopy.Options, out *Imported,
) (treecopy.Totals, error) {
	src := q.src
	opt.Before = src.stamp
	opt.Pass = func(pass int, changed int64) {
		content.AtStep("copying again")
		progress.From(ctx).StartOf(progress.CopyingAgain, countOf(changed, "changed directory", "changed directories"), 0, 0)
	}
	r, err := treecopy.CopyStable(ctx, src.path, root, opt, adoptPasses)
	src.stamp, out.Passes, out.Changed = r.Stamp, r.Passes, r.Again
	if errs.Is(err, errs.Conflict) {
		err = changedError(ctx, src.path, err)
	}
	return r.Totals, err
}

// replacement is a volume that is about to replace a directory.
type replacement struct {
	e          *Engine
	q          *importing
	dir, aside string
	old, place *mountpoint.Place // places of dir and aside
	oldDir     mountpoint.Inode  // what is at dir
	bare       *os.File          // the directory created at aside
	from       catalog.Row       // object that the volume is cloned from
	row        catalog.Row
	att        catalog.MountRecord
	recorded   bool // whether steps 1-3 are done
}

// openPlaces opens the directory that contains dir and aside, and records which inode dir is.
func (r *replacement) openPlaces() (err error) {
	if r.old, err = r.e.content.OpenPlace(r.dir); err != nil {
		return err
	}
	r.place = r.old.Beside(filepath.Base(r.aside))
	dir, err := r.old.OpenDir()
	if err != nil {
		return errs.Wrap(opAdopt, r.dir, err)
	}
	defer dir.Close()
	r.oldDir, err = mountpoint.FileInode(dir)
	return errs.Wrap(opAdopt, r.dir, err)
}

func (r *replacement) close() {
	if r.old != nil {
		r.old.Close()
	}
	if r.bare != nil {
		_ = r.bare.Close()
	}
}

// replaceSource replaces the imported directory with a volume of the new generation. On error the directory is
// unchanged, and the generation stays. It returns InUse, Conflict (the directory has changed) or Unsupported.
func (q *importing) replaceSource(ctx context.Context, out *Imported) error {
	src := q.src
	progress.From(ctx).StartOf(progress.Replacing, src.path, 0, 0)
	done, err := q.replaceDir(ctx, out)
	if err == nil {
		return nil
	}

	// The exchange cannot be undone: the next command records it.
	if done {
		return errs.New(errs.KindOf(err), opAdopt, src.path,
			"the volume has replaced the directory, whose old content is in %s, but this could not be recorded: %w",
			out.Aside, err).
			WithHint("fix the cause; the next command finishes the operation")
	}

	kind, hint := errs.KindOf(err), errs.HintIn(err)
	again := errs.Messagef("retry with %s",
		errs.Run("golden import", errs.Param("update"), q.Name, src.path, errs.Param("adopt"), errs.Param("replace")))
	if hint != "" {
		again = errs.Messagef("%s; then %s", hint, again)
	}

	return errs.New(kind, opAdopt, src.path, "golden %s is ready, but the directory was not replaced: %s",
		ref.Generation(out.Golden, out.Generation), aboutDir(err, src.path)).
		WithHint("%s", again)
}

// replaceDir does steps 1 to 6. done reports whether the exchange (step 5) has
// happened, which can be true even with an error.
func (q *importing) replaceDir(ctx context.Context, out *Imported) (done bool, err error) {
	e, src := q.e, q.src
	r := &replacement{e: q.e, q: q, dir: src.path}
	defer r.close()

	if err := q.checkReplace(r.dir); err != nil {
		return false, err
	}

	if err := r.planReplace(ctx, out); err != nil {
		return false, err
	}

	stamp, err := r.exchange(ctx)
	if err != nil {
		r.undoReplace(ctx)
		return false, err
	}

	out.Replaced, out.Aside, out.Volume = r.dir, r.aside, r.row.Name
	mountpoint.ForgetMadeFor(r.bare) // from now on it stands for the user's directory

	// An interrupt must not keep the rest from being done.
	ctx = context.WithoutCancel(ctx)

	// Make the exchange durable before the catalogue says so.
	if err := durable.SyncDir(filepath.Dir(r.dir)); err != nil {
		return true, errs.Wrap(opAdopt, filepath.Dir(r.dir), err)
	}

	a := r.att
	a.Mountpoint, a.MadeDir = r.dir, false
	err = e.cat.Update(ctx, catalog.Durable, func(tx *catalog.Tx) error {
		if err := tx.RecordMount(a); err != nil {
			return err
		}
		return tx.Unmark(r.row.ID)
	})
	if err != nil {
		return true, err
	}

	// Programs may have written between the last check and the exchange: warn.
	if after, _, err := treecopy.TakeStamp(ctx, r.aside, stamp.Moved(), q.sourceOptions(nil)); err == nil &&
		after.Changed() > 0 {
		out.Warnings = append(out.Warnings,
			errs.Messagef("files changed during the replacement; the changes are only in the old directory: %s",
				strings.Join(after.Paths(stamp, 5), ", ")))
	}

	return true, nil
}

// planReplace reserves the name and marks the work (step 1).
func (r *replacement) planReplace(ctx context.Context, out *Imported) error {
	e, q := r.e, r.q
	from := ref.Ref{Name: out.Golden, At: itoa(out.Generation)}
	clone := cloning{e: e, op: opAdopt,
		CloneRequest: CloneRequest{From: from, Name: q.ReplaceVolume, GoldenDecides: true}}
	if err := clone.decideOverlay(ctx); err != nil {
		return err
	}

	return e.ledger.Claim(ctx, opAdopt, false, func(tx *catalog.Tx) ([]catalog.Mark, error) {
		origin, err := tx.Resolve(opAdopt, from)
		if err != nil {
			return nil, err
		}

		if err := tx.CheckFree(opAdopt, q.ReplaceVolume.String()); err != nil {
			return nil, err
		}

		r.from = origin
		if clone.Overlay {
			r.from = clone.template
		}

		now := time.Now().UTC()
		id := clone.cloneIdentity(ctx, q.ReplaceVolume.String(), origin, tx.RefOf(origin), now)
		r.row = cloneRow(e.caps, r.from, id, now)
		r.aside = asidePath(r.dir, id.ID)
		return []catalog.Mark{{ID: id.ID, Op: opAdopt, Name: id.Name, Reads: origin.ID, Mountpoint: r.aside, MadeDir: true}},
			nil
	})
}

// exchange does steps 2 to 5, and returns the directory's last stamp.
func (r *replacement) exchange(ctx context.Context) (*treecopy.Stamp, error) {
	e, q := r.e, r.q
	if err := e.drv.Clone(ctx, r.from.ID, r.row.Identity); err != nil {
		return nil, err
	}

	t, err := r.makeAside()
	if err != nil {
		return nil, err
	}

	if r.att, err = e.content.Mount(ctx, r.row, t); err != nil {
		r.att = catalog.MountRecord{}
		return nil, err
	}

	r.att.MadeDir = true
	if err := e.cat.Update(ctx, catalog.Durable, func(tx *catalog.Tx) error {
		if err := tx.PutObject(r.row); err != nil {
			return err
		}
		return tx.RecordMount(r.att)
	}); err != nil {
		return nil, err
	}

	r.recorded = true

	// Check that everybody sees the mount, that nothing has changed, and that nobody uses the directory.
	if err := r.awaitSeeing(ctx); err != nil {
		return nil, err
	}

	stamp, _, err := treecopy.TakeStamp(ctx, r.dir, q.src.stamp, q.sourceOptions(nil))
	if err != nil {
		return nil, err
	}

	if stamp.Changed() > 0 {
		return nil, changedError(ctx, r.dir, errs.New(errs.Conflict, opAdopt, r.dir,
			"it has changed since it was copied: %s", strings.Join(stamp.Paths(q.src.stamp, 5), ", ")).
			WithHint("stop the programs that write to it"))
	}

	if err := checkUnused(ctx, r.dir); err != nil {
		return nil, err
	}

	if err := ctx.Err(); err != nil {
		return nil, err
	}

	// Exchange the two directories.
	if err := mount.Swap(r.old.Parent(), r.old.Name(), r.place.Name()); err != nil {
		return nil, err
	}

	if m, ok := r.old.Mounted(); !ok || m.ID != r.att.MountID { // never seen
		return nil, errs.New(errs.Internal, opAdopt, r.dir, "the volume is not in its place after the exchange with %s",
			r.aside)
	}

	return stamp, nil
}

// makeAside creates the directory that the volume is mounted on, with the attributes
// of the one that it replaces: users see it while the volume is not mounted. It
// returns how to mount the volume there.
func (r *replacement) makeAside() (content.Target, error) {
	if err := r.openPlaces(); err != nil {
		return content.Target{}, err
	}

	dir, err := r.old.OpenDir()
	if err != nil {
		return content.Target{}, errs.Wrap(opAdopt, r.dir, err)
	}

	defer dir.Close()

	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil || mountpoint.InodeOf(&st) != r.oldDir {
		return content.Target{}, cmp.Or(errs.Wrap(opAdopt, r.dir, err), error(content.MovedError(r.dir)))
	}

	made, err := r.place.MakeDir(0o700)
	if err == nil && !made {
		err = unix.EEXIST
	}
	if err != nil {
		return content.Target{}, errs.Wrap(opAdopt, r.aside, err)
	}

	content.AtStep("aside made")
	if r.bare, err = r.place.OpenDir(); err != nil {
		return content.Target{}, errs.Wrap(opAdopt, r.aside, err)
	}

	at, err := checkFresh(r.bare)
	if err != nil {
		return content.Target{}, err
	}

	if err := r.copyBare(dir); err != nil {
		return content.Target{}, err
	}

	// The root of a golden is open to everybody; the directory may not have been.
	t := content.Target{Path: r.aside, Own: true, At: at, Prepare: func(root *os.File) error {
		return errs.Wrap(opAdopt, r.dir, unix.Fchmod(int(root.Fd()), st.Mode&0o7777))
	}}

	// Programs in the directory keep the rights they had.
	t.May, err = content.RightsIn(dir)
	return t, errs.Wrap(opAdopt, r.dir, err)
}

// copyBare gives the directory created at aside the attributes of dir, and notes what it is for.
func (r *replacement) copyBare(dir *os.File) error {
	e := r.e
	note := func() error {
		if err := mountpoint.NoteMadeFor(r.bare, r.row.ID); !errs.Is(err, errs.Unsupported) {
			return err
		}
		return nil
	}

	// Note it first, so that a command that cleans up recognizes it; and again, as dir may carry a note of its own.
	if err := note(); err != nil {
		return err
	}

	if err := treecopy.CopyAttrs("/proc/self/fd/"+itoa(int(dir.Fd())), r.bare, e.copyOptions(nil)); err != nil {
		return err
	}

	return note()
}

// checkFresh checks that this process can have created a directory a moment ago, so
// that nobody has put another in its place, and returns its inode.
func checkFresh(dir *os.File) (mountpoint.Inode, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return mountpoint.Inode{}, errs.Wrap(opAdopt, dir.Name(), err)
	}
	names, err := dir.Readdirnames(1)
	if int(st.Uid) != os.Geteuid() || st.Mode&0o7777&^unix.S_ISGID != 0o700 || len(names) > 0 || !errors.Is(err, io.EOF) {
		return mountpoint.Inode{}, content.MovedError(dir.Name())
	}
	return mountpoint.InodeOf(&st), nil
}

// awaitSeeing waits until every mount namespace that contains the directory also has
// the mount beside it. It returns InUse if some still do not after blindWait.
func (r *replacement) awaitSeeing(ctx context.Context) error {
	deadline := time.Now().Add(blindWait)
	for wait := 10 * time.Millisecond; ; wait = min(2*wait, 200*time.Millisecond) {
		blind, err := mount.Blind(ctx, r.dir, r.aside)
		if err != nil || len(blind) == 0 {
			return err
		}

		if time.Now().After(deadline) {
			return errs.New(errs.InUse, opAdopt, r.dir,
				"it would be empty in mount namespaces that do not receive new mounts: %s", mount.FormatHolders(blind)).
				WithHint("stop these programs, or run them in a mount namespace that receives mounts (MS_SLAVE)")
		}

		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
	}
}

// undoReplace undoes the steps before the exchange. Work it cannot finish is left
// to the next command.
func (r *replacement) undoReplace(ctx context.Context) {
	e := r.e
	ctx = context.WithoutCancel(ctx)
	if r.recorded {
		if !mount.IsMounted(r.aside, r.att.MountID) {
			return // recovery finds out what happened
		}
		if e.destroyRow(ctx, r.row, r.att, true, notReplaced) == nil {
			r.removeBare()
		}
		return
	}

	if r.att.ID != "" && e.content.Unmount(ctx, reasonFor(opAdopt), r.row, r.att, false) != nil {
		return
	}

	r.removeBare()
	e.ledger.DestroyUnfinished(ctx, r.row.ID)
}

// removeBare removes the directory created at aside, if it is empty.
func (r *replacement) removeBare() {
	if r.bare == nil {
		return
	}
	if made, err := mountpoint.FileInode(r.bare); err == nil {
		_ = r.place.RemoveDir(func(dir *os.File) bool { // else it stays, and can be removed as any other
			is, err := mountpoint.FileInode(dir)
			return err == nil && is == made
		})
	}
}

// notReplaced is why the volume of a replacement is destroyed.
const notReplaced = "it did not replace the directory"

// finishAdopt finishes a replacement that was interrupted after its volume was
// recorded, or undoes it if the exchange had not happened. When in doubt it keeps
// the volume: it destroys only one that provably never replaced the directory.
func (w work) finishAdopt(
	ctx context.Context, m catalog.Mark, row catalog.Row, att catalog.MountRecord, has bool,
) error {
	e := w.e
	aside := m.Mountpoint
	dir := adoptedDir(aside)
	sameBoot := has && !kernel.EarlierBoot(att.BootID, att.At)
	if sameBoot {
		if ns, err := kernel.MountNamespace(); err != nil || ns != att.MountNS {
			return errs.New(errs.InUse, "recover", row.Name,
				"an interrupted import was replacing %s in another mount namespace (%d): only a command run there can finish it",
				dir, att.MountNS)
		}
	}

	switch {
	case sameBoot && mount.IsMounted(dir, att.MountID):
		att.Mountpoint, att.MadeDir = dir, false
		return e.cat.Update(ctx, catalog.Durable, func(tx *catalog.Tx) error {
			if err := tx.RecordMount(att); err != nil {
				return err
			}
			return tx.Unmark(m.ID)
		})
	case sameBoot && mount.IsMounted(aside, att.MountID):
		return e.destroyRow(ctx, row, att, true, notReplaced)
	}

	// The volume is no longer mounted: the power failed, or the user unmounted it.
	// The old content tells: the directory was not empty when the replacement began.
	if full, err := hasEntries(dir); err == nil && full {
		if full, err := hasEntries(aside); errors.Is(err, fs.ErrNotExist) || err == nil && !full {
			return e.destroyRow(ctx, row, att, has, notReplaced)
		}
	}

	err := e.cat.Update(ctx, catalog.Durable, func(tx *catalog.Tx) error {
		if has {
			record := tx.RecordMount
			att.Mountpoint, att.MadeDir = dir, false
			if e.content.MountState(row, att) == content.NotMounted {
				record = func(a catalog.MountRecord) error { return tx.ForgetMount(a.ID) }
			}
			if err := record(att); err != nil {
				return err
			}
		}

		return tx.Unmark(m.ID)
	})
	if err == nil {
		warnings.Add(ctx, "volume %s has replaced %s but is not mounted; the old content is in %s; mount the volume with %s",
			row.Name, dir, aside, errs.Run("mount", row.Name, dir))
	}

	return err
}

// measureSource measures a directory. If the directory is adopted, it also takes a stamp.
func (q *importing) measureSource(ctx context.Context) (n treecopy.Totals, err error) {
	e, src := q.e, q.src
	progress.From(ctx).Start(progress.Counting, 0, 0)
	if q.Adopt {
		src.stamp, n, err = treecopy.TakeStamp(ctx, src.path, nil, q.sourceOptions(nil))
		return n, err
	}
	return treecopy.Measure(ctx, src.path, e.copyOptions(nil))
}
