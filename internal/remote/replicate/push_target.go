package replicate

import (
	"context"
	"errors"
	"path/filepath"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/remote/objstore"
	"pando/internal/remote/repo"
)

// takeSnapshot takes a snapshot of a volume to push, and records it in the journal first.
func (p *pusher) takeSnapshot(ctx context.Context, name string, j *journal) (engine.Point, error) {
	vol, err := ref.ParseName(opPush, name)
	if err != nil {
		return engine.Point{}, err
	}

	// Refuse what cannot be pushed before there is a snapshot of it, which nothing would remove. A volume is no point,
	// and therefore Invalid.
	if _, err := p.e.Point(ctx, vol.Ref()); err != nil && !errs.Is(err, errs.Invalid) {
		return engine.Point{}, err
	}

	for {
		at := ref.MustName(pushName(time.Now()))
		snap := vol.At(at)

		// Tell pushes that clean up that this one is about to use the snapshot. The record need not survive a power loss:
		// then nothing uses the snapshot, and it is recognised as unused without the record.
		if err := j.beginPlan(plan{Snapshot: snap.String(), Took: true}, false); err != nil {
			return engine.Point{}, err
		}

		q := engine.SnapshotRequest{Volume: vol, Name: at, Freeze: p.q.Freeze}
		_, err := p.e.Snapshot(ctx, q)
		if err == nil {
			return p.e.Point(ctx, snap)
		}

		if err := errors.Join(err, j.reset()); !errs.Is(err, errs.Exists) {
			return engine.Point{}, err
		}

		// A push to another remote took a snapshot in the same millisecond.
		select {
		case <-ctx.Done():
			return engine.Point{}, errs.Wrap(opPush, name, ctx.Err())
		case <-time.After(time.Millisecond):
		}
	}
}

// unfinishedPoint finds the snapshot that an interrupted push of a volume took. It reports whether there is one.
func (p *pusher) unfinishedPoint(ctx context.Context, j *journal, volume string) (engine.Point, bool) {
	if j.plan == nil || !j.plan.Took {
		return engine.Point{}, false
	}

	if id := j.plan.Object; id != "" {
		pt, err := p.e.PointByID(ctx, driver.ObjectID(id))
		return pt, err == nil && pt.Volume == volume
	}

	r, err := ref.Parse(opPush, j.plan.Snapshot)
	if err != nil || r.Name != volume {
		return engine.Point{}, false
	}

	pt, err := p.e.Point(ctx, r)
	return pt, err == nil
}

// forgetUnfinished gives up the unfinished push in the journal: it ends the session and deletes the records.
func (p *pusher) forgetUnfinished(ctx context.Context, j *journal) error {
	if err := p.endPlannedSession(ctx, j); err != nil {
		return err
	}
	return errs.Wrap(opPush, filepath.Base(j.path), j.reset())
}

// endPlannedSession ends the session of an unfinished push if that is allowed. It does not end a session that a copy of
// this pool, which has the same journal, has resumed. The journal keeps the plan, which protects its snapshot from
// being destroyed.
func (p *pusher) endPlannedSession(ctx context.Context, j *journal) error {
	if j.plan == nil || j.plan.Session.IsZero() || !p.mayEndSession(ctx, filepath.Base(j.path)) {
		return nil
	}

	s, err := p.repo.Session(ctx, j.plan.Session)
	switch {
	case errs.Is(err, errs.NotFound):
		return nil
	case isUnreadable(err) || err == nil && !j.ownsSession(s.Session):
		return nil // a prune ends it once it shows no sign of life
	case err != nil:
		return err
	}

	return p.repo.EndSession(ctx, &s.Session)
}

// mayEndSession reports whether a session that may have written a manifest can be ended before it commits. It cannot if
// the volume has no head yet: heads are never deleted, so a manifest without a session and without a head means that a
// head was lost. A prune ends such a session, and makes the head.
func (p *pusher) mayEndSession(ctx context.Context, head string) bool {
	_, _, err := p.repo.Head(ctx, head)
	return err == nil || isUnreadable(err) && !errs.Is(err, errs.NotFound)
}

// withPointRef replaces the object ID in an error by the reference of the point.
func withPointRef(err error, pt engine.Point) error {
	var known *errs.Error
	if !errors.As(err, &known) || known.Ref != string(pt.ID) {
		return err
	}
	out := *known
	out.Ref = pt.Ref
	return &out
}

// isPermanent reports whether a push that failed with err cannot be resumed.
func isPermanent(err error) bool {
	switch errs.KindOf(err) {
	case errs.Conflict, errs.Exists, errs.Unsupported:
		return !objstore.Temporary(err)
	}
	return false
}

// newResult returns the result of a push, as far as the head's point determines it.
func (x *pointPush) newResult(at repo.Point) Pushed {
	kind := api.KindSnapshot
	if x.pt.Golden {
		kind = api.KindGeneration
	}
	return Pushed{
		Ref: x.pt.Ref, Kind: kind, RemoteRef: x.name + "@" + at.Name, Volume: x.name, Point: at.Name,
		Manifest: at.Manifest.String(),
		Content:  string(at.Content), Origin: at.OriginRef, SizeBytes: at.SizeBytes, LogicalBytes: at.Logical,
		Epoch: x.head.Epoch, Note: x.note, LostSegments: x.lostSegments,
	}
}

// discardPush ends a push that failed with err and cannot be resumed, and removes what it left. It returns err.
func (x *pointPush) discardPush(ctx context.Context, err error) error {
	ctx = context.WithoutCancel(ctx)
	_ = x.p.endPlannedSession(ctx, x.j) // if this fails, a later prune ends it
	if cerr := x.j.reset(); cerr != nil {
		return errors.Join(err, cerr)
	}
	if x.tookSnapshot {
		_ = x.p.destroySnapshot(ctx, x.pt.Ref) // if this fails, the next push destroys it
	}
	return err
}
