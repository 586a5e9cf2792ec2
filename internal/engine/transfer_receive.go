package engine

import (
	"cmp"
	"context"
	"io"
	"os"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/pool"
	"pando/internal/linux/extent"
)

// ReceiveRequest says what to make of content that comes from elsewhere: a snapshot
// and a volume that is a clone of it, or a generation of a golden.
type ReceiveRequest struct {
	Volume     ref.Name // name of the volume or golden
	Snapshot   ref.Name // name of the snapshot; zero with Golden
	Golden     bool     // whether a generation of a golden is made
	Generation int      // number of the generation, from 1

	// Update: the volume exists, and is replaced with the received content. Its previous
	// state stays as a snapshot, unless it has not changed since Base, a snapshot of it.
	// Of Golden: it exists, and gets one more generation, which becomes the current one
	// if its number is the highest.
	Update bool
	// SnapshotOnly: the volume exists and stays as it is; only the snapshot is added.
	SnapshotOnly bool

	FS          driver.FS
	SizeBytes   int64              // size of the image; 0 for native
	Sector      uint32             // sector size of the image, in bytes; 0: the driver's choice
	CreatedAt   time.Time          // when the snapshot or generation was made; zero: now
	Consistency driver.Consistency // consistency of the snapshot

	// Base is the snapshot or generation that the content starts from: a clone of it,
	// grown to SizeBytes. "": start with zeros, or an empty tree.
	Base driver.ObjectID

	OriginRef string          // origin of the volume, or what the generation was published from, for users
	OriginID  driver.ObjectID // ID of the origin, if it is in this pool
	// Descends is the generation that volume and snapshot descend from, if it is in this pool; "": that of Base, of the
	// volume before, or of OriginID.
	Descends driver.ObjectID

	// Lower is the generation that volume and snapshot are overlays on: then the content is their upper layer. It may
	// have been removed, and stay for other overlays. "": they are no overlays.
	Lower driver.ObjectID

	Tree      bool  // whether the content is the output of SendTree, not of SendStream
	NeedBytes int64 // about how much the content will write: refused at once if there is not enough space
	Links     []Link
}

// Content is what Receive stores: exactly one of its fields is set.
type Content struct {
	// Image writes the differences from Base. It may use the Target concurrently until it returns.
	Image func(ctx context.Context, t Target) error

	Stream io.Reader // output of SendStream or SendTree with the differences from Base
}

// Target is the image that is being made. It can be used concurrently. Ranges outside of
// it are Invalid. Nothing is durable before Receive returns.
type Target interface {
	io.WriterAt
	// Zero makes a range read as zeros, and returns its space to the pool if possible.
	Zero(off, length int64) error
	SizeBytes() int64
}

// Receive makes a snapshot and a volume, or a generation of a golden, from content that comes from elsewhere. It
// records them in one commit, together with Links (an empty Object stands for the snapshot or generation): whatever
// fails, either all of it exists or nothing has changed. The golden is created if it does not exist. The result is the
// volume, the snapshot with SnapshotOnly, or the generation. Durable on return. Receive does not check the content: its
// provider must know that it is right. It returns Exists, NotFound (Base, or the volume with Update), Invalid (Base is
// larger, or the request contradicts itself), InUse (with Update: the volume is mounted), NoSpace, Unsupported (FS,
// Stream, Lower), and the errors of c.
func (e *Transfer) Receive(ctx context.Context, q ReceiveRequest, c Content) (_ api.Object, err error) {
	ctx, end := e.ledger.Begin(ctx, opPull)
	defer end(&err)

	r := &receive{e: e, q: q, content: c}
	if err := r.checkRequest(); err != nil {
		return api.Object{}, err
	}

	if err := e.needRoot(opPull, r.ref); err != nil {
		return api.Object{}, err
	}

	if err := r.prepareLower(ctx); err != nil {
		return api.Object{}, err
	}

	if q.Golden {
		unlock, _, err := e.lockGolden(ctx, q.Volume.String())
		if err != nil {
			return api.Object{}, err
		}
		defer unlock()
	}

	if err := r.planWork(ctx); err != nil {
		return api.Object{}, err
	}

	info, err := r.makeAndCommit(ctx)
	if err != nil {
		e.ledger.DestroyUnfinished(ctx, r.made...)
		if r.next != nil {
			_ = e.ledger.Unmark(ctx, r.next.vol.ID)
		}
		return api.Object{}, errs.Wrap(opPull, r.ref, err)
	}

	return info, nil
}

