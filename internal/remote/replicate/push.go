package replicate

import (
	"cmp"
	"context"
	"errors"
	"time"

	"pando/internal/base/errs"
	"pando/internal/engine"
	"pando/internal/remote/objstore"
	"pando/internal/remote/repo"

	"golang.org/x/sync/errgroup"
)

// pointPush is the push of one point to one head, whatever the point is: see push for its steps.
type pointPush struct {
	p            *pusher
	pt           engine.Point
	name         string // of the head
	j            *journal
	tookSnapshot bool // the snapshot was taken for this push
	resuming     bool // the journal has its plan
	begun        time.Time

	claim    claim     // as the head was first read
	head     headState // as it was read last
	links    links
	portable bool // what it replaces is a tree that every driver can read

	attempt int  // how many bases have failed
	damaged bool // in a way that no listing shows: nothing of the map of a base may be used again
	noBase  bool // no base can serve

	// Of one attempt.
	resume        *repo.SessionState // of what is gone on with
	base          base
	origin        *repo.Origin
	content       contentPush
	merge         bool // of an image: what is read of it is what differs from the base
	session       repo.Session
	lease         *lease
	stats         *stats
	wroteManifest bool // a manifest may be there that names the head

	lostSegments int // segments of what it builds upon that were not there
	note         string
	out          Pushed // once the point is there
}

// contentPush is what a push of a block image does differently from one of a tree of files.
type contentPush interface {
	contentKind() repo.Content

	// open opens what is read, and drops the base if the content cannot be stored as what differs from it. unchanged:
	// it is what the base is, so that a snapshot that was taken for this push is not needed. errBaseGone, errStale.
	openContent(ctx context.Context) (unchanged bool, err error)

	// store puts what is not on the remote yet into segments, once the lease is ready. errBaseGone, errBaseDamaged,
	// engine.ErrUnchanged.
	storeSegments(ctx context.Context) error

	// describe adds what was stored to the manifest, and report to the result.
	describeManifest(m *repo.Manifest) error
	reportResult(out *Pushed)

	// close lets go of what open has opened. Again is no error.
	closeContent() error
}

// baseAttempts is how often a base is looked for, which somebody may be removing, here
// or there. The last attempt is without one.
const baseAttempts = 4

var (
	errStale    = errors.New("the interrupted push cannot be resumed")
	errBaseGone = errors.New("the base of this push no longer exists")
)

