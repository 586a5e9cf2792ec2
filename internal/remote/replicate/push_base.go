package replicate

import (
	"context"
	"os"
	"slices"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/remote/repo"
)

// links has the links of this repository: the local objects by manifest, and the reverse.
type links struct {
	object   map[repo.ID][]driver.ObjectID // the newest link last: a point may have been pulled under several names
	manifest map[driver.ObjectID][]repo.ID
	objects  []driver.ObjectID // each once, the newest link last
}

// loadLinks reads the links of this repository.
func (p *pusher) loadLinks(ctx context.Context) (links, error) {
	all, err := p.e.Links(ctx, p.repoID)
	out := links{object: map[repo.ID][]driver.ObjectID{}, manifest: map[driver.ObjectID][]repo.ID{}}
	for _, l := range all {
		if id, err := repo.ParseID(l.Manifest); err == nil {
			out.object[id] = append(out.object[id], l.Object)
			if _, is := out.manifest[l.Object]; !is {
				out.objects = append(out.objects, l.Object)
			}
			out.manifest[l.Object] = append(out.manifest[l.Object], id)
		}
	}

	return out, err
}

// findPushed finds a local point in a head, by the object it was pushed from or by a link.
func (p *pusher) findPushed(ctx context.Context, h headState, pt engine.Point, l links) (repo.Point, bool, error) {
	return findPoint(ctx, p.repo, h.Head, pagesNear(pt.CreatedAt), func(x repo.Point) bool {
		return x.Source == string(pt.ID) || slices.Contains(l.manifest[pt.ID], x.Manifest)
	})
}

// base is the point on the remote that a push builds upon.
type base struct {
	point  repo.Point
	head   string                // that lists it; "": there is no base
	object driver.ObjectID       // local object of the point; "": none, so it can only be compared with
	lower  driver.ObjectID       // that the object is an overlay on; "": on none
	newest bool                  // it is the newest point of the head that is pushed to
	lost   map[repo.Segment]bool // its segments that are missing or damaged
}

// ref returns the reference of the base on the remote, "" if there is none.
func (b base) ref() string {
	if b.head == "" {
		return ""
	}
	return b.head + "@" + b.point.Name
}

// newestKnown finds the newest point of a head whose object is in this pool and can be the base: of the same kind.
func (x *pointPush) newestKnown(ctx context.Context, h headState) (base, bool, error) {
	p, l, content := x.p, x.links, x.content.contentKind()
	newest, _, err := newestOf(ctx, p.repo, h.Head)
	if err != nil {
		return base{}, false, err
	}

	first := uint64(0) // of the recent points
	if len(h.Recent) > 0 {
		first = h.Recent[0].Seq
	}

	var linked pageFilter // read pages only if there are links to this repository
	if len(l.object) == 0 {
		linked = func(repo.PointPage) bool { return false }
	}

	// Return the first point whose object exists.
	for at, err := range newestFirst(ctx, p.repo, h.Head, linked, nil) {
		if err != nil {
			return base{}, false, err
		}
		if at.Content != content {
			continue
		}

		ids := l.object[at.Manifest]
		if len(ids) == 0 && h.Writer.Pool == p.me.Pool && at.Seq >= first {
			ids = []driver.ObjectID{driver.ObjectID(at.Source)} // pushed from this pool; the link may be lost
		}

		if o, ok := x.baseObject(ctx, ids); ok {
			return base{point: at, head: h.Name, object: o.ID, lower: o.LowerID, newest: at.Seq == newest.Seq}, true, nil
		}
	}

	return base{}, false, nil
}

// baseObject returns the newest of some objects with the same content that can be the base: if possible, one of the
// same volume, because streams of trees can only be differences within a volume.
func (x *pointPush) baseObject(ctx context.Context, ids []driver.ObjectID) (best engine.Point, ok bool) {
	for _, id := range slices.Backward(ids) {
		o, err := x.p.e.PointByID(ctx, id)
		if err != nil || o.IsOverlay() != x.pt.IsOverlay() {
			continue
		}
		if o.Lineage == x.pt.Lineage {
			return o, true
		}
		if !ok {
			best, ok = o, true
		}
	}
	return best, ok
}

