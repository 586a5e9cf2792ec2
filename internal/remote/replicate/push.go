package replicate

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"pando/internal/base/errs"
	"pando/internal/engine"
	"pando/internal/remote/objstore"
	"pando/internal/remote/repo"

	"golang.org/x/sync/errgroup"
)

// pointPush pushes one point to one head. The steps are the same for images and trees: see pushPoint.
type pointPush struct {
	p            *pusher
	pt           engine.Point
	name         string // of the head
	j            *journal
	tookSnapshot bool // the push took the snapshot itself
	resuming     bool // the journal has a plan for this point
	begun        time.Time

	claim    claim     // from the first read of the head
	head     headState // from the last read of the head
	links    links
	portable bool // it replaces a tree that every driver can read

	attempt int  // number of bases that have failed
	damaged bool // a base is damaged in a way that no listing shows: do not reuse nodes of a base's map
	noBase  bool // no base can be used

	// Of one attempt.
	resume        *repo.SessionState // session of the interrupted push that this one resumes
	base          base
	lower         base // of an overlay: its lower layer on the remote
	origin        *repo.Origin
	content       contentPush
	merge         bool // of an image: only the differences from the base are read
	session       repo.Session
	lease         *lease
	stats         *stats
	wroteManifest bool // a manifest that names the head may be on the remote

	lostSegments int // number of the base's segments that are missing or damaged
	note         string
	out          Pushed // once the point is on the remote
}

// contentPush has the steps that differ between block images and trees of files.
type contentPush interface {
	contentKind() repo.Content

	// openContent opens the content, and drops the base if the content cannot be stored as a difference from it.
	// unchanged reports that the content equals the base, so that the push does not need its snapshot. Errors:
	// errBaseGone, errStale.
	openContent(ctx context.Context) (unchanged bool, err error)

	// storeSegments uploads the data that is not on the remote yet, once the lease is ready. Errors: errBaseGone,
	// errBaseDamaged, engine.ErrUnchanged.
	storeSegments(ctx context.Context) error

	// describeManifest adds what was stored to the manifest.
	describeManifest(m *repo.Manifest) error
	// reportResult adds what was stored to the result.
	reportResult(out *Pushed)

	// closeContent closes what openContent opened. It may be called again.
	closeContent() error
}

// baseAttempts is the maximum number of attempts to find a base, because a base may be removed at any time, in this
// pool or from the remote. The last attempt uses no base.
const baseAttempts = 4

var (
	errStale    = errors.New("the interrupted push cannot be resumed")
	errBaseGone = errors.New("the base of this push no longer exists")
)

// pushTarget pushes one volume, snapshot or generation. The numbered comments are the steps of a push.
func (p *pusher) pushTarget(ctx context.Context, t target) error {
	// 1. Lock the journal: no other process of this pool pushes to the head.
	begun := time.Now()
	name, err := p.headOfTarget(ctx, t)
	if err != nil {
		return err
	}

	j, err := openJournal(ctx, p.r.dir, name)
	if err != nil {
		return err
	}

	defer j.releaseLock()

	// 2. Read the head, and check that this pool may write it.
	head, err := p.readHead(ctx, name)
	if err != nil {
		return err
	}

	if err := cmp.Or(p.checkWriter(head), p.checkNotOlder(head)); err != nil {
		return err
	}

	if !t.volume {
		pt, err := p.e.Point(ctx, t.ref)
		if err != nil {
			return err
		}
		return p.pushImmutable(ctx, pt, head, j, begun)
	}

	// 3. Push the snapshot of an interrupted push, or clean up what is left of that push.
	if pt, ok := p.unfinishedPoint(ctx, j, t.ref.Name); ok {
		x := &pointPush{
			p: p, pt: pt, name: name, head: head, j: j, tookSnapshot: true, resuming: j.plan.Object != "", begun: begun,
		}
		if err := x.pushPoint(ctx); err != nil {
			return err
		}
		begun = time.Now()
		if head, err = p.readHead(ctx, name); err != nil {
			return err
		}
	} else if err := p.forgetUnfinished(ctx, j); err != nil {
		return err
	}

	// 4. Take a snapshot of the volume as it is now.
	pt, err := p.takeSnapshot(ctx, t.ref.Name, j)
	if err != nil {
		return err
	}

	return (&pointPush{p: p, pt: pt, name: name, head: head, j: j, tookSnapshot: true, begun: begun}).pushPoint(ctx)
}

