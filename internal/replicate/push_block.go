package replicate

import (
	"context"
	"errors"
	"iter"
	"slices"
	"sync"
	"time"

	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/errs"
	"pando/internal/objstore"
	"pando/internal/repo"

	"golang.org/x/sync/errgroup"
)

// block pushes a point that is a block image.
func (p *pusher) block(ctx context.Context, jb *job, h headState, l links) (Pushed, error) {
	if jb.goOn && (!p.q.Full || jb.j.plan.Manifest.IsZero()) {
		out, err := p.resumeBlock(ctx, jb, h)
		if !errors.Is(err, errStale) {
			return out, err
		}
		if err := p.endPlanned(ctx, jb.j); err != nil {
			return Pushed{}, err
		}
		jb.goOn = false
	}
	damaged := false
	for attempt := range baseAttempts {
		var b base
		var origin *repo.Origin
		if attempt < baseAttempts-1 { // else whole, whatever is there
			var err error
			if b, origin, err = p.chooseBase(ctx, jb, h, l, repo.Block); err != nil {
				return Pushed{}, err
			}
			if b, err = p.intactBase(ctx, jb, b); err != nil {
				return Pushed{}, err
			}
			if damaged { // in a way that no listing shows
				b.object, b.newest = "", false
			}
		}
		x := &blockPush{p: p, jb: jb, head: h, base: b, origin: origin, scratch: damaged}
		out, err := x.run(ctx)
		if errors.Is(err, errBaseDamaged) {
			damaged = true
			jb.note = b.ref() + " on the remote is damaged: what it lacks was sent again"
			continue
		}
		if !errors.Is(err, errBaseGone) {
			return out, err
		}
		if h, l, err = p.lookAgain(ctx, jb, b); err != nil {
			return Pushed{}, err
		}
	}
	return Pushed{}, errs.New(errs.Conflict, opPush, jb.pt.Ref, "what it builds upon is removed again and again").WithHint("run the push again")
}

// baseAttempts is how often a base is looked for, which somebody may be removing, here
// or there. The last attempt is without one.
const baseAttempts = 4

// lookAgain is what there is to build upon, now that a base is gone. Conflict if the head was
// taken over meanwhile.
func (p *pusher) lookAgain(ctx context.Context, jb *job, b base) (h headState, l links, err error) {
	if b.object != "" {
		if err := p.e.DropLink(ctx, p.repoID, b.point.Manifest.String()); err != nil {
			return h, l, err
		}
	}
	if l, err = p.links(ctx); err != nil {
		return h, l, err
	}
	if h, err = p.readHead(ctx, jb.head); err != nil {
		return h, l, err
	}
	return h, l, p.holds(h, jb.claim)
}

var (
	errStale    = errors.New("an interrupted push cannot be gone on with")
	errBaseGone = errors.New("what a push was to build upon is gone")
)

// blockPush is the push of one block image.
type blockPush struct {
	p      *pusher
	jb     *job
	head   headState
	base   base
	origin *repo.Origin

	resume  *repo.SessionState // of what is gone on with
	plan    plan
	session repo.Session

	stats   stats
	lease   *lease
	leaseUp chan struct{} // closed when lease is set, or will not be
	upErr   error
	nodes   *repo.NodeCache // of the map of base
	root    repo.NodeRef    // of the new map
	scratch bool            // nothing of the map of base may be used again
	then    func() error    // to be done when the image is not held any more
}

// run pushes it, from the beginning or, if resume is set, from where it had ended.
func (x *blockPush) run(ctx context.Context) (Pushed, error) {
	pt := x.jb.pt
	var out Pushed
	read := false
	err := x.p.e.ReadImage(ctx, engine.ReadRequest{Point: pt.ID, Base: x.base.object}, func(img engine.Image) (err error) {
		read = true
		out, err = x.image(ctx, img)
		return err
	})
	if err == nil && x.then != nil {
		err = x.then()
	}
	if x.lease != nil {
		err = x.p.after(ctx, x.jb, x.lease, err)
	}
	out.Seconds = time.Since(x.jb.begun).Seconds()
	if !read && errs.Is(err, errs.NotFound) && x.base.object != "" {
		if _, gone := x.p.e.PointByID(ctx, x.base.object); errs.Is(gone, errs.NotFound) {
			return out, errBaseGone
		}
	}
	return out, err
}