// findInHead finds the point of a local object in a head. content "" stands for any.
func (p *pusher) findInHead(
	ctx context.Context, h headState, l links, id driver.ObjectID, content repo.Content,
) (base, bool, error) {
	pt, err := p.e.PointByID(ctx, id)
	if err != nil {
		return base{}, false, nil
	}
	x, ok, err := findPoint(ctx, p.repo, h.Head, pagesNear(pt.CreatedAt), func(x repo.Point) bool {
		is := x.Source == string(id) || slices.Contains(l.manifest[id], x.Manifest)
		return is && (content == "" || x.Content == content)
	})
	if !ok || err != nil {
		return base{}, false, err
	}
	return base{point: x, head: h.Name, object: id, lower: pt.LowerID}, true, nil
}

// chooseBase chooses the base: the newest known point of the same head; otherwise what the volume was cloned from, or
// another point of this pool on the remote that shares more. It first pushes the golden that the volume was cloned from
// if that is not on the remote. A base without an object can only be compared with. origin is set if the volume
// descends from a point on the remote.
func (x *pointPush) chooseBase(ctx context.Context) (b base, origin *repo.Origin, err error) {
	// Use the newest known point of the same head.
	p, pt, h, content := x.p, x.pt, x.head, x.content.contentKind()
	if b, ok, err := x.newestKnown(ctx, h); ok || err != nil {
		return b, originOf(b.point), err
	}

	if pt.IsOverlay() {
		b, err := x.upperBase(ctx)
		return b, nil, err // findLower sets the origin
	}

	// Use the origin, or the point that shares most.

	var from base
	if !pt.Golden {
		if from, err = x.clonedFrom(ctx); err != nil {
			return base{}, nil, err
		}
	}

	near, err := x.nearestBase(ctx, from)
	if err != nil {
		return base{}, nil, err
	}

	switch {
	case near.head == "":
	case near.head == h.Name:
		return near, originOf(near.point), nil
	case pt.Golden:
		return near, nil, nil
	case from.head == "" || content.Chained(): // a pull of a stream needs what it is the difference from
		from = near
	}

	if near.head != "" {
		return near, &repo.Origin{Ref: from.ref(), Volume: from.head, Manifest: from.point.Manifest}, nil
	}

	// Compare an image with any image of the same head.
	if content != repo.Block {
		return base{}, nil, nil
	}

	at, ok, err := findPoint(ctx, p.repo, h.Head, nil, func(at repo.Point) bool { return at.Content == content })
	if !ok || err != nil {
		return base{}, nil, err
	}

	return base{point: at, head: h.Name}, originOf(at), nil
}

// originOf returns the origin of a point on the remote, nil if it has none.
func originOf(x repo.Point) *repo.Origin {
	if x.OriginID.IsZero() {
		return nil
	}
	return &repo.Origin{Ref: x.OriginRef, Volume: x.OriginVol, Manifest: x.OriginID}
}

// clonedFrom finds what a volume was cloned from on the remote. It pushes the volume's golden if that is missing. The
// result has no head if there is nothing.
func (x *pointPush) clonedFrom(ctx context.Context) (base, error) {
	p, pt, h, l, content := x.p, x.pt, x.head, x.links, x.content.contentKind()
	tried, unread := map[string]headState{h.Name: h}, map[string]bool{}
	head := func(name string) (headState, error) {
		if h, ok := tried[name]; ok {
			return h, nil
		}
		h, err := p.readHead(ctx, name)
		if isUnreadable(err) { // damage of another volume must not prevent this push
			x.note = "cannot read the list of points of " + name + " on the remote: no data is shared with it"
			unread[name], err = true, nil
		}
		tried[name] = h
		return h, err
	}

	// Under another name, the volume may have been pushed under its own before.
	own, err := p.headOf(ctx, pt)
	if err != nil {
		return base{}, err
	}
	if own != h.Name {
		was, err := head(own)
		if err != nil {
			return base{}, err
		}
		if b, ok, err := x.newestKnown(ctx, was); ok || err != nil {
			return b, err
		}
	}

	// Find the origin.
	if name, _, _ := strings.Cut(pt.OriginRef, "@"); name != "" {
		from, err := head(name)
		if err != nil {
			return base{}, err
		}
		b, ok, err := p.findInHead(ctx, from, l, pt.OriginID, content)
		if err != nil {
			return base{}, err
		}
		if ok {
			return b, p.finishOriginPush(ctx, b, from)
		}
	}

	// Find the generation that the volume descends from.
	if pt.BaseID == "" {
		return base{}, nil
	}

	return x.descentBase(ctx, head, unread)
}

