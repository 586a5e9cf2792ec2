package engine

import (
	"context"
	"os"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
	"pando/internal/tree/treediff"

	"golang.org/x/sys/unix"
)

// RebaseRequest says which volume to move to which generation of its golden.
type RebaseRequest struct {
	Volume ref.Name
	Onto   ref.Ref // generation to rebase onto, as GOLDEN or GOLDEN@N
	Ours   bool    // keep the volume's version of paths changed on both sides
	Theirs bool    // keep the golden's version of paths changed on both sides
}

// RebaseConflict is a path that both the volume and its golden have changed.
type RebaseConflict struct {
	Path   Path   `json:"path"`   // path that both have changed
	Mine   string `json:"mine"`   // change in the volume, in words
	Theirs string `json:"theirs"` // change in the golden, in words
}

// Conflicts are what keeps a rebase from being done.
type Conflicts struct {
	Conflicts []RebaseConflict `json:"conflicts"` // paths that both sides have changed
}

// Rebased is the result of Rebase. Its JSON form is stable.
type Rebased struct {
	api.Object
	// reference to the generation that the volume was based on before
	Base string `json:"base_before,omitempty"`
	// reference to the snapshot with the previous content; absent: nothing had to be done
	Before    string           `json:"before,omitempty"`
	Stat      DiffStat         `json:"stat"`      // numbers of the volume's own changes that were kept
	Conflicts []RebaseConflict `json:"conflicts"` // paths that both sides have changed
}

// Rebase replaces a volume with a clone of another generation of its golden, and
// reapplies the volume's own changes. Paths that both sides have changed in different
// ways are conflicts: unless Ours or Theirs is set, nothing is changed then, and Rebase
// returns the conflicts with the error. The previous state stays as a snapshot. Either
// all of it happens or nothing. NotFound (even if only the volume's base has been
// removed), Invalid (not a generation of the volume's golden), Conflict, InUse (it is
// mounted), Unsupported (a raw volume), NoSpace.
func (e *Engine) Rebase(ctx context.Context, q RebaseRequest) (_ Rebased, err error) {
	ctx, end := e.ledger.Begin(ctx, opRebase)
	defer end(&err)

	out, name := Rebased{Conflicts: []RebaseConflict{}}, q.Volume.String()
	if q.Ours && q.Theirs {
		return out, errs.New(errs.Invalid, opRebase, name, "the volume's and the golden's version cannot both be kept").
			WithHint("use only one of %s and %s", errs.Param("ours"), errs.Param("theirs"))
	}

	if err := e.needRoot(opRebase, name); err != nil {
		return out, err
	}

	if err := e.pool.Admit(ctx, opRebase, name, 0); err != nil {
		return out, err
	}

	// Mark the work. There is none if the volume already has this base.
	r := &rebase{e: e, q: q, s: &succession{e: e, op: opRebase, next: e.newIdentity(ctx, driver.Volume)}}
	err = r.s.claim(ctx, func(tx *catalog.Tx) (catalog.Row, catalog.Row, error) {
		err := r.findVolume(tx)
		return r.vol, r.target, err
	})
	if err != nil {
		return out, err
	}

	out.Base = ref.Generation(r.base.Golden, r.base.Generation)
	if r.base.ID == r.target.ID {
		out.Object = volumeOf(r.vol, e.caps.Name, "")
		return out, e.ledger.Unmark(ctx, r.vol.ID, r.s.next.ID)
	}

	if err := r.reapplyChanges(ctx, &out); err != nil {
		r.s.giveUp(ctx)
		return out, r.explainFailure(err)
	}

	out.Object = volumeOf(r.s.row, e.caps.Name, "")
	out.Before = name + "@" + r.s.next.Before
	return out, nil
}

// rebase is the state of one Rebase.
type rebase struct {
	e                 *Engine
	q                 RebaseRequest
	s                 *succession
	vol, base, target catalog.Row
	from              catalog.Row // the object that the successor is cloned from: target, or the template of an overlay
}