// pushImmutable pushes a snapshot or generation that existed before this push.
func (p *pusher) pushImmutable(
	ctx context.Context, pt engine.Point, head headState, j *journal, begun time.Time,
) error {
	x := &pointPush{p: p, pt: pt, name: head.Name, head: head, j: j, begun: begun}
	if x.resuming = j.plan != nil && j.plan.Object == string(pt.ID); !x.resuming {
		if err := p.forgetUnfinished(ctx, j); err != nil {
			return err
		}
	}
	return x.pushPoint(ctx)
}

// pushPoint pushes the point. After any error, either the journal has what a later push needs to resume, or the push
// left nothing behind. Even with an error, p.pushed has the point if it is on the remote.
func (x *pointPush) pushPoint(ctx context.Context) error {
	// 5. Remember who may write the head, and check that the point fits into it.
	x.claim = x.head.claim()
	if err := x.p.checkFits(ctx, x.head, x.pt); err != nil {
		return x.discardPush(ctx, err)
	}

	// 6. If the head lists the point, and the point is intact, nothing is left to upload.
	there, err := x.finishIfThere(ctx)
	if err == nil && !there {
		err = x.pushContent(ctx)
		if isPermanent(err) {
			err = x.discardPush(ctx, err)
		}
		err = withPointRef(err, x.pt)
	}

	if x.out.Manifest != "" {
		x.out.Seconds = time.Since(x.begun).Seconds()
		x.p.pushed = append(x.p.pushed, x.out)
	}

	return err
}

// pushContent pushes a point that is not on the remote. It tries one base after another until a push succeeds.
func (x *pointPush) pushContent(ctx context.Context) error {
	// 7. Find the session of an interrupted push, or give it up.
	if err := x.findUnfinished(ctx); err != nil {
		return err
	}
	for x.attempt < baseAttempts {
		retry, err := x.endAttempt(ctx, x.tryBase(ctx))
		if !retry {
			return err
		}
	}
	return errs.New(errs.Conflict, opPush, x.pt.Ref, "the base of this push was removed %d times", x.attempt).
		WithHint("run the push again")
}

// tryBase takes the steps that depend on the base. endAttempt handles its result.
func (x *pointPush) tryBase(ctx context.Context) error {
	// 8. Choose the base.
	x.lease, x.stats, x.merge, x.content = nil, &stats{}, false, contentOf(x)
	if err := x.findBase(ctx); err != nil {
		return err
	}

	if err := x.findLower(ctx); err != nil {
		return err
	}

	// 9. Open the content, and compare it with the base as far as that is cheap.
	unchanged, err := x.content.openContent(ctx)
	defer x.content.closeContent()

	if err != nil {
		return err
	}

	// 10. If nothing has changed, remove the snapshot and stop.
	if unchanged {
		return x.endUnchanged(ctx)
	}

	// 11. Record in the journal what this push is about to do.
	if err := x.journalPlan(); err != nil {
		return err
	}

	leased, l := newLease(ctx, x.p.repo, x.session)
	l.noteToken = x.j.appendToken
	x.lease = l

	// 12. Upload all data, pin the base, and check that it is still listed.
	if err := x.storeContent(leased); err != nil {
		return err
	}

	// 13. Upload the manifest.
	m, err := x.putManifest(leased)
	if err != nil {
		return err
	}

	// 14. Add the point to the head. From here on it is on the remote.
	if err := x.commitHead(leased, m); err != nil {
		return err
	}

	// 15. Close the content, so that it may be destroyed.
	if err := x.content.closeContent(); err != nil {
		return err
	}

	// 16. Record the point in the catalogue. Remove the session, the journal and the snapshots of earlier pushes.
	return x.rememberPoint(ctx, m.ID, x.lease.endSession)
}

