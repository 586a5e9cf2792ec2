package replicate

import (
	"context"
	"fmt"

	"pando/internal/base/errs"
	"pando/internal/engine"
	"pando/internal/remote/repo"
)

// An overlay is pushed as what differs from its lower layer, a generation, which is pushed first if it is not on the
// remote. The manifest of the overlay names it, and a prune keeps it for as long.

// upperBase finds the base of an overlay of whose volume nothing is on the remote under this name: the volume under its
// own name, the overlay that it was cloned from, or, of an image, the overlay that shares most with it. The result has
// no head if there is none.
func (x *pointPush) upperBase(ctx context.Context) (base, error) {
	own, err := x.p.headOf(ctx, x.pt)
	if err != nil {
		return base{}, err
	}
	if own != x.name {
		h, err := x.p.readHead(ctx, own)
		if err == nil {
			b, ok, err := x.newestKnown(ctx, h)
			itself := b.object == x.pt.ID && x.content.contentKind().Chained() // nothing is a difference from itself
			if err != nil || ok && !itself {
				return b, err
			}
		} else if !isUnreadable(err) { // damage of another volume must not prevent this push
			return base{}, err
		}
	}

	b, err := x.upperOfOrigin(ctx)
	if b.head != "" || err != nil || x.content.contentKind() != repo.Block {
		return b, err
	}
	return x.nearestBase(ctx, base{})
}

// upperOfOrigin finds the overlay that an overlay was cloned from. The result has no head if there is none.
func (x *pointPush) upperOfOrigin(ctx context.Context) (base, error) {
	from, err := x.p.e.PointByID(ctx, x.pt.OriginID)
	if errs.Is(err, errs.NotFound, errs.Invalid) || err == nil && !from.IsOverlay() {
		return base{}, nil
	}
	if err != nil {
		return base{}, err
	}

	name, err := x.p.headOf(ctx, from)
	if err != nil {
		return base{}, err
	}

	h, err := x.p.readHead(ctx, name)
	if isUnreadable(err) { // damage of another volume must not prevent this push
		return base{}, nil
	}
	if err != nil {
		return base{}, err
	}

	b, _, err := x.p.findInHead(ctx, h, x.links, from.ID, x.content.contentKind())
	return b, err
}

// findLower finds the lower layer of an overlay on the remote, and makes it the origin of the point. It pushes the
// lower layer if it is missing there, or damaged. Errors: errStale if the interrupted push had another one.
func (x *pointPush) findLower(ctx context.Context) error {
	x.lower = base{}
	if !x.pt.IsOverlay() {
		return nil
	}

	lower, err := x.p.e.PointByID(ctx, x.pt.LowerID)
	if err != nil {
		return err
	}

	for _, find := range []func(context.Context, engine.Point) (base, error){x.intactLower, x.lowerOfBase, x.pushLower} {
		if x.lower.head == "" {
			if x.lower, err = find(ctx, lower); err != nil {
				return err
			}
		}
	}

	if x.resume != nil && (x.origin == nil || x.origin.Manifest != x.lower.point.Manifest) {
		return errStale
	}

	x.origin = &repo.Origin{Ref: x.lower.ref(), Volume: x.lower.head, Manifest: x.lower.point.Manifest}
	if x.base.point.OriginID != x.lower.point.Manifest {
		x.base.newest = false // perhaps its lower layer is lost: the volume does not count as unchanged
	}
	return nil
}

// intactLower finds the lower layer on the remote. The result has no head if it is not there, if some of it is missing,
// or if it is not in the form that the request asks for.
func (x *pointPush) intactLower(ctx context.Context, lower engine.Point) (base, error) {
	p := x.p
	b, head, err := x.lowerOnRemote(ctx, lower)
	if err != nil || b.head == "" || p.needsOtherForm(b.point) {
		return base{}, err
	}

	if whole, err := p.lowerIsWhole(ctx, b.point.Manifest); err != nil || !whole {
		return base{}, err
	}
	return b, p.finishOriginPush(ctx, b, head)
}

// lowerIsWhole reports whether a lower layer is complete on the remote, and remembers if it is.
func (p *pusher) lowerIsWhole(ctx context.Context, manifest repo.ID) (bool, error) {
	if p.intact[manifest] {
		return true, nil
	}

	missing, err := p.findLost(ctx, manifest)
	if err != nil || missing.any() {
		return false, err
	}

	if p.intact == nil {
		p.intact = map[repo.ID]bool{}
	}
	p.intact[manifest] = true
	return true, nil
}

