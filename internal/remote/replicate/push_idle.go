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

// isIdle reports whether a volume is unchanged since its newest point on the remote: no range differs, or only ranges
// that a mounted filesystem writes by itself.
func (c *imageContent) isIdle() (bool, error) {
	b, img := c.base, c.img
	if !c.merge || !c.tookSnapshot || c.resume != nil || !b.newest || b.head != c.name ||
		b.point.SizeBytes != img.SizeBytes || b.lower != c.pt.LowerID {
		return false, nil
	}

	// Without a range that differs, it is unchanged.

	_, some, err := c.reader.peekRange()
	if err != nil || !some {
		return err == nil, err
	}

	// Otherwise check the ranges, but only between clean snapshots: in others, the filesystem's log matters.
	complete := c.pt.Consistency == driver.Clean && b.point.Consistency == string(driver.Clean)
	if !complete || img.Base == nil {
		return false, nil
	}

	return fsprobe.OnlyBookkeeping(img.Base, img.R, img.SizeBytes, spans(img.Ranges))
}

// isIdleTree reports whether a tree is unchanged since the newest point of its volume on the remote, so that this push
// does not need its snapshot.
func (p *pusher) isIdleTree(ctx context.Context, x *pointPush, b base) (bool, error) {
	if !p.mayBeIdle(x, b) {
		return false, nil
	}
	return p.e.SamePoint(ctx, engine.ReadRequest{Point: x.pt.ID, Base: b.object})
}

// mayBeIdle reports whether nothing needs to be pushed if a tree is the same as its base.
func (p *pusher) mayBeIdle(x *pointPush, b base) bool {
	return x.tookSnapshot && b.newest && b.head == x.name && b.object != "" && b.lower == x.pt.LowerID && !p.q.Full
}

// errChanged ends the comparison of two trees at the first difference.
var errChanged = errors.New("the trees differ")

// untilChanged is a writer that fails at the first byte.
type untilChanged struct{}

func (untilChanged) Write([]byte) (int, error) { return 0, errChanged }

// isSameTree is isIdleTree for drivers that cannot tell whether trees are the same: it compares the trees. It is only
// for trees that are sent in full if they have changed; otherwise the difference that is sent tells.
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

// spans converts ranges to the form that fsprobe takes.
func spans(ranges iter.Seq2[engine.Range, error]) iter.Seq2[fsprobe.Span, error] {
	return func(yield func(fsprobe.Span, error) bool) {
		for g, err := range ranges {
			if !yield(fsprobe.Span{From: g.Offset, To: g.End()}, err) {
				return
			}
		}
	}
}
