package replicate

import (
	"maps"
	"slices"

	"pando/internal/remote/repo"
)

// A stream can be read only with all its parents, and an overlay only with its lower layer. So a fault of one point
// affects all that need it.

// blameChains adds the points that need others to the findings and problems of manifests and segments. It adds only
// points whose manifests are in named.
func (v *verifier) blameChains(named map[repo.ID]bool) {
	v.mu.Lock()
	defer v.mu.Unlock()

	if len(v.needing) == 0 {
		return
	}

	// Findings list the affected points by manifest.
	for _, f := range v.findings {
		for _, id := range slices.Collect(maps.Keys(f.points)) {
			first := f.points[id]
			for _, o := range v.followers(id, named) {
				if _, known := f.points[o.manifest]; known || v.affected >= maxAffected {
					continue
				}
				p := first
				p.Volume, p.Point, p.manifest, p.Offset, p.Length = o.volume, o.point, o.manifest, 0, 0
				f.points[o.manifest] = p
				v.affected++
			}
		}
	}

	// Problems have one point, and list the others by name.
	for i := range v.problems {
		p := &v.problems[i]
		if p.manifest.IsZero() || p.Point == "" || len(p.Affected) > 0 {
			continue
		}

		volumes, affected := map[string]bool{p.Volume: true}, []string{p.Volume + "@" + p.Point}
		for _, o := range v.followers(p.manifest, named) {
			if ref := o.volume + "@" + o.point; !slices.Contains(affected, ref) {
				volumes[o.volume], affected = true, append(affected, ref)
			}
		}

		if len(affected) > 1 {
			slices.Sort(affected)
			p.Volumes, p.Points, p.Affected = len(volumes), len(affected), affected[:min(len(affected), maxProblems)]
		}
	}
}

// followers returns the points that need a manifest, directly or through others. The caller holds the lock.
func (v *verifier) followers(id repo.ID, named map[repo.ID]bool) (out []owner) {
	seen := map[repo.ID]bool{id: true}
	for todo := []repo.ID{id}; len(todo) > 0; {
		next := v.needing[todo[0]]
		todo = todo[1:]
		for _, o := range next {
			if named[o.manifest] && !seen[o.manifest] {
				seen[o.manifest] = true
				out, todo = append(out, o), append(todo, o.manifest)
			}
		}
	}

	return out
}
