package engine

import (
	"context"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
)

// SnapshotRequest says what to snapshot.
type SnapshotRequest struct {
	Volume  ref.Name
	Name    ref.Name      // zero: the time, in UTC
	Labels  driver.Labels // of the snapshot; those of the volume are not copied
	Freeze  Freeze        // whether its writes are stopped
	Hooks   SnapshotHooks
	Tracker *progress.Tracker
}

// SnapshotGroupRequest says which volumes to snapshot at one point in time.
type SnapshotGroupRequest struct {
	Volumes []ref.Name
	Name    ref.Name      // of each snapshot; zero: the time, in UTC
	Labels  driver.Labels // of each snapshot
	Freeze  Freeze        // FreezeNever: others keep the volumes from changing; else their writes are stopped
	Hooks   SnapshotHooks
	Tracker *progress.Tracker
}

// SnapshotGroup describes snapshots of several volumes at one point in time.
type SnapshotGroup struct {
	Name          string  `json:"name"`           // of each snapshot
	FrozenSeconds float64 `json:"frozen_seconds"` // how long programs may have waited to write
	Snapshots     []Info  `json:"snapshots"`      // in the order of the request
}

// Snapshot makes an immutable snapshot of a volume, which may be in use. It contains
// everything that was written before the call, and its filesystem is consistent: see
// Freeze and Info.Consistency. A frozen filesystem is thawed even if this process dies.
// Durable on return, unless the volume is ephemeral. NotFound, Exists, Invalid, NoSpace,
// InUse (another program has frozen the filesystem, and waiting did not help), Conflict (the
// driver copies, and the volume changed during the copy), IO (a command of Hooks failed). If
// only Hooks.After failed, the snapshot exists, and is returned with the error.
func (e *Engine) Snapshot(ctx context.Context, q SnapshotRequest) (Info, error) {
	s := e.newSnapshots([]ref.Name{q.Volume}, q.Name, q.Freeze, q.Hooks, q.Tracker)
	s.labels = q.Labels
	infos, err := s.take(ctx, func(ctx context.Context) error {
		m := s.members[0]
		return e.content.CopyLive(ctx, m.Live, m.Snapshot, true, m.Others)
	})
	if len(infos) == 0 {
		return Info{}, err
	}
	return infos[0], err
}

// SnapshotGroup makes a snapshot of each of several volumes, all with the same name and of one point in time, even
// while programs write to them. Either all of them exist or none. It returns the kinds of Snapshot; Invalid if a volume
// is named twice, and Unsupported if more than one of them is in use and cannot be frozen.
func (e *Engine) SnapshotGroup(ctx context.Context, q SnapshotGroupRequest) (SnapshotGroup, error) {
	if err := q.check(); err != nil {
		return SnapshotGroup{}, err
	}

	s := e.newSnapshots(q.Volumes, q.Name, q.Freeze, q.Hooks, q.Tracker)
	s.labels = q.Labels
	if s.freeze == FreezeIfNeeded {
		s.freeze = FreezeAlways
	}

	var held time.Duration
	infos, err := s.take(ctx, func(ctx context.Context) (err error) {
		held, err = e.content.SnapshotGroup(ctx, s.members)
		return err
	})
	if len(infos) == 0 {
		return SnapshotGroup{}, err
	}
	return SnapshotGroup{Name: s.name.String(), FrozenSeconds: held.Seconds(), Snapshots: infos}, err
}

// check refuses groups without volumes, and with the same volume twice.
func (q SnapshotGroupRequest) check() error {
	if len(q.Volumes) == 0 {
		return errs.New(errs.Invalid, opSnapshot, "", "the group has no volumes").WithHint("name the volumes to snapshot")
	}

	seen := map[ref.Name]bool{}
	for _, v := range q.Volumes {
		if seen[v] {
			return errs.New(errs.Invalid, opSnapshot, v.String(), "the volume is named twice").
				WithHint("name each volume of a group once")
		}
		seen[v] = true
	}

	return nil
}

// snapshots are snapshots that are being taken.
type snapshots struct {
	e       *Engine
	volumes []ref.Name
	name    ref.Name
	labels  driver.Labels
	freeze  Freeze
	hooks   SnapshotHooks
	tracker *progress.Tracker

	ids     []driver.Identity // made out for the snapshots, one for each volume
	members []content.Member  // as of the last try to claim them
	at      time.Time
}

func (e *Engine) newSnapshots(
	volumes []ref.Name, name ref.Name, freeze Freeze, hooks SnapshotHooks, tracker *progress.Tracker,
) *snapshots {
	return &snapshots{e: e, volumes: volumes, name: name, freeze: freeze, hooks: hooks, tracker: tracker,
		ids: make([]driver.Identity, len(volumes))}
}

// full returns the reference of the snapshot of the i-th volume.
func (s *snapshots) full(i int) string { return s.volumes[i].At(s.name).String() }

