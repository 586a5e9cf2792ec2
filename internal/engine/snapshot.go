package engine

import (
	"context"
	"time"

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
	FreezeIfNeeded = content.FreezeIfNeeded // if a copy would not be consistent otherwise
	FreezeAlways   = content.FreezeAlways   // so that the copy is one moment also of what is not synced
	FreezeNever    = content.FreezeNever    // the copy is as after a power loss
)

// SnapshotRequest says what to snapshot.
type SnapshotRequest struct {
	Volume  ref.Name
	Name    ref.Name // zero: the time, in UTC
	Freeze  Freeze   // whether its writes are stopped
	Tracker *progress.Tracker
}

// Snapshot makes an immutable snapshot of a volume, which may be in use. Everything that was
// written before the call is in it, and its filesystem is consistent: see Freeze. What is frozen is thawed
// whatever becomes of this process. Info.Consistency says what it is worth.
// Durable on return, unless the volume is ephemeral. NotFound, Exists, Invalid,
// NoSpace, InUse (its filesystem is frozen by somebody else, for longer than others are waited for), Conflict (a driver
// that copies, and a volume that changed meanwhile).
func (e *Engine) Snapshot(ctx context.Context, q SnapshotRequest) (Info, error) {
	ctx, end := e.ledger.Begin(ctx)
	defer end()

	now := time.Now().UTC()
	if q.Name.IsZero() {
		q.Name = ref.MustName(timestampName(now))
	}

	full := q.Volume.At(q.Name).String()
	if err := e.needRoot(opSnapshot, full); err != nil {
		return Info{}, err
	}

	if err := e.pool.Admit(ctx, opSnapshot, full, 0); err != nil {
		return Info{}, err
	}

	var l content.Live
	id := e.newIdentity(driver.Snapshot)
	err := e.ledger.Claim(ctx, opSnapshot, false, func(tx *catalog.Tx) ([]catalog.Mark, error) {
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
		return []catalog.Mark{{ID: id.ID, Op: opSnapshot, Name: full, Reads: vol.ID, Freezes: l.Freezes()}}, nil
	})
	if err != nil {
		return Info{}, err
	}

	q.Tracker.Start("snapshotting", 0, 0)
	row := catalog.Row{Identity: id, UsedAt: now, Usage: cloneUsage(e.caps, l.Row), MeasuredAt: l.Row.MeasuredAt}
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
		return Info{}, errs.Wrap(opSnapshot, full, err)
	}

	return snapshotInfo(row, q.Volume.String(), e.caps.Name), nil
}

// SnapshotNames lists the names of a volume's snapshots, the oldest first. NotFound.
func (e *Engine) SnapshotNames(ctx context.Context, volume ref.Name) ([]string, error) {
	var out []string
	err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		vol, err := tx.ResolveVolume("show", volume.String())
		if err != nil {
			return err
		}
		snaps, err := tx.Snapshots(vol.Lineage())
		for _, s := range snaps {
			out = append(out, s.Name)
		}
		return err
	})

	return out, err
}

// timestampName is a time as a part of a name.
func timestampName(t time.Time) string { return t.UTC().Format("20060102T150405.000Z") }

// snapshotInfo describes a snapshot; its name is the whole reference.
func snapshotInfo(r catalog.Row, volume, driverName string) Info {
	i := rowInfo(r, driverName)
	i.Name = volume + "@" + r.Name
	return i
}

// RewindRequest says which volume becomes what it was when.
type RewindRequest struct {
	Volume   ref.Name
	Snapshot ref.Name
	Detach   bool // unmount it first, and mount it again where it was
	Tracker  *progress.Tracker
}

// Rewound is the result of Rewind.
type Rewound struct {
	Info
	Before string `json:"before"` // reference of the snapshot that keeps the state before
}

