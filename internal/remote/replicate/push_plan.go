package replicate

import (
	"context"
	"fmt"

	"pando/internal/base/errs"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/remote/repo"
)

// planTree finds out what the stream of a tree will be, and whether it can be a difference from the base. It cannot if
// the stream is raw and the base was not: then the result has no base, and the tree is pushed in full.
func (p *pusher) planTree(ctx context.Context, x *pointPush, b base) (base, driver.StreamPlan, error) {
	if p.treeContent(x) != repo.Stream {
		return b, driver.StreamPlan{}, nil // the driver makes no stream: files are read
	}

	expected, err := p.e.PlanStream(ctx, engine.ReadRequest{Point: x.pt.ID, Base: b.object})
	if err == nil && expected.Raw && b.object != "" {
		var fits bool
		if fits, err = p.wasRaw(ctx, b); err == nil && !fits {
			b = base{}
			expected, err = p.e.PlanStream(ctx, engine.ReadRequest{Point: x.pt.ID})
		}
	}
	if err == nil {
		warn(ctx, x, expansionWarning(expected))
	}

	return b, expected, err
}

// wasRaw reports whether a base was pushed as a raw stream, so that a raw difference can build upon it. A
// base that was pushed decrypted may have been pulled and then encrypted with this pool's key. A base whose manifest
// cannot be read counts as not raw.
func (p *pusher) wasRaw(ctx context.Context, b base) (bool, error) {
	m, err := p.repo.Manifest(ctx, b.point.Manifest)
	if isUnreadable(err) {
		return false, nil
	}
	return m.Raw, err
}

// warn reports a warning before a point is sent, or in its result if nobody listens.
func warn(ctx context.Context, x *pointPush, text string) {
	if text == "" || warnings.Tell(ctx, x.pt.Ref+": "+text) {
		return
	}
	if x.note != "" {
		x.note += "; "
	}
	x.note += text
}

// minExpansion is the minimum number of bytes that a stream exceeds its content by for a warning.
const minExpansion = 64 << 20

// expansionWarning returns a warning if a stream may be larger, by a tenth or more, than the space that its content
// occupies in the pool. Otherwise it returns "".
func expansionWarning(s driver.StreamPlan) string {
	if s.SavedBytes < minExpansion || s.SavedBytes < s.Bytes/10 {
		return ""
	}
	return fmt.Sprintf("pando will send about %s, and a pull needs as much space: a stream contains a block once for "+
		"each reference to it, and block cloning or dedup saves up to %s of that in this pool",
		errs.FormatBytes(s.Bytes), errs.FormatBytes(s.SavedBytes))
}