// receive is the state of one Receive. It makes the point first, under the ID of the
// draft; then the volume, as a clone of the point.
type receive struct {
	e       *Transfer
	q       ReceiveRequest
	content Content
	kind    driver.Kind
	ref     string
	base    catalog.Row     // zero if there is none
	lower   catalog.Row     // generation that a received overlay lies on; zero: it is no overlay
	from    catalog.Row     // the point that Descends names; zero if there is none
	point   driver.Identity // snapshot or generation that is made
	volume  driver.Identity // its ID is "" if no volume is made
	next    *succession     // change that replaces a volume; nil: none is replaced
	golden  catalog.Golden  // before; its numbers are zero if it does not exist yet
	spare   driver.Identity // the sealed point, if it is sealed
	draft   driver.Identity // object that a tree is applied to, which may become the point itself
	inside  bool            // whether a tree goes into an image, as this pool holds only images
	made    []driver.ObjectID
}

func (r *receive) checkRequest() error {
	q := &r.q
	if err := q.Volume.Required(opPull); err != nil {
		return err
	}

	r.ref = q.Volume.At(q.Snapshot).String()
	if q.Golden {
		r.ref = ref.Generation(q.Volume.String(), q.Generation)
	}

	bad := func(format string, args ...any) error { return errs.New(errs.Invalid, opPull, r.ref, format, args...) }
	switch {
	case q.Golden && q.Generation < 1:
		return bad("the generation number must be at least 1 (got %d)", q.Generation)
	case q.Golden && !q.Snapshot.IsZero():
		return bad("a generation cannot have a snapshot name")
	case q.Golden && q.SnapshotOnly:
		return bad("a golden has no snapshots")
	case q.Golden && q.Lower != "":
		return bad("a golden cannot be an overlay")
	case q.Update && q.SnapshotOnly:
		return bad("updating a volume and adding only a snapshot to it cannot be combined")
	case (r.content.Image == nil) == (r.content.Stream == nil):
		return bad("the content must come as an image or as a stream")
	case q.FS.IsImage() != (r.content.Image != nil):
		return bad("the content does not fit the filesystem %s", q.FS)
	case q.FS.IsImage() && q.SizeBytes <= 0:
		return bad("the image size must be greater than 0 (got %d)", q.SizeBytes)
	}

	if !q.Golden {
		if err := q.Snapshot.Required(opPull); err != nil {
			return err
		}
	}

	if r.content.Stream != nil {
		if err := r.checkStream(); err != nil {
			return err
		}
		q.SizeBytes, q.Sector = 0, 0
	}

	if fs := treeFS(r.e.caps); q.Tree && fs.IsImage() {
		r.inside, q.FS = true, fs
	}

	for _, l := range q.Links {
		if l.Repo == "" || l.Manifest == "" {
			return bad("a link needs a repository and a manifest")
		}
	}

	if q.CreatedAt.IsZero() {
		q.CreatedAt = time.Now()
	}

	q.CreatedAt = q.CreatedAt.UTC()
	return r.e.checkHolds(r.ref, q.FS)
}