// target pushes one volume, snapshot or generation.
func (p *pusher) pushTarget(ctx context.Context, t target) error {
	// 1. Nobody else of this pool pushes to the head.
	begun := time.Now()
	name := cmp.Or(p.q.As.String(), t.ref.Name)
	j, err := openJournal(ctx, p.r.dir, name)
	if err != nil {
		return err
	}

	defer j.releaseLock()

	// 2. The head is read, and this pool may write it.
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

	// 3. The snapshot that an earlier push had taken is pushed, or nothing is left of it.
	if pt, ok := p.unfinishedPoint(ctx, j, t.ref.Name); ok {
		x := &pointPush{p: p, pt: pt, name: name, head: head, j: j, tookSnapshot: true, resuming: j.plan.Object != "", begun: begun}
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

	// 4. There is a snapshot of what the volume is now.
	pt, err := p.takeSnapshot(ctx, t.ref.Name, j)
	if err != nil {
		return err
	}

	return (&pointPush{p: p, pt: pt, name: name, head: head, j: j, tookSnapshot: true, begun: begun}).pushPoint(ctx)
}

// immutable pushes a snapshot or generation that was there before.
func (p *pusher) pushImmutable(ctx context.Context, pt engine.Point, head headState, j *journal, begun time.Time) error {
	x := &pointPush{p: p, pt: pt, name: head.Name, head: head, j: j, begun: begun}
	if x.resuming = j.plan != nil && j.plan.Object == string(pt.ID); !x.resuming {
		if err := p.forgetUnfinished(ctx, j); err != nil {
			return err
		}
	}
	return x.pushPoint(ctx)
}

// push pushes the point. Whatever the error, either the journal has what is needed to go on, or the push left nothing
// behind. The result says what is on the remote even so.
func (x *pointPush) pushPoint(ctx context.Context) error {
	// 5. This pool may write the head, and the point fits into it.
	x.claim = x.head.claim()
	if err := x.p.checkFits(ctx, x.head, x.pt); err != nil {
		return x.discardPush(ctx, err)
	}

	// 6. If the head lists the point, and it is whole, it is done.
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

// pushContent pushes a point that is not there, with one base after the other until one holds.
func (x *pointPush) pushContent(ctx context.Context) error {
	// 7. What an interrupted push has left is found, or given up.
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

// try takes the steps that depend on the base. What comes of it is for after.
func (x *pointPush) tryBase(ctx context.Context) error {
	// 8. It is known what to build upon.
	x.lease, x.stats, x.merge, x.content = nil, &stats{}, false, contentOf(x)
	if err := x.findBase(ctx); err != nil {
		return err
	}

	// 9. The content is open, and compared with the base as far as that costs little.
	unchanged, err := x.content.openContent(ctx)
	defer x.content.closeContent()

	if err != nil {
		return err
	}

	// 10. If nothing has changed, nothing is left to do, and of the snapshot nothing.
	if unchanged {
		return x.endUnchanged(ctx)
	}

	// 11. The journal says what this push is about to do.
	if err := x.journalPlan(); err != nil {
		return err
	}

	leased, l := newLease(ctx, x.p.repo, x.session)
	l.noteToken = x.j.appendToken
	x.lease = l

	// 12. All data is on the remote, and the base is pinned and still listed.
	if err := x.storeContent(leased); err != nil {
		return err
	}

	// 13. The manifest is on the remote.
	m, err := x.putManifest(leased)
	if err != nil {
		return err
	}

	// 14. The head lists the point.
	if err := x.commitHead(leased, m); err != nil {
		return err
	}

	// 15. What was read may be destroyed.
	if err := x.content.closeContent(); err != nil {
		return err
	}

	// 16. This pool remembers the point. Session, journal and the snapshots of earlier pushes are gone.
	return x.rememberPoint(ctx, m.ID, x.lease.endSession)
}

// finishIfThere finishes the push of a point that the head lists already, and that is whole: its content was pushed or
// pulled before, or a push was killed just after its commit. One that is not whole is pushed once more, in its place.
func (x *pointPush) finishIfThere(ctx context.Context) (bool, error) {
	var err error
	if x.links, err = x.p.loadLinks(ctx); err != nil {
		return false, err
	}

	at, there, err := x.p.findPushed(ctx, x.head, x.pt, x.links)
	if err != nil || !there {
		return false, err
	}

	gone, err := x.p.findLost(ctx, at.Manifest)
	if err != nil {
		return false, err
	}

	if gone.any() || x.p.q.Full || x.p.needsOtherForm(at) {
		x.lostSegments = len(gone.segments)
		return false, x.p.preparePushAgain(ctx, x, at)
	}

	x.out = x.newResult(at)
	x.out.Unchanged, x.out.Resumed = !x.resuming, x.resuming
	end := func(ctx context.Context) error { return x.p.endPlannedSession(ctx, x.j) }
	return true, x.rememberPoint(ctx, at.Manifest, end)
}

// findUnfinished finds what an interrupted push of this point has left, and ends what cannot be gone on with: a
// stream cannot be in its middle.
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

// forgetSession begins afresh.
func (x *pointPush) abandonSession(ctx context.Context) error {
	x.resume, x.resuming, x.wroteManifest = nil, false, false
	return x.p.endPlannedSession(ctx, x.j)
}

// findBase finds out what to build upon: what the plan says, or else the best that is intact. In the last attempt that
// is nothing, whatever is there.
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

// journalPlan makes the journal say what this push sets out to do: under which session, and with which base.
func (x *pointPush) journalPlan() error {
	if x.resume != nil {
		x.session = x.resume.Session
		return nil
	}

	x.session = x.p.repo.NewSession(repo.Push, []string{x.name}, x.p.me)
	x.session.Token = repo.NewID()
	id := x.base.point.Manifest
	if !id.IsZero() {
		x.session.Pins = []repo.ID{id}
	}

	return x.j.replacePlan(plan{
		Snapshot: x.pt.Ref, Session: x.session.ID, Token: x.session.Token, Object: string(x.pt.ID), Took: x.tookSnapshot,
		Base: string(x.base.object),
		Head: x.base.head, Manifest: id, Merge: x.merge, Origin: x.origin,
	}, false)
}

// storeContent puts all data on the remote. In the same time the session is written, which pins the base, and the head
// is read again: what it does not list any more cannot be built upon.
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

// confirmBase writes the session, which lives as long as ctx, and then makes sure that the base is still listed.
func (x *pointPush) confirmBase(ctx, gctx context.Context) error {
	err := x.lease.start(ctx)
	if errors.Is(err, errEnded) && x.resume != nil {
		return errStale
	}
	if err != nil {
		return err
	}

	head, listed, err := x.p.confirmListed(gctx, x, x.base)
	if err != nil {
		return err
	}
	if !listed {
		return errBaseGone
	}

	x.head = head
	return nil
}

// putManifest puts the manifest on the remote.
func (x *pointPush) putManifest(ctx context.Context) (*repo.Manifest, error) {
	pt := x.pt
	m := &repo.Manifest{
		ID: repo.NewID(), Volume: x.name, Point: pt.Name, Content: x.content.contentKind(), FS: string(pt.FS),
		SizeBytes: pt.SizeBytes, Sector: pt.Sector, CreatedAt: pt.CreatedAt, Consistency: string(pt.Consistency),
		Source: string(pt.ID), Session: x.session.ID, Parent: x.base.point.Manifest, Origin: x.origin,
		Added: x.stats.uploaded.Load(),
	}

	if err := x.content.describeManifest(m); err != nil {
		return nil, err
	}

	x.wroteManifest = true
	if m.Version == 2 { // programs that do not know such manifests must not take them for damage
		if err := x.p.repo.Upgrade(ctx); err != nil {
			return nil, err
		}
	}

	return m, x.p.repo.PutManifest(ctx, *m)
}

// commitHead makes the head list the point. From here on it is there, whatever comes of the rest.
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

// rememberPoint is what follows a commit: remember it here, end the session, and let go of
// what only served earlier pushes. The point is on the remote whatever comes of this.
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

	// A session that stays is ended by a prune; the push has succeeded.
	if eerr := end(ctx); eerr != nil && !objstore.Temporary(eerr) && !errs.Is(eerr, errs.IO) {
		err = eerr
	}

	if cerr := x.j.reset(); cerr != nil {
		err = errors.Join(err, errs.Wrap(opPush, x.pt.Ref, cerr))
	}

	if x.tookSnapshot {
		err = errors.Join(err, p.cleanSnapshots(ctx, x.pt, x.head))
	}

	return err
}

// endUnchanged ends the push of a volume in which nothing has changed since its newest point there.
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

// after ends or keeps what an attempt has begun on the remote, and decides what follows from how it went: whether it is
// tried again, which must then begin otherwise, or what the error of the push is.
func (x *pointPush) endAttempt(ctx context.Context, err error) (retry bool, _ error) {
	ended, unchanged := errors.Is(err, errEnded), errors.Is(err, engine.ErrUnchanged)
	gone, damaged := errors.Is(err, errBaseGone), errors.Is(err, errBaseDamaged)
	stale := x.resume != nil && (gone || damaged || errors.Is(err, errStale))

	switch l := x.lease; {
	case err == nil || l == nil:
	case unchanged:
		if err := l.endSession(ctx); err != nil {
			return false, err
		}
	case ended, (stale || gone || damaged || isPermanent(err)) && !(x.wroteManifest && !x.p.mayEndSession(ctx, x.name)):
		_ = l.endSession(ctx) // else a prune does, sometime
	default:
		l.abandon()
	}

	switch {
	case unchanged:
		return false, x.endUnchanged(ctx)
	case ended: // what was uploaded may be gone already
		return false, errs.New(errs.Conflict, opPush, x.pt.Ref,
			"a prune ended this push because it showed no sign of life").WithHint("run the push again")
	case stale:
		return true, x.abandonSession(ctx)
	case damaged:
		x.damaged = true
		x.note = x.base.ref() + " on the remote is damaged: its missing data was sent again"
	case gone:
		if err := x.refreshBase(ctx); err != nil {
			return false, err
		}
	case errs.Is(err, errs.Unsupported) && x.content.contentKind().Chained() && x.base.object != "":
		x.noBase = true // the base cannot serve as one
	default:
		return false, err
	}

	x.attempt++
	return true, nil
}

// lookAgain finds what there is to build upon, now that a base is gone. Conflict if the head was
// taken over in the meantime.
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
