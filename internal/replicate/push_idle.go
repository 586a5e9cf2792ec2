package replicate

import (
	"context"
	"iter"
	"time"

	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/fsprobe"
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
	if !jb.took || !b.newest || b.head != jb.head || b.object == "" || p.q.Full {
		return false, nil
	}
	return p.e.SamePoint(ctx, engine.ReadRequest{Point: jb.pt.ID, Base: b.object})
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