// image pushes what has been opened.
func (x *blockPush) image(ctx context.Context, img engine.Image) (Pushed, error) {
	merge := img.Exact && x.base.object != "" && mergeable(x.base.point.SizeBytes, img.SizeBytes)
	if x.resume != nil && merge != x.plan.Merge {
		return Pushed{}, errStale
	}
	next, stop := iter.Pull2(img.Ranges)
	defer stop()
	r := &imageReader{
		img:    img,
		what:   x.jb.pt.Ref,
		next:   next,
		merge:  merge,
		hasSum: x.p.repo.HasSum,
		stats:  &x.stats,
		track:  x.p.q.Tracker,
	}
	if merge && x.jb.took && x.resume == nil && x.base.newest && x.base.head == x.jb.head &&
		x.base.point.SizeBytes == img.SizeBytes {
		if same, err := x.isIdle(img, r); err != nil {
			return Pushed{}, err
		} else if same {
			return x.unchanged(ctx)
		}
	}
	work, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	out, err := x.work(work, cancel, r)
	<-x.leaseUp
	if x.lease == nil { // nothing was written
		if errors.Is(err, errEnded) && x.resume != nil {
			err = errStale
		}
		return out, err
	}
	return out, err
}

// after ends or keeps what a push began, depending on what came of it.
func (p *pusher) after(ctx context.Context, jb *job, l *lease, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errEnded):
		// What was uploaded may be gone already.
		_ = l.end(ctx)
		return errs.New(errs.Conflict, opPush, jb.pt.Ref, "a prune of the remote ended this push, as it gave no sign of life").
			WithHint("run the push again")
	case hopeless(err), errors.Is(err, errBaseGone), errors.Is(err, errBaseDamaged), errors.Is(err, errStale):
		if jb.named && !p.mayEnd(ctx, jb.head) {
			break
		}
		_ = l.end(ctx) // else a prune does, sometime
		return err
	}
	l.abandon()
	return err
}

// mergeable reports whether changes of a volume can be laid over the map of one of
// another size: pieces end within it only at whole blocks.
func mergeable(was, is int64) bool {
	return was == is || was%repo.BlockBytes == 0 && is%repo.BlockBytes == 0
}

// unchanged ends a push of a volume in which nothing has changed.
func (x *blockPush) unchanged(ctx context.Context) (Pushed, error) {
	out := x.p.describe(x.jb, x.head, x.base.point)
	out.Unchanged, out.Base = true, x.base.ref()
	if o, err := x.p.e.PointByID(ctx, x.base.object); err == nil {
		out.Ref = o.Ref
	}
	x.then = func() error {
		if err := x.p.destroy(ctx, x.jb.pt.Ref); err != nil {
			return err
		}
		return x.jb.j.clear()
	}
	return out, nil
}

// work stores the image and commits it. When it returns, leaseUp is closed or will be
// soon.
func (x *blockPush) work(ctx context.Context, cancel context.CancelCauseFunc, r *imageReader) (Pushed, error) {
	p, pt := x.p, x.jb.pt
	full := !r.merge
	x.leaseUp = make(chan struct{})
	if x.resume == nil {
		x.session = p.repo.NewSession(repo.Push, []string{x.jb.head}, p.me)
		if !x.base.point.Manifest.IsZero() {
			x.session.Pins = []repo.ID{x.base.point.Manifest}
		}
		x.plan = plan{
			Snapshot: pt.Ref, Session: x.session.ID, Object: string(pt.ID), Took: x.jb.took, Base: string(x.base.object),
			Head: x.base.head, Manifest: x.base.point.Manifest, Merge: r.merge, Origin: x.origin,
		}
		if err := x.jb.j.replan(x.plan, false); err != nil {
			close(x.leaseUp)
			return Pushed{}, err
		}
	} else {
		x.session = x.resume.Session
	}

	g, gctx := errgroup.WithContext(ctx)
	var listed bool
	g.Go(func() error {
		defer close(x.leaseUp)
		lctx, l, err := beginWith(ctx, p.repo, x.session)
		if err != nil {
			x.upErr = err
			return err
		}
		x.lease = l
		context.AfterFunc(lctx, func() { cancel(context.Cause(lctx)) })
		// Pinned first, then looked at again.
		x.head, listed, err = p.verify(gctx, x.jb, x.base)
		return err
	})
	var was repo.Manifest
	g.Go(func() (err error) {
		switch id := x.base.point.Manifest; {
		case p.base != nil && p.base.ID == id:
			was = *p.base
		case !id.IsZero():
			was, err = p.repo.Manifest(gctx, id)
		}
		if broken(err) {
			err = errBaseGone
		}
		if err != nil {
			return err
		}
		return x.store(gctx, r, &was)
	})
	if err := g.Wait(); err != nil {
		if cause := context.Cause(ctx); cause != nil && errors.Is(cause, errEnded) {
			err = cause
		}
		return Pushed{}, err
	}
	if !listed {
		return Pushed{}, errBaseGone
	}
	m := repo.Manifest{
		ID: repo.NewID(), Volume: x.jb.head, Point: pt.Name, Content: repo.Block, FS: string(pt.FS), SizeBytes: r.img.SizeBytes, Sector: pt.Sector,
		CreatedAt: pt.CreatedAt, Consistency: string(pt.Consistency), Source: string(pt.ID), Session: x.session.ID, Parent: was.ID, Origin: x.origin,
		Logical: x.root.Bytes, Added: x.stats.uploaded.Load(), Version: 2, Map: x.root, Uses: x.stats.uses(x.root, x.intactUses(was.Uses)),
	}
	return x.finish(ctx, &m, full)
}