// descentBase finds the generation that the volume descends from on the remote, and pushes it if it is missing. head
// reads heads, and unread has the names of those that it could not read.
func (x *pointPush) descentBase(
	ctx context.Context, head func(string) (headState, error), unread map[string]bool,
) (base, error) {
	p, pt := x.p, x.pt
	gp, err := p.e.PointByID(ctx, pt.BaseID)
	if errs.Is(err, errs.NotFound) {
		return base{}, nil
	}
	if err != nil {
		return base{}, err
	}

	name, err := p.headOf(ctx, gp)
	if err != nil {
		return base{}, err
	}

	golden, err := head(name)
	if err != nil {
		return base{}, err
	}

	b, ok, err := p.findInHead(ctx, golden, x.links, pt.BaseID, x.content.contentKind())
	if err != nil {
		return base{}, err
	}

	if ok || p.q.NoOrigin || name == x.name {
		if ok {
			err = p.finishOriginPush(ctx, b, golden)
		}
		return b, err
	}

	// Push that generation.
	if unread[name] {
		return base{}, nil
	}

	return x.pushGolden(ctx, golden, gp)
}

// pushGolden pushes gp, the generation that the volume descends from, to the head golden, and returns it as a base. The
// result has no head if the generation cannot be pushed.
func (x *pointPush) pushGolden(ctx context.Context, golden headState, gp engine.Point) (base, error) {
	p, pt := x.p, x.pt
	err := p.checkFits(ctx, golden, gp)
	if err != nil {
		x.note = "its golden " + pt.BaseRef + " was not pushed, so all data of the volume was sent: " + err.Error()
		return base{}, nil
	}

	if golden, err = p.pushOrigin(ctx, gp, golden); err != nil {
		return base{}, err
	}

	b, _, err := p.findInHead(ctx, golden, x.links, pt.BaseID, x.content.contentKind())
	return b, err
}

// pushOrigin pushes a generation, and returns its head. It waits for another process that pushes to that head.
func (p *pusher) pushOrigin(ctx context.Context, pt engine.Point, h headState) (headState, error) {
	name, err := p.headOf(ctx, pt)
	if err != nil {
		return h, err
	}

	j, err := waitJournal(ctx, p.r.dir, name)
	if err != nil {
		return h, err
	}

	defer j.releaseLock()
	if h, err = p.readHead(ctx, name); err != nil {
		return h, err
	}

	if err := p.pushImmutable(ctx, pt, h, j, time.Now()); err != nil {
		return h, err
	}

	return p.readHead(ctx, name)
}

// finishOriginPush finishes a push of a generation that was interrupted after its commit, because the generation may
// never be pushed again.
func (p *pusher) finishOriginPush(ctx context.Context, b base, h headState) error {
	if !h.Golden {
		return nil
	}

	if _, err := os.Lstat(journalPath(p.r.dir, h.Name)); err != nil {
		return nil
	}

	j, err := openJournal(ctx, p.r.dir, h.Name)
	if errs.Is(err, errs.InUse) {
		return nil // another process is pushing it
	}
	if err != nil {
		return err
	}

	defer j.releaseLock()

	if j.plan == nil || j.plan.Object != string(b.object) {
		return nil
	}

	pt, err := p.e.PointByID(ctx, b.object)
	if err != nil {
		return err
	}

	before := len(p.pushed)
	err = p.pushImmutable(ctx, pt, h, j, time.Now())
	p.pushed = p.pushed[:before] // an earlier command pushed it, not this one
	return err
}

// confirmListed reads heads again after the base was pinned, and reports whether a head still lists the base. It
// returns the head that is pushed to. Errors: Conflict if that head was taken over.
func (p *pusher) confirmListed(ctx context.Context, x *pointPush, b base) (h headState, listed bool, err error) {
	if h, err = p.readHead(ctx, x.name); err != nil {
		return h, false, err
	}

	if err := p.checkClaim(h, x.claim); err != nil || b.head == "" {
		return h, true, err
	}

	of := h
	if b.head != x.name {
		if of, err = p.readHead(ctx, b.head); err != nil {
			return h, false, err
		}
	}

	listed, err = headLists(ctx, p.repo, of.Head, b.point)
	return h, listed, err
}