// planWork decides everything about the objects, reserves names and IDs, and marks the work.
func (r *receive) planWork(ctx context.Context) error {
	q := r.q
	r.kind = driver.Snapshot
	if q.Golden {
		r.kind = driver.Generation
	}

	room, err := r.e.pool.Space(ctx)
	if err != nil {
		return err
	}

	return r.e.ledger.Claim(ctx, opPull, q.Update, func(tx *catalog.Tx) ([]catalog.Mark, error) {
		r.base, r.volume, r.next, r.spare = catalog.Row{}, driver.Identity{}, nil, driver.Identity{}
		r.point = r.e.newIdentity(ctx, r.kind)
		p := &r.point
		p.FS, p.SizeBytes, p.Sector, p.CreatedAt = q.FS, q.SizeBytes, q.Sector, q.CreatedAt
		if err := r.planBase(tx, room); err != nil {
			return nil, err
		}

		reads, err := r.planLower(tx)
		if err != nil {
			return nil, err
		}

		// The golden must have the same name when what descends from it is recorded.
		if r.from, _, err = tx.Object(q.Descends); err != nil {
			return nil, err
		}
		if r.from.ID != "" {
			reads = append(reads, catalog.Mark{ID: driver.NewID(), Op: opPull, Reads: r.from.ID})
		}

		marks := []catalog.Mark{{ID: p.ID, Op: opPull, Name: r.ref, Reads: q.Base}}
		var more []catalog.Mark
		r.draft = r.e.newIdentity(ctx, driver.Scratch)
		_, inPlace := r.e.drv.(driver.Finisher)
		if inPlace = inPlace || r.inside; inPlace {
			r.draft.ID = p.ID
		}

		if q.Golden {
			marks[0].Name = q.Volume.String()
			more, err = r.planGeneration(ctx, tx)
		} else {
			more, err = r.planVolume(ctx, tx)
		}

		if q.Tree && !inPlace {
			more = append(more, catalog.Mark{ID: r.draft.ID, Op: opPull})
		}

		more = append(more, reads...)

		r.made = []driver.ObjectID{p.ID}
		for _, m := range more {
			if r.next == nil || m.ID != r.next.vol.ID {
				r.made = append(r.made, m.ID)
			}
		}

		return append(marks, more...), err
	})
}

// planBase finds the base, and checks that the point can be made from it.
func (r *receive) planBase(tx *catalog.Tx, room pool.Space) (err error) {
	q, p := r.q, &r.point
	if q.Base != "" {
		if r.base, err = tx.ResolvePoint(opPull, q.Base); err != nil {
			return err
		}
	}

	if r.inside {
		r.planInside(room)
	}
	if q.Base == "" {
		return nil
	}

	if r.base.FS.IsImage() != p.FS.IsImage() || r.base.FS == driver.None && r.inside || r.base.SizeBytes > p.SizeBytes {
		return errs.New(errs.Invalid, opPull, r.ref, "%s is not an image of at most %d bytes, so it cannot be the base",
			tx.RefOf(r.base), p.SizeBytes)
	}

	p.Sector = cmp.Or(p.Sector, r.base.Sector)
	return nil
}

// planGeneration plans the golden's row, and marks the object that the point becomes if
// it is sealed.
func (r *receive) planGeneration(ctx context.Context, tx *catalog.Tx) ([]catalog.Mark, error) {
	q, p := r.q, &r.point
	g, exists, err := tx.ResolveGolden(opPull, q.Volume.String())
	if err != nil {
		return nil, err
	}

	if !exists {
		if err := tx.CheckFree(opPull, q.Volume.String()); err != nil {
			return nil, err
		}
		g = catalog.Golden{Name: q.Volume.String(), CreatedAt: q.CreatedAt, Owner: p.Owner}
	} else {
		if !q.Update {
			return nil, errs.New(errs.Exists, opPull, q.Volume.String(), "golden %q already exists", q.Volume).
				WithHint("choose another name, or update it")
		}
		if _, taken, err := tx.Generation(q.Volume.String(), q.Generation); err != nil {
			return nil, err
		} else if taken {
			return nil, errs.New(errs.Exists, opPull, r.ref, "generation %d of golden %q already exists",
				q.Generation, q.Volume).WithHint("list its generations with %s", errs.Run("golden show", q.Volume.String()))
		}
		if !g.CreatedAt.Equal(q.CreatedAt) {
			p.Since = g.CreatedAt
		}
	}

	r.golden = g
	p.Golden, p.Generation, p.Owner = q.Volume.String(), q.Generation, g.Owner
	p.Origin, p.OriginID = q.OriginRef, q.OriginID
	if q.Generation > g.Current {
		p.GoldenProperties = g.GoldenProperties
	}

	r.spare = r.e.newIdentity(ctx, r.kind)
	return []catalog.Mark{{ID: r.spare.ID, Op: opPull}}, nil
}