// intactUses is uses without the segments that are lost.
func (x *blockPush) intactUses(uses []repo.Use) (out []repo.Use) {
	for _, u := range uses {
		if !x.base.lost[u.Segment] {
			out = append(out, u)
		}
	}
	return out
}

// finish commits a manifest and does what comes after that.
func (x *blockPush) finish(ctx context.Context, m *repo.Manifest, full bool) (Pushed, error) {
	p := x.p
	x.jb.named = true
	// Programs that do not know such manifests must not take them for damage.
	if err := p.repo.Upgrade(ctx); err != nil {
		return Pushed{}, err
	}
	if err := p.repo.PutManifest(ctx, *m); err != nil {
		return Pushed{}, err
	}
	h, at, err := p.commit(ctx, x.lease, x.jb.claim, x.head, x.jb.pt, m)
	if err != nil {
		return Pushed{}, err
	}
	for s, n := range x.stats.sizes {
		if p.sizes != nil {
			p.sizes[s] = int64(n)
		}
	}
	x.then = func() error { return p.settle(ctx, x.jb, h, m.ID, x.lease.end) }
	out := p.describe(x.jb, h, at)
	out.Base, out.Full, out.Resumed = x.base.ref(), full, x.resume != nil
	out.ReadBytes, out.UploadedBytes, out.Segments = x.stats.read.Load(), x.stats.uploaded.Load(), x.stats.segments.Load()
	return out, nil
}

