package replicate

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"pando/internal/base/progress"
	"pando/internal/remote/repo"
)

// A verify reads each manifest, and the pages in which it differs from a *base*: another checked point, of the same
// volume if there is one. The expectations of pages and pieces that both share are noted with the base. A base always
// comes earlier in one order of all points, so that each chain of bases ends at a point that is read completely. So
// neither memory nor time grows with points times pages.

// owner is a point that needs an object.
type owner struct {
	volume, point string
	manifest      repo.ID
	size          int64
}

// withManifest returns the owner of a manifest that o needs.
func (o owner) withManifest(id repo.ID) owner { o.manifest = id; return o }

// problem returns a problem of the point.
func (o owner) problem(object string, format string, args ...any) Problem {
	return Problem{Volume: o.volume, Point: o.point, Object: object, Message: fmt.Sprintf(format, args...),
		manifest: o.manifest}
}

// checked is a point to check, with its description in the head. There may be millions. A point that others need may
// not be in any head: then it has no description.
type checked struct {
	owner
	parent repo.ID
	said   *saidOfPoints // nil: no head lists it
}

// saidOfPoints is the part of a point's description in its head that consecutive points mostly share.
type saidOfPoints struct {
	content repo.Content
	fs      string
	origin  originOfPoints // zero: they were not cloned
}

// originOfPoints is the point that others were cloned from.
type originOfPoints struct {
	ref string
	id  repo.ID
}

// checkedOf returns a point as its head describes it. It shares the description with the point before if that is the
// same.
func checkedOf(volume string, pt repo.Point, before checked) checked {
	c := checked{owner: owner{volume, pt.Name, pt.Manifest, pt.SizeBytes}, parent: pt.Parent}
	said := saidOfPoints{content: pt.Content, fs: pt.FS}
	if !pt.OriginID.IsZero() {
		said.origin = originOfPoints{pt.OriginRef, pt.OriginID}
	}
	if c.said = before.said; c.said == nil || *c.said != said {
		c.said = &said
	}
	return c
}

// matchesManifest reports whether a manifest agrees with the point's description in the head.
func (c *checked) matchesManifest(m *repo.Manifest) bool {
	return c.said == nil || m.Content == c.said.content && m.SizeBytes == c.size && m.FS == c.said.fs &&
		(m.Parent == c.parent || !m.Content.Chained())
}

// span is a run of points of one volume, by age, that are checked one after the other.
type span struct {
	before repo.ID // the point before the first one; zero: none
	points []checked
}

// Bounds of the length of a span. Each span costs an additional manifest, and some pages, but spans are checked in
// parallel.
const (
	shortestSpan = 8
	longestSpan  = 32
)

// age orders points: a base must come before the points that are checked against it.
type age struct {
	at int64 // microseconds since 1970
	id repo.ID
}

func (a age) compare(b age) int {
	return cmp.Or(cmp.Compare(a.at, b.at), slices.Compare(a.id[:], b.id[:]))
}

// ageOf returns the age of a checked point, and false for other points.
func (v *verifier) ageOf(id repo.ID) (age, bool) {
	at, ok := v.ages[id]
	return age{at, id}, ok
}

// planSpans records the manifests that heads name, and divides the points of the checked volumes into spans.
func (v *verifier) planSpans(ctx context.Context, heads []repo.Head) error {
	v.ages, v.sibling, v.also = map[repo.ID]int64{}, map[repo.ID]repo.ID{}, map[repo.ID]bool{}
	for _, h := range heads {
		all := !h.Gone && (len(v.Names) == 0 || slices.Contains(v.Names, h.Name))
		points := make([]checked, 0, h.Count())
		var bad []*pageFault
		last, at := checked{}, int64(0)
		for pt, err := range allPoints(ctx, v.repo, h, &bad) {
			if err != nil {
				return err
			}
			v.named[pt.Manifest] = true
			if all {
				last = checkedOf(h.Name, pt, last)
				points = append(points, last)
				at = max(at+1, pt.CreatedAt.UnixMicro()) // in the order of the list, even if a clock was set back
				v.ages[pt.Manifest] = at
			}
		}

		v.reportPageFaults(h, bad, all)
		if !all {
			continue
		}

		v.out.Volumes++
		v.out.Points += len(points)
		v.spans = append(v.spans, span{points: points})
	}

	v.noteOrigins()
	v.cutSpans()
	return nil
}