// findVolume finds the volume and both generations.
func (r *rebase) findVolume(tx *catalog.Tx) (err error) {
	if r.vol, err = tx.ResolveVolume(opRebase, r.q.Volume.String()); err != nil {
		return err
	}

	l, err := r.e.content.FindLive(tx, r.vol, FreezeIfNeeded)
	if err != nil {
		return err
	}

	if l.InUse() {
		return errs.New(errs.InUse, opRebase, r.q.Volume.String(), "the volume is mounted at %s", l.Record.Mountpoint).
			WithHint("unmount it first with %s", errs.Run("umount", r.q.Volume.String()))
	}

	if r.target, err = tx.Resolve(opRebase, r.q.Onto); err != nil {
		return err
	}

	name := r.q.Volume.String()
	switch {
	case r.target.Kind != driver.Generation:
		return errs.New(errs.Invalid, opRebase, name, "%s is not a golden", r.q.Onto).
			WithHint("name a golden, or one of its generations as GOLDEN@N")
	case r.vol.Golden == "":
		return errs.New(errs.Invalid, opRebase, name, "the volume was not cloned from a golden").
			WithHint("check its origin with %s", errs.Run("show", name))
	case r.vol.Golden != r.target.Golden:
		return errs.New(errs.Invalid, opRebase, name, "the volume was cloned from %s, and %s is unrelated", r.vol.Golden,
			r.q.Onto).
			WithHint("rebase it onto a generation of %s; list them with %s", r.vol.Golden, errs.Run("golden show", r.vol.Golden))
	case r.vol.FS == driver.None || r.target.FS == driver.None:
		return errs.New(errs.Unsupported, opRebase, name, "a raw volume has no files, so its changes cannot be reapplied").
			WithHint("list the differences with %s", errs.Run("diff", r.q.Onto, name))
	}

	var ok bool
	if r.base, ok, err = tx.Generation(r.vol.Golden, r.vol.Generation); err == nil && !ok {
		gone := ref.Generation(r.vol.Golden, r.vol.Generation)
		err = errs.New(errs.NotFound, opRebase, name,
			"%s, the base of the volume, has been removed, so the volume's changes cannot be determined", gone).
			WithHint("create a new volume with %s, and find what to carry over with %s", errs.Run("clone", r.q.Onto, "NEW"),
				errs.Run("diff", r.q.Onto, name))
	}

	return err
}

// reapplyChanges makes a clone of the target that has the volume's own changes, and commits it as the successor of the
// volume. It reports changes and conflicts in out.
func (r *rebase) reapplyChanges(ctx context.Context, out *Rebased) error {
	e := r.e
	v, err := e.openSides(ctx, opRebase, FreezeIfNeeded, rowRef(r.base), rowRef(r.target))
	if err != nil {
		return err
	}

	defer v.close(ctx)

	vol, err := r.addVolume(ctx, v)
	if err != nil {
		return err
	}

	// Find the changes on both sides, and resolve the conflicts.
	m, err := r.findChanges(ctx, v, vol)
	if err != nil {
		return err
	}

	for _, c := range m.Conflicts {
		out.Conflicts = append(out.Conflicts, RebaseConflict{Path(c.Path), c.Mine, c.Theirs})
	}

	changes, how, err := r.resolve(m)
	if err != nil {
		return err
	}

	// Reapply the changes in a clone of the target.
	for _, c := range changes {
		if !c.TimesOnly() {
			out.Stat.count(c)
		}
	}

	how.Progress = progress.From(ctx).Add
	progress.From(ctx).Start(progress.ReapplyingChanges, int64(len(changes)), 0)
	if err := r.chooseOrigin(ctx); err != nil {
		return err
	}

	if err := e.drv.Clone(ctx, r.from.ID, r.s.draft()); err != nil {
		return err
	}

	if r.s.next.SizeBytes > r.from.SizeBytes {
		if err := e.growInside(ctx, catalog.Row{Identity: r.s.next}); err != nil {
			return err
		}
	}

	err = v.withRoots(ctx, func(roots []*os.File) error {
		return r.inSuccessor(ctx, func(onto *os.File) error { return treediff.Apply(ctx, changes, roots[0], onto, how) })
	}, vol)
	if err != nil {
		return err
	}

	return r.s.commit(ctx)
}

// findChanges finds the changes of the volume and of the golden since the volume's base, and their conflicts.
func (r *rebase) findChanges(ctx context.Context, v *view, vol *side) (m *treediff.Merge, err error) {
	base, target := v.sides[0], v.sides[1]
	progress.From(ctx).Start(progress.FindingVolumeChanges, 0, 0)
	mine, err := v.compareSides(ctx, base, vol, true)
	if err != nil {
		return nil, err
	}

	progress.From(ctx).Start(progress.FindingGoldenChanges, 0, 0)
	theirs, err := v.compareSides(ctx, base, target, true)
	if err != nil {
		return nil, err
	}

	err = v.withRoots(ctx, func(roots []*os.File) (err error) {
		m, err = treediff.Conflicts(ctx, mine.Changes, theirs.Changes, roots[0], roots[1])
		return err
	}, vol, target)
	return m, err
}