// store runs the pipeline over the image.
func (x *blockPush) store(ctx context.Context, r *imageReader, was *repo.Manifest) error {
	p := x.p
	x.nodes = p.nodes
	if x.nodes == nil {
		x.nodes = p.repo.NewNodeCache(cachedNodes)
	}
	if !was.ID.IsZero() {
		if was.Content != repo.Block {
			return errs.New(errs.Damaged, opPush, x.base.ref(), "the head says that it is a block image, its manifest says %q", was.Content)
		}
		r.base = was
		r.ahead = newPageAhead(ctx, p.repo, x.nodes.Read, was)
		if r.merge {
			r.ahead.mustBeWhole()
		} else {
			r.ahead.withoutLost(x.base.lost)
		}
	}
	r.unit = unitOf(r.base)
	first := uint32(0)
	if x.resume != nil {
		for _, f := range x.jb.j.finished {
			x.stats.size(repo.Segment{Session: x.session.ID, N: f.n}, int(f.bytes))
		}
		r.have, r.replay, first = x.jb.j.finishedParts(), x.jb.j.items, x.jb.j.next
		if err := x.jb.j.run(first); err != nil {
			return err
		}
	}
	pages := newMapper(x.nodes.Read, r.base, r.merge, x.scratch || len(x.base.lost) > 0, r.img.SizeBytes, r.ahead)
	p.q.Tracker.Start("pushing "+x.jb.pt.Ref, 0, 0)
	if p.q.Tracker != nil {
		ectx, cancel := context.WithCancel(ctx)
		var counting sync.WaitGroup
		counting.Go(func() { p.expect(ectx, r.img) })
		defer counting.Wait()
		defer cancel()
	}
	pl := &pipeline{
		repo: p.repo, session: x.session.ID, first: first, journal: x.jb.j, mapper: pages, stats: &x.stats,
		ready: func(ctx context.Context) error {
			select {
			case <-x.leaseUp:
				return x.upErr
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		},
	}
	err := pl.run(ctx, r.produce)
	x.root = pl.root
	return err
}

// expect tells the tracker how much there is to do.
func (p *pusher) expect(ctx context.Context, img engine.Image) {
	total := int64(0)
	for g, err := range img.Ranges {
		if err != nil || ctx.Err() != nil {
			return
		}
		if !g.Zero {
			total += g.Length
		}
	}
	p.q.Tracker.Expect(0, total)
}

// resumeBlock goes on with an interrupted push. errStale if that cannot be done.
func (p *pusher) resumeBlock(ctx context.Context, jb *job, h headState) (Pushed, error) {
	pl := *jb.j.plan
	s, err := p.repo.Session(ctx, pl.Session)
	if errs.Is(err, errs.NotFound) {
		return Pushed{}, errStale
	}
	if err != nil {
		return Pushed{}, err
	}
	if slices.Contains(h.Fenced, pl.Session) {
		return Pushed{}, errStale // a prune has given it up, and died before it removed it
	}
	b := base{object: driver.ObjectID(pl.Base), head: pl.Head}
	if !pl.Manifest.IsZero() {
		of := h
		if pl.Head != jb.head {
			if of, err = p.readHead(ctx, pl.Head); err != nil {
				return Pushed{}, err
			}
		}
		var found bool
		b.point, found, err = findPoint(
			ctx,
			p.repo,
			of.Head,
			nil,
			func(x repo.Point) bool { return x.Manifest == pl.Manifest },
		)
		if err != nil {
			return Pushed{}, err
		}
		if !found {
			return Pushed{}, errStale
		}
	}
	if gone, err := p.lostOf(ctx, pl.Manifest); err != nil {
		return Pushed{}, err
	} else if gone.any() {
		return Pushed{}, errStale
	}
	if err := p.stillThere(ctx, jb.j); err != nil {
		return Pushed{}, err
	}
	x := &blockPush{p: p, jb: jb, head: h, base: b, origin: pl.Origin, resume: &s, plan: pl}
	out, err := x.run(ctx)
	if errors.Is(err, errBaseGone) || errors.Is(err, errBaseDamaged) {
		err = errStale
	}
	return out, err
}

// stillThere makes sure of what the journal says was uploaded: what is not there, as it
// was, is uploaded again.
func (p *pusher) stillThere(ctx context.Context, j *journal) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(2 * uploads)
	good := make([]bool, len(j.finished))
	for i, f := range j.finished {
		g.Go(func() error {
			s, err := p.repo.StatSegment(ctx, repo.Segment{Session: j.plan.Session, N: f.n})
			if errs.Is(err, errs.NotFound) {
				return nil
			}
			good[i] = err == nil && s.Bytes == f.bytes
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	var kept []finishedSegment
	for i, f := range j.finished {
		if good[i] {
			kept = append(kept, f)
		}
	}
	j.finished = kept
	return nil
}

// settle is what follows a commit: remember it here, end the session, and let go of
// what only served earlier pushes. The point is on the remote whatever comes of this.
func (p *pusher) settle(ctx context.Context, jb *job, h headState, manifest repo.ID, end func(context.Context) error) error {
	ctx = context.WithoutCancel(ctx)
	id := manifest.String()
	err := p.e.PutLink(ctx, engine.Link{Repo: p.repoID, Manifest: id, Object: jb.pt.ID})
	if err == nil {
		err = p.e.PutRemoteHead(ctx, engine.RemoteHead{
			Repo: p.repoID, Name: jb.head, Lineage: jb.pt.Lineage, Epoch: h.Epoch, NextSeq: h.NextSeq, Manifest: id, At: time.Now(),
		})
	}
	if err != nil {
		return err
	}
	// A session that stays is ended by a prune; the push has succeeded.
	if eerr := end(ctx); eerr != nil && !objstore.Temporary(eerr) && !errs.Is(eerr, errs.IO) {
		err = eerr
	}
	if cerr := jb.j.clear(); cerr != nil {
		err = errors.Join(err, errs.Wrap(opPush, jb.pt.Ref, cerr))
	}
	if jb.took {
		err = errors.Join(err, p.cleanSnapshots(ctx, jb.pt, h))
	}
	return err
}
