package replicate

import (
	"context"
	"fmt"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/remote/repo"
)

// planTree finds out what the stream of a tree will be, and whether it can be the difference to a base: not if one of
// the two is raw and the other is not. A tree that was pushed in the other way is pushed whole.
func (p *pusher) planTree(ctx context.Context, x *pointPush, b base) (base, driver.StreamPlan, error) {
	if p.treeContent(x) != repo.Stream {
		return b, driver.StreamPlan{}, nil // files are read
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
		p.warn(x, expansionWarning(expected))
	}

	return b, expected, err
}

// wasRaw reports whether a raw difference can build upon a base: what is encrypted was pushed decrypted by earlier
// versions, or came here so and was encrypted with the key of this pool. What cannot be read is no base.
func (p *pusher) wasRaw(ctx context.Context, b base) (bool, error) {
	m, err := p.repo.Manifest(ctx, b.point.Manifest)
	if isUnreadable(err) {
		return false, nil
	}
	return m.Raw, err
}

// warn says something before a point is sent; in its result if nobody listens.
func (p *pusher) warn(x *pointPush, text string) {
	if text == "" {
		return
	}
	if p.q.Warn != nil {
		p.q.Warn(x.pt.Ref + ": " + text)
		return
	}
	if x.note != "" {
		x.note += "; "
	}
	x.note += text
}

// minExpansion is from how many bytes on it is worth a word that a stream is larger than what it is made of.
const minExpansion = 64 << 20

// expansion is what to say of a stream that may be clearly larger than the room that its content takes in the pool: by
// a tenth or more. "": nothing.
func expansionWarning(s driver.StreamPlan) string {
	if s.SavedBytes < minExpansion || s.SavedBytes < s.Bytes/10 {
		return ""
	}
	return fmt.Sprintf("pando will send about %s, and a pull needs as much space: a stream contains a block once for "+
		"each reference to it, and block cloning or dedup saves up to %s of that in this pool",
		errs.FormatBytes(s.Bytes), errs.FormatBytes(s.SavedBytes))
}
