package replicate

import (
	"cmp"
	"maps"
	"slices"

	"pando/internal/remote/repo"
)

// maxAffected is the number of points that are remembered in all findings together: some 50 MiB. Further points are
// neither remembered nor counted.
const maxAffected = 1 << 20

// findingKey identifies a finding: problems with the same key belong to it.
type findingKey struct {
	object         string
	offset, length int64
	message        string
}

// finding is a fault of a segment, with the points that it affects.
type finding struct {
	points map[repo.ID]Problem // by manifest: the first range of each
}

// addFinding adds a problem of a point to its finding. There is one finding for each lost segment, and one for each
// damaged range of a volume. The caller holds the lock.
func (v *verifier) addFinding(p Problem) {
	key := findingKey{p.Object, p.Offset, p.Length, p.Message}
	if p.whole {
		key = findingKey{object: p.Object}
	}

	f := v.findings[key]
	if f == nil {
		if len(v.findings) >= 8*maxProblems {
			v.droppedProblems++
			return
		}
		f = &finding{points: map[repo.ID]Problem{}}
		v.findings[key] = f
	}

	was, known := f.points[p.manifest]
	switch {
	case !known && v.affected >= maxAffected:
		return
	case !known:
		v.affected++
	case p.Length == 0, was.Length > 0 && was.Offset <= p.Offset:
		return
	}

	f.points[p.manifest] = p
}

// listFindings returns the findings that affect manifests in named, each as a problem of the first of these points.
func (v *verifier) listFindings(named map[repo.ID]bool) (out []Problem) {
	for _, f := range v.findings {
		maps.DeleteFunc(f.points, func(id repo.ID, _ Problem) bool { return !named[id] })
		if len(f.points) == 0 {
			continue
		}

		volumes := map[string]bool{}
		for _, p := range f.points {
			volumes[p.Volume] = true
		}

		first := slices.MinFunc(slices.Collect(maps.Values(f.points)), func(a, b Problem) int {
			// Prefer a point with a known range.
			return cmp.Or(cmp.Compare(min(b.Length, 1), min(a.Length, 1)), cmp.Compare(a.Volume, b.Volume),
				cmp.Compare(a.Point, b.Point))
		})

		first.Volumes, first.Points = len(volumes), len(f.points)
		for _, p := range f.points {
			first.Affected = append(first.Affected, p.Volume+"@"+p.Point)
		}

		slices.Sort(first.Affected)
		first.Affected = first.Affected[:min(len(first.Affected), maxProblems)]
		out = append(out, first)
	}

	return out
}