// planVolume plans the snapshot and, unless SnapshotOnly is set, the volume or its
// successor.
func (r *receive) planVolume(ctx context.Context, tx *catalog.Tx) ([]catalog.Mark, error) {
	e, q, p := r.e, r.q, &r.point
	fresh := e.newIdentity(ctx, driver.Volume)
	p.Name, p.Consistency = q.Snapshot.String(), q.Consistency
	p.Origin = q.Volume.String()
	if !q.Update && !q.SnapshotOnly {
		if err := tx.CheckFree(opPull, q.Volume.String()); err != nil {
			return nil, err
		}
		p.Volume, p.OriginID = fresh.ID, fresh.ID
		origin, _, err := tx.Object(q.OriginID)
		if err != nil {
			return nil, err
		}
		marks := []catalog.Mark{{ID: fresh.ID, Op: opPull, Name: q.Volume.String()}}
		if origin.ID != "" { // its golden keeps its name until the volume is recorded
			marks = append(marks, catalog.Mark{ID: driver.NewID(), Op: opPull, Reads: origin.ID})
		}
		p.Golden, p.Generation = r.baseGeneration(origin)
		if p.Order, err = tx.NextPlace(time.Now()); err != nil {
			return nil, err
		}

		fresh.Name, fresh.Origin, fresh.OriginID = q.Volume.String(), q.OriginRef, q.OriginID
		fresh.Golden, fresh.Generation = p.Golden, p.Generation
		r.volume = fresh
		return marks, nil
	}

	vol, err := tx.ResolveVolume(opPull, q.Volume.String())
	if err != nil {
		return nil, err
	}

	if _, taken, err := tx.Snapshot(vol.Lineage(), q.Snapshot.String()); err != nil {
		return nil, err
	} else if taken {
		return nil, errs.New(errs.Exists, opPull, r.ref, "volume %q already has a snapshot named %q",
			q.Volume, q.Snapshot).
			WithHint("pull it as another volume with %s", errs.Param("as", "NAME"))
	}

	p.Volume, p.OriginID, p.Owner = vol.Lineage(), vol.ID, vol.Owner
	p.Golden, p.Generation = r.baseGeneration(vol)
	if q.SnapshotOnly {
		// Keep the volume from being destroyed, or the snapshot would not have one.
		p.Order, err = tx.NextPlace(time.Now())
		return []catalog.Mark{{ID: driver.NewID(), Op: opPull, Reads: vol.ID}}, err
	}

	if err := e.notMounted(tx, vol); err != nil {
		return nil, err
	}

	// The present state of the volume comes before the point.
	n := fresh
	if n.Order, err = tx.NextPlace(time.Now()); err != nil {
		return nil, err
	}
	if p.Order, err = tx.NextPlace(time.Now()); err != nil {
		return nil, err
	}

	n.Name, n.Volume, n.Replaces = vol.Name, vol.Lineage(), vol.ID
	n.Before = "before-" + opPull + "-" + timestampName(time.Now())
	n.Origin, n.OriginID = r.ref, p.ID
	n.Golden, n.Generation = p.Golden, p.Generation
	n.CreatedAt, n.ExpiresAt, n.Pinned = vol.CreatedAt, vol.ExpiresAt, vol.Pinned
	n.Labels, n.Owner = vol.Labels, vol.Owner
	r.volume = n
	r.next = &succession{e: e.Engine, op: opPull, vol: vol, next: n}
	return []catalog.Mark{{ID: vol.ID, Op: opPull}, {ID: n.ID, Op: opPull}}, nil
}