// reportPageFaults reports pages of points that cannot be read, as warnings unless the volume is to be checked.
func (v *verifier) reportPageFaults(h repo.Head, bad []*pageFault, asked bool) {
	for _, f := range bad {
		p := Problem{Volume: h.Name, Object: f.Page.Object()}
		p.Message = "cannot read a part of the volume's list of points: " + f.Error()
		p.Volumes, p.Points = 1, f.Page.Count
		if asked {
			v.report(p)
		} else {
			v.out.Warnings = append(v.out.Warnings, p)
		}
	}
}

// noteOrigins records the oldest clone of each origin.
func (v *verifier) noteOrigins() {
	for _, s := range v.spans {
		for _, pt := range s.points {
			origin := pt.said.origin
			if origin.id.IsZero() {
				continue
			}
			v.addSibling(origin.id, pt.manifest)
		}
	}
}

// warnOfLostOrigins warns about points whose origin is gone. Those that overlays need are known by now, and are there.
func (v *verifier) warnOfLostOrigins() {
	for _, s := range v.spans {
		for _, pt := range s.points {
			if pt.said == nil || pt.said.origin.id.IsZero() || v.named[pt.said.origin.id] ||
				len(v.out.Warnings) >= maxProblems {
				continue
			}
			v.out.Warnings = append(v.out.Warnings, Problem{Volume: pt.volume, Point: pt.point,
				Message: fmt.Sprintf(
					"its origin %s is no longer on the remote: the point can be pulled, but will not share data with its origin",
					pt.said.origin.ref,
				)})
		}
	}
}

// cutSpans divides the planned spans into shorter ones.
func (v *verifier) cutSpans() {
	length := min(max(v.out.Points/(2*requests), shortestSpan), longestSpan)
	var cut []span
	for _, s := range v.spans {
		for len(s.points) > length {
			cut = append(cut, span{s.before, s.points[:length]})
			s.before, s.points = s.points[length-1].manifest, s.points[length:]
		}
		cut = append(cut, s)
	}
	v.spans = cut
}

// addSibling records the oldest of the points that were cloned from the same origin, which may be gone.
func (v *verifier) addSibling(origin, id repo.ID) {
	if was, ok := v.sibling[origin]; !ok || (age{v.ages[id], id}).compare(age{v.ages[was], was}) < 0 {
		v.sibling[origin] = id
	}
}

// checkPoints reads the manifests of all points, and their pages.
func (v *verifier) checkPoints(ctx context.Context) error {
	if err := eachOf(ctx, v.spans, v.checkSpan); err != nil {
		return err
	}

	// Then check those that others need.
	for len(v.needed) > 0 {
		todo := v.needed
		v.needed = nil
		err := eachOf(ctx, todo, func(ctx context.Context, c checked) error {
			return v.checkSpan(ctx, span{points: []checked{c}})
		})
		if err != nil {
			return err
		}
		for _, c := range todo {
			v.spans = append(v.spans, span{points: []checked{c}})
		}
	}

	return nil
}

