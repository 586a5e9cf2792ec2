package engine

import (
	"context"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
)

// Operations of marks.
const (
	opSnapshot = "snapshot"
	opRewind   = "rewind"
	opRebase   = "rebase"
)

// Freeze says whether writes to a mounted volume are stopped while it is copied.
type Freeze = content.Freeze

// Values of Freeze.
const (
	FreezeIfNeeded = content.FreezeIfNeeded // only if a copy would not be consistent otherwise
	FreezeAlways   = content.FreezeAlways   // even unsynced data in the copy is of one moment
	FreezeNever    = content.FreezeNever    // the copy is as after a power loss
)

// SnapshotRequest says what to snapshot.
type SnapshotRequest struct {
	Volume ref.Name
	Name   ref.Name      // name of the snapshot; zero: the time, in UTC
	Labels driver.Labels // labels of the snapshot; those of the volume are not copied
	Freeze Freeze        // whether writes to a mounted volume are stopped while it is copied
}

// Snapshot makes an immutable snapshot of a volume, which may be in use. It contains
// everything that was written before the call, and its filesystem is consistent: see
// Freeze and api.Object.Consistency. A frozen filesystem is thawed even if this process dies.
// Durable on return, unless the volume is ephemeral. NotFound, Exists, Invalid, NoSpace,
// InUse (another program has frozen the filesystem, and waiting did not help), Conflict (the
// driver copies, and the volume changed during the copy).
func (e *Engine) Snapshot(ctx context.Context, q SnapshotRequest) (_ api.Object, err error) {
	ctx, end := e.ledger.Begin(ctx, opSnapshot)
	defer end(&err)

	now := time.Now().UTC()
	if q.Name.IsZero() {
		q.Name = ref.MustName(timestampName(now))
	}

	full := q.Volume.At(q.Name).String()
	if err := e.needRoot(opSnapshot, full); err != nil {
		return api.Object{}, err
	}

	if err := e.pool.Admit(ctx, opSnapshot, full, 0); err != nil {
		return api.Object{}, err
	}

	// Reserve the name, and mark the work.
	var l content.Live
	id := e.newIdentity(ctx, driver.Snapshot)
	id.Labels = q.Labels
	err = e.ledger.Claim(ctx, opSnapshot, false, func(tx *catalog.Tx) ([]catalog.Mark, error) {
		vol, err := tx.ResolveVolume(opSnapshot, q.Volume.String())
		if err != nil {
			return nil, err
		}

		if _, taken, err := tx.Snapshot(vol.Lineage(), q.Name.String()); err != nil {
			return nil, err
		} else if taken {
			return nil, errs.New(errs.Exists, opSnapshot, full, "volume %q already has a snapshot named %q", q.Volume, q.Name).
				WithHint("choose another name, or omit it to use the current time")
		}

		if l, err = e.content.FindLive(tx, vol, q.Freeze); err != nil {
			return nil, err
		}

		id = id.SnapshotOf(vol.Identity, q.Name.String(), l.CopyConsistency())
		if id.Order, err = tx.NextPlace(now); err != nil {
			return nil, err
		}
		return []catalog.Mark{{ID: id.ID, Op: opSnapshot, Name: full, Reads: vol.ID, Freezes: l.Freezes()}}, nil
	})
	if err != nil {
		return api.Object{}, err
	}

	// Copy the volume, and record the snapshot.
	progress.From(ctx).Start(progress.Snapshotting, 0, 0)
	row := cloneRow(e.caps, l.Row, id, now)
	if err = e.copyLive(ctx, l, id, true); err == nil {
		err = e.cat.Update(ctx, catalog.Durability(!id.Ephemeral), func(tx *catalog.Tx) error {
			if err := tx.PutObject(row); err != nil {
				return err
			}
			return tx.Unmark(id.ID)
		})
	}
	if err != nil {
		e.ledger.DestroyUnfinished(ctx, id.ID)
		return api.Object{}, errs.Wrap(opSnapshot, full, err)
	}

	return snapshotOf(row, q.Volume.String(), e.caps.Name), nil
}

// timestampName returns a time in a form that names can contain.
func timestampName(t time.Time) string { return t.UTC().Format("20060102T150405.000Z") }

// RewindRequest says which volume to rewind, and to which snapshot.
type RewindRequest struct {
	Volume   ref.Name
	Snapshot ref.Name
	Detach   bool // unmount it first, and remount it in the same place
}

// Rewound is the result of Rewind.
type Rewound struct {
	api.Object
	Before string `json:"before"` // reference to the snapshot with the previous content
}

