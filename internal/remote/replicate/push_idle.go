package replicate

import (
	"context"
	"errors"
	"iter"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/linux/fsprobe"
	"pando/internal/remote/repo"
)

// isIdle reports whether nobody has changed a volume since its newest point there: no range of it differs, or only what
// a mounted filesystem writes by itself.
func (c *imageContent) isIdle() (bool, error) {
	b, img := c.base, c.img
	if !c.merge || !c.tookSnapshot || c.resume != nil || !b.newest || b.head != c.name || b.point.SizeBytes != img.SizeBytes {
		return false, nil
	}

	_, some, err := c.reader.peekRange()
	if err != nil || !some {
		return err == nil, err
	}

	// Else the log matters.
	complete := c.pt.Consistency == driver.Clean && b.point.Consistency == string(driver.Clean)
	if !complete || img.Base == nil {
		return false, nil
	}

	return fsprobe.OnlyBookkeeping(img.Base, img.R, img.SizeBytes, spans(img.Ranges))
}

// isIdleTree reports whether nobody has changed a tree since the newest point of its volume there, so that the snapshot
// that was taken for this push is not needed.
func (p *pusher) isIdleTree(ctx context.Context, x *pointPush, b base) (bool, error) {
	if !p.mayBeIdle(x, b) {
		return false, nil
	}
	return p.e.SamePoint(ctx, engine.ReadRequest{Point: x.pt.ID, Base: b.object})
}

// mayBeIdle reports whether nothing needs to be pushed if a tree is the same as its base.
func (p *pusher) mayBeIdle(x *pointPush, b base) bool {
	return x.tookSnapshot && b.newest && b.head == x.name && b.object != "" && !p.q.Full
}

// errChanged ends the comparison of two trees.
var errChanged = errors.New("something has changed")

// untilChanged takes nothing.
type untilChanged struct{}

func (untilChanged) Write([]byte) (int, error) { return 0, errChanged }

// isSameTree is isIdleTree for trees of drivers that cannot tell, which are compared. It is for those that are sent
// whole if they have changed: where the difference is sent, that tells.
func (p *pusher) isSameTree(ctx context.Context, x *pointPush, b base) (bool, error) {
	if p.treeContent(x) != repo.Tree || !p.mayBeIdle(x, b) {
		return false, nil
	}

	q := engine.ReadRequest{Point: x.pt.ID, Base: b.object, IfChanged: true}
	err := p.e.SendTree(ctx, q, untilChanged{})
	switch {
	case errors.Is(err, engine.ErrUnchanged):
		return true, nil
	case errors.Is(err, errChanged), errs.Is(err, errs.Unsupported), errs.Is(err, errs.NotFound):
		return false, nil
	}

	return false, err
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
