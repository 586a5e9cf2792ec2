package replicate

import (
	"context"
	"errors"
	"iter"
	"time"

	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/errs"
	"pando/internal/fsprobe"
	"pando/internal/repo"
)

// isIdle reports whether nobody has changed a volume since the point that it is compared with: no range of it differs,
// or only what a mounted filesystem writes by itself.
func (x *blockPush) isIdle(img engine.Image, r *imageReader) (bool, error) {
	_, some, err := r.peek()
	if err != nil || !some {
		return err == nil, err
	}

	// Else the log matters.
	complete := x.jb.pt.Consistency == driver.Clean && x.base.point.Consistency == string(driver.Clean)
	if !complete || img.Base == nil {
		return false, nil
	}
	return fsprobe.OnlyBookkeeping(img.Base, img.R, img.SizeBytes, spans(img.Ranges))
}

// isIdleTree reports whether nobody has changed a tree since the newest point of its volume there, so that the snapshot
// that was taken for this push is not needed.
func (p *pusher) isIdleTree(ctx context.Context, jb *job, b base) (bool, error) {
	if !p.mayBeIdle(jb, b) {
		return false, nil
	}
	return p.e.SamePoint(ctx, engine.ReadRequest{Point: jb.pt.ID, Base: b.object})
}

// mayBeIdle reports whether nothing needs to be pushed if a tree is the same as its base.
func (p *pusher) mayBeIdle(jb *job, b base) bool {
	return jb.took && b.newest && b.head == jb.head && b.object != "" && !p.q.Full
}

// errChanged ends the comparison of two trees.
var errChanged = errors.New("something has changed")

// untilChanged takes nothing.
type untilChanged struct{}

func (untilChanged) Write([]byte) (int, error) { return 0, errChanged }

// isSameTree is isIdleTree for trees of drivers that cannot tell, which are compared. It is for those that are sent
// whole if they have changed: where the difference is sent, that tells.
func (p *pusher) isSameTree(ctx context.Context, jb *job, b base) (bool, error) {
	if p.treeContent(jb) != repo.Tree || !p.mayBeIdle(jb, b) {
		return false, nil
	}
	q := engine.ReadRequest{Point: jb.pt.ID, Base: b.object, IfChanged: true}
	err := p.e.SendTree(ctx, q, untilChanged{})
	switch {
	case errors.Is(err, engine.ErrUnchanged):
		return true, nil
	case errors.Is(err, errChanged), errs.Is(err, errs.Unsupported), errs.Is(err, errs.NotFound):
		return false, nil
	}
	return false, err
}

// idleTree ends the push of a tree in which nothing has changed.
func (p *pusher) idleTree(ctx context.Context, jb *job, h headState, b base) (Pushed, error) {
	out := p.describe(jb, h, b.point)
	out.Unchanged, out.Base = true, b.ref()
	if o, err := p.e.PointByID(ctx, b.object); err == nil {
		out.Ref = o.Ref
	}
	err := p.destroy(ctx, jb.pt.Ref)
	if err == nil {
		err = jb.j.clear()
	}
	out.Seconds = time.Since(jb.begun).Seconds()
	return out, err
}

// spans are ranges as fsprobe wants them.
func spans(ranges iter.Seq2[engine.Range, error]) iter.Seq2[fsprobe.Span, error] {
	return func(yield func(fsprobe.Span, error) bool) {
		for g, err := range ranges {
			if !yield(fsprobe.Span{From: g.Offset, To: g.End()}, err) {
				return
			}
		}
	}
}
