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

// Bounds of looking for a base among all that this pool has on the remote. Comparing costs what reading two maps of
// extents does, and a base on the remote two requests.
const (
	relatedLinks    = 256 // that are looked at, the newest
	relatedCompared = 12  // by extents
	relatedTried    = 3   // on the remote
)

// kinship is how near a point is to another by what the catalogue says of them.
type kinship int

const (
	stranger   kinship = iota // perhaps it shares something, though nothing says so
	cousin                    // of the same golden
	ancestor                  // of the volume that the other was cloned from
	sameOrigin                // of the same volume or golden
)

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
	differs int64 // bytes of data that are not shared; -1: nobody can tell without reading
}

// nearest finds what to build upon among all points of this pool that are on the remote, whatever they are called: what
// shares most extents with a point, or, where nobody can tell what is shared, what is nearest by descent. from is what
// is known already; it is returned if nothing is nearer. Not being able to tell is no error.
func (x *pointPush) nearestBase(ctx context.Context, from base) (base, error) {
	p, h, l, content := x.p, x.head, x.links, x.content.contentKind()
	if x.pt.Golden && content.Chained() {
		return from, nil // else who pulls a golden would have to pull volumes
	}

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

// candidates are the points that may share something with one, the nearest by descent first.
func (p *pusher) listCandidates(ctx context.Context, pt engine.Point, l links, content repo.Content) ([]candidate, error) {
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
		case x.FS.IsImage() != pt.FS.IsImage():
			continue
		}

		c := candidate{Point: x, kin: kinshipOf(pt, x), differs: -1}
		if content.Chained() && c.kin != ancestor {
			continue // a pull brings what a stream leans on, so two heads must never lean on each other
		}

		out = append(out, c)
	}

	// Of those that are as near, those that were made at about the same time.
	slices.SortStableFunc(out, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(b.kin, a.kin), cmp.Compare(a.CreatedAt.Sub(pt.CreatedAt).Abs(),
			b.CreatedAt.Sub(pt.CreatedAt).Abs()))
	})
	return out, nil
}

// compare measures what candidates share with a point, and sorts them: those that share most first. limit is what a
// candidate must be below to be worth it.
func (p *pusher) rankCandidates(
	ctx context.Context, pt engine.Point, all []candidate, from base,
) (out []candidate, limit int64, err error) {
	if limit, _, err = p.differingBytes(ctx, pt.ID, ""); err != nil {
		return nil, 0, err
	}

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
		return cmp.Compare(b.differs, a.differs) // what can be told comes first
	})

	return out, limit, nil
}

// differing is how many bytes of data of a point another does not share; of all if base is "". exact: that is so.
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

// onRemote finds a candidate in the head that lists it: head "" if none does any more.
func (p *pusher) findOnRemote(ctx context.Context, h headState, l links, c candidate, content repo.Content) (base, error) {
	looked := map[string]bool{}
	look := func(name string) (base, error) {
		if looked[name] {
			return base{}, nil
		}

		looked[name] = true
		of := h
		if name != h.Name {
			var err error
			if of, err = p.readHead(ctx, name); err != nil {
				if isUnreadable(err) {
					err = nil // it cannot be built upon
				}
				return base{}, err
			}
		}

		b, _, err := p.findInHead(ctx, of, l, c.ID, content)
		return b, err
	}

	if b, err := look(c.Volume); err != nil || b.head != "" {
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
		if b, err := look(m.Volume); err != nil || b.head != "" {
			return b, err
		}
	}

	return base{}, nil
}
