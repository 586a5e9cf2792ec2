package replicate

import (
	"cmp"
	"context"
	"fmt"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/remote/repo"
)

// Faults are found by segment, node and frame. The points they affect are found in a second pass over the points, which
// a remote without damage never needs.

// maxFaults bounds each list of faults. A segment with faults beyond that counts as completely damaged.
const maxFaults = 32 << 10

// segmentState is a segment that points need.
type segmentState struct {
	repo.Segment
	end   uint32 // it must be longer than that
	size  uint32 // its size according to manifests; 0: unknown
	cut   bool   // it does not end like a segment of its size
	fault string // why no part of it can be read
	read  bool   // it was read and checked
}

// noteUses records the segments that a manifest lists, and the sizes they must have.
func (v *verifier) noteUses(m *repo.Manifest) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, u := range m.Uses {
		v.sizes[u.Segment] = max(v.sizes[u.Segment], u.Size)
	}
}

// findSizes checks the size of segments for which no manifest gives the size, because the manifest that their session
// wrote is gone: the end of such a segment tells whether it is complete.
func (v *verifier) findSizes(ctx context.Context) error {
	var unknown []int
	for i := range v.segments {
		s := &v.segments[i]
		if s.size == 0 {
			s.size = v.sizes[s.Segment]
		}
		_, there := v.listed[s.Segment]
		if _, moved := v.moved[s.Segment]; s.size == 0 && there && !moved { // the table of a pack knows what it had
			unknown = append(unknown, i)
		}
	}

	return eachOf(ctx, unknown, func(ctx context.Context, i int) error {
		s := &v.segments[i]
		err := v.repo.CheckSegmentSize(ctx, s.Segment, v.listed[s.Segment])
		switch {
		case errs.Is(err, errs.Damaged):
			v.mu.Lock()
			defer v.mu.Unlock()
			s.cut, v.damaged = true, true
			return nil
		case isUnreadable(err): // it was listed, and has just been removed
			return nil
		}

		return err
	})
}

// countSegments counts the needed segments, and finds out whether any are missing or have the wrong size.
func (v *verifier) countSegments() {
	packs := map[repo.Pack]bool{}
	for i := range v.segments {
		s := &v.segments[i]
		n, ok := v.listed[s.Segment]
		if ok {
			v.out.Segments++
			v.out.SegmentBytes += v.storedBytes(s.Segment, n, packs)
		}
		v.damaged = v.damaged || v.lostReason(s.Segment) != ""
	}
}

// lostReason says why a segment cannot be as it was written, judging by the listing. It returns "" if it can.
func (v *verifier) lostReason(s repo.Segment) string {
	n, ok := v.listed[s]
	if at, moved := v.lostPacks[s]; !ok && moved {
		return fmt.Sprintf("the segment was moved to packs/%s, which is missing or truncated", at.Pack)
	}

	if !ok && v.unreadTables {
		return "the segment is missing, or was moved and the table that locates it cannot be read"
	}
	if !ok {
		return "the segment is missing"
	}

	place, ok := v.number[s]
	if !ok {
		return "" // of a point that was pushed in the meantime
	}

	switch state := v.segments[place]; {
	case state.size != 0 && int64(state.size) != n:
		return fmt.Sprintf("the segment has %d bytes instead of %d", n, state.size)
	case state.cut:
		return fmt.Sprintf("the segment has %d bytes, and they do not end as they should", n)
	case int64(state.end) > n:
		return fmt.Sprintf("the segment has %d bytes instead of more than %d", n, state.end)
	}

	return ""
}

// missingFrameReason says why a frame cannot be in its segment, and returns "" if it can.
func (v *verifier) missingFrameReason(f repo.Frame) string {
	if n, ok := v.listed[f.Segment]; ok && int64(f.Offset)+int64(f.Stored) <= n {
		return ""
	}
	return v.lostReason(f.Segment)
}

