package replicate

import (
	"context"
	"fmt"

	"pando/internal/repo"
)

// What is wrong is found by segment, page and frame. Whom it affects is looked for only then, in a second pass over
// the points, which in a remote without damage is never needed.

// maxFaults bounds each list of what is wrong; a segment in which more is wrong counts as damaged whole.
const maxFaults = 32 << 10

// segmentState is a segment that points need.
type segmentState struct {
	repo.Segment
	end   uint32 // it must be longer than that
	fault string // why nothing of it can be read
	read  bool   // and checked
}

// present notes which of the segments that are needed are missing or too short.
func (v *verifier) present() {
	for i := range v.segments {
		s := &v.segments[i]
		n, ok := v.listed[s.Segment]
		if ok {
			v.out.Segments++
			v.out.SegmentBytes += n
		}
		v.damaged = v.damaged || !ok || int64(s.end) > n
	}
}

// lacks says why a frame cannot be in its segment.
func (v *verifier) lacks(f repo.Frame) string {
	n, ok := v.listed[f.Segment]
	switch {
	case !ok:
		return "the segment is missing"
	case int64(f.Offset)+int64(f.Stored) > n:
		return fmt.Sprintf("the segment has %d bytes and should have more than %d", n, f.Offset+f.Stored)
	}
	return ""
}

// wrong says what is wrong with a frame, or with what is expected of it; "" if nothing is known.
func (v *verifier) wrong(f repo.Frame, within, length uint32, sum repo.Sum) string {
	if why := v.lacks(f); why != "" {
		return why
	}
	n, ok := v.number[f.Segment]
	if !ok {
		return "" // of a point that was pushed meanwhile
	}
	if s := v.segments[n]; s.fault != "" {
		return s.fault
	}
	if len(v.faults) == 0 {
		return ""
	}
	return v.faults[expected{n, f.Index, f.Offset, f.Stored, f.Plain<<1 | uint32(f.Codec), within, length, sum}]
}

// blame reports what is wrong, for all points that it affects.
func (v *verifier) blame(ctx context.Context) error {
	if !v.damaged && len(v.broken) == 0 && len(v.faults) == 0 && !v.usesWrong {
		return nil
	}
	v.Tracker.Start("looking for what is affected", 0, 0)
	return eachOf(ctx, v.spans, v.blameSpan)
}

// blameSpan reports what is wrong with the points of a span.
func (v *verifier) blameSpan(ctx context.Context, s span) error {
	known := map[uint32]blamed{} // of the point before
	for _, c := range s.points {
		m, err := v.repo.Manifest(ctx, c.manifest)
		v.Tracker.Add(1, 0)
		switch {
		case broken(err):
			continue // that was said before, or somebody has removed it
		case err != nil:
			return err
		case m.Content == repo.Stream:
			v.blameStream(c.owner, &m)
			continue
		}
		now := make(map[uint32]blamed, len(m.Pages))
		for _, p := range m.Pages {
			b, same := known[p.Region]
			if !same || b.page != p {
				if b, err = v.blamePage(ctx, &m, p); err != nil {
					return err
				}
			}
			now[p.Region] = b
			v.blamePoint(c.owner, &m, b)
		}
		known = now
	}
	return nil
}

// blamed is what is wrong with a page, whomever it affects.
type blamed struct {
	page     repo.Page
	ranges   []Problem
	segments []repo.Segment // that it needs, if manifests are wrong about that
}

// blamePage looks for what is wrong with a page.
func (v *verifier) blamePage(ctx context.Context, m *repo.Manifest, page repo.Page) (blamed, error) {
	b := blamed{page: page}
	object := "segments/" + page.Frame.Segment.String()
	unread := func(why string) (blamed, error) {
		start := regionStart(page.Region)
		b.ranges = []Problem{{
			Offset: start, Length: regionEnd(page.Region, m.SizeBytes) - start, Object: object, Message: "its map cannot be read: " + why,
		}}
		return b, nil
	}
	if why := v.broken[page]; why != "" {
		return unread(why)
	}
	if why := v.wrong(page.Frame, 0, 0, repo.Sum{}); why != "" {
		return unread(why)
	}

	room := pageRoom(page)
	if err := v.room.Acquire(ctx, room); err != nil {
		return b, err
	}
	defer v.room.Release(room)
	pieces, err := readRegion(ctx, v.repo, m, page.Region)
	switch {
	case broken(err): // it could be read before: somebody has removed it, or it was damaged just now
		return unread(err.Error())
	case err != nil:
		return b, err
	}
	for _, x := range pieces {
		why := v.wrong(x.Frame, x.Within, uint32(x.Length), x.Sum)
		if why == "" {
			continue
		}
		object := "segments/" + x.Frame.Segment.String()
		if n := len(b.ranges); n > 0 {
			last := &b.ranges[n-1]
			if last.Offset+last.Length == x.Offset && last.Object == object && last.Message == why {
				last.Length += x.Length
				continue
			}
		}
		if len(b.ranges) < maxProblems {
			b.ranges = append(b.ranges, Problem{Offset: x.Offset, Length: x.Length, Object: object, Message: why})
		}
	}
	if v.usesWrong {
		b.segments = unlisted(&repo.Manifest{}, page, pieces) // all of them
	}
	return b, nil
}

// blamePoint reports what is wrong with a page of a point.
func (v *verifier) blamePoint(o owner, m *repo.Manifest, b blamed) {
	for _, r := range b.ranges {
		r.Volume, r.Point, r.manifest = o.volume, o.point, o.manifest
		v.problem(r)
	}
	for _, s := range b.segments {
		if !uses(m, s) {
			v.problem(o.problem("segments/"+s.String(), "the manifest does not say that it needs this segment, so that a prune may remove it"))
		}
	}
}

// blameStream reports what is wrong with a stream. Its offsets are those of the stream.
func (v *verifier) blameStream(o owner, m *repo.Manifest) {
	at := int64(0)
	for _, f := range m.Stream {
		if why := v.wrong(f, 0, f.Plain, repo.Sum{}); why != "" {
			p := o.problem("segments/"+f.Segment.String(), "%s", why)
			p.Offset, p.Length = at, int64(f.Plain)
			v.problem(p)
		}
		at += int64(f.Plain)
	}
}
