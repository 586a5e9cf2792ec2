package replicate

import (
	"iter"

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
