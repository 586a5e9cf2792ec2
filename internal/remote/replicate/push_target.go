package replicate

import (
	"context"
	"errors"
	"path/filepath"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/remote/objstore"
	"pando/internal/remote/repo"
)

// snapshot takes a snapshot of a volume to be pushed.
func (p *pusher) takeSnapshot(ctx context.Context, name string, j *journal) (engine.Point, error) {
	vol, err := ref.ParseName(opPush, name)
	if err != nil {
		return engine.Point{}, err
	}

	for {
		at := ref.MustName(pushName(time.Now()))
		snap := vol.At(at)

		// Who cleans up must know that somebody is about to use it. After a power loss a
		// snapshot that nobody uses is recognised without this.
		if err := j.beginPlan(plan{Snapshot: snap.String(), Took: true}, false); err != nil {
			return engine.Point{}, err
		}

		q := engine.SnapshotRequest{Volume: vol, Name: at, Freeze: p.q.Freeze, Tracker: p.q.Tracker}
		_, err := p.e.Snapshot(ctx, q)
		if err == nil {
			return p.e.Point(ctx, snap)
		}

		if err := errors.Join(err, j.reset()); !errs.Is(err, errs.Exists) {
			return engine.Point{}, err
		}

		// A push to another remote has taken one in this very millisecond.
		select {
		case <-ctx.Done():
			return engine.Point{}, errs.Wrap(opPush, name, ctx.Err())
		case <-time.After(time.Millisecond):
		}
	}
}

// unfinished finds the snapshot that an interrupted push of a volume had taken.
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

// forget gives up what the journal has of an unfinished push.
func (p *pusher) forgetUnfinished(ctx context.Context, j *journal) error {
	if err := p.endPlannedSession(ctx, j); err != nil {
		return err
	}
	return errs.Wrap(opPush, filepath.Base(j.path), j.reset())
}

// endPlanned ends the session of an unfinished push, if it may be ended: not one that a copy of this pool, which has
// the same journal, has gone on with. Its journal still says which snapshot it is of, so that nobody destroys that.
func (p *pusher) endPlannedSession(ctx context.Context, j *journal) error {
	if j.plan == nil || j.plan.Session.IsZero() || !p.mayEndSession(ctx, filepath.Base(j.path)) {
		return nil
	}

	s, err := p.repo.Session(ctx, j.plan.Session)
	switch {
	case errs.Is(err, errs.NotFound):
		return nil
	case isUnreadable(err) || err == nil && !j.ownsSession(s.Session):
		return nil // a prune ends it, if nobody is at work there
	case err != nil:
		return err
	}

	return p.repo.EndSession(ctx, &s.Session)
}

// mayEnd reports whether a session that has perhaps written a manifest may be ended before it commits: not if the
// volume has no head yet. Heads are never deleted, so a manifest without session and head tells of a head that was
// lost. A prune ends the session, and makes the head.
func (p *pusher) mayEndSession(ctx context.Context, head string) bool {
	_, _, err := p.repo.Head(ctx, head)
	return err == nil || isUnreadable(err) && !errs.Is(err, errs.NotFound)
}

// named makes an error about an object one about what people call it.
func withPointRef(err error, pt engine.Point) error {
	var known *errs.Error
	if !errors.As(err, &known) || known.Ref != string(pt.ID) {
		return err
	}
	out := *known
	out.Ref = pt.Ref
	return &out
}

// hopeless reports whether a push that failed so cannot be gone on with.
func isPermanent(err error) bool {
	switch errs.KindOf(err) {
	case errs.Conflict, errs.Exists, errs.Unsupported:
		return !objstore.Temporary(err)
	}
	return false
}

// result begins the result of a push.
func (x *pointPush) newResult(at repo.Point) Pushed {
	return Pushed{
		Ref: x.pt.Ref, Volume: x.name, Point: at.Name, Golden: x.pt.Golden, Manifest: at.Manifest.String(),
		Content: string(at.Content), Origin: at.OriginRef, SizeBytes: at.SizeBytes, LogicalBytes: at.Logical,
		Epoch: x.head.Epoch, Note: x.note, LostSegments: x.lostSegments,
	}
}

// discard ends a push that cannot be gone on with, for err, and leaves nothing of it.
func (x *pointPush) discardPush(ctx context.Context, err error) error {
	ctx = context.WithoutCancel(ctx)
	_ = x.p.endPlannedSession(ctx, x.j) // else a prune does, sometime
	if cerr := x.j.reset(); cerr != nil {
		return errors.Join(err, cerr)
	}
	if x.tookSnapshot {
		_ = x.p.destroySnapshot(ctx, x.pt.Ref) // else the next push does
	}
	return err
}