// faultReason describes the fault of a frame, or of the part of it that is expected, and returns "" if none is known.
// whole reports whether the fault is that of its whole segment.
func (v *verifier) faultReason(f repo.Frame, within, length uint32, sum repo.Sum) (why string, whole bool) {
	if why := v.missingFrameReason(f); why != "" {
		return why, true
	}

	n, ok := v.number[f.Segment]
	if !ok {
		return "", false // of a point that was pushed in the meantime
	}

	if s := v.segments[n]; s.fault != "" {
		return cmp.Or(v.lostReason(f.Segment), s.fault), true
	}

	if len(v.faults) == 0 {
		return "", false
	}

	return v.faults[expected{n, f.Index, f.Offset, f.Stored, f.Plain<<1 | uint32(f.Codec), within, length, sum}], false
}

// blamePoints reports the faults that were found, for all points they affect.
func (v *verifier) blamePoints(ctx context.Context) error {
	if !v.damaged && len(v.unreadableNodes) == 0 && len(v.faults) == 0 {
		return nil
	}
	progress.From(ctx).Start(progress.FindingAffectedPoints, 0, 0)
	return eachOf(ctx, v.spans, v.blameSpan)
}

// blameSpan reports the faults that affect the points of a span.
func (v *verifier) blameSpan(ctx context.Context, s span) error {
	trees := newTreeBlame(v)
	for _, c := range s.points {
		m, err := v.repo.Manifest(ctx, c.manifest)
		progress.From(ctx).Add(1, 0)
		switch {
		case isUnreadable(err):
			continue // this was reported before, or the manifest has just been removed
		case err != nil:
			return err
		}

		if m.Content.Chained() {
			v.blameStream(c.owner, &m)
		} else if err := v.blameTree(ctx, c.owner, &m, trees); err != nil {
			return err
		}
	}

	return nil
}

// reportLost reports a segment that is missing or has the wrong size. It returns whether that is so.
func (v *verifier) reportLost(o owner, s repo.Segment) bool {
	why := v.lostReason(s)
	if why != "" {
		p := o.problem("segments/"+s.String(), "%s", why)
		p.whole = true
		v.report(p)
	}
	return why != ""
}

// wrongPieces returns the ranges of faulty pieces. It merges adjacent ranges with the same fault.
func (v *verifier) wrongPieces(pieces []repo.Piece) (ranges []Problem) {
	for _, x := range pieces {
		why, whole := v.faultReason(x.Frame, x.Within, uint32(x.Length), x.Sum)
		if why == "" {
			continue
		}

		object := "segments/" + x.Frame.Segment.String()
		if n := len(ranges); n > 0 {
			last := &ranges[n-1]
			if last.Offset+last.Length == x.Offset && last.Object == object && last.Message == why {
				last.Length += x.Length
				continue
			}
		}

		if len(ranges) < maxProblems {
			ranges = append(ranges, Problem{Offset: x.Offset, Length: x.Length, Object: object, Message: why, whole: whole})
		}
	}

	return ranges
}

// blameRanges reports the faults in ranges of a point.
func (v *verifier) blameRanges(o owner, ranges []Problem) {
	for _, r := range ranges {
		r.Volume, r.Point, r.manifest = o.volume, o.point, o.manifest
		v.report(r)
	}
}

// blameStream reports the faults of a stream, and the segments with it that are lost. Offsets are those in the stream.
func (v *verifier) blameStream(o owner, m *repo.Manifest) {
	at, last := int64(0), repo.Segment{}
	for _, f := range m.Stream {
		if f.Segment != last {
			last = f.Segment
			v.reportLost(o, last)
		}
		if why, whole := v.faultReason(f, 0, f.Plain, repo.Sum{}); why != "" {
			p := o.problem("segments/"+f.Segment.String(), "%s", why)
			p.Offset, p.Length, p.whole = at, int64(f.Plain), whole
			v.report(p)
		}
		at += int64(f.Plain)
	}
}
