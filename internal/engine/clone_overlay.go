package engine

import (
	"context"
	"fmt"
	"os"
	"slices"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
	"pando/internal/tree/treediff"

	"golang.org/x/sys/unix"
)

// An overlay holds only what differs from its lower layer, a generation: see content/overlay.go for how it is mounted.
// Its object is cloned from an empty one, the template, which is made once for each size. Empty volumes have templates,
// too.

// opTemplate is the operation of marks on a template that is being made.
const opTemplate = "template"

// overlayOrigin returns the generation that an overlay clone is made from, and the template of its upper layer.
// It returns Invalid if the reference does not name a generation, and Unsupported for a raw image, which has no files.
func (q *cloning) overlayOrigin(ctx context.Context) (template catalog.Row, err error) {
	e := q.e
	var origin catalog.Row
	if err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		origin, err = tx.Resolve(q.op, q.From)
		return err
	}); err != nil {
		return template, err
	}

	if err := q.checkOverlayOrigin(origin); err != nil {
		return template, err
	}

	if err := e.checkUpperKey(ctx, q.op, q.From.String(), origin.ID); err != nil {
		return template, err
	}

	size := origin.SizeBytes
	if q.SizeBytes > 0 {
		size = roundUp(q.SizeBytes)
	}
	return e.upperTemplate(ctx, origin.FS, size)
}

// checkUpperKey refuses an overlay on a golden with a key of its own: the upper layer has the pool's key, or none.
// Unsupported.
func (e *Engine) checkUpperKey(ctx context.Context, op, reference string, lower driver.ObjectID) error {
	k, err := e.keyOf(ctx, lower)
	if err != nil || !k.Own {
		return err
	}
	return errs.New(errs.Unsupported, op, reference,
		"the golden has an encryption key of its own (%s), under which the changes of an overlay would not be", k.Root).
		WithHint("clone the golden without %s", errs.Param("overlay"))
}

// decideOverlay decides whether clones are overlays, and finds their template. With GoldenDecides they are not where
// the pool has none.
func (q *cloning) decideOverlay(ctx context.Context) error {
	asked := q.Overlay
	if err := q.applyOverlayPolicy(ctx); err != nil || !q.Overlay {
		return err
	}

	template, err := q.overlayOrigin(ctx)
	if !asked && errs.Is(err, errs.Unsupported) {
		q.Overlay = false
		return nil
	}

	q.template = template
	return err
}

// applyOverlayPolicy applies the policy of the golden that clones are made from. It returns Invalid if that never has
// overlays.
func (q *cloning) applyOverlayPolicy(ctx context.Context) error {
	e := q.e
	if !q.Overlay && !q.GoldenDecides {
		return nil
	}

	if err := e.cat.LostError(); err != nil {
		return err // the golden may be among what was lost
	}

	return e.cat.View(ctx, func(tx *catalog.Tx) error {
		origin, err := tx.Resolve(q.op, q.From)
		if err != nil || origin.Kind != driver.Generation {
			return err
		}

		g, _, err := tx.Golden(origin.Golden)
		if err != nil {
			return err
		}

		if q.Overlay && g.Overlay == driver.OverlayNever {
			return errs.New(errs.Invalid, q.op, q.From.String(), "this golden is not for overlays").
				WithHint("remove %s, or allow them with %s", errs.Param("overlay"),
					errs.Run("golden set", g.Name, "overlay=allowed"))
		}

		q.Overlay = q.Overlay || g.Overlay == driver.OverlayDefault && q.canOverlay(origin)
		return nil
	})
}

// canOverlay reports whether this user can make overlays from an object, as far as the object decides.
func (q *cloning) canOverlay(origin catalog.Row) bool {
	return os.Geteuid() == 0 && q.checkOverlayOrigin(origin) == nil
}