// checkSpan reads the manifests and maps of a span, and notes what they expect.
func (v *verifier) checkSpan(ctx context.Context, s span) error {
	w := &mapWalk{v: v}
	defer w.reset()

	for _, c := range s.points {
		m, err := v.repo.Manifest(ctx, c.manifest)
		progress.From(ctx).Add(1, 0)
		switch {
		case isUnreadable(err):
			v.report(c.owner.problem("manifests/"+c.manifest.String(), "%v", err))
			continue
		case err != nil:
			return err
		}

		// The manifest must agree with the head, and its map or stream must be readable.
		if !c.matchesManifest(&m) {
			v.report(c.owner.problem("manifests/"+c.manifest.String(), "it contradicts the volume's list of points"))
		}

		v.noteUses(&m)
		v.noteNeeds(c.owner, &m)
		if m.Content.Chained() {
			err = v.checkStream(c.owner, &m)
		} else {
			if w.base == nil {
				if w.base, err = v.baseOf(ctx, s.before, &m); err != nil {
					return err
				}
			}
			err = w.checkMap(ctx, &m)
		}
		if err != nil {
			return err
		}
	}

	return nil
}

// baseOf reads the manifest that the first point of a span is checked against. It returns nil if there is none.
func (v *verifier) baseOf(ctx context.Context, before repo.ID, m *repo.Manifest) (*repo.Manifest, error) {
	candidates := []repo.ID{before, m.Parent}
	if m.Origin != nil {
		candidates = append(candidates, m.Origin.Manifest, v.sibling[m.Origin.Manifest])
	}

	own, listed := v.ageOf(m.ID)
	for _, id := range candidates {
		// A base must be checked itself, and come earlier.
		if is, ok := v.ageOf(id); !ok || !listed || is.compare(own) >= 0 {
			continue
		}
		b, err := v.repo.Manifest(ctx, id)
		switch {
		case isUnreadable(err): // reported when it is checked itself
		case err != nil:
			return nil, err
		case b.Content == repo.Block:
			return &b, nil
		}
	}

	return nil, nil
}

// noteNeeds notes which other manifests a point needs, and lets them be checked, too: it may be that no head names
// them, or only one that was not to be checked.
func (v *verifier) noteNeeds(o owner, m *repo.Manifest) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, id := range m.Needs() {
		v.needing[id] = append(v.needing[id], o)
		v.named[id] = true
		if _, planned := v.ages[id]; !planned && !v.also[id] {
			v.also[id] = true
			v.needed = append(v.needed, checked{owner: o.withManifest(id)})
		}
	}
}

// checkStream notes what a stream expects.
func (v *verifier) checkStream(o owner, m *repo.Manifest) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	all := make([]expected, 0, min(len(m.Stream), 4096))
	for _, f := range m.Stream {
		if all = append(all, v.expectFrame(f, 0, f.Plain, repo.Sum{})); len(all) == cap(all) {
			if err := v.noteExpected(all); err != nil {
				return err
			}
			all = all[:0]
		}
	}

	return v.noteExpected(all)
}

// expectFrame returns the expectation of a frame, and records that its segment must be long enough. The caller holds
// the lock.
func (v *verifier) expectFrame(f repo.Frame, within, length uint32, sum repo.Sum) expected {
	n := v.segmentPlace(f.Segment)
	v.segments[n].end = max(v.segments[n].end, f.Offset+f.Stored)
	return expected{n, f.Index, f.Offset, f.Stored, f.Plain<<1 | uint32(f.Codec), within, length, sum}
}

// segmentPlace returns the place of a segment in v.segments, and adds the segment if it is new. The caller holds the
// lock.
func (v *verifier) segmentPlace(s repo.Segment) uint32 {
	n, ok := v.number[s]
	if !ok {
		n = uint32(len(v.segments))
		v.segments, v.number[s] = append(v.segments, segmentState{Segment: s}), n
	}
	return n
}

// noteExpected keeps expectations until data is read, if any is to be read.
func (v *verifier) noteExpected(all []expected) error {
	if v.ReadPercent == 0 {
		return nil
	}
	return v.expectations.addExpected(all)
}

func compareSegment(a, b repo.Segment) int {
	return cmp.Or(slices.Compare(a.Session[:], b.Session[:]), cmp.Compare(a.N, b.N))
}
