package replicate

import (
	"context"
	"fmt"
	"slices"

	"pando/internal/remote/repo"
)

// lostTable is a damaged or missing table of moved data.
type lostTable struct {
	object, why string
}

// listMoved adds moved segments to the listed ones. It reads the tables after the listing, so that a segment that is
// moved at the same time is found in at least one of the two.
func (v *verifier) listMoved(ctx context.Context, tables int) error {
	v.moved, v.packsRead = map[repo.Segment]repo.Place{}, map[repo.Pack]bool{}
	if tables == 0 && !v.lacksSegments() {
		return nil
	}

	m, err := v.repo.MovedAndPacks(ctx)
	if err != nil {
		return err
	}

	// Report damaged tables.
	for t, err := range m.Damaged {
		v.unreadTables = true
		why := fmt.Sprintf("cannot read this table of moved data: %v", err)
		v.report(Problem{Object: "moved/" + t.String(), Message: why})
	}

	// Add the moved segments. One whose own object still exists, with the right size, counts as not moved.
	for s, at := range m.Places() {
		n, there := v.listed[s]
		if there && n == at.Bytes {
			continue
		}
		if there {
			v.spoilt["segments/"+s.String()] = fmt.Sprintf("the segment has %d bytes instead of %d", n, at.Bytes)
		}
		v.listed[s], v.moved[s] = at.Bytes, at
	}

	v.cutPacks(m)
	if !v.lacksSegments() {
		return nil
	}

	return v.findTables(ctx, m)
}

// lacksSegments reports whether any needed segment is neither listed nor moved.
func (v *verifier) lacksSegments() bool {
	return slices.ContainsFunc(v.segments, func(s segmentState) bool {
		_, there := v.listed[s.Segment]
		return !there
	})
}

// cutPacks records packs that hold needed segments but do not have the size with which they were written.
func (v *verifier) cutPacks(m repo.Moved) {
	reported := map[repo.Pack]bool{}
	for _, packs := range m.Tables {
		for _, p := range packs {
			bytes, there := m.Packs[p.Pack]
			if !there || bytes == p.Bytes || reported[p.Pack] || !slices.ContainsFunc(p.Segments, v.needs) {
				continue
			}
			reported[p.Pack] = true
			v.spoilt["packs/"+p.Pack.String()] = fmt.Sprintf("the pack has %d bytes instead of %d", bytes, p.Bytes)
		}
	}
}

// needs reports whether any point needs a segment.
func (v *verifier) needs(s repo.SegmentState) bool {
	_, is := v.number[s.Segment]
	return is
}

// findTables finds out which of the segments that seem to be missing are in packs that no table names. Then only the
// table is missing, and can be rebuilt.
func (v *verifier) findTables(ctx context.Context, m repo.Moved) error {
	v.findLostPacks(m)
	named := packsOf(objects{moved: m})
	var unnamed []repo.PackState
	for p, n := range m.Packs {
		if named[p] == nil {
			unnamed = append(unnamed, repo.PackState{Pack: p, Bytes: n})
		}
	}

	v.tables = map[repo.Segment]lostTable{}
	return eachOf(ctx, unnamed, func(ctx context.Context, p repo.PackState) error {
		described, err := v.repo.DescribePack(ctx, p)
		if isUnreadable(err) {
			return nil // then its segments are missing
		}
		if err != nil {
			return err
		}

		table := tableOf(m, p.Pack)
		v.mu.Lock()
		defer v.mu.Unlock()
		for _, s := range described.Segments {
			if _, there := v.listed[s.Segment]; !there && v.needs(s) {
				v.tables[s.Segment] = table
			}
		}

		return nil
	})
}

// findLostPacks finds out which of the segments that seem to be missing were in packs that are missing or truncated.
func (v *verifier) findLostPacks(m repo.Moved) {
	v.lostPacks = map[repo.Segment]repo.Place{}
	for _, packs := range m.Tables {
		for _, p := range packs {
			for _, s := range p.Segments {
				at := repo.Place{Pack: p.Pack, Generation: p.Generation}
				if _, there := v.listed[s.Segment]; !there && v.needs(s) && v.lostPacks[s.Segment].Compare(at) < 0 {
					v.lostPacks[s.Segment] = at
				}
			}
		}
	}
}

// tableOf returns the table that should name a pack, and what is wrong with that table.
func tableOf(m repo.Moved, p repo.Pack) lostTable {
	const effect = "; it says in which packs the data of these points is, and can be rebuilt from the packs"
	t := p.Table()
	why := "the table of moved data is missing"
	if err := m.Damaged[t]; err != nil {
		why = fmt.Sprintf("cannot read the table of moved data: %v", err)
	}
	return lostTable{"moved/" + t.String(), why + effect}
}

// blameTable turns a problem of a missing segment into one of the table that should locate the segment, if that is
// lost.
func (v *verifier) blameTable(p Problem) Problem {
	s, is := segmentOf(p.Object)
	if t, lost := v.tables[s]; is && lost {
		p.Object, p.Message, p.Offset, p.Length, p.whole = t.object, t.why, 0, 0, true
	}
	return p
}

// noteSpoilt records the damaged copies that were noticed while other copies were read in their place.
func (v *verifier) noteSpoilt() {
	for object, err := range v.repo.Spoilt() {
		if v.spoilt[object] == "" {
			v.spoilt[object] = err.Error()
		}
	}
}

// spoiltCopies returns the problems of damaged copies that still exist. If another copy has the same data, they affect
// no point.
func (v *verifier) spoiltCopies(ctx context.Context) (out []Problem, err error) {
	for object, why := range v.spoilt {
		_, err := v.repo.Store().Stat(ctx, object)
		if isUnreadable(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		out = append(out, Problem{Object: object, Message: why + "; data of it that another copy has is read from there"})
	}
	return out, nil
}

// storedBytes returns the bytes that a segment of n bytes takes. For a moved segment that is its whole pack, but only
// for the first segment in that pack: counted remembers the packs.
func (v *verifier) storedBytes(s repo.Segment, n int64, counted map[repo.Pack]bool) int64 {
	at, moved := v.moved[s]
	if !moved {
		return n
	}
	if counted[at.Pack] {
		return 0
	}
	counted[at.Pack] = true
	return at.PackBytes
}

// countPackGarbage counts the packs that nothing needs.
func (v *verifier) countPackGarbage(packs map[repo.Pack]int64, used map[repo.Segment]bool, sessions map[repo.ID]bool) {
	needed := map[repo.Pack]bool{}
	for s, at := range v.moved {
		needed[at.Pack] = needed[at.Pack] || used[s]
	}

	for p, n := range packs {
		switch {
		case needed[p] || v.unreadTables:
		case sessions[p.Session]:
			v.out.WorkingBytes += n
		default:
			v.out.GarbageCount++
			v.out.GarbageBytes += n
		}
	}
}