// checkOverlayOrigin returns an error if no overlay can be made from an object.
func (q *cloning) checkOverlayOrigin(origin catalog.Row) error {
	switch {
	case origin.Kind != driver.Generation:
		return errs.New(errs.Invalid, q.op, q.From.String(), "an overlay needs a golden, and this is a %s",
			kindOf(origin.Kind, q.From.String())).
			WithHint("publish it first with %s, or remove %s", errs.Run("golden publish", "GOLDEN", q.From.Name),
				errs.Param("overlay"))
	case origin.FS == driver.None:
		return errs.New(errs.Unsupported, q.op, q.From.String(), "a raw golden has no files to lay changes over").
			WithHint("remove %s", errs.Param("overlay"))
	case q.SizeBytes > 0 && !origin.FS.IsImage():
		return errs.New(errs.Unsupported, q.op, q.From.String(), "%s volumes have no size of their own", origin.FS).
			WithHint("remove %s", errs.Param("size"))
	}
	return nil
}

// templateKind is what a template is for.
type templateKind string

const (
	upperLayer  templateKind = "upper layer"
	emptyVolume templateKind = "empty volume"
)

// upperTemplate returns the empty upper layer of a size for overlays on a generation with the filesystem lower.
func (e *Engine) upperTemplate(ctx context.Context, lower driver.FS, size int64) (catalog.Row, error) {
	fs := driver.Native
	if lower.IsImage() {
		fs = driver.Ext4
	}
	return e.template(ctx, upperLayer, fs, size)
}

// template returns the template of a kind and size, which it makes if there is none.
func (e *Engine) template(
	ctx context.Context, kind templateKind, fs driver.FS, size int64,
) (row catalog.Row, err error) {
	if !fs.IsImage() {
		size = 0
	}

	name := fmt.Sprintf("%s %s %d", kind, fs, size)
	var ok bool
	find := func() error {
		return e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
			row, ok, err = tx.Template(name)
			return err
		})
	}

	if err := find(); err != nil || ok {
		return row, err
	}

	// Make it, unless another process does.
	unlock, _, err := e.lockGolden(ctx, name)
	if err != nil {
		return row, err
	}

	defer unlock()

	if err := find(); err != nil || ok {
		return row, err
	}

	return e.makeTemplate(ctx, kind, name, fs, size)
}

// makeTemplate makes a template. Durable on return.
func (e *Engine) makeTemplate(
	ctx context.Context, kind templateKind, name string, fs driver.FS, size int64,
) (catalog.Row, error) {
	b := &build{e: e, op: opTemplate, scratch: e.newIdentity(ctx, driver.Scratch), gen: e.newIdentity(ctx, driver.Layer)}
	b.scratch.Ephemeral, b.scratch.FS, b.scratch.SizeBytes = true, fs, size
	b.gen.Name, b.gen.FS, b.gen.SizeBytes = name, fs, size
	b.ids = []driver.ObjectID{b.scratch.ID, b.gen.ID}
	if err := e.ledger.Claim(ctx, opTemplate, false, func(*catalog.Tx) ([]catalog.Mark, error) {
		return []catalog.Mark{{ID: b.scratch.ID, Op: opTemplate}, {ID: b.gen.ID, Op: opTemplate}}, nil
	}); err != nil {
		return catalog.Row{}, err
	}

	row, err := b.fillTemplate(ctx, kind)
	if err != nil {
		b.undoBuild(ctx)
		return row, errs.Wrap("make", name, err)
	}

	return row, nil
}

// fillTemplate makes the object of a template, and records it.
func (b *build) fillTemplate(ctx context.Context, kind templateKind) (catalog.Row, error) {
	e := b.e
	if err := e.drv.Create(ctx, b.scratch); err != nil {
		return catalog.Row{}, err
	}

	fill := func(*os.File) error { return nil }
	if kind == upperLayer {
		fill = content.MakeUpper
		if err := e.content.TryUpper(ctx, b.scratch); err != nil {
			return catalog.Row{}, err
		}
	}

	if err := e.fillTree(ctx, b.scratch, fill); err != nil {
		return catalog.Row{}, err
	}

	if err := b.makeGeneration(ctx); err != nil {
		return catalog.Row{}, err
	}

	row, err := b.measureGeneration(ctx)
	if err != nil {
		return catalog.Row{}, err
	}

	return row, e.cat.Update(ctx, catalog.Durable, func(tx *catalog.Tx) error {
		if err := tx.PutObject(row); err != nil {
			return err
		}
		for _, id := range b.ids {
			if err := tx.Unmark(id); err != nil {
				return err
			}
		}
		return nil
	})
}