// finishIfThere finishes the push of a point that the head already lists and that is intact: it was pushed or pulled
// before, or a push was killed just after its commit. It reports whether it did. A damaged point is pushed again, in
// its place.
func (x *pointPush) finishIfThere(ctx context.Context) (bool, error) {
	var err error
	if x.links, err = x.p.loadLinks(ctx); err != nil {
		return false, err
	}

	// Find the point in the head.
	at, there, err := x.p.findPushed(ctx, x.head, x.pt, x.links)
	if err != nil || !there {
		return false, err
	}

	// Prepare to push it again if data is missing, or if the request says so.
	missing, err := x.p.findLost(ctx, at.Manifest)
	if err != nil {
		return false, err
	}

	if x.pt.IsOverlay() && !missing.any() {
		if missing, err = x.p.findLost(ctx, at.OriginID); err != nil {
			return false, err
		}
	}

	if missing.any() || x.p.q.Full || x.p.needsOtherForm(at) {
		x.lostSegments = len(missing.segments)
		return false, x.p.preparePushAgain(ctx, x, at)
	}

	// Finish.
	x.out = x.newResult(at)
	x.out.Unchanged, x.out.Resumed = !x.resuming, x.resuming
	end := func(ctx context.Context) error { return x.p.endPlannedSession(ctx, x.j) }
	return true, x.rememberPoint(ctx, at.Manifest, end)
}

// findUnfinished finds the session of an interrupted push of this point. If the push cannot be resumed, it ends the
// session. A stream, for example, cannot be resumed in the middle.
func (x *pointPush) findUnfinished(ctx context.Context) error {
	if !x.resuming {
		return nil
	}
	if x.pt.FS.IsImage() && (!x.p.q.Full || x.j.plan.Manifest.IsZero()) {
		err := x.findSession(ctx)
		if !errors.Is(err, errStale) {
			return err
		}
	}
	return x.abandonSession(ctx)
}

// abandonSession ends the session of the interrupted push, so that this push starts from the beginning.
func (x *pointPush) abandonSession(ctx context.Context) error {
	x.resume, x.resuming, x.wroteManifest = nil, false, false
	return x.p.endPlannedSession(ctx, x.j)
}

// findBase sets the base: the plan's when resuming, otherwise the best one that is intact. The last attempt uses no
// base.
func (x *pointPush) findBase(ctx context.Context) error {
	switch {
	case x.resume != nil:
		return x.usePlannedBase(ctx)
	case x.noBase:
		x.base = base{}
		return nil
	}

	x.base, x.origin = base{}, nil
	if x.attempt == baseAttempts-1 {
		return nil
	}

	b, origin, err := x.chooseBase(ctx)
	if err != nil {
		return err
	}

	x.origin = origin
	if x.base, err = x.p.intactBase(ctx, x, b); err == nil && x.damaged {
		x.base.object, x.base.newest = "", false
	}

	return err
}

// journalPlan records in the journal what this push is about to do: its session and its base.
func (x *pointPush) journalPlan() error {
	if x.resume != nil {
		x.session = x.resume.Session
		return nil // its session pins what the plan names
	}

	x.session = x.p.repo.NewSession(repo.Push, []string{x.name}, x.p.me)
	x.session.Token = repo.NewID()
	id := x.base.point.Manifest
	for _, b := range []base{x.base, x.lower} {
		if pin := b.point.Manifest; !pin.IsZero() && !slices.Contains(x.session.Pins, pin) {
			x.session.Pins = append(x.session.Pins, pin)
		}
	}

	return x.j.replacePlan(plan{
		Snapshot: x.pt.Ref, Session: x.session.ID, Token: x.session.Token, Object: string(x.pt.ID), Took: x.tookSnapshot,
		Base: string(x.base.object),
		Head: x.base.head, Manifest: id, Merge: x.merge, Origin: x.origin,
	}, false)
}