// take takes the snapshots, between the hooks; copy copies the content of s.members. It returns the snapshots if they
// exist, even with an error.
func (s *snapshots) take(ctx context.Context, copy func(context.Context) error) ([]Info, error) {
	e := s.e
	ctx, end := e.ledger.Begin(ctx)
	defer end()

	if s.name.IsZero() {
		s.name = ref.MustName(timestampName(time.Now()))
	}

	if err := s.admit(ctx); err != nil {
		return nil, err
	}

	if s.hooks.Before == "" && s.hooks.After == "" {
		return s.make(ctx, copy)
	}

	// Let the programs that use the volumes prepare, unless the snapshots certainly cannot be taken.
	if err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		_, err := s.plan(tx)
		return err
	}); err != nil {
		return nil, err
	}

	if err := s.runBefore(ctx); err != nil {
		return nil, err
	}

	// Let them go on. If the snapshots failed too, that is the error to report.
	infos, err := s.make(ctx, copy)
	after := s.runAfter(context.WithoutCancel(ctx), err)
	switch {
	case err == nil:
		err = after
	case after != nil:
		warnings.Add(ctx, "%v", after)
	}

	return infos, err
}

// admit refuses what this process, or the pool, cannot do.
func (s *snapshots) admit(ctx context.Context) error {
	if err := s.e.needRoot(opSnapshot, s.full(0)); err != nil {
		return err
	}
	return s.e.pool.Admit(ctx, opSnapshot, s.full(0), 0)
}

// plan finds the volumes, and returns the marks of their snapshots.
func (s *snapshots) plan(tx *catalog.Tx) ([]catalog.Mark, error) {
	s.members = nil
	var marks []catalog.Mark
	for i, name := range s.volumes {
		vol, err := tx.ResolveVolume(opSnapshot, name.String())
		if err != nil {
			return nil, err
		}

		if _, taken, err := tx.Snapshot(vol.Lineage(), s.name.String()); err != nil {
			return nil, err
		} else if taken {
			return nil, errs.New(errs.Exists, opSnapshot, s.full(i), "volume %q already has a snapshot named %q", name, s.name).
				WithHint("choose another name, or omit it to use the current time")
		}

		l, err := s.e.content.FindLive(tx, vol, s.freeze)
		if err != nil {
			return nil, err
		}

		id := s.ids[i].SnapshotOf(vol.Identity, s.name.String(), l.CopyConsistency())
		s.members = append(s.members, content.Member{Live: l, Snapshot: id, Others: freezes{s.e, vol.ID, id.ID}})
		marks = append(marks, catalog.Mark{ID: id.ID, Op: opSnapshot, Name: s.full(i), Reads: vol.ID, Freezes: l.Freezes()})
	}

	return marks, nil
}

// make reserves the names, copies the content, and records the snapshots in one commit.
func (s *snapshots) make(ctx context.Context, copy func(context.Context) error) ([]Info, error) {
	e := s.e
	s.at = time.Now().UTC()
	for i := range s.ids {
		s.ids[i] = e.newIdentity(driver.Snapshot)
		s.ids[i].Labels, s.ids[i].Request = s.labels, requestIn(ctx)
	}

	if err := e.ledger.Claim(ctx, opSnapshot, false, s.plan); err != nil {
		return nil, err
	}

	// Copy the volumes, and record the snapshots.
	s.tracker.Start("snapshotting", 0, 0)
	err := copy(ctx)
	if err == nil {
		err = s.commit(ctx)
	}
	if err != nil {
		ids := make([]driver.ObjectID, len(s.ids))
		for i, id := range s.ids {
			ids[i] = id.ID
		}
		e.ledger.DestroyUnfinished(ctx, ids...)
		return nil, errs.Wrap(opSnapshot, s.full(0), err)
	}

	infos := make([]Info, len(s.members))
	for i := range s.members {
		infos[i] = snapshotInfo(s.row(i), s.volumes[i].String(), e.caps.Name)
	}

	return infos, nil
}

// row returns the row of the snapshot of the i-th volume.
func (s *snapshots) row(i int) catalog.Row {
	m := s.members[i]
	return catalog.Row{Identity: m.Snapshot, UsedAt: s.at, Usage: cloneUsage(s.e.caps, m.Row),
		MeasuredAt: m.Row.MeasuredAt}
}

// commit records the snapshots, and removes their marks.
func (s *snapshots) commit(ctx context.Context) error {
	durable := false
	for _, m := range s.members {
		durable = durable || !m.Snapshot.Ephemeral
	}

	return s.e.cat.Update(ctx, catalog.Durability(durable), func(tx *catalog.Tx) error {
		if err := firstOf(ctx, tx, opSnapshot); err != nil {
			return err
		}

		for i, m := range s.members {
			if err := tx.PutObject(s.row(i)); err != nil {
				return err
			}
			if err := tx.Unmark(m.Snapshot.ID); err != nil {
				return err
			}
		}
		return nil
	})
}