// Rewind makes a volume what it was when a snapshot of it was taken. Its state
// before stays as a snapshot; its other snapshots stay too. Either all of it
// happens or nothing. NotFound, InUse (it is mounted, and Detach is not set; or
// it is, and something uses it), NoSpace.
func (e *Engine) Rewind(ctx context.Context, q RewindRequest) (Rewound, error) {
	ctx, end := e.ledger.Begin(ctx)
	defer end()

	name, full := q.Volume.String(), q.Volume.At(q.Snapshot).String()
	if err := e.needRoot(opRewind, full); err != nil {
		return Rewound{}, err
	}

	if err := e.pool.Admit(ctx, opRewind, full, 0); err != nil {
		return Rewound{}, err
	}

	var vol, snap catalog.Row
	var att catalog.MountRecord
	mounted := false
	look := func(tx *catalog.Tx) (err error) {
		if vol, err = tx.ResolveVolume(opRewind, name); err != nil {
			return err
		}

		if snap, err = tx.Resolve(opRewind, q.Volume.At(q.Snapshot)); err != nil {
			return err
		}

		a, has, err := tx.MountRecord(vol.ID)
		if err != nil {
			return err
		}

		mounted = has && e.content.MountState(vol, a) != content.NotMounted
		if mounted {
			att = a
		}

		return nil
	}

	if err := q.Snapshot.Required(opRewind); err != nil { // without it, it is the volume itself
		return Rewound{}, err
	}

	if err := e.cat.View(ctx, look); err != nil {
		return Rewound{}, err
	}

	again, may := "", Rights{}
	if mounted {
		if !q.Detach {
			return Rewound{}, errs.New(errs.InUse, opRewind, name, "the volume is mounted at %s", att.Mountpoint).
				WithHint("unmount it first with %s, or use %s", errs.Run("umount", name), errs.Param("detach"))
		}
		again, may = att.Mountpoint, content.RightsOf(att)
		if att.Loop >= 0 && att.MountID == 0 || again == e.pool.DefaultMountpoint(name) {
			again = "" // the device, or the place below the pool
		}
		if _, err := e.Umount(ctx, UmountRequest{Volume: q.Volume}); err != nil {
			return Rewound{}, err
		}
	}

	out, err := e.rewindIdle(ctx, q, look, &vol, &snap, &mounted)
	if att.ID == "" || err != nil && ctx.Err() != nil {
		return out, err
	}

	// Where it was mounted, also if it is as it was.
	info, merr := e.Mount(ctx, MountRequest{Volume: q.Volume, Dir: again, May: may})
	if err == nil && merr == nil {
		out.Info = info
	}
	if err == nil {
		err = merr
	}

	return out, err
}

func (e *Engine) rewindIdle(
	ctx context.Context, q RewindRequest, look func(*catalog.Tx) error, vol, snap *catalog.Row, mounted *bool,
) (Rewound, error) {
	s := &succession{e: e, op: opRewind, next: e.newIdentity(driver.Volume)}
	err := s.claim(ctx, func(tx *catalog.Tx) (catalog.Row, catalog.Row, error) {
		err := look(tx)
		if err == nil && *mounted {
			err = errs.New(errs.InUse, opRewind, q.Volume.String(), "it has just been mounted").
				WithHint("unmount it first with %s", errs.Run("umount", q.Volume))
		}
		return *vol, *snap, err
	})
	if err != nil {
		return Rewound{}, err
	}

	q.Tracker.Start("rewinding", 0, 0)
	if err = e.drv.Clone(ctx, snap.ID, s.draft()); err == nil {
		if s.next.SizeBytes > snap.SizeBytes { // it has grown since
			err = e.growInside(ctx, catalog.Row{Identity: s.next})
		}
	}
	if err == nil {
		err = s.commit(ctx)
	}
	if err != nil {
		e.ledger.DestroyUnfinished(ctx, s.next.ID)
		_ = e.ledger.Unmark(ctx, vol.ID)
		return Rewound{}, errs.Wrap(opRewind, q.Volume.At(q.Snapshot).String(), err)
	}

	return Rewound{volumeInfo(s.row, e.caps.Name, ""), s.row.Name + "@" + s.next.Before}, nil
}