// storeContent uploads all data. At the same time it writes the session, which pins the base, and then reads the head
// again, because a base that the head no longer lists cannot be used.
func (x *pointPush) storeContent(ctx context.Context) error {
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error { return x.confirmBase(ctx, gctx) })
	g.Go(func() error { return x.content.storeSegments(gctx) })
	err := g.Wait()
	if cause := context.Cause(ctx); err != nil && errors.Is(cause, errEnded) {
		return cause
	}
	return err
}

// confirmBase writes the session, which lives as long as ctx, and then checks that the base is still listed.
func (x *pointPush) confirmBase(ctx, gctx context.Context) error {
	err := x.lease.start(ctx)
	if errors.Is(err, errEnded) && x.resume != nil {
		return errStale
	}
	if err != nil {
		return err
	}

	head, listed, err := x.p.confirmListed(gctx, x, x.base)
	if err == nil && listed {
		listed, err = x.confirmLower(gctx)
	}
	if err != nil {
		return err
	}
	if !listed {
		return errBaseGone
	}

	x.head = head
	return nil
}

// putManifest uploads the manifest.
func (x *pointPush) putManifest(ctx context.Context) (*repo.Manifest, error) {
	pt := x.pt
	order, err := x.stateOrder(ctx)
	if err != nil {
		return nil, err
	}

	m := &repo.Manifest{
		ID: repo.NewID(), Volume: x.name, Point: pt.Name, Content: x.content.contentKind(), FS: string(pt.FS),
		SizeBytes: pt.SizeBytes, Sector: pt.Sector, CreatedAt: pt.CreatedAt, StateOrder: order,
		Consistency: string(pt.Consistency), Source: string(pt.ID), Session: x.session.ID, Parent: x.base.point.Manifest,
		Origin: x.origin, Added: x.stats.uploaded.Load(),
	}

	if err := x.content.describeManifest(m); err != nil {
		return nil, err
	}

	if x.pt.IsOverlay() {
		m.MarkOverlay()
	}

	x.wroteManifest = true
	return m, x.p.repo.PutManifest(ctx, *m)
}

// commitHead adds the point to the head, and sets the result. From then on the point is on the remote, whatever fails
// later.
func (x *pointPush) commitHead(ctx context.Context, m *repo.Manifest) error {
	head, at, err := x.p.commitPoint(ctx, x.lease, x.claim, x.head, x.pt, m)
	if err != nil {
		return err
	}

	x.head = head
	for s, n := range x.stats.sizes {
		if x.p.sizes != nil {
			x.p.sizes[s] = int64(n)
		}
	}

	x.out = x.newResult(at)
	x.out.Base, x.out.Resumed = x.base.ref(), x.resume != nil
	x.out.ReadBytes, x.out.UploadedBytes = x.stats.read.Load(), x.stats.uploaded.Load()
	x.out.Segments = x.stats.segments.Load()
	x.content.reportResult(&x.out)
	return nil
}

// rememberPoint does the work after a commit: it records the point in the catalogue, ends the session, and removes what
// only served earlier pushes. The point is on the remote even if this fails.
func (x *pointPush) rememberPoint(ctx context.Context, manifest repo.ID, end func(context.Context) error) error {
	ctx = context.WithoutCancel(ctx)
	p, id := x.p, manifest.String()
	err := p.e.PutLink(ctx, engine.Link{Repo: p.repoID, Manifest: id, Object: x.pt.ID})
	if err == nil {
		err = p.e.PutRemoteHead(ctx, engine.RemoteHead{
			Repo: p.repoID, Name: x.name, Lineage: x.pt.Lineage, Epoch: x.head.Epoch, NextSeq: x.head.NextSeq,
			Manifest: id, At: time.Now(),
		})
	}
	if err != nil {
		return err
	}

	// If the session cannot be ended, the push has succeeded nevertheless: a prune ends the session.
	if eerr := end(ctx); eerr != nil && !objstore.Temporary(eerr) && !errs.Is(eerr, errs.IO) {
		err = eerr
	}

	// Remove the journal's records and old snapshots.
	if cerr := x.j.reset(); cerr != nil {
		err = errors.Join(err, errs.Wrap(opPush, x.pt.Ref, cerr))
	}

	if x.tookSnapshot {
		err = errors.Join(err, p.cleanSnapshots(ctx, x.pt, x.head))
	}

	return err
}

