package replicate

import (
	"context"
	"maps"
	"slices"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/remote/repo"
)

// objects are the objects that a prune may delete, as they were listed.
type objects struct {
	segments  map[repo.Segment]int64 // bytes
	manifests []repo.ID
	moved     repo.Moved                  // tables, and packs
	places    map[repo.Segment]repo.Place // where moved segments are
	unsound   map[repo.Segment]bool       // that cannot be read there, and have an older copy
}

// listObjects lists segments and manifests, and then tables and packs: so a segment that another prune moves at the
// same time is found in at least one of the two.
func listObjects(ctx context.Context, r *repo.Repo) (objects, error) {
	o := objects{segments: map[repo.Segment]int64{}}
	for s, err := range r.Segments(ctx) {
		if err != nil {
			return o, err
		}
		o.segments[s.Segment] = s.Bytes
	}

	for id, err := range r.Manifests(ctx) {
		if err != nil {
			return o, err
		}
		o.manifests = append(o.manifests, id)
	}

	var err error
	o.moved, err = r.MovedAndPacks(ctx)
	o.places = o.moved.Places()
	return o, err
}

// present returns the segments whose frames can be read, with the bytes of their objects; for moved segments these are
// the bytes before the move.
func (o objects) present() map[repo.Segment]int64 {
	out := maps.Clone(o.segments)
	for s, at := range o.places {
		if _, there := out[s]; !there {
			out[s] = at.Bytes
		}
	}
	return out
}

// presentSegments lists the segments whose frames can be read, as objects.present returns them.
func presentSegments(ctx context.Context, r *repo.Repo) (map[repo.Segment]int64, error) {
	o := objects{segments: map[repo.Segment]int64{}}
	for s, err := range r.Segments(ctx) {
		if err != nil {
			return nil, err
		}
		o.segments[s.Segment] = s.Bytes
	}
	moved, err := r.Moved(ctx)
	o.places = moved.Places()
	return o.present(), err
}

// findGarbage returns the listed objects that are to be deleted, and counts them in p.out.
func (p *pruner) findGarbage(
	ctx context.Context,
	o objects,
	now scene,
	n need,
) (manifests []repo.ID, segments []repo.Segment, err error) {
	// Manifests that nothing names are garbage, unless a push may be about to commit them.
	writing := slices.ContainsFunc(now.sessions, func(s repo.SessionState) bool { return s.Session.Kind == repo.Push })
	var maybe []repo.ID
	for _, id := range o.manifests {
		if n.manifests[id] {
			continue
		}
		if writing {
			maybe = append(maybe, id)
		} else {
			manifests = append(manifests, id)
		}
	}

	err = readManifests(ctx, p.repo, maybe, func(m repo.Manifest) {
		if !now.hasSession(m.Session) {
			manifests = append(manifests, m.ID)
		}
	}, func(_ repo.ID, err error) error {
		if k := errs.KindOf(err); k == errs.NotFound || k == errs.Damaged {
			return nil // gone, or its session is not known: it stays while any push is under way
		}
		return err
	})
	if err != nil {
		return nil, nil, err
	}

	// Segments are garbage if nothing needs them, or if they were moved.
	for s, size := range o.segments {
		is := n.marks.hasSegment(s)
		switch {
		case is && o.places[s].Generation > 0 && !o.unsound[s]: // moved, by a prune that did not get to delete it
			segments = append(segments, s)
			p.out.Segments++
			p.out.FreedBytes += size
		case is:
			p.out.UsedBytes += size
			p.out.PartlyUsedBytes += size - n.marks.neededBytes(s, size)
		case now.hasSession(s.Session):
			p.out.HeldBytes += size
		default:
			segments = append(segments, s)
			p.out.Segments++
			p.out.FreedBytes += size
		}
	}

	p.out.Manifests = len(manifests)
	return manifests, segments, nil
}

// deleteGarbage deletes manifests first, so that no manifest exists without its segments.
func (p *pruner) deleteGarbage(ctx context.Context, manifests []repo.ID, segments []repo.Segment) error {
	progress.From(ctx).Start(progress.Deleting, int64(len(manifests)+len(segments)), 0)
	err := eachOf(ctx, manifests, func(ctx context.Context, id repo.ID) error {
		progress.From(ctx).Add(1, 0)
		return p.repo.DeleteManifest(ctx, id)
	})
	if err != nil {
		return err
	}

	return eachOf(ctx, segments, func(ctx context.Context, s repo.Segment) error {
		progress.From(ctx).Add(1, 0)
		return p.repo.DeleteSegment(ctx, s)
	})
}