// layersOf describes the layers of an overlay.
func layersOf(tx *catalog.Tx, row catalog.Row) (*api.Layers, error) {
	lower, ok, err := tx.Object(row.Lower)
	if err != nil {
		return nil, err
	}
	l := &api.Layers{LowerID: string(row.Lower), LowerRemoved: !ok || lower.Kind == driver.Layer,
		LowerBytes: lower.Usage.LogicalBytes, Options: content.OverlayOptions(row.Ephemeral)}
	if ok {
		l.Lower = tx.RefOf(lower)
	}
	return l, nil
}

// layerKept is a generation that has become a layer.
type layerKept struct {
	id      driver.ObjectID
	users   int  // overlays that need it
	written bool // its identity in the pool says so
}

// keepLayers makes those of the generations that overlays need layers, in the transaction that removes them from their
// golden, and returns the others, which are to be removed.
func keepLayers(
	tx *catalog.Tx, rows []catalog.Row, why string,
) (going []catalog.Row, kept []layerKept, err error) {
	for _, r := range rows {
		users := 0
		if r.Kind == driver.Generation {
			if users, err = tx.CountOverlays(r.ID); err != nil {
				return nil, nil, err
			}
		}
		if users == 0 {
			going = append(going, r)
			continue
		}
		if err := tx.KeepAsLayer(r, why); err != nil {
			return nil, nil, err
		}
		kept = append(kept, layerKept{id: r.ID, users: users})
	}

	return going, kept, nil
}

// reclaimLayers removes the layers that nothing needs any more since overlays were destroyed. What takes too long is
// left to the next command.
func (e *Engine) reclaimLayers(ctx context.Context, destroyed []*destroyItem) {
	lowers := map[driver.ObjectID]bool{}
	for _, it := range destroyed {
		for _, r := range it.rows() {
			if r.IsOverlay() {
				lowers[r.Lower] = true
			}
		}
	}

	if len(lowers) == 0 {
		return
	}

	var going []catalog.Tombstone
	ctx = context.WithoutCancel(ctx)
	if err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		all, err := tx.Unreclaimed(0)
		going = slices.DeleteFunc(all, func(b catalog.Tombstone) bool { return !lowers[b.ID] })
		return err
	}); err == nil {
		e.ledger.Reclaim(ctx, going)
	}
}

// publishOverlay publishes the overlay that a build reads: a clone of its golden, with its changes.
func (b *build) publishOverlay(ctx context.Context) (out Published, err error) {
	e := b.e
	vol := b.reads.Row

	// Copy the upper layer, so that the overlay can be used and changed in the meantime.
	upper, err := b.copyUpper(ctx)
	if err != nil {
		return out, err
	}

	defer e.ledger.DestroyUnfinished(context.WithoutCancel(ctx), upper.ID)
	if err := b.checkOwner(ctx); err != nil { // in case it has started since
		return out, err
	}

	b.scratch, err = e.cloneWithChanges(ctx, vol, upper, b.scratch)
	if err != nil {
		return out, err
	}

	if out.Cleaned, err = b.cleanScratch(ctx); err != nil {
		return out, err
	}

	out.Object, err = b.publishGeneration(ctx)
	return out, err
}

// cloneWithChanges makes the object id, which is no overlay: a clone of the golden under the overlay vol, with the
// changes of the upper layer upper, which nobody uses. It returns the identity, completed. An image is as large
// as the golden, or larger if the changes do not fit.
func (e *Engine) cloneWithChanges(
	ctx context.Context, vol catalog.Row, upper, id driver.Identity,
) (driver.Identity, error) {
	var lower catalog.Row
	if err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		lower, _, err = tx.Object(vol.Lower)
		return err
	}); err != nil {
		return id, err
	}

	id = id.WithContentOf(lower.Identity)
	err := e.content.WithOverlay(ctx, upper, true, func(r content.OverlayRoots) error {
		progress.From(ctx).Start(progress.FindingChanges, 0, 0)
		res, err := treediff.CompareOverlay(ctx, r.Lower, r.Upper, r.Merged,
			treediff.Options{Times: true, Progress: progress.From(ctx).Add})
		if err != nil {
			return err
		}

		// Clone the golden, with room for the changes.
		missing, err := missingRoom(r.Lower, res.Changes)
		if err != nil {
			return err
		}

		if id.FS.IsImage() {
			id.SizeBytes = roundUp(lower.SizeBytes + missing)
		}

		draft := id
		draft.Kind = driver.Scratch
		if err := e.drv.Clone(ctx, lower.ID, draft); err != nil {
			return err
		}

		if id.SizeBytes > lower.SizeBytes {
			if err := e.growInside(ctx, catalog.Row{Identity: draft}); err != nil {
				return err
			}
		}

		// Repeat the changes in it.
		progress.From(ctx).Start(progress.ApplyingChanges, int64(len(res.Changes)), 0)
		return e.inScratch(ctx, draft, func(root *os.File) error {
			return treediff.Apply(ctx, res.Changes, r.Merged, root, treediff.ApplyOptions{Progress: progress.From(ctx).Add})
		})
	})
	return id, err
}