// CanUpdate checks that a volume can be replaced with received content (see ReceiveRequest.Update), and changes
// nothing. It returns InUse.
func (e *Transfer) CanUpdate(ctx context.Context, volume ref.Name) error {
	return e.cat.View(ctx, func(tx *catalog.Tx) error {
		vol, err := tx.ResolveVolume(opPull, volume.String())
		if err != nil {
			return err
		}
		return e.notMounted(tx, vol)
	})
}

// notMounted returns InUse if a volume is mounted, and therefore cannot be replaced.
func (e *Transfer) notMounted(tx *catalog.Tx, vol catalog.Row) error {
	l, err := e.content.FindLive(tx, vol, FreezeIfNeeded)
	if err != nil || !l.InUse() {
		return err
	}
	return errs.New(errs.InUse, opPull, vol.Name, "the volume is mounted at %s", l.Record.Mountpoint).
		WithHint("unmount it first with %s", errs.Run("umount", vol.Name))
}

// baseGeneration returns the generation that the point descends from: its lower layer, or that of the request, or else
// of Base, or else of the object before. A rebuild would find the same one.
func (r *receive) baseGeneration(before catalog.Row) (golden string, generation int) {
	switch {
	case r.lower.ID != "":
		return r.lower.Golden, r.lower.Generation
	case r.from.Golden != "":
		return r.from.Golden, r.from.Generation
	case r.base.Golden != "":
		return r.base.Golden, r.base.Generation
	}
	return before.Golden, before.Generation
}

// admit checks that the pool has room for the planned objects. NoSpace.
func (r *receive) admit(ctx context.Context) error {
	need := r.q.NeedBytes
	if !r.e.caps.Sharing { // the point copies its base, and the volume copies the point
		base, err := bytesToCopy(ctx, r.e.Engine, r.base)
		if err != nil {
			return err
		}
		if need = max(need, base); r.volume.ID != "" {
			need *= 2
		}
	}
	return r.e.pool.Admit(ctx, opPull, r.ref, need)
}

// makeAndCommit makes the planned objects and records them.
func (r *receive) makeAndCommit(ctx context.Context) (api.Object, error) {
	e, q := r.e, r.q
	if err := r.admit(ctx); err != nil {
		return api.Object{}, err
	}
	if err := r.makePoint(ctx); err != nil {
		return api.Object{}, err
	}

	// Clone the volume from it.
	unchanged := false
	if r.volume.ID != "" {
		v := &r.volume
		*v = v.WithContentOf(r.point)
		draft := *v
		if r.next != nil {
			r.next.next = *v
			draft = r.next.draft()
			var err error
			if unchanged, err = r.volumeUnchanged(ctx); err != nil {
				return api.Object{}, err
			}
		}

		if err := e.drv.Clone(ctx, r.point.ID, draft); err != nil {
			return api.Object{}, err
		}
	}

	row, err := r.measuredRow(ctx, r.point)
	if err != nil {
		return api.Object{}, err
	}

	// Record them in one commit.
	switch {
	case q.Golden:
		return r.commitGeneration(ctx, row)
	case q.SnapshotOnly:
		return snapshotOf(row, q.Volume.String(), e.caps.Name),
			e.cat.Update(ctx, catalog.Durable, func(tx *catalog.Tx) error {
				return r.recordPoint(tx, row)
			})
	case r.next != nil:
		r.next.also = func(tx *catalog.Tx) error { return r.recordPoint(tx, row) }
		if err := r.next.commit(ctx); err != nil {
			return api.Object{}, err
		}
		if unchanged {
			r.next.dropPredecessor(context.WithoutCancel(ctx))
		}
		return volumeOf(r.next.row, e.caps.Name, ""), nil
	}

	vol := cloneRow(e.caps, row, r.volume, time.Now())
	return volumeOf(vol, e.caps.Name, ""), e.cat.Update(ctx, catalog.Durable, func(tx *catalog.Tx) error {
		if err := tx.PutObject(vol); err != nil {
			return err
		}
		return r.recordPoint(tx, row)
	})
}

