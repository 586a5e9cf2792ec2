package replicate

import (
	"cmp"
	"context"
	"slices"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/remote/repo"
)

// These constants bound the search for a base among all points of this pool on the remote. Comparing two points costs
// as much as reading two extent maps, and trying a base on the remote takes two requests.
const (
	relatedLinks    = 256 // newest links that become candidates
	relatedCompared = 12  // candidates that are compared by extents
	relatedTried    = 3   // candidates that are looked up on the remote
)

// kinship is how closely two points are related according to the catalogue.
type kinship int

const (
	stranger   kinship = iota // it may share data, but the catalogue does not say so
	cousin                    // of the same golden
	ancestor                  // of the volume that the other was cloned from
	sameOrigin                // of the same volume or golden
)

// kinshipOf returns how closely x is related to pt.
func kinshipOf(pt, x engine.Point) kinship {
	golden := func(p engine.Point) string {
		if p.Golden {
			return p.Volume
		}
		name, _, _ := strings.Cut(p.BaseRef, "@")
		return name
	}

	volume, _, _ := strings.Cut(pt.OriginRef, "@")
	switch {
	case x.Lineage == pt.Lineage:
		return sameOrigin
	case x.ID == pt.OriginID, x.Volume == volume:
		return ancestor
	case golden(x) != "" && golden(x) == golden(pt):
		return cousin
	}

	return stranger
}

// candidate is a point of this pool that is on the remote.
type candidate struct {
	engine.Point
	kin     kinship
	differs int64 // bytes of data that are not shared; -1: unknown without reading
}

// nearestBase finds a base among all points of this pool that are on the remote, under any name: the one that shares
// most extents with the point, or, where the driver cannot tell, the closest relative. from is the best base so far;
// nearestBase returns it if no other is better.
func (x *pointPush) nearestBase(ctx context.Context, from base) (base, error) {
	p, h, l, content := x.p, x.head, x.links, x.content.contentKind()
	if x.pt.Golden && content.Chained() {
		return from, nil // otherwise pulling a golden would need volumes
	}

	// List the candidates, the best first.
	all, err := p.listCandidates(ctx, x.pt, l, content)
	if err != nil || len(all) == 0 {
		return from, err
	}

	limit := int64(-1)
	if content == repo.Block {
		if all, limit, err = p.rankCandidates(ctx, x.pt, all, from); err != nil {
			return from, err
		}
	}

	// Take the first that is still listed on the remote.
	tried := 0
	for _, c := range all {
		switch {
		case c.ID == from.object, c.differs < 0 && c.kin < ancestor:
			return from, nil
		case c.differs >= 0 && c.differs >= limit, tried == relatedTried:
			return from, nil
		}
		tried++
		b, err := p.findOnRemote(ctx, h, l, c, content)
		if err != nil || b.head != "" {
			return b, err
		}
	}

	return from, nil
}

// listCandidates lists the points that may share data with a point, the closest relatives first.
func (p *pusher) listCandidates(
	ctx context.Context, pt engine.Point, l links, content repo.Content,
) ([]candidate, error) {
	var out []candidate
	for n, id := range slices.Backward(l.objects) {
		if len(l.objects)-n > relatedLinks {
			break
		}
		if id == pt.ID {
			continue
		}

		x, err := p.e.PointByID(ctx, id)
		switch {
		case errs.Is(err, errs.NotFound):
			continue
		case err != nil:
			return nil, err
		case x.FS.IsImage() != pt.FS.IsImage(), x.IsOverlay() != pt.IsOverlay():
			continue
		}

		c := candidate{Point: x, kin: kinshipOf(pt, x), differs: -1}
		if content.Chained() && c.kin != ancestor {
			continue // a pull restores the base of a stream, so two heads must never depend on each other
		}

		out = append(out, c)
	}

	// Among equally close relatives, prefer those created at about the same time.
	slices.SortStableFunc(out, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(b.kin, a.kin), cmp.Compare(a.CreatedAt.Sub(pt.CreatedAt).Abs(),
			b.CreatedAt.Sub(pt.CreatedAt).Abs()))
	})
	return out, nil
}

// rankCandidates measures how much candidates share with a point, and sorts them, those that share most first. limit is
// the number of differing bytes below which a candidate is worth using.
func (p *pusher) rankCandidates(
	ctx context.Context, pt engine.Point, all []candidate, from base,
) (out []candidate, limit int64, err error) {
	if limit, _, err = p.differingBytes(ctx, pt.ID, ""); err != nil {
		return nil, 0, err
	}

	// A candidate must share at least a sixteenth of the data, and more than from does.
	limit -= limit / 16
	if from.object != "" {
		n, exact, err := p.differingBytes(ctx, pt.ID, from.object)
		if err != nil {
			return nil, 0, err
		}
		if exact {
			limit = min(limit, n)
		}
	}

	// Measure the candidates.
	for i := range all[:min(len(all), relatedCompared)] {
		c := &all[i]
		n, exact, err := p.differingBytes(ctx, pt.ID, c.ID)
		switch {
		case errs.Is(err, errs.NotFound):
			continue // destroyed just now
		case err != nil:
			return nil, 0, err
		case exact && mergeable(c.SizeBytes, pt.SizeBytes):
			c.differs = n
		}
		out = append(out, *c)
	}

	slices.SortStableFunc(out, func(a, b candidate) int {
		if a.differs >= 0 && b.differs >= 0 {
			return cmp.Compare(a.differs, b.differs)
		}
		return cmp.Compare(b.differs, a.differs) // known differences come first
	})

	return out, limit, nil
}

// differingBytes returns how many bytes of a point's data another point does not share, or all its data if base is "".
// exact reports whether the driver knows the differences.
func (p *pusher) differingBytes(ctx context.Context, id, base driver.ObjectID) (n int64, exact bool, err error) {
	img, err := p.e.OpenImage(ctx, engine.ReadRequest{Point: id, Base: base})
	if err != nil {
		return 0, false, err
	}

	defer img.Close()
	for r, err := range img.Ranges {
		if err != nil {
			return 0, false, err
		}
		if !r.Zero {
			n += r.Length
		}
	}

	return n, img.Exact, nil
}

// findOnRemote finds a candidate in the head that lists it. The result has no head if none lists it any more.
func (p *pusher) findOnRemote(
	ctx context.Context, h headState, l links, c candidate, content repo.Content,
) (base, error) {
	searched := map[string]bool{}
	searchHead := func(name string) (base, error) {
		if searched[name] {
			return base{}, nil
		}

		searched[name] = true
		of := h
		if name != h.Name {
			var err error
			if of, err = p.readHead(ctx, name); err != nil {
				if isUnreadable(err) {
					err = nil // it cannot be a base
				}
				return base{}, err
			}
		}

		b, _, err := p.findInHead(ctx, of, l, c.ID, content)
		return b, err
	}

	// Search its own head, then those that the linked manifests name.
	name, err := p.headOf(ctx, c.Point)
	if err != nil {
		return base{}, err
	}
	if b, err := searchHead(name); err != nil || b.head != "" {
		return b, err
	}

	for _, id := range slices.Backward(l.manifest[c.ID]) {
		m, err := p.repo.Manifest(ctx, id)
		if isUnreadable(err) {
			continue
		}
		if err != nil {
			return base{}, err
		}
		if b, err := searchHead(m.Volume); err != nil || b.head != "" {
			return b, err
		}
	}

	return base{}, nil
}