// missingRoom returns by how many bytes a filesystem is too small for changes to it. It counts no space that changes
// free, and allows for metadata.
func missingRoom(root *os.File, changes []treediff.Change) (int64, error) {
	const eachFile, spare = 8 << 10, 4 << 20
	var need int64
	for _, c := range changes {
		need += c.ChangedBytes + eachFile
	}
	need += need/16 + spare

	var st unix.Statfs_t
	if err := unix.Fstatfs(int(root.Fd()), &st); err != nil {
		return 0, errs.Wrap("measure", root.Name(), err)
	}
	return max(0, need-int64(st.Bavail)*st.Bsize), nil
}

// replaceOverlay replaces an overlay by a volume that holds all its files: a clone of its golden, with its changes. The
// succession has been claimed.
func (s *succession) replaceOverlay(ctx context.Context, q FlattenRequest) (catalog.Row, error) {
	e := s.e
	err := func() error {
		var err error
		if s.next, err = e.cloneWithChanges(ctx, s.vol, s.vol.Identity, s.next); err != nil {
			return err
		}

		if !s.next.Ephemeral {
			if err := e.syncContent(ctx, s.next); err != nil {
				return err
			}
		}

		return s.commit(ctx)
	}()
	if err != nil {
		e.ledger.DestroyUnfinished(ctx, s.next.ID)
		_ = e.ledger.Unmark(ctx, s.vol.ID)
		return catalog.Row{}, errs.Wrap(opFlatten, q.Volume.String(), err)
	}

	s.dropPredecessor(ctx)
	return s.row, nil
}

// syncContent makes what was written to an object that is not mounted durable.
func (e *Engine) syncContent(ctx context.Context, id driver.Identity) error {
	if !id.FS.IsImage() {
		return e.content.WithTree(ctx, id.ID, false, func(root *os.File) error {
			return errs.Wrap("sync", root.Name(), unix.Syncfs(int(root.Fd())))
		})
	}

	return e.content.WithPath(ctx, id.ID, func(path string) error {
		f, err := os.Open(path)
		if err != nil {
			return errs.Wrap("sync", path, err)
		}
		defer f.Close()
		return errs.Wrap("sync", path, f.Sync())
	})
}

// copyUpper copies the upper layer of the overlay that a build reads, at one moment. The caller destroys the copy.
func (b *build) copyUpper(ctx context.Context) (driver.Identity, error) {
	e := b.e
	vol := b.reads.Row
	id := e.newIdentity(ctx, driver.Scratch).WithContentOf(vol.Identity)
	id.Ephemeral = true
	id.Origin, id.OriginID = vol.Name, vol.ID
	if err := e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error {
		return tx.Mark(catalog.Mark{ID: id.ID, Op: opLook, Reads: vol.ID}) // clean-up thaws what it reads
	}); err != nil {
		return id, err
	}

	if err := e.copyLive(ctx, b.reads, id, false); err != nil {
		e.ledger.DestroyUnfinished(ctx, id.ID)
		return id, err
	}

	return id, nil
}

// inScratch calls fn with the root of the files of a scratch object, which is not an overlay.
func (e *Engine) inScratch(ctx context.Context, id driver.Identity, fn func(root *os.File) error) error {
	if id.FS.IsImage() {
		return e.content.WithImage(ctx, id.ID, content.ImageOptions{}, fn)
	}
	return e.content.WithTree(ctx, id.ID, false, fn)
}