// resolve returns the changes to reapply, and how. Conflict if there are conflicts, and neither Ours nor Theirs is set.
func (r *rebase) resolve(m *treediff.Merge) ([]treediff.Change, treediff.ApplyOptions, error) {
	changes, how, n := m.Changes, treediff.ApplyOptions{}, len(m.Conflicts)
	switch {
	case n == 0:
	case r.q.Ours:
		how.Force = true
	case r.q.Theirs:
		how.Keep = true
		changes = m.Clean()
	default:
		paths := "paths have"
		if n == 1 {
			paths = "path has"
		}
		return nil, how, errs.New(errs.Conflict, opRebase, r.q.Volume.String(),
			"%d %s been changed both in the volume and between %s and %s; nothing was changed",
			n, paths, rowRef(r.base), rowRef(r.target)).
			WithHint("keep the volume's version with %s, or the golden's with %s", errs.Param("ours"),
				errs.Param("theirs"))
	}

	return changes, how, nil
}

// rowRef returns the reference of a generation.
func rowRef(r catalog.Row) ref.Ref { return ref.Ref{Name: r.Golden, At: itoa(r.Generation)} }

// addVolume adds the volume, which only this command uses, to the view. A volume with
// an image is copied.
func (r *rebase) addVolume(ctx context.Context, v *view) (*side, error) {
	e := r.e
	s := &side{ref: r.q.Volume.Ref(), live: content.Live{Row: r.vol}, copy: e.newIdentity(ctx, driver.Scratch)}
	if !r.vol.FS.IsImage() {
		return s, nil
	}

	s.copy.Ephemeral = true
	s.copy = s.copy.WithContentOf(r.vol.Identity)
	s.copy.Origin, s.copy.OriginID = r.vol.Name, r.vol.ID
	err := e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error {
		return tx.Mark(catalog.Mark{ID: s.copy.ID, Op: opLook})
	})
	if err != nil {
		return nil, err
	}

	v.sides = append(v.sides, s)
	s.made = true
	return s, e.drv.Clone(ctx, r.vol.ID, s.copy)
}

// chooseOrigin decides what the successor is cloned from: an overlay stays one.
func (r *rebase) chooseOrigin(ctx context.Context) (err error) {
	r.from = r.target
	if !r.vol.IsOverlay() {
		return nil
	}
	if r.from, err = r.e.upperTemplate(ctx, r.target.FS, r.vol.SizeBytes); err != nil {
		return err
	}
	next := r.s.next.WithContentOf(r.from.Identity)
	next.Lower = r.target.ID
	r.s.next = next
	return nil
}

// inSuccessor calls fn with the root of the successor's files. Everything that fn has
// done is durable when inSuccessor returns, unless the volume is ephemeral.
func (r *rebase) inSuccessor(ctx context.Context, fn func(root *os.File) error) error {
	e, id := r.e, r.s.next.ID
	sync := func(root *os.File) error {
		err := fn(root)
		if err == nil && (r.s.next.FS.IsImage() || !r.s.next.Ephemeral) {
			// If a full pool keeps data from being written back, this reports an error,
			// but unmounting the filesystem does not.
			err = unix.Syncfs(int(root.Fd()))
		}
		return errs.Wrap(opRebase, r.q.Volume.String(), err)
	}

	switch {
	case r.s.next.IsOverlay():
		err := e.content.WithOverlay(ctx, r.s.draft(), false, func(o content.OverlayRoots) error { return sync(o.Merged) })
		if err != nil || r.s.next.Ephemeral || !r.s.next.FS.IsImage() {
			return err
		}
	case !r.s.next.FS.IsImage():
		return e.content.WithTree(ctx, id, false, sync)
	default:
		if err := e.content.WithImage(ctx, id, content.ImageOptions{}, sync); err != nil || r.s.next.Ephemeral {
			return err
		}
	}

	return errs.Wrap(opRebase, r.q.Volume.String(), e.syncImage(ctx, id))
}

// explainFailure adds to an error that the volume has not changed, and how to free space.
func (r *rebase) explainFailure(err error) error {
	if errs.Is(err, errs.NoSpace) {
		return errs.New(errs.NoSpace, opRebase, r.q.Volume.String(), "not enough free space; nothing was changed (%v)", err).
			WithHint("free space with %s and %s, or make the volume's generation larger", errs.Run("destroy"), errs.Run("gc"))
	}
	return errs.Wrap(opRebase, r.q.Volume.String(), err)
}
