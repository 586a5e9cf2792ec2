package replicate

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"pando/internal/remote/repo"
)

// A verify reads each manifest, and the pages in which it differs from a *base*: a point that is checked as well, in
// the same volume if there is one. What it expects of a page that both have, and of a piece that is the same in both,
// was noted with the base. A base is always earlier in one order of all points, so that each chain of them ends at one
// of which everything is read. Neither memory nor the work grows with points times pages.

// owner is a point that needs something.
type owner struct {
	volume, point string
	manifest      repo.ID
	size          int64
}

// withManifest is the owner of something that it needs.
func (o owner) withManifest(id repo.ID) owner { o.manifest = id; return o }

func (o owner) problem(object string, format string, args ...any) Problem {
	return Problem{Volume: o.volume, Point: o.point, Object: object, Message: fmt.Sprintf(format, args...),
		manifest: o.manifest}
}

// checked is a point to check, with what its head says of it. There may be millions. The manifest that a stream is the
// difference from may be listed nowhere: then nothing is said of it.
type checked struct {
	owner
	parent repo.ID
	said   *saidOfPoints // nil: nothing is
}

// saidOfPoints is what a head says of points. Those that come one after the other mostly share it.
type saidOfPoints struct {
	content repo.Content
	fs      string
	origin  originOfPoints // zero: they were not cloned
}

// originOfPoints is what points were cloned from.
type originOfPoints struct {
	ref string
	id  repo.ID
}

// checkedOf is what a head says of a point. What is the same as of the point before is kept once.
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

// matchesManifest reports whether a manifest is what the head says of the point.
func (c *checked) matchesManifest(m *repo.Manifest) bool {
	return c.said == nil || m.Content == c.said.content && m.SizeBytes == c.size && m.FS == c.said.fs &&
		(m.Parent == c.parent || !m.Content.Chained())
}

// span is some points of one volume, by age, that are checked one after the other.
type span struct {
	before repo.ID // the point that comes before, zero if none does
	points []checked
}

// Bounds of a span: a span reads a manifest, and some pages, more than it has; but several are read at once.
const (
	shortestSpan = 8
	longestSpan  = 32
)

// age orders points: a base must be before what is checked against it.
type age struct {
	at int64 // microseconds since 1970
	id repo.ID
}

func (a age) compare(b age) int {
	return cmp.Or(cmp.Compare(a.at, b.at), slices.Compare(a.id[:], b.id[:]))
}

// ageOf is that of a point that is checked.
func (v *verifier) ageOf(id repo.ID) (age, bool) {
	at, ok := v.ages[id]
	return age{at, id}, ok
}

// planSpans notes what heads name, and divides the points of volumes into spans.
func (v *verifier) planSpans(ctx context.Context, heads []repo.Head) error {
	v.ages, v.sibling = map[repo.ID]int64{}, map[repo.ID]repo.ID{}
	for _, h := range heads {
		all := !h.Gone && (len(v.Names) == 0 || slices.Contains(v.Names, h.Name))
		points := make([]checked, 0, h.Count())
		var bad []*pageFault
		last := checked{}
		for pt, err := range allPoints(ctx, v.repo, h, &bad) {
			if err != nil {
				return err
			}
			v.named[pt.Manifest] = true
			if all {
				last = checkedOf(h.Name, pt, last)
				points = append(points, last)
				v.ages[pt.Manifest] = pt.CreatedAt.UnixMicro()
			}
		}

		v.reportPageFaults(h, bad, all)
		if !all {
			continue
		}

		v.out.Volumes++
		v.out.Points += len(points)
		slices.SortStableFunc(points, func(a, b checked) int {
			return age{v.ages[a.manifest], a.manifest}.compare(age{v.ages[b.manifest], b.manifest})
		})
		v.spans = append(v.spans, span{points: points})
	}

	v.noteOrigins()
	v.cutSpans()
	return nil
}

// reportPageFaults notes pages of points that cannot be read.
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