// lowerOnRemote finds the lower layer in the heads that may list it: that of its golden, those that it was pushed to
// or pulled from, and the one that holds only this generation.
func (x *pointPush) lowerOnRemote(ctx context.Context, lower engine.Point) (base, headState, error) {
	p := x.p
	searched := map[string]bool{x.name: true}
	search := func(name string) (base, headState, error) {
		if searched[name] {
			return base{}, headState{}, nil
		}

		searched[name] = true
		h, err := p.readHead(ctx, name)
		if isUnreadable(err) {
			return base{}, h, nil // the lower layer is pushed to another
		}
		if err != nil {
			return base{}, h, err
		}
		b, _, err := p.findInHead(ctx, h, x.links, lower.ID, "")
		return b, h, err
	}

	name, err := p.headOf(ctx, lower)
	if err != nil {
		return base{}, headState{}, err
	}
	if b, h, err := search(name); err != nil || b.head != "" {
		return b, h, err
	}

	for _, id := range x.links.manifest[lower.ID] {
		m, err := p.repo.Manifest(ctx, id)
		if isUnreadable(err) {
			continue
		}
		if err != nil {
			return base{}, headState{}, err
		}
		if b, h, err := search(m.Volume); err != nil || b.head != "" {
			return b, h, err
		}
	}

	return search(lower.AsLayer().Volume)
}

// lowerOfBase returns the lower layer if the base is an overlay on it, too: it is there as long as the base, although
// no head lists it any more. The result has no head if not.
func (x *pointPush) lowerOfBase(ctx context.Context, lower engine.Point) (base, error) {
	p := x.p
	if x.base.head == "" || x.base.lower != lower.ID {
		return base{}, nil
	}

	m, err := p.repo.Manifest(ctx, x.base.point.Manifest)
	if isUnreadable(err) || err == nil && !m.IsOverlay() {
		return base{}, nil
	}
	if err != nil {
		return base{}, err
	}

	l, err := p.repo.Manifest(ctx, m.Origin.Manifest)
	if isUnreadable(err) {
		return base{}, nil
	}
	if err != nil {
		return base{}, err
	}

	missing, err := p.findLost(ctx, l.ID)
	if err != nil || missing.any() {
		return base{}, err
	}

	at := pointFrom(&l, 0)
	if p.needsOtherForm(at) {
		return base{}, nil
	}
	return base{point: at, head: l.Volume, object: lower.ID}, nil
}

// pushLower pushes the lower layer to the head of its golden, or, if this pool may not write that or the generation
// does not fit into it, to one of its own.
func (x *pointPush) pushLower(ctx context.Context, lower engine.Point) (base, error) {
	// A removed generation exists as long as the overlay.
	release, err := x.p.e.HoldPoint(ctx, x.pt.ID)
	if err != nil {
		return base{}, err
	}

	defer release()

	for _, as := range []engine.Point{lower, lower.AsLayer()} {
		name, err := x.p.headOf(ctx, as)
		if err != nil {
			return base{}, err
		}
		if name == x.name {
			continue
		}

		var h headState
		h, err = x.p.pushOrigin(ctx, as, h)
		if errs.Is(err, errs.Conflict, errs.Exists, errs.Damaged) && as.Volume != lower.AsLayer().Volume {
			x.note = fmt.Sprintf("its golden %s was pushed as %s, because it cannot be pushed as %s: %v",
				lower.Ref, lower.AsLayer().Volume, name, err)
			continue
		}
		if err != nil {
			return base{}, err
		}

		if x.links, err = x.p.loadLinks(ctx); err != nil {
			return base{}, err
		}

		b, ok, err := x.p.findInHead(ctx, h, x.links, lower.ID, "")
		if err != nil || ok {
			return b, err
		}
	}

	return base{}, errs.New(errs.Conflict, opPush, x.pt.Ref, "its golden %s was removed from the remote again and again",
		lower.Ref).WithHint("run the push again")
}

// confirmLower reports whether the lower layer, which is pinned by now, is still listed. One that is not listed has a
// number of 0, and is there because the base is.
func (x *pointPush) confirmLower(ctx context.Context) (bool, error) {
	if x.lower.head == "" || x.lower.point.Seq == 0 {
		return true, nil
	}

	h, err := x.p.readHead(ctx, x.lower.head)
	if err != nil {
		return false, err
	}

	listed, err := headLists(ctx, x.p.repo, h.Head, x.lower.point)
	if !listed {
		delete(x.p.intact, x.lower.point.Manifest)
	}
	return listed, err
}