// endUnchanged ends the push of a volume that has not changed since its newest point on the remote.
func (x *pointPush) endUnchanged(ctx context.Context) error {
	x.out = x.newResult(x.base.point)
	x.out.Unchanged, x.out.Base = true, x.base.ref()
	if o, err := x.p.e.PointByID(ctx, x.base.object); err == nil {
		x.out.Ref = o.Ref
	}

	if err := x.content.closeContent(); err != nil {
		return err
	}

	if err := x.p.destroySnapshot(ctx, x.pt.Ref); err != nil {
		return err
	}

	return x.j.reset()
}

// endAttempt handles the result of an attempt. It ends the attempt's session or keeps it for a later push, and decides
// whether to try again in another way, or which error the push returns.
func (x *pointPush) endAttempt(ctx context.Context, err error) (retry bool, _ error) {
	ended, unchanged := errors.Is(err, errEnded), errors.Is(err, engine.ErrUnchanged)
	removed, damaged := errors.Is(err, errBaseGone), errors.Is(err, errBaseDamaged)
	stale := x.resume != nil && (removed || damaged || errors.Is(err, errStale))

	// End the session, or leave it to be resumed.
	switch l := x.lease; {
	case err == nil || l == nil:
	case unchanged:
		if err := l.endSession(ctx); err != nil {
			return false, err
		}
	case ended, (stale || removed || damaged || isPermanent(err)) && !(x.wroteManifest && !x.p.mayEndSession(ctx, x.name)):
		_ = l.endSession(ctx) // if this fails, a later prune ends it
	default:
		l.abandon()
	}

	// Decide how to go on.
	switch {
	case unchanged:
		return false, x.endUnchanged(ctx)
	case ended: // the uploaded data may be removed already
		return false, endedPushError(x.pt.Ref)
	case stale:
		return true, x.abandonSession(ctx)
	case damaged:
		x.damaged = true
		x.noteDamagedBase(x.base)
	case removed:
		if err := x.refreshBase(ctx); err != nil {
			return false, err
		}
	case errs.Is(err, errs.Unsupported) && x.content.contentKind().Chained() && x.base.object != "":
		x.noBase = true // this base cannot be used
	default:
		return false, err
	}

	x.attempt++
	return true, nil
}

// endedPushError returns the error, of kind Conflict, of a push whose session is gone.
func endedPushError(point string) error {
	return errs.New(errs.Conflict, opPush, point, "nothing was pushed, because the session of this push is no longer on "+
		"the remote and its data may be deleted: a prune found it expired, or someone deleted it from the store").
		WithHint("run the push again: it sends the data again; if this repeats, make sure that no lifecycle rule of the " +
			"store deletes objects below sessions/")
}

// refreshBase reloads links and the head after a base was removed, and drops the link to that base. Errors: Conflict if
// the head was taken over in the meantime.
func (x *pointPush) refreshBase(ctx context.Context) (err error) {
	if x.base.object != "" {
		if err := x.p.e.DropLink(ctx, x.p.repoID, x.base.point.Manifest.String()); err != nil {
			return err
		}
	}

	if x.links, err = x.p.loadLinks(ctx); err != nil {
		return err
	}

	if x.head, err = x.p.readHead(ctx, x.name); err != nil {
		return err
	}

	return x.p.checkClaim(x.head, x.claim)
}