// noteOrigins notes which points have one that is gone, and what was cloned from the same.
func (v *verifier) noteOrigins() {
	for _, s := range v.spans {
		for _, pt := range s.points {
			origin := pt.said.origin
			if origin.id.IsZero() {
				continue
			}
			v.addSibling(origin.id, pt.manifest)
			if !v.named[origin.id] && len(v.out.Warnings) < maxProblems {
				v.out.Warnings = append(v.out.Warnings, Problem{Volume: pt.volume, Point: pt.point,
					Message: fmt.Sprintf(
						"its origin %s is no longer on the remote: the point can be pulled, but will not share data with its origin",
						origin.ref,
					)})
			}
		}
	}
}

// cutSpans divides what is planned into spans of bounded length.
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

// addSibling notes the oldest of the points that were cloned from one that may be gone.
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

	// Named by no head, perhaps: then they are there for those that are.
	for len(v.parents) > 0 {
		todo := v.parents
		v.parents = nil
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

// checkSpan reads the manifests of a span, and notes what they expect.
func (v *verifier) checkSpan(ctx context.Context, s span) error {
	w := &pageWalk{v: v}
	defer w.reset()

	for _, c := range s.points {
		m, err := v.repo.Manifest(ctx, c.manifest)
		v.Tracker.Add(1, 0)
		switch {
		case isUnreadable(err):
			v.report(c.owner.problem("manifests/"+c.manifest.String(), "%v", err))
			continue
		case err != nil:
			return err
		}

		if !c.matchesManifest(&m) {
			v.report(c.owner.problem("manifests/"+c.manifest.String(), "it contradicts the volume's list of points"))
		}

		v.noteUses(&m)
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

// baseOf reads a manifest that the first of a span is checked against; nil if there is none.
func (v *verifier) baseOf(ctx context.Context, before repo.ID, m *repo.Manifest) (*repo.Manifest, error) {
	candidates := []repo.ID{before, m.Parent}
	if m.Origin != nil {
		candidates = append(candidates, m.Origin.Manifest, v.sibling[m.Origin.Manifest])
	}

	own, listed := v.ageOf(m.ID)
	for _, id := range candidates {
		// One that is not checked itself, or later, is none.
		if is, ok := v.ageOf(id); !ok || !listed || is.compare(own) >= 0 {
			continue
		}
		b, err := v.repo.Manifest(ctx, id)
		switch {
		case isUnreadable(err): // that is said of it
		case err != nil:
			return nil, err
		case b.Content == repo.Block:
			return &b, nil
		}
	}

	return nil, nil
}

// checkStream notes what a stream expects.
func (v *verifier) checkStream(o owner, m *repo.Manifest) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !m.Parent.IsZero() {
		v.chained[m.Parent] = append(v.chained[m.Parent], o)
	}

	if !m.Parent.IsZero() && !v.named[m.Parent] {
		v.named[m.Parent] = true
		v.parents = append(v.parents, checked{owner: o.withManifest(m.Parent)})
	}

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

// expectFrame says what is expected of a frame, and that so much of its segment must be there. The caller holds the
// lock.
func (v *verifier) expectFrame(f repo.Frame, within, length uint32, sum repo.Sum) expected {
	n := v.segmentPlace(f.Segment)
	v.segments[n].end = max(v.segments[n].end, f.Offset+f.Stored)
	return expected{n, f.Index, f.Offset, f.Stored, f.Plain<<1 | uint32(f.Codec), within, length, sum}
}

// segmentPlace is that of a segment in v.segments. The caller holds the lock.
func (v *verifier) segmentPlace(s repo.Segment) uint32 {
	n, ok := v.number[s]
	if !ok {
		n = uint32(len(v.segments))
		v.segments, v.number[s] = append(v.segments, segmentState{Segment: s}), n
	}
	return n
}

// noteExpected keeps what is expected until data is read.
func (v *verifier) noteExpected(all []expected) error {
	if v.ReadPercent == 0 {
		return nil
	}
	return v.expectations.addExpected(all)
}

// pagesInMemory bounds the pages that all spans hold at once, in bytes.
const pagesInMemory = 96 << 20

// keptPage is the largest page that a span keeps for the next point, in bytes.
const keptPage = 4 << 20

// pageRoom is about how much memory decoding a page takes, at most.
func pageRoom(p repo.Page) int64 {
	pieces := min(int64(p.Frame.Plain)/4, repo.RegionBytes/repo.BlockBytes)
	return min(int64(p.Frame.Plain)+pieces*128, pagesInMemory/2)
}

// pageWalk goes over the pages of points, one after the other.
type pageWalk struct {
	v    *verifier
	base *repo.Manifest // nil: everything is read
	kept mapOf          // the last page, if it is small

	nodes *repo.NodeCache // of points of version 2
}

// mapOf is a page with its pieces.
type mapOf struct {
	page   repo.Page
	pieces []repo.Piece
}

func (w *pageWalk) reset() { *w = pageWalk{v: w.v} }

// checkMap is check for maps of either version. One of the other version is no base.
func (w *pageWalk) checkMap(ctx context.Context, m *repo.Manifest) error {
	if w.base != nil && (w.base.Version == 2) != (m.Version == 2) {
		w.base = nil
	}
	if m.Version == 2 {
		return w.checkTree(ctx, m)
	}
	return w.checkPages(ctx, m)
}

// checkPages reads the pages of a manifest that its base does not have, notes what they expect, and makes the manifest
// the next base.
func (w *pageWalk) checkPages(ctx context.Context, m *repo.Manifest) error {
	for _, region := range differentRegions(w.base, m) {
		page, ok := findPage(m, region)
		if !ok {
			continue
		}
		if err := w.checkPage(ctx, m, page); err != nil {
			return err
		}
	}

	if err := w.checkUses(ctx, m); err != nil {
		return err
	}

	w.base = m
	return nil
}

// checkPage notes what a page expects, if its base does not expect the same.
func (w *pageWalk) checkPage(ctx context.Context, m *repo.Manifest, page repo.Page) error {
	v := w.v
	old, has := repo.Page{}, false
	if w.base != nil && v.ReadPercent > 0 {
		old, has = findPage(w.base, page.Region)
	}

	room := pageRoom(page)
	if has {
		room += pageRoom(old)
	}

	if err := v.memory.Acquire(ctx, room); err != nil {
		return err
	}

	defer v.memory.Release(room)

	pieces, err := readRegion(ctx, v.repo, m, page.Region)
	switch {
	case isUnreadable(err):
		v.pageBroken(page, err)
		return nil
	case err != nil:
		return err
	}

	var was []repo.Piece
	if has {
		if was = w.kept.pieces; w.kept.page != old {
			if was, err = readRegion(ctx, v.repo, w.base, page.Region); isUnreadable(err) {
				was = nil // that is said of it
			} else if err != nil {
				return err
			}
		}
	}

	if err := v.notePieces(page, pieces, was); err != nil {
		return err
	}

	v.countUses(m, page, pieces)
	w.kept = mapOf{}
	if pageRoom(page) <= keptPage {
		w.kept = mapOf{page, pieces}
	}

	return nil
}

// notePieces notes what pieces of a page expect that are not the same in another map of the region.
func (v *verifier) notePieces(page repo.Page, pieces, was []repo.Piece) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	all := make([]expected, 0, 1024)
	if page.Frame.Stored > 0 { // else the pieces are of a leaf, which was noted when it was read
		all = append(all, v.expectFrame(page.Frame, 0, 0, repo.Sum{}))
	}

	for _, x := range pieces {
		for len(was) > 0 && was[0].Offset < x.Offset {
			was = was[1:]
		}
		if len(was) > 0 && was[0] == x {
			continue
		}
		if all = append(all, v.expectFrame(x.Frame, x.Within, uint32(x.Length), x.Sum)); len(all) == cap(all) {
			if err := v.noteExpected(all); err != nil {
				return err
			}
			all = all[:0]
		}
	}

	return v.noteExpected(all)
}

// countUses notes if a manifest does not say that it needs a segment that a page of it needs.
func (v *verifier) countUses(m *repo.Manifest, page repo.Page, pieces []repo.Piece) {
	if len(unlistedSegments(m, page, pieces)) > 0 {
		v.mu.Lock()
		defer v.mu.Unlock()
		v.usesWrong = true
	}
}

// unlistedSegments are the segments that a page needs and its manifest does not list.
func unlistedSegments(m *repo.Manifest, page repo.Page, pieces []repo.Piece) (out []repo.Segment) {
	good := map[repo.Segment]bool{}
	look := func(s repo.Segment) {
		if _, seen := good[s]; seen {
			return
		}
		if good[s] = listsSegment(m, s); !good[s] {
			out = append(out, s)
		}
	}

	look(page.Frame.Segment)
	last := page.Frame.Segment
	for _, x := range pieces {
		if x.Frame.Segment != last {
			last = x.Frame.Segment
			look(last)
		}
	}

	return out
}

// listsSegment reports whether a manifest lists a segment.
func listsSegment(m *repo.Manifest, s repo.Segment) bool {
	_, has := slices.BinarySearchFunc(m.Uses, s, func(u repo.Use, s repo.Segment) int {
		return compareSegment(u.Segment, s)
	})
	return has
}

// checkUses notes if a manifest does not list a segment that a page needs which it has from its base. What the base
// needs of each segment is known by page: if the manifest does not list a segment, the pages that it does not have
// any more must have needed all of that.
func (w *pageWalk) checkUses(ctx context.Context, m *repo.Manifest) error {
	if w.base == nil {
		return nil // all its pages were looked at
	}

	lost := map[repo.Segment]int64{}
	for _, u := range w.base.Uses {
		if !listsSegment(m, u.Segment) {
			lost[u.Segment] = u.Bytes
		}
	}

	if len(lost) == 0 {
		return nil
	}

	gone := map[repo.Segment]int64{}
	changed := differentRegions(w.base, m)
	for _, region := range changed {
		if err := w.withPage(ctx, w.base, region, func(p repo.Page, pieces []repo.Piece) {
			pageUses(gone, 1, p, pieces)
		}); err != nil {
			return err
		}
	}

	exact := true
	for s, n := range lost {
		exact = exact && gone[s] == n
	}

	if exact {
		return nil
	}

	for _, p := range m.Pages {
		if _, is := slices.BinarySearch(changed, p.Region); is {
			continue
		}
		if err := w.withPage(ctx, m, p.Region, func(p repo.Page, pieces []repo.Piece) {
			w.v.countUses(m, p, pieces)
		}); err != nil {
			return err
		}
	}

	return nil
}

// withPage gives a page of a manifest to fn, if it has one that can be read.
func (w *pageWalk) withPage(
	ctx context.Context, m *repo.Manifest, region uint32, fn func(repo.Page, []repo.Piece),
) error {
	page, ok := findPage(m, region)
	if !ok {
		return nil
	}

	room := pageRoom(page)
	if err := w.v.memory.Acquire(ctx, room); err != nil {
		return err
	}

	defer w.v.memory.Release(room)
	pieces, err := readRegion(ctx, w.v.repo, m, region)
	switch {
	case isUnreadable(err):
		w.v.pageBroken(page, err)
	case err != nil:
		return err
	default:
		fn(page, pieces)
	}

	return nil
}

// pageBroken notes that a page cannot be read.
func (v *verifier) pageBroken(p repo.Page, err error) {
	v.nodeBroken(repo.NodeRef{Frame: p.Frame}, err)
}

// nodeBroken notes that a node cannot be read, or is not what is said of it there.
func (v *verifier) nodeBroken(n repo.NodeRef, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.unreadableNodes) < maxFaults {
		v.unreadableNodes[n] = err.Error()
	}
}

func compareSegment(a, b repo.Segment) int {
	return cmp.Or(slices.Compare(a.Session[:], b.Session[:]), cmp.Compare(a.N, b.N))
}
