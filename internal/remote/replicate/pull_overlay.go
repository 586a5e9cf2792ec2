package replicate

import (
	"context"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/remote/repo"
)

// restoreLower returns the generation that a point is an overlay on, and restores it if it is not here. It exists on
// the remote as long as the overlay, even if no head lists it.
func (p *puller) restoreLower(ctx context.Context, m *repo.Manifest, depth int) (driver.ObjectID, error) {
	id := m.Origin.Manifest
	if p.hasPoint(ctx, id) {
		return p.links[id], nil
	}

	lower, err := p.repo.Manifest(ctx, id)
	if err != nil {
		return "", err
	}

	pt := pointFrom(&lower, 0)
	if _, ok := (ref.Ref{Name: lower.Volume, At: pt.Name}).Generation(); !ok || lower.IsOverlay() {
		return "", errs.New(errs.Damaged, opPull, m.Volume+"@"+m.Point, "it is an overlay on %s@%s, which is no generation",
			lower.Volume, pt.Name).WithHint("check the remote with %s", errs.Run("verify", p.remote))
	}

	// Perhaps it is here without a link.
	h, err := p.headOfNeeded(ctx, lower.Volume, true)
	if err == nil {
		err = p.linkKnownObjects(ctx, h, pt)
	}
	if err == nil && !p.hasPoint(ctx, id) {
		err = p.restoreOrigin(ctx, h, pt, depth+1)
	}

	return p.links[id], err
}

// hasPoint reports whether the point of a manifest is here.
func (p *puller) hasPoint(ctx context.Context, manifest repo.ID) bool {
	id, linked := p.links[manifest]
	if !linked {
		return false
	}
	_, err := p.e.PointByID(ctx, id)
	return err == nil
}

// headOfNeeded reads the head of a volume, or of a golden, with a point that another point needs. That point exists
// even if the head does not, or stands for something else by now.
func (p *puller) headOfNeeded(ctx context.Context, name string, golden bool) (repo.Head, error) {
	h, _, err := p.repo.Head(ctx, name)
	if errs.Is(err, errs.NotFound) || golden && (isUnreadable(err) || err == nil && !h.Golden) {
		return repo.Head{Name: name, Golden: golden}, nil
	}
	return h, err
}