// Rewind restores a volume to one of its snapshots. The previous state stays as a
// snapshot, and so do all other snapshots. Either all of it happens or nothing. NotFound,
// InUse (it is mounted and Detach is not set, or it is mounted and in use), NoSpace.
func (e *Engine) Rewind(ctx context.Context, q RewindRequest) (_ Rewound, err error) {
	ctx, end := e.ledger.Begin(ctx, opRewind)
	defer end(&err)

	name, full := q.Volume.String(), q.Volume.At(q.Snapshot).String()
	if err := e.needRoot(opRewind, full); err != nil {
		return Rewound{}, err
	}

	if err := e.pool.Admit(ctx, opRewind, full, 0); err != nil {
		return Rewound{}, err
	}

	if err := q.Snapshot.Required(opRewind); err != nil { // without a name the reference is the volume itself
		return Rewound{}, err
	}

	r := &rewind{e: e, q: q}
	if err := e.cat.View(ctx, r.find); err != nil {
		return Rewound{}, err
	}

	// Unmount the volume, and remember where and how it was mounted.
	again, may := "", Rights{}
	if r.mounted {
		if !q.Detach {
			return Rewound{}, errs.New(errs.InUse, opRewind, name, "the volume is mounted at %s", r.att.Mountpoint).
				WithHint("unmount it first with %s, or use %s", errs.Run("umount", name), errs.Param("detach"))
		}
		again, may = r.att.Mountpoint, content.RightsOf(r.att)
		if r.att.Loop >= 0 && r.att.MountID == 0 || e.pool.IsDefaultMountpoint(again) {
			again = "" // the device, or the place below the pool
		}
		if _, err := e.Umount(ctx, UmountRequest{Volume: q.Volume}); err != nil {
			return Rewound{}, err
		}
		content.AtStep("detached")
	}

	out, err := r.replaceVolume(ctx)
	if r.att.ID == "" || err != nil && ctx.Err() != nil {
		return out, err
	}

	// Mount it again, even if rewinding failed, whatever it is called by now.
	volume := q.Volume
	if err != nil {
		if volume = e.nameNow(ctx, r.att.ID); volume.IsZero() {
			return out, err
		}
	}
	info, merr := e.Mount(ctx, MountRequest{Volume: volume, Dir: again, May: may})
	if err == nil && merr == nil {
		out.Object = info
	}
	if err == nil {
		err = merr
	}

	return out, err
}

// nameNow returns the name of a volume, zero if it no longer exists.
func (e *Engine) nameNow(ctx context.Context, id driver.ObjectID) (name ref.Name) {
	_ = e.cat.View(ctx, func(tx *catalog.Tx) error { // without a name, what has failed before says enough
		row, ok, err := tx.Object(id)
		if err == nil && ok && row.Kind == driver.Volume {
			name = ref.MustName(row.Name)
		}
		return err
	})
	return name
}

// rewind is the state of one Rewind.
type rewind struct {
	e         *Engine
	q         RewindRequest
	vol, snap catalog.Row
	mounted   bool
	att       catalog.MountRecord // of the last time it was found mounted; zero: it never was
}

// find finds the volume and the snapshot, and whether the volume is mounted.
func (r *rewind) find(tx *catalog.Tx) (err error) {
	before := r.vol
	if r.vol, err = tx.ResolveVolume(opRewind, r.q.Volume.String()); err != nil {
		return err
	}
	if before.ID != "" && r.vol.Lineage() != before.Lineage() {
		return errs.New(errs.Conflict, opRewind, r.q.Volume.String(), "another volume has got this name in the meantime").
			WithHint("see which volumes there are with %s", errs.Run("ls"))
	}

	if r.snap, err = tx.Resolve(opRewind, r.q.Volume.At(r.q.Snapshot)); err != nil {
		return err
	}

	a, has, err := tx.MountRecord(r.vol.ID)
	if err != nil {
		return err
	}

	r.mounted = has && r.e.content.MountState(r.vol, a) != content.NotMounted
	if r.mounted {
		r.att = a
	}

	return nil
}

// replaceVolume replaces the volume, which must not be mounted, by a clone of the snapshot.
func (r *rewind) replaceVolume(ctx context.Context) (Rewound, error) {
	// Mark the work, after looking again in the transaction.
	e, q := r.e, r.q
	s := &succession{e: e, op: opRewind, next: e.newIdentity(ctx, driver.Volume)}
	err := s.claim(ctx, func(tx *catalog.Tx) (catalog.Row, catalog.Row, error) {
		err := r.find(tx)
		if err == nil && r.mounted {
			err = errs.New(errs.InUse, opRewind, q.Volume.String(), "it has just been mounted").
				WithHint("unmount it first with %s", errs.Run("umount", q.Volume))
		}
		return r.vol, r.snap, err
	})
	if err != nil {
		return Rewound{}, err
	}

	// Clone the snapshot, and commit the clone as the successor.
	progress.From(ctx).Start(progress.Rewinding, 0, 0)
	if err = e.drv.Clone(ctx, r.snap.ID, s.draft()); err == nil {
		if s.next.SizeBytes > r.snap.SizeBytes { // the volume has grown since the snapshot
			err = e.growInside(ctx, catalog.Row{Identity: s.next})
		}
	}
	if err == nil {
		err = s.commit(ctx)
	}
	if err != nil {
		s.giveUp(ctx)
		return Rewound{}, errs.Wrap(opRewind, q.Volume.At(q.Snapshot).String(), err)
	}

	return Rewound{volumeOf(s.row, e.caps.Name, ""), s.row.Name + "@" + s.next.Before}, nil
}