// makePoint makes the point, in the way that the content needs.
func (r *receive) makePoint(ctx context.Context) error {
	switch q := r.q; {
	case r.inside:
		return r.makeTreeImagePoint(ctx)
	case q.Tree:
		return r.makeTreePoint(ctx)
	case r.content.Stream != nil:
		s, err := r.e.streamer(opPull, r.ref)
		if err != nil {
			return err
		}
		return s.Receive(ctx, r.point, q.Base, r.content.Stream)
	}

	return r.makeImagePoint(ctx)
}

// measuredRow returns the row of a new object, measured if that is cheap.
func (r *receive) measuredRow(ctx context.Context, id driver.Identity) (catalog.Row, error) {
	row := catalog.Row{Identity: id, UsedAt: time.Now()}
	if !r.e.cheapUsage(id.FS) {
		return row, nil
	}
	var err error
	row.Usage, err = r.e.drv.Usage(ctx, id.ID)
	row.MeasuredAt = time.Now()
	return row, err
}

// recordPoint writes the row of the point and the links, and ends the marks.
func (r *receive) recordPoint(tx *catalog.Tx, row catalog.Row) error {
	if err := tx.PutObject(row); err != nil {
		return err
	}

	for _, l := range r.q.Links {
		l.Object = cmp.Or(l.Object, row.ID)
		if err := putLink(tx, l); err != nil {
			return err
		}
	}

	for _, id := range r.made {
		if err := tx.Unmark(id); err != nil {
			return err
		}
	}

	return nil
}

// commitGeneration records a generation.
func (r *receive) commitGeneration(ctx context.Context, row catalog.Row) (api.Object, error) {
	e := r.e
	g := r.golden
	if err := e.cat.Update(ctx, catalog.Durable, func(tx *catalog.Tx) error {
		g = r.golden

		// If the golden was destroyed in the meantime, it starts again with this generation.
		now, exists, err := tx.Golden(g.Name)
		if err != nil {
			return err
		}

		if exists {
			g = now
		} else {
			g.Current, g.Next = 0, 0
		}

		if row.Generation > g.Current {
			g.Current = row.Generation
		}

		g.Next = max(g.Next, row.Generation+1)
		if err := tx.PutGolden(g); err != nil {
			return err
		}

		return r.recordPoint(tx, row)
	}); err != nil {
		return api.Object{}, err
	}

	info := generationOf(row, g, e.caps.Name)
	if g.Current == row.Generation {
		e.removeOldOrWarn(ctx, g.Name)
	}

	return info, nil
}

// volumeUnchanged reports whether the volume that is replaced has not changed since the
// snapshot of it that is the base of the new content: then its state need not be kept.
func (r *receive) volumeUnchanged(ctx context.Context) (bool, error) {
	e, vol := r.e, r.next.vol
	if r.base.Kind != driver.Snapshot || r.base.Volume != vol.Lineage() || !e.caps.Sharing || !vol.FS.IsImage() ||
		vol.SizeBytes != r.base.SizeBytes || vol.Lower != r.base.Lower {
		return false, nil
	}

	var files [2]*os.File
	for i, id := range []driver.ObjectID{r.base.ID, vol.ID} {
		w, err := e.drv.Attachment(ctx, id)
		if err != nil || w.Block {
			return false, err
		}
		f, err := os.Open(w.Image)
		if err != nil {
			return false, errs.Wrap(opPull, r.ref, err)
		}
		defer f.Close()
		files[i] = f
	}

	if extent.Comparable(files[0], files[1]) != nil {
		return false, nil
	}

	for _, err := range extent.Compare(ctx, files[0], files[1]) {
		return false, errs.Wrap(opPull, r.ref, err)
	}

	return true, nil
}
